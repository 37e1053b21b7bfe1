"""The HTTP process's end: a DEALER socket to one engine, a new identity for each connection, and one thread that owns it.

No send ever waits: an engine that is gone or does not read loses the tickets it had and nothing else.
"""

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from rwkv_batch.errors import EngineFailed, NotBegun, RwkvBatchError, Unavailable
from rwkv_batch.ipc.messages import (
    HIGH_WATER,
    SUBMIT_HIGH_WATER,
    UNREADABLE,
    Accepted,
    Alive,
    Ask,
    Batch,
    Cancel,
    CommandResult,
    EngineInfo,
    Execute,
    Found,
    Hello,
    Live,
    Status,
    Submit,
    decode_to_http,
    encode,
)
from rwkv_batch.ipc.waker import Bell, call_back
from rwkv_batch.request import Event, Failure, Progress, Request
from rwkv_batch.session_messages import Deleted, Page, SessionCommand

log = logging.getLogger(__name__)

SessionAnswer = Page | Deleted | Failure


class Reader:
    """The reading side of an answer: what waits to be read, and how its reader gets on.

    num_put, num_taken  bytes that were queued and that were taken out: a reader that does not read shows in the difference
    taken_at            when the last item was taken
    unread_since        when the oldest item that was not taken was queued, at the latest
    peer                where the reader is, for whoever watches connections
    watched             whether that was looked at
    suspect             whether the reader may have left
    """

    def __init__(self, peer: str = ""):
        self.queue: SimpleQueue = SimpleQueue()
        self.num_put = 0
        self.num_taken = 0
        self.taken_at = self.unread_since = time.monotonic()
        self.peer = peer
        self.watched = self.suspect = False

    def put(self, item: Any) -> None:
        """Queue an item; only bytes count as unread."""
        if self.num_put == self.num_taken:
            self.unread_since = time.monotonic()
        self.num_put += len(item) if isinstance(item, bytes) else 0
        self.queue.put(item)

    def take(self, timeout: float) -> Any:
        """Next item; queue.Empty after `timeout` seconds."""
        item = self.queue.get(timeout=timeout)
        self.num_taken += len(item) if isinstance(item, bytes) else 0
        self.taken_at = time.monotonic()
        return item


class Ticket:
    """What a caller holds for a submitted request.

    reader    takes what `format_event` made of each event, None for nothing; END comes last
    answered  called once in the client's thread when the request was accepted or refused, see `accepted` and `failure`
    ended     called once in the client's thread after END was queued

    `format_event` runs in the client's thread and must be quick; without one the events themselves are queued.
    """

    END = object()

    def __init__(self, client: "EngineClient", request: Request, format_event: Callable[[Event], Any] | None):
        self.request_id = request.id
        self.reader = Reader()
        self.format_event = format_event
        self.open_rows = request.num_rows
        self.incremental = request.chunk_size > 0  # text comes as it is made, not all at the end
        self.accepted = False
        self.cancelled = False
        self.done = False
        self.failure: Failure | None = None
        self.answered: Callable[[], None] | None = None
        self.ended: Callable[[], None] | None = None
        self.submitted_at = time.monotonic()
        self.first_at: float | None = None  # first event with text
        self.progressed_at = self.submitted_at
        self.completion_tokens = 0  # of rows that have ended
        self.num_tokens = 0  # of texts that have come
        self._client = client

    def cancel(self) -> None:
        """Nobody wants the rest. Any thread, finalisers too; more than once is fine; END is queued if it was not."""
        self.cancelled = True
        self._client._cancelled.append(self)
        self._client._bell.ring()

    def abort(self, error: RwkvBatchError) -> None:
        """End it with an error for its reader and cancel it in the engine. The client's thread only."""
        self._feed(Failure.of(self.request_id, error))
        self.cancel()

    def take(self, timeout: float) -> Any:
        """Next item for the reader; queue.Empty after `timeout` seconds."""
        return self.reader.take(timeout)

    def _feed(self, event: Event) -> None:
        if self.done:
            return
        if isinstance(event, Failure):
            self.failure = event
            self.open_rows = 0
        else:
            self.open_rows -= len(event.finishes)
        item = self.format_event(event) if self.format_event else event
        if item is not None:
            self.reader.put(item)
        if isinstance(event, Progress):
            self.progressed_at = time.monotonic()
            if self.first_at is None and event.deltas:
                self.first_at = self.progressed_at
        self._tell_answered()
        if self.open_rows <= 0:
            self._end()

    def _tell_answered(self) -> None:
        answered, self.answered = self.answered, None
        call_back(answered)

    def _end(self) -> None:
        if not self.done:
            self.done = True
            self.reader.put(Ticket.END)
            self._tell_answered()
            call_back(self.ended)


class EngineClient:
    """The HTTP process's end: submits requests and fans the engine's events out to their tickets.

    address       ipc:// path, which need not exist yet
    heartbeat     seconds between two signs of life
    peer_seconds  silence after which the engine is taken for lost
    tick          called in the client's thread after each message and at least every 20 ms while tickets are open

    A callback that raises is logged and changes nothing else, except that a `format_event` that raises ends its own ticket.
    """

    BUSY_POLL_MS = 20
    IDLE_POLL_MS = 250

    def __init__(
        self, address: str, *, heartbeat: float = 0.5, peer_seconds: float = 15.0, tick: Callable[[], None] | None = None
    ):
        self.address = address
        self.heartbeat = heartbeat
        self.peer_seconds = peer_seconds
        self.tick = tick or (lambda: None)
        self.busy: Callable[[], bool] = lambda: False  # whether to tick fast although no ticket is open
        self.on_info: Callable[[EngineInfo], None] = lambda info: None  # a loaded engine has introduced itself
        self.observe: Callable[[Ticket, Event], None] = lambda ticket, event: None
        self.phase = "lost"
        self.info: EngineInfo | None = None
        self.stats: dict[str, int | float] = {}
        self.tickets: dict[str, Ticket] = {}  # touched by the client's thread only; others may look
        self._outbox: deque[tuple[Ticket, bytes] | tuple[None, RwkvBatchError]] = deque()
        self._cancelled: deque[Ticket] = deque()
        self._asked: deque[tuple[Ask, Callable[[list[Live]], None]]] = deque()
        self._questions: dict[str, Callable[[list[Live]], None]] = {}
        self._commands: deque[tuple[Execute, Callable[[SessionAnswer], None]]] = deque()
        self._command_answers: dict[str, Callable[[SessionAnswer], None]] = {}
        self._bell = Bell()
        self._closing = False
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)

    @property
    def ready(self) -> bool:
        """Whether an engine is there that takes requests."""
        return self.phase == "ready"

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; open tickets fail."""
        self._closing = True
        self._bell.ring()
        self._thread.join(timeout=5)

    def check(self) -> None:
        """Raise Unavailable unless an engine is there that takes requests."""
        if self.phase == "loading":
            raise NotBegun("the model is still loading", code="loading", retry_after=2.0)
        if self.phase == "draining":
            raise NotBegun("the server is shutting down", code="draining", retry_after=5.0)
        if self.phase != "ready":
            raise NotBegun("the engine is not running; it is being restarted", code="engine_lost", retry_after=2.0)

    def submit(
        self,
        request: Request,
        format_event: Callable[[Event], Any] | None = None,
        answered: Callable[[], None] | None = None,
        ended: Callable[[], None] | None = None,
        endpoint: str = "",
        given_id: str = "",
    ) -> Ticket:
        """Send a request. Any thread. Raises Unavailable; a refusal by the engine comes as Failure in the ticket's queue."""
        self.check()
        ticket = Ticket(self, request, format_event)
        ticket.answered, ticket.ended = answered, ended
        self._outbox.append((ticket, encode(Submit(request, endpoint, given_id))))
        self._bell.ring()
        return ticket

    def ask(self, question: Ask, answer: Callable[[list[Live]], None]) -> None:
        """Ask about requests; `answer` is called in the client's thread, never when the engine is lost. Any thread."""
        self._asked.append((question, answer))
        self._bell.ring()

    def execute(self, command: SessionCommand, answer: Callable[[SessionAnswer], None]) -> None:
        """Carry out a command about sessions. Any thread. Raises Unavailable.

        `answer` is called once in the client's thread, with a Failure if the engine is lost.
        """
        self.check()
        self._commands.append((Execute(secrets.token_hex(8), command), answer))
        self._bell.ring()

    def fail_all(self, error: RwkvBatchError) -> None:
        """End all open tickets with an error. Any thread."""
        self._outbox.append((None, error))
        self._bell.ring()

    def _run(self) -> None:
        while not self._closing:
            self._connection()
        self._fail(Unavailable("the server is stopping", code="draining"))
        self._context.destroy(linger=0)

    def _connection(self) -> None:
        """One connection, from hello until the engine is lost; the next one has a new identity."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, b"http-%d-" % os.getpid() + secrets.token_bytes(8))
        dealer.setsockopt(zmq.SNDHWM, SUBMIT_HIGH_WATER)
        dealer.setsockopt(zmq.RCVHWM, HIGH_WATER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller = zmq.Poller()
        for source in (dealer, monitor, self._bell.fd):
            poller.register(source, zmq.POLLIN)
        dealer.connect(self.address)
        dealer.send(encode(Hello(os.getpid())))
        heard = time.monotonic()
        next_beat = heard + self.heartbeat
        lost = None
        while lost is None and not self._closing:
            pause = self.BUSY_POLL_MS if self.tickets or call_back(self.busy) else self.IDLE_POLL_MS
            ready = dict(poller.poll(pause))
            self._bell.hear()
            self._send_out(dealer)
            lost = self._receive(dealer)
            now = time.monotonic()
            if dealer in ready:
                heard = now
            if monitor in ready:
                recv_monitor_message(monitor)
                lost = "it closed the connection"
            elif self.phase != "lost" and now - heard > self.peer_seconds:
                lost = "it is silent"
            if now >= next_beat:
                next_beat = now + self.heartbeat
                try:
                    dealer.send(encode(Alive()), zmq.NOBLOCK)
                except zmq.Again:
                    lost = "it does not read"
            call_back(self.tick)
        dealer.disable_monitor()
        monitor.close()
        dealer.close()
        served = self.phase in ("ready", "draining")  # why one that is still loading ends, it says itself
        self.phase, self.stats = "lost", {}
        if served and not self._closing:
            log.warning("the engine is lost: %s", lost)
        self._questions.clear()
        self._fail_commands(Unavailable("the engine was lost while it worked on this", code="engine_lost", retry_after=2.0))
        self._fail(Unavailable("the engine was lost while it worked on this request", code="engine_lost", retry_after=2.0))

    def _send_out(self, dealer: zmq.Socket) -> None:
        while self._outbox:
            ticket, payload = self._outbox.popleft()
            if ticket is None:
                self._fail(payload)
                continue
            if ticket.cancelled:  # its turn among the cancelled may have been already: it must not be sent after that
                ticket._end()
                continue
            self.tickets[ticket.request_id] = ticket
            try:
                dealer.send(payload, zmq.NOBLOCK)
            except zmq.Again:
                self._feed([Failure.of(ticket.request_id, Unavailable("the engine does not keep up", code="engine_busy"))])
        while self._asked:
            question, answer = self._asked.popleft()
            self._questions[question.question] = answer
            with contextlib.suppress(zmq.Again):  # whoever asked does not wait forever
                dealer.send(encode(question), zmq.NOBLOCK)
        while self._commands:
            message, answer = self._commands.popleft()
            self._command_answers[message.question] = answer
            try:
                dealer.send(encode(message), zmq.NOBLOCK)
            except zmq.Again:
                error = Unavailable("the engine does not keep up", code="engine_busy")
                call_back(self._command_answers.pop(message.question), Failure.of("", error))
        while self._cancelled:
            ticket = self._cancelled.popleft()
            if self.tickets.pop(ticket.request_id, None) is not None:
                try:
                    dealer.send(encode(Cancel(ticket.request_id)), zmq.NOBLOCK)
                except zmq.Again:
                    log.warning("a cancel was lost: the engine does not read")
            ticket._end()

    def _receive(self, dealer: zmq.Socket) -> str | None:
        """Read what is there; return why this connection has no future, if it has none."""
        while True:
            try:
                message = decode_to_http(dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                return None
            except UNREADABLE as error:
                return f"it sent what cannot be read: {error}"
            if isinstance(message, Batch):
                self._feed(message.progress)
                self._feed(message.failures)
            elif isinstance(message, Found):
                call_back(self._questions.pop(message.question, None), message.requests)
            elif isinstance(message, CommandResult):
                call_back(self._command_answers.pop(message.question, None), message.failure or message.answer)
            elif isinstance(message, Accepted):
                for ticket in filter(None, map(self.tickets.get, message.request_ids)):
                    ticket.accepted = True
                    ticket._tell_answered()
            elif isinstance(message, Status):
                self.phase, self.stats = message.phase, message.stats
                if message.info is not None and message.info != self.info:
                    self.info = message.info
                    call_back(self.on_info, message.info)
            else:
                return "it forgot this process"

    def _feed(self, events: Iterable[Event]) -> None:
        for event in events:
            ticket = self.tickets.get(event.request_id)
            if ticket is None:
                continue
            call_back(self.observe, ticket, event)
            try:
                ticket._feed(event)
            except Exception:
                log.exception("an event of request %s could not be passed on", event.request_id)
                ticket.failure = Failure.of(event.request_id, EngineFailed("internal error", code="internal"))
                ticket.cancel()
            if ticket.done:
                self.tickets.pop(event.request_id, None)

    def _fail_commands(self, error: RwkvBatchError) -> None:
        """All commands without an answer, sent or not, get the error."""
        while self._commands:
            message, answer = self._commands.popleft()
            self._command_answers[message.question] = answer
        for question in list(self._command_answers):
            call_back(self._command_answers.pop(question), Failure.of("", error))

    def _fail(self, error: RwkvBatchError) -> None:
        """All open tickets, and those not sent yet, end with the error."""
        while self._outbox:
            ticket, _ = self._outbox.popleft()
            if ticket is not None:
                self.tickets[ticket.request_id] = ticket
        self._feed([Failure.of(request_id, error) for request_id in list(self.tickets)])
