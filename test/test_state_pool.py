"""Sessions without a model: three levels, SQLite, turns in order, orders, and what happens when the disk or a file is bad."""

import contextlib
import inspect
import io
import itertools
import json
import os
import queue
import random
import signal
import sqlite3
import struct
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from memory_store import MemoryStore

from rwkv_batch.errors import (
    Conflict,
    EngineFailed,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    RwkvBatchError,
    StorageFailed,
    Unavailable,
    Unprocessable,
)
from rwkv_batch.model.state import Snapshot
from rwkv_batch.model.weights import ModelShape
from rwkv_batch.request import Request
from rwkv_batch.session_messages import Answer, CommitResult, Delete, Deleted, Export, Fork, Import, Rewind, Session, Status
from rwkv_batch.sessions.leases import digest_of
from rwkv_batch.sessions.pool import StatePool
from rwkv_batch.sessions.remote.client import RemoteStore
from rwkv_batch.sessions.sqlite.database import SessionDatabase
from rwkv_batch.sessions.state_file import StateFile, Stored
from rwkv_batch.sessions.store import SessionStore
from rwkv_batch.sessions.transfer import Copies
from sampling.params import SamplingParams

SHAPE = ModelShape(2, 64, 256, 256, 8, 8, 8, 8)
FILE = StateFile("0123456789abcdef", SHAPE)
ANSWER = Answer("said", "stop", 3, 4, 0)


def snapshot(seed: int, tokens: int = 7, dtype: torch.dtype = torch.float32) -> Snapshot:
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randn(2, 2, 64, generator=generator).to(torch.float16)
    return Snapshot(shift, torch.randn(2, 1, 64, 64, generator=generator).to(dtype), tokens)


class SlowDevice(Copies):
    """Copies to a device that are on their way for ever, and what was waited for."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.events: dict[Snapshot, str] = {}  # of what is on the device
        self.waited: list[str | None] = []

    def to_device(self, snapshot: Snapshot):
        if snapshot in self.events:
            return snapshot, None
        copy = Snapshot(snapshot.shift.clone(), snapshot.wkv.clone(), snapshot.elapsed)
        self.events[copy] = f"copy {len(self.events)}"
        return copy, self.events[copy]

    def wait(self, snapshot: Snapshot, event):
        assert event == self.events[snapshot]
        self.waited.append(event)


def same(a: Snapshot | None, b: Snapshot | None) -> bool:
    """Bit for bit."""
    if a is None or b is None:
        return a is b
    return a.elapsed == b.elapsed and torch.equal(a.shift, b.shift) and torch.equal(a.wkv, b.wkv)


class Pool:
    """A pool whose calls wait for their answers."""

    def __init__(
        self,
        path: Path,
        *,
        versions: int = 2,
        max_pages: int | None = None,
        fingerprint: str = "",
        store: SessionStore | None = None,
        **options,
    ):
        kept = {name: options.pop(name) for name in ("response_seconds", "max_responses", "key") if name in options}
        self.database = SessionDatabase(path, versions=versions, **kept)
        self.database.file.max_pages = max_pages
        file = StateFile(fingerprint, SHAPE) if fingerprint else FILE
        self.pool = StatePool(store or self.database, file, torch.device("cpu"), **options)
        self.num_requests = 0

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()

    def ask(self, session: Session, namespace: str = "", max_tokens: int = 5) -> "queue.SimpleQueue":
        self.num_requests += 1
        answers: queue.SimpleQueue = queue.SimpleQueue()
        request = Request(
            id=f"r{self.num_requests}", prompts=[[1]], sampling=SamplingParams(), max_tokens=max_tokens,
            session=session, namespace=namespace,
        )  # fmt: skip
        self.pool.lease(request, answers.put)
        return answers

    def lease(self, name: str = "s", *, namespace: str = "", **fields):
        return take(self.ask(Session(name=name, **fields), namespace))

    def commit(self, lease, state: Snapshot, newlines: int = 0) -> CommitResult:
        return take(self.commit_later(lease, state, newlines))

    def commit_later(self, lease, state: Snapshot, newlines: int = 0) -> "queue.SimpleQueue":
        answers: queue.SimpleQueue = queue.SimpleQueue()
        lease.commit(state, newlines, ANSWER, answers.put)
        return answers

    def turn(self, name: str, state: Snapshot, **fields) -> CommitResult:
        return self.commit(self.lease(name, **fields), state)

    def state(self, name: str, namespace: str = "") -> Snapshot | None:
        lease = self.lease(name, namespace=namespace, keep=False)
        found = lease.initial()
        lease.release()
        return found

    def order(self, action):
        answers: queue.SimpleQueue = queue.SimpleQueue()
        self.pool.execute(action, answers.put)
        return take(answers)


class Caller(Pool):
    """One of several callers of a pool."""

    numbers = itertools.count(1)

    def __init__(self, pool: Pool):
        self.pool = pool.pool
        self.num_requests = 1_000_000 * next(self.numbers)


def take(answers: "queue.SimpleQueue"):
    """The answer; raised if it is an error."""
    result = answers.get(timeout=60)
    if isinstance(result, RwkvBatchError):
        raise result
    return result


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest.mark.parametrize("durability", ["turn", "relaxed", "shutdown"])
def test_a_state_comes_back_bit_for_bit_from_every_level_and_after_a_restart(path, durability):
    states = {f"s{i}": snapshot(i, tokens=i) for i in range(12)}
    with Pool(path, durability=durability, l1_sessions=3, l2_sessions=4, relaxed_seconds=0.05) as pool:
        for i, (name, state) in enumerate(states.items()):
            kept = pool.turn(name, state)
            assert (kept.name, kept.version, kept.tokens, kept.durable) == (name, 1, i, durability == "turn")
        page = pool.order(Status())
        assert (page.total, page.l1, page.l2) == (12, 3, 4)
        tiers = {entry.name: entry.tier for entry in page.sessions}
        assert [tiers[f"s{i}"] for i in range(12)] == ["db"] * 5 + ["l2"] * 4 + ["l1"] * 3
        for name in ("s11", "s6", "s0"):
            assert same(pool.state(name), states[name])
        assert [e.name for e in pool.order(Status()).sessions][:3] == ["s11", "s6", "s0"]  # each became the newest
    with Pool(path) as pool:
        assert pool.order(Status()).db == 12
        for name, state in states.items():
            assert same(pool.state(name), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_state_as_bytes(dtype):
    state = snapshot(1, dtype=dtype)
    data = b"".join(bytes(piece) for piece in FILE.encode(Stored(state, 2)))
    assert len(data) <= FILE.size(torch.float16, dtype)
    for size in (len(data), 1000):
        read = FILE.decode(data[start : start + size] for start in range(0, len(data), size))
        assert same(read.snapshot, state)
        assert (read.newlines, read.snapshot.wkv.dtype) == (2, dtype)


def test_damaged_states_are_refused_whatever_is_wrong():
    data = b"".join(bytes(piece) for piece in FILE.encode(Stored(snapshot(1), 0)))
    rng = random.Random(0)
    for _ in range(300):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with pytest.raises(Unprocessable):
            FILE.decode([bytes(flipped)])
    for _ in range(100):
        with pytest.raises(Unprocessable):
            FILE.decode([data[: rng.randrange(len(data))]])
    with pytest.raises(Unprocessable, match="more data"):
        FILE.decode([data, b"x"])
    with pytest.raises(Unprocessable, match="newer"):
        FILE.decode([data[:8] + b"\x02" + data[9:]])
    with pytest.raises(Unprocessable, match="another model"):
        StateFile("other", SHAPE).decode([data])


def with_header(**fields) -> bytes:
    """A whole state, checksum and all, whose header says something else; a field that is `...` is left out."""
    data = b"".join(bytes(piece) for piece in FILE.encode(Stored(snapshot(1), 0)))
    (length,) = struct.unpack_from("<I", data, 12)
    changed = json.loads(data[16 : 16 + length]) | fields
    header = json.dumps({name: value for name, value in changed.items() if value is not ...}).encode()
    data = struct.pack("<8sII", data[:8], 1, len(header)) + header + data[16 + length : -4]
    return data + struct.pack("<I", zlib.crc32(data))


ODD_VALUES = [
    ..., None, True, False, 0, 1, 2, 3, -1, 0.0, 1.0, 2.0, 0.5, -0.0, 1e400, float("nan"), 64, 64.0, 2**31, 2**53, 2**62,
    2**63, 2**64, 10**400, "", "0", "1", "fp32", "fp64", "FP32", "\0", "\ud800",
    FILE.fingerprint, [], [1], {}, {"newlines": 1}, "x" * 9999,
]  # fmt: skip


@pytest.mark.parametrize("name", ["model", "layers", "width", "shift", "wkv", "tokens", "newlines"])
def test_whatever_a_header_says_it_is_refused_or_has_the_types_that_readers_rely_on(path, name):
    """What a turn computes with comes from a file that anybody may have written."""
    out = path.with_suffix(".state")
    with Pool(path) as pool:
        for number, value in enumerate(ODD_VALUES):
            out.write_bytes(with_header(**{name: value}))
            try:
                pool.order(Import(name=f"s{number}", path=str(out)))
            except Unprocessable:
                continue
            lease = pool.lease(f"s{number}")
            assert (type(lease.newlines), type(lease.initial().elapsed)) == (int, int)
            assert lease.newlines in range(3)
            pool.commit(lease, snapshot(2, tokens=lease.initial().elapsed + 1000))
            pool.order(Export(name=f"s{number}", path=str(out)))
        accepted = pool.order(Status()).total
    assert accepted == {"model": 1, "layers": 1, "width": 1, "shift": 0, "wkv": 1, "tokens": 6, "newlines": 3}[name]


def test_turns_of_one_session_run_in_order(path):
    """100 callers of 20 turns: versions without gap or repeat, each from the state before."""
    num_callers, num_turns = 20, 5
    seen: list[tuple[int, int]] = []
    with Pool(path, durability="shutdown", max_waiting=100) as pool:

        def call() -> None:
            for _ in range(num_turns):
                lease = pool.lease()
                start = lease.initial()
                seen.append((lease.version, start.elapsed if start else 0))
                pool.commit(lease, snapshot(0, tokens=(start.elapsed if start else 0) + 1))

        threads = [threading.Thread(target=call) for _ in range(num_callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [(i, i) for i in range(num_callers * num_turns)]


def test_a_busy_session_is_waited_for_a_while(path):
    with Pool(path, wait_seconds=1.5, max_waiting=1) as pool:
        first = pool.lease()
        waiting = pool.ask(Session(name="s"))
        with pytest.raises(Conflict, match="busy") as caught:
            pool.ask(Session(name="s"))
        assert (caught.value.code, caught.value.retry_after) == ("session_busy", 1.0)
        with pytest.raises(Conflict, match="busy"):
            take(waiting)
        assert pool.lease(keep=False).initial() is None  # whoever only reads does not wait
        waiting = pool.ask(Session(name="s"))
        cancelled = f"r{pool.num_requests}"
        pool.pool.cancel(cancelled)
        waiting = pool.ask(Session(name="s"))
        first.release()
        second = take(waiting)
        assert second.version == 0
        pool.commit(second, snapshot(1))
        assert pool.lease().version == 1


def test_many_that_wait_in_vain(path):
    """They are refused in a row, and the one behind them has its turn."""
    with Pool(path, max_waiting=500) as pool:
        pool.turn("s", snapshot(1))
        first = pool.lease()
        waiting = [pool.ask(Session(name="s", expect_version=9)) for _ in range(400)]
        last = pool.ask(Session(name="s"))
        first.release()
        for answers in waiting:
            with pytest.raises(PreconditionFailed):
                take(answers)
        assert take(last).version == 1


def test_expected_versions(path):
    with Pool(path) as pool:
        pool.turn("s", snapshot(1), expect_version=0)
        with pytest.raises(PreconditionFailed, match="version 1"):
            pool.lease(expect_version=0)
        pool.turn("s", snapshot(2), expect_version=1)
        with pytest.raises(NotFound):
            pool.lease("none", must_exist=True)


def test_a_state_that_is_not_finite_is_never_kept(path):
    with Pool(path) as pool:
        pool.turn("s", snapshot(1))
        for value in (float("nan"), float("inf")):
            bad = snapshot(2)
            bad.wkv[1, 0, 63, 63] = value
            with pytest.raises(EngineFailed, match="not finite"):
                pool.turn("s", bad)
        assert same(pool.state("s"), snapshot(1))
        assert pool.lease().version == 1


@pytest.mark.parametrize("durability", ["turn", "shutdown"])
def test_a_turn_kept_as_another_session_writes_that_one_only(path, durability, monkeypatch):
    with Pool(path, durability=durability) as pool:
        pool.turn("a", snapshot(1))
        with monkeypatch.context() as patch:
            written = spied_writes(patch, pool.database)
            one, two = pool.lease("a", save_as="b", must_exist=True), pool.lease("a", save_as="c", must_exist=True)
            assert pool.order(Status()).total == 1, "nothing is there before the turn's end"
            assert all(same(lease.initial(), snapshot(1)) for lease in (one, two))
            two.release()
            assert pool.commit(one, snapshot(2)) == CommitResult("b", 1, None, 7, durability == "turn")
            assert written == (["b"] if durability == "turn" else [])
        assert same(pool.state("a"), snapshot(1))
        assert same(pool.state("b"), snapshot(2))
        assert pool.state("c") is None
        taken = pool.lease("a", save_as="b")
        with pytest.raises(Conflict) as caught:
            pool.commit(taken, snapshot(3))
        assert caught.value.code == "session_exists"
        with pytest.raises(NotFound):
            pool.lease("nothing", save_as="d", must_exist=True)
    with Pool(path) as pool:
        assert same(pool.state("b"), snapshot(2))
        assert pool.order(Status()).total == 2


def spied_writes(patch: pytest.MonkeyPatch, database: SessionDatabase) -> list[str]:
    """The names of the sessions that are written from now on."""
    names: list[str] = []
    write = database.write
    patch.setattr(database, "write", lambda turns: names.extend(turn.name for turn in turns) or write(turns))
    return names


def test_a_turn_kept_as_another_session_outlives_the_first_but_not_its_own(path):
    with Pool(path) as pool:
        pool.turn("a", snapshot(1))
        kept, deleted = pool.lease("a", save_as="b"), pool.lease("a", save_as="c")
        pool.order(Delete(name="c"))
        assert pool.order(Delete(name="a")).found
        assert (kept.revoked, deleted.revoked) == (False, True)
        assert pool.commit(kept, snapshot(2)).name == "b"
        with pytest.raises(Conflict):
            pool.commit(deleted, snapshot(3))
        assert [entry.name for entry in pool.order(Status()).sessions] == ["b"]


def test_nodes_of_a_dialogue(path):
    with Pool(path) as pool:
        with pytest.raises(NotFound, match=r"^State not found for dialogue_idx=4$"):
            pool.lease("d", node=4)
        kept = [pool.turn("d", snapshot(1), node=0), pool.turn("d", snapshot(2), node=1), pool.turn("d", snapshot(3), node=1)]
        assert [(k.name, k.node, k.version) for k in kept] == [("d:1", 1, 1), ("d:2", 2, 1), ("d:3", 3, 1)]
        assert same(pool.lease("d", node=1).initial(), snapshot(1))
        pool.turn("d:7", snapshot(4))
        assert pool.turn("d", snapshot(5), node=7).node == 8
        assert pool.order(Delete(name="d:8")).found
        assert pool.turn("d", snapshot(5), node=0).node == 9
    with Pool(path) as pool:
        assert pool.order(Delete(name="d:9")).found
        assert pool.turn("d", snapshot(5), node=0).node == 10
        deleted = pool.order(Delete(name="d", prefix=True))
        assert (deleted.found, deleted.count) == (False, 5)


def respond(pool: Pool, name: str, seed: int, **fields) -> CommitResult:
    """Keep the state of a response, of a new conversation or as what follows `name`."""
    return pool.turn(name, snapshot(seed), response=True, **fields)


@pytest.mark.parametrize("durability", ["turn", "relaxed", "shutdown"])
def test_responses_take_no_session_s_place_in_memory_and_in_lists(path, durability):
    with Pool(path, durability=durability, l1_sessions=2, l2_sessions=0, relaxed_seconds=0.05) as pool:
        pool.turn("a", snapshot(1))
        pool.turn("b", snapshot(2))
        for i in range(5):
            respond(pool, f"r{i}", 10 + i)
        wait_until_written(pool)
        page = pool.order(Status())
        assert [(entry.name, entry.tier) for entry in page.sessions] == [("a", "l1"), ("b", "l1")]
        assert (page.total, page.db) == (2, 0)
        page = pool.order(Status(responses=True))
        assert ({entry.name for entry in page.sessions}, page.total) == ({"a", "b", *(f"r{i}" for i in range(5))}, 7)
        assert [e.name for e in pool.order(Status(responses=True, offset=2, limit=2)).sessions] == ["r4", "r3"]
        assert pool.order(Status(limit=9)).sessions == pool.order(Status()).sessions
        assert [entry.name for entry in pool.order(Status(name="r1")).sessions] == ["r1"]
        respond(pool, "r1", 20, save_as="r5", must_exist=True)
        wait_until_written(pool)
        assert pool.order(Status(name="r1", responses=True)).sessions[0].tier == "l1", "one that was continued may be again"
        assert pool.order(Status(responses=True)).total == 8
        assert pool.order(Delete(name="r0")).found
    with Pool(path) as pool:
        assert (pool.order(Status()).total, pool.order(Status(responses=True)).total) == (2, 7)
        for name, seed in {"r1": 11, "r4": 14, "r5": 20, "a": 1}.items():
            assert same(pool.state(name), snapshot(seed))


def wait_until_written(pool: Pool) -> None:
    until = time.monotonic() + 60
    while pool.pool.durability != "shutdown" and pool.pool.stats()["state_dirty_sessions"]:
        assert time.monotonic() < until
        time.sleep(0.01)
    pool.order(Status())


def num_states(path: Path) -> int:
    """States that take room in the file."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return len({row[0] >> 20 for row in connection.execute("SELECT id FROM kept_pieces")})


def test_the_oldest_responses_go_when_there_are_too_many(path):
    with Pool(path, max_responses=3) as pool:
        pool.turn("s", snapshot(0))
        for i in range(20):
            respond(pool, f"r{i}", i)
            respond(pool, f"other{i}", i, namespace="other")
        assert pool.order(Status(responses=True)).total == 4
        for i in range(20):
            assert same(pool.state(f"r{i}"), snapshot(i) if i > 16 else None)
        with pytest.raises(NotFound):
            respond(pool, "r3", 9, save_as="more", must_exist=True)
        assert same(pool.state("s"), snapshot(0))
    assert num_states(path) <= 9, "the room of those that went is used again"


def test_old_responses_go_bytes_and_all(path, monkeypatch):
    monkeypatch.setattr("rwkv_batch.sessions.storage.IDLE_SECONDS", 0.02)
    with Pool(path, response_seconds=1000) as pool:
        pool.turn("s", snapshot(0))
        for i in range(3):
            respond(pool, f"r{i}", i)
        respond(pool, "r0", 5, save_as="r3", must_exist=True)
        assert same(pool.state("r0"), snapshot(0))
        now = pool.database.now
        monkeypatch.setattr(pool.database, "now", lambda: now() + 1001)
        for name in ("r0", "r1"):  # in memory and on disk
            with pytest.raises(NotFound):
                respond(pool, name, 9, save_as="more", must_exist=True)
        until = time.monotonic() + 60
        while num_states(path) > 1:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert pool.order(Status(responses=True)).total == 1
        assert same(pool.state("s"), snapshot(0))


def test_namespaces_do_not_see_one_another(path):
    with Pool(path) as pool:
        pool.turn("s", snapshot(1), namespace="a")
        assert pool.state("s", "b") is None
        assert pool.order(Status(namespace="b")).total == 0
        assert not pool.order(Delete(namespace="b", name="s")).found
        assert same(pool.state("s", "a"), snapshot(1))


def test_an_answer_is_given_again_for_its_key(path):
    with Pool(path) as pool:
        lease = pool.lease(key="k")
        with pytest.raises(Conflict) as caught:
            pool.ask(Session(name="s", key="k"))
        assert caught.value.code == "turn_running"
        pool.commit(lease, snapshot(1))
        again = pool.lease(key="k")
        assert (again.replay.text, again.replay.kept.version, again.replay.kept.replayed) == ("said", 1, True)
        again.release()
        with pytest.raises(Unprocessable):
            take(pool.ask(Session(name="s", key="k"), max_tokens=6))
        released = pool.lease(key="other")
        released.release()
        assert pool.lease(key="other").replay is None
    with Pool(path) as pool:
        assert pool.lease(key="k").replay.text == "said"


def test_a_key_of_an_older_server_is_known():
    """Digests are on disk: a field of a request that is added or renamed must not change them."""
    sampling = SamplingParams(temperature=0.5, seed=7)
    session = Session(name="s", key="k", expect_version=3)
    request = Request(
        id="r", prompts=[[1, 2, 3]], sampling=sampling, max_tokens=9, stop_ids=[261], stop_texts=[b"x"], session=session,
        namespace="n",
    )  # fmt: skip
    assert digest_of(request).hex() == "39439d3b7305f63b22930ed5c3ed4f4c"


@pytest.mark.parametrize("durability", ["turn", "shutdown"])
def test_delete_wins_over_a_turn(path, durability):
    with Pool(path, durability=durability) as pool:
        pool.turn("s", snapshot(1))
        lease = pool.lease()
        assert pool.order(Delete(name="s")).found
        assert lease.revoked
        with pytest.raises(Conflict) as caught:
            pool.commit(lease, snapshot(2))
        assert caught.value.code == "session_deleted"
        assert pool.state("s") is None
        assert not pool.order(Delete(name="s")).found
        assert pool.turn("s", snapshot(3)).version == 1
    with Pool(path) as pool:
        assert same(pool.state("s"), snapshot(3))


@pytest.mark.parametrize("durability", ["turn", "shutdown"])
def test_fork_and_rewind(path, durability):
    with Pool(path, durability=durability, versions=3) as pool:
        for seed in (1, 2):
            pool.turn("s", snapshot(seed))
            pool.order(Export(name="s", path=str(path) + ".out"))  # brings it to disk
        copies = [f"c{i}" for i in range(320)]
        page = pool.order(Fork(name="s", copies=copies))
        assert [entry.name for entry in page.sessions] == copies
        assert {entry.version for entry in page.sessions} == {1}
        assert same(pool.state("c319"), snapshot(2))
        pool.turn("c0", snapshot(9))
        assert same(pool.state("s"), snapshot(2))
        for names in (["s"], ["c1", "new"], ["new", "new"], []):
            with pytest.raises((Conflict, InvalidRequest)):
                pool.order(Fork(name="s", copies=names))
        with pytest.raises(NotFound):
            pool.order(Fork(name="none", copies=["new"]))
        assert pool.order(Rewind(name="s")).sessions[0].version == 3
        assert same(pool.state("s"), snapshot(1))
        assert pool.order(Status(name="s")).sessions[0].versions == [3, 2, 1]
        with pytest.raises(PreconditionFailed):
            pool.order(Rewind(name="s", expect_version=2))
        with pytest.raises(NotFound):
            pool.order(Rewind(name="s", version=9))
        assert pool.order(Rewind(name="s", version=2)).sessions[0].version == 4
        assert same(pool.state("s"), snapshot(2))
        lease = pool.lease()
        with pytest.raises(Conflict):
            pool.order(Rewind(name="s", version=3))
        lease.release()
        pool.order(Delete(name="s"))
        assert same(pool.state("c1"), snapshot(2))  # the bytes are those of all copies


@pytest.mark.parametrize("durability", ["turn", "shutdown"])
def test_each_rewind_goes_one_turn_further_back(path, durability):
    with Pool(path, durability=durability, versions=9) as pool:
        for seed in (1, 2, 3):
            pool.turn("s", snapshot(seed))
            pool.order(Export(name="s", path=str(path) + ".out"))  # brings it to disk
        for seed in (2, 1):
            pool.order(Rewind(name="s"))
            assert same(pool.state("s"), snapshot(seed))
        with pytest.raises(NotFound, match="no earlier version"):
            pool.order(Rewind(name="s"))
        pool.turn("s", snapshot(4))  # the history is 1, 4 now
        pool.order(Rewind(name="s"))
        assert same(pool.state("s"), snapshot(1))
        with pytest.raises(NotFound, match="no earlier version"):
            pool.order(Rewind(name="s"))
        pool.order(Rewind(name="s", version=3))
        pool.order(Rewind(name="s"))
        assert same(pool.state("s"), snapshot(2))


def test_with_two_versions_a_second_rewind_is_refused_and_does_not_redo(path):
    with Pool(path) as pool:
        for seed in (1, 2, 3):
            pool.turn("s", snapshot(seed))
        pool.order(Rewind(name="s"))
        with pytest.raises(NotFound, match="no earlier version"):
            pool.order(Rewind(name="s"))
        assert same(pool.state("s"), snapshot(2))


def test_export_and_import(path, tmp_path):
    out = tmp_path / "state"
    with Pool(path) as pool:
        pool.turn("s", snapshot(1, tokens=77))
        assert pool.order(Export(name="s", path=str(out))).sessions[0].tokens == 77
        with pytest.raises(Conflict):
            pool.order(Import(name="s", path=str(out)))
        pool.turn("s", snapshot(2))
        assert pool.order(Import(name="s", path=str(out), overwrite=True)).sessions[0].version == 3
        assert same(pool.state("s"), snapshot(1, tokens=77))
        pool.order(Import(name="t", path=str(out)))
        assert same(pool.state("t"), snapshot(1, tokens=77))
        out.write_bytes(out.read_bytes()[:-1])
        with pytest.raises(Unprocessable, match="incomplete"):
            pool.order(Import(name="u", path=str(out)))
        bad = snapshot(3)
        bad.shift[0] = float("inf")
        out.write_bytes(b"".join(bytes(piece) for piece in FILE.encode(Stored(bad, 0))))
        with pytest.raises(Unprocessable, match="finite"):
            pool.order(Import(name="u", path=str(out)))
        with pytest.raises(NotFound):
            pool.order(Export(name="none", path=str(out)))
        with pytest.raises(StorageFailed, match="No space left"):
            pool.order(Export(name="s", path="/dev/full"))


def test_status_in_pages(path):
    with Pool(path, l1_sessions=2, l2_sessions=2) as pool:
        for i in range(9):
            pool.turn(f"s{i}", snapshot(i))
        whole = [entry.name for entry in pool.order(Status()).sessions]
        assert whole == ["s7", "s8", "s5", "s6", "s4", "s3", "s2", "s1", "s0"]
        pages = [pool.order(Status(offset=start, limit=2)) for start in range(0, 10, 2)]
        assert [entry.name for page in pages for entry in page.sessions] == whole
        assert {(page.total, page.l1, page.l2, page.db) for page in pages} == {(9, 2, 2, 5)}
        assert pool.order(Status(name="none")).sessions == []


def test_a_long_list_has_every_session_once_while_others_change(path, monkeypatch):
    """It is made in pieces with turns in between. Names may hold any character, also one that ends a string in C."""
    monkeypatch.setattr("rwkv_batch.sessions.commands.LIST_SESSIONS", 3)
    with Pool(path, l1_sessions=1, l2_sessions=1) as pool:
        names = ["a\0b", "a", "\0", "b", *(f"s{i}" for i in range(8)), "a\0c"]
        for i, name in enumerate(names):
            pool.turn(name, snapshot(i))
        whole = pool.order(Status())
        assert [entry.name for entry in whole.sessions] == names[::-1]
        assert (whole.total, whole.db) == (len(names), len(names) - 2)
        pages = [pool.order(Status(offset=start, limit=2)) for start in range(0, len(names), 2)]
        assert [entry.name for page in pages for entry in page.sessions] == [entry.name for entry in whole.sessions]
        assert pool.order(Status(offset=2, limit=100)).sessions == whole.sessions[2:]

        listing = pool.pool.commands.pieces_of_list(Status())
        assert next(listing) is None
        pool.turn("a", snapshot(50))
        pool.turn("b", snapshot(51))
        pool.order(Delete(name="s6"))
        *_, page = listing
        assert sorted(entry.name for entry in page.sessions) == sorted({*names} - {"s6"})


# What goes wrong.


@pytest.mark.parametrize("l2_sessions", [0, 9])
def test_a_state_that_does_not_fit_on_the_device_is_refused_and_keeps_nobody_waiting(path, monkeypatch, l2_sessions):
    with Pool(path, l1_sessions=1, l2_sessions=l2_sessions) as pool:
        pool.turn("s", snapshot(1))
        pool.turn("other", snapshot(2))
        with monkeypatch.context() as patch:
            patch.setattr(pool.pool.shared.copies, "to_device", lambda _: 1 / 0)
            for _ in range(2):
                with pytest.raises(Unavailable, match="could not be brought"):
                    pool.lease("s")
        assert pool.turn("s", snapshot(3)).version == 2


def test_a_session_wanted_again_before_it_is_on_the_device_is_still_waited_for(path):
    with Pool(path) as p:
        for seed, name in enumerate("ab"):
            p.turn(name, snapshot(seed))
    with Pool(path, l1_sessions=1) as p:
        p.pool.shared.copies = device = SlowDevice()
        for name in "aba":  # the second moves the first down, but not off the device yet
            lease = p.lease(name, keep=False)
            lease.initial()
            lease.release()
    assert device.waited == ["copy 0", "copy 1", "copy 0"]


class FakeDevice(Copies):
    """A device in host memory; `on_host` are the copies that were made from it."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.on_gpu = True
        self.on_host: set[Snapshot] = set()

    def mark(self) -> None:
        return None

    def to_device(self, snapshot: Snapshot):
        copy = Snapshot(snapshot.shift.clone(), snapshot.wkv.clone(), snapshot.elapsed)
        return (copy, None) if snapshot in self.on_host else (snapshot, None)

    def to_host(self, snapshot: Snapshot, event):
        if snapshot not in self.on_host:
            snapshot = Snapshot(snapshot.shift.clone(), snapshot.wkv.clone(), snapshot.elapsed)
            self.on_host.add(snapshot)
        return snapshot


def test_a_session_that_leaves_the_device_is_on_the_host_and_comes_back(path):
    with Pool(path, l1_sessions=1, l2_sessions=2) as p:
        p.pool.shared.copies = device = FakeDevice()
        for seed, name in enumerate("abc"):
            p.turn(name, snapshot(seed))
        for names in (("c", "a", "b"), ("a", "b", "c")):
            p.order(Status())  # what was to be moved is moved before it
            with p.pool.shared.lock:
                found = {resident.key[1]: resident.snapshot in device.on_host for resident in p.pool.shared.tiers}
            assert list(found.items()) == [(names[0], False), (names[1], True), (names[2], True)]
            assert same(p.state("a"), snapshot(0))


def fail_writes(patch: pytest.MonkeyPatch, pool: Pool) -> None:
    patch.setattr(pool.database, "write", lambda _: (_ for _ in ()).throw(StorageFailed("the disk is full")))


def test_relaxed_turns_are_not_acknowledged_while_the_disk_refuses_earlier_ones(path, monkeypatch):
    monkeypatch.setattr("rwkv_batch.sessions.disk.RETRY_SECONDS", 0.02)
    with Pool(path, durability="relaxed", relaxed_seconds=0.02) as pool:
        pool.turn("s", snapshot(1))
        running = pool.lease("t")
        with monkeypatch.context() as patch:
            fail_writes(patch, pool)
            pool.turn("s", snapshot(2))
            until = time.monotonic() + 60
            while not pool.pool.stats()["state_commit_failures_total"]:
                assert time.monotonic() < until
                time.sleep(0.01)
            with pytest.raises(StorageFailed, match="full"):
                pool.lease("u")
            with pytest.raises(StorageFailed, match="full"):
                pool.commit(running, snapshot(3))
            assert same(pool.state("s"), snapshot(2)), "reading goes on"
        wait_until_written(pool)
        assert pool.turn("u", snapshot(4)).version == 1
    with Pool(path) as pool:
        assert same(pool.state("s"), snapshot(2))


def test_relaxed_turns_go_on_when_what_the_disk_refused_was_deleted(path, monkeypatch):
    monkeypatch.setattr("rwkv_batch.sessions.disk.RETRY_SECONDS", 60)
    with Pool(path, durability="relaxed", relaxed_seconds=0.02) as pool:
        with monkeypatch.context() as patch:
            fail_writes(patch, pool)
            pool.turn("s", snapshot(1))
            until = time.monotonic() + 60
            while not pool.pool.stats()["state_commit_failures_total"]:
                assert time.monotonic() < until
                time.sleep(0.01)
        with pytest.raises(StorageFailed):
            pool.lease("t")
        assert pool.order(Delete(name="s")).found
        assert pool.turn("t", snapshot(2)).version == 1


@pytest.mark.parametrize("durability", ["relaxed", "shutdown"])
def test_what_the_end_could_not_write_is_told(path, durability, monkeypatch, caplog):
    pool = Pool(path, durability=durability, relaxed_seconds=60)
    pool.turn("kept", snapshot(1))
    pool.order(Export(name="kept", path=f"{path}.out"))  # brings it to disk
    for i in range(3):
        pool.turn(f"s{i}", snapshot(i))
    with monkeypatch.context() as patch:
        fail_writes(patch, pool)
        assert pool.pool.close() == 3
    assert "3 sessions" in caplog.text
    with Pool(path) as pool:
        assert same(pool.state("kept"), snapshot(1))
        pool.turn("s", snapshot(2))
    assert pool.pool.close() == 0


def test_two_turns_that_would_make_the_same_session_in_one_commit(path, monkeypatch):
    with Pool(path) as pool:
        pool.turn("a", snapshot(1))
        leases = [pool.lease("a", save_as="b") for _ in range(3)]
        go = threading.Event()
        write = pool.database.write
        monkeypatch.setattr(pool.database, "write", lambda turns: (go.wait(60), write(turns)))
        blocking = pool.commit_later(pool.lease("c"), snapshot(2))
        answers = [pool.commit_later(lease, snapshot(3)) for lease in leases]
        go.set()
        take(blocking)
        results = [answer.get(timeout=60) for answer in answers]
        assert [getattr(result, "code", "kept") for result in results] == ["kept", "session_exists", "session_exists"]


def test_a_change_of_the_clock_runs_no_turn_twice(path, monkeypatch):
    with Pool(path) as pool:
        pool.turn("s", snapshot(1), key="k")
        wall = time.time
        for days in (400, -400):
            monkeypatch.setattr(time, "time", lambda days=days: wall() + days * 86400)
            for _ in range(2):
                lease = pool.lease(key="k")
                assert lease.replay is not None
                lease.release()
                with pool.pool.leases.lock:
                    pool.pool.leases.replays.clear()  # as if others had come since


def test_an_answer_that_gets_too_old_while_it_is_read_is_given_all_the_same(path, monkeypatch):
    with Pool(path) as pool:
        pool.turn("s", snapshot(1), key="k")
        with pool.pool.leases.lock:
            pool.pool.leases.replays.clear()
        replay, now = pool.database.replay, pool.database.now

        def found(*key: str):
            answer = replay(*key)
            monkeypatch.setattr(pool.database, "now", lambda: now() + 1e6)
            return answer

        monkeypatch.setattr(pool.database, "replay", found)
        assert pool.lease(key="k").replay is not None


def test_a_session_that_could_not_be_deleted_is_as_it_was(path, monkeypatch):
    with Pool(path, durability="shutdown") as pool:
        pool.turn("s", snapshot(1), key="k")
        lease = pool.lease()
        with monkeypatch.context() as patch:
            patch.setattr(pool.database, "delete", lambda *_, **__: (_ for _ in ()).throw(StorageFailed("the disk is full")))
            with pytest.raises(StorageFailed):
                pool.order(Delete(name="s"))
        assert not lease.revoked
        assert pool.commit(lease, snapshot(2)).version == 2
        assert same(pool.state("s"), snapshot(2))
        assert pool.lease(key="k").replay is not None


def test_nothing_of_a_deleted_session_is_left_in_its_files(path, monkeypatch):
    monkeypatch.setattr("rwkv_batch.sessions.storage.IDLE_SECONDS", 0.02)
    with Pool(path) as pool:
        for seed in range(5):
            pool.turn("the name", snapshot(seed), key="the key")
            pool.turn("other", snapshot(10 + seed))

        def left() -> list[bool]:
            data = b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))
            states = (snapshot(seed).wkv.numpy().tobytes() for seed in range(5))
            return [text in data for text in (b"the name", b"the key", *(state[5000:5064] for state in states))]

        assert left().count(True) >= 4
        assert pool.order(Delete(name="the name")).found
        until = time.monotonic() + 60
        while any(left()):
            assert time.monotonic() < until
            time.sleep(0.02)
        assert same(pool.state("other"), snapshot(14))


def test_nothing_of_a_deleted_dialogue_is_answered_again(path):
    with Pool(path) as pool:
        pool.turn("d:x", snapshot(1), key="k")
        pool.turn("dx", snapshot(1), key="k")
    with Pool(path) as pool:
        assert pool.order(Delete(name="d", prefix=True)).count == 1
        assert pool.lease("d:x", key="k").replay is None
        assert pool.lease("dx", key="k").replay is not None


@pytest.mark.parametrize("durability", ["turn", "shutdown"])
def test_a_new_node_does_not_take_the_name_of_a_session_in_its_first_turn(path, durability):
    with Pool(path, durability=durability) as pool:
        node = pool.lease("d", node=0)
        plain = pool.lease("d:1")
        assert pool.commit(node, snapshot(1)).node == 2
        assert pool.commit(plain, snapshot(2)).version == 1
    with Pool(path) as pool:
        assert same(pool.state("d:2"), snapshot(1))
        assert same(pool.state("d:1"), snapshot(2))


def test_states_that_leave_memory_count_as_waiting_for_the_disk(path, monkeypatch):
    monkeypatch.setattr("rwkv_batch.sessions.leases.BACKLOG_BYTES", 3 * snapshot(0).num_bytes)
    monkeypatch.setattr("rwkv_batch.sessions.disk.RETRY_SECONDS", 0.05)
    with Pool(path, durability="shutdown", l1_sessions=1, l2_sessions=0) as pool, monkeypatch.context() as patch:
        patch.setattr(pool.database, "write", lambda _: (_ for _ in ()).throw(StorageFailed("the disk is full")))
        for i in range(4):
            pool.turn(f"s{i}", snapshot(i))
        with pytest.raises(Unavailable, match="wait for the disk"):
            pool.turn("s4", snapshot(4))
        assert same(pool.state("s0"), snapshot(0))
    with Pool(path) as pool:
        read_all(pool, 4)


def turns_until_failure(pool: Pool, limit: int) -> int:
    for i in range(limit):
        try:
            pool.turn(f"t{i}", snapshot(i))
        except StorageFailed:
            return i
    return limit


def read_all(pool: Pool, count: int, letter: str = "s") -> None:
    for i in range(count):
        assert same(pool.state(f"{letter}{i}"), snapshot(i))


@pytest.mark.parametrize("durability", ["turn", "relaxed"])
def test_a_full_disk_fails_the_turn_and_loses_nothing(path, durability):
    """SQLite is told to stop at a number of pages: it answers as on a full disk."""
    with Pool(path) as pool:
        pool.turn("s", snapshot(1))
    with Pool(path, durability=durability, max_pages=30, relaxed_seconds=0.02, l1_sessions=100) as pool:
        kept, failed = {}, 0
        for i in range(20):
            try:
                kept[f"t{i}"] = pool.turn(f"t{i}", snapshot(100 + i))
            except StorageFailed as error:
                failed += "full" in error.message
        if durability == "turn":
            assert failed
            assert kept
        for i in range(20):
            assert same(pool.state(f"t{i}"), snapshot(100 + i) if f"t{i}" in kept else None)
        assert same(pool.state("s"), snapshot(1))
        pool.order(Delete(name="t0"))
        pool.order(Delete(name="t1"))  # makes room
        if durability == "turn":
            pool.turn("s", snapshot(2))
    with Pool(path) as pool:
        assert same(pool.state("s"), snapshot(2 if durability == "turn" else 1))


@pytest.fixture
def mount(tmp_path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_sessions_can_be_deleted_when_the_disk_is_full(mount):
    with Pool(mount / "sessions.db") as pool:
        kept = turns_until_failure(pool, 200)
        with open(mount / "of others", "wb", buffering=0) as other, contextlib.suppress(OSError):
            while True:
                other.write(bytes(4096))
        for i in range(kept):
            assert pool.order(Delete(name=f"t{i}")).found
        assert pool.order(Status()).total == 0
        (mount / "of others").unlink()
        assert turns_until_failure(pool, 5) == 5
    with Pool(mount / "sessions.db") as pool:
        read_all(pool, 5, "t")
        assert pool.order(Status()).total == 5


@pytest.mark.long
def test_a_full_and_then_a_read_only_file_system(mount):
    """Real ones, where a small file system may be mounted."""
    with Pool(mount / "sessions.db") as pool:
        kept = turns_until_failure(pool, 2000)
        assert 5 < kept < 2000
        read_all(pool, kept, "t")
    subprocess.run(["mount", "-o", "remount,size=64m", str(mount)], check=True)
    with Pool(mount / "sessions.db") as pool:
        read_all(pool, kept, "t")
        assert pool.turn("t0", snapshot(1)).version == 2
    subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
    with Pool(mount / "sessions.db") as pool:
        assert same(pool.state("t0"), snapshot(1))
        with pytest.raises(StorageFailed, match="readonly"):
            pool.turn("t0", snapshot(2))
        assert same(pool.state("t0"), snapshot(1))


def test_a_read_only_file_can_still_be_read(path, monkeypatch):
    with Pool(path) as pool:
        pool.turn("s", snapshot(1))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with Pool(path) as pool:
        assert same(pool.state("s"), snapshot(1))
        with pytest.raises(StorageFailed, match="readonly"):
            pool.turn("s", snapshot(2))
        with pytest.raises(StorageFailed, match="readonly"):
            pool.order(Delete(name="s"))
        assert same(pool.state("s"), snapshot(1))


def test_a_damaged_state_spoils_only_its_session(path):
    with Pool(path) as pool:
        for i in range(3):
            pool.turn(f"s{i}", snapshot(i))
    with sqlite3.connect(path) as connection:
        id, data = connection.execute("SELECT id, data FROM kept_pieces WHERE length(data) > 10000 LIMIT 1").fetchone()
        connection.execute("UPDATE kept_pieces SET data = ? WHERE id = ?", (data[:5000] + b"?" + data[5001:], id))
    connection.close()
    with Pool(path) as pool:
        with pytest.raises(Unprocessable, match="checksum"):
            pool.lease("s0")
        with pytest.raises(Unprocessable, match="checksum"):
            pool.order(Export(name="s0", path=f"{path}.out"))
        assert same(pool.state("s1"), snapshot(1))
        assert pool.order(Delete(name="s0")).found
        assert pool.turn("s0", snapshot(5)).version == 1


def test_sessions_of_another_model_are_refused(path):
    with Pool(path) as pool:
        pool.turn("s", snapshot(1))
    with Pool(path, fingerprint="another") as pool:
        with pytest.raises(Unprocessable, match="another model"):
            pool.lease("s")
        pool.turn("t", snapshot(2))
    with Pool(path) as pool:
        assert same(pool.state("s"), snapshot(1))


def test_a_second_server_is_told_who_has_the_file(path):
    read_end, write_end = os.pipe()
    first = os.fork()
    if first == 0:
        try:
            with Pool(path) as pool:
                pool.turn("s", snapshot(1))
                os.write(write_end, b"ready")
                time.sleep(60)
        finally:
            os._exit(1)
    try:
        assert os.read(read_end, 5) == b"ready"
        with Pool(path) as pool:
            with pytest.raises(Unavailable, match=f"process {first}") as caught:
                pool.lease("s")
            assert caught.value.code == "state_db_locked"
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
            assert same(pool.state("s"), snapshot(1))  # killed without a warning: what it had acknowledged is there
    finally:
        os.close(read_end)
        os.close(write_end)


def test_relaxed_turns_are_on_disk_soon_and_the_last_of_several_wins(path):
    with Pool(path, durability="relaxed", relaxed_seconds=1.5) as pool:
        for i in range(5):
            assert not pool.turn("s", snapshot(i)).durable
        assert pool.pool.stats()["state_dirty_sessions"] == 1
        until = time.monotonic() + 60
        while pool.pool.stats()["state_dirty_sessions"]:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert pool.order(Status(name="s")).sessions[0].versions == [5]
        assert path.stat().st_mode & 0o077 == 0


def test_a_file_that_is_none_and_one_that_is_cut_and_one_that_is_too_new(path, tmp_path):
    path.write_bytes(b"no database" * 1000)
    with Pool(path) as pool:
        with pytest.raises(StorageFailed, match=r"not a database.*move it away"):
            pool.lease("s")
        with pytest.raises(StorageFailed):
            pool.order(Status())
    assert path.read_bytes() == b"no database" * 1000
    cut = tmp_path / "cut.db"
    with Pool(cut) as pool:
        for i in range(50):
            pool.turn(f"s{i}", snapshot(i))
    os.truncate(cut, cut.stat().st_size // 2)
    with Pool(cut) as pool, pytest.raises((StorageFailed, Unprocessable), match=r"malformed|I/O|incomplete"):
        read_all(pool, 50)
    new = tmp_path / "new.db"
    with Pool(new) as pool:
        pool.turn("s", snapshot(1))
    with sqlite3.connect(new) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with Pool(new) as pool, pytest.raises(StorageFailed, match="newer version"):
        pool.lease("s")


def test_a_file_of_the_reference(path):
    """Contract 9, line 25: torch's format, states with a batch dimension and without."""
    states = {"plain": snapshot(1), "batched": snapshot(2)}
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE sessions (session_id TEXT PRIMARY KEY, state_blob BLOB, last_updated TIMESTAMP)")
        for name, s in states.items():
            tensors = [s.shift, s.wkv, torch.tensor(s.elapsed, dtype=torch.int32)]
            if name == "batched":
                tensors = [s.shift[:, :, None], s.wkv[:, None], tensors[2][None]]
            torch.save(tensors, path.with_suffix(".pt"))
            row = (name, path.with_suffix(".pt").read_bytes(), time.time())
            connection.execute("INSERT INTO sessions VALUES (?, ?, ?)", row)
        connection.execute("INSERT INTO sessions VALUES ('broken', x'00', 0)")
    connection.close()
    with Pool(path) as pool:
        for name, state in states.items():
            assert same(pool.state(name), state)
        assert pool.turn("plain", snapshot(3)).version == 2
        with pytest.raises(Unprocessable):
            pool.lease("broken")
    with Pool(path) as pool:
        assert same(pool.state("plain"), snapshot(3))
        assert same(pool.state("batched"), states["batched"])
        for name in states:
            assert pool.order(Delete(name=name)) == Deleted(True, 1)
            assert pool.state(name) is None, "what was deleted does not come back from their table"


def write_reference_file(path: Path, states: dict[str, Snapshot | bytes]) -> None:
    """What rwkv_lightning leaves."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE sessions (session_id TEXT PRIMARY KEY, state_blob BLOB, last_updated TIMESTAMP)")
        for number, (name, state) in enumerate(states.items()):
            if isinstance(state, Snapshot):
                blob = io.BytesIO()
                torch.save([state.shift, state.wkv, torch.tensor(state.elapsed, dtype=torch.int32)], blob)
                state = blob.getvalue()
            connection.execute("INSERT INTO sessions VALUES (?, ?, ?)", (name, state, 1.7e9 + number))


@pytest.mark.parametrize("used", ["not used", "read", "continued"])
def test_every_order_sees_the_sessions_of_the_reference(path, used, tmp_path):
    names = ["a", "b", "c", "d:1", "d:5", "d"]
    write_reference_file(path, {name: snapshot(seed, tokens=9) for seed, name in enumerate(names)})
    first, out, other = 1, tmp_path / "out", tmp_path / "other"
    with Pool(path) as pool:
        pool.turn("ours", snapshot(50))
        pool.order(Export(name="ours", path=str(other)))
        for name in names[:3]:
            if used == "read":
                assert pool.state(name) is not None
            elif used == "continued":
                assert pool.turn(name, snapshot(60, tokens=9)).version == 2
                first = 2
        page = pool.order(Status())
        assert page.total == len(page.sessions) == 7
        assert {entry.name: entry.version for entry in page.sessions} == {
            "ours": 1, **dict.fromkeys(names[:3], first), **dict.fromkeys(names[3:], 1)
        }  # fmt: skip
        assert [e.name for e in page.sessions if e.tier == "db"][:3] == ["d", "d:5", "d:1"]
        pages = [pool.order(Status(offset=start, limit=2)) for start in range(0, 8, 2)]
        assert [entry for page in pages for entry in page.sessions] == page.sessions
        assert pool.order(Status(name="a")).sessions[0].versions == [2, 1][2 - first :]
        now = {name: snapshot(seed if first == 1 else 60, tokens=9) for seed, name in enumerate(names[:3])}

        pool.order(Fork(name="a", copies=["a2"]))
        assert same(pool.state("a2"), now["a"])
        for order in (Fork(name="ours", copies=["b"]), Import(name="b", path=str(other))):
            with pytest.raises(Conflict):
                pool.order(order)
        pool.order(Export(name="b", path=str(out)))
        assert pool.order(Import(name="back", path=str(out))).sessions[0].tokens == 9
        assert same(pool.state("back"), now["b"])
        assert pool.order(Import(name="b", path=str(other), overwrite=True)).sessions[0].version == first + 1
        assert same(pool.state("b"), snapshot(50))
        pool.order(Rewind(name="b"))
        assert same(pool.state("b"), now["b"])
        if used == "continued":
            pool.order(Rewind(name="a"))
            assert same(pool.state("a"), snapshot(0, tokens=9))
        else:
            with pytest.raises(NotFound, match="no earlier"):
                pool.order(Rewind(name="a"))
        assert pool.order(Delete(name="c")) == Deleted(True, 1)
        assert pool.state("c") is None
        assert pool.turn("d", snapshot(70), node=0).node == 6, "numbers go on after the highest of theirs"
        assert same(pool.lease("d", node=5).initial(), snapshot(4, tokens=9))
        assert pool.order(Status()).total == 9
    with Pool(path) as pool:
        assert pool.order(Status()).total == 9
        assert pool.order(Delete(name="d", prefix=True)) == Deleted(True, 4)
        assert {entry.name for entry in pool.order(Status()).sessions} == {"ours", "a", "a2", "b", "back"}


@pytest.mark.parametrize("blob", [b"junk", b"", b"\x80\x02.", b"PK\x03\x04" + bytes(100), "text", 5, None])
def test_junk_in_a_file_of_the_reference_is_refused_by_name(path, blob):
    write_reference_file(path, {"good": snapshot(1), "junk": blob})
    with Pool(path) as pool:
        assert pool.order(Status()).total == 2
        for attempt in (
            lambda: pool.lease("junk"),
            lambda: pool.lease("junk", keep=False),
            lambda: pool.order(Export(name="junk", path=f"{path}.out")),
            lambda: pool.order(Fork(name="junk", copies=["x"])),
        ):
            with pytest.raises(Unprocessable) as caught:
                attempt()
            assert caught.value.code == "state_unusable"
        assert same(pool.state("good"), snapshot(1))
        assert pool.order(Delete(name="junk")).found
        assert pool.turn("junk", snapshot(2)).version == 1


def test_nothing_is_acknowledged_before_its_commit(path, monkeypatch):
    with Pool(path) as pool:
        go = threading.Event()
        write = pool.database.write
        monkeypatch.setattr(pool.database, "write", lambda turns: (go.wait(60), write(turns)))
        done = pool.commit_later(pool.lease("s"), snapshot(1))
        with pytest.raises(queue.Empty):
            done.get(timeout=0.05)
        go.set()
        assert take(done).durable


def test_random_histories_against_a_dictionary(path):
    """Turns, deletes, forks, rewinds and restarts in random order: every session is what a dictionary says."""
    check_random_history(path, seed=0, num_steps=70)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_random_histories(path, seed):
    check_random_history(path, seed=seed, num_steps=1000)


@pytest.mark.parametrize("seed", range(3))
def test_random_histories_over_a_store_that_is_no_database(path, seed):
    check_random_history(path, seed=seed, num_steps=150, store=MemoryStore(versions=3))
    assert not path.exists()


def test_all_stores_have_what_the_pool_asks_for():
    asked = {name: inspect.signature(method) for name, method in vars(SessionStore).items() if not name.startswith("_")}
    assert len(asked) > 15
    for store in (SessionDatabase, MemoryStore, RemoteStore):
        for name, signature in asked.items():
            assert list(inspect.signature(getattr(store, name)).parameters) == list(signature.parameters)


def check_random_history(path: Path, *, seed: int, num_steps: int, store: SessionStore | None = None) -> None:
    rng = random.Random(seed)
    names = [f"s{i}" for i in range(6)] + ["s0:1", "s0:2"]
    expected: dict[str, list[tuple[int, Snapshot]]] = {}  # kept versions, the oldest first

    def open_pool() -> Pool:
        levels = {"l1_sessions": rng.randrange(1, 4), "l2_sessions": rng.randrange(3)}
        return Pool(path, durability="turn", versions=3, store=store, **levels)

    pool = open_pool()
    for step in range(num_steps):
        name = rng.choice(names)
        versions = expected.get(name, [])
        last = versions[-1][0] if versions else 0
        action = rng.random()
        if action < 0.5:
            state = snapshot(seed * 10_000 + step, tokens=step)
            lease = pool.lease(name)
            assert (lease.version, same(lease.initial(), versions[-1][1] if versions else None)) == (last, True)
            if rng.random() < 0.2:
                lease.release()
            else:
                assert pool.commit(lease, state).version == last + 1
                expected[name] = [*versions, (last + 1, state)][-3:]
        elif action < 0.65:
            prefix = rng.random() < 0.2
            gone = [n for n in expected if n == name or (prefix and n.startswith(f"{name}:"))]
            deleted = pool.order(Delete(name=name, prefix=prefix))
            assert (deleted.found, deleted.count) == (name in expected, len(gone))
            for n in gone:
                del expected[n]
        elif action < 0.75 and versions:
            copies = [n for n in names if n not in expected][:2]
            if copies:
                pool.order(Fork(name=name, copies=copies))
                expected |= {n: [(1, versions[-1][1])] for n in copies}
        elif action < 0.85 and len(versions) > 1:
            version, state = rng.choice(versions)
            assert pool.order(Rewind(name=name, version=version)).sessions[0].version == last + 1
            expected[name] = [*versions, (last + 1, state)][-3:]
        elif action < 0.9:
            pool.pool.close()
            pool = open_pool()
        else:
            page = pool.order(Status())
            assert {e.name: e.version for e in page.sessions} == {n: v[-1][0] for n, v in expected.items()}
            assert page.total == len(expected) == len(page.sessions)
    for name in names:
        assert same(pool.state(name), expected[name][-1][1] if name in expected else None)
    pool.pool.close()
    if store is None:
        check_nothing_is_left_over(path)


def check_nothing_is_left_over(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        states = {row[0] >> 20 for row in connection.execute("SELECT id FROM kept_pieces")}
        used = {row[0] for row in connection.execute("SELECT state FROM kept_versions")}
        spare = {row[0] for row in connection.execute("SELECT state FROM kept_spare")}
        assert not used & spare
        assert states == used | spare
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


@pytest.mark.parametrize("durability", ["turn", "relaxed", "shutdown"])
def test_threads_in_each_others_way(path, durability):
    """Each thread has sessions of its own; they push one another out of memory. Nobody loses or sees a strange state."""
    check_threads(path, durability, num_threads=4, num_steps=25)


@pytest.mark.long
@pytest.mark.parametrize("durability", ["turn", "relaxed", "shutdown"])
def test_many_threads_in_each_others_way(path, durability):
    check_threads(path, durability, num_threads=16, num_steps=400)


def check_threads(path: Path, durability: str, *, num_threads: int, num_steps: int) -> None:
    expected: dict[str, Snapshot] = {}
    errors: list[BaseException] = []
    options = {"l1_sessions": 3, "l2_sessions": 2, "relaxed_seconds": 0.02}

    def live(number: int) -> None:
        rng = random.Random(f"{durability}{number}")
        mine = Caller(pool)
        try:
            for step in range(num_steps):
                name = f"t{number}-{rng.randrange(3)}"
                action = rng.random()
                if action < 0.7:
                    lease = mine.lease(name)
                    assert same(lease.initial(), expected.get(name))
                    if rng.random() < 0.2:
                        lease.release()
                    else:
                        state = snapshot(number * 10_000 + step, tokens=step)
                        mine.commit(lease, state)
                        expected[name] = state
                elif action < 0.85:
                    assert mine.order(Delete(name=name)).found == (name in expected)
                    expected.pop(name, None)
                elif action < 0.95 and name in expected:
                    copy = f"t{number}-copy{step}"
                    mine.order(Fork(name=name, copies=[copy]))
                    expected[copy] = expected[name]
                else:
                    assert name not in expected or mine.order(Status(name=name)).sessions[0].tokens == expected[name].elapsed
        except BaseException as error:
            errors.append(error)

    with Pool(path, durability=durability, **options) as pool:
        threads = [threading.Thread(target=live, args=(number,)) for number in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert pool.order(Status()).total == len(expected)
    with Pool(path) as pool:
        for name, state in expected.items():
            assert same(pool.state(name), state)


SESSIONS = 32


def serve_until_killed(path: Path, report: int) -> None:
    """The life of a server: 32 sessions, turn after turn; each is reported when it was acknowledged."""

    everyone = threading.Barrier(SESSIONS)

    def client(number: int) -> None:
        mine = Caller(pool)
        everyone.wait()
        while True:
            lease = mine.lease(f"s{number}")
            kept = mine.commit(lease, snapshot(number, tokens=lease.version + 1))
            os.write(report, b"%d %d\n" % (number, kept.version))

    with Pool(path) as pool:
        for number in range(SESSIONS):
            threading.Thread(target=client, args=(number,), daemon=True).start()
        time.sleep(60)


def check_kills(path: Path, times: int) -> None:
    rng = random.Random(0)
    acknowledged = dict.fromkeys(range(SESSIONS), 0)
    for life in range(times):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                serve_until_killed(path, write_end)
            finally:
                os._exit(1)
        os.close(write_end)
        with open(read_end) as reports:
            # The first life lasts until every session was acknowledged once, however slow the disk is.
            lines = [reports.readline()]
            while life == 0 and len({line.split()[0] for line in lines}) < SESSIONS:
                lines.append(reports.readline())
            time.sleep(rng.random() * 0.2)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            lines += reports
        for number, version in (map(int, line.split()) for line in lines):
            acknowledged[number] = max(acknowledged[number], version)
        with Pool(path) as pool:
            for number, version in acknowledged.items():
                lease = pool.lease(f"s{number}")
                assert lease.version >= version
                assert same(lease.initial(), snapshot(number, tokens=lease.version) if lease.version else None)
                lease.release()
    assert all(acknowledged.values())


def test_kill_9_at_some_moments_loses_no_acknowledged_turn(path):
    check_kills(path, 5)


@pytest.mark.long
def test_kill_9_at_random_moments_loses_no_acknowledged_turn(path):
    check_kills(path, 100)
