"""What a caller holds of a request in progress: its events, their reader, and the way to cancel it."""

import time
from collections.abc import Callable, Collection
from queue import SimpleQueue
from typing import Any

from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.ipc.waker import call_back
from rwkv_batch.request import Event, Failure, Request


class Reader:
    """The reading side of an answer: what waits to be read, and how its reader gets on.

    num_put, num_taken  bytes that were queued and that were taken out: a reader that does not read shows in the difference
    taken_at            when the last item was taken
    unread_since        when the oldest item that was not taken was queued, at the latest
    peer                where the reader is, for whoever watches connections
    watched             whether that was looked at
    suspect             whether the reader may have left
    """

    def __init__(self, peer: str = ""):
        self.queue: SimpleQueue = SimpleQueue()
        self.num_put = 0
        self.num_taken = 0
        self.taken_at = self.unread_since = time.monotonic()
        self.peer = peer
        self.watched = self.suspect = False

    def put(self, item: Any) -> None:
        """Queue an item; only bytes count as unread."""
        if self.num_put == self.num_taken:
            self.unread_since = time.monotonic()
        self.num_put += len(item) if isinstance(item, bytes) else 0
        self.queue.put(item)

    def take(self, timeout: float) -> Any:
        """Next item; queue.Empty after `timeout` seconds."""
        item = self.queue.get(timeout=timeout)
        self.num_taken += len(item) if isinstance(item, bytes) else 0
        self.taken_at = time.monotonic()
        return item


class Ticket:
    """What a caller holds for a submitted request.

    reader    takes what `format_event` made of each event, None for nothing; END comes last
    answered  called once in the client's thread when the request was accepted or refused, see `accepted` and `failure`
    ended     called once in the client's thread after END was queued

    among     numbers of the engines that may have it, None = all

    `format_event` runs in the client's thread and must be quick; without one the events themselves are queued.
    `on_cancel` is called with the ticket when it is cancelled, in any thread.
    """

    END = object()

    def __init__(self, on_cancel: Callable[["Ticket"], None], request: Request, format_event: Callable[[Event], Any] | None):
        self.request_id = request.id
        self.among: Collection[int] | None = None
        self.reader = Reader()
        self.format_event = format_event
        self.open_rows = request.num_rows
        self.incremental = request.chunk_size > 0  # text comes as it is made, not all at the end
        self.accepted = False
        self.cancelled = False
        self.done = False
        self.failure: Failure | None = None
        self.answered: Callable[[], None] | None = None
        self.ended: Callable[[], None] | None = None
        self.submitted_at = time.monotonic()
        self.first_at: float | None = None  # first event with text
        self.progressed_at = self.submitted_at
        self.completion_tokens = 0  # of rows that have ended
        self.num_tokens = 0  # of texts that have come
        self._on_cancel = on_cancel

    def cancel(self) -> None:
        """Nobody wants the rest. Any thread, finalisers too; more than once is fine; END is queued if it was not."""
        self.cancelled = True
        self._on_cancel(self)

    def abort(self, error: RwkvBatchError) -> None:
        """End it with an error for its reader and cancel it in the engine. The client's thread only."""
        self.feed(Failure.of(self.request_id, error))
        self.cancel()

    def take(self, timeout: float) -> Any:
        """Next item for the reader; queue.Empty after `timeout` seconds."""
        return self.reader.take(timeout)

    def accept(self) -> None:
        """An engine has taken it. The client's thread only."""
        self.accepted = True
        self._tell_answered()

    def feed(self, event: Event) -> None:
        """Pass an event on to the reader. The client's thread only."""
        if self.done:
            return
        if isinstance(event, Failure):
            self.failure = event
            self.open_rows = 0
        else:
            self.open_rows -= len(event.finishes)
        item = self.format_event(event) if self.format_event else event
        if item is not None:
            self.reader.put(item)
        if self.failure is None:
            self.progressed_at = time.monotonic()
            if self.first_at is None and event.deltas:
                self.first_at = self.progressed_at
        if self.answered is not None:
            self._tell_answered()
        if self.open_rows <= 0:
            self.end()

    def end(self) -> None:
        """Nothing more comes. The client's thread only."""
        if not self.done:
            self.done = True
            self.reader.put(Ticket.END)
            self._tell_answered()
            call_back(self.ended)

    def _tell_answered(self) -> None:
        answered, self.answered = self.answered, None
        call_back(answered)
