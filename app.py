"""The command line and the supervisor: reads the settings, starts one engine process and some HTTP processes, watches them, and
ends them together.

Children are fresh interpreters of this same file (`--role`), each with one socket to the supervisor as its standard input: the
settings come in by it, orders, reports and signs of life pass over it, and its end means that the other side is dead.
Exit codes:

    0    orderly
    1    the engine did not live to the end of an orderly stop, or what did not stop in time was killed
    2    wrong setting, busy port or unusable checkpoint
    70   a step failed or hung (engine), or a thread died
    71   too many crashes (supervisor)
    74   stopped, but sessions could not be written
    128  and more: a second signal, less 128, stopped the server at once
"""

import contextlib
import ctypes
import faulthandler
import fcntl
import logging
import math
import os
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rwkv_batch import __version__, lines, metrics
from rwkv_batch.config import Config, find_model, load
from rwkv_batch.errors import CheckpointError, RwkvBatchError, Unavailable, UsageError

if TYPE_CHECKING:
    from rwkv_batch.ipc.channel import EngineInfo, EngineServer

log = logging.getLogger("rwkv_batch.app")

EXIT_USAGE, EXIT_ENGINE, EXIT_CRASHES, EXIT_LOST = 2, 70, 71, 74
FOLDER_PREFIX = "rwkv-batch-"
MAX_BASE = 68  # bytes of the path before that: those of a socket may be 103 in all
HTTP_STOP_SECONDS = 3.0  # from the order to stop until a process is killed
MAX_FAILED_STARTS = 5
RETRY_SECONDS = 1.0  # until a process is tried again that this machine had no room for
MAX_PAUSE = 30.0  # until an HTTP process that failed to start is started again
MEET_SECONDS = 5.0  # that a new HTTP process gives an engine that is there to show itself
BEAT_SECONDS = 0.5  # between two signs of life of a child
TICK_SECONDS = 0.25  # a longer turn of the supervisor counts as so much: it slept itself, and the children perhaps with it
STACKS_SECONDS = 1.0  # that a silent child gets to say where it hangs
KILL_SECONDS = 5.0  # until a killed process is gone, unless the kernel holds it
SWITCH_SECONDS = 0.05  # the HTTP processes' threads hold the interpreter's lock for microseconds; forced switches only cost


class Birth(msgspec.Struct):
    """The first line a child reads."""

    config: Config
    folder: str
    index: int
    parent: int
    engine_ready: bool


# --- the supervisor ---


class Child:
    """One process and the socket to it."""

    def __init__(self, role: str, index: int, config: Config, folder: Path, engine_ready: bool = False):
        self.role = role
        self.index = index
        self.ready = False
        self.idle = False
        self.silent = 0.0  # seconds since its last sign of life, as `wait` counts them
        self.suspected = False
        self._patience = (config.start_silence_seconds, getattr(config, f"{role}_silence_seconds"))
        self._unread = b""
        self.socket, theirs = socket.socketpair()
        hidden = ("ROBYN_", "RWKV_BATCH_PASSWORD", "RWKV_BATCH_API_KEY", "RWKV_BATCH_CONFIG")
        environ = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
        if role == "http":
            environ["TOKIO_WORKER_THREADS"] = "1"  # of a runtime that stays idle; the default is one thread for each CPU
        command = [sys.executable, os.path.abspath(__file__), "--role", role]
        with theirs:
            try:
                self.process = subprocess.Popen(command, stdin=theirs, env=environ, process_group=0)
            except OSError:
                self.socket.close()
                raise
        with contextlib.suppress(OSError):  # it has ended already: the next turn finds it dead
            self.socket.sendall(msgspec.json.encode(Birth(config, str(folder), index, os.getpid(), engine_ready)) + b"\n")
        self.socket.setblocking(False)

    @property
    def key(self) -> str:
        """The name of its figures."""
        return key_of(self.role, self.index)

    @property
    def name(self) -> str:
        """For people."""
        return "engine" if self.role == "engine" else f"HTTP process {self.index}"

    def order(self, word: str) -> None:
        """Send "drain" or "stop"; a dead child does not mind."""
        with contextlib.suppress(OSError):
            self.socket.sendall(word.encode() + b"\n")

    def reports(self) -> list[dict[str, Any]]:
        """What the child has said since last time, without its signs of life."""
        with contextlib.suppress(OSError):
            while data := self.socket.recv(65536):
                self._unread += data
                self.silent, self.suspected = 0.0, False
        *lines, self._unread = self._unread.split(b"\n")
        return [msgspec.json.decode(line) for line in lines if line]

    def wait(self, seconds: float) -> None:
        """So much time has passed without a word: a child that is silent for too long shows its stacks and is killed."""
        before, self.silent = self.silent, self.silent + seconds
        patience = self._patience[self.ready]
        if not patience or self.silent <= patience:
            return
        if not self.suspected:
            self.suspected = True
            log.error("%s has given no sign of life for %.0f s and is killed", self.name, self.silent)
            self.process.send_signal(signal.SIGUSR2)
        elif before <= patience + STACKS_SECONDS < self.silent:
            self.process.kill()


def key_of(role: str, index: int) -> str:
    """What processes that follow one another have in common."""
    return f"{role}-{index}"


class Supervisor:
    """Keeps one engine and `config.http_workers` HTTP processes alive until told to stop."""

    def __init__(self, config: Config, folder: Path):
        self.config = config
        self.folder = folder
        self.children: list[Child] = []
        self.due: list[tuple[float, str, int]] = []  # when, which role and index to start
        self.crashes: deque[float] = deque()
        self.failed_starts = 0
        self.info: EngineInfo | None = None
        self.announced = False
        self.signals: list[int] = []
        self.hung_up = False
        self.draining_until: float | None = None
        self.code = 0  # of an orderly end so far
        self.watched = time.monotonic()
        self.selector = selectors.DefaultSelector()

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
        self.due = [(now, "engine", 0), *((now, "http", index) for index in range(self.config.http_workers))]
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
            waiting = [child for child in self.children if child.role == "http" and not child.idle]
            return self.stop() if not waiting or now >= self.draining_until else None
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
            child.wait(seconds)

    def start(self, role: str, index: int) -> None:
        """Start one process."""
        engine_ready = any(child.role == "engine" and child.ready for child in self.children)
        child = Child(role, index, self.config, self.folder, engine_ready)
        self.children.append(child)
        self.selector.register(child.socket, selectors.EVENT_READ)

    def hear(self, child: Child, report: dict[str, Any]) -> None:
        """Take one report of a child."""
        if report["event"] == "ready":
            child.ready = True
            if child.role == "engine":
                from rwkv_batch.ipc.channel import EngineInfo

                self.info = msgspec.convert(report["info"], EngineInfo)
                if self.announced:
                    log.warning("the engine is back")
            if self.info is not None and not self.announced and all(child.ready for child in self.children):
                self.announced = True
                announce(self.config, self.info)
        elif report["event"] == "idle":
            child.idle = True

    def bury(self, child: Child, status: int) -> int | None:
        """A child has ended: decide whether and when it starts again; returns the exit code when the server must end."""
        self.children.remove(child)
        self.selector.unregister(child.socket)
        child.socket.close()
        metrics.forget(self.folder / "metrics", child.key)
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

    def drain(self, now: float) -> None:
        """Refuse what is new, let run what runs."""
        say(f"finishing what runs, at most {self.config.drain_seconds:g} s; a second signal stops at once")
        self.draining_until = now + self.config.drain_seconds
        self.due.clear()
        for child in self.children:
            child.order("drain")

    def stop(self) -> int:
        """End the HTTP processes, then the engine; what does not end in time is killed, and all at the next signal."""
        for role, seconds in (("http", HTTP_STOP_SECONDS), ("engine", self.config.engine_stop_seconds)):
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


def say(text: str) -> None:
    """A line for the person who started the server, who may have gone since."""
    lines.OUT.write(text)


def announce(config: Config, info: "EngineInfo") -> None:
    """What was loaded, on what, the limits, the address, and something to try."""
    host = config.host or "127.0.0.1"
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{'127.0.0.1' if shown == '0.0.0.0' else '[::1]' if shown == '[::]' else shown}:{config.port}"
    why = "a password is set" if config.password else "API keys are set" if config.api_keys else "no password is set"
    size = (
        f", {info.parameters / 1e6:,.0f} M weights, {info.layers} layers of {info.width}, loaded in {info.load_seconds:.1f} s"
    )
    size = size if info.parameters else ""
    header = ' -H "Authorization: Bearer $PASSWORD"' if config.password or config.api_keys else ""
    say(f"rwkv_batch {__version__}")
    say(f"  model    {config.served_model_name or info.model}{size}")
    if config.is_demo and config.fake_engine is None:
        say("           a built-in toy that knows its toy world only; for real RWKV-7 weights: --model-path FILE (README)")
    say(f"  device   {info.device}, {info.dtype}, operations: {info.ops}")
    say(f"  batch    {info.slots} sequences at a time, {info.prefill_budget} prompt tokens a step")
    if config.fake_engine is None:
        levels = f"{config.l1_sessions} in device memory, {config.l2_sessions} in host memory"
        say(f"  sessions {config.state_db}, durability: {config.durability}; {levels}")
    say(
        f"  limits   {config.max_prompts} prompts and {config.max_body_mib} MiB a request, {config.queue} requests waiting, "
        f"{config.max_streams * config.http_workers} answers in progress"
    )
    say(f"  address  http://{shown}:{config.port}  ({why}; {config.http_workers} HTTP processes)")
    if not config.password and not config.api_keys and not config.loopback:
        say("  WARNING  anyone who can reach this address can use the server: set --password-file, or RWKV_BATCH_PASSWORD")
    body = '{"contents": ["User: Hello!\\n\\nAssistant:"], "max_tokens": 64, "stream": true}'
    say(f"  page     {url}/")
    say(f"  try      curl -N {url}/v1/chat/completions{header} -d '{body}'")


def claim_port(config: Config) -> tuple[Config, socket.socket]:
    """Make sure that the port is free and keep it for us; returns the settings with the port's number. Raises UsageError.

    A port that another server shares (SO_REUSEPORT) would be shared with us silently, so the test goes without that option.
    """
    host = config.host or "127.0.0.1"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as test:
            test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            test.bind((host, config.port))
            test.listen()
            port = test.getsockname()[1]
        claim = socket.socket(family, socket.SOCK_STREAM)
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        claim.bind((host, port))
    except OSError as error:
        raise UsageError(f"--port: cannot listen on {host} port {config.port}: {error.strerror}", param="port") from None
    return replace(config, port=port), claim


def make_folder() -> tuple[Path, int]:
    """A folder only we may enter, for sockets and figures, and the lock on it; folders of servers that were killed are removed.

    A lock and no process id says who is alive, because containers that share a folder do not share ids. It also keeps
    systemd-tmpfiles away, which ages files in /tmp. Raises UsageError.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if len(os.fsencode(base)) > MAX_BASE:
        base = Path("/tmp")
    for old in base.glob(FOLDER_PREFIX + "*"):
        if "-" not in old.name.removeprefix(FOLDER_PREFIX):  # with a hyphen: an older version's, which did not lock them
            remove_unlocked(old)
    try:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=base))
            with contextlib.suppress(BlockingIOError, FileNotFoundError):  # found by another server before it was locked
                return folder, lock_folder(folder)
    except OSError as error:
        raise UsageError(f"no folder for sockets in {base}: {error.strerror}; set TMPDIR to one with room") from None


def lock_folder(folder: Path) -> int:
    """Make `folder` ours; returns what holds it. Raises BlockingIOError or FileNotFoundError when it is being removed."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:  # then nobody else can lock it either, to remove it
            log.warning("%s cannot be locked: %s", folder, error.strerror)
        (folder / "metrics").mkdir()
    except OSError:
        os.close(lock)
        raise
    return lock


def remove_unlocked(folder: Path) -> None:
    """Remove a folder of ours that no server holds."""
    with contextlib.suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
        finally:
            os.close(lock)


def main() -> int:
    """Run the server; returns the exit code."""
    if sys.argv[1:2] == ["--role"]:
        return child_main(sys.argv[2])
    folder = None
    try:
        config = load(sys.argv[1:], os.environ).resolved()
        if config.fake_engine is None:
            config = replace(config, model_path=str(find_model(config)))
        set_up_logging(config)
        config, claim = claim_port(config)
        folder, lock = make_folder()
        metrics.use_folder(folder / "metrics", "supervisor")
        say(f"loading {config.model_path or 'no model, the engine is a stand-in'}")
        with claim:
            return Supervisor(config, folder).run()
    except RwkvBatchError as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


# --- the children ---


class Control:
    """A child's side of the socket to the supervisor."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=os.dup(0))  # dup makes it close on exec, so that no compiler we start keeps it open
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        self._lines = self._socket.makefile("rb")
        self.birth = msgspec.json.decode(self._lines.readline(), type=Birth)

    def report(self, event: str, **more: Any) -> None:
        """Tell the supervisor."""
        with contextlib.suppress(OSError):
            self._socket.sendall(msgspec.json.encode({"event": event, **more}) + b"\n")

    def beat(self) -> None:
        """Give the supervisor a sign of life; never waits: one that sleeps itself needs none."""
        with contextlib.suppress(OSError):
            self._socket.send(b"\n", socket.MSG_DONTWAIT)

    def listen(self, orders: dict[str, Callable[[], None]]) -> None:
        """Obey in a thread; when the supervisor is gone, end this process."""

        def run() -> None:
            with contextlib.suppress(OSError):
                for line in self._lines:
                    orders[line.decode().strip()]()
            lines.leave(1)

        threading.Thread(target=run, name="control", daemon=True).start()


def child_main(role: str) -> int:
    """Be an HTTP process or the engine."""
    faulthandler.register(signal.SIGUSR2)  # how the supervisor asks a process that hangs where
    # The supervisor decides when to stop; signals meant for it may reach all of us (a service manager sends them to the group).
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    control = Control()
    die_with(control.birth.parent)
    config = control.birth.config
    set_up_logging(config)
    threading.excepthook = end_with_thread
    metrics.use_folder(Path(control.birth.folder) / "metrics", key_of(role, control.birth.index))
    return (engine_main if role == "engine" else http_main)(control, config, Path(control.birth.folder))


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


def address_in(folder: Path) -> str:
    """Where the engine listens for the HTTP processes."""
    return f"ipc://{folder}/engine"


def engine_main(control: Control, config: Config, folder: Path) -> int:
    """The engine process: load, then step until told to stop."""
    from rwkv_batch.ipc.channel import EngineServer

    faulthandler.enable()
    server = EngineServer(address_in(folder), heartbeat=config.heartbeat, peer_seconds=config.peer_seconds)
    server.on_beat = metrics.EngineMetrics().update
    stopping = threading.Event()

    def stop() -> None:
        stopping.set()
        if server.worker is None:
            lines.leave(0)
        server.worker.stop()

    control.listen({"drain": server.drain, "stop": stop})
    watching = (control, server, config.watchdog_seconds, stopping)
    threading.Thread(target=watch, args=watching, name="watchdog", daemon=True).start()
    server.start()
    try:
        if config.fake_engine is not None:
            from rwkv_batch.engine.stub_worker import build_worker
        else:
            from rwkv_batch.engine.build import build_worker
        worker = build_worker(config, server.deliver)
    except (UsageError, CheckpointError) as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    server.attach(worker)
    control.report("ready", info=worker.info)
    try:
        worker.run()
    except Exception:
        log.exception("the engine cannot go on")
    server.close()
    if not stopping.is_set():
        return EXIT_ENGINE
    return EXIT_LOST if worker.lost_sessions else 0


def watch(control: Control, server: "EngineServer", seconds: float, stopping: threading.Event) -> None:
    """Give signs of life as long as the worker goes on; end this process when it takes longer than `seconds` for a turn.

    A worker that stops takes its time to write its sessions, and the supervisor bounds that.
    """
    pause = min(BEAT_SECONDS, (seconds or math.inf) / 4)
    last_step, stuck = None, 0.0
    while True:
        time.sleep(pause)
        stuck += pause  # not by the clock: it also runs while this process sleeps
        if server.worker is None or stopping.is_set() or server.worker.last_step != last_step:
            last_step, stuck = server.worker and server.worker.last_step, 0.0
        if seconds and stuck > seconds:
            log.error("no step for %.0f s: the engine hangs and ends", stuck)
            lines.ERR.flush()
            faulthandler.dump_traceback(all_threads=True)
            os._exit(EXIT_ENGINE)
        control.beat()


def http_main(control: Control, config: Config, folder: Path) -> int:
    """An HTTP process: Robyn with our routes."""
    sys.argv = ["app.py", "--log-level", "WARNING", "--workers", "1", "--disable-openapi"]  # Robyn reads it when imported
    import asyncio

    from robyn import Robyn

    from routes import register
    from routes.http.site import Site
    from rwkv_batch.ipc.channel import EngineClient

    client = EngineClient(address_in(folder), heartbeat=config.heartbeat, peer_seconds=config.peer_seconds)
    site = Site(config, client, metrics.HttpMetrics(), folder)

    def drain() -> None:
        site.draining = True
        threading.Thread(target=wait_idle, daemon=True).start()

    def wait_idle() -> None:
        while not site.idle:
            time.sleep(0.02)
        time.sleep(0.1)  # what was handed to Robyn last is still being written
        control.report("idle")

    def stop() -> None:
        site.draining = True
        client.fail_all(Unavailable("the server is stopping", code="draining"))
        deadline = time.monotonic() + 1.0
        while not site.idle and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.1)
        lines.leave(0)

    def beat(loop: asyncio.AbstractEventLoop) -> None:
        control.beat()
        loop.call_later(BEAT_SECONDS, beat, loop)

    async def up() -> None:
        try:
            restore = narrow_affinity(control.birth.index, config.pin_http)
            tune_listener(config)
            loop = asyncio.get_running_loop()
            loop.call_later(0.5, restore)  # the pool has its size by then
            loop.call_later(0.05, control.report, "ready")
            beat(loop)
        except Exception:
            log.exception("the HTTP process cannot start")
            lines.leave(1)

    sys.setswitchinterval(SWITCH_SECONDS)
    app = Robyn(str(folder / "app.py"))  # where it looks for a robyn.env to load, so not here
    register(app, site)
    app.startup_handler(up)
    control.listen({"drain": drain, "stop": stop})
    client.start()
    deadline = time.monotonic() + (MEET_SECONDS if control.birth.engine_ready else 0.0)
    while (client.phase == "lost" or site.tokenizer is None) and time.monotonic() < deadline:
        time.sleep(0.005)  # who listens before would refuse what its neighbours answer
    app.start(config.host or "127.0.0.1", config.port, _check_port=False)
    return 1


def narrow_affinity(index: int, keep: bool) -> Callable[[], None]:
    """Put all threads on one CPU, another for each HTTP process; returns what undoes it, nothing when it is to be kept.

    Each waiting stream holds a thread of a pool whose size is 512 divided by the CPUs that are visible when the server below is
    built, right after the startup handler: 512 with one CPU, 4 with 128. Staying there halves the cost of a chunk, because
    threads that hand the interpreter's lock to each other then do so on one CPU.
    """
    if not hasattr(os, "sched_setaffinity"):
        return lambda: None
    everywhere = sorted(os.sched_getaffinity(0), reverse=True)

    def put(cpus: set[int]) -> bool:
        try:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:  # a thread that has just ended
            return put(cpus)
        except OSError:
            return False
        return True

    turned = everywhere[index % len(everywhere) :] + everywhere[: index % len(everywhere)]
    if not any(put({cpu}) for cpu in turned):
        log.warning("the threads cannot be put on one CPU: few streams will run at a time")
    return (lambda: None) if keep else (lambda: put(set(everywhere)))


def tune_listener(config: Config) -> None:
    """Options that accepted connections inherit: dead and stuck peers are noticed by the kernel."""
    for name in os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"):
        with contextlib.suppress(OSError, ValueError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            listener = socket.socket(fileno=os.dup(int(name)))
            with listener:
                if listener.family in (socket.AF_INET, socket.AF_INET6) and listener.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                ):
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for option, value in (
                        ("TCP_KEEPIDLE", 30),
                        ("TCP_KEEPINTVL", 10),
                        ("TCP_KEEPCNT", 3),
                        ("TCP_USER_TIMEOUT", int(config.stream_stall_seconds * 1000)),
                    ):
                        if hasattr(socket, option):
                            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


if __name__ == "__main__":
    sys.exit(main())
