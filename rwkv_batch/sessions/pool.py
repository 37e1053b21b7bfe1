"""Sessions: named states in device memory, then in host memory, then in a store on disk.

A request takes a lease on a session and either saves the state at its end or leaves the session as it was; turns of one session
run one after another. Snapshots are never changed: a slot is always a copy. Everything that may take long - the disk, copies to
the host - happens in one storage thread, so no step ever waits for it.

    level  where                    by default     what happens to the oldest
    L1     device memory            16 sessions    to L2
    L2     host memory              32 sessions    dropped, for it is on disk; written first when it is not yet
    DB     SQLite, `--state-db`     no limit                  (or PostgreSQL, which servers share: a turn is claimed there)

`durability` says when a turn is acknowledged: "log" after its ids are on disk, which lead to its state from the one before;
"turn" after its state is; "relaxed" at once, and it is on disk within `relaxed_seconds`, so while the disk takes none no more
are acknowledged; "shutdown" at once, and it is on disk when it leaves L2 or the server stops. A turn that cannot be written
fails and the session stays at its last version. What was acknowledged stays in memory until it is on disk.

With "log" a state is a snapshot and ids that are fed after it, before the next prompt: in memory a few, the rest of an answer
behind the row's last checkpoint; on disk those of the turns since the last snapshot there. Snapshots follow in the background,
when more than `snapshot_tokens` ids lead to a state, when it leaves memory, and at the end.

    leases.py    whose turn it is                     disk.py      states to the store and from it
    tiers.py     what is in memory, and eviction      snapshots.py whole states, in the background
    shared.py    what threads share, and its lock     commands.py  list, delete, fork, rewind, export, import
                                                      storage.py   the thread that does all this
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.request import Request
from rwkv_batch.session_messages import Deleted, Page, SessionCommand
from rwkv_batch.sessions.commands import SessionCommands
from rwkv_batch.sessions.disk import StateReader, StateWriter
from rwkv_batch.sessions.leases import Lease, LeaseManager
from rwkv_batch.sessions.room import Room
from rwkv_batch.sessions.shared import ComputeState, Durability, Execute, Shared, Telling
from rwkv_batch.sessions.snapshots import SnapshotWriter
from rwkv_batch.sessions.state_file import StateFile
from rwkv_batch.sessions.storage import StorageThread
from rwkv_batch.sessions.store import SessionStore
from rwkv_batch.sessions.tiers import Level, ResidentSession, Tiers
from rwkv_batch.sessions.transfer import Copies

log = logging.getLogger("rwkv_batch.session_messages")

LOST_NAMED = 10  # in the log


class StatePool:
    """All sessions of the server.

    store              where they outlive it
    file               how a state is written
    device             of the engine
    durability         see above
    snapshot_tokens    ids that may lead to a state on disk
    snapshot_rate      bytes of snapshots that are written a second; None: a share of what the disk takes
    finish_seconds     how long `close` may write snapshots
    l1_…, l2_…         most sessions and bytes of the two levels
    wait_seconds       how long a turn waits for the one before it, and `max_waiting` how many may
    drops_oldest       whether the sessions used longest ago go where the store has no room
    copies             what moves states between host and device, None = for one device
    Its methods may be called from any thread and do not wait; callbacks must be quick.
    """

    def __init__(
        self,
        store: SessionStore,
        file: StateFile,
        device: torch.device,
        *,
        durability: Durability = "log",
        snapshot_tokens: int = 2048,
        snapshot_rate: float | None = None,
        finish_seconds: float = 30.0,
        relaxed_seconds: float = 1.0,
        l1_sessions: int = 16,
        l1_bytes: int = 2**31,
        l2_sessions: int = 32,
        l2_bytes: int = 2**32,
        wait_seconds: float = 30.0,
        max_waiting: int = 64,
        drops_oldest: bool = False,
        copies: Copies | None = None,
    ):
        def is_expired(resident: ResidentSession) -> bool:
            return resident.response and resident.updated <= store.now() - store.response_seconds

        self.file = file
        self.durability = durability
        self.store = store
        tiers = Tiers(Level(l1_sessions, l1_bytes), Level(l2_sessions, l2_bytes), is_expired)
        self.shared = Shared(tiers, copies or Copies(device), durability, snapshot_tokens=snapshot_tokens)
        if store.shared:
            with self.shared.lock:
                self.shared.jobs.more_loads = store.claims_at_once - 1
        self.leases = LeaseManager(self.shared, store, wait_seconds=wait_seconds, max_waiting=max_waiting)
        room = Room(self.shared, self.leases, store, drops=drops_oldest)
        writer = StateWriter(self.shared, self.leases, store, file, room, relaxed_seconds=relaxed_seconds)
        reader = StateReader(self.shared, self.leases, store, file, writer)
        self.commands = SessionCommands(self.shared, self.leases, store, file, reader, writer)
        snapshots = SnapshotWriter(self.shared, store, file, room, bytes_per_second=snapshot_rate)
        self._thread = StorageThread(
            self.shared, self.leases, store, reader, writer, snapshots, self.commands, finish_seconds=finish_seconds
        )
        self._thread.start()

    def use(self, compute: ComputeState, telling: Telling = nullcontext) -> None:
        """States that several rows start from, or a file is made of, are computed by `compute`.

        telling  inside it several turns are told of that were saved together
        """
        self.shared.compute_state = compute
        self.shared.telling = telling

    def lease(self, request: Request, ready: Callable[[Lease | RwkvBatchError], None]) -> None:
        """Ask for a session; `ready` is called once, in any thread, with the lease or with why there is none.

        Raises Conflict when too many turns wait for the session or one with the same idempotency key runs, Unavailable when
        too many states wait for the disk.
        """
        self.leases.lease(request, ready)

    def cancel(self, request_id: str) -> None:
        """Nobody waits any more for the lease of this request; one that was given is released by whoever has it."""
        self.leases.cancel(request_id)

    def together(self) -> AbstractContextManager[None]:
        """Turns that are committed inside, in one thread, go to the disk together; their states were copied before."""
        return self.leases.together()

    def execute(self, command: SessionCommand, answer: Callable[[Page | Deleted | RwkvBatchError], None]) -> None:
        """Carry out a command; `answer` is called once, in the storage thread. Raises Unavailable when the server stops."""
        with self.shared.lock:
            self.shared.check_open()
            self.shared.enqueue(Execute(command, answer))

    def stats(self) -> dict[str, int | float]:
        """Figures of this moment."""
        return self.shared.stats()

    def close(self) -> int:
        """Write what is not on disk yet and end; waits for it. Returns how many sessions could not be written and are lost."""
        with self.shared.lock:
            self.shared.closing = True
            self.shared.lock.ring()
        self._thread.join()
        with self.shared.lock:
            lost = [resident.key[1] for resident in self.shared.tiers.unwritten()]
        if lost:
            log.critical("%d sessions could not be written and are lost, such as %r", len(lost), lost[:LOST_NAMED])
        return len(lost)
