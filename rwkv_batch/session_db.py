"""The sessions on disk: the only module that knows SQLite. One connection, used by one thread.

What is listed (sessions, versions) is kept apart from the states' bytes (pieces), so listing reads no state. A state belongs to
all versions that name it: a fork copies rows, not bytes. The bytes of a version that is too old are written over by the next
state: to give its pages back to SQLite would take as long as to write them. WAL with synchronous=FULL: what was committed
survives a power loss. Moves from an older schema happen in `MIGRATIONS`; a newer one is refused. A file of rwkv_lightning can
be used as it is: its tables, `sessions` and `prefix_cache`, stay beside ours, and only what is deleted leaves them.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from rwkv_batch.errors import RwkvBatchError, StorageFailed, Unavailable

log = logging.getLogger(__name__)

APPLICATION_ID = 0x72776B76  # "rwkv"
PAGE_BYTES = 65536  # states are megabytes: twice the rate of 4 KiB pages
WAL_BYTES = 256 * 2**20  # a write-ahead log longer than this is copied back although turns wait,
WAL_SOON_BYTES = 16 * 2**20  # longer than this when none does: a little at a time, lest one turn wait for all of it
STATE_SHIFT = 20  # of a piece's id: state << 20 | number
MAX_REPLAYS = 1000  # answers kept for their idempotency keys, in each namespace

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
MIGRATIONS = [SCHEMA]  # step n leads from user_version n to n + 1


class Replay(NamedTuple):
    """An answer kept for its idempotency key. `digest`: of the request; `answer`: what to say again."""

    key: str
    digest: bytes
    answer: bytes
    created: float


@dataclass
class Record:
    """One version of a session without its bytes; `state` names them."""

    version: int
    state: int
    tokens: int
    newlines: int
    num_bytes: int
    updated: float


class Listed(NamedTuple):
    """What a list says of a session; `id` never changes and is larger for a session that was made later."""

    updated: float
    id: int
    name: str
    version: int
    tokens: int
    num_bytes: int


@dataclass
class Turn:
    """A state to keep as a new version of a session. `node`: (dialogue, number) when it is a new node of one."""

    namespace: str
    name: str
    version: int
    tokens: int
    newlines: int
    pieces: Iterable[bytes | memoryview]
    updated: float
    replays: list[tuple[str, Replay]] = field(default_factory=list)  # (session as the request named it, answer)
    node: tuple[str, int] | None = None


class SessionDatabase:
    """The file at `path`, opened by the first call that needs it and made by the first that writes.

    versions        of a session that are kept
    replay_seconds  how long answers are kept for their idempotency keys
    Every method raises StorageFailed when the file cannot be read or written, Unavailable when another server has it.
    """

    def __init__(self, path: str | os.PathLike, *, versions: int = 2, replay_seconds: float = 600.0):
        self.path = Path(path).absolute()
        self.versions = versions
        self.replay_seconds = replay_seconds
        self.max_pages: int | None = None  # for tests: a disk this full
        self._connection: sqlite3.Connection | None = None
        self._lock_file: IO[str] | None = None
        self._read_only = False
        self._written = 0  # bytes of states since the log was copied back

    # Reading.

    def find(self, namespace: str, name: str, version: int | None = None) -> Record | None:
        """Return the newest version of a session, or the one asked for; None when there is none."""
        rows = self._rows(
            f"SELECT {_RECORD} FROM kept_sessions s JOIN kept_versions v"
            " ON v.session = s.id AND v.version = ifnull(?, s.version) WHERE s.namespace = ? AND s.name = ?",
            (version, namespace, name),
        )
        return Record(*rows[0]) if rows else None

    def pieces(self, state: int) -> Iterator[bytes]:
        """Yield the bytes of a state as they were written."""
        for number in range(1 << STATE_SHIFT):
            rows = self._rows("SELECT data FROM kept_pieces WHERE id = ?", (state << STATE_SHIFT | number,))
            if not rows:
                return
            yield rows[0][0]

    def page(self, namespace: str, *, without: list[int], offset: int, limit: int) -> list[Listed]:
        """Return sessions, newest first, leaving out those with the ids `without`."""
        query = f"{_LIST} AND s.id NOT IN (SELECT value FROM json_each(?)) ORDER BY s.updated DESC, s.id DESC LIMIT ? OFFSET ?"
        return list(map(Listed._make, self._rows(query, (namespace, json.dumps(without), limit, offset))))

    def named_after(self, namespace: str, name: str, limit: int) -> list[Listed]:
        """Return the sessions whose names follow `name`, in the order of their names."""
        query = f"{_LIST} AND s.name > ? ORDER BY s.name LIMIT ?"
        return list(map(Listed._make, self._rows(query, (namespace, name, limit))))

    def count(self, namespace: str) -> int:
        """Return the number of sessions."""
        rows = self._rows("SELECT sessions FROM kept_counts WHERE namespace = ?", (namespace,))
        return rows[0][0] if rows else 0

    def ids(self, namespace: str, names: list[str]) -> list[int]:
        """Return the ids of those of these sessions that exist."""
        query = "SELECT id FROM kept_sessions WHERE namespace = ? AND name = ?"
        return [row[0] for name in names for row in self._rows(query, (namespace, name))]

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
        nodes = [row[0][len(name) + 1 :] for row in self._rows(_PREFIXED.format("name"), (namespace, *_range(name)))]
        numbers = [int(node) for node in nodes if node.isascii() and node.isdigit() and len(node) < 19]
        return max([0, *numbers, *(row[0] for row in rows)])

    def replay(self, namespace: str, name: str, key: str) -> Replay | None:
        """Return the answer that was kept for an idempotency key."""
        rows = self._rows(
            "SELECT key, digest, answer, created FROM kept_replays"
            " WHERE namespace = ? AND name = ? AND key = ? AND created > ?",
            (namespace, name, key, time.time() - self.replay_seconds),
        )
        return Replay(*rows[0]) if rows else None

    def reference_state(self, name: str) -> bytes | None:
        """Return what rwkv_lightning stored under a session's name in the same file, None if nothing."""
        if not self._has_reference():
            return None
        rows = self._rows("SELECT state_blob FROM sessions WHERE session_id = ?", (name,))
        return rows[0][0] if rows else None

    # Writing. Each call is one transaction.

    def write(self, turns: list[Turn]) -> None:
        """Keep new versions, all or none."""
        with self._transaction() as connection:
            for turn in turns:
                state, num_bytes = self._add_state(connection, turn.pieces)
                self._written += num_bytes
                self._set_version(connection, turn, state, num_bytes)
                if turn.node is not None:
                    connection.execute(
                        "INSERT INTO kept_dialogues VALUES (?, ?, ?) ON CONFLICT DO UPDATE"
                        " SET last_node = max(last_node, excluded.last_node)",
                        (turn.namespace, *turn.node),
                    )
                for name, replay in turn.replays:
                    self._add_replay(connection, turn.namespace, name, replay)

    def delete(self, namespace: str, name: str, *, prefix: bool) -> set[str]:
        """Forget a session, and with `prefix` all "name:…"; return the names of those that were there."""
        if not self._open(create=False):
            return set()
        tests = [("{0} = ?", (name,)), ("{0} >= ? AND {0} < ?", _range(name))][: 1 + prefix]
        forgotten: set[str] = set()
        with self._transaction() as connection:
            for test, values in tests:
                ours, theirs = f"namespace = ? AND {test.format('name')}", test.format("session_id")
                connection.execute(f"DELETE FROM kept_replays WHERE {ours}", (namespace, *values))
                query = f"SELECT id, name FROM kept_sessions WHERE {ours}"
                for session, found in connection.execute(query, (namespace, *values)).fetchall():
                    forgotten.add(found)
                    for state in self._drop_versions(connection, session, 2**62):
                        span = (state << STATE_SHIFT, (state + 1) << STATE_SHIFT)
                        connection.execute("DELETE FROM kept_pieces WHERE id >= ? AND id < ?", span)
                    connection.execute("DELETE FROM kept_sessions WHERE id = ?", (session,))
                if not namespace and self._has_reference():
                    rows = connection.execute(f"SELECT session_id FROM sessions WHERE {theirs}", values).fetchall()
                    forgotten |= {row[0] for row in rows}
                    connection.execute(f"DELETE FROM sessions WHERE {theirs}", values)
        return forgotten

    def fork(self, namespace: str, record: Record, copies: list[str]) -> None:
        """Make sessions whose version 1 is `record`; none of them may exist."""
        now = time.time()
        with self._transaction() as connection:
            for name in copies:
                self._set_version(connection, Turn(namespace, name, 1, record.tokens, record.newlines, (), now),
                                  record.state, record.num_bytes)  # fmt: skip

    def rewind(self, namespace: str, name: str, record: Record, version: int) -> None:
        """Make a kept version of a session its version `version`."""
        turn = Turn(namespace, name, version, record.tokens, record.newlines, (), time.time())
        with self._transaction() as connection:
            self._set_version(connection, turn, record.state, record.num_bytes)

    def tidy(self, *, waiting: bool, idle: bool = False) -> None:
        """Copy the write-ahead log back if it is time to.

        waiting  somebody waits for what is to be done next
        idle     nothing was to be done for a while: also make the log's file empty
        """
        if self._connection is None or self._read_only:
            return
        limit = 0 if idle else WAL_BYTES if waiting else WAL_SOON_BYTES
        with contextlib.suppress(sqlite3.Error, OSError):
            if self._written > limit or (idle and os.path.getsize(f"{self.path}-wal")):
                self._connection.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if idle else 'PASSIVE'})")
                self._written = 0

    def open_if_there(self) -> bool:
        """Open the file unless it does not exist yet."""
        return self._open(create=False)

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()
        lock_file, self._lock_file = self._lock_file, None
        if lock_file is not None:
            lock_file.close()

    # Inside.

    def _add_state(self, connection: sqlite3.Connection, pieces: Iterable[bytes | memoryview]) -> tuple[int, int]:
        """Write a state's bytes; return its id and how many they are."""
        spare = connection.execute("SELECT max(state) FROM kept_spare").fetchone()[0]
        if spare is not None:
            state = spare
            connection.execute("DELETE FROM kept_spare WHERE state = ?", (state,))
        else:
            last = connection.execute("SELECT max(id) FROM kept_pieces").fetchone()[0]
            state = 1 if last is None else (last >> STATE_SHIFT) + 1
        id, num_bytes = state << STATE_SHIFT, 0
        for piece in pieces:
            connection.execute("REPLACE INTO kept_pieces VALUES (?, ?)", (id, piece))  # in place when the size is the same
            num_bytes += len(piece)
            id += 1
        if spare is not None:
            connection.execute("DELETE FROM kept_pieces WHERE id >= ? AND id < ?", (id, (state + 1) << STATE_SHIFT))
        return state, num_bytes

    def _set_version(self, connection: sqlite3.Connection, turn: Turn, state: int, num_bytes: int) -> None:
        """Make a state the newest version of a session, and forget versions that are too old."""
        connection.execute(
            "INSERT INTO kept_sessions (namespace, name, version, updated) VALUES (?, ?, ?, ?) ON CONFLICT (namespace, name)"
            " DO UPDATE SET version = excluded.version, updated = excluded.updated",
            (turn.namespace, turn.name, turn.version, turn.updated),
        )
        query = "SELECT id FROM kept_sessions WHERE namespace = ? AND name = ?"
        session = connection.execute(query, (turn.namespace, turn.name)).fetchone()[0]
        connection.execute(
            "INSERT INTO kept_versions VALUES (?, ?, ?, ?, ?, ?, ?)",
            (session, turn.version, state, turn.tokens, turn.newlines, num_bytes, turn.updated),
        )
        kept = connection.execute(
            "SELECT version FROM kept_versions WHERE session = ? ORDER BY version DESC LIMIT 1 OFFSET ?",
            (session, self.versions),
        ).fetchone()
        if kept is not None:
            for spare in self._drop_versions(connection, session, kept[0]):
                connection.execute("INSERT INTO kept_spare VALUES (?)", (spare,))

    def _drop_versions(self, connection: sqlite3.Connection, session: int, up_to: int) -> list[int]:
        """Forget versions of a session; return the states that no other version needs."""
        where = "session = ? AND version <= ?"
        states = connection.execute(f"SELECT state FROM kept_versions WHERE {where}", (session, up_to)).fetchall()
        connection.execute(f"DELETE FROM kept_versions WHERE {where}", (session, up_to))
        query = "SELECT 1 FROM kept_versions WHERE state = ? LIMIT 1"
        return [state for (state,) in set(states) if not connection.execute(query, (state,)).fetchone()]

    def _add_replay(self, connection: sqlite3.Connection, namespace: str, name: str, replay: Replay) -> None:
        connection.execute("INSERT OR REPLACE INTO kept_replays VALUES (?, ?, ?, ?, ?, ?)", (namespace, name, *replay))
        oldest = connection.execute(
            "SELECT created FROM kept_replays WHERE namespace = ? ORDER BY created DESC LIMIT 1 OFFSET ?",
            (namespace, MAX_REPLAYS),
        ).fetchone()
        limit = max(replay.created - self.replay_seconds, oldest[0] if oldest else 0.0)
        connection.execute("DELETE FROM kept_replays WHERE namespace = ? AND created <= ?", (namespace, limit))

    def _has_reference(self) -> bool:
        """Whether rwkv_lightning has kept sessions in this file."""
        return {"session_id", "state_blob"} <= {row[1] for row in self._rows("PRAGMA table_info(sessions)", ())}

    def _rows(self, query: str, values: tuple) -> list[tuple]:
        """Return what a query finds; nothing when there is no file yet."""
        if not self._open(create=False):
            return []
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
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
            if isinstance(error, sqlite3.Error):
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
        except (sqlite3.Error, OSError) as error:
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
            connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        connection.execute("PRAGMA cache_size = -16384")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > len(MIGRATIONS):
            raise StorageFailed(
                f"{self.path} was written by a newer version of this server (schema {version}, known is {len(MIGRATIONS)})",
                code="state_db_too_new",
            )
        for number, script in enumerate(MIGRATIONS[version:], version + 1):
            connection.executescript(
                f"BEGIN IMMEDIATE; {script} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {number}; COMMIT;"
            )
        if self.max_pages is not None:
            connection.execute(f"PRAGMA max_page_count = {self.max_pages}")
        log.info(
            "sessions in %s: SQLite %s, journal %s, pages of %d KiB, %d sessions%s",
            self.path, sqlite3.sqlite_version, *connection.execute("PRAGMA journal_mode").fetchone(),
            connection.execute("PRAGMA page_size").fetchone()[0] // 1024,
            connection.execute("SELECT ifnull(sum(sessions), 0) FROM kept_counts").fetchone()[0],
            ", READ-ONLY: no turn can be kept" if self._read_only else "",
        )  # fmt: skip

    def _failed(self, what: str, error: Exception) -> StorageFailed:
        log.error("cannot %s %s: %s", what, self.path, error)
        damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
        advice = "; move it away or give another file with --state-db" if damaged else ""
        return StorageFailed(f"cannot {what} the session file {self.path.name}: {error}{advice}")


_RECORD = "v.version, v.state, v.tokens, v.newlines, v.num_bytes, v.updated"
_LIST = (
    "SELECT v.updated, s.id, s.name, v.version, v.tokens, v.num_bytes FROM kept_sessions s"
    " JOIN kept_versions v ON v.session = s.id AND v.version = s.version WHERE s.namespace = ?"
)
_PREFIXED = "SELECT {} FROM kept_sessions WHERE namespace = ? AND name >= ? AND name < ?"


def _range(name: str) -> tuple[str, str]:
    """Bounds of the names that begin with "name:"."""
    return f"{name}:", f"{name};"  # ; follows :
