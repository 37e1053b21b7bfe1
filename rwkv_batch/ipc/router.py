"""Several engines behind one front: which of them gets a request. Each has an address, an `EngineInfo`, figures and sessions of
its own, held by its client.

All sessions of a namespace live in one engine, so that forks, lists and the states of responses stay together; the namespace
alone chooses it, so that every HTTP process finds the same one. A request without a session goes to the engine with the fewest
tickets.
"""

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.ipc.client import EngineClient, SessionAnswer, Ticket
from rwkv_batch.ipc.messages import Ask, EngineInfo, Live
from rwkv_batch.request import Request
from rwkv_batch.session_messages import SessionCommand

PHASES = ("ready", "loading", "draining", "lost")  # what is told of several engines is the first of these that one is in


def shared(name: str) -> property:
    """A callback of `EngineClient` that all clients have."""

    def give(router: "EngineRouter", callback: Callable) -> None:
        for client in router.clients:
            setattr(client, name, callback)

    return property(lambda router: getattr(router.clients[0], name), give)


class EngineRouter:
    """Has the methods of an `EngineClient` and uses that of the engine concerned; `clients` are in the order of the engines.

    Callbacks come from the thread of each client.
    """

    tick, busy, observe, on_info = map(shared, ("tick", "busy", "observe", "on_info"))

    def __init__(self, clients: Sequence[EngineClient]):
        self.clients = list(clients)

    @property
    def phase(self) -> str:
        """That of the engine that is best off."""
        return min((client.phase for client in self.clients), key=PHASES.index)

    @property
    def ready(self) -> bool:
        """Whether there is an engine that takes requests."""
        return self.phase == "ready"

    @property
    def info(self) -> EngineInfo | None:
        """What the first engine is that has introduced itself."""
        return next((client.info for client in self.clients if client.info is not None), None)

    @property
    def stats(self) -> dict[str, int | float]:
        """The figures of all engines, added up."""
        total: dict[str, int | float] = {}
        for client in self.clients:
            for name, value in client.stats.items():
                total[name] = total.get(name, 0) + value
        return total

    @property
    def tickets(self) -> dict[str, Ticket]:
        """Those of all engines."""
        first, *others = (client.tickets for client in self.clients)
        return {key: ticket for tickets in (first, *others) for key, ticket in list(tickets.items())} if others else first

    def home(self, namespace: str) -> EngineClient:
        """The engine that has the sessions of a namespace."""
        return self.clients[zlib.crc32(namespace.encode()) % len(self.clients)]

    def client_for(self, request: Request) -> EngineClient:
        """The engine that a request goes to."""
        if request.session is not None:
            return self.home(request.namespace)
        return min(self.clients, key=lambda client: (PHASES.index(client.phase), len(client.tickets)))

    def start(self) -> None:
        """Begin to connect to all."""
        for client in self.clients:
            client.start()

    def close(self) -> None:
        """End all connections; open tickets fail."""
        for client in self.clients:
            client.close()

    def check(self) -> None:
        """Raise Unavailable unless there is an engine that takes requests."""
        min(self.clients, key=lambda client: PHASES.index(client.phase)).check()

    def submit(self, request: Request, *args: Any, **more: Any) -> Ticket:
        """See `EngineClient.submit`."""
        return self.client_for(request).submit(request, *args, **more)

    def execute(self, command: SessionCommand, answer: Callable[[SessionAnswer], None]) -> None:
        """See `EngineClient.execute`."""
        self.home(command.namespace).execute(command, answer)

    def ask(self, question: Ask, answer: Callable[[list[Live]], None]) -> None:
        """Ask all engines that take requests; `answer` is called once with what all said, never when one is lost meanwhile."""
        asked = [client for client in self.clients if client.ready] or self.clients[:1]
        found: list[list[Live]] = []
        lock = threading.Lock()

        def gather(requests: list[Live]) -> None:
            with lock:
                found.append(requests)
                complete = len(found) == len(asked)
            if complete:
                answer(sorted((live for part in found for live in part), key=lambda live: live.created))

        for client in asked:
            client.ask(question, gather)

    def fail_all(self, error: RwkvBatchError) -> None:
        """End all open tickets with an error."""
        for client in self.clients:
            client.fail_all(error)
