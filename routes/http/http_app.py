"""What all calls of one HTTP process share, and what routes ask of it."""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from routes import schemas
from routes.http import variants
from routes.http.access import OWNER, Headers, Pages, Secrets, in_headers, present
from routes.http.connections import Ledger
from routes.http.context import RequestContext
from routes.http.disconnects import DisconnectMonitor, address
from routes.http.figures import CallFigures
from routes.http.off_loop import off_loop
from routes.http.replies import Response
from routes.http.served import Models, ServedModel
from routes.http.streams import DOCUMENT, EVENTS, NUDGE, FormatEvent, Framing, Reply, StreamingAnswer, TaskAnswer, notify_first
from rwkv_batch.config import Config
from rwkv_batch.errors import NotBegun, Overloaded, RwkvBatchError, Unavailable
from rwkv_batch.grammar.checker import Checker, refuse
from rwkv_batch.ipc.client import EngineClient
from rwkv_batch.ipc.link import SessionAnswer
from rwkv_batch.ipc.messages import Ask, Live
from rwkv_batch.ipc.tickets import Ticket
from rwkv_batch.metrics import HttpMetrics
from rwkv_batch.request import Event, Failure, Grammar, Request
from rwkv_batch.served.variants import VariantOrder
from rwkv_batch.session_messages import SessionCommand
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.text.translation import Memory

log = logging.getLogger(__name__)

PLAIN_SECONDS = 1.0  # a shorter answer has its true status; a longer one is a stream, so that a client that left is noticed
BLANK_SECONDS = 0.25  # between the blanks of a long JSON answer: they hurt nobody and find out that a client left
TOKENIZER_SECONDS = 10.0  # for it to load, which takes about one
ASK_SECONDS = 5.0  # for an answer of the engine about its requests
FILE_BYTES = 65536  # what a session's file may hold beside the state
EXPOSED = "Retry-After, X-Request-Id, Request-Id, X-Should-Retry, X-Session-Version, Content-Disposition, WWW-Authenticate"


class HttpApp:
    """What all calls of one HTTP process share: settings, engine, figures, and the answers in progress.

    folder  for files that HTTP process and engine hand each other
    models  that the engines run; None = one, which all of them do
    """

    def __init__(self, config: Config, client: EngineClient, metrics: HttpMetrics, folder: Path, models: Models | None = None):
        self.folder = folder
        self.config = config
        self.client = client
        self.models = models or Models.one(client, config.model_name)
        self.metrics = metrics
        self.draining = False
        self.started = time.time()
        self.pid = os.getpid()
        self.handling = 0  # calls whose handler has not returned; event loop only
        self.large_bodies = asyncio.Lock()
        self.secrets = Secrets(config.password, config.api_keys)
        self.grammars = Checker(config.grammar_seconds)
        self.pages = Pages(config, bool(self.secrets))
        self._submitting: set[str] = set()  # requests on their way to the engine; event loop only
        self.translations = Memory(config.translate_memory_mib * 2**20)
        self.ledger = Ledger()
        self.release_iterators: Callable[[], object] = lambda: None  # has Robyn drop those of connections that ended
        self.figures = CallFigures(metrics, logs=config.access_log)
        self.disconnects = DisconnectMonitor(client, config)
        client.tick = self.tick
        client.busy = lambda: self.figures.active > 0
        client.observe = self.figures.observe
        client.on_info = self.models.tokenizers.want

    @property
    def max_file_bytes(self) -> int:
        """Largest file that a session can be in."""
        largest = max((model.info.state_bytes for model in self.models.all if model.info is not None), default=None)
        return max(self.config.max_body_bytes, largest + FILE_BYTES if largest is not None else 0)

    @property
    def idle(self) -> bool:
        """Whether no call is being handled and no answer is in progress."""
        return self.figures.active == 0 and self.handling == 0

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

    def check(self) -> None:
        """Raise Unavailable or Overloaded when no further request can be answered at once."""
        self._check_room(self.models.default)
        if self.models.default.tokenizer is None:
            raise NotBegun("the tokenizer is still loading", code="loading", retry_after=2.0)

    def _check_room(self, model: ServedModel) -> None:
        if self.draining:
            raise NotBegun("the server is shutting down", code="draining", retry_after=5.0)
        model.engines.check()
        tickets = self.client.tickets
        not_there_yet = sum(request_id not in tickets for request_id in self._submitting)
        if max(self.figures.active, len(tickets) + not_there_yet) >= self.config.max_streams:
            raise Overloaded("too many answers are in progress", code="too_many_streams")

    async def loaded_tokenizer(self, model: ServedModel) -> Tokenizer:
        """A model's tokenizer. Whoever comes while it loads waits: another process may have said that the server is ready.

        Raises Unavailable.
        """
        deadline = time.monotonic() + TOKENIZER_SECONDS
        while (found := model.tokenizer) is None:
            model.engines.check()
            if time.monotonic() > deadline:
                raise NotBegun("the tokenizer is still loading", code="loading", retry_after=2.0)
            await asyncio.sleep(0.02)
        return found

    async def encode(self, context: RequestContext, texts: list[str], field: str) -> list[list[int]]:
        """Tokens of each text, away from the event loop when they are long. Raises InvalidRequest, Unavailable, Overloaded."""
        self._check_room(context.model)
        encode = (await self.loaded_tokenizer(context.model)).ids
        return await off_loop(sum(map(len, texts)), schemas.prompt_ids, texts, field, self.config, encode)

    async def to_request(self, context: RequestContext, body: schemas.PromptsBody) -> Request:
        """Check and tokenise a body, away from the event loop when it is long. Raises InvalidRequest, Unavailable."""
        model = context.model
        variant = await variants.choose(context, body)
        body = variants.with_defaults(body, variant).of_model(model.entry.defaults)
        texts = await off_loop(context.body_bytes, body.checked_texts, context.config)
        self._check_room(model)
        encode = (await self.loaded_tokenizer(model)).ids
        request = await off_loop(sum(map(len, texts)), body.to_request, texts, context.id, context.config, encode)
        own = variants.fields_of(body, variant)
        request = msgspec.structs.replace(request, namespace=context.namespace, **own)
        variants.check_mixed(request)
        if variant is not None:
            self.metrics.variants.labels(variant.name).inc()
        if request.grammar is not None:
            await self.check_grammar(request.grammar)
        context.num_prompts = request.num_rows
        context.prompt_tokens = sum(map(len, request.prompts))
        self.metrics.num_prompts.observe(context.num_prompts)
        self.metrics.max_tokens.observe(request.max_tokens)
        if context.config.log_prompts:
            log.info("%s prompts %s", context.id, json.dumps([text[:256] for text in texts[:4]]))
        return request

    async def check_grammar(self, wanted: Grammar) -> None:
        """Have a grammar compiled where it hurts nobody. Raises InvalidRequest, Overloaded, Unavailable."""
        answer = asyncio.wrap_future(self.grammars.submit(wanted))
        refuse(wanted, await asyncio.shield(answer))  # others may wait for the same

    async def submit(
        self,
        context: RequestContext,
        request: Request,
        format_event: FormatEvent,
        ended: asyncio.Event | None = None,
    ) -> Ticket:
        """Hand a request to the engine and wait until it has taken it. Raises what the engine refuses it with.

        A turn of a session may be refused after it had to wait for another one, so its first event is awaited.
        """
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()

        def notify(event: asyncio.Event) -> Callable[[], None]:
            return lambda: loop.call_soon_threadsafe(event.set)

        self._check_room(context.model)  # again, for others came while this one was tokenised
        on_answer, on_end = notify(answered), notify(ended) if ended else None
        if request.session is not None:
            format_event, on_answer = notify_first(format_event, on_answer), None
        context.ticket = ticket = context.model.engines.submit(
            request, format_event, on_answer, on_end, context.path, context.given_id
        )
        ticket.reader.peer = address(context.peer)
        self._submitting.add(request.id)
        try:
            await answered.wait()
        except asyncio.CancelledError:
            ticket.cancel()
            raise
        finally:
            self._submitting.discard(request.id)
        if ticket.failure is not None and ticket.first_at is None:
            raise ticket.failure.exception()
        return ticket

    async def stream(
        self, context: RequestContext, request: Request, format_event: FormatEvent, framing: Framing = EVENTS
    ) -> StreamingAnswer:
        """Answer with events as they come. `format_event` makes their bytes, the end or the error included."""
        ticket = await self.submit(context, request, format_event)
        return StreamingAnswer(context, ticket, framing, self.config.ping_seconds)

    async def document(
        self,
        context: RequestContext,
        request: Request,
        format_event: Callable[[Event], bytes | Callable[[], bytes] | RwkvBatchError | None],
    ) -> Reply:
        """Answer with one JSON document, which `format_event` returns with the last event, or the error to tell instead.

        Within PLAIN_SECONDS it has its true status; after that the answer is a stream of blanks that ends in the document, or
        is cut off. Instead of a document that takes long to write, `format_event` may return what writes it.
        """
        ended = asyncio.Event()
        ticket = await self.submit(context, request, format_event, ended)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), PLAIN_SECONDS)
        if not ended.is_set():
            return StreamingAnswer(context, ticket, DOCUMENT, min(BLANK_SECONDS, self.config.ping_seconds))
        return await self.gathered(ticket)

    async def gathered(self, ticket: Ticket) -> Response:
        """The document of a ticket that has ended. Raises what the request failed with."""
        if ticket.failure is not None:
            raise ticket.failure.exception()
        items = []
        while (item := ticket.take(0.0)) is not Ticket.END:
            if isinstance(item, RwkvBatchError):
                raise item
            if item is not NUDGE:
                items.append(item if isinstance(item, bytes) else await asyncio.to_thread(item))
        return Response(b"".join(items))

    async def answer_when_done(self, context: RequestContext, work: Coroutine[Any, Any, Response]) -> Reply:
        """Answer with what `work` comes to, as `document` does for one request; it is cancelled when the client has left."""
        task = asyncio.ensure_future(work)
        await asyncio.wait({task}, timeout=PLAIN_SECONDS)
        if task.done():
            return task.result()
        return StreamingAnswer(context, TaskAnswer(task), DOCUMENT, min(BLANK_SECONDS, self.config.ping_seconds))

    async def execute(self, command: SessionCommand | VariantOrder, model: ServedModel | None = None) -> Any:
        """What came of a command about a model's sessions or variants, the default one's where none is given.

        Raises what the engine refuses it with, and Unavailable.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[SessionAnswer] = loop.create_future()

        def put(result: SessionAnswer) -> None:
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(result))

        if self.draining:
            raise NotBegun("the server is shutting down", code="draining", retry_after=5.0)
        (model or self.models.default).engines.execute(command, put)
        try:
            result = await asyncio.wait_for(answer, self.config.session_wait_seconds + ASK_SECONDS)
        except TimeoutError:
            raise Unavailable("the engine does not answer", code="engine_busy") from None
        if isinstance(result, Failure):
            raise result.exception()
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

    def tick(self) -> None:
        """The regular turn of the client's thread: let finalisers run, wake answers whose client may be gone, keep books."""
        self.release_iterators()
        self.figures.count_closed()
        self.disconnects.look(time.monotonic())
        self.models.tick()
