"""What nobody needs any more: deleted a little at a time, by any of the servers, while turns go on."""

import contextlib
import logging
import random
import threading

import psycopg

from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.sessions.postgres.connection import Database
from rwkv_batch.sessions.postgres.objects import Objects

log = logging.getLogger("rwkv_batch.sessions.postgres")

EVERY_SECONDS = 5.0
AT_ONCE = 500  # rows of a statement
OBJECTS_AT_ONCE = 20
GRACE_SECONDS = 60.0  # a server that has just read what a session's state is may still fetch its object
FORGET_SECONDS = 3600.0  # after which the row of an engine that has ended goes

ALIVE = "EXISTS (SELECT 1 FROM kept_engines e WHERE e.id = {} AND e.alive_until > now())"
ENGINES = "DELETE FROM kept_engines WHERE alive_until < now() - make_interval(secs => %s)"
NEVER_MADE = f"""
DELETE FROM kept_sessions WHERE id IN (
    SELECT id FROM kept_sessions s WHERE version = 0 AND (owner IS NULL OR NOT {ALIVE.format("s.owner")}) LIMIT %s
    FOR UPDATE SKIP LOCKED)
"""
REPLAYS = """
DELETE FROM kept_replays WHERE (namespace, name, key) IN (
    SELECT namespace, name, key FROM kept_replays WHERE created <= now() - make_interval(secs => %s) LIMIT %s
    FOR UPDATE SKIP LOCKED)
"""
OLD_RESPONSES = """
SELECT s.id FROM kept_sessions s WHERE s.id IN (
    SELECT id FROM (SELECT id, updated, row_number() OVER (PARTITION BY namespace ORDER BY updated DESC) AS place
        FROM kept_sessions WHERE response AND version > 0) r
    WHERE r.updated <= extract(epoch FROM now()) - %s OR r.place > %s LIMIT %s)
  AND s.owner IS NULL FOR UPDATE SKIP LOCKED
"""
# Hints say which states may be free. One that is used is no news: whoever lets go of it gives a hint of his own.
LOOSE = """
WITH hints AS (
    DELETE FROM kept_loose WHERE id IN (SELECT id FROM kept_loose ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED) RETURNING state),
free AS (
    SELECT s.id FROM kept_states s WHERE s.id IN (SELECT state FROM hints)
      AND NOT EXISTS (SELECT 1 FROM kept_versions v WHERE v.state = s.id)
      AND NOT EXISTS (SELECT 1 FROM kept_states c WHERE c.base = s.id) FOR UPDATE),
gone AS (DELETE FROM kept_states s USING free WHERE s.id = free.id RETURNING s.base, s.object),
more AS (INSERT INTO kept_loose (state) SELECT DISTINCT base FROM gone WHERE base IS NOT NULL),
freed AS (UPDATE kept_objects o SET freed = now() FROM gone WHERE o.name = gone.object)
SELECT (SELECT count(*) FROM hints), (SELECT count(*) FROM gone)
"""
FREE_OBJECTS = f"""
SELECT name FROM kept_objects o WHERE (freed < now() - make_interval(secs => %s)
    OR (freed IS NULL AND created < now() - make_interval(secs => %s) AND NOT {ALIVE.format("o.writer")}))
  AND NOT EXISTS (SELECT 1 FROM kept_states s WHERE s.object = o.name) LIMIT %s FOR UPDATE SKIP LOCKED
"""


def drop_sessions(connection: psycopg.Connection, sessions: list[int]) -> None:
    """Delete sessions inside a transaction; what only they needed goes later."""
    connection.execute(
        "WITH gone AS (DELETE FROM kept_versions WHERE session = ANY (%s) RETURNING state)"
        " INSERT INTO kept_loose (state) SELECT DISTINCT state FROM gone",
        (sessions,),
    )
    connection.execute("DELETE FROM kept_sessions WHERE id = ANY (%s)", (sessions,))


class Sweeper:
    """Sweeps every few seconds, in a thread and over a connection of its own.

    replay_seconds, response_seconds, max_responses  as of `PostgresStore`
    """

    def __init__(
        self, database: Database, objects: Objects, *, replay_seconds: float, response_seconds: float, max_responses: int
    ):
        self._database = database
        self._objects = objects
        self._replay_seconds = replay_seconds
        self._response_seconds = response_seconds
        self._max_responses = max_responses
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    @property
    def is_idle(self) -> bool:
        """Whether it has not been started."""
        return self._thread is None

    def start(self) -> None:
        """Begin, if it has not."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End, and wait for it."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._thread, self._stopped = None, threading.Event()
        self._database.close()

    def sweep(self) -> None:
        """Delete what nobody needs."""
        rows = self._database.rows
        rows(ENGINES, (FORGET_SECONDS,))
        rows(NEVER_MADE, (AT_ONCE,))
        rows(REPLAYS, (self._replay_seconds, AT_ONCE))
        with self._database.transaction() as connection:
            values = (self._response_seconds, self._max_responses, AT_ONCE)
            if old := [row[0] for row in connection.execute(OLD_RESPONSES, values).fetchall()]:
                drop_sessions(connection, old)
        while rows(LOOSE, (AT_ONCE,))[0][0] and not self._stopped.is_set():
            pass
        with self._database.transaction() as connection:
            free = connection.execute(FREE_OBJECTS, (GRACE_SECONDS, FORGET_SECONDS, OBJECTS_AT_ONCE)).fetchall()
            if names := [row[0] for row in free]:
                connection.execute("DELETE FROM kept_objects WHERE name = ANY (%s)", (names,))
                self._objects.delete(names)

    def _run(self) -> None:
        stopped = self._stopped
        while not stopped.wait(EVERY_SECONDS * random.uniform(0.5, 1.5)):
            try:
                self.sweep()
            except (RwkvBatchError, psycopg.Error) as error:  # such as one that has begun to use what was free
                with contextlib.suppress(RwkvBatchError):
                    self._database.close()
                log.debug("nothing was swept: %s", error)
            except Exception:
                log.exception("what nobody needs could not be swept")
