"""Slots whose state is spread over the stages by layers, and snapshots that are."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from rwkv_batch.engine.pipeline.stage import Stage
from rwkv_batch.model.architectures import Shape
from rwkv_batch.model.state import Snapshot


@dataclass(frozen=True, eq=False)
class StagedSnapshot:
    """A snapshot in parts, each with the layers of one stage and on its device; otherwise what `Snapshot` is."""

    parts: tuple[Snapshot, ...]

    @property
    def elapsed(self) -> int:
        """Tokens it has seen."""
        return self.parts[0].elapsed

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self.parts)

    @cached_property
    def shift(self) -> torch.Tensor:
        """[L, 2, C], joined on the host."""
        return torch.cat([part.shift.cpu() for part in self.parts])

    @cached_property
    def wkv(self) -> torch.Tensor:
        """[L, H, 64, 64], joined on the host."""
        return torch.cat([part.wkv.cpu() for part in self.parts])

    def joined(self) -> Snapshot:
        """Return it as one, on the host."""
        return Snapshot(self.shift, self.wkv, self.elapsed)


AnySnapshot = Snapshot | StagedSnapshot


class PipelineState:
    """The states of all stages, addressed as one `State` is."""

    def __init__(self, shape: Shape, stages: Sequence[Stage]):
        """`shape`: of the whole model."""
        self.shape = shape
        self._stages = stages
        last = stages[-1].state
        self.num_slots = last.num_slots
        self.last_ids = last.last_ids  # where they are sampled
        self.shift, self.wkv = last.shift, last.wkv  # some of the arrays, for what asks for their types and a device
        heads = (shape.num_heads, shape.head_size, shape.head_size)
        self._expected = (torch.Size((shape.num_layers, 2, shape.width)), torch.Size((shape.num_layers, *heads)))

    @property
    def elapsed(self) -> list[int]:
        """Tokens that each slot has seen."""
        return self._stages[0].state.elapsed

    def snapshot_of(self, wkv: torch.Tensor) -> StagedSnapshot:
        """See `State.snapshot_of`."""
        return self._of_each(lambda stage: stage.state.snapshot_of(wkv[_slice(stage)]))

    def clear(self, slots: Sequence[int]) -> None:
        """See `State.clear`."""
        for stage in self._stages:
            with stage.active():
                stage.state.clear(slots)

    def take(self, slot: int) -> StagedSnapshot:
        """See `State.take`."""
        return self.take_many([slot])[0]

    def take_many(self, slots: Sequence[int]) -> list[StagedSnapshot]:
        """See `State.take_many`."""
        parts = []
        for stage in self._stages:
            with stage.active():
                parts.append(stage.state.take_many(slots))
        return [StagedSnapshot(own) for own in zip(*parts, strict=True)]

    def put(self, slot: int, snapshot: AnySnapshot) -> None:
        """See `State.put`; the snapshot may be whole, on any device, or staged."""
        self.put_many([slot], snapshot)

    def put_many(self, slots: Sequence[int], snapshot: AnySnapshot) -> None:
        """See `State.put_many`."""
        for stage, part in zip(self._stages, self.parts_of(snapshot), strict=True):
            with stage.active():
                stage.state.put_many(slots, part)

    def put_each(self, slots: Sequence[int], snapshots: Sequence[AnySnapshot]) -> None:
        """See `State.put_each`."""
        parts = [self.parts_of(snapshot) for snapshot in snapshots]
        for i, stage in enumerate(self._stages):
            with stage.active():
                stage.state.put_each(slots, [own[i] for own in parts])

    def parts_of(self, snapshot: AnySnapshot) -> tuple[Snapshot, ...]:
        """Return what each stage gets of a snapshot, wherever it lies; ValueError when it is of a model of another shape."""
        if isinstance(snapshot, StagedSnapshot):
            return snapshot.parts
        got = (snapshot.shift.shape, snapshot.wkv.shape)
        if got != self._expected:
            raise ValueError(f"snapshot of shapes {got}, this model needs {self._expected}")
        cuts = [_slice(stage) for stage in self._stages]
        return tuple(Snapshot(snapshot.shift[cut], snapshot.wkv[cut], snapshot.elapsed) for cut in cuts)

    def _of_each(self, part_of) -> StagedSnapshot:
        parts = []
        for stage in self._stages:
            with stage.active():
                parts.append(part_of(stage))
        return StagedSnapshot(tuple(parts))


def _slice(stage: Stage) -> slice:
    return slice(stage.layers.start, stage.layers.stop)
