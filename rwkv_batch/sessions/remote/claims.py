"""Which engine has which session for a turn, as the store process knows it: nothing about sockets.

A claim ends when its turn is written or let go, when its engine ends, and when another engine takes the session because the
one that has it gives no sign of life. Then nothing can be written by it any more: its epoch, a number that no other claim ever
had, is not the session's. Claims are not on disk. One of an earlier life of the process holds as long as nobody has taken or
changed the session since; a turn that was to make a new session fails.
"""

import itertools
import time
from dataclasses import dataclass, field

from rwkv_batch.errors import Conflict
from rwkv_batch.sessions.sqlite.database import SessionDatabase
from rwkv_batch.sessions.store import Claim, Key, NewVersion, Record, is_number

LIFE_BITS = 22  # of an epoch, for the claims of one life: more than can be made in as many milliseconds as it lasts
MAX_DIALOGUES = 65_536  # whose last nodes are remembered


@dataclass(eq=False)
class Engine:
    """One that uses the sessions.

    shared         whether others write too: one that is alone needs no claims
    lease_seconds  without a sign of life after which its sessions may be taken
    heard          when it gave the last one, on the clock of time.monotonic
    keys           of its claims, by their epochs
    """

    name: str
    shared: bool
    lease_seconds: float
    heard: float = field(default_factory=time.monotonic)
    keys: dict[int, Key] = field(default_factory=dict)

    @property
    def is_silent(self) -> bool:
        """Whether its sessions may be taken."""
        return time.monotonic() - self.heard > self.lease_seconds


@dataclass
class Holder:
    """Who has a session. `revoked`: it was deleted meanwhile."""

    engine: Engine
    epoch: int
    revoked: bool = False


class ClaimTable:
    """The claims of all engines on the sessions of `database`."""

    def __init__(self, database: SessionDatabase):
        self._database = database
        self._holders: dict[Key, Holder] = {}
        self._first_epoch = int(time.time() * 1000) << LIFE_BITS  # no process is started again within one
        self._epochs = itertools.count(self._first_epoch)
        self._last_nodes: dict[Key, int] = {}

    def take(self, engine: Engine, namespace: str, name: str) -> Claim | None:
        """Take a session for a turn; None while another engine that is alive has it."""
        key = (namespace, name)
        holder = self._holders.get(key)
        if holder is not None and self._is_held(holder, engine):
            return None
        version, updated = self._database.newest(namespace, name)
        if holder is not None:
            self._end(key, holder)
        epoch = next(self._epochs)
        self._holders[key] = Holder(engine, epoch)
        engine.keys[epoch] = key
        return Claim(0, epoch, version, updated)

    def take_many(self, engine: Engine, keys: list[Key]) -> list[Claim | None]:
        """The same for many: all that can be had, or none where one of them is damaged."""
        taken: list[Claim | None] = []
        try:
            for key in keys:
                taken.append(self.take(engine, *key))
        except BaseException:
            for claim in taken:
                if claim is not None:
                    self.let_go(engine, claim)
            raise
        return taken

    def let_go(self, engine: Engine, claim: Claim) -> None:
        """A turn wrote nothing."""
        key = engine.keys.get(claim.epoch)
        if key is not None:
            self._end(key, self._holders[key])

    def left(self, engine: Engine) -> None:
        """An engine has ended."""
        for key in list(engine.keys.values()):
            self._end(key, self._holders[key])

    def deleted(self, namespace: str, name: str, *, prefix: bool) -> None:
        """Sessions were deleted: turns in progress cannot be written."""
        for key, holder in self._holders.items():
            if key == (namespace, name) or (prefix and key[0] == namespace and key[1].startswith(f"{name}:")):
                holder.revoked = True

    @property
    def num_claims(self) -> int:
        """How many sessions turns have."""
        return len(self._holders)

    def is_claimed(self, key: Key) -> bool:
        """Whether some turn has a session."""
        return key in self._holders

    def check(self, engine: Engine, new: NewVersion) -> None:
        """Raise Conflict unless a version may be written."""
        key = (new.namespace, new.name)
        if new.claim is None:
            self.check_free(engine, key, new.version)
            return
        holder, newest = self._holders.get(key), self._database.newest(*key)
        if holder is None:
            is_old = new.claim.epoch < self._first_epoch and new.claim.version > 0
            is_good = is_old and newest == (new.claim.version, new.claim.updated)
        else:
            is_good = holder.epoch == new.claim.epoch and not holder.revoked
        if not is_good or newest[0] != new.version - 1:
            raise Conflict(f"session {new.name!r} went on elsewhere during this turn, which is not kept", code="session_moved")

    def check_free(self, engine: Engine, key: Key, version: int) -> None:
        """Raise Conflict unless a version may be written that is not of a claimed turn."""
        if not engine.shared:
            return
        holder = self._holders.get(key)
        is_held = holder is not None and self._is_held(holder, engine)
        if version == 1 and (is_held or self._database.newest(*key)[0]):
            raise Conflict(f"there is a session {key[1]!r} already", code="session_exists")
        if version > 1 and (is_held or self._database.newest(*key)[0] != version - 1):
            raise Conflict(f"session {key[1]!r} is busy with a turn", code="session_busy", retry_after=1.0)
        if holder is not None and holder.engine is not engine:
            self._end(key, holder)  # a silent one, which finds the session changed

    def check_kept(self, record: Record) -> None:
        """Raise Conflict when a version that was found has gone meanwhile."""
        if not self._database.is_kept(record):
            raise Conflict("the session changed meanwhile", code="session_busy", retry_after=1.0)

    def written(self, versions: list[NewVersion]) -> None:
        """Turns were written: their claims end."""
        for new in versions:
            key = (new.namespace, new.name)
            if new.claim is not None and (holder := self._holders.get(key)) is not None:
                self._end(key, holder)
            self.count_node(key)

    def next_node(self, namespace: str, name: str) -> int:
        """Take the next number of a dialogue's nodes."""
        dialogue = (namespace, name)
        if dialogue not in self._last_nodes:
            if len(self._last_nodes) >= MAX_DIALOGUES:
                self._last_nodes.clear()
            self._last_nodes[dialogue] = self._database.last_node(*dialogue)
        self._last_nodes[dialogue] += 1
        return self._last_nodes[dialogue]

    def count_node(self, key: Key) -> None:
        """A session called "dialogue:n", however it was made, takes that number."""
        dialogue, _, number = key[1].rpartition(":")
        if is_number(number) and (key[0], dialogue) in self._last_nodes:
            self._last_nodes[key[0], dialogue] = max(self._last_nodes[key[0], dialogue], int(number))

    def _is_held(self, holder: Holder, engine: Engine) -> bool:
        """Whether another engine that is alive has a session."""
        return holder.engine is not engine and not holder.revoked and not holder.engine.is_silent

    def _end(self, key: Key, holder: Holder) -> None:
        del self._holders[key]
        del holder.engine.keys[holder.epoch]
