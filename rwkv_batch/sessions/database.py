"""The sessions on disk: the only module that knows SQLite. One connection, used by one thread.

What is listed (sessions, versions) is kept apart from the states' bytes (pieces), so listing reads no state. A state belongs to
all versions that name it: a fork copies rows, not bytes. The bytes of a version that is too old are written over by the next
state: to give its pages back to SQLite would take as long as to write them. WAL with synchronous=FULL: what was committed
survives a power loss. Moves from an older schema happen in `MIGRATIONS`; a newer one is refused. A file of rwkv_lightning can
be used as it is: its tables, `sessions` and `prefix_cache`, stay beside ours, and only what is deleted leaves them.

A bit that flips on the disk must not make one session's state another's. So each version carries a checksum of all that leads
to its bytes, and of how they end; and when the file is opened, what sessions are looked up in is read whole.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from rwkv_batch.errors import RwkvBatchError, StorageFailed, Unavailable, Unprocessable
from rwkv_batch.sessions.store import NewVersion, Record, Replay, SessionSummary

log = logging.getLogger(__name__)

APPLICATION_ID = 0x72776B76  # "rwkv"
PAGE_BYTES = 65536  # states are megabytes: twice the rate of 4 KiB pages
WAL_BYTES = 256 * 2**20  # a write-ahead log longer than this is copied back although turns wait,
WAL_SOON_BYTES = 16 * 2**20  # longer than this when none does: a little at a time, lest one turn wait for all of it
STATE_SHIFT = 20  # of a piece's id: state << 20 | number
MAX_REPLAYS = 1000  # answers kept for their idempotency keys, in each namespace
SEAL_BYTES = 4  # the end of a state's bytes: its own checksum
RESERVE_BYTES = 16 * 2**20  # kept free on the disk to copy the write-ahead log back and delete sessions when it is full,
RESERVE_SHARE = 4  # or this part of what is free
FORGET_AT_ONCE = 8  # old responses: a few at a time, lest a turn wait for all of them
REFERENCE_ID = -(2**62)  # of the first of the sessions that are only in rwkv_lightning's table
DAMAGE = (sqlite3.Error, OSError, ValueError, OverflowError, msgspec.MsgspecError)  # what reading a damaged file raises

SCHEMA = """
CREATE TABLE kept_sessions (id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL,
    updated REAL NOT NULL, UNIQUE (namespace, name));
CREATE INDEX sessions_updated ON kept_sessions (namespace, updated);
CREATE TABLE kept_versions (session INTEGER NOT NULL, version INTEGER NOT NULL, state INTEGER NOT NULL, tokens INTEGER NOT NULL,
    newlines INTEGER NOT NULL, num_bytes INTEGER NOT NULL, updated REAL NOT NULL, PRIMARY KEY (session, version)) WITHOUT ROWID;
CREATE INDEX versions_state ON kept_versions (state);
CREATE TABLE kept_pieces (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE kept_spare (state INTEGER PRIMARY KEY);
CREATE TABLE kept_counts (namespace TEXT PRIMARY KEY, sessions INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE kept_dialogues (namespace TEXT NOT NULL, name TEXT NOT NULL, last_node INTEGER NOT NULL,
    PRIMARY KEY (namespace, name)) WITHOUT ROWID;
CREATE TABLE kept_replays (namespace TEXT NOT NULL, name TEXT NOT NULL, key TEXT NOT NULL, digest BLOB NOT NULL,
    answer BLOB NOT NULL, created REAL NOT NULL, PRIMARY KEY (namespace, name, key)) WITHOUT ROWID;
CREATE INDEX replays_created ON kept_replays (namespace, created);
CREATE TRIGGER session_added AFTER INSERT ON kept_sessions BEGIN
    INSERT INTO kept_counts VALUES (NEW.namespace, 1) ON CONFLICT DO UPDATE SET sessions = sessions + 1; END;
CREATE TRIGGER session_removed AFTER DELETE ON kept_sessions BEGIN
    UPDATE kept_counts SET sessions = sessions - 1 WHERE namespace = OLD.namespace; END;
"""
RESPONSE_NAMES = "resp_" + "[0-9a-f]" * 24  # by which versions before this schema can be told from sessions
CHECKSUMS = f"""
ALTER TABLE kept_sessions ADD COLUMN response INTEGER NOT NULL DEFAULT 0;
ALTER TABLE kept_versions ADD COLUMN origin INTEGER;
ALTER TABLE kept_versions ADD COLUMN seal BLOB;
ALTER TABLE kept_versions ADD COLUMN checksum INTEGER;
ALTER TABLE kept_replays ADD COLUMN checksum INTEGER;
ALTER TABLE kept_counts ADD COLUMN responses INTEGER NOT NULL DEFAULT 0;
DROP TRIGGER session_added;
DROP TRIGGER session_removed;
UPDATE kept_sessions SET response = 1 WHERE name GLOB '{RESPONSE_NAMES}' AND version = 1;
CREATE INDEX responses_updated ON kept_sessions (namespace, updated) WHERE response;
DELETE FROM kept_counts;
INSERT INTO kept_counts SELECT namespace, sum(NOT response), sum(response) FROM kept_sessions GROUP BY namespace;
CREATE TRIGGER session_added AFTER INSERT ON kept_sessions BEGIN
    INSERT INTO kept_counts VALUES (NEW.namespace, NOT NEW.response, NEW.response) ON CONFLICT DO UPDATE
    SET sessions = sessions + excluded.sessions, responses = responses + excluded.responses; END;
CREATE TRIGGER session_removed AFTER DELETE ON kept_sessions BEGIN
    UPDATE kept_counts SET sessions = sessions - NOT OLD.response, responses = responses - OLD.response
    WHERE namespace = OLD.namespace; END;
UPDATE kept_versions SET seal = (SELECT substr(data, -{SEAL_BYTES}) FROM kept_pieces
    WHERE id >= state << {STATE_SHIFT} AND id < (state + 1) << {STATE_SHIFT} ORDER BY id DESC LIMIT 1);
UPDATE kept_versions SET checksum = checksum_of(s.namespace, s.name, s.id, kept_versions.version, state, tokens, newlines,
    num_bytes, kept_versions.updated, origin, seal) FROM kept_sessions s WHERE s.id = session;
UPDATE kept_replays SET checksum = checksum_of(namespace, name, key, digest, answer, created);
"""
MIGRATIONS = [SCHEMA, CHECKSUMS]  # step n leads from user_version n to n + 1
TABLES = ("kept_sessions", "kept_versions", "kept_spare", "kept_counts", "kept_dialogues", "kept_replays")  # of contents


def checksum_of(*values: Any) -> int:
    """The CRC-32 of a row's values."""
    return zlib.crc32(msgspec.msgpack.encode(values))


class Bytes(NamedTuple):
    """A state as it was written: its id, how many bytes, the last of them."""

    state: int
    num_bytes: int
    seal: bytes | None


class SessionDatabase:
    """The file at `path`, opened by the first call that needs it and made by the first that writes.

    versions          of a session that are kept
    replay_seconds    how long answers are kept for their idempotency keys
    response_seconds  how long the states of responses are kept, and `max_responses` how many of them in each namespace
    Every method raises StorageFailed when the file cannot be read or written, Unavailable when another server has it, and those
    that read one session Unprocessable when what is said of it is damaged.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        versions: int = 2,
        replay_seconds: float = 600.0,
        response_seconds: float = 30 * 86400.0,
        max_responses: int = 1000,
    ):
        self.path = Path(path).absolute()
        self._reserve = self.path.with_name(self.path.name + "-reserve")
        self.versions = versions
        self.replay_seconds = replay_seconds
        self.response_seconds = response_seconds
        self.max_responses = max_responses
        self.max_pages: int | None = None  # for tests: a disk this full
        self._connection: sqlite3.Connection | None = None
        self._lock_file: IO[str] | None = None
        self._read_only = False
        self._schema = len(MIGRATIONS)  # of the open file
        self._reference: dict[str, SessionSummary] = {}  # sessions that are in rwkv_lightning's table and not in ours
        self._reserve_bytes = 0
        self._to_clear = False
        self._written = 0  # bytes of states since the log was copied back
        self._began = time.time() - time.monotonic()

    def now(self) -> float:
        """Epoch seconds that no change of the clock makes jump while the server runs; for what is kept for a time."""
        return self._began + time.monotonic()

    # Reading.

    def find(self, namespace: str, name: str, version: int | None = None) -> Record | None:
        """Return the newest version of a session, or the one asked for; None when there is none."""
        query = (
            f"SELECT {_RECORD[self._schema]}, s.version, (SELECT max(version) FROM kept_versions WHERE session = s.id)"
            " FROM kept_sessions s LEFT JOIN kept_versions v ON v.session = s.id AND v.version = ifnull(?, s.version)"
            " WHERE s.namespace = ? AND s.name = ?"
        )
        rows = self._rows(query, (version, namespace, name))
        if not rows:
            return None
        *values, last, largest = rows[0]
        if last != largest:  # an older version must not be taken for the newest
            raise _damaged(name)
        if values[0] is None:
            return None
        try:
            record = msgspec.convert(values, Record)
        except msgspec.MsgspecError:
            raise _damaged(name) from None
        if record.checksum not in (None, checksum_of(namespace, name, record.session, *record[:8])):
            raise _damaged(name)
        return None if record.response and record.updated <= self.now() - self.response_seconds else record

    def pieces(self, record: Record) -> Iterator[bytes]:
        """Yield the bytes of a version as they were written; Unprocessable when they are not those."""
        num_bytes, seal = 0, b""
        for number in range(1 << STATE_SHIFT):
            rows = self._rows("SELECT data FROM kept_pieces WHERE id = ?", (record.state << STATE_SHIFT | number,))
            if not rows:
                break
            piece = rows[0][0]
            if not isinstance(piece, bytes):
                raise _damaged()
            yield piece
            num_bytes, seal = num_bytes + len(piece), (seal + piece[-SEAL_BYTES:])[-SEAL_BYTES:]
        if record.seal is not None and (num_bytes, seal) != (record.num_bytes, record.seal):
            raise _damaged()

    def page(
        self, namespace: str, *, without: list[int], offset: int, limit: int, responses: bool = False
    ) -> list[SessionSummary]:
        """Return sessions, newest first, leaving out those with the ids `without`, and responses unless they are wanted."""
        query = f"{self._list(responses)} AND s.id NOT IN (SELECT value FROM json_each(?))"
        query += " ORDER BY s.updated DESC, s.id DESC LIMIT ? OFFSET ?"
        theirs = [session for session in self.reference(namespace) if session.id not in without]
        if not theirs:
            return self._listed(query, (namespace, json.dumps(without), limit, offset))
        ours = self._listed(query, (namespace, json.dumps(without), offset + limit, 0))
        return sorted([*ours, *theirs], reverse=True)[offset : offset + limit]

    def named_after(self, namespace: str, name: str, limit: int, *, responses: bool = False) -> list[SessionSummary]:
        """Return the sessions whose names follow `name`, in the order of their names; `reference` has the rest."""
        query = f"{self._list(responses)} AND s.name > ? ORDER BY s.name LIMIT ?"
        return self._listed(query, (namespace, name, limit))

    def reference(self, namespace: str) -> list[SessionSummary]:
        """Return the sessions that rwkv_lightning kept in the same file, as far as they are not among ours yet."""
        self._open(create=False)
        return [] if namespace else list(self._reference.values())

    def count(self, namespace: str, *, responses: bool = False) -> int:
        """Return the number of sessions, with responses when they are wanted."""
        what = "sessions + responses" if responses and self._schema > 1 else "sessions"
        rows = self._rows(f"SELECT {what} FROM kept_counts WHERE namespace = ?", (namespace,))
        return (rows[0][0] if rows else 0) + len(self.reference(namespace))

    def ids(self, namespace: str, names: list[str]) -> list[int]:
        """Return the ids of those of these sessions that exist."""
        query = "SELECT id FROM kept_sessions WHERE namespace = ? AND name = ?"
        ours = [row[0] for name in names for row in self._rows(query, (namespace, name))]
        return ours + [self._reference[name].id for name in names if not namespace and name in self._reference]

    def kept_versions(self, namespace: str, name: str) -> list[int]:
        """Return the versions of a session that can be rewound to, newest first."""
        query = (
            "SELECT v.version FROM kept_sessions s JOIN kept_versions v ON v.session = s.id"
            " WHERE s.namespace = ? AND s.name = ? ORDER BY v.version DESC"
        )
        return [row[0] for row in self._rows(query, (namespace, name))]

    def last_node(self, namespace: str, name: str) -> int:
        """Return the largest number a node of this dialogue ever had, 0 if none."""
        rows = self._rows("SELECT last_node FROM kept_dialogues WHERE namespace = ? AND name = ?", (namespace, name))
        query = "SELECT name FROM kept_sessions WHERE namespace = ? AND name >= ? AND name < ?"
        names = [row[0] for row in self._rows(query, (namespace, *_range(name)))]
        names += [session.name for session in self.reference(namespace) if session.name.startswith(f"{name}:")]
        nodes = [node[len(name) + 1 :] for node in names]
        numbers = [int(node) for node in nodes if node.isascii() and node.isdigit() and len(node) < 19]
        return max([0, *numbers, *(row[0] for row in rows)])

    def replay(self, namespace: str, name: str, key: str) -> Replay | None:
        """Return the answer that was kept for an idempotency key."""
        checksum = "checksum" if self._schema > 1 else "NULL"
        rows = self._rows(
            f"SELECT key, digest, answer, created, {checksum} FROM kept_replays"
            " WHERE namespace = ? AND name = ? AND key = ? AND created > ?",
            (namespace, name, key, self.now() - self.replay_seconds),
        )
        if not rows:
            return None
        *values, checksum = rows[0]
        if checksum not in (None, checksum_of(namespace, name, *values)):
            raise Unprocessable("the answer kept for this idempotency key is damaged", code="state_unusable")
        return Replay(*values)

    def reference_state(self, namespace: str, name: str) -> tuple[Any, float] | None:
        """Return what rwkv_lightning stored for a session that is not among ours, whatever it is, and when; None if nothing."""
        self._open(create=False)
        if namespace or name not in self._reference:
            return None
        rows = self._rows("SELECT state_blob FROM sessions WHERE session_id = ?", (name,))
        return (rows[0][0], self._reference[name].updated) if rows else None

    # Writing. Each call is one transaction.

    def write(self, turns: list[NewVersion]) -> None:
        """Keep new versions, all or none."""
        with self._transaction() as connection:
            for turn in turns:
                self._set_version(connection, turn, self._add_state(connection, turn.pieces))
                if turn.node is not None:
                    connection.execute(
                        "INSERT INTO kept_dialogues VALUES (?, ?, ?) ON CONFLICT DO UPDATE"
                        " SET last_node = max(last_node, excluded.last_node)",
                        (turn.namespace, *turn.node),
                    )
                for name, replay in turn.replays:
                    self._add_replay(connection, turn.namespace, name, replay)
            for namespace in {turn.namespace for turn in turns if turn.response}:
                for state in self._forget_responses(connection, namespace, max(FORGET_AT_ONCE, len(turns))):
                    connection.execute("INSERT INTO kept_spare VALUES (?)", (state,))
        self._shadow({turn.name for turn in turns if not turn.namespace})

    def delete(self, namespace: str, name: str, *, prefix: bool) -> set[str]:
        """Forget a session, and with `prefix` all "name:…"; return the names of those that were there.

        On a full disk the bytes of their states stay where they are until there is room to clear them.
        """
        if not self._open(create=False):
            return set()
        self._to_clear = True  # older versions of them may be among the states that are free
        try:
            return self._delete(namespace, name, prefix, bytes_too=True)
        except StorageFailed:
            if self._read_only:
                raise
            self._reserve.unlink(missing_ok=True)
            self._shorten_log()
            try:
                return self._delete(namespace, name, prefix, bytes_too=False)
            finally:
                self._shorten_log()
                self._keep_reserve()

    def _delete(self, namespace: str, name: str, prefix: bool, *, bytes_too: bool) -> set[str]:
        tests = [("{0} = ?", (name,)), ("{0} >= ? AND {0} < ?", _range(name))][: 1 + prefix]
        forgotten: set[str] = set()
        with self._transaction() as connection:
            for test, values in tests:
                ours, theirs = f"namespace = ? AND {test.format('name')}", test.format("session_id")
                connection.execute(f"DELETE FROM kept_replays WHERE {ours}", (namespace, *values))
                query = f"SELECT id, name FROM kept_sessions WHERE {ours}"
                for session, found in connection.execute(query, (namespace, *values)).fetchall():
                    forgotten.add(found)
                    for state in self._drop_session(connection, session):
                        if bytes_too:
                            self._drop_state(connection, state)
                        else:
                            connection.execute("INSERT INTO kept_spare VALUES (?)", (state,))
                if not namespace and self._has_reference():
                    rows = connection.execute(f"SELECT session_id FROM sessions WHERE {theirs}", values).fetchall()
                    forgotten |= {row[0] for row in rows}
                    connection.execute(f"DELETE FROM sessions WHERE {theirs}", values)
        if not namespace:
            self._shadow(forgotten)
        return forgotten

    def fork(self, namespace: str, record: Record, copies: list[str]) -> None:
        """Make sessions whose version 1 is `record`; none of them may exist."""
        now = time.time()
        with self._transaction() as connection:
            for name in copies:
                turn = NewVersion(namespace, name, 1, record.tokens, record.newlines, (), now)
                self._set_version(connection, turn, Bytes(record.state, record.num_bytes, record.seal))

    def rewind(self, namespace: str, name: str, record: Record, version: int) -> None:
        """Make a kept version of a session its version `version`."""
        turn = NewVersion(namespace, name, version, record.tokens, record.newlines, (), time.time())
        origin = record.version if record.origin is None else record.origin
        with self._transaction() as connection:
            self._set_version(connection, turn, Bytes(record.state, record.num_bytes, record.seal), origin)

    def clean_up(self) -> None:
        """Delete some of the responses that are too old, and some of the bytes that deleted sessions have left."""
        if self._connection is None or self._read_only:
            return
        self._clear_spare()
        query = "SELECT DISTINCT namespace FROM kept_sessions WHERE response AND updated <= ?"
        for (namespace,) in self._rows(query, (self.now() - self.response_seconds,)):
            with self._transaction() as connection:
                for state in self._forget_responses(connection, namespace, FORGET_AT_ONCE):
                    self._drop_state(connection, state)

    def tidy(self, *, waiting: bool, idle: bool = False) -> None:
        """Copy the write-ahead log back if it is time to.

        waiting  somebody waits for what is to be done next
        idle     nothing was to be done for a while: also make the log's file empty
        """
        if self._connection is None or self._read_only:
            return
        soon = min(WAL_SOON_BYTES, self._reserve_bytes // 2 or WAL_SOON_BYTES)  # what the reserve has room for
        limit = 0 if idle else WAL_BYTES if waiting else soon
        with contextlib.suppress(sqlite3.Error, OSError):
            if self._written > limit or (idle and os.path.getsize(f"{self.path}-wal")):
                self._connection.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if idle else 'PASSIVE'})")
                self._written = 0
        if idle:
            self._keep_reserve()

    def open_if_there(self) -> bool:
        """Open the file unless it does not exist yet."""
        return self._open(create=False)

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()
            if not self._read_only:
                with contextlib.suppress(OSError):
                    self._reserve.unlink(missing_ok=True)
        lock_file, self._lock_file = self._lock_file, None
        if lock_file is not None:
            lock_file.close()

    # Inside.

    def _keep_reserve(self) -> None:
        """Keep some room of the disk in a file beside ours, if there is any and we do not have it."""
        with contextlib.suppress(OSError, AttributeError):  # macOS has no such call, and then no reserve
            if not self._reserve.exists():
                with open(self._reserve, "xb") as file:
                    os.posix_fallocate(file.fileno(), 0, max(1, min(RESERVE_BYTES, self._free_bytes() // RESERVE_SHARE)))
        with contextlib.suppress(OSError):
            self._reserve_bytes = self._reserve.stat().st_size

    def _clear_spare(self) -> None:
        if self._to_clear:
            self._to_clear = False
            with self._transaction() as connection:
                spare = connection.execute("SELECT state FROM kept_spare LIMIT ?", (FORGET_AT_ONCE,)).fetchall()
                for (state,) in spare:
                    connection.execute("DELETE FROM kept_spare WHERE state = ?", (state,))
                    if not self._is_used(connection, state):
                        self._drop_state(connection, state)
            self._to_clear = bool(spare)

    def _shorten_log(self) -> None:
        """Give the room of the write-ahead log back, if the disk has room for the pages that only stand there."""
        with contextlib.suppress(sqlite3.Error, OSError):
            num_pages, page_bytes = (
                self._connection.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_count", "page_size")
            )
            if num_pages * page_bytes - os.path.getsize(self.path) <= self._free_bytes():
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _free_bytes(self) -> int:
        disk = os.statvfs(self.path)
        return disk.f_bavail * disk.f_frsize

    def _add_state(self, connection: sqlite3.Connection, pieces: Iterable[bytes | memoryview]) -> Bytes:
        """Write a state's bytes."""
        spare = connection.execute("SELECT max(state) FROM kept_spare").fetchone()[0]
        if spare is not None:
            state = spare
            connection.execute("DELETE FROM kept_spare WHERE state = ?", (state,))
            if self._is_used(connection, state):
                raise sqlite3.DatabaseError("a state that is in use is listed as free")
        else:
            last = connection.execute("SELECT max(id) FROM kept_pieces").fetchone()[0]
            state = 1 if last is None else (last >> STATE_SHIFT) + 1
        id, num_bytes, seal = state << STATE_SHIFT, 0, b""
        for piece in pieces:
            connection.execute("REPLACE INTO kept_pieces VALUES (?, ?)", (id, piece))  # in place when the size is the same
            num_bytes, seal = num_bytes + len(piece), (seal + bytes(piece[-SEAL_BYTES:]))[-SEAL_BYTES:]
            id += 1
        if spare is not None:
            connection.execute("DELETE FROM kept_pieces WHERE id >= ? AND id < ?", (id, (state + 1) << STATE_SHIFT))
        self._written += num_bytes
        return Bytes(state, num_bytes, seal)

    def _set_version(self, connection: sqlite3.Connection, turn: NewVersion, kept: Bytes, origin: int | None = None) -> None:
        """Make a state the newest version of a session, and forget versions that are too old."""
        connection.execute(
            "INSERT INTO kept_sessions (namespace, name, version, updated, response) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (namespace, name) DO UPDATE SET version = excluded.version, updated = excluded.updated",
            (turn.namespace, turn.name, turn.version, turn.updated, turn.response),
        )
        query = "SELECT id FROM kept_sessions WHERE namespace = ? AND name = ?"
        session = connection.execute(query, (turn.namespace, turn.name)).fetchone()[0]
        said = (turn.version, kept.state, turn.tokens, turn.newlines, kept.num_bytes, turn.updated, origin, kept.seal)
        connection.execute(
            "INSERT INTO kept_versions (session, version, state, tokens, newlines, num_bytes, updated, origin, seal, checksum)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (session, *said, checksum_of(turn.namespace, turn.name, session, *said)),
        )
        oldest = connection.execute(
            "SELECT version FROM kept_versions WHERE session = ? ORDER BY version DESC LIMIT 1 OFFSET ?",
            (session, self.versions),
        ).fetchone()
        if oldest is not None:
            for spare in self._drop_versions(connection, session, oldest[0]):
                connection.execute("INSERT INTO kept_spare VALUES (?)", (spare,))

    def _drop_versions(self, connection: sqlite3.Connection, session: int, up_to: int) -> list[int]:
        """Forget versions of a session; return the states that no other version needs."""
        where = "session = ? AND version <= ?"
        states = connection.execute(f"SELECT state FROM kept_versions WHERE {where}", (session, up_to)).fetchall()
        connection.execute(f"DELETE FROM kept_versions WHERE {where}", (session, up_to))
        return [state for (state,) in set(states) if not self._is_used(connection, state)]

    def _drop_session(self, connection: sqlite3.Connection, session: int) -> list[int]:
        """Forget a session; return the states that no other needs."""
        states = self._drop_versions(connection, session, 2**62)
        connection.execute("DELETE FROM kept_sessions WHERE id = ?", (session,))
        return states

    def _drop_state(self, connection: sqlite3.Connection, state: int) -> None:
        span = (state << STATE_SHIFT, (state + 1) << STATE_SHIFT)
        connection.execute("DELETE FROM kept_pieces WHERE id >= ? AND id < ?", span)

    def _is_used(self, connection: sqlite3.Connection, state: int) -> bool:
        return connection.execute("SELECT 1 FROM kept_versions WHERE state = ? LIMIT 1", (state,)).fetchone() is not None

    def _forget_responses(self, connection: sqlite3.Connection, namespace: str, at_most: int) -> list[int]:
        """Forget some responses that are too old or too many; return the states that no version needs any more."""
        query = "SELECT id, updated FROM kept_sessions WHERE response AND namespace = ? ORDER BY updated LIMIT ?"
        count = connection.execute("SELECT responses FROM kept_counts WHERE namespace = ?", (namespace,)).fetchone()[0]
        limit, states = self.now() - self.response_seconds, []
        for session, updated in connection.execute(query, (namespace, at_most)).fetchall():
            if updated > limit and count <= self.max_responses:
                break
            states += self._drop_session(connection, session)
            count -= 1
        return states

    def _shadow(self, names: set[str]) -> None:
        """Sessions of rwkv_lightning with these names are not to be seen any more: they are among ours, or deleted."""
        for name in names & self._reference.keys():
            del self._reference[name]

    def _add_replay(self, connection: sqlite3.Connection, namespace: str, name: str, replay: Replay) -> None:
        values = (namespace, name, *replay)
        connection.execute("INSERT OR REPLACE INTO kept_replays VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, checksum_of(*values)))
        oldest = connection.execute(
            "SELECT created FROM kept_replays WHERE namespace = ? ORDER BY created DESC LIMIT 1 OFFSET ?",
            (namespace, MAX_REPLAYS),
        ).fetchone()
        limit = max(replay.created - self.replay_seconds, oldest[0] if oldest else 0.0)
        connection.execute("DELETE FROM kept_replays WHERE namespace = ? AND created <= ?", (namespace, limit))

    def _has_reference(self) -> bool:
        """Whether rwkv_lightning has kept sessions in this file."""
        return {"session_id", "state_blob"} <= self._reference_columns()

    def _reference_columns(self) -> set[str]:
        return {row[1] for row in self._rows("PRAGMA table_info(sessions)", ())}

    def _find_reference(self) -> dict[str, SessionSummary]:
        """What rwkv_lightning has kept, as far as there is no session of ours with that name."""
        time_of = _REFERENCE_TIME if "last_updated" in self._reference_columns() else "0"
        query = (
            f"SELECT {time_of}, rowid + {REFERENCE_ID}, session_id, 1, 0, ifnull(length(state_blob), 0) FROM sessions r"
            " WHERE typeof(session_id) = 'text' AND NOT EXISTS"
            " (SELECT 1 FROM kept_sessions WHERE namespace = '' AND name = r.session_id)"
        )
        return {session.name: session for session in self._listed(query, ())} if self._has_reference() else {}

    def _list(self, responses: bool) -> str:
        """How sessions are listed, with responses or without."""
        return _LIST if responses or self._schema == 1 else f"{_LIST} AND NOT s.response"

    def _listed(self, query: str, values: tuple) -> list[SessionSummary]:
        rows = self._rows(query, values)
        try:
            return msgspec.convert(rows, list[SessionSummary])
        except msgspec.MsgspecError as error:
            raise self._failed("read", error) from None

    def _rows(self, query: str, values: tuple) -> list[tuple]:
        """Return what a query finds; nothing when there is no file yet."""
        if not self._open(create=False):
            return []
        try:
            return self._connection.execute(query, values).fetchall()
        except DAMAGE as error:
            raise self._failed("read", error) from None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit what is done inside, all or nothing."""
        self._open(create=True)
        connection = self._connection
        try:
            if self._read_only:
                raise sqlite3.OperationalError("attempt to write a readonly database")
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            if isinstance(error, (sqlite3.Error, OverflowError)):
                raise self._failed("write", error) from None
            raise

    def _open(self, *, create: bool) -> bool:
        """Open the file unless it is open; False when it does not exist and is not to be made."""
        if self._connection is not None:
            return True
        if not create and not self.path.exists():
            return False
        self._read_only = False
        try:
            self._take_lock()
            self._connect()
        except DAMAGE as error:
            self.close()
            raise self._failed("open", error) from None
        except RwkvBatchError:
            self.close()
            raise
        return True

    def _take_lock(self) -> None:
        """Make sure that no other server uses the file; the lock goes with the process, however it ends."""
        try:
            self._lock_file = open(f"{self.path}.lock", "a+", encoding="ascii")  # noqa: SIM115 - held while the file is open
        except OSError as error:
            if not self.path.exists() or error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            self._read_only = True  # nothing can be made beside it, so nobody writes
            return
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock_file.seek(0)
            owner = self._lock_file.read(32).strip()
            raise Unavailable(
                f"another server (process {owner}) uses {self.path}; give this one a file of its own with --state-db",
                code="state_db_locked",
            ) from None
        with contextlib.suppress(OSError):  # a full disk: the lock counts, not what the file says
            os.ftruncate(self._lock_file.fileno(), 0)
            os.write(self._lock_file.fileno(), b"%d\n" % os.getpid())

    def _connect(self) -> None:
        """Open the connection, bring the schema up to date."""
        self._read_only |= self.path.exists() and not os.access(self.path, os.W_OK)
        mode = "rwc"
        if self._read_only:  # "immutable" needs nothing beside the file, but would not see turns in its write-ahead log
            log_file = Path(f"{self.path}-wal")
            mode = "ro" if log_file.exists() and log_file.stat().st_size else "ro&immutable=1"
        quoted = str(self.path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
        if not self.path.exists():  # what is said in sessions is nobody else's business
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(f"file:{quoted}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False)
        self._connection = connection
        if not self._read_only:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
                raise sqlite3.OperationalError("write-ahead log not possible here")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            connection.execute("PRAGMA secure_delete = ON")  # what was said in a deleted session is nobody's business
            connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        connection.execute("PRAGMA cache_size = -16384")
        connection.execute("PRAGMA temp_store = MEMORY")  # a turn does not fail because another disk is full
        connection.create_function("checksum_of", -1, checksum_of, deterministic=True)
        known, found = len(MIGRATIONS), connection.execute("PRAGMA user_version").fetchone()[0]
        if not 0 <= found <= known:
            raise StorageFailed(
                f"{self.path} was written by a newer version of this server (schema {found}, known is {known})",
                code="state_db_too_new",
            )
        self._schema = found
        if found:
            self._check_contents(connection)
        if not (self._read_only and found):
            for number, script in enumerate(MIGRATIONS[found:], found + 1):
                marks = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {number};"
                connection.executescript(f"BEGIN IMMEDIATE; {script} {marks} COMMIT;")
            self._schema = known
        self._reference = self._find_reference()
        if not self._read_only:
            self._keep_reserve()
        if self.max_pages is not None:
            connection.execute(f"PRAGMA max_page_count = {self.max_pages}")
        log.info(
            "sessions in %s: SQLite %s, journal %s, pages of %d KiB, %d sessions%s",
            self.path, sqlite3.sqlite_version, *connection.execute("PRAGMA journal_mode").fetchone(),
            connection.execute("PRAGMA page_size").fetchone()[0] // 1024,
            connection.execute("SELECT ifnull(sum(sessions), 0) FROM kept_counts").fetchone()[0],
            ", READ-ONLY: no turn can be kept" if self._read_only else "",
        )  # fmt: skip

    def _check_contents(self, connection: sqlite3.Connection) -> None:
        """Raise sqlite3.DatabaseError unless sessions can be found by their names: a session that is there is never missed.

        Reads all but the states, which carry checksums.
        """
        schema = {row[0]: row[1] for row in connection.execute("SELECT name, sql FROM sqlite_master")}
        changed = [name for name, sql in _schema_of(self._schema).items() if name not in schema or _plain(schema[name]) != sql]
        if changed:
            raise sqlite3.DatabaseError(f"the definition of {changed[0]} is damaged")
        for table in TABLES:
            found = connection.execute(f"PRAGMA integrity_check({table})").fetchone()[0]
            if found != "ok":
                raise sqlite3.DatabaseError(f"{table} is damaged: {found.splitlines()[-1]}")
        counts = connection.execute("SELECT ifnull(sum(sessions + responses), 0) FROM kept_counts" if self._schema > 1 else
                                    "SELECT ifnull(sum(sessions), 0) FROM kept_counts").fetchone()  # fmt: skip
        if counts != connection.execute("SELECT count(*) FROM kept_sessions NOT INDEXED").fetchone():
            raise sqlite3.DatabaseError("sessions are missing")

    def _failed(self, what: str, error: Exception) -> StorageFailed:
        log.error("cannot %s %s: %s", what, self.path, error)
        damaged = not isinstance(error, (sqlite3.OperationalError, OSError))
        advice = "; move it away or give another file with --state-db" if damaged else ""
        return StorageFailed(f"cannot {what} the session file {self.path.name}: {error}{advice}")


_RECORD = {
    1: "v.version, v.state, v.tokens, v.newlines, v.num_bytes, v.updated, NULL, NULL, NULL, s.id, 0",
    2: "v.version, v.state, v.tokens, v.newlines, v.num_bytes, v.updated, v.origin, v.seal, v.checksum, s.id, s.response",
}  # by schema
_LIST = (
    "SELECT v.updated, s.id, s.name, v.version, v.tokens, v.num_bytes FROM kept_sessions s"
    " JOIN kept_versions v ON v.session = s.id AND v.version = s.version WHERE s.namespace = ?"
)
_REFERENCE_TIME = (  # a number, or as SQLite and Python write a time
    "CASE WHEN typeof(last_updated) IN ('integer', 'real') THEN last_updated"
    " ELSE ifnull((julianday(last_updated) - 2440587.5) * 86400, 0) END"
)


@lru_cache
def _schema_of(version: int) -> dict[str, str]:
    """The definitions in a new file of this schema, by name."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.create_function("checksum_of", -1, checksum_of, deterministic=True)
        for script in MIGRATIONS[:version]:
            connection.executescript(script)
        return {name: _plain(sql) for name, sql in connection.execute("SELECT name, sql FROM sqlite_master")}


def _plain(sql: str | None) -> str:
    """A definition without what versions of SQLite may write in another way."""
    return "".join((sql or "").split()).lower()


def _damaged(name: str | None = None) -> Unprocessable:
    whose = "" if name is None else f" of session {name!r}"
    return Unprocessable(f"the stored state{whose} cannot be used: what leads to it is damaged", code="state_unusable")


def _range(name: str) -> tuple[str, str]:
    """Bounds of the names that begin with "name:"."""
    return f"{name}:", f"{name};"  # ; follows :
