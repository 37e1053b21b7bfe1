"""Rows that may sample only some tokens, beside rows that may sample all."""

import pytest
import torch
from models import TINY, random_weights

from rwkv_batch.engine import token_mask
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.token_mask import MOST_SHARE, SHRINKING, MaskPatience
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.request import Request
from rwkv_batch.scheduling.scheduler import Scheduler
from sampling.masks import pack, unpack, words_of
from sampling.params import SamplingParams
from sampling.reference import ReferenceSampler

VOCAB = 256
IDS = random_weights(TINY, VOCAB).output_ids  # by column
DRAWN = SamplingParams(seed=3, ignore_eos=True)


class OnlyMultiples:
    """Allows multiples of 1, 2, 3, ... in turn; each mask takes `delay` questions to be ready."""

    def __init__(self, delay: int):
        self.delay = delay
        self.ids: list[int] = []
        self._left, self._taken = 0, False

    def ready(self) -> bool:
        if self._taken:
            return False
        self._left -= 1
        return self._left < 0

    def take(self) -> torch.Tensor:
        assert not self._taken, "a draw before the last one was told"
        self._taken = True
        return pack(IDS % (len(self.ids) + 1) == 0)

    def accept(self, id: int) -> None:
        assert self._taken
        self.ids.append(id)
        self._left, self._taken = self.delay, False


@pytest.mark.parametrize("num_columns", [1, 31, 32, 33, 100, 4096])
def test_bits_of_words_stand_for_columns(num_columns):
    places = {0, num_columns // 2, num_columns - 1}
    assert unpack(words_of(places, num_columns), num_columns).nonzero().flatten().tolist() == sorted(places)
    flags = torch.rand(3, num_columns, generator=torch.Generator().manual_seed(num_columns)) < 0.5
    words = pack(flags)
    assert words.dtype == torch.int32
    assert words.shape == (3, -(-num_columns // 32))
    assert all(words[0].tolist()[u // 32] >> u % 32 & 1 == flags[0, u] for u in range(num_columns))
    assert torch.equal(unpack(words, num_columns), flags)


def run(masks: dict[str, OnlyMultiples | None], max_tokens: int, *, mixed: bool = True) -> tuple[dict[str, list[int]], list]:
    """Run one row for each name, one step ahead of what is read; return their ids, and which rows each step sampled."""
    weights = random_weights(TINY, VOCAB)
    engine = Engine(Model(weights), ReferenceSampler(8, weights.output_ids), State(weights.shape, 8))
    scheduler = Scheduler(num_slots=8, prefill_budget=64, mixed=mixed)
    ids, steps, before = {name: [] for name in masks}, [], None
    for name, mask in masks.items():
        request = Request(id=name, prompts=[[5, 7, len(name)]], sampling=DRAWN, max_tokens=max_tokens)
        (sequence,) = scheduler.add(request)
        sequence.mask = mask
    for _ in range(1000):
        plan = scheduler.next_plan()
        step = engine.submit(plan) if plan else None
        if before is not None:
            for token in engine.collect(before):
                name = token.sequence.request.id
                ids[name].append(token.id)
                if token.sequence.mask is not None:
                    token.sequence.mask.accept(token.id)
                if len(ids[name]) == max_tokens:
                    scheduler.finish(token.sequence)
            steps.append([sequence.request.id for sequence in before.sequences])
        before = step
        if before is None and all(len(found) == max_tokens for found in ids.values()):
            return ids, steps
    raise AssertionError("rows do not come to their end")


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("delay", [0, 3])
def test_a_masked_row_samples_what_it_may_and_holds_up_nobody(delay, mixed):
    mask = OnlyMultiples(delay)
    ids, steps = run({"free": None, "masked": mask, "other": None}, 12, mixed=mixed)
    assert ids["masked"] == mask.ids
    assert len(mask.ids) == 12
    assert all(id % (number + 1) == 0 for number, id in enumerate(mask.ids))
    plain = [step for step in steps if "free" in step]
    assert plain == steps[: len(plain)], "the others were in every step until their ends"
    assert all("other" in step for step in plain)
    assert sum("masked" in step for step in plain) <= -(-len(plain) // 2)
    alone, _ = run({"free": None, "other": None}, 12, mixed=mixed)
    assert {name: ids[name] for name in alone} == alone


def test_a_mask_that_allows_everything_changes_nothing():
    class Everything(OnlyMultiples):
        def take(self) -> torch.Tensor:
            super().take()
            return pack(torch.ones(len(IDS), dtype=torch.bool))

    assert run({"row": Everything(0)}, 20)[0] == run({"row": None}, 20)[0]


def test_a_row_that_may_sample_nothing_ends_alone():
    class Nothing(OnlyMultiples):
        def take(self) -> torch.Tensor:
            super().take()
            return pack(torch.zeros(len(IDS), dtype=torch.bool))

    ids, _ = run({"free": None, "masked": Nothing(0)}, 3)
    assert ids["masked"] == [None] * 3
    assert None not in ids["free"]


def test_waiting_for_masks_ends_before_the_device_has_nothing_to_do(monkeypatch):
    now = 100.0
    monkeypatch.setattr(token_mask.time, "monotonic", lambda: now)
    patience = MaskPatience()
    for _ in range(100):
        now += 0.01
        patience.note_step(is_typical=True)
    now += 0.001
    patience.note_step(is_typical=False)  # a short one of another kind
    assert patience.deadline() - now == pytest.approx(MOST_SHARE * 0.01, rel=1e-3)
    for _ in range(3):
        patience.judge(was_long=True)
    assert patience.deadline() - now == pytest.approx(MOST_SHARE * 0.01 * SHRINKING**3, rel=1e-3)
    for _ in range(100):
        patience.judge(was_long=False)
    assert patience.deadline() - now == pytest.approx(MOST_SHARE * 0.01, rel=1e-3)
