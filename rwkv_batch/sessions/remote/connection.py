"""An engine's connection to the store process: opened when it is needed, and again when that process was started again."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rwkv_batch.errors import Unavailable
from rwkv_batch.sessions.remote.messages import LENGTHS, METHODS, Call, Reply, head_of, raw
from rwkv_batch.sessions.store import SourceLost

log = logging.getLogger("rwkv_batch.sessions.remote")

RETRY_SECONDS = 0.05
PATIENCE_SECONDS = 5.0  # that a call waits for a process that is being started; while it stays away the next ones are refused
_reply = msgspec.msgpack.Decoder(Reply)


class Broken(Unavailable):
    """The connection ended before the reply: the call was carried out or not."""


class Connection:
    """One connection to the process at `path`. May be used by several threads, one call at a time.

    hello  the arguments of its first call
    """

    def __init__(self, path: Path, hello: tuple[str, str, bool, float]):
        self._path = path
        self._hello = hello
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_away = False

    def call(
        self, method: str, *arguments: Any, pieces: Sequence[bytes | memoryview] = (), once: bool = False
    ) -> tuple[Any, memoryview]:
        """Have a method carried out; return its result and the bytes behind it.

        Raises what the method raised, and Unavailable while there is no process. Where it ends meanwhile the call is made
        again, or with `once` Broken is raised.
        """
        with self._lock:
            until = time.monotonic() + (0.0 if self._is_away else PATIENCE_SECONDS)
            while True:
                try:
                    self._open()
                    reply, data = self._ask(method, arguments, pieces)
                    break
                except OSError as error:
                    was_open = self._socket is not None
                    self._close()
                    if once and was_open:
                        raise _unreachable(Broken) from None
                    if time.monotonic() > until:
                        self._is_away = True
                        log.warning("the store of sessions cannot be reached: %s", error)
                        raise _unreachable(Unavailable) from None
                    time.sleep(RETRY_SECONDS)
        if reply.failure is not None:
            raise reply.failure.exception()
        if reply.lost is not None:
            raise SourceLost(reply.lost)
        return METHODS[method].result.decode(reply.result), data

    def tell(self, method: str, *arguments: Any) -> None:
        """Make a call that has no reply, if there is a connection; without one there is nothing to be told."""
        with self._lock:
            self._tell(method, arguments)

    def tell_if_free(self, method: str, *arguments: Any) -> None:
        """The same unless a call is in progress, which tells as much."""
        if self._lock.acquire(blocking=False):
            try:
                self._tell(method, arguments)
            finally:
                self._lock.release()

    def close(self) -> None:
        """Close it; the next call opens it again."""
        with self._lock:
            self._close()

    def _tell(self, method: str, arguments: tuple) -> None:
        if self._socket is not None:
            try:
                self._socket.sendall(head_of(Call(method, raw(arguments))))
            except OSError:
                self._close()

    def _ask(self, method: str, arguments: tuple, pieces: Sequence[bytes | memoryview]) -> tuple[Reply, memoryview]:
        self._socket.sendall(head_of(Call(method, raw(arguments)), sum(map(len, pieces))))
        for piece in pieces:
            self._socket.sendall(piece)
        size, more = LENGTHS.unpack(self._read(LENGTHS.size))
        return _reply.decode(self._read(size)), self._read(more)

    def _open(self) -> None:
        if self._socket is not None:
            return
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            found.connect(str(self._path))
        except BaseException:
            found.close()
            raise
        self._socket, self._is_away = found, False
        self._ask("hello", self._hello, ())

    def _read(self, count: int) -> memoryview:
        data = memoryview(bytearray(count))
        done = 0
        while done < count:
            size = self._socket.recv_into(data[done:])
            if not size:
                raise ConnectionResetError("the store process has ended")
            done += size
        return data

    def _close(self) -> None:
        found, self._socket = self._socket, None
        if found is not None:
            with contextlib.suppress(OSError):
                found.close()


def _unreachable(kind: type[Unavailable]) -> Unavailable:
    return kind("the store of sessions is being started again", code="storage_unavailable", retry_after=1.0)
