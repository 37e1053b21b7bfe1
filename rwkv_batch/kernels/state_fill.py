"""Calls of cuda/state.cu: slots of the state arrays overwritten at the speed of the memory."""

from array import array
from collections.abc import Sequence

from torch import Tensor

from rwkv_batch.kernels.launch import INT, POINTER, Launcher, check, pointer


class StateFill:
    """The kernel on one device. Nothing is allocated or waited for: the slots go along with the launch."""

    def __init__(self, launcher: Launcher):
        self._launcher = launcher
        self._fill = launcher.bind("rwkv_fill_slots", *[POINTER] * 3, *[INT] * 4)

    def __call__(self, slots: Sequence[int], **parts: tuple[Tensor, Tensor | None]) -> None:
        """Overwrite slots of arrays, behind what torch's current stream has to do, and touch no other slot.

        slots  from 0 to S - 1, any number of them; -1 is passed over
        parts  by name, (array [outer, S, row] of any type, source [outer, row] of the same type, or None for zeros);
               a row's bytes are a multiple of 16

        ValueError names the argument that does not fit; then nothing is written.
        """
        listed = array("q", slots)
        for name, (target, source) in parts.items():
            self._check(name, target, source, listed)
        self._launcher.use_current_stream()
        for target, source in parts.values():
            outer, num_slots, row = target.shape
            addresses = pointer(target), pointer(source), listed.buffer_info()[0]
            sizes = len(listed), outer, num_slots, row * target.itemsize
            self._launcher.launch(self._fill, *addresses, *sizes)

    def _check(self, name: str, target: Tensor, source: Tensor | None, slots: Sequence[int]) -> None:
        if target.dim() != 3:
            raise ValueError(f"{name}: expected [outer, slots, row], got {list(target.shape)}")
        check(name, target, self._launcher.device, target.dtype, target.shape)
        outer, num_slots, row = target.shape
        if row * target.itemsize % 16:
            raise ValueError(f"{name}: rows of {row * target.itemsize} bytes, must be a multiple of 16")
        if source is not None:
            check(f"source of {name}", source, self._launcher.device, target.dtype, (outer, row))
        if any(t is not None and t.data_ptr() % 16 for t in (target, source)):
            raise ValueError(f"{name}: it and its source must begin at a multiple of 16 bytes")
        if slots and not -1 <= min(slots) <= max(slots) < num_slots:
            raise ValueError(f"slots: from {min(slots)} to {max(slots)}, {name} has {num_slots}")
