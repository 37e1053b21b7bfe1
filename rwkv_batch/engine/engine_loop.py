"""The one thread that owns the device: inbox, plan, step, text, events.

Callers submit and cancel from any thread; what a step brought is delivered once, grouped by owner. The step after is already
submitted when a step's ids are read, so a row that stops has run one step too many: that overshoot is dropped here. What is
kept of a session's row is a checkpoint inside the text that was shown and the ids from there to its end, where the sessions
keep a log; elsewhere the row is finalized, which means brought to exactly that text.
"""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from rwkv_batch.engine.active_requests import ActiveRequests, told
from rwkv_batch.engine.admission import Accepted, ActiveRequest, Cancel, CancelOwner, Masked, Owner, Sessions
from rwkv_batch.engine.engine import Engine, Step
from rwkv_batch.engine.row_output import CheckpointTimes, RowOutput, again, begin_forced, rows_of
from rwkv_batch.engine.token_mask import MaskPatience
from rwkv_batch.errors import Conflict, EngineFailed, InvalidRequest, RwkvBatchError, Unavailable
from rwkv_batch.grammar.masks import GrammarMask, Grammars
from rwkv_batch.model.state import Snapshot, Together
from rwkv_batch.request import Event, Sequence, TokenLogprob
from rwkv_batch.scheduling.plan import Plan, Row
from rwkv_batch.scheduling.scheduler import Scheduler
from rwkv_batch.served.variants import Variant
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.tuned.variants import EngineVariants

log = logging.getLogger("rwkv_batch.engine")

CHECKPOINT_TOKENS = 16  # sampled tokens between the checkpoints of a row whose state is kept, and the most where states are
MOST_CHECKPOINT_TOKENS = 64  # small: there a copy takes the host longer than feeding the tokens again takes the device
LARGE_STATE = 16 * 2**20  # bytes
IDLE_SECONDS = 0.25  # how long an idle loop sleeps between two signs of life
MASK_SECONDS = 0.001  # the same where all rows wait for their masks


class InFlight(NamedTuple):
    """A step that was submitted and not read, the groups of its plan, and whether it feeds no prompts."""

    step: Step
    groups: int
    decodes: bool


class Flight:
    """The steps under way, in the order in which they were submitted. `most`: that stay so while another is submitted."""

    def __init__(self, most: int):
        self.most = most
        self._steps: deque[InFlight] = deque()

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def newest(self) -> InFlight:
        """The one submitted last; IndexError when there is none."""
        return self._steps[-1]

    def add(self, step: Step, plan: Plan) -> None:
        """A step was submitted, after those that are due were read."""
        self._steps.append(InFlight(step, plan.groups, not plan.rows[0].ids))

    def due(self, plan: Plan | None) -> Iterator[InFlight]:
        """Take off what has to be read now that `plan` is submitted: the first ones, until there is room for its step, and no
        row of it is in one of the others. Without a plan, the first one."""
        while self._steps:
            if plan is not None and len(self._steps) < self.most and not any(s.groups & plan.groups for s in self._steps):
                return
            yield self._steps.popleft()
            if plan is None:
                return


class EngineLoop(ActiveRequests):
    """Runs requests on an engine until stopped.

    deliver   called in the loop's thread after each step that brought something: {owner: events}
    sessions  gives leases for requests that name a session; None = such requests are refused
    grammars  makes masks for requests that name a grammar; None likewise
    tuned     finds the states that requests name; None likewise
    queue     requests that may wait for their first slot
    checkpoint_tokens  sampled tokens between the checkpoints of a row whose state is kept
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        deliver: Callable[[dict[Owner, list[Event]]], None],
        *,
        sessions: Sessions | None = None,
        grammars: Grammars | None = None,
        tuned: EngineVariants | None = None,
        queue: int = 512,
        checkpoint_tokens: int = CHECKPOINT_TOKENS,
    ):
        super().__init__(engine, scheduler, tokenizer, deliver, sessions, grammars, queue, tuned)
        if grammars is not None:
            grammars.notify = lambda masks: self._inbox.put(Masked(masks) if masks else None)
        self.checkpoint_tokens = checkpoint_tokens
        self.info = None  # what the outside is told about the engine; set by whoever puts it together
        self.last_step = time.monotonic()
        self.lost_sessions = 0  # that could not be written at the end; known when `run` has returned
        self._flight = Flight(scheduler.num_groups)
        self._times = CheckpointTimes()
        self._planned = False  # whether there was something to run last time
        self._mask_patience = MaskPatience()
        self._pace = scheduler.pace
        self._totals = {"prompt_tokens_total": 0, "generation_tokens_total": 0, "steps_total": 0, "step_seconds_total": 0.0}

    def show_variants(self, variants: list[Variant]) -> None:
        """The outside is told which there are now. Any thread."""
        self.info = msgspec.structs.replace(self.info, variants=variants)

    def remember_in(self, file: Path) -> None:
        """Have again what an engine before this one was told to load, and write down in `file` what this one is."""
        if self.tuned is not None:
            self.tuned.remember_in(file)

    def sampled(self) -> dict[str, int]:
        """Tokens that requests have sampled so far, by their ids."""
        found = defaultdict(int, {id: active.num_tokens for id, active in list(self._active.items())})
        for row in list(self._rows.values()):
            found[row.active.request.id] += row.count
        return found

    def stats(self) -> dict[str, int | float]:
        """Figures of this moment."""
        return {
            "requests_running": sum(active.started for active in list(self._active.values())),
            "requests_waiting": self._num_waiting,
            **stats_of(self.scheduler),
            **self._totals,
            **self.engine.stats(),
            **(self.sessions.stats() if self.sessions is not None else {}),
        }

    def run(self) -> None:
        """Step until stopped, then have the sessions written.

        An error of the engine fails every request and is raised again: the process cannot go on.
        """
        try:
            while not self._stopping:
                self.step()
        except Exception:
            self._fail_all()
            raise
        finally:
            if self.sessions is not None:
                self.lost_sessions = self.sessions.close()

    def step(self) -> None:
        """Take the inbox, submit the next step, read the one before, deliver."""
        self._take_inbox(self._patience())
        waited = self._await_masks()
        started = time.monotonic()
        plan = self.scheduler.next_plan()
        self._planned = plan is not None
        submitted = self._submit(plan) if plan else None
        if waited and submitted is not None and self._flight.newest.step.arrived is not None:
            self._mask_patience.judge(was_long=self._flight.newest.step.arrived.query())
        self._deliver()  # what the inbox brought, before a step is waited for
        if submitted is not None and submitted.early is not None:
            self._read(submitted.early)
        for first in self._flight.due(plan):
            self._read(first.step, in_turn=True)
            self._mask_patience.note_step(is_typical=first.decodes)
        if submitted is not None:
            self._flight.add(submitted, plan)
        self.last_step = time.monotonic()
        if plan:
            self._totals["step_seconds_total"] += self.last_step - started
        self._deliver()

    def _patience(self) -> float:
        """Return how many seconds there is nothing to do but to read the inbox."""
        if self._flight or self._planned:
            return 0
        return MASK_SECONDS if self._rows else IDLE_SECONDS

    def _await_masks(self) -> bool:
        """Wait for masks that the next step can use, while the device is busy with the one before; returns whether it did."""
        if not (self._flight and self._flight.newest.decodes and self.scheduler.late_draws):
            return False
        deadline, waited = self._mask_patience.deadline(), False
        while self.scheduler.awaits_masks and (left := deadline - time.monotonic()) > 0:
            self._take_inbox(left)
            waited = True
        return waited

    def _take_inbox(self, seconds: float) -> None:
        messages = self._inbox.take(seconds)
        for message in messages:
            match message:
                case Accepted():
                    self._start(message)
                case Masked(masks):
                    self._masked(masks)
                case Cancel(request_id):
                    self._cancel(request_id)
                case CancelOwner(owner):
                    for request_id in [o.request.id for o in list(self._active.values()) if o.owner == owner]:
                        self._cancel(request_id)
        self._keep_ended()

    def _start(self, accepted: Accepted) -> None:
        request, owner, lease = accepted.request, accepted.owner, accepted.lease
        if isinstance(lease, RwkvBatchError):
            self._refuse(accepted, lease)
            return
        if lease is not None and lease.replay is not None:
            lease.release()
            self.count_started()
            self._outbox.put(owner, again(request, lease.replay))
            return
        try:
            sequences = self.scheduler.add(request)
        except ValueError as error:
            self._refuse(accepted, InvalidRequest(str(error)))
            return
        active = ActiveRequest(request, owner, len(sequences))
        try:
            rows = rows_of(active, sequences, accepted, self.tokenizer)
        except Exception as error:
            self.scheduler.cancel(request.id)
            self._refuse(accepted, told(request, error))
            return
        if accepted.masks is not None and (self.scheduler.mixed or not request.sampling.penalized):  # else counting takes long
            for sequence, row in rows.items():
                if row.may_be_fed() and not sequence.mask.complete:
                    begin_forced(sequence, row, self.tokenizer.token_bytes)
                    self._totals["generation_tokens_total"] += row.count
        self._active[request.id] = active
        self._rows |= rows
        if lease is not None:
            self._outbox.progress(active)  # empty: says that the turn was not refused
            if not request.session.keep:
                lease.release()
        if request.max_tokens == 0 and request.prompt_logprobs is None and all(row.lease is None for row in rows.values()):
            self._drop(active)  # nothing to compute
            for sequence, row in rows.items():
                del self._rows[sequence]
                self._end(sequence, row, "length")

    def _submit(self, plan: Plan) -> Step:
        if self._pace is not None:
            self._pace.began(plan, time.monotonic())
        step = self.engine.submit(plan)
        if self._pace is not None and step.arrived is None:  # the device does not run beside the host
            self._pace.ended(time.monotonic())
        self._totals["steps_total"] += 1
        # Rows whose states are kept now, and how many ids they generated.
        wanted = self._times.take(self._totals["steps_total"], self.checkpoint_tokens, self._rows, self.scheduler.late_draws)
        for row in plan.rows:
            if not row.ids:
                continue  # nearly all of them
            self._totals["prompt_tokens_total"] += len(row.ids)
            text = self._rows.get(row.sequence)
            if text is not None and self._fed(row, text):  # None: another row of its request has failed just now
                wanted.append((row.sequence, text, 0))
        self._checkpoint(wanted)
        return step

    def _fed(self, row: Row, text: RowOutput) -> bool:
        """A part of a row's prompt is on its way; whether the state behind it is the first checkpoint."""
        sequence = row.sequence
        try:
            if row.start:
                self.note_start(text.active)
            keep_prefix(self.engine, self.scheduler, sequence)
            if text.lease is None or sequence.num_prefilled < len(sequence.prompt):
                return False
            if not sequence.finalizing and sequence.request.max_tokens > 0:
                return True
            text.reason = text.reason or "length"
            self._commit(sequence, text, self.engine.take(sequence.slot), [])
        except Exception as error:
            self._fail(text.active, told(text.active.request, error))
        return False

    def _checkpoint(self, wanted: list[tuple[Sequence, RowOutput, int]]) -> None:
        """Keep the states of rows, which hold so many generated ids; rows that want it behind one step share the copy."""
        for (sequence, row, count), state in zip(wanted, self._snapshots([s.slot for s, _, _ in wanted]), strict=True):
            if isinstance(state, RwkvBatchError):
                self._fail(row.active, state)
                continue
            row.add_checkpoint(count, state)
            if count == 0:
                self._times.begin(self._totals["steps_total"], self.checkpoint_tokens, sequence)

    def _read(self, step: Step, *, in_turn: bool = False) -> None:
        """Turn a step's ids into text; end rows that stopped. `in_turn`: it is the first one under way."""
        for sequence, tokens in step.scoring.collect() if step.scoring is not None else ():
            self._add_scores(sequence, tokens)
        tokens = self.engine.read(step)
        if in_turn and self._pace is not None and step.arrived is not None:
            self._pace.ended(time.monotonic())
        rows, num_quick = self._rows, 0
        for sequence, id, logprobs in tokens:
            row = rows.get(sequence)
            if row is None or row.reason is not None:
                continue  # ended one step ago
            try:
                if row.count < row.quick_until and row.feed_quickly(id):
                    num_quick += 1
                    if row.num_undelivered >= row.due_at:
                        self._outbox.add_delta(sequence, row)
                else:
                    self._read_token(row, sequence, id, logprobs)
            except Exception as error:
                self._fail(row.active, told(row.active.request, error))
        self._totals["generation_tokens_total"] += num_quick
        self._keep_ended()
        if self.grammars is not None:
            self.grammars.flush()

    def _read_token(self, row: RowOutput, sequence: Sequence, id: int | None, logprobs: TokenLogprob | None) -> None:
        if row.lease is not None and row.lease.revoked:
            raise Conflict("the session was deleted during the turn", code="session_deleted")
        if id is None:
            self.scheduler.finish(sequence, nonfinite=True)
            self._end(sequence, self._rows.pop(sequence), "error")
            return
        self._totals["generation_tokens_total"] += 1
        if sequence.mask is not None:
            sequence.mask.accept(id)
        if row.feed(id, logprobs):
            self._ended(sequence, row, "stop")
        elif sequence.mask is not None and sequence.mask.ended:
            self._complete(sequence, row)
        elif row.count == sequence.request.max_tokens:
            row.undelivered += row.detokenizer.finish()
            self._ended(sequence, row, "length")
        elif row.undelivered and 0 < sequence.request.chunk_size <= row.num_undelivered:
            self._outbox.add_delta(sequence, row)

    def _masked(self, masks: list[GrammarMask]) -> None:
        """The grammars of rows leave no choice."""
        for mask in masks:
            row = self._rows.get(mask.sequence)
            if row is None or row.reason is not None:
                continue
            if mask.error is not None:
                self._fail(row.active, EngineFailed(f"the grammar cannot be followed: {mask.error}", code="grammar_failed"))
            elif mask.ended:
                self._complete(mask.sequence, row)
            elif row.may_be_fed():
                self._feed_forced(mask.sequence, row)

    def _feed_forced(self, sequence: Sequence, row: RowOutput) -> None:
        """What a row must say is fed as a prompt is, and not drawn token by token."""
        last, request = sequence.mask.last, sequence.request
        ids = sequence.mask.take_forced(
            request.max_tokens - row.count, lambda ids: self.scheduler.is_sooner_fed(sequence, len(ids))
        )
        self._totals["generation_tokens_total"] += len(ids)
        if any(row.feed(id, None) for id in ids):
            self._ended(sequence, row, "stop")
        elif ids and sequence.mask.ended:
            self._complete(sequence, row)
        elif ids:
            self.scheduler.feed_forced(sequence, last, ids)
            if row.undelivered and 0 < request.chunk_size <= row.num_undelivered:
                self._outbox.add_delta(sequence, row)


def checkpoint_distance(state_bytes: int) -> int:
    """Return how many sampled tokens lie between two checkpoints of a row, for a model with states of this size."""
    return max(CHECKPOINT_TOKENS, min(MOST_CHECKPOINT_TOKENS, CHECKPOINT_TOKENS * LARGE_STATE // state_bytes))


def stats_of(scheduler: Scheduler) -> dict[str, int | float]:
    """Figures of slots and cached prefixes."""
    return {
        "sequences_running": scheduler.num_running,
        "sequences_waiting": scheduler.num_waiting,
        "slots": scheduler.num_slots,
        "slots_free": scheduler.num_free,
        **(scheduler.prefixes.stats() if scheduler.prefixes is not None else {}),
        **(scheduler.pace.stats() if scheduler.pace is not None else {}),
    }


def keep_prefix(engine: Engine, scheduler: Scheduler, sequence: Sequence) -> None:
    """A part of a prompt is fed: others may start from the state there."""
    prefixes = scheduler.prefixes
    if prefixes is not None and not (sequence.finalizing or sequence.resumed):
        followers = prefixes.fed(sequence, lambda: take_prefix(engine, sequence))
        if followers:
            scheduler.resume(followers)


def take_prefix(engine: Engine, sequence: Sequence) -> Snapshot | Together | None:
    """Return a copy of the state; None where there is no memory for it."""
    try:
        return engine.take_of(sequence)
    except Unavailable as error:
        log.warning("a prefix is not kept: %s", error.message)
        return None
