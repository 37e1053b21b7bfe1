"""Whole states for sessions whose turns are kept as ids: in the background, so that a resume feeds few of them again.

The newest version alone is written, and of all that lag the one that lags most. It is written piece by piece: turns that end
meanwhile wait for one piece at most. Between the pieces the disk rests, so that it can keep this up.
"""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.sessions.room import Room
from rwkv_batch.sessions.shared import Shared
from rwkv_batch.sessions.state_file import StateFile, Stored
from rwkv_batch.sessions.store import SessionStore, Source
from rwkv_batch.sessions.tiers import ResidentSession

log = logging.getLogger("rwkv_batch.session_messages")

REST = 3  # without a rate, the disk rests so many times as long as a piece took
URGENT = 8  # times the lag at which a snapshot is wanted: from there on nothing rests
RETRY_SECONDS = 10.0  # after the disk took none
UPLOAD_SECONDS = 0.05  # until it is looked again whether the last one has arrived


@dataclass
class Draft:
    """A session that is being written, and what of it is to be written next."""

    resident: ResidentSession
    pieces: Iterator[bytes | memoryview]


class SnapshotWriter:
    """Writes snapshots. Used by the storage thread alone.

    bytes_per_second  how much it writes at most; None: a share of what the disk takes
    """

    def __init__(self, shared: Shared, store: SessionStore, file: StateFile, room: Room, *, bytes_per_second: float | None):
        self._shared = shared
        self._store = store
        self._file = file
        self._room = room
        self._bytes_per_second = bytes_per_second
        self._draft: Draft | None = None
        self._next_time = 0.0

    def next_time(self) -> float:
        """When there is something to write, on the clock of time.monotonic. Called with the lock."""
        return self._next_time if self._draft is not None or self._shared.lagging else math.inf

    def go_on(self) -> None:
        """Write one piece, if it is time to."""
        began = time.monotonic()
        if began < self._next_time:
            return
        if self._store.shared and self._store.is_uploading:
            self._next_time = began + UPLOAD_SECONDS
            return
        try:
            num_bytes = self._write_piece()
        except Exception as error:
            self._give_up(error)
            self._next_time = began + RETRY_SECONDS
            return
        now = time.monotonic()
        self._next_time = now
        if not self._is_urgent():
            rate = self._bytes_per_second
            self._next_time += num_bytes / rate - (now - began) if rate else REST * (now - began)

    def finish(self, until: float) -> int:
        """Write every session that lags, until a moment of the clock; return for how many only their ids are kept."""
        shared = self._shared
        with shared.lock:
            shared.lagging |= {resident.key for resident in shared.tiers if resident.lag > len(resident.ids)}
        try:
            while (self._draft is not None or self._is_wanted()) and time.monotonic() < until:
                self._write_piece()
        except Exception as error:
            self._give_up(error)
        with shared.lock:
            return len(shared.lagging) + (self._draft is not None)

    def _give_up(self, error: Exception) -> None:
        """The session in hand is kept as it was, as ids."""
        self._draft = None
        if isinstance(error, RwkvBatchError):
            log.warning("a session could not be written whole: %s", error.message)
        else:  # such as a device that is gone
            log.error("a session could not be written whole", exc_info=error)

    def _is_wanted(self) -> bool:
        with self._shared.lock:
            return bool(self._shared.lagging)

    def _is_urgent(self) -> bool:
        return self._draft is not None and self._draft.resident.lag > URGENT * self._shared.snapshot_tokens

    def _write_piece(self) -> int:
        """Write the next piece of the session in hand, or begin with another one; return how many bytes it were."""
        if self._draft is None:
            self._draft = self._begin()
        if self._draft is None:
            return 0
        piece = next(self._draft.pieces, None)
        if piece is not None:
            self._room.for_(lambda: self._store.add_to_draft(piece))
            return len(piece)
        resident, self._draft = self._draft.resident, None
        namespace, name = resident.key
        self._store.finish_draft(namespace, Source(name, resident.version, resident.updated), resident.ids)
        with self._shared.lock:
            self._shared.written_whole(resident)
        return 0

    def _begin(self) -> Draft | None:
        """Take the session that lags most."""
        shared = self._shared
        with shared.lock:
            found = [resident for key in shared.lagging if (resident := shared.tiers.find(key)) is not None]
            resident = max(found, key=lambda resident: resident.lag, default=None)
            shared.lagging = {resident.key for resident in found}
            if resident is None:
                return None
            shared.lagging.discard(resident.key)
            if resident.snapshot is None or resident.lag <= len(resident.ids):
                shared.tiers.let_go(resident)
                return None
            snapshot, arrived = resident.snapshot, resident.arrived
        if not shared.copies.is_finite(snapshot, arrived):
            log.error("session %r is not written whole: its state is not finite", resident.key[1])
            return None
        host = shared.copies.to_host(snapshot, arrived)
        self._room.for_(self._store.begin_draft)
        return Draft(resident, self._file.encode(Stored(host, resident.newlines, resident.origin)))
