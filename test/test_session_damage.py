"""Bits that flip in the file of the sessions: what is read is what was written, or is refused; nothing else."""

import os
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from test_state_pool import FILE, Pool, same, snapshot
from test_turn_log import LogPool, ids_of, state_after

from rwkv_batch.errors import RwkvBatchError, StorageFailed, Unprocessable
from rwkv_batch.session_messages import Delete, Status
from rwkv_batch.sessions.sqlite.connection import PAGE_BYTES
from rwkv_batch.sessions.sqlite.database import SessionDatabase
from rwkv_batch.sessions.sqlite.schema import APPLICATION_ID, CHECKSUMS, SCHEMA, STATE_SHIFT, TABLES, checksum_of
from rwkv_batch.sessions.state_file import Stored
from rwkv_batch.sessions.store import NewVersion, Replay, Source, SourceLost

NUM_SESSIONS, NUM_VERSIONS = 12, 3


def name_of(number: int) -> str:
    return f"user{number}"


def is_logged(number: int) -> bool:
    """Whether a session's versions are ids; the others are whole states."""
    return number % 3 > 0


def ids_seen(number: int, version: int) -> tuple[int, ...]:
    """What a session that is logged has seen."""
    return tuple(1000 * number + place for place in range(9 * version))


def turn(number: int, version: int) -> NewVersion:
    """One version of a session, with the answer for an idempotency key."""
    state, newlines = snapshot(100 * number + version, tokens=1000 * number + version), number % 3
    replay = Replay(f"key{version}", b"digest", b"answer of %d" % number, 2e9 + number)
    new = NewVersion(
        "", name_of(number), version, state.elapsed, newlines, FILE.encode(Stored(state, newlines)), 1e9 + number,
        [(name_of(number), replay)],
    )  # fmt: skip
    if is_logged(number):
        new.pieces, new.tokens = None, 9 * version
        new.ids = ids_seen(number, version)[-9:]
        new.model = "model"
        new.source = Source(name_of(number), version - 1, new.updated) if version > 1 else None
    return new


def write_whole(database: SessionDatabase, number: int, version: int) -> None:
    """Write the whole state of a version that is ids, but for the last of them."""
    ids = ids_seen(number, version)
    database.begin_draft()
    for piece in FILE.encode(Stored(state_after(ids[:-2]), 0)):
        database.add_to_draft(piece)
    assert database.finish_draft("", Source(name_of(number), version, 1e9 + number), ids[-2:])


def check_turn(database: SessionDatabase, number: int, version: int) -> None:
    """The session is at this version with this state, or it is refused."""
    try:
        record = database.find("", name_of(number))
        assert record is not None, "a session that is there must not be taken for a new one"
        pieces, ids, models, _ = database.load(record)
        stored = FILE.decode(pieces) if pieces is not None else None
    except RwkvBatchError:
        return
    expected = turn(number, version)
    assert (record.version, record.tokens, record.newlines) == (version, expected.tokens, expected.newlines)
    if is_logged(number):
        assert models == {"model"}
        assert (*(ids_of(stored.snapshot) if stored else ()), *ids) == ids_seen(number, version)
    else:
        assert (stored.newlines, ids) == (expected.newlines, [])
        assert same(stored.snapshot, snapshot(100 * number + version, tokens=expected.tokens))


def check_answer(database: SessionDatabase, number: int) -> None:
    """The answer to the last turn is given again, or refused: the turn is not run a second time."""
    try:
        replay = database.replay("", name_of(number), f"key{NUM_VERSIONS}")
    except RwkvBatchError:
        return
    assert replay == turn(number, NUM_VERSIONS).replays[0][1]


def check_file(path: Path, *, writes: bool) -> None:
    """Read everything, and with `writes` go on with every session."""
    database = SessionDatabase(path)
    try:
        for number in range(NUM_SESSIONS):
            check_turn(database, number, NUM_VERSIONS)
            check_answer(database, number)
        try:
            assert len(database.page("", without=[], offset=0, limit=99)) <= NUM_SESSIONS
            assert len(database.named_after("", "", 99)) <= NUM_SESSIONS
        except RwkvBatchError:
            pass
        if writes:
            check_writes(database)
    finally:
        database.close()


def check_writes(database: SessionDatabase) -> None:
    versions = dict.fromkeys(range(NUM_SESSIONS), NUM_VERSIONS)
    for number in range(NUM_SESSIONS):
        try:
            database.write([turn(number, NUM_VERSIONS + 1)])
        except (RwkvBatchError, SourceLost):
            continue
        versions[number] += 1
    for number, version in versions.items():
        check_turn(database, number, version)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> bytes:
    """A file with some sessions, whose oldest versions have been dropped already."""
    path = tmp_path_factory.mktemp("pristine") / "sessions.db"
    database = SessionDatabase(path)
    for version in range(1, NUM_VERSIONS + 1):
        database.write([turn(number, version) for number in range(NUM_SESSIONS)])
        for number in range(2, NUM_SESSIONS, 6) if version == 2 else ():
            write_whole(database, number, version)
    database.close()
    check_file(path, writes=False)
    return path.read_bytes()


def places(pristine: bytes, path: Path) -> list[int]:
    """Where the tables and indexes are that lead to the states: all bytes of their pages that are not zero."""
    path.write_bytes(pristine)
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE rootpage > 0 AND tbl_name IN ({})".format(
            ",".join("?" * (len(TABLES) + 1))
        )
        roots = [1] + [row[0] for row in connection.execute(query, (*TABLES, "kept_turns"))]
    return [at for root in roots for at in range((root - 1) * PAGE_BYTES, root * PAGE_BYTES) if pristine[at]]


def flip(pristine: bytes, path: Path, rng: random.Random, at: int) -> None:
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    data = bytearray(pristine)
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def check_flips(pristine: bytes, path: Path, *, seed: int, everywhere: int, in_tables: int, writes: bool) -> None:
    rng, chosen = random.Random(seed), places(pristine, path)
    for at in [rng.randrange(len(pristine)) for _ in range(everywhere)] + [rng.choice(chosen) for _ in range(in_tables)]:
        flip(pristine, path, rng, at)
        check_file(path, writes=writes)


def test_a_flipped_bit_never_gives_a_wrong_state(pristine, tmp_path):
    check_flips(pristine, tmp_path / "s.db", seed=1, everywhere=20, in_tables=80, writes=False)


def test_nor_does_it_when_turns_go_on(pristine, tmp_path):
    check_flips(pristine, tmp_path / "s.db", seed=2, everywhere=2, in_tables=8, writes=True)


@pytest.mark.long
@pytest.mark.parametrize("writes", [False, True])
def test_many_flipped_bits_never_give_a_wrong_state(pristine, tmp_path, writes):
    check_flips(pristine, tmp_path / "s.db", seed=3, everywhere=400, in_tables=400, writes=writes)


def write_old_file(path: Path) -> None:
    """A file as the version before checksums wrote it: two versions of a session, a response, an answer for a key."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(SCHEMA + f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 1;")
        response = "resp_" + "0123456789ab" * 2
        for id, (name, last) in enumerate((("s", 2), (response, 1), ("resp_mine", 1)), 1):
            connection.execute("INSERT INTO kept_sessions VALUES (?, '', ?, ?, ?)", (id, name, last, 2e9))
            for version in range(1, last + 1):
                state = 10 * id + version
                pieces = [bytes(piece) for piece in FILE.encode(Stored(snapshot(state), 1))]
                for number, piece in enumerate(pieces):
                    connection.execute("INSERT INTO kept_pieces VALUES (?, ?)", (state << STATE_SHIFT | number, piece))
                row = (id, version, state, 7, 1, sum(map(len, pieces)), 2e9)
                connection.execute("INSERT INTO kept_versions VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        connection.execute("INSERT INTO kept_replays VALUES ('', 's', 'k', x'01', x'02', 4e9)")


def check_old_file(pool: Pool) -> None:
    assert [entry.name for entry in pool.order(Status()).sessions if entry.name == "s"] == ["s"]
    assert same(pool.state("s"), snapshot(12))
    assert same(pool.state("resp_mine"), snapshot(31))
    assert pool.database.replay("", "s", "k").answer == b"\2"


def test_a_file_without_checksums_is_given_them_and_goes_on(tmp_path):
    path = tmp_path / "old.db"
    write_old_file(path)
    for _ in range(2):
        with Pool(path) as pool:
            check_old_file(pool)
            page = pool.order(Status())
            assert (page.total, {entry.name for entry in page.sessions}) == (2, {"s", "resp_mine"})
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*), count(seal), count(checksum) FROM kept_versions").fetchone() == (4, 4, 4)
        connection.execute("UPDATE kept_versions SET state = 31 WHERE state = 12")
        connection.commit()
    with Pool(path) as pool:
        with pytest.raises(Unprocessable, match=r"session 's'.*damaged"):
            pool.lease("s")
        assert same(pool.state("resp_mine"), snapshot(31))
        assert pool.order(Delete(name="s")).found
        assert pool.turn("s", snapshot(1)).version == 1


def test_a_file_without_a_log_is_given_one_and_goes_on(tmp_path):
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.create_function("checksum_of", -1, checksum_of, deterministic=True)
        connection.executescript(SCHEMA + CHECKSUMS + f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 2;")
        data = b"".join(bytes(piece) for piece in FILE.encode(Stored(state_after((1, 2, 3)), 1)))
        connection.execute("INSERT INTO kept_pieces VALUES (?, ?)", (9 << STATE_SHIFT, data))
        said = (4, 9, 3, 1, len(data), 2e9, None, data[-4:])
        connection.execute("INSERT INTO kept_sessions VALUES (7, '', 's', 4, 2e9, 0)")
        connection.execute(
            "INSERT INTO kept_versions (session, version, state, tokens, newlines, num_bytes, updated, origin, seal, checksum)"
            " VALUES (7, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*said, checksum_of("", "s", 7, *said)),
        )
    for version in (5, 6):
        with LogPool(path) as pool:
            assert pool.say("s", (version,)).version == version
            pool.crash()
    with LogPool(path, durability="turn") as pool:
        assert pool.ids("s") == (1, 2, 3, 5, 6)
        assert pool.say("s", (7,)).version == 7
    with LogPool(path) as pool:
        lease = pool.lease("s")
        assert (ids_of(lease.initial()), lease.ids) == ((1, 2, 3, 5, 6, 7), [])


def test_a_file_without_checksums_can_be_read_where_nothing_can_be_written(tmp_path, monkeypatch):
    path = tmp_path / "old.db"
    write_old_file(path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with Pool(path) as pool:
        check_old_file(pool)
        with pytest.raises(StorageFailed, match="readonly"):
            pool.turn("s", snapshot(2))


def test_a_file_whose_definitions_are_damaged_is_refused_and_the_pool_lives_on(pristine, tmp_path):
    path = tmp_path / "s.db"
    data = bytearray(pristine)
    data[data.index(b"CREATE TABLE kept_pieces") + 7] ^= 0x80  # no UTF-8 any more
    path.write_bytes(data)
    with Pool(path) as pool:
        for _ in range(2):
            with pytest.raises(StorageFailed, match="move it away"):
                pool.lease(name_of(0))
        with pytest.raises(StorageFailed):
            pool.order(Status())
        path.write_bytes(pristine)
        assert pool.lease(name_of(0)).version == NUM_VERSIONS
    assert path.exists()


def test_a_session_that_cannot_be_found_by_its_name_is_not_taken_for_a_new_one(pristine, tmp_path):
    """Its entry in an index is wrong: before, the next turn began with an empty state."""
    path = tmp_path / "s.db"
    path.write_bytes(pristine)
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE type = 'index' AND tbl_name = 'kept_sessions' AND sql IS NULL"
        start = (connection.execute(query).fetchone()[0] - 1) * PAGE_BYTES
    data = bytearray(pristine)
    data[data.index(b"user7", start) + 4] ^= 1
    path.write_bytes(data)
    with Pool(path) as pool, pytest.raises(StorageFailed, match="damaged"):
        pool.lease("user7")
