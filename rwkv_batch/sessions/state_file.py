"""One session's state as bytes, for SQLite and for exported files: what is written, and what is refused.

    "rwkvstat", version u32, length of the header u32, header (JSON), shift [L, 2, C], wkv [L, H, 64, 64], CRC-32 u32

All numbers are little-endian; the CRC covers everything before it. The header names the model by its fingerprint, the shape,
the two dtypes, how many tokens the state has seen, and with which tuned state it began, if with one. Knows nothing of sessions'
names, of SQLite and of devices.
"""

import io
import math
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch

from rwkv_batch.errors import Unprocessable
from rwkv_batch.model.architectures import Shape
from rwkv_batch.model.state import Snapshot

MAGIC = b"rwkvstat"
VERSION = 1
PIECE_BYTES = 2**20  # what is handed to SQLite at once: a bind copies it while it holds the GIL
MAX_HEADER = 4096
MAX_ORIGIN = 256
MAX_NEWLINES = 2
MAX_TOKENS = 2**62  # of a stored state
MAX_FOREIGN_TOKENS = 2**53  # of a state from elsewhere: what comes after it stays below MAX_TOKENS
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PREFIX = struct.Struct("<8sII")
_CRC = struct.Struct("<I")


class Header(msgspec.Struct, frozen=True, omit_defaults=True):
    """What stands in front of a state. Whoever reads it can rely on these types and ranges."""

    model: str
    layers: int
    width: int
    shift: str
    wkv: str
    tokens: Annotated[int, msgspec.Meta(ge=0, lt=MAX_TOKENS)]
    newlines: Annotated[int, msgspec.Meta(ge=0, le=MAX_NEWLINES)]
    origin: Annotated[str, msgspec.Meta(max_length=MAX_ORIGIN)] = ""


@dataclass(frozen=True)
class Stored:
    """A state on the host.

    newlines  how many newlines, two at most, the text ends in that it has seen
    origin    the key of the tuned state that it began with, "" for none
    """

    snapshot: Snapshot
    newlines: int
    origin: str = ""


class StateFile:
    """Writes and reads the states of one model."""

    def __init__(self, fingerprint: str, shape: Shape):
        self.fingerprint = fingerprint
        self.shape = shape

    def size(self, shift_dtype: torch.dtype, wkv_dtype: torch.dtype) -> int:
        """The most bytes a state with these dtypes takes."""
        shift, wkv = (math.prod(dims) for dims in self._shapes())
        return _PREFIX.size + MAX_HEADER + shift * shift_dtype.itemsize + wkv * wkv_dtype.itemsize + _CRC.size

    def encode(self, stored: Stored) -> Iterator[bytes | memoryview]:
        """Yield a state in pieces of at most PIECE_BYTES, which share the memory of its tensors."""
        snapshot = stored.snapshot
        header = msgspec.json.encode(
            Header(
                self.fingerprint,
                self.shape.num_layers,
                self.shape.width,
                NAMES[snapshot.shift.dtype],
                NAMES[snapshot.wkv.dtype],
                snapshot.elapsed,
                stored.newlines,
                stored.origin,
            )
        )
        first = _PREFIX.pack(MAGIC, VERSION, len(header)) + header
        crc = zlib.crc32(first)
        yield first
        for tensor in (snapshot.shift, snapshot.wkv):
            data = _bytes_of(tensor.contiguous())
            for start in range(0, len(data), PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                crc = zlib.crc32(piece, crc)
                yield piece
        yield _CRC.pack(crc)

    def decode(self, pieces: Iterable[bytes], *, pin: bool = False) -> Stored:
        """Read what `encode` wrote, however it is cut; `pin`: into page-locked memory.

        Unprocessable, saying why, for anything else: other data, a newer version, another model, a damaged or incomplete state.
        """
        stream = _Stream(pieces)
        magic, version, length = _PREFIX.unpack(stream.take(_PREFIX.size))
        if magic != MAGIC:
            raise _unusable("it is no state of this program")
        if version > VERSION:
            raise _unusable(f"a newer program wrote it: version {version}, known is {VERSION}")
        if length > MAX_HEADER:
            raise _unusable("its header is damaged")
        header, dtypes = self._read_header(stream.take(length))
        shift, wkv = (
            torch.empty(dims, dtype=dtype, pin_memory=pin) for dims, dtype in zip(self._shapes(), dtypes, strict=True)
        )
        stream.fill(_bytes_of(shift))
        stream.fill(_bytes_of(wkv))
        crc = stream.crc
        if _CRC.unpack(stream.take(_CRC.size))[0] != crc:
            raise _unusable("its checksum is wrong")
        stream.end()
        return Stored(Snapshot(shift, wkv, header.tokens), header.newlines, header.origin)

    def decode_reference(self, data: bytes) -> Stored:
        """Read a state that rwkv_lightning stored: three tensors in torch's format, which names no model; Unprocessable.

        Read with weights-only, so that nothing in it is run.
        """
        try:
            shift, wkv, elapsed = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            shift, wkv = (t.reshape(dims).clone() for t, dims in zip((shift, wkv), self._shapes(), strict=True))
            tokens = int(elapsed.reshape(-1)[0])
            if not {shift.dtype, wkv.dtype} <= set(NAMES) or not 0 <= tokens < MAX_FOREIGN_TOKENS:
                raise ValueError
            return Stored(Snapshot(shift, wkv, tokens), 0)
        except Exception:  # torch has no list of what it raises for other bytes
            raise _unusable("it is damaged or has another shape than this model's states") from None

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        layers, width, size = self.shape.num_layers, self.shape.width, self.shape.head_size
        return (layers, 2, width), (layers, self.shape.num_heads, size, size)

    def _read_header(self, data: bytes) -> tuple[Header, tuple[torch.dtype, torch.dtype]]:
        """Return the header, and the dtypes of shift and wkv."""
        try:
            header = msgspec.json.decode(data, type=Header)
            dtypes = DTYPES[header.shift], DTYPES[header.wkv]
        except (msgspec.MsgspecError, UnicodeError, KeyError, RecursionError):
            raise _unusable("its header is damaged") from None
        if header.model != self.fingerprint:
            raise other_model(header.model, self.fingerprint)
        if (header.layers, header.width) != (self.shape.num_layers, self.shape.width):
            raise _unusable("it has another shape than this model's states")
        return header, dtypes


class _Stream:
    """Reads from pieces of any lengths and keeps the CRC of what was read."""

    def __init__(self, pieces: Iterable[bytes]):
        self._pieces = iter(pieces)
        self._piece = memoryview(b"")
        self.crc = 0

    def fill(self, target: memoryview) -> None:
        """Read until `target` is full."""
        start = 0
        while start < len(target):
            if not self._piece:
                self._piece = memoryview(next(self._pieces, b""))
                if not self._piece:
                    raise _unusable("it is incomplete")
            part = self._piece[: len(target) - start]
            target[start : start + len(part)] = part
            self.crc = zlib.crc32(part, self.crc)
            self._piece = self._piece[len(part) :]
            start += len(part)

    def take(self, length: int) -> bytes:
        """Return the next bytes."""
        data = bytearray(length)
        self.fill(memoryview(data))
        return bytes(data)

    def end(self) -> None:
        """Nothing may follow."""
        if self._piece or next(self._pieces, b""):
            raise _unusable("more data follows it")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def other_model(theirs: str, ours: str) -> Unprocessable:
    """The error for a state of another model."""
    return _unusable(f"it is of another model, {theirs[:32]!r}, or of the same under another --quant; this one is {ours}")


def _unusable(why: str) -> Unprocessable:
    return Unprocessable(f"the stored state cannot be used: {why}", code="state_unusable")
