"""The supervisor: starts one engine process and some HTTP processes, watches them, and ends them together."""

import contextlib
import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from rwkv_batch import metrics
from rwkv_batch.config import Config, find_model
from rwkv_batch.config_sources import load
from rwkv_batch.errors import RwkvBatchError, UsageError
from rwkv_batch.ipc.messages import EngineInfo
from rwkv_batch.server.announce import announce, say
from rwkv_batch.server.child import Child
from rwkv_batch.server.claims import claim_port, make_folder
from rwkv_batch.server.control import set_up_logging
from rwkv_batch.server.exit_codes import EXIT_CRASHES, EXIT_LOST, EXIT_USAGE

log = logging.getLogger(__name__)

HTTP_STOP_SECONDS = 3.0  # from the order to stop until a process is killed
MAX_FAILED_STARTS = 5
RETRY_SECONDS = 1.0  # until a process is tried again that this machine had no room for
MAX_PAUSE = 30.0  # until an HTTP process that failed to start is started again
TICK_SECONDS = 0.25  # a longer turn of the supervisor counts as so much: it slept itself, and the children perhaps with it
KILL_SECONDS = 5.0  # until a killed process is gone, unless the kernel holds it


class Supervisor:
    """Keeps one engine and `config.http_workers` HTTP processes alive until told to stop. `program` starts a child.

    front      role of the processes that stand before the engine
    arguments  what each child is told beside the settings
    """

    front = "http"

    def __init__(self, config: Config, folder: Path, program: Sequence[str], arguments: Sequence[str] = ()):
        self.config = config
        self.folder = folder
        self.program = program
        self.arguments = arguments
        self.children: list[Child] = []
        self.due: list[tuple[float, str, int]] = []  # when, which role and index to start
        self.crashes: deque[float] = deque()
        self.failed_starts = 0
        self.info: EngineInfo | None = None
        self.announced = False
        self.signals: list[int] = []
        self.hung_up = False
        self.draining_from = 0.0
        self.draining_until: float | None = None
        self.code = 0  # of an orderly end so far
        self.watched = time.monotonic()
        self.selector = selectors.DefaultSelector()

    @property
    def num_fronts(self) -> int:
        """How many processes stand before the engine."""
        return self.config.http_workers

    def announce(self, info: EngineInfo) -> None:
        """All are ready: say so."""
        announce(self.config, info)

    def run(self) -> int:
        """Start everything, watch it, stop it; returns the exit code."""
        waker, wake = socket.socketpair()
        for end in (waker, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: self.signals.append(number))
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, lambda number, frame: setattr(self, "hung_up", True))
        self.selector.register(waker, selectors.EVENT_READ)
        now = time.monotonic()
        self.due = [(now, "engine", 0), *((now, self.front, index) for index in range(self.num_fronts))]
        try:
            while True:
                code = self.turn()
                if code is not None:
                    return code
                for key, _ in self.selector.select(timeout=0.1):
                    if key.fileobj is waker:
                        with contextlib.suppress(BlockingIOError):
                            waker.recv(64)
        finally:
            for child in self.children:
                child.process.kill()
            for child in self.children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(KILL_SECONDS)

    def turn(self) -> int | None:
        """Look at everything once; returns the exit code when it is time to go."""
        self.listen()
        for child in list(self.children):
            status = child.process.poll()
            if status is not None and (code := self.bury(child, status)) is not None:
                if self.announced:
                    self.stop()
                return code
        now = time.monotonic()
        if self.hung_up and self.draining_until is None:  # a terminal may say so twice, and systemd does behind SIGTERM
            self.drain(now)
        if self.signals:
            number = self.signals.pop(0)
            if self.draining_until is not None:
                say("stopping at once")
                return 128 + number
            self.drain(now)
        if self.draining_until is not None:
            waiting = [child for child in self.children if child.role == self.front and not child.idle]
            done = not waiting and now >= self.draining_from + self.config.drain_least_seconds
            return self.stop() if done or now >= self.draining_until else None
        for start in [start for start in self.due if start[0] <= now]:
            self.due.remove(start)
            try:
                self.start(*start[1:])
            except OSError as error:  # no memory, no process or descriptor left: those that run go on
                if not self.announced:
                    raise UsageError(f"a process cannot be started: {error.strerror}") from None
                log.error("a process cannot be started, and it is tried again: %s", error.strerror)
                self.due.append((now + RETRY_SECONDS, *start[1:]))
        return None

    def listen(self) -> None:
        """Take the reports of all children, and notice which are silent.

        Time counts only while the supervisor runs: after a sleep of the machine, or of all of us, nobody is to blame.
        """
        now = time.monotonic()
        seconds, self.watched = min(now - self.watched, TICK_SECONDS), now
        for child in self.children:
            for report in child.reports():
                self.hear(child, report)
            if child.process.returncode is None:  # at the end those that have ended stay until the engine has, too
                child.wait(seconds)

    def start(self, role: str, index: int) -> None:
        """Start one process."""
        engine_ready = any(child.role == "engine" and child.ready for child in self.children)
        child = Child(self.program, role, index, self.config, self.folder, engine_ready, self.arguments)
        self.children.append(child)
        self.selector.register(child.socket, selectors.EVENT_READ)

    def hear(self, child: Child, report: dict[str, Any]) -> None:
        """Take one report of a child."""
        if report["event"] == "ready":
            child.ready = True
            if child.role == "engine":
                self.info = msgspec.convert(report["info"], EngineInfo)
                if self.announced:
                    log.warning("the engine is back")
            if self.info is not None and not self.announced and all(child.ready for child in self.children):
                self.announced = True
                self.announce(self.info)
        elif report["event"] == "idle":
            child.idle = True

    def bury(self, child: Child, status: int) -> int | None:
        """A child has ended: decide whether and when it starts again; returns the exit code when the server must end."""
        self.retire(child)
        how = str(status)
        if status < 0:
            how = signal.Signals(-status).name if -status in list(signal.Signals) else f"SIGRT{-status}"
        reason = f"by signal {how}" if status < 0 else f"with status {how}"
        if self.draining_until is not None:
            log.error("%s ended %s while the server was finishing", child.name, reason)
            if child.role == "engine":
                self.code = 1
            return None
        now = time.monotonic()
        metrics.process_ends().labels(child.role, how).inc()
        if child.role == "engine":
            if status == EXIT_USAGE:
                return EXIT_USAGE
            self.crashes.append(now)
            while now - self.crashes[0] > self.config.crash_window_seconds:
                self.crashes.popleft()
            if len(self.crashes) >= self.config.max_crashes:
                log.error("the engine ended %s; %d times is too often, giving up", reason, len(self.crashes))
                return EXIT_CRASHES
            log.error("the engine ended %s and is started again", reason)
            self.due.append((now + 0.2, "engine", 0))
            return None
        # An HTTP process can be ended from outside by a malformed body, so only failing to start counts against the server,
        # and only when there is no other one that serves.
        self.failed_starts = 0 if child.ready else self.failed_starts + 1
        serving = any(other.role == "http" and other.ready for other in self.children)
        if self.failed_starts >= MAX_FAILED_STARTS and not serving:
            log.error("the HTTP process ended %s before it could serve, %d times; giving up", reason, self.failed_starts)
            return EXIT_CRASHES
        log.error("%s ended %s and is started again", child.name, reason)
        pause = min(MAX_PAUSE, 0.25 * 2**self.failed_starts) if self.failed_starts else 0.0
        self.due.append((now + pause, "http", child.index))
        return None

    def retire(self, child: Child) -> None:
        """Forget a child that has ended."""
        self.children.remove(child)
        self.selector.unregister(child.socket)
        child.socket.close()
        metrics.forget(self.folder / "metrics", child.key)

    def drain(self, now: float) -> None:
        """Refuse what is new, let run what runs."""
        say(f"finishing what runs, at most {self.config.drain_seconds:g} s; a second signal stops at once")
        self.draining_from, self.draining_until = now, now + self.config.drain_seconds
        self.due.clear()
        for child in self.children:
            child.order("drain")

    def stop(self) -> int:
        """End the HTTP processes, then the engine; what does not end in time is killed, and all at the next signal."""
        for role, seconds in ((self.front, HTTP_STOP_SECONDS), ("engine", self.config.engine_stop_seconds)):
            group = [child for child in self.children if child.role == role]
            for child in group:
                child.order("stop")
            deadline = time.monotonic() + seconds
            while late := [child for child in group if child.process.poll() is None]:
                if self.signals:
                    return 1  # `run` kills the rest
                if time.monotonic() > deadline:
                    log.error("killing what has not ended: %s", ", ".join(child.name for child in late))
                    for child in late:
                        child.process.kill()
                    self.code = 1
                    break
                self.listen()
                time.sleep(0.01)
            codes = {child.process.poll() for child in group}
            if EXIT_LOST in codes:
                return EXIT_LOST
            if any(codes):
                self.code = 1
        return self.code


def serve(argv: Sequence[str], environ: Mapping[str, str], program: Sequence[str]) -> int:
    """Run the server with these flags; returns the exit code. `program` is the command that starts a child, given its role."""
    try:
        config = begin(load(argv, environ))
        config, claim = claim_port(config)
        with own_folder() as folder, claim:
            say(f"loading {config.model_path or 'no model, the engine is a stand-in'}")
            return Supervisor(config, folder, program).run()
    except RwkvBatchError as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        return EXIT_USAGE


def begin(config: Config) -> Config:
    """Settle what depends on this machine, and begin to log. Raises UsageError."""
    config = config.resolved()
    if config.fake_engine is None:
        config = replace(config, model_path=str(find_model(config)))
    set_up_logging(config)
    return config


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for sockets and figures, removed at the end. Raises UsageError."""
    folder, lock = make_folder()
    try:
        metrics.use_folder(folder / "metrics", "supervisor")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
