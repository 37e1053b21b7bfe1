"""The commands of the state routes: list, delete, fork, rewind, export and import sessions. Run by the storage thread."""

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from rwkv_batch.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    RwkvBatchError,
    StorageFailed,
    Unprocessable,
)
from rwkv_batch.model.state import Snapshot
from rwkv_batch.session_messages import (
    Delete,
    Deleted,
    Entry,
    Export,
    Fork,
    Import,
    Page,
    Rewind,
    SessionCommand,
    Status,
    Tier,
)
from rwkv_batch.sessions.disk import StateReader, StateWriter
from rwkv_batch.sessions.leases import LeaseManager
from rwkv_batch.sessions.shared import Call, Execute, Listing, Shared
from rwkv_batch.sessions.state_file import MAX_FOREIGN_TOKENS, PIECE_BYTES, StateFile, Stored
from rwkv_batch.sessions.store import Key, NewVersion, Record, SessionStore, SessionSummary
from rwkv_batch.sessions.tiers import ResidentSession
from rwkv_batch.sessions.transfer import Mark

log = logging.getLogger("rwkv_batch.session_messages")

Answered = Callable[[Page | Deleted | RwkvBatchError], None]

LIST_SESSIONS = 1000  # read at once for a list: some milliseconds


class SessionCommands:
    """Carries the commands out, in memory and on disk alike."""

    def __init__(
        self,
        shared: Shared,
        leases: LeaseManager,
        store: SessionStore,
        file: StateFile,
        reader: StateReader,
        writer: StateWriter,
    ):
        self._shared = shared
        self._leases = leases
        self._store = store
        self._file = file
        self._reader = reader
        self._writer = writer

    def execute(self, job: Execute) -> None:
        """Carry out a command and answer it, a list perhaps later."""
        if isinstance(job.command, Status):
            self.go_on(Listing(self.pieces_of_list(job.command), job.answer))
            return
        page = _guarded(lambda: self._execute(job.command, job.answer))
        if page is not None:
            job.answer(page)

    def go_on(self, listing: Listing) -> None:
        """Make the next piece of a list; what waits already is done before the one after it."""
        page = _guarded(lambda: next(listing.pieces))
        if page is None:
            self._shared.enqueue(listing)
        else:
            listing.answer(page)

    def _execute(self, command: SessionCommand, answer: Answered) -> Page | Deleted | None:
        """Return the answer, None when it is given later."""
        match command:
            case Export():
                return self._export(command, answer)
            case Delete():
                return self._delete(command)
            case Fork():
                return self._fork(command)
            case Rewind():
                return self._rewind(command)
            case Import():
                return self._import(command)

    # Lists.

    def pieces_of_list(self, command: Status) -> Iterator[Page | None]:
        """Yield None after each piece of the work, and then the list."""
        namespace, responses = command.namespace, command.responses
        l1, l2 = ([], []) if self._store.shared else self._in_memory(namespace, responses)  # others may have changed them
        names = [resident.key[1] for resident in (*l1, *l2)]
        ids = self._ids([*l1, *l2])
        num_db = self._store.count(namespace, responses=responses) - len(ids)
        counts = {"total": len(names) + num_db, "l1": len(l1), "l2": len(l2), "db": num_db}
        entries = [*(_entry(resident, "l1") for resident in l1), *(_entry(resident, "l2") for resident in l2)]
        if command.name is not None:
            yield Page(sessions=self._one(namespace, command.name, entries), **counts)
            return
        offset, limit = max(0, command.offset), command.limit
        if limit is not None and limit <= LIST_SESSIONS:
            sessions = entries[offset : offset + limit]
            if len(sessions) < limit:
                part = {"offset": max(0, offset - len(entries)), "limit": limit - len(sessions)}
                sessions += map(_listed, self._store.page(namespace, without=ids, responses=responses, **part))
            yield Page(sessions=sessions, **counts)
            return
        found: list[SessionSummary] = []
        last, in_memory = "", set(names)
        while piece := self._store.named_after(namespace, last, LIST_SESSIONS, responses=responses):
            found += [session for session in piece if session.name not in in_memory]
            last = piece[-1].name  # names do not change: each comes once
            yield None
        seen = in_memory | {session.name for session in found}
        found += [session for session in self._store.reference(namespace) if session.name not in seen]
        found.sort(reverse=True)  # by time and id, as `page` does
        entries += map(_listed, found)
        yield Page(sessions=entries[offset:][:limit], **counts)

    def _in_memory(self, namespace: str, responses: bool) -> tuple[list[ResidentSession], list[ResidentSession]]:
        """The sessions of a namespace on L1, and those on L2 or on their way to disk."""

        def is_wanted(resident: ResidentSession) -> bool:
            return resident.key[0] == namespace and (responses or not resident.response)

        with self._shared.lock:
            tiers = self._shared.tiers
            l1 = [resident for resident in tiers.l1.sessions.values() if is_wanted(resident)]
            leaving = [resident for resident in tiers.leaving.values() if resident.due is not None]
            l2 = [resident for resident in (*tiers.l2.sessions.values(), *leaving) if is_wanted(resident)]
        return l1, l2

    def _ids(self, residents: list[ResidentSession]) -> list[int]:
        """The ids of those of these sessions that are in the store."""
        ids = []
        for resident in residents:
            found = [resident.id] if resident.id is not None else self._store.ids(resident.key[0], [resident.key[1]])
            if found and found[0] > 0:  # else it is rwkv_lightning's, until it is adopted
                resident.id = found[0]
            ids += found
        return ids

    def _one(self, namespace: str, name: str, entries: list[Entry]) -> list[Entry]:
        """The session's entry with its versions."""
        record = self._store.find(namespace, name)
        entry = next((e for e in entries if e.name == name), None) or (_stored_entry(name, record) if record else None)
        if entry is None:
            entry = next((_listed(session) for session in self._store.reference(namespace) if session.name == name), None)
        if entry is None:
            return []
        versions = {entry.version, *self._store.kept_versions(namespace, name)}
        return [msgspec.structs.replace(entry, versions=sorted(versions, reverse=True))]

    # Changes.

    def _delete(self, command: Delete) -> Deleted:
        def is_meant(key: Key) -> bool:
            return key == (command.namespace, command.name) or (
                command.prefix and key[0] == command.namespace and key[1].startswith(f"{command.name}:")
            )

        with self._shared.lock:  # where the store is shared, what is in memory may have been deleted by others
            known = () if self._store.shared else self._shared.tiers
            names = {resident.key[1] for resident in known if is_meant(resident.key)}
        names |= self._store.delete(command.namespace, command.name, prefix=command.prefix)
        with self._shared.lock:  # after the disk, which may refuse; turns that began meanwhile are meant too
            self._leases.revoke(is_meant)
            for key in [resident.key for resident in self._shared.tiers if is_meant(resident.key)]:
                self._shared.tiers.drop(key)
        return Deleted(command.name in names, len(names))

    def _fork(self, command: Fork) -> Page:
        if not command.copies or len(set(command.copies)) < len(command.copies):
            raise InvalidRequest("the copies need names, each its own", param="copies")
        record = self._record(command.namespace, command.name, command.version)
        for name in command.copies:
            self._writer.check_free(command.namespace, name)
        self._store.fork(command.namespace, record, command.copies)
        with self._shared.lock:
            for name in command.copies:
                self._shared.count_node((command.namespace, name))
        return Page(sessions=self._stored(command.namespace, command.copies))

    def _rewind(self, command: Rewind) -> Page:
        namespace, name = key = (command.namespace, command.name)
        newest = self._record(namespace, name, None)
        if command.expect_version not in (None, newest.version):
            raise PreconditionFailed(f"session {name!r} is at version {newest.version}", param="expect_version")
        version = command.version
        if version is None:
            current = newest.version if newest.origin is None else newest.origin
            version = max((v for v in self._store.kept_versions(namespace, name) if v < current), default=0)
        record = self._record(namespace, name, version)
        self._take_out(key)
        self._store.rewind(namespace, name, record, newest.version + 1)
        return Page(sessions=self._stored(namespace, [name]))

    def _export(self, command: Export, answer: Answered) -> Page | None:
        """Make a file; where its state is not whole, the engine computes it first."""
        key = (command.namespace, command.name)
        record = self._record(*key, command.version)
        resident = self._version_in_memory(key, record) or self._reader.read(key, record)
        if not resident.ids:
            return self._write_file(command, record, resident, resident.snapshot, resident.arrived)

        def computed(result: Snapshot | RwkvBatchError) -> None:
            arrived = self._shared.copies.mark()
            write = partial(self._write_file, command, record, resident, result, arrived)
            self._shared.enqueue(Call(lambda: answer(_guarded(write))))

        self._shared.compute(resident, computed)
        return None

    def _version_in_memory(self, key: Key, record: Record) -> ResidentSession | None:
        resident = self._shared.find(key)
        if resident is None or (resident.version, resident.updated) != (record.version, record.updated):
            return None
        return resident

    def _write_file(
        self, command: Export, record: Record, of: ResidentSession, state: Snapshot | RwkvBatchError, arrived: Mark | None
    ) -> Page:
        if isinstance(state, RwkvBatchError):
            raise state
        if not self._shared.copies.is_finite(state, arrived):
            raise Unprocessable("the state is not finite", code="state_unusable")
        stored = Stored(self._shared.copies.to_host(state, arrived), record.newlines, of.origin)
        try:
            with open(command.path, "wb") as out:
                for piece in self._file.encode(stored):
                    out.write(piece)
        except OSError as error:
            raise StorageFailed(f"no room for the file in transit: {error.strerror}") from None
        return Page(sessions=[_stored_entry(command.name, record)])

    def _import(self, command: Import) -> Page:
        with open(command.path, "rb") as source:
            stored = self._file.decode(iter(lambda: source.read(PIECE_BYTES), b""))
        if not self._shared.copies.is_finite(stored.snapshot, None):
            raise Unprocessable("the state is not finite", code="state_unusable")
        if stored.snapshot.elapsed >= MAX_FOREIGN_TOKENS:
            raise Unprocessable("the state cannot have seen so many tokens", code="state_unusable")
        key = (command.namespace, command.name)
        if not command.overwrite:
            self._writer.check_free(*key)
        record = self._record(*key, None) if self._writer.exists(key) else None
        self._take_out(key)
        snapshot, pieces = stored.snapshot, self._file.encode(stored)
        version = record.version + 1 if record else 1
        self._store.write([NewVersion(*key, version, snapshot.elapsed, stored.newlines, pieces, time.time())])
        with self._shared.lock:
            self._shared.count_node(key)
        return Page(sessions=self._stored(command.namespace, [command.name]))

    # Inside.

    def _record(self, namespace: str, name: str, version: int | None) -> Record:
        """A version of a session on disk, where it is brought first if need be; NotFound."""
        resident = self._shared.find((namespace, name))
        if resident is not None and resident.due is not None:
            self._writer.flush([resident])
            if resident.due is not None:
                raise StorageFailed(f"session {name!r} could not be written")
        self._reader.adopt((namespace, name))
        record = self._store.find(namespace, name, version)
        if record is None and (version is None or self._store.find(namespace, name) is None):
            raise NotFound(f"there is no session {name!r}", code="session_not_found", param="session_id")
        if record is None:
            what = f"version {version}" if version else "earlier version"
            raise NotFound(f"session {name!r}: no {what} is kept", code="version_not_found", param="version")
        return record

    def _take_out(self, key: Key) -> None:
        """Take a session that is to change on disk out of memory, so that the next turn reads it; Conflict when it is busy."""
        with self._shared.lock:
            if self._leases.is_busy(key):
                raise Conflict(f"session {key[1]!r} is busy with a turn", code="session_busy", retry_after=1.0)
            self._shared.tiers.drop(key)

    def _stored(self, namespace: str, names: list[str]) -> list[Entry]:
        records = [(name, self._store.find(namespace, name)) for name in names]
        return [_stored_entry(name, record) for name, record in records if record is not None]


def _guarded(work: Callable[[], Page | Deleted | None]) -> Page | Deleted | RwkvBatchError | None:
    """What comes of a command, or why it cannot be carried out."""
    try:
        return work()
    except RwkvBatchError as error:
        return error
    except Exception:
        log.exception("an order about sessions failed")
        return StorageFailed("the order could not be carried out; the log says why")


def _entry(resident: ResidentSession, tier: Tier) -> Entry:
    num_bytes = resident.num_bytes or 2 * len(resident.ids)
    return Entry(resident.key[1], tier, resident.updated, resident.version, resident.tokens, num_bytes)


def _listed(session: SessionSummary) -> Entry:
    updated, _, name, version, tokens, num_bytes = session
    return Entry(name, "db", updated, version, tokens, num_bytes)


def _stored_entry(name: str, record: Record) -> Entry:
    return Entry(name, "db", record.updated, record.version, record.tokens, record.num_bytes)
