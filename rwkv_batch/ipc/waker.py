"""What the threads of both ends share: a bell that wakes them, and callbacks that cannot end them."""

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


def call_back(callback: Callable | None, *args: Any) -> Any:
    """What the callback returns, None without one. What it raises is logged: it must not end the thread that calls it."""
    try:
        return callback(*args) if callback is not None else None
    except Exception:
        log.exception("a callback failed")
        return None


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
