"""Whose turn it is: turns of one session run one after another, for a limited wait, and once for each idempotency key."""

import dataclasses
import hashlib
import heapq
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from rwkv_batch.errors import Conflict, NotFound, PreconditionFailed, RwkvBatchError, Unavailable, Unprocessable
from rwkv_batch.model.state import Snapshot
from rwkv_batch.request import Request
from rwkv_batch.served.variants import ADAPTER
from rwkv_batch.session_messages import Answer, CommitResult, Session
from rwkv_batch.sessions.shared import Commit, GiveBack, Guarded, Load, Shared
from rwkv_batch.sessions.store import Claim, Key, Replay, SessionStore
from rwkv_batch.sessions.tiers import ResidentSession
from rwkv_batch.sessions.transfer import Mark

log = logging.getLogger("rwkv_batch.session_messages")

BACKLOG_STATES = 64  # that may wait for the disk before new turns are refused,
BACKLOG_BYTES = 512 * 2**20  # and of how many bytes
LOG_BACKLOG_TURNS = 1024  # that may wait for the log before new turns wait too,
LOG_BACKLOG_BYTES = 8 * 2**30  # and the bytes of their states
FEW_IDS = 32  # that each row of a request feeds again
MAX_REPLAYS = 1000  # answers in memory, kept for their idempotency keys
# Fields of requests that digests on disk are older than: they are left out of the digest of a request that does not use them.
LATER_FIELDS = ("first", "grammar", "min_p", "repetition_penalty", "state", "weights")

ReplayKey = tuple[str, str, str]  # namespace, session as requests name it, idempotency key


class Lease:
    """The right to continue a session, given by `StatePool.lease`; ends with `commit` or `release`, exactly once.

    newlines  how many newlines, at most two, the session's text ends in
    version   of the session, 0 for a new one
    replay    the answer of an earlier turn with the same idempotency key: then there is nothing to run, only to `release`
    revoked   the session was deleted meanwhile: a commit will be refused
    claim     of the session, where other servers may have it too
    """

    def __init__(self, leases: "LeaseManager", request: Request, key: Key, ready: Callable[["Lease | RwkvBatchError"], None]):
        self.request = request
        self.session: Session = request.session
        self.key = key
        self.newlines = 0
        self.version = 0
        self.replay: Answer | None = None
        self.revoked = False
        self.claim: Claim | None = None
        self.ready = ready
        self.resident: ResidentSession | None = None
        self.deadline = math.inf
        self.cancelled = False
        self._leases = leases

    @property
    def takes_turns(self) -> bool:
        """Whether it takes its turn with others: it will replace the session's state."""
        return self.session.keep and self.session.node is None and self.session.save_as is None

    @property
    def target(self) -> Key:
        """The session it will change, for a new node the one it continues."""
        return self.key if self.session.save_as is None else (self.key[0], self.session.save_as)

    @property
    def replay_key(self) -> ReplayKey:
        """What its answer is found by again; only for one with an idempotency key."""
        return self.request.namespace, self.session.name, self.session.key

    @property
    def logs(self) -> bool:
        """Whether a commit may name a state behind the row's last snapshot: the ids between are kept with it."""
        return self._leases.durability == "log"

    @property
    def ids(self) -> list[int]:
        """What has to be fed after `initial`, before anything else."""
        return [] if self.resident is None else self.resident.ids

    def initial(self) -> Snapshot | None:
        """Return the state to start from, None for the empty one. Called in the thread, and on the stream, that uses it."""
        return None if self.resident is None else self._leases.arrived(self.resident)

    def commit(
        self,
        snapshot: Snapshot,
        newlines: int,
        answer: Answer,
        done: Callable[[CommitResult | RwkvBatchError], None],
        *,
        ids: list[int] | None = None,
        turn: list[int] | None = None,
    ) -> None:
        """Save the state at the end of the row; `done` is called once, in another thread, when it is, or could not be.

        ids   the state is the one that they lead to from `snapshot`; only where `logs`
        turn  all ids that lead to it from the session's state before, without `self.ids`; None: not known
        """
        if self.resident is None and self.request.state:
            turn = None  # what they follow is in no store, so the state is written whole
        self._leases.commit(Commit(self, snapshot, newlines, answer, done, ids or [], turn, None))

    def release(self, *, nonfinite: bool = False) -> None:
        """Leave the session as it was; `nonfinite`: but its state in memory led to numbers that are not finite."""
        self._leases.end(self, nonfinite=nonfinite)


class LeaseManager:
    """Gives the leases of a pool.

    turns        of each session that is busy: the first one has it, the others wait
    next_turns   those whose turn it is now
    held         those whose turn it is, but the log does not keep up: they go on when it does
    granted      leases that were given and have not ended
    unanswered   by request, those that are neither given nor refused yet
    deadlines    a heap of (when, count, lease)
    keys         idempotency keys of turns in progress
    replays      answers in memory, kept for their idempotency keys, the oldest first
    mark         behind the states of turns that are committed together
    gathers      whether more of them come, so that the storage thread need not wake yet
    """

    turns = Guarded[dict[Key, deque[Lease]]]()
    next_turns = Guarded[deque[Lease]]()
    held = Guarded[deque[Lease]]()
    granted = Guarded[set[Lease]]()
    unanswered = Guarded[dict[str, Lease]]()
    deadlines = Guarded[list[tuple[float, int, Lease]]]()
    num_deadlines = Guarded[int]()
    keys = Guarded[set[ReplayKey]]()
    replays = Guarded[OrderedDict[ReplayKey, Replay]]()
    mark = Guarded[Mark | None]()
    gathers = Guarded[bool]()

    def __init__(self, shared: Shared, store: SessionStore, *, wait_seconds: float, max_waiting: int):
        self.lock = shared.lock
        self.durability = shared.durability
        self._shared = shared
        self._store = store
        self._wait_seconds = wait_seconds
        self._max_waiting = max_waiting
        with self.lock:
            self.turns, self.next_turns, self.held, self.granted, self.unanswered = {}, deque(), deque(), set(), {}
            self.deadlines, self.num_deadlines, self.keys, self.replays = [], 0, set(), OrderedDict()
            self.mark, self.gathers = None, False

    # From any thread.

    def lease(self, request: Request, ready: Callable[[Lease | RwkvBatchError], None]) -> None:
        """See `StatePool.lease`."""
        session = request.session
        key = (request.namespace, session.name if session.node is None else f"{session.name}:{session.node}")
        lease = Lease(self, request, key, ready)
        with self.lock:
            self._admit(lease)
            self.unanswered[request.id] = lease
            if session.key is not None:
                self.keys.add(lease.replay_key)
            if lease.takes_turns:
                queue = self.turns.setdefault(key, deque())
                queue.append(lease)
                if len(queue) > 1:
                    self._wait(lease)
                    return
            self._look_up(lease)

    def cancel(self, request_id: str) -> None:
        """See `StatePool.cancel`."""
        with self.lock:
            lease = self.unanswered.pop(request_id, None)
            if lease is not None:
                lease.cancelled = True
                self.end(lease)

    def arrived(self, resident: ResidentSession) -> Snapshot | None:
        """See `Lease.initial`."""
        return self._shared.arrived(resident)

    def commit(self, commit: Commit) -> None:
        """See `Lease.commit`."""
        with self.lock:
            self._shared.jobs.add(commit._replace(written=self.mark or self._shared.copies.mark()))
            if not self.gathers:
                self.lock.ring()

    @contextmanager
    def together(self) -> Iterator[None]:
        """See `StatePool.together`."""
        with self.lock:
            self.mark, self.gathers = self._shared.copies.mark(), True
            try:
                yield
            finally:
                self.mark, self.gathers = None, False
                self.lock.ring()

    def end(self, lease: Lease, *, nonfinite: bool = False) -> None:
        """The lease is over, or will never be given; the next one in line has its turn."""
        with self.lock:
            if nonfinite and self.durability == "log" and lease.resident is not None:
                self._shared.tiers.drop(lease.key)  # what is on disk may lead to a better one
            self.granted.discard(lease)
            self.give_back(lease)
            if lease.session.key is not None:
                self.keys.discard(lease.replay_key)
            queue = self.turns.get(lease.key)
            if not lease.takes_turns or queue is None or lease not in queue:
                return
            was_first = queue[0] is lease
            queue.remove(lease)
            if not queue:
                del self.turns[lease.key]
            elif was_first:
                self.next_turns.append(queue[0])
                if len(self.next_turns) == 1:  # else a caller of this does it: many may be refused in a row
                    self._begin_turns()

    # For the storage thread.

    def is_wanted(self, lease: Lease) -> bool:
        """Whether somebody still waits for this lease."""
        return self.unanswered.get(lease.request.id) is lease

    def wait_elsewhere(self, lease: Lease) -> None:
        """Another server has the session of this lease, whose turn it is: it waits as others wait here."""
        if lease.deadline == math.inf:
            self._wait(lease)

    def give_back(self, lease: Lease) -> None:
        """Let other servers have the session, unless the turn was written."""
        claim, lease.claim = lease.claim, None
        if claim is not None:
            self._shared.enqueue(GiveBack(claim))

    def is_busy(self, key: Key) -> bool:
        """Whether a turn that will replace the session's state runs or waits."""
        return key in self.turns

    def in_use(self) -> set[Key]:
        """The sessions that somebody uses, or waits for."""
        used = {lease.key for lease in (*self.granted, *self.unanswered.values())}
        return used | {lease.target for lease in self.granted} | self.turns.keys()

    def found(self, lease: Lease, resident: ResidentSession | None, replay: Replay | None) -> None:
        """The session was looked for on disk: give the lease, unless nobody wants it any more."""
        with self.lock:
            if not lease.cancelled:
                self._grant(lease, self._shared.tiers.find(lease.key) or resident, replay)

    def refuse(self, lease: Lease, error: RwkvBatchError) -> None:
        """There will be no lease, unless nobody wants it any more."""
        with self.lock:
            if not lease.cancelled:
                self._refuse(lease, error)

    def first_deadline(self) -> float:
        """When the first turn has waited too long, on the clock of time.monotonic."""
        return self.deadlines[0][0] if self.deadlines else math.inf

    def time_out(self) -> None:
        """Refuse turns that have waited too long."""
        now = time.monotonic()
        while self.deadlines and self.deadlines[0][0] <= now:
            _, _, lease = heapq.heappop(self.deadlines)
            if lease.deadline <= now and not lease.cancelled:
                self._refuse(lease, _too_slow() if lease in self.held else _busy(lease))

    def go_on(self) -> None:
        """Turns were written: those that were held for them begin."""
        while self.held and not self._is_behind():
            lease = self.held.popleft()
            if not lease.cancelled and lease.request.id in self.unanswered:
                self._look_up(lease)

    def remember(self, resident: ResidentSession) -> None:
        """Keep the answers that were saved with a session in memory too."""
        for name, replay in resident.replays:
            self.replays[resident.key[0], name, replay.key] = replay
            if len(self.replays) > MAX_REPLAYS:
                self.replays.popitem(last=False)

    def revoke(self, is_meant: Callable[[Key], bool]) -> None:
        """Sessions are deleted: their turns in progress will be refused, and their answers are not given again."""
        for lease in self.granted:
            if lease.session.keep and is_meant(lease.target):
                lease.revoked = True
        for replay in [key for key in self.replays if is_meant(key[:2])]:
            del self.replays[replay]

    # Inside.

    def _admit(self, lease: Lease) -> None:
        session = lease.session
        self._shared.check_open()
        if session.key is not None and lease.replay_key in self.keys:
            raise Conflict("a turn with this idempotency key is in progress", code="turn_running", retry_after=1.0)
        if len(self.turns.get(lease.key, ())) > self._max_waiting:
            raise _busy(lease)
        if session.keep:
            self._shared.check_promise()
        if self.durability == "log":
            return
        jobs, leaving = self._shared.jobs, self._shared.tiers.leaving
        num_states = jobs.num_commits + len(leaving)
        num_bytes = jobs.commit_bytes + sum(resident.num_bytes for resident in leaving.values())
        if session.keep and (num_states >= BACKLOG_STATES or num_bytes >= BACKLOG_BYTES):
            raise Unavailable("too many states wait for the disk", code="storage_busy")

    def _wait(self, lease: Lease) -> None:
        lease.deadline = time.monotonic() + self._wait_seconds
        self.num_deadlines += 1
        heapq.heappush(self.deadlines, (lease.deadline, self.num_deadlines, lease))
        self.lock.ring()

    def _look_up(self, lease: Lease) -> None:
        """It is this lease's turn: grant it at once when the session is in memory, else have it loaded."""
        session = lease.session
        if session.keep and self._is_behind():
            self.held.append(lease)
            self._wait(lease)
            return
        lease.deadline = math.inf
        dialogue = (lease.request.namespace, session.name)
        in_memory = session.key is None or self._fresh_replay(lease.replay_key) is not None
        numbered = session.node is None or not session.keep or dialogue in self._shared.last_nodes
        resident = self._shared.tiers.find(lease.key)
        if resident is not None and in_memory and numbered and not self._store.shared:
            self._grant(lease, resident)
        else:
            self._shared.enqueue(Load(lease))

    def _is_behind(self) -> bool:
        """Whether so many turns wait for the log that more would only fill the memory."""
        jobs = self._shared.jobs
        return self.durability == "log" and (jobs.num_commits >= LOG_BACKLOG_TURNS or jobs.commit_bytes >= LOG_BACKLOG_BYTES)

    def _grant(self, lease: Lease, resident: ResidentSession | None, replay: Replay | None = None) -> None:
        """Give the lease its state, or say why it cannot have it."""
        session = lease.session
        try:
            if session.key is not None:
                replay = replay or self._fresh_replay(lease.replay_key)
                if replay is not None:
                    if replay.digest != digest_of(lease.request):
                        raise Unprocessable(
                            "this idempotency key was used for another request", code="idempotency_key_reused",
                            param="idempotency_key",
                        )  # fmt: skip
                    lease.replay = msgspec.msgpack.decode(replay.answer, type=Answer)
            if lease.replay is None:
                _check(lease, resident)
                if resident is not None and _must_be_whole(lease.request, resident):
                    self._shared.promote(resident)
                    self._shared.compute(resident, lambda result: self._computed(lease, resident, result))
                    return
            if resident is not None:
                self._shared.promote(resident)
        except RwkvBatchError as error:
            self._refuse(lease, error)
            return
        except Exception:  # such as no memory left on the device
            log.exception("session %r could not be brought to the device", lease.key[1])
            self._refuse(lease, Unavailable("the session could not be brought to the device", code="storage_busy"))
            return
        if resident is not None:
            lease.resident, lease.version, lease.newlines = resident, resident.version, resident.newlines
        self.unanswered.pop(lease.request.id, None)
        self.granted.add(lease)
        lease.ready(lease)

    def _computed(self, lease: Lease, resident: ResidentSession, result: Snapshot | RwkvBatchError) -> None:
        """The engine has computed the state that a session's ids lead to."""
        with self.lock:
            if isinstance(result, RwkvBatchError):
                self.refuse(lease, result)
                return
            arrived = self._shared.copies.mark()
            whole = dataclasses.replace(resident, snapshot=result, ids=[], arrived=arrived)
            if self._shared.tiers.find(lease.key) is resident:
                self._shared.put(whole)
            if not lease.cancelled:
                self._grant(lease, whole)

    def _fresh_replay(self, key: ReplayKey) -> Replay | None:
        """The answer in memory for an idempotency key, if it is to be given again; others may have deleted its session."""
        if self._store.shared:
            return None
        replay = self.replays.get(key)
        return replay if replay is not None and replay.created > self._store.now() - self._store.replay_seconds else None

    def _refuse(self, lease: Lease, error: RwkvBatchError) -> None:
        self.unanswered.pop(lease.request.id, None)
        self.end(lease)
        lease.ready(error)

    def _begin_turns(self) -> None:
        while self.next_turns:
            try:
                self._look_up(self.next_turns[0])
            finally:
                self.next_turns.popleft()


def _check(lease: Lease, resident: ResidentSession | None) -> None:
    """Raise unless the session is as the request expects it."""
    session, version = lease.session, resident.version if resident else 0
    if session.expect_version is not None and session.expect_version != version:
        raise PreconditionFailed(f"session {lease.key[1]!r} is at version {version}", param="expect_version")
    if resident is None and session.must_exist:
        raise NotFound(f"there is no session {lease.key[1]!r}", code="session_not_found", param="session_id")
    if resident is not None and lease.request.state != resident.origin and resident.origin.startswith(ADAPTER):
        raise Unprocessable(
            f"session {lease.key[1]!r} was begun with an adapter; its turns name the same one",
            param="model", code="other_adapter",
        )  # fmt: skip
    if resident is not None and lease.request.state.startswith(ADAPTER) and lease.request.state != resident.origin:
        raise Unprocessable(f"session {lease.key[1]!r} was begun without this adapter", param="model", code="other_adapter")
    if resident is not None and lease.request.state not in ("", resident.origin):
        raise Unprocessable(
            f"session {lease.key[1]!r} was begun with another state; a turn that names none goes on from where it is",
            param="state", code="other_state",
        )  # fmt: skip
    if resident is None and session.node:
        raise NotFound(f"State not found for dialogue_idx={session.node}", code="node_not_found", param="dialogue_idx")


def _must_be_whole(request: Request, resident: ResidentSession) -> bool:
    """Whether a session's ids are to be fed before the request's rows, not in each of them."""
    return (request.num_rows > 1 and len(resident.ids) > FEW_IDS) or (
        request.prompt_logprobs is not None and resident.ids != []
    )


def _too_slow() -> Unavailable:
    return Unavailable("the disk does not keep up with the turns", code="storage_busy", retry_after=1.0)


def _busy(lease: Lease) -> Conflict:
    return Conflict(f"session {lease.key[1]!r} is busy with another turn", code="session_busy", retry_after=1.0)


def digest_of(request: Request) -> bytes:
    """What two requests with the same idempotency key must have in common: all but how the answer is delivered."""
    same = msgspec.structs.replace(request, id="", chunk_size=0, loop="sync")
    return hashlib.blake2b(msgspec.msgpack.encode(_as_digested(same)), digest_size=16).digest()


def _as_digested(value: Any) -> Any:
    """A struct as the map of its fields that it would be encoded as, without those that came later and are not used."""
    if not isinstance(value, msgspec.Struct):
        return value
    fields = [(field, getattr(value, field.name)) for field in msgspec.structs.fields(value)]
    return {
        field.encode_name: _as_digested(content)
        for field, content in fields
        if field.name not in LATER_FIELDS or content != _default_of(field)
    }


def _default_of(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
