"""Where the states of versions lie: whole, in pieces, or as a turn, the ids that lead to one from another state.

Every state has a number, 0 is the empty one. A turn names the state it goes on from, its base, so the turns since a whole state
form a chain, and those of sessions that were forked a tree: a fork copies nothing. A turn whose base is replaced by a whole
state nearer to it stays the same state for all that name it. Each state has a seal, which whoever names it repeats: a number
that was given again is not mistaken for the state that had it before.

The bytes of a whole state that nobody needs any more are written over by the next one: to give its pages back to SQLite would
take as long as to write them. All functions work inside a transaction of the caller.
"""

import json
import os
import random
import sqlite3
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rwkv_batch.sessions.sqlite.many_rows import execute_for
from rwkv_batch.sessions.sqlite.schema import SEAL_BYTES, STATE_SHIFT, checksum_of
from rwkv_batch.sessions.sqlite.sealing import Sealer, sealed
from rwkv_batch.sessions.store import NewVersion

NARROW, WIDE = b"\2", b"\4"  # bytes of an id, in front of them
TURN_SEAL_BYTES = 8
_seals = random.Random(os.urandom(16))  # a system call for each turn would be waited for


class Kept(NamedTuple):
    """A state in the file: its number, the bytes it has when it is whole, its seal."""

    state: int
    num_bytes: int
    seal: bytes | None


EMPTY = Kept(0, 0, b"")


class Turn(NamedTuple):
    """The row of a turn: `ids`, packed and perhaps encrypted, lead to its state from `base`, whose seal is `base_seal`, when
    `model` reads them."""

    state: int
    base: int
    base_seal: bytes
    ids: bytes
    seal: bytes
    model: str


class StateConnection(sqlite3.Connection):
    """A connection that knows the largest number it has given to a state, None before the first, and what seals values."""

    last_number: int | None = None
    sealer: Sealer | None = None


def pack_ids(ids: Sequence[int]) -> bytes:
    """Ids as bytes: two for each where that is enough."""
    try:
        kind, packed = NARROW, array("H", ids)
    except OverflowError:
        kind, packed = WIDE, array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return kind + packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """What `pack_ids` packed; ValueError for anything else."""
    kind = {NARROW: "H", WIDE: "I"}.get(data[:1])
    if kind is None:
        raise ValueError("no packed ids")
    ids = array(kind)
    ids.frombytes(data[1:])
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def next_number(connection: StateConnection) -> int:
    """A number that no state has."""
    if connection.last_number is None:
        connection.last_number = _largest_number(connection)
    connection.last_number += 1
    return connection.last_number


def _largest_number(connection: sqlite3.Connection) -> int:
    last = connection.execute("SELECT max(id) FROM kept_pieces").fetchone()[0]
    tops = [connection.execute(f"SELECT max(state) FROM {table}").fetchone()[0] for table in ("kept_turns", "kept_spare")]
    return max(0 if last is None else last >> STATE_SHIFT, *(top or 0 for top in tops))


def add_whole(connection: StateConnection, pieces: Iterable[bytes | memoryview], drafts: Iterable[int]) -> Kept:
    """Write a state's bytes. `drafts`: spare states that are being written."""
    state = spare_state(connection, drafts)
    is_spare = state is not None
    if is_spare:
        connection.execute("DELETE FROM kept_spare WHERE state = ?", (state,))
        if is_used(connection, state):
            raise sqlite3.DatabaseError("a state that is in use is listed as free")
    else:
        state = next_number(connection)
    number, num_bytes, seal = 0, 0, b""
    for piece in pieces:
        put_piece(connection, state, number, piece)
        number, num_bytes, seal = number + 1, num_bytes + len(piece), seal_of(seal, piece)
    if is_spare:
        drop_pieces(connection, state, number)
    return Kept(state, num_bytes, seal)


def spare_state(connection: sqlite3.Connection, drafts: Iterable[int]) -> int | None:
    """A state whose bytes may be written over, if there is one beside `drafts`."""
    query = "SELECT max(state) FROM kept_spare WHERE state NOT IN (SELECT value FROM json_each(?))"
    return connection.execute(query, (json.dumps([*drafts]),)).fetchone()[0]


def put_piece(connection: StateConnection, state: int, number: int, piece: bytes | memoryview) -> None:
    """Write one piece, in place of what was there: without other pages when the size is the same."""
    id = state << STATE_SHIFT | number
    connection.execute("REPLACE INTO kept_pieces VALUES (?, ?)", (id, sealed(connection.sealer, piece, place_of_piece(id))))


def place_of_piece(id: int) -> str:
    """What the bytes of a piece are sealed for."""
    return f"piece {id}"


def place_of_turn(state: int) -> str:
    """What the ids of a turn are sealed for."""
    return f"turn {state}"


def seal_of(seal: bytes, piece: bytes | memoryview) -> bytes:
    """The seal of a whole state, its last bytes, with one piece more."""
    return (seal + bytes(piece[-SEAL_BYTES:]))[-SEAL_BYTES:]


def drop_pieces(connection: sqlite3.Connection, state: int, first: int = 0) -> None:
    """Delete a whole state's bytes, from piece `first` on."""
    span = (state << STATE_SHIFT | first, (state + 1) << STATE_SHIFT)
    connection.execute("DELETE FROM kept_pieces WHERE id >= ? AND id < ?", span)


def new_turn(connection: StateConnection, base: Kept, ids: Sequence[int], model: str) -> Turn:
    """The row of the ids that follow `base`."""
    state = next_number(connection)
    packed = sealed(connection.sealer, pack_ids(ids), place_of_turn(state))
    return Turn(state, base.state, base.seal, packed, _seals.randbytes(TURN_SEAL_BYTES), model)


def add_turns(connection: sqlite3.Connection, turns: Iterable[Turn]) -> None:
    """Write turns."""
    rows = [(*turn, checksum_of(*turn)) for turn in turns]
    execute_for(connection, "INSERT INTO kept_turns VALUES {rows}", rows)


def add_turn(connection: StateConnection, base: Kept, ids: Sequence[int], model: str) -> Kept:
    """Write the ids that follow `base`."""
    turn = new_turn(connection, base, ids, model)
    add_turns(connection, [turn])
    return Kept(turn.state, base.num_bytes, turn.seal)


def rebase_turn(connection: StateConnection, turn: Turn, base: Kept, ids: Sequence[int]) -> list[int]:
    """Let a turn's state follow from another base; return the whole states that nobody needs any more."""
    packed = sealed(connection.sealer, pack_ids(ids), place_of_turn(turn.state))
    new = turn._replace(base=base.state, base_seal=base.seal, ids=packed)
    connection.execute(
        "UPDATE kept_turns SET base = ?, base_seal = ?, ids = ?, checksum = ? WHERE state = ?",
        (new.base, new.base_seal, new.ids, checksum_of(*new), new.state),
    )
    return let_go(connection, {turn.base})


def set_version(connection: sqlite3.Connection, new: NewVersion, kept: Kept, origin: int | None, max_versions: int) -> int:
    """Make a state the newest version of a session, and forget versions that are too old; return the session's id."""
    connection.execute(
        "INSERT INTO kept_sessions (namespace, name, version, updated, response) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (namespace, name) DO UPDATE SET version = excluded.version, updated = excluded.updated",
        (new.namespace, new.name, new.version, new.updated, new.response),
    )
    query = "SELECT id FROM kept_sessions WHERE namespace = ? AND name = ?"
    session = connection.execute(query, (new.namespace, new.name)).fetchone()[0]
    add_versions(connection, [version_row(new, session, kept, origin)])
    oldest = connection.execute(
        "SELECT version FROM kept_versions WHERE session = ? ORDER BY version DESC LIMIT 1 OFFSET ?",
        (session, max_versions),
    ).fetchone()
    if oldest is not None:
        add_spare(connection, drop_versions(connection, session, oldest[0]))
    return session


def version_row(new: NewVersion, session: int, kept: Kept, origin: int | None) -> tuple:
    """The row of a version, with the checksum of all that is said of it."""
    said = (new.version, kept.state, new.tokens, new.newlines, kept.num_bytes, new.updated, origin, kept.seal)
    return session, *said, checksum_of(new.namespace, new.name, session, *said)


def add_versions(connection: sqlite3.Connection, rows: list[tuple]) -> None:
    """Write the rows of versions."""
    columns = "session, version, state, tokens, newlines, num_bytes, updated, origin, seal, checksum"
    execute_for(connection, f"INSERT INTO kept_versions ({columns}) VALUES {{rows}}", rows)


def add_spare(connection: sqlite3.Connection, states: Iterable[int]) -> None:
    """The bytes of these states may be written over."""
    connection.executemany("INSERT INTO kept_spare VALUES (?)", [(state,) for state in states])


def drop_versions(connection: sqlite3.Connection, session: int, up_to: int) -> list[int]:
    """Forget versions of a session; return the whole states that nobody needs any more."""
    where = "session = ? AND version <= ?"
    states = connection.execute(f"SELECT state FROM kept_versions WHERE {where}", (session, up_to)).fetchall()
    connection.execute(f"DELETE FROM kept_versions WHERE {where}", (session, up_to))
    return let_go(connection, {state for (state,) in states})


def drop_session(connection: sqlite3.Connection, session: int) -> list[int]:
    """Forget a session; return the whole states that nobody needs any more."""
    states = drop_versions(connection, session, 2**62)
    connection.execute("DELETE FROM kept_sessions WHERE id = ?", (session,))
    return states


def let_go(connection: sqlite3.Connection, states: set[int]) -> list[int]:
    """Those that named these states do not any more: delete the turns that only led there; return the whole states that
    nobody needs either."""
    waiting, whole = sorted(states - {0}), set()
    while waiting:
        state = waiting.pop()
        if is_used(connection, state):
            continue
        turn = connection.execute("SELECT base FROM kept_turns WHERE state = ?", (state,)).fetchone()
        if turn is None:
            whole.add(state)
            continue
        connection.execute("DELETE FROM kept_turns WHERE state = ?", (state,))
        if turn[0] and turn[0] not in waiting:
            waiting.append(turn[0])
    return sorted(whole)


def is_used(connection: sqlite3.Connection, state: int) -> bool:
    """Whether a version or a turn needs this state."""
    query = "SELECT 1 FROM kept_versions WHERE state = ? UNION ALL SELECT 1 FROM kept_turns WHERE base = ? LIMIT 1"
    return connection.execute(query, (state, state)).fetchone() is not None
