"""The messages between HTTP and engine processes, and the two ends that exchange them.

    HTTP process   EngineClient   DEALER, a new identity for each connection     submit, cancel, signs of life
    engine process EngineServer   ROUTER, one for all HTTP processes             progress, refusals, signs of life

Each end has one thread that owns its socket. No send ever waits: a peer that is gone or does not drain loses its own tickets
and nothing else. Knows nothing of models and nothing of HTTP.
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
from typing import Any, Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from rwkv_batch import errors
from rwkv_batch.errors import Conflict, EngineFailed, RwkvBatchError, Unavailable
from rwkv_batch.request import Failure, Progress, Request
from rwkv_batch.session_messages import Action, Deleted, Page

log = logging.getLogger(__name__)

HIGH_WATER = 1000  # messages held for a peer that does not read: some ten seconds of steps
SUBMIT_HIGH_WATER = 10_000
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)  # what decoding raises

Event = Progress | Failure
SessionAnswer = Page | Deleted | Failure


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the loaded engine is; sent to every HTTP process when it is ready.

    model           name for people, without folder and ending
    fingerprint     identifies the weights; empty when there are none
    device          as torch names it, "cpu" or "cuda:0 NVIDIA H200"
    dtype, ops      what was chosen, "fp16", "kernels"
    slots           sequences decoded at the same time
    prefill_budget  prompt tokens of one step
    vocab_size      columns of the logits
    layers, width   shape, for the start-up lines
    parameters      number of weights
    load_seconds    time that loading took
    state_bytes     most that the file of one session takes; 0 = no sessions
    """

    model: str
    fingerprint: str = ""
    device: str = "cpu"
    dtype: str = "fp32"
    ops: str = "reference"
    slots: int = 0
    prefill_budget: int = 0
    vocab_size: int = 65536
    layers: int = 0
    width: int = 0
    parameters: int = 0
    load_seconds: float = 0.0
    state_bytes: int = 0


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """HTTP process: here I am."""

    pid: int


class Alive(msgspec.Struct, tag="alive", array_like=True, frozen=True):
    """HTTP process: still here."""


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """HTTP process: run this. `endpoint` is the path that was called, `given_id` the caller's own id of the request."""

    request: Request
    endpoint: str = ""
    given_id: str = ""


class RequestId(msgspec.Struct, frozen=True):
    """What must be readable of a request, so that its owner can be told that the rest is not."""

    id: str


class Unreadable(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """A `Submit` of which only the id can be read."""

    request: RequestId


class Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    """HTTP process: nobody wants this any more."""

    request_id: str


class Ask(msgspec.Struct, tag="ask", array_like=True, frozen=True):
    """HTTP process: which requests run or wait, of all HTTP processes? With `stop` they are ended.

    question    comes back with the answer
    request_id  only this request, or all parts of this call
    endpoint    only requests of this path
    """

    question: str
    stop: bool = False
    request_id: str | None = None
    endpoint: str | None = None


class Manage(msgspec.Struct, tag="manage", array_like=True, frozen=True):
    """HTTP process: do this to the sessions. `question` comes back with the answer."""

    question: str
    action: Action


class Managed(msgspec.Struct, tag="managed", array_like=True, frozen=True):
    """Engine: what came of it; exactly one of the two is there."""

    question: str
    answer: Page | Deleted | None
    failure: Failure | None = None


class Status(msgspec.Struct, tag="status", array_like=True, frozen=True):
    """Engine: sign of life. `phase` is "loading", "ready" or "draining"; `info` is there once the model is loaded."""

    phase: str
    info: EngineInfo | None
    stats: dict[str, int | float]


class Accepted(msgspec.Struct, tag="accepted", array_like=True, frozen=True):
    """Engine: the request waits or runs."""

    request_id: str


class Live(msgspec.Struct, array_like=True):
    """A request that runs or waits. `created` is epoch seconds, `tokens` counts what was sampled."""

    id: str
    endpoint: str
    created: float
    prompts: int
    prompt_tokens: int
    max_tokens: int
    ended: int = 0
    tokens: int = 0
    given_id: str = ""


class Found(msgspec.Struct, tag="found", array_like=True, frozen=True):
    """Engine: the requests that were asked for, oldest first."""

    question: str
    requests: list[Live]


class Batch(msgspec.Struct, tag="batch", array_like=True, frozen=True):
    """Engine: what one step brought all requests of this HTTP process, and which of them failed."""

    progress: list[Progress]
    failures: list[Failure]


class Forgotten(msgspec.Struct, tag="forgotten", array_like=True, frozen=True):
    """Engine: you did not drain, or I do not know you; your tickets are cancelled, say hello again."""


ToEngine = Hello | Alive | Submit | Cancel | Ask | Manage
ToHttp = Status | Accepted | Batch | Found | Managed | Forgotten

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_unreadable = msgspec.msgpack.Decoder(Unreadable).decode
decode_to_http = msgspec.msgpack.Decoder(ToHttp).decode


def failure(request_id: str, error: RwkvBatchError) -> Failure:
    """A designed error as a message."""
    return Failure(request_id, type(error).__name__, error.message, error.param, error.code, error.retry_after)


def error_of(message: Failure) -> RwkvBatchError:
    """The exception that a failure carries; EngineFailed for a class that is not in `errors`."""
    kind = getattr(errors, message.error, None)
    if not (isinstance(kind, type) and issubclass(kind, RwkvBatchError)):
        kind = EngineFailed
    return kind(message.message, param=message.param, code=message.code, retry_after=message.retry_after)


def live_of(message: Submit) -> Live:
    """What is known of a request when it comes in."""
    request = message.request
    prompt_tokens = sum(map(len, request.prompts))
    return Live(
        request.id, message.endpoint, time.time(), request.num_rows, prompt_tokens, request.max_tokens,
        given_id=message.given_id,
    )  # fmt: skip


def matches(question: Ask, live: Live) -> bool:
    """Whether a request is one of those asked for, by our id or the caller's own.

    The parts of a call have its id, a hyphen and a number.
    """
    wanted = question.request_id
    if wanted is not None and wanted not in (live.id, live.given_id or None) and not live.id.startswith(wanted + "-"):
        return False
    return question.endpoint is None or live.endpoint == question.endpoint


def call_back(callback: Callable | None, *args: Any) -> Any:
    """What the callback returns, None without one. What it raises is logged: it must not end the thread that calls it."""
    try:
        return callback(*args) if callback is not None else None
    except Exception:
        log.exception("a callback failed")
        return None


class Worker(Protocol):
    """What the engine server asks of the worker; submit and the cancels are called in the server's thread.

    last_step      when its loop last went round, as time.monotonic() says
    lost_sessions  that could not be written when it stopped
    """

    info: EngineInfo
    last_step: float
    lost_sessions: int

    def submit(self, request: Request, owner: bytes) -> None:
        """Take a request; raise Overloaded, Unavailable or InvalidRequest."""

    def cancel(self, request_id: str) -> None:
        """End a request early; an unknown one is ignored."""

    def cancel_owner(self, owner: bytes) -> None:
        """End all requests of one HTTP process."""

    def manage(self, action: Action, answer: Callable[[Page | Deleted | RwkvBatchError], None]) -> None:
        """Do something to the sessions; `answer` is called once, in any thread."""

    def drain(self) -> None:
        """Refuse new requests."""

    def undelivered(self) -> dict[str, int]:
        """Tokens that requests have sampled and not delivered yet, by their ids."""

    def stats(self) -> dict[str, int | float]:
        """Figures for /stats and /metrics."""


class Bell:
    """Wakes a thread that waits in poll; safe from any thread and from finalisers, takes no lock."""

    def __init__(self) -> None:
        self.fd, self._send = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._send, False)
        self._rung = False

    def ring(self) -> None:
        """Wake the waiter; rings that it has not heard yet are one."""
        if not self._rung:
            self._rung = True
            with contextlib.suppress(BlockingIOError):  # full: it will wake anyway
                os.write(self._send, b"!")

    def hear(self) -> None:
        """Make the next ring count; call before looking at what it announced."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 64)
        self._rung = False


class EngineServer:
    """The engine's end: gives requests to the worker and carries its events to the HTTP process that owns each.

    address       ipc:// path
    heartbeat     seconds between two signs of life
    peer_seconds  silence after which an HTTP process is given up
    """

    def __init__(self, address: str, *, heartbeat: float = 0.5, peer_seconds: float = 15.0):
        self.heartbeat = heartbeat
        self.peer_seconds = peer_seconds
        self.worker: Worker | None = None
        self.info: EngineInfo | None = None
        self.draining = False
        self.on_beat: Callable[[dict[str, int | float]], None] = lambda stats: None
        self._peers: dict[bytes, float] = {}  # identity -> when it was last heard
        self._live: dict[str, tuple[bytes, Live]] = {}  # request -> owner and what is known of it
        self._outbox: deque[dict[bytes, list[Event]]] = deque()
        self._answers: deque[tuple[bytes, Managed]] = deque()
        self._bell = Bell()
        self._closing = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.RCVHWM, SUBMIT_HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)

    @property
    def num_peers(self) -> int:
        """HTTP processes connected."""
        return len(self._peers)

    def start(self) -> None:
        """Begin to answer; until `attach` every request is refused as Unavailable."""
        self._thread.start()

    def attach(self, worker: Worker) -> None:
        """The worker is ready: requests go to it from now on."""
        self.info = worker.info
        self.worker = worker
        self._bell.ring()

    def drain(self) -> None:
        """Refuse new requests and say so."""
        self.draining = True
        if self.worker is not None:
            self.worker.drain()

    def deliver(self, events: dict[bytes, list[Event]]) -> None:
        """Carry one step's events, by owner. Any thread; never waits."""
        if events:
            self._outbox.append(events)
            self._bell.ring()

    def close(self) -> None:
        """End the thread and close the socket."""
        self._closing = True
        self._bell.ring()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell.fd, zmq.POLLIN)
        next_beat = time.monotonic()
        while not self._closing:
            poller.poll(max(0.0, next_beat - time.monotonic()) * 1000)
            self._bell.hear()
            self._receive()
            while self._outbox:
                self._send_events(self._outbox.popleft())
            while self._answers:
                self._send(*self._answers.popleft())
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self.heartbeat
                self._beat()
        while self._outbox:  # what the worker said last, such as why it failed
            self._send_events(self._outbox.popleft())
        self._socket.close(linger=500)
        self._context.term()

    def _receive(self) -> None:
        while True:
            try:
                owner, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode_to_engine(payload)
            except UNREADABLE as error:
                self._refuse(owner, payload, error)
                continue
            if isinstance(message, Hello):
                log.debug("HTTP process %d connected", message.pid)
                self._peers[owner] = time.monotonic()
                self._send(owner, self._status(self._stats()))
            elif owner not in self._peers:
                self._send(owner, Forgotten())
            else:
                self._peers[owner] = time.monotonic()
                self._handle(owner, message)

    def _refuse(self, owner: bytes, payload: bytes, error: Exception) -> None:
        """A message cannot be read: the request that it hands over fails, all else is dropped."""
        log.warning("a message that cannot be read was dropped: %s", error)
        with contextlib.suppress(*UNREADABLE):
            request_id = decode_unreadable(payload).request.id
            if owner in self._peers:
                self._send(owner, Batch([], [failure(request_id, EngineFailed("the request could not be read"))]))

    def _handle(self, owner: bytes, message: Alive | Submit | Cancel | Ask | Manage) -> None:
        if isinstance(message, Cancel):
            self._live.pop(message.request_id, None)
            if self.worker is not None:
                self.worker.cancel(message.request_id)
        elif isinstance(message, Ask):
            found = [live for _, live in self._live.values() if matches(message, live)]
            for live in found if message.stop else ():
                self._stop(live.id)
            waiting = self.worker.undelivered() if self.worker is not None else {}
            told = [msgspec.structs.replace(live, tokens=live.tokens + waiting.get(live.id, 0)) for live in found]
            self._send(owner, Found(message.question, told))
        elif isinstance(message, Manage):
            self._manage(owner, message)
        elif isinstance(message, Submit):
            try:
                if self.worker is None:
                    raise Unavailable("the model is still loading", code="loading")
                self.worker.submit(message.request, owner)
            except RwkvBatchError as error:
                self._send(owner, Batch([], [failure(message.request.id, error)]))
            except Exception:
                log.exception("request %s could not be taken", message.request.id)
                self._send(owner, Batch([], [failure(message.request.id, EngineFailed("the request could not be started"))]))
            else:
                self._live[message.request.id] = (owner, live_of(message))
                self._send(owner, Accepted(message.request.id))

    def _manage(self, owner: bytes, message: Manage) -> None:
        """Pass an order about sessions on; its answer comes from another thread."""

        def answer(result: Page | Deleted | RwkvBatchError) -> None:
            failed = isinstance(result, RwkvBatchError)
            managed = Managed(message.question, None if failed else result, failure("", result) if failed else None)
            self._answers.append((owner, managed))
            self._bell.ring()

        try:
            if self.worker is None:
                raise Unavailable("the model is still loading", code="loading")
            self.worker.manage(message.action, answer)
        except RwkvBatchError as error:
            answer(error)

    def _stop(self, request_id: str) -> None:
        """End a request and tell its owner, unless that was found to be gone while another of its requests was ended."""
        owner, live = self._live.pop(request_id, (b"", None))
        if live is None:
            return
        self.worker.cancel(request_id)
        self._send(owner, Batch([], [failure(request_id, Conflict("Request cancelled", code="cancelled"))]))

    def _note(self, item: Event) -> None:
        """Keep up with what one event says of its request."""
        _, live = self._live.get(item.request_id, (b"", None))
        if live is None:
            return
        if isinstance(item, Progress):
            live.tokens += sum(delta.tokens for delta in item.deltas)
            live.ended += len(item.finishes)
        if isinstance(item, Failure) or live.ended >= live.prompts:
            del self._live[item.request_id]

    def _send_events(self, events: dict[bytes, list[Event]]) -> None:
        for owner, items in events.items():
            for item in items:
                self._note(item)
            if owner in self._peers:
                progress = [item for item in items if isinstance(item, Progress)]
                self._send(owner, Batch(progress, [item for item in items if isinstance(item, Failure)]))

    def _send(self, owner: bytes, message: ToHttp) -> None:
        """Send without waiting; a peer that is gone (EHOSTUNREACH) or full (EAGAIN) is given up."""
        try:
            self._socket.send_multipart([owner, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._give_up(owner, "does not read" if error.errno == zmq.EAGAIN else "is gone")

    def _give_up(self, owner: bytes, reason: str) -> None:
        if self._peers.pop(owner, None) is not None:
            self._live = {key: value for key, value in self._live.items() if value[0] != owner}
            log.warning("an HTTP process %s: its requests are cancelled", reason)
            if self.worker is not None:
                self.worker.cancel_owner(owner)

    def _beat(self) -> None:
        now = time.monotonic()
        for owner, heard in list(self._peers.items()):
            if now - heard > self.peer_seconds:
                self._give_up(owner, "is silent")
        stats = self._stats()
        call_back(self.on_beat, stats)
        status = self._status(stats)
        for owner in list(self._peers):
            self._send(owner, status)

    def _stats(self) -> dict[str, int | float]:
        return self.worker.stats() if self.worker is not None else {}

    def _status(self, stats: dict[str, int | float]) -> Status:
        phase = "draining" if self.draining else "loading" if self.worker is None else "ready"
        return Status(phase, self.info, stats)


class Ticket:
    """What a caller holds for a submitted request.

    queue    what `translate` made of each event, None for nothing; END comes last
    settled  called once in the client's thread when the request was accepted or refused, see `accepted` and `failure`
    ended    called once in the client's thread after END was queued

    `translate` runs in the client's thread and must be quick; without one the events themselves are queued.
    """

    END = object()

    def __init__(self, client: "EngineClient", request: Request, translate: Callable[[Event], Any] | None):
        self.request_id = request.id
        self.queue: SimpleQueue = SimpleQueue()
        self.translate = translate
        self.open_rows = request.num_rows
        self.incremental = request.chunk_size > 0  # text comes as it is made, not all at the end
        self.accepted = False
        self.cancelled = False
        self.done = False
        self.failure: Failure | None = None
        self.settled: Callable[[], None] | None = None
        self.ended: Callable[[], None] | None = None
        self.submitted_at = time.monotonic()
        self.first_at: float | None = None  # first event with text
        self.progressed_at = self.submitted_at
        self.num_put = 0  # size of what was queued and of what was taken out, to notice readers that do not read
        self.num_taken = 0
        self.taken_at = self.submitted_at
        self.unread_since = self.submitted_at  # when the oldest unread item was queued, at the latest
        self.completion_tokens = 0  # of rows that have ended
        self.num_tokens = 0  # of texts that have come
        self.peer = ""  # where it came from, for whoever watches connections
        self.watched = self.suspect = False  # whether that was looked at, and whether its client may have left
        self._client = client

    def cancel(self) -> None:
        """Nobody wants the rest. Any thread, finalisers too; more than once is fine; END is queued if it was not."""
        self.cancelled = True
        self._client._cancelled.append(self)
        self._client._bell.ring()

    def abort(self, error: RwkvBatchError) -> None:
        """End it with an error for its reader and cancel it in the engine. The client's thread only."""
        self._feed(failure(self.request_id, error))
        self.cancel()

    def take(self, timeout: float) -> Any:
        """Next item; queue.Empty after `timeout` seconds."""
        item = self.queue.get(timeout=timeout)
        self.num_taken += len(item) if isinstance(item, bytes) else 0
        self.taken_at = time.monotonic()
        return item

    def _feed(self, event: Event) -> None:
        if self.done:
            return
        if isinstance(event, Failure):
            self.failure = event
            self.open_rows = 0
        else:
            self.open_rows -= len(event.finishes)
        item = self.translate(event) if self.translate else event
        if item is not None:
            if self.num_put == self.num_taken:
                self.unread_since = time.monotonic()
            self.num_put += len(item) if isinstance(item, bytes) else 0
            self.queue.put(item)
        if isinstance(event, Progress):
            self.progressed_at = time.monotonic()
            if self.first_at is None and event.deltas:
                self.first_at = self.progressed_at
        self._settle()
        if self.open_rows <= 0:
            self._end()

    def _settle(self) -> None:
        settled, self.settled = self.settled, None
        call_back(settled)

    def _end(self) -> None:
        if not self.done:
            self.done = True
            self.queue.put(Ticket.END)
            self._settle()
            call_back(self.ended)


class EngineClient:
    """The HTTP process's end: submits requests and fans the engine's events out to their tickets.

    address       ipc:// path, which need not exist yet
    heartbeat     seconds between two signs of life
    peer_seconds  silence after which the engine is taken for lost
    tick          called in the client's thread after each message and at least every 20 ms while tickets are open

    A callback that raises is logged and changes nothing else, except that a `translate` that raises ends its own ticket.
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
        self._outbox: deque[tuple[Ticket | None, bytes]] = deque()
        self._cancelled: deque[Ticket] = deque()
        self._asked: deque[tuple[Ask, Callable[[list[Live]], None]]] = deque()
        self._questions: dict[str, Callable[[list[Live]], None]] = {}
        self._managing: deque[tuple[Manage, Callable[[SessionAnswer], None]]] = deque()
        self._orders: dict[str, Callable[[SessionAnswer], None]] = {}
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
            raise Unavailable("the model is still loading", code="loading", retry_after=2.0)
        if self.phase == "draining":
            raise Unavailable("the server is shutting down", code="draining", retry_after=5.0)
        if self.phase != "ready":
            raise Unavailable("the engine is not running; it is being restarted", code="engine_lost", retry_after=2.0)

    def submit(
        self,
        request: Request,
        translate: Callable[[Event], Any] | None = None,
        settled: Callable[[], None] | None = None,
        ended: Callable[[], None] | None = None,
        endpoint: str = "",
        given_id: str = "",
    ) -> Ticket:
        """Send a request. Any thread. Raises Unavailable; a refusal by the engine comes as Failure in the ticket's queue."""
        self.check()
        ticket = Ticket(self, request, translate)
        ticket.settled, ticket.ended = settled, ended
        self._outbox.append((ticket, encode(Submit(request, endpoint, given_id))))
        self._bell.ring()
        return ticket

    def ask(self, question: Ask, answer: Callable[[list[Live]], None]) -> None:
        """Ask about requests; `answer` is called in the client's thread, never when the engine is lost. Any thread."""
        self._asked.append((question, answer))
        self._bell.ring()

    def manage(self, action: Action, answer: Callable[[SessionAnswer], None]) -> None:
        """Do something to the sessions; `answer` is called once in the client's thread, with a Failure if the engine is lost.

        Any thread. Raises Unavailable.
        """
        self.check()
        self._managing.append((Manage(secrets.token_hex(8), action), answer))
        self._bell.ring()

    def fail_all(self, error: RwkvBatchError) -> None:
        """End all open tickets with an error. Any thread."""
        self._outbox.append((None, encode(failure("", error))))
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
        self._fail_orders(Unavailable("the engine was lost while it worked on this", code="engine_lost", retry_after=2.0))
        self._fail(Unavailable("the engine was lost while it worked on this request", code="engine_lost", retry_after=2.0))

    def _send_out(self, dealer: zmq.Socket) -> None:
        while self._outbox:
            ticket, payload = self._outbox.popleft()
            if ticket is None:
                self._fail(error_of(msgspec.msgpack.decode(payload, type=Failure)))
                continue
            if ticket.cancelled:  # its turn among the cancelled may have been already: it must not be sent after that
                ticket._end()
                continue
            self.tickets[ticket.request_id] = ticket
            try:
                dealer.send(payload, zmq.NOBLOCK)
            except zmq.Again:
                self._feed([failure(ticket.request_id, Unavailable("the engine does not keep up", code="engine_busy"))])
        while self._asked:
            question, answer = self._asked.popleft()
            self._questions[question.question] = answer
            with contextlib.suppress(zmq.Again):  # whoever asked does not wait forever
                dealer.send(encode(question), zmq.NOBLOCK)
        while self._managing:
            order, answer = self._managing.popleft()
            self._orders[order.question] = answer
            try:
                dealer.send(encode(order), zmq.NOBLOCK)
            except zmq.Again:
                error = Unavailable("the engine does not keep up", code="engine_busy")
                call_back(self._orders.pop(order.question), failure("", error))
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
            elif isinstance(message, Managed):
                call_back(self._orders.pop(message.question, None), message.failure or message.answer)
            elif isinstance(message, Accepted):
                ticket = self.tickets.get(message.request_id)
                if ticket is not None:
                    ticket.accepted = True
                    ticket._settle()
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
                ticket.failure = failure(event.request_id, EngineFailed("internal error", code="internal"))
                ticket.cancel()
            if ticket.done:
                self.tickets.pop(event.request_id, None)

    def _fail_orders(self, error: RwkvBatchError) -> None:
        """All orders without an answer, sent or not, get the error."""
        while self._managing:
            order, answer = self._managing.popleft()
            self._orders[order.question] = answer
        for question in list(self._orders):
            call_back(self._orders.pop(question), failure("", error))

    def _fail(self, error: RwkvBatchError) -> None:
        """All open tickets, and those not sent yet, end with the error."""
        while self._outbox:
            ticket, _ = self._outbox.popleft()
            if ticket is not None:
                self.tickets[ticket.request_id] = ticket
        self._feed([failure(request_id, error) for request_id in list(self.tickets)])
