"""What the store process does for engines: their calls carried out on the session file, turns of many in one transaction."""

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from rwkv_batch.errors import Conflict, RwkvBatchError, StorageFailed, Unavailable
from rwkv_batch.request import Failure
from rwkv_batch.sessions.remote.claims import ClaimTable, Engine
from rwkv_batch.sessions.remote.messages import METHODS, Call, Found, Reply, SentVersion, cut, raw, received
from rwkv_batch.sessions.sqlite.database import SessionDatabase
from rwkv_batch.sessions.store import Claim, Key, NewVersion, Record, SessionSummary, Source, SourceLost

log = logging.getLogger("rwkv_batch.sessions.remote")

NOTHING = memoryview(b"")
SLOW = ("add_to_draft", "finish_draft", "pieces", "named_after", "page", "delete", "reference_state")  # not many at once

Answer = tuple[Reply, list[bytes | memoryview]]


class StoreService:
    """Carries out the calls of engines on one session file, `database`. Used by one thread."""

    def __init__(self, database: SessionDatabase):
        self.database = database
        self._database = database
        self._claims = ClaimTable(database)
        self._writers: dict[Engine, int] = {}
        self._methods: dict[str, Callable] = {
            **{name: self._same(name) for name in (
                "find", "kept_versions", "last_node", "replay", "reference", "reference_state", "ids", "open_if_there",
            )},
            **{name.strip("_"): getattr(self, name) for name in (
                "_load", "_pieces", "_page", "_named_after", "_count", "_oldest", "_begin_draft", "_add_to_draft",
                "_finish_draft", "_delete", "_fork", "_rewind", "_claim_many", "_let_go", "_next_node",
            )},
        }  # fmt: skip

    def left(self, engine: Engine) -> None:
        """An engine has ended: others may have its sessions."""
        self._claims.left(engine)
        self._database.writer = self._writers.pop(engine, 0)
        self._database.drop_draft()

    def answer(self, engine: Engine, call: Call, data: memoryview = NOTHING) -> Answer:
        """Carry out a call, which is not `write`; `data` came behind it."""
        pieces: list[bytes | memoryview] = []

        def work() -> Any:
            arguments = METHODS[call.method].arguments.decode(call.arguments)
            return self._methods[call.method](engine, data, pieces, *arguments)

        return _reply(work), pieces

    def write(self, calls: list[tuple[Engine, Call, memoryview]]) -> list[Reply]:
        """Carry out the writes of several engines, together where nothing speaks against it: each as a whole or not at all."""
        replies: list[Reply | None] = [None] * len(calls)
        together: list[tuple[int, list[NewVersion]]] = []
        seen: set[Any] = set()
        for number, (engine, call, data) in enumerate(calls):
            found: list[NewVersion] = []

            def check(engine: Engine = engine, call: Call = call, data: memoryview = data, found: list = found) -> None:
                found += _versions(call, data)
                self._check(engine, found)

            reply = _reply(check)
            touched = {what for new in found for what in _touched(new)}
            if reply.failure is None and reply.lost is None and seen.isdisjoint(touched):
                seen |= touched
                together.append((number, found))
            elif reply.failure is None:  # after those that it stands in the way of
                self._write_all(together, replies)
                together, seen = [], set()
                replies[number] = _reply(lambda e=engine, f=found: self._checked(e, f))
            else:
                replies[number] = reply
        self._write_all(together, replies)
        return replies

    def _checked(self, engine: Engine, versions: list[NewVersion]) -> None:
        self._check(engine, versions)
        self._write(versions)

    def _write_all(self, calls: list[tuple[int, list[NewVersion]]], replies: list[Reply | None]) -> None:
        """Write what was checked, in one transaction; where that fails each call in one of its own."""
        if len(calls) > 1:
            reply = _reply(lambda: self._write([new for _, versions in calls for new in versions]))
            if reply == Reply():
                for number, _ in calls:
                    replies[number] = reply
                return
        for number, versions in calls:
            replies[number] = _reply(lambda versions=versions: self._write(versions))

    def _write(self, versions: list[NewVersion]) -> None:
        self._database.write(versions)
        self._claims.written(versions)

    def _check(self, engine: Engine, versions: list[NewVersion]) -> None:
        for new in versions:
            self._claims.check(engine, new)
            for name, replay in new.replays if engine.shared else ():
                if self._database.replay(new.namespace, name, replay.key) is not None:
                    raise Conflict("another engine ran this turn meanwhile", code="turn_running", retry_after=1.0)

    def _same(self, name: str) -> Callable:
        """A method of the file as it is."""
        method = getattr(self._database, name)
        return lambda engine, data, pieces, *arguments: method(*arguments)

    def _load(self, engine: Engine, data: memoryview, pieces: list, record: Record) -> Found:
        self._claims.check_kept(record)
        state = self._database.load(record)
        return Found(state.ids, list(state.models), state.base if state.pieces is not None else None)

    def _pieces(self, engine: Engine, data: memoryview, pieces: list, record: Record, base: int) -> list[int] | None:
        self._claims.check_kept(record)
        state = self._database.load(record)
        if state.pieces is None or state.base != base:
            return None
        pieces += state.pieces
        return [len(piece) for piece in pieces]

    def _page(
        self, engine: Engine, data: memoryview, pieces: list, namespace: str, without: list[int], offset: int, limit: int,
        responses: bool,
    ) -> list[SessionSummary]:  # fmt: skip
        return self._database.page(namespace, without=without, offset=offset, limit=limit, responses=responses)

    def _named_after(
        self, engine: Engine, data: memoryview, pieces: list, namespace: str, name: str, limit: int, responses: bool
    ) -> list[SessionSummary]:
        return self._database.named_after(namespace, name, limit, responses=responses)

    def _count(self, engine: Engine, data: memoryview, pieces: list, namespace: str, responses: bool) -> int:
        return self._database.count(namespace, responses=responses)

    def _oldest(self, engine: Engine, data: memoryview, pieces: list, limit: int) -> list[Key]:
        found = self._database.oldest(limit + self._claims.num_claims)
        return [key for key in found if not self._claims.is_claimed(key)][:limit]

    def _begin_draft(self, engine: Engine, data: memoryview, pieces: list) -> None:
        self._draft_of(engine)
        self._database.begin_draft()

    def _add_to_draft(self, engine: Engine, data: memoryview, pieces: list) -> None:
        self._draft_of(engine, begun=True)
        self._database.add_to_draft(data)

    def _finish_draft(
        self, engine: Engine, data: memoryview, pieces: list, namespace: str, source: Source, ids: list[int]
    ) -> bool:
        self._draft_of(engine, begun=True)
        return self._database.finish_draft(namespace, source, ids)

    def _draft_of(self, engine: Engine, *, begun: bool = False) -> None:
        """The draft of this engine is meant; Unavailable when it has none, for it was begun in an earlier life."""
        self._database.writer = self._writers.setdefault(engine, 1 + max(self._writers.values(), default=0))
        if begun and not self._database.has_draft:
            raise Unavailable("the store of sessions was started again", code="storage_unavailable", retry_after=1.0)

    def _delete(self, engine: Engine, data: memoryview, pieces: list, namespace: str, name: str, prefix: bool) -> set[str]:
        found = self._database.delete(namespace, name, prefix=prefix)
        self._claims.deleted(namespace, name, prefix=prefix)
        return found

    def _fork(self, engine: Engine, data: memoryview, pieces: list, namespace: str, record: Record, copies: list[str]) -> None:
        self._claims.check_kept(record)
        for name in copies:
            self._claims.check_free(engine, (namespace, name), 1)
        self._database.fork(namespace, record, copies)
        for name in copies:
            self._claims.count_node((namespace, name))

    def _rewind(
        self, engine: Engine, data: memoryview, pieces: list, namespace: str, name: str, record: Record, version: int
    ) -> None:
        self._claims.check_kept(record)
        self._claims.check_free(engine, (namespace, name), version)
        self._database.rewind(namespace, name, record, version)

    def _claim_many(self, engine: Engine, data: memoryview, pieces: list, keys: list[Key]) -> list[Claim | None]:
        return self._claims.take_many(engine, keys)

    def _let_go(self, engine: Engine, data: memoryview, pieces: list, claim: Claim) -> None:
        self._claims.let_go(engine, claim)

    def _next_node(self, engine: Engine, data: memoryview, pieces: list, namespace: str, name: str) -> int:
        return self._claims.next_node(namespace, name)


def _versions(call: Call, data: memoryview) -> list[NewVersion]:
    """The versions of a call, with their whole states."""
    (sent,) = METHODS["write"].arguments.decode(call.arguments)
    begin, versions = 0, []
    for version in sent:
        versions.append(received(version, _pieces_of(version, data[begin:])))
        begin += sum(version.sizes or ())
    return versions


def _pieces_of(version: SentVersion, data: memoryview) -> list[memoryview] | None:
    return cut(data, version.sizes) if version.sizes is not None else None


def _touched(new: NewVersion) -> list[Any]:
    """What two versions that are written together must not both have: the session, the keys of answers."""
    return [(new.namespace, new.name), *((new.namespace, name, replay.key) for name, replay in new.replays)]


def _reply(work: Callable[[], Any]) -> Reply:
    try:
        return Reply(raw(work()))
    except RwkvBatchError as error:
        return Reply(failure=Failure.of("", error))
    except SourceLost as error:
        return Reply(lost=str(error))
    except Exception as error:
        if isinstance(error, (msgspec.MsgspecError, KeyError)):
            log.error("a call of an engine cannot be read: %r", error)
        else:
            log.exception("a call of an engine failed")
        return Reply(failure=Failure.of("", StorageFailed("the session file could not be used; the log says why")))
