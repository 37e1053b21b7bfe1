"""Which variant of the model a request means, the orders about states, and what they are answered with; without a server."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import quiet_robyn  # noqa: F401

from routes import ROUTES, dialects, models
from routes.anthropic.schemas import MessagesBody, MessagesChat
from routes.http import variants
from routes.http.context import RequestContext
from routes.http.served import Models, ServedModel, Tokenizers
from routes.native import tuned
from routes.native.chat import V1Body, V2Body
from routes.ollama import about
from routes.ollama.schemas import ChatRequest, OllamaChat
from routes.openai.schemas import ChatBody, read
from routes.schemas import SamplingBody, validate
from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest, NotFound, RwkvBatchError
from rwkv_batch.ipc.messages import EngineInfo
from rwkv_batch.request import Request
from rwkv_batch.served.models import ModelEntry, ModelTable
from rwkv_batch.served.variants import (
    Choice,
    ListVariants,
    LoadState,
    RemoveStates,
    SetWeights,
    Variant,
    VariantsNow,
    choices,
    id_of,
    resolve,
)
from sampling.params import SamplingParams

CAT = Variant(name="cat", key="c1", temperature=0.5, top_p=0.25)
BLACK_CAT = Variant(name="black cat", key="b1")
MIX = Variant(name="cat mix", kind="mix", key="m1", weights=[0.25, 0.75, 0.5])
ALL = [CAT, BLACK_CAT, MIX]


def test_names_are_compared_as_a_whole():
    served = {"demo": [CAT, BLACK_CAT], "demo black": [CAT], "RWKV x070 1B5": []}
    assert [id_of(*choice) for choice in choices(served)] == [
        "demo", "demo cat", "demo black cat", "demo black", "demo black cat", "RWKV x070 1B5",
    ]  # fmt: skip
    assert resolve("demo black cat", served) == Choice("demo", BLACK_CAT)
    assert resolve("RWKV x070 1B5", served) == Choice("RWKV x070 1B5", None)
    for wanted in ("", "demo ", "demo  cat", "cat", "Demo cat", "demo cat "):
        assert resolve(wanted, served) is None


class FakeApp:
    """Stands in for the process's HttpApp: notes orders, and knows the variants only that it was made with."""

    def __init__(self, known: list[Variant] = (), there: list[Variant] | None = None, **settings):
        self.config = Config(served_model_name="demo", **settings)
        self.client = SimpleNamespace(info=EngineInfo(model="demo", layers=8, variants=list(known)), ready=True)
        self.models = Models.one(self.client, "demo")
        self.there = list(known) if there is None else there
        self.started = 0
        self.orders: list = []

    async def execute(self, command, model=None):
        self.orders.append(command)
        match command:
            case LoadState():
                key = f"{len(self.orders)}"
                self.there.append(Variant(name=command.name, key=key, weights=command.weights or []))
            case RemoveStates():
                self.there = [one for one in self.there if command.name not in (None, one.name)]
        self.client.info = EngineInfo(model="demo", layers=8, variants=list(self.there))
        return VariantsNow(variants=list(self.there), transposed=[False] if isinstance(command, LoadState) else [])


def context_of(app: FakeApp, body: dict | None = None, **more) -> RequestContext:
    return RequestContext(app, "POST", "/", {}, body=body or {}, **more)


def chosen(body: SamplingBody, known: list[Variant] = ALL, there: list[Variant] | None = None) -> Variant | None:
    return asyncio.run(variants.choose(context_of(FakeApp(known, there)), body))


@pytest.mark.parametrize(
    ("body", "variant"),
    [
        ({"model": "demo cat"}, CAT), ({"model": "demo black cat"}, BLACK_CAT), ({"model": "demo"}, None), ({}, None),
        ({"model": None}, None), ({"model": ""}, None), ({"model": "rwkv7"}, None), ({"state": "cat"}, CAT),
        ({"model": "demo", "state": "cat mix"}, MIX), ({"model": "demo cat", "state": "cat"}, CAT),
    ],
)  # fmt: skip
def test_what_a_body_names(body, variant):
    assert chosen(validate(V1Body, {"contents": ["a"], **body})) == variant
    assert chosen(read(ChatBody, {"messages": [{"content": "a"}], **body})) == variant
    ollama = validate(ChatRequest, {"messages": [{"role": "user", "content": "a"}], **body})
    assert chosen(read(OllamaChat, ollama.in_openai_form())) == variant
    anthropic = validate(MessagesBody, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, **body})
    assert chosen(read(MessagesChat, anthropic.in_openai_form())) == variant


@pytest.mark.parametrize(
    ("body", "param"),
    [({"model": "gpt-3.5-turbo"}, "model"), ({"model": "demo dog"}, "model"), ({"model": "cat"}, "model"),
     ({"state": "dog"}, "state"), ({"model": "demo", "state": "demo cat"}, "state")],
)  # fmt: skip
def test_names_that_nothing_has(body, param):
    """Contract 10 (u)."""
    with pytest.raises(NotFound) as raised:
        chosen(validate(V1Body, {"contents": ["a"], **body}))
    assert (raised.value.param, raised.value.code) == (param, "model_not_found")
    assert "'demo', 'demo cat', 'demo black cat', 'demo cat mix'" in raised.value.message
    with pytest.raises(InvalidRequest, match="another one"):
        chosen(validate(V1Body, {"contents": ["a"], "model": "demo cat", "state": "black cat"}))


def test_with_one_plain_model_any_name_goes():
    assert chosen(validate(V1Body, {"contents": ["a"], "model": "gpt-3.5-turbo"}), []) is None
    for body in ({"model": "demo cat"}, {"state": "cat"}):
        with pytest.raises(NotFound):
            chosen(validate(V1Body, {"contents": ["a"], **body}), [])


def test_what_another_process_had_loaded_just_now():
    for body in ({"model": "demo cat"}, {"state": "cat"}):
        assert chosen(validate(V1Body, {"contents": ["a"], **body}), [], [CAT]) == CAT


def test_defaults_are_those_of_the_request_then_of_the_state():
    def sampling(variant: Variant | None, kind=V1Body, **body) -> tuple[float, float]:
        sent = validate(kind, {"contents": ["a"], **body})
        params = variants.with_defaults(sent, variant).sampling()
        return params.temperature, params.top_p

    assert sampling(None) == sampling(BLACK_CAT) == (1.0, 0.6)
    assert sampling(CAT) == sampling(CAT, V2Body) == (0.5, 0.25)
    assert sampling(CAT, temperature=0.75) == (0.75, 0.25)
    assert sampling(CAT, temperature=None, top_p=0.5) == (0.5, 0.5)
    chat = variants.with_defaults(read(ChatBody, {"messages": [{"content": "a"}], "top_p": 1}), CAT).sampling()
    assert (chat.temperature, chat.top_p) == (0.5, 1)


def test_weights_of_a_request():
    def fields(variant, **body):
        return variants.fields_of(validate(V1Body, {"contents": ["a"], **body}), variant)

    assert fields(None) == {}
    assert fields(CAT) == {"state": "c1"}
    assert fields(MIX) == {"state": "m1", "weights": [0.25, 0.75, 0.5]}
    assert fields(MIX, mrss_gatingweight=["0.5", 1]) == {"state": "m1", "weights": [0.5, 1.0, 0.0]}
    assert fields(MIX, mrss_gatingweight=[-0.5, 1]) == {"state": "m1", "weights": [-0.5, 1.0, 0.0]}
    for wrong in ([], [0, 0], [1, -1], [1, 1, 1, 1]):
        with pytest.raises(InvalidRequest, match="mrss_gatingweight"):
            fields(MIX, mrss_gatingweight=wrong)
    for variant in (None, CAT):
        with pytest.raises(InvalidRequest, match="mixes states"):
            fields(variant, mrss_gatingweight=[1])
    for wrong in (["x"], [float("nan")], [1e9], "1", [1] * 33):
        with pytest.raises(InvalidRequest, match="mrss_gatingweight"):
            validate(V1Body, {"contents": ["a"], "mrss_gatingweight": wrong})


def test_what_mixed_states_cannot_have():
    from rwkv_batch.session_messages import Session

    fields = {"id": "r", "prompts": [[1]], "sampling": SamplingParams(), "max_tokens": 1, "state": "m1"}
    variants.check_mixed(Request(**fields, session=Session(name="s")))
    variants.check_mixed(Request(**fields, weights=[1.0]))
    for more in ({"session": Session(name="s")}, {"prompt_logprobs": 1}):
        with pytest.raises(InvalidRequest):
            variants.check_mixed(Request(**fields, weights=[1.0], **more))


# --- routes ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "states").mkdir()
    for name in ("state.pth", "jp7b-bancho.pth", "ojousama2.pth", "secret.pth"):
        (tmp_path / "states" / name).write_bytes(b"x")
    (tmp_path / "outside.pth").write_bytes(b"x")
    (tmp_path / "states" / "link.pth").symlink_to(tmp_path / "outside.pth")
    return tmp_path / "states"


def call(route, app: FakeApp, **body) -> dict:
    return json.loads(asyncio.run(route(context_of(app, body))).body)


SINGLE = {"state_filename": "state.pth", "state_viewname": "State Test", "default_temperature": "1.0", "default_top_p": "0.3"}
MIXED = {
    "state_viewname": "MRSS Test",
    "state_filenames": ["states/jp7b-bancho.pth", "states/ojousama2.pth", "states/secret.pth"],
    "contain_originalstate": "True",
    "state_gatingweight": ["0.01", "0.3", "0.4", "0.03"],
    "default_temperature": "1.0",
    "default_top_p": "0.8",
}


def test_the_bodies_of_rwkv_infer(folder):
    app = FakeApp(states_dir=str(folder))
    answer = call(tuned.load_state, app, **SINGLE)
    assert answer.pop("seconds") >= 0
    assert answer == {"status": "success", "model": "demo State Test", "layers": 8, "transposed": [False]}
    file = str(folder / "state.pth")
    assert app.orders.pop() == LoadState(name="State Test", files=[file], temperature=1.0, top_p=0.3)
    answer = call(tuned.load_mix, app, **MIXED)
    assert (answer["model"], answer["state_gatingweight"]) == ("demo MRSS Test", [0.01, 0.3, 0.4, 0.03])
    order = app.orders.pop()
    assert [Path(file).name for file in order.files] == ["jp7b-bancho.pth", "ojousama2.pth", "secret.pth"]
    assert (order.original, order.weights, order.top_p) == (True, [0.01, 0.3, 0.4, 0.03], 0.8)
    assert call(models.index, app) == [
        {"object": "models", "id": name} for name in ("demo", "demo State Test", "demo MRSS Test")
    ]
    answer = call(tuned.remove, app, dummy="dummy")
    assert answer == {"status": "success", "removed": 2, "models": ["demo"]}


def test_other_orders(folder):
    app = FakeApp(ALL, states_dir=str(folder))
    for name in ("cat mix", "demo cat mix"):
        call(tuned.set_weights, app, state_viewname=name, state_gatingweight=["1", "0.5"], default_top_p="")
        assert app.orders.pop() == SetWeights(name="cat mix", weights=[1.0, 0.5, 0.0])
    assert call(tuned.remove, app, state_viewname="demo cat")["models"] == ["demo", "demo black cat", "demo cat mix"]
    assert app.orders.pop() == RemoveStates(name="cat")
    more = {**SINGLE, "default_temperature": "", "default_top_p": "", "transpose": "true", "replace": True}
    call(tuned.load_state, app, **more)
    order = app.orders.pop()
    assert (order.transpose, order.replace, order.temperature, order.top_p) == (True, True, None, None)


@pytest.mark.parametrize(
    ("route", "change", "status", "param"),
    [
        (tuned.load_state, {"state_filename": "none.pth"}, 404, "state_filename"),
        (tuned.load_state, {"state_filename": "../outside.pth"}, 403, "state_filename"),
        (tuned.load_state, {"state_filename": "link.pth"}, 403, "state_filename"),
        (tuned.load_state, {"state_filename": "/etc/passwd"}, 403, "state_filename"),
        (tuned.load_state, {"state_filename": "a\0b"}, 400, "state_filename"),
        (tuned.load_state, {"state_filename": ""}, 400, "state_filename"),
        (tuned.load_state, {"state_filename": 5}, 400, "state_filename"),
        (tuned.load_state, {"state_viewname": ""}, 400, "state_viewname"),
        (tuned.load_state, {"state_viewname": "x" * 257}, 400, "state_viewname"),
        (tuned.load_state, {"state_viewname": "a\nb"}, 400, "state_viewname"),
        (tuned.load_state, {"state_viewname": "demo"}, 409, "state_viewname"),
        (tuned.load_state, {"default_temperature": "hot"}, 400, "default_temperature"),
        (tuned.load_state, {"default_top_p": "1.5"}, 400, "default_top_p"),
        (tuned.load_state, {"transpose": "perhaps"}, 400, "transpose"),
        (tuned.load_mix, {"state_filenames": []}, 400, "state_filenames"),
        (tuned.load_mix, {"state_filenames": ["state.pth"] * 5}, 400, "state_filenames"),
        (tuned.load_mix, {"state_filenames": ["state.pth", "../outside.pth"]}, 403, "state_filenames[1]"),
        (tuned.load_mix, {"state_gatingweight": []}, 400, "state_gatingweight"),
        (tuned.load_mix, {"state_gatingweight": ["0", "0"]}, 400, "state_gatingweight"),
        (tuned.load_mix, {"state_gatingweight": [1, 1, 1, 1, 1]}, 400, "state_gatingweight"),
        (tuned.load_mix, {"state_gatingweight": [1, -2]}, 400, "state_gatingweight"),
        (tuned.set_weights, {"state_viewname": "none"}, 404, "state_viewname"),
        (tuned.set_weights, {"state_viewname": "cat"}, 400, "state_viewname"),
        (tuned.remove, {"state_viewname": "none"}, 404, "state_viewname"),
    ],
)  # fmt: skip
def test_what_is_refused(folder, route, change, status, param):
    app = FakeApp(ALL, states_dir=str(folder))
    body = {**({tuned.load_state: SINGLE, tuned.load_mix: MIXED}.get(route, {})), **change}
    with pytest.raises(RwkvBatchError) as raised:
        call(route, app, **body)
    assert (raised.value.status, raised.value.param) == (status, param)
    assert not app.orders


def test_without_a_folder_and_for_whom():
    with pytest.raises(RwkvBatchError, match="--states-dir") as raised:
        call(tuned.load_state, FakeApp(), **SINGLE)
    assert raised.value.status == 403
    access = {route.path: route.access for route in ROUTES}
    orders = ("/loadstatemodel", "/mrss_loadstatemodel", "/mrss_set_gatingweight", "/removestatemodel")
    assert [access[path] for path in orders] == ["admin"] * len(orders)
    assert access["/models"] == "open"


def test_the_lists_of_models():
    app = FakeApp(ALL)
    ids = ["demo", "demo cat", "demo black cat", "demo cat mix"]
    openai = json.loads(asyncio.run(dialects.models(context_of(app))).body)
    assert [(entry["id"], entry["parent"]) for entry in openai["data"]] == [
        (name, "demo" if name != "demo" else None) for name in ids
    ]
    call_of_anthropic = RequestContext(app, "GET", "/", {"anthropic-version": "2023-06-01"})
    anthropic = json.loads(asyncio.run(dialects.models(call_of_anthropic)).body)
    assert ([entry["id"] for entry in anthropic["data"]], anthropic["last_id"]) == (ids, "demo cat mix")
    assert [entry["model"] for entry in json.loads(asyncio.run(about.tags(context_of(app))).body)["models"]] == ids
    one = context_of(app, params={"model": "demo%20black%20cat"})
    assert json.loads(asyncio.run(dialects.model(one)).body)["id"] == "demo black cat"
    with pytest.raises(NotFound, match="demo cat mix"):
        asyncio.run(dialects.model(context_of(app, params={"model": "cat"})))


def test_an_order_is_asked_again_only_where_a_name_is_not_known():
    app = FakeApp(ALL)
    asyncio.run(variants.choose(context_of(app), validate(V1Body, {"contents": ["a"], "model": "demo cat"})))
    assert app.orders == []
    with pytest.raises(NotFound):
        asyncio.run(variants.choose(context_of(app), validate(V1Body, {"contents": ["a"], "model": "demo dog"})))
    assert app.orders == [ListVariants()]


def test_which_of_several_models_is_meant():
    def served_as(name: str, known: list[Variant]) -> ServedModel:
        return ServedModel(ModelEntry(name, []), SimpleNamespace(info=EngineInfo(model=name, variants=known)), Tokenizers())

    table = Models(SimpleNamespace(), ModelTable(0, []))
    table._served = [served_as("demo", ALL), served_as("demo two", [CAT]), served_as("other", [])]
    wanted = {
        "demo": "demo", "demo cat": "demo", "demo two cat": "demo two", "demo dog": "demo", "demo two dog": "demo two",
        "other cat": "other", "": "demo",
    }  # fmt: skip
    assert {name: table.find(name, "call").name for name in wanted} == wanted
    assert table.find(None, "call").name == "demo"
    with pytest.raises(NotFound):
        table.find("gpt-4", "call")
