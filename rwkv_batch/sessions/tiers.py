"""The sessions in memory: on the device (L1), on the host (L2), and out of both but not on disk yet. Nothing about threads."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rwkv_batch.model.state import Snapshot
from rwkv_batch.session_messages import Tier
from rwkv_batch.sessions.store import Key, Replay
from rwkv_batch.sessions.transfer import Mark

MAX_LAGGING = 64  # sessions that left L2 and are held for a snapshot; others are dropped, for what they lack is in the log,
MAX_LAGGING_BYTES = 512 * 2**20  # and their bytes


@dataclass(eq=False, slots=True)
class ResidentSession:
    """The newest version of a session in memory: the state behind `snapshot` and `ids`.

    snapshot  None: the empty state
    ids       to feed after the snapshot, before whatever comes next
    lag       how many ids lead to its state on disk, from a whole one there; 0 when it is whole there or not there yet
    arrived   when the snapshot is on its way to the device: the event behind the copy
    due       when it has to be on disk, on the clock of time.monotonic; infinite: when it leaves memory; None: it is there
    replays   answers for idempotency keys that go to disk with it, each with its session as the request named it
    node      of a new node: the dialogue and the number
    response  whether it is the state of an answer of the Responses API
    id        the session's in the store, None where it was not asked for
    origin    the key of the tuned state that it began with, "" for none
    place     `snapshot` and `arrived`, for who does not have the pool's lock
    """

    key: Key
    version: int
    snapshot: Snapshot | None
    newlines: int
    updated: float
    ids: list[int] = field(default_factory=list)
    lag: int = 0
    arrived: Mark | None = None
    due: float | None = None
    replays: list[tuple[str, Replay]] = field(default_factory=list)
    node: tuple[str, int] | None = None
    response: bool = False
    id: int | None = None
    origin: str = ""
    place: tuple[Snapshot | None, Mark | None] = field(init=False)

    def __post_init__(self) -> None:
        self.place = self.snapshot, self.arrived

    def move(self, snapshot: Snapshot, arrived: Mark | None) -> None:
        """Its snapshot is at another place now."""
        self.snapshot, self.arrived = self.place = snapshot, arrived

    @property
    def tokens(self) -> int:
        """Tokens its state has seen."""
        return (self.snapshot.elapsed if self.snapshot is not None else 0) + len(self.ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of the snapshot."""
        return self.snapshot.num_bytes if self.snapshot is not None else 0


class Level:
    """The sessions of one tier, the one that was used longest ago first."""

    def __init__(self, max_sessions: int, max_bytes: int):
        self.sessions: OrderedDict[Key, ResidentSession] = OrderedDict()
        self.num_bytes = 0
        self.max_bytes = max_bytes
        self._max_sessions = max_sessions

    def add(self, resident: ResidentSession) -> None:
        """Make it the newest; its key is not there."""
        self.sessions[resident.key] = resident
        self.num_bytes += resident.num_bytes

    def remove(self, key: Key) -> ResidentSession | None:
        """Take a session out, if it is there."""
        resident = self.sessions.pop(key, None)
        if resident is not None:
            self.num_bytes -= resident.num_bytes
        return resident

    def evict(self) -> list[ResidentSession]:
        """Take the oldest out while there are too many sessions or bytes."""
        evicted = []
        while len(self.sessions) > self._max_sessions or (self.num_bytes > self.max_bytes and self.sessions):
            evicted.append(self.remove(next(iter(self.sessions))))
        return evicted


class Tiers:
    """Each session is on one tier at most.

    is_expired  whether a session is not to be found any more
    leaving     sessions that left L2 before they were on disk, or whole there, the oldest first
    """

    def __init__(self, l1: Level, l2: Level, is_expired: Callable[[ResidentSession], bool]):
        self.l1 = l1
        self.l2 = l2
        self.leaving: dict[Key, ResidentSession] = {}
        self._is_expired = is_expired

    def __iter__(self) -> Iterator[ResidentSession]:
        yield from self.l1.sessions.values()
        yield from self.l2.sessions.values()
        yield from self.leaving.values()

    def find(self, key: Key) -> ResidentSession | None:
        """Return a session; one that has expired is dropped."""
        resident = self.l1.sessions.get(key) or self.l2.sessions.get(key) or self.leaving.get(key)
        if resident is not None and self._is_expired(resident):
            self.drop(key)
            return None
        return resident

    def tier_of(self, key: Key) -> Tier:
        """Return where a session comes from; "db" when it is on neither level."""
        return "l1" if key in self.l1.sessions else "l2" if key in self.l2.sessions else "db"

    def put(self, resident: ResidentSession) -> tuple[list[ResidentSession], list[ResidentSession]]:
        """Make it the newest of L1 in place of an older version, and evict what there is no room for.

        Returns the sessions that are on L2 now, whose snapshots belong on the host, and those that are leaving, which have to
        be written, or may be.
        """
        self.drop(resident.key)
        self.l1.add(resident)
        demoted = self.l1.evict()
        for old in demoted:
            self.l2.add(old)
        leaving = []
        for old in self.l2.evict():
            if old.due is not None or (old.lag > len(old.ids) and self._has_room_for(old)):
                self.leaving[old.key] = old
                leaving.append(old)
        return demoted, leaving

    def _has_room_for(self, lagging: ResidentSession) -> bool:
        """Whether one more session may be held only to be written whole."""
        num_bytes = sum(resident.num_bytes for resident in self.leaving.values()) + lagging.num_bytes
        return len(self.leaving) < MAX_LAGGING and num_bytes <= MAX_LAGGING_BYTES

    def put_aside(self, resident: ResidentSession, *, keep: bool = False) -> bool:
        """Hold it in no level, in place of an older version, only until it is on disk; whether it has to be written.

        keep  it is to be written whole, if there is room for it until then
        """
        self.drop(resident.key)
        if resident.due is None and not (keep and self._has_room_for(resident)):
            return False
        self.leaving[resident.key] = resident
        return True

    def drop(self, key: Key) -> ResidentSession | None:
        """Take a session out of memory."""
        return self.l1.remove(key) or self.l2.remove(key) or self.leaving.pop(key, None)

    def written(self, resident: ResidentSession) -> None:
        """It is on disk: it may go if it was only waiting for that."""
        resident.due, resident.replays = None, []
        self.let_go(resident)

    def let_go(self, resident: ResidentSession) -> None:
        """It need not be held for the disk any more."""
        if self.leaving.get(resident.key) is resident:
            del self.leaving[resident.key]

    def unwritten(self) -> list[ResidentSession]:
        """Return the sessions that are not on disk."""
        return [resident for resident in self if resident.due is not None]
