"""The dialects beside OpenAI's and the native one, on a real socket: the official clients, and what editors and agents send."""

import importlib
import json
import re
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("ollama", reason="needs the SDK ollama: requirements-test.txt")

import httpx
import ollama
from scripted_server import ANSWER, PASSWORD
from server_process import ROOT, ServerProcess

CLIENTS = json.loads((ROOT / "test" / "client_requests.json").read_text(encoding="utf-8"))
LOOKS_IN = {
    "/infill": lambda piece: piece.get("content"),
    "/completion": lambda piece: piece["content"],
    "/v1/fim/completions": lambda piece: piece["choices"][0]["delta"]["content"],
    "/v1/completions": lambda piece: piece["choices"][0]["text"],
    "/v1/messages?beta=true": lambda piece: (piece.get("content") or [piece.get("delta", {})])[0].get("text"),
    "/v1/chat/completions": lambda piece: piece["choices"] and piece["choices"][0]["delta"].get("content"),
    "/api/chat": lambda piece: piece["message"]["content"],
}
HELLO = [{"role": "user", "content": "Hello!"}]
GREEDY = {"temperature": 0}


def url(server: ServerProcess) -> str:
    return f"http://{server.host}:{server.port}"


# --- Anthropic ---


@pytest.fixture(scope="module")
def anthropic() -> ModuleType:
    """The SDK; each process of the tests would need a second to import it when it only looks which tests there are."""
    return importlib.import_module("anthropic")


def claude(sdk: ModuleType, server: ServerProcess, key: str = "anything") -> Any:
    return sdk.Anthropic(base_url=url(server), api_key=key, max_retries=0, timeout=60)


def test_the_sdk_of_anthropic(anthropic, scripted):
    client = claude(anthropic, scripted)
    message = client.messages.create(model="m", max_tokens=50, messages=HELLO, extra_body=GREEDY)
    assert (message.content[0].text, message.stop_reason) == (ANSWER, "end_turn")
    assert message._request_id
    count = client.messages.count_tokens(model="m", messages=HELLO).input_tokens
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == count
    with client.messages.stream(model="m", max_tokens=50, messages=HELLO, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens
    stopped = client.messages.create(model="m", max_tokens=50, messages=HELLO, stop_sequences=["世界"], extra_body=GREEDY)
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "世界", "你😀")
    assert client.messages.create(model="m", max_tokens=1, messages=HELLO).stop_reason == "max_tokens"
    [model] = client.models.list()
    assert client.models.retrieve(model.id).id == model.id


def test_the_sdk_of_anthropic_reads_our_errors(anthropic, scripted, locked_scripted):
    client = claude(anthropic, scripted)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="m", max_tokens=-1, messages=HELLO)
    with pytest.raises(anthropic.NotFoundError, match="Not found"):
        client.messages.batches.list()
    with pytest.raises(anthropic.NotFoundError, match="no such model"):
        client.models.retrieve("another")
    with pytest.raises(anthropic.AuthenticationError, match="password"):
        claude(anthropic, locked_scripted).messages.create(model="m", max_tokens=1, messages=HELLO)
    answer = claude(anthropic, locked_scripted, PASSWORD).messages.create(model="m", max_tokens=1, messages=HELLO)
    assert answer.usage.output_tokens == 1
    bearer = anthropic.Anthropic(base_url=url(locked_scripted), auth_token=PASSWORD, api_key=None)
    assert bearer.messages.count_tokens(model="m", messages=HELLO).input_tokens > 1
    status, answer, _ = locked_scripted.request("POST", "/v1/messages?beta=true", b"{", {"x-api-key": PASSWORD})
    assert (status, json.loads(json.dumps(answer))["error"]["type"]) == (400, "invalid_request_error")


CITY = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"], "additionalProperties": False}


def test_the_sdk_of_anthropic_calls_tools(anthropic, random_model):
    """A forced call is one whatever the model would say; the SDK puts streamed arguments together."""
    client = claude(anthropic, random_model)
    tools = [{"name": "get_weather", "description": "How it is outside.", "input_schema": CITY}]
    asked = {"model": "m", "max_tokens": 100, "messages": HELLO, "tools": tools, "tool_choice": {"type": "any"}}
    message = client.messages.create(**asked)
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    with client.messages.stream(**asked) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "mild"}
    history = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(model="m", max_tokens=3, messages=history, tools=tools).usage.output_tokens == 3
    wanted = {"format": {"type": "json_schema", "schema": CITY}}
    formed = client.messages.create(model="m", max_tokens=100, messages=HELLO, output_config=wanted)
    assert json.loads(formed.content[0].text) == {"city": "Paris"}


def test_the_client_of_ollama_calls_tools(random_model):
    client = ollama.Client(host=url(random_model))
    formed = client.chat("m", HELLO, format=CITY, options={"num_predict": 100})
    assert json.loads(formed.message.content) == {"city": "Paris"}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
    called = [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]
    history = [
        *HELLO,
        {"role": "assistant", "tool_calls": called},
        {"role": "tool", "tool_name": "get_weather", "content": "mild"},
    ]
    assert client.chat("m", history, tools=tools, options={"num_predict": 3}).eval_count == 3


# --- Ollama ---


def test_the_client_of_ollama(scripted):
    client = ollama.Client(host=url(scripted))
    name = client.list().models[0].model
    assert {"completion", "insert"} <= set(client.show(name).capabilities)
    assert client.ps().models[0].model == name
    options = {"temperature": 0}
    whole = client.chat(name, HELLO, options=options)
    assert (whole.message.content, whole.done_reason) == (ANSWER, "stop")
    assert whole.total_duration >= whole.eval_duration > 0
    pieces = list(client.chat(name, HELLO, options=options, stream=True))
    assert "".join(piece.message.content for piece in pieces) == ANSWER
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].eval_count == whole.eval_count
    for fields in ({}, {"raw": True}, {"suffix": "b"}):
        assert client.generate(name, "a", options=options, **fields).response == ANSWER
        assert "".join(piece.response for piece in client.generate(name, "a", options=options, stream=True, **fields)) == ANSWER
    assert client.generate(name).done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="mirostat") as error:
        client.chat(name, HELLO, options={"mirostat": 2})
    assert error.value.status_code == 400


def test_ollama_behind_a_password(locked_scripted):
    open_client = ollama.Client(host=url(locked_scripted))
    assert open_client.list().models
    with pytest.raises(ollama.ResponseError, match="password") as error:
        open_client.chat("m", HELLO)
    assert error.value.status_code == 401
    client = ollama.Client(host=url(locked_scripted), headers={"Authorization": f"Bearer {PASSWORD}"})
    assert client.chat("m", HELLO, options={"temperature": 0}).message.content == ANSWER


def test_lines_that_wait_are_still_json(folder):
    """A sign of life in a stream of lines is a blank, which JSON may begin with."""
    with ServerProcess("--ping-seconds", "0.1", "--http-workers", "1", folder=folder, step_ms=400) as server:
        status, text, headers = server.request("POST", "/api/chat", {"messages": HELLO, "options": {"num_predict": 2}})
    assert (status, headers["content-type"]) == (200, "application/x-ndjson")
    assert text.startswith(" ")
    pieces = [json.loads(line) for line in text.splitlines()]
    assert [piece["done"] for piece in pieces][-1]
    assert len(pieces) > 1


# --- editors ---


@pytest.mark.parametrize("name", CLIENTS)
def test_the_first_requests_of_clients(scripted, name):
    """As they send them, texts shortened; the answer is where they look for it."""
    sent = CLIENTS[name]
    status, answer, headers = scripted.request("POST", sent["path"], sent["body"], sent["headers"])
    assert status == 200, answer
    if headers["content-type"].startswith("text/event-stream"):
        pieces = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    elif headers["content-type"].startswith("application/x-ndjson"):
        pieces = [json.loads(line) for line in answer.splitlines()]
    else:
        pieces = [answer]
    said = "".join(LOOKS_IN[sent["path"]](piece) or "" for piece in pieces)
    if "thinking" in sent["body"]:  # this model never ends a thought
        assert pieces[-1] == {"type": "message_stop"}
    elif sent["body"].get("max_tokens") == 1:
        assert ANSWER.startswith(said)
    else:
        assert said == ("" if sent["body"].get("n_predict") == 0 else ANSWER)


def test_what_clients_ask_of_ollama_first(scripted):
    """A model is offered to agents only where it is said to take tools."""
    assert scripted.get("/api/version")[0] == 200
    (model,) = scripted.get("/api/tags")[1]["models"]
    status, shown = scripted.post({"model": model["model"]}, "/api/show")
    assert status == 200
    assert "tools" in shown["capabilities"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] > 100_000


def test_an_infill_in_the_bytes_that_an_editor_looks_for(scripted):
    """The pattern of llama.vim has no place for a blank."""
    with httpx.Client(base_url=url(scripted)) as client:
        assert re.search(r'"content"\s*:"', client.post("/infill", json=CLIENTS["llama.vim"]["body"]).text)
        assert client.get("/props").json()["total_slots"] > 0
