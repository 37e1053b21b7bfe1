"""Answers in progress: bytes as they come, signs of life between them, a cut where a stream cannot end well."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from queue import Empty
from typing import TYPE_CHECKING, Any, NamedTuple

from routes.http.connections import Cut
from routes.http.replies import JSON, NDJSON, SSE, Response, dumps, error_document
from rwkv_batch.errors import EngineFailed, RwkvBatchError
from rwkv_batch.ipc.tickets import Reader, Ticket
from rwkv_batch.request import Event

if TYPE_CHECKING:
    from routes.http.context import RequestContext

log = logging.getLogger(__name__)

SLICE_SECONDS = 0.25  # longest time a pool thread waits for one answer
NUDGE = object()  # in the queue of an answer: write something, for the client may be gone


class Framing(NamedTuple):
    """What a stream is, and what may be written into it that nobody takes for content.

    ping   sent when nothing was for `ping_seconds`
    nudge  sent to make a write fail when the client may be gone
    """

    content_type: str
    ping: bytes
    nudge: bytes


EVENTS = Framing(SSE, b": ping\n", b":\n")
DOCUMENT = Framing(JSON, b" ", b" ")  # one JSON text behind blanks
LINES = Framing(NDJSON, b" ", b" ")  # JSON texts, one on each line; an empty line would be none


class StreamingAnswer:
    """An answer in progress, pulled by Robyn from its thread pool: an iterator, because a generator that was never started
    has no finaliser. A ping is due when nothing was sent for `ping_seconds` (s).
    """

    def __init__(
        self,
        context: "RequestContext",
        ticket: "Ticket | TaskAnswer",
        framing: Framing,
        ping_seconds: float,
    ):
        self.context = context
        self.content_type = framing.content_type
        self._ticket = ticket
        self._ping = framing.ping
        self._nudge = framing.nudge
        self._ping_seconds = ping_seconds
        self._wrote_at = time.monotonic()
        self._held: Any = None  # taken from the queue behind what was just returned
        self._open = True
        self._error: RwkvBatchError | None = None  # what it has failed with after it began
        self._cut = Cut(context.app.ledger)
        context.app.figures.opened()

    def __iter__(self) -> "StreamingAnswer":
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
        self.context.failed = True
        self._close("done")
        if was_cut:
            raise StopIteration
        return dumps(error_document(self._error, self.context.form)).encode()

    def _with_rest(self, item: bytes) -> bytes:
        parts = [item]
        while not self._ticket.reader.queue.empty():  # nobody else takes from it
            further = self._ticket.take(0.0)
            if not isinstance(further, bytes):
                self._held = further
                break
            parts.append(further)
        return b"".join(parts) if len(parts) > 1 else item

    def _close(self, how: str) -> None:
        self._open = False
        self.context.app.figures.closed(self.context, how)

    def __del__(self) -> None:
        """Robyn let go. Runs in any thread at any time, so it only leaves notes."""
        if self._open:
            self._ticket.cancel()
            self._close("gone")


Reply = Response | StreamingAnswer  # what a route returns
FormatEvent = Callable[[Event], bytes | None]


class TaskAnswer:
    """What a task of the event loop comes to, in the shape in which `StreamingAnswer` takes it from a ticket."""

    def __init__(self, task: "asyncio.Task[Response]"):
        self._task = task
        self._loop = task.get_loop()
        self.reader = Reader()
        task.add_done_callback(self._done)

    def take(self, timeout: float) -> Any:
        """Next item; queue.Empty after `timeout` seconds."""
        return self.reader.take(timeout)

    def cancel(self) -> None:
        """Nobody wants it any more. Any thread, finalisers too."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._task.cancel)

    def _done(self, task: "asyncio.Task[Response]") -> None:
        if not task.cancelled():
            error = task.exception()
            if error is not None and not isinstance(error, RwkvBatchError):
                log.error("an answer failed", exc_info=error)
                error = EngineFailed("internal error", code="internal")
            self.reader.put(task.result().body if error is None else error)
        self.reader.put(Ticket.END)


def notify_first(format_event: FormatEvent, notify: Callable[[], None]) -> FormatEvent:
    """`format_event` that calls `notify` with the first event."""
    untold = [notify]

    def watched(event: Event) -> bytes | None:
        if untold:
            untold.pop()()
        return format_event(event)

    return watched
