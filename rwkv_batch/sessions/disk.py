"""States on their way to the store and from it: when a turn counts as saved, and what happens when the disk takes none.

All of it runs in the storage thread, which is the only one that uses the store.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from rwkv_batch.errors import Conflict, EngineFailed, InvalidRequest, RwkvBatchError, StorageFailed, Unprocessable
from rwkv_batch.model.state import Snapshot
from rwkv_batch.session_messages import CommitResult
from rwkv_batch.sessions.claims import Claims
from rwkv_batch.sessions.leases import Lease, LeaseManager, digest_of
from rwkv_batch.sessions.room import Room
from rwkv_batch.sessions.shared import GROUP_BYTES, Commit, Shared
from rwkv_batch.sessions.state_file import StateFile, Stored, other_model
from rwkv_batch.sessions.store import (
    Key,
    NewVersion,
    Record,
    Replay,
    SessionStore,
    Source,
    SourceLost,
    StateMoved,
    StoredState,
    is_number,
)
from rwkv_batch.sessions.tiers import ResidentSession

log = logging.getLogger("rwkv_batch.session_messages")

FETCHES = 8  # whole states on their way from a shared store at once
RETRY_SECONDS = 1.0  # until a state that could not be written is tried again


class StateReader:
    """Finds the sessions that leases ask for."""

    def __init__(self, shared: Shared, leases: LeaseManager, store: SessionStore, file: StateFile, writer: "StateWriter"):
        self._shared = shared
        self._leases = leases
        self._store = store
        self._file = file
        self._writer = writer
        self.claims = Claims(shared, leases, store)
        self._fetches = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch")  # begins a thread when it needs one

    def load(self, leases: list[Lease]) -> None:
        """Find sessions and give the leases."""
        leases = [lease for lease in leases if not lease.cancelled]
        for lease in self._claim(leases) if self._store.shared else leases:
            self._give(lease, lambda lease=lease: self._look_on_disk(lease))

    def _claim(self, leases: list[Lease]) -> list[Lease]:
        """Claim the sessions of leases that take turns, all at once; return the leases that can be looked for."""
        turns = [lease for lease in leases if lease.takes_turns]
        try:
            return [*self.claims.take_many(turns), *(lease for lease in leases if not lease.takes_turns)]
        except Exception:  # for one of them, perhaps: each is told by itself
            return leases

    def _give(self, lease: Lease, look: Callable[[], tuple[ResidentSession | None, Replay | None] | None]) -> None:
        """Give the lease what is found, or say why there is none; None: that will be later."""
        try:
            found = look()
        except RwkvBatchError as error:
            self._leases.refuse(lease, error)
        except Exception:
            log.exception("session %r could not be loaded", lease.key[1])
            self._leases.refuse(lease, StorageFailed(f"session {lease.key[1]!r} could not be loaded"))
        else:
            if found is not None:
                self._leases.found(lease, *found)

    def adopt(self, key: Key) -> None:
        """Make a session that is only in rwkv_lightning's table one of ours, as its version 1."""
        resident = self._read_reference(key)
        if resident is not None:
            if not self._shared.copies.is_finite(resident.snapshot, None):
                raise Unprocessable("the stored state cannot be used: it is not finite", code="state_unusable")
            self._writer.write_whole([resident])

    def _look_on_disk(self, lease: Lease) -> tuple[ResidentSession | None, Replay | None] | None:
        """Return the session, unless it is in memory, and the answer that the idempotency key stands for; None: not yet."""
        if self._store.shared and lease.claim is None and not self.claims.take(lease):
            return None
        namespace, session = lease.key[0], lease.session
        if session.key is not None:
            replay = self._store.replay(namespace, session.name, session.key)
            if replay is not None:
                return None, replay
        if session.keep and session.node is not None and not self._store.shared:
            self._count_nodes(namespace, session.name)
        if self._shared.find(lease.key) is not None:
            return None, None
        if lease.takes_turns:
            self.adopt(lease.key)  # so that the turn can be taken back
        record = self._store.find(*lease.key)
        if record is None:
            return self._read_reference(lease.key), None
        stored = self._store.load(record)
        if self._store.shared and stored.pieces is not None:  # they come over a network, and others need not wait for them
            self._fetches.submit(self._give, lease, lambda: (self._read(lease.key, record, stored), None))
            return None
        return self._read(lease.key, record, stored), None

    def read(self, key: Key, record: Record) -> ResidentSession:
        """Read a version from disk."""
        return self._read(key, record, self._store.load(record))

    def _read(self, key: Key, record: Record, stored: StoredState) -> ResidentSession:
        whole, ids = self._decode(record, stored)
        snapshot, origin = (whole.snapshot, whole.origin) if whole is not None else (None, "")
        return ResidentSession(
            key, record.version, snapshot, record.newlines, record.updated, ids, lag=len(ids), response=bool(record.response),
            id=record.session, origin=origin,
        )  # fmt: skip

    def read_state(self, record: Record) -> tuple[Snapshot | None, list[int]]:
        """Return a whole state on disk, None for the empty one, and the ids that lead from it to that of a version."""
        whole, ids = self._decode(record, self._store.load(record))
        return (whole.snapshot if whole is not None else None), ids

    def _decode(self, record: Record, stored: StoredState) -> tuple[Stored | None, list[int]]:
        while True:
            try:
                return self._decode_now(record, stored)
            except StateMoved:
                stored = self._store.load(record)

    def _decode_now(self, record: Record, stored: StoredState) -> tuple[Stored | None, list[int]]:
        pieces, ids, models, _ = stored
        for model in models - {self._file.fingerprint}:
            raise other_model(model, self._file.fingerprint)
        whole = self._file.decode(pieces, pin=self._shared.copies.on_gpu) if pieces is not None else None
        if (whole.snapshot.elapsed if whole is not None else 0) + len(ids) != record.tokens:
            raise Unprocessable("the stored state cannot be used: it has seen other tokens", code="state_unusable")
        return whole, ids

    def _read_reference(self, key: Key) -> ResidentSession | None:
        """Read a session of rwkv_lightning whose file this is; its version is 1."""
        found = self._store.reference_state(*key)
        if found is None:
            return None
        data, updated = found
        stored = self._file.decode_reference(data)
        return ResidentSession(key, 1, stored.snapshot, stored.newlines, updated)

    def _count_nodes(self, namespace: str, name: str) -> None:
        """Find the largest number of a node of this dialogue, on disk or not yet."""
        with self._shared.lock:
            if (namespace, name) in self._shared.last_nodes:
                return
            names = [resident.key[1] for resident in self._shared.tiers if resident.key[0] == namespace]
        numbers = [n.removeprefix(f"{name}:") for n in names if n.startswith(f"{name}:")]
        last = max([self._store.last_node(namespace, name), *(int(n) for n in numbers if is_number(n))])
        with self._shared.lock:
            self._shared.last_nodes[namespace, name] = last


class StateWriter:
    """Saves the states of turns that ended, at once or when they are due."""

    def __init__(
        self,
        shared: Shared,
        leases: LeaseManager,
        store: SessionStore,
        file: StateFile,
        room: Room,
        *,
        relaxed_seconds: float,
    ):
        self._shared = shared
        self._leases = leases
        self._store = store
        self._file = file
        self._room = room
        self._relaxed_seconds = relaxed_seconds
        self._logs = shared.durability == "log"
        self._at_once = shared.durability in ("log", "turn")

    # Commits.

    def commit(self, jobs: list[Commit]) -> None:
        """Save the states of turns that ended."""
        began = time.monotonic()
        good: list[tuple[Commit, ResidentSession]] = []
        new: set[Key] = set()  # names given to new sessions by turns that are written together with this one
        for job in jobs:
            try:
                good.append((job, self._prepare(job, new)))
                if job.lease.session.save_as is not None:
                    new.add(job.lease.target)
            except RwkvBatchError as error:
                self._failed(job, error)
            except Exception:
                log.exception("a turn of session %r could not be kept", job.lease.key[1])
                self._failed(job, StorageFailed("the state could not be kept"))
        if self._at_once and good:
            good = self._write_turns(good)
        with self._shared.lock:
            for job, resident in good:
                job.lease.claim = None  # it ended with the write
                self._publish(job, resident)
            self._shared.totals["state_commits_total"] += len(good)
            self._shared.totals["state_commit_seconds_total"] += time.monotonic() - began
            self._leases.go_on()
        results = [(job.done, self._result(resident)) for job, resident in good]
        with self._shared.telling():
            for done, result in results:
                done(result)

    def _prepare(self, job: Commit, new: set[Key]) -> ResidentSession:
        """Give the state its name and version; Conflict or EngineFailed when it cannot be saved."""
        lease, session = job.lease, job.lease.session
        if lease.revoked:
            raise Conflict(f"session {lease.target[1]!r} was deleted during the turn", code="session_deleted")
        self._shared.check_promise()
        if not self._logs and not self._shared.copies.is_finite(job.snapshot, job.written):
            raise EngineFailed("the state at the end of this turn is not finite; the session stays as it was")
        key, version, node = lease.key, lease.version + 1, None
        if session.save_as is not None:
            self.check_free(*lease.target)
            if lease.target in new:
                raise _exists_already(lease.target[1])
            key, version = lease.target, 1
        elif session.node is not None:
            number, key = self._next_node((lease.request.namespace, session.name))
            version, node = 1, (session.name, number)
        response = session.response and node is None
        before = lease.resident.lag if lease.resident is not None else 0
        lag = before + len(job.turn) if self._logs and job.turn is not None else len(job.ids)
        resident = ResidentSession(
            key, version, job.snapshot, job.newlines, time.time(), job.ids, lag, job.written, node=node, response=response,
            origin=lease.request.state if lease.resident is None else lease.resident.origin,
        )  # fmt: skip
        if lease.resident is not None and key == lease.resident.key:
            resident.id = lease.resident.id
        if session.key is not None:
            answer = msgspec.structs.replace(job.answer, kept=self._result(resident, replayed=True))
            replay = Replay(session.key, digest_of(lease.request), msgspec.msgpack.encode(answer), self._store.now())
            resident.replays.append((session.name, replay))
        return resident

    def _next_node(self, dialogue: Key) -> tuple[int, Key]:
        """Take the next number; one whose session is being made by a turn of its own is passed over."""
        if self._store.shared:
            number = self._store.next_node(*dialogue)
            return number, (dialogue[0], f"{dialogue[1]}:{number}")
        with self._shared.lock:
            while True:
                number = self._shared.last_nodes[dialogue] = self._shared.last_nodes[dialogue] + 1
                key = (dialogue[0], f"{dialogue[1]}:{number}")
                if not self._leases.is_busy(key):
                    return number, key

    def _publish(self, job: Commit, resident: ResidentSession) -> None:
        """The session is at its new version."""
        if resident.replays:
            self._leases.remember(resident)
        if self._at_once:
            resident.replays = []
        else:
            relaxed = self._shared.durability == "relaxed"
            resident.due = time.monotonic() + self._relaxed_seconds if relaxed else math.inf
            old = self._shared.tiers.find(resident.key)
            if old is not None and old.due is not None:  # it will not be written any more
                resident.replays = old.replays + resident.replays
                resident.due = min(resident.due, old.due)
        self._shared.publish(resident)
        self._shared.count_node(resident.key)
        self._end(job)

    def _failed(self, job: Commit, error: RwkvBatchError) -> None:
        """The turn is not saved; the session stays at its last version."""
        with self._shared.lock:
            self._shared.totals["state_commit_failures_total"] += 1
            self._end(job)
        job.done(error)

    def _end(self, job: Commit) -> None:
        self._shared.jobs.commit_ended(job)
        self._leases.end(job.lease)

    def _result(self, resident: ResidentSession, *, replayed: bool = False) -> CommitResult:
        node = resident.node[1] if resident.node is not None else None
        return CommitResult(resident.key[1], resident.version, node, resident.tokens, self._at_once, replayed)

    # Writing.

    def write_whole(self, residents: list[ResidentSession]) -> None:
        """Write versions with their whole states in one transaction; StorageFailed or Unavailable."""
        self._write(lambda: [self._whole(resident) for resident in residents])

    def _write(self, versions: Callable[[], list[NewVersion]]) -> None:
        try:
            self._room.for_(lambda: self._store.write(versions()))
        except (RwkvBatchError, SourceLost):
            raise
        except Exception as error:  # such as a device that is gone
            log.exception("states could not be written")
            raise StorageFailed("the state could not be written") from error

    def _write_turns(self, good: list[tuple[Commit, ResidentSession]]) -> list[tuple[Commit, ResidentSession]]:
        """Write them in one transaction, or one by one when that fails; return those that are on disk."""
        try:
            self._write(lambda: [self._new(*turn) for turn in good])
        except (RwkvBatchError, SourceLost) as error:
            if len(good) > 1:
                return [pair for one in good for pair in self._write_turns([one])]
            job, resident = good[0]
            if isinstance(error, SourceLost):
                return self._write_turns([(job._replace(turn=None), resident)])
            self._failed(job, error)
            return []
        return good

    def _new(self, job: Commit, resident: ResidentSession) -> NewVersion:
        """What is written of a turn."""
        is_logged = self._logs and job.turn is not None
        new = self._logged(job, resident) if is_logged else self._whole(resident)
        new.claim = job.lease.claim
        return new

    def _logged(self, job: Commit, resident: ResidentSession) -> NewVersion:
        """The version as the ids that lead to it."""
        before = job.lease.resident
        new = self._version(resident, None, job.turn)
        new.source = Source(before.key[1], before.version, before.updated) if before is not None else None
        return new

    def _whole(self, resident: ResidentSession) -> NewVersion:
        """The version with its whole state, or one from which a few ids lead to it."""
        if self._logs and not self._shared.copies.is_finite(resident.snapshot, resident.arrived):
            raise EngineFailed("the state at the end of this turn is not finite; the session stays as it was")
        snapshot = self._shared.copies.to_host(resident.snapshot, resident.arrived)
        resident.lag = len(resident.ids)
        return self._version(resident, self._file.encode(Stored(snapshot, resident.newlines, resident.origin)), resident.ids)

    def _version(
        self, resident: ResidentSession, pieces: Iterable[bytes | memoryview] | None, ids: Sequence[int]
    ) -> NewVersion:
        return NewVersion(
            *resident.key, resident.version, resident.tokens, resident.newlines, pieces, resident.updated,
            resident.replays, resident.node, resident.response, None, ids, resident.num_bytes, self._file.fingerprint,
        )  # fmt: skip

    def flush_due(self, now: float | None) -> None:
        """Write what is due, or all that is not on disk."""
        if self._at_once:
            return
        with self._shared.lock:
            dirty = [resident for resident in self._shared.tiers.unwritten() if now is None or resident.due <= now]
        while dirty:
            group, num_bytes = [], 0
            while dirty and num_bytes < GROUP_BYTES:
                group.append(dirty.pop())
                num_bytes += group[-1].num_bytes
            self.flush(group)

    def flush(self, residents: list[ResidentSession]) -> None:
        """Write versions that were acknowledged already; what cannot be written stays in memory and is tried again."""
        with self._shared.lock:
            tiers = self._shared.tiers
            residents = [
                resident for resident in residents if resident.due is not None and tiers.find(resident.key) is resident
            ]
        if not residents:
            return
        try:
            self.write_whole(residents)
        except RwkvBatchError as error:
            log.error("%d states wait for the disk: %s", len(residents), error.message)
            retry = time.monotonic() + max(self._relaxed_seconds, RETRY_SECONDS)
            with self._shared.lock:
                self._shared.totals["state_commit_failures_total"] += len(residents)
                self._shared.refusal = error.message
                for resident in residents:
                    resident.due = retry
            return
        with self._shared.lock:
            self._shared.refusal = None
            for resident in residents:
                self._shared.tiers.written(resident)

    # Names.

    def exists(self, key: Key) -> bool:
        """Whether there is a session of this name, in memory or on disk."""
        in_memory = not self._store.shared and self._shared.find(key) is not None
        return in_memory or bool(self._store.ids(key[0], [key[1]]))

    def check_free(self, namespace: str, name: str) -> None:
        """Raise InvalidRequest or Conflict unless a new session can have this name."""
        if not name:
            raise InvalidRequest("a session needs a name", param="session_id")
        if self.exists((namespace, name)):
            raise _exists_already(name)
        with self._shared.lock:
            if self._leases.is_busy((namespace, name)):
                raise _exists_already(name)


def _exists_already(name: str) -> Conflict:
    return Conflict(f"there is a session {name!r} already", code="session_exists")
