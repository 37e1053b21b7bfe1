"""Connections to the database: opened when they are needed, opened again when they are lost. No password is in any message."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from rwkv_batch.errors import InvalidRequest, RwkvBatchError, StorageFailed, StorageFull, Unavailable, UsageError
from rwkv_batch.sessions.postgres.schema import prepare

log = logging.getLogger("rwkv_batch.sessions.postgres")

CONNECT_SECONDS = 3
RETRY_SECONDS = 0.25  # after the database could not be reached, until it is tried again
PATIENCE_SECONDS = 3.0  # that a statement waits for it; while it stays away the next ones are refused at once
LOCK_MILLISECONDS = 500  # what waits longer for a row is refused, and may be tried again; signs of life wait behind it
STATEMENT_MILLISECONDS = 10_000
DEFAULTS = {  # where the URL says nothing else; a network that takes packets and gives none is noticed
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "application_name": "rwkv_batch",
}


class Database:
    """One connection, opened by the first call that needs it. May be used by several threads, one at a time.

    durable       whether what has returned survives a power loss, as far as the database promises that
    idle_seconds  after which the database ends a transaction of a server that has stopped in its middle
    Its methods raise Unavailable when the database cannot be reached, StorageFull when it has no room, StorageFailed when it
    refuses, InvalidRequest for a text that it cannot hold; errors of integrity are psycopg's.
    """

    def __init__(self, url: str, *, durable: bool, idle_seconds: float):
        self._conninfo = complete(url)
        self._durable = durable
        self._idle_seconds = idle_seconds
        self._lock = threading.RLock()
        self._connection: psycopg.Connection | None = None
        self._not_before = 0.0
        self._is_away = False

    def rows(self, query: str, values: Sequence[Any] | dict[str, Any] = (), *, once: bool = False) -> list[tuple]:
        """The rows of one statement, a transaction of its own.

        Where the database goes away meanwhile it is run again, or with `once` Unavailable is raised: it may have run or not.
        """
        with self._lock:
            until = time.monotonic() + (0.0 if self._is_away else PATIENCE_SECONDS)
            while True:
                try:
                    with self._told("use"):
                        cursor = self._open().execute(query, values, prepare=True)
                        return cursor.fetchall() if cursor.description else []
                except Unavailable:
                    self._is_away = not once and time.monotonic() > until
                    if once or self._is_away:
                        raise
                    time.sleep(RETRY_SECONDS)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[psycopg.Connection]:
        """Commit what is done inside, all or nothing. What needs no answer is sent together."""
        with self._lock, self._told("write to"):
            connection = self._open()
            with connection.pipeline(), connection.transaction():
                yield connection

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                with contextlib.suppress(psycopg.Error):
                    connection.close()

    def _open(self) -> psycopg.Connection:
        if self._connection is not None and not self._connection.broken and not self._connection.closed:
            return self._connection
        self.close()
        if time.monotonic() < self._not_before:
            raise _unreachable()
        self._not_before = time.monotonic() + RETRY_SECONDS
        connection = psycopg.connect(self._conninfo, autocommit=True)
        try:
            self._set_up(connection)
        except BaseException:
            connection.close()
            raise
        self._connection, self._not_before, self._is_away = connection, 0.0, False
        return connection

    def _set_up(self, connection: psycopg.Connection) -> None:
        settings = {
            "plan_cache_mode": "force_generic_plan",  # to plan the statement of a turn takes longer than to run it
            "enable_seqscan": "off",  # such a plan may be made while the tables are empty
            "synchronous_commit": "off",
            "lock_timeout": LOCK_MILLISECONDS,
            "statement_timeout": STATEMENT_MILLISECONDS,
            "idle_in_transaction_session_timeout": max(1, int(self._idle_seconds * 1000)),
        }
        if self._durable:
            del settings["synchronous_commit"]  # as the database has it: a standby may have to say yes
            prepare(connection)
        for name, value in settings.items():
            connection.execute("SELECT set_config(%s, %s, false)", (name, str(value)))

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Errors of the database as those that callers know."""
        try:
            yield
        except (errors.IntegrityError, errors.LockNotAvailable, errors.DeadlockDetected):
            raise
        except psycopg.Error as error:
            raise self._failed(what, error) from None

    def _failed(self, what: str, error: psycopg.Error) -> RwkvBatchError:
        said = str(error).strip().partition("\n")[0]
        if isinstance(error, errors.DiskFull):
            return StorageFull(f"the database of sessions is full: {said}")
        if isinstance(error, psycopg.DataError):
            return InvalidRequest("the database cannot hold this name or key", param="session_id")
        if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
            self.close()
            log.warning("cannot %s the database of sessions: %s", what, said)
            return _unreachable()
        log.error("cannot %s the database of sessions: %s", what, said)
        return StorageFailed(f"cannot {what} the database of sessions: {said}")


def complete(url: str) -> str:
    """The URL with our defaults; UsageError, which does not show it, when it is none."""
    try:
        said = conninfo_to_dict(url)
    except psycopg.Error:
        raise UsageError("--state-url: wants postgresql://USER@HOST:PORT/DATABASE", param="state_url") from None
    return make_conninfo("", **(DEFAULTS | said))


def _unreachable() -> Unavailable:
    return Unavailable("the database of sessions cannot be reached", code="storage_unavailable", retry_after=1.0)
