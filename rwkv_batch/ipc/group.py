"""Some of the engines that an HTTP process has links to: those of one model."""

from collections.abc import Callable, Collection
from typing import Any

from rwkv_batch.ipc.client import EngineClient
from rwkv_batch.ipc.link import EngineLink, SessionAnswer
from rwkv_batch.ipc.loop import Engines, refuse_in
from rwkv_batch.ipc.tickets import Ticket
from rwkv_batch.request import Request
from rwkv_batch.session_messages import SessionCommand


class EngineGroup(Engines):
    """Has those methods of an `EngineClient` that are about single requests. Any thread. `numbers`: of the engines."""

    def __init__(self, client: EngineClient, numbers: Collection[int]):
        self.client = client
        self.numbers = frozenset(numbers)

    @property
    def links(self) -> list[EngineLink]:
        """The links to them."""
        return self.client.links_of(self.numbers)

    def check(self) -> None:
        """Raise Unavailable unless there is one that takes requests."""
        refuse_in(self.phase)

    def submit(self, request: Request, *args: Any, **more: Any) -> Ticket:
        """See `EngineClient.submit`."""
        return self.client.submit(request, *args, **more, among=self.numbers)

    def execute(self, command: SessionCommand, answer: Callable[[SessionAnswer], None]) -> None:
        """See `EngineClient.execute`."""
        self.client.execute(command, answer, among=self.numbers)
