"""A connection from an HTTP process to one engine: a DEALER socket, a new identity for each connection."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from rwkv_batch.ipc.messages import (
    HIGH_WATER,
    SUBMIT_HIGH_WATER,
    UNREADABLE,
    Alive,
    EngineInfo,
    Hello,
    Seat,
    Status,
    ToEngine,
    ToHttp,
    decode_to_http,
    encode,
)
from rwkv_batch.ipc.tickets import Ticket
from rwkv_batch.request import Failure
from rwkv_batch.served.variants import VariantsNow
from rwkv_batch.session_messages import Deleted, Page

log = logging.getLogger(__name__)

SessionAnswer = Page | Deleted | VariantsNow | Failure


class Part:
    """The rows of a request that one engine has.

    id       what the engine calls them
    payload  what it was sent
    refused  engines that did not take them, by their numbers
    """

    __slots__ = ("accepted", "id", "open_rows", "payload", "refused", "rows", "ticket")

    def __init__(self, ticket: Ticket, part_id: str, rows: range, payload: bytes):
        self.ticket = ticket
        self.id = part_id
        self.rows = rows
        self.open_rows = len(rows)
        self.payload = payload
        self.accepted = False
        self.refused: set[int] = set()


class Pace(NamedTuple):
    """Seconds between two signs of life, and of silence after which an engine is taken for lost."""

    heartbeat: float
    peer_seconds: float


class EngineLink:
    """What an HTTP process knows of one engine, and the connection to it. Methods are for the client's thread only.

    phase     "lost" until the engine has said another one
    info      what it is, once it has said so; stays when it is lost
    stats     its figures of the last sign of life
    parts     what it has of our requests, by the ids it knows them by
    open_rows  their rows that have not ended
    others    rows it has from other HTTP processes, as it said last
    commands  questions about sessions and variants that it has not answered
    """

    def __init__(self, seat: Seat, context: zmq.Context, poller: zmq.Poller, pace: Pace):
        self.seat = seat
        self.phase = "lost"
        self.info: EngineInfo | None = None
        self.stats: dict[str, int | float] = {}
        self.parts: dict[str, Part] = {}
        self.open_rows = 0
        self.others = 0
        self.commands: dict[str, Callable[[SessionAnswer], None]] = {}
        self._context, self._poller, self._pace = context, poller, pace
        self._dealer: zmq.Socket | None = None

    @property
    def ready(self) -> bool:
        """Whether the engine takes requests."""
        return self.phase == "ready"

    @property
    def load(self) -> tuple[int, int]:
        """Rows it has, ours counted by ourselves; slots that any row may take."""
        return self.open_rows + self.others, (self.info.slots if self.info is not None else 0) or 1

    def connect(self) -> None:
        """Begin to connect; the engine need not be there yet."""
        dealer = self._dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, b"http-%d-" % os.getpid() + secrets.token_bytes(8))
        dealer.setsockopt(zmq.SNDHWM, SUBMIT_HIGH_WATER)
        dealer.setsockopt(zmq.RCVHWM, HIGH_WATER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        self._monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for source in (dealer, self._monitor):
            self._poller.register(source, zmq.POLLIN)
        dealer.connect(self.seat.address)
        dealer.send(encode(Hello(os.getpid())))
        self._heard = time.monotonic()
        self._next_beat = self._heard + self._pace.heartbeat

    def disconnect(self) -> None:
        """Give the connection up; the next one has a new identity."""
        if self._dealer is not None:
            for source in (self._dealer, self._monitor):
                self._poller.unregister(source)
            self._dealer.disable_monitor()
            self._monitor.close()
            self._dealer.close()
            self._dealer = None
        self.phase, self.stats, self.others = "lost", {}, 0

    def send(self, message: ToEngine) -> bool:
        """Send without waiting; whether the engine has room for it."""
        return self.send_bytes(encode(message))

    def send_bytes(self, payload: bytes) -> bool:
        """The same with a message that is encoded."""
        try:
            self._dealer.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def messages(self) -> Iterator[ToHttp]:
        """What has come. Raises ConnectionError when it cannot be read."""
        while True:
            try:
                yield decode_to_http(self._dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except UNREADABLE as error:
                raise ConnectionError(f"it sent what cannot be read: {error}") from None

    def note(self, status: Status) -> None:
        """Keep what a sign of life says."""
        self.phase, self.stats, self.others = status.phase, status.stats, status.others

    def check_up(self, ready: dict) -> None:
        """Give a sign of life when it is due, and look whether the engine is alive; `ready`: what has something to read.

        Raises ConnectionError, which says why this connection has no future.
        """
        now = time.monotonic()
        if self._dealer in ready:
            self._heard = now
        if self._monitor in ready:
            recv_monitor_message(self._monitor)
            raise ConnectionError("it closed the connection")
        if self.phase != "lost" and now - self._heard > self._pace.peer_seconds:
            raise ConnectionError("it is silent")
        if now >= self._next_beat:
            self._next_beat = now + self._pace.heartbeat
            if not self.send(Alive()):
                raise ConnectionError("it does not read")

    def add(self, part: Part) -> None:
        """The engine gets these rows."""
        self.parts[part.id] = part
        self.open_rows += part.open_rows

    def ended(self, part: Part, num_rows: int) -> None:
        """So many of them have ended."""
        num_rows = min(num_rows, part.open_rows)
        part.open_rows -= num_rows
        self.open_rows -= num_rows

    def drop(self, part: Part) -> None:
        """Nothing more is wanted of them."""
        if self.parts.pop(part.id, None) is not None:
            self.ended(part, part.open_rows)
