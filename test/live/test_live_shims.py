"""The dialects beside OpenAI's and the native one, on a real socket: the official clients, and what editors and agents send."""

import json
import re

import anthropic
import httpx
import ollama
import pytest
from scripted_server import ANSWER, PASSWORD
from server_process import ROOT, ServerProcess

CLIENTS = json.loads((ROOT / "test" / "client_requests.json").read_text(encoding="utf-8"))
LOOKS_IN = {
    "/infill": lambda piece: piece.get("content"),
    "/completion": lambda piece: piece["content"],
    "/v1/fim/completions": lambda piece: piece["choices"][0]["delta"]["content"],
    "/v1/completions": lambda piece: piece["choices"][0]["text"],
}
HELLO = [{"role": "user", "content": "Hello!"}]
GREEDY = {"temperature": 0}


def url(server: ServerProcess) -> str:
    return f"http://{server.host}:{server.port}"


# --- Anthropic ---


def claude(server: ServerProcess, key: str = "anything") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url(server), api_key=key, max_retries=0, timeout=60)


def test_the_sdk_of_anthropic(scripted):
    client = claude(scripted)
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


def test_the_sdk_of_anthropic_reads_our_errors(scripted, locked_scripted):
    client = claude(scripted)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="m", max_tokens=-1, messages=HELLO)
    with pytest.raises(anthropic.NotFoundError, match="Not found"):
        client.messages.batches.list()
    with pytest.raises(anthropic.NotFoundError, match="no such model"):
        client.models.retrieve("another")
    with pytest.raises(anthropic.AuthenticationError, match="password"):
        claude(locked_scripted).messages.create(model="m", max_tokens=1, messages=HELLO)
    assert claude(locked_scripted, PASSWORD).messages.create(model="m", max_tokens=1, messages=HELLO).usage.output_tokens == 1
    bearer = anthropic.Anthropic(base_url=url(locked_scripted), auth_token=PASSWORD, api_key=None)
    assert bearer.messages.count_tokens(model="m", messages=HELLO).input_tokens > 1
    status, answer, _ = locked_scripted.request("POST", "/v1/messages?beta=true", b"{", {"x-api-key": PASSWORD})
    assert (status, json.loads(json.dumps(answer))["error"]["type"]) == (400, "invalid_request_error")


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
    else:
        pieces = [answer]
    said = "".join(LOOKS_IN[sent["path"]](piece) or "" for piece in pieces)
    assert said == ("" if sent["body"].get("n_predict") == 0 else ANSWER)


def test_an_infill_in_the_bytes_that_an_editor_looks_for(scripted):
    """The pattern of llama.vim has no place for a blank."""
    with httpx.Client(base_url=url(scripted)) as client:
        assert re.search(r'"content"\s*:"', client.post("/infill", json=CLIENTS["llama.vim"]["body"]).text)
        assert client.get("/props").json()["total_slots"] > 0
