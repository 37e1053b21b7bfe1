"""OUT: one answer a line, in the order of IN and in the form of OpenAI's Batch API. Only ever appended to, by whole lines."""

import fcntl
import io
import logging
import os
import secrets
import time
from pathlib import Path

import msgspec

from routes.http.replies import Response, dumps, error_document
from routes.offline.request_file import RequestFile, UnusableLine, id_of
from rwkv_batch.errors import UsageError

log = logging.getLogger(__name__)

START = b'{"id": "batch_req_'
LOCK_SECONDS = 10.0  # that the processes of a command that was killed get to end


class _Reply(msgspec.Struct):
    status_code: int


class _Answer(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Reply | None


_read_answer = msgspec.json.Decoder(_Answer).decode


def answered(custom_id: str, request_id: str, reply: Response) -> bytes:
    """The line of a request that was tried."""
    head = f'"batch_req_{secrets.token_hex(12)}", "custom_id": {dumps(custom_id)}'
    response = f'"status_code": {reply.status}, "request_id": "{request_id}"'
    return f'{{"id": {head}, "response": {{{response}, "body": '.encode() + reply.body + b'}, "error": null}\n'


def unanswered(error: UnusableLine) -> bytes:
    """The line of one that is no request."""
    told = error_document(error, "openai")["error"]
    line = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": error.custom_id,
        "response": None,
        "error": {"code": told["code"], "message": told["message"]},
    }
    return dumps(line).encode() + b"\n"


class AnswerFile:
    """The answers. What comes before its turn waits; a crash at any moment leaves whole lines and at most a part of one.

    num_lines   answers that are in the file
    num_errors  of them, those that are errors
    num_held    bytes of answers that wait for that of an earlier line
    """

    def __init__(self, path: Path):
        """Open the file for us alone. Raises UsageError while another command writes it, OSError."""
        self.num_lines = self.num_errors = self.num_held = 0
        self._path = path
        self._file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")
        self._held: dict[int, tuple[bytes, bool]] = {}
        self._synced = 0
        try:
            self._lock()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close it; what waits for an earlier answer is dropped."""
        self._file.close()

    def _lock(self) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UsageError(f"{self._path}: another command writes it") from None
                time.sleep(0.05)

    def resume(self, requests: RequestFile) -> None:
        """Count what is answered, skip its lines in `requests`, cut off what a crash has left behind.

        Raises UsageError for a file of anything else, or of another batch.
        """
        end = 0
        with open(self._path, "rb") as file:
            for data in file:
                try:
                    answer = _read_answer(data) if data[-1:] == b"\n" else None
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    answer = None
                if answer is None:
                    self._check_damaged(data)
                    break
                self._check(answer, requests)
                self.num_lines += 1
                self.num_errors += answer.response is None or answer.response.status_code >= 400
                end += len(data)
        size = self._path.stat().st_size
        if size > end:
            log.warning("%s: %d bytes behind the last whole line are cut off", self._path, size - end)
            self._file.truncate(end)
        self._file.seek(end)

    def _check_damaged(self, data: bytes) -> None:
        torn = data[-1:] != b"\n" or b"\0" in data  # zeros are what a power cut may leave
        ours = self.num_lines > 0 or START.startswith(data.strip(b"\0")[: len(START)])
        if not torn or not ours:
            raise UsageError(f"{self._path}: its line {self.num_lines + 1} is something else than the answer of a batch")

    def _check(self, answer: _Answer, requests: RequestFile) -> None:
        line = next(requests, None)
        if line is None:
            raise UsageError(f"{self._path}: it has more answers than the input has requests")
        asked = id_of(line.data)
        if None not in (asked, answer.custom_id) and asked != answer.custom_id:
            raise UsageError(f"{self._path}: its answer {self.num_lines + 1} is not to line {line.number} of the input")

    def put(self, index: int, line: bytes, *, failed: bool) -> None:
        """Add the answer to the request that has this index; it waits for all before it. Raises OSError."""
        self._held[index] = line, failed
        self.num_held += len(line)
        ready = []
        while (found := self._held.pop(self.num_lines, None)) is not None:
            ready.append(found[0])
            self.num_lines += 1
            self.num_errors += found[1]
        rest = memoryview(b"".join(ready))
        self.num_held -= len(rest)
        while rest:
            rest = rest[self._file.write(rest) :]

    def sync(self) -> None:
        """Wait until all that was written is on disk. Any thread. Raises OSError."""
        if self._synced != self.num_lines:
            num_lines = self.num_lines
            os.fsync(self._file.fileno())
            self._synced = num_lines
