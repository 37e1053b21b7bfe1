"""Which engine gets a request. Knows numbers and names, no sockets.

A session has a home among the engines that are ready, chosen by its name alone (rendezvous hashing: when an engine is lost or
added, only what it had or gets moves), so that every HTTP process finds the same one, which has the state in memory. All other
requests go to the engine with the fewest rows for its slots, and those of many rows to several.

Rows beyond all free slots are spread late: an engine gets a few that wait, so that no slot is ever free, and the rest wait in
the HTTP process until it is known which engine has slots for them.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Protocol, TypeVar

from rwkv_batch.ipc.messages import PHASES, Seat
from rwkv_batch.request import Request

LEAST_ROWS = 16  # that are spread over several engines although one has slots for them
WAITING_SHARE = 8  # an engine gets as many rows that wait as one in so many of its slots
NODE = re.compile(r":\d+$")  # behind a dialogue's name: those of its nodes


class Engine(Protocol):
    """What is known of an engine: where it is, whether it takes requests, how many rows it has for how many slots."""

    seat: Seat
    phase: str

    @property
    def load(self) -> tuple[int, int]:
        """Rows and slots."""


E = TypeVar("E", bound=Engine)


class Router:
    """Chooses. `number`: of this HTTP process, so that each breaks ties in another order."""

    def __init__(self, number: int = 0):
        self._turn = number

    def link_for(self, request: Request, engines: Sequence[E]) -> E | None:
        """The engine that a request goes to; one that is not ready when none is, None when there is none."""
        if request.session is not None:
            return self.home(request.namespace, request.session.name, engines)
        best = best_off(engines)
        if len(best) < 2:
            return next(iter(best), None)
        self._turn = (self._turn + 1) % len(best)
        return min(best[self._turn :] + best[: self._turn], key=lambda engine: engine.load[0] / engine.load[1])

    def spread(self, request: Request, engines: Sequence[E]) -> tuple[list[tuple[E, range]], range]:
        """Which rows of a request go to which engine now, and which wait until others have ended. No rows at all: no engine."""
        rows = request.indices
        best = self.link_for(request, engines)
        ready = [engine for engine in best_off(engines) if engine.phase == "ready"]
        if best is None or len(ready) < 2 or request.session is not None:
            return ([(best, rows)] if best is not None else []), rows[len(rows) :]
        free = [max(0, engine.load[1] - engine.load[0]) for engine in ready]
        at_once = max(free[ready.index(best)], LEAST_ROWS if not any(free) else 0)
        if len(rows) <= at_once and (len(rows) < LEAST_ROWS or len(request.prompts) == 1):
            return [(best, rows)], rows[len(rows) :]
        unit = unit_of(request)
        room = free if sum(free) >= len(rows) else [room_of(engine) for engine in ready]
        shares = [rows_of // unit for rows_of in room]
        if not any(shares):
            shares[ready.index(best)] = 1
        num_units = min(len(rows) // unit, sum(shares))
        ends = [round(num_units * sum(shares[: i + 1]) / sum(shares)) * unit for i in range(len(ready))]
        parts = [(engine, rows[begin:end]) for engine, begin, end in zip(ready, [0, *ends], ends, strict=False) if end > begin]
        return parts, rows[num_units * unit :]

    def further(self, request: Request, rows: range, engines: Sequence[E]) -> tuple[E, range] | None:
        """Which of the rows that wait go to which engine now; None: none has room for them."""
        ready = [engine for engine in engines if engine.phase == "ready"]
        engine = max(ready, key=room_of, default=None)
        if engine is None:
            return None
        unit, room = unit_of(request), room_of(engine)
        if room < min(len(rows), max(unit, engine.load[1] // WAITING_SHARE)):
            return None
        return engine, rows[: max(unit, room // unit * unit)]

    def home(self, namespace: str, name: str | None, engines: Sequence[E]) -> E | None:
        """The engine that a session lives in, a node of a dialogue where the dialogue does; None: when nobody keeps any."""
        best = best_off([engine for engine in engines if engine.seat.sessions]) or best_off(engines)
        wanted = f"{namespace}\0{NODE.sub('', name or '')}"
        return max(best, key=lambda engine: score(wanted, engine.seat.index), default=None)


def others_are_free(engines: Sequence[Engine], num_rows: int) -> bool:
    """Whether several engines take requests and at least one of them seems to have free slots for so many rows."""
    loads = [engine.load for engine in engines if engine.phase == "ready"]
    return len(loads) > 1 and any(rows + num_rows <= slots for rows, slots in loads)


def unit_of(request: Request) -> int:
    """Rows that stay together, so that a part is a request: the copies of a prompt, where there are several prompts."""
    return request.copies if len(request.prompts) > 1 else 1


def room_of(engine: Engine) -> int:
    """Rows that an engine may get now, those included that wait there for a slot."""
    rows, slots = engine.load
    return max(0, slots + max(1, slots // WAITING_SHARE) - rows)


def best_off(engines: Sequence[E]) -> list[E]:
    """Those in the best phase that one is in."""
    phase = min((engine.phase for engine in engines), key=PHASES.index, default="lost")
    return [engine for engine in engines if engine.phase == phase]


def score(name: str, index: int) -> bytes:
    """How much an engine wants a name: the highest bidder has it (rendezvous hashing)."""
    return hashlib.blake2b(f"{index}\0{name}".encode(), digest_size=8).digest()
