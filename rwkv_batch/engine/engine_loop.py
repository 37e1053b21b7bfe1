"""The one thread that owns the device: inbox, plan, step, text, events.

Callers submit and cancel from any thread; what a step brought is delivered once, grouped by owner. The step after is already
submitted when a step's ids are read, so a row that stops has run one step too many: that overshoot is dropped here, and a row
whose state is kept is settled, which means brought to exactly the text that was shown.
"""

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, Protocol

import msgspec

from rwkv_batch.engine.engine import Engine, Step
from rwkv_batch.errors import Conflict, EngineFailed, InvalidRequest, Overloaded, RwkvBatchError, Unavailable
from rwkv_batch.model.state import Snapshot
from rwkv_batch.request import Delta, Event, Failure, Finish, Progress, PromptScore, Reason, Request, Sequence, TokenLogprob
from rwkv_batch.scheduling.plan import Plan, Row
from rwkv_batch.scheduling.scheduler import Scheduler
from rwkv_batch.session_messages import Action, Answer, Deleted, Kept, Page
from rwkv_batch.text.detokenizer import Stops, TextStream
from rwkv_batch.text.tokenizer import Tokenizer

log = logging.getLogger("rwkv_batch.engine")

Owner = Hashable

CHECKPOINT_TOKENS = 16  # sampled tokens between the checkpoints of a row whose state is kept
IDLE_SECONDS = 0.25  # how long an idle worker sleeps between two signs of life
MASK_SECONDS = 0.001  # the same where all rows wait for their masks
NOT_FINITE = "the model's output for this row was not finite"
NO_STOPS = Stops()  # until min_tokens ids were sampled


class Lease(Protocol):
    """The right to continue one session; exactly one of `commit` and `release` ends it.

    newlines  how many newlines, two at most, the session's text ends in
    replay    what an earlier turn with the same idempotency key said: there is nothing to run
    revoked   the session was deleted meanwhile
    """

    newlines: int
    replay: Answer | None
    revoked: bool

    def initial(self) -> Snapshot | None:
        """Return the state to start from, in the thread that uses it; None for the empty one."""

    def commit(self, snapshot: Snapshot, newlines: int, answer: Answer, done: Callable[[Kept | RwkvBatchError], None]) -> None:
        """Keep the state at the end of the row; `done` is called once, in any thread, when it is kept or cannot be."""

    def release(self) -> None:
        """Leave the session as it was."""


class Sessions(Protocol):
    """Where named states live."""

    def lease(self, request: Request, ready: Callable[[Lease | RwkvBatchError], None]) -> None:
        """Ask for the session of `request`; `ready` is called once, in any thread. Raises what refuses it at once."""

    def cancel(self, request_id: str) -> None:
        """Nobody waits for this request's lease any more."""

    def manage(self, action: Action, answer: Callable[[Page | Deleted | RwkvBatchError], None]) -> None:
        """Carry out an order."""

    def stats(self) -> dict[str, int | float]:
        """Figures of this moment."""

    def close(self) -> int:
        """Write what is not on disk yet; waits for it. Returns how many sessions could not be written."""


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
    checkpoints   (n, snapshot after the prompt and n generated ids), only of such rows: the newest and, before it, the last
                  one all of whose ids were shown when the newest was made
    reason        why the row ended, while it settles
    logprobs      of sampled ids, not delivered yet, and how many were; only of rows that asked
    num_scored    tokens of the prompt that were scored
    prompt        ids of the prompt, with the separator from the session's text before
    said          text delivered, only of rows whose answer is kept for an idempotency key
    """

    ongoing: Ongoing
    stream: TextStream
    lease: Lease | None
    prompt: list[int]
    count: int = 0
    gathered: str = ""
    num_gathered: int = 0
    generated: list[int] = field(default_factory=list)
    checkpoints: list[tuple[int, Snapshot]] = field(default_factory=list)
    reason: Reason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_reported: int = 0
    num_scored: int = 0
    said: list[str] = field(default_factory=list)


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
        self.lost_sessions = 0  # that could not be written at the end; known when `run` has returned
        self._inbox: _Inbox = _Inbox()
        self._lock = threading.Lock()
        self._num_waiting = 0  # accepted requests none of whose rows has started
        self._draining = False
        self._stopping = False
        self._dead = False
        self._leasing: dict[str, Owner] = {}  # accepted requests that wait for their session
        self._ongoing: dict[str, Ongoing] = {}
        self._rows: dict[Sequence, RowText] = {}
        self._events: dict[Owner, dict[str, Event]] = defaultdict(dict)
        self._step: Step | None = None  # submitted, not read
        self._planned = False  # whether there was something to run last time
        self._totals = {"prompt_tokens_total": 0, "generation_tokens_total": 0, "steps_total": 0, "step_seconds_total": 0.0}

    # From any thread.

    def submit(self, request: Request, owner: Owner) -> None:
        """Accept a request; Overloaded when the queue is full, Unavailable when draining or dead.

        One with a session waits for it outside of the worker's thread; the sessions may refuse it at once.
        """
        session = request.session
        if session is not None and self.sessions is None:
            raise InvalidRequest("this server keeps no sessions", param="session_id")
        if session is not None and session.keep and request.num_rows != 1:
            raise InvalidRequest("a turn of a session takes one prompt", param="contents")
        self._check_room()  # before the stops, which may take long to build
        stops = _stops(tuple(request.stop_ids), tuple(request.stop_texts))  # here, so that no step waits for it
        with self._lock:
            self._check_room()
            self._num_waiting += 1
            if session is None:
                self._inbox.put(_Accepted(request, owner, stops))
                return
            self._leasing[request.id] = owner
        try:
            self.sessions.lease(request, lambda result: self._leased(_Accepted(request, owner, stops, result)))
        except Exception:
            self._forget_leasing(request.id)
            raise

    def cancel(self, request_id: str) -> None:
        """End a request early; nothing more is delivered for it."""
        if self._forget_leasing(request_id):
            self.sessions.cancel(request_id)
        else:
            self._inbox.put(_Cancel(request_id))

    def cancel_owner(self, owner: Owner) -> None:
        """End all requests of one owner."""
        with self._lock:
            leasing = [request_id for request_id, known in self._leasing.items() if known == owner]
        for request_id in leasing:
            self.cancel(request_id)
        self._inbox.put(_CancelOwner(owner))

    def manage(self, action: Action, answer: Callable[[Page | Deleted | RwkvBatchError], None]) -> None:
        """Do something to the sessions; `answer` is called once, in any thread. InvalidRequest when there are none."""
        if self.sessions is None:
            raise InvalidRequest("this server keeps no sessions", param="session_id")
        self.sessions.manage(action, answer)

    def drain(self) -> None:
        """Refuse new requests, finish the others."""
        self._draining = True

    def stop(self) -> None:
        """Let `run` return after the step in progress."""
        self._stopping = True
        self._inbox.put(None)

    def undelivered(self) -> dict[str, int]:
        """Tokens that requests have sampled and not delivered yet, by their ids."""
        found: dict[str, int] = defaultdict(int)
        for row in list(self._rows.values()):
            found[row.ongoing.request.id] += row.num_gathered
        return found

    def stats(self) -> dict[str, int | float]:
        """Figures of this moment."""
        return {
            "requests_running": sum(ongoing.started for ongoing in list(self._ongoing.values())),
            "requests_waiting": self._num_waiting,
            "sequences_running": self.scheduler.num_running,
            "sequences_waiting": self.scheduler.num_waiting,
            "slots": self.scheduler.num_slots,
            "slots_free": self.scheduler.num_free,
            **self._totals,
            **self.engine.stats(),
            **(self.sessions.stats() if self.sessions is not None else {}),
            **(self.scheduler.prefixes.stats() if self.scheduler.prefixes is not None else {}),
        }

    def _check_room(self) -> None:
        if self._dead:
            raise Unavailable("the engine has failed and is being restarted", code="engine_dead")
        if self._draining or self._stopping:
            raise Unavailable("the server is shutting down", code="draining", retry_after=5.0)
        if self._num_waiting >= self.queue:
            raise Overloaded(f"the queue is full: {self.queue} requests wait")

    def _leased(self, accepted: "_Accepted") -> None:
        """A session is there for its request, or cannot be had."""
        with self._lock:
            wanted = self._leasing.pop(accepted.request.id, None) is not None
            if wanted:
                self._inbox.put(accepted)
        if not wanted and not isinstance(accepted.lease, RwkvBatchError):
            accepted.lease.release()

    def _forget_leasing(self, request_id: str) -> bool:
        """A request that waits for its session waits no more; whether it did."""
        with self._lock:
            waited = self._leasing.pop(request_id, None) is not None
            self._num_waiting -= waited
        return waited

    # The worker's thread.

    def run(self) -> None:
        """Step until stopped, then have the sessions written.

        An error of the engine fails every request and is raised again: the process cannot go on.
        """
        try:
            while not self._stopping:
                self.turn()
        except Exception:
            self._fail_all()
            raise
        finally:
            if self.sessions is not None:
                self.lost_sessions = self.sessions.close()

    def turn(self) -> None:
        """Take the inbox, submit the next step, read the one before, deliver."""
        self._take_inbox(self._patience())
        started = time.monotonic()
        plan = self.scheduler.next_plan()
        self._planned = plan is not None
        submitted = self._submit(plan) if plan else None
        if self._step is not None:
            self._read(self._step)
        self._step = submitted
        self.last_step = time.monotonic()
        if plan:
            self._totals["step_seconds_total"] += self.last_step - started
        self._flush()

    def _patience(self) -> float:
        """Return how many seconds there is nothing to do but to read the inbox."""
        if self._step is not None or self._planned:
            return 0
        return MASK_SECONDS if self._rows else IDLE_SECONDS

    def _take_inbox(self, seconds: float) -> None:
        for message in self._inbox.take(seconds):
            match message:
                case _Accepted():
                    self._start(message)
                case _Committed():
                    self._committed(message)
                case _Cancel(request_id):
                    self._cancel(request_id)
                case _CancelOwner(owner):
                    for request_id in [o.request.id for o in self._ongoing.values() if o.owner == owner]:
                        self._cancel(request_id)

    def _start(self, accepted: "_Accepted") -> None:
        request, owner, lease = accepted.request, accepted.owner, accepted.lease
        if isinstance(lease, RwkvBatchError):
            self._refuse(accepted, lease)
            return
        if lease is not None and lease.replay is not None:
            self._replay(accepted)
            return
        try:
            sequences = self.scheduler.add(request)
        except ValueError as error:
            self._refuse(accepted, InvalidRequest(str(error)))
            return
        ongoing = Ongoing(request, owner, len(sequences))
        try:
            rows = self._texts(ongoing, sequences, accepted)
        except Exception as error:
            self.scheduler.cancel(request.id)
            self._refuse(accepted, _told(request, error))
            return
        self._ongoing[request.id] = ongoing
        self._rows |= rows
        if lease is not None:
            self._progress(ongoing)  # empty: says that the turn was not refused
            if not request.session.keep:
                lease.release()
        if request.max_tokens == 0 and request.prompt_logprobs is None and all(row.lease is None for row in rows.values()):
            self._drop(request.id)  # nothing to compute
            for sequence, row in rows.items():
                del self._rows[sequence]
                self._end(sequence, row, "length")

    def _refuse(self, accepted: "_Accepted", error: RwkvBatchError) -> None:
        """A request does not start."""
        if accepted.lease is not None and not isinstance(accepted.lease, RwkvBatchError):
            accepted.lease.release()
        self._count_started()
        self._add_failure(accepted.request.id, accepted.owner, error)

    def _texts(self, ongoing: Ongoing, sequences: list[Sequence], accepted: "_Accepted") -> dict[Sequence, RowText]:
        """Return the text side of a request's rows, which start from the session's state if it has one."""
        request, lease = ongoing.request, accepted.lease
        initial, newlines = (lease.initial(), lease.newlines) if lease is not None else (None, 0)
        stops = NO_STOPS if request.sampling.min_tokens > 0 else accepted.stops
        kept = lease if lease is not None and request.session.keep else None
        rows = {}
        for sequence in sequences:
            if initial is not None:
                sequence.initial = initial
                if request.session.separate:
                    sequence.prompt = self._separated(sequence.prompt, newlines)
            rows[sequence] = RowText(ongoing, TextStream(self.tokenizer.token_bytes, stops), kept, sequence.prompt)
        return rows

    def _separated(self, prompt: list[int], newlines: int) -> list[int]:
        """Return the prompt with what makes one blank line between it and a text that ends in `newlines` newlines.

        A newline and a byte other than a blank, a tab or another newline are never in one World token.
        """
        token_bytes = self.tokenizer.token_bytes
        for count, token in enumerate(prompt):
            if not token_bytes[token]:
                return prompt  # the end of a text separates more than a blank line would
            rest = token_bytes[token].lstrip(b"\n")
            if rest:
                partial = rest if rest != token_bytes[token] else b""
                separator = b"\n" * (2 - newlines)
                return self.tokenizer.encode_bytes(separator + partial) + prompt[count + bool(partial) :]
        return prompt  # nothing but newlines

    def _replay(self, accepted: "_Accepted") -> None:
        """Say again what an earlier turn with the same idempotency key said."""
        request, answer = accepted.request, accepted.lease.replay
        accepted.lease.release()
        self._count_started()
        progress = Progress(request.id, [], [])
        if answer.text:
            progress.deltas.append(Delta(0, answer.text, answer.completion_tokens))
        counts = (answer.prompt_tokens, answer.completion_tokens, None, answer.cached_tokens)
        progress.finishes.append(Finish(0, answer.reason, *counts, answer.kept))
        self._events[accepted.owner][request.id] = progress

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
            self._totals["prompt_tokens_total"] += len(row.ids)
            text = self._rows.get(row.sequence)
            if text is None:
                continue  # another row of its request has failed just now
            try:
                self._submitted(row, text)
            except Exception as error:
                self._fail(text.ongoing, _told(text.ongoing.request, error))
        return step

    def _submitted(self, row: Row, text: RowText) -> None:
        """A row's part of a step is on its way: keep the states wanted behind it."""
        if not row.ids:
            if text.lease is not None:
                self._checkpoint(row.sequence, text)
            return
        if row.start and not text.ongoing.started:
            text.ongoing.started = True
            self._count_started()
        self._keep_prefix(row.sequence)
        if text.lease is not None and row.sequence.num_fed == len(row.sequence.prompt):
            self._after_prompt(row.sequence, text)

    def _keep_prefix(self, sequence: Sequence) -> None:
        """A part of a prompt is fed: others may start from the state there."""
        prefixes = self.scheduler.prefixes
        if prefixes is not None and not sequence.settling:
            followers = prefixes.fed(sequence, lambda: self._take_prefix(sequence.slot))
            if followers:
                self.scheduler.resume(followers)

    def _take_prefix(self, slot: int) -> Snapshot | None:
        """Return a copy of the state; None where there is no memory for it."""
        try:
            return self.engine.take(slot)
        except Unavailable as error:
            log.warning("a prefix is not kept: %s", error.message)
            return None

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
            newest = row.checkpoints[-1:]
            row.checkpoints = newest if newest and newest[0][0] <= row.stream.num_shown else row.checkpoints[:1]
            row.checkpoints.append((num_fed, self.engine.take(sequence.slot)))

    def _read(self, step: Step) -> None:
        """Turn a step's ids into text; end rows that stopped."""
        for sequence, tokens in step.scoring.collect() if step.scoring is not None else ():
            self._add_scores(sequence, tokens)
        for token in self.engine.collect(step):
            row = self._rows.get(token.sequence)
            if row is None or row.reason is not None:
                continue  # ended one step ago
            try:
                self._read_token(row, *token)
            except Exception as error:
                self._fail(row.ongoing, _told(row.ongoing.request, error))

    def _read_token(self, row: RowText, sequence: Sequence, id: int | None, logprobs: TokenLogprob | None) -> None:
        if row.lease is not None and row.lease.revoked:
            raise Conflict("the session was deleted during the turn", code="session_deleted")
        if id is None:
            self.scheduler.finish(sequence, poisoned=True)
            self._end(sequence, self._rows.pop(sequence), "error")
            return
        self._totals["generation_tokens_total"] += 1
        if sequence.mask is not None:
            sequence.mask.accept(id)
        text, stopped = row.stream.feed(id)
        row.count += 1
        row.num_gathered += 1
        if text:
            row.gathered += text
        if logprobs is not None:
            row.logprobs.append(logprobs)
        if row.lease is not None:
            row.generated.append(id)
        request = row.ongoing.request
        if row.count == request.sampling.min_tokens:
            row.stream.arm(_stops(tuple(request.stop_ids), tuple(request.stop_texts)))
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
        """Give the state away to be kept. The row's text is delivered now, its end when the state is kept."""
        newlines = self._newlines(row)
        self.scheduler.finish(sequence)
        del self._rows[sequence]
        if row.gathered or row.logprobs:
            self._add_delta(sequence, row, row.reason)
        finish = _finish(sequence, row, row.reason)
        answer = Answer("".join(row.said), row.reason, finish.prompt_tokens, finish.completion_tokens, finish.cached_tokens)
        try:
            row.lease.commit(snapshot, newlines, answer, lambda kept: self._inbox.put(_Committed(row.ongoing, finish, kept)))
        except Exception:
            row.lease.release()
            raise

    def _committed(self, message: "_Committed") -> None:
        """A row's state is kept, or could not be."""
        ongoing, kept = message.ongoing, message.kept
        request = ongoing.request
        if self._ongoing.get(request.id) is not ongoing:
            return  # cancelled meanwhile
        del self._ongoing[request.id]
        if isinstance(kept, RwkvBatchError):
            self._add_failure(request.id, ongoing.owner, kept)
        else:
            self._progress(ongoing).finishes.append(msgspec.structs.replace(message.finish, session=kept))

    def _newlines(self, row: RowText) -> int:
        """Return how many newlines, two at most, the text of prompt and answer ends in."""
        num_visible, rest = row.stream.visible()
        ids = chain(reversed(row.generated[:num_visible]), reversed(row.prompt))
        count = 0
        for data in chain((rest,), (self.tokenizer.token_bytes[id] for id in ids)):
            stripped = data.rstrip(b"\n")
            count += len(data) - len(stripped)
            if stripped or count >= 2:
                return min(count, 2)
        return min(count + row.lease.newlines, 2)

    def _fail(self, ongoing: Ongoing, error: RwkvBatchError) -> None:
        """End a request with an error."""
        self._cancel(ongoing.request.id)
        self._add_failure(ongoing.request.id, ongoing.owner, error)

    def _end(self, sequence: Sequence, row: RowText, reason: Reason) -> None:
        if row.lease is not None:
            row.lease.release()
        if row.gathered or row.logprobs:
            self._add_delta(sequence, row, reason)
        self._progress(row.ongoing).finishes.append(_finish(sequence, row, reason))
        row.ongoing.num_open -= 1
        if row.ongoing.num_open == 0:
            del self._ongoing[row.ongoing.request.id]

    def _add_delta(self, sequence: Sequence, row: RowText, reason: Reason | None = None) -> None:
        logprobs = _take_logprobs(row, reason) if row.logprobs else None
        self._progress(row.ongoing).deltas.append(Delta(sequence.index, row.gathered, row.num_gathered, logprobs))
        if row.lease is not None and row.ongoing.request.session.key is not None:
            row.said.append(row.gathered)
        row.gathered, row.num_gathered = "", 0

    def _add_scores(self, sequence: Sequence, tokens: list[TokenLogprob]) -> None:
        """Pass on how likely a piece of a prompt was; a row that samples nothing ends with the last piece."""
        row = self._rows.get(sequence)
        if row is None:
            return
        self._progress(row.ongoing).scores.append(PromptScore(sequence.index, tokens))
        row.num_scored += len(tokens)
        if sequence.request.max_tokens == 0 and row.num_scored == len(sequence.prompt) - 1:
            self._ended(sequence, row, "length")

    def _progress(self, ongoing: Ongoing) -> Progress:
        """Return what this step brought the request so far."""
        events = self._events[ongoing.owner]
        request_id = ongoing.request.id
        if request_id not in events:
            events[request_id] = Progress(request_id, [], [])
        return events[request_id]

    def _add_failure(self, request_id: str, owner: Owner, error: RwkvBatchError) -> None:
        self._events[owner][request_id] = Failure.of(request_id, error)

    def _flush(self) -> None:
        batch = {owner: list(events.values()) for owner, events in self._events.items() if events}
        if batch:
            self._events.clear()
            self.deliver(batch)

    def _count_started(self) -> None:
        with self._lock:
            self._num_waiting -= 1

    def _fail_all(self) -> None:
        """Tell every caller, also those whose requests are still in the inbox; what ended before the error has ended."""
        with self._lock:
            self._dead = True
            leasing, self._leasing = self._leasing, {}
        for row in self._rows.values():
            if row.lease is not None:
                row.lease.release()
        error = EngineFailed("a step of the engine failed; the server restarts it")
        waiting = [(m.request, m.owner) for m in self._inbox.take(0) if isinstance(m, _Accepted)]
        for request, owner in [(o.request, o.owner) for o in self._ongoing.values()] + waiting:
            self._add_failure(request.id, owner, error)
        for request_id, owner in leasing.items():
            self._add_failure(request_id, owner, error)
        self._flush()


class _Accepted(NamedTuple):
    request: Request
    owner: Owner
    stops: Stops
    lease: Lease | RwkvBatchError | None = None


class _Committed(NamedTuple):
    ongoing: Ongoing
    finish: Finish
    kept: Kept | RwkvBatchError


class _Cancel(NamedTuple):
    request_id: str


class _CancelOwner(NamedTuple):
    owner: Owner


class _Inbox:
    """Messages from other threads; None only wakes."""

    def __init__(self):
        self._queue: queue.SimpleQueue = queue.SimpleQueue()

    def put(self, message: _Accepted | _Committed | _Cancel | _CancelOwner | None) -> None:
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


def _told(request: Request, error: Exception) -> RwkvBatchError:
    """What is told of an error that concerns one request alone; one that nobody designed goes to the log."""
    if isinstance(error, RwkvBatchError):
        return error
    log.error("request %s failed", request.id, exc_info=error)
    return EngineFailed("internal error", code="internal")


def _finish(sequence: Sequence, row: RowText, reason: Reason) -> Finish:
    error = NOT_FINITE if reason == "error" else None
    return Finish(sequence.index, reason, len(row.prompt), row.count, error, sequence.cached)


def _take_logprobs(row: RowText, reason: Reason | None) -> list[TokenLogprob]:
    """Return those of the ids that became visible; at the row's end the rest, without what a stop text hides."""
    num_visible, rest = row.stream.visible()
    count = num_visible - row.num_reported
    if reason is not None:
        last, request = row.logprobs[-1].id, row.ongoing.request
        by_text = reason == "stop" and last != 0 and last not in request.stop_ids
        count = count + bool(rest) if by_text else len(row.logprobs)
    taken, row.logprobs = row.logprobs[:count], row.logprobs[count:]
    row.num_reported += count
    return taken


@lru_cache(maxsize=32)  # of 5 MiB each at most, by the limits of the routes
def _stops(stop_ids: tuple[int, ...], stop_texts: tuple[bytes, ...]) -> Stops:
    return Stops(stop_ids, stop_texts)
