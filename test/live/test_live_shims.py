"""The dialects beside OpenAI's and the native one, on a real socket: the official clients, and what editors and agents send."""

import json

import anthropic
import pytest
from scripted_server import ANSWER, PASSWORD
from server_process import ServerProcess

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
