"""The requests in progress: their rows, and the ways in which they end."""

import contextlib
from collections.abc import Callable

import msgspec

from rwkv_batch.engine.admission import Accepted, ActiveRequest, Admission, Committed, Inbox, Owner, Sessions
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.row_output import Outbox, RowOutput
from rwkv_batch.errors import EngineFailed, RwkvBatchError, Unavailable
from rwkv_batch.grammar.masks import Grammars
from rwkv_batch.model.state import Snapshot
from rwkv_batch.request import Event, Reason, Sequence
from rwkv_batch.scheduling.scheduler import Scheduler
from rwkv_batch.text.tokenizer import Tokenizer


class ActiveRequests(Admission):
    """The requests that were taken from the inbox. All of it is of the loop's thread.

    deliver  called after each step that brought something: {owner: events}
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
    ):
        super().__init__(sessions, grammars, queue)
        self.engine = engine
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.deliver = deliver
        self._active: dict[str, ActiveRequest] = {}
        self._rows: dict[Sequence, RowOutput] = {}
        self._outbox = Outbox()
        self._kept = Inbox()  # what became of states that were given away
        self._num_committing = 0  # of which nothing has come yet

    def _refuse(self, accepted: Accepted, error: RwkvBatchError) -> None:
        """A request does not start."""
        if accepted.lease is not None and not isinstance(accepted.lease, RwkvBatchError):
            accepted.lease.release()
        self.count_started()
        self._outbox.fail(accepted.request.id, accepted.owner, error)

    def _cancel(self, request_id: str) -> None:
        if request_id in self._active:
            for sequence in self._drop(request_id):
                row = self._rows.pop(sequence)
                row.release()
            self._outbox.forget(self._active.pop(request_id))

    def _drop(self, request_id: str) -> list[Sequence]:
        """Take a request out of the scheduler; its slots are free for the next plan."""
        self.note_start(self._active[request_id])
        return self.scheduler.cancel(request_id)

    def _committed(self, message: Committed) -> None:
        """A row's state is kept, or could not be."""
        self._num_committing -= 1
        active, kept, id = message.active, message.kept, message.active.request.id
        if self._active.get(id) is not active:
            return  # cancelled meanwhile
        del self._active[id]
        if isinstance(kept, RwkvBatchError):
            self._outbox.fail(id, active.owner, kept)
        else:
            self._outbox.progress(active).finishes.append(msgspec.structs.replace(message.finish, session=kept))

    def _tell(self, message: Committed) -> None:
        """Have the loop hear what became of a state. Any thread."""
        self._kept.put(message)
        self._inbox.put(None)

    def _fail(self, active: ActiveRequest, error: RwkvBatchError) -> None:
        """End a request with an error."""
        self._cancel(active.request.id)
        self._outbox.fail(active.request.id, active.owner, error)

    def _end(self, sequence: Sequence, row: RowOutput, reason: Reason) -> None:
        row.release(nonfinite=reason == "error")
        self._outbox.end(sequence, row, reason)
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
        late = sequence.mask is not None and self.scheduler.late_draws  # its slot may have the last id already
        if 0 < row.count == sequence.num_sampled and not late:  # no step was planned since: the slot lacks the last id alone
            with contextlib.suppress(Unavailable):
                row.add_checkpoint(row.count - 1, self.engine.take(sequence.slot))
        snapshot, ids = row.remainder(self.tokenizer)
        if not ids or row.lease.logs:
            self._commit(sequence, row, snapshot, ids)
            return
        self.engine.put(sequence.slot, snapshot)
        row.checkpoints.clear()
        self.scheduler.finalize(sequence, ids)

    def _commit(self, sequence: Sequence, row: RowOutput, snapshot: Snapshot, ids: list[int]) -> None:
        """Give the state away to be kept, which `ids` lead to. The text is delivered now, its end when the state is kept."""
        newlines = row.newlines(self.tokenizer)
        self.scheduler.finish(sequence)
        del self._rows[sequence]
        self._outbox.add_rest(sequence, row, row.reason)
        finish = row.finish(sequence, row.reason)
        self._num_committing += 1
        try:
            row.lease.commit(
                snapshot,
                newlines,
                row.answer(finish),
                lambda kept: self._tell(Committed(row.active, finish, kept)),
                ids=ids,
                turn=row.turn(self.tokenizer),
            )
        except Exception:
            self._num_committing -= 1
            row.lease.release()
            raise

    def _fail_all(self) -> None:
        """Tell every caller, also those whose requests are still in the inbox; what ended before the error has ended."""
        waiting = self.close_admission()
        for row in self._rows.values():
            row.release()
        error = EngineFailed("a step of the engine failed; the server restarts it")
        for request_id, owner in [(a.request.id, a.owner) for a in self._active.values()] + waiting:
            self._outbox.fail(request_id, owner, error)
        if batch := self._outbox.take():
            self.deliver(batch)
