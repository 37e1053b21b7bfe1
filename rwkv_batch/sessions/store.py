"""What the pool asks of a store of sessions, and the nouns they share. `database.py` is the one that servers use."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Key = tuple[str, str]  # namespace, name


class Replay(NamedTuple):
    """An answer kept for its idempotency key. `digest`: of the request; `answer`: what to say again."""

    key: str
    digest: bytes
    answer: bytes
    created: float


class Record(NamedTuple):
    """One version of a session without its bytes; `state` names them.

    num_bytes  of the state when it is whole
    origin     the version whose state it is, None when it is its own
    seal       what tells its state from others: the last bytes of a whole one
    checksum   of all before it, the session's id and name; None where the store has none, as in an old file that is read-only
    response   whether it is the state of an answer of the Responses API
    """

    version: int
    state: int
    tokens: int
    newlines: int
    num_bytes: int
    updated: float
    origin: int | None
    seal: bytes | None
    checksum: int | None
    session: int
    response: int


class SessionSummary(NamedTuple):
    """What a list says of a session; `id` never changes and is larger for a session that was made later."""

    updated: float
    id: int
    name: str
    version: int
    tokens: int
    num_bytes: int


class Source(NamedTuple):
    """A version of a session; when it was made tells it from one of a later session of that name."""

    name: str
    version: int
    updated: float


class Claim(NamedTuple):
    """A session of a store that several servers use, taken for a turn; it ends when the turn is written, or is let go.

    session  its id
    epoch    which claim of this session it is: a later one ends it
    version  at which the session is, 0 when there is none yet
    updated  when that version was made
    """

    session: int
    epoch: int
    version: int
    updated: float


class SourceLost(Exception):
    """The version that a turn went on from is not kept any more, or damaged: its own state has to be written whole."""


class StateMoved(Exception):
    """The pieces of a state are not those any more that its ids follow: it was written whole meanwhile. Load it again."""


class StoredState(NamedTuple):
    """How a version's state comes about: `ids` are fed after the state in `pieces`, None being the empty one.

    pieces  may raise StateMoved where others write to the store meanwhile
    models  for which the ids were kept; the pieces know theirs
    base    tells whole states apart, where the store can
    """

    pieces: Iterator[bytes] | None
    ids: list[int]
    models: set[str]
    base: int = 0


@dataclass(slots=True)
class NewVersion:
    """A state to save as a new version of a session: what follows by `ids` from the state in `pieces`, or from that of another
    version, or from the empty one.

    pieces     a whole state, None when it is already there
    source     then: the version whose state it is, None being the empty one
    num_bytes  then: of a whole state
    model      the fingerprint of the model that reads the ids
    claim      of the turn that made it, where the store is shared
    node       (dialogue, number) when it is a new node of one
    response   whether a new session is the state of an answer of the Responses API, which is forgotten some day
    """

    namespace: str
    name: str
    version: int
    tokens: int
    newlines: int
    pieces: Iterable[bytes | memoryview] | None
    updated: float
    replays: list[tuple[str, Replay]] = field(default_factory=list)  # (session as the request named it, answer)
    node: tuple[str, int] | None = None
    response: bool = False
    source: Source | None = None
    ids: Sequence[int] = ()
    num_bytes: int = 0
    model: str = ""
    claim: Claim | None = None


class SessionStore(Protocol):
    """Where sessions outlive the server; used by one thread, but for `now` and the two ages, which any thread may read.

    replay_seconds    how long answers are kept for their idempotency keys
    response_seconds  how long the states of responses are kept
    shared            whether other servers use it too: then it is a `SharedStore`
    Every method but `now` and `close` raises StorageFailed when the store does not work, StorageFull when it has no room, and
    Unavailable when another server has it; those that read one session raise Unprocessable when what is said of it is damaged.
    """

    replay_seconds: float
    response_seconds: float
    shared: bool

    def now(self) -> float:
        """Epoch seconds that no change of the clock makes jump while the server runs."""

    # Reading.

    def find(self, namespace: str, name: str, version: int | None = None) -> Record | None:
        """Return the newest version of a session, or the one asked for; None when there is none or it is too old a response."""

    def load(self, record: Record) -> StoredState:
        """Return how a version's state comes about."""

    def page(
        self, namespace: str, *, without: list[int], offset: int, limit: int, responses: bool = False
    ) -> list[SessionSummary]:
        """Return sessions, newest first, leaving out those with the ids `without`, and responses unless they are wanted."""

    def named_after(self, namespace: str, name: str, limit: int, *, responses: bool = False) -> list[SessionSummary]:
        """Return the sessions whose names follow `name`, in the order of their names; `reference` has the rest."""

    def count(self, namespace: str, *, responses: bool = False) -> int:
        """Return the number of sessions, with responses when they are wanted."""

    def ids(self, namespace: str, names: list[str]) -> list[int]:
        """Return the ids of those of these sessions that exist."""

    def oldest(self, limit: int) -> list[tuple[str, str]]:
        """Return namespace and name of the sessions and responses that were used longest ago, the oldest first."""

    def kept_versions(self, namespace: str, name: str) -> list[int]:
        """Return the versions of a session that can be rewound to, newest first."""

    def last_node(self, namespace: str, name: str) -> int:
        """Return the largest number a node of this dialogue ever had, 0 if none."""

    def replay(self, namespace: str, name: str, key: str) -> Replay | None:
        """Return the answer that was kept for an idempotency key."""

    # Sessions that rwkv_lightning left in the same place; a store without any has none of them.

    def reference(self, namespace: str) -> list[SessionSummary]:
        """Return those that no session of ours has replaced yet."""

    def reference_state(self, namespace: str, name: str) -> tuple[Any, float] | None:
        """Return what was stored for one of them, whatever it is, and when; None if nothing."""

    # Writing. Each call happens as a whole or not at all, and what has returned survives a power loss.

    def write(self, versions: list[NewVersion]) -> None:
        """Save new versions; SourceLost when one of their sources is not there."""

    def begin_draft(self) -> None:
        """Begin to write a whole state for a version that is there already, in place of a draft that was not finished."""

    def add_to_draft(self, piece: bytes | memoryview) -> None:
        """Write its next piece."""

    def finish_draft(self, namespace: str, source: Source, ids: Sequence[int]) -> bool:
        """Let the state of a version follow by `ids` from what was written, and forget what led to it until now.

        False when there is no such version any more. It is the same state for whatever goes on from it.
        """

    def delete(self, namespace: str, name: str, *, prefix: bool) -> set[str]:
        """Forget a session, and with `prefix` all "name:…"; return the names of those that were there."""

    def fork(self, namespace: str, record: Record, copies: list[str]) -> None:
        """Make sessions whose version 1 is `record`; none of them may exist."""

    def rewind(self, namespace: str, name: str, record: Record, version: int) -> None:
        """Make a kept version of a session its version `version`."""

    # Upkeep.

    def open_if_there(self) -> bool:
        """Make ready what is there already; False when nothing is. The other methods open by themselves."""

    def tidy(self, *, waiting: bool, idle: bool = False) -> None:
        """Do some upkeep: none that takes long when somebody is `waiting`, all of it when nothing was to do (`idle`)."""

    def clean_up(self) -> None:
        """Delete some of what is too old or was left by deleted sessions; called again while there is nothing else to do."""

    def close(self) -> None:
        """Let go of it; the next call opens it again."""


class SharedStore(SessionStore, Protocol):
    """A store that other servers use too. A turn needs a claim, and what others wrote meanwhile is not overwritten.

    is_uploading    whether a whole state is on its way, so that another one should wait
    claims_at_once  how many `claim_many` takes in about the time of one
    `write` raises Conflict when a claim has ended, or a new session is there already; `finish_draft` may do its work later.
    """

    is_uploading: bool
    claims_at_once: int

    def claim(self, namespace: str, name: str) -> Claim | None:
        """Take a session, or a name without one, for a turn; None while another server that is alive has it."""

    def claim_many(self, keys: list[Key]) -> list[Claim | None]:
        """The same for many; raises for all what it would raise for one."""

    def let_go(self, claim: Claim) -> None:
        """The turn wrote nothing: others may have the session."""

    def next_node(self, namespace: str, name: str) -> int:
        """Take the next number of a dialogue's nodes, which nobody else gets."""


def is_number(text: str) -> bool:
    """Whether it can be the number of a node."""
    return text.isascii() and text.isdigit() and len(text) < 19
