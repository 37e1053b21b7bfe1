"""The requests in progress: their rows, and the ways in which they end."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import msgspec

from rwkv_batch.engine.admission import NOBODY, Accepted, ActiveRequest, Admission, Owner, Sessions
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.row_output import Outbox, RowOutput
from rwkv_batch.errors import EngineFailed, RwkvBatchError, Unavailable
from rwkv_batch.grammar.masks import Grammars
from rwkv_batch.model.state import Snapshot
from rwkv_batch.request import Event, Failure, Finish, Progress, PromptScore, Reason, Request, Sequence, TokenLogprob
from rwkv_batch.scheduling.scheduler import Scheduler
from rwkv_batch.session_messages import CommitResult
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.tuned.variants import EngineVariants

log = logging.getLogger("rwkv_batch.engine")


class Turn(NamedTuple):
    """A row whose text is complete, and the state to keep of it: the one behind `snapshot` and `ids`.

    all_ids  that lead to it from the session's state before
    """

    row: RowOutput
    finish: Finish
    snapshot: Snapshot
    newlines: int
    ids: list[int]
    all_ids: list[int]


class ActiveRequests(Admission):
    """The requests that were taken from the inbox. All of it is of the loop's thread, but for the ends of turns that are kept.

    deliver  called after each step that brought something, and in any thread when turns are kept: {owner: events}
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        deliver: Callable[[dict[Owner, list[Event]]], None],
        sessions: Sessions | None,
        grammars: Grammars | None,
        queue: int,
        tuned: EngineVariants | None = None,
    ):
        super().__init__(sessions, grammars, queue, tuned)
        self.engine = engine
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.deliver = deliver
        self._active: dict[str, ActiveRequest] = {}
        self._rows: dict[Sequence, RowOutput] = {}
        self._outbox = Outbox()
        self._ending: list[tuple[Sequence, RowOutput]] = []  # rows with complete texts, whose states are to be kept
        self._turns: list[Turn] = []  # to be kept when their texts are delivered
        self._ends = threading.RLock()  # held by who ends a request: nothing is told of it after a cancel, or before its text
        self._giving = False  # the loop's thread holds it, to give turns away
        self._told_of: dict[Owner, list[Event]] | None = None  # another one does, to tell of some that are kept

    def _refuse(self, accepted: Accepted, error: RwkvBatchError) -> None:
        """A request does not start."""
        if accepted.lease is not None and not isinstance(accepted.lease, RwkvBatchError):
            accepted.lease.release()
        self.count_started()
        self._outbox.fail(accepted.request.id, accepted.owner, error)

    def _cancel(self, request_id: str) -> None:
        active = self._active.get(request_id)
        if active is None:
            return
        for sequence in self._drop(active):
            row = self._rows.pop(sequence)
            row.release()
        with self._ends:
            self._active.pop(request_id, None)
        self._outbox.forget(active)

    def _drop(self, active: ActiveRequest) -> list[Sequence]:
        """Take a request out of the scheduler; its slots are free for the next plan."""
        self.note_start(active)
        return self.scheduler.cancel(active.request.id)

    def _told(self, active: ActiveRequest, finish: Finish, kept: CommitResult | RwkvBatchError) -> None:
        """A row's state is kept, or could not be: its request has ended. Any thread: no step is waited for to say so."""
        id = active.request.id
        with self._ends:
            if self._active.get(id) is not active:
                return  # cancelled meanwhile
            if isinstance(kept, RwkvBatchError):
                event = Failure.of(id, kept)
            else:
                event = Progress(id, [], [msgspec.structs.replace(finish, session=kept)])
            if self._giving:  # at once, before the text is delivered: with it
                self._outbox.end_turn(active, event)
            elif self._told_of is not None:
                self._told_of.setdefault(active.owner, []).append(event)
            elif active.owner is not NOBODY:
                self.deliver({active.owner: [event]})
            del self._active[id]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What is told of turns inside is delivered together: each delivery wakes the thread that sends."""
        with self._ends:
            self._told_of = {}
            try:
                yield
            finally:
                events, self._told_of = self._told_of, None
                events.pop(NOBODY, None)
                if events:
                    self.deliver(events)

    def _fail(self, active: ActiveRequest, error: RwkvBatchError) -> None:
        """End a request with an error."""
        self._cancel(active.request.id)
        self._outbox.fail(active.request.id, active.owner, error)

    def _end(self, sequence: Sequence, row: RowOutput, reason: Reason) -> None:
        row.release(nonfinite=reason == "error")
        self._outbox.end(sequence, row, reason)
        row.active.num_tokens += row.count
        row.active.num_open -= 1
        if row.active.num_open == 0:
            del self._active[row.active.request.id]

    def _complete(self, sequence: Sequence, row: RowOutput) -> None:
        """The row's text is all that its grammar allows."""
        row.undelivered += row.detokenizer.finish()
        self._ended(sequence, row, "stop")

    def _ended(self, sequence: Sequence, row: RowOutput, reason: Reason) -> None:
        """The row's text is complete; its state is not yet, when it is kept."""
        if row.lease is None:
            self.scheduler.finish(sequence)
            self._end(sequence, self._rows.pop(sequence), reason)
            return
        row.reason = reason
        self._ending.append((sequence, row))

    def _add_scores(self, sequence: Sequence, tokens: list[TokenLogprob]) -> None:
        """Pass on how likely a piece of a prompt was; a row that samples nothing ends with the last piece."""
        row = self._rows.get(sequence)
        if row is None:
            return
        self._outbox.progress(row.active).scores.append(PromptScore(sequence.index, tokens))
        row.num_scored += len(tokens)
        if sequence.request.max_tokens == 0 and row.num_scored == len(sequence.prompt) - 1:
            self._ended(sequence, row, "length")

    def _keep_ended(self) -> None:
        """Have the states of rows with complete texts kept; those that end together are copied together."""
        ending = [pair for pair in self._ending if pair[0] in self._rows]
        self._ending = []
        whole = [pair for pair in ending if self._lacks_last_id(*pair)]
        for (_, row), snapshot in zip(whole, self._snapshots([sequence.slot for sequence, _ in whole]), strict=True):
            if not isinstance(snapshot, RwkvBatchError):  # else the checkpoint before will do
                row.add_checkpoint(row.count - 1, snapshot)
        for sequence, row in ending:
            try:
                self._keep(sequence, row)
            except Exception as error:
                self._fail(row.active, told(row.active.request, error))

    def _lacks_last_id(self, sequence: Sequence, row: RowOutput) -> bool:
        """Whether a slot has seen all but the last id: no step was planned since."""
        late = sequence.mask is not None and self.scheduler.late_draws  # it may have the last id already
        return 0 < row.count == sequence.num_sampled and not late

    def _snapshots(self, slots: list[int]) -> list[Snapshot | RwkvBatchError]:
        """Return copies of the states of slots, or why there is none."""
        if not slots:
            return []
        try:
            return self.engine.take_many(slots)
        except Unavailable:  # not all at once
            return [self._snapshot(slot) for slot in slots]

    def _snapshot(self, slot: int) -> Snapshot | RwkvBatchError:
        try:
            return self.engine.take(slot)
        except Unavailable as error:
            return error

    def _keep(self, sequence: Sequence, row: RowOutput) -> None:
        """Have the state at the end of a row's visible text kept, which may have to be computed first."""
        snapshot, ids = row.remainder(self.tokenizer)
        if not ids or row.lease.logs:
            self._commit(sequence, row, snapshot, ids)
            return
        self.engine.put(sequence.slot, snapshot)
        row.checkpoints.clear()
        self.scheduler.finalize(sequence, ids)

    def _commit(self, sequence: Sequence, row: RowOutput, snapshot: Snapshot, ids: list[int]) -> None:
        """The state to keep is there, which `ids` lead to. The text is delivered now, its end when the state is kept."""
        newlines, all_ids = row.newlines(self.tokenizer), row.turn(self.tokenizer)
        self.scheduler.finish(sequence)
        del self._rows[sequence]
        row.active.num_tokens += row.count
        self._outbox.add_rest(sequence, row, row.reason)
        self._turns.append(Turn(row, row.finish(sequence, row.reason), snapshot, newlines, ids, all_ids))

    def _deliver(self) -> None:
        """Have the states of turns kept that ended, and deliver what there is, with their texts before they are told of."""
        with self._ends:
            if self._turns:
                turns, self._turns, self._giving = self._turns, [], True
                with self.sessions.together():
                    for turn in turns:
                        self._give_away(turn)
                self._giving = False
            if batch := self._outbox.take():
                self.deliver(batch)

    def _give_away(self, turn: Turn) -> None:
        row, active = turn.row, turn.row.active
        done = partial(self._told, active, turn.finish)
        try:
            row.lease.commit(turn.snapshot, turn.newlines, row.answer(turn.finish), done, ids=turn.ids, turn=turn.all_ids)
        except Exception as error:
            row.lease.release()
            self._told(active, turn.finish, told(active.request, error))

    def _fail_all(self) -> None:
        """Tell every caller, also those whose requests are still in the inbox; what ended before the error has ended."""
        waiting = self.close_admission()
        for row in (*self._rows.values(), *(turn.row for turn in self._turns)):
            row.release()
        error = EngineFailed("a step of the engine failed; the server restarts it")
        with self._ends:
            active, self._active = list(self._active.values()), {}
        for request_id, owner in [(a.request.id, a.owner) for a in active] + waiting:
            self._outbox.fail(request_id, owner, error)
        if batch := self._outbox.take():
            self.deliver(batch)


def told(request: Request, error: Exception) -> RwkvBatchError:
    """What is told of an error that concerns one request alone; one that nobody designed goes to the log."""
    if isinstance(error, RwkvBatchError):
        return error
    log.error("request %s failed", request.id, exc_info=error)
    return EngineFailed("internal error", code="internal")
