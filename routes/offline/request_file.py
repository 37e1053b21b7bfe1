"""IN: one request a line, in the format of OpenAI's Batch API. Read as a stream; no line takes more memory than a body may."""

from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import msgspec

from routes import schemas
from routes.http.context import Handler
from routes.openai import chat, responses
from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest, RwkvBatchError, TooLarge

HANDLERS: dict[str, Handler] = {
    "/v1/chat/completions": chat.chat_completions,
    "/v1/completions": chat.completions,
    "/v1/responses": responses.create,
    "/v1/embeddings": chat.embeddings,
}
ENVELOPE_BYTES = 65536  # of a line beside its body
MAX_NOTED = 1_000_000  # ids that are remembered to tell of those that come again: some 100 MB
BOM = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """One line that is not blank. `number` counts all lines from 1; `data` is None for one that is too long."""

    number: int
    data: bytes | None


class _Id(msgspec.Struct):
    custom_id: str | None = None


_read_id = msgspec.json.Decoder(_Id).decode


def id_of(data: bytes | None) -> str | None:
    """The custom_id of a line of either file, without reading the rest; None where there is none to be read."""
    try:
        return None if data is None else _read_id(data).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class RequestFile:
    """The lines of IN, one after the other.

    num_bytes     how far it was read
    num_repeated  lines whose custom_id an earlier line had; `first_repeated` is the first of them
    """

    def __init__(self, file: BinaryIO, max_bytes: int):
        self._file = file
        self._max_bytes = max_bytes + ENVELOPE_BYTES
        self._number = 0
        self._ids: set[int] = set()
        self.num_bytes = 0
        self.num_repeated = 0
        self.first_repeated: Line | None = None

    def __iter__(self) -> Iterator[Line]:
        return self

    def __next__(self) -> Line:
        while data := self._file.readline(self._max_bytes):
            self._number += 1
            self.num_bytes += len(data)
            if self._number == 1:
                data = data.removeprefix(BOM)
            if len(data) == self._max_bytes and data[-1:] != b"\n":
                self._skip_rest()
                return Line(self._number, None)
            if data.strip():
                line = Line(self._number, data)
                self._note(line)
                return line
        raise StopIteration

    def _skip_rest(self) -> None:
        while rest := self._file.readline(2**20):
            self.num_bytes += len(rest)
            if rest[-1:] == b"\n":
                return

    def _note(self, line: Line) -> None:
        name = id_of(line.data)
        if name is None:
            return
        if (key := hash(name)) in self._ids:
            self.num_repeated += 1
            self.first_repeated = self.first_repeated or line
        elif len(self._ids) < MAX_NOTED:
            self._ids.add(key)


class UnusableLine(RwkvBatchError):
    """A line is no request that could be tried; `custom_id` as far as it is known."""

    def __init__(self, line: Line, message: str, code: str, custom_id: str | None = None):
        super().__init__(f"line {line.number}: {message}", code=code)
        self.custom_id = custom_id


class Call(NamedTuple):
    """What one line asks for."""

    custom_id: str
    url: str
    handler: Handler
    body: dict[str, Any]
    num_bytes: int  # of the line


def read_call(line: Line, config: Config) -> Call:
    """What a line asks for. Raises UnusableLine."""
    try:
        if line.data is None:
            raise TooLarge(f"it is over {config.max_body_mib} MiB")
        found = schemas.parse(line.data, config)
    except RwkvBatchError as error:
        raise UnusableLine(line, error.message, error.code or "invalid_json_line") from None
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str):
        raise UnusableLine(line, "custom_id: a text is needed", "invalid_custom_id")
    method, url, body = found.get("method", "POST"), found.get("url"), found.get("body")
    if method != "POST":
        raise UnusableLine(line, "method: POST is the only one", "invalid_method", custom_id)
    if not isinstance(url, str) or url not in HANDLERS:
        raise UnusableLine(line, f"url: one of {', '.join(HANDLERS)}", "invalid_url", custom_id)
    if not isinstance(body, dict):
        raise UnusableLine(line, "body: an object is needed", "invalid_body", custom_id)
    return Call(custom_id, url, HANDLERS[url], body, len(line.data))


def check_body(call: Call) -> None:
    """Raise InvalidRequest for what a batch has not: streams and sessions.

    A turn of a session that was answered twice, before and after a kill, would be in it twice. Responses are not stored.
    """
    for name in ("stream", "session_id", "previous_response_id"):
        if call.body.get(name):
            raise InvalidRequest(f"{name}: not in a batch", param=name, code="unsupported_parameter")
    if call.handler is responses.create:
        call.body["store"] = False
