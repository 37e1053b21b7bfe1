"""What happens around processes, as far as it can be seen without starting a server."""

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import quiet_robyn  # noqa: F401
from models import ROOT

from routes.process import tune_listener
from rwkv_batch.config import Config
from rwkv_batch.errors import UsageError
from rwkv_batch.server import claims, engine_process, supervisor
from rwkv_batch.server.child import Child
from rwkv_batch.server.control import BEAT_SECONDS
from rwkv_batch.server.engines import engine_on, engines_of
from rwkv_batch.server.exit_codes import EXIT_CRASHES, EXIT_ENGINE
from rwkv_batch.server.supervisor import Supervisor

PROGRAM = [sys.executable, str(ROOT / "app.py")]

DYING = """
import threading, time
from rwkv_batch.server import control
threading.excepthook = control.end_with_thread
threading.Thread(target=lambda: [][0]).start()
time.sleep(60)
"""


def test_a_dead_thread_ends_its_process():
    """Nobody else would notice that the channel or the storage has stopped."""
    ended = subprocess.run([sys.executable, "-c", DYING], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == EXIT_ENGINE
    assert "IndexError" in ended.stderr


def test_a_child_that_dies_at_birth_is_found_dead_later(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda command, *, stdin, **more: stdin.close())
    child = Child(PROGRAM, "http", 0, Config(), Path("/nowhere"))
    assert child.reports() == []
    child.socket.close()


class FrozenProcess:
    """In place of a child's process: never ends, notes what it is sent."""

    pid = 0

    def __init__(self, command, *, stdin, **more):
        self.theirs = socket.socket(fileno=os.dup(stdin.fileno()))
        self.sent = []
        self.returncode = None

    def poll(self):
        return self.returncode

    def send_signal(self, number):
        self.sent.append(number)

    def kill(self):
        self.sent.append(signal.SIGKILL)


@pytest.fixture
def clock(monkeypatch):
    """Hands of the clock that the supervisor reads; appending moves them on."""
    times = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: times[-1])
    return times


@pytest.fixture
def supervised(monkeypatch, clock):
    """A supervisor with one ready child of each role, which hang."""
    monkeypatch.setattr(subprocess, "Popen", FrozenProcess)
    supervisor = Supervisor(Config(http_silence_seconds=5, engine_silence_seconds=20), Path("/nowhere"), PROGRAM)
    for role in ("http", "engine"):
        supervisor.start(role, 0)
        supervisor.children[-1].ready = True
    yield supervisor
    supervisor.selector.close()
    for child in supervisor.children:
        child.socket.close()
        child.process.theirs.close()


def run_for(supervisor, clock, seconds, pause=0.1):
    for _ in range(round(seconds / pause)):
        clock.append(clock[-1] + pause)
        supervisor.listen()


def test_a_silent_child_shows_its_stacks_and_is_killed(supervised, clock):
    http, engine = supervised.children
    run_for(supervised, clock, 4.8)
    assert http.process.sent == []
    run_for(supervised, clock, 0.5)
    assert http.process.sent == [signal.SIGUSR2]
    run_for(supervised, clock, 5)
    assert http.process.sent == [signal.SIGUSR2, signal.SIGKILL]
    assert engine.process.sent == []
    run_for(supervised, clock, 30)
    assert engine.process.sent == http.process.sent == [signal.SIGUSR2, signal.SIGKILL]


def test_a_child_that_gives_signs_of_life_lives(supervised, clock):
    http, engine = supervised.children
    for _ in range(10):
        run_for(supervised, clock, 4)
        for child in (http, engine):
            child.process.theirs.send(b"\n")
    run_for(supervised, clock, 5.5)
    http.process.theirs.send(b"\n")  # it was only slow
    run_for(supervised, clock, 4)
    assert http.process.sent == [signal.SIGUSR2]
    assert engine.process.sent == []


def test_a_child_that_has_ended_is_not_silent(supervised, clock):
    """While the engine takes its time to write sessions at the end."""
    http, _ = supervised.children
    http.process.returncode = 0
    run_for(supervised, clock, 15)
    assert http.process.sent == []


def test_a_process_that_starts_has_more_time(supervised, clock):
    for child in supervised.children:
        child.ready = False
    run_for(supervised, clock, 290)
    assert [child.process.sent for child in supervised.children] == [[], []]
    run_for(supervised, clock, 12)
    assert all(signal.SIGKILL in child.process.sent for child in supervised.children)


def test_nobody_is_blamed_for_the_supervisors_own_sleep(supervised, clock):
    clock.append(clock[-1] + 3600)
    run_for(supervised, clock, 4)
    clock.append(clock[-1] + 3600)
    supervised.listen()
    assert [child.process.sent for child in supervised.children] == [[], []]


def test_an_engine_that_steps_gives_signs_of_life_and_one_that_slept_is_not_ended(monkeypatch):
    """The process may be stopped between two looks: only looks count, not the clock."""
    monkeypatch.setattr(engine_process.time, "sleep", lambda seconds: core.turn())
    monkeypatch.setattr(engine_process.faulthandler, "dump_traceback", lambda **more: None)
    ended = []

    class Ended(BaseException):
        pass

    def end(code):
        ended.append(code)
        raise Ended

    monkeypatch.setattr(engine_process.os, "_exit", end)

    class Core:
        last_step = 0.0
        turns = 0

        def turn(self):
            self.turns += 1
            if self.turns < 100:
                self.last_step += 1000.0

    class Control:
        beats = 0

        def beat(self):
            self.beats += 1

    core, control = Core(), Control()
    with pytest.raises(Ended):
        engine_process.watch(control, SimpleNamespace(core=core), 10.0, threading.Event())
    assert ended == [EXIT_ENGINE]
    assert 100 + 10 / BEAT_SECONDS <= core.turns <= 102 + 10 / BEAT_SECONDS
    assert control.beats == core.turns - 1


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="Linux")
def test_a_models_file_is_read_ahead_where_memory_takes_it(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(engine_process.os, "posix_fadvise", lambda opened, *rest: asked.append(rest))
    file, meminfo = tmp_path / "m.pth", tmp_path / "meminfo"
    file.write_bytes(bytes(8192))
    for available, times in ((7, 0), (8, 1)):
        meminfo.write_text(f"MemTotal: 99 kB\nMemAvailable: {available} kB\n")
        engine_process.read_ahead(file, meminfo)
        assert asked == [(0, 0, os.POSIX_FADV_WILLNEED)] * times
    engine_process.read_ahead(tmp_path / "none.pth", meminfo)
    engine_process.read_ahead(file, tmp_path / "nowhere")
    assert len(asked) == 1


def test_an_http_process_that_cannot_start_does_not_end_those_that_serve(supervised):
    http, _ = supervised.children
    for _ in range(2 * supervisor.MAX_FAILED_STARTS):
        supervised.due.clear()
        supervised.start("http", 1)
        assert supervised.bury(supervised.children[-1], -signal.SIGBUS) is None
    (when, *_), now = supervised.due[0], time.monotonic()
    assert now + 5 < when <= now + supervisor.MAX_PAUSE
    http.ready = False
    supervised.start("http", 1)
    assert supervised.bury(supervised.children[-1], -signal.SIGBUS) == EXIT_CRASHES


def test_an_engine_that_dies_while_the_server_finishes_is_no_orderly_end(supervised):
    supervised.drain(time.monotonic())
    http, engine = supervised.children
    assert supervised.bury(engine, -signal.SIGKILL) is None
    http.idle = True
    http.process.poll = lambda: 0
    assert supervised.stop() == 1


def test_a_machine_without_room_for_a_process_costs_those_that_run_nothing(supervised, clock, monkeypatch):
    def full(command, **more):
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", full)
        supervised.due = [(0.0, "http", 1)]
        with pytest.raises(UsageError, match="no more processes"):
            supervised.turn()
        supervised.announced = True
        supervised.due = [(0.0, "http", 1)]
        for _ in range(3):
            assert supervised.turn() is None
            clock.append(clock[-1] + 1.1)
    assert count() == before
    assert supervised.turn() is None
    assert [child.name for child in supervised.children] == ["HTTP process 0", "the engine", "HTTP process 1"]


def test_an_http_process_that_hangs_holds_up_the_end_only_until_it_is_noticed(supervised, clock):
    http, engine = supervised.children
    engine.process.poll = lambda: 0
    http.process.poll = lambda: -signal.SIGKILL if signal.SIGKILL in http.process.sent else None
    supervised.children.remove(engine)
    supervised.drain(time.monotonic())
    began = clock[-1]
    while (code := supervised.turn()) is None:
        clock.append(clock[-1] + 0.1)
    assert code == 0
    assert 5 < clock[-1] - began < 8  # it may run for 30 s when it is busy
    supervised.children.append(engine)


def test_an_http_process_that_served_is_started_again_at_once(supervised):
    http, _ = supervised.children
    assert supervised.bury(http, -signal.SIGABRT) is None
    assert supervised.due == [(time.monotonic(), "http", 0)]


def test_engines_crash_for_themselves_and_the_last_one_ends_the_server(supervised, clock):
    """One that crashes too often is left out while others serve."""
    supervised.announced = True
    supervised.config = replace(supervised.config, devices="cpu,cpu", max_crashes=2)
    supervised.engines = {engine.seat.index: engine for engine in engines_of(supervised.config, Path("/nowhere"))}
    first, second = supervised.engines.values()

    def crash(index: int) -> int | None:
        supervised.due.clear()
        supervised.start("engine", index)
        return supervised.bury(supervised.children[-1], -signal.SIGKILL)

    assert crash(1) is None
    assert [start[1:] for start in supervised.due] == [("engine", 1)]
    assert crash(0) is None
    clock.append(clock[-1] + supervised.config.crash_window_seconds + 1)
    assert crash(0) is None  # long after the first time
    assert crash(1) is None
    assert (first.given_up, second.given_up) == (False, False)
    assert crash(1) is None
    assert (first.given_up, second.given_up, supervised.due) == (False, True, [])
    assert crash(0) == EXIT_CRASHES


def test_engines_that_wait_for_others_to_load_start_one_after_another(supervised):
    supervised.config = replace(supervised.config, devices="0,1,2", max_crashes=1)
    supervised.engines = {engine.seat.index: engine for engine in engines_of(supervised.config, Path("/nowhere"), {})}
    supervised.due, supervised.later = [], [1, 2]
    supervised.hear(supervised.children[1], {"event": "ready", "info": {"model": "m"}})
    assert [start[1:] for start in supervised.due] == [("engine", 1)]
    supervised.start("engine", 1)
    assert supervised.bury(supervised.children[-1], -signal.SIGKILL) is None  # it is given up
    assert [start[1:] for start in supervised.due] == [("engine", 1), ("engine", 2)]


def orders_of(child) -> list[str]:
    child.process.theirs.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        return child.process.theirs.recv(1 << 20).decode().splitlines()
    return []


def test_engines_are_added_and_removed_while_the_server_runs(supervised, clock):
    http, engine = supervised.children
    orders_of(http)
    orders_of(engine)
    supervised.announced = True
    supervised.add(engine_on("cpu", 1, supervised.config, Path("/nowhere")))
    assert supervised.turn() is None
    added = supervised.children[-1]
    assert (added.role, added.index) == ("engine", 1)
    (told,) = orders_of(http)
    assert [seat["index"] for seat in json.loads(told.removeprefix("seats "))] == [0, 1]
    supervised.hear(added, {"event": "ready", "info": {"model": "m"}})
    assert supervised.engines[1].ready
    supervised.remove(0)
    assert orders_of(engine) == ["drain"]
    assert orders_of(http) == []  # what it has still comes
    supervised.hear(engine, {"event": "idle"})
    assert orders_of(engine) == ["stop"]
    engine.process.poll = lambda: 0
    assert supervised.turn() is None
    (told,) = orders_of(http)
    assert [seat["index"] for seat in json.loads(told.removeprefix("seats "))] == [1]
    assert (list(supervised.engines), supervised.due, supervised.code) == ([1], [], 0)


def test_listening_sockets_get_their_options_and_nothing_stays_open(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener, open(tmp_path / "file", "w"):
        before = set(os.listdir("/proc/self/fd"))
        tune_listener(Config())
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert set(os.listdir("/proc/self/fd")) <= before


def test_sockets_are_made_where_their_paths_fit(tmp_path, monkeypatch):
    base = tmp_path / ("long" * 20)
    base.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    folder, lock = claims.make_folder()
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "engine"))
    finally:
        shutil.rmtree(folder)
        os.close(lock)


def test_a_servers_folder_is_its_own_until_it_ends(tmp_path, monkeypatch):
    """Whatever process ids say: containers that share a folder have ids of their own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(claims, "MAX_BASE", 1000)
    folder, lock = claims.make_folder()
    older = tmp_path / f"{claims.FOLDER_PREFIX}1-abcdefgh"  # of a version that did not lock it
    older.mkdir()
    other, other_lock = claims.make_folder()
    assert {folder, other, older} == set(tmp_path.iterdir())
    os.close(lock)
    last, last_lock = claims.make_folder()
    assert {other, older, last} == set(tmp_path.iterdir())
    os.close(other_lock)
    os.close(last_lock)


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(claims, "MAX_BASE", 1000)
    locks = []

    def lock(folder, real=claims.lock_folder):
        if not locks:
            claims.remove_unlocked(folder)
        locks.append(folder)
        return real(folder)

    monkeypatch.setattr(claims, "lock_folder", lock)
    folder, held = claims.make_folder()
    assert [folder] == list(tmp_path.iterdir()) == locks[1:]
    os.close(held)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_folder_that_cannot_be_made_is_a_wrong_setting(monkeypatch, code):
    def mkdtemp(**more):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(claims.tempfile, "mkdtemp", mkdtemp)
    with pytest.raises(UsageError, match="TMPDIR"):
        claims.make_folder()
