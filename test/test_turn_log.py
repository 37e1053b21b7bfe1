"""The log of turns: a session's state on disk is a snapshot and ids. Here a state says itself which ids it has seen."""

import contextlib
import os
import queue
import random
import sqlite3
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import MemoryStore
from test_state_pool import ANSWER, SHAPE, Pool, take

from rwkv_batch.errors import NotFound, StorageFailed, Unavailable, Unprocessable
from rwkv_batch.model.state import Snapshot
from rwkv_batch.request import Request
from rwkv_batch.session_messages import CommitResult, Delete, Export, Fork, Import, Rewind, Session, Status
from rwkv_batch.sessions import storage
from rwkv_batch.sessions.shared import Commit, Demote, JobQueue, Load
from rwkv_batch.sessions.sqlite import connection as database_connection
from rwkv_batch.sessions.sqlite.states import pack_ids, unpack_ids
from rwkv_batch.sessions.store import SessionStore
from sampling.params import SamplingParams

Ids = tuple[int, ...]


def state_after(ids: Ids) -> Snapshot:
    """The state that these ids lead to."""
    wkv = torch.zeros(SHAPE.num_layers, 1, 64, 64)
    wkv.view(-1)[: len(ids)] = torch.tensor(ids, dtype=torch.float32)
    return Snapshot(torch.zeros(SHAPE.num_layers, 2, 64, dtype=torch.float16), wkv, len(ids))


def ids_of(state: Snapshot | None) -> Ids:
    """The ids that a state has seen."""
    return () if state is None else tuple(map(int, state.wkv.view(-1)[: state.elapsed].tolist()))


class LogPool(Pool):
    """A pool whose engine computes states at once. `fed` counts what it was asked to feed."""

    def __init__(self, path: Path, **options: Any):
        super().__init__(path, **options)
        self.fed: list[int] = []
        self.pool.use(self.compute)

    def compute(self, initial, ids, done, origin="") -> None:
        self.fed.append(len(ids))
        done(state_after((*ids_of(initial()), *ids)))

    def say(self, name: str, ids: Ids, *, behind: int = 0, **fields: Any) -> CommitResult:
        """A turn that feeds `ids`; what is kept of its state is the one before the last `behind` of them."""
        return take(self.say_later(self.lease(name, **fields), ids, behind=behind))

    def say_later(self, lease, ids: Ids, *, behind: int = 0) -> "queue.SimpleQueue":
        answers: queue.SimpleQueue = queue.SimpleQueue()
        whole = (*ids_of(lease.initial()), *lease.ids, *ids)
        cut = len(whole) - behind
        lease.commit(state_after(whole[:cut]), 0, ANSWER, answers.put, ids=list(whole[cut:]), turn=list(ids))
        return answers

    def ids(self, name: str, **fields: Any) -> Ids | None:
        """What a session has seen; None when there is none."""
        lease = self.lease(name, keep=False, **fields)
        found = (*ids_of(lease.initial()), *lease.ids) if lease.version else None
        lease.release()
        return found

    def crash(self) -> None:
        """End without writing anything more."""
        self.pool._thread._finish_seconds = 0.0
        self.pool.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


def pieces_in(path: Path) -> int:
    """Pieces of whole states in the file."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT count(*) FROM kept_pieces").fetchone()[0]


def wait_for_snapshots(pool: LogPool, count: int) -> None:
    until = time.monotonic() + 60
    while pool.pool.stats()["state_snapshots_total"] < count:
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize("ids", [[], [0], [65535, 0, 7], [65536, 1], list(range(3000))])
def test_ids_as_bytes(ids):
    packed = pack_ids(ids)
    assert unpack_ids(packed) == ids
    assert len(packed) == 1 + len(ids) * (2 if max(ids, default=0) < 65536 else 4)


def test_a_turn_is_its_ids_and_survives_the_end_without_a_state(path):
    with LogPool(path) as pool:
        for number in range(5):
            kept = pool.say("s", (number, 10 + number), behind=1)
            assert (kept.version, kept.tokens, kept.durable) == (number + 1, 2 * number + 2, True)
        expected = pool.ids("s")
        pool.crash()
    assert pieces_in(path) == 0
    with LogPool(path) as pool:
        lease = pool.lease("s", keep=False)
        assert (lease.version, lease.initial(), tuple(lease.ids)) == (5, None, expected)
        assert pool.order(Status(name="s")).sessions[0].tokens == 10
        assert pool.say("s", (99,)).version == 6
        assert pool.ids("s") == (*expected, 99)


def test_a_session_that_lags_is_written_whole_and_the_next_start_feeds_only_the_rest(path):
    with LogPool(path, snapshot_tokens=16) as pool:
        pool.say("s", tuple(range(10)), behind=3)
        assert pool.pool.stats()["state_snapshots_total"] == 0
        pool.say("s", tuple(range(10, 20)), behind=3)
        wait_for_snapshots(pool, 1)
        pool.say("s", (50, 51))
        pool.crash()
    with LogPool(path) as pool:
        lease = pool.lease("s", keep=False)
        assert ids_of(lease.initial()) == tuple(range(17))
        assert lease.ids == [17, 18, 19, 50, 51]
        pool.order(Rewind(name="s"))
        assert pool.ids("s") == tuple(range(20))


def test_the_end_writes_what_lags_but_only_for_so_long(path):
    names = [f"s{number}" for number in range(6)]
    with LogPool(path) as pool:
        for number, name in enumerate(names):
            pool.say(name, tuple(range(number + 2)), behind=1)
    with LogPool(path) as pool:
        for number, name in enumerate(names):
            lease = pool.lease(name, keep=False)
            assert (ids_of(lease.initial()), lease.ids) == (tuple(range(number + 1)), [number + 1])
        for name in names:
            pool.say(name, (7, 8, 9))
        pool.crash()
    with LogPool(path) as pool:
        for name in names:
            assert pool.ids(name)[-3:] == (7, 8, 9)


def test_a_session_that_leaves_memory_is_written_whole_or_its_log_is_fed_again(path, monkeypatch):
    with LogPool(path, l1_sessions=1, l2_sessions=1) as pool:
        for number in range(4):
            pool.say(f"s{number}", (number, 5, 6), behind=1)
        wait_for_snapshots(pool, 2)
        assert ids_of(pool.lease("s0", keep=False).initial()) == (0, 5)
        monkeypatch.setattr("rwkv_batch.sessions.tiers.MAX_LAGGING", 0)
        for number in range(4, 8):
            pool.say(f"s{number}", (number, 5, 6), behind=1)
        lease = pool.lease("s4", keep=False)
        assert (lease.initial(), lease.ids) == (None, [4, 5, 6])


def test_of_many_versions_only_the_newest_is_written(path):
    with LogPool(path, snapshot_tokens=16, snapshot_rate=1.0) as pool:  # a byte a second: not in this test
        pool.say("first", tuple(range(40)))  # is begun
        for number in range(30):
            pool.say("s", (number,) * 10)
        assert pool.pool.stats()["state_lagging_sessions"] == 1
        pool.crash()
    with LogPool(path) as pool:
        assert len(pool.ids("s")) == 300


def test_a_turn_waits_for_one_piece_of_a_snapshot_at_most(path, monkeypatch):
    monkeypatch.setattr("rwkv_batch.sessions.state_file.PIECE_BYTES", 1000)
    with LogPool(path, snapshot_tokens=16) as pool:
        waited, add = [], pool.database.add_to_draft

        def slowly(piece) -> None:
            time.sleep(0.02)
            add(piece)

        monkeypatch.setattr(pool.database, "add_to_draft", slowly)
        pool.say("s", tuple(range(40)))
        for number in range(5):
            began = time.monotonic()
            pool.say("t", (number,))
            waited.append(time.monotonic() - began)
        assert pool.pool.stats()["state_snapshots_total"] == 0, "a snapshot takes a second here"
        assert min(waited) < 0.3
        pool.crash()


def test_a_fork_and_its_turns_share_the_log_and_the_snapshot(path):
    with LogPool(path, versions=1, snapshot_tokens=30) as pool:
        pool.say("s", (1, 2, 3))
        copies = [f"c{number}" for number in range(50)]
        pool.order(Fork(name="s", copies=copies))
        assert pieces_in(path) == 0
        for number, name in enumerate(copies):
            pool.say(name, (number, 100))
        pool.say("s", tuple(range(40)))
        wait_for_snapshots(pool, 1)
        pool.order(Delete(name="s"))
        pool.crash()
    with LogPool(path) as pool:
        for number, name in enumerate(copies):
            assert pool.ids(name) == (1, 2, 3, number, 100)
        assert pool.order(Delete(name="c0")).found
        assert pool.ids("c1") == (1, 2, 3, 1, 100)


def test_each_rewind_goes_one_turn_further_back_over_snapshots(path):
    with LogPool(path, versions=20, snapshot_tokens=16) as pool:
        for number in range(6):
            pool.say("s", (number,) * 7, behind=2)
        wait_for_snapshots(pool, 1)
        for left in (5, 4, 3, 2, 1):
            pool.order(Rewind(name="s"))
            assert pool.ids("s") == tuple(number for number in range(left) for _ in range(7))
        with pytest.raises(NotFound):
            pool.order(Rewind(name="s"))


@pytest.mark.parametrize("seed", range(3))
def test_many_versions_that_go_at_once_leave_nothing_behind(path, seed):
    """Some of them lead to others, some are whole; each leaves the file once."""
    rng = random.Random(seed)
    with LogPool(path, versions=40, snapshot_tokens=2**30) as pool:
        for name in ("s", "t"):
            for number in range(12):
                if rng.random() < 0.3:
                    pool.turn(name, state_after((number,)))
                else:
                    pool.say(name, (number,) * 3)
                if rng.random() < 0.3:
                    pool.order(Rewind(name=name, version=rng.randrange(1, number + 2)))
            pool.order(Fork(name=name, copies=[f"copy of {name}"]))
        expected = {name: pool.ids(name) for name in ("s", "t")}
        pool.crash()
    with LogPool(path, versions=1) as pool:
        assert pool.say("s", (99,)).version > 12
        assert pool.ids("s") == (*expected["s"], 99)
        assert pool.order(Delete(name="t")).found
        assert pool.ids("copy of t") == expected["t"]
        pool.crash()
    check_tables(path)


def test_nodes_and_new_sessions_go_on_from_what_others_hold(path):
    with LogPool(path) as pool:
        assert pool.say("d", (1, 2), node=0, behind=1).node == 1
        assert pool.say("d", (3,), node=1).node == 2
        assert pool.say("d", (4,), node=1, behind=1).node == 3
        assert pool.say("d:3", (5,), save_as="other").name == "other"
        pool.crash()
    with LogPool(path) as pool:
        assert [pool.ids(name) for name in ("d:1", "d:2", "d:3", "other")] == [(1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 4, 5)]


def test_ids_that_another_model_was_fed_are_refused(path):
    with LogPool(path) as pool:
        pool.say("s", (1, 2))
        pool.crash()
    with LogPool(path, fingerprint="another") as pool:
        with pytest.raises(Unprocessable, match="another model"):
            pool.lease("s")
        pool.say("t", (3,))
        pool.crash()
    with LogPool(path) as pool:
        assert pool.ids("s") == (1, 2)


@pytest.mark.parametrize("same_name", [False, True])
def test_a_turn_whose_source_is_deleted_meanwhile_keeps_its_own_state(path, same_name):
    with LogPool(path) as pool:
        pool.say("a", (1, 2, 3))
        lease = pool.lease("a", save_as="b")
        pool.order(Delete(name="a"))
        if same_name:
            pool.say("a", (9, 9, 9))
        assert take(pool.say_later(lease, (4, 5), behind=1)).version == 1
        pool.crash()
    with LogPool(path) as pool:
        assert pool.ids("b") == (1, 2, 3, 4, 5)
        assert pool.ids("a") == ((9, 9, 9) if same_name else None)


def test_many_rows_of_a_session_that_lags_feed_its_log_once(path):
    with LogPool(path) as pool:
        pool.say("s", tuple(range(100)))
        pool.crash()
    with LogPool(path) as pool:
        for _ in range(2):
            answers: queue.SimpleQueue = queue.SimpleQueue()
            pool.pool.lease(
                Request(id="many", prompts=[[1]] * 8, sampling=SamplingParams(), max_tokens=5,
                        session=Session(name="s", keep=False)),
                answers.put,
            )  # fmt: skip
            lease = take(answers)
            assert (ids_of(lease.initial()), lease.ids) == (tuple(range(100)), [])
            lease.release()
        assert pool.fed == [100]
        assert pool.say("s", (7,)).version == 2
        pool.crash()
    with LogPool(path) as pool:
        assert pool.ids("s") == (*range(100), 7)


@pytest.mark.parametrize("where", ["memory", "disk", "old version"])
def test_an_exported_file_holds_a_whole_state(path, tmp_path, where):
    out = tmp_path / "state"
    with LogPool(path) as pool:
        pool.say("s", tuple(range(60)), behind=4)
        if where == "old version":
            pool.say("s", (1, 2))
        if where == "disk":
            pool.crash()
            pool = LogPool(path)
        page = pool.order(Export(name="s", path=str(out), version=1))
        assert page.sessions[0].tokens == 60
        assert pool.fed == [4 if where == "memory" else 60]
        assert pool.order(Import(name="t", path=str(out))).sessions[0].tokens == 60
        assert pool.ids("t") == tuple(range(60))
        pool.pool.close()


def test_turns_that_end_together_share_a_transaction(path, monkeypatch):
    with LogPool(path) as pool:
        leases = [pool.lease(f"s{number}") for number in range(40)]
        go, sizes, write = threading.Event(), [], pool.database.write
        monkeypatch.setattr(pool.database, "write", lambda turns: (go.wait(60), sizes.append(len(turns)), write(turns)))
        answers = [pool.say_later(lease, (number,)) for number, lease in enumerate(leases)]
        go.set()
        assert [take(answer).version for answer in answers] == [1] * 40
        assert len(sizes) <= 3


def when_opened(monkeypatch, install) -> None:
    """Have `install` called with each connection to a session file, by the thread that opens it.

    A thread that gave a callback to a connection in use would wait, with Python's lock, for the statement under way, which
    may wait for that lock, as what is written in Python does that SQLite calls.
    """
    prepare = database_connection.prepare

    def prepared(opened, *args, **options):
        install(opened)
        return prepare(opened, *args, **options)

    monkeypatch.setattr(database_connection, "prepare", prepared)


def test_turns_that_follow_turns_look_nothing_up(path, monkeypatch):
    found: list[str] = []  # what is asked of SQLite, by its first word
    with monkeypatch.context() as patch:
        when_opened(patch, lambda opened: opened.set_trace_callback(lambda text: found.append(text.split()[0])))
        with LogPool(path) as pool:
            for number in range(4):
                pool.say("s", (number,))
            found.clear()
            for number in range(4, 8):
                pool.say("s", (number,))
            assert sorted(set(found)) == ["BEGIN", "COMMIT", "DELETE", "INSERT", "UPDATE"]
            assert len(found) == 4 * 6
            pool.crash()
    with LogPool(path) as pool:
        assert pool.ids("s") == tuple(range(8))
        assert pool.pool.store.kept_versions("", "s") == [8, 7]


@pytest.mark.parametrize("change", ["rewind", "delete", "snapshot", "another's"])
def test_what_was_changed_in_another_way_is_looked_up_again(path, change):
    with LogPool(path, snapshot_tokens=4 if change == "snapshot" else 2048) as pool:
        for number in range(4):
            pool.say("s", (number,))
            pool.say("other", (number,))
        expected = tuple(range(4))
        if change == "rewind":
            pool.order(Rewind(name="s"))
            expected = expected[:3]
        elif change == "delete":
            pool.order(Delete(name="s"))
            expected = ()
        elif change == "snapshot":
            pool.say("s", (4,))
            wait_for_snapshots(pool, 1)
            expected += (4,)
        else:  # something that does not know of it
            with contextlib.closing(sqlite3.connect(path)) as connection:
                connection.execute("UPDATE kept_sessions SET version = 3 WHERE name = 's'")
                connection.execute("DELETE FROM kept_versions WHERE version = 4 AND session = 1")
                connection.commit()  # its state is whole in memory, and is written so
        for number in range(10, 14):
            pool.say("s", (number,))
            pool.say("other", (number,))
        pool.crash()
    with LogPool(path) as pool:
        assert pool.ids("s") == (*expected, 10, 11, 12, 13)
        assert pool.ids("other") == (0, 1, 2, 3, 10, 11, 12, 13)
        pool.pool.close()
    if change != "another's":  # whose turn led nowhere
        check_tables(path)


@pytest.mark.parametrize("wait_seconds", [60.0, 0.1])
def test_turns_wait_where_the_log_does_not_keep_up_and_fail_only_in_the_end(path, monkeypatch, wait_seconds):
    monkeypatch.setattr("rwkv_batch.sessions.leases.LOG_BACKLOG_TURNS", 3)
    with LogPool(path, wait_seconds=wait_seconds) as pool:
        pool.say("known", (1,))
        leases = [pool.lease(f"s{number}") for number in range(3)]
        go, write = threading.Event(), pool.database.write
        monkeypatch.setattr(pool.database, "write", lambda turns: (go.wait(60), write(turns)))
        answers = [pool.say_later(lease, (7,)) for lease in leases]
        assert pool.ids("known") == (1,), "reading waits for nothing"
        waiting = [pool.ask(Session(name=name)) for name in ("known", "new")]
        if wait_seconds > 1:
            with pytest.raises(queue.Empty):
                waiting[0].get(timeout=0.1)
        go.set()
        assert [take(answer).version for answer in answers] == [1, 1, 1]
        if wait_seconds > 1:
            assert [take(answer).version for answer in waiting] == [1, 0]
            return
        for answer in waiting:
            with contextlib.suppress(Unavailable):
                take(answer).release()
        assert pool.say("known", (2,)).version == 2


def test_a_full_disk_fails_turns_and_loses_nothing(path):
    with LogPool(path) as pool:
        pool.say("s", (1,))
    with LogPool(path, max_pages=24) as pool:
        kept: dict[str, Ids] = {}
        for number in range(60):
            ids = tuple(range(8000))
            with contextlib.suppress(StorageFailed):
                pool.say(f"t{number}", ids)
                kept[f"t{number}"] = ids
        assert 0 < len(kept) < 60
        for name, ids in kept.items():
            assert pool.ids(name) == ids
        pool.crash()
    with LogPool(path) as pool:
        assert pool.order(Status()).total == len(kept) + 1
        for name, ids in kept.items():
            assert pool.ids(name) == ids


def test_a_file_of_limited_size_drops_the_oldest_idle_sessions_if_asked_to(path):
    ids = tuple(range(8000))
    with LogPool(path, max_pages=80, drops_oldest=True, snapshot_tokens=2**30) as pool:
        running = pool.lease("used", key="k")
        pool.say("idle", (1,))
        pool.say("read", (2,))
        reading = pool.lease("read", keep=False)
        for number in range(100):
            assert pool.say(f"t{number}", ids).version == 1
        assert take(pool.say_later(running, (7,))).version == 1
        assert pool.ids("idle") is None
        assert pool.ids("t0") is None
        assert pool.ids("t99") == ids
        reading.release()
        dropped = pool.pool.stats()["state_dropped_sessions_total"]
        assert dropped > 20
        assert pool.order(Status()).total == 103 - dropped
        assert path.stat().st_size <= 80 * 16384
        pool.crash()
    with LogPool(path) as pool:
        assert pool.ids("t99") == ids
        assert pool.ids("used") == (7,)


def test_the_log_of_a_read_only_file_is_read(path, monkeypatch):
    with LogPool(path) as pool:
        pool.say("s", (1, 2, 3))
        pool.crash()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with LogPool(path) as pool:
        assert pool.ids("s") == (1, 2, 3)
        with pytest.raises(StorageFailed, match="readonly"):
            pool.say("s", (4,))
        assert pool.ids("s") == (1, 2, 3)


def test_a_disk_that_takes_no_snapshot_fails_no_turn(path, monkeypatch, caplog):
    with LogPool(path, snapshot_tokens=16) as pool:

        def refuse() -> None:
            raise StorageFailed("the disk is full")

        monkeypatch.setattr(pool.database, "begin_draft", refuse)
        for number in range(5):
            assert pool.say("s", (number,) * 20).version == number + 1
        pool.order(Status())
        pool.crash()
    with LogPool(path) as pool:
        assert len(pool.ids("s")) == 100
    assert "could not be written whole" in caplog.text


def test_a_state_that_is_not_finite_is_not_written_whole(path):
    with LogPool(path, snapshot_tokens=16) as pool:
        lease, answers = pool.lease("s"), queue.SimpleQueue()
        bad = state_after(tuple(range(20)))
        bad.wkv[0, 0, 63, 63] = float("nan")
        lease.commit(bad, 0, ANSWER, answers.put, ids=[], turn=list(range(20)))
        take(answers)
        lease = pool.lease("s")
        lease.release(nonfinite=True)
        assert pool.ids("s") == tuple(range(20)), "what is on disk leads to a better one"
    assert pieces_in(path) == 0


def test_nothing_of_a_deleted_session_is_left_in_its_files(path, monkeypatch):
    monkeypatch.setattr(storage, "IDLE_SECONDS", 0.02)
    secret = tuple(range(40_000, 40_030))
    with LogPool(path, snapshot_tokens=16) as pool:
        pool.say("other", (1,))
        pool.say("s", secret)
        wait_for_snapshots(pool, 1)
        pool.say("s", secret)

        def left() -> bool:
            data = b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))
            return pack_ids(secret)[1:] in data or state_after(secret).wkv.numpy().tobytes()[:120] in data

        assert left()
        pool.order(Delete(name="s"))
        until = time.monotonic() + 60
        while left():
            assert time.monotonic() < until
            time.sleep(0.02)
        assert pool.ids("other") == (1,)


# Random histories against lists of ids.

NAMES = ("a", "b", "c", "d", "d:1", "d:2")
STEP = st.tuples(st.integers(0, 99), st.sampled_from(NAMES), st.integers(0, 2**16))


class History:
    """What a pool does and what a dictionary of lists says. `model`: kept versions of each session, the oldest first."""

    def __init__(self, path: Path, store: SessionStore | None):
        self.path, self.store = path, store
        self.model: dict[str, list[tuple[int, Ids]]] = {}
        self.last_node = 0
        self.pool = self.open(0)

    def open(self, number: int) -> LogPool:
        rate = (None, 1e9, 1.0)[number % 3]
        levels = {"l1_sessions": 1 + number % 2, "l2_sessions": number % 3}
        return LogPool(self.path, versions=3, store=self.store, snapshot_tokens=16, snapshot_rate=rate, **levels)

    def step(self, kind: int, name: str, number: int) -> None:
        versions = self.model.get(name, [])
        last, ids = versions[-1] if versions else (0, ())
        if kind < 50:
            self.turn(name, last, ids, number)
        elif kind < 58 and versions:
            copies = [other for other in NAMES if other not in self.model][:2]
            if copies:
                self.pool.order(Fork(name=name, copies=copies))
                self.model |= {copy: [(1, ids)] for copy in copies}
        elif kind < 66 and len(versions) > 1:
            version, old = versions[number % len(versions)]
            self.pool.order(Rewind(name=name, version=version))
            self.model[name] = [*versions, (last + 1, old)][-3:]
        elif kind < 72:
            assert self.pool.order(Delete(name=name)).found == (name in self.model)
            self.model.pop(name, None)
        elif kind < 80:
            node = "d:1" in self.model
            kept = self.pool.say("d", (number,), node=int(node))
            assert kept.node > max([self.last_node, *(int(other[2:]) for other in self.model if other.startswith("d:"))])
            self.last_node = kept.node
            self.model[kept.name] = [(1, (*(self.model["d:1"][-1][1] if node else ()), number))]
        elif kind < 90:
            self.pool.crash() if kind < 86 else self.pool.pool.close()
            self.pool = self.open(number)
        else:
            found = {entry.name: (entry.version, entry.tokens) for entry in self.pool.order(Status()).sessions}
            assert found == {other: (kept[-1][0], len(kept[-1][1])) for other, kept in self.model.items()}

    def turn(self, name: str, last: int, ids: Ids, number: int) -> None:
        lease = self.pool.lease(name)
        assert (lease.version, (*ids_of(lease.initial()), *lease.ids)) == (last, ids)
        if number % 7 == 0:
            lease.release()
            return
        new = tuple((number + place) % 65536 for place in range(1 + number % 25))
        take(self.pool.say_later(lease, new, behind=number % min(5, 1 + len(new))))
        self.model[name] = [*self.model.get(name, []), (last + 1, ids + new)][-3:]

    def check(self) -> None:
        for name in (*NAMES, *self.model):
            assert self.pool.ids(name) == (self.model[name][-1][1] if name in self.model else None)
        for name, versions in self.model.items():
            for version, ids in versions:
                record = self.pool.pool.store.find("", name, version)
                base, rest = self.pool.pool.commands._reader.read_state(record)
                assert (*ids_of(base), *rest) == ids


def run_history(steps: list[tuple[int, str, int]], *, sqlite: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        path = Path(folder) / "s.db"
        history = History(path, None if sqlite else MemoryStore(versions=3))
        try:
            for step in steps:
                history.step(*step)
        finally:
            history.pool.pool.close()
        if sqlite and path.exists():
            check_tables(path)
        history.pool = history.open(0)
        history.check()
        history.pool.crash()


def check_tables(path: Path) -> None:
    """Nothing is left over and nothing is missing."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        whole = {row[0] >> 20 for row in connection.execute("SELECT id FROM kept_pieces")}
        turns = dict(connection.execute("SELECT state, base FROM kept_turns"))
        used = {row[0] for row in connection.execute("SELECT state FROM kept_versions")} | set(turns.values()) - {0}
        spare = {row[0] for row in connection.execute("SELECT state FROM kept_spare")}
        assert not used & spare
        assert not whole & turns.keys()
        assert not spare & turns.keys()
        assert whole | turns.keys() | spare == used | spare
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@given(st.lists(STEP, min_size=5, max_size=40))
@settings(max_examples=25)
def test_random_histories(steps):
    run_history(steps, sqlite=True)


@given(st.lists(STEP, min_size=5, max_size=40))
@settings(max_examples=25)
def test_random_histories_over_a_store_that_is_no_database(steps):
    run_history(steps, sqlite=False)


@pytest.mark.long
@pytest.mark.parametrize(("sqlite", "count"), [(True, 2_000), (False, 18_000)])
def test_many_random_histories(sqlite, count):
    @given(st.lists(STEP, min_size=5, max_size=60))
    @settings(max_examples=count)
    def run(steps):
        run_history(steps, sqlite=sqlite)

    run()


def test_the_log_leaves_turns_to_what_else_waits():
    """Sessions are loaded and copied to the host however many turns end meanwhile."""
    jobs, done = JobQueue(), []
    for job in (Demote("demoted"), Load("first"), Load("second")):
        jobs.add(job)
    for _ in range(7):
        jobs.add(Commit(None, state_after((1,)), 0, ANSWER, print, [1], None, None))  # turns keep ending
        done.append(type(jobs.take("log")[0]))
    assert done == [Commit, Load, Commit, Load, Commit, Demote, Commit]
