"""The requests in progress: their rows, and the ways in which they end."""

from collections.abc import Callable

import msgspec

from rwkv_batch.engine.admission import Accepted, ActiveRequest, Admission, Committed, Inbox, Owner, Sessions
from rwkv_batch.engine.row_output import Outbox, RowOutput
from rwkv_batch.errors import EngineFailed, RwkvBatchError
from rwkv_batch.grammar.masks import Grammars
from rwkv_batch.request import Event, Reason, Sequence
from rwkv_batch.scheduling.scheduler import Scheduler


class ActiveRequests(Admission):
    """The requests that were taken from the inbox. All of it is of the loop's thread.

    deliver  called after each step that brought something: {owner: events}
    """

    def __init__(
        self,
        scheduler: Scheduler,
        deliver: Callable[[dict[Owner, list[Event]]], None],
        sessions: Sessions | None,
        grammars: Grammars | None,
        queue: int,
    ):
        super().__init__(sessions, grammars, queue)
        self.scheduler = scheduler
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
