"""Acknowledged turns against the power going off, and the process being killed, in the middle of any write.

A shim notes each call by which a server changes its files (`disk_shim.c`). From these notes the files are made as a power cut
any moment may leave them: what was synced is there, of the rest any part is. The shim also kills a server at each of its calls.
"""

import contextlib
import ctypes
import itertools
import os
import random
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from test_state_pool import FILE, take
from test_turn_log import LogPool, ids_of

from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.session_messages import Delete, Fork, Rewind, Session
from rwkv_batch.sessions import storage
from rwkv_batch.sessions.sqlite import connection
from rwkv_batch.sessions.sqlite.database import SessionDatabase
from rwkv_batch.sessions.store import Record

pytestmark = pytest.mark.faults

NAMES = [f"s{i}" for i in range(6)]
RECORD = struct.Struct("<cHqq")
SECTOR = 512  # what a disk writes whole or not at all
ACKS = "acks"
TURN_IDS = 4  # of each turn

Version = tuple[int, int]  # number, seed of its state; number 0: there is no such session


# The life of a server, in a process of its own.


class Life:
    """Turns, rewinds, forks and deletes in random order. What is begun and what was acknowledged stands in a file.

    A turn feeds its number a few times, so a state says which turns led to it. Now and then one is written whole.
    """

    def __init__(self, folder: Path, seed: int, durability: str):
        storage.IDLE_SECONDS = 0.005
        connection.WAL_SOON_BYTES, connection.WAL_BYTES = 2_000_000, 8_000_000  # so that the log is copied back often
        connection.RESERVE_BYTES = 2**16
        torch.set_num_threads(1)
        self.folder = folder
        self.durability = durability
        self.rng = random.Random(seed)
        self.seeds = itertools.count(1)
        self.versions: dict[str, list[Version]] = defaultdict(list)  # that are kept
        self.acks = os.open(folder / ACKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.pool = self.open()

    def open(self) -> LogPool:
        return LogPool(self.folder / "s.db", versions=3, durability=self.durability, snapshot_tokens=20, snapshot_rate=1e12)

    def note(self, word: str, name: str, version: Version) -> None:
        os.write(self.acks, f"{word} {name} {version[0]} {version[1]}\n".encode())

    def step(self) -> None:
        action, name = self.rng.random(), self.rng.choice(NAMES)
        versions = self.versions[name]
        if action < 0.7:
            self.turns(self.rng.sample(NAMES, self.rng.choice((1, 1, 1, 2, 3))))
        elif action < 0.78 and len(versions) > 1:
            old, seed = self.rng.choice(versions)
            self.order(Rewind(name=name, version=old), name, (versions[-1][0] + 1, seed))
        elif action < 0.86 and versions:
            copy = f"copy{next(self.seeds)}"
            self.order(Fork(name=name, copies=[copy]), copy, (1, versions[-1][1]))
        elif action < 0.92 and versions:
            self.order(Delete(name=name), name, (0, 0))
        elif action < 0.96:
            time.sleep(0.03)  # idle
        else:
            self.pool.pool.close()
            self.pool = self.open()

    def turns(self, names: list[str]) -> None:
        """Turns of some sessions, which may share a commit."""
        begun = []
        for name in names:
            last, before = self.versions[name][-1] if self.versions[name] else (0, 0)
            version = (last + 1, next(self.seeds))
            lease = take(self.pool.ask(Session(name=name, key=f"key{version[1]}")))
            assert lease.version == last
            self.note("after", name, (before, version[1]))
            self.note("begin", name, version)
            begun.append((name, version, self.pool.say_later(lease, (version[1],) * TURN_IDS, behind=self.rng.randrange(4))))
        for name, version, answer in begun:
            take(answer)
            self.done(name, version)

    def order(self, action: Rewind | Fork | Delete, name: str, version: Version) -> None:
        self.note("begin", name, version)
        self.pool.order(action)
        self.done(name, version)

    def done(self, name: str, version: Version) -> None:
        self.note("done", name, version)
        self.versions[name] = [*self.versions[name], version][-3:] if version[0] else []


def live_and_be_noted(folder: Path, durability: str, num_steps: int, weaker: str) -> None:
    """A life whose calls are noted; SQLite syncs as the server has it, or `weaker`."""
    life = Life(folder, 1, durability)
    for _ in range(num_steps):
        life.step()
        opened = life.pool.database.file.connection
        if weaker and opened is not None:
            with contextlib.suppress(sqlite3.OperationalError):  # in a transaction: then the next step says it
                opened.execute(f"PRAGMA synchronous = {weaker}")
    os._exit(0)


def live_and_be_killed(folder: Path, durability: str, num_steps: int, first: int, last: int, step: int) -> None:
    """Lives in `folder`/n, each killed at its nth call, until one ends by itself."""
    shim = ctypes.CDLL(None)
    for n in range(first, last, step):
        child = os.fork()
        if child == 0:
            try:
                here = folder / str(n)
                here.mkdir()
                life = Life(here, n, durability)
                shim.disk_kill_at(ctypes.c_long(n))
                for _ in range(num_steps):
                    life.step()
                life.pool.pool.close()
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 1
            return


# What must be true of what it leaves.


def may_be(lines: Iterable[str]) -> dict[str, set[Version]]:
    """Where each session may be: at the last version that was acknowledged, or at the one that was begun after it."""
    found: dict[str, set[Version]] = {}
    for line in lines:
        if not line.endswith("\n"):
            break  # killed while it was written
        word, name, number, seed = line.split()
        if word == "after":
            continue
        version = (int(number), int(seed))
        before = found.get(name, {(0, 0)})
        found[name] = {version} if word == "done" else before | {version}
    return found


def parents_in(lines: Iterable[str]) -> dict[int, int]:
    """Which turn each turn goes on from, 0 if from none."""
    words = [line.split() for line in lines if line.startswith("after ") and line.endswith("\n")]
    return {int(turn): int(before) for _, _, before, turn in words}


def seen(database: SessionDatabase, record: Record) -> tuple[int, ...]:
    """The turns that led to a version's state."""
    pieces, ids, _, _ = database.load(record)
    ids = (*(ids_of(FILE.decode(pieces).snapshot) if pieces is not None else ()), *ids)
    assert len(ids) == record.tokens
    return ids[::TURN_IDS]


def anomaly(path: Path, lines: list[str]) -> str | None:
    """What is wrong with the file after a life with these notes, None if nothing is."""
    expected, parents = may_be(lines), parents_in(lines)

    def turns_to(seed: int) -> tuple[int, ...]:
        return (*turns_to(parents[seed]), seed) if seed else ()

    database = SessionDatabase(path, replay_seconds=1e9)
    try:
        for name, versions in expected.items():
            record = database.find("", name)
            number = record.version if record is not None else 0
            seeds = [seed for allowed, seed in versions if allowed == number]
            if not seeds:
                return f"{name} is at version {number}, not at one of {versions}"
            if record is None:
                continue
            turns = seen(database, record)
            if turns not in [turns_to(seed) for seed in seeds]:
                return f"{name} has another state than that of version {number}"
            for version in database.kept_versions("", name):
                seen(database, database.find("", name, version))
            key = f"key{turns[-1]}"
            if record.origin is None and name in NAMES and database.replay("", name, key) is None:
                return f"the answer of {name} is not there for {key}"
        database.close()
        with LogPool(path) as pool:
            pool.say("one more", (1,))
        with closing(sqlite3.connect(path)) as connection:
            result = connection.execute("PRAGMA integrity_check").fetchone()[0]
            return None if result == "ok" else result
    except (RwkvBatchError, sqlite3.Error) as error:
        return str(error)
    finally:
        database.close()


class Call(NamedTuple):
    """One noted call: W write, S sync, T truncate, U unlink."""

    kind: str
    name: str
    offset: int
    data: bytes


def read_calls(log: Path) -> list[Call]:
    data, calls, at = log.read_bytes(), [], 0
    while at < len(data):
        kind, name_length, offset, length = RECORD.unpack_from(data, at)
        at += RECORD.size
        name, at = data[at : at + name_length].decode(), at + name_length
        calls.append(Call(kind.decode(), name, offset, data[at : at + length]))
        at += length
    return calls


def after_power_cut(calls: list[Call], rng: random.Random) -> dict[str, bytearray]:
    """The files after the last of these calls and a power cut: what was synced, and some part of the rest."""
    last_sync = {call.name: index for index, call in enumerate(calls) if call.kind == "S"}
    files: dict[str, bytearray] = {}
    rest = rng.choice(["nothing", "all", "the first", "some", "torn"])
    cut = rng.randrange(len(calls) + 1)
    for index, call in enumerate(calls):
        if call.name.endswith(("-shm", ".lock", ACKS)) or call.kind == "S":
            continue
        if index > last_sync.get(call.name, -1) and call.kind != "U":
            missing = {"nothing": True, "all": False, "the first": index > cut}.get(rest, rng.random() < 0.4)
            if missing and rest == "torn" and call.kind == "W":
                for start in range(0, len(call.data), SECTOR):
                    if rng.random() < 0.5:
                        apply(files, call._replace(offset=call.offset + start, data=call.data[start : start + SECTOR]))
            if missing:
                continue
        apply(files, call)
    return files


def apply(files: dict[str, bytearray], call: Call) -> None:
    if call.kind == "U":
        files.pop(call.name, None)
        return
    file = files.setdefault(call.name, bytearray())
    end = call.offset + len(call.data)
    file.extend(bytes(max(0, end - len(file))))
    if call.kind == "W":
        file[call.offset : end] = call.data
    else:
        del file[call.offset :]


@pytest.fixture(scope="module")
def shim(tmp_path_factory) -> Path:
    """The compiled shim."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler, to see the calls of a server")
    library = tmp_path_factory.mktemp("shim") / "disk_shim.so"
    source = Path(__file__).with_name("disk_shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-lpthread"], check=True)
    return library


@pytest.fixture
def ram(tmp_path) -> Iterator[Path]:
    """A folder in memory, where there is one: what is looked at after a power cut need not be synced again."""
    if not os.access("/dev/shm", os.W_OK) or shutil.disk_usage("/dev/shm").free < 2**30:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def run_life(shim: Path, folder: Path, *arguments: object, log: Path | None = None) -> None:
    """Run this file in a process of its own, its calls seen by the shim."""
    folder.mkdir()
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    # SQLite's temporary files may not be made where TMPDIR says: a turn must not need them.
    environment = os.environ | {
        "LD_PRELOAD": str(shim),
        "DISK_FOLDER": str(folder.resolve()),
        "PYTHONPATH": os.pathsep.join(paths),
        "SQLITE_TMPDIR": "/proc",
    }
    if log is not None:
        environment["DISK_LOG"] = str(log)
    command = [sys.executable, __file__, *map(str, arguments)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def cut_the_power(
    shim: Path, tmp_path: Path, ram: Path, *, num_steps: int, num_cuts: int, weaker: str = "", durability: str = "log"
) -> str | None:
    """What is wrong after one of many power cuts at random moments of one life; None if nothing ever is."""
    log = tmp_path / "log"
    run_life(shim, tmp_path / "life", "noted", tmp_path / "life", durability, num_steps, weaker, log=log)
    calls, rng = read_calls(log), random.Random(0)
    assert {"W", "S", "T"} <= {call.kind for call in calls}, "the shim sees nothing"
    begin = next(index for index, call in enumerate(calls) if call.name == ACKS)
    for number in range(num_cuts):
        moment = rng.randrange(begin, len(calls) + 1)
        lines = (
            b"".join(call.data for call in calls[:moment] if call.name == ACKS and call.kind == "W")
            .decode()
            .splitlines(keepends=True)
        )
        folder = ram / f"cut{number}"
        folder.mkdir()
        for name, data in after_power_cut(calls[:moment], rng).items():
            (folder / name).write_bytes(data)
        wrong = anomaly(folder / "s.db", lines)
        shutil.rmtree(folder)
        if wrong is not None:
            return f"cut {number}, after {moment} of {len(calls)} calls: {wrong}"
    return None


@pytest.mark.parametrize("durability", ["log", pytest.param("turn", marks=pytest.mark.long)])
def test_no_acknowledged_turn_is_lost_when_the_power_goes_off(shim, tmp_path, ram, durability):
    assert cut_the_power(shim, tmp_path, ram, num_steps=60, num_cuts=50, durability=durability) is None


@pytest.mark.parametrize("weaker", ["NORMAL", pytest.param("OFF", marks=pytest.mark.long)])
def test_the_test_of_power_cuts_sees_a_database_that_syncs_too_little(shim, tmp_path, ram, weaker):
    # About one cut in fifteen shows it, and the first that does ends the test.
    assert cut_the_power(shim, tmp_path, ram, num_steps=40, num_cuts=500, weaker=weaker) is not None


@pytest.mark.long
@pytest.mark.parametrize("durability", ["log", "turn"])
def test_no_acknowledged_turn_is_lost_in_many_power_cuts(shim, tmp_path, ram, durability):
    assert cut_the_power(shim, tmp_path, ram, num_steps=300, num_cuts=1000, durability=durability) is None


def kill_at_calls(shim: Path, ram: Path, *, num_steps: int, calls: range, durability: str = "log") -> int:
    """Kill servers at these of their calls and look at what they leave; how many were killed."""
    folder = ram / f"lives from {calls.start}"
    run_life(shim, folder, "killed", folder, durability, num_steps, calls.start, calls.stop, calls.step)
    lives = sorted(folder.iterdir(), key=lambda life: int(life.name))
    for life in lives:
        wrong = anomaly(life / "s.db", (life / ACKS).read_text().splitlines(keepends=True))
        assert wrong is None, f"killed at call {life.name}: {wrong}"
    shutil.rmtree(folder)
    return len(lives)


def test_a_kill_at_each_call_of_the_first_turns_loses_nothing(shim, ram):
    assert kill_at_calls(shim, ram, num_steps=5, calls=range(1, 90, 4)) > 15


@pytest.mark.long
@pytest.mark.parametrize("durability", ["log", "turn"])
def test_a_kill_at_any_call_loses_nothing(shim, ram, durability):
    killed = [
        kill_at_calls(shim, ram, num_steps=60, calls=range(at, at + 50), durability=durability) for at in range(1, 1000, 50)
    ]
    assert sum(killed) == 1000


if __name__ == "__main__":
    signal.alarm(3000)
    kind, folder, durability, num_steps, *arguments = sys.argv[1:]
    if kind == "noted":
        live_and_be_noted(Path(folder), durability, int(num_steps), arguments[0])
    else:
        live_and_be_killed(Path(folder), durability, int(num_steps), *map(int, arguments))
