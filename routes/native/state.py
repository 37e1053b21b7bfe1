"""The routes of sessions: turns that continue a state, branching dialogues, and what is done to states between turns.

The engine keeps the states and makes the border between two turns; here are the bodies, the reference's answers, and files.
"""

import asyncio
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from pydantic import Field

from routes.http.context import RequestContext
from routes.http.replies import DONE, Response, json_reply, sse
from routes.http.streams import Reply
from routes.native.chat import NATIVE_ID, ChunkFormatter, DocumentFormatter, V1Body
from routes.schemas import MAX_ID, Body, Texts, session_name, validate
from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest, StorageFailed
from rwkv_batch.request import Event, Finish
from rwkv_batch.session_messages import CommitResult, Delete, Entry, Export, Fork, Import, Page, Rewind, Session, Status, Tier

DIALOGUE_ID = "rwkv7-multi-state"
KEY_HEADER = "idempotency-key"
BYTES = "application/octet-stream"
MAX_KEY = 255  # characters of an idempotency key
NODE = re.compile(r":[0-9]{1,18}\Z")  # what a node's name has more than its dialogue's
DESCRIBED_AT_ONCE = 500  # sessions: other calls of this process come in between
CACHE_LEVELS: dict[Tier, str] = {"l1": "L1 (VRAM)", "l2": "L2 (RAM)", "db": "Database (Disk)"}

transfers = asyncio.Semaphore(4)  # files that an HTTP process holds in memory at a time


class StateBody(V1Body):
    """One turn: what is said next in a session. Without a session it runs without memory.

    keep             without it nothing is stored, and any number of prompts start from the session's state
    expect_version   the version the session must be at; 0: it must not exist
    idempotency_key  a turn that was kept under it is answered again and not run again; also a header
    """

    SINGLE: ClassVar[str] = "Server Error: Requst must be single prompt !"  # as the reference spells it

    session_id: str | None = None
    keep: bool = True
    expect_version: int | None = Field(None, ge=0, le=MAX_ID)
    idempotency_key: str | None = Field(None, min_length=1, max_length=MAX_KEY)

    def check_count(self, texts: list[str], config: Config) -> None:
        """Raise InvalidRequest unless there is one prompt, or any number for a session that is not changed."""
        super().check_count(texts, config)
        if len(texts) > 1 and (self.keep or not self.session_id):
            raise InvalidRequest(self.SINGLE, param="contents")

    def session(self, config: Config) -> Session | None:
        """The state to continue. Raises InvalidRequest.

        Rows that only start from a state need one, for there is nothing else to them: a session that is not there is a mistake.
        """
        if self.session_id == "":
            raise InvalidRequest("session_id: empty; without memory, leave it out", param="session_id")
        if self.session_id is not None:
            return Session(
                name=name_or_node(self.session_id, config),
                keep=self.keep,
                must_exist=not self.keep and self.expect_version != 0,
                expect_version=self.expect_version,
                key=self.idempotency_key,
            )
        for field in ("expect_version", "idempotency_key"):
            if getattr(self, field) is not None:
                raise InvalidRequest(f"{field}: needs a session_id", param=field)
        return None


class DialogueBody(StateBody):
    """One turn from a node of a branching dialogue; what comes of it is a new node."""

    SINGLE: ClassVar[str] = "Server Error: Request must be single prompt!"

    dialogue_idx: int = Field(0, ge=0, le=MAX_ID)

    def check_count(self, texts: list[str], config: Config) -> None:
        """Raise InvalidRequest unless there is one prompt."""
        if len(texts) != 1:
            raise InvalidRequest(self.SINGLE, param="contents")

    def session(self, config: Config) -> Session:
        """The node to continue. Raises InvalidRequest."""
        name = session_name(self.session_id, config)
        return Session(name=name, node=self.dialogue_idx, expect_version=self.expect_version, key=self.idempotency_key)


class NamedBody(Body):
    """A command about one session."""

    session_id: str = ""

    def name(self, config: Config) -> str:
        """The session's name. Raises InvalidRequest."""
        if not self.session_id:
            raise InvalidRequest("Missing session_id parameter", param="session_id")
        return name_or_node(self.session_id, config)


class StatusBody(Body):
    """Which sessions to list: one, a page of all, or all; with `responses` the states of the Responses API too."""

    session_id: str | None = None
    offset: int = Field(0, ge=0, le=MAX_ID)
    limit: int | None = Field(None, ge=0, le=MAX_ID)
    responses: bool = False


class DeleteBody(NamedBody):
    """What to forget; with `delete_prefix` also every session whose name begins with this one and a colon."""

    delete_prefix: bool = False


class ForkBody(NamedBody):
    """`copies`: the names of the new sessions; `version`: what they are copies of, the last one if it is not given."""

    copies: Texts = Field(default_factory=list)
    version: int | None = Field(None, ge=1, le=MAX_ID)

    def names(self, config: Config) -> list[str]:
        """The names of the copies. Raises InvalidRequest."""
        if not 1 <= len(self.copies) <= config.max_prompts:
            raise InvalidRequest(f"copies: 1 to {config.max_prompts} names", param="copies")
        if len(set(self.copies)) < len(self.copies) or not all(self.copies):
            raise InvalidRequest("copies: each name once, none empty", param="copies")
        return [name_or_node(name, config, f"copies[{index}]") for index, name in enumerate(self.copies)]


class RewindBody(NamedBody):
    """The version to go back to, the one before the last if it is not given."""

    version: int | None = Field(None, ge=1, le=MAX_ID)
    expect_version: int | None = Field(None, ge=0, le=MAX_ID)


class ExportBody(NamedBody):
    """The version to write, the last one if it is not given."""

    version: int | None = Field(None, ge=1, le=MAX_ID)


class ImportBody(NamedBody):
    """The name of the session to make of a file."""

    overwrite: bool = False


def name_or_node(name: str, config: Config, field: str = "session_id") -> str:
    """The name of a session, which may be "dialogue:7": longer by that than what a client may choose. Raises InvalidRequest."""
    session_name(NODE.sub("", name), config, field)
    return name


async def completions(context: RequestContext) -> Reply:
    """POST /state/chat/completions: continue a session by one turn."""
    body = validate(StateBody, with_key(context))
    if body.stream:
        return await reply_to(context, body, lambda rows: TurnChunkFormatter(rows, body.chunk_size))
    return await reply_to(context, body, lambda rows: TurnDocumentFormatter(NATIVE_ID, body.model, rows))


async def dialogue(context: RequestContext) -> Reply:
    """POST /multi_state/chat/completions: continue a node of a dialogue; the answer tells the new node's number."""
    for field in ("dialogue_idx", "session_id"):
        if field not in context.body or (field == "session_id" and context.body[field] in (None, "")):
            raise InvalidRequest(f"Missing {field} parameter", param=field)
    body = validate(DialogueBody, with_key(context))
    if body.stream:
        return await reply_to(context, body, lambda rows: DialogueChunkFormatter(rows, body.chunk_size))
    return await reply_to(context, body, lambda rows: DialogueDocumentFormatter(DIALOGUE_ID, body.model, rows))


def with_key(context: RequestContext) -> dict[str, Any]:
    """The body; an idempotency key may come in it or as a header."""
    key = context.body.get("idempotency_key")
    return context.body | {"idempotency_key": context.headers.get(KEY_HEADER) if key is None else key}


async def reply_to(
    context: RequestContext, body: StateBody, collector: Callable[[int], DocumentFormatter | ChunkFormatter]
) -> Reply:
    """Answer a turn with what `collector`, given the number of rows, makes of its events."""
    request = await context.app.to_request(context, body)
    answer = context.app.stream if body.stream else context.app.document
    return await answer(context, request, collector(len(request.prompts)).feed)


def told(kept: CommitResult) -> dict[str, Any]:
    """What an answer says of its session."""
    session = {"id": kept.name, "version": kept.version, "tokens": kept.tokens, "durable": kept.durable}
    return {"session": session | ({"replayed": True} if kept.replayed else {})}


def kept_of(finishes: dict[int, Finish]) -> CommitResult | None:
    """Where the one row of a turn was kept."""
    return finishes[0].session


class TurnDocumentFormatter(DocumentFormatter):
    """The answer to a turn: beside the usual the session and its version."""

    def body(self) -> dict[str, Any]:
        """The finished answer."""
        kept = kept_of(self.finishes)
        return super().body() | (told(kept) if kept else {})


class TurnChunkFormatter(ChunkFormatter):
    """The stream of a turn: the last chunk tells the session and its version."""

    def summary(self) -> dict[str, Any]:
        """What the last chunk carries."""
        kept = kept_of(self.finishes)
        return super().summary() | (told(kept) if kept else {})


class DialogueDocumentFormatter(TurnDocumentFormatter):
    """The answer to a turn of a dialogue, with the number of the new node."""

    def body(self) -> dict[str, Any]:
        """The finished answer."""
        kept = kept_of(self.finishes)
        return super().body() | ({"dialogue_idx": kept.node} if kept else {})


class DialogueChunkFormatter(TurnChunkFormatter):
    """The stream of a turn of a dialogue: just before [DONE] comes the number of the new node."""

    def feed(self, event: Event) -> bytes | None:
        """Take one step's events; return the bytes to send, if any."""
        sent = super().feed(event)
        if not sent or not sent.endswith(DONE) or (kept := kept_of(self.finishes)) is None:
            return sent
        node = {"object": "multi_state.dialogue_idx", "session_id": kept.name, "dialogue_idx": kept.node}
        return sent.removesuffix(DONE) + sse(node) + DONE


async def status(context: RequestContext) -> Response:
    """POST /state/status: the sessions and where they are. Without `limit` all of them, as in the reference."""
    body = validate(StatusBody, context.body)
    page = await context.app.execute(
        Status(
            namespace=context.namespace,
            name=body.session_id or None,
            offset=body.offset,
            limit=body.limit,
            responses=body.responses,
        ),
        context.model,
    )
    sessions: list[dict[str, Any]] = []
    for start in range(0, len(page.sessions), DESCRIBED_AT_ONCE):
        sessions += map(described, page.sessions[start : start + DESCRIBED_AT_ONCE])
        await asyncio.sleep(0)
    document: dict[str, Any] = {
        "status": "success",
        "total_sessions": page.total,
        "l1_cache_count": page.l1,
        "l2_cache_count": page.l2,
        "database_count": page.db,
        "sessions": sessions,
    }
    if body.limit is not None:
        reached = body.offset + len(page.sessions)
        document["next_offset"] = reached if page.sessions and reached < page.total else None
    return Response(msgspec.json.encode(document))  # ten times as fast as json for a long list


def described(entry: Entry) -> dict[str, Any]:
    """A session for people: the reference's four fields, then ours."""
    on_disk = entry.tier == "db"
    described = {
        "session_id": entry.name,
        "cache_level": CACHE_LEVELS[entry.tier],
        "last_updated": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.updated)) if on_disk else "In Memory",
        "timestamp": entry.updated if on_disk else time.time(),
        "updated": entry.updated,
        "version": entry.version,
        "tokens": entry.tokens,
        "bytes": entry.num_bytes,
    }
    return described | ({"versions": entry.versions} if entry.versions else {})


async def delete(context: RequestContext) -> Response:
    """POST /state/delete: forget a session everywhere."""
    body = validate(DeleteBody, context.body)
    name = body.name(context.config)
    deleted = await context.app.execute(
        Delete(namespace=context.namespace, name=name, prefix=body.delete_prefix), context.model
    )
    if not deleted.found and not body.delete_prefix:
        return json_reply({"status": "not_found", "message": f"Session {name} not found in database"}, 404)
    return json_reply({"status": "success", "message": f"Session {name} deleted successfully"})


async def fork(context: RequestContext) -> Response:
    """POST /state/fork: make copies of a session, all or none."""
    body = validate(ForkBody, context.body)
    command = Fork(
        namespace=context.namespace, name=body.name(context.config), copies=body.names(context.config), version=body.version
    )
    return success(await context.app.execute(command, context.model))


async def rewind(context: RequestContext) -> Response:
    """POST /state/rewind: make an earlier version the newest one."""
    body = validate(RewindBody, context.body)
    command = Rewind(
        namespace=context.namespace, name=body.name(context.config), version=body.version, expect_version=body.expect_version
    )
    return success(await context.app.execute(command, context.model))


def success(page: Page) -> Response:
    """The answer to a command that made sessions or changed one."""
    return json_reply({"status": "success", "sessions": [described(entry) for entry in page.sessions]})


async def export(context: RequestContext) -> Response:
    """POST /state/export: a session as one file, checksum and model included."""
    body = validate(ExportBody, context.body)
    name = body.name(context.config)
    async with transfers:
        with ScratchFile(context.app.folder) as file:
            page = await context.app.execute(
                Export(namespace=context.namespace, name=name, path=str(file), version=body.version), context.model
            )
            data = await asyncio.to_thread(file.read_bytes)
    headers = {"Content-Disposition": 'attachment; filename="session.rwkvstate"'}
    return Response(data, content_type=BYTES, headers=headers | {"X-Session-Version": str(page.sessions[0].version)})


async def import_file(context: RequestContext) -> Response:
    """POST /state/import?session_id=NAME: make a session of the file in the body."""
    body = validate(ImportBody, context.body)
    name = body.name(context.config)
    if not context.file:
        raise InvalidRequest("the body is empty; send the file of an export as it is")
    async with transfers:
        with ScratchFile(context.app.folder) as file:
            try:
                await asyncio.to_thread(file.write_bytes, context.file)
            except OSError as error:
                raise no_room(error) from None
            return success(
                await context.app.execute(
                    Import(namespace=context.namespace, name=name, path=str(file), overwrite=body.overwrite), context.model
                )
            )


def no_room(error: OSError) -> StorageFailed:
    """What is said when a file in transit cannot be written; it lies in TMPDIR or beside the server's sockets."""
    return StorageFailed(f"no room for the file in transit: {error.strerror}")


class ScratchFile:
    """An empty file that only we may read, for what HTTP process and engine hand each other; gone at the end."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> Path:
        try:
            handle, name = tempfile.mkstemp(dir=self.folder)
        except OSError as error:
            raise no_room(error) from None
        os.close(handle)
        self.path = Path(name)
        return self.path

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)
