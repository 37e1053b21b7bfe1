"""What there is in an SQLite file of sessions, looked up."""

import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from rwkv_batch.errors import Unprocessable
from rwkv_batch.sessions.sqlite.connection import DatabaseFile
from rwkv_batch.sessions.sqlite.reference import ReferenceTable, summaries
from rwkv_batch.sessions.sqlite.schema import STATE_SHIFT, checksum_of
from rwkv_batch.sessions.sqlite.sealing import opened
from rwkv_batch.sessions.sqlite.states import EMPTY, Turn, place_of_piece, place_of_turn, seal_of, unpack_ids
from rwkv_batch.sessions.store import Record, Replay, SessionSummary, StoredState

_OLD_RECORD = "v.version, v.state, v.tokens, v.newlines, v.num_bytes, v.updated, NULL, NULL, NULL, s.id, 0"  # before checksums
_RECORD = "v.version, v.state, v.tokens, v.newlines, v.num_bytes, v.updated, v.origin, v.seal, v.checksum, s.id, s.response"
_TURN = "state, base, base_seal, ids, seal, model, checksum"
_LIST = (
    "SELECT v.updated, s.id, s.name, v.version, v.tokens, v.num_bytes FROM kept_sessions s"
    " JOIN kept_versions v ON v.session = s.id AND v.version = s.version WHERE s.namespace = ?"
)


class SessionCatalog:
    """Reads the file. See `SessionDatabase`."""

    shared = False

    def __init__(self, file: DatabaseFile, *, replay_seconds: float, response_seconds: float):
        self.file = file
        self.replay_seconds = replay_seconds
        self.response_seconds = response_seconds
        self._reference = ReferenceTable(file)
        file.opened = self._reference.look
        self._began = time.time() - time.monotonic()

    def now(self) -> float:
        """Epoch seconds that no change of the clock makes jump while the server runs; for what is kept for a time."""
        return self._began + time.monotonic()

    def find(self, namespace: str, name: str, version: int | None = None) -> Record | None:
        """Return the newest version of a session, or the one asked for; None when there is none."""
        query = (
            f"SELECT {_RECORD if self.file.schema > 1 else _OLD_RECORD}, s.version,"
            " (SELECT max(version) FROM kept_versions WHERE session = s.id)"
            " FROM kept_sessions s LEFT JOIN kept_versions v ON v.session = s.id AND v.version = ifnull(?, s.version)"
            " WHERE s.namespace = ? AND s.name = ?"
        )
        rows = self.file.rows(query, (version, namespace, name))
        if not rows:
            return None
        *values, last, largest = rows[0]
        if last != largest:  # an older version must not be taken for the newest
            raise damaged(name)
        if values[0] is None:
            return None
        try:
            record = msgspec.convert(values, Record)
        except msgspec.MsgspecError:
            raise damaged(name) from None
        if record.checksum not in (None, checksum_of(namespace, name, record.session, *record[:8])):
            raise damaged(name)
        return None if record.response and record.updated <= self.now() - self.response_seconds else record

    def load(self, record: Record) -> StoredState:
        """Return how a version's state comes about; Unprocessable, also from its pieces, when it is damaged."""
        state, seal, turns = record.state, record.seal, []
        while state and (turn := self._turn(state)) is not None:
            if turn.seal != seal or len(turns) > record.tokens:
                raise damaged()
            turns.append(turn)
            state, seal = turn.base, turn.base_seal
        if not state and seal != EMPTY.seal:
            raise damaged()
        try:
            ids = [id for turn in reversed(turns) for id in unpack_ids(self._opened_value(turn.ids, place_of_turn(turn.state)))]
        except ValueError:
            raise damaged() from None
        num_bytes = None if turns else record.num_bytes
        pieces = self._pieces(state, num_bytes, seal) if state else None
        return StoredState(pieces, ids, {turn.model for turn in turns}, state)

    def _turn(self, state: int) -> Turn | None:
        """Return the turn that leads to a state; None when that is whole."""
        if self.file.schema < 3:
            return None
        rows = self.file.rows(f"SELECT {_TURN} FROM kept_turns WHERE state = ?", (state,))
        if not rows:
            return None
        *values, checksum = rows[0]
        try:
            turn = msgspec.convert(values, Turn)
        except msgspec.MsgspecError:
            raise damaged() from None
        if checksum != checksum_of(*turn):
            raise damaged()
        return turn

    def _pieces(self, state: int, num_bytes: int | None, seal: bytes | None) -> Iterator[bytes]:
        """Yield the bytes of a whole state as they were written; Unprocessable when they are not those."""
        count, end = 0, b""
        for number in range(1 << STATE_SHIFT):
            id = state << STATE_SHIFT | number
            rows = self.file.rows("SELECT data FROM kept_pieces WHERE id = ?", (id,))
            if not rows:
                break
            if not isinstance(rows[0][0], bytes):
                raise damaged()
            piece = self._opened_value(rows[0][0], place_of_piece(id))
            yield piece
            count, end = count + len(piece), seal_of(end, piece)
        if seal is not None and (end != seal or num_bytes not in (None, count)):
            raise damaged()

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

    def oldest(self, limit: int) -> list[tuple[str, str]]:
        """Return namespace and name of the sessions and responses that were used longest ago."""
        namespaces = [row[0] for row in self.file.rows("SELECT namespace FROM kept_counts", ())]
        query = "SELECT updated, namespace, name FROM kept_sessions WHERE namespace = ? ORDER BY updated LIMIT ?"
        found = sorted(row for namespace in namespaces for row in self.file.rows(query, (namespace, limit)))
        return [(namespace, name) for _, namespace, name in found[:limit]]

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
        names = [row[0] for row in self.file.rows(query, (namespace, *range_of(name)))]
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
            raise damaged_answer()
        replay, place = Replay(*values), place_of_replay(namespace, name, key)
        digest, answer = (opened(self.file.sealer, value, place, damaged_answer) for value in (replay.digest, replay.answer))
        return replay._replace(digest=digest, answer=answer)

    def reference_state(self, namespace: str, name: str) -> tuple[Any, float] | None:
        """Return what rwkv_lightning stored for a session that is not among ours, whatever it is, and when; None if nothing."""
        return self._reference.state(namespace, name)

    def _opened_value(self, value: bytes, place: str) -> bytes:
        return opened(self.file.sealer, value, place, damaged)

    def _list(self, responses: bool) -> str:
        """How sessions are listed, with responses or without."""
        return _LIST if responses or self.file.schema == 1 else f"{_LIST} AND NOT s.response"


def damaged(name: str | None = None) -> Unprocessable:
    """The error for a session of which what the file says cannot be true."""
    whose = "" if name is None else f" of session {name!r}"
    return Unprocessable(f"the stored state{whose} cannot be used: what leads to it is damaged", code="state_unusable")


def damaged_answer() -> Unprocessable:
    """The same for an answer that was kept."""
    return Unprocessable("the answer kept for this idempotency key is damaged", code="state_unusable")


def place_of_replay(namespace: str, name: str, key: str) -> str:
    """What an answer and the digest of its request are sealed for."""
    return "\0".join(("answer", namespace, name, key))


def range_of(name: str) -> tuple[str, str]:
    """Bounds of the names that begin with "name:"."""
    return f"{name}:", f"{name};"  # ; follows :
