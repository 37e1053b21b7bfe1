"""Lines of text for a descriptor, written by a thread of their own: whoever says something never waits for whoever reads it.

A reader that stalls costs lines, which are counted and reported when it reads again; one that has gone costs all of them.
"""

import atexit
import logging
import os
import select
import threading
import time

MAX_BYTES = 4 * 2**20  # that wait for a reader
PIECE_BYTES = 4096  # written at once: as much as pipes take whole, so that lines of several processes do not mix
LEAVE_SECONDS = 1.0  # that a process which ends gives its readers


class Lines:
    """Writes lines to `descriptor`. The thread starts with the first line."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._waiting: list[bytes] = []
        self._num_bytes = 0  # of those that wait and of those that are being written
        self._num_dropped = 0
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
        """Have the line written, without its end; any thread, never waits."""
        data = line.encode(errors="backslashreplace") + b"\n"
        with self._lock:
            if self._num_bytes + len(data) > MAX_BYTES:
                self._num_dropped += 1
                return
            self._waiting.append(data)
            self._num_bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
                self._thread.start()
                atexit.register(self.flush)
        self._wake.set()

    def flush(self, seconds: float = LEAVE_SECONDS) -> None:
        """Wait until all is written, no longer than that."""
        deadline = time.monotonic() + seconds
        while self._num_bytes and time.monotonic() < deadline:
            time.sleep(0.002)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while pieces := self._take():
                for piece in pieces:
                    self._put(piece)
                    with self._lock:
                        self._num_bytes -= len(piece)

    def _take(self) -> list[bytes]:
        """All lines that wait, as pieces to write."""
        with self._lock:
            lines, self._waiting = self._waiting, []
            if self._num_dropped:
                lines.append(b"%d lines were dropped here: nobody read them in time\n" % self._num_dropped)
                self._num_bytes += len(lines[-1])
                self._num_dropped = 0
        pieces: list[bytes] = []
        for line in lines:
            if pieces and len(pieces[-1]) + len(line) <= PIECE_BYTES:
                pieces[-1] += line
            else:
                pieces.append(line)
        return pieces

    def _put(self, piece: bytes) -> None:
        rest = memoryview(piece)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except OSError:  # nobody will ever read it
                return


class Handler(logging.Handler):
    """Passes log records on to `lines`."""

    def __init__(self, lines: Lines):
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
        else:
            self.lines.write(text)


OUT, ERR = Lines(1), Lines(2)


def leave(code: int) -> None:
    """End this process at once, but for the lines that wait."""
    OUT.flush()
    ERR.flush()
    os._exit(code)
