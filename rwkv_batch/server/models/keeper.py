"""The models of a running server: which there are, and how one comes, takes another's place, and goes. Nobody waits for it.

A model is loaded by engine processes of its own. Only when these are ready are the HTTP processes told; each says when it sends
requests there, and when the last one of the model that went has ended. Then that model's engines are stopped, and the order is
answered. One order at a time: whatever fails until the HTTP processes are told has touched nobody.
"""

import logging
import re
import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from rwkv_batch.config import Config
from rwkv_batch.errors import Conflict, EngineFailed, NotBegun, NotFound, RwkvBatchError, UsageError
from rwkv_batch.ipc.messages import EngineInfo
from rwkv_batch.request import Failure
from rwkv_batch.served.models import Loaded, LoadModel, ModelEntry, ModelOrder, ModelTable, RemoveModel

log = logging.getLogger(__name__)

Front = Hashable  # an HTTP process, as the supervisor knows it
Answer = Callable[[Loaded | Failure], None]


class Processes(Protocol):
    """What the keeper has the supervisor do."""

    def start_engine(self, number: int, config: Config, place: int) -> None:
        """Start an engine with these settings in one of the places that each model has, the first of which keeps sessions."""

    def stop_engine(self, number: int) -> None:
        """End an engine and all that it does; it is not started again. `ModelKeeper.ended` is called when it has ended."""

    def tell(self, table: ModelTable) -> None:
        """Give the table to all HTTP processes; those that start later get it at their birth."""

    def fronts(self) -> list[Front]:
        """The HTTP processes that there are."""


@dataclass
class Work:
    """An order that is being carried out.

    coming   the engines that are started for it
    ready    those of them that are
    going    what is served no longer when it is done
    table    that the HTTP processes were told, None before that
    before   the table that holds until then
    until    when those that still use what goes are no longer waited for
    stopped  whether the engines that go were told to end
    """

    order: ModelOrder
    answer: Answer
    began: float
    before: ModelTable
    coming: list[int] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)
    going: list[ModelEntry] = field(default_factory=list)
    table: ModelTable | None = None
    info: EngineInfo | None = None
    until: float = 0.0
    stopped: bool = False
    failure: RwkvBatchError | None = None

    @property
    def described(self) -> str:
        """For people."""
        return f"{'loading' if isinstance(self.order, LoadModel) else 'removing'} {self.order.name}"


class ModelKeeper:
    """The table of models and the settings of each engine; `engines` are the numbers of those that the server starts with."""

    def __init__(self, config: Config, engines: list[int], processes: Processes):
        self.config = config
        self.processes = processes
        self.table = ModelTable(0, [ModelEntry(config.model_name, engines)])
        self.configs = dict.fromkeys(engines, config)  # of all engines that are to run
        self._places = len(engines)
        self.work: Work | None = None
        self.draining = False
        self._next = max(engines) + 1
        self._versions: dict[Front, int] = {}  # of the tables that the HTTP processes go by
        self._used: dict[Front, list[int]] = {}  # engines that they still have requests in

    def take(self, order: ModelOrder, answer: Answer, now: float) -> None:
        """Begin to carry out an order; `answer` is called once, at once for one that is refused."""
        if self._cancels(order):
            began = self.work.began
            self._fail(Conflict(f"loading {order.name} was given up, as was ordered", code="cancelled"))
            answer(Loaded(order.name, now - began, self._names))
            return
        try:
            self._check_free()
            work = Work(order, answer, now, self.table)
            if isinstance(order, LoadModel):
                self._begin_load(work, order)
            else:
                self._begin_remove(work, order)
        except RwkvBatchError as error:
            answer(Failure.of("", error))
            return
        self.work = work
        log.info("%s", work.described)
        for place, number in enumerate(work.coming):
            self.processes.start_engine(number, self.configs[number], place)
        if not work.coming:
            self._switch([entry for entry in self.table.models if entry not in work.going], now)

    def ready(self, number: int, info: EngineInfo, now: float) -> None:
        """An engine is ready."""
        work = self.work
        if work is None or number not in work.coming or work.table is not None:
            return
        work.info = info
        work.ready.add(number)
        if len(work.ready) < len(work.coming):
            return
        entry = ModelEntry(work.order.name, work.coming, work.order.defaults)
        if not work.going:
            self._switch([*self.table.models, entry], now)
        else:
            self._switch([entry if old in work.going else old for old in self.table.models], now)

    def ended(self, number: int, why: str, failure: Failure | None, now: float) -> bool:
        """An engine has ended; returns whether that was waited for, or has failed an order.

        failure  what it said last of why it cannot start
        """
        work = self.work
        if work is None:
            return False
        if number in work.coming and not work.stopped:
            self.configs.pop(number, None)
            if failure is not None:
                self._fail(failure.exception())
            else:
                self._fail(
                    EngineFailed(f"its engine ended {why} while it was {'loading' if work.table is None else 'taken over'}")
                )
            return True
        if work.stopped and any(number in entry.engines for entry in work.going):
            self.configs.pop(number, None)
            self.look(now)
            return True
        return False

    def holds(self, front: Front, version: int, engines: list[int], now: float) -> None:
        """An HTTP process goes by this version of the table; `engines`: what is in it no more and has its requests."""
        self._versions[front], self._used[front] = version, engines
        self.look(now)

    def born(self, front: Front) -> ModelTable:
        """An HTTP process starts, with the table returned."""
        self._versions[front], self._used[front] = self.table.version, []
        return self.table

    def buried(self, front: Front, now: float) -> None:
        """An HTTP process has ended."""
        self._versions.pop(front, None)
        self._used.pop(front, None)
        self.look(now)

    def drain(self) -> None:
        """The server is about to end: no model comes or goes any more."""
        self.draining = True
        if self.work is not None:
            work, self.work = self.work, None
            work.answer(Failure.of("", NotBegun("the server is shutting down", code="draining", retry_after=5.0)))

    def drop(self, number: int, now: float) -> bool:
        """An engine crashes too often: serve its model no longer, if there are others; returns whether that was done."""
        entry = next((entry for entry in self.table.models if number in entry.engines), None)
        if entry is None or len(self.table.models) < 2 or (self.work is not None and self.work.table is not None):
            return False
        self.table = self.table.changed([other for other in self.table.models if other is not entry])
        if self.work is not None:  # still loading: what it takes the place of may have gone
            self.work.before = self.table
            self.work.going = [other for other in self.work.going if other is not entry]
        for engine in entry.engines:
            self.configs.pop(engine, None)
            self.processes.stop_engine(engine)
        self.processes.tell(self.table)
        log.error("the model %s is served no longer", entry.name)
        return True

    def look(self, now: float) -> None:
        """See whether the order is further than it was."""
        work = self.work
        if work is None or work.table is None:
            return
        fronts = self.processes.fronts()
        if any(self._versions.get(front, -1) < work.table.version for front in fronts):
            return
        if not work.stopped:
            going = {engine for entry in work.going for engine in entry.engines}
            used = any(going.intersection(self._used.get(front, ())) for front in fronts)
            if used and now < work.until:
                return
            work.stopped = True
            for engine in sorted(going):
                self.processes.stop_engine(engine)
        if all(engine not in self.configs for entry in work.going for engine in entry.engines):
            self._finish(now)

    @property
    def _names(self) -> list[str]:
        return [entry.name for entry in self.table.models]

    def _cancels(self, order: ModelOrder) -> bool:
        """Whether a model is to be removed that is still being loaded, and that no other one of its name stands for."""
        loading = self.work is not None and isinstance(self.work.order, LoadModel) and self.work.table is None
        return isinstance(order, RemoveModel) and loading and order.name == self.work.order.name not in self._names

    def _check_free(self) -> None:
        if self.draining:
            raise NotBegun("the server is shutting down", code="draining", retry_after=5.0)
        if self.work is not None:
            raise Conflict(f"the server is busy {self.work.described}; one model at a time", code="model_busy")

    def _begin_load(self, work: Work, order: LoadModel) -> None:
        same = self.table.entry(order.name)
        if same is not None and order.keep and not order.replace:
            raise Conflict(f"model_viewname: {order.name} is served already; with replace true this one takes its place",
                           param="model_viewname", code="name_taken")  # fmt: skip
        if same is not None or not order.keep:
            work.going = [same or self.table.models[0]]
        settings = {
            "model_path": order.file,
            "served_model_name": order.name,
            "state_db": session_file(self.config, order.name),
            **dict.fromkeys(("adapter", "row_adapter", "state")),  # those of the start belong to its model
        }
        try:
            config = replace(self.config, **(settings | order.settings))
        except (UsageError, TypeError) as error:
            raise UsageError(f"model_strategy: {error}", param="model_strategy") from None
        work.coming = [*range(self._next, self._next + self._places)]
        self._next += self._places
        self.configs |= dict.fromkeys(work.coming, config)

    def _begin_remove(self, work: Work, order: RemoveModel) -> None:
        entry = self.table.entry(order.name)
        if entry is None:
            names = ", ".join(self._names)
            raise NotFound(
                f"model_viewname: no such model; this server has {names}", param="model_viewname", code="model_not_found"
            )
        if len(self.table.models) < 2:
            raise Conflict(f"{order.name} is the only model; another one takes its place with /loadmodel", code="last_model")
        work.going = [entry]

    def _switch(self, models: list[ModelEntry], now: float) -> None:
        """Tell the HTTP processes."""
        work = self.work
        work.until = now + self.config.drain_seconds
        self.table = work.table = self.table.changed(models)
        self.processes.tell(self.table)
        self.look(now)

    def _finish(self, now: float) -> None:
        work, self.work = self.work, None
        names = self._names
        info = work.info or EngineInfo(model=work.order.name)
        log.info("%s: done; served: %s", work.described, ", ".join(names))
        work.answer(
            Loaded(
                name=work.order.name, seconds=now - work.began, models=names, layers=info.layers, width=info.width,
                parameters=info.parameters, fingerprint=info.fingerprint, quant=info.quant, weight_bytes=info.weight_bytes,
                adapters=info.adapters,
            )
        )  # fmt: skip

    def _fail(self, error: RwkvBatchError) -> None:
        """Give up an order whose engine has ended: what was served before is served on."""
        work, self.work = self.work, None
        if work.table is not None:
            self.table = self.table.changed(work.before.models)
            self.processes.tell(self.table)
        for number in work.coming:
            if self.configs.pop(number, None) is not None:
                self.processes.stop_engine(number)
        log.error("%s failed: %s", work.described, error.message)
        work.answer(Failure.of("", error))


def session_file(config: Config, name: str) -> str:
    """The file of a model's sessions. One process may use a file, so each name but the first's has one of its own beside it."""
    if name == config.model_name:
        return config.state_db
    path = Path(config.state_db)
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:48].strip(".-")
    if slug != name:
        slug += f"-{zlib.crc32(name.encode()):08x}"
    return str(path.with_name(f"{path.stem}.{slug}{path.suffix}"))
