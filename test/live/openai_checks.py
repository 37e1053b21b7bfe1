"""Checks of the OpenAI surface over HTTP, for any server and any model: pytest runs them, and so do the two scripts
test/test_openai_adapter.py (official clients) and test/test_openai_routes.py (every route, plain HTTP).

A check is a function of a `Target` that raises AssertionError. Names in capitals in docstrings are lines of the clients'
acceptance list: A1 is what the official SDK needs, A2 langchain, A3 an evaluation harness, A4 to A6 load generators, A9 web
chats, A11 request fields.
"""

import http.client
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import jinja2
import openai
import pydantic
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

HELLO = [{"role": "user", "content": "Hello!"}]
GREEDY = {"temperature": 0, "max_tokens": 12, "seed": 7}
BASES = ("/v1", "/openai/v1")
OURS = {"reasoning_content", "max_model_len", "root", "parent", "store"}  # fields beside the SDK's


@dataclass
class Target:
    """A running server."""

    url: str
    password: str | None = None
    timeout: float = 60.0
    clients: dict[str, openai.OpenAI] = field(default_factory=dict)

    def client(self, base: str = "/v1", **more: Any) -> openai.OpenAI:
        """An SDK client; one without a password sends any key. Those without settings of their own are kept."""
        if not more and base in self.clients:
            return self.clients[base]
        settings = {"api_key": self.password or "anything", "timeout": self.timeout, "max_retries": 0, **more}
        client = openai.OpenAI(base_url=self.url + base, **settings)
        if not more:
            self.clients[base] = client
        return client

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, parsed JSON or text, headers in lower case)"""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=self.timeout)
        key = {"Authorization": f"Bearer {self.password}"} if self.password else {}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, {**key, **(headers or {})})
        reply = connection.getresponse()
        text, found = reply.read().decode(), {name.lower(): value for name, value in reply.getheaders()}
        connection.close()
        return reply.status, json.loads(text) if "json" in found.get("content-type", "") and text else text, found

    def post(self, path: str, body: Any) -> Any:
        """The JSON of an answer that is expected to be good."""
        status, answer, _ = self.request("POST", path, body)
        assert status == 200, answer
        return answer

    def events(self, path: str, body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        status, text, headers = self.request("POST", path, {**body, "stream": True})
        assert status == 200, text
        assert headers["content-type"] == "text/event-stream"
        *lines, done = [line for line in text.split("\n") if line.startswith("data: ")]
        assert done == "data: [DONE]"
        assert text.endswith("data: [DONE]\n\n")
        return [json.loads(line[6:]) for line in lines]


def strictly(kind: type[pydantic.BaseModel], document: dict[str, Any]) -> Any:
    """The document as the SDK's type, every field of the right type and none that the SDK does not know but ours."""
    found = kind.model_validate(document, strict=True)
    assert not (extra := set(unknown_fields(found)) - OURS), extra
    return found


def error_of(kind: type[openai.APIStatusError], call: Callable[[], Any]) -> openai.APIStatusError:
    """The error that a call of the SDK must end with."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def unknown_fields(value: Any) -> list[str]:
    """Names of fields that no type declares, at any depth."""
    if isinstance(value, pydantic.BaseModel):
        inner = [name for item in value.__dict__.values() for name in unknown_fields(item)]
        return [*(value.model_extra or {}), *inner]
    if isinstance(value, list):
        return [name for item in value for name in unknown_fields(item)]
    return []


# --- the official SDK ---


def check_sdk_chat(target: Target) -> None:
    """A1: create, with a content of parts, the newer name of the limit, and nulls."""
    for base in BASES:
        parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
        answer = target.client(base).chat.completions.create(
            model="any name", messages=[{"role": "user", "content": parts}], max_completion_tokens=8, temperature=0, seed=None
        )
        plain = target.client(base).chat.completions.create(model="other", messages=HELLO, max_tokens=8, temperature=0)
        assert answer.choices[0].message.content == plain.choices[0].message.content != ""
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason in ("stop", "length")
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.usage.completion_tokens <= 8


def check_sdk_stream(target: Target) -> None:
    """A1: a stream has the text of the whole answer, the role first, the reason last, no usage unasked."""
    chat = target.client().chat.completions
    whole = chat.create(model="m", messages=HELLO, **GREEDY)
    chunks = list(chat.create(model="m", messages=HELLO, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    *chunks, last = chat.create(model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.choices == []
    assert last.usage == whole.usage or last.usage.completion_tokens == whole.usage.completion_tokens


def check_sdk_stream_helper(target: Target) -> None:
    """A1: the strict helper with three choices gives what the whole answer has."""
    client, fields = target.client(), {"model": "m", "messages": HELLO, "n": 3, "seed": 5, "max_tokens": 8, "temperature": 1}
    with client.chat.completions.stream(**fields) as stream:
        stream.until_done()
        final = stream.current_completion_snapshot  # get_final_completion raises for a choice that was cut
    whole = client.chat.completions.create(**fields)
    assert [choice.index for choice in final.choices] == [0, 1, 2]
    assert [c.message.content for c in final.choices] == [c.message.content for c in whole.choices]
    assert [c.finish_reason for c in final.choices] == [c.finish_reason for c in whole.choices]


def check_sdk_completions(target: Target) -> None:
    """A1: every form of a prompt, echo and logprobs; indices are prompt times n plus choice."""
    completions = target.client("/openai/v1").completions
    ids = target.post("/tokenize", {"prompt": "Once upon"})["tokens"]
    forms = ["Once upon", ["Once upon"], ids, [ids]]
    texts = {completions.create(model="m", prompt=form, **GREEDY).choices[0].text for form in forms}
    assert len(texts) == 1
    several = completions.create(model="m", prompt=["Once upon", "Hello"], n=2, **GREEDY)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == texts.pop()
    answer = completions.create(model="m", prompt="Once upon", echo=True, logprobs=2, max_tokens=3, temperature=0)
    choice = answer.choices[0]
    assert choice.text.startswith("Once upon")
    assert choice.logprobs.token_logprobs[0] is None
    names = target.post("/tokenize", {"prompt": "Once upon", "return_token_strs": True})["token_strs"]
    assert choice.logprobs.tokens[: len(ids)] == names
    for place, token in enumerate(choice.logprobs.tokens):
        if not token.startswith(("bytes:", "<|")):
            assert choice.text.startswith(token, choice.logprobs.text_offset[place]), token
    assert len(completions.create(model="m", prompt="x").choices[0].text.encode()) <= 16 * 128, (
        "16 tokens unless asked for more"
    )
    filled = completions.create(model="m", prompt="def f(", suffix="return x", max_tokens=4)
    assert filled.object == "text_completion"


def check_sdk_models(target: Target) -> None:
    """A1, A6: the list of one model, and the model."""
    for base in BASES:
        client = target.client(base)
        (model,) = client.models.list().data
        assert client.models.retrieve(model.id) == model
        listed = target.request("GET", f"{base}/models")[1]["data"][0]
        strictly(Model, listed)
        assert (listed["root"], listed["parent"]) == (listed["id"], None), "what vLLM's load generator reads"
        assert error_of(openai.NotFoundError, lambda c=client: c.models.retrieve("no such model")).code == "model_not_found"


def check_sdk_errors(target: Target) -> None:
    """A1: the SDK's error classes carry our message, type, field and code; embeddings are refused in words."""
    client = target.client()
    cases = [
        (
            openai.BadRequestError,
            "temperature",
            lambda: client.chat.completions.create(model="m", messages=HELLO, temperature=1e9),
        ),
        (openai.BadRequestError, "messages", lambda: client.chat.completions.create(model="m", messages=[])),
        (openai.BadRequestError, "n", lambda: client.chat.completions.create(model="m", messages=HELLO, n=10**6)),
        (openai.BadRequestError, "prompt[0]", lambda: client.completions.create(model="m", prompt=[65_530])),
        (openai.BadRequestError, "tools[0]", lambda: client.chat.completions.create(model="m", messages=HELLO, tools=[{}])),
        (openai.NotFoundError, None, lambda: client.embeddings.create(model="m", input="x")),
    ]
    for kind, param, call in cases:
        error = error_of(kind, call)
        assert error.param == param, error
        assert error.type in ("invalid_request_error", "not_found_error")
        assert isinstance(error.body["message"], str)
        assert error.body["message"]
        assert error.request_id


def check_wrong_key(target: Target) -> None:
    """A1: where a password is set, a wrong key is told in our words; where none is, any key will do."""
    client = target.client(api_key="wrong")

    def ask() -> Any:
        return client.chat.completions.create(model="m", messages=HELLO, max_tokens=1)

    if target.password is None:
        assert ask().choices
    else:
        error = error_of(openai.AuthenticationError, ask)
        assert error.body["message"] == "Unauthorized: invalid or missing password"
        assert "missing password" in str(error)
        assert error.code == "invalid_api_key"
    assert client.models.list().data, "the list needs no key"


def check_sdk_logprobs(target: Target) -> None:
    """A1: the tokens of a chat are its text, byte for byte, and the likeliest of greedy text is the text."""
    answer = target.client().chat.completions.create(model="m", messages=HELLO, logprobs=True, top_logprobs=3, **GREEDY)
    tokens = answer.choices[0].logprobs.content
    shown = b"".join(bytes(token.bytes) for token in tokens).decode(errors="ignore")
    assert shown.startswith(answer.choices[0].message.content)
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob, "temperature 0 takes the likeliest"
        assert token.logprob <= 0
    none = target.client().chat.completions.create(model="m", messages=HELLO, **GREEDY)
    assert none.choices[0].logprobs is None


def check_sdk_responses(target: Target) -> None:
    """A1: responses, whole and as events; continued by id where the server keeps sessions."""
    client = target.client()
    fields = {"model": "m", "input": "Hello!", "temperature": 0, "max_output_tokens": 32, "store": False}
    whole = client.responses.create(**fields)
    assert whole.output_text
    counted = client.responses.input_tokens.count(model="m", input="Hello!")
    assert counted.input_tokens == whole.usage.input_tokens
    assert whole.status == ("completed" if whole.incomplete_details is None else "incomplete")
    events = list(client.responses.create(**fields, stream=True))
    names = [event.type for event in events]
    assert names[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert names[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    raw = target.request("POST", "/v1/responses", {**fields, "stream": True})[1]
    assert "[DONE]" not in raw, "the last event is the response"
    if whole.status == "completed":
        with client.responses.stream(**fields) as stream:
            assert stream.get_final_response().output_text == whole.output_text
    error = error_of(openai.NotFoundError, lambda: client.responses.create(input="x", previous_response_id="resp_nothing"))
    assert "not found or expired" in str(error)


def check_sdk_responses_continue(target: Target) -> None:
    """A1: a chain of responses equals one conversation; two can follow one, and a deleted one is gone."""
    client = target.client()
    settings = {"model": "m", "temperature": 0, "max_output_tokens": 12}
    first = client.responses.create(input="Hello!", instructions="Be short.", **settings)
    second = client.responses.create(input="What is your name?", previous_response_id=first.id, **settings)
    again = client.responses.create(input="What is your name?", previous_response_id=first.id, store=False, **settings)
    assert again.output_text == second.output_text
    assert second.previous_response_id == first.id
    told = client.responses.create(
        input="What is your name?", instructions="Be long.", previous_response_id=first.id, store=False, **settings
    )
    assert told.usage.input_tokens > again.usage.input_tokens, "instructions are those of this turn"
    deleted = target.request("DELETE", f"/v1/responses/{first.id}")
    assert deleted[:2] == (200, {"id": first.id, "object": "response", "deleted": True})
    assert target.request("DELETE", f"/openai/v1/responses/{first.id}")[1]["deleted"] is False
    client.responses.create(input="And mine?", previous_response_id=second.id, **settings)
    error = error_of(
        openai.NotFoundError, lambda: client.responses.create(input="x", previous_response_id=first.id, **settings)
    )
    assert error.param == "previous_response_id"
    count = num_sessions(target)
    endless = {"max_output_tokens": 100_000, "extra_body": {"ignore_eos": True}}
    left = client.responses.create(model="m", input="x", previous_response_id=second.id, stream=True, **endless)
    next(iter(left))
    assert num_sessions(target) == count, "nothing is there before the answer is whole"
    left.close()
    deadline = time.monotonic() + 10
    while target.request("GET", "/stats")[1]["http"]["answers_in_progress"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert num_sessions(target) == count, "nothing stays of an answer whose client left"


def num_sessions(target: Target) -> int:
    """How many sessions there are."""
    return target.request("POST", "/state/status", {"limit": 0})[1]["total_sessions"]


def check_langchain(target: Target) -> None:
    """A2: invoke, stream and batch."""
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        base_url=target.url + "/v1", api_key=target.password or "any", model="m", temperature=0, max_tokens=8, max_retries=0
    )
    answer = model.invoke("Hello!")
    assert answer.content
    assert answer.usage_metadata["output_tokens"] <= 8
    assert "".join(str(chunk.content) for chunk in model.stream("Hello!")) == answer.content
    assert [each.content for each in model.batch(["Hello!", "Hello!"])] == [answer.content] * 2


# --- plain HTTP ---


def check_shapes(target: Target) -> None:
    """1.5, field by field: every document and chunk is exactly what the SDK's types say."""
    chat = {"messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 2, **GREEDY}
    answer = strictly(ChatCompletion, target.post("/v1/chat/completions", chat))
    assert answer.id.startswith("chatcmpl-")
    for event in target.events("/v1/chat/completions", {**chat, "stream_options": {"include_usage": True}}):
        strictly(ChatCompletionChunk, event)
    text = {"prompt": ["a", "b"], "logprobs": 2, **GREEDY}
    assert strictly(Completion, target.post("/v1/completions", text)).id.startswith("cmpl-")
    for event in target.events("/v1/completions", text):
        strictly(
            Completion, {**event, "choices": [{**c, "finish_reason": c["finish_reason"] or "stop"} for c in event["choices"]]}
        )
    strictly(Response, target.post("/v1/responses", {"input": "Hello!", "store": False, "max_output_tokens": 4}))


def check_first_chunks_in_order(target: Target) -> None:
    """The first chunks of all choices come in the order of their indices, before any text."""
    events = target.events("/openai/v1/chat/completions", {"messages": HELLO, "n": 5, **GREEDY})
    assert [event["choices"][0]["index"] for event in events[:5]] == [0, 1, 2, 3, 4]
    assert all(event["choices"][0]["delta"]["role"] == "assistant" for event in events[:5])
    assert all("role" not in event["choices"][0]["delta"] for event in events[5:])
    assert all("usage" not in event for event in events)


def check_stream_equals_whole(target: Target) -> None:
    """Texts, log-probabilities and reasons are the same both ways, thinking included."""
    for fields in (
        {"temperature": 1, "seed": 3, "n": 2},
        {"temperature": 0, "logprobs": True, "top_logprobs": 1, "stop": ["e", "?"]},
        {"temperature": 1, "seed": 4, "enable_think": True},
        {"temperature": 1, "seed": 4, "enable_think": True, "separate_reasoning": False},
        {"temperature": 1, "seed": 4, "thinking": {"type": "enabled"}, "reasoning_format": "hidden", "logprobs": True},
    ):
        body = {"messages": HELLO, "max_tokens": 16, **fields}
        whole = target.post("/v1/chat/completions", body)["choices"]
        joined = [{"content": "", "reasoning_content": "", "reason": None, "logprobs": []} for _ in whole]
        for event in target.events("/v1/chat/completions", body):
            choice = event["choices"][0]
            mine = joined[choice["index"]]
            for part in ("content", "reasoning_content"):
                mine[part] += choice["delta"].get(part) or ""
            mine["reason"] = choice["finish_reason"] or mine["reason"]
            mine["logprobs"] += (choice["logprobs"] or {}).get("content") or []
        for choice, mine in zip(whole, joined, strict=True):
            assert choice["message"]["content"] == mine["content"]
            assert choice["message"].get("reasoning_content", "") == mine["reasoning_content"]
            assert choice["finish_reason"] == mine["reason"]
            assert ((choice["logprobs"] or {}).get("content") or []) == mine["logprobs"]
    body = {"prompt": ["Once upon", "a"], "echo": True, "logprobs": 1, "n": 2, **GREEDY}
    whole = target.post("/v1/completions", body)["choices"]
    texts, tokens, offsets = [""] * 4, [[] for _ in whole], [[] for _ in whole]
    for event in target.events("/v1/completions", body):
        choice = event["choices"][0]
        texts[choice["index"]] += choice["text"]
        tokens[choice["index"]] += (choice["logprobs"] or {"tokens": []})["tokens"]
        offsets[choice["index"]] += (choice["logprobs"] or {"text_offset": []})["text_offset"]
    assert texts == [choice["text"] for choice in whole]
    assert tokens == [choice["logprobs"]["tokens"] for choice in whole]
    assert offsets == [choice["logprobs"]["text_offset"] for choice in whole]


def check_evaluation_bodies(target: Target) -> None:
    """A3, its shapes: what lm-evaluation-harness asks first, and its scoring of lists of ids."""
    for beside in ("", "/openai"):
        assert target.request("GET", f"{beside}/tokenizer_info")[1]["eos_token"] == "<|endoftext|>"
        assert target.post(f"{beside}/tokenize", {"prompt": "<|endoftext|>", "add_special_tokens": False})["tokens"] == [0]
        ids = target.post(f"{beside}/tokenize", {"prompt": "Hello, world", "add_special_tokens": False})["tokens"]
        assert target.post(f"{beside}/detokenize", {"tokens": ids})["prompt"] == "Hello, world"
    prompts = [[0, *ids], [0, *ids[:1]]]
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234, "model": "m"}
    choices = target.post("/v1/completions", body)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for prompt, choice in zip(prompts, choices, strict=True):
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(prompt) + 1}, "the prompt and exactly one token"
        assert logprobs["token_logprobs"][0] is None
        for token, logprob, top in list(zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True))[
            1:
        ]:
            assert top[token] == logprob
    ids = target.post("/tokenize", {"prompt": "The old bridge and the river. " * 8})["tokens"]
    windows = [[0, *ids[:20]], ids[19:40]]
    texts = [target.post("/detokenize", {"tokens": window})["prompt"] for window in windows]
    of_ids, of_texts = (target.post("/v1/completions", {**body, "prompt": form})["choices"] for form in (windows, texts))
    assert of_ids == of_texts, "a document's windows as texts are scored as its ids are"
    body = {"prompt": ["Hello"], "max_tokens": 4, "temperature": 0, "stop": ["<|endoftext|>", "\n\n"], "model": "m"}
    assert target.post("/openai/v1/completions", body)["choices"][0]["finish_reason"] in ("stop", "length")


def check_load_generators(target: Target) -> None:
    """A4 to A6: exactly max_tokens with ignore_eos, the parser that cuts six characters, the calls at start-up."""
    bench = {
        "model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}], "temperature": 0.0,
        "max_completion_tokens": 40, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    assert target.events("/v1/chat/completions", bench)[-1]["usage"]["completion_tokens"] == 40
    text = {
        "model": "m", "prompt": "Hello!", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 40, "logprobs": None,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "ignore_eos": True, "stop": None,
    }  # fmt: skip
    events = target.events("/v1/completions", text)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 40
    status, raw, _ = target.request("POST", "/v1/chat/completions", {"messages": HELLO, "stream": True, **GREEDY})
    assert status == 200
    for line in raw.split("\n"):
        cut = line[len("data: ") :].strip()
        if cut and cut != "[DONE]" and not line.startswith(":"):
            assert "delta" in json.loads(cut)["choices"][0]
    assert target.request("GET", "/health")[0] == 200
    assert target.request("GET", "/v1/models")[1]["data"]


def check_web_chats(target: Target) -> None:
    """A9: a stream is told by its content type; thoughts come apart, or whole with their tags."""
    body = {"messages": HELLO, "enable_think": True, "temperature": 1, "seed": 1, "max_tokens": 12}
    apart = target.post("/v1/chat/completions", body)["choices"][0]["message"]
    assert apart["reasoning_content"] or apart["content"]
    assert "<think" not in apart["content"]
    for switch in ({"separate_reasoning": False}, {"reasoning_format": "none"}):
        raw = target.post("/v1/chat/completions", {**body, **switch})["choices"][0]["message"]
        assert raw["content"].startswith("<think")
        assert "reasoning_content" not in raw
    hidden = target.post("/v1/chat/completions", {**body, "include_reasoning": False})
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": apart["content"], "refusal": None}
    status, _, headers = target.request("POST", "/v1/chat/completions", {**body, "stream": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream")


def check_fields(target: Target) -> None:
    """A11: each field works or is refused by name; nulls and unknown fields are tolerated."""
    chat = {"messages": HELLO, **GREEDY}
    plain = target.post("/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    nulls = dict.fromkeys(
        ("temperature", "top_p", "n", "stop", "seed", "logprobs", "top_logprobs", "logit_bias", "presence_penalty", "tools",
         "frequency_penalty", "stream", "stream_options", "user", "response_format", "tool_choice", "max_tokens", "session_id")
    )  # fmt: skip
    tolerated = {**nulls, **chat, "no_such_field": {"a": [1]}, "response_format": {"type": "text"}, "tools": []}
    assert target.post("/v1/chat/completions", tolerated)["choices"][0]["message"]["content"] == plain
    for refused in (
        {"tools": [{"type": "function"}]}, {"tool_choice": "required"}, {"response_format": {"type": "xml"}},
        {"functions": [{}]}, {"min_p": 1.1}, {"repetition_penalty": 0}, {"guided_json": 5}, {"grammar": "root"},
        {"typical_p": 0.9}, {"thinking": {"type": "enabled", "budget_tokens": 99}}, {"prefix": "a"},
        {"modalities": ["audio"]}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"min_tokens": 99},
        {"messages": [{"role": "robot", "content": "x"}]}, {"think_type": "x"}, {"logit_bias": {"5": 1000}}, {"n": 0},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    ):  # fmt: skip
        status, answer, _ = target.request("POST", "/v1/chat/completions", {**chat, **refused})
        assert status == 400, refused
        assert any((answer["error"]["param"] or "").startswith(name) for name in refused), answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
    for path, refused in (("completions", {"best_of": 3}), ("responses", {"tools": 5}), ("responses", {"background": True})):
        status, answer, _ = target.request("POST", f"/v1/{path}", {"prompt": "a", "input": "a", "store": False, **refused})
        assert (status, answer["error"]["param"]) == (400, next(iter(refused)))
    assert len(plain) > 1
    stopped = target.post("/v1/chat/completions", {**chat, "stop": plain[1]})["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == (plain[: plain.index(plain[1])], "stop")
    shown = tokens_of(target.post("/v1/chat/completions", {**chat, "logprobs": True}))
    ids = {name: target.post("/tokenize", {"prompt": name})["tokens"] for name in shown}
    name, (token,) = next((name, ids) for name, ids in ids.items() if len(ids) == 1)
    banned = target.post("/v1/chat/completions", {**chat, "logprobs": True, "logit_bias": {str(token): -100}})
    assert name not in tokens_of(banned)
    more = target.post("/v1/chat/completions", {**chat, "max_tokens": 60, "min_tokens": 50, "stop": [plain[0]]})
    assert more["usage"]["completion_tokens"] >= 50
    drawn = {"messages": HELLO, "temperature": 1.5, "seed": 11, "max_tokens": 8, "n": 2}
    once, twice = (target.post("/v1/chat/completions", drawn)["choices"] for _ in range(2))
    assert once == twice, "a seed holds"


def tokens_of(answer: dict[str, Any]) -> list[str]:
    """The names of the tokens of a chat's first choice."""
    return [token["token"] for token in answer["choices"][0]["logprobs"]["content"]]


def check_templates(target: Target) -> None:
    """Contract 9, line 27: the token sequences of the templates, over the routes that tools use."""
    hi = [{"role": "user", "content": "hi"}]
    known = [
        ({"messages": hi}, [24281, 59, 4571, 261, 5585, 41693, 59, 295, 35762, 63, 11, 754, 35762, 63, 11]),
        ({"messages": hi, "enable_think": True}, [24281, 59, 4571, 261, 5585, 41693, 59, 295, 35762]),
    ]
    for body, tokens in known:
        text = target.post("/apply_template", body)["prompt"]
        assert target.post("/v1/tokenize", body)["tokens"] == target.post("/tokenize", {"content": text})["tokens"]
        if target.request("GET", "/tokenizer_info")[1]["vocab_size"] > 256:
            assert target.post("/tokenize", body)["tokens"] == tokens
    for think_type, end in (
        ("fast", "hi\n\nAssistant: <think>\n</think>\n"),
        ("enShort", "hi (think a bit)\n\nAssistant: <think"),
        ("preferChinese", "hi\n\nAssistant: <think>嗯"),
    ):
        body = {"messages": [{"role": "developer", "content": "Be kind."}, *hi], "think_type": think_type}
        assert target.post("/openai/apply-template", body)["prompt"] == f"System: Be kind.\n\nUser: {end}"
    template = jinja2.Template(target.request("GET", "/tokenizer_info")[1]["chat_template"])
    for think in (False, True):
        rendered = template.render(messages=body["messages"], add_generation_prompt=True, enable_thinking=think)
        fields = {"messages": body["messages"], "enable_thinking": think}
        assert rendered == target.post("/apply_template", fields)["prompt"], "tools render it themselves"


def check_dispatch(target: Target) -> None:
    """Contract 9, line 26: one path, two dialects; errors have the dialect's form, under both bases."""
    for base, body, nested in (
        ("/v1", {"messages": HELLO, "temperature": -1}, True),
        ("/v1", {"contents": ["a"], "temperature": -1}, False),
        ("/openai/v1", {"messages": HELLO, "temperature": -1}, True),
    ):
        status, answer, _ = target.request("POST", f"{base}/chat/completions", body)
        assert status == 400
        assert isinstance(answer["error"], dict if nested else str)
    native = target.post("/v1/chat/completions", {"contents": ["Hello!"], "max_tokens": 2})
    assert native["id"] == "rwkv7-batch"
    kept = target.post("/openai/v1/chat/completions", {"contents": ["Hello!"], **GREEDY})["choices"][0]["message"]
    assert kept == target.post("/v1/chat/completions", {"messages": HELLO, **GREEDY})["choices"][0]["message"]
    for method, path in (("GET", "/openai/v1/nothing"), ("GET", "/openai/v1/completions"), ("POST", "/v1/embeddings")):
        status, answer, _ = target.request(method, path, {} if method == "POST" else None)
        assert status in (404, 405)
        assert answer["error"]["message"]
    status, answer, _ = target.request("POST", "/openai/v1/completions", {"messages": HELLO})
    assert (status, answer["error"]["param"]) == (400, "messages")


def check_request_ids(target: Target) -> None:
    """The caller's X-Request-Id comes back; one that is no plain word does not."""
    body = {"messages": HELLO, "max_tokens": 1}
    for given, taken in (("my-id:1.2", True), ("two words", False), ("x" * 200, False), (None, False)):
        _, _, headers = target.request("POST", "/v1/chat/completions", body, {"X-Request-Id": given} if given else None)
        assert (headers["x-request-id"] == given) == taken
        assert headers["x-request-id"]


def check_sessions(target: Target) -> None:
    """Contract 1.10 B: with session_id only the new messages are sent; the state goes on."""
    name = f"check-{time.time_ns()}"
    body = {"messages": HELLO, "session_id": name, **GREEDY}
    assert target.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    assert target.post("/openai/v1/chat/completions", body)["choices"][0]["message"]["content"]
    entries = target.post("/state/status", {"password": target.password})["sessions"]
    assert name in [entry["session_id"] for entry in entries]
    status, answer, _ = target.request("POST", "/v1/chat/completions", {**body, "n": 2})
    assert (status, answer["error"]["param"]) == (400, "n")
    assert target.request("POST", "/state/delete", {"session_id": name, "password": target.password})[0] == 200


def check_chats_are_incremental(target: Target) -> None:
    """A chat that is sent anew with each turn is not computed anew, without any id; the text is that of a fresh start."""
    messages = [{"role": "system", "content": f"{time.time_ns()} " + "Be kind and brief. " * 150}, *HELLO]
    answer = target.post("/v1/chat/completions", {"messages": messages, **GREEDY})
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "Good. Tell me more."}]
    body = {"messages": messages, **GREEDY}
    second = target.post("/v1/chat/completions", body)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 512
    fresh = target.post("/v1/chat/completions", {**body, "use_prefix_cache": False})
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert fresh["choices"] == second["choices"]


def check_copies_are_prefilled_once(target: Target) -> None:
    """n = 64 from a prompt of 2,000 tokens: counted once in usage, computed once by the engine."""
    text = f"{time.time_ns()} " + "the old bridge and the river " * 400
    ids = target.post("/tokenize", {"prompt": text})["tokens"][:2000]
    before = computed_tokens(target)
    answer = target.post("/v1/completions", {"prompt": ids, "n": 64, "max_tokens": 2, "temperature": 1})
    assert len(answer["choices"]) == 64
    assert answer["usage"]["prompt_tokens"] == 2000
    deadline = time.monotonic() + 30
    while (computed := computed_tokens(target) - before) < 2000 and time.monotonic() < deadline:
        time.sleep(0.05)  # the figures come with the engine's signs of life
    assert 2000 <= computed < 10_000, computed


def computed_tokens(target: Target) -> int:
    """Prompt tokens that the engine has computed so far."""
    return target.request("GET", "/stats")[1]["engine"]["prompt_tokens_total"]


ADAPTER = [
    check_sdk_chat, check_sdk_stream, check_sdk_stream_helper, check_sdk_completions, check_sdk_models, check_sdk_errors,
    check_wrong_key, check_sdk_logprobs, check_sdk_responses, check_sdk_responses_continue, check_langchain,
]  # fmt: skip
ROUTES = [
    check_shapes, check_first_chunks_in_order, check_stream_equals_whole, check_evaluation_bodies, check_load_generators,
    check_web_chats, check_fields, check_templates, check_dispatch, check_request_ids, check_sessions,
    check_chats_are_incremental, check_copies_are_prefilled_once,
]  # fmt: skip


def main(checks: list[Any]) -> int:
    """Run the checks against BASE_URL with PASSWORD, or against a demo server that is started for them; the exit status."""
    import os
    import tempfile
    from pathlib import Path

    from server_process import ROOT, ServerProcess

    base_url, password = os.environ.get("BASE_URL"), os.environ.get("PASSWORD") or None
    if base_url:
        return run(checks, Target(base_url.rstrip("/"), password))
    with tempfile.TemporaryDirectory() as folder:
        print("BASE_URL is not set: starting a server with the demo model")
        with ServerProcess(folder=Path(folder), model=ROOT / "demo" / "model.rwkv") as server:
            return run(checks, Target(f"http://{server.host}:{server.port}"))


def run(checks: list[Any], target: Target) -> int:
    """Run each check and print a line for it; 1 when one failed."""
    failed = 0
    for check in checks:
        began = time.monotonic()
        try:
            check(target)
            print(f"ok    {check.__name__:34} {time.monotonic() - began:5.2f} s", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAIL  {check.__name__:34} {type(error).__name__}: {str(error)[:600]}", file=sys.stdout, flush=True)
    print(f"{len(checks) - failed} right, {failed} wrong")
    return 1 if failed else 0
