"""What is known of all calls of one HTTP process: metrics, the access log, how many answers are in progress."""

import json
import logging
import time
from collections import deque

from routes.http.access import OWNER
from routes.http.context import Call
from rwkv_batch.ipc.channel import Event, Ticket
from rwkv_batch.metrics import HttpMetrics
from rwkv_batch.request import Progress

access_log = logging.getLogger("rwkv_batch.access")


class CallFigures:
    """Counts calls, answers and events."""

    def __init__(self, metrics: HttpMetrics, *, logs: bool):
        self.metrics = metrics
        self._logs = logs
        self._num_opened = 0  # counted on the event loop
        self._num_closed = 0  # counted in the client's thread
        self._closed: deque[tuple[Call, str]] = deque()
        self._num_observed = 0

    @property
    def active(self) -> int:
        """Answers in progress."""
        return self._num_opened - self._num_closed

    def opened(self) -> None:
        """An answer begins; event loop only."""
        self._num_opened += 1
        self.metrics.streams.inc()

    def closed(self, call: Call, how: str) -> None:
        """An answer ended: "done", or "gone" when its client left. Any thread, finalisers too: no lock is taken here."""
        self._closed.append((call, how))

    def settle(self) -> None:
        """Note the answers that ended since last time; in the client's thread."""
        while self._closed:
            call, how = self._closed.popleft()
            self._num_closed += 1
            self.metrics.streams.dec()
            if how == "gone":
                self.metrics.disconnects.inc()
            self.finished(call, how)

    def observe(self, ticket: Ticket, event: Event) -> None:
        """Count one event."""
        if not isinstance(event, Progress):
            return
        if event.deltas and ticket.incremental:
            now = time.monotonic()
            if ticket.first_at is None:
                self.metrics.first_token.observe(now - ticket.submitted_at)
            else:
                self._num_observed += 1
                if self._num_observed % 8 == 0:
                    self.metrics.inter_token.observe(now - ticket.progressed_at)
        ticket.num_tokens += sum(delta.tokens for delta in event.deltas)
        for finish in event.finishes:
            self.metrics.success.labels(finish.reason).inc()
            self.metrics.prompt_tokens.observe(finish.prompt_tokens)
            self.metrics.generation_tokens.observe(finish.completion_tokens)
            ticket.completion_tokens += finish.completion_tokens

    def finished(self, call: Call, how: str = "done") -> None:
        """Note the end of a call."""
        seconds = time.monotonic() - call.began
        ticket = call.ticket
        if call.status >= 400:
            self.metrics.refused.labels(str(call.status)).inc()
        elif ticket is not None and ticket.failure is None and how == "done":
            self.metrics.latency.observe(seconds)
        if self._logs and access_log.isEnabledFor(logging.INFO):
            line = f"{call.method} {json.dumps(call.path[:256])} {call.status} id={call.id} ms={seconds * 1000:.1f}"
            line += f" key={call.caller}" if call.caller != OWNER else ""
            line += f" given_id={call.given_id}" if call.given_id else ""
            if ticket is not None:
                tokens = call.completion_tokens or max(ticket.completion_tokens, ticket.num_tokens)
                line += f" prompts={call.num_prompts} prompt_tokens={call.prompt_tokens} tokens={tokens}"
                if ticket.first_at is not None and ticket.incremental:
                    line += f" ttft_ms={(ticket.first_at - call.began) * 1000:.1f}"
                line += f" end={'error' if ticket.failure or call.failed else how}"
            access_log.info(line)
