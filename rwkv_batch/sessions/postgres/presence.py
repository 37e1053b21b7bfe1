"""This engine among those that share the sessions: a row that says until when it is alive, by the database's clock."""

import contextlib
import logging
import threading

from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.sessions.postgres.connection import Database

log = logging.getLogger("rwkv_batch.sessions.postgres")

RENEWALS = 4  # in the time of a lease

JOIN = "INSERT INTO kept_engines (alive_until, what) VALUES (now() + make_interval(secs => %s), %s) RETURNING id"
# A row that was swept away while this process stood still is made again.
RENEW = """
INSERT INTO kept_engines (id, alive_until, what) VALUES (%s, now() + make_interval(secs => %s), %s)
ON CONFLICT (id) DO UPDATE SET alive_until = EXCLUDED.alive_until
"""


class Presence:
    """Keeps the row, in a thread of its own: sessions of an engine that has stopped may go on elsewhere.

    durable       a connection whose numbers are never given again
    database      one that is not used for long statements
    lease_seconds how long the engine counts as alive after its last sign
    what          who it is, for people who look into the table
    """

    def __init__(self, durable: Database, database: Database, *, lease_seconds: float, what: str):
        self._durable = durable
        self._database = database
        self._lease_seconds = lease_seconds
        self._what = what
        self._id: int | None = None
        self._thread: threading.Thread | None = None
        self._left = threading.Event()

    @property
    def id(self) -> int:
        """The engine's number, which no other ever had. Raises what `Database.rows` raises when there is none yet."""
        if self._id is None:
            self._id = self._durable.rows(JOIN, (self._lease_seconds, self._what))[0][0]
            self._thread = threading.Thread(target=self._renew, name="presence", daemon=True)
            self._thread.start()
        return self._id

    def leave(self) -> None:
        """The engine ends: whatever it still has is free at once."""
        self._left.set()
        if self._thread is not None:
            self._thread.join()
            with contextlib.suppress(RwkvBatchError):
                self._database.rows("DELETE FROM kept_engines WHERE id = %s", (self._id,))
        self._left, self._thread, self._id = threading.Event(), None, None

    def _renew(self) -> None:
        while not self._left.wait(self._lease_seconds / RENEWALS):
            try:
                self._database.rows(RENEW, (self._id, self._lease_seconds, self._what))
            except RwkvBatchError:  # logged; others may take the sessions of turns in progress
                continue
            except Exception:
                log.exception("this engine could not say that it is alive")
