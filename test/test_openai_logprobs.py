"""Log-probabilities of sampled tokens and of prompts, against the float64 oracle, through the worker."""

import random

import numpy as np
import pytest
import torch
from models import TINY, random_tensors, random_weights
from msgspec.structs import replace
from oracle import Oracle
from test_worker import GREEDY, Harness

from rwkv_batch.engine import logprobs
from rwkv_batch.request import Progress, Request, Sequence, TokenLogprob
from rwkv_batch.scheduling import plan
from rwkv_batch.scheduling.plan import PrefillQueue

TOLERANCE = 1e-4
PROMPT = random.Random(0).choices(range(1, 256), k=83)


def oracle_logprobs(tokens: list[int]) -> np.ndarray:
    """[T, 256]: log-softmax of the logits after each token, float64; ids that cannot be sampled have -inf."""
    tensors = {name: tensor.float().numpy() for name, tensor in random_tensors(TINY, 256).items()}
    logits = np.full((len(tokens), 256), -np.inf)
    known = random_weights(TINY, 256).output_ids
    logits[:, known] = Oracle(tensors).logits(tokens)[:, known]
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


class Scored(Harness):
    """A harness that keeps the log-probabilities too."""

    def __init__(self, **fields):
        super().__init__(**fields)
        self.scores: dict[int, list[TokenLogprob]] = {}
        self.pieces: dict[int, list[int]] = {}  # tokens of each event with scores
        self.sampled: dict[int, list[TokenLogprob]] = {}

    def deliver(self, batch):
        for events in batch.values():
            for event in events:
                for score in event.scores if isinstance(event, Progress) else ():
                    assert score.index not in self.sampled, "the prompt comes first"
                    self.scores.setdefault(score.index, []).extend(score.tokens)
                    self.pieces.setdefault(score.index, []).append(len(score.tokens))
                for delta in event.deltas if isinstance(event, Progress) else ():
                    self.sampled.setdefault(delta.index, []).extend(delta.logprobs or [])
        super().deliver(batch)


def scored(prompts: list[list[int]], *, max_tokens: int = 3, **fields) -> Scored:
    """Score prompts and go on."""
    top, harness = 2, Scored(**fields)
    params = replace(GREEDY, logprobs=top)
    harness.worker.submit(
        Request(id="r", prompts=prompts, sampling=params, max_tokens=max_tokens, prompt_logprobs=top, cache=False), b"test"
    )
    for _ in range(2000):
        harness.worker.step()
        if len(harness.finishes["r"]) == len(prompts):
            return harness
    raise AssertionError("it does not end")


@pytest.mark.parametrize("budget", [16, 256])
def test_prompt_and_sampled_tokens_equal_the_oracle(budget):
    harness = scored([PROMPT, PROMPT[:1], PROMPT[:40]], budget=budget)
    for index, prompt in enumerate([PROMPT, PROMPT[:1], PROMPT[:40]]):
        sampled = [token.id for token in harness.sampled[index]]
        assert len(sampled) == 3
        right = oracle_logprobs([*prompt, *sampled])
        tokens = [*harness.scores[index], *harness.sampled[index]]
        assert [token.id for token in tokens] == [*prompt, *sampled][1:]
        for place, token in enumerate(tokens):
            row = right[place].copy()
            if place >= len(prompt) - 1:  # of sampled tokens the end token is masked, for these rows ignore it
                row[0] = -np.inf
                row -= np.log(np.exp(row).sum())
            assert abs(token.logprob - row[token.id]) < TOLERANCE
            best = np.argsort(-row)[:2]
            assert [logprob for _, logprob in token.top] == pytest.approx(row[best].tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_a_prompt_is_wholly_scored_once(max_tokens):
    """Also when its last piece is one token long, which scores nothing more; one of one token has one empty score."""
    lengths = [1, 2, 16, 17, 18, 33, 49]
    harness = scored([PROMPT[:length] for length in lengths], max_tokens=max_tokens, budget=16)
    for index, length in enumerate(lengths):
        pieces = harness.pieces[index]
        assert sum(pieces) == length - 1
        assert all(pieces) or length == 1
        assert len(harness.finishes["r"]) == len(lengths)


def test_the_sum_over_a_text_equals_the_sum_over_any_split():
    total = sum(token.logprob for token in scored([PROMPT], max_tokens=0).scores[0])
    for cut in (1, 2, 16, 31, 32, 33, 64, 82):
        first, whole = scored([PROMPT[:cut], PROMPT], max_tokens=0, budget=32).scores.values()
        assert [token.id for token in whole] == PROMPT[1:]
        parts = sum(token.logprob for token in first) + sum(token.logprob for token in whole[cut - 1 :])
        assert parts == pytest.approx(total, abs=TOLERANCE)


def test_rows_without_max_tokens_only_score():
    harness = scored([PROMPT, PROMPT[:1]], max_tokens=0)
    assert [harness.finishes["r"][index].completion_tokens for index in (0, 1)] == [0, 0]
    assert [len(harness.scores[index]) for index in (0, 1)] == [len(PROMPT) - 1, 0]
    assert harness.worker.scheduler.num_free == harness.worker.scheduler.num_slots


def test_rows_that_do_not_ask_get_none():
    harness = Scored()
    for name, logprobs_wanted in (("a", None), ("b", 1)):
        params = replace(GREEDY, logprobs=logprobs_wanted)
        harness.worker.submit(Request(id=name, prompts=[PROMPT[:5]], sampling=params, max_tokens=4), b"test")
    seen = {"a": [], "b": []}
    deliver = harness.deliver

    def note(batch):
        for event in batch[b"test"]:
            seen[event.request_id] += [delta.logprobs for delta in event.deltas]
        deliver(batch)

    harness.worker.deliver = note
    while not (harness.finishes["a"] and harness.finishes["b"]):
        harness.worker.step()
    assert set(map(type, seen["a"])) == {type(None)}
    assert sum(len(tokens) for tokens in seen["b"] if tokens) == 4


@pytest.mark.parametrize("chunk_size", [0, 1, 3])
def test_a_stop_text_hides_its_tokens(chunk_size):
    """What is reported are the tokens of which something is visible; a stop id is reported with the rest."""
    params = replace(GREEDY, logprobs=0)
    sampled = [token.id for token in scored([PROMPT[:9]], max_tokens=12).sampled[0]]
    for fields, kept in (
        ({"stop_texts": [bytes(sampled[5:8])]}, sampled[:5]),
        ({"stop_ids": [sampled[6]]}, sampled[: sampled.index(sampled[6]) + 1]),
    ):
        harness = Scored()
        request = Request(id="r", prompts=[PROMPT[:9]], sampling=params, max_tokens=12, chunk_size=chunk_size, **fields)
        harness.worker.submit(request, b"test")
        while not harness.finishes["r"]:
            harness.worker.step()
        assert harness.finishes["r"][0].reason == "stop"
        assert [token.id for token in harness.sampled[0]] == kept


def test_stops_wait_for_min_tokens():
    plain = [token.id for token in scored([PROMPT[:9]], max_tokens=8).sampled[0]]
    for min_tokens in (0, 3, 6):
        params = replace(GREEDY, min_tokens=min_tokens)
        harness = Scored()
        stops = [bytes([token]) for token in plain]
        harness.worker.submit(Request(id="r", prompts=[PROMPT[:9]], sampling=params, max_tokens=8, stop_texts=stops), b"test")
        while not harness.finishes["r"]:
            harness.worker.step()
        assert harness.finishes["r"][0].completion_tokens == min_tokens + 1


def test_scored_prompts_share_a_smaller_budget_and_hold_up_nobody(monkeypatch):
    monkeypatch.setattr(plan, "SCORED_TOKENS", 64)
    queue = PrefillQueue(256)

    def add(name: str, length: int, **fields) -> Sequence:
        sequence = Sequence(Request(id=name, prompts=[[1] * length], sampling=GREEDY, max_tokens=1, **fields), 0)
        queue.add(sequence)
        return sequence

    first, second = add("a", 300, prompt_logprobs=0), add("b", 300, prompt_logprobs=0)
    other = add("c", 150)
    rows = {row.sequence.request.id: len(row.ids) for row in queue.take()}
    assert rows["c"] == 150
    assert sum(rows.values()) - rows["c"] == 64
    for _ in range(9):
        assert sum(len(row.ids) for row in queue.take()) <= 64
    assert (first.num_prefilled, second.num_prefilled, other.num_prefilled) == (300, 300, 150)
    assert not queue


def test_targets_without_a_column_and_top_of_none():
    ids = torch.tensor([0, 3, 5])
    scores = logprobs.score(torch.tensor([[0.0, 1.0, 2.0]] * 3), ids, torch.tensor([5, 4, 9]), 0)
    assert scores.logprobs.tolist() == [pytest.approx(-0.4076, abs=1e-4), -torch.inf, -torch.inf]
    assert scores.top_ids.shape == (3, 0)
    assert logprobs.entry(4, -torch.inf, [], [], 0).logprob == logprobs.LEAST
    assert logprobs.entry(4, float("nan"), [], [], 0).logprob == logprobs.LEAST
