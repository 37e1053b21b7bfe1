"""Cuts off the connection of an answer that fails in the middle.

Robyn does not tell which connection a call came on, and what it is given to write it ends well. So all descriptors of the
process are looked at.
"""

import contextlib
import fcntl
import os
import random
import socket
import struct
import threading
import time

ACKED_AT = 120  # where Linux's struct tcp_info has the number of acknowledged bytes, 64 bits
SIOCOUTQ = 0x5411
INFO_BYTES = 256
GONE_SECONDS = 0.02  # for what was written to leave the process
LOOK_SECONDS = 0.01
FOUND_SECONDS = 0.25  # for the blanks to leave it
MAX_ROUNDS = 8
CHUNK_FRAME = len("\r\n\r\n")  # around the chunk, beside the digits of its length


class Ledger:
    """How much was written to each TCP connection of this process; one for all answers, which share the looks.

    A connection goes by the inode of its socket, for its descriptor may be another one's soon.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: dict[int, tuple[int, int]] = {}
        self._looked_at = 0.0

    def since(self, moment: float) -> dict[int, tuple[int, int]]:
        """By inode the descriptor and the bytes written, as of a time after `moment` (s, monotonic)."""
        with self._lock:
            if self._looked_at <= moment:
                self._looked_at = time.monotonic()
                self._written = written()
            return self._written


class Cut:
    """Ends the connection of an answer in progress in the middle of its body, so that its client sees that it is not whole.

    The connection is found by what it writes: random numbers of blanks. `blanks` and `found` take turns until it was that one
    twice. On Linux only; elsewhere, and where it is not found, the answer must end otherwise.
    """

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._before: dict[int, tuple[int, int]] = {}
        self._suspects: set[int] | None = None  # those that wrote what was written in an earlier round
        self._size = 0
        self._num_rounds = 0

    def blanks(self, wrote_at: float) -> bytes:
        """What the answer writes next; the last time it did was at `wrote_at` (s, monotonic)."""
        time.sleep(max(0.0, wrote_at + GONE_SECONDS - time.monotonic()))
        self._before = self._ledger.since(wrote_at + GONE_SECONDS)
        self._size = random.randrange(300, 9000)
        self._num_rounds += 1
        return b" " * self._size

    def found(self) -> bool | None:
        """Whether the connection was cut, once the blanks have been handed over; None when there is another round."""
        deadline = time.monotonic() + FOUND_SECONDS
        wrote = self._wrote()
        while not wrote and time.monotonic() < deadline and self._before:
            time.sleep(LOOK_SECONDS)
            wrote = self._wrote()
        if wrote and self._suspects is not None and len(wrote) == 1:
            return shut_down(*wrote, self._before[next(iter(wrote))][0])
        self._suspects = wrote or self._suspects
        return None if self._before and self._num_rounds < MAX_ROUNDS else False

    def _wrote(self) -> set[int]:
        """The connections to which the blanks were written since."""
        sizes = (self._size, self._size + len(f"{self._size:x}") + CHUNK_FRAME)
        now = self._ledger.since(time.monotonic() - LOOK_SECONDS)
        candidates = self._before.keys() & now.keys() if self._suspects is None else self._suspects & now.keys()
        return {one for one in candidates if one in self._before and now[one][1] - self._before[one][1] in sizes}


def written() -> dict[int, tuple[int, int]]:
    """By inode the descriptor of each TCP connection and the bytes that this side has written, give or take a constant."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        fd = int(name)
        with contextlib.suppress(OSError, AttributeError, struct.error):
            inode = os.fstat(fd).st_ino
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=fd)
            try:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
                (waiting,) = struct.unpack("i", fcntl.ioctl(fd, SIOCOUTQ, b"\0\0\0\0"))
            finally:
                connection.detach()
            found[inode] = fd, struct.unpack_from("Q", info, ACKED_AT)[0] + waiting
    return found


def shut_down(inode: int, fd: int) -> bool:
    """Shut a connection down unless its descriptor is another one's by now; returns whether that was done."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if os.fstat(connection.fileno()).st_ino != inode:
                return False
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True
