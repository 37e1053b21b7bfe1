"""What goes out: JSON documents, events, and errors in the form of each dialect."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from rwkv_batch.errors import BatchTooLarge, Overloaded, RwkvBatchError

JSON = "application/json"
SSE = "text/event-stream"
NDJSON = "application/x-ndjson"
DONE = b"data: [DONE]\n\n"

Form = Literal["native", "openai", "anthropic"]  # of errors
ANTHROPIC_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    529: "overloaded_error",
}  # fmt: skip

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


def status_of(error: RwkvBatchError, form: Form) -> int:
    """The status of an error; Anthropic's clients know a full queue as 529."""
    return 529 if form == "anthropic" and isinstance(error, Overloaded) else error.status


def error_document(error: RwkvBatchError, form: Form = "native") -> dict[str, Any]:
    """The body of an error."""
    if form == "anthropic":
        status = status_of(error, form)
        kind = ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    if form == "openai":
        return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
    if isinstance(error, BatchTooLarge):
        return {"error": error.message, "request_bsz": error.size, "max_bsz": error.limit}
    return {"error": error.message}


def error_reply(error: RwkvBatchError, form: Form = "native") -> Response:
    """An error with its status, and with Retry-After where waiting helps."""
    reply = json_reply(error_document(error, form), status_of(error, form))
    if error.retry_after is not None:
        reply.headers["Retry-After"] = str(max(1, round(error.retry_after)))
    elif error.status == 401:
        reply.headers["WWW-Authenticate"] = 'Bearer realm="rwkv_batch"'
    elif error.status == 409 and form != "native":
        reply.headers["X-Should-Retry"] = "false"  # the SDKs retry 409 unless they are told
    return reply
