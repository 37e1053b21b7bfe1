"""Which engine gets a request. Knows numbers and names, no sockets.

A session has a home among the engines that are ready, chosen by its name alone (rendezvous hashing: when an engine is lost or
added, only what it had or gets moves), so that every HTTP process finds the same one, which has the state in memory. All other
requests go to the engine with the fewest rows for its slots.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Protocol, TypeVar

from rwkv_batch.ipc.messages import PHASES, Seat
from rwkv_batch.request import Request

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

    def home(self, namespace: str, name: str | None, engines: Sequence[E]) -> E | None:
        """The engine that a session lives in, a node of a dialogue where the dialogue does; None: when nobody keeps any."""
        best = best_off([engine for engine in engines if engine.seat.sessions]) or best_off(engines)
        wanted = f"{namespace}\0{NODE.sub('', name or '')}"
        return max(best, key=lambda engine: score(wanted, engine.seat.index), default=None)


def best_off(engines: Sequence[E]) -> list[E]:
    """Those in the best phase that one is in."""
    phase = min((engine.phase for engine in engines), key=PHASES.index, default="lost")
    return [engine for engine in engines if engine.phase == phase]


def score(name: str, index: int) -> bytes:
    """How much an engine wants a name: the highest bidder has it (rendezvous hashing)."""
    return hashlib.blake2b(f"{index}\0{name}".encode(), digest_size=8).digest()
