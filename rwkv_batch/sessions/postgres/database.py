"""Sessions that several servers share: names, versions, claims and token ids in PostgreSQL, whole states as objects beside it.

A turn is two statements. `claim` makes a session this engine's, which fails while an engine that is alive has it, and tells the
version, so that a copy in memory that is older is not used. `write` adds the version, its ids, and lets go of the session, if
it is still this engine's by the same claim: an engine that was given up finds that it is not, and can acknowledge nothing.
Turns that end together share the statement and its transaction. Used by one thread, but for the signs of life and the upkeep,
which have threads and connections of their own.
"""

import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import psycopg
from psycopg import errors

from rwkv_batch.errors import Conflict, RwkvBatchError, StorageFailed, Unavailable
from rwkv_batch.sessions.postgres.catalog import SEAL_BYTES, PostgresCatalog, range_of
from rwkv_batch.sessions.postgres.connection import Database
from rwkv_batch.sessions.postgres.objects import Objects
from rwkv_batch.sessions.postgres.presence import Presence
from rwkv_batch.sessions.postgres.sweep import Sweeper, drop_sessions
from rwkv_batch.sessions.postgres.uploads import Uploads
from rwkv_batch.sessions.sqlite.states import pack_ids
from rwkv_batch.sessions.store import Claim, Key, NewVersion, Record, Replay, Source, SourceLost

log = logging.getLogger("rwkv_batch.sessions.postgres")
T = TypeVar("T")

WAIT_SECONDS = 10.0  # that a turn which ended waits for a database that cannot be reached
RETRY_SECONDS = 0.1
SWEEP_SECONDS = 60.0  # that the upkeep may take to delete objects
TRIES = 3  # of a transaction that the database gave up for another one

CLAIM = """
INSERT INTO kept_sessions AS s (namespace, name, version, owner, epoch) VALUES (%(namespace)s, %(name)s, 0, %(me)s, 1)
ON CONFLICT (namespace, name) DO UPDATE SET owner = EXCLUDED.owner, epoch = s.epoch + 1
    WHERE s.owner IS NULL OR s.owner = EXCLUDED.owner
       OR NOT EXISTS (SELECT 1 FROM kept_engines e WHERE e.id = s.owner AND e.alive_until > now())
RETURNING s.id, s.epoch, s.version, s.updated
"""
LET_GO = """
WITH unmade AS (DELETE FROM kept_sessions WHERE id = %(session)s AND owner = %(me)s AND epoch = %(epoch)s AND version = 0)
UPDATE kept_sessions SET owner = NULL WHERE id = %(session)s AND owner = %(me)s AND epoch = %(epoch)s AND version > 0
"""
# One row of `new` for each version. `own`: sessions that are claimed, and still this engine's, or nobody's since the database
# lost its power and with it the claim, which is not synced; `made`: new ones. What has a
# `kept` state names that one, else it gets a state of its own, which follows that of its source.
WRITE = """
WITH new AS MATERIALIZED (
    SELECT t.*, coalesce(t.claimed, nextval('kept_sessions_id_seq')) AS session,
        coalesce(t.kept, nextval('kept_states_id_seq')) AS state
    FROM unnest(%(namespace)s::text[], %(name)s::text[], %(version)s::bigint[], %(claimed)s::bigint[], %(epoch)s::bigint[],
        %(tokens)s::bigint[], %(newlines)s::int[], %(num_bytes)s::bigint[], %(updated)s::float8[], %(origin)s::bigint[],
        %(response)s::bool[], %(source_name)s::text[], %(source_version)s::bigint[], %(source_updated)s::float8[],
        %(object)s::text[], %(seal)s::bytea[], %(ids)s::bytea[], %(model)s::text[], %(kept)s::bigint[])
    WITH ORDINALITY AS t (namespace, name, version, claimed, epoch, tokens, newlines, num_bytes, updated, origin, response,
        source_name, source_version, source_updated, object, seal, ids, model, kept, number)),
based AS (
    SELECT n.*, v.state AS base, n.source_name IS NULL OR v.state IS NOT NULL AS is_sound
    FROM new n LEFT JOIN kept_sessions s ON s.namespace = n.namespace AND s.name = n.source_name
    LEFT JOIN kept_versions v ON v.session = s.id AND v.version = n.source_version AND v.updated = n.source_updated),
own AS (
    UPDATE kept_sessions s
    SET version = n.version, tokens = n.tokens, num_bytes = n.num_bytes, updated = n.updated, owner = NULL
    FROM based n WHERE n.is_sound AND s.id = n.claimed AND s.version = n.version - 1
        AND ((s.owner = %(me)s AND s.epoch = n.epoch) OR (s.owner IS NULL AND s.epoch < n.epoch)) RETURNING s.id),
made AS (
    INSERT INTO kept_sessions (id, namespace, name, version, tokens, num_bytes, updated, response, epoch)
    SELECT session, namespace, name, version, tokens, num_bytes, updated, response, 0 FROM based
    WHERE claimed IS NULL AND is_sound ORDER BY namespace, name ON CONFLICT DO NOTHING RETURNING id),
done AS (SELECT id FROM own UNION ALL SELECT id FROM made),
stated AS (
    INSERT INTO kept_states (id, base, object, seal, ids, model)
    SELECT n.state, n.base, n.object, n.seal, n.ids, n.model FROM based n JOIN done ON done.id = n.session
    WHERE n.kept IS NULL),
versioned AS (
    INSERT INTO kept_versions (session, version, state, tokens, newlines, num_bytes, updated, origin)
    SELECT n.session, n.version, n.state, n.tokens, n.newlines, n.num_bytes, n.updated, n.origin
    FROM based n JOIN done ON done.id = n.session),
trimmed AS (
    DELETE FROM kept_versions v USING own WHERE v.session = own.id AND v.version <= (
        SELECT o.version FROM kept_versions o WHERE o.session = own.id ORDER BY o.version DESC OFFSET %(before)s LIMIT 1)
    RETURNING v.state),
loosened AS (
    INSERT INTO kept_loose (state)
    SELECT t.state FROM trimmed t WHERE NOT EXISTS (SELECT 1 FROM kept_states c WHERE c.base = t.state))
SELECT done.id IS NOT NULL, n.is_sound FROM based n LEFT JOIN done ON done.id = n.session ORDER BY n.number
"""
# An answer that is kept already, for the same key and not too old, is another server's: the same request ran there meanwhile.
ADD_REPLAY = """
INSERT INTO kept_replays AS r (namespace, name, key, digest, answer) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT (namespace, name, key) DO UPDATE SET digest = EXCLUDED.digest, answer = EXCLUDED.answer, created = now()
    WHERE r.created <= now() - make_interval(secs => %s)
RETURNING 1
"""
COUNT_NODE = """
INSERT INTO kept_dialogues AS d VALUES (%s, %s, %s)
ON CONFLICT (namespace, name) DO UPDATE SET last_node = greatest(d.last_node, EXCLUDED.last_node)
"""
# The state of a version comes from an object now; what led to it may not be needed any more.
REBASE = """
WITH old AS (
    SELECT st.id, st.base FROM kept_sessions s JOIN kept_versions v ON v.session = s.id JOIN kept_states st ON st.id = v.state
    WHERE s.namespace = %(namespace)s AND s.name = %(name)s AND v.version = %(version)s AND v.updated = %(updated)s
      AND (st.base IS NOT NULL OR st.object IS NULL) FOR UPDATE OF st),
changed AS (
    UPDATE kept_states st SET base = NULL, object = %(object)s, seal = %(seal)s, ids = %(ids)s FROM old WHERE st.id = old.id
    RETURNING old.base),
loosened AS (INSERT INTO kept_loose (state) SELECT base FROM changed WHERE base IS NOT NULL)
SELECT count(*) FROM changed
"""


@dataclass
class _Row:
    """One version in the columns of `WRITE`."""

    new: NewVersion
    claim: Claim | None = None
    origin: int | None = None
    kept: int | None = None
    object: str | None = None
    seal: bytes | None = None


class _More(NamedTuple):
    """What is written beside versions. `at_once`: all of them or none."""

    replays: list[tuple[str, str, Replay]] = []  # noqa: RUF012 - never changed
    nodes: list[tuple[str, str, int]] = []  # noqa: RUF012
    at_once: bool = False


class PostgresStore(PostgresCatalog):
    """The sessions in the database at `url`, with whole states in `objects`; connected by the first call that needs it.

    versions          of a session that are kept
    replay_seconds    how long answers are kept for their idempotency keys
    response_seconds  how long the states of responses are kept, and `max_responses` how many of them in each namespace
    lease_seconds     after which the sessions of an engine that gives no sign of life may go on elsewhere
    """

    def __init__(
        self,
        url: str,
        objects: Objects,
        *,
        versions: int = 2,
        replay_seconds: float = 600.0,
        response_seconds: float = 30 * 86400.0,
        max_responses: int = 1000,
        lease_seconds: float = 1.5,
    ):
        database = Database(url, durable=True, idle_seconds=lease_seconds)
        super().__init__(database, objects, replay_seconds=replay_seconds, response_seconds=response_seconds)
        self.versions = versions
        self._quick = Database(url, durable=False, idle_seconds=lease_seconds)  # what may be lost with the database's power
        what = f"{socket.gethostname()}:{os.getpid()}"
        self._presence = Presence(database, self._quick, lease_seconds=lease_seconds, what=what)
        self._uploads = Uploads(objects)
        self._to_let_go: list[Claim] = []
        self._sweeper = Sweeper(
            Database(url, durable=False, idle_seconds=SWEEP_SECONDS),
            objects,
            replay_seconds=replay_seconds,
            response_seconds=response_seconds,
            max_responses=max_responses,
        )

    @property
    def is_uploading(self) -> bool:
        """Whether a whole state is on its way, so that another one should wait."""
        return self._uploads.is_busy

    # Turns.

    def claim(self, namespace: str, name: str) -> Claim | None:
        """Make a session, or a name without one, this engine's for a turn; None while an engine that is alive has it."""
        self._open()
        try:
            rows = self._quick.rows(CLAIM, {"namespace": namespace, "name": name, "me": self._presence.id})
        except errors.LockNotAvailable:
            return None
        return Claim(*rows[0]) if rows else None

    def claim_many(self, keys: list[Key]) -> list[Claim | None]:
        """The same for many, one by one."""
        return [self.claim(*key) for key in keys]

    def let_go(self, claim: Claim) -> None:
        """The turn wrote nothing: others may have the session."""
        self._to_let_go.append(claim)
        while self._to_let_go:
            claim = self._to_let_go[-1]
            values = {"session": claim.session, "epoch": claim.epoch, "me": self._presence.id}
            try:
                self._quick.rows(LET_GO, values)
            except (RwkvBatchError, psycopg.Error):
                return  # tried again with the next one, and by `tidy`
            self._to_let_go.pop()

    def next_node(self, namespace: str, name: str) -> int:
        """Take the next number of a dialogue's nodes; no other server gets it."""
        number = self.last_node(namespace, name) + 1
        query = (
            "INSERT INTO kept_dialogues AS d VALUES (%s, %s, %s) ON CONFLICT (namespace, name)"
            " DO UPDATE SET last_node = greatest(d.last_node + 1, EXCLUDED.last_node) RETURNING last_node"
        )
        return self.database.rows(query, (namespace, name, number))[0][0]

    # Writing. Each call is one transaction.

    def write(self, versions: list[NewVersion]) -> None:
        """Keep new versions; Conflict when a session is not this engine's any more, or a new one is there.

        Then some of the others may be kept: to write these again, by themselves, does nothing.
        """
        self._open()
        rows = [_Row(new, new.claim) for new in versions]
        more = _More(
            [(new.namespace, name, replay) for new in versions for name, replay in new.replays],
            [(new.namespace, *new.node) for new in versions if new.node is not None],
        )
        with contextlib.ExitStack() as left_over:
            for row in rows:
                if row.new.pieces is not None:
                    row.object, row.seal = self._add_object(row.new, left_over)
            with self._claims_for(rows):
                self._write_until_known(rows, more)
            left_over.pop_all()

    def _add_object(self, new: NewVersion, left_over: contextlib.ExitStack) -> tuple[str, bytes]:
        """Write a whole state; its name and how it ends."""
        name = self._name_object()
        left_over.callback(self._free, name)
        end = b""

        def pieces() -> Iterator[bytes | memoryview]:
            nonlocal end
            for piece in new.pieces:
                end = (end + bytes(piece[-SEAL_BYTES:]))[-SEAL_BYTES:]
                yield piece

        self.objects.put(name, pieces())
        return name, end

    @contextlib.contextmanager
    def _claims_for(self, rows: list[_Row]) -> Iterator[None]:
        """Versions that follow others outside of a turn, such as an imported one, need a claim of their own."""
        taken = []
        try:
            for row in rows:
                if row.claim is None and row.new.version > 1:
                    row.claim = self.claim(row.new.namespace, row.new.name)
                    if row.claim is None:
                        raise Conflict(f"session {row.new.name!r} is busy with a turn", code="session_busy", retry_after=1.0)
                    taken.append(row.claim)
            yield
        except BaseException:
            for claim in taken:
                self.let_go(claim)
            raise

    def _write_until_known(self, rows: list[_Row], more: _More) -> None:
        """Write, and where the database goes away before it has answered, find out whether it was done."""
        until = time.monotonic() + WAIT_SECONDS
        in_doubt = False
        while True:
            try:
                if not (in_doubt and self._are_written(rows)):
                    self._write_rows(rows, more)
                return
            except Unavailable:
                if time.monotonic() > until:
                    raise
                in_doubt = True
                time.sleep(RETRY_SECONDS)

    def _check(self, rows: list[_Row], results: list[tuple[bool, bool]]) -> None:
        """Raise unless all are written."""
        for row, (is_done, is_sound) in zip(rows, results, strict=True):
            if not is_sound:
                raise SourceLost(row.new.name)
            if not is_done and not self._are_written([row]):
                raise _moved(row)

    def _are_written(self, rows: list[_Row]) -> bool:
        return all(
            (record := self.find(row.new.namespace, row.new.name, row.new.version)) is not None
            and record.updated == row.new.updated
            for row in rows
        )

    def _write_rows(self, rows: list[_Row], more: _More) -> None:
        values = _columns(rows) | {"me": self._presence.id, "before": self.versions - 1}

        def write() -> None:
            if more == _More():  # the usual turns: one statement, and no more is sent
                self._check(rows, self.database.rows(WRITE, values, once=True))
                return
            limit = self.replay_seconds
            with self.database.transaction() as connection:
                done = connection.execute(WRITE, values, prepare=True)
                kept = [connection.execute(ADD_REPLAY, (*key, *replay[:3], limit)) for *key, replay in more.replays]
                for node in more.nodes:
                    connection.execute(COUNT_NODE, node)
                self._check(rows, done.fetchall())
                if not all(cursor.fetchone() for cursor in kept):
                    raise Conflict("another server ran this turn meanwhile", code="turn_running", retry_after=1.0)

        try:
            _again(write)
        except errors.ForeignKeyViolation:  # deleted at this moment
            raise SourceLost(rows[0].new.name) from None

    # A whole state for a version that has none of its own.

    def begin_draft(self) -> None:
        """Begin to gather a state, in place of one that was begun before."""
        self._settle(wait=True)
        self._uploads.begin(self._name_object())

    def add_to_draft(self, piece: bytes | memoryview) -> None:
        """Gather its next piece, whose memory must not change."""
        self._uploads.add(piece)

    def finish_draft(self, namespace: str, source: Source, ids: Sequence[int]) -> bool:
        """Write what was gathered, in a thread of its own; then the state of the version follows from it by `ids`."""
        self._uploads.finish(namespace, source, list(ids))
        return True

    def _settle(self, *, wait: bool = False) -> None:
        """If a state has been written, let its version follow from it."""
        upload = self._uploads.take(wait=wait)
        if upload is None:
            return
        values = upload.source._asdict() | {
            "namespace": upload.namespace, "object": upload.name, "seal": upload.seal, "ids": pack_ids(upload.ids),
        }  # fmt: skip
        try:
            if upload.error is not None:
                raise upload.error
            if self.database.rows(REBASE, values)[0][0]:
                return
        except (RwkvBatchError, psycopg.Error) as error:  # its ids are kept all the same
            log.warning("session %r was not written whole: %s", upload.source.name, error)
        self._free(upload.name)

    def delete(self, namespace: str, name: str, *, prefix: bool) -> set[str]:
        """Forget a session, and with `prefix` all "name:…"; return the names of those that were there."""
        first, end = range_of(name) if prefix else ("", "")
        meant = {"namespace": namespace, "name": name, "first": first, "end": end}
        test = "namespace = %(namespace)s AND (name = %(name)s OR (name >= %(first)s AND name < %(end)s))"

        def delete() -> set[str]:
            with self.database.transaction() as connection:
                connection.execute(f"DELETE FROM kept_replays WHERE {test}", meant)
                query = f"SELECT id, name, version FROM kept_sessions WHERE {test} ORDER BY id FOR UPDATE"
                found = connection.execute(query, meant).fetchall()
                drop_sessions(connection, [session for session, _, _ in found])
                return {name for _, name, version in found if version}

        return _again(delete)

    def fork(self, namespace: str, record: Record, copies: list[str]) -> None:
        """Make sessions whose version 1 is `record`; none of them may exist."""
        now = time.time()
        new = [NewVersion(namespace, name, 1, record.tokens, record.newlines, None, now) for name in copies]
        self._set_versions([_Row(version, kept=record.state) for version in new], record)

    def rewind(self, namespace: str, name: str, record: Record, version: int) -> None:
        """Make a kept version of a session its version `version`."""
        new = NewVersion(namespace, name, version, record.tokens, record.newlines, None, time.time())
        origin = record.version if record.origin is None else record.origin
        rows = [_Row(new, origin=origin, kept=record.state)]
        with self._claims_for(rows):
            self._set_versions(rows, record)

    def _set_versions(self, rows: list[_Row], record: Record) -> None:
        for row in rows:
            row.new.num_bytes = record.num_bytes
        try:
            self._write_until_known(rows, _More(at_once=True))
        except SourceLost:
            raise Conflict("the session changed meanwhile", code="session_busy", retry_after=1.0) from None

    # Upkeep.

    def open_if_there(self) -> bool:
        """Connect, and make the tables if there are none."""
        self._open()
        return True

    def tidy(self, *, waiting: bool, idle: bool = False) -> None:
        """Finish what is on its way. The rest of the upkeep has a thread of its own."""
        self._settle()
        if self._to_let_go and not waiting:
            self.let_go(self._to_let_go.pop())

    def clean_up(self) -> None:
        """Nothing: see `tidy`."""

    def sweep(self) -> None:
        """Delete what nobody needs, now."""
        self._sweeper.sweep()

    def close(self) -> None:
        """Let go of all sessions and of the connections; the next call opens them again."""
        self._settle(wait=True)
        self._sweeper.stop()
        self._presence.leave()
        self._quick.close()
        self.database.close()

    # Inside.

    def _open(self) -> None:
        """The tables are there, and others know of this engine."""
        if self._sweeper.is_idle:
            self.database.rows("SELECT 1")
            self._sweeper.start()

    def _name_object(self) -> str:
        """A name for a whole state, told to the database first."""
        name = uuid.uuid4().hex
        query = "INSERT INTO kept_objects (name, writer) VALUES (%s, %s) ON CONFLICT DO NOTHING"
        self.database.rows(query, (name, self._presence.id))
        return name

    def _free(self, name: str) -> None:
        """Nothing needs this object."""
        with contextlib.suppress(RwkvBatchError, psycopg.Error):  # else it is found when this engine has ended
            self.database.rows("UPDATE kept_objects SET freed = now() WHERE name = %s", (name,))


def _columns(rows: list[_Row]) -> dict[str, list]:
    """The parameters of `WRITE`."""
    new = [row.new for row in rows]
    said = ("namespace", "name", "version", "tokens", "newlines", "num_bytes", "updated", "response", "model")
    sources = [version.source or (None, None, None) for version in new]
    return {
        **{field: [getattr(version, field) for version in new] for field in said},
        "claimed": [row.claim.session if row.claim else None for row in rows],
        "epoch": [row.claim.epoch if row.claim else None for row in rows],
        "origin": [row.origin for row in rows],
        "source_name": [name for name, _, _ in sources],
        "source_version": [version for _, version, _ in sources],
        "source_updated": [updated for _, _, updated in sources],
        "object": [row.object for row in rows],
        "seal": [row.seal for row in rows],
        "ids": [pack_ids(version.ids) for version in new],
        "kept": [row.kept for row in rows],
    }


def _again(work: Callable[[], T]) -> T:
    """Do it again where the database gave it up for another transaction."""
    for _ in range(TRIES - 1):
        try:
            return work()
        except (errors.DeadlockDetected, errors.LockNotAvailable):
            continue
    try:
        return work()
    except (errors.DeadlockDetected, errors.LockNotAvailable) as error:
        raise StorageFailed(f"the database was busy: {error}") from None


def _moved(row: _Row) -> Conflict:
    """Why a version cannot be written."""
    name = row.new.name
    if row.claim is None:
        return Conflict(f"there is a session {name!r} already", code="session_exists")
    return Conflict(f"session {name!r} went on elsewhere during this turn, which is not kept", code="session_moved")
