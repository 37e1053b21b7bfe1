"""Rows with masks on a GPU: sampled in front of their next step they get the ids that they get behind the last one."""

import pytest
import torch
from test_gpu_engine import engine_of

from rwkv_batch.request import Request
from rwkv_batch.scheduling.scheduler import Scheduler
from sampling.masks import pack
from sampling.params import SamplingParams

pytestmark = pytest.mark.gpu


class OnlyMultiples:
    """Allows multiples of 1, 2, 3, ... in turn; each mask takes `delay` questions to be ready."""

    def __init__(self, ids: torch.Tensor, delay: int):
        self.output_ids = ids.cpu()
        self.delay, self.ids = delay, []
        self._left, self._taken = 0, False

    def ready(self) -> bool:
        self._left -= not self._taken
        return not self._taken and self._left < 0

    def take(self) -> torch.Tensor:
        assert not self._taken, "a draw before the last one was told"
        self._taken = True
        return pack(self.output_ids % (len(self.ids) + 1) == 0)

    def accept(self, id: int) -> None:
        self.ids.append(id)
        self._left, self._taken = self.delay, False


def run(engine, *, late: bool, delay: int, max_tokens: int = 40) -> dict[str, list[int]]:
    """Run plain rows and rows with masks, one step ahead of what is read."""
    scheduler = Scheduler(num_slots=64, prefill_budget=512, mixed=False, late_draws=late)
    ids: dict[str, list[int]] = {}
    before = None
    for number in range(24):
        drawn = SamplingParams(
            seed=number, ignore_eos=True, temperature=1, top_k=40, alpha_presence=0.3, logprobs=2 if number % 5 else None
        )
        prompt = [5 + number, 7, 9][: 1 + number % 3]
        (sequence,) = scheduler.add(Request(id=f"{number}", prompts=[prompt], sampling=drawn, max_tokens=max_tokens + number))
        ids[f"{number}"] = []
        sequence.mask = OnlyMultiples(engine.sampler.ids, delay) if number % 2 else None

    def read(step) -> None:
        for token in engine.collect(step):
            request = token.sequence.request
            found = ids[request.id]
            if len(found) == request.max_tokens:
                continue
            found.append(token.id)
            if token.sequence.mask is not None:
                token.sequence.mask.accept(token.id)
            if len(found) == request.max_tokens:
                scheduler.finish(token.sequence)

    for _ in range(2000):
        plan = scheduler.next_plan()
        step = engine.submit(plan) if plan else None
        if step is not None and step.early is not None:
            read(step.early)
        if before is not None:
            read(before)
        before = step
        if before is None and not scheduler.num_running:
            return ids
    raise AssertionError("rows do not come to their ends")


@pytest.mark.parametrize("delay", [0, 3])
def test_late_draws_sample_the_same_ids(delay):
    engine = engine_of("768", 64, [64])
    num_eager = engine.num_eager_decodes
    late, soon = run(engine, late=True, delay=delay), run(engine, late=False, delay=delay)
    assert late == soon
    for number in range(1, 24, 2):
        assert all(id % (place + 1) == 0 for place, id in enumerate(late[f"{number}"]))
    assert engine.num_eager_decodes == num_eager, "all of them ran as graphs"
