"""The tables of sessions, how an older file is brought up to date, and how damage to a file is found.

A bit that flips on the disk must not make one session's state another's. So each version carries a checksum of all that leads
to its bytes, and of how they end; and when a file is opened, what sessions are looked up in is read whole.
"""

import contextlib
import sqlite3
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from rwkv_batch.errors import StorageFailed

APPLICATION_ID = 0x72776B76  # "rwkv"
STATE_SHIFT = 20  # of a piece's id: state << 20 | number
SEAL_BYTES = 4  # the end of a state's bytes: its own checksum

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
TURNS = """
CREATE TABLE kept_turns (state INTEGER PRIMARY KEY, base INTEGER NOT NULL, base_seal BLOB NOT NULL, ids BLOB NOT NULL,
    seal BLOB NOT NULL, model TEXT NOT NULL, checksum INTEGER NOT NULL);
CREATE INDEX turns_base ON kept_turns (base);
"""
MIGRATIONS = [SCHEMA, CHECKSUMS, TURNS]  # step n leads from user_version n to n + 1
TABLES = ("kept_sessions", "kept_versions", "kept_spare", "kept_counts", "kept_dialogues", "kept_replays")  # of contents


def checksum_of(*values: Any) -> int:
    """The CRC-32 of a row's values."""
    return zlib.crc32(msgspec.msgpack.encode(values))


def prepare(connection: sqlite3.Connection, path: Path, *, read_only: bool) -> int:
    """Check the file and bring it up to date as far as it can be written; return its schema. Raises what damage raises."""
    connection.create_function("checksum_of", -1, checksum_of, deterministic=True)
    known, found = len(MIGRATIONS), connection.execute("PRAGMA user_version").fetchone()[0]
    if not 0 <= found <= known:
        raise StorageFailed(
            f"{path} was written by a newer version of this server (schema {found}, known is {known})",
            code="state_db_too_new",
        )
    if found:
        check_contents(connection, found)
        if read_only:
            return found
    for number, script in enumerate(MIGRATIONS[found:], found + 1):
        marks = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {number};"
        connection.executescript(f"BEGIN IMMEDIATE; {script} {marks} COMMIT;")
    return known


def check_contents(connection: sqlite3.Connection, schema: int) -> None:
    """Raise sqlite3.DatabaseError unless sessions can be found by their names: a session that is there is never missed.

    Reads all but the states and turns, which carry checksums.
    """
    found = {row[0]: row[1] for row in connection.execute("SELECT name, sql FROM sqlite_master")}
    changed = [name for name, sql in _definitions(schema).items() if name not in found or _plain(found[name]) != sql]
    if changed:
        raise sqlite3.DatabaseError(f"the definition of {changed[0]} is damaged")
    for table in TABLES:
        result = connection.execute(f"PRAGMA integrity_check({table})").fetchone()[0]
        if result != "ok":
            raise sqlite3.DatabaseError(f"{table} is damaged: {result.splitlines()[-1]}")
    counts = connection.execute("SELECT ifnull(sum(sessions + responses), 0) FROM kept_counts" if schema > 1 else
                                "SELECT ifnull(sum(sessions), 0) FROM kept_counts").fetchone()  # fmt: skip
    if counts != connection.execute("SELECT count(*) FROM kept_sessions NOT INDEXED").fetchone():
        raise sqlite3.DatabaseError("sessions are missing")


@lru_cache
def _definitions(version: int) -> dict[str, str]:
    """The definitions in a new file of this schema, by name."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.create_function("checksum_of", -1, checksum_of, deterministic=True)
        for script in MIGRATIONS[:version]:
            connection.executescript(script)
        return {name: _plain(sql) for name, sql in connection.execute("SELECT name, sql FROM sqlite_master")}


def _plain(sql: str | None) -> str:
    """A definition without what versions of SQLite may write in another way."""
    return "".join((sql or "").split()).lower()
