"""How Python calls a kernel: arguments checked by name, then a launch on torch's current stream.

Every kernel is a C function that takes pointers and sizes, the stream last, and returns a CUDA error number; it allocates
nothing and waits for nothing, so that a CUDA graph can capture it.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

POINTER = ctypes.c_void_p
INT = ctypes.c_int
HOPPER = 900  # as `BUILT_FOR` in cuda/common.cuh


class KernelLaunchFailed(RuntimeError):
    """A kernel could not be started; the message names it and the CUDA error."""


class Launcher:
    """The functions of one built library (see `compiler.library`) on one device."""

    def __init__(self, library: ctypes.CDLL, device: torch.device | str):
        self.library = library
        self.device = torch.device(device)
        self.digest = Path(library._name).stem  # of compiler, flags and sources
        self.stream = 0

    @functools.cached_property
    def hopper(self) -> bool:
        """Whether Hopper's own kernels can run: the card is one, and the library was built for it (see `compiler.arch_for`)."""
        return self.library.rwkv_built_for() == HOPPER and torch.cuda.get_device_capability(self.device)[0] == 9

    def use_current_stream(self) -> None:
        """Look up torch's current stream, which all launches go to until the next call; once a step, since it takes 10 us."""
        self.stream = torch.cuda.current_stream(self.device).cuda_stream

    def bind(self, name: str, *types: type) -> ctypes._CFuncPtr:
        """Return the library's function `name` with arguments of `types`; the stream follows them."""
        function = getattr(self.library, name)
        function.argtypes = (*types, POINTER)
        function.restype = ctypes.c_int
        return function

    def launch(self, function: ctypes._CFuncPtr, *arguments: int | float | None) -> None:
        """Start a kernel; KernelLaunchFailed when CUDA refuses."""
        error = function(*arguments, self.stream)
        if error:
            raise KernelLaunchFailed(f"{function.__name__} failed with CUDA error {error}")

    def time(self, run: Callable[[], object], rounds: int = 4) -> float:
        """Return the milliseconds of `run`'s launches, replayed as a CUDA graph; infinity when they cannot be captured."""
        keep, graph = self.stream, torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(self.device)):
                self.use_current_stream()
                run()
        except RuntimeError:
            return float("inf")
        finally:
            self.stream = keep
        return fastest_replay(graph, rounds)


def fastest_replay(graph: torch.cuda.CUDAGraph, rounds: int) -> float:
    """Return the milliseconds of the fastest of `rounds` replays, the first left out."""
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times[1:])


def check(name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Raise ValueError, naming the argument, unless `tensor` is contiguous and has this device, dtype and shape."""
    if tensor.device != device or tensor.dtype != dtype or tensor.shape != tuple(shape) or not tensor.is_contiguous():
        layout = "" if tensor.is_contiguous() else ", not contiguous"
        raise ValueError(
            f"{name}: expected contiguous {dtype} {list(shape)} on {device}, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}{layout}"
        )


def pointer(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's first element; None for None."""
    return None if tensor is None else tensor.data_ptr()
