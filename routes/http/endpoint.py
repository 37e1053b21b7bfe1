"""Between Robyn and the routes: what comes in, how answers and faults go out.

A route gets a `RequestContext` and returns a `Response` or a `StreamingAnswer`; it raises the errors of `rwkv_batch.errors` and
nothing else of interest. This module turns both into Robyn's objects and is, beside the route table and the start of the
process, the only one that knows Robyn.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal
from urllib.parse import unquote, unquote_plus

from robyn import Headers, StreamingResponse
from robyn import Request as RobynRequest
from robyn import Response as RobynResponse
from robyn.robyn import get_version

from routes import schemas
from routes.http.access import OWNER, READING, from_this_host, in_headers
from routes.http.context import Access, FormOf, Handler, RequestContext
from routes.http.http_app import HttpApp
from routes.http.replies import Form, Response, error_reply
from routes.http.streams import Reply, StreamingAnswer
from rwkv_batch.errors import (
    EngineFailed,
    Forbidden,
    InvalidRequest,
    MethodNotAllowed,
    NotBegun,
    NotFound,
    RwkvBatchError,
    TooLarge,
    UnsupportedMedia,
)

log = logging.getLogger(__name__)

ELSEWHERE = "x-retry-elsewhere"  # sent by a proxy that asks another server when one answers TOO_EARLY
TOO_EARLY = 425
LARGE_BODY_BYTES = 65536  # a smaller one is read in a millisecond
CALLERS_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # an X-Request-Id that is taken over

Reads = Literal["nothing", "json", "file"]


def endpoint(
    app: HttpApp,
    handler: Handler,
    *,
    access: Access,
    form: Form | FormOf = "native",
    reads: Reads = "nothing",
    may_be_empty: bool = False,
) -> Callable[[RobynRequest], Awaitable[Any]]:
    """What Robyn calls for one route: read, authorise, handle, and turn every fault into an answer."""

    async def handle(request: RobynRequest) -> RobynResponse | StreamingResponse:
        context = RequestContext(app, request.method, request.url.path, request.headers, request.ip_addr or "")
        context.params = dict(request.path_params)
        context.form = "native" if callable(form) else form
        given_id = request.headers.get("x-request-id")
        context.given_id = given_id if given_id is not None and CALLERS_ID.fullmatch(given_id) else ""
        public = access == "open"
        if access == "translate":
            context.token = token_of(app, request.query_params.get("token", None))
            public = app.config.open_translate or (app.config.local_translate and from_this_host(context.headers, context.peer))
        app.handling += 1
        try:
            app.pages.check(request.headers, acts=request.method not in READING and access != "translate")
            if in_headers(request.headers) and not public:
                app.authorize(request.headers, {})
            if reads == "json":
                context.body = await json_body(context, request, public=public, may_be_empty=may_be_empty)
            elif reads == "file":
                context.body = {key: unquote_plus(values[-1]) for key, values in request.query_params.to_dict().items()}
                context.file = read_body(request, app.max_file_bytes)
            if not public:
                context.caller = app.authorize(request.headers, context.body, context.token)
            if access == "admin" and context.caller != OWNER:
                raise Forbidden("this route needs the server's password; an API key is not enough")
            reply = await handler(context)
        except Exception as error:  # not kept: its traceback keeps this frame, and so the body, until the next collection
            if callable(form) and context.form == "native":
                context.form = form(context.body or request.body)
            reply = failure_reply(context, error)
        finally:
            app.handling -= 1
        return to_robyn(context, reply)

    return handle


def token_of(app: HttpApp, text: str | None) -> str | None:
    """The secret in the URL, which Robyn does not decode; a plus sign is a blank unless the secret has one."""
    if text is None:
        return None
    as_sent = unquote(text)
    return as_sent if app.secrets.knows(as_sent) else unquote_plus(text)


def failure_reply(context: RequestContext, error: Exception) -> Response:
    """The answer to a call that raised; what is none of our errors is logged and not told."""
    if isinstance(error, RwkvBatchError):
        reply = error_reply(error, context.form)
        if isinstance(error, NotBegun) and context.headers.get(ELSEWHERE):
            reply.status = TOO_EARLY
        return reply
    log.error("%s failed", context.id, exc_info=error)
    return error_reply(EngineFailed("internal error", code="internal"), context.form)


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


async def json_body(context: RequestContext, request: RobynRequest, *, public: bool, may_be_empty: bool) -> dict[str, Any]:
    """The object in a call's body.

    Large bodies are looked at one at a time and by slices, and where a secret is needed that no header brought, it is found
    before the rest takes memory. Raises TooLarge, InvalidRequest, Unauthorized.
    """
    app = context.app
    context.body_bytes = len(request.body)
    if context.body_bytes <= LARGE_BODY_BYTES:
        data = read_body(request, app.config.max_body_bytes)
        return {} if may_be_empty and not data else schemas.parse(data, app.config)
    async with app.large_bodies:
        data = read_body(request, app.config.max_body_bytes)
        for _ in schemas.inspect(data, app.config):
            await asyncio.sleep(0)
        if not public and app.secrets and not in_headers(context.headers):
            app.authorize(context.headers, {"password": schemas.password_in(data)}, context.token)
        return schemas.read(data)


def to_robyn(context: RequestContext, reply: Reply) -> RobynResponse | StreamingResponse:
    """Robyn's form of an answer, with the headers that all have."""
    common = {"X-Request-Id": context.given_id or context.id, "Content-Type": reply.content_type}
    if context.form == "anthropic":
        common["Request-Id"] = common["X-Request-Id"]
    headers = Headers({**common, **context.app.cors(context.headers)})
    if isinstance(reply, StreamingAnswer):
        return StreamingResponse(reply, headers=headers, media_type=reply.content_type)
    for name, value in reply.headers.items():
        headers.set(name, value)
    context.status = reply.status
    context.app.figures.finished(context)
    return RobynResponse(status_code=reply.status, headers=headers, description=reply.body)


async def preflight(context: RequestContext) -> Response:
    """The answer to OPTIONS on any path."""
    asked = context.headers.get("access-control-request-headers")
    headers = {
        "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": asked or "Content-Type, Authorization",
        "Access-Control-Max-Age": "86400",
    }
    if (context.headers.get("access-control-request-private-network") or "").lower() == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    return Response(b"", 204, headers=headers)


def unknown(methods_by_path: Mapping[str, list[str]]) -> Handler:
    """What answers where no route does: 405 on a known path, else 404."""

    async def handle(context: RequestContext) -> Response:
        context.form = form_of_path(context)
        methods = methods_by_path.get(context.path)
        if methods is None:
            raise NotFound("Not found")
        reply = error_reply(MethodNotAllowed("Method not allowed"), context.form)
        reply.headers["Allow"] = ", ".join(methods)
        return reply

    return handle


def form_of_path(context: RequestContext) -> Form:
    """The form of errors where there is no route: what the client says that it speaks, else what the path looks like."""
    if context.headers.get("anthropic-version") is not None:
        return "anthropic"
    return "openai" if context.path.startswith(("/openai/", "/v1/")) else "native"


def release_iterators() -> None:
    """Have Robyn drop the iterators of connections that ended: any call into it does."""
    get_version()
