"""The gap that prompts add between two tokens of rows that decode: a device of known step times, a clock that is not real."""

import random
from collections.abc import Callable
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_worker import Harness

from rwkv_batch.request import Request, Sequence
from rwkv_batch.scheduling.pace import PrefillPace
from rwkv_batch.scheduling.plan import PREFILL_CHUNK, Plan
from rwkv_batch.scheduling.scheduler import Scheduler
from rwkv_batch.scheduling.step_cost import StepCost
from sampling.params import SamplingParams

CAPTURED = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)
FOREVER = 10**6
FEW = settings(max_examples=settings.get_profile(settings.get_current_profile_name()).max_examples // 5)


def request(name: str, num_tokens: int, max_tokens: int = 2, scored: bool = False) -> Request:
    return Request(
        id=name,
        prompts=[[1] * num_tokens],
        sampling=SamplingParams(),
        max_tokens=max_tokens,
        loop="continuous",
        prompt_logprobs=0 if scored else None,
    )


class Device:
    """A scheduler beside a device that takes `cost` (plan) milliseconds a step; the host reads a step while the next one runs.

    added  milliseconds of prefill in front of each plan that decodes, and how many plans that was
    """

    def __init__(self, cost: Callable[[int, int], float], budget_ms: float | None, *, mixed: bool = False, budget: int = 4096,
                 captured: tuple[int, ...] = CAPTURED, busy: int | None = None, slots: int = 80,
                 times: dict[int, float] | None = None):  # fmt: skip
        self.cost = cost
        self.mixed = mixed
        kind = {"budget": budget, "mixed": mixed, "captured": captured, "times": times or {}}
        self.pace = PrefillPace(budget_ms, **kind) if budget_ms else None
        self.scheduler = Scheduler(num_slots=slots, prefill_budget=budget, mixed=mixed, busy_budget=busy, pace=self.pace)
        self.now = self.ends = 0.0
        self.reads: float | None = None  # when the step before ends
        self.added: list[tuple[float, int, int]] = []
        self.first: dict[str, float] = {}  # when the first token of a request is there
        self._since: tuple[float, int, int] = (0.0, 0, 0)

    def add(self, name: str, num_tokens: int, **fields) -> Sequence:
        return self.scheduler.add(request(name, num_tokens, **fields))[0]

    def step(self) -> Plan | None:
        waits = bool(self.scheduler._decoding)
        plan = self.scheduler.next_plan()
        if plan is None:
            return None
        tokens, rows = sum(len(row.ids) for row in plan.rows), sum(not row.ids for row in plan.rows)
        if self.pace is not None:
            self.pace.began(plan, self.now / 1000)
        took = self.cost(tokens, rows)
        self.ends = max(self.ends, self.now) + took
        if self.reads is not None:
            self.now = max(self.now, self.reads)
            if self.pace is not None:
                self.pace.ended(self.now / 1000)
        self.reads = self.ends
        self._note(tokens, rows, took, waits)
        for row in plan.rows:
            if row.sample:
                self.first.setdefault(row.sequence.request.id, self.ends)
                if row.sequence.num_sampled == row.sequence.request.max_tokens:
                    self.scheduler.finish(row.sequence)
        return plan

    def _note(self, tokens: int, rows: int, took: float, waits: bool) -> None:
        if tokens and waits:
            ms, plans, fed = self._since
            added = took - self.cost(0, rows) if self.mixed else took
            self._since = ms + added, plans + 1, fed + tokens
        elif tokens:
            self._since = (0.0, 0, 0)
        if rows:
            if self._since[1]:
                self.added.append(self._since)
            self._since = (0.0, 0, 0)

    def run_until(self, name: str, limit: int = 100_000) -> float:
        """Step until the request has its first token; return how long that took, in milliseconds."""
        began = self.now
        for _ in range(limit):
            if name in self.first:
                return self.first[name] - began
            assert self.step() is not None
        raise AssertionError(f"{name} starves")


def linear(fixed: float, per_token: float, decode: float = 5.0, captured: tuple[int, ...] = CAPTURED, noise: float = 0.0):
    """Step times of a device that cannot mix; those of prefill deviate at random by up to a share."""
    rng = random.Random(1)

    def cost(tokens: int, rows: int) -> float:
        if not tokens:
            return decode
        full = next((size for size in captured if size >= tokens), tokens)
        return (fixed + per_token * full) * (1 + noise * rng.uniform(-1, 1))

    return cost


def h200(noise: float, seed: int, host_ms: float = 0.0):
    """Step times of 7.2B on an H200: those of 64 tokens take no longer than those of 32, what 512 take is more than linear."""
    rng, known = random.Random(seed), {0: 4.5, 64: 4.5, 320: 8.9, 512: 13.4, 4096: 107.2}

    def cost(tokens: int, rows: int) -> float:
        if not tokens:
            return 7.9
        full = next((size for size in CAPTURED if size >= tokens), tokens)
        below, above = max(size for size in known if size < full), min(size for size in known if size >= full)
        share = (full - below) / (above - below)
        return (host_ms + known[below] + share * (known[above] - known[below])) * (1 + noise * rng.uniform(-1, 1))

    return cost


def short_prompts(device: Device, streams: int = 64) -> Device:
    """Rows that decode without end and came one after another, so that no step but the first has fed more than 32 tokens."""
    for number in range(streams):
        device.add(f"s{number}", 28, max_tokens=FOREVER)
        device.step()
        device.step()
    device.added.clear()
    return device


def busy(device: Device, streams: int = 4) -> Device:
    """Rows that decode without end."""
    for number in range(streams):
        device.add(f"s{number}", 20 + 13 * number, max_tokens=FOREVER)
    for _ in range(8):
        device.step()
    return device


@FEW
@given(
    fixed=st.floats(0.05, 20),
    per_token=st.floats(0.0005, 0.2),
    budget_ms=st.floats(0.5, 200),
    noise=st.sampled_from([0.0, 0.02]),
    budget=st.sampled_from([256, 4096]),
    graphs=st.booleans(),
)
def test_the_budget_holds_whatever_steps_take(fixed, per_token, budget_ms, noise, budget, graphs):
    captured = CAPTURED if graphs else ()
    device = busy(Device(linear(fixed, per_token, captured=captured, noise=noise), budget_ms, budget=budget, captured=captured))
    device.added.clear()
    for number in range(3):
        device.add(f"long{number}", 16_000)
    for _ in range(80):
        device.step()
    for ms, plans, tokens in device.added[2:]:
        assert ms <= budget_ms * (1 + noise) or (plans == 1 and tokens <= PREFILL_CHUNK)


@FEW
@given(fixed=st.floats(0.1, 10), per_token=st.floats(0.001, 0.1), share=st.floats(1.5, 30))
def test_most_of_the_budget_is_used(fixed, per_token, share):
    """Once the device is known, the plans feed at least half of what would fit; sizes are a factor of two apart at most."""
    cost = linear(fixed, per_token)
    budget_ms = share * cost(64, 0)
    device = busy(Device(cost, budget_ms))
    device.add("long", 600_000)  # which does not end meanwhile
    for _ in range(60):
        device.step()
    fits = max((size for size in (32, *CAPTURED[2:], *range(544, 4097, 32)) if cost(size, 0) <= budget_ms), default=32)
    assert median(tokens for _, _, tokens in device.added[-10:]) >= fits / 2


@FEW
@given(extra=st.floats(0.0, 3.0), per_token=st.floats(0.05, 1.0), budget_ms=st.floats(5, 300))
def test_the_budget_holds_where_plans_mix(extra, per_token, budget_ms):
    """What prefill adds to a step that decodes; such a step also costs something more for each row."""

    def cost(tokens, rows):
        return 20 + extra * rows + per_token * tokens

    device = busy(Device(cost, budget_ms, mixed=True, budget=256, captured=()))
    device.added.clear()
    device.add("long", 4_000)
    for _ in range(80):
        device.step()
    for ms, _, tokens in device.added[3:]:
        assert ms <= budget_ms * 1.001 or tokens <= PREFILL_CHUNK


def test_steps_that_stall_are_forgotten():
    """One in eight takes ten times as long: the plans stay about as large as without."""
    rng = random.Random(5)
    plain = linear(3.0, 0.022)

    def stalls(tokens, rows):
        return plain(tokens, rows) * (10 if rng.random() < 0.125 else 1)

    fed = []
    for cost in (plain, stalls):
        device = busy(Device(cost, 20.0))
        device.add("long", 200_000)
        for _ in range(300):
            device.step()
        fed.append(median(tokens for _, _, tokens in device.added[50:]))
    assert fed[1] >= 0.5 * fed[0]


def test_a_device_that_slows_down_is_learned_anew():
    plain = linear(3.0, 0.022)
    device = busy(Device(plain, 20.0))
    device.add("long", 400_000)
    for factor in (1.0, 3.0, 1.0):
        device.cost = lambda tokens, rows, factor=factor: factor * plain(tokens, rows)
        for _ in range(160):
            device.step()
        ends = [ms for ms, _, _ in device.added[-20:]]
        assert 10.0 <= median(ends) <= 20.0


def test_a_prompt_is_fed_however_small_the_budget():
    device = busy(Device(linear(3.0, 0.022), 0.001))
    device.add("late", 640)
    device.run_until("late", 2 * 640 // PREFILL_CHUNK + 2)
    assert all((plans, tokens) == (1, PREFILL_CHUNK) for _, plans, tokens in device.added[-15:])


def test_a_larger_budget_brings_the_first_token_sooner():
    """H200, 7.2B: 64 streams, a prompt of 16,000 tokens."""
    times = []
    for budget_ms in (5.0, 10.0, 50.0, 250.0):
        device = busy(Device(linear(3.0, 0.0218), budget_ms), streams=16)
        device.add("long", 16_000)
        times.append(device.run_until("long"))
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0] / 4
    assert times[-1] < 16_000 * 0.0218 * 1.25


@pytest.mark.parametrize("measured", [None, 0.7, 1.0, 1.4])
@pytest.mark.parametrize("host_ms", [0.0, 0.2, 0.5])
def test_a_budget_is_used_soon_when_only_the_smallest_steps_are_known(measured, host_ms):
    """Whether or not times were measured before, and however right: real steps take longer by what the host does."""
    exact = h200(0.0, 0)
    for seed in range(8):
        times = {size: measured * exact(size, 0) for size in (32, 256, 512)} if measured else {}
        device = short_prompts(Device(h200(0.05, seed, host_ms), 10.0, times=times))
        device.add("long", 16_000)
        assert device.run_until("long") < 1_000
        fed = [tokens for _, _, tokens in device.added[:-1]]
        assert next(plan for plan, tokens in enumerate(fed) if tokens >= 256) < 4
        assert median(fed) >= 256
        over = [ms for ms, _, _ in device.added if ms > 10.0 * 1.05]
        assert len(over) <= 3
        assert max(over, default=0.0) <= (11.0 if measured in (None, 1.0) and host_ms == 0 else 13.5)


def test_the_next_size_is_tried_once_and_not_again_if_it_takes_too_long():
    """Budgets that no step of 64 tokens is within."""
    cost = linear(0.0, 6.0 / 32)
    device = short_prompts(Device(cost, 10.0), streams=16)
    device.add("long", 16_000)
    device.run_until("long")
    assert [tokens for _, _, tokens in device.added].count(64) <= 1
    assert {tokens for _, _, tokens in device.added} <= {32, 64}


def test_no_plan_is_much_larger_than_what_was_measured():
    """Steps of 32 and of 64 tokens take the same, so it looks as if more cost nothing."""
    device = short_prompts(Device(h200(0.0, 0), 1000.0))
    device.add("long", 16_000)
    largest = 32
    while "long" not in device.first:
        tokens = sum(len(row.ids) for row in device.step().rows)
        assert tokens <= 2 * largest
        largest = max(largest, tokens)
    assert largest == 4096


def test_times_that_were_measured_count_from_the_first_plan():
    times = {32: 4.5, 256: 7.8, 512: 13.4}
    for budget_ms, least, most in ((1.0, 32, 32), (10.0, 192, 320), (20.0, 512, 768)):
        pace = PrefillPace(budget_ms, budget=4096, mixed=False, captured=CAPTURED, times=times)
        assert least <= pace.stats()["prefill_allowance_tokens"] <= most
    assert PrefillPace(10.0, budget=4096, mixed=False, captured=CAPTURED).allowance == 32


def test_several_plans_feed_before_the_next_token_where_there_is_time():
    device = busy(Device(linear(1.0, 0.002), 30.0))
    device.add("long", 64_000)
    device.run_until("long")
    assert max(plans for _, plans, _ in device.added) > 1
    assert all(ms <= 30.0 for ms, _, _ in device.added)


def test_the_fixed_bound_of_tokens_holds_beside_the_budget():
    device = busy(Device(linear(3.0, 0.022), 1000.0, busy=128))
    device.add("long", 4_000)
    device.run_until("long")
    assert {(plans, tokens) for _, plans, tokens in device.added[1:-1]} == {(1, 128)}


def test_scored_prompts_teach_nothing():
    device = busy(Device(linear(3.0, 0.022), 20.0))
    before = device.pace.stats()
    device.cost = lambda tokens, rows: 500.0
    device.add("scored", 300, scored=True, max_tokens=1)
    device.run_until("scored")
    assert device.pace.stats() == before


def test_figures():
    device = busy(Device(linear(2.0, 0.02), 20.0))
    device.add("long", 50_000)
    for _ in range(60):
        device.step()
    stats = device.pace.stats()
    assert 448 <= stats["prefill_allowance_tokens"] <= 900
    assert stats["prefill_ms_per_1000_tokens"] == pytest.approx(20 + 2000 / stats["prefill_allowance_tokens"], rel=0.1)


def test_nothing_changes_without_a_budget():
    """The plans are those of a scheduler that knows no pace."""
    found = []
    for busy_budget in (512, 512):
        device = busy(Device(linear(3.0, 0.022), None, busy=busy_budget))
        device.add("long", 3_000)
        found.append([[(row.sequence.request.id, len(row.ids)) for row in device.step().rows] for _ in range(20)])
    assert found[0] == found[1]
    assert [sum(tokens for _, tokens in plan) for plan in found[0]][:12] == [512, 0] * 5 + [440, 0]


@pytest.mark.parametrize("mixed", [True, False])
def test_the_loop_measures_its_steps(mixed):
    """A tiny model on a CPU: texts are what they are without a budget, and the figures say what was measured."""
    texts = []
    for budget_ms in (None, 1e-3, 1000.0):
        harness = Harness(budget=64, mixed=mixed)
        if budget_ms:
            pace = PrefillPace(budget_ms, budget=64, mixed=mixed)
            harness.scheduler.pace = harness.worker._pace = pace
        harness.submit("early", [[5, 6, 7]], max_tokens=30)
        harness.submit("late", [[9] * 300], max_tokens=3)
        harness.run()
        texts.append((harness.texts["early"][0], harness.texts["late"][0]))
        if budget_ms:
            stats = harness.worker.stats()
            assert stats["prefill_ms_per_1000_tokens"] > 0
            assert stats["prefill_allowance_tokens"] == (32 if budget_ms < 1 else 64)
    assert texts[0] == texts[1] == texts[2]


@given(
    weights=st.tuples(st.floats(0.1, 20), st.floats(0.01, 5)),
    sizes=st.lists(st.floats(1, 128), min_size=8, max_size=60),
)
def test_costs_are_learned_and_bounded(weights, sizes):
    """Whatever sizes it has seen: what it expects of the last ones is right, and no time exceeds its bound by much."""
    cost = StepCost(2)
    for size in sizes * 3:
        cost.learn([1.0, size], weights[0] + weights[1] * size)
    for size in sizes:
        true = weights[0] + weights[1] * size
        assert cost.expected([1.0, size]) == pytest.approx(true, rel=0.15)
        assert cost.bound([1.0, size]) >= 0.97 * true
