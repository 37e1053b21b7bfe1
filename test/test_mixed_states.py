"""Rows that mix several states: what they draw, that they keep together, and that they share the engine with others."""

import random
import re
from collections import defaultdict

import numpy as np
import pytest
import torch
from models import TINY, random_tensors, random_weights
from oracle import Oracle
from test_grammar_masks import GrammarHarness
from test_tuned_states import LAYERS, PROMPT, Tuned, tensors_of, write

from rwkv_batch.errors import InvalidRequest
from rwkv_batch.request import Grammar, Progress
from rwkv_batch.scheduling.prefix_cache import PrefixCache
from rwkv_batch.served.variants import LoadState
from rwkv_batch.session_messages import Session
from rwkv_batch.tuned.registry import TunedStates
from sampling.mixture import mix_logits
from sampling.params import SamplingParams

REPORTING = SamplingParams(temperature=0, alpha_presence=0, alpha_frequency=0, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mixed_logits_are_those_of_numpy(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(7, 33, generator=generator) * 5).to(dtype)
    logits[6] = float("nan")
    slots = torch.tensor([[0, 3, 5], [4, 4, 4], [2, 6, 1]])
    weights = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [1.5, 0.0, -0.5]])
    wanted = np.stack(
        [
            sum(weight * logits[slot].double().numpy() for slot, weight in zip(row, own, strict=True) if weight != 0)
            for row, own in zip(slots.tolist(), weights.double().tolist(), strict=True)
        ]
    )
    found = mix_logits(logits, slots, weights)
    assert found.dtype == dtype
    assert np.allclose(found.double().numpy(), wanted, rtol=1e-2 if dtype != torch.float32 else 1e-6, atol=1e-2)
    assert torch.equal(found[1], logits[4]), "a row alone keeps its logits bit for bit"


class Mixed(Tuned):
    """A worker with the mix `mix` of the states 1, 2, … and, in its end, the model's own start."""

    def __init__(self, folder, *, states=2, original=True, weights=(1.0, 1.0, 1.0), **fields):
        self.drawn = defaultdict(list)  # ids, of requests with log-probabilities
        super().__init__(folder, **fields)
        paths = [write(folder / f"{seed}.pth", tensors_of(seed)) for seed in range(1, states + 1)]
        self.tuned.load(LoadState(name="mix", files=paths, original=original, weights=list(weights)))
        for seed in range(1, states + 1):
            self.load(f"{seed}", seed)
        self.mix = self.key("mix")

    def deliver(self, batch):
        super().deliver(batch)
        for event in (event for events in batch.values() for event in events if isinstance(event, Progress)):
            for delta in event.deltas:
                self.drawn[event.request_id] += [report.id for report in delta.logprobs or ()]

    def mixed_text(self, prompt, weights, **fields):
        return self.text(prompt, state=self.mix, weights=list(weights), **fields)


def oracle_tokens(weights: list[float], count: int, seeds=(1, 2, None), alpha: float = 0.0) -> list[int]:
    """The greedy tokens of a mix in numpy; `alpha`: taken from the logit of each token that was drawn."""
    published = {key: tensor.double() for key, tensor in random_tensors(TINY, 256).items()}
    ids = random_weights(TINY, 256).output_ids.numpy()
    rows = []
    for seed in seeds:
        row = Oracle(published)
        if seed is not None:
            state = tensors_of(seed)
            row.wkv = np.stack([state[f"blocks.{i}.att.time_state"].double().numpy() for i in range(LAYERS)])
        rows.append(row)
    drawn: list[int] = []
    logits = [row.logits(PROMPT)[-1][ids] for row in rows]
    taken = np.zeros(len(ids))
    while len(drawn) < count:
        mixture = sum(weight * (z - taken) for weight, z in zip(weights, logits, strict=True)) / sum(weights)
        mixture[0] = -np.inf if ids[0] == 0 else mixture[0]  # ignore_eos
        best = int(mixture.argmax())
        taken[best] += alpha
        drawn.append(int(ids[best]))
        logits = [row.step(drawn[-1])[ids] for row in rows]
    return drawn


@pytest.mark.parametrize(
    ("weights", "alpha"), [([1.0, 1.0, 1.0], 0), ([0.3, 0.4, 0.03], 0), ([2.0, -0.5, 0.0], 0), ([0.3, 0.4, 0.03], 3.0)]
)
def test_tokens_are_those_of_an_oracle(tmp_path, weights, alpha):
    harness = Mixed(tmp_path)
    params = SamplingParams(
        temperature=0, alpha_presence=alpha, alpha_frequency=alpha, alpha_decay=1.0, ignore_eos=True, logprobs=0
    )
    harness.mixed_text(PROMPT, weights, max_tokens=24, sampling=params)
    assert harness.drawn["r0"] == oracle_tokens(weights, 24, alpha=alpha)


def test_what_a_mix_of_one_is(tmp_path):
    """One state, the same one many times, or all but one without weight: the text of that state alone."""
    harness = Mixed(tmp_path)
    plain, first, second = (
        harness.text(PROMPT),
        harness.text(PROMPT, state=harness.key("1")),
        harness.text(PROMPT, state=harness.key("2")),
    )
    assert len({plain, first, second}) == 3
    assert [harness.mixed_text(PROMPT, weights) for weights in ([1, 0, 0], [0, 0.5, 0], [0, 0, 9.0])] == [first, second, plain]
    same = [str(tmp_path / "1.pth")] * 3
    harness.tuned.load(LoadState(name="same", files=same, weights=[1.0]))
    assert harness.text(PROMPT, state=harness.key("same"), weights=[0.1, 0.7, 0.3]) == first
    harness.tuned.load(LoadState(name="one", files=same[:1], weights=[1.0]))
    assert harness.text(PROMPT, state=harness.key("one"), weights=[0.4]) == first


LONG = pytest.mark.long
COMPANY = [  # loop, whether plans are mixed, whether draws are late, budget, requests
    ("sync", True, False, 256, 5), ("continuous", False, True, 64, 5), ("sync", False, False, 5, 4),
    *(pytest.param(loop, *way, 20, marks=LONG) for loop in ("sync", "continuous")
      for way in ((True, False, 256), (False, True, 64), (True, False, 16), (False, False, 5))),
]  # fmt: skip


@pytest.mark.parametrize(("loop", "mixed", "late", "budget", "count"), COMPANY)
def test_rows_keep_together_in_company(tmp_path, loop, mixed, late, budget, count):
    """Random company in few slots: every text is what it is alone, greedy or drawn."""
    rng = random.Random(budget)
    alone = Mixed(tmp_path, slots=4)
    harness = Mixed(tmp_path, slots=8, mixed=mixed, budget=budget)
    harness.scheduler.late_draws = late
    jobs = {}
    for number in range(count):
        prompts = [[rng.randrange(1, 256) for _ in range(rng.randrange(1, 50))] for _ in range(rng.randrange(1, 4))]
        fields = {"max_tokens": rng.randrange(1, 12), "loop": loop}
        if number % 2:
            weights = [rng.random(), rng.random() - 0.2, 1.0]
            fields |= {"state": harness.mix, "weights": weights}
        if rng.random() < 0.3:
            fields["sampling"] = SamplingParams(temperature=1.0, top_p=0.8, seed=number, ignore_eos=True)
        jobs[f"j{number}"] = (prompts, fields)
    for id, (prompts, fields) in jobs.items():
        harness.submit(id, prompts, **fields)
        for _ in range(rng.randrange(4)):
            harness.worker.step()
    harness.run()
    assert harness.scheduler.num_free == 8
    assert not harness.failures
    for id, (prompts, fields) in jobs.items():
        alone.submit(id, prompts, **fields)
        alone.run()
        assert alone.texts[id] == harness.texts[id], id


def test_a_mix_starts_whole_or_waits(tmp_path):
    """It waits for all its slots, and nobody takes those that it waits for."""
    harness = Mixed(tmp_path, slots=4)
    harness.submit("long", [PROMPT] * 2, max_tokens=30)
    harness.worker.step()
    harness.submit("mix", [PROMPT], max_tokens=3, state=harness.mix, weights=[1, 1, 1])
    harness.submit("short", [PROMPT] * 2, max_tokens=3)
    for _ in range(10):
        harness.worker.step()
        assert harness.scheduler.num_free == 2
    harness.run()
    assert harness.scheduler.num_free == 4
    assert [len(harness.finishes[id]) for id in ("long", "mix", "short")] == [2, 1, 2]
    with pytest.raises(InvalidRequest):
        harness.submit("bad", [PROMPT], state=harness.mix, weights=[1, 1])
    small = Mixed(tmp_path, slots=2)
    small.submit("r", [PROMPT], state=small.mix, weights=[1, 1, 1])
    small.run()
    assert small.failures["r"].error == "InvalidRequest"


def test_cancelled_rows_give_all_their_slots_back(tmp_path):
    harness = Mixed(tmp_path, slots=8)
    for steps in range(6):
        harness.submit(f"{steps}", [PROMPT] * 4, max_tokens=50, state=harness.mix, weights=[1, 1, 1])
        for _ in range(steps):
            harness.worker.step()
        harness.worker.cancel(f"{steps}")
        harness.run()
        assert harness.scheduler.num_free == 8
    assert harness.mixed_text(PROMPT, [1, 0, 0]) == harness.text(PROMPT, state=harness.key("1"))


def test_stops_end_mixed_rows(tmp_path):
    harness = Mixed(tmp_path)
    ids = oracle_tokens([1, 1, 1], 20)
    harness.mixed_text(PROMPT, [1, 1, 1], max_tokens=20, stop_ids=[ids[7]], sampling=REPORTING)
    assert harness.drawn["r0"] == ids[: ids.index(ids[7]) + 1]
    assert harness.finishes["r0"][0].reason == "stop"


def test_prefixes_of_mixes(tmp_path):
    """A cached prefix of a mix is as many states as it mixes, whatever the weights."""
    harness = Mixed(tmp_path, budget=256)
    harness.scheduler.prefixes = PrefixCache(2**30, every_tokens=64)
    fresh = Mixed(tmp_path, budget=256)
    prompt = [1 + (i * 37) % 250 for i in range(200)]
    for number, weights in enumerate(([1, 1, 1], [0.2, 0.1, 0.9])):
        harness.submit(f"{number}", [prompt] * 2, max_tokens=4, state=harness.mix, weights=weights)
        harness.run()
        fresh.submit(f"{number}", [prompt] * 2, max_tokens=4, state=harness.mix, weights=weights)
        fresh.run()
        assert harness.texts[f"{number}"] == fresh.texts[f"{number}"]
    assert [harness.finishes[f"{number}"][0].cached_tokens for number in range(2)] == [0, 160]
    harness.submit("plain", [prompt])
    harness.run()
    assert harness.finishes["plain"][0].cached_tokens == 0


def test_what_a_mix_cannot_have(tmp_path):
    harness = Mixed(tmp_path)
    fields = {"state": harness.mix, "weights": [1, 1, 1]}
    for more in ({"session": Session(name="s")}, {"prompt_logprobs": 1}, {"weights": [1, -1, 0]}, {"weights": []}):
        with pytest.raises(InvalidRequest):
            harness.submit("r", [PROMPT], **{**fields, **more})
    with pytest.raises(InvalidRequest):
        harness.submit("r", [PROMPT], state=harness.key("1"), weights=[1])


@pytest.mark.parametrize("late", [False, True])
def test_a_mix_follows_a_grammar(tmp_path, late):
    harness = GrammarHarness(late=late)
    harness.worker.tuned = tuned = TunedStates(harness.engine.state)
    paths = [write(tmp_path / f"{seed}.pth", tensors_of(seed)) for seed in (1, 2)]
    tuned.load(LoadState(name="mix", files=paths, original=True, weights=[1.0]))
    fields = {"state": tuned.variants[0].key, "weights": [0.5, 1.0, 0.25], "max_tokens": 40}
    for number, source in enumerate(("[a-f]{5}-[0-9]{3}", "(yes|no), quite so", "cat{2}")):
        harness.submit(f"{number}", [PROMPT] * 2, grammar=Grammar("regex", source), **fields)
    harness.submit("plain", [PROMPT], grammar=Grammar("regex", "[x-z]{4}"), max_tokens=40)
    harness.run()
    for number, source in enumerate(("[a-f]{5}-[0-9]{3}", "(yes|no), quite so", "cat{2}")):
        for text in harness.texts[f"{number}"].values():
            assert re.fullmatch(source, text), text
    assert re.fullmatch("[x-z]{4}", harness.texts["plain"][0])
    assert harness.scheduler.num_free == harness.scheduler.num_slots
