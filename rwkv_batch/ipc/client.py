"""The HTTP process's end: what its routes ask of the engines, from any thread."""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.ipc.link import Pace, SessionAnswer
from rwkv_batch.ipc.loop import Among, Engines, LinkLoop, best_phase, refuse_in
from rwkv_batch.ipc.messages import Ask, Execute, Live, Seat, Submit, encode
from rwkv_batch.ipc.router import others_are_free
from rwkv_batch.ipc.tickets import Ticket
from rwkv_batch.request import Event, Request
from rwkv_batch.served.variants import VariantOrder
from rwkv_batch.session_messages import SessionCommand


class EngineClient(Engines, LinkLoop):
    """The HTTP process's end: submits requests and fans the engines' events out to their tickets.

    seats         where the engines are, none of which need be there yet; or the ipc:// path of the only one
    heartbeat     seconds between two signs of life
    peer_seconds  silence after which an engine is taken for lost
    tick          called in the client's thread after each message and at least every 20 ms while tickets are open
    busy          whether to do so although no ticket is open
    on_info       called with what a loaded engine is, when it introduces itself
    observe       called with each event and the ticket it is for
    number        of this HTTP process: those of equal load go through the engines in different orders

    A callback that raises is logged and changes nothing else, except that a `format_event` that raises ends its own ticket.
    """

    def __init__(
        self,
        seats: str | Sequence[Seat],
        *,
        heartbeat: float = 0.5,
        peer_seconds: float = 15.0,
        tick: Callable[[], None] | None = None,
        number: int = 0,
    ):
        seats = [Seat(address=seats)] if isinstance(seats, str) else seats
        super().__init__(seats, Pace(heartbeat, peer_seconds), number)
        if tick is not None:
            self.tick = tick

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; open tickets fail."""
        self._closing = True
        self._bell.ring()
        self._thread.join(timeout=5)

    def use(self, seats: Sequence[Seat]) -> None:
        """These are all the engines from now on: links to new ones begin, what those have that are gone fails."""
        self._seats = list(seats)
        self._bell.ring()

    def check(self) -> None:
        """Raise Unavailable unless there is an engine that takes requests."""
        refuse_in(self.phase)

    def submit(
        self,
        request: Request,
        format_event: Callable[[Event], Any] | None = None,
        answered: Callable[[], None] | None = None,
        ended: Callable[[], None] | None = None,
        endpoint: str = "",
        given_id: str = "",
        among: Among = None,
    ) -> Ticket:
        """Send a request to one of these engines.

        Raises Unavailable; a refusal by the engine comes as Failure in the ticket's queue.
        """
        refuse_in(best_phase(self.links_of(among)))
        ticket = Ticket(self._cancel, request, format_event)
        ticket.answered, ticket.ended, ticket.among = answered, ended, among
        now = request.session is None and others_are_free(self.links_of(among), request.num_rows)
        message = Submit(request, endpoint, given_id, now=now)
        self._outbox.append((ticket, message, encode(message)))  # encoded here: what cannot be must not end the client's thread
        self._bell.ring()
        return ticket

    def ask(self, question: Ask, answer: Callable[[list[Live]], None]) -> None:
        """Ask all engines about requests; `answer` is called in the client's thread, never when all are lost meanwhile."""
        self._asked.append((question, answer))
        self._bell.ring()

    def execute(
        self, command: SessionCommand | VariantOrder, answer: Callable[[SessionAnswer], None], among: Among = None
    ) -> None:
        """Carry out a command about sessions of these engines, or an order about variants, which goes to all of them.

        Raises Unavailable.

        `answer` is called once in the client's thread, with a Failure if the engine is lost.
        """
        refuse_in(best_phase(self.links_of(among)))
        self._commands.append((Execute(secrets.token_hex(8), command), answer, among))
        self._bell.ring()

    def fail_all(self, error: RwkvBatchError) -> None:
        """End all open tickets with an error."""
        self._outbox.append((None, error, b""))
        self._bell.ring()

    def _cancel(self, ticket: Ticket) -> None:
        self._cancelled.append(ticket)
        self._bell.ring()
