"""An engine without a model: rows of numbered words at a set pace. For tests and for measuring the HTTP side alone.

Row text is `" w0 w1 w2 …"`, one word a token, so that clients can check order and completeness. Slots, queue, cancel and drain
behave as in the engine loop. `RWKV_BATCH_FAULT` breaks it on purpose: `hang:N`, `crash:N`, `fail:N`, `row:N` act when the Nth
request (from 1) is in its third step: stop stepping, abort the process, fail the request, end its first row with an error.
`poison:N` aborts the process in the first step of any request whose first prompt has the token N. `start:NAME` has the engine
of a model of this name load until it is killed.
"""

import collections
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest, NotBegun, Overloaded, RwkvBatchError
from rwkv_batch.ipc.messages import EngineInfo
from rwkv_batch.request import Delta, Event, Failure, Finish, Progress, Request
from rwkv_batch.session_messages import Deleted, Page, SessionCommand


class StubRow:
    """One sequence: how many prompt tokens are still to be fed, how many tokens were sampled."""

    __slots__ = ("gathered", "index", "prompt_tokens", "run", "sampled", "to_feed")

    def __init__(self, run: "StubRequest", index: int):
        self.run = run
        self.index = index
        self.prompt_tokens = len(run.request.prompts[(index - run.request.first) // run.request.copies])
        self.to_feed = self.prompt_tokens
        self.sampled = 0
        self.gathered: list[str] = []


class StubRequest:
    """One request in the stub."""

    __slots__ = ("cancelled", "fault", "num_open", "num_steps", "num_tokens", "owner", "request")

    def __init__(self, request: Request, owner: bytes):
        self.request = request
        self.owner = owner
        self.num_open = request.num_rows
        self.num_steps = 0
        self.num_tokens = 0
        self.cancelled = False
        self.fault = ""


class StubEngine:
    """What `EngineServer` asks of an engine, over a clock instead of a model. `step_seconds` is the time of one step."""

    def __init__(
        self,
        deliver: Callable[[dict[bytes, list[Event]]], None],
        *,
        step_seconds: float = 0.02,
        slots: int = 320,
        prefill_budget: int = 4096,
        queue: int = 512,
        fault: str = "",
        model: str = "fake",
    ):
        self.info = EngineInfo(
            model=model, device="none", dtype="none", vocab_size=256, slots=slots, prefill_budget=prefill_budget
        )
        self.deliver = deliver
        self.step_seconds = step_seconds
        self.slots = slots
        self.prefill_budget = prefill_budget
        self.queue = queue
        self.last_step = time.monotonic()
        self.lost_sessions = 0
        self._fault, _, nth = fault.partition(":")
        self._fault_at = int(nth or 0)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._runs: dict[str, StubRequest] = {}
        self._waiting: collections.deque[StubRow] = collections.deque()
        self._running: list[StubRow] = []
        self._stopping = False
        self._draining = False
        self._hanging = False
        self._num_requests = 0
        self._totals = {"prompt_tokens_total": 0, "generation_tokens_total": 0, "steps_total": 0}

    def submit(self, request: Request, owner: bytes) -> None:
        """Take a request; Overloaded when `queue` requests wait, Unavailable when draining."""
        if request.session is not None:
            raise InvalidRequest("this server keeps no sessions", param="session_id")
        with self._lock:
            if self._draining or self._stopping:
                raise NotBegun("the server is shutting down", code="draining", retry_after=5.0)
            waiting = len({row.run.request.id for row in self._waiting} - {row.run.request.id for row in self._running})
            if waiting >= self.queue:
                raise Overloaded(f"the queue is full: {self.queue} requests wait")
            run = StubRequest(request, owner)
            self._num_requests += 1
            by = request.prompts[0] if self._fault == "poison" else [self._num_requests]
            if self._fault_at in by:
                run.fault = self._fault
            self._runs[request.id] = run
            self._waiting.extend(StubRow(run, index) for index in request.indices)
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """End a request early."""
        with self._lock:
            run = self._runs.pop(request_id, None)
            if run is not None:
                run.cancelled = True
        self._wake.set()

    def cancel_owner(self, owner: bytes) -> None:
        """End all requests of one HTTP process."""
        with self._lock:
            mine = [request_id for request_id, run in self._runs.items() if run.owner == owner]
        for request_id in mine:
            self.cancel(request_id)

    def execute(self, command: SessionCommand, answer: Callable[[Page | Deleted | RwkvBatchError], None]) -> None:
        """The stub keeps no sessions: InvalidRequest."""
        raise InvalidRequest("this server keeps no sessions", param="session_id")

    def remember_in(self, file: Path) -> None:
        """The stub loads nothing."""

    def drain(self) -> None:
        """Refuse new requests."""
        self._draining = True

    def stop(self) -> None:
        """Let `run` return."""
        self._stopping = True
        self._wake.set()

    def sampled(self) -> dict[str, int]:
        """Tokens that requests have sampled so far, by their ids."""
        with self._lock:
            return {id: run.num_tokens for id, run in self._runs.items()}

    def stats(self) -> dict[str, int | float]:
        """Figures for /stats and /metrics."""
        with self._lock:
            started = {row.run.request.id for row in self._running}
            waiting = {row.run.request.id for row in self._waiting} - started
            return {
                "requests_running": len(started),
                "requests_waiting": len(waiting),
                "sequences_running": len(self._running),
                "sequences_waiting": len(self._waiting),
                "slots": self.slots,
                "slots_free": self.slots - len(self._running),
                **self._totals,
            }

    def run(self) -> None:
        """Step until stopped."""
        due = time.monotonic()
        while not self._stopping:
            self.last_step = time.monotonic()
            with self._lock:
                self._drop_cancelled()
                idle = not self._runs
                events = {} if idle else self._step()
            if idle:
                self._wake.wait(0.1)
                self._wake.clear()
                due = time.monotonic()
                continue
            while self._hanging and not self._stopping:
                time.sleep(0.05)
            due = max(due + self.step_seconds, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            if events:
                self.deliver(events)

    def _drop_cancelled(self) -> None:
        if any(row.run.cancelled for row in self._running):
            self._running = [row for row in self._running if not row.run.cancelled]
        if any(row.run.cancelled for row in self._waiting):
            self._waiting = collections.deque(row for row in self._waiting if not row.run.cancelled)

    def _step(self) -> dict[bytes, list[Event]]:
        while self._waiting and len(self._running) < self.slots:
            self._running.append(self._waiting.popleft())
        budget = self.prefill_budget
        self._totals["steps_total"] += 1
        changed: dict[str, tuple[StubRequest, list[Delta], list[Finish]]] = {}
        events: dict[bytes, list[Event]] = {}
        still_running = []
        for row in self._running:
            run = row.run
            if row.to_feed:
                fed = min(row.to_feed, budget)
                row.to_feed -= fed
                budget -= fed
                self._totals["prompt_tokens_total"] += fed
                if row.to_feed:
                    still_running.append(row)
                    continue
            request = run.request
            _, deltas, finishes = changed.setdefault(request.id, (run, [], []))
            if row.sampled < request.max_tokens:
                row.gathered.append(f" w{row.sampled}")
                row.sampled += 1
                run.num_tokens += 1
                self._totals["generation_tokens_total"] += 1
            if row.gathered and (row.sampled >= request.max_tokens or 0 < request.chunk_size <= len(row.gathered)):
                deltas.append(Delta(row.index, "".join(row.gathered), len(row.gathered)))
                row.gathered.clear()
            if run.fault == "row" and row.index == 0 and run.num_steps >= 2:
                finishes.append(Finish(0, "error", row.prompt_tokens, row.sampled, "the logits of this row were not finite"))
            elif row.sampled >= request.max_tokens:
                finishes.append(Finish(row.index, "length", row.prompt_tokens, row.sampled))
            else:
                still_running.append(row)
        self._running = still_running
        for run, deltas, finishes in changed.values():
            run.num_steps += 1
            run.num_open -= len(finishes)
            if run.fault and (run.num_steps >= 3 or run.fault == "poison"):
                self._break(run, events)
            if deltas or finishes:
                events.setdefault(run.owner, []).append(Progress(run.request.id, deltas, finishes))
            if run.num_open == 0:
                self._runs.pop(run.request.id, None)
        return events

    def _break(self, run: StubRequest, events: dict[bytes, list[Event]]) -> None:
        if run.fault == "hang":
            self._hanging = True
        elif run.fault in ("crash", "poison"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif run.fault == "fail":
            events.setdefault(run.owner, []).append(Failure(run.request.id, "EngineFailed", "the step failed"))
            run.cancelled = True
            self._runs.pop(run.request.id, None)


def build_stub(config: Config, deliver: Callable[[dict[bytes, list[Event]]], None]) -> StubEngine:
    """The stub in place of an engine loop, paced by `config.fake_engine` milliseconds."""
    fault = os.environ.get("RWKV_BATCH_FAULT", "")
    while fault == f"start:{config.model_name}":
        time.sleep(1)
    return StubEngine(
        deliver,
        step_seconds=(config.fake_engine or 0) / 1000,
        slots=config.slots or 320,
        prefill_budget=config.prefill_budget or 4096,
        queue=config.queue,
        fault="" if fault.startswith("start:") else fault,
        model=config.model_name,
    )
