#!/usr/bin/env python3
"""Simulate a fleet of engines that share sessions: how calls are routed, what a lost node and an upgrade cost, a cold start.

    python bench/cluster/fleet.py [--engines 104 10000] [--out bench/results/fleet.json]      (pip install simpy)

Users of 7.2B models take turns of 64 tokens and get 256, then think for 20 s. An engine's step takes what `engine-h200.json`
measured for its rows, a prompt what it measured for prefills. A session whose state is elsewhere is fetched, and fed what was
logged since its last snapshot where an engine was lost. Events of the fleet are SimPy's; all turns of a moment are
computed together, since a fleet of 10,000 has a million of them a second. One proxy knows who has how many calls.

Not simulated: networks that are full, users who come all at once, prompts in common, several proxies.
"""

import argparse
import heapq
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import simpy

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
NODE = 8  # GPUs of a machine
FEW = 1000  # engines, of which more is simulated
POLICIES: dict[str, dict[str, Any]] = {"two choices": {}, "bounded": {}}
MORE_POLICIES: dict[str, dict[str, Any]] = {
    "random": {}, "hash": {}, "hash, 16 places": {"nodes": 16}, "bounded, 16 places": {"nodes": 16},
    "bounded x 1.5": {"bound": 1.5}, "bounded x 2": {"bound": 2.0}, "two choices, 90 % load": {"load": 0.9},
    "hash, 90 % load": {"load": 0.9}, "bounded, 90 % load": {"load": 0.9},
}  # fmt: skip
WARM_UP = 15.0  # s that count for nothing
AFTER = 10  # s after a loss that are told apart


@dataclass(frozen=True)
class Costs:
    """What things cost, in seconds where nothing else is said.

    steps     of a decode step, by its number of rows
    fetch     of a state of 16.5 MiB, from a bucket or a folder to the device; `between` two of them on one engine, since the
              eight of a machine share 100 Gbit/s
    lag       tokens that were logged since the last snapshot, at most; on average half of them are fed again
    lease     after which sessions of a lost engine may go on elsewhere
    claim     of the two statements of a turn
    start     of an engine whose kernels are compiled and tuned; `first` on a new kind of card
    """

    steps: np.ndarray
    prefill_tokens_s: float
    slots: int = 320
    state_gib: float = 16.5 / 1024
    fetch: float = 0.035
    between: float = 0.0107
    lag: int = 2048
    lease: float = 1.5
    claim: float = 0.002
    start: float = 9.0
    first: float = 48.0
    prompt: int = 64
    answer: int = 256
    think: float = 20.0

    def turn(self, load: float) -> float:
        """A turn on an engine of which so much is taken."""
        return self.answer * float(self.steps[int(load * self.slots)])


def measured() -> tuple[Costs, dict[str, str]]:
    """The costs of an H200, and what they were measured on."""
    entry = json.loads((RESULTS / "engine-h200.json").read_text())["random 7.2b"]
    rows = [row for row in entry["rows"] if "decode" in row]
    batches, steps = [row["decode"] for row in rows], [row["decode"] / row["engine_tok_s"] for row in rows]
    prefill = max(row["tok_s"] for row in entry["rows"] if "prefill" in row)
    table = np.interp(np.arange(321), [0, *batches], [steps[0], *steps])
    return Costs(table, prefill), {"device": entry["device"], "measured": entry["date"]}


class Ring:
    """Consistent hashing as HAProxy has it: each server stands at `nodes` places of a ring."""

    def __init__(self, engines: int, nodes: int, rng: np.random.Generator):
        self._places = np.sort(rng.integers(0, 2**32, engines * nodes, dtype=np.uint32))
        self._owners = rng.permutation(np.repeat(np.arange(engines, dtype=np.int32), nodes))

    def owners(self, hashes: np.ndarray, steps: int) -> np.ndarray:
        """The engine `steps` places behind each hash."""
        return self._owners[(np.searchsorted(self._places, hashes) + steps) % len(self._owners)]


class Router:
    """Gives each call an engine. `policy`: random, two choices, hash, bounded."""

    def __init__(self, fleet: "Fleet", policy: str, bound: float, nodes: int):
        self.fleet = fleet
        self.policy = policy
        self.bound = bound
        self.ring = Ring(fleet.engines, nodes, fleet.rng)

    def route(self, sessions: np.ndarray) -> np.ndarray:
        """An engine for each of these sessions, all of which call now; some engine takes calls."""
        fleet, count = self.fleet, len(sessions)
        there = np.flatnonzero(fleet.takes)
        if self.policy == "random":
            return fleet.rng.choice(there, count).astype(np.int32)
        if self.policy == "two choices":
            first, second = fleet.rng.choice(there, (2, count)).astype(np.int32)
            return np.where(fleet.calls[first] <= fleet.calls[second], first, second)
        limit = math.inf
        if self.policy == "bounded":
            limit = math.ceil(self.bound * (fleet.calls[there].sum() + count) / len(there))
        return self._along_the_ring(sessions, there, limit)

    def _along_the_ring(self, sessions: np.ndarray, there: np.ndarray, limit: float) -> np.ndarray:
        fleet = self.fleet
        chosen = np.full(len(sessions), -1, np.int32)
        calls = fleet.calls.copy()
        for steps in range(40):
            left = np.flatnonzero(chosen < 0)
            if not len(left):
                return chosen
            owners = self.ring.owners(fleet.hashes[sessions[left]], steps)
            fits = fleet.takes[owners]
            if limit < math.inf:
                fits &= calls[owners] + ranks(owners) < limit
            chosen[left[fits]] = owners[fits]
            calls += np.bincount(owners[fits], minlength=fleet.engines)
        left = chosen < 0
        chosen[left] = fleet.rng.choice(there, left.sum())
        return chosen


def ranks(values: np.ndarray) -> np.ndarray:
    """For each entry how many equal ones come before it."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    result = np.empty(len(values), np.int64)
    result[order] = np.arange(len(values)) - np.repeat(starts, np.diff(np.r_[starts, len(values)]))
    return result


@dataclass
class Books:
    """What happened, by second."""

    seconds: int
    turns: np.ndarray = field(init=False)
    fetched: np.ndarray = field(init=False)
    ttft: list[list[np.ndarray]] = field(init=False)
    spread: list[float] = field(default_factory=list)  # rows of the fullest engine by those of the average
    cut: int = 0
    moved: int = 0
    fed_again: float = 0.0  # seconds of GPUs

    def __post_init__(self) -> None:
        self.turns, self.fetched = np.zeros(self.seconds), np.zeros(self.seconds)
        self.ttft = [[] for _ in range(self.seconds)]

    def quantiles(self, since: float, until: float, *shares: float) -> list[float]:
        """Milliseconds to the first token of the turns that began in this time."""
        found = [part for second in self.ttft[int(since) : int(until)] for part in second]
        return [round(float(value) * 1e3, 1) for value in np.quantile(np.concatenate(found), shares)] if found else []


class Fleet:
    """Engines, sessions and their turns.

    at       the engine that has a session's state in memory, -1 none
    lost     whether it has to be fed again what was logged
    takes    whether an engine is given calls, and `alive` whether it runs
    calls    of each engine; `work` counts the tokens that each of its rows has got so far
    fetches  seconds until an engine has fetched what it is to fetch
    """

    def __init__(self, engines: int, policy: str, costs: Costs, *, load: float, seconds: float, bound: float, nodes: int):
        self.costs = costs
        self.tick = 0.05 if engines <= FEW else 0.1  # s
        self.engines = engines
        self.rng = np.random.default_rng(1)
        self.seconds = seconds
        self.env = simpy.Environment()
        turn = costs.turn(load)
        count = int(engines * load * costs.slots * (turn + costs.think) / turn)
        self.hashes = self.rng.integers(0, 2**32, count, dtype=np.uint32)
        self.takes, self.alive = np.ones(engines, bool), np.ones(engines, bool)
        self.calls, self.work, self.fetches = np.zeros(engines, np.int64), np.zeros(engines), np.zeros(engines)
        self.router = Router(self, policy, bound, nodes)
        self.lost = np.zeros(count, bool)
        self.at = self.rng.integers(0, engines, count).astype(np.int32)
        if policy in ("hash", "bounded"):
            self.at = self.router.ring.owners(self.hashes, 0)
        self.books = Books(math.ceil(seconds))
        self.num_ticks = int(seconds / self.tick)
        self.wakes: list[list[np.ndarray]] = [[] for _ in range(self.num_ticks + 1)]
        self._who, self._where = np.empty(0, np.int32), np.empty(0, np.int16)
        self._until = np.empty(0, np.float32)
        self._sleep(np.arange(count, dtype=np.int32), self.rng.exponential(costs.think + turn, count))
        self.env.process(self._run())

    def run(self) -> "Fleet":
        """Simulate to the end."""
        self.env.run(until=self.seconds)
        return self

    # Turns.

    def _run(self) -> Iterator[simpy.Event]:
        for tick in range(self.num_ticks):
            self._finish()
            if self.wakes[tick]:
                self._begin(np.concatenate(self.wakes[tick]))
                self.wakes[tick] = []
            if tick * self.tick > WARM_UP and tick % 10 == 0 and self.takes.any():
                rows = self.calls[self.takes]
                self.books.spread.append(float(rows.max() / max(rows.mean(), 1e-9)))
            yield self.env.timeout(self.tick)

    def _finish(self) -> None:
        """Rows go on for a tick; those that have their tokens end, and their users think."""
        rows = np.minimum(self.calls, self.costs.slots)
        self.work += np.where(self.alive, self.tick / self.costs.steps[rows], 0.0)
        self.fetches = np.maximum(0.0, self.fetches - self.tick)
        done = self.work.astype(np.float32)[self._where] >= self._until
        if done.any():
            who = self._who[done]
            self.calls -= np.bincount(self._where[done], minlength=self.engines)
            self._who, self._where, self._until = self._who[~done], self._where[~done], self._until[~done]
            self._sleep(who, self.rng.exponential(self.costs.think, len(who)))

    def _sleep(self, who: np.ndarray, seconds: np.ndarray) -> None:
        ticks = (self.env.now / self.tick + 1 + seconds / self.tick).astype(int)
        soon = ticks < self.num_ticks
        who, ticks = who[soon], ticks[soon]
        if not len(who):
            return
        order = np.argsort(ticks, kind="stable")
        found, starts = np.unique(ticks[order], return_index=True)
        for tick, part in zip(found, np.split(who[order], starts[1:]), strict=True):
            self.wakes[tick].append(part)

    def _begin(self, who: np.ndarray) -> None:
        """These users call."""
        costs, books, second = self.costs, self.books, int(self.env.now)
        if not self.takes.any():
            self._sleep(who, np.full(len(who), 1.0))
            return
        where = self.router.route(who)
        misses = self.at[who] != where
        self.calls += np.bincount(where, minlength=self.engines)
        step = costs.steps[np.minimum(self.calls[where], costs.slots)]
        waits = np.maximum(0, self.calls[where] - costs.slots) / costs.slots * costs.answer
        fed = np.where(misses & self.lost[who], self.rng.random(len(who)) * costs.lag, 0.0)
        fetch = np.zeros(len(who))
        fetch[misses] = self.fetches[where[misses]] + ranks(where[misses]) * costs.between + costs.fetch
        self.fetches += np.bincount(where[misses], minlength=self.engines) * costs.between
        first = costs.claim + fetch + waits * step + (costs.prompt + fed) / costs.prefill_tokens_s + step
        tokens = self.rng.gamma(4.0, costs.answer / 4, len(who))
        self._who, self._where = np.r_[self._who, who], np.r_[self._where, where.astype(np.int16)]
        self._until = np.r_[self._until, (self.work[where] + first / step + tokens).astype(np.float32)]
        self.at[who], self.lost[who] = where, False
        books.turns[second] += len(who)
        books.fetched[second] += misses.sum() * costs.state_gib
        books.fed_again += float(fed.sum() / costs.prefill_tokens_s)
        books.ttft[second].append(first)

    # What happens to engines.

    def stop(self, engines: np.ndarray, *, kill: bool) -> None:
        """Engines end. Calls on those that are killed are cut and come again; their sessions are free after the lease."""
        gone = np.zeros(self.engines, bool)
        gone[engines] = True
        self.takes &= ~gone
        self.alive &= ~gone
        cut = gone[self._where]
        who = self._who[cut]
        self.calls[gone] = 0
        self._who, self._where, self._until = self._who[~cut], self._where[~cut], self._until[~cut]
        self._sleep(who, np.full(len(who), self.costs.lease) + self.rng.random(len(who)) * 0.1)
        had = (self.at >= 0) & gone[np.maximum(self.at, 0)]
        self.at[had] = -1
        self.lost |= had & kill
        self.books.cut += len(who)
        self.books.moved += int(had.sum())

    def start(self, engines: np.ndarray) -> None:
        """Engines take calls."""
        self.alive[engines] = self.takes[engines] = True
        self.fetches[engines] = 0.0

    def lose(self, when: float, nodes: int) -> Iterator[simpy.Event]:
        """Machines die, and are there again when they have been started."""
        yield self.env.timeout(when)
        picked = self.rng.choice(self.engines // NODE, nodes, replace=False)
        engines = (picked[:, None] * NODE + np.arange(NODE)).ravel()
        self.stop(engines, kill=True)
        yield self.env.timeout(self.costs.start)
        self.start(engines)

    def upgrade(self, when: float, at_once: int, done: list[float]) -> Iterator[simpy.Event]:
        """Machine after machine takes no calls, finishes what runs, ends, and starts again."""
        yield self.env.timeout(when)
        places = simpy.Resource(self.env, at_once)
        yield self.env.all_of([self.env.process(self._upgrade_one(node, places)) for node in range(self.engines // NODE)])
        done.append(self.env.now - when)

    def _upgrade_one(self, node: int, places: simpy.Resource) -> Iterator[simpy.Event]:
        with places.request() as turn:
            yield turn
            engines = np.arange(node * NODE, (node + 1) * NODE)
            self.takes[engines] = False
            until = self.env.now + 30
            while self.calls[engines].any() and self.env.now < until:
                yield self.env.timeout(4 * self.tick)
            self.stop(engines, kill=False)
            yield self.env.timeout(self.costs.start)
            self.start(engines)

    def cold_start(self, seconds: float) -> Iterator[simpy.Event]:
        """No engine runs; all start at once. The users are there already."""
        self.stop(np.arange(self.engines), kill=False)
        ready = [(seconds + float(late), node) for node, late in enumerate(self.rng.exponential(1.0, self.engines // NODE))]
        heapq.heapify(ready)
        while ready:
            moment, node = heapq.heappop(ready)
            yield self.env.timeout(max(0.0, moment - self.env.now))
            self.start(np.arange(node * NODE, (node + 1) * NODE))


def steady(fleet: Fleet) -> dict[str, Any]:
    """What a fleet does to which nothing happens."""
    books, since = fleet.books, int(WARM_UP)
    p50, p99, p999 = books.quantiles(since, fleet.seconds, 0.5, 0.99, 0.999)
    fetched = float(books.fetched[since:].mean())
    turns = float(books.turns[since:].mean())
    return {
        "turns_s": round(turns), "fetched_gib_s": round(fetched, 2),
        "misses": round(fetched / fleet.costs.state_gib / turns, 4),
        "spread": round(float(np.mean(books.spread)), 2), "ttft_ms": {"p50": p50, "p99": p99, "p99.9": p999},
    }  # fmt: skip


def course(fleet: Fleet) -> dict[str, list[float]]:
    """p99 of the time to the first token, and what was fetched, second by second."""
    seconds = range(int(WARM_UP), int(fleet.seconds))
    p99 = [(fleet.books.quantiles(second, second + 1, 0.99) or [None])[0] for second in seconds]
    return {"ttft_p99_ms": p99, "fetched_gib_s": [round(float(fleet.books.fetched[second]), 1) for second in seconds]}


def after(fleet: Fleet, moment: float) -> dict[str, Any]:
    """What an event at this moment cost."""
    books = fleet.books
    p50, p99, p999 = books.quantiles(moment, moment + AFTER, 0.5, 0.99, 0.999)
    peak = float(books.fetched[int(moment) :].max())
    return {
        "sessions_moved": books.moved, "calls_cut": books.cut, "gpu_seconds_fed_again": round(books.fed_again, 1),
        "fetched_peak_gib_s": round(peak, 1), "ttft_ms_next_10s": {"p50": p50, "p99": p99, "p99.9": p999}, **course(fleet),
    }  # fmt: skip


def simulate(engines: int, costs: Costs, found: dict[str, Any], save: Callable[[], None]) -> None:
    """All figures of a fleet of this size, but those that are `found` already; each is saved when it is there."""
    small = engines <= FEW
    seconds, moment = (60.0, 20.0) if small else (28.0, 16.0)
    options = {"load": 0.75, "seconds": seconds, "bound": 1.25, "nodes": 256}
    policies, events = found.setdefault("policies", {}), found.setdefault("events", {})

    def fleet(policy: str = "bounded", **changed: Any) -> Fleet:
        return Fleet(engines, policy, costs, **(options | changed))

    def loss() -> dict[str, Any]:
        hurt, nodes = fleet(), max(1, round(engines / NODE / 100))
        hurt.env.process(hurt.lose(moment, nodes))
        return {"nodes": nodes, "of": engines // NODE} | after(hurt.run(), moment)

    def upgrade() -> dict[str, Any]:
        rolling, at_once, done = (
            fleet(seconds=moment + (320.0 if small else 20.0)),
            max(1, engines // NODE // 10),
            list[float](),
        )
        rolling.env.process(rolling.upgrade(moment, at_once, done))
        figures = {"nodes_at_once": at_once} | after(rolling.run(), moment)
        return figures | {"seconds": round(done[0], 1) if done else None}

    def cold_start(start: float) -> dict[str, Any]:
        cold = fleet(seconds=math.ceil(start) + (60.0 if small else 20.0))
        cold.env.process(cold.cold_start(start))
        return after(cold.run(), math.floor(start))

    for name, changed in (POLICIES | MORE_POLICIES if small else POLICIES).items():
        if name not in policies:
            policy = name.split(",")[0].split(" x ")[0]
            policies[name] = steady(fleet(policy, **changed).run())
            print(f"{engines} {name}: {policies[name]}", flush=True)
            save()
    todo = {"loss": loss, "upgrade": upgrade, "cold start": lambda: cold_start(costs.start)}
    for name, work in (todo | {"first start": lambda: cold_start(costs.first)} if small else todo).items():
        if name not in events:
            events[name] = work()
            print(f"{engines} {name}: { ({key: v for key, v in events[name].items() if not isinstance(v, list)}) }", flush=True)
            save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[104, 10_000])
    parser.add_argument("--out", type=Path, default=RESULTS / "fleet.json")
    args = parser.parse_args()
    costs, origin = measured()
    said = {name: value for name, value in asdict(replace(costs, steps=np.empty(0))).items() if name != "steps"}
    fleets: dict[str, Any] = {}
    if args.out.exists() and (before := json.loads(args.out.read_text()))["costs"] == said:
        fleets = before["fleets"]  # goes on where it was stopped

    def save() -> None:
        result = {"date": datetime.now(UTC).date().isoformat(), **origin, "costs": said, "fleets": fleets}
        args.out.write_text(json.dumps(result, indent=1) + "\n")

    for engines in args.engines:
        simulate(engines, costs, fleets.setdefault(str(engines), {}), save)


if __name__ == "__main__":
    main()
