"""Adapters of single rows as a server has them: orders, requests, sessions, cached prefixes, routes; without a server."""

import asyncio
import gc
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import adapter_files
import pytest
import quiet_robyn  # noqa: F401
import torch
from models import TINY, random_tensors, random_weights
from test_variants import FakeApp, context_of
from test_weights import Trap
from test_worker import Harness

from demo import tune_lora, tuning
from routes import ROUTES
from routes.native import adapters as routes
from rwkv_batch.config import Config
from rwkv_batch.engine import engine_loop
from rwkv_batch.engine.engine import Way
from rwkv_batch.errors import Conflict, Forbidden, NoRoom, NotFound, RwkvBatchError, Unprocessable, UsageError
from rwkv_batch.model import reference_ops
from rwkv_batch.model.adapters import adapter_file
from rwkv_batch.model.adapters.bank import AdapterBank
from rwkv_batch.model.adapters.row_ops import RowAdapterOps
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.scheduling.prefix_cache import PrefixCache
from rwkv_batch.served.variants import ListVariants, LoadAdapter, LoadState, RemoveAdapters, Variant, VariantsNow
from rwkv_batch.session_messages import Export, Session
from rwkv_batch.sessions.pool import StatePool
from rwkv_batch.sessions.sqlite.database import SessionDatabase
from rwkv_batch.sessions.state_file import StateFile
from rwkv_batch.tuned import row_adapters
from rwkv_batch.tuned.registry import TunedStates
from rwkv_batch.tuned.row_adapters import RowAdapters, bank_for, columns_of, row_adapters_of
from rwkv_batch.tuned.variants import EngineVariants

VOCAB, SLOTS, RANKS = 256, 8, 4 * adapter_files.RANK
MODEL = random_tensors(TINY, VOCAB)
PROMPT, SECOND = [7, 100, 33, 21, 5], [9, 8, 7]


class Adapted(Harness):
    """A worker with room for adapters."""

    def __init__(self, folder: Path, **fields):
        super().__init__(vocab=VOCAB, slots=SLOTS, **fields)
        self.folder, plain = folder, random_weights(TINY, VOCAB)
        bank = self.engine.bank = AdapterBank(plain, RANKS, SLOTS, only_adding=False)
        self.engine.adapted = Way(Model(plain, RowAdapterOps(bank, reference_ops)))
        self.adapters = RowAdapters(bank)
        self.worker.tuned = EngineVariants(TunedStates(self.engine.state), self.adapters)

    def file(self, seed: int) -> str:
        path = self.folder / f"{seed}.pth"
        return str(path if path.exists() else adapter_files.lora(MODEL, self.folder, seed, path.name)[0])

    def load(self, name: str, seed: int = 1, **more) -> str:
        """Load a LoRA made of `seed`; returns its key."""
        self.adapters.load(LoadAdapter(name=name, file=self.file(seed), **more))
        return next(variant.key for variant in self.adapters.variants if variant.name == name)

    def order(self, order) -> VariantsNow | RwkvBatchError:
        """Carry out an order and wait for what comes of it."""
        answers, arrived = [], threading.Event()
        self.worker.execute(order, lambda result: (answers.append(result), arrived.set()))
        assert arrived.wait(30)
        return answers[0]

    def text(self, prompt: list[int], **fields) -> str:
        id = f"r{len(self.finishes)}"
        self.submit(id, [prompt], **fields)
        self.run()
        return self.texts[id][0]


def test_rows_have_the_adapter_that_they_name(tmp_path):
    harness = Adapted(tmp_path)
    first, second = harness.load("first", 1), harness.load("second", 2)
    plain = harness.text(PROMPT)
    texts = [harness.text(PROMPT, state=key) for key in (first, second, "", first)]
    assert len({plain, *texts}) == 3
    assert (texts[2], texts[3]) == (plain, texts[0])
    harness.submit("many", [PROMPT] * 3, state=first, copies=2)
    harness.submit("others", [PROMPT] * 2)
    harness.run()
    assert set(harness.texts["many"].values()) == {texts[0]}
    assert set(harness.texts["others"].values()) == {plain}


def test_loading_changes_no_row_that_runs(tmp_path):
    quiet, harness = Adapted(tmp_path), Adapted(tmp_path)
    for one in (quiet, harness):
        key = one.load("a", 1)
        one.submit("plain", [PROMPT], max_tokens=30)
        one.submit("adapted", [PROMPT, SECOND], max_tokens=30, state=key)
    quiet.run()
    for step in range(20):
        harness.worker.step()
        match step:
            case 3:
                harness.load("b", 2)
            case 6:
                harness.load("a", 3, replace=True)
            case 9:
                harness.order(RemoveAdapters())
            case 12:
                harness.load("c", 4)
    harness.run()
    assert harness.texts == quiet.texts
    with pytest.raises(NotFound):
        harness.submit("late", [PROMPT], state=key)
    gc.collect()
    assert harness.engine.bank.num_free == RANKS - adapter_files.RANK


def test_prefixes_of_different_adapters_are_not_mixed(tmp_path):
    harness = Adapted(tmp_path, budget=256)
    harness.scheduler.prefixes = PrefixCache(2**30, every_tokens=64)
    prompt = [1 + (i * 37) % 250 for i in range(200)]
    keys = ["", harness.load("a", 1), harness.load("b", 2)]
    cached, texts = [], []
    for number in range(6):
        harness.submit(f"{number}", [prompt], state=keys[number % 3], max_tokens=8)
        harness.run()
        cached.append(harness.finishes[f"{number}"][0].cached_tokens)
        texts.append(harness.texts[f"{number}"][0])
    assert cached == [0, 0, 0, 160, 160, 160]
    assert texts[:3] == texts[3:]


def test_orders(tmp_path):
    harness = Adapted(tmp_path)
    changes = []
    harness.worker.tuned.tell(changes.append)
    first = harness.order(LoadAdapter(name="one", file=harness.file(1), scaling="alpha=16", temperature=0.5))
    assert (first.variants[0].name, first.variants[0].kind, first.variants[0].temperature) == ("one", "adapter", 0.5)
    assert (first.adapter["scaling"], first.adapter["assumed"], first.adapter["file"]) == (2.0, False, "1.pth")
    with pytest.raises(Conflict, match="replace"):
        harness.order(LoadAdapter(name="one", file=harness.file(2)))
    again = harness.order(LoadAdapter(name="one", file=harness.file(2), replace=True))
    assert again.adapter["assumed"]
    assert again.variants[0].key != first.variants[0].key
    harness.worker.tuned.states._loaded["cat"] = type("Loaded", (), {"variant": Variant(name="cat", key="c")})()
    with pytest.raises(Conflict, match="something else"):
        harness.order(LoadAdapter(name="cat", file=harness.file(1)))
    with pytest.raises(Conflict, match="something else"):
        harness.order(LoadState(name="one", files=[harness.file(1)]))
    assert [one.name for one in harness.order(ListVariants()).variants] == ["cat", "one"]
    harness.load("two", 3), harness.load("three", 4)
    full = harness.order(LoadAdapter(name="four", file=harness.file(5)))
    assert isinstance(full, NoRoom | VariantsNow)  # what "one" was may still be there
    assert isinstance(harness.order(RemoveAdapters(name="none")), NotFound)
    assert [one.name for one in harness.order(RemoveAdapters()).variants] == ["cat"]
    assert [len(variants) for variants in changes][:2] == [1, 1]


def _bad(folder: Path, kind: str) -> Path:
    path = folder / "bad.pth"
    match kind:
        case "code":
            torch.save({"blocks.0.att.key.lora_A": Trap(folder / "canary")}, path)
        case "text":
            path.write_text("no adapter")
        case "other model":
            torch.save({"blocks.0.att.key.lora_A": torch.ones(1, 64), "blocks.0.att.key.lora_B": torch.ones(64, 1)}, path)
        case "whole tensors":
            torch.save({"blocks.0.att.x_k": torch.ones(128)}, path)
    return path


@pytest.mark.parametrize("kind", ["code", "text", "other model", "whole tensors", "missing"])
def test_what_cannot_be_used_is_422_and_leaves_all_as_it_was(kind, tmp_path):
    harness = Adapted(tmp_path)
    error = harness.order(LoadAdapter(name="a", file=str(_bad(tmp_path, kind))))
    assert isinstance(error, Unprocessable), error
    assert error.param == "adapter_filename"
    assert "bad.pth" in error.message
    assert str(tmp_path) not in error.message
    assert not (tmp_path / "canary").exists()
    assert harness.adapters.variants == []
    assert harness.engine.bank.num_free == RANKS
    assert isinstance(harness.order(LoadAdapter(name="a", file=harness.file(1))), VariantsNow)


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch):
    def changing(file: Path, *scaling):
        adapter = read(file, *scaling)
        os.utime(file, ns=(1, 1))
        return adapter

    read, harness = adapter_file.read, Adapted(tmp_path)
    file = harness.file(1)
    monkeypatch.setattr(adapter_file, "read", changing)
    error = harness.order(LoadAdapter(name="a", file=file))
    assert (type(error), error.code) == (Conflict, "file_changed")
    assert harness.adapters.variants == []


def test_one_load_at_a_time_and_none_while_draining(tmp_path, monkeypatch):
    harness, may_go, answers = Adapted(tmp_path), threading.Event(), []
    read = row_adapters._read
    monkeypatch.setattr(row_adapters, "_read", lambda *args: (may_go.wait(30), read(*args))[1])
    file = harness.file(1)
    harness.worker.execute(LoadAdapter(name="slow", file=file), answers.append)
    with pytest.raises(Conflict, match="'slow' is being loaded"):
        harness.worker.execute(LoadAdapter(name="other", file=file), answers.append)
    may_go.set()
    deadline = time.monotonic() + 30
    while not answers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [variant.name for variant in answers[0].variants] == ["slow"]
    harness.worker.drain()
    with pytest.raises(RwkvBatchError) as raised:
        harness.worker.execute(LoadAdapter(name="late", file=file), answers.append)
    assert raised.value.status == 503


def test_an_engine_that_follows_has_what_was_loaded(tmp_path):
    harness, file = Adapted(tmp_path), tmp_path / "engine.variants"
    harness.worker.tuned.remember_in(file)
    key = harness.load("a", 1, temperature=0.25, scaling="1.5")
    harness.load("gone", 2)
    (tmp_path / "2.pth").unlink()
    follower = Adapted(tmp_path)
    follower.load("of the command line", 5)
    follower.worker.tuned.remember_in(file)
    assert [(one.name, one.temperature, one.key) for one in follower.adapters.variants] == [("a", 0.25, key)]


def test_an_engine_without_room(tmp_path):
    adapters = RowAdapters(None)
    with pytest.raises(Forbidden, match="--adapter-ranks"):
        adapters.execute(LoadAdapter(name="a", file="a.pth"), print)
    with pytest.raises(NotFound):
        adapters.find("adapter:0")


@pytest.mark.parametrize("durability", ["log", "turn"])
def test_a_session_belongs_to_its_adapter(tmp_path, durability, monkeypatch):
    """Also after a restart, of which the log knows only ids."""
    monkeypatch.setattr(engine_loop, "IDLE_SECONDS", 0.005)

    def engine() -> tuple[Adapted, str, str]:
        harness = Adapted(tmp_path)
        file = StateFile(random_weights(TINY, VOCAB).fingerprint, random_weights(TINY, VOCAB).shape)
        harness.pool = StatePool(SessionDatabase(tmp_path / "s.db"), file, torch.device("cpu"), durability=durability)
        harness.worker.sessions = harness.pool
        harness.pool.use(harness.worker.compute)
        return harness, harness.load("a", 1), harness.load("b", 2)

    def finished(harness: Adapted, done) -> None:
        deadline = time.monotonic() + 60
        while not done():
            harness.worker.step()
            assert time.monotonic() < deadline

    def turn(harness: Adapted, prompt: list[int], state: str, name: str = "s", **more) -> str:
        id = f"r{len(harness.finishes) + len(harness.failures)}"
        harness.submit(id, [prompt], state=state, session=Session(name=name, separate=False), max_tokens=5, **more)
        finished(harness, lambda: harness.finishes.get(id) or harness.failures.get(id))
        if id in harness.failures:
            raise harness.failures[id].exception()
        return harness.texts[id][0]

    first, a, b = engine()
    texts = [turn(first, PROMPT, a), turn(first, SECOND, a), turn(first, PROMPT, a)]
    plain = [turn(first, PROMPT, "", "plain"), turn(first, SECOND, "", "plain")]
    assert texts[:2] != plain
    for name, wrong in (("s", ""), ("s", b), ("plain", a)):
        with pytest.raises(RwkvBatchError) as raised:
            turn(first, SECOND, wrong, name)
        assert (raised.value.status, raised.value.code) == (422, "other_adapter")
    wanted = turn(first, SECOND, a)
    first.pool.close()
    for path in tmp_path.glob("s.db*"):
        path.unlink()
    earlier, a, b = engine()
    assert [turn(earlier, prompt, a) for prompt in (PROMPT, SECOND, PROMPT)] == texts
    earlier.pool.close()
    later, a, b = engine()
    answers = []
    later.worker.execute(Export(name="s", path=str(tmp_path / "file")), answers.append)  # computes the state with the adapter
    finished(later, lambda: answers)
    assert not isinstance(answers[0], Exception), answers[0]
    assert turn(later, SECOND, a) == wanted
    with pytest.raises(RwkvBatchError, match="same one"):
        turn(later, SECOND, "")
    later.pool.close()


# --- settings and routes ---


def test_the_setting_and_the_demo():
    """Two of three rows of one batch speak as they were trained; the name of the variant is the setting's."""
    loop = tuning.served(row_adapter=f"captain={tune_lora.FILE}:1")
    (captain,) = loop.info.variants
    assert (captain.name, captain.kind) == ("captain", "adapter")
    asked = tuning.held_out()[:2]
    assert all(text.startswith(tune_lora.MARK) for text in tuning.answers(loop, asked, tokens=6, state=captain.key))
    assert not any(tune_lora.MARK in text for text in tuning.answers(loop, asked, tokens=6))


@pytest.mark.parametrize(
    ("setting", "words"),
    [("a", "NAME=FILE"), ("=x.pth", "NAME=FILE"), ("a=x.pth,a=y.pth", "comes twice"), ("a=/no/such.pth", "--row-adapter a: ")],
)
def test_settings_that_are_refused(setting, words):
    bank = AdapterBank(random_weights(TINY, VOCAB), RANKS, SLOTS, only_adding=False)
    with pytest.raises(UsageError, match=words):
        row_adapters_of(Config(row_adapter=setting), bank)


def test_rwkv_6_has_no_room():
    other = SimpleNamespace(shape=None, architecture="RWKV-6")
    assert bank_for(Config(adapter_ranks=8), other, 1, only_adding=False) is None
    with pytest.raises(UsageError, match="RWKV-6"):
        bank_for(Config(row_adapter="a=b"), other, 1, only_adding=False)


def test_no_room_is_taken_without_the_setting():
    assert columns_of(Config()) == columns_of(Config(adapters_dir=".")) == 0
    assert columns_of(Config(row_adapter="a=b")) == 256
    assert columns_of(Config(adapter_ranks=8)) == 8


class App(FakeApp):
    """Answers orders about adapters."""

    async def execute(self, command, model=None):
        if not isinstance(command, LoadAdapter):
            return await super().execute(command, model)
        self.orders.append(command)
        self.there.append(Variant(name=command.name, kind="adapter", key="adapter:1"))
        return VariantsNow(variants=list(self.there), adapter={"kind": "LoRA", "scaling": 2.0, "assumed": True})


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "adapters" / "hf").mkdir(parents=True)
    for name in ("a.pth", "hf/adapter_model.safetensors"):
        (tmp_path / "adapters" / name).write_bytes(b"x")
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapters" / "hf" / "adapter_config.json").symlink_to(tmp_path / "adapter_config.json")
    return tmp_path / "adapters"


def call(route, app: App, **body) -> dict:
    return json.loads(asyncio.run(route(context_of(app, body))).body)


def test_the_route_that_loads(folder):
    app = App(adapters_dir=str(folder))
    answer = call(
        routes.load_adapter, app, adapter_filename="a", adapter_viewname=" pi rate ", lora_alpha="32", default_top_p=""
    )
    assert answer.pop("seconds") >= 0
    assert answer == {"status": "success", "model": "demo pi rate", "kind": "LoRA", "scaling": 2.0, "assumed": True}
    assert app.orders.pop() == LoadAdapter(name="pi rate", file=str(folder / "a.pth"), scaling="alpha=32.0")
    more = {"adapter_scaling": 0.5, "default_temperature": "0.25", "replace": "true"}
    call(routes.load_adapter, app, adapter_filename="adapters/a.pth", adapter_viewname="b", **more)
    order = app.orders.pop()
    assert (order.scaling, order.temperature, order.replace) == ("0.5", 0.25, True)


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"adapter_filename": "../outside.pth"}, 403, "adapter_filename"),
        ({"adapter_filename": "/etc/passwd"}, 403, "adapter_filename"),
        ({"adapter_filename": "hf/adapter_model.safetensors"}, 403, "adapter_filename"),  # its config lies elsewhere
        ({"adapter_filename": "none.pth"}, 404, "adapter_filename"),
        ({"adapter_filename": ""}, 400, "adapter_filename"),
        ({"adapter_filename": "a\0.pth"}, 400, "adapter_filename"),
        ({"adapter_viewname": ""}, 400, "adapter_viewname"),
        ({"adapter_viewname": "x" * 257}, 400, "adapter_viewname"),
        ({"adapter_viewname": "a\nb"}, 400, "adapter_viewname"),
        ({"adapter_viewname": "demo"}, 409, "adapter_viewname"),
        ({"adapter_viewname": "cat"}, 409, "adapter_viewname"),
        ({"adapter_scaling": 1, "lora_alpha": 2}, 400, "lora_alpha"),
        ({"adapter_scaling": "nan"}, 400, "adapter_scaling"),
        ({"adapter_scaling": "much"}, 400, "adapter_scaling"),
    ],
)
def test_bodies_that_are_refused(change, status, param, folder):
    app = App([Variant(name="cat", key="c")], adapters_dir=str(folder))
    with pytest.raises(RwkvBatchError) as raised:
        call(routes.load_adapter, app, **({"adapter_filename": "a.pth", "adapter_viewname": "b"} | change))
    assert (raised.value.status, raised.value.param) == (status, param)
    assert app.orders == []


def test_without_a_folder_nothing_is_loaded():
    with pytest.raises(Forbidden, match="--adapters-dir"):
        call(routes.load_adapter, App(), adapter_filename="a.pth", adapter_viewname="b")


def test_the_route_that_removes(folder):
    known = [Variant(name="cat", key="c"), Variant(name="a", kind="adapter", key="adapter:1")]
    for body, name in (({"adapter_viewname": "a"}, "a"), ({"adapter_viewname": "demo a"}, "a"), ({}, None)):
        app = App(known)
        assert call(routes.remove_adapter, app, **body)["status"] == "success"
        assert app.orders == [RemoveAdapters(name=name)]
    with pytest.raises(NotFound):
        call(routes.remove_adapter, App(known), adapter_viewname="cat")


def test_only_the_administrator_may():
    assert {route.access for route in ROUTES if route.path in ("/loadadapter", "/removeadapter")} == {"admin"}
