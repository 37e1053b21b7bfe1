"""Sessions: named states in device memory, then in host memory, then in SQLite.

A request takes a lease on a session and either keeps the state at its end or leaves the session as it was; turns of one session
run one after another. Snapshots are never changed: a slot is always a copy. Everything that may take long - the disk, copies to
the host - happens in one storage thread, so no step ever waits for it.

    level  where                    by default     what happens to the oldest
    L1     device memory            16 sessions    to L2
    L2     host memory              32 sessions    dropped, for it is on disk; written first when it is not yet
    DB     SQLite, `--state-db`     no limit

`durability` says when a turn is acknowledged: "turn" after its commit; "relaxed" at once, and it is on disk within
`relaxed_seconds`, so while the disk takes none no more are acknowledged; "shutdown" at once, and it is on disk when it leaves
L2 or the server stops. A turn that cannot be written fails and the session stays at its last version. What was acknowledged
stays in memory until it is on disk.
"""

import contextlib
import hashlib
import heapq
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import torch

from rwkv_batch.errors import (
    Conflict,
    EngineFailed,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    RwkvBatchError,
    StorageFailed,
    Unavailable,
    Unprocessable,
)
from rwkv_batch.model.state import Snapshot
from rwkv_batch.request import Request
from rwkv_batch.session_messages import (
    Action,
    Answer,
    Delete,
    Deleted,
    Entry,
    Export,
    Fork,
    Import,
    Kept,
    Page,
    Rewind,
    Session,
    Status,
    Tier,
)
from rwkv_batch.sessions.database import Listed, Record, Replay, SessionDatabase, Turn
from rwkv_batch.sessions.state_file import MAX_FOREIGN_TOKENS, PIECE_BYTES, StateFile, Stored
from rwkv_batch.sessions.transfer import Copies

log = logging.getLogger("rwkv_batch.session_messages")

Durability = Literal["turn", "relaxed", "shutdown"]
Key = tuple[str, str]  # namespace, name

GROUP_BYTES = 64 * 2**20  # states of one transaction: more waiting turns share a commit, but none waits much longer for it
BACKLOG_STATES, BACKLOG_BYTES = 64, 512 * 2**20  # states that may wait for the disk before new turns are refused
IDLE_SECONDS = 1.0  # without work until the write-ahead log is copied back
LIST_SESSIONS = 1000  # read at once for a list: some milliseconds
RETRY_SECONDS = 1.0  # until a state that could not be written is tried again
LOST_NAMED = 10  # in the log
MAX_REPLAYS = 1000  # answers in memory, kept for their idempotency keys


@dataclass(eq=False, slots=True)
class Held:
    """The newest version of a session in memory.

    arrived  when the snapshot is on its way to the device: the event behind the copy
    due      when it has to be on disk, on the clock of time.monotonic; infinite: when it leaves memory; None: it is there
    replays  answers for idempotency keys that go to disk with it, each with its session as the request named it
    node     of a new node: the dialogue and the number
    response  whether it is the state of an answer of the Responses API
    """

    key: Key
    version: int
    snapshot: Snapshot
    newlines: int
    updated: float
    arrived: "torch.cuda.Event | None" = None
    due: float | None = None
    replays: list[tuple[str, Replay]] = field(default_factory=list)
    node: tuple[str, int] | None = None
    response: bool = False


class Lease:
    """The right to continue a session, given by `StatePool.lease`; ends with `commit` or `release`, exactly once.

    newlines  how many newlines, at most two, the session's text ends in
    version   of the session, 0 for a new one
    replay    the answer of an earlier turn with the same idempotency key: then there is nothing to run, only to `release`
    revoked   the session was deleted meanwhile: a commit will be refused
    """

    def __init__(self, pool: "StatePool", request: Request, key: Key, ready: Callable[["Lease | RwkvBatchError"], None]):
        self.request = request
        self.session: Session = request.session
        self.key = key
        self.newlines = 0
        self.version = 0
        self.replay: Answer | None = None
        self.revoked = False
        self.ready = ready
        self.held: Held | None = None
        self.deadline = math.inf
        self.cancelled = False
        self._pool = pool

    @property
    def takes_turns(self) -> bool:
        """Whether it takes its turn with others: it will replace the session's state."""
        return self.session.keep and self.session.node is None and self.session.kept_as is None

    @property
    def target(self) -> Key:
        """The session it will change, for a new node the one it continues."""
        return self.key if self.session.kept_as is None else (self.key[0], self.session.kept_as)

    def initial(self) -> Snapshot | None:
        """Return the state to start from, None for the empty one. Called in the thread, and on the stream, that uses it."""
        if self.held is None:
            return None
        with self._pool._lock:
            snapshot, arrived = self.held.snapshot, self.held.arrived
        self._pool.copies.wait(snapshot, arrived)
        return snapshot

    def commit(self, snapshot: Snapshot, newlines: int, answer: Answer, done: Callable[[Kept | RwkvBatchError], None]) -> None:
        """Keep the state at the end of the row; `done` is called once, in another thread, when it is, or could not be."""
        self._pool._enqueue(_Commit(self, snapshot, newlines, answer, done, self._pool.copies.mark()))

    def release(self) -> None:
        """Leave the session as it was."""
        self._pool._end(self)


class _Load(NamedTuple):
    lease: Lease


class _Commit(NamedTuple):
    lease: Lease
    snapshot: Snapshot
    newlines: int
    answer: Answer
    done: Callable[[Kept | RwkvBatchError], None]
    written: "torch.cuda.Event | None"  # behind the copy out of the slot


class _Order(NamedTuple):
    action: Action
    answer: Callable[[Page | Deleted | RwkvBatchError], None]


class _Listing(NamedTuple):
    """A list that is made piece by piece, other work in between: None until it is whole."""

    pieces: Iterator[Page | None]
    answer: Callable[[Page | Deleted | RwkvBatchError], None]


class _Demote(NamedTuple):
    held: Held


class _Flush(NamedTuple):
    held: Held


_Job = _Load | _Commit | _Order | _Listing | _Demote | _Flush


class StatePool:
    """All sessions of the server.

    database           where they are kept
    file               how a state is written
    device             of the engine
    durability         see above
    l1_…, l2_…         most sessions and bytes of the two levels
    wait_seconds       how long a turn waits for the one before it, and `max_waiting` how many may
    Its methods may be called from any thread and do not wait; callbacks must be quick.
    """

    def __init__(
        self,
        database: SessionDatabase,
        file: StateFile,
        device: torch.device,
        *,
        durability: Durability = "turn",
        relaxed_seconds: float = 1.0,
        l1_sessions: int = 16,
        l1_bytes: int = 2**31,
        l2_sessions: int = 32,
        l2_bytes: int = 2**32,
        wait_seconds: float = 30.0,
        max_waiting: int = 64,
    ):
        self.copies = Copies(device)
        self.durability = durability
        self._database = database
        self.file = file
        self._relaxed_seconds = relaxed_seconds
        self._limits = {"l1": (l1_sessions, l1_bytes), "l2": (l2_sessions, l2_bytes)}
        self._wait_seconds = wait_seconds
        self._max_waiting = max_waiting
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._levels: dict[Tier, OrderedDict[Key, Held]] = {"l1": OrderedDict(), "l2": OrderedDict()}  # the oldest first
        self._num_bytes = {"l1": 0, "l2": 0}
        self._leaving: dict[Key, Held] = {}  # out of L2, not on disk yet
        self._turns: dict[Key, deque[Lease]] = {}  # the first one has the session, the others wait
        self._next_turns: deque[Lease] = deque()  # those whose turn it is now
        self._granted: set[Lease] = set()
        self._by_request: dict[str, Lease] = {}  # not granted yet
        self._deadlines: list[tuple[float, int, Lease]] = []
        self._num_deadlines = 0
        self._keys: set[tuple[str, str, str]] = set()  # idempotency keys of turns in progress
        self._replays: OrderedDict[tuple[str, str, str], Replay] = OrderedDict()
        self._nodes: dict[Key, int] = {}  # dialogue -> last number
        self._jobs: deque[_Job] = deque()
        self._backlog_bytes = 0
        self._num_commits = 0  # waiting
        self._closing = False
        self._refused: str | None = None  # why the last flush failed
        self._totals = {"state_commits_total": 0, "state_commit_seconds_total": 0.0, "state_commit_failures_total": 0,
                        "state_loads_l1_total": 0, "state_loads_l2_total": 0, "state_loads_db_total": 0}  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="storage", daemon=True)
        self._thread.start()

    # From any thread.

    def lease(self, request: Request, ready: Callable[[Lease | RwkvBatchError], None]) -> None:
        """Ask for a session; `ready` is called once, in any thread, with the lease or with why there is none.

        Raises Conflict when too many turns wait for the session or one with the same idempotency key runs, Unavailable when
        too many states wait for the disk.
        """
        session = request.session
        key = (request.namespace, session.name if session.node is None else f"{session.name}:{session.node}")
        lease = Lease(self, request, key, ready)
        with self._lock:
            self._admit(lease)
            self._by_request[request.id] = lease
            if session.key is not None:
                self._keys.add(_key_of(lease))
            if lease.takes_turns:
                queue = self._turns.setdefault(key, deque())
                queue.append(lease)
                if len(queue) > 1:
                    self._wait(lease)
                    return
            self._look_up(lease)

    def cancel(self, request_id: str) -> None:
        """Nobody waits any more for the lease of this request; one that was given is released by whoever has it."""
        with self._lock:
            lease = self._by_request.pop(request_id, None)
            if lease is not None:
                lease.cancelled = True
                self._end(lease)

    def manage(self, action: Action, answer: Callable[[Page | Deleted | RwkvBatchError], None]) -> None:
        """Carry out an order; `answer` is called once, in the storage thread. Raises Unavailable when the server stops."""
        with self._lock:
            self._check_open()
            self._enqueue(_Order(action, answer))

    def stats(self) -> dict[str, int | float]:
        """Figures of this moment."""
        with self._lock:
            levels = [*self._levels["l1"].values(), *self._levels["l2"].values(), *self._leaving.values()]
            return {
                "state_l1_sessions": len(self._levels["l1"]),
                "state_l2_sessions": len(self._levels["l2"]),
                "state_dirty_sessions": sum(held.due is not None for held in levels) + self._num_commits,
                **self._totals,
            }

    def close(self) -> int:
        """Write what is not on disk yet and end; waits for it. Returns how many sessions could not be written and are lost."""
        with self._lock:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()
        lost = [held.key[1] for held in self._iter_held() if held.due is not None]
        if lost:
            log.critical("%d sessions could not be written and are lost, such as %r", len(lost), lost[:LOST_NAMED])
        return len(lost)

    # Turns. The lock is held.

    def _admit(self, lease: Lease) -> None:
        session = lease.session
        self._check_open()
        if session.key is not None and _key_of(lease) in self._keys:
            raise Conflict("a turn with this idempotency key is in progress", code="turn_running", retry_after=1.0)
        if len(self._turns.get(lease.key, ())) > self._max_waiting:
            raise self._busy(lease)
        if session.keep:
            self._check_promise()
        num_states = self._num_commits + len(self._leaving)
        num_bytes = self._backlog_bytes + sum(held.snapshot.num_bytes for held in self._leaving.values())
        if session.keep and (num_states >= BACKLOG_STATES or num_bytes >= BACKLOG_BYTES):
            raise Unavailable("too many states wait for the disk", code="storage_busy")

    def _check_promise(self) -> None:
        """Refuse what would be said to be on disk within `relaxed_seconds` while the disk refuses such states."""
        if self._refused is None or self.durability != "relaxed":
            return
        with self._lock:
            waiting = any(held.due is not None for held in self._iter_held())
        if waiting:
            raise StorageFailed(f"earlier turns still wait for the disk: {self._refused}")
        self._refused = None  # they were deleted

    def _check_open(self) -> None:
        if self._closing:
            raise Unavailable("the server is shutting down", code="draining", retry_after=5.0)

    def _busy(self, lease: Lease) -> Conflict:
        return Conflict(f"session {lease.key[1]!r} is busy with another turn", code="session_busy", retry_after=1.0)

    def _wait(self, lease: Lease) -> None:
        lease.deadline = time.monotonic() + self._wait_seconds
        self._num_deadlines += 1
        heapq.heappush(self._deadlines, (lease.deadline, self._num_deadlines, lease))
        self._wake.notify_all()

    def _look_up(self, lease: Lease) -> None:
        """It is this lease's turn: grant it at once when the session is in memory, else have it loaded."""
        lease.deadline = math.inf
        session = lease.session
        dialogue = (lease.request.namespace, session.name)
        in_memory = session.key is None or self._fresh_replay(_key_of(lease)) is not None
        numbered = session.node is None or not session.keep or dialogue in self._nodes
        held = self._find(lease.key)
        if held is not None and in_memory and numbered:
            self._grant(lease, held)
        else:
            self._enqueue(_Load(lease))

    def _grant(self, lease: Lease, held: Held | None, replay: Replay | None = None) -> None:
        """Give the lease its state, or say why it cannot have it."""
        session = lease.session
        try:
            if session.key is not None:
                replay = replay or self._fresh_replay(_key_of(lease))
                if replay is not None:
                    if replay.digest != _digest(lease.request):
                        raise Unprocessable(
                            "this idempotency key was used for another request", code="idempotency_key_reused",
                            param="idempotency_key",
                        )  # fmt: skip
                    lease.replay = msgspec.msgpack.decode(replay.answer, type=Answer)
            if lease.replay is None:
                self._check(lease, held)
            if held is not None:
                self._promote(held)
        except RwkvBatchError as error:
            self._refuse(lease, error)
            return
        except Exception:  # such as no memory left on the device
            log.exception("session %r could not be brought to the device", lease.key[1])
            self._refuse(lease, Unavailable("the session could not be brought to the device", code="storage_busy"))
            return
        if held is not None:
            lease.held, lease.version, lease.newlines = held, held.version, held.newlines
        self._by_request.pop(lease.request.id, None)
        self._granted.add(lease)
        lease.ready(lease)

    def _fresh_replay(self, key: tuple[str, str, str]) -> Replay | None:
        """The answer in memory for an idempotency key, if it is to be given again."""
        replay = self._replays.get(key)
        return replay if replay is not None and replay.created > self._database.now() - self._database.replay_seconds else None

    def _check(self, lease: Lease, held: Held | None) -> None:
        session, version = lease.session, held.version if held else 0
        if session.expect_version is not None and session.expect_version != version:
            raise PreconditionFailed(f"session {lease.key[1]!r} is at version {version}", param="expect_version")
        if held is None and session.must_exist:
            raise NotFound(f"there is no session {lease.key[1]!r}", code="session_not_found", param="session_id")
        if held is None and session.node:
            raise NotFound(f"State not found for dialogue_idx={session.node}", code="node_not_found", param="dialogue_idx")

    def _refuse(self, lease: Lease, error: RwkvBatchError) -> None:
        self._by_request.pop(lease.request.id, None)
        self._end(lease)
        lease.ready(error)

    def _end(self, lease: Lease) -> None:
        """The lease is over, or will never be given; the next one in line has its turn."""
        with self._lock:
            self._granted.discard(lease)
            if lease.session.key is not None:
                self._keys.discard(_key_of(lease))
            queue = self._turns.get(lease.key)
            if not lease.takes_turns or queue is None or lease not in queue:
                return
            was_first = queue[0] is lease
            queue.remove(lease)
            if not queue:
                del self._turns[lease.key]
            elif was_first:
                self._next_turns.append(queue[0])
                if len(self._next_turns) == 1:  # else a caller of this does it: many may be refused in a row
                    self._begin_turns()

    def _begin_turns(self) -> None:
        while self._next_turns:
            try:
                self._look_up(self._next_turns[0])
            finally:
                self._next_turns.popleft()

    # What is in memory. The lock is held.

    def _find(self, key: Key) -> Held | None:
        held = self._levels["l1"].get(key) or self._levels["l2"].get(key) or self._leaving.get(key)
        if held is not None and held.response and held.updated <= self._database.now() - self._database.response_seconds:
            with self._lock:
                self._drop(key)
            return None
        return held

    def _promote(self, held: Held) -> None:
        """Make it the newest of L1."""
        tier = next((tier for tier in self._levels if held.key in self._levels[tier]), None)
        self._totals[f"state_loads_{tier or 'db'}_total"] += 1
        if tier != "l1":
            snapshot, arrived = self.copies.to_device(held.snapshot)
            if snapshot is not held.snapshot:  # else it is on the device, or still on its way there
                held.snapshot, held.arrived = snapshot, arrived
        self._put(held)

    def _put(self, held: Held) -> None:
        """Make it the newest of L1 in place of an older version, and move what is too much down."""
        self._drop(held.key)
        self._levels["l1"][held.key] = held
        self._num_bytes["l1"] += held.snapshot.num_bytes
        for old in self._trim("l1"):
            self._levels["l2"][old.key] = old
            self._num_bytes["l2"] += old.snapshot.num_bytes
            if self.copies.on_gpu:
                self._enqueue(_Demote(old))
        for old in self._trim("l2"):
            if old.due is not None:
                self._leaving[old.key] = old
                self._enqueue(_Flush(old))

    def _trim(self, tier: Tier) -> Iterator[Held]:
        """Take the oldest out while there are too many."""
        level, (most, most_bytes) = self._levels[tier], self._limits[tier]
        while len(level) > most or (self._num_bytes[tier] > most_bytes and level):
            _, old = level.popitem(last=False)
            self._num_bytes[tier] -= old.snapshot.num_bytes
            yield old

    def _drop(self, key: Key) -> Held | None:
        """Take a session out of memory."""
        for tier, level in self._levels.items():
            if key in level:
                held = level.pop(key)
                self._num_bytes[tier] -= held.snapshot.num_bytes
                return held
        return self._leaving.pop(key, None)

    def _enqueue(self, job: _Job) -> None:
        with self._lock:
            if isinstance(job, _Commit):
                self._num_commits += 1
                self._backlog_bytes += job.snapshot.num_bytes
            self._jobs.append(job)
            self._wake.notify_all()

    # The storage thread.

    def _run(self) -> None:
        try:
            self._database.open_if_there()
        except RwkvBatchError as error:  # requests without sessions are served all the same
            log.error("%s", error.message)
        while True:
            woken = True
            with self._lock:
                self._time_out()
                jobs = self._next_jobs()
                if not jobs:
                    if self._closing:
                        break
                    woken = self._wake.wait(max(0.0, min(self._next_time() - time.monotonic(), IDLE_SECONDS)))
            if jobs:
                try:
                    self._work(jobs)
                except Exception:  # such as a device that is gone
                    log.exception("the storage thread could not do its work")
            self._flush_due(time.monotonic())
            self._database.tidy(waiting=bool(self._jobs), idle=not woken)
            if not woken:
                with contextlib.suppress(RwkvBatchError):  # logged; there is time for another try
                    self._database.clean_up()
        self._flush_due(None)
        self._database.tidy(waiting=False, idle=True)
        self._database.close()

    def _next_jobs(self) -> list[_Job]:
        """Take what is done next: what needs no transaction first, but nothing before an order it came after."""
        for index, job in enumerate(self._jobs):
            if isinstance(job, _Order):
                break
            if isinstance(job, _Load) or (isinstance(job, _Commit) and self.durability != "turn"):
                del self._jobs[index]
                return [job]
        if not self._jobs:
            return []
        jobs, num_bytes = [self._jobs.popleft()], 0
        if isinstance(jobs[0], _Commit):
            num_bytes = jobs[0].snapshot.num_bytes
            while self._jobs and isinstance(self._jobs[0], _Commit) and num_bytes < GROUP_BYTES:
                jobs.append(self._jobs.popleft())
                num_bytes += jobs[-1].snapshot.num_bytes
        return jobs

    def _work(self, jobs: list[_Job]) -> None:
        match jobs[0]:
            case _Load(lease):
                self._load(lease)
            case _Commit():
                self._commit(jobs)
            case _Order(Status() as action, answer):
                self._list(_Listing(self._status(action), answer))
            case _Order(action, answer):
                answer(self._guarded(lambda: self._obey(action)))
            case _Listing():
                self._list(jobs[0])
            case _Demote(held):
                self._demote(held)
            case _Flush(held):
                self._flush([held])

    def _next_time(self) -> float:
        """When there is something to do next, on the clock of time.monotonic."""
        first_wait = self._deadlines[0][0] if self._deadlines else math.inf
        dues = () if self.durability == "turn" else (held.due for held in self._iter_held() if held.due is not None)
        return min(first_wait, min(dues, default=math.inf))

    def _iter_held(self) -> Iterator[Held]:
        yield from self._levels["l1"].values()
        yield from self._levels["l2"].values()
        yield from self._leaving.values()

    def _time_out(self) -> None:
        """Refuse turns that have waited too long."""
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, lease = heapq.heappop(self._deadlines)
            if lease.deadline <= now and not lease.cancelled:
                self._refuse(lease, self._busy(lease))

    def _load(self, lease: Lease) -> None:
        """Find the session and give the lease."""
        if lease.cancelled:
            return
        held = replay = None
        try:
            held, replay = self._look_on_disk(lease)
        except RwkvBatchError as error:
            failure = error
        except Exception:
            log.exception("session %r could not be loaded", lease.key[1])
            failure = StorageFailed(f"session {lease.key[1]!r} could not be loaded")
        else:
            failure = None
        with self._lock:
            if lease.cancelled:
                return
            if failure is not None:
                self._refuse(lease, failure)
            else:
                self._grant(lease, self._find(lease.key) or held, replay)

    def _look_on_disk(self, lease: Lease) -> tuple[Held | None, Replay | None]:
        """Return the session, unless it is in memory, and the answer that the idempotency key stands for."""
        namespace, session = lease.key[0], lease.session
        if session.key is not None:
            replay = self._database.replay(namespace, session.name, session.key)
            if replay is not None:
                return None, replay
        if session.keep and session.node is not None and (namespace, session.name) not in self._nodes:
            self._nodes[namespace, session.name] = self._last_node(namespace, session.name)
        if self._find(lease.key) is not None:
            return None, None
        if lease.takes_turns:
            self._adopt(lease.key)  # so that the turn can be taken back
        record = self._database.find(*lease.key)
        if record is not None:
            return self._read(lease.key, record), None
        return self._read_reference(lease.key), None

    def _commit(self, jobs: list[_Commit]) -> None:
        """Keep the states of turns that ended."""
        began = time.monotonic()
        good: list[tuple[_Commit, Held]] = []
        new: set[Key] = set()  # names given to new sessions by turns that are written together with this one
        for job in jobs:
            try:
                good.append((job, self._prepare(job, new)))
                if job.lease.session.kept_as is not None:
                    new.add(job.lease.target)
            except RwkvBatchError as error:
                self._failed(job, error)
            except Exception:
                log.exception("a turn of session %r could not be kept", job.lease.key[1])
                self._failed(job, StorageFailed("the state could not be kept"))
        if self.durability == "turn" and good:
            good = self._write_turns(good)
        for job, held in good:
            self._publish(job, held)
        self._totals["state_commits_total"] += len(good)
        self._totals["state_commit_seconds_total"] += time.monotonic() - began

    def _prepare(self, job: _Commit, new: set[Key]) -> Held:
        """Give the state its name and version; Conflict or EngineFailed when it cannot be kept."""
        lease, session = job.lease, job.lease.session
        if lease.revoked:
            raise Conflict(f"session {lease.target[1]!r} was deleted during the turn", code="session_deleted")
        self._check_promise()
        if not self.copies.is_finite(job.snapshot, job.written):
            raise EngineFailed("the state at the end of this turn is not finite; the session stays as it was")
        now = time.time()
        if session.kept_as is not None:
            self._check_free(*lease.target)
            if lease.target in new:
                raise _exists_already(lease.target[1])
            held = Held(lease.target, 1, job.snapshot, job.newlines, now, job.written, response=session.response)
        elif session.node is None:
            version = lease.version + 1
            held = Held(lease.key, version, job.snapshot, job.newlines, now, job.written, response=session.response)
        else:
            dialogue = (lease.request.namespace, session.name)
            number, key = self._next_node(dialogue)
            held = Held(key, 1, job.snapshot, job.newlines, now, job.written, node=(session.name, number))
        if session.key is not None:
            answer = msgspec.structs.replace(job.answer, kept=self._kept(held, replayed=True))
            replay = Replay(session.key, _digest(lease.request), msgspec.msgpack.encode(answer), self._database.now())
            held.replays.append((session.name, replay))
        return held

    def _write_turns(self, good: list[tuple[_Commit, Held]]) -> list[tuple[_Commit, Held]]:
        """Write them in one transaction, or one by one when that fails; return those that are on disk."""
        try:
            self._write([held for _, held in good])
        except RwkvBatchError as error:
            if len(good) > 1:
                return [pair for one in good for pair in self._write_turns([one])]
            self._failed(good[0][0], error)
            return []
        return good

    def _write(self, helds: list[Held]) -> None:
        """Write versions in one transaction; StorageFailed or Unavailable."""
        try:
            self._database.write([self._turn_of(held) for held in helds])
        except RwkvBatchError:
            raise
        except Exception as error:  # such as a device that is gone
            log.exception("states could not be written")
            raise StorageFailed("the state could not be written") from error

    def _turn_of(self, held: Held) -> Turn:
        snapshot = self.copies.to_host(held.snapshot, held.arrived)
        pieces = self.file.encode(Stored(snapshot, held.newlines))
        return Turn(
            *held.key, held.version, snapshot.elapsed, held.newlines, pieces, held.updated, held.replays, held.node,
            response=held.response,
        )  # fmt: skip

    def _publish(self, job: _Commit, held: Held) -> None:
        """The session is at its new version."""
        with self._lock:
            for name, replay in held.replays:
                self._replays[held.key[0], name, replay.key] = replay
                if len(self._replays) > MAX_REPLAYS:
                    self._replays.popitem(last=False)
            if self.durability == "turn":
                held.replays = []
            else:
                held.due = time.monotonic() + self._relaxed_seconds if self.durability == "relaxed" else math.inf
                old = self._find(held.key)
                if old is not None and old.due is not None:  # it will not be written any more
                    held.replays = old.replays + held.replays
                    held.due = min(held.due, old.due)
            self._keep_in_memory(held)
            self._count_node(held.key)
            self._settled(job)
        job.done(self._kept(held))

    def _keep_in_memory(self, held: Held) -> None:
        """The newest of L1; but a response, which few continue, pushes no session out and only waits for the disk."""
        if not held.response:
            self._put(held)
        else:
            self._drop(held.key)
            if held.due is not None:
                self._leaving[held.key] = held
                self._enqueue(_Flush(held))

    def _failed(self, job: _Commit, error: RwkvBatchError) -> None:
        """The turn is not kept; the session stays at its last version."""
        self._totals["state_commit_failures_total"] += 1
        with self._lock:
            self._settled(job)
        job.done(error)

    def _settled(self, job: _Commit) -> None:
        self._num_commits -= 1
        self._backlog_bytes -= job.snapshot.num_bytes
        self._end(job.lease)

    def _kept(self, held: Held, *, replayed: bool = False) -> Kept:
        node = held.node[1] if held.node is not None else None
        return Kept(held.key[1], held.version, node, held.snapshot.elapsed, self.durability == "turn", replayed)

    def _next_node(self, dialogue: Key) -> tuple[int, Key]:
        """Take the next number; one whose session is being made by a turn of its own is passed over."""
        while True:
            number = self._nodes[dialogue] = self._nodes[dialogue] + 1
            key = (dialogue[0], f"{dialogue[1]}:{number}")
            if key not in self._turns:
                return number, key

    def _count_node(self, key: Key) -> None:
        """A session called "dialogue:n", however it was made, takes that number."""
        dialogue, _, number = key[1].rpartition(":")
        if _is_number(number) and (key[0], dialogue) in self._nodes:
            self._nodes[key[0], dialogue] = max(self._nodes[key[0], dialogue], int(number))

    def _demote(self, held: Held) -> None:
        """Bring a session of L2 to the host, if it is still there."""
        if self._levels["l2"].get(held.key) is held or self._leaving.get(held.key) is held:
            snapshot = self.copies.to_host(held.snapshot, held.arrived)
            with self._lock:
                if self._levels["l1"].get(held.key) is not held:
                    held.snapshot, held.arrived = snapshot, None

    def _flush_due(self, now: float | None) -> None:
        """Write what is due, or all that is not on disk."""
        if self.durability == "turn":
            return
        with self._lock:
            dirty = [held for held in self._iter_held() if held.due is not None and (now is None or held.due <= now)]
        while dirty:
            group, num_bytes = [], 0
            while dirty and num_bytes < GROUP_BYTES:
                group.append(dirty.pop())
                num_bytes += group[-1].snapshot.num_bytes
            self._flush(group)

    def _flush(self, helds: list[Held]) -> None:
        """Write versions that were acknowledged already; what cannot be written stays in memory and is tried again."""
        with self._lock:
            helds = [held for held in helds if held.due is not None and self._find(held.key) is held]
        if not helds:
            return
        try:
            self._write(helds)
        except RwkvBatchError as error:
            self._totals["state_commit_failures_total"] += len(helds)
            self._refused = error.message
            log.error("%d states wait for the disk: %s", len(helds), error.message)
            retry = time.monotonic() + max(self._relaxed_seconds, RETRY_SECONDS)
            for held in helds:
                held.due = retry
            return
        self._refused = None
        with self._lock:
            for held in helds:
                held.due, held.replays = None, []
                if self._leaving.get(held.key) is held:
                    del self._leaving[held.key]

    # Reading.

    def _read(self, key: Key, record: Record) -> Held:
        """Read a version from disk."""
        stored = self.file.decode(self._database.pieces(record), pin=self.copies.on_gpu)
        return Held(key, record.version, stored.snapshot, stored.newlines, record.updated, response=bool(record.response))

    def _read_reference(self, key: Key) -> Held | None:
        """Read a session of rwkv_lightning whose file this is; its version is 1."""
        found = self._database.reference_state(*key)
        if found is None:
            return None
        data, updated = found
        stored = self.file.decode_reference(data)
        return Held(key, 1, stored.snapshot, stored.newlines, updated)

    def _last_node(self, namespace: str, name: str) -> int:
        """The largest number of a node of this dialogue, on disk or not yet."""
        with self._lock:
            names = [held.key[1] for held in self._iter_held() if held.key[0] == namespace]
        numbers = [n.removeprefix(f"{name}:") for n in names if n.startswith(f"{name}:")]
        return max([self._database.last_node(namespace, name), *(int(n) for n in numbers if _is_number(n))])

    # Orders, in the storage thread.

    def _guarded(self, work: Callable[[], Page | Deleted | None]) -> Page | Deleted | RwkvBatchError | None:
        """What comes of an order, or why it cannot be carried out."""
        try:
            return work()
        except RwkvBatchError as error:
            return error
        except Exception:
            log.exception("an order about sessions failed")
            return StorageFailed("the order could not be carried out; the log says why")

    def _obey(self, action: Action) -> Page | Deleted:
        match action:
            case Delete():
                return self._delete(action)
            case Fork():
                return self._fork(action)
            case Rewind():
                return self._rewind(action)
            case Export():
                return self._export(action)
            case Import():
                return self._import(action)

    def _list(self, listing: _Listing) -> None:
        """Make the next piece of a list; what waits already is done before the one after it."""
        page = self._guarded(lambda: next(listing.pieces))
        if page is None:
            self._enqueue(listing)
        else:
            listing.answer(page)

    def _status(self, action: Status) -> Iterator[Page | None]:
        namespace, responses = action.namespace, action.responses
        with self._lock:
            l1, l2 = (
                [held for held in level if held.key[0] == namespace and (responses or not held.response)]
                for level in (
                    [*self._levels["l1"].values()],
                    [*self._levels["l2"].values(), *self._leaving.values()],
                )
            )
        names = [held.key[1] for held in (*l1, *l2)]
        ids = self._database.ids(namespace, names)
        num_db = self._database.count(namespace, responses=responses) - len(ids)
        counts = {"total": len(names) + num_db, "l1": len(l1), "l2": len(l2), "db": num_db}
        entries = [*(_entry(held, "l1") for held in l1), *(_entry(held, "l2") for held in l2)]
        if action.name is not None:
            yield Page(sessions=self._one(namespace, action.name, entries), **counts)
            return
        offset, limit = max(0, action.offset), action.limit
        if limit is not None and limit <= LIST_SESSIONS:
            sessions = entries[offset : offset + limit]
            if len(sessions) < limit:
                part = {"offset": max(0, offset - len(entries)), "limit": limit - len(sessions)}
                sessions += map(_listed, self._database.page(namespace, without=ids, responses=responses, **part))
            yield Page(sessions=sessions, **counts)
            return
        found: list[Listed] = []
        last, in_memory = "", set(names)
        while piece := self._database.named_after(namespace, last, LIST_SESSIONS, responses=responses):
            found += [session for session in piece if session.name not in in_memory]
            last = piece[-1].name  # names do not change: each comes once
            yield None
        seen = in_memory | {session.name for session in found}
        found += [session for session in self._database.reference(namespace) if session.name not in seen]
        found.sort(reverse=True)  # by time and id, as `page` does
        entries += map(_listed, found)
        yield Page(sessions=entries[offset:][:limit], **counts)

    def _one(self, namespace: str, name: str, entries: list[Entry]) -> list[Entry]:
        """The session's entry with its versions."""
        record = self._database.find(namespace, name)
        entry = next((e for e in entries if e.name == name), None) or (_stored_entry(name, record) if record else None)
        if entry is None:
            entry = next((_listed(session) for session in self._database.reference(namespace) if session.name == name), None)
        if entry is None:
            return []
        versions = {entry.version, *self._database.kept_versions(namespace, name)}
        return [msgspec.structs.replace(entry, versions=sorted(versions, reverse=True))]

    def _delete(self, action: Delete) -> Deleted:
        def is_meant(key: Key) -> bool:
            return key == (action.namespace, action.name) or (
                action.prefix and key[0] == action.namespace and key[1].startswith(f"{action.name}:")
            )

        with self._lock:
            names = {held.key[1] for held in self._iter_held() if is_meant(held.key)}
        names |= self._database.delete(action.namespace, action.name, prefix=action.prefix)
        with self._lock:  # after the disk, which may refuse; turns that began meanwhile are meant too
            for lease in self._granted:
                if lease.session.keep and is_meant(lease.target):
                    lease.revoked = True
            for held in [held for held in self._iter_held() if is_meant(held.key)]:
                self._drop(held.key)
            for replay in [r for r in self._replays if is_meant(r[:2])]:
                del self._replays[replay]
        return Deleted(action.name in names, len(names))

    def _fork(self, action: Fork) -> Page:
        if not action.copies or len(set(action.copies)) < len(action.copies):
            raise InvalidRequest("the copies need names, each its own", param="copies")
        record = self._record(action.namespace, action.name, action.version)
        for name in action.copies:
            self._check_free(action.namespace, name)
        self._database.fork(action.namespace, record, action.copies)
        with self._lock:
            for name in action.copies:
                self._count_node((action.namespace, name))
        return Page(sessions=self._stored(action.namespace, action.copies))

    def _rewind(self, action: Rewind) -> Page:
        namespace, name = key = (action.namespace, action.name)
        newest = self._record(namespace, name, None)
        if action.expect_version not in (None, newest.version):
            raise PreconditionFailed(f"session {name!r} is at version {newest.version}", param="expect_version")
        version = action.version
        if version is None:
            current = newest.version if newest.origin is None else newest.origin
            version = max((v for v in self._database.kept_versions(namespace, name) if v < current), default=0)
        record = self._record(namespace, name, version)
        self._take_out(key)
        self._database.rewind(namespace, name, record, newest.version + 1)
        return Page(sessions=self._stored(namespace, [name]))

    def _export(self, action: Export) -> Page:
        record = self._record(action.namespace, action.name, action.version)
        stored = self.file.decode(self._database.pieces(record))
        try:
            with open(action.path, "wb") as out:
                for piece in self.file.encode(stored):
                    out.write(piece)
        except OSError as error:
            raise StorageFailed(f"no room for the file in transit: {error.strerror}") from None
        return Page(sessions=[_stored_entry(action.name, record)])

    def _import(self, action: Import) -> Page:
        with open(action.path, "rb") as source:
            stored = self.file.decode(iter(lambda: source.read(PIECE_BYTES), b""))
        if not self.copies.is_finite(stored.snapshot, None):
            raise Unprocessable("the state is not finite", code="state_unusable")
        if stored.snapshot.elapsed >= MAX_FOREIGN_TOKENS:
            raise Unprocessable("the state cannot have seen so many tokens", code="state_unusable")
        key = (action.namespace, action.name)
        if not action.overwrite:
            self._check_free(*key)
        record = self._record(*key, None) if self._exists(*key) else None
        self._take_out(key)
        snapshot, pieces = stored.snapshot, self.file.encode(stored)
        version = record.version + 1 if record else 1
        self._database.write([Turn(*key, version, snapshot.elapsed, stored.newlines, pieces, time.time())])
        with self._lock:
            self._count_node(key)
        return Page(sessions=self._stored(action.namespace, [action.name]))

    def _record(self, namespace: str, name: str, version: int | None) -> Record:
        """A version of a session on disk, where it is brought first if need be; NotFound."""
        held = self._find((namespace, name))
        if held is not None and held.due is not None:
            self._flush([held])
            if held.due is not None:
                raise StorageFailed(f"session {name!r} could not be written")
        self._adopt((namespace, name))
        record = self._database.find(namespace, name, version)
        if record is None and (version is None or self._database.find(namespace, name) is None):
            raise NotFound(f"there is no session {name!r}", code="session_not_found", param="session_id")
        if record is None:
            what = f"version {version}" if version else "earlier version"
            raise NotFound(f"session {name!r}: no {what} is kept", code="version_not_found", param="version")
        return record

    def _adopt(self, key: Key) -> None:
        """Make a session that is only in rwkv_lightning's table one of ours, as its version 1."""
        held = self._read_reference(key)
        if held is not None:
            if not self.copies.is_finite(held.snapshot, None):
                raise Unprocessable("the stored state cannot be used: it is not finite", code="state_unusable")
            self._write([held])

    def _exists(self, namespace: str, name: str) -> bool:
        return self._find((namespace, name)) is not None or bool(self._database.ids(namespace, [name]))

    def _check_free(self, namespace: str, name: str) -> None:
        if not name:
            raise InvalidRequest("a session needs a name", param="session_id")
        if self._exists(namespace, name) or (namespace, name) in self._turns:
            raise _exists_already(name)

    def _take_out(self, key: Key) -> None:
        """Take a session that is to change on disk out of memory, so that the next turn reads it; Conflict when it is busy."""
        with self._lock:
            if key in self._turns:
                raise Conflict(f"session {key[1]!r} is busy with a turn", code="session_busy", retry_after=1.0)
            self._drop(key)

    def _stored(self, namespace: str, names: list[str]) -> list[Entry]:
        records = [(name, self._database.find(namespace, name)) for name in names]
        return [_stored_entry(name, record) for name, record in records if record is not None]


def _key_of(lease: Lease) -> tuple[str, str, str]:
    return lease.request.namespace, lease.session.name, lease.session.key


def _exists_already(name: str) -> Conflict:
    return Conflict(f"there is a session {name!r} already", code="session_exists")


def _digest(request: Request) -> bytes:
    """What two requests with the same idempotency key must have in common: all but how the answer is delivered."""
    same = msgspec.structs.replace(request, id="", chunk_size=0, loop="sync")
    return hashlib.blake2b(msgspec.msgpack.encode(same), digest_size=16).digest()


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def _entry(held: Held, tier: Tier) -> Entry:
    return Entry(held.key[1], tier, held.updated, held.version, held.snapshot.elapsed, held.snapshot.num_bytes)


def _listed(session: Listed) -> Entry:
    updated, _, name, version, tokens, num_bytes = session
    return Entry(name, "db", updated, version, tokens, num_bytes)


def _stored_entry(name: str, record: Record) -> Entry:
    return Entry(name, "db", record.updated, record.version, record.tokens, record.num_bytes)
