"""What a session costs when there are 100,000 of them: as many steps of SQLite as when there are a thousand."""

import time
from pathlib import Path

import pytest
from test_turn_log import LogPool, when_opened

from rwkv_batch.session_messages import Delete, Fork, Rewind, Status
from rwkv_batch.sessions.sqlite.database import SessionDatabase
from rwkv_batch.sessions.sqlite.states import pack_ids
from rwkv_batch.sessions.store import NewVersion, Replay

IDS = (5, 6, 7)


def test_answers_are_kept_for_their_time_but_not_too_many(tmp_path, monkeypatch):
    """A busy server takes a thousand turns in a second, and a caller may ask again after minutes."""
    database = SessionDatabase(tmp_path / "s.db", replay_seconds=60.0)
    now = database.now()

    def write(numbers: range) -> None:
        replays = {f"s{number}": Replay(f"k{number}", b"digest", b"answer", now + number / 1000) for number in numbers}
        new = [NewVersion("", name, 1, 1, 0, None, 1.0, [(name, one)], ids=[1], model="m") for name, one in replays.items()]
        database.write(new)

    def kept(number: int) -> bool:
        return database.replay("", f"s{number}", f"k{number}") is not None

    write(range(1100))
    assert all(kept(number) for number in range(1100))
    monkeypatch.setattr("rwkv_batch.sessions.sqlite.database.MAX_REPLAYS", 500)
    write(range(1100, 2100))
    assert not kept(1599)
    assert kept(1600)
    monkeypatch.setattr(database, "now", lambda: now + 61.9)
    write(range(2100, 2101))
    assert not kept(1899)
    assert kept(1901)
    database.close()


def fill(path: Path, count: int) -> None:
    """Sessions m0, m1, … of one turn each, the last one the newest, as `write` leaves them."""
    database = SessionDatabase(path)
    with database.file.transaction() as connection:
        numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})"
        connection.execute(f"INSERT INTO kept_sessions {numbers} SELECT i, '', 'm' || (i - 1), 1, 1e9 + i, 0 FROM n")
        connection.execute(
            f"INSERT INTO kept_turns {numbers}, t AS (SELECT i, 0 AS base, x'' AS base_seal, ?1 AS ids, CAST(printf('%08d', i)"
            " AS BLOB) AS seal, ?2 AS model FROM n)"
            " SELECT *, checksum_of(i, base, base_seal, ids, seal, model) FROM t",
            (pack_ids(IDS), "0123456789abcdef"),
        )
        connection.execute(
            f"INSERT INTO kept_versions (session, version, state, tokens, newlines, num_bytes, updated, origin, seal, checksum)"
            f" {numbers}, v AS (SELECT i, 1 AS version, i AS state, {len(IDS)} AS tokens, 0 AS newlines, 99 AS num_bytes,"
            " 1e9 + i AS updated, NULL AS origin, CAST(printf('%08d', i) AS BLOB) AS seal FROM n) SELECT *,"
            " checksum_of('', 'm' || (i - 1), i, version, state, tokens, newlines, num_bytes, updated, origin, seal) FROM v"
        )
    database.close()


class Steps:
    """Counts what SQLite does, in hundreds of its instructions."""

    def __init__(self, monkeypatch):
        self.count = 0
        when_opened(monkeypatch, lambda opened: opened.set_progress_handler(self.step, 100))

    def of(self, pool: LogPool, action) -> int:
        self.count = 0
        action()
        pool.order(Status(limit=0))  # behind what the action left to do
        return self.count

    def step(self) -> int:
        self.count += 1
        return 0


def measure(path: Path, count: int, steps: Steps) -> dict[str, int]:
    fill(path, count)
    with LogPool(path, l1_sessions=8, l2_sessions=8) as pool:
        assert pool.order(Status(limit=0)).total == count
        for number in range(40):
            pool.say(f"m{number}", (1,))
        found = {}
        found["resume"] = steps.of(pool, lambda: pool.say(f"m{count // 2}", (8, 9)))
        assert pool.ids(f"m{count // 2}") == (*IDS, 8, 9)
        found["new"] = steps.of(pool, lambda: pool.say("new", (8, 9), key="k"))
        found["list"] = steps.of(pool, lambda: pool.order(Status(limit=100)))
        found["one"] = steps.of(pool, lambda: pool.order(Status(name=f"m{count // 3}")))
        found["node"] = steps.of(pool, lambda: pool.say("d", (1,), node=0))
        found["fork"] = steps.of(pool, lambda: pool.order(Fork(name="m7", copies=["f1", "f2"])))
        found["rewind"] = steps.of(pool, lambda: pool.order(Rewind(name="m7")))
        found["delete"] = steps.of(pool, lambda: pool.order(Delete(name="m8", prefix=True)))
        page = pool.order(Status(limit=30))
        assert (page.total, len(page.sessions)) == (count + 4 - 1, 30)
        pool.crash()
    return found


@pytest.mark.parametrize("many", [100_000])
def test_nothing_takes_longer_because_there_are_many_sessions(tmp_path, monkeypatch, many):
    counted = Steps(monkeypatch)
    few = measure(tmp_path / "few.db", 1000, counted)
    began = time.monotonic()
    found = measure(tmp_path / "many.db", many, counted)
    print(f"{time.monotonic() - began:.1f} s", few, found)
    for action, steps in found.items():
        assert steps <= 1.5 * few[action] + 5, action
