"""What an HTTP process's thread `channel` does: it owns the links to the engines, and hands out what comes over them.

No send ever waits: an engine that is gone or does not read loses the tickets it had and nothing else.
"""

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import zmq

from rwkv_batch.errors import EngineFailed, NotBegun, RwkvBatchError, Unavailable
from rwkv_batch.ipc.handover import Handover
from rwkv_batch.ipc.late_texts import read_all
from rwkv_batch.ipc.link import EngineLink, Pace, Part, SessionAnswer
from rwkv_batch.ipc.messages import (
    PHASES,
    Accepted,
    Ask,
    Batch,
    CommandResult,
    EngineInfo,
    Execute,
    Found,
    Live,
    Seat,
    Status,
    Submit,
    ToHttp,
    joined,
)
from rwkv_batch.ipc.router import Router
from rwkv_batch.ipc.tickets import Ticket
from rwkv_batch.ipc.waker import Bell, call_back
from rwkv_batch.request import Event, Failure
from rwkv_batch.served.variants import ListVariants, LoadAdapter, LoadState, RemoveAdapters, RemoveStates, VariantOrder

log = logging.getLogger(__name__)

# Codes of failures after which another engine may be asked.
REFUSALS = ("no_free_slot", "queue_full", "draining", "loading", "engine_busy")


Among = Collection[int] | None  # numbers of the engines that are meant, None = all


class Question:
    """What several engines are asked, and what they have said so far."""

    def __init__(self, links: Iterable[EngineLink], answer: Callable[[list[Live]], None]):
        self.pending = {link.seat.index for link in links}
        self.found: list[Live] | None = None
        self.answer = answer

    def heard(self, index: int, found: list[Live] | None) -> bool:
        """One has answered, or was lost (None); returns whether that was the last one. When all are lost nobody is told."""
        if found is not None:
            self.found = (self.found or []) + found
        self.pending.discard(index)
        if not self.pending and self.found is not None:
            call_back(self.answer, joined(self.found))
        return not self.pending


class OrderForAll:
    """An order about variants, which all engines carry out or none."""

    def __init__(self, order: VariantOrder, links: Sequence[EngineLink], answer: Callable[[SessionAnswer], None]):
        self.order = order
        self.pending = len(links)
        self.done: list[EngineLink] = []  # that have carried it out
        self.said: SessionAnswer | None = None
        self.answer = answer

    def heard(self, link: EngineLink, said: SessionAnswer) -> None:
        """One has answered, or was lost; what the first says that fails is the answer, and others forget what they loaded."""
        self.pending -= 1
        if isinstance(said, Failure):
            self.said = self.said if isinstance(self.said, Failure) else said
        else:
            self.done.append(link)
            self.said = self.said or said
        if self.pending:
            return
        if isinstance(self.said, Failure) and isinstance(self.order, LoadState | LoadAdapter):
            forget = RemoveStates if isinstance(self.order, LoadState) else RemoveAdapters
            for one in self.done:
                if one.ready:
                    one.send(Execute(secrets.token_hex(8), forget(name=self.order.name)))
        call_back(self.answer, self.said)


class LinkLoop:
    """The thread and what it owns; `EngineClient` is what others see of it.

    tickets  that are open
    links    to the engines, in the order of their seats; replaced as a whole, never changed
    """

    BUSY_POLL_MS = 20
    IDLE_POLL_MS = 250

    def __init__(self, seats: Sequence[Seat], pace: Pace, number: int):
        self.tick: Callable[[], None] = lambda: None
        self.busy: Callable[[], bool] = lambda: False
        self.on_info: Callable[[EngineInfo], None] = lambda info: None
        self.observe: Callable[[Ticket, Event], None] = lambda ticket, event: None
        self.tickets: dict[str, Ticket] = {}
        self._outbox: deque[tuple[Ticket, Submit, bytes] | tuple[None, RwkvBatchError, bytes]] = deque()
        self._cancelled: deque[Ticket] = deque()
        self._asked: deque[tuple[Ask, Callable[[list[Live]], None]]] = deque()
        self._questions: dict[str, Question] = {}
        self._commands: deque[tuple[Execute, Callable[[SessionAnswer], None], Among]] = deque()
        self._handed: dict[str, Handover] = {}  # of each ticket
        self._waiting: dict[str, Handover] = {}  # those with rows that no engine has yet, oldest first
        self._router = Router(number)
        self._bell = Bell()
        self._closing = False
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._pace = pace
        self._seats = list(seats)
        self.links = [self._link(seat) for seat in self._seats]
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)

    def _run(self) -> None:
        self._poller.register(self._bell.fd, zmq.POLLIN)
        for link in self.links:
            link.connect()
        while not self._closing:
            pause = self.BUSY_POLL_MS if self.tickets or call_back(self.busy) else self.IDLE_POLL_MS
            ready = dict(self._poller.poll(pause))
            self._bell.hear()
            self._find_seats()
            self._send_out()
            for link in self.links:
                try:
                    read_all(link.messages(), partial(self._feed, link), partial(self._take, link))
                    link.check_up(ready)
                except ConnectionError as error:
                    self._lose(link, str(error))
                    link.connect()
            self._hand_on()
            call_back(self.tick)
        self._fail(Unavailable("the server is stopping", code="draining"))
        for link in self.links:
            self._end(link)
        self._context.destroy(linger=0)

    def _link(self, seat: Seat) -> EngineLink:
        return EngineLink(seat, self._context, self._poller, self._pace)

    def _find_seats(self) -> None:
        """Link to the seats that `use` was told of."""
        seats, known = self._seats, {link.seat: link for link in self.links}
        if list(known) == seats:
            return
        links = []
        for seat in seats:
            link = known.pop(seat, None)
            if link is None:
                link = self._link(seat)
                link.connect()
            links.append(link)
        self.links = links
        for link in known.values():
            self._end(link)

    def links_of(self, among: Among) -> list[EngineLink]:
        """The links to these engines."""
        return self.links if among is None else [link for link in self.links if link.seat.index in among]

    def _lose(self, link: EngineLink, why: str) -> None:
        """A connection has no future: what the engine had fails."""
        if link.phase in ("ready", "draining"):  # why one that is still loading ends, it says itself
            log.warning("%s is lost: %s", "the engine" if len(self.links) == 1 else f"engine {link.seat.index}", why)
        self._end(link)

    def _end(self, link: EngineLink) -> None:
        link.disconnect()
        self._questions = {key: asked for key, asked in self._questions.items() if not asked.heard(link.seat.index, None)}
        error = engine_lost("this")
        for question in list(link.commands):
            call_back(link.commands.pop(question), Failure.of("", error))
        error = engine_lost("this request")
        for part_id in list(link.parts):
            self._feed(link, Failure.of(part_id, error))

    def _send_out(self) -> None:
        while self._outbox:
            ticket, message, payload = self._outbox.popleft()
            if ticket is None:
                self._fail(message)
            elif ticket.cancelled:  # its turn among the cancelled may have been already: it must not be sent after that
                ticket.end()
            else:
                self._submit(Handover(ticket, message, payload))
        while self._asked:
            self._put(*self._asked.popleft())
        while self._commands:
            self._execute(*self._commands.popleft())
        while self._cancelled:
            ticket = self._cancelled.popleft()
            self._forget(ticket)
            ticket.end()

    def _submit(self, handover: Handover) -> None:
        """Send a request to the engines that are to have it."""
        ticket = handover.ticket
        self.tickets[ticket.request_id] = ticket
        self._handed[ticket.request_id] = handover
        parts, waiting = self._router.spread(handover.message.request, self.links_of(ticket.among))
        try:
            refuse_in(parts[0][0].phase if parts else "lost")
        except RwkvBatchError as error:
            self._pass_on(ticket, Failure.of(ticket.request_id, error))
            return
        if waiting:
            handover.waiting.append(waiting)
            self._waiting[ticket.request_id] = handover
        for link, rows in parts:
            if not ticket.done:
                self._give(handover, link, handover.part(rows))

    def _give(self, handover: Handover, link: EngineLink, part: Part) -> None:
        if not handover.give(link, part):
            self._feed(link, Failure.of(part.id, Unavailable("the engine does not keep up", code="engine_busy")))

    def _hand_on(self) -> None:
        """Send rows that wait to engines that have room for them now."""
        for request_id, handover in list(self._waiting.items()):
            links = self.links_of(handover.ticket.among)
            while handover.waiting:
                rows = handover.waiting.popleft()
                found = self._router.further(handover.message.request, rows, links)
                if found is None:
                    handover.waiting.appendleft(rows)
                    break
                link, now = found
                if rest := rows[len(now) :]:
                    handover.waiting.appendleft(rest)
                self._give(handover, link, handover.part(now))
            if not handover.waiting:
                self._waiting.pop(request_id, None)
            elif not handover.in_hand and not any(link.ready for link in links):
                self._pass_on(handover.ticket, Failure.of(request_id, engine_lost("this request")))

    def _elsewhere(self, link: EngineLink, part: Part, failure: Failure) -> bool:
        """Whether a part that an engine has refused goes to another one, now or later."""
        handover = self._handed.get(part.ticket.request_id)
        if part.accepted or failure.code not in REFUSALS or handover is None:
            return False
        part.refused.add(link.seat.index)
        links = self.links_of(part.ticket.among)
        others = [other for other in links if other.ready and other.seat.index not in part.refused]
        other = self._router.link_for(handover.message.request, others)
        if other is None and failure.code == "no_free_slot":
            handover.may_wait(part)
            other = self._router.link_for(handover.message.request, links)
        if other is not None:
            handover.take_back(link, part)
            self._give(handover, other, part)
            return True
        if handover.ticket.accepted:
            handover.take_back(link, part)
            handover.waiting.appendleft(part.rows)
            self._waiting[part.ticket.request_id] = handover
            return True
        return False

    def _put(self, question: Ask, answer: Callable[[list[Live]], None]) -> None:
        """Put a question to all engines that take requests, whether they have room for it or not: nobody waits forever."""
        asked = [link for link in self.links if link.ready] or self.links[:1]
        self._questions[question.question] = Question(asked, answer)
        for link in asked:
            link.send(question)

    def _execute(self, message: Execute, answer: Callable[[SessionAnswer], None], among: Among) -> None:
        """Send a command to the engine that has the session, or an order about variants to all."""
        links = self.links_of(among)
        if isinstance(message.command, VariantOrder):
            self._execute_everywhere(message, answer, links)
            return
        link = self._router.home(message.command.namespace, getattr(message.command, "name", None), links)
        try:
            refuse_in(link.phase if link is not None else "lost")
            if not link.send(message):
                raise Unavailable("the engine does not keep up", code="engine_busy")
        except RwkvBatchError as error:
            call_back(answer, Failure.of("", error))
        else:
            link.commands[message.question] = answer

    def _execute_everywhere(
        self, message: Execute, answer: Callable[[SessionAnswer], None], links: Sequence[EngineLink]
    ) -> None:
        if isinstance(message.command, ListVariants):  # of those that are there
            links = [link for link in links if link.ready] or links
        try:
            for phase in [link.phase for link in links] or ["lost"]:
                refuse_in(phase)
        except RwkvBatchError as error:
            call_back(answer, Failure.of("", error))
            return
        order = OrderForAll(message.command, links, answer)
        for link in links:
            if link.send(message):
                link.commands[message.question] = partial(order.heard, link)
            else:
                order.heard(link, Failure.of("", Unavailable("the engine does not keep up", code="engine_busy")))

    def _take(self, link: EngineLink, message: ToHttp) -> None:
        """Act on one message but for its events. Raises ConnectionError when the engine knows nothing of this process."""
        if isinstance(message, Batch):
            link.others = message.others
        elif isinstance(message, Found):
            question = self._questions.get(message.question)
            if question is not None and question.heard(link.seat.index, message.requests):
                del self._questions[message.question]
        elif isinstance(message, CommandResult):
            call_back(link.commands.pop(message.question, None), message.failure or message.answer)
        elif isinstance(message, Accepted):
            link.others = message.others
            for part in filter(None, map(link.parts.get, message.request_ids)):
                part.accepted = True
                handover = self._handed.get(part.ticket.request_id)
                if handover is not None and handover.is_accepted:
                    part.ticket.accept()
        elif isinstance(message, Status):
            link.note(message)
            if message.info is not None and message.info != link.info:
                link.info = message.info
                call_back(self.on_info, message.info)
        else:
            raise ConnectionError("it forgot this process")

    def _feed(self, link: EngineLink, event: Event) -> None:
        """Pass an event of an engine on to the ticket it is for."""
        part = link.parts.get(event.request_id)
        if part is None:
            return
        if isinstance(event, Failure):
            if self._elsewhere(link, part, event):
                return
            link.drop(part)
        else:
            part.accepted = True
            if event.finishes:
                link.ended(part, len(event.finishes))
                if not part.open_rows:
                    link.drop(part)
        self._pass_on(part.ticket, event)

    def _pass_on(self, ticket: Ticket, event: Event) -> None:
        call_back(self.observe, ticket, event)
        try:
            ticket.feed(event)
        except Exception:
            log.exception("an event of request %s could not be passed on", ticket.request_id)
            ticket.failure = Failure.of(ticket.request_id, EngineFailed("internal error", code="internal"))
            ticket.cancel()
        if ticket.done:
            self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        """Nobody wants anything of it any more, whatever engines have of it."""
        self.tickets.pop(ticket.request_id, None)
        self._waiting.pop(ticket.request_id, None)
        handover = self._handed.pop(ticket.request_id, None)
        if handover is not None and not handover.cancel():
            log.warning("a cancel was lost: the engine does not read")

    def _fail(self, error: RwkvBatchError) -> None:
        """All open tickets, and those not sent yet, end with the error."""
        while self._outbox:
            ticket, *_ = self._outbox.popleft()
            if ticket is not None:
                self.tickets[ticket.request_id] = ticket
        for ticket in list(self.tickets.values()):
            self._pass_on(ticket, Failure.of(ticket.request_id, error))


def best_phase(links: Iterable[EngineLink]) -> str:
    """The phase of the engine that is best off."""
    return min((link.phase for link in links), key=PHASES.index, default="lost")


def first_info(links: Iterable[EngineLink]) -> EngineInfo | None:
    """What the first of these engines is that has introduced itself."""
    return next((link.info for link in links if link.info is not None), None)


def sum_of_stats(links: Iterable[EngineLink]) -> dict[str, int | float]:
    """The figures of these engines, added up."""
    total: dict[str, int | float] = {}
    for link in links:
        for name, value in link.stats.items():
            total[name] = total.get(name, 0) + value
    return total


class Engines:
    """What is told of the engines of `links` together."""

    links: Sequence[EngineLink]

    @property
    def phase(self) -> str:
        """That of the engine that is best off."""
        return best_phase(self.links)

    @property
    def ready(self) -> bool:
        """Whether there is an engine that takes requests."""
        return self.phase == "ready"

    @property
    def info(self) -> EngineInfo | None:
        """What the first engine is that has introduced itself."""
        return first_info(self.links)

    @property
    def stats(self) -> dict[str, int | float]:
        """The figures of all of them, added up."""
        return sum_of_stats(self.links)


def engine_lost(what: str) -> Unavailable:
    """What is said of work that an engine was lost with."""
    return Unavailable(f"the engine was lost while it worked on {what}", code="engine_lost", retry_after=2.0)


def refuse_in(phase: str) -> None:
    """Raise Unavailable unless an engine in this phase takes requests."""
    if phase == "loading":
        raise NotBegun("the model is still loading", code="loading", retry_after=2.0)
    if phase == "draining":
        raise NotBegun("the server is shutting down", code="draining", retry_after=5.0)
    if phase != "ready":
        raise NotBegun("the engine is not running; it is being restarted", code="engine_lost", retry_after=2.0)
