"""The recurrent state of many sequences, addressed by slot. Knows nothing of who owns a slot."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from rwkv_batch.model.architectures import Shape


class Fill(Protocol):
    """Kernels that overwrite and copy slots of state arrays."""

    def __call__(self, slots: Sequence[int], **parts: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        """Overwrite the slots of arrays [outer, S, row], by name, with sources [outer, row]; None = zeros."""

    def take(self, slots: Sequence[int], **parts: tuple[torch.Tensor, Sequence[torch.Tensor]]) -> None:
        """Copy the slots of arrays [outer, S, row], by name, each to its own of the copies, of outer * row values."""

    def put(self, slots: Sequence[int], **parts: tuple[torch.Tensor, Sequence[torch.Tensor]]) -> None:
        """Overwrite them, each with its own."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """An immutable copy of one sequence's state after `elapsed` tokens."""

    shift: torch.Tensor  # [L, 2, C]
    wkv: torch.Tensor  # [L, H, 64, 64]
    elapsed: int

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        return self.shift.nbytes + self.wkv.nbytes


@dataclass(frozen=True, eq=False)
class Together:
    """The states of a row and its followers, in their order; None is the empty one."""

    parts: tuple[Snapshot | None, ...]

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return sum(part.num_bytes for part in self.parts if part is not None)


class State:
    """The state arrays of `num_slots` slots; every step updates them in place.

    shift     [L, 2, S, C]        last normalised inputs of time mix (0) and channel mix (1), of `shift_dtype`
    wkv       [L, S, H, 64, 64]   the recurrent matrices, rows are value channels, columns key channels, of `wkv_dtype`
    last_ids  [S] int64           tokens sampled last: what a decode step feeds
    elapsed   S ints              tokens seen, counted on the host

    fill      the kernels that overwrite and copy slots; None = torch does it
    """

    def __init__(
        self,
        shape: Shape,
        num_slots: int,
        *,
        shift_dtype: torch.dtype = torch.float32,
        wkv_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        fill: Fill | None = None,
    ):
        self.shape = shape
        self.num_slots = num_slots
        self.shift = torch.zeros(shape.num_layers, 2, num_slots, shape.width, dtype=shift_dtype, device=device)
        heads = (shape.num_heads, shape.head_size, shape.head_size)
        self.wkv = torch.zeros(shape.num_layers, num_slots, *heads, dtype=wkv_dtype, device=device)
        self.last_ids = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.elapsed = [0] * num_slots
        # One view a layer, made once: a decode step on a small model is mostly the cost of small operations.
        self.time_shift = self.shift[:, 0].unbind()  # L times [S, C]
        self.channel_shift = self.shift[:, 1].unbind()
        self.layer_wkv = self.wkv.unbind()  # L times [S, H, 64, 64]
        self._fill = fill
        self._shift_rows = self.shift.flatten(0, 1)  # [2 L, S, C]
        self._wkv_rows = self.wkv.flatten(2)  # [L, S, H * 64 * 64]
        self._expected = (self.shift[:, :, 0].shape, self.wkv[:, 0].shape)

    @classmethod
    def num_bytes(
        cls,
        shape: Shape,
        num_slots: int,
        *,
        shift_dtype: torch.dtype = torch.float32,
        wkv_dtype: torch.dtype = torch.float32,
    ) -> int:
        """Bytes of the states of so many slots, or snapshots."""
        state = cls(shape, num_slots, shift_dtype=shift_dtype, wkv_dtype=wkv_dtype, device="meta")
        return state.shift.nbytes + state.wkv.nbytes

    def snapshot_of(self, wkv: torch.Tensor) -> Snapshot:
        """Return the state before the first token whose recurrent part is `wkv` [L, H, 64, 64], on the device of the arrays."""
        layers, width = self.shape.num_layers, self.shape.width
        return Snapshot(self.shift.new_zeros(layers, 2, width), wkv.to(self.wkv), 0)

    def clear(self, slots: Sequence[int]) -> None:
        """Overwrite the slots with the state before the first token (0 × NaN would stay NaN, so nothing is multiplied)."""
        if self._fill is not None:
            self._fill(slots, shift=(self._shift_rows, None), wkv=(self._wkv_rows, None))
        else:
            index = self._index(slots)
            self.shift.index_fill_(2, index, 0)
            self.wkv.index_fill_(1, index, 0)
        for slot in slots:
            self.elapsed[slot] = 0

    def advance(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Count the tokens that a step feeds."""
        for slot, length in zip(slots, lengths, strict=True):
            self.elapsed[slot] += length

    def take(self, slot: int) -> Snapshot:
        """Return a copy of one slot."""
        return Snapshot(self.shift[:, :, slot].clone(), self.wkv[:, slot].clone(), self.elapsed[slot])

    def take_many(self, slots: Sequence[int]) -> list[Snapshot]:
        """Return a copy of each slot, with as many launches as for one."""
        if self._fill is None:
            return [self.take(slot) for slot in slots]
        layers, heads = self.shape.num_layers, self.wkv.shape[2:]
        shift = [self.shift.new_empty(layers, 2, self.shape.width) for _ in slots]
        wkv = [self.wkv.new_empty(layers, *heads) for _ in slots]
        self._fill.take(slots, shift=(self._shift_rows, shift), wkv=(self._wkv_rows, wkv))
        return [Snapshot(*parts, self.elapsed[slot]) for *parts, slot in zip(shift, wkv, slots, strict=True)]

    def put(self, slot: int, snapshot: Snapshot) -> None:
        """Overwrite one slot with a snapshot; ValueError when it belongs to a model of another shape."""
        self.put_many([slot], snapshot)

    def put_many(self, slots: Sequence[int], snapshot: Snapshot) -> None:
        """Overwrite several slots with one snapshot, with as many launches as for one; ValueError as `put`."""
        self._check(snapshot)
        if self._fill is not None:
            shift, wkv = snapshot.shift.to(self.shift).contiguous(), snapshot.wkv.to(self.wkv).contiguous()
            self._fill(slots, shift=(self._shift_rows, shift.flatten(0, 1)), wkv=(self._wkv_rows, wkv.flatten(1)))
        elif len(slots) == 1:
            self.shift[:, :, slots[0]] = snapshot.shift
            self.wkv[:, slots[0]] = snapshot.wkv
        else:
            index = self._index(slots)
            self.shift[:, :, index] = snapshot.shift.to(self.shift).unsqueeze(2)
            self.wkv[:, index] = snapshot.wkv.to(self.wkv).unsqueeze(1)
        for slot in slots:
            self.elapsed[slot] = snapshot.elapsed

    def put_each(self, slots: Sequence[int], snapshots: Sequence[Snapshot]) -> None:
        """Overwrite each slot with a snapshot of its own, with as many launches as for one; ValueError as `put`."""
        if self._fill is None:
            for slot, snapshot in zip(slots, snapshots, strict=True):
                self.put(slot, snapshot)
            return
        for snapshot in snapshots:
            self._check(snapshot)
        shift = [snapshot.shift.to(self.shift).contiguous() for snapshot in snapshots]
        wkv = [snapshot.wkv.to(self.wkv).contiguous() for snapshot in snapshots]
        self._fill.put(slots, shift=(self._shift_rows, shift), wkv=(self._wkv_rows, wkv))
        for slot, snapshot in zip(slots, snapshots, strict=True):
            self.elapsed[slot] = snapshot.elapsed

    def _check(self, snapshot: Snapshot) -> None:
        got = (snapshot.shift.shape, snapshot.wkv.shape)
        if got != self._expected:
            raise ValueError(f"snapshot of shapes {got}, this model needs {self._expected}")

    def _index(self, slots: Sequence[int]) -> torch.Tensor:
        return torch.as_tensor(slots, dtype=torch.int64, device=self.shift.device)
