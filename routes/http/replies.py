"""What goes out: JSON documents, events, and errors in the form of either dialect."""

import json
from dataclasses import dataclass, field
from typing import Any

from rwkv_batch.errors import BatchTooLarge, RwkvBatchError

JSON = "application/json"
SSE = "text/event-stream"
DONE = b"data: [DONE]\n\n"

dumps = json.JSONEncoder(ensure_ascii=False).encode  # blanks after , and : as the reference's answers have


def sse(document: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + dumps(document).encode() + b"\n\n"


@dataclass
class Response:
    """A whole answer."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)


def json_reply(document: dict[str, Any], status: int = 200) -> Response:
    """A JSON answer in the reference's form."""
    return Response(dumps(document).encode(), status)


def error_document(error: RwkvBatchError, nested: bool = False) -> dict[str, Any]:
    """The body of an error: on a native route, or `nested` in OpenAI's form."""
    if nested:
        return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
    if isinstance(error, BatchTooLarge):
        return {"error": error.message, "request_bsz": error.size, "max_bsz": error.limit}
    return {"error": error.message}


def error_reply(error: RwkvBatchError, nested: bool = False) -> Response:
    """An error with its status, and with Retry-After where waiting helps."""
    reply = json_reply(error_document(error, nested), error.status)
    if error.retry_after is not None:
        reply.headers["Retry-After"] = str(max(1, round(error.retry_after)))
    elif error.status == 401:
        reply.headers["WWW-Authenticate"] = 'Bearer realm="rwkv_batch"'
    elif error.status == 409 and nested:
        reply.headers["X-Should-Retry"] = "false"  # OpenAI's clients retry 409 unless they are told
    return reply
