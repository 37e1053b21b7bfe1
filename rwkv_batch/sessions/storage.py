"""The storage thread: the disk and all copies to the host, one after another, so that no step of the engine waits for them."""

import contextlib
import logging
import math
import threading
import time

from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.sessions.commands import SessionCommands
from rwkv_batch.sessions.disk import StateReader, StateWriter
from rwkv_batch.sessions.leases import LeaseManager
from rwkv_batch.sessions.shared import Call, Commit, Demote, Execute, Flush, GiveBack, Job, Listing, Load, Shared
from rwkv_batch.sessions.snapshots import SnapshotWriter
from rwkv_batch.sessions.store import SessionStore
from rwkv_batch.sessions.tiers import ResidentSession

log = logging.getLogger("rwkv_batch.session_messages")

IDLE_SECONDS = 1.0  # without work until the store does all its upkeep


class StorageThread:
    """Does the jobs of a pool, refuses turns that have waited too long, and writes what is due."""

    def __init__(
        self,
        shared: Shared,
        leases: LeaseManager,
        store: SessionStore,
        reader: StateReader,
        writer: StateWriter,
        snapshots: SnapshotWriter,
        commands: SessionCommands,
        *,
        finish_seconds: float,
    ):
        self._shared = shared
        self._leases = leases
        self._store = store
        self._reader = reader
        self._writer = writer
        self._snapshots = snapshots
        self._finish_seconds = finish_seconds
        self._commands = commands
        self._thread = threading.Thread(target=self._run, name="storage", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the end, which comes when the pool is closing and everything is written that can be."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._store.open_if_there()
        except RwkvBatchError as error:  # requests without sessions are served all the same
            log.error("%s", error.message)
        shared = self._shared
        while True:
            woken = True
            with shared.lock:
                self._leases.time_out()
                jobs = shared.jobs.take(shared.durability)
                if not jobs:
                    if shared.closing:
                        break
                    woken = shared.lock.wait(max(0.0, min(self._next_time() - time.monotonic(), IDLE_SECONDS)))
            if jobs:
                try:
                    self._work(jobs)
                except Exception:  # such as a device that is gone
                    log.exception("the storage thread could not do its work")
            self._writer.flush_due(time.monotonic())
            self._snapshots.go_on()
            self._reader.claims.go_on()
            with shared.lock:
                waiting, resting = len(shared.jobs) > 0, self._snapshots.next_time() < math.inf
            self._store.tidy(waiting=waiting, idle=not woken and not resting)
            if not woken:
                with contextlib.suppress(RwkvBatchError):  # logged; there is time for another try
                    self._store.clean_up()
        self._writer.flush_due(None)
        num_lagging = self._snapshots.finish(time.monotonic() + self._finish_seconds)
        if num_lagging:
            log.info("%d sessions are kept as ids, to be fed again when they go on", num_lagging)
        self._store.tidy(waiting=False, idle=True)
        self._store.close()

    def _next_time(self) -> float:
        """When there is something to do next, on the clock of time.monotonic."""
        at_once = self._shared.durability in ("log", "turn")
        dues = [] if at_once else [resident.due for resident in self._shared.tiers.unwritten()]
        dues += [self._leases.first_deadline(), self._snapshots.next_time(), self._reader.claims.next_time()]
        return min(dues)

    def _work(self, jobs: list[Job]) -> None:
        match jobs[0]:
            case Load():
                self._reader.load([job.lease for job in jobs])
            case Commit():
                self._writer.commit(jobs)
            case GiveBack(claim):
                self._store.let_go(claim)
            case Execute():
                self._commands.execute(jobs[0])
            case Listing():
                self._commands.go_on(jobs[0])
            case Demote(resident):
                self._demote(resident)
            case Flush(resident):
                self._writer.flush([resident])
            case Call(work):
                work()

    def _demote(self, resident: ResidentSession) -> None:
        """Bring a session of L2 to the host, if it is still there."""
        key, shared = resident.key, self._shared
        with shared.lock:
            if shared.tiers.l2.sessions.get(key) is not resident and shared.tiers.leaving.get(key) is not resident:
                return
            snapshot, arrived = resident.snapshot, resident.arrived
        if snapshot is None:
            return
        snapshot = shared.copies.to_host(snapshot, arrived)
        with shared.lock:
            if shared.tiers.l1.sessions.get(key) is not resident:
                resident.move(snapshot, None)
