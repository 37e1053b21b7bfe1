"""The packed weights of the demo model: one small file without pickle, read and checked in well under a second.

    python -m rwkv_batch.model.packed_file unpack demo/model.rwkv out.pth     write a checkpoint that any RWKV-7 program loads
    python -m rwkv_batch.model.packed_file info demo/model.rwkv               print what the file holds

Layout: the magic, the header's length (4 bytes, little endian), the header (JSON), the body. The header lists the
arrays of the body in order as [name, kind, shape] and holds the body's SHA-256. Kinds:

    i8   a matrix of signed bytes, row by row, after one float32 scale a row
    f16, f32, u16, u8   plain numbers, little endian

Beside the tensors the body holds `kept` (the World ids that have rows in emb.weight and head.weight, rising), and for
every other id how many kept tokens spell it (`piece_counts`) and which (`pieces`, as row numbers). When unpacked, the
embedding of such an id is the mean of the rows that spell it, and its row of the head is zero: the model never writes
it.
"""

import hashlib
import json
import math
import sys

import numpy as np
import torch

MAGIC = b"RWKVDEMO"
VOCAB = 65536
HEADER_MAX = 1 << 18
KINDS = {"i8": 1, "f16": 2, "f32": 4, "u16": 2, "u8": 1}
TYPES = {"i8": "i1", "f16": "<f2", "f32": "<f4", "u16": "<u2", "u8": "u1"}


def kind_of(name: str, tensor: torch.Tensor) -> str:
    """Large matrices as bytes, the low-rank ones as halves, vectors as floats."""
    if tensor.dim() == 2 and name.endswith(".weight"):
        return "i8"
    return "f16" if tensor.dim() == 2 and tensor.numel() > 4096 else "f32"


def quantise(matrix: torch.Tensor) -> tuple:
    """[rows, columns] -> (float32 scales [rows], int8 [rows, columns])."""
    matrix = matrix.detach().float().cpu()
    scale = matrix.abs().amax(1).clamp(min=1e-12) / 127
    return scale, (matrix / scale[:, None]).round().to(torch.int8)


def rounded(tensors: dict) -> dict:
    """The tensors as they come back from a packed file (kept rows only), for measuring what packing costs."""
    out = {}
    for name, tensor in tensors.items():
        kind = kind_of(name, tensor)
        if kind == "i8":
            scale, values = quantise(tensor)
            out[name] = (values.float() * scale[:, None]).to(tensor.device)
        else:
            out[name] = tensor.detach().half().float() if kind == "f16" else tensor.detach().float()
    return out


def pack(tensors: dict, kept: list, pieces: list, path: str) -> int:
    """Write tensors under their published names, emb.weight and head.weight with the kept rows only.

    pieces[n] spells the n-th id that is not kept, as rows of emb.weight. Returns the size of the file.
    """
    counts = np.array([len(p) for p in pieces], np.uint8)
    arrays = [
        ("kept", "u16", np.array(kept)),
        ("piece_counts", "u8", counts),
        ("pieces", "u16", np.array([row for p in pieces for row in p])),
    ]
    entries, body = [], bytearray()
    for name, kind, array in arrays:
        entries.append([name, kind, list(array.shape)])
        body += array.astype(TYPES[kind]).tobytes()
    for name, tensor in tensors.items():
        kind = kind_of(name, tensor)
        entries.append([name, kind, list(tensor.shape)])
        if kind == "i8":
            scale, values = quantise(tensor)
            body += scale.numpy().astype("<f4").tobytes() + values.numpy().tobytes()
        else:
            body += tensor.detach().float().cpu().numpy().astype(TYPES[kind]).tobytes()
    header = json.dumps({"version": 1, "sha256": hashlib.sha256(body).hexdigest(), "arrays": entries}).encode()
    with open(path, "wb") as file:
        file.write(MAGIC + len(header).to_bytes(4, "little") + header + body)
    return len(MAGIC) + 4 + len(header) + len(body)


def stored_size(kind: str, shape: list) -> int:
    return math.prod(shape) * KINDS[kind] + (4 * shape[0] if kind == "i8" else 0)


def read_header(data: memoryview, path: str) -> tuple:
    """(entries, body) after every length and the SHA-256 have been checked."""

    def need(condition, what):
        if not condition:
            raise ValueError(f"{path} is not a packed demo model, or it is damaged: {what}")

    start = len(MAGIC) + 4
    need(len(data) >= start and bytes(data[: len(MAGIC)]) == MAGIC, "wrong first bytes")
    length = int.from_bytes(data[len(MAGIC) : start], "little")
    need(2 <= length <= HEADER_MAX and start + length <= len(data), "wrong header length")
    try:
        header = json.loads(bytes(data[start : start + length]))
    except (ValueError, RecursionError):
        need(False, "the header is not JSON")
    need(isinstance(header, dict) and header.get("version") == 1, "unknown version")
    entries = header.get("arrays")
    need(isinstance(entries, list) and 3 < len(entries) < 10000, "no list of arrays")
    total, names = 0, set()
    for entry in entries:
        need(isinstance(entry, list) and len(entry) == 3, "wrong entry")
        name, kind, shape = entry
        need(isinstance(name, str) and name not in names and kind in list(KINDS), "wrong entry")
        need(isinstance(shape, list) and 1 <= len(shape) <= 3, f"wrong shape of {name}")
        need(all(type(n) is int and 0 < n <= 1 << 24 for n in shape), f"wrong shape of {name}")
        need(kind != "i8" or len(shape) == 2, f"wrong shape of {name}")
        names.add(name)
        total += stored_size(kind, shape)
    body = data[start + length :]
    need(total == len(body), f"{len(body)} bytes where {total} belong")
    need(hashlib.sha256(body).hexdigest() == header.get("sha256"), "the checksum is wrong")
    return entries, body


def read_file(path) -> tuple:
    """(bytes, a name for messages) of a path or of bytes."""
    if isinstance(path, (bytes, bytearray, memoryview)):
        return memoryview(path), "the data"
    with open(path, "rb") as file:
        return memoryview(file.read()), str(path)


def kept_ids(path) -> list:
    """The World ids that the packed model knows, rising."""
    entries, body = read_header(*read_file(path))
    at = 0
    for name, kind, shape in entries:
        if name == "kept":
            return np.frombuffer(body, TYPES[kind], math.prod(shape), at).tolist()
        at += stored_size(kind, shape)
    raise ValueError(f"{path} lacks the kept ids")


def unpack(path, token_bytes=None, dtype: torch.dtype = torch.float32) -> dict:
    """Read a packed file (a path or its bytes) into full tensors under the published names.

    emb.weight and head.weight come back as [65536, D]. The same file always gives the same numbers. ValueError on
    damage. token_bytes is not needed (the file says how rare ids are spelled) and is ignored.
    """
    data, path = read_file(path)
    entries, body = read_header(data, path)
    arrays, at = {}, 0
    for name, kind, shape in entries:
        scale = None
        if kind == "i8":
            scale = torch.from_numpy(np.frombuffer(body, "<f4", shape[0], at).copy())
            at += 4 * shape[0]
        numbers = np.frombuffer(body, TYPES[kind], math.prod(shape), at).reshape(shape)
        at += numbers.nbytes
        if kind in ("u8", "u16"):
            arrays[name] = torch.from_numpy(numbers.astype(np.int64))
        elif kind == "i8":
            arrays[name] = torch.from_numpy(numbers.astype(np.float32)).mul_(scale[:, None])
        else:
            arrays[name] = torch.from_numpy(numbers.astype(np.float32))
    try:
        kept, counts, pieces = arrays.pop("kept"), arrays.pop("piece_counts"), arrays.pop("pieces")
        emb, head = arrays["emb.weight"], arrays["head.weight"]
    except KeyError as missing:
        raise ValueError(f"{path} lacks {missing}") from None
    known = len(kept)
    if (
        any(x.dim() != 1 for x in (kept, counts, pieces))
        or not bool((kept[1:] > kept[:-1]).all())
        or len(counts) != VOCAB - known
        or int(counts.sum()) != len(pieces)
        or int(pieces.max()) >= known
        or emb.shape != head.shape
        or len(emb) != known
    ):
        raise ValueError(f"{path} has tables of kept ids that do not fit each other")
    rest = torch.ones(VOCAB, dtype=torch.bool)
    rest[kept] = False
    offsets = counts.cumsum(0) - counts
    out = {}
    for name, tensor in arrays.items():
        if name == "emb.weight":
            full = torch.empty(VOCAB, tensor.shape[1])
            full[rest] = torch.nn.functional.embedding_bag(pieces, tensor, offsets, mode="mean")
            full[kept] = tensor
        elif name == "head.weight":
            full = torch.zeros(VOCAB, tensor.shape[1])
            full[kept] = tensor
        else:
            full = tensor
        out[name] = full.to(dtype)
    return out


def main() -> None:
    arguments = sys.argv[1:]
    if len(arguments) == 3 and arguments[0] == "unpack":
        torch.save(unpack(arguments[1]), arguments[2])
    elif len(arguments) == 2 and arguments[0] == "info":
        with open(arguments[1], "rb") as file:
            entries, body = read_header(memoryview(file.read()), arguments[1])
        for name, kind, shape in entries:
            print(f"{name:32} {kind:4} {shape}")
        print(f"{len(body):,} bytes")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
