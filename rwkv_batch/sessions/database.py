"""Sessions in an SQLite file; one connection, used by one thread.

What is listed (sessions, versions) is kept apart from the states' bytes (pieces), so listing reads no state. A state belongs to
all versions that name it: a fork copies rows, not bytes. The bytes of a version that is too old are written over by the next
state: to give its pages back to SQLite would take as long as to write them. WAL with synchronous=FULL: what was committed
survives a power loss. A newer schema is refused (`schema.py`). A file of rwkv_lightning can be used as it is: its tables,
`sessions` and `prefix_cache`, stay beside ours, and only what is deleted leaves them.
"""

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from rwkv_batch.errors import StorageFailed, Unprocessable
from rwkv_batch.sessions.connection import DatabaseFile
from rwkv_batch.sessions.schema import SEAL_BYTES, STATE_SHIFT, checksum_of
from rwkv_batch.sessions.store import NewVersion, Record, Replay, SessionSummary

MAX_REPLAYS = 1000  # answers kept for their idempotency keys, in each namespace
FORGET_AT_ONCE = 8  # old responses: a few at a time, lest a turn wait for all of them
REFERENCE_ID = -(2**62)  # of the first of the sessions that are only in rwkv_lightning's table

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
        self.versions = versions
        self.replay_seconds = replay_seconds
        self.response_seconds = response_seconds
        self.max_responses = max_responses
        self.file = DatabaseFile(path)
        self._reference = ReferenceTable(self.file)
        self.file.opened = self._reference.look
        self._to_clear = False
        self._began = time.time() - time.monotonic()

    def now(self) -> float:
        """Epoch seconds that no change of the clock makes jump while the server runs; for what is kept for a time."""
        return self._began + time.monotonic()

    # Reading.

    def find(self, namespace: str, name: str, version: int | None = None) -> Record | None:
        """Return the newest version of a session, or the one asked for; None when there is none."""
        query = (
            f"SELECT {_RECORD[self.file.schema]}, s.version, (SELECT max(version) FROM kept_versions WHERE session = s.id)"
            " FROM kept_sessions s LEFT JOIN kept_versions v ON v.session = s.id AND v.version = ifnull(?, s.version)"
            " WHERE s.namespace = ? AND s.name = ?"
        )
        rows = self.file.rows(query, (version, namespace, name))
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
            rows = self.file.rows("SELECT data FROM kept_pieces WHERE id = ?", (record.state << STATE_SHIFT | number,))
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
            return summaries(self.file, query, (namespace, json.dumps(without), limit, offset))
        ours = summaries(self.file, query, (namespace, json.dumps(without), offset + limit, 0))
        return sorted([*ours, *theirs], reverse=True)[offset : offset + limit]

    def named_after(self, namespace: str, name: str, limit: int, *, responses: bool = False) -> list[SessionSummary]:
        """Return the sessions whose names follow `name`, in the order of their names; `reference` has the rest."""
        query = f"{self._list(responses)} AND s.name > ? ORDER BY s.name LIMIT ?"
        return summaries(self.file, query, (namespace, name, limit))

    def reference(self, namespace: str) -> list[SessionSummary]:
        """Return the sessions that rwkv_lightning kept in the same file, as far as they are not among ours yet."""
        return self._reference.sessions(namespace)

    def count(self, namespace: str, *, responses: bool = False) -> int:
        """Return the number of sessions, with responses when they are wanted."""
        what = "sessions + responses" if responses and self.file.schema > 1 else "sessions"
        rows = self.file.rows(f"SELECT {what} FROM kept_counts WHERE namespace = ?", (namespace,))
        return (rows[0][0] if rows else 0) + len(self.reference(namespace))

    def ids(self, namespace: str, names: list[str]) -> list[int]:
        """Return the ids of those of these sessions that exist."""
        query = "SELECT id FROM kept_sessions WHERE namespace = ? AND name = ?"
        ours = [row[0] for name in names for row in self.file.rows(query, (namespace, name))]
        return ours + self._reference.ids(namespace, names)

    def kept_versions(self, namespace: str, name: str) -> list[int]:
        """Return the versions of a session that can be rewound to, newest first."""
        query = (
            "SELECT v.version FROM kept_sessions s JOIN kept_versions v ON v.session = s.id"
            " WHERE s.namespace = ? AND s.name = ? ORDER BY v.version DESC"
        )
        return [row[0] for row in self.file.rows(query, (namespace, name))]

    def last_node(self, namespace: str, name: str) -> int:
        """Return the largest number a node of this dialogue ever had, 0 if none."""
        rows = self.file.rows("SELECT last_node FROM kept_dialogues WHERE namespace = ? AND name = ?", (namespace, name))
        query = "SELECT name FROM kept_sessions WHERE namespace = ? AND name >= ? AND name < ?"
        names = [row[0] for row in self.file.rows(query, (namespace, *_range(name)))]
        names += [session.name for session in self.reference(namespace) if session.name.startswith(f"{name}:")]
        nodes = [node[len(name) + 1 :] for node in names]
        numbers = [int(node) for node in nodes if node.isascii() and node.isdigit() and len(node) < 19]
        return max([0, *numbers, *(row[0] for row in rows)])

    def replay(self, namespace: str, name: str, key: str) -> Replay | None:
        """Return the answer that was kept for an idempotency key."""
        checksum = "checksum" if self.file.schema > 1 else "NULL"
        rows = self.file.rows(
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
        return self._reference.state(namespace, name)

    # Writing. Each call is one transaction.

    def write(self, versions: list[NewVersion]) -> None:
        """Keep new versions, all or none."""
        with self.file.transaction() as connection:
            for new in versions:
                kept = add_state(connection, new.pieces)
                self.file.count_written(kept.num_bytes)
                set_version(connection, new, kept, None, self.versions)
                if new.node is not None:
                    connection.execute(
                        "INSERT INTO kept_dialogues VALUES (?, ?, ?) ON CONFLICT DO UPDATE"
                        " SET last_node = max(last_node, excluded.last_node)",
                        (new.namespace, *new.node),
                    )
                for name, replay in new.replays:
                    self._add_replay(connection, new.namespace, name, replay)
            for namespace in {new.namespace for new in versions if new.response}:
                for state in self._forget_responses(connection, namespace, max(FORGET_AT_ONCE, len(versions))):
                    connection.execute("INSERT INTO kept_spare VALUES (?)", (state,))
        self._reference.shadow({new.name for new in versions if not new.namespace})

    def delete(self, namespace: str, name: str, *, prefix: bool) -> set[str]:
        """Forget a session, and with `prefix` all "name:…"; return the names of those that were there.

        On a full disk the bytes of their states stay where they are until there is room to clear them.
        """
        if not self.file.open(create=False):
            return set()
        self._to_clear = True  # older versions of them may be among the states that are free
        try:
            return self._delete(namespace, name, prefix, bytes_too=True)
        except StorageFailed:
            if self.file.read_only:
                raise
            self.file.give_up_reserve()
            try:
                return self._delete(namespace, name, prefix, bytes_too=False)
            finally:
                self.file.shorten_log()
                self.file.keep_reserve()

    def _delete(self, namespace: str, name: str, prefix: bool, *, bytes_too: bool) -> set[str]:
        tests = [("{0} = ?", (name,)), ("{0} >= ? AND {0} < ?", _range(name))][: 1 + prefix]
        forgotten: set[str] = set()
        with self.file.transaction() as connection:
            for test, values in tests:
                ours, theirs = f"namespace = ? AND {test.format('name')}", test.format("session_id")
                connection.execute(f"DELETE FROM kept_replays WHERE {ours}", (namespace, *values))
                query = f"SELECT id, name FROM kept_sessions WHERE {ours}"
                for session, found in connection.execute(query, (namespace, *values)).fetchall():
                    forgotten.add(found)
                    for state in drop_session(connection, session):
                        if bytes_too:
                            drop_state(connection, state)
                        else:
                            connection.execute("INSERT INTO kept_spare VALUES (?)", (state,))
                if not namespace:
                    forgotten |= self._reference.delete(connection, theirs, values)
        if not namespace:
            self._reference.shadow(forgotten)
        return forgotten

    def fork(self, namespace: str, record: Record, copies: list[str]) -> None:
        """Make sessions whose version 1 is `record`; none of them may exist."""
        now = time.time()
        with self.file.transaction() as connection:
            for name in copies:
                new = NewVersion(namespace, name, 1, record.tokens, record.newlines, (), now)
                kept = Bytes(record.state, record.num_bytes, record.seal)
                set_version(connection, new, kept, None, self.versions)

    def rewind(self, namespace: str, name: str, record: Record, version: int) -> None:
        """Make a kept version of a session its version `version`."""
        new = NewVersion(namespace, name, version, record.tokens, record.newlines, (), time.time())
        origin = record.version if record.origin is None else record.origin
        with self.file.transaction() as connection:
            kept = Bytes(record.state, record.num_bytes, record.seal)
            set_version(connection, new, kept, origin, self.versions)

    def clean_up(self) -> None:
        """Delete some of the responses that are too old, and some of the bytes that deleted sessions have left."""
        if not self.file.can_change:
            return
        self._clear_spare()
        query = "SELECT DISTINCT namespace FROM kept_sessions WHERE response AND updated <= ?"
        for (namespace,) in self.file.rows(query, (self.now() - self.response_seconds,)):
            with self.file.transaction() as connection:
                for state in self._forget_responses(connection, namespace, FORGET_AT_ONCE):
                    drop_state(connection, state)

    def tidy(self, *, waiting: bool, idle: bool = False) -> None:
        """Copy the write-ahead log back if it is time to; see `DatabaseFile.tidy`."""
        self.file.tidy(waiting=waiting, idle=idle)

    def open_if_there(self) -> bool:
        """Open the file unless it does not exist yet."""
        return self.file.open(create=False)

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        self.file.close()

    # Inside.

    def _clear_spare(self) -> None:
        if self._to_clear:
            self._to_clear = False
            with self.file.transaction() as connection:
                spare = connection.execute("SELECT state FROM kept_spare LIMIT ?", (FORGET_AT_ONCE,)).fetchall()
                for (state,) in spare:
                    connection.execute("DELETE FROM kept_spare WHERE state = ?", (state,))
                    if not is_used(connection, state):
                        drop_state(connection, state)
            self._to_clear = bool(spare)

    def _forget_responses(self, connection: sqlite3.Connection, namespace: str, at_most: int) -> list[int]:
        """Forget some responses that are too old or too many; return the states that no version needs any more."""
        query = "SELECT id, updated FROM kept_sessions WHERE response AND namespace = ? ORDER BY updated LIMIT ?"
        count = connection.execute("SELECT responses FROM kept_counts WHERE namespace = ?", (namespace,)).fetchone()[0]
        limit, states = self.now() - self.response_seconds, []
        for session, updated in connection.execute(query, (namespace, at_most)).fetchall():
            if updated > limit and count <= self.max_responses:
                break
            states += drop_session(connection, session)
            count -= 1
        return states

    def _add_replay(self, connection: sqlite3.Connection, namespace: str, name: str, replay: Replay) -> None:
        values = (namespace, name, *replay)
        connection.execute("INSERT OR REPLACE INTO kept_replays VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, checksum_of(*values)))
        oldest = connection.execute(
            "SELECT created FROM kept_replays WHERE namespace = ? ORDER BY created DESC LIMIT 1 OFFSET ?",
            (namespace, MAX_REPLAYS),
        ).fetchone()
        limit = max(replay.created - self.replay_seconds, oldest[0] if oldest else 0.0)
        connection.execute("DELETE FROM kept_replays WHERE namespace = ? AND created <= ?", (namespace, limit))

    def _list(self, responses: bool) -> str:
        """How sessions are listed, with responses or without."""
        return _LIST if responses or self.file.schema == 1 else f"{_LIST} AND NOT s.response"


class ReferenceTable:
    """Sessions that rwkv_lightning kept in the same file, as far as they are not among ours yet. They have no namespace."""

    def __init__(self, file: DatabaseFile):
        self._file = file
        self._sessions: dict[str, SessionSummary] = {}

    def look(self) -> None:
        """See what is there, now that the file is open."""
        time_of = _REFERENCE_TIME if "last_updated" in self._columns() else "0"
        query = (
            f"SELECT {time_of}, rowid + {REFERENCE_ID}, session_id, 1, 0, ifnull(length(state_blob), 0) FROM sessions r"
            " WHERE typeof(session_id) = 'text' AND NOT EXISTS"
            " (SELECT 1 FROM kept_sessions WHERE namespace = '' AND name = r.session_id)"
        )
        self._sessions = {session.name: session for session in summaries(self._file, query, ())} if self._exists() else {}

    def sessions(self, namespace: str) -> list[SessionSummary]:
        """Return all of them."""
        self._file.open(create=False)
        return [] if namespace else list(self._sessions.values())

    def ids(self, namespace: str, names: list[str]) -> list[int]:
        """Return the ids of those of these sessions that exist."""
        return [self._sessions[name].id for name in names if not namespace and name in self._sessions]

    def state(self, namespace: str, name: str) -> tuple[Any, float] | None:
        """Return what was stored for one, whatever it is, and when; None if nothing."""
        self._file.open(create=False)
        if namespace or name not in self._sessions:
            return None
        rows = self._file.rows("SELECT state_blob FROM sessions WHERE session_id = ?", (name,))
        return (rows[0][0], self._sessions[name].updated) if rows else None

    def delete(self, connection: sqlite3.Connection, where: str, values: tuple) -> set[str]:
        """Delete rows; return the names that were there."""
        if not self._exists():
            return set()
        names = {row[0] for row in connection.execute(f"SELECT session_id FROM sessions WHERE {where}", values).fetchall()}
        connection.execute(f"DELETE FROM sessions WHERE {where}", values)
        return names

    def shadow(self, names: set[str]) -> None:
        """Those with these names are not to be seen any more: they are among ours, or deleted."""
        for name in names & self._sessions.keys():
            del self._sessions[name]

    def _exists(self) -> bool:
        """Whether rwkv_lightning has kept sessions in this file."""
        return {"session_id", "state_blob"} <= self._columns()

    def _columns(self) -> set[str]:
        return {row[1] for row in self._file.rows("PRAGMA table_info(sessions)", ())}


def summaries(file: DatabaseFile, query: str, values: tuple) -> list[SessionSummary]:
    """Return the sessions that a query finds."""
    rows = file.rows(query, values)
    try:
        return msgspec.convert(rows, list[SessionSummary])
    except msgspec.MsgspecError as error:
        raise file.failed("read", error) from None


def add_state(connection: sqlite3.Connection, pieces: Iterable[bytes | memoryview]) -> Bytes:
    """Write a state's bytes."""
    spare = connection.execute("SELECT max(state) FROM kept_spare").fetchone()[0]
    if spare is not None:
        state = spare
        connection.execute("DELETE FROM kept_spare WHERE state = ?", (state,))
        if is_used(connection, state):
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
    return Bytes(state, num_bytes, seal)


def set_version(connection: sqlite3.Connection, new: NewVersion, kept: Bytes, origin: int | None, max_versions: int) -> None:
    """Make a state the newest version of a session, and forget versions that are too old."""
    connection.execute(
        "INSERT INTO kept_sessions (namespace, name, version, updated, response) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (namespace, name) DO UPDATE SET version = excluded.version, updated = excluded.updated",
        (new.namespace, new.name, new.version, new.updated, new.response),
    )
    query = "SELECT id FROM kept_sessions WHERE namespace = ? AND name = ?"
    session = connection.execute(query, (new.namespace, new.name)).fetchone()[0]
    said = (new.version, kept.state, new.tokens, new.newlines, kept.num_bytes, new.updated, origin, kept.seal)
    connection.execute(
        "INSERT INTO kept_versions (session, version, state, tokens, newlines, num_bytes, updated, origin, seal, checksum)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (session, *said, checksum_of(new.namespace, new.name, session, *said)),
    )
    oldest = connection.execute(
        "SELECT version FROM kept_versions WHERE session = ? ORDER BY version DESC LIMIT 1 OFFSET ?",
        (session, max_versions),
    ).fetchone()
    if oldest is not None:
        for spare in drop_versions(connection, session, oldest[0]):
            connection.execute("INSERT INTO kept_spare VALUES (?)", (spare,))


def drop_versions(connection: sqlite3.Connection, session: int, up_to: int) -> list[int]:
    """Forget versions of a session; return the states that no other version needs."""
    where = "session = ? AND version <= ?"
    states = connection.execute(f"SELECT state FROM kept_versions WHERE {where}", (session, up_to)).fetchall()
    connection.execute(f"DELETE FROM kept_versions WHERE {where}", (session, up_to))
    return [state for (state,) in set(states) if not is_used(connection, state)]


def drop_session(connection: sqlite3.Connection, session: int) -> list[int]:
    """Forget a session; return the states that no other needs."""
    states = drop_versions(connection, session, 2**62)
    connection.execute("DELETE FROM kept_sessions WHERE id = ?", (session,))
    return states


def drop_state(connection: sqlite3.Connection, state: int) -> None:
    """Delete a state's bytes."""
    span = (state << STATE_SHIFT, (state + 1) << STATE_SHIFT)
    connection.execute("DELETE FROM kept_pieces WHERE id >= ? AND id < ?", span)


def is_used(connection: sqlite3.Connection, state: int) -> bool:
    """Whether a version needs this state."""
    return connection.execute("SELECT 1 FROM kept_versions WHERE state = ? LIMIT 1", (state,)).fetchone() is not None


def _damaged(name: str | None = None) -> Unprocessable:
    whose = "" if name is None else f" of session {name!r}"
    return Unprocessable(f"the stored state{whose} cannot be used: what leads to it is damaged", code="state_unusable")


def _range(name: str) -> tuple[str, str]:
    """Bounds of the names that begin with "name:"."""
    return f"{name}:", f"{name};"  # ; follows :
