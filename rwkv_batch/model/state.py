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


class Log(Protocol):
    """Tokens that some slots have seen but their recurrent matrices do not hold yet.

    least_rows  of a captured decode step that keeps its tokens there; every other step wants the matrices whole
    """

    least_rows: int

    def flush(self, slots: Sequence[int]) -> None:
        """Take what is kept of these slots into their matrices."""

    def forget(self, slots: Sequence[int]) -> None:
        """Drop what is kept of these slots, whose matrices are overwritten."""


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

    Where a log is kept (`keep_log`), `wkv` may lack the last tokens of a slot: whoever reads it without the methods here calls
    `flush` before.
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
        self._log: Log | None = None
        self._unflushed: set[int] = set()  # slots of which the log may hold something
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
        self._forget(slots)
        if self._fill is not None:
            self._fill(slots, shift=(self._shift_rows, None), wkv=(self._wkv_rows, None))
        else:
            index = self._index(slots)
            self.shift.index_fill_(2, index, 0)
            self.wkv.index_fill_(1, index, 0)
        for slot in slots:
            self.elapsed[slot] = 0

    def keep_log(self, log: Log) -> None:
        """Have decode steps of many rows keep their tokens in `log` from now on."""
        self._log = log
        self._unflushed = set(range(self.num_slots))  # steps are tried out without saying so, until all slots are cleared

    def logs(self, num_rows: int) -> bool:
        """Whether a captured decode step of so many rows, padding included, keeps its tokens in a log."""
        return self._log is not None and num_rows >= self._log.least_rows

    def advance(self, slots: Sequence[int], lengths: Sequence[int], *, logged: bool = False) -> None:
        """Before a step: count the tokens it feeds, and flush its slots. `logged`: it reads the log itself, and adds to it."""
        if logged and self._log is not None:
            self._unflushed.update(slots)
        else:
            self.flush(slots)
        for slot, length in zip(slots, lengths, strict=True):
            self.elapsed[slot] += length

    def flush(self, slots: Sequence[int]) -> None:
        """See to it that `wkv` holds all tokens of these slots, behind the steps submitted so far."""
        if waiting := self._taken_off(slots):
            self._log.flush(waiting)

    def _forget(self, slots: Sequence[int]) -> None:
        """Drop what the log holds of these slots, whose states are about to be overwritten."""
        if waiting := self._taken_off(slots):
            self._log.forget(waiting)

    def _taken_off(self, slots: Sequence[int]) -> list[int]:
        if not self._unflushed:
            return []
        waiting = self._unflushed.intersection(slots)
        self._unflushed -= waiting
        return sorted(waiting)

    def take(self, slot: int) -> Snapshot:
        """Return a copy of one slot."""
        self.flush([slot])
        return Snapshot(self.shift[:, :, slot].clone(), self.wkv[:, slot].clone(), self.elapsed[slot])

    def take_many(self, slots: Sequence[int]) -> list[Snapshot]:
        """Return a copy of each slot, with as many launches as for one."""
        if self._fill is None:
            return [self.take(slot) for slot in slots]
        self.flush(slots)
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
            self._forget(slots)
            self._fill(slots, shift=(self._shift_rows, shift.flatten(0, 1)), wkv=(self._wkv_rows, wkv.flatten(1)))
        elif len(slots) == 1:
            self._forget(slots)
            self.shift[:, :, slots[0]] = snapshot.shift
            self.wkv[:, slots[0]] = snapshot.wkv
        else:
            index = self._index(slots)
            self._forget(slots)
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
        self._forget(slots)
        self._fill.put(slots, shift=(self._shift_rows, shift), wkv=(self._wkv_rows, wkv))
        for slot, snapshot in zip(slots, snapshots, strict=True):
            self.elapsed[slot] = snapshot.elapsed

    def _check(self, snapshot: Snapshot) -> None:
        got = (snapshot.shift.shape, snapshot.wkv.shape)
        if got != self._expected:
            raise ValueError(f"snapshot of shapes {got}, this model needs {self._expected}")

    def _index(self, slots: Sequence[int]) -> torch.Tensor:
        return torch.as_tensor(slots, dtype=torch.int64, device=self.shift.device)
