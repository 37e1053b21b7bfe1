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


class Scripted:
    """Allows everything, but at some places one id alone; always known."""

    def __init__(self, forced: dict[int, int], ids: torch.Tensor):
        self.forced, self.output_ids, self.place = forced, ids.cpu(), 0

    def ready(self) -> bool:
        return True

    def take(self) -> torch.Tensor:
        only = self.forced.get(self.place)
        return pack(self.output_ids == only if only is not None else self.output_ids > 0)

    def accept(self, id: int) -> None:
        self.place += 1


def test_what_a_row_must_say_is_fed_in_one_step_behind_what_it_drew():
    engine = engine_of("768", 8, [8])
    forced = {place: 100 + place for place in range(5, 17)}

    def run(feeds: bool) -> tuple[list[int], int, int]:
        scheduler = Scheduler(num_slots=8, prefill_budget=64, mixed=False, late_draws=True)
        params = SamplingParams(seed=3, ignore_eos=True, temperature=1, top_k=4, alpha_presence=0.3, repetition_penalty=1.1)
        (sequence,) = scheduler.add(Request(id="row", prompts=[[5, 7, 9]], sampling=params, max_tokens=30))
        sequence.mask = mask = Scripted(forced, engine.sampler.ids)
        found, before, num_steps = [], None, 0
        while len(found) < 30:
            plan = scheduler.next_plan()
            step = engine.submit(plan) if plan else None
            num_steps += step is not None
            for part in (step.early if step is not None else None, before):
                for token in engine.collect(part) if part is not None else ():
                    found.append(token.id)
                    mask.accept(token.id)
            before = step
            if feeds and len(found) == 5:
                scheduler.feed_forced(sequence, found[-1], list(forced.values()))
                found += forced.values()
                mask.place += len(forced)
        num_drawn = int(engine.sampler.controls.step[sequence.slot])
        scheduler.finish(sequence)
        return found[:30], num_steps, num_drawn

    (fed, few, num_fed), (drawn, many, num_drawn) = run(True), run(False)
    assert fed[:17] == drawn[:17]
    assert fed[5:17] == list(forced.values())
    assert few <= many - 10
    assert abs(num_fed - num_drawn) <= 1, "fed ids count as sampled"
