"""Encryption at rest: the file of the sessions tells nobody without the key what was said, and nobody can change it."""

import contextlib
import os
import sqlite3

import pytest
from test_state_pool import ANSWER
from test_turn_log import LogPool, pieces_in, wait_for_snapshots

from rwkv_batch.config import Config
from rwkv_batch.engine.build import open_store
from rwkv_batch.errors import StorageFailed, Unprocessable, UsageError
from rwkv_batch.session_messages import Status
from rwkv_batch.sessions.sqlite.schema import checksum_of
from rwkv_batch.sessions.sqlite.sealing import Sealer, read_key
from rwkv_batch.sessions.sqlite.states import pack_ids

pytest.importorskip("cryptography", reason="requirements-encryption.txt is not installed")

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
SAID = tuple(range(1000, 1040))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sessions.db"


def contents(path) -> bytes:
    """All that lies on the disk."""
    return b"".join(file.read_bytes() for file in sorted(path.parent.iterdir()) if not file.name.endswith("-reserve"))


def talk(path, key) -> None:
    """A session with a log and a whole state, and an answer that is kept."""
    with LogPool(path, key=key, snapshot_tokens=16) as pool:
        pool.say("s", SAID[:20])
        wait_for_snapshots(pool, 1)
        pool.say("s", SAID[20:], key="the key")
        pool.crash()


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_what_was_said_is_not_in_the_file(path, key):
    talk(path, key)
    found = contents(path)
    assert (pack_ids(SAID[20:])[1:] in found) == (key is None)
    assert (b"rwkvstat" in found) == (key is None)
    assert (ANSWER.text.encode() in found) == (key is None)
    assert pieces_in(path)
    with LogPool(path, key=key) as pool:
        assert pool.ids("s") == SAID
        lease = pool.lease("s", key="the key")
        assert lease.replay.text == ANSWER.text
        lease.release()
        assert pool.say("s", (7,)).version == 3
        assert pool.ids("s") == (*SAID, 7)


@pytest.mark.parametrize(("key", "code"), [(None, "state_key_missing"), (OTHER, "state_key_wrong")])
def test_without_its_key_the_file_is_refused_by_name_and_left_as_it_is(path, key, code):
    talk(path, KEY)
    with LogPool(path, key=key) as pool:
        with pytest.raises(StorageFailed, match="state-key-file") as failed:
            pool.say("s", (7,))
        assert failed.value.code == code
        with pytest.raises(StorageFailed):
            pool.order(Status())
    with LogPool(path, key=KEY) as pool:
        assert pool.ids("s") == SAID


def test_a_file_without_a_key_goes_on_with_one(path):
    talk(path, None)
    with LogPool(path, key=KEY) as pool:
        assert pool.ids("s") == SAID
        pool.say("s", SAID)
        pool.say("new", SAID[:3])
        pool.crash()
    with LogPool(path, key=KEY) as pool:
        assert pool.ids("s") == (*SAID, *SAID)
    with LogPool(path) as pool, pytest.raises(StorageFailed, match="is encrypted"):
        pool.ids("new")


def test_a_value_in_the_place_of_another_is_damage(path):
    """Whoever can write the file can repair its checksums, but has no key."""
    with LogPool(path, key=KEY) as pool:
        pool.say("a", (1, 2, 3))
        pool.say("b", (4, 5, 6))
        pool.crash()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (one, *a), (other, *b) = (row[:6] for row in connection.execute("SELECT * FROM kept_turns ORDER BY state"))
        a[2], b[2] = b[2], a[2]
        for state, rest in ((one, a), (other, b)):
            values = (rest[2], checksum_of(state, *rest), state)
            connection.execute("UPDATE kept_turns SET ids = ?, checksum = ? WHERE state = ?", values)
        connection.commit()
    with LogPool(path, key=KEY) as pool:
        for name in "ab":
            with pytest.raises(Unprocessable, match="damaged"):
                pool.ids(name)


def test_sealed_values():
    sealer, other = Sealer(KEY), Sealer(OTHER)
    for data in (b"", b"x", os.urandom(2**20)):
        one, again = sealer.seal(data, "here"), sealer.seal(memoryview(data), "here")
        assert one != again
        assert sealer.open(one, "here") == sealer.open(again, "here") == data
        for wrong in (lambda one=one: sealer.open(one, "there"), lambda one=one: other.open(one, "here"),
                      lambda one=one: sealer.open(one[:-1] + bytes([one[-1] ^ 1]), "here")):  # fmt: skip
            with pytest.raises(sealer.failed):
                wrong()
    assert sealer.open(b"never sealed", "here") == b"never sealed"


def test_the_key_file(tmp_path):
    file = tmp_path / "key"
    file.write_text(KEY.hex() + "\n")
    file.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        read_key(str(file))
    file.chmod(0o600)
    assert read_key(str(file)) == KEY
    assert open_store(Config(state_db=str(tmp_path / "s.db"), state_key_file=str(file))).file.sealer is not None
    for text in (KEY.hex()[2:], "not hexadecimal", "ü"):
        file.write_text(text)
        with pytest.raises(UsageError, match="64 hexadecimal digits"):
            read_key(str(file))
    with pytest.raises(UsageError, match="cannot read"):
        read_key(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="PostgreSQL"):
        open_store(Config(state_url="postgresql://x/y", snapshots=str(tmp_path), state_key_file=str(file)))
