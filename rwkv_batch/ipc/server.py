"""The engine's end: one ROUTER socket for all HTTP processes, and one thread that owns it.

No send ever waits: a peer that is gone or does not drain loses its own requests and nothing else.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from rwkv_batch.errors import Conflict, EngineFailed, NotBegun, Overloaded, RwkvBatchError
from rwkv_batch.ipc.live import LiveRequests
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
    Forgotten,
    Found,
    Hello,
    Status,
    Submit,
    ToHttp,
    decode_to_engine,
    decode_unreadable,
    encode,
    live_of,
    matches,
)
from rwkv_batch.ipc.waker import Bell, call_back
from rwkv_batch.request import Event, Failure, Request
from rwkv_batch.served.variants import VariantOrder, VariantsNow
from rwkv_batch.session_messages import Deleted, Page, SessionCommand

log = logging.getLogger(__name__)


class EngineCore(Protocol):
    """What runs requests: an engine loop, or the stub. `submit` and the cancels are called in the server's thread.

    info           what it is, anew when its variants are others
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

    def execute(
        self,
        command: SessionCommand | VariantOrder,
        answer: Callable[[Page | Deleted | VariantsNow | RwkvBatchError], None],
    ) -> None:
        """Carry out a command about sessions or variants; `answer` is called once, in any thread."""

    def drain(self) -> None:
        """Refuse new requests."""

    def sampled(self) -> dict[str, int]:
        """Tokens that requests have sampled so far, by their ids."""

    def stats(self) -> dict[str, int | float]:
        """Figures for /stats and /metrics."""


class EngineServer:
    """The engine's end: gives requests to the core and carries its events to the HTTP process that owns each.

    address       ipc:// path
    heartbeat     seconds between two signs of life
    peer_seconds  silence after which an HTTP process is given up
    """

    def __init__(self, address: str, *, heartbeat: float = 0.5, peer_seconds: float = 15.0):
        self.address = address
        self.heartbeat = heartbeat
        self.peer_seconds = peer_seconds
        self.core: EngineCore | None = None
        self.info: EngineInfo | None = None
        self.draining = False
        self.on_beat: Callable[[dict[str, int | float]], None] = lambda stats: None
        self._peers: dict[bytes, float] = {}  # identity -> when it was last heard
        self._live = LiveRequests()
        self._taken: dict[bytes, list[str]] = {}  # owner -> requests that it was not told of yet
        self._outbox: deque[dict[bytes, list[Event]]] = deque()
        self._answers: deque[tuple[bytes, CommandResult]] = deque()
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

    def attach(self, core: EngineCore) -> None:
        """The core is ready: requests go to it from now on."""
        self.info = core.info
        self.core = core
        self._bell.ring()

    def drain(self) -> None:
        """Refuse new requests and say so."""
        self.draining = True
        if self.core is not None:
            self.core.drain()

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
        next_beat, loading = time.monotonic(), self.core is None
        while not self._closing:
            ready = dict(poller.poll(max(0.0, next_beat - time.monotonic()) * 1000))
            # Not to be asked in vain: for each call the loop may have to wait for the interpreter's lock.
            if self._bell.fd in ready:
                self._bell.hear()
            if self._socket in ready:
                self._receive()
            self._send_events()
            self._send_answers()
            begins = loading and self.core is not None  # who has been waiting for it shall not wait for the next beat
            if begins or time.monotonic() >= next_beat:
                loading = self.core is None
                next_beat = time.monotonic() + self.heartbeat
                self._beat()
        self._send_events()  # what the core said last, such as why it failed
        self._socket.close(linger=500)
        self._context.term()

    def _receive(self) -> None:
        """Read what is there, and say which requests were taken, in one message to each HTTP process."""
        self._read_all()
        taken, self._taken = self._taken, {}
        for owner, request_ids in taken.items():
            self._send(owner, Accepted(request_ids, self._live.others(owner)))

    def _read_all(self) -> None:
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
                self._send(owner, self._status(owner, self._stats()))
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
                self._send(owner, Batch([], [Failure.of(request_id, EngineFailed("the request could not be read"))]))

    def _handle(self, owner: bytes, message: Alive | Submit | Cancel | Ask | Execute) -> None:
        if isinstance(message, Cancel):
            self._live.pop(message.request_id)
            if self.core is not None:
                self.core.cancel(message.request_id)
        elif isinstance(message, Ask):
            found = [live for live in self._live if matches(message, live)]
            for live in found if message.stop else ():
                self._stop(live.id)
            sampled = self.core.sampled() if self.core is not None else {}
            told = [msgspec.structs.replace(live, tokens=sampled.get(live.id, 0)) for live in found]
            self._send(owner, Found(message.question, told))
        elif isinstance(message, Execute):
            self._execute(owner, message)
        elif isinstance(message, Submit):
            try:
                if self.core is None:
                    raise NotBegun("the model is still loading", code="loading")
                if message.now and self._live.num_rows + message.request.num_rows > self.info.slots:
                    raise Overloaded("no slot is free", code="no_free_slot")
                self.core.submit(message.request, owner)
            except RwkvBatchError as error:
                self._send(owner, Batch([], [Failure.of(message.request.id, error)], self._live.others(owner)))
            except Exception:
                log.exception("request %s could not be taken", message.request.id)
                self._send(owner, Batch([], [Failure.of(message.request.id, EngineFailed("the request could not be started"))]))
            else:
                self._live.add(owner, live_of(message))
                self._taken.setdefault(owner, []).append(message.request.id)

    def _execute(self, owner: bytes, message: Execute) -> None:
        """Pass a command on; its answer comes from another thread."""

        def answer(result: Page | Deleted | VariantsNow | RwkvBatchError) -> None:
            failed = isinstance(result, RwkvBatchError)
            failure = Failure.of("", result) if failed else None
            self._answers.append((owner, CommandResult(message.question, None if failed else result, failure)))
            self._bell.ring()

        try:
            if self.core is None:
                raise NotBegun("the model is still loading", code="loading")
            self.core.execute(message.command, answer)
        except RwkvBatchError as error:
            answer(error)

    def _stop(self, request_id: str) -> None:
        """End a request and tell its owner, unless that was found to be gone while another of its requests was ended."""
        found = self._live.pop(request_id)
        if found is None:
            return
        owner, _ = found
        self.core.cancel(request_id)
        self._send(owner, Batch([], [Failure.of(request_id, Conflict("Request cancelled", code="cancelled"))]))

    def _send_events(self) -> None:
        """Send what waits, in one message to each HTTP process."""
        events: dict[bytes, list[Event]] = {}
        while self._outbox:
            for owner, items in self._outbox.popleft().items():
                events.setdefault(owner, []).extend(items)
        for owner, items in events.items():
            progress, failures = [], []
            for item in items:
                if isinstance(item, Failure):
                    failures.append(item)
                    self._live.pop(item.request_id)
                else:
                    progress.append(item)
                    if item.finishes:
                        self._live.ended(item.request_id, len(item.finishes))
            if owner in self._peers:
                self._send(owner, Batch(progress, failures, self._live.others(owner)))

    def _send_answers(self) -> None:
        """Send what came of commands; of other variants all HTTP processes are told before the one that asked for them."""
        while self._answers:
            owner, result = self._answers.popleft()
            if isinstance(result, CommandResult) and isinstance(result.answer, VariantsNow):
                self.info = self.core.info
                self._tell(self._stats())
            self._send(owner, result)

    def _tell(self, stats: dict[str, int | float]) -> None:
        for owner in list(self._peers):
            self._send(owner, self._status(owner, stats))

    def _send(self, owner: bytes, message: ToHttp) -> None:
        """Send without waiting; a peer that is gone (EHOSTUNREACH) or full (EAGAIN) is given up."""
        try:
            self._socket.send_multipart([owner, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._give_up(owner, "does not read" if error.errno == zmq.EAGAIN else "is gone")

    def _give_up(self, owner: bytes, reason: str) -> None:
        if self._peers.pop(owner, None) is not None:
            theirs = self._live.pop_all(owner)
            log.log(logging.WARNING if theirs else logging.DEBUG, "an HTTP process %s: its requests are cancelled", reason)
            if self.core is not None:
                self.core.cancel_owner(owner)

    def _beat(self) -> None:
        now = time.monotonic()
        for owner, heard in list(self._peers.items()):
            if now - heard > self.peer_seconds:
                self._give_up(owner, "is silent")
        stats = self._stats()
        call_back(self.on_beat, stats)
        self._tell(stats)

    def _stats(self) -> dict[str, int | float]:
        return self.core.stats() if self.core is not None else {}

    def _status(self, owner: bytes, stats: dict[str, int | float]) -> Status:
        phase = "draining" if self.draining else "loading" if self.core is None else "ready"
        return Status(phase, self.info, stats, self._live.others(owner))
