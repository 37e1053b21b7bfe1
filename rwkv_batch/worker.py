"""The one thread that owns the device: inbox, plan, step, text, events.

Callers submit and cancel from any thread; what a step brought is delivered once, grouped by owner. The step after is already
submitted when a step's ids are read, so a row that stops has run one step too many: that overshoot is dropped here, and a row
whose state is kept is settled, which means brought to exactly the text that was shown.
"""

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

from rwkv_batch.engine import Engine, Step
from rwkv_batch.errors import EngineFailed, InvalidRequest, Overloaded, RwkvBatchError, Unavailable
from rwkv_batch.plan import Plan
from rwkv_batch.request import Delta, Failure, Finish, Progress, Reason, Request, Sequence
from rwkv_batch.scheduler import Scheduler
from rwkv_batch.state import Snapshot
from rwkv_batch.text_stream import Stops, TextStream
from rwkv_batch.tokenizer import Tokenizer

Owner = Hashable
Event = Progress | Failure

CHECKPOINT_TOKENS = 16  # sampled tokens between the checkpoints of a row whose state is kept
IDLE_SECONDS = 0.25  # how long an idle worker sleeps between two signs of life
NOT_FINITE = "the model's output for this row was not finite"


class Lease(Protocol):
    """The right to continue one session; exactly one of `commit` and `release` ends it."""

    initial: Snapshot | None

    def commit(self, snapshot: Snapshot) -> None:
        """Keep the state at the end of the row."""

    def release(self) -> None:
        """Leave the session as it was."""


class Sessions(Protocol):
    """Where named states live."""

    def lease(self, request: Request) -> Lease:
        """Return the lease `request.session` asks for; RwkvBatchError when it cannot be had."""


@dataclass(eq=False)
class Ongoing:
    """One live request. `num_open` rows have not ended; `started` once a row owns a slot."""

    request: Request
    owner: Owner
    num_open: int
    started: bool = False


@dataclass(eq=False, slots=True)
class RowText:
    """The text side of one row.

    count         sampled ids seen
    gathered      text safe to show that was not delivered yet, of the last `num_gathered` ids
    generated     all ids seen, only of rows whose state is kept
    checkpoints   (n, snapshot after the prompt and n generated ids), oldest first, only of such rows
    reason        why the row ended, while it settles
    """

    ongoing: Ongoing
    stream: TextStream
    lease: Lease | None
    count: int = 0
    gathered: str = ""
    num_gathered: int = 0
    generated: list[int] = field(default_factory=list)
    checkpoints: list[tuple[int, Snapshot]] = field(default_factory=list)
    reason: Reason | None = None


class Worker:
    """Runs requests on an engine until stopped.

    deliver   called in the worker's thread after each step that brought something: {owner: events}
    sessions  gives leases for requests that name a session; None = such requests are refused
    queue     requests that may wait for their first slot
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        deliver: Callable[[dict[Owner, list[Event]]], None],
        *,
        sessions: Sessions | None = None,
        queue: int = 512,
    ):
        self.info = None  # what the outside is told about the engine; set by whoever puts it together
        self.engine = engine
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.deliver = deliver
        self.sessions = sessions
        self.queue = queue
        self.last_step = time.monotonic()
        self._inbox: _Inbox = _Inbox()
        self._lock = threading.Lock()
        self._num_waiting = 0  # accepted requests none of whose rows has started
        self._draining = False
        self._stopping = False
        self._dead = False
        self._ongoing: dict[str, Ongoing] = {}
        self._rows: dict[Sequence, RowText] = {}
        self._events: dict[Owner, dict[str, Event]] = defaultdict(dict)
        self._step: Step | None = None  # submitted, not read
        self._totals = {"prompt_tokens_total": 0, "generation_tokens_total": 0, "steps_total": 0, "step_seconds_total": 0.0}

    # From any thread.

    def submit(self, request: Request, owner: Owner) -> None:
        """Accept a request; Overloaded when the queue is full, Unavailable when draining or dead."""
        if request.session is not None and self.sessions is None:
            raise InvalidRequest("this server keeps no sessions", param="session_id")
        stops = _stops(tuple(request.stop_ids), tuple(request.stop_texts))  # here, so that no step waits for it
        with self._lock:
            if self._dead:
                raise Unavailable("the engine has failed and is being restarted", code="engine_dead")
            if self._draining or self._stopping:
                raise Unavailable("the server is shutting down", code="draining", retry_after=5.0)
            if self._num_waiting >= self.queue:
                raise Overloaded(f"the queue is full: {self.queue} requests wait")
            self._num_waiting += 1
            self._inbox.put(_Accepted(request, owner, stops))

    def cancel(self, request_id: str) -> None:
        """End a request early; nothing more is delivered for it."""
        self._inbox.put(_Cancel(request_id))

    def cancel_owner(self, owner: Owner) -> None:
        """End all requests of one owner."""
        self._inbox.put(_CancelOwner(owner))

    def drain(self) -> None:
        """Refuse new requests, finish the others."""
        self._draining = True

    def stop(self) -> None:
        """Let `run` return after the step in progress."""
        self._stopping = True
        self._inbox.put(None)

    def stats(self) -> dict[str, int | float]:
        """Figures of this moment."""
        requests_waiting = self._num_waiting
        return {
            "requests_running": max(0, len(self._ongoing) - requests_waiting),
            "requests_waiting": requests_waiting,
            "sequences_running": self.scheduler.num_running,
            "sequences_waiting": self.scheduler.num_waiting,
            "slots": self.scheduler.num_slots,
            "slots_free": self.scheduler.num_free,
            **self._totals,
        }

    # The worker's thread.

    def run(self) -> None:
        """Step until stopped. An error of the engine fails every request and is raised again: the process cannot go on."""
        try:
            while not self._stopping:
                self.turn()
        except Exception:
            self._fail_all()
            raise

    def turn(self) -> None:
        """Take the inbox, submit the next step, read the one before, deliver."""
        self._take_inbox(wait=self._step is None and not self._ongoing)
        started = time.monotonic()
        plan = self.scheduler.next_plan()
        submitted = self._submit(plan) if plan else None
        if self._step is not None:
            self._read(self._step)
        self._step = submitted
        self.last_step = time.monotonic()
        if plan:
            self._totals["step_seconds_total"] += self.last_step - started
        self._flush()

    def _take_inbox(self, *, wait: bool) -> None:
        for message in self._inbox.take(IDLE_SECONDS if wait else 0):
            match message:
                case _Accepted():
                    self._start(message)
                case _Cancel(request_id):
                    self._cancel(request_id)
                case _CancelOwner(owner):
                    for request_id in [o.request.id for o in self._ongoing.values() if o.owner == owner]:
                        self._cancel(request_id)

    def _start(self, accepted: "_Accepted") -> None:
        request, owner, lease = accepted.request, accepted.owner, None
        try:
            if request.session is not None:
                if len(request.prompts) != 1:
                    raise InvalidRequest("a session takes one prompt at a time", param="contents")
                lease = self.sessions.lease(request)
            sequences = self.scheduler.add(request)
        except (RwkvBatchError, ValueError) as error:
            if lease is not None:
                lease.release()
            self._count_started()
            self._add_failure(request.id, owner, error if isinstance(error, RwkvBatchError) else InvalidRequest(str(error)))
            return
        ongoing = Ongoing(request, owner, len(sequences))
        self._ongoing[request.id] = ongoing
        for sequence in sequences:
            sequence.initial = lease.initial if lease else None
            self._rows[sequence] = RowText(ongoing, TextStream(self.tokenizer.token_bytes, accepted.stops), lease)
        if request.max_tokens == 0 and lease is None:  # nothing to compute
            self._drop(request.id)
            for sequence in sequences:
                self._end(sequence, self._rows.pop(sequence), "length")

    def _cancel(self, request_id: str) -> None:
        if request_id in self._ongoing:
            for sequence in self._drop(request_id):
                row = self._rows.pop(sequence)
                if row.lease is not None:
                    row.lease.release()
            ongoing = self._ongoing.pop(request_id)
            self._events[ongoing.owner].pop(request_id, None)

    def _drop(self, request_id: str) -> list[Sequence]:
        """Take a request out of the scheduler; its slots are free for the next plan."""
        ongoing = self._ongoing[request_id]
        if not ongoing.started:
            ongoing.started = True
            self._count_started()
        return self.scheduler.cancel(request_id)

    def _submit(self, plan: Plan) -> Step:
        step = self.engine.submit(plan)
        self._totals["steps_total"] += 1
        for row in plan.rows:
            if row.ids:
                self._totals["prompt_tokens_total"] += len(row.ids)
                text = self._rows[row.sequence]
                if row.start and not text.ongoing.started:
                    text.ongoing.started = True
                    self._count_started()
                if text.lease is not None and row.sequence.num_fed == len(row.sequence.prompt):
                    self._after_prompt(row.sequence, text)
            elif (text := self._rows[row.sequence]).lease is not None:
                self._checkpoint(row.sequence, text)
        return step

    def _after_prompt(self, sequence: Sequence, row: RowText) -> None:
        """The ids to feed of a row whose state is kept are all fed."""
        if sequence.settling:
            self._commit(sequence, row, self.engine.take(sequence.slot))
        elif sequence.request.max_tokens == 0:
            row.reason = "length"
            self._commit(sequence, row, self.engine.take(sequence.slot))
        else:
            self._checkpoint(sequence, row)

    def _checkpoint(self, sequence: Sequence, row: RowText) -> None:
        """Keep the state every CHECKPOINT_TOKENS ids; it holds one generated id less than were sampled."""
        num_fed = sequence.num_sampled - 1
        if num_fed % CHECKPOINT_TOKENS == 0:
            row.checkpoints.append((num_fed, self.engine.take(sequence.slot)))
            while len(row.checkpoints) > 1 and row.checkpoints[1][0] <= row.stream.num_shown:
                row.checkpoints.pop(0)  # the next one is wholly visible too

    def _read(self, step: Step) -> None:
        """Turn a step's ids into text; end rows that stopped."""
        for sequence, id in self.engine.collect(step):
            row = self._rows.get(sequence)
            if row is None or row.reason is not None:
                continue  # ended one step ago
            if id is None:
                self.scheduler.finish(sequence)
                self._end(sequence, self._rows.pop(sequence), "error")
                continue
            self._totals["generation_tokens_total"] += 1
            text, stopped = row.stream.feed(id)
            row.count += 1
            row.num_gathered += 1
            if text:
                row.gathered += text
            if row.lease is not None:
                row.generated.append(id)
            request = row.ongoing.request
            if stopped:
                self._ended(sequence, row, "stop")
            elif row.count == request.max_tokens:
                row.gathered += row.stream.finish()
                self._ended(sequence, row, "length")
            elif row.gathered and 0 < request.chunk_size <= row.num_gathered:
                self._add_delta(sequence, row)

    def _ended(self, sequence: Sequence, row: RowText, reason: Reason) -> None:
        """The row's text is complete; its state is not yet, when it is kept."""
        if row.lease is None:
            self.scheduler.finish(sequence)
            self._end(sequence, self._rows.pop(sequence), reason)
            return
        row.reason = reason
        num_visible, rest = row.stream.visible()
        num_fed, snapshot = next(c for c in reversed(row.checkpoints) if c[0] <= num_visible)
        ids = row.generated[num_fed:num_visible] + self.tokenizer.encode_bytes(rest)
        if not ids:
            self._commit(sequence, row, snapshot)
            return
        self.engine.put(sequence.slot, snapshot)
        row.checkpoints.clear()
        self.scheduler.settle(sequence, ids)

    def _commit(self, sequence: Sequence, row: RowText, snapshot: Snapshot) -> None:
        self.scheduler.finish(sequence)
        lease, row.lease = row.lease, None
        lease.commit(snapshot)
        self._end(sequence, self._rows.pop(sequence), row.reason)

    def _end(self, sequence: Sequence, row: RowText, reason: Reason) -> None:
        if row.lease is not None:
            row.lease.release()
        if row.gathered:
            self._add_delta(sequence, row)
        error = NOT_FINITE if reason == "error" else None
        num_prompt = len(sequence.request.prompts[sequence.index])
        finish = Finish(sequence.index, reason, num_prompt, row.count, error)
        self._progress(row.ongoing).finishes.append(finish)
        row.ongoing.num_open -= 1
        if row.ongoing.num_open == 0:
            del self._ongoing[row.ongoing.request.id]

    def _add_delta(self, sequence: Sequence, row: RowText) -> None:
        self._progress(row.ongoing).deltas.append(Delta(sequence.index, row.gathered, row.num_gathered))
        row.gathered, row.num_gathered = "", 0

    def _progress(self, ongoing: Ongoing) -> Progress:
        """Return what this step brought the request so far."""
        events = self._events[ongoing.owner]
        request_id = ongoing.request.id
        if request_id not in events:
            events[request_id] = Progress(request_id, [], [])
        return events[request_id]

    def _add_failure(self, request_id: str, owner: Owner, error: RwkvBatchError) -> None:
        self._events[owner][request_id] = Failure(
            request_id, type(error).__name__, error.message, error.param, error.code, error.retry_after
        )

    def _flush(self) -> None:
        batch = {owner: list(events.values()) for owner, events in self._events.items() if events}
        if batch:
            self._events.clear()
            self.deliver(batch)

    def _count_started(self) -> None:
        with self._lock:
            self._num_waiting -= 1

    def _fail_all(self) -> None:
        """Tell every caller, also those whose requests are still in the inbox."""
        with self._lock:
            self._dead = True
        for row in self._rows.values():
            if row.lease is not None:
                row.lease.release()
        self._events.clear()
        error = EngineFailed("a step of the engine failed; the server restarts it")
        waiting = [(m.request, m.owner) for m in self._inbox.take(0) if isinstance(m, _Accepted)]
        for request, owner in [(o.request, o.owner) for o in self._ongoing.values()] + waiting:
            self._add_failure(request.id, owner, error)
        self._flush()


class _Accepted(NamedTuple):
    request: Request
    owner: Owner
    stops: Stops


class _Cancel(NamedTuple):
    request_id: str


class _CancelOwner(NamedTuple):
    owner: Owner


class _Inbox:
    """Messages from other threads; None only wakes."""

    def __init__(self):
        self._queue: queue.SimpleQueue = queue.SimpleQueue()

    def put(self, message: _Accepted | _Cancel | _CancelOwner | None) -> None:
        self._queue.put(message)

    def take(self, seconds: float) -> list:
        """Return all messages; wait up to `seconds` for the first."""
        messages = []
        try:
            if seconds:
                messages.append(self._queue.get(timeout=seconds))
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages


@lru_cache(maxsize=256)
def _stops(stop_ids: tuple[int, ...], stop_texts: tuple[bytes, ...]) -> Stops:
    return Stops(stop_ids, stop_texts)
