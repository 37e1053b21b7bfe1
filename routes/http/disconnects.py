"""Which clients have left, and which do not read.

Robyn does not tell when a client has hung up. So all descriptors of the process are looked at.
"""

import ipaddress
import logging
import os
import select
import socket

from routes.http.streams import NUDGE
from rwkv_batch.config import Config
from rwkv_batch.errors import Unavailable
from rwkv_batch.ipc.client import EngineClient

log = logging.getLogger(__name__)

SCAN_SECONDS = 0.02  # time between two looks for connections that were hung up
CHECK_SECONDS = 1.0  # and for clients that do not read
QUIET_SECONDS = 0.1  # an answer that wrote more recently finds out by itself


def address(text: str) -> str:
    """An address in one form only, "" for what is none."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return ""
    return str(getattr(found, "ipv4_mapped", None) or found)


class Hangups:
    """Notices connections of this process that the other side has hung up, by looking at all of its descriptors.

    One that stays hung up for two looks is that of a call in progress: others are closed at once.

    current  addresses that have such connections
    """

    EVENTS = getattr(select, "POLLRDHUP", 0)  # absent on macOS: there only pings find out

    def __init__(self) -> None:
        self.current: set[str] = set()
        self._poll: select.poll | None = None
        self._num_scans = 0
        self._seen: set[int] = set()
        self._addresses: dict[int, str] = {}  # of connections that were hung up for two looks

    def scan(self) -> set[str]:
        """The addresses whose connections are newly known to be hung up."""
        if not self.EVENTS:
            return set()
        if self._num_scans % 8 == 0:
            self._refresh()
        self._num_scans += 1
        found = {fd for fd, events in self._poll.poll(0) if events & self.EVENTS and not events & select.POLLNVAL}
        new = {fd: peer_of(fd) for fd in found & self._seen if fd not in self._addresses}
        self._addresses = {fd: peer for fd, peer in (self._addresses | new).items() if fd in found}
        self._seen = found
        self.current = set(self._addresses.values())
        return set(new.values())

    def _refresh(self) -> None:
        self._poll = select.poll()
        top = max((int(name) for name in os.listdir("/proc/self/fd")), default=64)
        for fd in range(3, top + 32):
            self._poll.register(fd, self.EVENTS)


def peer_of(fd: int) -> str:
    """The address at the other end of a descriptor, "" for one that is no connection any more."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            return address(connection.getpeername()[0]) if connection.family != socket.AF_UNIX else ""
    except (OSError, IndexError):
        return ""


class DisconnectMonitor:
    """Ends answers that nobody waits for. In the client's thread only."""

    def __init__(self, client: EngineClient, config: Config):
        self.hangups = Hangups()
        self._client = client
        self._config = config
        self._next_scan = 0.0
        self._next_check = 0.0

    def look(self, now: float) -> None:
        """Look at connections and readers when it is time to."""
        if self._client.tickets and now >= self._next_scan:
            self._next_scan = now + SCAN_SECONDS
            self._nudge(self.hangups.scan(), now)
        if now >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            self._cut_slow_readers(now)

    def _nudge(self, left: set[str], now: float) -> None:
        """After a hang-up, make each answer to that address write twice as soon as it is quiet, for it may have been left.

        The first write after a hang-up still succeeds, the second fails and ends the answer. Others write anyway.
        """
        for ticket in self._client.tickets.values():
            reader = ticket.reader
            if reader.peer in left or (not reader.watched and reader.peer in self.hangups.current):
                reader.suspect = True
            reader.watched = True
            if reader.suspect and now - reader.taken_at > QUIET_SECONDS:
                reader.suspect = False
                reader.put(NUDGE)
                reader.put(NUDGE)

    def _cut_slow_readers(self, now: float) -> None:
        limit = self._config.stream_buffer_mib * 2**20
        for ticket in list(self._client.tickets.values()):
            reader = ticket.reader
            unread = reader.num_put - reader.num_taken
            stalled = unread and now - max(reader.taken_at, reader.unread_since) > self._config.stream_stall_seconds
            if unread > limit or stalled:
                log.warning("%s cut off: its client does not read", ticket.request_id)
                ticket.abort(Unavailable("the client does not read", code="slow_reader"))
