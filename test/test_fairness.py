"""No caller stalls another: how long a request waits is a matter of its own prompt and of how many others there are, whatever
they send: rows, prompts, shared beginnings, loops, answers without end, cancels.
"""

import random
from dataclasses import dataclass
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from rwkv_batch.request import Request, Sequence
from rwkv_batch.scheduling.plan import PREFILL_CHUNK
from rwkv_batch.scheduling.prefix_cache import BLOCK, MAX_WAITS, PrefixCache
from rwkv_batch.scheduling.scheduler import Scheduler
from sampling.params import SamplingParams

LONG = 10_000  # tokens: no row of so many ends in a test
TRUNKS = [random.Random(seed).choices(range(1, 60_000), k=1500) for seed in range(8)]


class State:
    """A state, as the cache sees it."""

    num_bytes = 100


@dataclass(frozen=True)
class Sent:
    """What a caller sends: row i begins with the first tokens of trunk i modulo `num_trunks`, `shared` of them or, the further
    back it is, the fewer. `stays` is how many plans he waits until he leaves."""

    num_rows: int
    length: int
    shared: int
    num_trunks: int
    loop: str
    copies: int
    max_tokens: int
    stays: int
    scored: bool = False

    def request(self, name: str) -> Request:
        """Return it; what a row does not share is its own."""
        prompts = []
        for index in range(self.num_rows):
            shared = min(max(self.shared - index // self.num_trunks * BLOCK, 0), self.length - 1)
            own = [index + 1, int(name) + 1] * self.length
            prompts.append((TRUNKS[(int(name) + index) % self.num_trunks][:shared] + own)[: self.length])
        return Request(
            id=name,
            prompts=prompts,
            sampling=SamplingParams(),
            max_tokens=self.max_tokens,
            loop=self.loop,
            copies=self.copies,
            prompt_logprobs=0 if self.scored else None,
        )


LOOPS = st.sampled_from(["sync", "continuous"])
OTHERS = st.builds(
    Sent,
    num_rows=st.sampled_from([1, 2, 8, 30, 30]),
    length=st.sampled_from([1, 40, 1500, 1500]),
    shared=st.sampled_from([0, 64, 256, 1400, 1400]),
    num_trunks=st.sampled_from([1, 8, 8]),
    loop=LOOPS,
    copies=st.sampled_from([1, 1, 3]),
    max_tokens=st.sampled_from([1, 3, LONG, LONG]),
    stays=st.sampled_from([1, 60, LONG, LONG, LONG]),
    scored=st.sampled_from([False, False, False, False, True]),
)
PROBES = st.builds(
    Sent,
    num_rows=st.sampled_from([1, 3]),
    length=st.one_of(st.integers(1, 40), st.integers(1, 300)),
    shared=st.sampled_from([0, 64, 256, 290]),
    num_trunks=st.just(8),
    loop=LOOPS,
    copies=st.just(1),
    max_tokens=st.just(2),
    stays=st.just(LONG),
)


class Life:
    """A scheduler that always has as many callers as there are spare slots, and its worker."""

    def __init__(self, num_spare: int, budget: int, busy: int | None, mixed: bool, cached: bool, others: list[Sent]):
        self.num_spare = num_spare
        self.smallest_budget = min(budget, max(busy or budget, min(PREFILL_CHUNK, budget)))
        self.mixed = mixed
        prefixes = PrefixCache(10_000, min_tokens=64, every_tokens=256) if cached else None
        self.scheduler = Scheduler(
            num_slots=8 + num_spare,
            spare_slots=num_spare,
            prefill_budget=budget,
            busy_budget=busy,
            mixed=mixed,
            prefixes=prefixes,
        )
        self.others = others
        self.names = count()
        self.leaves: dict[str, int] = {}  # others that are there, and the plan before which they leave
        self.left: dict[str, set[Sequence]] = {}  # their rows that have not ended
        self.num_plans = 0

    def send(self) -> None:
        """Others leave, and new ones come for them."""
        for name in [name for name, when in self.leaves.items() if when <= self.num_plans or not self.left[name]]:
            self.scheduler.cancel(name)
            del self.leaves[name], self.left[name]
        while self.others and len(self.leaves) < self.num_spare:
            number = next(self.names)
            sent = self.others[number % len(self.others)]
            self.left[f"{number}"] = set(self.scheduler.add(sent.request(f"{number}")))
            self.leaves[f"{number}"] = self.num_plans + sent.stays

    def step(self) -> None:
        """One plan, and what the worker makes of it."""
        self.num_plans += 1
        plan = self.scheduler.next_plan()
        rows = plan.rows if plan else []
        for row in rows:
            if row.ids and self.scheduler.prefixes is not None:
                self.scheduler.resume(self.scheduler.prefixes.fed(row.sequence, State))
        for sequence in [row.sequence for row in rows if row.sample]:
            if sequence.num_sampled == sequence.request.max_tokens:
                self.scheduler.finish(sequence)
                self.left.get(sequence.request.id, set()).discard(sequence)

    def bound(self, length: int) -> int:
        """Plans until a prompt of `length` tokens is fed.

        With n other callers a round takes n + 1 plans at most, for a plan has room for one turn at least. A prompt needs a
        round for each of its turns, and one more because it came in the middle of one. Where others want the state after a
        block of it, it pauses for a plan. It may see all of this once for itself, and once for each row of others that it
        waits for in vain. Where plans do not mix, every second one decodes.
        """
        turn = max(min(PREFILL_CHUNK, self.smallest_budget), self.smallest_budget // 4 // PREFILL_CHUNK * PREFILL_CHUNK)
        rounds = -(-length // turn) + 1
        once = rounds * (self.num_spare + 1) + length // BLOCK + 1
        waits = MAX_WAITS if self.scheduler.prefixes is not None else 0
        return once * (1 + waits) * (1 if self.mixed else 2)


@given(
    num_spare=st.integers(1, 3),
    budget=st.sampled_from([16, 32, 64, 4096, 4096]),
    busy=st.sampled_from([None, 1, 64]),
    mixed=st.booleans(),
    cached=st.booleans(),
    others=st.lists(OTHERS, min_size=1, max_size=5),
    probe=PROBES,
    comes=st.integers(0, 40),
)
def test_no_request_waits_longer_than_its_share(num_spare, budget, busy, mixed, cached, others, probe, comes):
    life = Life(num_spare, budget, busy, mixed, cached, others)
    for _ in range(comes):
        life.send()
        life.step()
    life.send()
    first = life.scheduler.add(probe.request("1003"))[0]
    life.step()
    assert first.slot >= 0 or first.num_sampled, "it has no slot in the next plan"
    bound = life.bound(probe.length)
    while not first.num_sampled:
        assert life.num_plans - comes < bound, "others hold it up"
        life.send()
        life.step()
