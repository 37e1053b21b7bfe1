"""The state of all ranks: `wkv` dealt out by heads, `shift` replicated. A snapshot of it is one of a whole model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rwkv_batch.model.state import Snapshot, State
from rwkv_batch.model.tensor_parallel.on_device import current
from rwkv_batch.model.weights import ModelShape


class ShardedState:
    """The state arrays of all ranks with the face of `State`: snapshots are cut where they are put and joined where taken.

    shape  of the whole model
    ranks  the arrays of each, of the shape of its shard

    `last_ids` and the counts of tokens are rank 0's, which samples; so are `shift` and `wkv`, for their types and device. Every
    rank keeps a log of its own.
    """

    def __init__(self, shape: ModelShape, ranks: Sequence[State]):
        self.shape = shape
        self.ranks = list(ranks)
        first = self.ranks[0]
        self.num_slots = first.num_slots
        self.shift, self.wkv, self.last_ids, self.elapsed = first.shift, first.wkv, first.last_ids, first.elapsed
        heads = (shape.num_heads, shape.head_size, shape.head_size)
        self._expected = ((shape.num_layers, 2, shape.width), (shape.num_layers, *heads))
        self._per_rank = shape.num_heads // len(self.ranks)

    def snapshot_of(self, wkv: Tensor) -> Snapshot:
        """See `State.snapshot_of`."""
        layers, width = self.shape.num_layers, self.shape.width
        return Snapshot(self.shift.new_zeros(layers, 2, width), wkv.to(self.wkv), 0)

    def clear(self, slots: Sequence[int]) -> None:
        """See `State.clear`."""
        for state in self.ranks:
            with current(state.wkv.device):
                state.clear(slots)

    def logs(self, num_rows: int) -> bool:
        """See `State.logs`."""
        return self.ranks[0].logs(num_rows)

    def advance(self, slots: Sequence[int], lengths: Sequence[int], *, logged: bool = False) -> None:
        """See `State.advance`."""
        for state in self.ranks:
            with current(state.wkv.device):
                state.advance(slots, lengths, logged=logged)

    def take(self, slot: int) -> Snapshot:
        """Return a copy of one slot."""
        return self.take_many([slot])[0]

    def take_many(self, slots: Sequence[int]) -> list[Snapshot]:
        """Return a copy of each slot, on rank 0's device."""
        parts = []
        for state in self.ranks:
            with current(state.wkv.device):
                parts.append(state.take_many(slots))
        return [self._joined(each) for each in zip(*parts, strict=True)]

    def put(self, slot: int, snapshot: Snapshot) -> None:
        """See `State.put`."""
        self.put_many([slot], snapshot)

    def put_many(self, slots: Sequence[int], snapshot: Snapshot) -> None:
        """See `State.put_many`."""
        self._check(snapshot)
        for rank, state in enumerate(self.ranks):
            with current(state.wkv.device):
                state.put_many(slots, self._cut(snapshot, rank))

    def put_each(self, slots: Sequence[int], snapshots: Sequence[Snapshot]) -> None:
        """See `State.put_each`."""
        for snapshot in snapshots:
            self._check(snapshot)
        for rank, state in enumerate(self.ranks):
            with current(state.wkv.device):
                state.put_each(slots, [self._cut(snapshot, rank) for snapshot in snapshots])

    def _joined(self, parts: Sequence[Snapshot]) -> Snapshot:
        device = self.wkv.device
        with current(device):
            wkv = torch.cat([part.wkv.to(device, non_blocking=True) for part in parts], 1)
        return Snapshot(parts[0].shift, wkv, parts[0].elapsed)

    def _cut(self, snapshot: Snapshot, rank: int) -> Snapshot:
        device, first = self.ranks[rank].wkv.device, rank * self._per_rank
        heads = snapshot.wkv[:, first : first + self._per_rank]
        return Snapshot(snapshot.shift.to(device, non_blocking=True), heads.to(device, non_blocking=True), snapshot.elapsed)

    def _check(self, snapshot: Snapshot) -> None:
        got = (tuple(snapshot.shift.shape), tuple(snapshot.wkv.shape))
        if got != self._expected:
            raise ValueError(f"snapshot of shapes {got}, this model needs {self._expected}")
