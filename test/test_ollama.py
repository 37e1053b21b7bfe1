"""From Ollama's bodies to requests, from the engine's events to its documents and lines, and what it says of the model."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import quiet_robyn  # noqa: F401
from test_openai_adapter import BYTES, CONFIG, HI, request_of, step, text_of

from routes import ROUTES
from routes.ollama import about, generation
from routes.ollama.answers import ChatLines, GenerateLines, Lines, RawLines
from routes.ollama.schemas import ChatRequest, GenerateRequest, OllamaBody, OllamaChat, OllamaCompletion
from routes.openai.schemas import GenerationBody, read
from routes.schemas import validate
from routes.timed import Timings
from rwkv_batch.errors import EngineFailed, InvalidRequest
from rwkv_batch.ipc.messages import EngineInfo
from rwkv_batch.request import Delta, Failure, Finish, Request

OPEN = "Assistant: <think>\n</think>\n"
INFO = EngineInfo(
    model="m", fingerprint="f" * 32, dtype="fp16", layers=2, width=64, parameters=7_200_000_000, weight_bytes=14_400_000_000
)


def body_of(kind: type[OllamaBody], fields: dict) -> GenerationBody:
    body = validate(kind, fields)
    return read(OllamaCompletion if getattr(body, "is_raw", False) else OllamaChat, body.in_openai_form())


def chat(**fields) -> Request:
    return request_of(body_of(ChatRequest, {"messages": HI, **fields}))


def generate(**fields) -> Request:
    return request_of(body_of(GenerateRequest, {"prompt": "ab", **fields}))


def context_of(body: dict | None = None, info: EngineInfo | None = INFO) -> SimpleNamespace:
    app = SimpleNamespace(client=SimpleNamespace(ready=info is not None), started=1e9)
    model = SimpleNamespace(name="m", info=info, tokenizer=BYTES)
    app.models = SimpleNamespace(all=[model])
    return SimpleNamespace(
        id="id", app=app, model=model, config=CONFIG, model_name="m", form="native", began=0.0, body=body or {}
    )


def lines_of(kind: type[Lines], body_kind: type[OllamaBody], **fields) -> Lines:
    body = body_of(body_kind, {"model": "asked", **fields})
    return kind(context_of(), body, request_of(body))


def asked(call, body: dict | None = None, info: EngineInfo | None = INFO) -> dict:
    return json.loads(asyncio.run(call(context_of(body, info))).body)


# --- bodies ---


def test_a_chat_is_a_chat():
    request = chat(
        messages=[
            {"role": "system", "content": "S"},
            *HI,
            {"role": "assistant", "content": "a", "thinking": "t"},
            {"role": "tool", "content": "42", "tool_name": "f"},
        ],
        keep_alive="5m",
    )
    assert text_of(request) == f"System: S\n\nUser: hi\n\nAssistant: a\n\nUser: Function output:\n42\n\n{OPEN}"
    assert (request.max_tokens, request.chunk_size, request.stop_texts) == (4096, 1, [b"\nUser:"])


def test_options():
    sent = {"num_predict": 7, "temperature": 0.5, "top_k": 9, "top_p": 0.25, "seed": 3, "stop": ["x", "y"], "num_ctx": 2048}
    request = chat(options={**sent, "presence_penalty": 0.5, "repeat_penalty": 1.0, "mirostat": 0, "num_gpu": None})
    sampling = request.sampling
    assert (request.max_tokens, request.stop_texts) == (7, [b"\nUser:", b"x", b"y"])
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 9, 0.25, 3)
    assert (sampling.alpha_presence, sampling.alpha_frequency) == (0.5, 0.0)
    for all_there_are in (-1, -2):
        assert chat(options={"num_predict": all_there_are}).max_tokens == CONFIG.max_tokens_limit


@pytest.mark.parametrize(
    ("think", "end"),
    [
        (None, f"hi\n\n{OPEN}"), (False, f"hi\n\n{OPEN}"), (True, "hi\n\nAssistant: <think"),
        ("low", "hi (think a bit)\n\nAssistant: <think"), ("high", "hi (think a lot)\n\nAssistant: <think"),
    ],
)  # fmt: skip
def test_how_much_to_think(think, end):
    assert text_of(chat(think=think)).endswith(end)
    assert text_of(generate(prompt="hi", think=think)).endswith(end)


def test_an_answer_may_have_a_form():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    for make in (chat, generate):
        assert make(format="").grammar is None
        assert make(format="json").grammar.kind == make(format=schema).grammar.kind == "json_schema"
    sampling = chat(options={"min_p": 0.1, "repeat_penalty": 1.25, "repeat_last_n": 64}).sampling
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.25)


def test_prompts():
    assert text_of(generate(system="S")) == f"System: S\n\nUser: ab\n\n{OPEN}"
    assert text_of(generate(raw=True)) == "ab"
    assert text_of(generate(suffix="c")) == "✿prefix✿✿suffix✿c✿middle✿ab"
    assert generate(suffix="c").stop_texts == ["✿".encode()]
    assert generate(raw=True).max_tokens == 4096


@pytest.mark.parametrize(
    ("make", "fields", "name"),
    [
        (chat, {"options": {"mirostat": 2}}, "mirostat"),
        (chat, {"options": {"temperature": -1}}, "temperature"),
        (chat, {"options": {"stop": ["x"] * 99}}, "options.stop"),
        (chat, {"format": "xml"}, "format"),
        (chat, {"logprobs": True}, "logprobs"),
        (chat, {"think": "hard"}, "think"),
        (chat, {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages[0].images"),
        (chat, {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        (generate, {"template": "{{ .Prompt }}"}, "template"),
        (generate, {"context": [1, 2]}, "context"),
        (generate, {"images": ["aGk="]}, "images"),
        (generate, {"raw": True, "suffix": "b"}, "raw"),
    ],
)
def test_what_is_refused_is_named(make, fields, name):
    with pytest.raises(InvalidRequest) as error:
        make(**fields)
    assert error.value.param.startswith(name)


# --- answers ---


def test_a_whole_answer():
    lines = lines_of(ChatLines, ChatRequest, messages=HI, think=True, stream=False)
    assert lines.document(step([Delta(0, ">\nWhy?</think>\nYes", 4)])) is None
    answer = json.loads(lines.document(step([Delta(0, ".", 1)], [Finish(0, "stop", 30, 6)])))
    assert answer["message"] == {"role": "assistant", "content": "Yes.", "thinking": "Why?"}
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("asked", True, "stop")
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (30, 6)
    assert answer["total_duration"] == answer["prompt_eval_duration"] + answer["eval_duration"] > 0


@pytest.mark.parametrize(
    ("kind", "body_kind", "fields"),
    [
        (ChatLines, ChatRequest, {"messages": HI}),
        (GenerateLines, GenerateRequest, {"prompt": "a"}),
        (RawLines, GenerateRequest, {"prompt": "a", "raw": True}),
        (RawLines, GenerateRequest, {"prompt": "a", "suffix": "b"}),
    ],
)
def test_a_stream_is_lines(kind, body_kind, fields):
    lines = lines_of(kind, body_kind, **fields)
    data = [lines.chunks(event) for event in (step([Delta(0, "a", 1)]), step([Delta(0, "", 1)]), step([Delta(0, "b", 1)]))]
    assert data[1] is None
    data.append(lines.chunks(step([], [Finish(0, "length", 3, 4)])))
    pieces = [json.loads(line) for line in b"".join(filter(None, data)).decode().splitlines()]
    texts = [piece["message"]["content"] if kind is ChatLines else piece["response"] for piece in pieces]
    assert texts == ["a", "b", ""]
    assert [piece["done"] for piece in pieces] == [False, False, True]
    assert (pieces[-1]["done_reason"], pieces[-1]["eval_count"]) == ("length", 4)
    whole = lines_of(kind, body_kind, **fields)
    whole.document(step([Delta(0, "a", 1)]))
    answer = json.loads(whole.document(step([Delta(0, "b", 1)], [Finish(0, "stop", 3, 4)])))
    assert (answer["message"]["content"] if kind is ChatLines else answer["response"]) == "ab"


def test_thoughts_in_a_stream():
    lines = lines_of(ChatLines, ChatRequest, messages=HI, think=True)
    data = lines.chunks(step([Delta(0, ">Why", 2)])) + lines.chunks(step([Delta(0, " x <", 2)], [Finish(0, "length", 3, 4)]))
    messages = [json.loads(line)["message"] for line in data.decode().splitlines()]
    assert "".join(message.get("thinking", "") for message in messages) == "Why x <"
    assert not any(message["content"] for message in messages)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "How it is outside.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}  # fmt: skip
CALL = 'Let me see.\n```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```'


def test_calls_of_tools_come_whole():
    assert '"name":"get_weather"' in text_of(chat(tools=[WEATHER]))
    called = [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]
    history = [*HI, {"role": "assistant", "content": "", "tool_calls": called}, {"role": "tool", "content": "mild"}]
    assert "Function output:\nmild" in text_of(chat(tools=[WEATHER], messages=history))
    whole = lines_of(ChatLines, ChatRequest, messages=HI, tools=[WEATHER], stream=False)
    whole.document(step([Delta(0, CALL, 9)]))
    streamed = lines_of(ChatLines, ChatRequest, messages=HI, tools=[WEATHER])
    data = b"".join(streamed.chunks(step([Delta(0, character, 1)])) or b"" for character in CALL)
    data += streamed.chunks(step([], [Finish(0, "stop", 3, 9)]))
    messages = [json.loads(line)["message"] for line in data.decode().splitlines()]
    document = json.loads(whole.document(step([], [Finish(0, "stop", 3, 9)])))["message"]
    assert "".join(message["content"] for message in messages) == document["content"] == "Let me see."
    (called,) = [call for message in messages for call in message.get("tool_calls", ())]
    assert called["function"] == document["tool_calls"][0]["function"]
    assert (called["function"]["name"], called["function"]["arguments"]) == ("get_weather", {"city": "Paris"})


def test_a_stream_that_fails_says_so_and_is_not_done():
    for last in (Failure.of("r", EngineFailed("broken")), step([], [Finish(0, "error", 3, 1, "broken")])):
        lines = lines_of(ChatLines, ChatRequest, messages=HI)
        lines.chunks(step([Delta(0, "a", 1)]))
        (answer,) = lines.chunks(last).decode().splitlines()
        assert "broken" in json.loads(answer)["error"]


def test_times_are_told(monkeypatch):
    clock = iter((12.0, 13.0, 17.0))
    monkeypatch.setattr("routes.timed.time.monotonic", lambda: next(clock))
    timings = Timings(10.0)
    for event in (step(), step([Delta(0, "a", 1)]), step([], [Finish(0, "stop", 1, 2)])):
        timings.note(event)
    assert (timings.total, timings.prompt, timings.generation) == (7.0, 3.0, 4.0)


# --- without generating ---


@pytest.mark.parametrize(
    ("call", "body", "said"),
    [
        (generation.chat, {}, {"message": {"role": "assistant", "content": ""}, "done_reason": "load"}),
        (generation.chat, {"messages": [], "keep_alive": 0}, {"done_reason": "unload"}),
        (generation.generate, {"model": "x"}, {"model": "x", "response": "", "done": True, "done_reason": "load"}),
    ],
)
def test_a_model_that_is_to_be_loaded_is_there(call, body, said):
    assert said.items() <= asked(call, body).items()


def test_what_is_said_of_the_model():
    (model,) = asked(about.tags)["models"]
    assert (model["name"], model["model"], model["size"]) == ("m", "m", 14_400_000_000)
    assert (model["details"]["parameter_size"], model["details"]["quantization_level"]) == ("7.2B", "F16")
    shown = asked(about.show, {"model": "m"})
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == CONFIG.max_prompt_tokens
    assert {"completion", "tools", "insert"} <= set(shown["capabilities"])
    assert [running["name"] for running in asked(about.running)["models"]] == ["m"]
    assert asked(about.running, info=None) == {"models": []}
    assert asked(about.tags, info=None)["models"], "clients give up without one"
    assert all(part.isdecimal() for part in asked(about.version)["version"].split(".")), "clients compare it by numbers"


def test_the_routes_are_in_the_table():
    table = {(route.method, route.path): route for route in ROUTES}
    for path, access in (("tags", "open"), ("version", "open"), ("ps", "password")):
        assert table["GET", f"/api/{path}"].access == access
    for path in ("chat", "generate", "show"):
        assert table["POST", f"/api/{path}"].access == "password"
