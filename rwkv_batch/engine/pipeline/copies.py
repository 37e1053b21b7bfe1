"""Moves snapshots between the stages' devices and the host, beside the steps."""

import math
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from rwkv_batch.engine.pipeline.stage import Stage
from rwkv_batch.engine.pipeline.state import AnySnapshot, PipelineState, StagedSnapshot
from rwkv_batch.model.state import Snapshot
from rwkv_batch.sessions.transfer import Copies, Mark

Marks = tuple[Mark, ...]  # one for each stage


class StagedCopies(Copies):
    """`Copies` of a pipeline: on the devices each stage has its part of a snapshot, on the host the snapshot is whole."""

    def __init__(self, state: PipelineState, stages: Sequence[Stage]):
        super().__init__(torch.device("cpu"))
        self.on_gpu = stages[0].stream is not None
        self._state = state
        self._stages = stages
        self._streams = [torch.cuda.Stream(stage.device) for stage in stages] if self.on_gpu else []

    def mark(self) -> Marks | None:
        """Return events behind all that was submitted to the stages so far."""
        return tuple(_mark(stage.stream) for stage in self._stages) if self.on_gpu else None

    def wait(self, snapshot: AnySnapshot, mark: Marks | None) -> None:
        """Make the stages' streams wait until `snapshot` has arrived, and keep its memory until they are done."""
        if mark is None:
            return
        for stage, part, own in zip(self._stages, self._state.parts_of(snapshot), mark, strict=True):
            if stage.stream.cuda_stream == own.stream:
                continue
            stage.stream.wait_event(own.event)
            for tensor in (part.shift, part.wkv):
                if tensor.is_cuda:
                    tensor.record_stream(stage.stream)

    def to_device(self, snapshot: AnySnapshot) -> tuple[AnySnapshot, Marks | None]:
        """Begin to copy a snapshot to the devices; the marks say when it is there. Does not wait."""
        if not self.on_gpu or isinstance(snapshot, StagedSnapshot):
            return snapshot, None
        parts = []
        for stage, stream, part in zip(self._stages, self._streams, self._state.parts_of(snapshot), strict=True):
            with torch.cuda.stream(stream):
                shift, wkv = (tensor.to(stage.device, non_blocking=True) for tensor in (part.shift, part.wkv))
            parts.append(Snapshot(shift, wkv, part.elapsed))
        return StagedSnapshot(tuple(parts)), tuple(_mark(stream) for stream in self._streams)

    def to_host(self, snapshot: AnySnapshot, mark: Marks | None) -> Snapshot:
        """Return a whole copy in host memory, page-locked where there are cards; waits for it."""
        if not isinstance(snapshot, StagedSnapshot):
            return snapshot
        if not self.on_gpu:
            return snapshot.joined()
        layers = self._state.shape.num_layers
        shift, wkv = (
            torch.empty(layers, *tensor.shape[1:], dtype=tensor.dtype, pin_memory=True)
            for tensor in (snapshot.parts[0].shift, snapshot.parts[0].wkv)
        )
        done = []
        for i, (stage, stream, part) in enumerate(zip(self._stages, self._streams, snapshot.parts, strict=True)):
            cut = slice(stage.layers.start, stage.layers.stop)
            with torch.cuda.stream(stream):
                if mark is not None:
                    stream.wait_event(mark[i].event)
                shift[cut].copy_(part.shift, non_blocking=True)
                wkv[cut].copy_(part.wkv, non_blocking=True)
                done.append(torch.cuda.Event(blocking=True))
                done[-1].record()
        for event in done:
            event.synchronize()
        return Snapshot(shift, wkv, snapshot.elapsed)

    def is_finite(self, snapshot: AnySnapshot, mark: Marks | None) -> bool:
        """Whether no value is NaN or infinite: a sum with one is neither."""
        parts = snapshot.parts if isinstance(snapshot, StagedSnapshot) else (snapshot,)
        for i, part in enumerate(parts):
            with ExitStack() as stack:
                if part.wkv.is_cuda:
                    stack.enter_context(torch.cuda.stream(self._streams[i]))
                    if mark is not None:
                        self._streams[i].wait_event(mark[i].event)
                sums = [tensor.sum(dtype=torch.float32) for tensor in (part.shift, part.wkv)]
                if not all(math.isfinite(float(value)) for value in sums):
                    return False
        return True


def _mark(stream: torch.cuda.Stream) -> Mark:
    event = torch.cuda.Event()
    event.record(stream)
    return Mark(event, stream.cuda_stream)
