"""How models come and go in a running server, with processes that only the test has."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import msgspec
import pytest

from rwkv_batch.config import Config
from rwkv_batch.errors import CheckpointError, NoMemory
from rwkv_batch.ipc.messages import EngineInfo
from rwkv_batch.request import Failure
from rwkv_batch.served.models import Defaults, Loaded, LoadModel, ModelTable, RemoveModel
from rwkv_batch.server.engines import engine_of_all
from rwkv_batch.server.models.keeper import ModelKeeper, session_file
from rwkv_batch.server.supervisor import Supervisor

INFO = EngineInfo(model="x", layers=8, fingerprint="f")
CONFIG = Config(model_path="/models/first.pth", drain_seconds=30)


@dataclass
class FakeProcesses:
    """Notes what it is to do, and has the HTTP processes do what the test says."""

    started: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    told: list[ModelTable] = field(default_factory=list)
    alive: list[str] = field(default_factory=lambda: ["http-0", "http-1"])

    def start_engine(self, number: int, config: Config, place: int) -> None:
        self.started.append(number)

    def stop_engine(self, number: int) -> None:
        self.stopped.append(number)

    def tell(self, table: ModelTable) -> None:
        self.told.append(table)

    def fronts(self) -> list[str]:
        return self.alive


class Scene:
    """A keeper, its processes and what the orders came to."""

    def __init__(self, config: Config = CONFIG, engines: tuple[int, ...] = (0,)):
        self.processes = FakeProcesses()
        self.keeper = ModelKeeper(config, list(engines), self.processes)
        self.answers: list[Loaded | Failure] = []
        for front in self.processes.alive:
            self.keeper.born(front)

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.keeper.table.models]

    def load(self, name: str, **more) -> None:
        self.keeper.take(LoadModel(f"/models/{name}.pth", name, **more), self.answers.append, 0.0)

    def remove(self, name: str) -> None:
        self.keeper.take(RemoveModel(name), self.answers.append, 0.0)

    def all_take(self, *used: int, now: float = 1.0) -> None:
        for front in self.processes.alive:
            self.keeper.holds(front, self.keeper.table.version, list(used), now)

    def has_ended(self, number: int, now: float = 2.0, failure: Failure | None = None) -> bool:
        return self.keeper.ended(number, "by signal SIGKILL", failure, now)

    def error(self) -> tuple[str, str | None]:
        (failure,) = self.answers
        return failure.error, failure.code


def test_what_was_made_for_the_first_model_stays_with_it():
    scene = Scene(
        Config(model_path="/models/first.pth", adapter="a.pth", row_adapter="b=b.pth", state="c=c.pth", adapter_ranks=8)
    )
    scene.load("second")
    scene.keeper.ready(1, INFO, 0.5)
    for front in scene.processes.alive:
        scene.keeper.holds(front, 1, [], 1.0)
    config = scene.keeper.configs[1]
    assert (config.adapter, config.row_adapter, config.state, config.adapter_ranks) == (None, None, None, 8)


def test_an_order_may_name_an_adapter_of_its_own():
    scene = Scene(Config(model_path="/models/first.pth", adapter="a.pth"))
    scene.load("second", settings={"adapter": "/adapters/b.pth:2"})
    assert scene.keeper.configs[1].adapter == "/adapters/b.pth:2"


def test_a_model_takes_the_place_of_another():
    scene = Scene()
    scene.load("second", settings={"quant": "int8"}, defaults=Defaults(temperature=0.5))
    assert scene.processes.started == [1]
    config = scene.keeper.configs[1]
    assert (config.model_path, config.model_name, config.quant) == ("/models/second.pth", "second", "int8")
    assert scene.names == ["first"]
    assert not scene.processes.told
    scene.keeper.ready(1, INFO, 0.5)
    assert scene.names == ["second"]
    assert scene.keeper.table.models[0].defaults.temperature == 0.5
    assert scene.processes.told == [scene.keeper.table]
    scene.keeper.holds("http-0", 1, [], 1.0)
    assert not scene.processes.stopped
    scene.keeper.holds("http-1", 1, [0], 1.0)  # a request is still running there
    assert not scene.processes.stopped
    scene.keeper.holds("http-1", 1, [], 2.0)
    assert scene.processes.stopped == [0]
    assert not scene.answers
    assert scene.has_ended(0, 3.0)
    (done,) = scene.answers
    assert (done.name, done.models, done.layers, done.seconds) == ("second", ["second"], 8, 3.0)
    assert list(scene.keeper.configs) == [1]


def test_requests_that_do_not_end_are_not_waited_for_longer_than_drain_seconds():
    scene = Scene()
    scene.load("second")
    scene.keeper.ready(1, INFO, 100.0)
    scene.all_take(0, now=101.0)
    scene.keeper.look(129.9)
    assert not scene.processes.stopped
    scene.keeper.look(130.0)
    assert scene.processes.stopped == [0]


def test_models_stand_side_by_side_and_go_one_by_one():
    scene = Scene()
    for name, number in (("b", 1), ("c", 2)):
        scene.load(name, keep=True)
        scene.keeper.ready(number, INFO, 0.5)
        scene.all_take()
    assert scene.names == ["first", "b", "c"]
    assert not scene.processes.stopped
    scene.remove("first")
    scene.all_take()
    assert scene.processes.stopped == [0]
    assert len(scene.answers) == 2
    assert scene.has_ended(0)
    assert scene.answers[-1].models == scene.names == ["b", "c"]
    scene.load("d")  # without keep: in the place of the default one
    scene.keeper.ready(3, INFO, 0.5)
    assert scene.names == ["d", "c"]


def test_a_name_that_is_taken():
    scene = Scene()
    scene.load("first", keep=True)
    assert scene.error() == ("Conflict", "name_taken")
    for more in ({"keep": True, "replace": True}, {}):
        scene = Scene()
        scene.load("first", **more)
        scene.keeper.ready(1, INFO, 0.5)
        assert scene.keeper.table.models[0].engines == [1]
        assert scene.names == ["first"]


def test_one_order_at_a_time():
    scene = Scene()
    scene.load("second")
    scene.load("third")
    assert scene.error() == ("Conflict", "model_busy")
    assert "loading second" in scene.answers[0].message
    scene.remove("first")
    assert scene.answers[1].code == "model_busy"
    assert scene.processes.started == [1]


def test_a_load_is_given_up_when_its_model_is_removed():
    scene = Scene()
    scene.load("second")
    scene.remove("second")
    failure, done = scene.answers
    assert (failure.code, done.models) == ("cancelled", ["first"])
    assert scene.processes.stopped == [1]
    assert not scene.has_ended(1)
    scene.load("first")
    scene.remove("first")  # that one is served
    assert scene.answers[2].code == "model_busy"


@pytest.mark.parametrize(
    ("failure", "error"),
    [(None, "EngineFailed"), (Failure.of("", CheckpointError("x.pth: not finite")), "CheckpointError")],
)
def test_a_load_that_fails_touches_nobody(failure, error):
    scene = Scene()
    scene.load("second")
    assert scene.has_ended(1, failure=failure)
    assert scene.answers[0].error == error
    assert scene.names == ["first"]
    assert not scene.processes.told
    assert not scene.processes.stopped
    assert list(scene.keeper.configs) == [0]
    scene.load("second")  # and the next one is taken
    assert scene.processes.started == [1, 2]


def test_a_model_has_as_many_engines_as_the_first():
    scene = Scene(engines=(0, 1))
    scene.load("second")
    assert scene.processes.started == [2, 3]
    scene.keeper.ready(3, INFO, 0.5)
    assert scene.names == ["first"]
    scene.keeper.ready(2, INFO, 0.5)
    assert scene.keeper.table.models[0].engines == [2, 3]
    scene.all_take()
    assert scene.processes.stopped == [0, 1]
    scene = Scene(engines=(0, 1))
    scene.load("second")
    scene.keeper.ready(2, INFO, 0.5)
    assert scene.has_ended(3)
    assert scene.processes.stopped == [2]
    assert list(scene.keeper.configs) == [0, 1]
    assert scene.names == ["first"]


def test_an_engine_that_dies_while_it_takes_over_gives_the_old_one_back():
    scene = Scene()
    scene.load("second")
    scene.keeper.ready(1, INFO, 0.5)
    scene.keeper.holds("http-0", 1, [0], 1.0)
    assert scene.has_ended(1)
    assert scene.names == ["first"]
    assert scene.keeper.table.version == 2
    assert scene.processes.told[-1] == scene.keeper.table
    assert scene.error()[0] == "EngineFailed"
    assert not scene.processes.stopped


def test_an_engine_that_dies_after_that_comes_back_as_any_does():
    scene = Scene()
    scene.load("second")
    scene.keeper.ready(1, INFO, 0.5)
    scene.all_take()
    assert scene.processes.stopped == [0]
    assert not scene.has_ended(1)
    assert scene.has_ended(0)
    assert scene.answers[0].models == ["second"]
    assert scene.keeper.configs[1].model_path == "/models/second.pth"
    assert not scene.has_ended(1)


def test_http_processes_that_end_and_start_meanwhile():
    scene = Scene()
    scene.load("second")
    scene.keeper.ready(1, INFO, 0.5)
    scene.keeper.holds("http-0", 1, [], 1.0)
    scene.processes.alive.remove("http-1")
    scene.keeper.buried("http-1", 1.0)
    assert scene.processes.stopped == [0]
    scene.processes.alive.append("http-2")
    assert scene.keeper.born("http-2") == scene.keeper.table
    assert scene.has_ended(0)
    assert scene.answers


def test_names_that_are_not_there_and_the_last_model():
    scene = Scene()
    scene.remove("other")
    assert scene.error() == ("NotFound", "model_not_found")
    scene = Scene()
    scene.remove("first")
    assert scene.error() == ("Conflict", "last_model")


def test_a_server_that_ends_loads_nothing():
    scene = Scene()
    scene.load("second")
    scene.keeper.drain()
    assert scene.error() == ("NotBegun", "draining")
    scene.load("third")
    assert scene.answers[1].code == "draining"
    scene.keeper.ready(1, INFO, 0.5)
    assert scene.names == ["first"]


def test_settings_that_cannot_be():
    scene = Scene()
    scene.load("second", settings={"quant": "int9"})
    assert scene.error()[0] == "UsageError"
    assert scene.keeper.work is None


def test_a_model_that_crashes_too_often_goes_where_others_are():
    scene = Scene()
    assert not scene.keeper.drop(0, 0.0)
    scene.load("second", keep=True)
    scene.keeper.ready(1, INFO, 0.5)
    scene.all_take()
    assert scene.keeper.drop(1, 5.0)
    assert scene.names == ["first"]
    assert scene.processes.stopped == [1]
    assert list(scene.keeper.configs) == [0]
    assert not scene.keeper.drop(0, 5.0)


def test_each_model_has_a_session_file_of_its_own():
    config = Config(model_path="/models/first.pth", state_db="/data/sessions.db")
    assert session_file(config, "first") == "/data/sessions.db"
    files = [session_file(config, name) for name in ("second", "a b", "a/b", "../../x", "日本", "", "x" * 300, "a b ")]
    assert files[0] == "/data/sessions.second.db"
    assert len(set(files)) == len(files)
    assert all(file.startswith("/data/sessions.") and file.count("/") == 2 and len(file) < 90 for file in files)


def test_of_an_engine_that_went_no_files_stay(tmp_path):
    supervisor = Supervisor(CONFIG, tmp_path, [])
    for index in (1, 10):
        supervisor.add(engine_of_all(index, CONFIG, tmp_path))
        for ending in ("", ".states", ".states.adapters"):
            (tmp_path / f"engine-{index}{ending}").touch()
    supervisor.remove(1)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["engine-10", "engine-10.states", "engine-10.states.adapters"]
    supervisor.selector.close()


def test_orders_reach_the_keeper_once_the_server_is_there(tmp_path):
    supervisor = Supervisor(CONFIG, tmp_path, [])
    told = []
    child = SimpleNamespace(index=0, tell=lambda word, what: told.append((word, what)))

    def order(order) -> tuple:
        report = {"event": "order", "question": "q", "order": msgspec.to_builtins(order)}
        supervisor.models.hear(child, report, 0.0)
        word, (question, result) = told.pop()
        assert (word, question) == ("failed", "q")
        return result.error, result.code

    assert order(RemoveModel("other")) == ("NotBegun", "loading")
    supervisor.announced = True
    assert order(RemoveModel("other")) == ("NotFound", "model_not_found")
    report = {"event": "order", "question": "q", "order": msgspec.to_builtins(LoadModel("/x", "second"))}
    supervisor.models.hear(child, report, 0.0)
    engine = supervisor.engines[1]
    assert (engine.config.model_path, engine.seat.address) == ("/x", f"ipc://{tmp_path}/engine-1")
    assert [start[1:] for start in supervisor.due] == [("engine", 1)]
    failure = Failure.of("", NoMemory("needs 5 MiB, only 4 MiB are free"))
    said = {"event": "failed", "failure": msgspec.to_builtins(failure)}
    supervisor.models.hear(SimpleNamespace(index=1), said, 1.0)
    assert supervisor.models.ended(1, "with status 2", 2.0)
    assert told == [("failed", ["q", failure])]
    assert failure.exception().status == 507
    supervisor.selector.close()
