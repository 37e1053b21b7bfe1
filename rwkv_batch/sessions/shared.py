"""What the threads of a pool share. Whatever stands behind its lock is `Guarded`: to touch it without the lock is an error."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from rwkv_batch.errors import NotBegun, RwkvBatchError, StorageFailed, Unavailable
from rwkv_batch.model.state import Snapshot
from rwkv_batch.session_messages import Answer, CommitResult, Deleted, Page, SessionCommand
from rwkv_batch.sessions.store import Claim, Key, is_number
from rwkv_batch.sessions.tiers import ResidentSession, Tiers
from rwkv_batch.sessions.transfer import Copies, Mark

if TYPE_CHECKING:
    from rwkv_batch.sessions.leases import Lease

T = TypeVar("T")
TOTALS = (
    "state_commits_total", "state_commit_seconds_total", "state_commit_failures_total", "state_snapshots_total",
    "state_dropped_sessions_total",
    "state_loads_l1_total", "state_loads_l2_total", "state_loads_db_total",
)  # fmt: skip
Durability = Literal["log", "turn", "relaxed", "shutdown"]
Telling = Callable[[], AbstractContextManager[None]]
ComputeState = Callable[[Callable[[], Snapshot | None], list[int], Callable[[Snapshot | RwkvBatchError], None], str], None]

MAX_DEMOTES = 64  # sessions that wait to be copied to the host; more than these leave memory, if they are on disk
GROUP_TURNS = 1024  # logged in one transaction
GROUP_BYTES = 64 * 2**20  # states of one transaction: more waiting turns share a commit, but none waits much longer for it


class PoolLock:
    """The one lock of a pool, which a thread may take again, with a bell for the storage thread."""

    def __init__(self):
        self._lock = threading.RLock()
        self.is_held: Callable[[], bool] = self._lock._is_owned  # by the calling thread
        self._bell = threading.Condition(self._lock)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def ring(self) -> None:
        """Wake the storage thread."""
        with self._lock:
            self._bell.notify_all()

    def wait(self, seconds: float) -> bool:
        """Let go of the lock until `ring` or for so long; whether it rang."""
        return self._bell.wait(seconds)


class Guarded(Generic[T]):
    """An attribute that only a thread with the `lock` of its object may read or set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> T:
        if not instance.lock.is_held():
            raise self._untouchable()
        return instance.__dict__[self._name]

    def __set__(self, instance: Any, value: T) -> None:
        if not instance.lock.is_held():
            raise self._untouchable()
        instance.__dict__[self._name] = value

    def _untouchable(self) -> RuntimeError:
        return RuntimeError(f"{self._name} is used without the pool's lock")


class Load(NamedTuple):
    """Find the session of a lease whose turn it is."""

    lease: "Lease"


class Commit(NamedTuple):
    """Save the state of a turn that ended, the one behind `snapshot` and `ids`.

    turn     what was fed since the session's state before; None: not known
    written  the event behind the copy out of the slot
    """

    lease: "Lease"
    snapshot: Snapshot
    newlines: int
    answer: Answer
    done: Callable[[CommitResult | RwkvBatchError], None]
    ids: list[int]
    turn: list[int] | None
    written: Mark | None


class GiveBack(NamedTuple):
    """A turn of a session in a shared store ended without being written."""

    claim: Claim


class Execute(NamedTuple):
    """Carry out a command of the state routes."""

    command: SessionCommand
    answer: Callable[[Page | Deleted | RwkvBatchError], None]


class Listing(NamedTuple):
    """A list that is made piece by piece, other work in between: None until it is whole."""

    pieces: Any  # Iterator[Page | None]
    answer: Callable[[Page | Deleted | RwkvBatchError], None]


class Demote(NamedTuple):
    """Bring a session that left L1 to the host."""

    resident: ResidentSession


class Flush(NamedTuple):
    """Write a session that left memory."""

    resident: ResidentSession


class Call(NamedTuple):
    """Go on with a command that had to wait for the engine."""

    work: Callable[[], None]


Job = Load | Commit | GiveBack | Execute | Listing | Demote | Flush | Call


class JobQueue:
    """What the storage thread has to do.

    num_commits, commit_bytes  turns that ended and whose callers wait for the end of the commit, and their states
    num_demotes                sessions that are to be copied to the host
    more_loads                 sessions that may be looked for together with a first one: a store that others use is asked once
    """

    def __init__(self):
        self.num_commits = 0
        self.commit_bytes = 0
        self.num_demotes = 0
        self.more_loads = 0
        self._jobs: deque[Job] = deque()
        self._others_next = False  # the log had the last turn

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Put it at the end."""
        if isinstance(job, Commit):
            self.num_commits += 1
            self.commit_bytes += job.snapshot.num_bytes
        self.num_demotes += isinstance(job, Demote)
        self._jobs.append(job)

    def commit_ended(self, job: Commit) -> None:
        """Nobody waits for this commit any more."""
        self.num_commits -= 1
        self.commit_bytes -= job.snapshot.num_bytes

    def take(self, durability: Durability) -> list[Job]:
        """Take what is done next: what takes little time first, but nothing before a command it came after.

        Commits that write come together, as many as share a transaction. Those of the log take turns with all else, one by one:
        they take little time, but there may always be some.
        """
        if durability == "log":
            if self._others_next and (job := self._take_other()) is not None:
                self._others_next = False
                return [job, *self._take_loads()] if isinstance(job, Load) else [job]
            if commits := self._take_commits():
                self._others_next = True
                return commits
        for index, job in enumerate(self._jobs):
            if isinstance(job, Execute):
                break
            if isinstance(job, Load) or (isinstance(job, Commit) and durability != "turn"):
                del self._jobs[index]
                return [job, *self._take_loads()] if isinstance(job, Load) else [job]
        if not self._jobs:
            return []
        jobs, num_bytes = [self._jobs.popleft()], 0
        self.num_demotes -= isinstance(jobs[0], Demote)
        if isinstance(jobs[0], Commit):
            num_bytes = jobs[0].snapshot.num_bytes
            while self._jobs and isinstance(self._jobs[0], Commit) and num_bytes < GROUP_BYTES:
                jobs.append(self._jobs.popleft())
                num_bytes += jobs[-1].snapshot.num_bytes
        return jobs

    def _take_other(self) -> Job | None:
        """What is no commit, a load if there is one, up to a command."""
        found = None
        for index, job in enumerate(self._jobs):
            if isinstance(job, Execute):
                break
            if isinstance(job, Load):
                found = index
                break
            if found is None and not isinstance(job, Commit):
                found = index
        if found is None:
            return None
        job = self._jobs[found]
        del self._jobs[found]
        self.num_demotes -= isinstance(job, Demote)
        return job

    def _take_loads(self) -> list[Job]:
        """More sessions that are to be found, up to a command."""
        loads: list[Job] = []
        others: deque[Job] = deque()
        while self._jobs and len(loads) < self.more_loads and not isinstance(self._jobs[0], Execute):
            job = self._jobs.popleft()
            (loads if isinstance(job, Load) else others).append(job)
        self._jobs.extendleft(reversed(others))
        return loads

    def _take_commits(self) -> list[Job]:
        """All turns that wait for the log, whatever else came between, up to a command."""
        commits: list[Job] = []
        others: deque[Job] = deque()
        while self._jobs and len(commits) < GROUP_TURNS and not isinstance(self._jobs[0], Execute):
            job = self._jobs.popleft()
            (commits if isinstance(job, Commit) else others).append(job)
        self._jobs.extendleft(reversed(others))
        return commits


class Shared:
    """The sessions in memory and the work that waits, with the rules that need both.

    compute_state  computes a state from one before and ids, on the engine; None = there is none
    telling        inside it several turns are told of
    snapshot_tokens  most ids that lead to a state on disk before it is to be written whole
    last_nodes  the last number of each dialogue that was looked up
    lagging     sessions in memory that are to be written whole, for many ids lead to their states on disk
    closing     whether the server stops
    refusal     why the last states that were acknowledged could not be written, None when they could
    totals      since the start
    """

    tiers = Guarded[Tiers]()
    jobs = Guarded[JobQueue]()
    last_nodes = Guarded[dict[Key, int]]()
    lagging = Guarded[set[Key]]()
    closing = Guarded[bool]()
    refusal = Guarded[str | None]()
    totals = Guarded[dict[str, int | float]]()

    def __init__(self, tiers: Tiers, copies: Copies, durability: Durability, *, snapshot_tokens: int = 2048):
        self.snapshot_tokens = snapshot_tokens
        self.lock = PoolLock()
        self.copies = copies
        self.durability = durability
        self.compute_state: ComputeState | None = None
        self.telling: Telling = nullcontext
        with self.lock:
            self.tiers = tiers
            self.jobs = JobQueue()
            self.last_nodes, self.lagging = {}, set()
            self.closing = False
            self.refusal = None
            self.totals = dict.fromkeys(TOTALS, 0)

    def find(self, key: Key) -> ResidentSession | None:
        """Return a session in memory."""
        with self.lock:
            return self.tiers.find(key)

    def enqueue(self, job: Job) -> None:
        """Have the storage thread do it."""
        with self.lock:
            self.jobs.add(job)
            self.lock.ring()

    def check_open(self) -> None:
        """Raise Unavailable when the server stops."""
        if self.closing:
            raise NotBegun("the server is shutting down", code="draining", retry_after=5.0)

    def check_promise(self) -> None:
        """Refuse what would be said to be on disk within `relaxed_seconds` while the disk refuses such states."""
        if self.durability != "relaxed":
            return
        with self.lock:
            if self.refusal is None:
                return
            if self.tiers.unwritten():
                raise StorageFailed(f"earlier turns still wait for the disk: {self.refusal}")
            self.refusal = None  # they were deleted

    def promote(self, resident: ResidentSession) -> None:
        """Make it the newest of L1, on the device or on its way there."""
        self.totals[f"state_loads_{self.tiers.tier_of(resident.key)}_total"] += 1
        if self.tiers.tier_of(resident.key) != "l1" and resident.snapshot is not None:
            snapshot, arrived = self.copies.to_device(resident.snapshot)
            if snapshot is not resident.snapshot:  # else it is on the device, or still on its way there
                resident.move(snapshot, arrived)
        self.put(resident)

    def put(self, resident: ResidentSession) -> None:
        """Make it the newest of L1; what this evicts is moved by the storage thread."""
        demoted, leaving = self.tiers.put(resident)
        if self.copies.on_gpu:
            for old in demoted:
                if old.due is None and self.jobs.num_demotes >= MAX_DEMOTES:
                    self.tiers.drop(old.key)
                else:
                    self.enqueue(Demote(old))
        for old in leaving:
            if old.due is not None:
                self.enqueue(Flush(old))
            else:
                self.lagging.add(old.key)

    def publish(self, resident: ResidentSession) -> None:
        """A new version is there. A response, which few continue, pushes no session out and only waits for the disk."""
        is_lagging = resident.lag > self.snapshot_tokens
        if not resident.response:
            self.put(resident)
        elif self.tiers.put_aside(resident, keep=is_lagging) and not is_lagging:
            self.enqueue(Flush(resident))
        if is_lagging:
            self.lagging.add(resident.key)
            self.lock.ring()

    def written_whole(self, resident: ResidentSession) -> None:
        """Only `ids` lead to its state on disk now, from a whole one: from there later versions lag too."""
        self.totals["state_snapshots_total"] += 1
        newest = self.tiers.find(resident.key)
        if newest is not None and newest is not resident:
            newest.lag = max(len(newest.ids), newest.lag - resident.lag + len(resident.ids))
        resident.lag = len(resident.ids)
        self.tiers.let_go(resident)

    def compute(self, resident: ResidentSession, done: Callable[[Snapshot | RwkvBatchError], None]) -> None:
        """Have the engine compute the state that a session's ids lead to; `done` is called once, in the engine's thread."""
        if self.compute_state is None:
            done(Unavailable("there is no engine to compute the state of this session"))
        else:
            self.compute_state(lambda: self.arrived(resident), resident.ids, done, resident.origin)

    def arrived(self, resident: ResidentSession) -> Snapshot | None:
        """Return a session's snapshot, which is there for what the calling thread's stream does next. No lock is waited for."""
        snapshot, arrived = resident.place
        if snapshot is not None:
            self.copies.wait(snapshot, arrived)
        return snapshot

    def count_node(self, key: Key) -> None:
        """A session called "dialogue:n", however it was made, takes that number."""
        if not self.last_nodes:
            return
        dialogue, _, number = key[1].rpartition(":")
        if is_number(number) and (key[0], dialogue) in self.last_nodes:
            self.last_nodes[key[0], dialogue] = max(self.last_nodes[key[0], dialogue], int(number))

    def stats(self) -> dict[str, int | float]:
        """Figures of this moment."""
        with self.lock:
            return {
                "state_l1_sessions": len(self.tiers.l1.sessions),
                "state_l2_sessions": len(self.tiers.l2.sessions),
                "state_l1_bytes": self.tiers.l1.num_bytes,
                "state_l2_bytes": self.tiers.l2.num_bytes,
                "state_lagging_sessions": len(self.lagging),
                "state_dirty_sessions": len(self.tiers.unwritten()) + self.jobs.num_commits,
                **self.totals,
            }
