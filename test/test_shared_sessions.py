"""Sessions that several servers share: the pool over PostgreSQL, claims, engines that stop and wake up, what is left over."""

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import PostgresServer, find_program
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
from test_state_pool import Pool, check_random_history, same, snapshot

from rwkv_batch.errors import Conflict, RwkvBatchError, Unavailable, Unprocessable, UsageError
from rwkv_batch.session_messages import Delete, Fork, Status
from rwkv_batch.sessions.store import NewVersion, Source

pytest.importorskip("psycopg", reason="requirements-cluster.txt is not installed")
if find_program("initdb") is None:
    pytest.skip("PostgreSQL is not installed", allow_module_level=True)

from rwkv_batch.sessions.postgres import connection, open_store
from rwkv_batch.sessions.postgres.database import PostgresStore
from rwkv_batch.sessions.postgres.objects import Folder, open_objects


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.close()


class Servers:
    """Servers that share what is at one URL."""

    def __init__(self, url: str, folder: Path):
        self.url = url
        self.folder = folder
        self._pools: list[Pool] = []

    def store(self, **options) -> PostgresStore:
        return PostgresStore(self.url, Folder(self.folder), **({"versions": 3} | options))

    def start(self, *, lease_seconds: float = 30.0, versions: int = 3, **options) -> Pool:
        options.setdefault("wait_seconds", 0.0)
        store = self.store(lease_seconds=lease_seconds, versions=versions)
        self._pools.append(Pool(self.folder / "unused", store=store, **options))
        return self._pools[-1]

    def close(self) -> None:
        for pool in self._pools:
            pool.pool.close()


@pytest.fixture
def servers(postgres, tmp_path) -> Iterator[Servers]:
    servers = Servers(postgres.new_url(), tmp_path / "states")
    yield servers
    servers.close()


def test_random_histories_over_postgresql(servers):
    store = servers.store()
    check_random_history(servers.folder, seed=0, num_steps=80, store=store)
    check_nothing_is_left_over(store)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_random_histories_over_postgresql(servers, seed):
    store = servers.store()
    check_random_history(servers.folder, seed=seed, num_steps=1000, store=store)
    check_nothing_is_left_over(store)


def check_nothing_is_left_over(store: PostgresStore) -> None:
    """Every state is one of a version, every object one of a state, every file an object."""
    store.sweep()
    rows = store.database.rows
    rows("UPDATE kept_objects SET freed = freed - interval '1 hour'")
    while rows("SELECT 1 FROM kept_objects WHERE freed IS NOT NULL"):
        store.sweep()
    assert rows("SELECT count(*) FROM kept_states WHERE id NOT IN (SELECT state FROM kept_versions)") == [(0,)]
    names = {row[0] for row in rows("SELECT name FROM kept_objects")}
    assert names == {row[0] for row in rows("SELECT object FROM kept_states")}
    assert names == {path.name for path in store.objects.path.glob("*/*")}
    assert rows("SELECT count(*) FROM kept_loose") == [(0,)]
    store.close()


def test_an_engine_that_stopped_and_wakes_up_can_acknowledge_nothing(servers):
    a, b = servers.start(), servers.start(lease_seconds=0.5, wait_seconds=30.0)
    log_turn(a, "s", [1])
    lease = a.lease("s")
    a.pool.store._presence._left.set()  # no sign of life any more
    b.pool.store.database.rows("UPDATE kept_engines SET alive_until = now() WHERE id = %s", (a.pool.store._presence.id,))
    assert log_turn(b, "s", [2]).version == 2
    with pytest.raises(Conflict) as caught:
        a.commit(lease, snapshot(9))
    assert caught.value.code == "session_moved"
    assert ids_of(a, "s") == ids_of(b, "s") == [1, 2]
    assert log_turn(b, "s", [3]).version == 3


def test_a_snapshot_shortens_what_is_fed_again(servers):
    a, b = servers.start(snapshot_tokens=16, versions=2), servers.start()
    a.turn("s", snapshot(1))
    for number in range(20):
        log_turn(a, "s", [number], snapshot(number, tokens=8 + number))
    store = b.pool.store
    deadline = time.monotonic() + 30
    while store.database.rows("SELECT count(*) FROM kept_states WHERE object IS NOT NULL")[0][0] < 2:
        assert time.monotonic() < deadline
        a.pool.shared.lock.ring()
        time.sleep(0.02)
    lease = b.lease("s", keep=False)
    lag = len(lease.ids)  # turns that came while the last whole state was on its way
    assert lag < 16
    assert lease.ids == list(range(20 - lag, 20))
    assert same(lease.initial(), snapshot(19 - lag, tokens=27 - lag))
    lease.release()
    for number in range(2):  # what led to it goes with the last version that needs it
        log_turn(b, "s", [number])
    store.sweep()
    assert store.database.rows("SELECT count(*) FROM kept_states") <= [(6,)]


def test_a_snapshot_that_is_gone_or_another_spoils_only_its_session(servers):
    a = servers.start()
    for name in ("one", "two", "three"):
        a.turn(name, snapshot(len(name)))
    rows = a.pool.store.database.rows
    objects = [row[0] for row in rows("SELECT object FROM kept_states ORDER BY id")]
    paths = [servers.folder / name[:2] / name for name in objects]
    paths[0].unlink()
    paths[1].write_bytes(paths[2].read_bytes())
    b = servers.start()
    for name in ("one", "two"):
        with pytest.raises(Unprocessable) as caught:
            b.state(name)
        assert caught.value.code == "state_unusable"
    assert same(b.state("three"), snapshot(5))


def test_what_is_swept_while_others_use_it_stays(servers):
    """Sessions fork, go on and go, and two servers sweep: no version ever lacks its state."""
    pools = [servers.start(versions=1, wait_seconds=30.0) for _ in range(2)]
    for pool in pools:
        pool.order(Status())
    rng, until = random.Random(0), time.monotonic() + 0.7
    errors: list[BaseException] = []

    def live(pool: Pool, number: int) -> None:
        mine: dict[str, list[int]] = {}
        try:
            for step in range(1_000_000):
                if time.monotonic() > until:
                    break
                name = f"{number}-{rng.randrange(4)}"
                if name in mine and rng.random() < 0.3:
                    pool.order(Delete(name=name))
                    del mine[name]
                elif mine and name not in mine:
                    source = rng.choice(list(mine))
                    pool.order(Fork(name=source, copies=[name]))
                    mine[name] = list(mine[source])
                else:
                    log_turn(pool, name, [step])
                    mine[name] = [*mine.get(name, []), step]
                    assert ids_of(pools[1 - number], name) == mine[name]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=live, args=(pool, number)) for number, pool in enumerate(pools)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for pool in pools:
            pool.pool.store._sweeper.sweep()
        time.sleep(0.01)
    assert not errors


def test_a_write_whose_answer_was_lost_is_not_done_twice(servers, monkeypatch):
    store = servers.store()
    claim = store.claim("", "s")
    write = store._write_rows

    def cut(*args) -> None:
        monkeypatch.setattr(store, "_write_rows", write)
        write(*args)
        raise Unavailable("the network")

    monkeypatch.setattr(store, "_write_rows", cut)
    new = NewVersion("", "s", 1, 1, 0, None, time.time(), ids=[1], model="m", claim=claim)
    store.write([new])
    assert store.load(store.find("", "s")).ids == [1]
    claim = store.claim("", "s")
    store.write([NewVersion("", "s", 2, 2, 0, None, 9.0, ids=[2], claim=claim, source=Source("s", 1, new.updated))])
    assert store.load(store.find("", "s")).ids == [1, 2]
    store.close()


def test_what_the_database_cannot_hold_is_refused(servers):
    a = servers.start()
    with pytest.raises(RwkvBatchError) as caught:
        a.lease("nul \0 in it")
    assert (caught.value.status, caught.value.param) == (400, "session_id")
    assert log_turn(a, "日本 'quoted' %s", [1]).version == 1


def test_no_password_is_told(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(UsageError) as caught:
        PostgresStore("postgresql://user:secret@/db?no_such_option=1", Folder(tmp_path))
    assert "secret" not in caught.value.message
    store = PostgresStore(f"postgresql://user:secret@/db?host={tmp_path}", Folder(tmp_path))
    with pytest.raises(Unavailable) as caught:
        store.claim("", "s")
    assert "secret" not in caught.value.message + caplog.text
    assert os.path.basename(tmp_path) in caplog.text


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """The URL of a bucket, of which the environment says where it is."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    said = {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://{host}:{port}", **keys}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in said.items():
            patch.setenv(name, value)
        pytest.importorskip("httpx").put(f"http://{host}:{port}/states").raise_for_status()
        yield "s3://states/prod"
    server.stop()


@pytest.mark.long
def test_whole_states_in_a_bucket(postgres, bucket, tmp_path):
    objects = open_objects(bucket)
    pieces = [os.urandom(3 * 2**20) for _ in range(4)]
    objects.put("large", iter(pieces))
    assert b"".join(objects.get("large")) == b"".join(pieces)
    objects.delete(["large", "never there"])
    with pytest.raises(KeyError):
        objects.get("large")
    store = PostgresStore(postgres.new_url(), objects, versions=3)
    check_random_history(tmp_path, seed=0, num_steps=20, store=store)
    with pytest.raises(Unavailable):
        open_objects("s3://no-such-bucket/prod").put("name", iter([b"1"]))


def test_settings_that_do_not_belong_together_are_refused(tmp_path):
    for url, snapshots, durability, param in (
        ("mysql://db", "/tmp", "log", "state_url"), ("postgresql://db", None, "log", "snapshots"),
        ("postgresql://db", "/tmp", "relaxed", "durability"), ("postgresql://db?a=b", "/tmp", "log", "state_url"),
        ("postgresql://db", "nonsense://x", "log", "snapshots"),
    ):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            open_store(url, snapshots, durability)
        assert caught.value.param == param
