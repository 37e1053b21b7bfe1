"""The routes that load and remove models, below the socket: bodies, files, names."""

import asyncio
import json
import os
import pickle
import shlex
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import quiet_robyn  # noqa: F401
import torch
from models import ROOT

from routes import ROUTES, models
from routes.schemas import validate
from rwkv_batch.config import Config
from rwkv_batch.errors import CheckpointError, Forbidden, InvalidRequest, NotFound, RwkvBatchError
from rwkv_batch.served.models import Defaults, Loaded, LoadModel, RemoveModel

SEED = json.loads((ROOT / "test" / "model_curls.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of models, and files beside it."""
    folder = tmp_path / "models"
    folder.mkdir()
    tensors = {"emb.weight": torch.ones(4, 4), "blocks.0.att.r_k": torch.ones(1, 4)}
    for path in (folder / "a.pth", folder / "RWKV-x060-World-1B6-v2.1-20240328-ctx4096.pth", tmp_path / "outside.pth"):
        torch.save(tensors, path)
    (tmp_path / "adapters").mkdir()
    torch.save({"blocks.0.att.key.bone": torch.ones(2, 2, 2)}, tmp_path / "adapters" / "rwkv-9-bone.pth")
    torch.save({"emb.weight": torch.ones(4), "blocks.0.att.time_first": torch.ones(4)}, folder / "v4.pth")
    (folder / "empty.pth").touch()
    (folder / "cut.pth").write_bytes((folder / "a.pth").read_bytes()[:-100])
    (folder / "link.pth").symlink_to(tmp_path / "outside.pth")
    with zipfile.ZipFile(folder / "code.pth", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"emb.weight": os.system}, protocol=2))
    return folder


class FakeModels:
    """In place of a process's models: notes the orders."""

    def __init__(self, *names: str):
        self.names = list(names)
        self.all = [SimpleNamespace(name=name, info=None) for name in names]
        self.orders: list[LoadModel | RemoveModel] = []

    async def order(self, order: LoadModel | RemoveModel) -> Loaded:
        self.orders.append(order)
        return Loaded(order.name, 1.5, [order.name], layers=24)


def call(route, body: dict, folder: Path | None, *names: str) -> tuple[list, dict]:
    """The orders that a call gives, and its answer."""
    app = SimpleNamespace(models=FakeModels(*(names or ("first",))))
    config = Config(models_dir=folder and str(folder), adapters_dir=folder and str(folder.parent / "adapters"))
    reply = asyncio.run(route(SimpleNamespace(app=app, config=config, body=body)))
    return app.models.orders, json.loads(reply.body)


def load(folder: Path | None, **body) -> LoadModel:
    (order,), _ = call(models.load, body, folder)
    return order


def test_a_model_is_ordered_by_file_and_name(folder):
    orders, answer = call(models.load, {"model_filename": "a", "model_viewname": " My model "}, folder)
    assert orders == [LoadModel(str(folder / "a.pth"), "My model")]
    assert answer["status"] == "success"
    assert (answer["model"], answer["seconds"], answer["layers"], answer["models"]) == ("My model", 1.5, 24, ["My model"])
    assert load(folder, model_filename="models/a.pth").name == "a"


def test_all_fields_are_read_as_texts_and_as_numbers(folder):
    for temperature, top_p in (("0.5", "0.3"), (0.5, 0.3)):
        order = load(
            folder, model_filename="a", model_strategy="fp16i8", default_temperature=temperature, default_top_p=top_p,
            endtoken="\\n\\n", keep="true", replace=1, rope_theta="10000",
        )  # fmt: skip
        assert order.defaults == Defaults(0.5, 0.3, "\n\n")
        assert (order.keep, order.replace) == (True, True)
        assert order.settings == {"dtype": "fp16", "quant": "int8"}
    order = load(folder, model_filename="a", model_strategy="", default_temperature="", endtoken="", adapter_filename=None)
    assert (order.defaults, order.settings) == (Defaults(), {})


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("bf16", {"dtype": "bf16", "quant": "none"}),
        ("INT8", {"quant": "int8"}),
        ("nf4", {"quant": "nf4"}),
        ("bf16i8", {"dtype": "bf16", "quant": "int8"}),
        ("cuda fp16", {"dtype": "fp16", "quant": "none"}),
        ("cuda:0 fp16i8", {"dtype": "fp16", "quant": "int8"}),
        (" ", {}),
    ],
)
def test_strategies(folder, strategy, settings):
    assert load(folder, model_filename="a", model_strategy=strategy).settings == settings
    Config(**settings)


@pytest.mark.parametrize("strategy", ["fp17", "cuda fp16 *20 -> cpu fp32", "cuda", "fp16 int8", "i8", "rwkv.cpp"])
def test_strategies_that_are_none(folder, strategy):
    with pytest.raises(InvalidRequest) as raised:
        load(folder, model_filename="a", model_strategy=strategy)
    assert raised.value.param == "model_strategy"


@pytest.mark.parametrize(
    ("sent", "read"),
    [("\\n\\n", "\n\n"), ("\n\n", "\n\n"), ("\\u3002", "。"), ("。\\x0a", "。\n"), ("\\q\\", "\\q\\"), ("\\\\n", "\\n")],
)
def test_end_tokens_may_be_escaped(folder, sent, read):
    assert load(folder, model_filename="a", endtoken=sent).defaults.end == read


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endtoken", "x" * 65),
        ("endtoken", "\\ud800"),
        ("default_temperature", -1),
        ("default_temperature", "warm"),
        ("default_temperature", "nan"),
        ("default_top_p", 1.5),
        ("model_viewname", "a\nb"),
        ("model_viewname", "x" * 257),
        ("model_viewname", "  "),
        ("model_filename", "a\0.pth"),
        ("model_filename", ""),
        ("model_filename", 5),
        ("keep", "maybe"),
        ("adapter_mode", "mole"),
        ("adapter_scaling", "much"),
    ],
)
def test_fields_that_are_wrong_are_named(folder, field, value):
    with pytest.raises(InvalidRequest) as raised:
        load(folder, **{"model_filename": "a", field: value})
    assert raised.value.param == field


@pytest.mark.parametrize(
    ("name", "error", "status"),
    [
        ("b.pth", NotFound, 404),
        ("../outside.pth", Forbidden, 403),
        ("link.pth", Forbidden, 403),
        ("/etc/passwd", Forbidden, 403),
        ("v4.pth", CheckpointError, 422),
        ("empty.pth", CheckpointError, 422),
        ("cut.pth", CheckpointError, 422),
        ("code.pth", CheckpointError, 422),
    ],
)
def test_files_that_cannot_be_loaded_start_no_engine(folder, name, error, status):
    for route, field in ((models.load, "model_filename"), (models.switch, "model")):
        with pytest.raises(RwkvBatchError) as raised:
            call(route, {field: name}, folder)
        assert type(raised.value) is error
        assert raised.value.status == status
        assert str(folder) not in raised.value.message
        assert raised.value.param == field


def test_an_adapter_is_merged_into_the_model(folder):
    adapters = folder.parent / "adapters"
    torch.save({"blocks.0.att.key.lora_A": torch.ones(2, 4)}, adapters / "bone.pth")
    config = Config(models_dir=str(folder), adapters_dir=str(adapters))

    def settings(**fields) -> dict:
        return validate(models.LoadBody, {"model_filename": "a", **fields}).order(config).settings

    assert settings(adapter_filename="adapters/bone.pth", adapter_mode="bone") == {"adapter": str(adapters / "bone.pth")}
    scaled = settings(adapter_filename="bone", adapter_mode="", adapter_scaling="2.0", model_strategy="int8")
    assert scaled == {"adapter": f"{adapters / 'bone.pth'}:2", "quant": "int8"}
    (adapters / "a,b.pth").touch()
    (adapters / "code.pth").write_bytes((folder / "code.pth").read_bytes())
    for name, error in (
        ("none", NotFound), ("../outside.pth", Forbidden), ("a,b", InvalidRequest), ("code", CheckpointError)
    ):  # fmt: skip
        with pytest.raises(error):
            settings(adapter_filename=name)
    with pytest.raises(Forbidden, match="--adapters-dir"):
        validate(models.LoadBody, {"model_filename": "a", "adapter_filename": "b"}).order(Config(models_dir=str(folder)))


def test_without_a_folder_nothing_is_loaded():
    for route, body in ((models.load, {"model_filename": "a"}), (models.switch, {"model": "a"})):
        with pytest.raises(Forbidden, match="--models-dir"):
            call(route, body, None)


def test_rwkv_runners_way_to_switch(folder):
    orders, answer = call(models.switch, {"model": str(folder / "a.pth"), "strategy": "cuda fp16", "deploy": "true"}, folder)
    assert orders == [LoadModel(str(folder / "a.pth"), "a", {"dtype": "fp16", "quant": "none"})]
    assert answer["status"] == "success"


def test_what_is_removed_is_named_where_there_are_several():
    assert call(models.remove, {}, None, "only")[0] == [RemoveModel("only")]
    assert call(models.remove, {"model_viewname": "b"}, None, "a", "b")[0] == [RemoveModel("b")]
    with pytest.raises(InvalidRequest, match="a, b"):
        call(models.remove, {"dummy": "dummy"}, None, "a", "b")


def test_the_list_is_bare():
    assert call(models.index, {}, None, "a", "b c")[1] == [{"object": "models", "id": "a"}, {"object": "models", "id": "b c"}]


@pytest.mark.parametrize("curl", SEED, ids=lambda curl: curl[:60])
def test_curls_of_other_servers_run_as_they_are(folder, curl):
    words = shlex.split(curl)
    path = "/" + words[1].split("/", 3)[3]
    body = json.loads(words[words.index("-d") + 1]) if "-d" in words else {}
    (route,) = [route for route in ROUTES if route.path == path]
    assert route.method == words[words.index("-X") + 1]
    if "model" in body:  # the one path that is absolute there
        body["model"] = str(folder / "a.pth")
    assert route.access == ("admin" if route.method == "POST" else "open")
    orders, answer = call(route.handler, body, folder)
    if route.method == "POST":
        assert answer["status"] == "success"
        assert orders[0].defaults in (Defaults(), Defaults(1.0, 0.3, "\n\n"))
