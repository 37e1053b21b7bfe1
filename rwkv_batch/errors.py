"""The few exceptions a caller can meet, each with its HTTP meaning.

Knows nothing of HTTP libraries: `status` is a number, `kind` and `code` are words for the error body, `param` names the
field at fault. Anything else that is raised is a defect and becomes a 500 without detail.
"""


class RwkvBatchError(Exception):
    """Base of all designed errors; `str(error)` is one line meant for the person who caused it."""

    status = 500
    kind = "server_error"
    code: str | None = None
    retry_after: float | None = None  # seconds, when trying again can help

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, retry_after: float | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        if retry_after is not None:
            self.retry_after = retry_after


class InvalidRequest(RwkvBatchError):
    """The request can never work as it is; `param` names the field."""

    status, kind = 400, "invalid_request_error"


class BatchTooLarge(InvalidRequest):
    """More prompts than one request may have; `size` came, `limit` are allowed (numbers of prompts)."""

    code = "batch_too_large"

    def __init__(self, size: int, limit: int, *, param: str | None = None):
        super().__init__(f"bsz overflow, Max bsz={limit}", param=param)
        self.size = size
        self.limit = limit


class NotInstalled(InvalidRequest):
    """The request needs an optional package that this server lacks; the message says how to install it."""

    code = "not_installed"


class Unauthorized(RwkvBatchError):
    """The password is missing or wrong."""

    status, kind, code = 401, "authentication_error", "invalid_api_key"


class Forbidden(RwkvBatchError):
    """The caller is known and may not do this."""

    status, kind, code = 403, "permission_error", "not_allowed"


class NotFound(RwkvBatchError):
    """No such route, model or session."""

    status, kind = 404, "not_found_error"


class MethodNotAllowed(RwkvBatchError):
    """The path is there, but not for this method."""

    status, kind = 405, "invalid_request_error"


class Conflict(RwkvBatchError):
    """The thing asked for is in use: a session in another turn."""

    status, kind = 409, "conflict_error"


class PreconditionFailed(RwkvBatchError):
    """The session is not at the version the caller expects."""

    status, kind, code = 412, "conflict_error", "version_mismatch"


class TooLarge(RwkvBatchError):
    """The body is over its limit."""

    status, kind, code = 413, "invalid_request_error", "body_too_large"


class UnsupportedMedia(RwkvBatchError):
    """The body is of a kind that no route reads."""

    status, kind, code = 415, "invalid_request_error", "content_type"


class Unprocessable(RwkvBatchError):
    """An idempotency key came again with another request, or a stored state cannot be used."""

    status, kind = 422, "invalid_request_error"


class Overloaded(RwkvBatchError):
    """The queue is full; trying again later can help."""

    status, kind, code, retry_after = 429, "rate_limit_error", "queue_full", 1.0


class Unavailable(RwkvBatchError):
    """The server is loading, draining, or has lost its engine."""

    status, kind, code, retry_after = 503, "service_unavailable", "unavailable", 1.0


class NotBegun(Unavailable):
    """Nothing of the request was done here, and nothing will be: another server may be asked."""


class StorageFailed(RwkvBatchError):
    """The disk refused a session's state: the turn is not kept, what was stored before is."""

    status, kind, code = 507, "server_error", "storage_failed"


class StorageFull(StorageFailed):
    """There is no room for it, on the disk or in what the file may take."""


class NoRoom(RwkvBatchError):
    """There is no memory set aside for what is to be loaded."""

    status, kind, code = 507, "server_error", "no_room"


class EngineFailed(RwkvBatchError):
    """A step failed, or a row's logits were not finite; the request's result is lost, the server goes on."""

    status, kind, code = 500, "server_error", "engine_failed"


class CheckpointError(RwkvBatchError):
    """A model file cannot be used: one line saying which file and why. At the start the process exits with 2."""

    status, kind, code = 422, "invalid_request_error", "unusable_file"


class NoMemory(CheckpointError):
    """The model does not fit into memory; the message says how much is needed and how much is free."""

    status, kind, code = 507, "server_error", "not_enough_memory"


class UsageError(RwkvBatchError):
    """A flag, an environment variable or a setting is wrong. At the start the process exits with 2."""

    status, kind = 400, "invalid_request_error"
