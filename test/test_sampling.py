"""The samplers against the literal formulas of `sampling_oracle.py`, against chance, and against themselves in company."""

import math
import random

import msgspec
import numpy as np
import pytest
import sampling_oracle as oracle
import torch

from sampling import flashinfer
from sampling.base import NEVER, Controls, Sampled
from sampling.factory import make_sampler
from sampling.params import SamplingParams
from sampling.philox import philox, uniform
from sampling.reference import (
    ReferenceSampler,
    best_columns,
    draw_plain,
    joint_cut,
    report_logprobs,
    sequential_cut,
)

BORDER = 1e-5  # columns whose q is this close to the boundary, relatively, may fall on either side; float32 softmax, CPU
MASS = 5e-6  # as may columns at which the mass is this close to top_p
WEIGHT = 1e-5  # bound on the summed difference of normalised weights; worst seen 3e-6: torch's CPU softmax has an exp of 20 ulp
CUTS = {"joint": joint_cut, "sequential": sequential_cut}


@pytest.fixture(autouse=True)
def _inference():
    """One thread: the ops are small, and on a busy machine threads wait for each other longer than they work."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(num_threads)


def started(params: list[SamplingParams], ids: torch.Tensor | int, choices: list[int] | None = None) -> ReferenceSampler:
    """Return a sampler whose slot i has the controls params[i]."""
    sampler = ReferenceSampler(len(params), torch.arange(ids) if isinstance(ids, int) else ids)
    sampler.start_many(list(range(len(params))), params, choices or [0] * len(params))
    return sampler


def sample(sampler: ReferenceSampler, logits: torch.Tensor, slots: list[int] | None = None) -> Sampled:
    slots = list(range(len(logits))) if slots is None else slots
    return sampler.sample(logits, torch.tensor(slots), slots)


def unpenalized(**controls) -> SamplingParams:
    return SamplingParams(alpha_presence=0, alpha_frequency=0, **controls)


# --- Philox ---


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    """The vectors that Random123 publishes."""
    assert philox(torch.tensor(counter)[:, None], torch.tensor(key)[:, None])[:, 0].tolist() == list(words)
    assert oracle.philox(counter, key) == words


def test_philox_in_bulk_equals_python_integers():
    generator = torch.Generator().manual_seed(1)
    counter = torch.randint(0, 2**32, (4, 50), generator=generator)
    key = torch.randint(0, 2**32, (2, 50), generator=generator)
    words = philox(counter, key)
    for i in range(50):
        assert tuple(words[:, i].tolist()) == oracle.philox(tuple(counter[:, i].tolist()), tuple(key[:, i].tolist()))


def test_uniform_is_exact_and_open():
    words = torch.tensor([0, 511, 512, 2**31, 2**32 - 1])
    assert uniform(words).tolist() == [2.0**-24, 2.0**-24, 3 * 2.0**-24, 0.5 + 2.0**-24, 1 - 2.0**-24]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, 2**64 + 5, 0x123456789ABCDEF])
def test_numbers_follow_the_documented_layout(seed):
    """Draws over several refills, further draws after rejected ones, and column noise with gaps in the ids."""
    ids = torch.tensor([0, 3, 4, 7, 100, 65529])
    sampler = started([unpenalized(rule="gumbel", seed=seed)] * 3, ids, choices=[0, 5, 2**32 + 1])
    slots = torch.tensor([2, 0, 1])
    for step in range(70):
        first = sampler._draw_numbers(slots, [2, 0, 1])
        later = sampler._candidate_numbers(slots, sampler.controls.step[slots], 40)
        assert first[:, 0, 0].tolist() == [oracle.number(seed, step, choice) for choice in (2**32 + 1, 0, 5)]
        for numbers, num_rejected in ((first, 0), (later, 40)):
            assert numbers[1].tolist() == [
                [oracle.number(seed, step, 0, None, num_rejected + i, word) for word in (0, 1)] for i in range(numbers.shape[1])
            ]
        noise = sampler._column_numbers(torch.full_like(ids, 1), ids)
        assert noise.tolist() == [oracle.number(seed, step, 5, token) for token in ids.tolist()]
        sampler.controls.advance(slots, [2, 0, 1])


def test_without_a_seed_every_row_is_fresh():
    sampler = started([unpenalized(top_k=0, top_p=1)] * 64, 8)
    assert len(set(sampler.controls.seed.tolist())) == 64


# --- kept sets, boundary, weights ---


def random_row(rng: np.random.Generator, num_columns: int) -> np.ndarray:
    """Return logits [V] fp32 of one of many characters: flat, peaked, tied, with masked columns."""
    z = rng.standard_normal(num_columns) * rng.choice([0.0, 0.01, 1.0, 3.0, 30.0])
    character = rng.integers(6)
    if character == 0:
        z = np.round(z)  # many ties
    elif character == 1:
        z = np.round(z * 4) / 4
    elif character == 2:
        z[rng.integers(num_columns)] += 20
    z = z.astype(np.float16 if rng.random() < 0.5 else np.float32).astype(np.float32)
    if rng.random() < 0.4:
        masked = rng.random(num_columns) < rng.choice([0.1, 0.9])
        masked[rng.integers(num_columns)] = False
        z[masked] = -np.inf
    return z


def random_controls(rng: np.random.Generator, num_columns: int) -> tuple[int, float, float]:
    """Return top_k, top_p and temperature, edges included."""
    top_k = int(rng.choice([0, -1, 2, 3, 50, 63, 64, 65, 500, num_columns - 1, num_columns, num_columns + 1]))
    top_p = float(rng.choice([0.001, 0.3, 0.6, 0.9, 0.99, 0.9999, 1.0, -1.0, 2.0, rng.random()]))
    return (2 if top_k == 1 else top_k), top_p, float(rng.choice([0.05, 0.7, 1.0, 1.0, 2.0, 30.0]))


def filter_weights(rule: str, q: torch.Tensor, top_k: int, top_p: float) -> tuple[np.ndarray, list[int]]:
    """Return the weights [V] float64 that the sampler's cut means, and the sizes at which it had found the boundary."""
    num_columns = q.shape[1]
    controls = Controls(1, torch.arange(num_columns), "cpu")
    controls.start(0, unpenalized(rule=rule, top_k=top_k, top_p=top_p), 0)
    if controls.needs[0].method == "plain":
        return q[0].double().numpy(), []
    results = {}
    for size in (64, 512, 4096, num_columns):
        values = q.topk(min(size, num_columns))[0]
        theta, edge, _, found = CUTS[rule](values, controls.top_k.long()[:, None], controls.top_p[:, None], num_columns)
        if found or size >= num_columns:
            results[size] = (theta.item(), edge.item())
    assert len(set(results.values())) == 1, "the boundary depends on how many columns were looked at"
    theta, edge = results[num_columns]
    row = q[0].double().numpy()
    return np.where(row > theta, row, np.where(row == theta, edge, 0.0)), list(results)


def near(q: np.ndarray, value: float) -> np.ndarray:
    return np.abs(q - value) <= BORDER * value


def near_mass(q: np.ndarray, top_p: float) -> np.ndarray:
    """Return where the mass of the columns down to this one, with or without it, is too close to top_p to call."""
    order = np.argsort(-q, kind="stable")
    mass = q[order].cumsum() / q.sum()
    close = np.zeros(len(q), bool)
    p = min(top_p, 1.0) if top_p > 0 else 1.0
    close[order] = (np.abs(mass - p) <= MASS) | (np.abs(np.concatenate(([0.0], mass[:-1])) - p) <= MASS)
    return close


def check_filter(rule: str, seed: int, num_columns: int) -> None:
    rng = np.random.default_rng([seed, num_columns])
    z = random_row(rng, num_columns)
    top_k, top_p, temperature = random_controls(rng, num_columns)
    q = (torch.from_numpy(z)[None] / torch.tensor(temperature, dtype=torch.float32)).softmax(-1)
    weights, _ = filter_weights(rule, q, top_k, top_p)
    exact = oracle.softmax(z, float(np.float32(temperature)))
    # float32 may see ties where float64 does not, so the formula gets the ties of float32 and the values of float64
    tied = {value: exact[q[0].numpy() == value].mean() for value in np.unique(q[0].numpy())}
    exact = np.array([tied[value] for value in q[0].numpy()])
    if rule == "joint":
        expected, theta = oracle.joint_weights(exact, top_k, top_p)
        border = near(exact, theta) | near_mass(exact, top_p)
    else:
        expected, kth, theta = oracle.sequential_weights(exact, top_k, top_p)
        border = near(exact, kth) | near(exact, theta) | near_mass(np.where(exact >= kth, exact, 0.0), top_p)
    case = f"{rule} V={num_columns} k={top_k} p={top_p} T={temperature} seed={seed}"
    strange = ((weights > 0) != (expected > 0)) & ~border & (exact > 1e-37)  # below that float32 may hold 0
    assert not strange.any(), case
    assert weights.sum() > 0, case
    if rule == "sequential" and ((weights > 0) != (expected > 0)).any():
        return  # this rule keeps an exempt column whole or not at all
    bound = WEIGHT + 2 * MASS / expected.sum()  # in a flat row an error of the mass moves the weight of the boundary
    assert np.abs(weights / weights.sum() - expected / expected.sum()).sum() <= bound, case


@pytest.mark.parametrize("rule", ["joint", "sequential"])
def test_filters_against_the_formula(rule):
    """Contract 9, lines 14 and 17."""
    for seed in range(100):
        check_filter(rule, seed, int(np.random.default_rng(seed).choice([2, 3, 5, 17, 63, 64, 65, 300, 1000, 4097])))
    check_filter(rule, 0, 65_536)


@pytest.mark.long
@pytest.mark.parametrize("rule", ["joint", "sequential"])
def test_filters_against_the_formula_long(rule):
    for seed in range(1000, 3000):
        check_filter(rule, seed, int(np.random.default_rng(seed).choice([2, 3, 5, 17, 63, 64, 65, 300, 1000, 4097, 8192])))
    for seed in range(100):
        check_filter(rule, seed, 65_536)


def test_underflowed_columns_are_never_drawn():
    """top_k above the number of columns that hold any probability: the boundary is 0."""
    z = torch.full((1, 100), -torch.inf)
    z[0, 40], z[0, 60] = 0.0, -200.0  # exp(-200) is 0 in float32
    for rule in ("joint", "sequential"):
        sampler = started([unpenalized(rule=rule, top_k=50, top_p=1.0, seed=1)], 100)
        assert {sample(sampler, z).ids.item() for _ in range(50)} == {40}


def test_rounding_at_the_borders_of_parts_draws_no_masked_column():
    """Each part begins with a column that cannot be drawn; numbers around all borders between parts are tried."""
    z = torch.randn(1, 65_536, generator=torch.Generator().manual_seed(0)).half().float()
    z[:, ::256] = -torch.inf
    q = z.softmax(-1)
    sums = q.view(-1, 256).sum(-1).cumsum(-1)
    borders = sums / sums[-1]
    for steps in range(-5, 6):
        for u in (borders + steps * 2.0**-24)[:-1].clamp(2.0**-24, 1 - 2.0**-24).split(64):
            drawn = draw_plain(q.expand(len(u), -1), u[:, None])
            assert bool((q[0, drawn] > 0).all())


# --- the distribution ---


def check_draws(name: str, z: torch.Tensor, params: dict, expected: np.ndarray, num_draws: int, seed: int) -> None:
    """Chi-square of `num_draws` draws over rows with seeds of their own and over steps, at alpha = 1e-4."""
    num_rows = 2048
    sampler = started([unpenalized(seed=seed * num_rows + row, **params) for row in range(num_rows)], len(z))
    logits, slots, slot_list = z.expand(num_rows, -1), torch.arange(num_rows), list(range(num_rows))
    counts = torch.zeros(len(z), dtype=torch.int64)
    for _ in range(-(-num_draws // num_rows)):
        counts += torch.bincount(sampler.sample(logits, slots, slot_list).ids, minlength=len(z))
    observed, total = counts.numpy(), counts.sum().item()
    assert observed[expected == 0].sum() == 0, name
    often = expected * total >= 10
    observed = np.append(observed[often], observed[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum()) * total
    used = wanted >= 1
    statistic = float(((observed[used] - wanted[used]) ** 2 / wanted[used]).sum())
    freedom = int(used.sum()) - 1
    if freedom > 0:
        p_value = torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()).item()
        assert p_value > 1e-4, f"{name}: chi-square {statistic:.1f} with {freedom} degrees of freedom, p = {p_value:.2g}"


def tied(num_columns: int) -> torch.Tensor:
    return (torch.arange(num_columns) % 5).float()


def spread(num_columns: int, scale: float) -> torch.Tensor:
    return torch.randn(num_columns, generator=torch.Generator().manual_seed(num_columns)) * scale


def masked(num_columns: int) -> torch.Tensor:
    z = spread(num_columns, 1.0)
    z[::3] = -torch.inf
    return z


DRAWS = [
    # logits, controls
    (spread(12, 1.0), {"rule": "joint", "top_k": 5, "top_p": 0.8}),
    (spread(40, 2.0), {"rule": "gumbel", "temperature": 1.0}),
    (spread(30, 1.0), {"rule": "sequential", "top_k": 10, "top_p": 0.7}),
    (spread(12, 1.0), {"rule": "noise", "noise": 1.5}),
    (tied(25), {"rule": "joint", "top_k": 7, "top_p": 0.9}),
    (masked(50), {"rule": "joint", "top_k": 0, "top_p": 1.0, "temperature": 0.7}),
    (tied(25), {"rule": "sequential", "top_k": 7, "top_p": 1.0}),
    (masked(30), {"rule": "noise", "noise": 3.0, "temperature": 0.8}),
    (spread(300, 1.0), {"rule": "joint", "top_k": 200, "top_p": 0.95}),
    (spread(40, 0.0), {"rule": "gumbel", "temperature": 2.0}),
    (spread(7, 0.0), {"rule": "joint", "top_k": 3, "top_p": 0.9}),
    (spread(300, 0.5), {"rule": "joint", "top_k": 0, "top_p": 0.6}),
    (spread(300, 3.0), {"rule": "joint", "top_k": 50, "top_p": 1.0, "temperature": 1.7}),
    (spread(2, 1.0), {"rule": "joint", "top_k": 2, "top_p": 0.999}),
    (spread(300, 1.0), {"rule": "sequential", "top_k": 0, "top_p": 0.6}),
    (spread(300, 2.0), {"rule": "sequential", "top_k": 100, "top_p": 0.9, "temperature": 1.3}),
    (spread(20, 5.0), {"rule": "gumbel", "temperature": 0.6}),
    (masked(60), {"rule": "gumbel", "temperature": 1.5}),
    (spread(5, 0.3), {"rule": "noise", "noise": 0.5}),
    (tied(20), {"rule": "noise", "noise": 2.0}),
]


def distribution(z: torch.Tensor, params: dict) -> np.ndarray:
    row, temperature = z.numpy(), params.get("temperature", 1.0)
    if params["rule"] == "gumbel":
        return oracle.gumbel_probabilities(row, temperature)
    if params["rule"] == "noise":
        return oracle.noise_probabilities(row, temperature, params["noise"])
    q = oracle.softmax(row, temperature)
    filtered = oracle.joint_weights if params["rule"] == "joint" else oracle.sequential_weights
    weights = filtered(q, params["top_k"], params["top_p"])[0]
    return weights / weights.sum()


@pytest.mark.parametrize("case", range(8))
def test_draws_follow_the_distribution(case):
    z, params = DRAWS[case]
    check_draws(f"{case} {params}", z, params, distribution(z, params), 20_000, seed=case)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", range(len(DRAWS)))
def test_draws_follow_the_distribution_long(case):
    z, params = DRAWS[case]
    check_draws(f"{case} {params}", z, params, distribution(z, params), 200_000, seed=1000 + case)


# --- draws that are rejected ---

PEAK = torch.where(torch.arange(300) == 123, 6.0, spread(300, 0.5))  # 0.55 of the mass; of the rest every column counts
REJECTED = [  # logits, controls: top_p alone, from 0.25 on
    (tied(25), {"top_p": 0.6}),
    (torch.zeros(40), {"top_p": 0.3}),
    (PEAK, {"top_p": 0.5}),
    (PEAK, {"top_p": 0.7, "temperature": 1.1}),
    (masked(60), {"top_p": 0.25}),
    (spread(300, 1.0), {"top_p": 0.999}),
    (spread(300, 2.0).round(), {"top_p": 0.9, "ignore_eos": True, "logit_bias": ((7, 2.0), (250, 30.0), (9, -100.0))}),
]


def rejected_row(z: torch.Tensor, params: dict) -> np.ndarray:
    """Return q [V] float64 of logits after the masked end token and the bias."""
    row = z.double().numpy().copy()
    if params.get("ignore_eos"):
        row[0] = -np.inf
    for token, bias in params.get("logit_bias", ()):
        row[token] += bias
    return oracle.softmax(row, params.get("temperature", 1.0))


def test_only_a_large_top_p_alone_rejects_draws():
    below = math.nextafter(0.25, 0)
    cases = [
        ({"top_k": 0, "top_p": 0.25}, "rejection"),
        ({"top_k": 300, "top_p": 0.999}, "rejection"),
        ({"top_k": 0, "top_p": below}, "joint"),
        ({"top_k": 299, "top_p": 0.6}, "joint"),
        ({"top_k": 0, "top_p": 0.6, "rule": "sequential"}, "sequential"),
        ({"top_k": 0, "top_p": 1.0}, "plain"),
    ]
    sampler = started([unpenalized(**controls) for controls, _ in cases], 300)
    assert [need.method for need in sampler.controls.needs] == [method for _, method in cases]


@pytest.mark.parametrize("case", range(len(REJECTED)))
def test_rejection_gives_the_weights_of_the_joint_rule(case):
    z, params = REJECTED[case]
    weights, _ = oracle.joint_weights(rejected_row(z, params), 0, params["top_p"])
    check_draws(f"{case} {params}", z, {"top_k": 0, **params}, weights / weights.sum(), 12_000, seed=500 + case)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", range(len(REJECTED)))
def test_rejection_gives_the_weights_of_the_joint_rule_long(case):
    z, params = REJECTED[case]
    weights, _ = oracle.joint_weights(rejected_row(z, params), 0, params["top_p"])
    check_draws(f"{case} {params}", z, {"top_k": 0, **params}, weights / weights.sum(), 400_000, seed=1500 + case)


@pytest.mark.parametrize("case", range(len(REJECTED)))
def test_rejection_draws_with_the_documented_numbers(case):
    """Token for token, over steps and choices."""
    z, params = REJECTED[case]
    q = rejected_row(z, params)
    seeds, choices = [3 + 1000 * row for row in range(12)], [row % 3 for row in range(12)]
    sampler = started([unpenalized(seed=seed, top_k=0, **params) for seed in seeds], len(z), choices)
    for step in range(3):
        ids = sample(sampler, z.expand(12, -1)).ids.tolist()
        for id, seed, choice in zip(ids, seeds, choices, strict=True):
            expected, margin = oracle.draw_by_rejection(q, params["top_p"], seed, step, choice)
            assert id == expected or margin < 1e-6, (step, seed, margin)


def test_rejection_with_penalties():
    """Each draw moves the next one's distribution."""
    params = SamplingParams(top_k=0, top_p=0.6, seed=11, alpha_presence=1.0, alpha_frequency=0.3, alpha_decay=0.9)
    sampler = started([params], 50)
    z, penalties = spread(50, 2.0), np.zeros(50)
    for step in range(30):
        q = oracle.softmax(z.double().numpy() - penalties, 1.0)
        drawn = sample(sampler, z[None]).ids.item()
        expected, margin = oracle.draw_by_rejection(q, 0.6, 11, step, 0)
        assert drawn == expected or margin < 1e-5, (step, margin)
        penalties = oracle.next_penalties(penalties, drawn, 1.0, 0.3, 0.9)


# --- penalties ---


@pytest.mark.parametrize(
    ("presence", "frequency", "decay"),
    [(2.0, 0.2, 0.996), (0.0, 0.5, 0.9), (1.0, 0.0, 1.0), (-0.5, -0.1, 0.99), (0.7, 0.3, 0.0)],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_follow_the_recurrence(presence, frequency, decay, temperature):
    """Contract 9, line 14."""
    controls = {"alpha_presence": presence, "alpha_frequency": frequency, "alpha_decay": decay, "temperature": temperature}
    sampler = started([SamplingParams(seed=3, **controls)], 20)
    z = spread(20, 1.0)[None]
    expected = np.zeros(20)
    for _ in range(60):
        before = sampler.controls.penalties[0].clone()
        drawn = sample(sampler, z).ids.item()
        if temperature == 0:
            assert drawn == (z[0] - before).argmax().item()
        expected = oracle.next_penalties(expected, drawn, presence, frequency, decay)
        np.testing.assert_allclose(sampler.controls.penalties[0].numpy(), expected, rtol=2e-5, atol=1e-6)


def test_a_new_sequence_starts_without_penalties():
    sampler = started([SamplingParams(seed=1)] * 2, 10)
    for _ in range(5):
        sample(sampler, torch.zeros(2, 10))
    kept = sampler.controls.penalties[1].clone()
    sampler.controls.start(0, SamplingParams(seed=2), 0)
    assert not sampler.controls.penalties[0].any()
    assert torch.equal(sampler.controls.penalties[1], kept)
    assert sampler.controls.step.tolist() == [0, 5]
    assert sampler.controls.host_step == [0, 5]


def test_penalties_cost_nothing_until_a_row_has_them():
    sampler = started([unpenalized(), SamplingParams(rule="gumbel"), SamplingParams(rule="noise", noise=1.0)], 10)
    sample(sampler, torch.zeros(3, 10))
    assert sampler.controls.penalties is None
    assert sampler.controls.seen is None


# --- a row alone and in company ---

MIXED = [
    SamplingParams(temperature=0),
    unpenalized(temperature=0),
    SamplingParams(),
    unpenalized(),
    unpenalized(top_k=0, top_p=0.95),
    SamplingParams(top_k=0, top_p=0.3, temperature=3.0),
    unpenalized(top_k=0, top_p=1.0),
    SamplingParams(rule="sequential", top_k=20, top_p=0.9),
    unpenalized(rule="sequential", top_k=0, top_p=0.9, temperature=2.0),
    SamplingParams(rule="gumbel"),
    SamplingParams(rule="noise", noise=1.5),
    SamplingParams(top_k=700, top_p=1.0, temperature=5.0, logit_bias=((5, 3.0), (9, -100.0))),
    SamplingParams(ignore_eos=True, logprobs=3),
    unpenalized(min_tokens=2, top_k=1),
    SamplingParams(min_p=0.1, repetition_penalty=1.3),
    unpenalized(top_k=0, top_p=1.0, min_p=0.05),
    unpenalized(top_k=0, top_p=0.8, temperature=2.0, min_p=0.02, repetition_penalty=0.8),
    unpenalized(temperature=0, repetition_penalty=2.0),
    SamplingParams(rule="sequential", top_k=30, top_p=0.9, min_p=0.2, repetition_penalty=0.7),
]


def seeded(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(**{**{f: getattr(params, f) for f in params.__struct_fields__}, "seed": seed})


def test_a_row_in_company_equals_the_row_alone():
    """Mixed rules, changing neighbours, order and batch size: ids, penalties and log-probabilities agree bit for bit."""
    num_columns, num_steps = 1003, 6
    params = [seeded(p, 100 + i) for i, p in enumerate(MIXED * 2)]
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(num_steps, len(params), num_columns, generator=generator) * 2
    together, alone = started(params, num_columns), started(params, num_columns)
    step_of = [0] * len(params)
    rng = np.random.default_rng(0)
    while min(step_of) < num_steps:
        waiting = [slot for slot in range(len(params)) if step_of[slot] < num_steps]
        slots = rng.permutation(waiting)[: rng.integers(1, len(waiting) + 1)].tolist()
        company = sample(together, torch.stack([logits[step_of[slot], slot] for slot in slots]), slots)
        for row, slot in enumerate(slots):
            single = sample(alone, logits[step_of[slot], slot][None], [slot])
            assert company.ids[row] == single.ids[0], (params[slot], step_of[slot])
            if params[slot].logprobs is not None:
                assert company.logprobs[row] == single.logprobs[0]
                assert torch.equal(company.top_ids[row, :3], single.top_ids[0, :3])
            step_of[slot] += 1
    assert torch.equal(together.controls.penalties, alone.controls.penalties)
    assert torch.equal(together.controls.seen, alone.controls.seen)


@pytest.mark.parametrize("rule", ["joint", "joint, top_p alone", "sequential", "gumbel", "noise"])
@pytest.mark.parametrize("num_columns", [pytest.param(8192, marks=pytest.mark.long), 65_536])
def test_same_seed_same_ids_in_large_batches(rule, num_columns):
    """As above where torch splits work over threads."""
    torch.set_num_threads(2)
    controls = {"rule": "joint", "top_k": 0, "top_p": 0.9} if "alone" in rule else {"rule": rule}
    params = [SamplingParams(**controls, noise=2.0, seed=row) for row in range(12)]
    logits = torch.randn(12, num_columns, generator=torch.Generator().manual_seed(7)) * (1 if "alone" in rule else 3)
    together, alone = started(params, num_columns), started(params, num_columns)
    for _ in range(2):
        ids = sample(together, logits).ids
        for slot in (0, 1, 11):
            assert sample(alone, logits[slot : slot + 1], [slot]).ids[0] == ids[slot]


def test_the_slot_does_not_matter_and_the_choice_does():
    params = unpenalized(top_k=0, top_p=1.0, seed=9)
    sampler = started([params] * 40, 1000, choices=[0, 0, *range(2, 40)])
    ids = sample(sampler, torch.zeros(40, 1000)).ids.tolist()
    assert ids[0] == ids[1]
    assert len(set(ids)) > 30


# --- rows that are not finite ---


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(fault):
    params = [seeded(p, 7) for p in MIXED]
    logits = torch.randn(len(params), 1003, generator=torch.Generator().manual_seed(2))
    clean, broken = started(params, 1003), started(params, 1003)
    expected = sample(clean, logits)
    assert expected.finite.all()
    for bad in range(len(params)):
        broken.start_many(list(range(len(params))), params, [0] * len(params))
        spoilt = logits.clone()
        if fault == -math.inf:
            spoilt[bad] = fault
        else:
            spoilt[bad, 500] = fault
        sampled = sample(broken, spoilt)
        assert sampled.finite.tolist() == [row != bad for row in range(len(params))]
        assert sampled.ids[bad] == 0
        others = [row for row in range(len(params)) if row != bad]
        assert torch.equal(sampled.ids[others], expected.ids[others])


# --- greedy, edges, types ---


@pytest.mark.parametrize(
    "greedy",
    [
        {"temperature": 0},
        {"temperature": -1.0, "rule": "gumbel"},
        {"top_k": 1},
        {"top_p": 0.0},
        {"top_p": 0.0, "rule": "sequential"},
        {"rule": "noise", "noise": 0.0},
    ],
)
def test_greedy_ties_go_to_the_lowest_id(greedy):
    ids = torch.tensor([0, 4, 9, 20, 21])
    sampler = started([unpenalized(**greedy)] * 2, ids)
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    for _ in range(3):
        assert sample(sampler, logits).ids.tolist() == [4, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_logits_equal_their_float32_values(dtype):
    params = [seeded(p, 50 + i) for i, p in enumerate(MIXED)]
    logits = (torch.randn(len(params), 500, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    kept = logits.clone()
    half, full = started(params, 500), started(params, 500)
    for _ in range(4):
        a, b = sample(half, logits), sample(full, logits.float())
        assert torch.equal(a.ids, b.ids)
    assert torch.equal(logits, kept)


def test_controls_out_of_range_are_tamed():
    extremes = [
        SamplingParams(temperature=1e-9, seed=1),
        SamplingParams(temperature=1e9, seed=1),
        SamplingParams(top_k=10**6, top_p=7.0, seed=1),
        SamplingParams(top_k=-5, top_p=-1.0, seed=1),
        SamplingParams(top_p=1e-60, seed=1),
    ]
    sampler = started(extremes, 30)
    assert sampler.controls.temperature.tolist()[:2] == [pytest.approx(1e-3), 1e3]
    assert sampler.controls.top_k.tolist()[2:4] == [30, 30]
    assert sampler.controls.top_p.tolist()[2:4] == [math.inf, math.inf]
    sampled = sample(sampler, spread(30, 1.0).expand(5, -1))
    assert sampled.finite.all()
    assert sampled.ids[0] == sampled.ids[4] == spread(30, 1.0).argmax()


class Counted(tuple):
    """A logit bias that counts how often it is gone through."""

    count = 0

    def __iter__(self):
        Counted.count += 1
        return super().__iter__()


def test_rows_that_share_their_parameters_start_like_rows_with_their_own():
    biased = SamplingParams(temperature=0.3, top_k=7, seed=2**63 + 5, logit_bias=Counted([(5, 3.0), (9, -1.0)]), min_tokens=2)
    other = unpenalized(rule="sequential", top_p=0.9, seed=3, logit_bias=((1, 2.0),), logprobs=2)
    greedy = unpenalized(temperature=0, seed=4, ignore_eos=True)
    shared = [greedy, biased, other, biased, greedy, biased]
    together = started(shared, 20, list(range(6))).controls
    assert Counted.count == 1
    apart = started([msgspec.structs.replace(params) for params in shared], 20, list(range(6))).controls
    assert together.needs == apart.needs
    for name, control in vars(together).items():
        if isinstance(control, torch.Tensor):
            assert torch.equal(control, getattr(apart, name)), name
    assert together.bias_values[3].tolist()[:3] == [3.0, -1.0, 0.0]
    assert together.seed.tolist() == [4, 5 - 2**63, 3, 5 - 2**63, 4, 5 - 2**63]
    assert together.first_end.tolist() == [NEVER, 2, 0, 2, NEVER, 2]


def test_logit_bias_by_token_id():
    ids = torch.tensor([0, 3, 8, 9])
    bias = ((8, 5.0), (7, 100.0), (8, 6.0), (70_000, 100.0))  # 7 and 70,000 have no column; 8 counts twice
    sampler = started([unpenalized(temperature=0, logit_bias=bias), unpenalized(temperature=0)], ids)
    logits = torch.tensor([[0.0, 10.0, 0.0, 0.0]] * 2)
    assert sample(sampler, logits).ids.tolist() == [8, 3]
    sampler.controls.start(0, unpenalized(temperature=0), 0)
    assert sample(sampler, logits).ids.tolist() == [3, 3]


def test_logit_bias_grows_without_disturbing_other_slots():
    sampler = started([unpenalized(temperature=0, logit_bias=((5, 9.0),))] * 2, 400)
    many = (*((token, 1.0) for token in range(300)), (399, 20.0))
    sampler.controls.start(1, unpenalized(temperature=0, logit_bias=many), 0)
    assert sample(sampler, torch.zeros(2, 400)).ids.tolist() == [5, 399]


def test_the_end_token_is_masked_for_min_tokens_or_for_ever():
    params = [unpenalized(temperature=0, min_tokens=2), unpenalized(temperature=0, ignore_eos=True), unpenalized(temperature=0)]
    sampler = started(params, 4)
    assert sampler.controls.first_end.tolist() == [2, NEVER, 0]
    logits = torch.tensor([[5.0, 1.0, 2.0, 0.0]] * 3)
    assert [sample(sampler, logits).ids.tolist() for _ in range(3)] == [[2, 2, 0], [2, 2, 0], [0, 2, 0]]


def test_masking_an_end_token_that_has_no_column_is_nothing():
    sampler = started([unpenalized(temperature=0, ignore_eos=True)], torch.tensor([5, 6]))
    assert sample(sampler, torch.tensor([[1.0, 0.0]])).ids.tolist() == [5]


def test_logprobs_against_float64():
    """Before penalties and temperature, after the bias; n by row; rows that did not ask hold NaN."""
    params = [
        SamplingParams(seed=1, logprobs=5, temperature=0.3),
        SamplingParams(seed=2),
        SamplingParams(seed=3, logprobs=0),
        unpenalized(temperature=0, logprobs=2, logit_bias=((8, 4.0),), ignore_eos=True),
    ]
    ids = torch.arange(0, 600, 2)
    sampler = started(params, ids)
    for _ in range(4):
        logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(8)) * 3
        sampled = sample(sampler, logits)
        for row, n in ((0, 5), (2, 0), (3, 2)):
            z = logits[row].double().numpy()
            if row == 3:
                z[0], z[4] = -np.inf, z[4] + 4.0  # column 4 is token 8
            exact = oracle.log_softmax(z)
            assert sampled.logprobs[row].item() == pytest.approx(exact[sampled.ids[row].item() // 2], abs=1e-5)
            best = np.argsort(-exact, kind="stable")[:n]
            assert sampled.top_ids[row, :n].tolist() == (2 * best).tolist()
            np.testing.assert_allclose(sampled.top_logprobs[row, :n].numpy(), exact[best], atol=1e-5)
        assert sampled.top_ids.shape == (4, 5)
        assert sampled.logprobs[1].isnan()
        assert sampled.top_ids[1].tolist() == [-1] * 5


def test_no_row_asks_for_logprobs():
    sampled = sample(started([unpenalized()], 4), torch.zeros(1, 4))
    assert sampled.logprobs is None
    assert sampled.top_ids is None


def test_best_columns_breaks_ties_by_column():
    values = torch.tensor([[-1.0, 0.0, -0.0, 2.0, 2.0, -torch.inf]])
    assert best_columns(values, 6).tolist() == [[3, 4, 1, 2, 0, 5]]


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="ids: expected"):
        ReferenceSampler(1, torch.tensor([0, 2, 2]))
    with pytest.raises(ValueError, match=r"logits: expected \[1, 4\]"):
        sample(started([unpenalized()], 4), torch.zeros(1, 5))
    with pytest.raises(ValueError, match="differ in length"):
        started([unpenalized()], 4).start_many([0], [], [])


# --- which sampler runs ---


@pytest.mark.parametrize("name", ["auto", "rapid", "flashinfer", "reference"])
def test_without_kernels_the_reference_runs_and_says_so(name, caplog):
    sampler = make_sampler(name, 2, torch.arange(10), "cpu")
    assert isinstance(sampler, ReferenceSampler)
    assert [name in record.message for record in caplog.records] == ([True] if name in ("rapid", "flashinfer") else [])


def test_a_missing_flashinfer_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "requirements-cuda.txt" in flashinfer.missing()
    assert "\n" not in flashinfer.missing()


def test_log_probabilities_reported_after_the_step_was_counted_are_those_of_the_step():
    """What follows a captured step: its end token was masked for the first token, and is not for the second."""
    ids, params = torch.arange(8), SamplingParams(temperature=0, min_tokens=1, logprobs=3, logit_bias=((2, 1.5),))
    sampler, slots = ReferenceSampler(2, ids), torch.tensor([1])
    sampler.start_many([1], [params], [0])
    logits = torch.tensor([[9.0, 1, 2, 3, 0, 0, 0, 4]])
    for end_is_likely in (False, True):
        expected = sampler.sample(logits, slots, [1])
        step = sampler.controls.step.clone()
        bare = Sampled(expected.ids, expected.finite)
        got = report_logprobs(sampler.controls, ids, bare, logits, slots, [sampler.needs[1]])
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
        assert (got.top_ids[0, 0] == 0) == end_is_likely
        assert torch.equal(sampler.controls.step, step)


def test_controls_are_set_where_a_slot_has_others():
    """What a slot is started with holds, whatever it and others were started with before."""
    rng, ids = random.Random(3), torch.arange(10)
    chosen = [
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(temperature=0.5, top_k=4),
        SamplingParams(noise=0.1, rule="noise"),
    ]
    controls = Controls(6, ids, "cpu")
    for _ in range(20):
        slots = rng.sample(range(6), rng.randint(1, 6))
        params = [rng.choice(chosen) for _ in slots]
        controls.start_many(slots, params, [0] * len(slots))
        for slot, one in zip(slots, params, strict=True):
            fresh = Controls(1, ids, "cpu")
            fresh.start(0, one, 0)
            for name in ("temperature", "top_k", "top_p", "noise", "rule", "greedy", "min_p_depth", "first_end", "penalized"):
                assert getattr(controls, name)[slot] == getattr(fresh, name)[0], name
