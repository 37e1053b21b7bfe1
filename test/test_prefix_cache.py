"""Shared prefixes are computed once, and the text is what it is without."""

import random
import time

import pytest
import torch
from models import TINY
from test_worker import GREEDY, Harness

from rwkv_batch.request import Request, Sequence
from rwkv_batch.scheduling.prefix_cache import BLOCK, TAIL, PrefixCache
from rwkv_batch.scheduling.scheduler import Scheduler
from rwkv_batch.session_messages import Session
from sampling.params import SamplingParams


class State:
    """What the cache sees of one."""

    num_bytes = 100


def harness_with(cache, **fields):
    """A worker with a cache; None = without."""
    harness = Harness(**fields)
    harness.scheduler.prefixes = cache
    return harness


def tokens_fed(harness):
    return harness.worker.stats()["prompt_tokens_total"]


def prompt_of(rng, length):
    return [rng.randrange(1, 256) for _ in range(length)]


@pytest.mark.parametrize("loop", ["sync", "continuous"])
@pytest.mark.parametrize("budget", [64, pytest.param(256, marks=pytest.mark.long)])
def test_identical_prompts_are_fed_once(loop, budget):
    prompt = prompt_of(random.Random(0), 700)
    plain = harness_with(None, slots=16, budget=budget)
    plain.submit("r", [prompt], max_tokens=8)
    plain.run()
    harness = harness_with(PrefixCache(2**30), slots=16, budget=budget)
    harness.submit("a", [prompt] * 10, max_tokens=8, loop=loop)
    harness.submit("b", [prompt] * 10, max_tokens=8, loop=loop)
    harness.run()
    assert set(harness.texts["a"].values()) | set(harness.texts["b"].values()) == {plain.texts["r"][0]}
    assert tokens_fed(harness) <= 700 + 19 * (BLOCK + TAIL)
    assert [harness.finishes["a"][i].cached_tokens for i in (0, 9)] == [0, 672]
    stats = harness.worker.stats()
    assert (stats["prefix_queries_total"], stats["prefix_hits_total"]) == (20, 19)
    harness.submit("later", [prompt], max_tokens=8)
    harness.run()
    assert harness.finishes["later"][0].cached_tokens == 672
    assert harness.texts["later"][0] == plain.texts["r"][0]


def test_prompts_that_begin_alike_share_what_they_share():
    rng = random.Random(1)
    common = prompt_of(rng, 500)
    prompts = [common + prompt_of(rng, 50) for _ in range(6)]
    harness = harness_with(PrefixCache(2**30), slots=8)
    harness.submit("first", [prompts[0]], max_tokens=3)
    harness.run()
    harness.submit("second", [prompts[1]], max_tokens=3)  # here it is seen that prompts part behind 480 tokens
    harness.run()
    harness.submit("rest", prompts[2:], max_tokens=3)
    harness.run()
    assert harness.finishes["first"][0].cached_tokens == 0
    assert harness.finishes["second"][0].cached_tokens == 0
    assert [harness.finishes["rest"][i].cached_tokens for i in range(4)] == [480] * 4


def test_a_growing_chat_is_fed_once():
    """The end of a long prompt is kept, so that the next turn of a chat that comes whole starts there."""
    rng = random.Random(2)
    harness = harness_with(PrefixCache(2**30, every_tokens=64))
    prompt, fed = [], 0
    for turn in range(6):
        prompt = prompt + prompt_of(rng, 200)
        harness.submit(f"{turn}", [prompt], max_tokens=2)
        harness.run()
        fed = max(fed, len(prompt) - harness.finishes[f"{turn}"][0].cached_tokens)
    assert fed <= 200 + BLOCK + TAIL


def test_who_asks_not_to_and_other_namespaces_share_nothing():
    prompt = prompt_of(random.Random(3), 400)
    harness = harness_with(PrefixCache(2**30))
    harness.submit("a", [prompt] * 2, max_tokens=2, namespace="a")
    harness.run()
    assert harness.finishes["a"][1].cached_tokens > 0
    harness.submit("b", [prompt], max_tokens=2, namespace="b")
    harness.submit("c", [prompt], max_tokens=2, namespace="a", cache=False)
    harness.submit("d", [prompt], max_tokens=2, namespace="a")
    harness.run()
    assert [harness.finishes[name][0].cached_tokens for name in "bcd"] == [0, 0, 384]


def test_the_first_turn_of_a_session_uses_the_cache_and_the_others_do_not():
    prompt = prompt_of(random.Random(4), 300)
    harness = harness_with(PrefixCache(2**30))
    harness.submit("plain", [prompt] * 2, max_tokens=2)
    harness.run()
    for turn in (1, 2):
        harness.submit(f"{turn}", [prompt], max_tokens=2, session=Session(name="s", separate=False))
        harness.run()
    assert harness.finishes["1"][0].cached_tokens == 256
    assert harness.finishes["2"][0].cached_tokens == 0
    assert harness.sessions.states["s"].elapsed == 604


def test_a_cancelled_leader_is_replaced():
    prompt = prompt_of(random.Random(5), 2000)
    harness = harness_with(PrefixCache(2**30), slots=8, budget=64)
    harness.submit("leader", [prompt], max_tokens=3)
    for _ in range(4):
        harness.worker.step()
    harness.submit("a", [prompt] * 3, max_tokens=3)
    harness.submit("b", [prompt] * 3, max_tokens=3)
    harness.worker.step()
    harness.worker.cancel("leader")
    for _ in range(4):
        harness.worker.step()
    harness.worker.cancel("a")
    harness.run()
    assert len(set(harness.texts["b"].values())) == 1
    assert [harness.finishes["b"][i].cached_tokens > 0 for i in range(3)] == [False, True, True]
    assert harness.scheduler.num_free == 8
    assert not harness.scheduler.prefixes._ways


def test_a_poisoned_row_leaves_no_state_behind():
    prompt = prompt_of(random.Random(6), 600)
    expected = harness_with(None, slots=2)
    expected.submit("r", [prompt], max_tokens=4)
    expected.run()
    harness = harness_with(PrefixCache(2**30), slots=4, budget=64)
    harness.submit("sick", [prompt] * 2, max_tokens=4)
    for _ in range(4):
        harness.worker.step()
    harness.engine.state.wkv[:, 0] = float("nan")
    harness.run()
    assert {harness.finishes["sick"][i].reason for i in range(2)} == {"error"}
    harness.submit("next", [prompt] * 2, max_tokens=4)
    harness.run()
    assert set(harness.texts["next"].values()) == {expected.texts["r"][0]}


def test_without_memory_for_a_prefix_rows_are_fed_whole():
    rng = random.Random(8)
    prompt = prompt_of(rng, 200)
    texts = []
    for full in (False, True):
        harness = harness_with(PrefixCache(2**30), slots=8, budget=64)
        if full:

            def take(slot):
                raise torch.OutOfMemoryError("no room")

            harness.engine.state.take = take
        harness.submit("r", [prompt] * 4 + [prompt[:150]], max_tokens=6)
        harness.run()
        assert not harness.failures
        assert harness.scheduler.num_free == 8
        texts.append(dict(harness.texts["r"]))
    assert texts[0] == texts[1]


def test_memory_is_bounded_and_the_least_used_goes_first():
    cache = PrefixCache(350, min_tokens=32)
    prompts = [[i + 1] * 100 for i in range(5)]

    def run(prompt):
        scheduler = Scheduler(num_slots=2, prefill_budget=1000, mixed=True, prefixes=cache)
        sequences = scheduler.add(Request(id="r", prompts=[prompt, prompt], sampling=SamplingParams(), max_tokens=1))
        while plan := scheduler.next_plan():
            for row in plan.rows:
                scheduler.resume(cache.fed(row.sequence, State))
        for sequence in sequences:
            scheduler.finish(sequence)
        return sequences[0].cached

    assert [run(prompt) for prompt in prompts[:3]] == [0, 0, 0]
    assert cache.num_bytes == 300
    assert run(prompts[0]) == 64
    assert run(prompts[3]) == 0
    assert [run(prompts[i]) for i in (0, 2, 3)] == [64, 64, 64]
    assert run(prompts[1]) == 0
    assert cache.num_bytes == 300
    assert not cache._ways


def test_nodes_are_bounded(monkeypatch):
    monkeypatch.setattr("rwkv_batch.scheduling.prefix_cache.MAX_NODES", 50)
    cache, rng = PrefixCache(10_000, min_tokens=32), random.Random(7)
    for number in range(200):
        prompt = prompt_of(rng, 200) if number % 3 else [1] * 64 + prompt_of(rng, 100)
        sequence = Sequence(Request(id="r", prompts=[prompt], sampling=SamplingParams(), max_tokens=1), 0)
        sequence.slot = 0
        assert cache.start(sequence, lambda row: True)
        for end in [*sequence.cuts, len(prompt)]:
            sequence.num_prefilled = end
            cache.fed(sequence, State)
        cache.end(sequence)
        assert len(cache._nodes) <= 50
        assert cache.num_bytes == 100 * len(cache._states) <= 10_000
        assert all(node in cache._nodes for node in cache._states)
    count, stack = 0, list(cache._roots.values())
    while stack:
        stack += stack.pop().children.values()
        count += 1
    assert count == 1 + len(cache._nodes)


def plans_until(scheduler, sequence):
    """Run until a row's first token is planned; rows end with theirs. Returns the number of plans."""
    for count in range(1, 10_000):
        for row in scheduler.next_plan().rows:
            if row.ids:
                scheduler.resume(scheduler.prefixes.fed(row.sequence, State))
            if row.sample:
                scheduler.finish(row.sequence)
        if sequence.num_sampled:
            return count
    raise AssertionError("it waits for ever")


def request_of(name, prompts, **fields):
    return Request(id=name, prompts=prompts, sampling=SamplingParams(), max_tokens=1, loop="continuous", **fields)


@pytest.mark.parametrize("shared", [128, 256, 640])
def test_a_row_does_not_wait_in_the_queue_of_another_request(shared):
    """What it shares with a row far back there is not worth the prompts before that one."""
    rng = random.Random(9)
    scheduler = Scheduler(num_slots=64, prefill_budget=1024, mixed=True, prefixes=PrefixCache(10_000))
    documents = [prompt_of(rng, 2000) for _ in range(50)]
    scheduler.add(request_of("big", documents))
    scheduler.next_plan()
    (short,) = scheduler.add(request_of("short", [documents[-1][:shared] + prompt_of(rng, 40)]))
    assert plans_until(scheduler, short) <= 4
    (last,) = scheduler.add(request_of("last", [documents[-2][:shared] + prompt_of(rng, 40)]))
    assert plans_until(scheduler, last) <= 4


def test_leaders_that_are_cancelled_do_not_hold_up_a_row_for_ever():
    """Others send the same prompt again and again, and leave just before it is fed."""
    prompt = prompt_of(random.Random(10), 2000)
    scheduler = Scheduler(num_slots=8, prefill_budget=64, mixed=True, prefixes=PrefixCache(10_000))
    scheduler.add(request_of("leader0", [prompt]))
    scheduler.next_plan()
    (row,) = scheduler.add(request_of("row", [prompt]))
    for count in range(1, 40):
        scheduler.add(request_of(f"leader{count}", [prompt]))
        for _ in range(20):
            if row.num_sampled:
                return
            for planned in scheduler.next_plan().rows:
                scheduler.resume(scheduler.prefixes.fed(planned.sequence, State))
        scheduler.cancel(f"leader{count - 1}")
        assert count < 10, "it waits for ever"


def test_the_same_prompts_in_another_request_are_not_fed_again():
    """Rows that do not wait in another's queue still start from the states that are there when their turn comes."""
    rng = random.Random(11)
    prompts = [prompt_of(rng, 300) for _ in range(6)]
    plain = harness_with(None, slots=24, budget=64)
    plain.submit("r", prompts, max_tokens=3)
    plain.run()
    harness = harness_with(PrefixCache(2**30), slots=24, budget=64)
    for name in "ab":
        harness.submit(name, prompts * 2, max_tokens=3, loop="continuous")
        for _ in range(8):
            harness.worker.step()
    harness.run()
    assert tokens_fed(harness) <= 6 * 300 + 18 * (BLOCK + TAIL) + 300
    for name in "ab":
        assert [harness.texts[name][i] for i in range(12)] == [plain.texts["r"][i % 6] for i in range(12)]
    stats = harness.worker.stats()
    cached = sum(harness.finishes[name][i].cached_tokens for name in "ab" for i in range(12))
    assert stats["prefix_cached_tokens_total"] == cached
    assert stats["prefix_hits_total"] == sum(harness.finishes[name][i].cached_tokens > 0 for name in "ab" for i in range(12))


class Seen:
    """A state that tells what it has seen."""

    num_bytes = 100

    def __init__(self, tokens):
        self.tokens = list(tokens)


def check_scheduling(seed: int) -> int:
    """Families of prompts that join, are cancelled and fail at random: a row is fed its prompt, behind a state of its own
    beginning, and none waits for ever. Returns the number of hits."""
    rng = random.Random(seed)
    cache = PrefixCache(
        rng.choice((250, 1000, 10**6)), min_tokens=rng.choice((32, 64, 128)), every_tokens=rng.choice((32, 128, 512))
    )
    slots, budget, busy = rng.choice((2, 4, 12)), rng.choice((16, 64, 256)), rng.choice((None, 32))
    fields = {"num_slots": slots, "prefill_budget": budget, "busy_budget": busy, "mixed": rng.random() < 0.5}
    scheduler = Scheduler(prefixes=cache, **fields)
    trunks = [prompt_of(rng, rng.randrange(40, 500)) for _ in range(3)]
    live: dict[str, set[Sequence]] = {}
    seen: dict[Sequence, Seen] = {}
    to_come = 60
    while to_come or live:
        if to_come and rng.random() < 0.3:
            to_come -= 1
            prompts = [
                rng.choice(trunks)[: rng.randrange(1, 500)] + prompt_of(rng, rng.randrange(70))
                for _ in range(rng.randrange(1, 5))
            ]
            request = Request(
                id=f"{to_come}", prompts=prompts, copies=rng.choice((1, 1, 3)), loop=rng.choice(("sync", "continuous")),
                sampling=SamplingParams(), max_tokens=rng.choice((1, 2, 5)), namespace=rng.choice(("", "a")),
            )  # fmt: skip
            live[request.id] = set(scheduler.add(request))
        if live and rng.random() < 0.08:
            gone = rng.choice(list(live))
            scheduler.cancel(gone)
            del live[gone]
        plan = scheduler.next_plan()
        assert plan is not None or not live, "all wait"
        for row in plan.rows if plan else ():
            sequence = row.sequence
            if row.start:
                seen[sequence] = Seen(sequence.initial.tokens if sequence.initial else ())
                sequence.initial = None
            if row.ids:
                seen[sequence].tokens += row.ids
                assert seen[sequence].tokens == sequence.prompt[: sequence.num_prefilled]
                scheduler.resume(cache.fed(sequence, lambda: Seen(seen[sequence].tokens)))  # noqa: B023 - called at once
        for row in plan.rows if plan else ():
            sequence, failed = row.sequence, rng.random() < 0.01
            if failed or (row.sample and sequence.num_sampled == sequence.request.max_tokens):
                scheduler.finish(sequence, nonfinite=failed)
                live[sequence.request.id].discard(sequence)
                if not live[sequence.request.id]:
                    del live[sequence.request.id]
        assert cache.num_bytes == 100 * len(cache._states) <= cache.max_bytes
    assert not cache._ways
    assert scheduler.num_free == slots
    return cache.stats()["prefix_hits_total"]


def test_no_row_waits_for_ever():
    assert sum(check_scheduling(seed) for seed in range(20))


@pytest.mark.long
def test_no_row_waits_for_ever_in_500_random_lives():
    assert sum(check_scheduling(seed) for seed in range(20, 520))


def check_families(seed: int, num_families: int) -> tuple[int, int]:
    """Random families of prompts, joined at random times: every text is what it is without a cache."""
    rng = random.Random(seed)
    fields = {"slots": 12, "budget": rng.choice((64, 256)), "shape": TINY}
    plain, cached = harness_with(None, **fields), harness_with(PrefixCache(2**24, min_tokens=64, every_tokens=128), **fields)
    for family in range(num_families):
        trunk = prompt_of(rng, rng.randrange(20, 400))
        prompts = []
        for _ in range(rng.randrange(1, 7)):
            cut = rng.randrange(len(trunk) + 1) if rng.random() < 0.4 else len(trunk)
            prompts.append((trunk[:cut] + prompt_of(rng, rng.randrange(0, 60))) or [1])
        loop, turns = rng.choice(("sync", "continuous")), rng.randrange(4)
        for harness in (plain, cached):
            harness.submit(f"{family}", prompts, max_tokens=8, loop=loop, sampling=GREEDY)
            for _ in range(turns):
                harness.worker.step()
    plain.run()
    cached.run()
    for name, texts in plain.texts.items():
        assert cached.texts[name] == texts, (seed, name)
    assert cached.scheduler.num_free == 12
    assert not cached.scheduler.prefixes._ways
    return tokens_fed(plain), tokens_fed(cached)


def test_random_families_have_the_same_text():
    before, after = check_families(0, 6)
    assert after < before


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 11))
def test_500_random_families_have_the_same_text(seed):
    check_families(seed, 50)


@pytest.mark.long
def test_64_requests_over_a_shared_prefix_have_their_first_token_ten_times_sooner():
    rng = random.Random(8)
    common = prompt_of(rng, 2000)
    prompts = [common + prompt_of(rng, 20) for _ in range(64)]
    seconds = {}
    for name, cache in (("without", None), ("with", PrefixCache(2**30))):
        harness = harness_with(cache, slots=64)
        began = time.perf_counter()
        for index, prompt in enumerate(prompts):
            harness.submit(f"{index}", [prompt], max_tokens=1)
        harness.run()
        seconds[name] = time.perf_counter() - began
        print(f"{name}: last first token after {seconds[name]:.2f} s, {tokens_fed(harness)} tokens fed")
    assert seconds["without"] >= 10 * seconds["with"]
