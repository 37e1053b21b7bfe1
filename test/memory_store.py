"""A store of sessions in dictionaries, the second user of `SessionStore`. It outlives the pools that use it."""

import itertools
import time
from collections.abc import Sequence

from rwkv_batch.sessions.store import NewVersion, Record, Replay, SessionSummary, Source, SourceLost, StoredState

Key = tuple[str, str]


class MemoryStore:
    """Sessions as they were given, `versions` of each."""

    shared = False

    def __init__(self, *, versions: int = 2, replay_seconds: float = 600.0, response_seconds: float = 1e9):
        self.versions = versions
        self.replay_seconds = replay_seconds
        self.response_seconds = response_seconds
        self._records: dict[Key, list[Record]] = {}  # the oldest first
        self._states: dict[int, bytes] = {0: b""}
        self._turns: dict[int, tuple[int, list[int]]] = {}  # (state before, ids) of those that are not whole
        self._draft = b""
        self._replays: dict[tuple[str, str, str], Replay] = {}
        self._last_nodes: dict[Key, int] = {}
        self._numbers = itertools.count(1)

    def now(self) -> float:
        return time.time()

    # Reading.

    def find(self, namespace: str, name: str, version: int | None = None) -> Record | None:
        records = self._records.get((namespace, name), [])
        return next((record for record in reversed(records) if version in (None, record.version)), None)

    def load(self, record: Record) -> StoredState:
        state, ids = record.state, []
        while state in self._turns:
            state, before = self._turns[state]
            ids = before + ids
        return StoredState(iter([self._states[state]]) if state else None, ids, set())

    def page(
        self, namespace: str, *, without: list[int], offset: int, limit: int, responses: bool = False
    ) -> list[SessionSummary]:
        found = [session for session in self._list(namespace, responses) if session.id not in without]
        return sorted(found, reverse=True)[offset : offset + limit]

    def named_after(self, namespace: str, name: str, limit: int, *, responses: bool = False) -> list[SessionSummary]:
        return sorted((s for s in self._list(namespace, responses) if s.name > name), key=lambda session: session.name)[:limit]

    def count(self, namespace: str, *, responses: bool = False) -> int:
        return len(self._list(namespace, responses))

    def ids(self, namespace: str, names: list[str]) -> list[int]:
        return [self._records[namespace, name][0].session for name in names if (namespace, name) in self._records]

    def oldest(self, limit: int) -> list[Key]:
        return sorted(self._records, key=lambda key: self._records[key][-1].updated)[:limit]

    def kept_versions(self, namespace: str, name: str) -> list[int]:
        return [record.version for record in reversed(self._records.get((namespace, name), []))]

    def last_node(self, namespace: str, name: str) -> int:
        nodes = [n.removeprefix(f"{name}:") for space, n in self._records if space == namespace and n.startswith(f"{name}:")]
        return max([self._last_nodes.get((namespace, name), 0), *(int(node) for node in nodes if node.isdigit())])

    def replay(self, namespace: str, name: str, key: str) -> Replay | None:
        replay = self._replays.get((namespace, name, key))
        return replay if replay is not None and replay.created > self.now() - self.replay_seconds else None

    def reference(self, namespace: str) -> list[SessionSummary]:
        return []

    def reference_state(self, namespace: str, name: str) -> None:
        return None

    # Writing.

    def write(self, versions: list[NewVersion]) -> None:
        bases = [self._base(new) for new in versions]  # what fails does so before any change
        for new, (base, whole, num_bytes) in zip(versions, bases, strict=True):
            state = base
            if whole is not None:
                state = next(self._numbers)
                self._states[state] = whole
            if new.ids or whole is None:
                self._turns[number := next(self._numbers)] = (state, list(new.ids))
                state = number
            self._add(new, state, num_bytes)
            if new.node is not None:
                dialogue = (new.namespace, new.node[0])
                self._last_nodes[dialogue] = max(self._last_nodes.get(dialogue, 0), new.node[1])
            for name, replay in new.replays:
                self._replays[new.namespace, name, replay.key] = replay

    def _base(self, new: NewVersion) -> tuple[int, bytes | None, int]:
        if new.pieces is not None:
            whole = b"".join(bytes(piece) for piece in new.pieces)
            return 0, whole, len(whole)
        return (self._source(new.namespace, new.source).state if new.source is not None else 0), None, new.num_bytes

    def _source(self, namespace: str, source: Source) -> Record:
        record = self.find(namespace, source.name, source.version)
        if record is None or record.updated != source.updated:
            raise SourceLost(source.name)
        return record

    def begin_draft(self) -> None:
        self._draft = b""

    def add_to_draft(self, piece: bytes | memoryview) -> None:
        self._draft += bytes(piece)

    def finish_draft(self, namespace: str, source: Source, ids: Sequence[int]) -> bool:
        try:
            record = self._source(namespace, source)
        except SourceLost:
            return False
        if record.state in self._turns:
            number = next(self._numbers)
            self._states[number] = self._draft
            self._turns[record.state] = (number, list(ids))
        return True

    def delete(self, namespace: str, name: str, *, prefix: bool) -> set[str]:
        def is_meant(space: str, found: str) -> bool:
            return space == namespace and (found == name or (prefix and found.startswith(f"{name}:")))

        names = {key[1] for key in self._records if is_meant(*key)}
        for found in names:
            del self._records[namespace, found]
        for key in [key for key in self._replays if is_meant(*key[:2])]:
            del self._replays[key]
        return names

    def fork(self, namespace: str, record: Record, copies: list[str]) -> None:
        for name in copies:
            new = NewVersion(namespace, name, 1, record.tokens, record.newlines, (), time.time())
            self._add(new, record.state, record.num_bytes)

    def rewind(self, namespace: str, name: str, record: Record, version: int) -> None:
        new = NewVersion(namespace, name, version, record.tokens, record.newlines, (), time.time())
        self._add(new, record.state, record.num_bytes, record.version if record.origin is None else record.origin)

    # Upkeep.

    def open_if_there(self) -> bool:
        return True

    def tidy(self, *, waiting: bool, idle: bool = False) -> None:
        if idle:
            self.clean_up()

    def clean_up(self) -> None:
        used = {record.state for records in self._records.values() for record in records}
        states = list(used)
        for state in states:
            if state in self._turns and self._turns[state][0] not in used:
                used.add(self._turns[state][0])
                states.append(self._turns[state][0])
        self._turns = {number: turn for number, turn in self._turns.items() if number in used}
        self._states = {number: state for number, state in self._states.items() if number in used or not number}

    def close(self) -> None:
        self.clean_up()

    # Inside.

    def _add(self, new: NewVersion, state: int, num_bytes: int, origin: int | None = None) -> None:
        key = (new.namespace, new.name)
        before = self._records.get(key, [])
        session, response = (before[0].session, before[0].response) if before else (next(self._numbers), new.response)
        record = Record(
            new.version, state, new.tokens, new.newlines, num_bytes, new.updated, origin, None, None, session, response
        )
        self._records[key] = [*before, record][-self.versions :]

    def _list(self, namespace: str, responses: bool) -> list[SessionSummary]:
        newest = [(name, records[-1]) for (space, name), records in self._records.items() if space == namespace]
        return [
            SessionSummary(last.updated, last.session, name, last.version, last.tokens, last.num_bytes)
            for name, last in newest
            if responses or not last.response
        ]
