"""From the lines of IN to those of OUT: enough requests in progress that no slot waits for one, and no more."""

import asyncio
import logging
import time
from collections.abc import Callable

from routes.http.context import RequestContext
from routes.http.replies import Response, error_reply
from routes.offline.answer_file import AnswerFile, answered, unanswered
from routes.offline.offline_app import OfflineApp
from routes.offline.progress import ProgressReport
from routes.offline.request_file import Call, Line, RequestFile, UnusableLine, check_body, read_call
from routes.offline.suspects import Suspects
from rwkv_batch.errors import EngineFailed, Overloaded, RwkvBatchError, Unavailable

log = logging.getLogger(__name__)

ROWS_PER_SLOT = 2  # in progress: when all slots end in one step, as many rows wait for them
MORE_ROWS = 32
TRIES = 3  # of a request whose step failed
TICK_SECONDS = 0.1
GONE = ("engine_dead", "engine_lost")  # codes of what an engine that ends had, or refuses


class Pipeline:
    """Has the engine answer what `requests` still has. `stopping` and `aborted` may be set by any thread.

    found  called when a line was found that ends the engine, as long as more lines are answered than found: so it is the line
    """

    def __init__(
        self,
        app: OfflineApp,
        requests: RequestFile,
        answers: AnswerFile,
        progress: ProgressReport,
        found: Callable[[], None] = lambda: None,
    ):
        self.app = app
        self.found = found
        self.requests = requests
        self.answers = answers
        self.progress = progress
        self.stopping = False  # no further line is begun
        self.aborted = False  # nothing is waited for
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_bytes = 0  # of the lines in progress
        self._freed = asyncio.Event()
        self._failed: BaseException | None = None
        self._suspects = Suspects()
        self._num_answered = self._num_found = 0  # lines without an error, and lines that end the engine

    async def run(self) -> bool:
        """Answer them; returns whether that was all. Raises OSError when an answer cannot be written."""
        ticking = asyncio.create_task(self._tick())
        num_lines = await self._begin_all()
        while self._tasks and not self.aborted and self._failed is None:
            await self._wait()
        for task in (*self._tasks, ticking):
            task.cancel()
        await asyncio.gather(*self._tasks, ticking, return_exceptions=True)
        if self._failed is not None:
            raise self._failed
        return num_lines == self.answers.num_lines

    async def _begin_all(self) -> int | None:
        """Begin lines as there is room; returns how many there are, None when it was stopped before it knew."""
        first = num_lines = self.answers.num_lines
        for line in self.requests:
            if num_lines == first:
                await self._engine()
                self.progress.begin(self.app)
            await self._room()
            if self.stopping:
                return None
            task = asyncio.create_task(self._put(num_lines, line))
            num_lines += 1
            self._tasks.add(task)
            self._num_bytes += len(line.data or b"")
            task.add_done_callback(lambda task, line=line: self._done(task, line))
            await asyncio.sleep(0)  # it goes as far as to hand its request over
        return num_lines

    async def _room(self) -> None:
        """Wait until a further line may be begun."""
        slots = self.app.client.info.slots * len(self.app.client.links)
        most_bytes = self.app.config.batch_window_mib * 2**20
        while not self.stopping and (
            self._suspects.are_left
            or self.app.num_rows >= ROWS_PER_SLOT * slots + MORE_ROWS
            or len(self._tasks) >= ROWS_PER_SLOT * slots + MORE_ROWS
            or self._num_bytes + self.answers.num_held >= most_bytes
        ):
            await self._wait()

    async def _wait(self) -> None:
        """Until something has ended, or a tick."""
        if self.stopping:
            self._suspects.release_all()
        else:
            self._suspects.release(len(self._tasks))
        self._freed.clear()
        await self._freed.wait()

    def _done(self, task: asyncio.Task[None], line: Line) -> None:
        self._tasks.discard(task)
        self._num_bytes -= len(line.data or b"")
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())
        self._freed.set()

    def _fail(self, error: BaseException) -> None:
        self._failed = self._failed or error
        self.stopping = True
        self._freed.set()

    async def _tick(self) -> None:
        """Look at what other threads say, show how far it is, keep the answers."""
        due = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._freed.set()
            self.stopping = self.stopping or self.aborted
            self.progress.show(self.app, self.requests, self.answers)
            pause = self.app.config.batch_sync_seconds
            if pause and time.monotonic() >= due:
                try:
                    await asyncio.to_thread(self.answers.sync)
                except OSError as error:
                    self._fail(error)
                due = time.monotonic() + pause

    async def _engine(self) -> None:
        """Wait for an engine that takes requests, and for the tokenizer; no longer than until the end is near."""
        while not (self.stopping or (self.app.client.ready and self.app.models.default.tokenizer is not None)):
            await asyncio.sleep(TICK_SECONDS / 2)

    # --- a line ---

    async def _put(self, index: int, line: Line) -> None:
        """Answer one line, unless the end comes first."""
        try:
            call = read_call(line, self.app.config)
        except UnusableLine as error:
            self.answers.put(index, unanswered(error), failed=True)
            return
        found = await self._reply(call, line)
        if found is not None:
            request_id, reply = found
            self._num_answered += reply.status < 400
            self.answers.put(index, answered(call.custom_id, request_id, reply), failed=reply.status >= 400)

    async def _reply(self, call: Call, line: Line) -> tuple[str, Response] | None:
        """The id and the response of a request, None where the end comes first.

        One whose step failed is tried again, and so is one that the engine was lost with, unless nothing else ran beside it.
        """
        failures = 0
        is_tried = is_alone = has_failed = False
        try:
            while True:
                context = RequestContext(self.app, "POST", call.url, {}, body=call.body, form="openai")
                context.body_bytes = call.num_bytes
                try:
                    check_body(call)
                    return context.id, await call.handler(context)
                except (Unavailable, Overloaded) as error:
                    if self.stopping:
                        return None
                    log.debug("%s is tried again: %s", context.id, error)
                    await asyncio.sleep(TICK_SECONDS)
                    if error.code in GONE:
                        is_lost = has_failed or was_lost(context)
                        if is_lost and is_alone:
                            return context.id, self._ends_engine(line)
                        if is_tried:
                            self._suspects.leave()
                        is_alone = await self._suspects.turn(was_tried=is_lost and is_tried)
                        is_tried, failures, has_failed = True, 0, False
                    if self.stopping:
                        return None
                    await self._engine()
                except EngineFailed as error:
                    failures += 1
                    has_failed = True  # perhaps because the engine ends: then it refuses the next request
                    if failures == TRIES:
                        return context.id, error_reply(error, "openai")
                except RwkvBatchError as error:
                    return context.id, error_reply(error, "openai")
                except Exception:
                    log.exception("%s failed", context.id)
                    return context.id, error_reply(EngineFailed("internal error", code="internal"), "openai")
        finally:
            if is_tried:
                self._suspects.leave()

    def _ends_engine(self, line: Line) -> Response:
        """What is said of a line that the engine was lost with alone."""
        log.error("line %d: the engine ends when it works on it", line.number)
        self._num_found += 1
        if self._num_found < self._num_answered:
            self.found()
        return error_reply(EngineFailed("the engine ends when it works on this request", code="ends_engine"), "openai")


def was_lost(context: RequestContext) -> bool:
    """Whether the engine has ended while it had the request."""
    ticket = context.ticket
    return ticket is not None and ticket.failure is not None and ticket.failure.code == "engine_lost"
