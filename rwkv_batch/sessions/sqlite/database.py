"""Sessions in an SQLite file; one connection, used by one thread.

What is listed (sessions, versions) is kept apart from the states' bytes (pieces), so listing reads no state. A state belongs to
all versions that name it: a fork copies rows, not bytes (`states.py`). WAL with synchronous=FULL: what was committed survives a
power loss. A newer schema is refused (`schema.py`). A file of rwkv_lightning can be used as it is: its tables, `sessions` and
`prefix_cache`, stay beside ours, and only what is deleted leaves them (`reference.py`).
"""

import json
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rwkv_batch.errors import StorageFailed, Unprocessable
from rwkv_batch.sessions.sqlite.catalog import SessionCatalog, place_of_replay, range_of
from rwkv_batch.sessions.sqlite.connection import DatabaseFile
from rwkv_batch.sessions.sqlite.schema import checksum_of
from rwkv_batch.sessions.sqlite.sealing import Sealer, sealed
from rwkv_batch.sessions.sqlite.states import (
    EMPTY,
    Kept,
    add_spare,
    add_turn,
    add_whole,
    drop_pieces,
    drop_session,
    is_used,
    next_number,
    put_piece,
    rebase_turn,
    seal_of,
    set_version,
    spare_state,
)
from rwkv_batch.sessions.sqlite.steady import NotAsKnown, SteadyTurns
from rwkv_batch.sessions.store import NewVersion, Record, Replay, Source, SourceLost

MAX_REPLAYS = 100_000  # answers kept for their idempotency keys, in each namespace,
REPLAYS_BETWEEN = 1000  # and how many are added until that is looked at
FORGET_AT_ONCE = 8  # old responses: a few at a time, lest a turn wait for all of them


class Draft(NamedTuple):
    """A whole state that is being written: what there is of it, in how many pieces."""

    kept: Kept
    num_pieces: int


class SessionDatabase(SessionCatalog):
    """The file at `path`, opened by the first call that needs it and made by the first that writes.

    versions          of a session that are kept
    replay_seconds    how long answers are kept for their idempotency keys
    response_seconds  how long the states of responses are kept, and `max_responses` how many of them in each namespace
    max_bytes         of the file, beside its write-ahead log; None = what the disk has room for
    key               what was said in sessions is encrypted with it (`sealing.py`), None = with none
    writer            whose draft is meant: each may have one
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
        max_bytes: int | None = None,
        key: bytes | None = None,
    ):
        super().__init__(DatabaseFile(path), replay_seconds=replay_seconds, response_seconds=response_seconds)
        self.file.max_bytes = max_bytes
        self.file.sealer = Sealer(key) if key is not None else None
        self.versions = versions
        self.max_responses = max_responses
        self._to_clear = False
        self._num_replays: Counter[str] = Counter()  # by namespace, since it was looked whether they are too many
        self.writer = 0
        self._drafts: dict[int, Draft] = {}
        self._steady = SteadyTurns(versions)
        self.file.opened = self._opened

    def _opened(self) -> None:
        self._steady.forget_all()
        self._reference.look()

    # What the newest version is, for those who only compare.

    def newest(self, namespace: str, name: str) -> tuple[int, float]:
        """Return number and time of the newest version of a session; (0, 0.0) when there is none."""
        known = self._steady.newest(namespace, name)
        if known is not None:
            return known
        record = self.find(namespace, name)
        return (record.version, record.updated) if record is not None else (0, 0.0)

    def is_kept(self, record: Record) -> bool:
        """Whether a version that was found is still there."""
        query = "SELECT 1 FROM kept_versions WHERE session = ? AND version = ? AND state = ? AND updated = ?"
        return bool(self.file.rows(query, (record.session, record.version, record.state, record.updated)))

    # Writing. Each call is one transaction.

    def write(self, versions: list[NewVersion]) -> None:
        """Keep new versions, all or none."""
        try:
            self._write(versions)
        except NotAsKnown:
            self._steady.forget_all()
            self._write(versions)
        self.file.count_written(0, len(versions))
        self._reference.shadow({new.name for new in versions if not new.namespace})

    def _write(self, versions: list[NewVersion]) -> None:
        with self.file.transaction() as connection:
            steady = [new for new in versions if self._steady.knows(new)]
            others = [new for new in versions if not self._steady.knows(new)] if len(steady) < len(versions) else []
            after = []
            for new in others:  # first, for they may go on from what the turns replace
                kept = self._add_state(connection, new)
                after.append(self._steady.follow(new, set_version(connection, new, kept, None, self.versions), kept))
                if new.node is not None:
                    connection.execute(
                        "INSERT INTO kept_dialogues VALUES (?, ?, ?) ON CONFLICT DO UPDATE"
                        " SET last_node = max(last_node, excluded.last_node)",
                        (new.namespace, *new.node),
                    )
            if steady:
                after += self._steady.write(connection, steady)
            for new in versions:
                for name, replay in new.replays:
                    self._add_replay(connection, new.namespace, name, replay)
            for namespace in {new.namespace for new in versions if new.replays}:
                self._forget_replays(connection, namespace)
            for namespace in {new.namespace for new in versions if new.response}:
                add_spare(connection, self._forget_responses(connection, namespace, max(FORGET_AT_ONCE, len(versions))))
        if not any(new.response for new in versions):  # else some may be forgotten already
            for new, newest in zip([*others, *steady], after, strict=True):
                self._steady.learn(new, newest)

    def _add_state(self, connection: sqlite3.Connection, new: NewVersion) -> Kept:
        if new.pieces is not None:
            base = add_whole(connection, new.pieces, self._states_of_drafts())
            self.file.count_written(base.num_bytes)
            return add_turn(connection, base, new.ids, new.model) if new.ids else base
        base = EMPTY if new.source is None else self._source(new.namespace, new.source)
        return add_turn(connection, base._replace(num_bytes=new.num_bytes), new.ids, new.model)

    def _source(self, namespace: str, source: Source) -> Kept:
        """Return the state of a version."""
        try:
            record = self.find(namespace, source.name, source.version)
        except Unprocessable:
            record = None
        if record is None or record.updated != source.updated or record.seal is None:
            raise SourceLost(source.name)
        return Kept(record.state, record.num_bytes, record.seal)

    # A whole state for a version that has none of its own, piece by piece.

    def begin_draft(self) -> None:
        """Begin to write a state, in place of one that was begun before."""
        self.drop_draft()
        with self.file.transaction() as connection:
            state = spare_state(connection, self._states_of_drafts())
            if state is None or is_used(connection, state):
                state = next_number(connection)
                add_spare(connection, [state])  # as long as it is not finished, its bytes may be written over
        self._drafts[self.writer] = Draft(Kept(state, 0, b""), 0)

    def add_to_draft(self, piece: bytes | memoryview) -> None:
        """Write the next piece."""
        kept, num_pieces = self._drafts[self.writer]
        with self.file.transaction() as connection:
            put_piece(connection, kept.state, num_pieces, piece)
        self.file.count_written(len(piece))
        kept = Kept(kept.state, kept.num_bytes + len(piece), seal_of(kept.seal, piece))
        self._drafts[self.writer] = Draft(kept, num_pieces + 1)

    def finish_draft(self, namespace: str, source: Source, ids: Sequence[int]) -> bool:
        """Let a version's state follow by `ids` from what was written; False when there is no such version any more."""
        draft, num_pieces = self._drafts.pop(self.writer)
        try:
            kept = self._source(namespace, source)
        except SourceLost:
            self._to_clear = True
            return False
        turn = self._turn(kept.state)
        if turn is None:
            return True  # it is whole
        with self.file.transaction() as connection:
            connection.execute("DELETE FROM kept_spare WHERE state = ?", (draft.state,))
            drop_pieces(connection, draft.state, num_pieces)
            add_spare(connection, rebase_turn(connection, turn, draft, ids))
        self._steady.moved(turn.state)
        return True

    def drop_draft(self) -> None:
        """A draft is not finished."""
        self._drafts.pop(self.writer, None)

    @property
    def has_draft(self) -> bool:
        """Whether one was begun and neither finished nor dropped."""
        return self.writer in self._drafts

    def _states_of_drafts(self) -> list[int]:
        return [draft.kept.state for draft in self._drafts.values()]

    def delete(self, namespace: str, name: str, *, prefix: bool) -> set[str]:
        """Forget a session, and with `prefix` all "name:…"; return the names of those that were there.

        On a full disk the bytes of their states stay where they are until there is room to clear them.
        """
        if not self.file.open(create=False):
            return set()
        self._steady.forget_all()
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
        tests = [("{0} = ?", (name,)), ("{0} >= ? AND {0} < ?", range_of(name))][: 1 + prefix]
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
                            drop_pieces(connection, state)
                        else:
                            add_spare(connection, [state])
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
                kept = Kept(record.state, record.num_bytes, record.seal)
                set_version(connection, new, kept, None, self.versions)

    def rewind(self, namespace: str, name: str, record: Record, version: int) -> None:
        """Make a kept version of a session its version `version`."""
        new = NewVersion(namespace, name, version, record.tokens, record.newlines, (), time.time())
        origin = record.version if record.origin is None else record.origin
        self._steady.forget(namespace, name)
        with self.file.transaction() as connection:
            kept = Kept(record.state, record.num_bytes, record.seal)
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
                    drop_pieces(connection, state)

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
                query = "SELECT state FROM kept_spare WHERE state NOT IN (SELECT value FROM json_each(?)) LIMIT ?"
                spare = connection.execute(query, (json.dumps(self._states_of_drafts()), FORGET_AT_ONCE)).fetchall()
                for (state,) in spare:
                    connection.execute("DELETE FROM kept_spare WHERE state = ?", (state,))
                    if not is_used(connection, state):
                        drop_pieces(connection, state)
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
            self._steady.forget_all()
        return states

    def _add_replay(self, connection: sqlite3.Connection, namespace: str, name: str, replay: Replay) -> None:
        place = place_of_replay(namespace, name, replay.key)
        digest, answer = (sealed(self.file.sealer, value, place) for value in (replay.digest, replay.answer))
        values = (namespace, name, replay.key, digest, answer, replay.created)
        connection.execute("INSERT OR REPLACE INTO kept_replays VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, checksum_of(*values)))
        self._num_replays[namespace] += 1

    def _forget_replays(self, connection: sqlite3.Connection, namespace: str) -> None:
        """Answers that are old go, and now and then the oldest of those that are too many."""
        limit = self.now() - self.replay_seconds
        if self._num_replays[namespace] >= REPLAYS_BETWEEN:
            self._num_replays[namespace] = 0
            oldest = connection.execute(
                "SELECT created FROM kept_replays WHERE namespace = ? ORDER BY created DESC LIMIT 1 OFFSET ?",
                (namespace, MAX_REPLAYS),
            ).fetchone()
            limit = max(limit, oldest[0] if oldest else 0.0)
        connection.execute("DELETE FROM kept_replays WHERE namespace = ? AND created <= ?", (namespace, limit))
