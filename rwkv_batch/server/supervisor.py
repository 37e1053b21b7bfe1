"""The supervisor: starts the engines and some HTTP processes, watches them, and ends them together."""

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from rwkv_batch import metrics
from rwkv_batch.config import Config, find_model
from rwkv_batch.config_sources import load
from rwkv_batch.errors import RwkvBatchError, UsageError
from rwkv_batch.ipc.messages import EngineInfo, Seat
from rwkv_batch.server.announce import announce, say
from rwkv_batch.server.child import Child
from rwkv_batch.server.claims import claim_port, make_folder
from rwkv_batch.server.control import set_up_logging
from rwkv_batch.server.engines import Crashes, SupervisedEngine, engines_of, room_for_all
from rwkv_batch.server.exit_codes import EXIT_CRASHES, EXIT_LOST, EXIT_USAGE
from rwkv_batch.server.models.processes import ABOUT_MODELS, ModelProcesses

log = logging.getLogger(__name__)

HTTP_STOP_SECONDS = 3.0  # from the order to stop until a process is killed
MAX_FAILED_STARTS = 5
RETRY_SECONDS = 1.0  # until a process is tried again that this machine had no room for
MAX_PAUSE = 30.0  # until an HTTP process that failed to start is started again
TICK_SECONDS = 0.25  # a longer turn of the supervisor counts as so much: it slept itself, and the children perhaps with it
KILL_SECONDS = 5.0  # until a killed process is gone, unless the kernel holds it


class Supervisor:
    """Keeps the engines and `config.http_workers` HTTP processes alive until told to stop. `program` starts a child.

    front      role of the processes that stand before the engines
    engines    by their numbers
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
        self.engines = {engine.seat.index: engine for engine in engines_of(config, folder)}
        self.store_crashes = Crashes()
        self.later: list[int] = []  # engines that start when those before them have loaded
        self.failed_starts = 0
        self.announced = False
        self.signals: list[int] = []
        self.hung_up = False
        self.draining_from = 0.0
        self.draining_until: float | None = None
        self.code = 0  # of an orderly end so far
        self.watched = time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.models = ModelProcesses(self)

    @property
    def num_fronts(self) -> int:
        """How many processes stand before the engines."""
        return self.config.http_workers

    @property
    def seats(self) -> list[Seat]:
        """Where the engines are, as other processes are told."""
        return [engine.seat for engine in self.engines.values() if not engine.stopping]

    def announce(self, infos: list[EngineInfo]) -> None:
        """All are ready: say so."""
        announce(self.config, infos)

    def add(self, engine: SupervisedEngine) -> None:
        """Start a further engine, whose number none has had before."""
        self.engines[engine.seat.index] = engine
        self.due.append((time.monotonic(), "engine", engine.seat.index))
        self.tell_seats()

    def remove(self, index: int) -> None:
        """Have an engine refuse what is new, finish what it has, and end; its seat goes with it."""
        engine = self.engines[index]
        engine.leaving = True
        children = [child for child in self.children if child.role == "engine" and child.index == index]
        for child in children:
            child.order("drain")
        if not children:
            self.forget(index)

    def start_next(self, now: float) -> None:
        """Start the first of the engines that wait for others to load."""
        if self.later:
            self.due.append((now, "engine", self.later.pop(0)))

    def forget(self, index: int) -> None:
        """There is no such engine any more."""
        self.engines.pop(index).remove_files()
        self.due = [start for start in self.due if start[1:] != ("engine", index)]
        self.tell_seats()

    def tell_seats(self) -> None:
        """Tell the processes before the engines where those are now."""
        for child in self.children:
            if child.role == self.front:
                child.tell("seats", self.seats)

    def run(self) -> int:
        """Start everything, watch it, stop it; returns the exit code."""
        waker, _wake = sockets_of_signals()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: self.signals.append(number))
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, lambda number, frame: setattr(self, "hung_up", True))
        self.selector.register(waker, selectors.EVENT_READ)
        now = time.monotonic()
        self.due = [(now, "store", 0)] if self.config.has_store else []
        self.later = [] if room_for_all(self.config) else list(self.engines)[1:]
        self.due += [(now, "engine", index) for index in self.engines if index not in self.later]
        self.due += [(now, self.front, index) for index in range(self.num_fronts)]
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
            kill(self.children)

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
        self.models.look(now)
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
        engine_ready = any(engine.ready for engine in self.engines.values())
        engine = self.engines[index] if role == "engine" else None
        own = {"environ": engine.environ, "cpus": engine.cpus} if engine is not None else {"models": self.models.keeper.table}
        config = engine.config if engine is not None else self.config
        child = Child(self.program, role, index, config, self.folder, engine_ready, self.arguments, seats=self.seats, **own)
        if role == self.front:
            self.models.keeper.born(child)
        self.children.append(child)
        self.selector.register(child.socket, selectors.EVENT_READ)

    def hear(self, child: Child, report: dict[str, Any]) -> None:
        """Take one report of a child."""
        if report["event"] == "ready":
            child.ready = True
            if child.role == "engine" and child.index in self.engines:
                engine = self.engines[child.index]
                if self.announced:
                    log.warning("%s is %s", child.name, "there" if engine.info is None else "back")
                engine.ready, engine.info = True, msgspec.convert(report["info"], EngineInfo)
                self.start_next(time.monotonic())
                self.models.keeper.ready(child.index, engine.info, time.monotonic())
            self.announce_once()
        elif report["event"] == "idle":
            child.idle = True
            if child.role == "engine" and child.index in self.engines and self.engines[child.index].leaving:
                child.order("stop")
        elif report["event"] in ABOUT_MODELS:
            self.models.hear(child, report, time.monotonic())

    def announce_once(self) -> None:
        """Say that all are ready, as soon as they are; an engine that was given up is not waited for."""
        engines = [engine for engine in self.engines.values() if not engine.given_up]
        fronts = [child for child in self.children if child.role == self.front]
        ready = all(engine.ready for engine in engines) and all(child.ready for child in fronts)
        if ready and engines and fronts and not self.announced:
            self.announced = True
            self.announce([engine.info for engine in engines])

    def bury(self, child: Child, status: int) -> int | None:
        """A child has ended: decide whether and when it starts again; returns the exit code when the server must end."""
        for report in child.reports():  # what it said last
            self.hear(child, report)
        self.retire(child)
        engine = self.engines.get(child.index) if child.role == "engine" else None
        if child.role == "engine" and (engine is None or engine.leaving):
            if engine is not None:
                self.forget(child.index)
            self.models.ended(child.index, "", time.monotonic())
            return None
        how, reason = way_of_ending(status)
        if self.draining_until is not None:
            log.error("%s ended %s while the server was finishing", child.name, reason)
            if engine is not None:
                self.code = 1
            return None
        now = time.monotonic()
        metrics.process_ends().labels(child.role, how).inc()
        if engine is not None:
            return self.bury_engine(engine, child, status, reason)
        if child.role == "store":
            return self.bury_store(status, reason)
        self.models.keeper.buried(child, now)
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

    def bury_engine(self, engine: SupervisedEngine, child: Child, status: int, reason: str) -> int | None:
        """See `bury`. One that crashes too often is left out as long as there are others."""
        engine.ready = False
        if self.models.ended(child.index, reason, time.monotonic()):
            self.forget(child.index)
            return None
        if status == EXIT_USAGE and not self.announced:
            return EXIT_USAGE
        now = time.monotonic()
        if not engine.crashes.too_often(self.config, now) and status != EXIT_USAGE:
            log.error("%s ended %s and is started again", child.name, reason)
            self.due.append((now + 0.2, "engine", child.index))
            return None
        engine.given_up = True
        if all(other.given_up for other in self.engines.values()):
            log.error("%s ended %s; %d times is too often, giving up", child.name, reason, len(engine.crashes))
            return EXIT_USAGE if status == EXIT_USAGE else EXIT_CRASHES
        log.error("%s ended %s; %d times is too often: the others go on without it", child.name, reason, len(engine.crashes))
        self.models.given_up(child.index, now)
        self.start_next(now)
        self.announce_once()
        return None

    def bury_store(self, status: int, reason: str) -> int | None:
        """See `bury`. Without a store turns of sessions fail, and nothing else does."""
        now = time.monotonic()
        if self.store_crashes.too_often(self.config, now) or status == EXIT_USAGE:
            log.error("the store ended %s; %d times is too often, giving up", reason, len(self.store_crashes))
            return EXIT_USAGE if status == EXIT_USAGE else EXIT_CRASHES
        log.error("the store ended %s and is started again", reason)
        self.due.append((now + 0.2, "store", 0))
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
        self.models.keeper.drain()
        for child in self.children:
            child.order("drain")

    def stop(self) -> int:
        """End HTTP processes, engines, store; what does not end in time is killed, and all at the next signal."""
        engine_seconds = self.config.engine_stop_seconds
        for role, seconds in ((self.front, HTTP_STOP_SECONDS), ("engine", engine_seconds), ("store", engine_seconds)):
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


def kill(children: Sequence[Child]) -> None:
    """End processes at once."""
    for child in children:
        child.process.kill()
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(KILL_SECONDS)


def sockets_of_signals() -> tuple[socket.socket, socket.socket]:
    """A socket that can be read when a signal has come, and the one that is written to then, which is to be kept."""
    waker, wake = socket.socketpair()
    for end in (waker, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    return waker, wake


def way_of_ending(status: int) -> tuple[str, str]:
    """How a process has ended, for figures and for people."""
    if status >= 0:
        return str(status), f"with status {status}"
    how = signal.Signals(-status).name if -status in list(signal.Signals) else f"SIGRT{-status}"
    return how, f"by signal {how}"


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
