"""Between the keeper of the models and the supervisor: which process an order, a report or an end is of."""

import time
from typing import TYPE_CHECKING, Any

import msgspec

from rwkv_batch.config import Config
from rwkv_batch.errors import NotBegun
from rwkv_batch.request import Failure
from rwkv_batch.served.models import Loaded, ModelOrder, ModelTable
from rwkv_batch.server.child import Child
from rwkv_batch.server.engines import SupervisedEngine, engine_in
from rwkv_batch.server.models.keeper import ModelKeeper

if TYPE_CHECKING:
    from rwkv_batch.server.supervisor import Supervisor


ABOUT_MODELS = ("order", "models", "failed")  # events of reports


class ModelProcesses:
    """What the supervisor tells of its processes, and what the keeper has it do with them.

    failures  what engines have said of why they cannot start
    until     when engines that were told to stop are killed
    """

    def __init__(self, supervisor: "Supervisor"):
        self._supervisor = supervisor
        self.keeper = ModelKeeper(supervisor.config, list(supervisor.engines), self)
        self.failures: dict[int, Failure] = {}
        self.until: dict[int, float] = {}

    # --- what the supervisor tells ---

    def hear(self, child: Child, report: dict[str, Any], now: float) -> None:
        """A report of a child about models."""
        if report["event"] == "order":
            self._take(child, report["question"], report["order"], now)
        elif report["event"] == "models":
            self.keeper.holds(child, report["version"], report["engines"], now)
        elif report["event"] == "failed":
            self.failures[child.index] = msgspec.convert(report["failure"], Failure)

    def ended(self, index: int, reason: str, now: float) -> bool:
        """An engine has ended; returns whether nothing more is to be done about it."""
        self.until.pop(index, None)
        return self.keeper.ended(index, reason, self.failures.pop(index, None), now)

    def given_up(self, index: int, now: float) -> None:
        """An engine is not started again, because it ended too often: its model goes when it has no other, and others serve."""
        engines = self._supervisor.engines
        entry = next((entry for entry in self.keeper.table.models if index in entry.engines), None)
        if entry is not None and all(engines[number].given_up for number in entry.engines if number in engines):
            self.keeper.drop(index, now)

    def look(self, now: float) -> None:
        """The regular turn: what waits for time to pass."""
        self.keeper.look(now)
        for index in [index for index, until in self.until.items() if now > until]:
            del self.until[index]
            for child in self._children(index):
                child.process.kill()

    def _take(self, child: Child, question: str, order: dict[str, Any], now: float) -> None:
        def answer(result: Loaded | Failure) -> None:
            child.tell("failed" if isinstance(result, Failure) else "loaded", [question, result])

        if not self._supervisor.announced:
            answer(Failure.of("", NotBegun("the server is still starting", code="loading", retry_after=2.0)))
        else:
            self.keeper.take(msgspec.convert(order, ModelOrder), answer, now)

    # --- what the keeper has done ---

    def start_engine(self, number: int, config: Config, place: int) -> None:
        """See Processes."""
        self._supervisor.add(engine_in(place, number, config, self._supervisor.config, self._supervisor.folder))

    def stop_engine(self, number: int) -> None:
        """See Processes."""
        engine: SupervisedEngine | None = self._supervisor.engines.get(number)
        if engine is None:
            return
        engine.leaving = engine.stopping = True
        self._supervisor.tell_seats()  # before they see that it has gone
        self.until[number] = time.monotonic() + self._supervisor.config.engine_stop_seconds
        children = self._children(number)
        for child in children:
            child.order("stop")
        if not children:
            self._supervisor.forget(number)
            self.ended(number, "before it began", time.monotonic())

    def tell(self, table: ModelTable) -> None:
        """See Processes."""
        for child in self.fronts():
            child.tell("models", table)

    def fronts(self) -> list[Child]:
        """See Processes."""
        return [child for child in self._supervisor.children if child.role == self._supervisor.front]

    def _children(self, number: int) -> list[Child]:
        return [child for child in self._supervisor.children if child.role == "engine" and child.index == number]
