"""The session file of a process of its own, as an engine uses it."""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rwkv_batch.errors import Unavailable
from rwkv_batch.sessions.remote.connection import Broken, Connection
from rwkv_batch.sessions.remote.messages import cut, sent
from rwkv_batch.sessions.store import Claim, NewVersion, Record, Replay, SessionSummary, Source, StateMoved, StoredState

SIGNS = 4  # of life in the time after which an engine is given up
_numbers = itertools.count(1)


class RemoteStore:
    """The sessions of `file` in the store process at `path`.

    Used by one thread, but for the pieces of states, and for `load`, when they are not those of its answer any more.

    replay_seconds, response_seconds  as the process has them
    shared         whether other engines use it too
    lease_seconds  after which the sessions of an engine that gives no sign of life may go on elsewhere
    """

    is_uploading = False
    claims_at_once = 64

    def __init__(
        self,
        path: Path,
        file: str,
        *,
        replay_seconds: float = 600.0,
        response_seconds: float = 30 * 86400.0,
        shared: bool = True,
        lease_seconds: float = 1.5,
    ):
        self.replay_seconds = replay_seconds
        self.response_seconds = response_seconds
        self.shared = shared
        self._lease_seconds = lease_seconds
        hello = (f"{os.getpid()}-{next(_numbers)}", file, shared, lease_seconds)
        self._connection = Connection(path, hello)
        self._states = Connection(path, hello)  # for whole ones, which take longer
        self._began = time.time() - time.monotonic()
        self._closed = threading.Event()
        self._signs: threading.Thread | None = None

    def now(self) -> float:
        """Epoch seconds that no change of the clock makes jump while the server runs."""
        return self._began + time.monotonic()

    # Reading.

    def find(self, namespace: str, name: str, version: int | None = None) -> Record | None:
        """Return the newest version of a session, or the one asked for; None when there is none or it is too old a response."""
        return self._ask("find", namespace, name, version)

    def load(self, record: Record) -> StoredState:
        """Return how a version's state comes about; Conflict when it is not kept any more."""
        ids, models, base = self._ask("load", record)
        return StoredState(self._pieces(record, base) if base is not None else None, ids, set(models), base or 0)

    def _pieces(self, record: Record, base: int) -> Iterator[bytes]:
        sizes, data = self._states.call("pieces", record, base)
        if sizes is None:
            raise StateMoved
        yield from cut(data, sizes)

    def page(
        self, namespace: str, *, without: list[int], offset: int, limit: int, responses: bool = False
    ) -> list[SessionSummary]:
        """Return sessions, newest first, leaving out those with the ids `without`, and responses unless they are wanted."""
        return self._ask("page", namespace, without, offset, limit, responses)

    def named_after(self, namespace: str, name: str, limit: int, *, responses: bool = False) -> list[SessionSummary]:
        """Return the sessions whose names follow `name`, in the order of their names; `reference` has the rest."""
        return self._ask("named_after", namespace, name, limit, responses)

    def count(self, namespace: str, *, responses: bool = False) -> int:
        """Return the number of sessions, with responses when they are wanted."""
        return self._ask("count", namespace, responses)

    def ids(self, namespace: str, names: list[str]) -> list[int]:
        """Return the ids of those of these sessions that exist."""
        return self._ask("ids", namespace, names)

    def oldest(self, limit: int) -> list[tuple[str, str]]:
        """Return namespace and name of the sessions that were used longest ago and that no turn has, the oldest first."""
        return self._ask("oldest", limit)

    def kept_versions(self, namespace: str, name: str) -> list[int]:
        """Return the versions of a session that can be rewound to, newest first."""
        return self._ask("kept_versions", namespace, name)

    def last_node(self, namespace: str, name: str) -> int:
        """Return the largest number a node of this dialogue ever had, 0 if none."""
        return self._ask("last_node", namespace, name)

    def replay(self, namespace: str, name: str, key: str) -> Replay | None:
        """Return the answer that was kept for an idempotency key."""
        return self._ask("replay", namespace, name, key)

    def reference(self, namespace: str) -> list[SessionSummary]:
        """Return the sessions of rwkv_lightning that no session of ours has replaced yet."""
        return self._ask("reference", namespace)

    def reference_state(self, namespace: str, name: str) -> tuple[Any, float] | None:
        """Return what was stored for one of them, whatever it is, and when; None if nothing."""
        return self._ask("reference_state", namespace, name)

    # Writing.

    def write(self, versions: list[NewVersion]) -> None:
        """Save new versions, all or none; Conflict when a claim has ended, or a new session is there already.

        Where the process ends before it has answered, it is found out from the next one whether it was done.
        """
        messages = [sent(new) for new in versions]
        pieces = [piece for _, of_one in messages for piece in of_one]
        call = ("write", [version for version, _ in messages])
        try:
            self._connection.call(*call, pieces=pieces, once=True)
        except Broken:
            if not self._are_written(versions):
                self._connection.call(*call, pieces=pieces, once=True)

    def _are_written(self, versions: list[NewVersion]) -> bool:
        records = [self.find(new.namespace, new.name, new.version) for new in versions]
        return all(record is not None and record.updated == new.updated for record, new in zip(records, versions, strict=True))

    def begin_draft(self) -> None:
        """Begin to write a whole state, in place of a draft that was not finished."""
        self._ask("begin_draft")

    def add_to_draft(self, piece: bytes | memoryview) -> None:
        """Write its next piece."""
        self._connection.call("add_to_draft", pieces=[piece], once=True)

    def finish_draft(self, namespace: str, source: Source, ids: Sequence[int]) -> bool:
        """Let the state of a version follow by `ids` from what was written; False when there is no such version any more."""
        return self._connection.call("finish_draft", namespace, source, list(ids), once=True)[0]

    def delete(self, namespace: str, name: str, *, prefix: bool) -> set[str]:
        """Forget a session, and with `prefix` all "name:…"; return the names of those that were there."""
        return self._ask("delete", namespace, name, prefix)

    def fork(self, namespace: str, record: Record, copies: list[str]) -> None:
        """Make sessions whose version 1 is `record`; Conflict when one of them exists."""
        self._connection.call("fork", namespace, record, copies, once=True)

    def rewind(self, namespace: str, name: str, record: Record, version: int) -> None:
        """Make a kept version of a session its version `version`; Conflict while another engine has it."""
        self._connection.call("rewind", namespace, name, record, version, once=True)

    # Turns of sessions that other engines may have.

    def claim(self, namespace: str, name: str) -> Claim | None:
        """Take a session, or a name without one, for a turn; None while another engine that is alive has it."""
        return self.claim_many([(namespace, name)])[0]

    def claim_many(self, keys: list[tuple[str, str]]) -> list[Claim | None]:
        """The same for many; raises for all what it would raise for one."""
        self._give_signs()
        return self._ask("claim_many", keys)

    def let_go(self, claim: Claim) -> None:
        """The turn wrote nothing: others may have the session."""
        self._connection.tell("let_go", claim)

    def next_node(self, namespace: str, name: str) -> int:
        """Take the next number of a dialogue's nodes, which nobody else gets."""
        return self._ask("next_node", namespace, name)

    # Upkeep, which is the process's own.

    def open_if_there(self) -> bool:
        """Wait for the process, which opens the file unless it does not exist yet."""
        return self._ask("open_if_there")

    def tidy(self, *, waiting: bool, idle: bool = False) -> None:
        """Nothing."""

    def clean_up(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Let go of all sessions; the next call connects again."""
        self._closed.set()
        if self._signs is not None:
            self._signs.join()
        self._closed, self._signs = threading.Event(), None
        self._connection.close()
        self._states.close()

    # Inside.

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._connection.call(method, *arguments)[0]

    def _give_signs(self) -> None:
        """Give signs of life from now on."""
        if self._signs is None:
            self._signs = threading.Thread(target=self._sign, args=(self._closed,), name="signs", daemon=True)
            self._signs.start()

    def _sign(self, closed: threading.Event) -> None:
        while not closed.wait(self._lease_seconds / SIGNS):
            with contextlib.suppress(Unavailable):
                self._connection.tell_if_free("alive")
