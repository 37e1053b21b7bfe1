"""What is known of all calls of one HTTP process: metrics, the access log, how many answers are in progress."""

import json
import logging
import time
from collections import deque

from routes.http.access import OWNER
from routes.http.context import RequestContext
from rwkv_batch.ipc.tickets import Ticket
from rwkv_batch.metrics import HttpMetrics
from rwkv_batch.request import Event, Failure

access_log = logging.getLogger("rwkv_batch.access")


class CallFigures:
    """Counts calls, answers and events."""

    def __init__(self, metrics: HttpMetrics, *, logs: bool):
        self.metrics = metrics
        self._logs = logs
        self._num_opened = 0  # counted on the event loop
        self._num_closed = 0  # counted in the client's thread
        self._closed: deque[tuple[RequestContext, str]] = deque()
        self._num_observed = 0

    @property
    def active(self) -> int:
        """Answers in progress."""
        return self._num_opened - self._num_closed

    def opened(self) -> None:
        """An answer begins; event loop only."""
        self._num_opened += 1
        self.metrics.streams.inc()

    def closed(self, context: RequestContext, how: str) -> None:
        """An answer ended: "done", or "gone" when its client left. Any thread, finalisers too: no lock is taken here."""
        self._closed.append((context, how))

    def count_closed(self) -> None:
        """Note the answers that ended since last time; in the client's thread."""
        while self._closed:
            context, how = self._closed.popleft()
            self._num_closed += 1
            self.metrics.streams.dec()
            if how == "gone":
                self.metrics.disconnects.inc()
            self.finished(context, how)

    def observe(self, ticket: Ticket, event: Event) -> None:
        """Count one event."""
        if isinstance(event, Failure):
            return
        deltas = event.deltas
        if deltas and ticket.incremental:
            now = time.monotonic()
            if ticket.first_at is None:
                self.metrics.first_token.observe(now - ticket.submitted_at)
            else:
                self._num_observed += 1
                if self._num_observed % 32 == 0:
                    self.metrics.inter_token.observe(now - ticket.progressed_at)
        for delta in deltas:
            ticket.num_tokens += delta.tokens
        for finish in event.finishes:
            self.metrics.success.labels(finish.reason).inc()
            self.metrics.prompt_tokens.observe(finish.prompt_tokens)
            self.metrics.generation_tokens.observe(finish.completion_tokens)
            ticket.completion_tokens += finish.completion_tokens

    def finished(self, context: RequestContext, how: str = "done") -> None:
        """Note the end of a call."""
        if context.found_model is not None:
            context.found_model.calls.discard(context.id)
        seconds = time.monotonic() - context.began
        ticket = context.ticket
        if context.status >= 400:
            self.metrics.refused.labels(str(context.status)).inc()
        elif ticket is not None and ticket.failure is None and how == "done":
            self.metrics.latency.observe(seconds)
        if self._logs and access_log.isEnabledFor(logging.INFO):
            line = f"{context.method} {json.dumps(context.path[:256])} {context.status} id={context.id} ms={seconds * 1000:.1f}"
            line += f" key={context.caller}" if context.caller != OWNER else ""
            line += f" given_id={context.given_id}" if context.given_id else ""
            if ticket is not None:
                tokens = context.completion_tokens or max(ticket.completion_tokens, ticket.num_tokens)
                line += f" prompts={context.num_prompts} prompt_tokens={context.prompt_tokens} tokens={tokens}"
                if ticket.first_at is not None and ticket.incremental:
                    line += f" ttft_ms={(ticket.first_at - context.began) * 1000:.1f}"
                line += f" end={'error' if ticket.failure or context.failed else how}"
            access_log.info(line)
