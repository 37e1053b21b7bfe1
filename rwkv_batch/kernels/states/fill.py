"""Calls of cuda/state.cu: slots of the state arrays overwritten and copied at the speed of the memory."""

from array import array
from collections.abc import Sequence

from torch import Tensor

from rwkv_batch.kernels.launch import INT, POINTER, Launcher, check, pointer


class StateFill:
    """The kernels on one device. Nothing is allocated or waited for: the slots go along with the launch."""

    def __init__(self, launcher: Launcher):
        self._launcher = launcher
        self._fill = launcher.bind("rwkv_fill_slots", *[POINTER] * 3, *[INT] * 4)
        self._copy = launcher.bind("rwkv_copy_slots", *[POINTER] * 3, *[INT] * 5)

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

    def take(self, slots: Sequence[int], **parts: tuple[Tensor, Sequence[Tensor]]) -> None:
        """Copy slots out of arrays, behind what torch's current stream has to do: as many launches as for one.

        slots  from 0 to S - 1, distinct
        parts  by name, (array [outer, S, row] of any type, a copy of outer * row values, of the same type, for each slot);
               a row's bytes are a multiple of 16

        ValueError names the argument that does not fit; then nothing is written.
        """
        self._copy_all(slots, parts, to_slots=False)

    def put(self, slots: Sequence[int], **parts: tuple[Tensor, Sequence[Tensor]]) -> None:
        """Overwrite slots of arrays, each with its own copy; arguments and errors as for `take`."""
        self._copy_all(slots, parts, to_slots=True)

    def _copy_all(self, slots: Sequence[int], parts: dict[str, tuple[Tensor, Sequence[Tensor]]], *, to_slots: bool) -> None:
        listed = array("q", slots)
        if -1 in listed or len(set(listed)) < len(listed):
            raise ValueError("slots: each once, from 0 on")
        for name, (target, copies) in parts.items():
            self._check(name, target, None, listed)
            if len(copies) != len(listed):
                raise ValueError(f"copies of {name}: {len(copies)} for {len(listed)} slots")
            outer, _, row = target.shape
            for copy in copies:
                if copy.numel() != outer * row or copy.data_ptr() % 16:
                    raise ValueError(f"copies of {name}: expected {outer} x {row} values from a multiple of 16 bytes on")
                check(f"copies of {name}", copy, target.device, target.dtype, copy.shape)
        self._launcher.use_current_stream()
        for target, copies in parts.values():
            outer, num_slots, row = target.shape
            places = array("Q", map(Tensor.data_ptr, copies))
            addresses = pointer(target), places.buffer_info()[0], listed.buffer_info()[0]
            sizes = len(listed), outer, num_slots, row * target.itemsize
            self._launcher.launch(self._copy, *addresses, *sizes, int(to_slots))

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
