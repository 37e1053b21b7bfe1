"""Turns that follow those written before, which is nearly all of them: written without looking anything up.

What a turn's rows need of the session's rows before is remembered from when those were written: nobody else writes to the file.
A turn for which something is not known is written by `SessionDatabase` step by step, and so known the next time.
"""

from typing import NamedTuple

from rwkv_batch.sessions.sqlite.many_rows import execute_for
from rwkv_batch.sessions.sqlite.states import Kept, StateConnection, add_turns, add_versions, new_turn, version_row
from rwkv_batch.sessions.store import NewVersion

MAX_KNOWN = 65_536  # sessions, of some 500 bytes each


class NotAsKnown(Exception):
    """The file is not as it was remembered."""


class Newest(NamedTuple):
    """The newest version of a session in the file, whose state is `kept`.

    states  those of the last versions, the newest last; each but the first was written as a turn that goes on from the one
            before
    """

    session: int
    version: int
    updated: float
    kept: Kept
    states: tuple[int, ...]


class SteadyTurns:
    """Writes turns. `max_versions`: of a session that are kept."""

    def __init__(self, max_versions: int):
        self._max_versions = max_versions
        self._newest: dict[tuple[str, str], Newest] = {}
        self._moved: set[int] = set()  # states that go on from another one than they did when they were written

    def forget(self, namespace: str, name: str) -> None:
        """A session was changed in another way."""
        self._newest.pop((namespace, name), None)

    def forget_all(self) -> None:
        """Any session may have been."""
        self._newest.clear()
        self._moved.clear()

    def newest(self, namespace: str, name: str) -> tuple[int, float] | None:
        """Number and time of the newest version of a session, if that is known."""
        known = self._newest.get((namespace, name))
        return (known.version, known.updated) if known is not None else None

    def moved(self, state: int) -> None:
        """A turn's state goes on from another one now."""
        self._moved.add(state)

    def knows(self, new: NewVersion) -> bool:
        """Whether the version is a turn that goes on from what is known, and so is what it replaces."""
        newest, source = self._newest.get((new.namespace, new.name)), new.source
        if newest is None or source is None or new.pieces is not None or new.node is not None or new.response:
            return False
        if source != (new.name, newest.version, newest.updated) or new.version != newest.version + 1:
            return False
        if new.version <= self._max_versions:
            return True
        states = (*newest.states, 0)  # and its own: the first is of the version that is to go,
        return len(states) > self._max_versions and states[1] not in self._moved  # which the second still goes on from

    def write(self, connection: StateConnection, versions: list[NewVersion]) -> list[Newest]:
        """Write turns that are known; return what `learn` is to be told of each. NotAsKnown: nothing may be committed."""
        before = [self._newest[new.namespace, new.name] for new in versions]
        turns, rows, after = [], [], []
        for new, newest in zip(versions, before, strict=True):
            turn = new_turn(connection, newest.kept._replace(num_bytes=new.num_bytes), new.ids, new.model)
            kept = Kept(turn.state, new.num_bytes, turn.seal)
            turns.append(turn)
            rows.append(version_row(new, newest.session, kept, None))
            states = (*newest.states, turn.state)[-self._max_versions :]
            after.append(Newest(newest.session, new.version, new.updated, kept, states))
        changed = execute_for(
            connection,
            "UPDATE kept_sessions SET version = new.column1, updated = new.column2 FROM (VALUES {rows}) AS new"
            " WHERE kept_sessions.id = new.column3 AND kept_sessions.version = new.column4",
            [(new.version, new.updated, known.session, known.version) for new, known in zip(versions, before, strict=True)],
        )
        if changed != len(versions):
            raise NotAsKnown
        add_turns(connection, turns)
        add_versions(connection, rows)
        old = [(newest.session,) for newest in after if newest.version > self._max_versions]
        gone = f"(SELECT version - {self._max_versions:d} FROM kept_sessions WHERE id = session)"
        execute_for(connection, f"DELETE FROM kept_versions WHERE session IN (VALUES {{rows}}) AND version = {gone}", old)
        return after

    def follow(self, new: NewVersion, session: int, kept: Kept) -> Newest:
        """What `learn` is to be told of a version that was written in another way."""
        states: tuple[int, ...] = ()
        before, source = self._newest.get((new.namespace, new.name)), new.source
        if before is not None and source == (new.name, before.version, before.updated) and new.version == before.version + 1:
            states = before.states
        return Newest(session, new.version, new.updated, kept, (*states, kept.state)[-self._max_versions :])

    def learn(self, new: NewVersion, newest: Newest) -> None:
        """A version was committed."""
        if len(self._newest) >= MAX_KNOWN or len(self._moved) >= MAX_KNOWN:
            self.forget_all()
        self._newest[new.namespace, new.name] = newest
