"""Sessions of several engines in one SQLite file: the store process, its claims, engines and stores that end at any moment."""

import os
import queue
import random
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shared_contract import (  # noqa: F401 - its tests run here
    ids_of,
    log_turn,
    test_a_name_whose_first_turn_failed_is_no_session,
    test_a_session_goes_on_wherever_it_is_asked_for,
    test_a_session_that_another_server_has_is_waited_for,
    test_a_turn_that_waited_may_take_its_time,
    test_a_turn_that_wrote_nothing_lets_go_of_its_session,
    test_an_idempotency_key_is_known_to_all,
    test_nodes_of_a_dialogue_have_numbers_of_their_own,
    test_turns_that_end_together_fail_one_by_one,
    test_what_others_deleted_forked_and_rewound_is_seen,
)
from test_state_pool import ANSWER, Caller, Pool, check_nothing_is_left_over, check_random_history, same, snapshot, take

from rwkv_batch.errors import Conflict, StorageFull, Unavailable, Unprocessable
from rwkv_batch.model.state import Snapshot
from rwkv_batch.session_messages import Delete, Fork, Session, Status
from rwkv_batch.sessions.remote import connection
from rwkv_batch.sessions.remote.client import RemoteStore
from rwkv_batch.sessions.remote.messages import Call, head_of, path_in, raw
from rwkv_batch.sessions.remote.server import StoreServer
from rwkv_batch.sessions.sqlite.database import SessionDatabase
from rwkv_batch.sessions.store import NewVersion, Source


class Engines:
    """Engines that share a session file, and the store process, here a thread, that has it open."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / "sessions.db"
        self.pools: list[Pool] = []
        self.open()

    def open(self, **options) -> None:
        self.database = SessionDatabase(self.path, **({"versions": 3} | options))
        self.server = StoreServer(path_in(self.folder), lambda _: self.database)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()

    def store(self, **options) -> RemoteStore:
        return RemoteStore(path_in(self.folder), str(self.path), **options)

    def start(self, *, lease_seconds: float = 30.0, **options) -> Pool:
        options.setdefault("wait_seconds", 0.0)
        self.pools.append(Pool(self.folder / "unused", store=self.store(lease_seconds=lease_seconds), **options))
        return self.pools[-1]

    def stop(self) -> None:
        self.server.stop()
        self._thread.join()

    def close(self) -> None:
        for pool in self.pools:
            pool.pool.close()
        self.stop()


@pytest.fixture
def servers(tmp_path) -> Iterator[Engines]:
    engines = Engines(tmp_path)
    yield engines
    engines.close()


def test_random_histories(servers):
    check_history(servers, 0, 100)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_random_histories(servers, seed):
    check_history(servers, seed, 1000)


def check_history(servers: Engines, seed: int, num_steps: int) -> None:
    check_random_history(servers.folder, seed=seed, num_steps=num_steps, store=servers.store())
    servers.stop()
    check_nothing_is_left_over(servers.path)
    servers.open()


def test_sessions_go_on_here_and_there_while_others_come_and_go(servers):
    check_two(servers, 0.7)


@pytest.mark.long
def test_sessions_go_on_here_and_there_for_long(servers):
    check_two(servers, 60.0)


def check_two(servers: Engines, seconds: float) -> None:
    """Two engines use the same sessions at once: each turn goes on from the one that was acknowledged before."""
    pools = [servers.start(wait_seconds=60.0, snapshot_tokens=16, l1_sessions=2, l2_sessions=1) for _ in range(2)]
    until = time.monotonic() + seconds
    kept: dict[str, list[int]] = {f"s{number}": [] for number in range(4)}
    locks = {name: threading.Lock() for name in kept}
    errors: list[BaseException] = []

    def check(lease, ids: list[int]) -> None:
        state, tail = lease.initial(), lease.ids
        cut = len(ids) - len(tail)
        assert tail == ids[cut:]
        assert same(state, snapshot(ids[cut - 1], tokens=cut) if cut else None)

    def live(number: int) -> None:
        rng = random.Random(number)
        name = f"s{number // 2}"
        mine = [Caller(pool) for pool in pools]
        try:
            for step in range(1_000_000):
                if time.monotonic() > until:
                    break
                pool, other, action = rng.choice(mine), rng.choice(mine), rng.random()
                with locks[name]:
                    ids = kept[name]
                    if action < 0.03:
                        assert pool.order(Delete(name=name)).found == bool(ids)
                        kept[name] = []
                    elif ids and action < 0.1:
                        copy = f"{name}-{number}-{step}"
                        pool.order(Fork(name=name, copies=[copy]))
                        lease = other.lease(copy, keep=False)
                        check(lease, ids)
                        lease.release()
                        other.order(Delete(name=copy))
                    else:
                        lease = pool.lease(name)
                        assert lease.version == len(ids)
                        check(lease, ids)
                        answers: queue.SimpleQueue = queue.SimpleQueue()
                        lease.commit(snapshot(step, tokens=len(ids) + 1), 0, ANSWER, answers.put, ids=[], turn=[step])
                        assert take(answers).version == len(ids) + 1
                        ids.append(step)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=live, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert {entry.name: entry.version for entry in pools[0].order(Status()).sessions} == {
        n: len(i) for n, i in kept.items() if i
    }


def test_an_engine_that_ends_leaves_its_sessions_to_the_others_at_once(servers):
    a, b = servers.start(), servers.start(wait_seconds=30.0)
    log_turn(a, "s", [1])
    lease = a.lease("s")
    waiting = b.ask(Session(name="s"))
    with pytest.raises(queue.Empty):
        waiting.get(timeout=0.1)
    a.pool.store.close()  # as the kernel does it for a process that is killed
    turn = take(waiting)
    assert turn.ids == [1]
    with pytest.raises(Conflict) as caught:
        a.commit(lease, snapshot(9))
    assert caught.value.code == "session_moved"
    b.commit(turn, snapshot(2))
    assert same(a.state("s"), snapshot(2))


def test_an_engine_that_stopped_and_wakes_up_can_acknowledge_nothing(servers):
    a, b = servers.start(lease_seconds=0.3), servers.start(wait_seconds=30.0)
    log_turn(a, "s", [1])
    lease, other = a.lease("s"), a.lease("other")
    a.pool.store._closed.set()  # no sign of life any more
    assert log_turn(b, "s", [2]).version == 2
    with pytest.raises(Conflict) as caught:
        a.commit(lease, snapshot(9))
    assert caught.value.code == "session_moved"
    assert ids_of(a, "s") == ids_of(b, "s") == [1, 2]
    assert a.commit(other, snapshot(3)).version == 1  # nobody wanted it


def test_an_engine_that_gives_signs_of_life_may_take_its_time(servers):
    a, b = servers.start(lease_seconds=0.2), servers.start(wait_seconds=30.0)
    lease = a.lease("s")
    waiting = b.ask(Session(name="s"))
    with pytest.raises(queue.Empty):
        waiting.get(timeout=0.8)
    assert a.commit(lease, snapshot(1)).version == 1
    take(waiting).release()


def test_a_store_that_was_started_again_takes_the_turns_of_sessions_that_nobody_changed(servers):
    a, b = servers.start(), servers.start()
    for name in ("kept", "changed"):
        log_turn(a, name, [1])
    leases = [a.lease(name) for name in ("kept", "changed", "new")]
    servers.stop()
    servers.open()
    log_turn(b, "changed", [2])
    assert a.commit(leases[0], snapshot(1)).version == 2
    for lease in leases[1:]:
        with pytest.raises(Conflict) as caught:
            a.commit(lease, snapshot(1))
        assert caught.value.code == "session_moved"
    assert ids_of(b, "changed") == [1, 2]
    assert {entry.name for entry in b.order(Status()).sessions} == {"kept", "changed"}


def test_without_a_store_turns_fail_until_there_is_one(servers, monkeypatch):
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", 0.1)
    a = servers.start()
    log_turn(a, "s", [1])
    lease = a.lease("s")
    servers.stop()
    for turn in (lambda: a.commit(lease, snapshot(1)), lambda: a.lease("t"), lambda: a.order(Status())):
        with pytest.raises(Unavailable) as caught:
            turn()
        assert (caught.value.status, caught.value.code) == (503, "storage_unavailable")
    servers.open()
    assert log_turn(a, "s", [2]).version == 2
    assert ids_of(a, "s") == [1, 2]


def test_a_write_whose_answer_was_lost_is_not_done_twice(servers, monkeypatch):
    store = servers.store()
    claim = store.claim("", "s")
    ask, lost = connection.Connection._ask, []

    def cut(self, method, *rest):
        answer = ask(self, method, *rest)
        if method == "write" and len(lost) < 2:
            lost.append(method)
            raise ConnectionResetError
        return answer

    monkeypatch.setattr(connection.Connection, "_ask", cut)
    new = NewVersion("", "s", 1, 1, 0, None, time.time(), ids=[1], model="m", claim=claim)
    store.write([new])
    claim = store.claim("", "s")
    store.write([NewVersion("", "s", 2, 2, 0, None, 9.0, ids=[2], claim=claim, source=Source("s", 1, new.updated))])
    assert store.load(store.find("", "s")).ids == [1, 2]
    assert len(lost) == 2
    store.close()


def test_two_engines_write_whole_states_at_once(servers):
    stores, pieces = [servers.store() for _ in range(2)], {}
    for number, store in enumerate(stores):
        new = NewVersion("", f"s{number}", 1, 3, 0, None, 1.0, ids=[1, 2, 3], claim=store.claim("", f"s{number}"))
        store.write([new])
    for store in stores:
        store.begin_draft()
    for part in range(3):
        for number, store in enumerate(stores):
            pieces.setdefault(number, []).append(os.urandom(2**20))
            store.add_to_draft(pieces[number][part])
    stores[0].write([NewVersion("", "whole", 1, 3, 0, [b"a whole one"], 1.0, model="m")])
    for number, store in enumerate(stores):
        assert store.finish_draft("", Source(f"s{number}", 1, 1.0), [3])
        found = store.load(store.find("", f"s{number}"))
        assert (b"".join(found.pieces), found.ids) == (b"".join(pieces[number]), [3])
    assert b"".join(stores[1].load(stores[1].find("", "whole")).pieces) == b"a whole one"
    stores[0].begin_draft()
    stores[0].close()
    with pytest.raises(Unavailable):
        stores[0].add_to_draft(b"a draft that nobody has begun")
    for store in stores:
        store.close()


def test_a_version_that_went_meanwhile_is_not_taken_for_damaged(servers):
    store = servers.store()
    store.write([NewVersion("", "s", 1, 3, 0, [b"a state"], 1.0, model="m")])
    record = store.find("", "s")
    found = store.load(record)
    store.delete("", "s", prefix=False)
    for late in (lambda: list(found.pieces), lambda: store.load(record), lambda: store.fork("", record, ["t"])):
        with pytest.raises(Conflict) as caught:
            late()
        assert caught.value.code == "session_busy"
    store.close()


def test_what_the_file_says_is_told(servers):
    a = servers.start()
    a.turn("s", snapshot(1))
    servers.stop()
    with sqlite3.connect(servers.path) as file:
        file.execute("UPDATE kept_versions SET tokens = 9")
    file.close()
    servers.open(max_bytes=1)
    with pytest.raises(Unprocessable) as caught:
        a.lease("s")
    assert caught.value.code == "state_unusable"
    with pytest.raises(StorageFull):
        a.turn("t", Snapshot(torch.zeros(2, 2, 64), torch.rand(2, 1, 2000, 64), 7))


def test_the_oldest_session_that_goes_is_none_that_a_turn_has(servers):
    a, b = servers.start(), servers.start()
    for name in ("first", "second", "third"):
        log_turn(a, name, [1])
    lease = b.lease("first")
    assert a.pool.store.oldest(2) == [("", "second"), ("", "third")]
    lease.release()


def test_nonsense_ends_one_connection(servers):
    a = servers.start()
    log_turn(a, "s", [1])
    write = head_of(Call("write", raw([])))
    for nonsense in (write, write.replace(b"write", b"hello"), b"\xff" * 7, b"\1\0\0\0\0\0\0\0\xc1", b"\2\0\0\0\0\0\0\0\x91\1"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(str(path_in(servers.folder)))
            peer.sendall(nonsense)
    assert log_turn(a, "s", [2]).version == 2


def test_each_model_has_a_file_of_its_own(servers):
    servers.stop()
    path = path_in(servers.folder)
    server = StoreServer(path, SessionDatabase)
    thread = threading.Thread(target=server.run)
    thread.start()
    stores = [RemoteStore(path, str(servers.folder / name)) for name in ("a.db", "b.db")]
    for number, store in enumerate(stores):
        claim = store.claim("", "s")
        store.write([NewVersion("", "s", 1, 1, 0, None, 1.0, ids=[number], claim=claim)])
    assert [store.load(store.find("", "s")).ids for store in stores] == [[0], [1]]
    for store in stores:
        store.close()
    server.stop()
    thread.join()
    servers.open()


class Nursery:
    """A process that starts store processes."""

    def __init__(self, folder: Path):
        theirs, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self._process = os.fork()
        if not self._process:
            os.close(self._orders)
            try:
                while os.read(theirs, 1):
                    child = os.fork()
                    if not child:
                        StoreServer(path_in(folder), SessionDatabase).run()
                    os.write(answers, b"%08d" % child)
                    os.waitpid(child, 0)
            finally:
                os._exit(0)
        os.close(theirs)
        os.close(answers)

    def start(self) -> int:
        """Start one, when the one before has ended; returns its process id."""
        os.write(self._orders, b"!")
        return int(os.read(self._answers, 8))

    def close(self) -> None:
        os.close(self._orders)
        os.waitpid(self._process, 0)
        os.close(self._answers)


def check_kills(folder: Path, times: int, num_sessions: int) -> None:
    """A store that is killed again and again under two engines: no turn is lost or done twice."""
    rng, stopping = random.Random(0), threading.Event()
    errors: list[BaseException] = []
    acknowledged = [0] * num_sessions

    def live(number: int, mine: Caller) -> None:
        try:
            while not stopping.is_set():
                try:
                    lease = mine.lease(f"s{number}")
                    assert lease.version >= acknowledged[number]
                    assert same(lease.initial(), snapshot(number, tokens=lease.version) if lease.version else None)
                    kept = mine.commit(lease, snapshot(number, tokens=lease.version + 1))
                    assert kept.version == lease.version + 1
                    acknowledged[number] = kept.version
                except (Unavailable, Conflict) as error:
                    refused.append(error.code)
        except BaseException as error:
            errors.append(error)

    refused: list[str | None] = []
    nursery = Nursery(folder)  # before there are threads
    process = nursery.start()
    pools = [
        Pool(folder / "unused", store=RemoteStore(path_in(folder), str(folder / "sessions.db")), wait_seconds=5.0)
        for _ in range(2)
    ]
    threads = [threading.Thread(target=live, args=(n, Caller(pools[n % 2]))) for n in range(num_sessions)]
    for thread in threads:
        thread.start()
    for _ in range(times):
        until = time.monotonic() + 60
        before = sum(acknowledged)
        while sum(acknowledged) < before + num_sessions and time.monotonic() < until and not errors:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.05)
        os.kill(process, signal.SIGKILL)
        process = nursery.start()
    stopping.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert set(refused) <= {"storage_unavailable", "session_moved", "session_busy"}
    for number, version in enumerate(acknowledged):
        lease = Caller(pools[1 - number % 2]).lease(f"s{number}")
        assert lease.version >= version > 0
        assert same(lease.initial(), snapshot(number, tokens=lease.version))
        lease.release()
    for pool in pools:
        pool.pool.close()
    os.kill(process, signal.SIGKILL)
    nursery.close()


def test_a_store_that_is_killed_loses_no_acknowledged_turn(tmp_path):
    check_kills(tmp_path, 3, 8)


@pytest.mark.long
def test_a_store_that_is_killed_often_loses_no_acknowledged_turn(tmp_path):
    check_kills(tmp_path, 100, 32)
