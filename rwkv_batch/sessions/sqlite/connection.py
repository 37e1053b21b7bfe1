"""The file of the sessions as a whole: who may use it, how it is opened, its write-ahead log and the room kept for it."""

import contextlib
import errno
import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from rwkv_batch.errors import RwkvBatchError, StorageFailed, StorageFull, Unavailable
from rwkv_batch.sessions.sqlite.many_rows import NUM_STATEMENTS
from rwkv_batch.sessions.sqlite.schema import MIGRATIONS, prepare
from rwkv_batch.sessions.sqlite.sealing import Sealer, check_key
from rwkv_batch.sessions.sqlite.states import StateConnection

log = logging.getLogger("rwkv_batch.sessions.sqlite")

PAGE_BYTES = 16384  # a turn in the log changes some ten pages; states, which are megabytes, want larger ones than usual
TURN_PAGES, TURNS_PER_PAGE = 8, 4  # what a transaction with turns changes, about
WAL_BYTES = 256 * 2**20  # a write-ahead log longer than this is copied back although turns wait,
WAL_SOON_BYTES = 16 * 2**20  # longer than this when none does: a little at a time, lest one turn wait for all of it
RESERVE_BYTES = 16 * 2**20  # kept free on the disk to copy the write-ahead log back and delete sessions when it is full,
RESERVE_SHARE = 4  # or this part of what is free
DAMAGE = (sqlite3.Error, OSError, ValueError, OverflowError, msgspec.MsgspecError)  # what reading a damaged file raises


class DatabaseFile:
    """The file at `path` with one connection, opened by the first call that needs it and made by the first that writes.

    opened     called whenever it has been opened
    schema     of the open file
    read_only  whether the open file cannot be written
    max_bytes  of the file, None = what the disk has room for
    max_pages  the same in pages, for tests
    sealer     what encrypts what was said in sessions, None = nothing does
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path).absolute()
        self.schema = len(MIGRATIONS)
        self.read_only = False
        self.max_bytes: int | None = None
        self.max_pages: int | None = None
        self.sealer: Sealer | None = None
        self.connection: StateConnection | None = None
        self.opened: Callable[[], None] = lambda: None
        self._reserve = self.path.with_name(self.path.name + "-reserve")
        self._reserve_bytes = 0
        self._lock_file: IO[str] | None = None
        self._written = 0  # bytes of states since the log was copied back

    @property
    def can_change(self) -> bool:
        """Whether it is open and can be written."""
        return self.connection is not None and not self.read_only

    def count_written(self, num_bytes: int, num_turns: int = 0) -> None:
        """So many bytes of states, or so many turns, went into the write-ahead log."""
        self._written += num_bytes
        if num_turns:
            self._written += (TURN_PAGES + num_turns // TURNS_PER_PAGE) * PAGE_BYTES

    def tidy(self, *, waiting: bool, idle: bool = False) -> None:
        """Copy the write-ahead log back if it is time to.

        waiting  somebody waits for what is to be done next
        idle     nothing was to be done for a while: also make the log's file empty
        """
        if not self.can_change:
            return
        soon = min(WAL_SOON_BYTES, self._reserve_bytes // 2 or WAL_SOON_BYTES)  # what the reserve has room for
        limit = 0 if idle else WAL_BYTES if waiting else soon
        with contextlib.suppress(sqlite3.Error, OSError):
            if self._written > limit or (idle and os.path.getsize(f"{self.path}-wal")):
                self.connection.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if idle else 'PASSIVE'})")
                self._written = 0
        if idle:
            self.keep_reserve()

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        connection, self.connection = self.connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()
            if not self.read_only:
                with contextlib.suppress(OSError):
                    self._reserve.unlink(missing_ok=True)
        lock_file, self._lock_file = self._lock_file, None
        if lock_file is not None:
            lock_file.close()

    def rows(self, query: str, values: tuple) -> list[tuple]:
        """Return what a query finds; nothing when there is no file yet."""
        if not self.open(create=False):
            return []
        try:
            return self.connection.execute(query, values).fetchall()
        except DAMAGE as error:
            raise self.failed("read", error) from None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[StateConnection]:
        """Commit what is done inside, all or nothing."""
        self.open(create=True)
        connection = self.connection
        try:
            if self.read_only:
                raise sqlite3.OperationalError("attempt to write a readonly database")
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            if isinstance(error, (sqlite3.Error, OverflowError)):
                raise self.failed("write", error) from None
            raise

    def keep_reserve(self) -> None:
        """Keep some room of the disk in a file beside ours, if there is any and we do not have it."""
        with contextlib.suppress(OSError, AttributeError):  # macOS has no such call, and then no reserve
            if not self._reserve.exists():
                with open(self._reserve, "xb") as file:
                    os.posix_fallocate(file.fileno(), 0, max(1, min(RESERVE_BYTES, self._free_bytes() // RESERVE_SHARE)))
        with contextlib.suppress(OSError):
            self._reserve_bytes = self._reserve.stat().st_size

    def give_up_reserve(self) -> None:
        """Make room on a full disk."""
        self._reserve.unlink(missing_ok=True)
        self.shorten_log()

    def shorten_log(self) -> None:
        """Give the room of the write-ahead log back, if the disk has room for the pages that only stand there."""
        with contextlib.suppress(sqlite3.Error, OSError):
            num_pages, page_bytes = (
                self.connection.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_count", "page_size")
            )
            if num_pages * page_bytes - os.path.getsize(self.path) <= self._free_bytes():
                self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _free_bytes(self) -> int:
        disk = os.statvfs(self.path)
        return disk.f_bavail * disk.f_frsize

    def open(self, *, create: bool) -> bool:
        """Open the file unless it is open; False when it does not exist and is not to be made."""
        if self.connection is not None:
            return True
        if not create and not self.path.exists():
            return False
        self.read_only = False
        try:
            self._take_lock()
            self._connect()
        except DAMAGE as error:
            self.close()
            raise self.failed("open", error) from None
        except RwkvBatchError:
            self.close()
            raise
        return True

    def _take_lock(self) -> None:
        """Make sure that no other server uses the file; the lock goes with the process, however it ends."""
        try:
            self._lock_file = open(f"{self.path}.lock", "a+", encoding="ascii")  # noqa: SIM115 - held while the file is open
        except OSError as error:
            if not self.path.exists() or error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            self.read_only = True  # nothing can be made beside it, so nobody writes
            return
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock_file.seek(0)
            owner = self._lock_file.read(32).strip()
            raise Unavailable(
                f"another server (process {owner}) uses {self.path}; give this one a file of its own with --state-db",
                code="state_db_locked",
            ) from None
        with contextlib.suppress(OSError):  # a full disk: the lock counts, not what the file says
            os.ftruncate(self._lock_file.fileno(), 0)
            os.write(self._lock_file.fileno(), b"%d\n" % os.getpid())

    def _connect(self) -> None:
        """Open the connection, bring the schema up to date."""
        self.read_only |= self.path.exists() and not os.access(self.path, os.W_OK)
        mode = "rwc"
        if self.read_only:  # "immutable" needs nothing beside the file, but would not see turns in its write-ahead log
            log_file = Path(f"{self.path}-wal")
            mode = "ro" if log_file.exists() and log_file.stat().st_size else "ro&immutable=1"
        quoted = str(self.path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
        if not self.path.exists():  # what is said in sessions is nobody else's business
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        address = f"file:{quoted}?mode={mode}"
        connection = sqlite3.connect(
            address, uri=True, isolation_level=None, check_same_thread=False, factory=StateConnection,
            cached_statements=NUM_STATEMENTS,
        )  # fmt: skip
        self.connection = connection
        if not self.read_only:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
                raise sqlite3.OperationalError("write-ahead log not possible here")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            connection.execute("PRAGMA secure_delete = ON")  # what was said in a deleted session is nobody's business
            connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        connection.execute("PRAGMA cache_size = -16384")
        connection.execute("PRAGMA temp_store = MEMORY")  # a turn does not fail because another disk is full
        self.schema = prepare(connection, self.path, read_only=self.read_only)
        check_key(connection, self.path, self.sealer, read_only=self.read_only)
        connection.sealer = self.sealer
        self.opened()
        if not self.read_only:
            self.keep_reserve()
        page_bytes = connection.execute("PRAGMA page_size").fetchone()[0]
        max_pages = self.max_pages or (self.max_bytes // page_bytes if self.max_bytes is not None else None)
        if max_pages is not None:  # a file that has more already does not grow
            connection.execute(f"PRAGMA max_page_count = {max(1, max_pages)}")
        log.info(
            "sessions in %s: SQLite %s, journal %s, pages of %d KiB, %d sessions%s",
            self.path, sqlite3.sqlite_version, *connection.execute("PRAGMA journal_mode").fetchone(),
            connection.execute("PRAGMA page_size").fetchone()[0] // 1024,
            connection.execute("SELECT ifnull(sum(sessions), 0) FROM kept_counts").fetchone()[0],
            ", READ-ONLY: no turn can be kept" if self.read_only else "",
        )  # fmt: skip

    def failed(self, what: str, error: Exception) -> StorageFailed:
        """Log and return the error to raise when the file cannot be opened, read or written (`what`)."""
        log.error("cannot %s %s: %s", what, self.path, error)
        damaged = not isinstance(error, (sqlite3.OperationalError, OSError))
        advice = "; move it away or give another file with --state-db" if damaged else ""
        is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        kind = StorageFull if is_full else StorageFailed
        return kind(f"cannot {what} the session file {self.path.name}: {error}{advice}")
