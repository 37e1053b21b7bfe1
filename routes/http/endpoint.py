"""Between Robyn and the routes: what comes in, how answers and faults go out.

A route gets a `Call` and returns a `Plain` or an `Answer`; it raises the errors of `rwkv_batch.errors` and nothing else of
interest. This module turns both into Robyn's objects and is, beside the route table and the start of the process, the only one
that knows Robyn.
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
from routes.http.context import Access, Call, Form, FormOf, Handler
from routes.http.replies import Plain, error_reply
from routes.http.site import Site
from routes.http.streams import Answer
from rwkv_batch.errors import (
    EngineFailed,
    Forbidden,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RwkvBatchError,
    TooLarge,
    UnsupportedMedia,
)

log = logging.getLogger(__name__)

LARGE_BODY_BYTES = 65536  # a smaller one is read in a millisecond
CALLERS_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # an X-Request-Id that is taken over

Reads = Literal["nothing", "json", "file"]


def endpoint(
    site: Site,
    handler: Handler,
    *,
    access: Access,
    form: Form | FormOf = "native",
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
            public = site.config.open_translate or (site.config.local_translate and from_this_host(call.headers, call.peer))
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
            if callable(form) and not call.nested:
                call.nested = form(call.body or request.body) == "openai"
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


def to_robyn(call: Call, reply: Plain | Answer) -> RobynResponse | StreamingResponse:
    """Robyn's form of an answer, with the headers that all have."""
    common = {"X-Request-Id": call.given_id or call.id, "Content-Type": reply.content_type}
    headers = Headers({**common, **call.site.cors(call.headers)})
    if isinstance(reply, Answer):
        return StreamingResponse(reply, headers=headers, media_type=reply.content_type)
    for name, value in reply.headers.items():
        headers.set(name, value)
    call.status = reply.status
    call.site.figures.finished(call)
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


def release_iterators() -> None:
    """Have Robyn drop the iterators of connections that ended: any call into it does."""
    get_version()
