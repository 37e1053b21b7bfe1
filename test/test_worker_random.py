"""Random lives of requests on an engine whose state is the tuple of tokens it was fed, so that any mix-up of slots, steps,
states and rows shows as a wrong text: prefixes, sessions granted and kept late, stops, cancels, rows that are not finite.
"""

import contextlib
import random
from collections import defaultdict, deque
from dataclasses import dataclass

import pytest

from rwkv_batch.engine.engine import Step, Token
from rwkv_batch.engine.engine_loop import EngineLoop
from rwkv_batch.errors import Conflict
from rwkv_batch.request import Failure, Request
from rwkv_batch.scheduling.prefix_cache import PrefixCache
from rwkv_batch.scheduling.scheduler import Scheduler
from rwkv_batch.session_messages import CommitResult, Session
from rwkv_batch.text import tokenizer
from sampling.params import SamplingParams

LETTERS = range(97, 109)


@dataclass(eq=False)
class Fed:
    """A state."""

    tokens: tuple[int, ...] = ()
    num_bytes = 100


def sample(tokens: tuple[int, ...], seed: int) -> int:
    """What comes after `tokens`: now and then the end, else a letter."""
    number = hash((tokens, seed))  # of numbers only, so it is the same in every run
    return 0 if number % 61 == 0 else LETTERS[number % len(LETTERS)]


class TupleEngine:
    """Rows whose slot is in `sick` sample no number."""

    def __init__(self, num_slots: int):
        self.states: list[tuple[int, ...]] = [()] * num_slots
        self.last = [0] * num_slots
        self.owners = [None] * num_slots
        self.sick: set[int] = set()

    def submit(self, plan) -> Step:
        tokens = []
        assert len({row.sequence.slot for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            sequence, slot = row.sequence, row.sequence.slot
            if row.start:
                self.states[slot], sequence.initial = (sequence.initial or Fed()).tokens, None
                self.owners[slot] = sequence
                self.sick.discard(slot)
            assert self.owners[slot] is sequence
            self.states[slot] += tuple(row.ids or [self.last[slot]])
            if row.sample:
                self.last[slot] = id = sample(self.states[slot], sequence.request.sampling.seed)
                tokens.append(Token(sequence, None if slot in self.sick else id))
        return Step(tokens, None)

    def read(self, step: Step) -> list[Token]:
        return step.sequences

    def take(self, slot: int) -> Fed:
        return Fed(self.states[slot])

    def take_of(self, sequence) -> Fed:
        return self.take(sequence.slot)

    def take_many(self, slots: list[int]) -> list[Fed]:
        return [self.take(slot) for slot in slots]

    def put(self, slot: int, state: Fed) -> None:
        self.states[slot] = state.tokens

    def stats(self) -> dict[str, int]:
        return {}


class Turns:
    """Sessions: turns that keep their state follow one another; they are granted and kept when `work` says so.

    logs  whether a kept state may be one from which some ids lead to that of the session
    """

    def __init__(self, *, logs: bool):
        self.logs = logs
        self.behind: dict[str, tuple[Fed, list[int]]] = {}  # what was kept of the states
        self.states: dict[str, Fed] = {}
        self.queues: dict[str, deque] = defaultdict(deque)
        self.asked: list[tuple[Lease, object]] = []
        self.commits: list[tuple[Lease, Fed, list[int], object]] = []
        self.leases: list[Lease] = []

    def use(self, compute, telling) -> None:
        pass

    def lease(self, request, ready) -> None:
        lease = Lease(self, request)
        self.leases.append(lease)
        self.asked.append((lease, ready))
        if request.session.keep:
            self.queues[request.session.name].append(lease)

    def cancel(self, request_id: str) -> None:
        for lease, _ in [pair for pair in self.asked if pair[0].request.id == request_id]:
            lease.release()

    def together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def work(self, rng: random.Random) -> None:
        for lease, ready in list(self.asked):
            queue = self.queues[lease.request.session.name]
            if rng.random() < 0.7 and (not lease.request.session.keep or queue[0] is lease):
                self.asked.remove((lease, ready))
                lease.start = self.states.get(lease.request.session.name)
                lease.behind, lease.ids = self.behind.get(lease.request.session.name, (None, []))
                ready(lease)
        while self.commits and rng.random() < 0.5:
            lease, behind, ids, done = self.commits.pop(0)
            state = Fed((*behind.tokens, *ids))
            if not lease.revoked:
                lease.kept = self.states[lease.request.session.name] = state
                self.behind[lease.request.session.name] = (behind, ids)
            self.queues[lease.request.session.name].remove(lease)
            done(Conflict("it was deleted") if lease.revoked else CommitResult("s", 1, None, len(state.tokens), True))

    def stats(self) -> dict[str, int]:
        return {}


class Lease:
    """Ends exactly once. `start`: the state it begins at; `kept`: the one at its end."""

    newlines, replay, revoked, ended = 0, None, False, False
    start: Fed | None = None
    kept: Fed | None = None
    behind: Fed | None = None

    def __init__(self, turns: Turns, request: Request):
        self.turns = turns
        self.request = request
        self.ids: list[int] = []

    @property
    def logs(self) -> bool:
        return self.turns.logs

    def initial(self) -> Fed | None:
        return self.behind

    def commit(self, state, newlines, answer, done, *, ids, turn) -> None:
        assert not self.ended
        self.ended = True
        assert self.logs or not ids
        assert (*state.tokens, *ids) == (*(self.start.tokens if self.start else ()), *turn), "the log leads to another state"
        self.turns.commits.append((self, state, ids, done))

    def release(self, *, nonfinite: bool = False) -> None:
        assert not self.ended
        self.ended = True
        self.turns.asked = [pair for pair in self.turns.asked if pair[0] is not self]
        if self.request.session.keep:
            self.turns.queues[self.request.session.name].remove(self)


class Life:
    """A worker and everything that happens to it."""

    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        num_slots, states = rng.choice([1, 2, 4, 9]), rng.choice([100, 500, 1_000_000])
        cache = PrefixCache(states, min_tokens=rng.choice([32, 64]), every_tokens=rng.choice([32, 64, 128]))
        self.scheduler = Scheduler(
            num_slots=num_slots,
            prefill_budget=rng.choice([5, 32, 64, 100, 256]),
            mixed=rng.random() < 0.5,
            busy_budget=rng.choice([None, 1, 40, 64]),
            prefixes=rng.choice([None, cache]),
        )
        self.engine, self.turns = TupleEngine(num_slots), Turns(logs=rng.random() < 0.5)
        vocabulary = tokenizer.for_vocab(256)
        self.worker = EngineLoop(self.engine, self.scheduler, vocabulary, self.deliver, sessions=self.turns, queue=1000)
        self.requests: dict[str, Request] = {}
        self.owners: dict[str, str] = {}
        self.texts: dict[tuple[str, int], str] = defaultdict(str)
        self.finishes: dict[tuple[str, int], object] = {}
        self.failed: set[str] = set()
        self.cancelled: set[str] = set()
        self.bases = [[rng.randrange(1, 256) for _ in range(400)] for _ in range(2)]

    def run(self, num_events: int) -> None:
        events = (self.submit, self.cancel, self.cancel_owner, self.sicken, self.revoke, self.turn)
        weights = (25, 5, 1, 2, 1, 66)
        for event in self.rng.choices(events, weights, k=num_events):
            event()
        for _ in range(20_000):
            if not (self.live() or self.worker._flight or self.turns.asked or self.turns.commits):
                break
            self.turn()
        self.turn()
        self.check()

    def live(self) -> list[str]:
        return [name for name in self.requests if name not in self.failed | self.cancelled and not self.ended(name)]

    def ended(self, name: str) -> bool:
        return all((name, index) in self.finishes for index in range(self.requests[name].num_rows))

    def known(self, name: str) -> bool:
        """Whether the worker has taken it, so that a cancel comes before its end."""
        return name in self.worker._active or name in self.worker._preparing

    def submit(self) -> None:
        rng, name = self.rng, f"r{len(self.requests)}"
        if len(self.live()) > 30:
            return
        session = Session(name=rng.choice("ab"), keep=rng.random() < 0.7, separate=False) if rng.random() < 0.3 else None
        single = session is not None and session.keep
        self.requests[name] = request = Request(
            id=name,
            prompts=[self.prompt() for _ in range(1 if single else rng.choice([1, 1, 2, 5]))],
            copies=1 if single else rng.choice([1, 1, 3]),
            sampling=SamplingParams(seed=rng.randrange(100)),
            max_tokens=rng.choice([0, 1, 2, 3, 20, 50]),
            stop_ids=rng.choice([[], [100]]),
            stop_texts=[bytes(rng.choices(LETTERS, k=rng.randrange(1, 4))) for _ in range(rng.choice([0, 0, 1, 3]))],
            loop=rng.choice(["sync", "continuous"]),
            chunk_size=rng.choice([0, 1, 4]),
            session=session,
            cache=rng.random() < 0.9,
        )
        self.owners[name] = rng.choice("xy")
        self.worker.submit(request, self.owners[name])

    def prompt(self) -> list[int]:
        rng = self.rng
        base, length = rng.choice(self.bases), rng.choice([0, 32, 64, 96, rng.randrange(400)])
        return base[:length] + [rng.randrange(1, 256) for _ in range(rng.choice([1, 2, 16, 17, rng.randrange(1, 120)]))]

    def cancel(self) -> None:
        name = self.rng.choice([*filter(self.known, self.requests), "unknown"])
        self.worker.cancel(name)
        self.cancelled |= {name} & set(self.live())

    def cancel_owner(self) -> None:
        if all(map(self.known, self.live())):
            self.worker.cancel_owner("x")
            self.cancelled |= {name for name in self.live() if self.owners[name] == "x"}

    def sicken(self) -> None:
        self.engine.sick |= {self.rng.randrange(self.scheduler.num_slots)}

    def revoke(self) -> None:
        for lease in self.turns.leases:
            lease.revoked |= self.rng.random() < 0.5

    def turn(self) -> None:
        self.worker._inbox.put(None)  # it does not sleep
        self.worker.step()  # takes what was cancelled: of that nothing is told any more
        self.turns.work(self.rng)

    def deliver(self, batch) -> None:
        for owner, events in batch.items():
            for event in events:
                name = event.request_id
                assert self.owners[name] == owner
                assert name not in self.cancelled | self.failed
                if isinstance(event, Failure):
                    assert event.error == "Conflict"
                    self.failed.add(name)
                    continue
                for delta in event.deltas:
                    assert (name, delta.index) not in self.finishes
                    self.texts[name, delta.index] += delta.text
                for finish in event.finishes:
                    assert (name, finish.index) not in self.finishes
                    self.finishes[name, finish.index] = finish

    def check(self) -> None:
        """Nothing is left, and all that was said and kept is right."""
        worker, scheduler, prefixes = self.worker, self.scheduler, self.scheduler.prefixes
        assert not self.live()
        assert (worker._num_waiting, len(worker._active), len(worker._rows), len(worker._preparing)) == (0, 0, 0, 0)
        assert (scheduler.num_free, scheduler.num_waiting) == (scheduler.num_slots, 0)
        assert not any((scheduler._batches, scheduler._queue, scheduler._decoding, scheduler._prompts))
        assert prefixes is None or not prefixes._ways
        starts = {lease.request.id: lease.start for lease in self.turns.leases}
        for (name, index), finish in self.finishes.items():
            request = self.requests[name]
            if finish.reason != "error":
                data, count, reason = said(request, index, starts.get(name))
                assert (self.texts[name, index], finish.completion_tokens, finish.reason) == (data.decode(), count, reason)
        for lease in self.turns.leases:
            assert lease.ended
            if lease.kept is not None:
                data, _, _ = said(lease.request, 0, lease.start)
                assert lease.kept.tokens == (*(lease.start or Fed()).tokens, *lease.request.prompts[0], *data)


def said(request: Request, index: int, start: Fed | None) -> tuple[bytes, int, str]:
    """Return what a row says by the letter: the visible bytes, how many tokens were sampled, why it ended."""
    tokens = (*(start or Fed()).tokens, *request.prompts[index // request.copies])
    data = b""
    for count in range(1, request.max_tokens + 1):
        id = sample(tokens, request.sampling.seed)
        if id in (0, *request.stop_ids):
            return data, count, "stop"
        tokens += (id,)
        data += bytes([id])
        ends = [len(text) for text in request.stop_texts if data.endswith(text)]
        if ends:
            return data[: -max(ends)], count, "stop"
    return data, request.max_tokens, "length"


@pytest.mark.parametrize("seed", range(10))
def test_random_lives(seed):
    Life(seed).run(100)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 600, 20))
def test_random_lives_at_length(seed):
    for one in range(seed, seed + 20):
        Life(one).run(200)
