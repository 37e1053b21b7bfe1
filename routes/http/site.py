"""Between Robyn and the routes: who may call, what comes in, how answers and faults go out, who has left.

A route gets a `Call` and returns a `Plain` or an `Answer`; it raises the errors of `rwkv_batch.errors` and nothing else of
interest. This module turns both into Robyn's objects and is, beside the route table and app.py, the only one that knows Robyn.
"""

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal
from urllib.parse import unquote, unquote_plus

import msgspec
from robyn import Headers, StreamingResponse
from robyn import Request as RobynRequest
from robyn import Response as RobynResponse
from robyn.robyn import get_version

from routes import schemas
from routes.http.access import OWNER, READING, Pages, Secrets, hostname, in_headers, is_loopback, present
from routes.http.connections import Cut, Hangups, Ledger, address
from routes.http.off_loop import off_loop
from rwkv_batch.config import Config
from rwkv_batch.errors import (
    BatchTooLarge,
    EngineFailed,
    Forbidden,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    RwkvBatchError,
    TooLarge,
    Unavailable,
    UnsupportedMedia,
)
from rwkv_batch.ipc.channel import Ask, EngineClient, EngineInfo, Event, Live, SessionAnswer, Ticket, error_of
from rwkv_batch.metrics import HttpMetrics
from rwkv_batch.request import Failure, Progress, Request
from rwkv_batch.session_messages import Action, Deleted, Page
from rwkv_batch.text import tokenizer
from rwkv_batch.text.translation import Memory

log = logging.getLogger(__name__)
access_log = logging.getLogger("rwkv_batch.access")

JSON = "application/json"
SSE = "text/event-stream"
DONE = b"data: [DONE]\n\n"

PLAIN_SECONDS = 1.0  # a shorter answer has its true status; a longer one is a stream, so that a client that left is noticed
BLANK_SECONDS = 0.25  # between the blanks of a long JSON answer: they hurt nobody and find out that a client left
SLICE_SECONDS = 0.25  # longest time a pool thread waits for one answer
SCAN_SECONDS = 0.02  # time between two looks for connections that were hung up
TOKENIZER_SECONDS = 10.0  # for it to load, which takes about one
ASK_SECONDS = 5.0  # for an answer of the engine about its requests
QUIET_SECONDS = 0.1  # an answer that wrote more recently finds out by itself
FILE_BYTES = 65536  # what a session's file may hold beside the state
LARGE_BODY_BYTES = 65536  # a smaller one is read in a millisecond

EXPOSED = "Retry-After, X-Request-Id, X-Should-Retry, X-Session-Version, Content-Disposition, WWW-Authenticate"
NUDGE = object()
CALLERS_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # an X-Request-Id that is taken over

dumps = json.JSONEncoder(ensure_ascii=False).encode  # blanks after , and : as the reference's answers have


def sse(document: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + dumps(document).encode() + b"\n\n"


@dataclass
class Plain:
    """A whole answer."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)


def json_reply(document: dict[str, Any], status: int = 200) -> Plain:
    """A JSON answer in the reference's form."""
    return Plain(dumps(document).encode(), status)


def error_document(error: RwkvBatchError, nested: bool = False) -> dict[str, Any]:
    """The body of an error: on a native route, or `nested` in OpenAI's form."""
    if nested:
        return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
    if isinstance(error, BatchTooLarge):
        return {"error": error.message, "request_bsz": error.size, "max_bsz": error.limit}
    return {"error": error.message}


def error_reply(error: RwkvBatchError, nested: bool = False) -> Plain:
    """An error with its status, and with Retry-After where waiting helps."""
    reply = json_reply(error_document(error, nested), error.status)
    if error.retry_after is not None:
        reply.headers["Retry-After"] = str(max(1, round(error.retry_after)))
    elif error.status == 401:
        reply.headers["WWW-Authenticate"] = 'Bearer realm="rwkv_batch"'
    elif error.status == 409 and nested:
        reply.headers["X-Should-Retry"] = "false"  # OpenAI's clients retry 409 unless they are told
    return reply


@dataclass
class Call:
    """One HTTP call as the routes see it.

    body   parsed JSON of a POST, checked for depth only; where a file is posted, what the URL gives behind ?
    body_bytes  size of that JSON as it came
    file   the bytes of that file
    peer   address it came from, "" when that is not known
    token  what the URL gives as ?token=
    params what the path gives, by the names in the table of routes
    nested whether errors have OpenAI's form
    caller name of the API key it came with, else OWNER
    given_id the caller's own X-Request-Id, "" without one
    """

    site: "Site"
    method: str
    path: str
    headers: Headers
    peer: str = ""
    token: str | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    body: dict[str, Any] = field(default_factory=dict)
    body_bytes: int = 0
    file: bytes = b""
    params: dict[str, str] = field(default_factory=dict)
    nested: bool = False
    caller: str = OWNER
    given_id: str = ""
    began: float = field(default_factory=time.monotonic)
    status: int = 200
    num_prompts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ticket: Ticket | None = None
    failed: bool = False  # after its answer had begun

    @property
    def config(self) -> Config:
        """The process's settings."""
        return self.site.config

    @property
    def namespace(self) -> str:
        """Whose sessions and cached prefixes are used; that of the password is ""."""
        return self.caller if self.config.isolate else ""


class Site:
    """What all calls of one HTTP process share: settings, engine, figures, and the answers in progress.

    folder  for files that HTTP process and engine hand each other
    """

    def __init__(self, config: Config, client: EngineClient, metrics: HttpMetrics, folder: Path):
        self.folder = folder
        self.config = config
        self.client = client
        self.metrics = metrics
        self.draining = False
        self.started = time.time()
        self.pid = os.getpid()
        self.handling = 0  # calls whose handler has not returned; event loop only
        self.large_bodies = asyncio.Lock()
        self.secrets = Secrets(config.password, config.api_keys)
        self.tokenizer: tokenizer.Tokenizer | None = None
        self.pages = Pages(config, bool(self.secrets))
        self._submitting: set[str] = set()  # requests on their way to the engine; event loop only
        self._num_opened = 0  # counted on the event loop
        self._num_closed = 0  # counted in the client's thread
        self._closed: deque[tuple[Call, str]] = deque()
        self._num_observed = 0
        self.translations = Memory(config.translate_memory_mib * 2**20)
        self.ledger = Ledger()
        self._hangups = Hangups()
        self._next_scan = 0.0
        self._next_check = 0.0
        client.tick = self.tick
        client.busy = lambda: self.active > 0
        client.observe = self.observe
        client.on_info = self.load_tokenizer

    @property
    def active(self) -> int:
        """Answers in progress."""
        return self._num_opened - self._num_closed

    @property
    def max_file_bytes(self) -> int:
        """Largest file that a session can be in."""
        info = self.client.info
        return max(self.config.max_body_bytes, info.state_bytes + FILE_BYTES if info is not None else 0)

    @property
    def idle(self) -> bool:
        """Whether no call is being handled and no answer is in progress."""
        return self.active == 0 and self.handling == 0

    # --- access ---

    def authorize(self, headers: Headers, body: dict[str, Any], token: str | None = None) -> str:
        """Who calls, by a secret in a header, in the body or as `token`. Raises Unauthorized unless all that came is right."""
        if not self.secrets:
            return OWNER
        return self.secrets.caller([*in_headers(headers), *present([body.get("password"), token])])

    def cors(self, headers: Headers | None) -> dict[str, str]:
        """Headers that let pages of the allowed origins read any answer, errors and streams too."""
        exposed = {"Access-Control-Expose-Headers": EXPOSED}
        if "*" in self.pages.readers:
            return {"Access-Control-Allow-Origin": "*", **exposed}
        origin = headers.get("origin") if headers is not None else None
        if origin is not None and origin.lower() in self.pages.readers:
            return {"Access-Control-Allow-Origin": origin, "Vary": "Origin", **exposed}
        return {"Vary": "Origin"}

    # --- work ---

    def load_tokenizer(self, info: EngineInfo) -> None:
        """Begin to load the tokenizer of the engine's vocabulary, which takes about a second."""

        def run() -> None:
            try:
                self.tokenizer = tokenizer.for_vocab(info.vocab_size)
            except Exception:
                log.exception("the tokenizer cannot be loaded")

        threading.Thread(target=run, daemon=True).start()

    def check(self) -> None:
        """Raise Unavailable or Overloaded when no further request can be answered at once."""
        self._check_room()
        if self.tokenizer is None:
            raise Unavailable("the tokenizer is still loading", code="loading", retry_after=2.0)

    def _check_room(self) -> None:
        if self.draining:
            raise Unavailable("the server is shutting down", code="draining", retry_after=5.0)
        self.client.check()
        tickets = self.client.tickets
        not_there_yet = sum(request_id not in tickets for request_id in self._submitting)
        if max(self.active, len(tickets) + not_there_yet) >= self.config.max_streams:
            raise Overloaded("too many answers are in progress", code="too_many_streams")

    async def loaded_tokenizer(self) -> tokenizer.Tokenizer:
        """The tokenizer; whoever comes while it loads waits, since another process may have said that the server is ready.

        Raises Unavailable.
        """
        deadline = time.monotonic() + TOKENIZER_SECONDS
        while self.tokenizer is None:
            self.client.check()
            if time.monotonic() > deadline:
                raise Unavailable("the tokenizer is still loading", code="loading", retry_after=2.0)
            await asyncio.sleep(0.02)
        return self.tokenizer

    async def encode(self, texts: list[str], field: str) -> list[list[int]]:
        """Tokens of each text, away from the event loop when they are long. Raises InvalidRequest, Unavailable, Overloaded."""
        self._check_room()
        encode = (await self.loaded_tokenizer()).ids
        return await off_loop(sum(map(len, texts)), schemas.prompt_ids, texts, field, self.config, encode)

    async def to_request(self, call: Call, body: schemas.PromptsBody) -> Request:
        """Check and tokenise a body, away from the event loop when it is long. Raises InvalidRequest, Unavailable."""
        texts = await off_loop(call.body_bytes, body.checked_texts, call.config)
        self._check_room()
        encode = (await self.loaded_tokenizer()).ids
        request = await off_loop(sum(map(len, texts)), body.to_request, texts, call.id, call.config, encode)
        request = msgspec.structs.replace(request, namespace=call.namespace)
        call.num_prompts = request.num_rows
        call.prompt_tokens = sum(map(len, request.prompts))
        self.metrics.num_prompts.observe(call.num_prompts)
        self.metrics.max_tokens.observe(request.max_tokens)
        if call.config.log_prompts:
            log.info("%s prompts %s", call.id, json.dumps([text[:256] for text in texts[:4]]))
        return request

    async def submit(
        self, call: Call, request: Request, translate: Callable[[Event], bytes | None], ended: asyncio.Event | None = None
    ) -> Ticket:
        """Hand a request to the engine and wait until it has taken it. Raises what the engine refuses it with.

        A turn of a session may be refused after it had to wait for another one, so its first event is awaited.
        """
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()

        def tell(event: asyncio.Event) -> Callable[[], None]:
            return lambda: loop.call_soon_threadsafe(event.set)

        self._check_room()  # again, for others came while this one was tokenised
        on_settled, on_end = tell(answered), tell(ended) if ended else None
        if request.session is not None:
            translate, on_settled = telling(translate, on_settled), None
        call.ticket = ticket = self.client.submit(request, translate, on_settled, on_end, call.path, call.given_id)
        ticket.peer = address(call.peer)
        self._submitting.add(request.id)
        try:
            await answered.wait()
        except asyncio.CancelledError:
            ticket.cancel()
            raise
        finally:
            self._submitting.discard(request.id)
        if ticket.failure is not None and ticket.first_at is None:
            raise error_of(ticket.failure)
        return ticket

    async def stream(self, call: Call, request: Request, translate: Callable[[Event], bytes | None]) -> "Answer":
        """Answer with events as they come. `translate` makes their bytes, the end or the error included."""
        ticket = await self.submit(call, request, translate)
        return Answer(call, ticket, SSE, b": ping\n", b":\n", self.config.ping_seconds)

    async def document(
        self, call: Call, request: Request, translate: Callable[[Event], bytes | Callable[[], bytes] | RwkvBatchError | None]
    ) -> "Plain | Answer":
        """Answer with one JSON document, which `translate` returns with the last event, or the error to tell instead.

        Within PLAIN_SECONDS it has its true status; after that the answer is a stream of blanks that ends in the document, or
        is cut off. Instead of a document that takes long to write, `translate` may return what writes it.
        """
        ended = asyncio.Event()
        ticket = await self.submit(call, request, translate, ended)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), PLAIN_SECONDS)
        if not ended.is_set():
            return Answer(call, ticket, JSON, b" ", b" ", min(BLANK_SECONDS, self.config.ping_seconds))
        if ticket.failure is not None:
            raise error_of(ticket.failure)
        items = []
        while (item := ticket.take(0.0)) is not Ticket.END:
            if isinstance(item, RwkvBatchError):
                raise item
            if item is not NUDGE:
                items.append(item if isinstance(item, bytes) else await asyncio.to_thread(item))
        return Plain(b"".join(items))

    async def later(self, call: Call, work: Coroutine[Any, Any, Plain]) -> "Plain | Answer":
        """Answer with what `work` comes to, as `document` does for one request; it is cancelled when the client has left."""
        task = asyncio.ensure_future(work)
        await asyncio.wait({task}, timeout=PLAIN_SECONDS)
        if task.done():
            return task.result()
        return Answer(call, Later(task), JSON, b" ", b" ", min(BLANK_SECONDS, self.config.ping_seconds))

    async def manage(self, action: Action) -> Page | Deleted:
        """What came of an order about sessions. Raises what the engine refuses it with, and Unavailable."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[SessionAnswer] = loop.create_future()

        def put(result: SessionAnswer) -> None:
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(result))

        if self.draining:
            raise Unavailable("the server is shutting down", code="draining", retry_after=5.0)
        self.client.manage(action, put)
        try:
            result = await asyncio.wait_for(answer, self.config.session_wait_seconds + ASK_SECONDS)
        except TimeoutError:
            raise Unavailable("the engine does not answer", code="engine_busy") from None
        if isinstance(result, Failure):
            raise error_of(result)
        return result

    async def ask(self, *, stop: bool = False, request_id: str | None = None, endpoint: str | None = None) -> list[Live]:
        """The requests of all HTTP processes that run or wait; with `stop` they are ended. Raises Unavailable."""
        self.client.check()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Live]] = loop.create_future()

        def put(found: list[Live]) -> None:
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(found))

        self.client.ask(Ask(secrets.token_hex(8), stop, request_id, endpoint), put)
        try:
            return await asyncio.wait_for(answer, ASK_SECONDS)
        except TimeoutError:
            raise Unavailable("the engine does not answer", code="engine_busy") from None

    # --- the client's thread ---

    def opened(self) -> None:
        """An answer begins; event loop only."""
        self._num_opened += 1
        self.metrics.streams.inc()

    def closed(self, call: Call, how: str) -> None:
        """An answer ended: "done", or "gone" when its client left. Any thread, finalisers too: no lock is taken here."""
        self._closed.append((call, how))

    def tick(self) -> None:
        """The regular turn of the client's thread: let finalisers run, wake answers whose client may be gone, keep books."""
        get_version()  # any call into Robyn makes it drop the iterators of connections that ended
        while self._closed:
            call, how = self._closed.popleft()
            self._num_closed += 1
            self.metrics.streams.dec()
            if how == "gone":
                self.metrics.disconnects.inc()
            self.finished(call, how)
        now = time.monotonic()
        if self.client.tickets and now >= self._next_scan:
            self._next_scan = now + SCAN_SECONDS
            self._nudge(self._hangups.scan(), now)
        if now >= self._next_check:
            self._next_check = now + 1.0
            self._cut_slow_readers(now)

    def _nudge(self, left: set[str], now: float) -> None:
        """After a hang-up, make each answer to that address write twice as soon as it is quiet, for it may have been left.

        The first write after a hang-up still succeeds, the second fails and ends the answer. Others write anyway.
        """
        for ticket in self.client.tickets.values():
            if ticket.peer in left or (not ticket.watched and ticket.peer in self._hangups.current):
                ticket.suspect = True
            ticket.watched = True
            if ticket.suspect and now - ticket.taken_at > QUIET_SECONDS:
                ticket.suspect = False
                ticket.queue.put(NUDGE)
                ticket.queue.put(NUDGE)

    def _cut_slow_readers(self, now: float) -> None:
        limit = self.config.stream_buffer_mib * 2**20
        for ticket in list(self.client.tickets.values()):
            unread = ticket.num_put - ticket.num_taken
            stalled = unread and now - max(ticket.taken_at, ticket.unread_since) > self.config.stream_stall_seconds
            if unread > limit or stalled:
                log.warning("%s cut off: its client does not read", ticket.request_id)
                ticket.abort(Unavailable("the client does not read", code="slow_reader"))

    def observe(self, ticket: Ticket, event: Event) -> None:
        """Count one event."""
        if not isinstance(event, Progress):
            return
        if event.deltas and ticket.incremental:
            now = time.monotonic()
            if ticket.first_at is None:
                self.metrics.first_token.observe(now - ticket.submitted_at)
            else:
                self._num_observed += 1
                if self._num_observed % 8 == 0:
                    self.metrics.inter_token.observe(now - ticket.progressed_at)
        ticket.num_tokens += sum(delta.tokens for delta in event.deltas)
        for finish in event.finishes:
            self.metrics.success.labels(finish.reason).inc()
            self.metrics.prompt_tokens.observe(finish.prompt_tokens)
            self.metrics.generation_tokens.observe(finish.completion_tokens)
            ticket.completion_tokens += finish.completion_tokens

    def finished(self, call: Call, how: str = "done") -> None:
        """Note the end of a call."""
        seconds = time.monotonic() - call.began
        ticket = call.ticket
        if call.status >= 400:
            self.metrics.refused.labels(str(call.status)).inc()
        elif ticket is not None and ticket.failure is None and how == "done":
            self.metrics.latency.observe(seconds)
        if self.config.access_log and access_log.isEnabledFor(logging.INFO):
            line = f"{call.method} {json.dumps(call.path[:256])} {call.status} id={call.id} ms={seconds * 1000:.1f}"
            line += f" key={call.caller}" if call.caller != OWNER else ""
            line += f" given_id={call.given_id}" if call.given_id else ""
            if ticket is not None:
                tokens = call.completion_tokens or max(ticket.completion_tokens, ticket.num_tokens)
                line += f" prompts={call.num_prompts} prompt_tokens={call.prompt_tokens} tokens={tokens}"
                if ticket.first_at is not None and ticket.incremental:
                    line += f" ttft_ms={(ticket.first_at - call.began) * 1000:.1f}"
                line += f" end={'error' if ticket.failure or call.failed else how}"
            access_log.info(line)


class Answer:
    """An answer in progress, pulled by Robyn from its thread pool: an iterator, because a generator that was never started
    has no finaliser.

    ping   sent when nothing was for `ping_seconds` (s)
    nudge  sent to make a write fail when the client may be gone
    """

    def __init__(self, call: Call, ticket: "Ticket | Later", content_type: str, ping: bytes, nudge: bytes, ping_seconds: float):
        self.call = call
        self.content_type = content_type
        self._ticket = ticket
        self._ping = ping
        self._nudge = nudge
        self._ping_seconds = ping_seconds
        self._wrote_at = time.monotonic()
        self._held: Any = None  # taken from the queue behind what was just returned
        self._open = True
        self._error: RwkvBatchError | None = None  # what it has failed with after it began
        self._cut = Cut(call.site.ledger)
        call.site.opened()

    def __iter__(self) -> "Answer":
        return self

    def __next__(self) -> bytes:
        """Next bytes to write, all that wait; b"" writes nothing and gives the thread back."""
        if not self._open:
            raise StopIteration
        if self._error is not None:
            return self._fail()
        item, self._held = self._held, None
        if item is None:
            try:
                item = self._ticket.take(SLICE_SECONDS)
            except Empty:
                if time.monotonic() - self._wrote_at < self._ping_seconds:
                    return b""
                self._wrote_at = time.monotonic()
                return self._ping
        if item is Ticket.END:
            self._close("done")
            raise StopIteration
        if isinstance(item, RwkvBatchError):
            self._error = item
            return self._blanks()
        self._wrote_at = time.monotonic()
        if item is NUDGE:
            return self._nudge
        return self._with_rest(item) if isinstance(item, bytes) else item()

    def _blanks(self) -> bytes:
        blanks = self._cut.blanks(self._wrote_at)
        self._wrote_at = time.monotonic()
        return blanks

    def _fail(self) -> bytes:
        """Cut the connection, for the status said success; where that cannot be done, the error is the body."""
        was_cut = self._cut.found()
        if was_cut is None:
            return self._blanks()
        self.call.failed = True
        self._close("done")
        if was_cut:
            raise StopIteration
        return dumps(error_document(self._error, self.call.nested)).encode()

    def _with_rest(self, item: bytes) -> bytes:
        parts = [item]
        while not self._ticket.queue.empty():  # nobody else takes from it
            further = self._ticket.take(0.0)
            if not isinstance(further, bytes):
                self._held = further
                break
            parts.append(further)
        return b"".join(parts) if len(parts) > 1 else item

    def _close(self, how: str) -> None:
        self._open = False
        self.call.site.closed(self.call, how)

    def __del__(self) -> None:
        """Robyn let go. Runs in any thread at any time, so it only leaves notes."""
        if self._open:
            self._ticket.cancel()
            self._close("gone")


class Later:
    """What a task of the event loop comes to, in the shape in which `Answer` takes it from a ticket."""

    def __init__(self, task: "asyncio.Task[Plain]"):
        self._task = task
        self._loop = task.get_loop()
        self.queue: SimpleQueue = SimpleQueue()
        task.add_done_callback(self._done)

    def take(self, timeout: float) -> Any:
        """Next item; queue.Empty after `timeout` seconds."""
        return self.queue.get(timeout=timeout)

    def cancel(self) -> None:
        """Nobody wants it any more. Any thread, finalisers too."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._task.cancel)

    def _done(self, task: "asyncio.Task[Plain]") -> None:
        if not task.cancelled():
            error = task.exception()
            if error is not None and not isinstance(error, RwkvBatchError):
                log.error("an answer failed", exc_info=error)
                error = EngineFailed("internal error", code="internal")
            self.queue.put(task.result().body if error is None else error)
        self.queue.put(Ticket.END)


def telling(translate: Callable[[Event], bytes | None], tell: Callable[[], None]) -> Callable[[Event], bytes | None]:
    """`translate` that calls `tell` with the first event."""
    untold = [tell]

    def watched(event: Event) -> bytes | None:
        if untold:
            untold.pop()()
        return translate(event)

    return watched


def read_body(request: RobynRequest, limit: int) -> bytes:
    """The at most `limit` bytes of a body. Raises TooLarge, and InvalidRequest for one that is compressed or was cut off."""
    declared = request.headers.get("content-length") or ""
    size = int(declared) if declared.isdecimal() and len(declared) < 20 else None
    if (size is not None and size > limit) or len(request.body) > limit:
        raise TooLarge(f"the body is over {limit / 2**20:.4g} MiB")
    if (request.headers.get("content-type") or "").lower().startswith("multipart/"):
        raise UnsupportedMedia("forms of several parts are not read; send JSON")
    if (request.headers.get("content-encoding") or "identity").lower() != "identity":
        raise InvalidRequest("compressed bodies are not read; send it as it is", code="content_encoding")
    body = request.body.encode() if isinstance(request.body, str) else bytes(request.body)
    if len(body) > limit:
        raise TooLarge(f"the body is over {limit / 2**20:.4g} MiB")
    if size is not None and len(body) != size:
        raise InvalidRequest("the body was cut off")
    return body


async def json_body(call: Call, request: RobynRequest, *, public: bool, may_be_empty: bool) -> dict[str, Any]:
    """The object in a call's body.

    Large bodies are looked at one at a time and by slices, and where a secret is needed that no header brought, it is found
    before the rest takes memory. Raises TooLarge, InvalidRequest, Unauthorized.
    """
    site = call.site
    call.body_bytes = len(request.body)
    if call.body_bytes <= LARGE_BODY_BYTES:
        data = read_body(request, site.config.max_body_bytes)
        return {} if may_be_empty and not data else schemas.parse(data, site.config)
    async with site.large_bodies:
        data = read_body(request, site.config.max_body_bytes)
        for _ in schemas.inspect(data, site.config):
            await asyncio.sleep(0)
        if not public and site.secrets and not in_headers(call.headers):
            site.authorize(call.headers, {"password": schemas.password_in(data)}, call.token)
        return schemas.read(data)


PROXY_HEADERS = ("x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "forwarded", "via")


def from_this_host(call: Call) -> bool:
    """Whether a call came over the loopback interface and not through a proxy, as far as can be seen.

    A proxy that adds no header of its own gives itself away by the client's Host, or as nginx does by closing the connection.
    """
    if any(call.headers.get(name) is not None for name in PROXY_HEADERS):
        return False
    if not is_loopback(hostname(call.headers.get("host") or "")) or (call.headers.get("connection") or "").lower() == "close":
        return False
    try:
        address = ipaddress.ip_address(call.peer)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


# admin: not with an API key; translate: open to this host, or to all by --open-translate
Access = Literal["password", "admin", "open", "translate"]
Form = Literal["native", "openai", "chat"]  # of errors; chat: OpenAI's unless the body is clearly native
Reads = Literal["nothing", "json", "file"]
Handler = Callable[[Call], Awaitable[Plain | Answer]]


def endpoint(
    site: Site,
    handler: Handler,
    *,
    access: Access,
    form: Form = "native",
    reads: Reads = "nothing",
    may_be_empty: bool = False,
) -> Callable[[RobynRequest], Awaitable[Any]]:
    """What Robyn calls for one route: read, authorise, handle, and turn every fault into an answer."""

    async def handle(request: RobynRequest) -> RobynResponse | StreamingResponse:
        call = Call(site, request.method, request.url.path, request.headers, request.ip_addr or "")
        call.params = dict(request.path_params)
        call.nested = form == "openai"
        given_id = request.headers.get("x-request-id")
        call.given_id = given_id if given_id is not None and CALLERS_ID.fullmatch(given_id) else ""
        public = access == "open"
        if access == "translate":
            call.token = token_of(site, request.query_params.get("token", None))
            public = site.config.open_translate or (site.config.local_translate and from_this_host(call))
        site.handling += 1
        try:
            site.pages.check(request.headers, acts=request.method not in READING and access != "translate")
            if in_headers(request.headers) and not public:
                site.authorize(request.headers, {})
            if reads == "json":
                call.body = await json_body(call, request, public=public, may_be_empty=may_be_empty)
            elif reads == "file":
                call.body = {key: unquote_plus(values[-1]) for key, values in request.query_params.to_dict().items()}
                call.file = read_body(request, site.max_file_bytes)
            if not public:
                call.caller = site.authorize(request.headers, call.body, call.token)
            if access == "admin" and call.caller != OWNER:
                raise Forbidden("this route needs the server's password; an API key is not enough")
            reply = await handler(call)
        except Exception as error:  # not kept: its traceback keeps this frame, and so the body, until the next collection
            call.nested = call.nested or (form == "chat" and not is_native(call.body or request.body))
            reply = failure_reply(call, error)
        finally:
            site.handling -= 1
        return to_robyn(call, reply)

    return handle


def token_of(site: Site, text: str | None) -> str | None:
    """The secret in the URL, which Robyn does not decode; a plus sign is a blank unless the secret has one."""
    if text is None:
        return None
    as_sent = unquote(text)
    return as_sent if site.secrets.knows(as_sent) else unquote_plus(text)


def failure_reply(call: Call, error: Exception) -> Plain:
    """The answer to a call that raised; what is none of our errors is logged and not told."""
    if isinstance(error, RwkvBatchError):
        return error_reply(error, call.nested)
    log.error("%s failed", call.id, exc_info=error)
    return error_reply(EngineFailed("internal error", code="internal"), call.nested)


NATIVE_FIELDS = ("contents", "text_list", "prefix", "suffix", "dialogue_idx", "chats")


def is_native(body: dict[str, Any] | str | bytes) -> bool:
    """Whether a body is clearly not OpenAI's form of a chat; it may be one that could not be parsed."""
    if isinstance(body, dict):
        return any(field in body for field in NATIVE_FIELDS)
    quoted = (f'"{field}"' for field in NATIVE_FIELDS)
    return any((field if isinstance(body, str) else field.encode()) in body for field in quoted)


def to_robyn(call: Call, reply: Plain | Answer) -> RobynResponse | StreamingResponse:
    """Robyn's form of an answer, with the headers that all have."""
    common = {"X-Request-Id": call.given_id or call.id, "Content-Type": reply.content_type}
    headers = Headers({**common, **call.site.cors(call.headers)})
    if isinstance(reply, Answer):
        return StreamingResponse(reply, headers=headers, media_type=reply.content_type)
    for name, value in reply.headers.items():
        headers.set(name, value)
    call.status = reply.status
    call.site.finished(call)
    return RobynResponse(status_code=reply.status, headers=headers, description=reply.body)


async def preflight(call: Call) -> Plain:
    """The answer to OPTIONS on any path."""
    asked = call.headers.get("access-control-request-headers")
    headers = {
        "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": asked or "Content-Type, Authorization",
        "Access-Control-Max-Age": "86400",
    }
    if (call.headers.get("access-control-request-private-network") or "").lower() == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    return Plain(b"", 204, headers=headers)


def unknown(methods_by_path: Mapping[str, list[str]]) -> Handler:
    """What answers where no route does: 405 on a known path, else 404."""

    async def handle(call: Call) -> Plain:
        call.nested = call.path.startswith(("/openai/", "/v1/"))
        methods = methods_by_path.get(call.path)
        if methods is None:
            raise NotFound("Not found")
        reply = error_reply(MethodNotAllowed("Method not allowed"), call.nested)
        reply.headers["Allow"] = ", ".join(methods)
        return reply

    return handle
