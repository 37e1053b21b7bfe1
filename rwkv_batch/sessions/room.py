"""Room in a store that is full: the sessions that were used longest ago go, where that was asked for."""

import logging
from collections.abc import Callable
from typing import TypeVar

from rwkv_batch.errors import StorageFull
from rwkv_batch.sessions.leases import LeaseManager
from rwkv_batch.sessions.shared import Shared
from rwkv_batch.sessions.store import Key, SessionStore

log = logging.getLogger("rwkv_batch.session_messages")

T = TypeVar("T")
DROPPED_AT_ONCE = 8


class Room:
    """Makes room. Used by the storage thread alone.

    drops  whether old sessions may be dropped
    """

    def __init__(self, shared: Shared, leases: LeaseManager, store: SessionStore, *, drops: bool):
        self._shared = shared
        self._leases = leases
        self._store = store
        self._drops = drops

    def for_(self, write: Callable[[], T]) -> T:
        """Write, and where the store is full drop idle sessions until there is room; StorageFull when none is left."""
        while True:
            try:
                return write()
            except StorageFull:
                if not self._drops or not self._drop_some():
                    raise

    def _drop_some(self) -> bool:
        """Drop the oldest that nobody uses; whether there were any."""
        with self._shared.lock:
            busy = self._leases.in_use()
        oldest = [key for key in self._store.oldest(DROPPED_AT_ONCE + len(busy)) if key not in busy][:DROPPED_AT_ONCE]
        for key in oldest:
            self._drop(key)
        return bool(oldest)

    def _drop(self, key: Key) -> None:
        namespace, name = key
        log.warning("session %r is dropped, the oldest of a full store", name)
        self._store.delete(namespace, name, prefix=False)
        with self._shared.lock:
            self._leases.revoke(lambda other: other == key)
            self._shared.tiers.drop(key)
            self._shared.totals["state_dropped_sessions_total"] += 1
