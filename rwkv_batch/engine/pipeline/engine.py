"""The engine of a pipeline: `Engine`, whose model, state and captured steps go through several devices."""

import torch

from rwkv_batch.engine import memory
from rwkv_batch.engine.engine import READBACKS, Engine, Step
from rwkv_batch.engine.pipeline.model import PipelineGraphs, PipelineModel, PipelinePrefills
from rwkv_batch.engine.pipeline.state import PipelineState
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.request import Sequence
from rwkv_batch.scheduling.plan import Row
from sampling.base import Sampled, Sampler


class PipelineEngine(Engine):
    """As many steps may be under way as there are stages. The sampler is the last stage's."""

    def __init__(
        self,
        model: PipelineModel,
        sampler: Sampler,
        state: PipelineState,
        graphs: PipelineGraphs | None = None,
        prefills: PipelinePrefills | None = None,
    ):
        super().__init__(model, sampler, state, graphs, prefills, readbacks=READBACKS * len(model.stages))
        self.device = model.stages[-1].device  # where it samples

    def stats(self) -> dict[str, int]:
        """See `Engine.stats`; memory of all devices."""
        devices = {stage.device for stage in self.model.stages}
        held = [memory.in_use(device).get("device_memory_bytes", 0) for device in devices]
        return super().stats() | ({"device_memory_bytes": sum(held)} if self.device.type == "cuda" else {})

    def _step(self, sequences: list[Sequence], sampled: Sampled) -> Step:
        self.model.sampled([part.slot for sequence in sequences for part in (sequence, *sequence.followers)])
        return super()._step(sequences, sampled)

    def _tokens(self, rows: list[Row], packed: PackedRows) -> torch.Tensor:
        if self.device.type == "cpu" or not all(row.ids for row in rows):
            return super()._tokens(rows, packed)
        first = self.model.stages[0]
        with first.active():  # not behind what the last stage has to do
            return torch.tensor([id for row in rows for id in row.ids]).to(first.device, non_blocking=True)
