"""min_p, the repetition penalty and token masks against the literal formulas of `sampling_oracle.py`."""

import math

import numpy as np
import pytest
import sampling_oracle as oracle
import torch
from test_sampling import check_draws, masked, sample, seeded, spread, started, tied, unpenalized

from sampling.masks import pack
from sampling.params import SamplingParams
from sampling.reference import above_floor

JOINT, SEQUENTIAL = {"rule": "joint", "top_k": 0, "top_p": 1.0}, {"rule": "sequential", "top_k": 0, "top_p": 1.0}


@pytest.fixture(autouse=True)
def _inference():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(num_threads)


# --- min_p ---

MIN_P = [
    # logits, controls
    (spread(30, 1.0), {**JOINT, "min_p": 0.1}),
    (spread(40, 2.0), {**JOINT, "min_p": 0.02, "top_k": 7}),
    (spread(60, 1.0), {**JOINT, "min_p": 0.05, "top_p": 0.7, "temperature": 1.5}),
    (spread(40, 1.0), {**JOINT, "min_p": 0.3, "top_k": 20, "top_p": 0.1}),
    (tied(25), {**JOINT, "min_p": math.exp(-2), "top_k": 9}),  # the third largest value is on the border
    (masked(50), {**SEQUENTIAL, "min_p": 0.1, "top_p": 0.8, "temperature": 0.7}),
    (spread(300, 1.0), {**SEQUENTIAL, "min_p": 0.01, "top_k": 50, "top_p": 0.9}),
    (spread(20, 1.0), {**JOINT, "min_p": 1.0}),
]


@pytest.mark.parametrize("case", range(len(MIN_P)))
def test_min_p_comes_behind_temperature_and_in_front_of_the_filters(case):
    z, params = MIN_P[case]
    temperature = params.get("temperature", 1.0)
    q = oracle.softmax(oracle.above_min_p(z.numpy(), temperature, params["min_p"] * (1 - 1e-6)), temperature)
    filtered = oracle.joint_weights if params["rule"] == "joint" else oracle.sequential_weights
    weights = filtered(q, params["top_k"], params["top_p"])[0]
    check_draws(f"{case} {params}", z, params, weights / weights.sum(), 20_000, seed=2000 + case)


def test_min_p_keeps_what_the_formula_keeps():
    rng = np.random.default_rng(4)
    for _ in range(200):
        z = (rng.standard_normal(200) * rng.choice([0.0, 0.1, 1, 5])).astype(np.float32)
        z[rng.random(200) < 0.2] = -np.inf
        z[3] = 0.0
        temperature, min_p = float(rng.choice([0.05, 0.7, 1, 3])), float(rng.choice([1e-9, 0.01, 0.1, 0.9, 1]))
        sampler = started([unpenalized(min_p=min_p, temperature=temperature)], 200)
        kept = above_floor(torch.from_numpy(z)[None], sampler.controls.min_p_depth)[0].isfinite().numpy()
        q = oracle.softmax(z, temperature)
        border = np.abs(q / q.max() / min_p - 1) < 1e-5
        assert (kept == (q >= min_p * q.max()) & np.isfinite(z))[~border].all()
        assert kept[z.argmax()]


def test_rows_without_a_filter_have_no_min_p():
    """Greedy rows take the largest logit anyway; rules with noise have neither filters nor penalties."""
    params = [unpenalized(temperature=0, min_p=0.5)]
    params += [SamplingParams(rule=rule, noise=1.0, min_p=0.5, repetition_penalty=2.0) for rule in ("gumbel", "noise")]
    sampler = started(params, 10)
    assert [need.floored or need.repeated for need in sampler.needs] == [False] * 3
    assert sampler.controls.min_p_depth.tolist() == [math.inf] * 3
    assert sampler.controls.repetition.tolist() == [1.0] * 3


# --- repetition penalty ---


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
@pytest.mark.parametrize("ids", [torch.arange(30), torch.tensor([0, 3, 4, *range(40, 67)])])
def test_the_repetition_penalty_acts_on_prompt_and_answer(penalty, ids):
    """Greedy rows, which show every logit; ids of the prompt without a column change nothing."""
    prompts = [[3, 40, 65529, 3], [], [66, 29, 0]]
    z = spread(3 * len(ids), 2.0).view(3, -1)
    sampler = started([unpenalized(temperature=0)] * 3, ids)
    sampler.start_many([2, 0, 1], [unpenalized(temperature=0, repetition_penalty=penalty)] * 3, [0] * 3, prompts)
    slots = [2, 0, 1]
    seen = [{column for column, id in enumerate(ids.tolist()) if id in prompt} for prompt in prompts]
    for _ in range(20):
        drawn = sample(sampler, z, slots).ids
        for row in range(3):
            expected = oracle.repetition_penalized(z[row].numpy(), seen[row], penalty)
            column = (ids == drawn[row]).nonzero().item()
            assert expected[column] == pytest.approx(expected.max(), rel=1e-6)
            seen[row].add(column)


def test_the_repetition_penalty_comes_before_the_others():
    params = SamplingParams(
        temperature=0, repetition_penalty=1.5, alpha_presence=0.7, alpha_frequency=0.2, alpha_decay=0.9, logit_bias=((4, -6.0),)
    )
    z = spread(12, 3.0)
    sampler, penalties, seen = started([params], 12), np.zeros(12), {2}
    sampler.start_many([0], [params], [0], [[2]])
    biased = z.double().numpy().copy()
    biased[4] -= 6
    for _ in range(30):
        expected = oracle.repetition_penalized(biased, seen, 1.5) - penalties
        drawn = sample(sampler, z[None]).ids.item()
        assert expected[drawn] == pytest.approx(expected.max(), abs=1e-5)
        penalties = oracle.next_penalties(penalties, drawn, 0.7, 0.2, 0.9)
        seen.add(drawn)


def test_a_new_sequence_has_seen_its_own_prompt_only():
    params = [unpenalized(temperature=0, repetition_penalty=2.0)] * 2
    sampler = started(params, 40)
    sampler.start_many([0, 1], params, [0, 0], [[1, 2], [33, 39]])
    sample(sampler, torch.zeros(2, 40))
    assert sampler.controls.seen.tolist() == [[0b111, 0], [1, 0b10000010]]
    sampler.start_many([0], params[:1], [0], [[31]])
    assert sampler.controls.seen.tolist() == [[-(1 << 31), 0], [1, 0b10000010]]
    sampler.start_many([0, 1], params, [0, 0])
    assert not sampler.controls.seen.any()


def test_neutral_values_change_nothing():
    neutral = SamplingParams(min_p=0.0, repetition_penalty=1.0, seed=5)
    plain, other = started([SamplingParams(seed=5)], 500), started([neutral], 500)
    assert plain.needs == other.needs
    for _ in range(5):
        assert torch.equal(sample(plain, spread(500, 2.0)[None]).ids, sample(other, spread(500, 2.0)[None]).ids)


# --- masks ---

MASKED = [
    SamplingParams(temperature=0),
    SamplingParams(),
    unpenalized(top_k=0, top_p=1.0),
    unpenalized(top_k=0, top_p=0.9, min_p=0.01),
    SamplingParams(rule="sequential", top_k=20, top_p=0.9, repetition_penalty=1.5),
    SamplingParams(rule="gumbel"),
    SamplingParams(rule="noise", noise=2.0),
    unpenalized(top_k=5, ignore_eos=True, logit_bias=((7, 4.0),)),
]


def test_a_masked_row_samples_as_if_other_logits_were_minus_infinity():
    """And a row beside it as it does alone; masks change from step to step."""
    num_rows, num_columns = 2 * len(MASKED), 1003
    params = [seeded(p, 30 + i) for i, p in enumerate(MASKED * 2)]
    generator = torch.Generator().manual_seed(6)
    under_masks, spoilt = started(params, num_columns), started(params, num_columns)
    for step in range(8):
        logits = torch.randn(num_rows, num_columns, generator=generator) * 2
        flags = torch.rand(num_rows, num_columns, generator=generator) < 0.1
        flags[step % num_rows, 1:] = False
        flags[:, 500] = True
        rows = [row for row in range(num_rows) if (row + step) % 3 == 0]
        free = [row for row in range(num_rows) if row not in rows]
        under_masks.masks.put(dict(zip(rows, pack(flags[rows]), strict=True)))
        flags[free] = True
        sampled, expected = sample(under_masks, logits), sample(spoilt, logits.masked_fill(~flags, -torch.inf))
        assert torch.equal(sampled.ids, expected.ids)
        assert flags[torch.arange(num_rows), sampled.ids].all()


def test_a_mask_that_allows_nothing_leaves_no_token():
    params = [seeded(p, 1) for p in MASKED]
    sampler = started(params, 70)
    sampler.masks.put({row: torch.zeros(3, dtype=torch.int32) for row in range(len(params))})
    sampled = sample(sampler, torch.zeros(len(params), 70))
    assert sampled.ids.tolist() == [0] * len(params)
    assert not sampled.finite.any()
    sampler.masks.put({})
    sampler.start_many(list(range(len(params))), params, [0] * len(params))
    assert sample(sampler, torch.zeros(len(params), 70)).finite.all()


def test_logprobs_know_nothing_of_masks():
    sampler = started([unpenalized(temperature=0, logprobs=2)], 5)
    sampler.masks.put({0: pack(torch.tensor([False, False, True, False, False]))})
    sampled = sample(sampler, torch.tensor([[0.0, 3.0, 1.0, 2.0, 0.0]]))
    assert sampled.ids.tolist() == [2]
    assert sampled.top_ids.tolist() == [[1, 3]]
    assert sampled.logprobs.item() == pytest.approx(oracle.log_softmax(np.array([0.0, 3, 1, 2, 0]))[2], abs=1e-6)
