"""Kernel ops without a GPU: a library that launches nothing and notes what it was asked for.

Addresses differ from run to run, so a note gives the number under which an address came up first, and a digest of the bytes
that lie there: enough to tell weights and states apart. A tensor map is noted as the address and the sizes that it describes.
"""

import ctypes
import struct
import zlib
from types import SimpleNamespace

import torch

from rwkv_batch.kernels import ops as kernel_ops
from rwkv_batch.kernels.launch import INT, POINTER, Launcher
from rwkv_batch.kernels.quant import many_tokens
from sampling.kernel import SampleArgs

NUM_SMS = 132  # of an H200
NOT_SUPPORTED = 801


class Recorder:
    """`notes`: everything launched since the last `clear`, in order."""

    def __init__(self, *, content: bool):
        self.content = content
        self.maps: set[int] = set()
        self.clear()

    def clear(self) -> None:
        self.notes: list[tuple] = []
        self.numbers: dict[int, int] = {}

    def take(self) -> list[tuple]:
        notes = self.notes
        self.clear()
        return notes

    def address(self, value: int | None) -> str:
        if value is None:
            return "-"
        if value in self.maps:
            start, sizes = struct.unpack_from("<QI", ctypes.string_at(value, 12))
            return f"map {self.address(start)} {sizes:08x}"
        number = self.numbers.setdefault(value, len(self.numbers))
        return f"{number}:{zlib.crc32(ctypes.string_at(value, 4)):08x}" if self.content else f"{number}"

    def launched(self, function: "Function", arguments: tuple) -> None:
        *rest, stream = arguments
        plain = [self.address(v) if kind is POINTER else int(v) for kind, v in zip(function.argtypes, rest, strict=False)]
        assert len(rest) + 1 == len(function.argtypes), function.__name__
        assert all(kind in (POINTER, INT) for kind in function.argtypes)
        self.notes.append((function.__name__, stream, *plain))


class Function:
    """A C function of the library."""

    def __init__(self, name: str, recorder: Recorder):
        self.__name__ = name
        self.recorder = recorder
        self.argtypes: tuple = ()
        self.restype = None

    def __call__(self, *arguments) -> int:
        self.recorder.launched(self, arguments)
        return 0


class Library:
    """As `ctypes.CDLL`. `hopper`: whether it has what only those GPUs run."""

    _name = "/kernels/digest.so"

    def __init__(self, recorder: Recorder, *, hopper: bool):
        self._recorder = recorder
        self._hopper = hopper
        self.rwkv_gemm_map, self.rwkv_quant_gemm_map = Describe(recorder), Describe(recorder)
        self.rwkv_sample_args_size = Answer(ctypes.sizeof(SampleArgs))
        self.rwkv_sample_takes = Answer(1)
        self.rwkv_sample_method = Answer(0)
        self.rwkv_built_for = Answer(900 if hopper else 800)

    def __getattr__(self, name: str) -> "Function | Answer":
        setup = name.endswith("_setup")
        function = Answer(0 if self._hopper else NOT_SUPPORTED) if setup else Function(name, self._recorder)
        setattr(self, name, function)
        return function


class Answer:
    """A C function that launches nothing."""

    def __init__(self, value: int):
        self.value = value
        self.argtypes: tuple = ()
        self.restype = None

    def __call__(self, *arguments) -> int:
        return self.value


class Describe:
    """`rwkv_gemm_map` and the like: leaves what it was told where the map should be."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.argtypes: tuple = ()

    def __call__(self, target, tensor, rank, sizes, strides, box) -> int:
        described = zlib.crc32(repr((rank, [*sizes], [*strides], [*box])).encode())
        ctypes.memmove(target, struct.pack("<QI", tensor, described), 12)
        self.recorder.maps.add(target)
        return 0


class Products:
    """In the place of `MatMul`."""

    def __init__(self, launcher: Launcher):
        self.launcher = launcher
        self.recorder = launcher.library._recorder

    def __call__(self, x, weight, out, *, in_out: bool = False) -> None:
        sizes = (*x.shape, *weight.shape, *out.shape)
        addresses = (self.recorder.address(t.data_ptr()) for t in (x, weight, out))
        self.recorder.notes.append(("cublas", self.launcher.stream, *addresses, *sizes, in_out))

    def tune(self, calls, *, in_out: bool = False) -> None:
        self.recorder.notes.append(("tune cublas", len(calls), *(tuple(t.shape) for t in calls[0]), in_out))

    def save(self) -> None:
        pass


class ScaledProducts(Products):
    """In the place of `MatMulFp8`."""

    def __init__(self, launcher: Launcher, *, fast: bool):
        super().__init__(launcher)

    def __call__(self, x, weight, scales, out) -> None:
        super().__call__(x.values, weight, out)

    def fits(self, M: int, K: int) -> bool:
        return M % 16 == 0

    def tune_rows(self, calls) -> None:
        self.tune([(x.values, weight, out) for x, weight, _, out in calls])


class Stream:
    """A CUDA stream by name."""

    def __init__(self, recorder: Recorder, name: str):
        self.recorder = recorder
        self.cuda_stream = name

    def wait_stream(self, other: "Stream") -> None:
        self.recorder.notes.append((self.cuda_stream, "waits for", other.cuda_stream))


def make_launcher(
    monkeypatch, *, hopper: bool = True, content: bool = True, num_sms: int = NUM_SMS
) -> tuple[Launcher, Recorder]:
    """Return a launcher that launches nothing, and what it notes. Timing gives numbers that depend on the launches alone."""
    recorder = Recorder(content=content)
    main = Stream(recorder, "main")
    capability = (9, 0) if hopper else (8, 0)
    properties = SimpleNamespace(multi_processor_count=num_sms, major=capability[0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "no card")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: Stream(recorder, "side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
    monkeypatch.setattr(torch.cuda, "device", lambda device=None: torch.no_grad())
    monkeypatch.setattr(kernel_ops, "MatMul", Products)
    monkeypatch.setattr(many_tokens, "MatMulFp8", ScaledProducts)
    launcher = Launcher(Library(recorder, hopper=hopper), "cpu")

    def time(run, rounds: int = 4) -> float:
        before = recorder.notes
        recorder.notes = []
        launcher.use_current_stream()
        run()
        sizes = [[part for part in note if not isinstance(part, str) or note[0] == part] for note in recorder.notes]
        recorder.notes = before
        return 1 + zlib.crc32(repr((rounds, sizes)).encode()) % 4096 / 16384

    monkeypatch.setattr(launcher, "time", time)
    return launcher, recorder
