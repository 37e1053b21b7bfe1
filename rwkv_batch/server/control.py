"""The child's side of the socket to the supervisor, and what every child does first."""

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rwkv_batch import metrics
from rwkv_batch.config import Config
from rwkv_batch.ipc.messages import Seat
from rwkv_batch.request import Failure
from rwkv_batch.served.models import Loaded, ModelTable
from rwkv_batch.server import lines
from rwkv_batch.server.child import Birth, key_of
from rwkv_batch.server.exit_codes import EXIT_ENGINE

log = logging.getLogger(__name__)

GARBAGE_OBJECTS = 10_000  # made and not freed between two collections of garbage: nearly all are freed without one
BEAT_SECONDS = 0.5  # between two signs of life of a child


# What the supervisor says beside single words: where the engines are now, which models they run, and what came of an order.
HEARD = {
    "seats": list[Seat],
    "models": ModelTable,
    "loaded": tuple[str, Loaded],
    "failed": tuple[str, Failure],
}


class Control:
    """A child's side of the socket to the supervisor."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=os.dup(0))  # dup makes it close on exec, so that no compiler we start keeps it open
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        self._lines = self._socket.makefile("rb")
        self.birth = msgspec.json.decode(self._lines.readline(), type=Birth)
        self.config = self.birth.config
        self.folder = Path(self.birth.folder)

    def report(self, event: str, **more: Any) -> None:
        """Tell the supervisor."""
        with contextlib.suppress(OSError):
            self._socket.sendall(msgspec.json.encode({"event": event, **more}) + b"\n")

    def beat(self) -> None:
        """Give the supervisor a sign of life; never waits: one that sleeps itself needs none."""
        with contextlib.suppress(OSError):
            self._socket.send(b"\n", socket.MSG_DONTWAIT)

    def listen(self, orders: dict[str, Callable[..., None]]) -> None:
        """Obey in a thread; when the supervisor is gone, end this process. HEARD says what some are called with."""

        def run() -> None:
            with contextlib.suppress(OSError):
                for line in self._lines:
                    word, _, rest = line.decode().strip().partition(" ")
                    if word in orders:  # the end of an engine's seat is nothing to an engine
                        orders[word](*([msgspec.json.decode(rest, type=HEARD[word])] if rest else []))
            lines.leave(1)

        threading.Thread(target=run, name="control", daemon=True).start()


def begin(role: str) -> Control:
    """Make this process a child of its supervisor."""
    faulthandler.register(signal.SIGUSR2)  # how the supervisor asks a process that hangs where
    # The supervisor decides when to stop; signals meant for it may reach all of us (a service manager sends them to the group).
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    control = Control()
    die_with(control.birth.parent)
    set_up_logging(control.config)
    threading.excepthook = end_with_thread
    metrics.use_folder(control.folder / "metrics", key_of(role, control.birth.index))
    return control


def freeze_loaded(*, collect_rarely: bool = False) -> None:
    """What was made until now stays: collections of garbage need not look at it again.

    One that looks at all that torch or the routes have made takes a twentieth of a second, and everybody waits for it.
    """
    gc.collect()
    gc.freeze()
    if collect_rarely:
        gc.set_threshold(GARBAGE_OBJECTS)


def die_with(parent: int) -> None:
    """Be killed when the parent dies; elsewhere than on Linux the end of the control socket has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def end_with_thread(died: threading.ExceptHookArgs) -> None:
    """A thread has died of a defect, so end this process: the supervisor can start another one, but not another thread."""
    log.critical("a thread died", exc_info=(died.exc_type, died.exc_value or died.exc_type(), died.exc_traceback))
    lines.leave(EXIT_ENGINE)


def set_up_logging(config: Config) -> None:
    """Log to stderr, waiting for nobody. Client text is JSON-escaped where it is logged, so one line stays one line."""
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname).1s %(process)d %(name)s: %(message)s",
        handlers=[lines.Handler(lines.ERR)],
    )
    for name in ("robyn", "actix_server", "actix_http", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


def address_in(folder: Path, index: int) -> str:
    """Where an engine listens for the HTTP processes."""
    return f"ipc://{folder}/engine-{index}"
