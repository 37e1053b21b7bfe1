"""The sockets of the store process: one thread that reads calls, has them carried out, and keeps the file in order.

What takes little time goes first, then all writes that wait, in one transaction, then one call that takes longer. No engine
waits for another one that does not read.
"""

import contextlib
import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.ipc.waker import Bell
from rwkv_batch.sessions.remote.claims import Engine
from rwkv_batch.sessions.remote.messages import LENGTHS, METHODS, UNANSWERED, Call, Reply, head_of
from rwkv_batch.sessions.remote.service import SLOW, StoreService
from rwkv_batch.sessions.sqlite.database import SessionDatabase

log = logging.getLogger("rwkv_batch.sessions.remote")

READ_BYTES = 2**20  # at once
IDLE_SECONDS = 1.0  # without a call until the file gets all its upkeep
_call = msgspec.msgpack.Decoder(Call)


class Peer:
    """One connection. `calls`: read and not carried out, each with the bytes behind it; `service`: of the file it wants."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self.socket = connection
        self.engine: Engine | None = None
        self.service: StoreService | None = None
        self.calls: deque[tuple[Call, memoryview]] = deque()
        self.unsent: deque[memoryview] = deque()
        self._unread = bytearray()

    def read(self) -> bool:
        """Take what has come; False when the other side is gone."""
        with contextlib.suppress(BlockingIOError):
            while data := self.socket.recv(READ_BYTES):
                self._unread += data
                if len(data) < READ_BYTES:
                    break
            else:
                return False
        self._cut()
        return True

    def _cut(self) -> None:
        """Make calls of what is whole."""
        begin, unread = 0, self._unread
        while len(unread) - begin >= LENGTHS.size:
            size, more = LENGTHS.unpack_from(unread, begin)
            body = begin + LENGTHS.size
            if len(unread) < body + size + more:
                break
            data = bytes(unread[body + size : body + size + more])
            self.calls.append((_call.decode(unread[body : body + size]), memoryview(data)))
            begin = body + size + more
        del unread[:begin]

    def send(self, reply: Reply, pieces: list[bytes | memoryview]) -> None:
        """Send, as much as the socket takes now."""
        self.unsent.append(memoryview(head_of(reply, sum(map(len, pieces)))))
        self.unsent.extend(memoryview(piece) for piece in pieces)
        self.flush()

    def flush(self) -> None:
        """Send more of what could not be sent; OSError when the other side is gone."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                sent = self.socket.send(self.unsent[0])
                self.unsent[0] = self.unsent[0][sent:]
                if not self.unsent[0]:
                    self.unsent.popleft()


class StoreServer:
    """Answers engines at `path` from the session files they want, which nobody else uses.

    open_file  gives the one at a path; UsageError
    """

    def __init__(self, path: Path, open_file: Callable[[str], SessionDatabase]):
        self._path = path
        self._open_file = open_file
        self._services: dict[str, StoreService] = {}
        self._peers: deque[Peer] = deque()
        self._bell = Bell()
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        path.unlink(missing_ok=True)  # of a process that was killed
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell.fd, selectors.EVENT_READ)

    def stop(self) -> None:
        """Let `run` return. Any thread."""
        self._stopping = True
        self._bell.ring()

    def use(self, file: str) -> StoreService:
        """Return what carries out calls on a file, which is opened if it is there. UsageError."""
        if file not in self._services:
            self._services[file] = StoreService(self._open_file(file))
            try:
                self._services[file].database.open_if_there()
            except RwkvBatchError as error:  # every call will say so
                log.error("%s", error.message)
        return self._services[file]

    def run(self) -> None:
        """Answer until stopped, then close the files."""
        last_call, rested = time.monotonic(), False
        while not self._stopping:
            waits = any(peer.calls for peer in self._peers)
            self._listen(0.0 if waits else IDLE_SECONDS)
            self._drop_alive()
            if any(peer.calls for peer in self._peers):
                self._work()
                last_call, rested = time.monotonic(), False
                self._tidy(waiting=any(peer.calls for peer in self._peers))
            elif time.monotonic() - last_call >= IDLE_SECONDS:
                self._tidy(waiting=False, idle=not rested)
                rested = True
                for service in self._services.values():
                    with contextlib.suppress(RwkvBatchError):  # logged; there is time for another try
                        service.database.clean_up()
        self._close()

    def _tidy(self, *, waiting: bool, idle: bool = False) -> None:
        for service in self._services.values():
            service.database.tidy(waiting=waiting, idle=idle)

    def _listen(self, seconds: float) -> None:
        """Take what has come from everybody, so that nobody counts as silent whose words only wait here."""
        for key, events in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data is None:
                self._bell.hear()
            else:
                self._exchange(key.data, events)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            peer = Peer(self._listener.accept()[0])
            self._peers.append(peer)
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def _exchange(self, peer: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_READ and not peer.read():
                raise ConnectionResetError
            if events & selectors.EVENT_WRITE:
                peer.flush()
                self._watch(peer)
        except OSError:
            self._leave(peer)
        except msgspec.MsgspecError as error:
            log.error("an engine said what cannot be read: %s", error)
            self._leave(peer)
        if peer.engine is not None:
            peer.engine.heard = time.monotonic()

    def _leave(self, peer: Peer) -> None:
        """A connection has ended, and with it what its engine had."""
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        peer.calls.clear()
        if peer.engine is not None:
            peer.service.left(peer.engine)

    def _drop_alive(self) -> None:
        """Signs of life have done their work when they are heard; who waits for us is not silent."""
        for peer in self._peers:
            while peer.calls and peer.calls[0][0].method == "alive":
                peer.calls.popleft()
            if peer.calls and peer.engine is not None:
                peer.engine.heard = time.monotonic()

    def _work(self) -> None:
        writes: list[Peer] = []
        slow: list[Peer] = []
        for peer in list(self._peers):
            while peer.calls:
                method = peer.calls[0][0].method
                if peer.service is not None and (method == "write" or method in SLOW):
                    (writes if method == "write" else slow).append(peer)
                    break
                self._answer(peer)
        for service in {peer.service for peer in writes}:
            theirs = [peer for peer in writes if peer.service is service and peer.calls]
            replies = service.write([(peer.engine, *peer.calls.popleft()) for peer in theirs])
            for peer, reply in zip(theirs, replies, strict=True):
                self._send(peer, reply)
        if slow and slow[0].calls:
            self._answer(slow[0])
            if slow[0] in self._peers:  # the others come first next time
                self._peers.remove(slow[0])
                self._peers.append(slow[0])

    def _answer(self, peer: Peer) -> None:
        call, data = peer.calls.popleft()
        if peer.service is None:
            self._greet(peer, call)
        elif call.method != "alive":
            reply, pieces = peer.service.answer(peer.engine, call, data)
            if call.method not in UNANSWERED:
                self._send(peer, reply, pieces)

    def _greet(self, peer: Peer, call: Call) -> None:
        """The first call says who it is."""
        try:
            name, file, shared, seconds = METHODS["hello"].arguments.decode(call.arguments)
            peer.service = self.use(file)
        except (msgspec.MsgspecError, RwkvBatchError) as error:
            log.error("an engine cannot be told from others: %s", error)
            self._leave(peer)
            return
        peer.engine = Engine(name, shared, seconds)
        self._send(peer, Reply())

    def _send(self, peer: Peer, reply: Reply, pieces: list[bytes | memoryview] = ()) -> None:
        try:
            peer.send(reply, list(pieces))
            self._watch(peer)
        except OSError:
            self._leave(peer)

    def _watch(self, peer: Peer) -> None:
        """Hear when there is room for what could not be sent."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.socket, events, peer)

    def _close(self) -> None:
        for peer in list(self._peers):
            self._leave(peer)
        self._selector.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)
        self._tidy(waiting=False, idle=True)
        for service in self._services.values():
            service.database.close()
