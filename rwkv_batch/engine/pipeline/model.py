"""A model in stages: the forward pass and the captured steps that go through all of them."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from rwkv_batch.engine.pipeline.hops import Hop, IdRelay
from rwkv_batch.engine.pipeline.stage import Stage
from rwkv_batch.engine.pipeline.state import PipelineState
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.weights import Weights
from sampling.base import Sampled

T = TypeVar("T")


class PipelineModel:
    """The stages in their order, in `Model`'s place. No call waits: a stage's part of a step runs when the one before is done.

    weights  of the whole model
    hops     from each stage to the next
    relay    from the last stage to the first
    """

    def __init__(self, weights: Weights, stages: Sequence[Stage], hops: Sequence[Hop], relay: IdRelay):
        self.weights = weights
        self.stages = stages
        self.relay = relay
        self.ops_name = stages[0].model.ops_name
        self._hops = hops

    def through(self, num_tokens: int, run: Callable[[Stage], T], fed_back: Sequence[int] = ()) -> T:
        """Run a step of so many tokens in each stage; return what the last one does.

        fed_back  slots that are fed what was sampled last in them
        """
        for i, stage in enumerate(self.stages):
            with stage.active():
                if i > 0:
                    self._hops[i - 1].receive(*stage.model.ops.way_in(num_tokens))
                elif fed_back:
                    self.relay.receive(fed_back)
                result = run(stage)
                if i < len(self._hops):
                    self._hops[i].send(*stage.model.ops.way_out(num_tokens))
        return result

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor | None, rows: PackedRows, state: PipelineState, *, logits_of: Tensor | None = None
    ) -> Tensor:
        """See `Model.forward`; `rows` and `logits_of` are on the last stage's device, `tokens` on the first's or the last's."""
        first = self.stages[0]

        def run(stage: Stage) -> Tensor:
            shares = stage.model.is_last or stage.stream is None  # else its arrays would be made and read on two streams
            own = rows if shares else PackedRows(rows.slots, rows.lengths, stage.device)
            # Later stages take no more of the tokens than their number.
            fed = tokens.to(first.device) if tokens is not None and stage is first else tokens
            return stage.model.forward(fed, own, stage.state, logits_of=logits_of if stage.model.is_last else None)

        return self.through(sum(rows.lengths), run, rows.slots if tokens is None else ())

    def sampled(self, slots: Sequence[int]) -> None:
        """The last stage has new ids of these slots."""
        with self.stages[-1].active():
            self.relay.send(slots)


class PipelineGraphs:
    """The captured decode steps of all stages, in `DecodeGraphs`' place."""

    def __init__(self, model: PipelineModel):
        self._model = model
        self.sizes = model.stages[0].graphs.sizes
        self.num_replays = 0

    def replay(self, slots: list[int], num_sampled: int | None = None) -> tuple[Sampled, Tensor]:
        """See `DecodeGraphs.replay`; what comes back is the last stage's."""
        self.num_replays += 1
        return self._model.through(len(slots), lambda stage: stage.graphs.replay(slots, num_sampled), slots)


class PipelinePrefills:
    """The captured prefill steps of all stages, in `PrefillGraphs`' place. Each stage fills a step up to a size of its own."""

    def __init__(self, model: PipelineModel):
        self._model = model
        self.times: dict[int, float] = {}  # what stages take one by one does not say what they take at the same time
        self.sizes = min((stage.prefills.sizes for stage in model.stages), key=len)
        self.num_replays = 0

    def fits(self, num_tokens: int, num_rows: int) -> bool:
        """See `PrefillGraphs.fits`."""
        return all(stage.prefills.fits(num_tokens, num_rows) for stage in self._model.stages)

    def replay(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], num_sampled: int) -> tuple[Sampled, Tensor]:
        """See `PrefillGraphs.replay`."""
        self.num_replays += 1
        return self._model.through(sum(map(len, prompts)), lambda stage: stage.prefills.replay(slots, prompts, num_sampled))
