"""The models as one HTTP process uses them: which one a call means, and what happens to calls while models change."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from routes.http import variants
from routes.http.context import RequestContext
from routes.http.served import Models
from routes.native.chat import V1Body, V3Body
from routes.openai.schemas import ChatBody, CompletionBody, read
from routes.schemas import validate
from rwkv_batch.config import Config
from rwkv_batch.errors import Conflict, Forbidden, NotFound
from rwkv_batch.ipc.messages import EngineInfo, Seat
from rwkv_batch.request import Failure
from rwkv_batch.served.models import Defaults, Loaded, ModelEntry, ModelTable, RemoveModel

BYTES = EngineInfo(model="m", vocab_size=256)
END = Defaults(temperature=0.5, top_p=0.25, end="\n\n")


class FakeLink:
    """A link to an engine in a phase that the test says."""

    def __init__(self, seat: Seat):
        self.seat = seat
        self.phase = "lost"
        self.info: EngineInfo | None = None
        self.stats: dict[str, int] = {}


class FakeClient:
    """In place of the links of an HTTP process."""

    def __init__(self, *numbers: int):
        self.links: list[FakeLink] = []
        self.use(seats(*numbers))
        for link in self.links:
            link.phase, link.info = "ready", BYTES

    def use(self, seats: list[Seat]) -> None:
        known = {link.seat: link for link in self.links}
        self.links = [known.get(seat) or FakeLink(seat) for seat in seats]

    def links_of(self, among):
        return [link for link in self.links if link.seat.index in among]


def seats(*numbers: int) -> list[Seat]:
    return [Seat(index=number, address=f"ipc://engine-{number}") for number in numbers]


def table(version: int, **models: int) -> ModelTable:
    return ModelTable(version, [ModelEntry(name, [number]) for name, number in models.items()])


class Scene:
    """A process with one model, and what it reports."""

    def __init__(self):
        self.client = FakeClient(0)
        self.reports: list[dict] = []
        self.models = Models(self.client, table(0, a=0), self.report)
        self.meet(0)

    def report(self, event: str, **more) -> None:
        self.reports.append({"event": event, **more})

    def meet(self, number: int) -> None:
        """The engine is ready, and so is its tokenizer."""
        (link,) = self.client.links_of([number])
        link.phase, link.info = "ready", BYTES
        self.models.tokenizers.want(BYTES)
        for thread in threading.enumerate():
            if thread.name.startswith("tokenizer"):
                thread.join()
        self.models.tick()

    def find(self, name: str | None, call: str = "call") -> str:
        return self.models.find(name, call).name


def test_with_one_model_any_name_goes():
    scene = Scene()
    assert [scene.find(name) for name in ("a", "gpt-4", "", None, 5)] == ["a"] * 5


def test_with_several_a_name_must_be_one_of_them():
    scene = Scene()
    scene.client.use(seats(0, 1))
    scene.models.told(table(1, a=0, b=1))
    scene.meet(1)
    assert [scene.find(name) for name in ("a", "b", "", None, 5)] == ["a", "b", "a", "a", "a"]
    with pytest.raises(NotFound, match="a, b") as raised:
        scene.find("gpt-4")
    assert (raised.value.param, raised.value.code) == ("model", "model_not_found")


def test_a_table_holds_when_all_its_engines_can_be_used():
    scene = Scene()
    scene.client.use(seats(0, 1))
    scene.models.told(table(1, b=1))
    assert scene.models.names == ["a"]
    assert not scene.reports
    (link,) = scene.client.links_of([1])
    link.phase = "loading"
    scene.models.tick()
    assert scene.models.names == ["a"]
    scene.meet(1)
    assert scene.models.names == ["b"]
    assert scene.reports == [{"event": "models", "version": 1, "engines": []}]


def test_calls_keep_the_model_they_have():
    scene = Scene()
    old = scene.models.find("a", "1")
    scene.client.use(seats(0, 1))
    scene.models.told(table(1, b=1))
    scene.meet(1)
    assert scene.reports == [{"event": "models", "version": 1, "engines": [0]}]
    assert scene.find("a", "2") == "b"
    assert old.engines.ready
    scene.models.tick()
    assert len(scene.reports) == 1
    old.calls.discard("1")
    scene.models.tick()
    assert scene.reports[1:] == [{"event": "models", "version": 1, "engines": []}]
    scene.models.tick()
    assert len(scene.reports) == 2


def test_a_table_that_is_taken_back():
    scene = Scene()
    old = scene.models.find("a", "1")
    scene.client.use(seats(0, 1))
    scene.models.told(table(1, b=1))
    scene.meet(1)
    scene.client.use(seats(0))
    scene.models.told(table(2, a=0))
    assert scene.models.default is old
    assert scene.reports[-1] == {"event": "models", "version": 2, "engines": []}
    scene = Scene()
    scene.client.use(seats(0, 1))
    scene.models.told(table(1, b=1))
    scene.client.use(seats(0))
    scene.models.told(table(2, a=0))  # before it held
    assert scene.models.names == ["a"]
    assert scene.reports == [{"event": "models", "version": 2, "engines": []}]


def test_the_same_name_with_another_engine_is_another_model():
    scene = Scene()
    old = scene.models.find("a", "1")
    scene.client.use(seats(0, 1))
    scene.models.told(table(1, a=1))
    scene.meet(1)
    assert scene.models.find("a", "2") is not old


def test_orders_are_answered():
    scene = Scene()
    done = Loaded("a", 1.0, ["a"])

    async def ask(result) -> Loaded:
        asking = asyncio.ensure_future(scene.models.order(RemoveModel("a")))
        await asyncio.sleep(0)
        question = scene.reports[-1]["question"]
        scene.models.answered("another", done)
        threading.Thread(target=scene.models.answered, args=(question, result)).start()
        return await asking

    assert asyncio.run(ask(done)) == done
    with pytest.raises(Conflict, match="busy"):
        asyncio.run(ask(Failure.of("", Conflict("busy"))))
    with pytest.raises(Forbidden):
        asyncio.run(Models.one(scene.client, "a").order(RemoveModel("a")))


def test_what_a_model_says_where_the_request_says_nothing():
    body = read(ChatBody, {"messages": [{"content": "hi"}, {"content": "ho"}], "top_p": 0.75}).of_model(END)
    params = body.sampling()
    assert (params.temperature, params.top_p) == (0.5, 0.75)
    assert body.stops(Config())[1] == [b"\nUser:", b"\n\n"]
    assert validate(V1Body, {"contents": ["a"]}).of_model(END).stops(Config())[1] == [b"\nUser:", b"\n\n"]
    assert validate(V1Body, {"contents": ["a"], "stop_tokens": [0]}).of_model(END).stops(Config()) == ([0], [])
    assert read(ChatBody, {"messages": [], "stop": "x"}).of_model(END).stops(Config())[1] == [b"\nUser:", b"x"]
    assert read(CompletionBody, {"prompt": "a"}).of_model(END).stops(Config())[1] == []
    plain = read(ChatBody, {"messages": []})
    assert plain.of_model(Defaults()) is plain


def test_the_end_of_an_answer_stands_between_turns():
    end = Defaults(end="\n\x1e\n")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"content": "hu"}]
    (text,) = read(ChatBody, {"messages": messages}).of_model(end).texts()
    assert text.startswith("User: hi\n\x1e\nAssistant: ho\n\x1e\nUser: hu\n\x1e\nAssistant:")
    assert validate(V3Body, {"contents": ["hi"]}).of_model(end).texts()[0].startswith("User: hi\n\x1e\nAssistant:")


def test_a_call_whose_model_goes_while_it_is_read_is_answered_by_that_model():
    scene = Scene()
    app = SimpleNamespace(models=scene.models)
    for name in ("a", "any", ""):
        call = RequestContext(app, "POST", "/", {}, body={"model": name})
        assert call.model_name == "a"
        scene.client.use(seats(0, 1))
        scene.models.told(table(1, b=1))
        scene.meet(1)
        assert asyncio.run(variants.choose(call, read(ChatBody, {"messages": [], "model": name}))) is None
        assert variants.served_ids(call) == ["b"]
        scene = Scene()
        app.models = scene.models
