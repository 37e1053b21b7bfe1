"""Turns of sessions that other servers may have: the claim that each needs, and the wait for it. Run by the storage thread."""

import math
import time

from rwkv_batch.sessions.leases import Lease, LeaseManager
from rwkv_batch.sessions.shared import Load, Shared
from rwkv_batch.sessions.store import Claim, SharedStore

RETRY_SECONDS = 0.05  # until a session that another server has is asked for again


class Claims:
    """Gets the claims of turns, where the store is shared."""

    def __init__(self, shared: Shared, leases: LeaseManager, store: SharedStore):
        self._shared = shared
        self._leases = leases
        self._store = store
        self._waiting: list[tuple[float, Lease]] = []  # when to ask again; the soonest first

    def take(self, lease: Lease) -> bool:
        """Claim the session of a lease, where it takes turns, and drop an older copy of it; False: it has to wait."""
        if lease.takes_turns:
            return self._took(lease, self._store.claim(*lease.key))
        record = self._store.find(*lease.key)
        self._drop_older(lease, (record.version, record.updated) if record is not None else None)
        return True

    def take_many(self, leases: list[Lease]) -> list[Lease]:
        """The same for leases that take turns; returns those that need not wait."""
        claims = self._store.claim_many([lease.key for lease in leases])
        return [lease for lease, claim in zip(leases, claims, strict=True) if self._took(lease, claim)]

    def _took(self, lease: Lease, claim: Claim | None) -> bool:
        if claim is None:
            self._wait(lease)
            return False
        with self._shared.lock:
            lease.claim, lease.deadline = claim, math.inf
            if not self._leases.is_wanted(lease):
                self._leases.give_back(lease)
                return False
        self._drop_older(lease, (claim.version, claim.updated))
        return True

    def _drop_older(self, lease: Lease, newest: tuple[int, float] | None) -> None:
        with self._shared.lock:
            resident = self._shared.tiers.find(lease.key)
            if resident is not None and (resident.version, resident.updated) != newest:
                self._shared.tiers.drop(lease.key)

    def go_on(self) -> None:
        """Ask again for sessions that others had."""
        now = time.monotonic()
        with self._shared.lock:
            while self._waiting and self._waiting[0][0] <= now:
                _, lease = self._waiting.pop(0)
                if self._leases.is_wanted(lease):
                    self._shared.enqueue(Load(lease))

    def next_time(self) -> float:
        """When the next one is to be asked for, on the clock of time.monotonic."""
        return self._waiting[0][0] if self._waiting else math.inf

    def _wait(self, lease: Lease) -> None:
        with self._shared.lock:
            if self._leases.is_wanted(lease):
                self._leases.wait_elsewhere(lease)
                self._waiting.append((time.monotonic() + RETRY_SECONDS, lease))
