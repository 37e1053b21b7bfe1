"""Where requests come in, from any thread: who is let in, who waits for a session, what the loop then finds in its inbox."""

import queue
import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from rwkv_batch.errors import InvalidRequest, NotBegun, Overloaded, RwkvBatchError, Unavailable, Unprocessable
from rwkv_batch.grammar.masks import GrammarMask, Grammars
from rwkv_batch.model.state import Snapshot
from rwkv_batch.request import Request
from rwkv_batch.served.variants import ADAPTER, VariantOrder, VariantsNow
from rwkv_batch.session_messages import Answer, CommitResult, Deleted, Page, Session, SessionCommand
from rwkv_batch.sessions.shared import ComputeState, Telling
from rwkv_batch.text.detokenizer import StopMatcher
from rwkv_batch.tuned.registry import Start
from rwkv_batch.tuned.variants import EngineVariants
from sampling.params import SamplingParams

Owner = Hashable
NOBODY = None  # the owner of rows that only compute a state


class Lease(Protocol):
    """The right to continue one session; exactly one of `commit` and `release` ends it.

    newlines  how many newlines, two at most, the session's text ends in
    replay    what an earlier turn with the same idempotency key said: there is nothing to run
    revoked   the session was deleted meanwhile
    ids       what leads from `initial` to the session's state: to be fed before the prompt
    logs      whether the state that is kept may be one that some ids lead to, which are kept with it
    """

    newlines: int
    replay: Answer | None
    revoked: bool
    ids: list[int]
    logs: bool

    def initial(self) -> Snapshot | None:
        """Return the state to start from, in the thread that uses it; None for the empty one."""

    def commit(
        self,
        snapshot: Snapshot,
        newlines: int,
        answer: Answer,
        done: Callable[[CommitResult | RwkvBatchError], None],
        *,
        ids: list[int],
        turn: list[int],
    ) -> None:
        """Keep the state at the end of the row; `done` is called once, in any thread, when it is kept or cannot be.

        ids   what leads to it from `snapshot`; none unless `logs`
        turn  what leads to it from the session's state before
        """

    def release(self, *, nonfinite: bool = False) -> None:
        """Leave the session as it was; `nonfinite`: its state led to numbers that are not finite."""


class StateLease:
    """The lease of a row that computes a state which belongs to no session: what `ids` lead to from `initial`."""

    newlines, replay, revoked, logs = 0, None, False, False

    def __init__(self, initial: Callable[[], Snapshot | None], done: Callable[[Snapshot | RwkvBatchError], None]):
        self.ids: list[int] = []  # they are the row's prompt
        self.initial = initial
        self._done = done

    def commit(
        self,
        snapshot: Snapshot,
        newlines: int,
        answer: Answer,
        done: Callable[[CommitResult | RwkvBatchError], None],
        **_: list[int],
    ) -> None:
        """Give the state to whoever wants it."""
        self._done(snapshot)
        done(CommitResult("", 0, None, snapshot.elapsed, False))

    def release(self, *, nonfinite: bool = False) -> None:
        """There is no state."""
        self._done(Unavailable("the state of this session could not be computed"))


class Sessions(Protocol):
    """Where named states live."""

    def use(self, compute: ComputeState, telling: Telling) -> None:
        """States that are not at hand, only ids that lead to them, are computed by `compute`; see `Admission.compute`.

        telling  inside it several turns may be told of
        """

    def lease(self, request: Request, ready: Callable[[Lease | RwkvBatchError], None]) -> None:
        """Ask for the session of `request`; `ready` is called once, in any thread. Raises what refuses it at once."""

    def cancel(self, request_id: str) -> None:
        """Nobody waits for this request's lease any more."""

    def together(self) -> AbstractContextManager[None]:
        """What is committed inside is taken at once. All snapshots were submitted before, in the calling thread."""

    def execute(self, command: SessionCommand, answer: Callable[[Page | Deleted | RwkvBatchError], None]) -> None:
        """Carry out a command."""

    def stats(self) -> dict[str, int | float]:
        """Figures of this moment."""

    def close(self) -> int:
        """Write what is not on disk yet; waits for it. Returns how many sessions could not be written."""


@dataclass(eq=False)
class ActiveRequest:
    """One live request. `num_open` rows have not ended, the others have `num_tokens`; `started` once a row owns a slot."""

    request: Request
    owner: Owner
    num_open: int
    started: bool = False
    num_tokens: int = 0


class Accepted(NamedTuple):
    request: Request
    owner: Owner
    stops: StopMatcher
    start: Start | None = None  # what its rows begin with
    lease: Lease | RwkvBatchError | None = None
    masks: list[GrammarMask] | None = None  # by row


class Masked(NamedTuple):
    """Rows whose grammars leave no choice: there is one way to go on, or none."""

    masks: list[GrammarMask]


class Cancel(NamedTuple):
    request_id: str


class CancelOwner(NamedTuple):
    owner: Owner


class Inbox:
    """Messages from other threads; None only wakes."""

    def __init__(self):
        self._queue: queue.SimpleQueue = queue.SimpleQueue()

    def put(self, message: Accepted | Masked | Cancel | CancelOwner | None) -> None:
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


class Admission:
    """Takes requests until `queue` of them wait for their first slot.

    sessions  gives leases for requests that name a session; None = such requests are refused
    grammars  makes masks for requests that name a grammar; None likewise
    tuned     finds the states and adapters that requests name; None likewise
    """

    def __init__(self, sessions: Sessions | None, grammars: Grammars | None, queue: int, tuned: EngineVariants | None = None):
        self.sessions = sessions
        self.grammars = grammars
        self.tuned = tuned
        if sessions is not None:
            sessions.use(self.compute, self.telling)
        self.queue = queue
        self._inbox = Inbox()
        self._lock = threading.Lock()
        self._num_waiting = 0  # accepted requests none of whose rows has started
        self._num_computed = 0
        self._draining = False
        self._stopping = False
        self._dead = False
        self._preparing: dict[str, Owner] = {}  # accepted requests that wait for their session or their grammar

    def submit(self, request: Request, owner: Owner) -> None:
        """Accept a request; Overloaded when the queue is full, Unavailable when draining or dead.

        One with a session waits for it outside of the loop's thread; the sessions may refuse it at once.
        """
        session = request.session
        if session is not None and self.sessions is None:
            raise InvalidRequest("this server keeps no sessions", param="session_id")
        if session is not None and session.keep and request.num_rows != 1:
            raise InvalidRequest("a turn of a session takes one prompt", param="contents")
        if request.grammar is not None and self.grammars is None:
            raise InvalidRequest("this engine reads no grammars", param=request.grammar.param)
        start = self._start_of(request)
        self._check_room()  # before the stops, which may take long to build
        stops = stops_of(tuple(request.stop_ids), tuple(request.stop_texts))  # here, so that no step waits for it
        with self._lock:
            self._check_room()
            self._num_waiting += 1
            if session is None and request.grammar is None:
                self._inbox.put(Accepted(request, owner, stops, start))
                return
            self._preparing[request.id] = owner
        try:
            if session is None:
                self._leased(Accepted(request, owner, stops, start))
            else:
                self.sessions.lease(request, lambda result: self._leased(Accepted(request, owner, stops, start, result)))
        except Exception:
            self._forget_preparing(request.id)
            raise

    def compute(
        self,
        initial: Callable[[], Snapshot | None],
        ids: list[int],
        done: Callable[[Snapshot | RwkvBatchError], None],
        origin: str = "",
    ) -> None:
        """Compute the state that `ids` lead to, in a row like others; `done` is called once, in the loop's thread.

        initial  gives the state to start from, in the loop's thread; None for the empty one
        origin   of the session: the key of its adapter, which the row has too
        """
        start = None
        if origin.startswith(ADAPTER):
            if self.tuned is None:
                raise Unprocessable("the session was begun with an adapter, and there are none here", code="other_adapter")
            start = self.tuned.find(origin)
        with self._lock:
            self._num_waiting += 1
            self._num_computed += 1
            request = Request(
                id=f"\0state-{self._num_computed}",
                prompts=[ids],
                sampling=SamplingParams(),
                max_tokens=0,
                session=Session(name="", separate=False),
                cache=False,
            )
        self._inbox.put(Accepted(request, NOBODY, stops_of((), ()), start, StateLease(initial, done)))

    def telling(self) -> AbstractContextManager[None]:
        """What is told of turns inside is delivered together."""
        return nullcontext()

    def cancel(self, request_id: str) -> None:
        """End a request early; but for a turn that is being kept, nothing more is delivered for it."""
        if self._forget_preparing(request_id):
            if self.sessions is not None:
                self.sessions.cancel(request_id)
        else:
            self._inbox.put(Cancel(request_id))

    def cancel_owner(self, owner: Owner) -> None:
        """End all requests of one owner."""
        with self._lock:
            preparing = [request_id for request_id, known in self._preparing.items() if known == owner]
        for request_id in preparing:
            self.cancel(request_id)
        self._inbox.put(CancelOwner(owner))

    def _start_of(self, request: Request) -> Start | None:
        """What the rows of a request begin with; NotFound, InvalidRequest."""
        if not request.state and not request.weights:
            return None
        if self.tuned is None:
            raise InvalidRequest("this engine has no tuned states", param="state")
        start = self.tuned.find(request.state)
        if len(request.weights) != (len(start.parts) if start.mixed else 0) or (request.weights and sum(request.weights) <= 0):
            raise InvalidRequest("the weights do not fit the states that are mixed", param="mrss_gatingweight")
        if request.weights and (request.session is not None or request.prompt_logprobs is not None):
            raise InvalidRequest("mixed states have no sessions and no prompt_logprobs", param="state")
        return start

    def execute(
        self,
        command: SessionCommand | VariantOrder,
        answer: Callable[[Page | Deleted | VariantsNow | RwkvBatchError], None],
    ) -> None:
        """Carry out a command about sessions or states; `answer` is called once, in any thread. Raises what refuses it."""
        if isinstance(command, VariantOrder):
            if self.tuned is None:
                raise InvalidRequest("this engine has no tuned states", param="state_viewname")
            self._check_open()
            self.tuned.execute(command, answer)
            return
        if self.sessions is None:
            raise InvalidRequest("this server keeps no sessions", param="session_id")
        self.sessions.execute(command, answer)

    def drain(self) -> None:
        """Refuse new requests, finish the others."""
        self._draining = True

    def stop(self) -> None:
        """Let the loop return after the step in progress."""
        self._stopping = True
        self._inbox.put(None)

    def _check_open(self) -> None:
        if self._dead:
            raise NotBegun("the engine has failed and is being restarted", code="engine_dead")
        if self._draining or self._stopping:
            raise NotBegun("the server is shutting down", code="draining", retry_after=5.0)

    def _check_room(self) -> None:
        self._check_open()
        if self._num_waiting >= self.queue:
            raise Overloaded(f"the queue is full: {self.queue} requests wait")

    def _leased(self, accepted: Accepted) -> None:
        """A session is there for its request, or cannot be had."""
        if accepted.request.grammar is None or isinstance(accepted.lease, RwkvBatchError):
            self._prepared(accepted)
        else:
            self.grammars.prepare(accepted.request, lambda result: self._compiled(accepted, result))

    def _compiled(self, accepted: Accepted, result: list[GrammarMask] | RwkvBatchError) -> None:
        """The masks of its rows are there for a request, or cannot be had."""
        if not isinstance(result, RwkvBatchError):
            self._prepared(accepted._replace(masks=result))
            return
        if accepted.lease is not None:
            accepted.lease.release()
        self._prepared(accepted._replace(lease=result))

    def _prepared(self, accepted: Accepted) -> None:
        """All that a request waited for is there, or what refuses it."""
        with self._lock:
            wanted = self._preparing.pop(accepted.request.id, None) is not None
            if wanted:
                self._inbox.put(accepted)
        if not wanted and accepted.lease is not None and not isinstance(accepted.lease, RwkvBatchError):
            accepted.lease.release()

    def _forget_preparing(self, request_id: str) -> bool:
        """A request that waits for its session or its grammar waits no more; whether it did."""
        with self._lock:
            waited = self._preparing.pop(request_id, None) is not None
            self._num_waiting -= waited
        return waited

    def count_started(self) -> None:
        """A request that was taken waits no more."""
        with self._lock:
            self._num_waiting -= 1

    def note_start(self, active: ActiveRequest) -> None:
        """A row of the request owns a slot, or will not need one."""
        if not active.started:
            active.started = True
            self.count_started()

    def close_admission(self) -> list[tuple[str, Owner]]:
        """Refuse all from now on; returns the ids and owners of those that have not come to the loop."""
        with self._lock:
            self._dead = True
            preparing, self._preparing = self._preparing, {}
        waiting = [(message.request.id, message.owner) for message in self._inbox.take(0) if isinstance(message, Accepted)]
        return waiting + list(preparing.items())


@lru_cache(maxsize=32)  # of 5 MiB each at most, by the limits of the routes
def stops_of(stop_ids: tuple[int, ...], stop_texts: tuple[bytes, ...]) -> StopMatcher:
    """The stops of a request, built once for requests that follow one another."""
    return StopMatcher(stop_ids, stop_texts)
