"""From OpenAI's bodies to requests, and from the engine's events to OpenAI's answers.

    python test/test_openai_adapter.py                                          starts a server with the demo model
    BASE_URL=http://localhost:8000 PASSWORD=... python test/test_openai_adapter.py

runs the official clients against a live server; pytest runs what needs none.
"""

import asyncio
import itertools
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import quiet_robyn  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from routes.http.access import Secrets
from routes.http.context import RequestContext
from routes.http.http_app import HttpApp
from routes.http.replies import error_document
from routes.openai.answers import CompletionFormatter
from routes.openai.chat_answers import ChatFormatter
from routes.openai.response_answers import ResponseFormatter
from routes.openai.response_body import ResponseBody
from routes.openai.schemas import ChatBody, CompletionBody, GenerationBody, read
from routes.openai.tokens import detokenize, tokenize
from rwkv_batch.config import Config
from rwkv_batch.errors import BatchTooLarge, InvalidRequest, Unauthorized, Unavailable, UsageError
from rwkv_batch.ipc.messages import EngineInfo
from rwkv_batch.request import Delta, Failure, Finish, Progress, PromptScore, Request, Sequence, TokenLogprob
from rwkv_batch.secrets import read_api_keys
from rwkv_batch.served.models import ModelEntry
from rwkv_batch.text import prompts, tokenizer
from rwkv_batch.text.reasoning import ReasoningParser

BYTES = tokenizer.for_vocab(256)
CONFIG = Config()
HI = [{"role": "user", "content": "hi"}]


def to_request(kind, data: dict, config: Config = CONFIG) -> Request:
    return request_of(read(kind, data), config)


def request_of(body: GenerationBody, config: Config = CONFIG, ids=BYTES.ids) -> Request:
    return body.to_request(body.checked_texts(config), "r", config, ids)


def chat(**fields) -> Request:
    return to_request(ChatBody, {"messages": HI, **fields})


def completion(**fields) -> Request:
    return to_request(CompletionBody, {"prompt": "ab", **fields})


def text_of(request: Request) -> str:
    return bytes(request.prompts[0]).decode()


# --- bodies ---


def test_defaults_are_the_references():
    request = chat()
    params = request.sampling
    assert (request.max_tokens, request.stop_texts, request.loop) == (4096, [b"\nUser:"], "continuous")
    assert (params.temperature, params.top_k, params.top_p) == (1.0, 20, 0.6)
    assert (params.alpha_presence, params.alpha_frequency, params.alpha_decay) == (1.0, 0.1, 0.996)
    request = completion()
    assert (request.max_tokens, request.stop_ids, request.stop_texts) == (16, [], [])
    assert (request.sampling.alpha_presence, request.sampling.alpha_frequency) == (0.0, 0.0)


def test_penalties_stand_in_for_the_native_ones():
    for fields, right in (
        ({"presence_penalty": 0.5}, (0.5, 0.0)),
        ({"frequency_penalty": 0.25}, (0.0, 0.25)),
        ({"presence_penalty": 0, "frequency_penalty": 0}, (0.0, 0.0)),
        ({"presence_penalty": 0.5, "alpha_presence": 2}, (2.0, 0.0)),
        ({"presence_penalty": None}, (1.0, 0.1)),
    ):
        params = chat(**fields).sampling
        assert (params.alpha_presence, params.alpha_frequency) == right, fields


BODIES = [(ChatBody, {"messages": HI}), (CompletionBody, {"prompt": "a"}), (ResponseBody, {"input": "hi"})]


@pytest.mark.parametrize(("kind", "fields"), BODIES)
def test_temperature_0_is_greedy_unless_a_penalty_is_sent(kind, fields):
    def penalties(**more) -> tuple[float, float]:
        params = to_request(kind, {**fields, "temperature": 0, **more}).sampling
        return params.alpha_presence, params.alpha_frequency

    assert penalties() == penalties(presence_penalty=None, top_p=0.5) == (0.0, 0.0)
    assert penalties(presence_penalty=0.5) == (0.5, 0.0)
    assert penalties(alpha_presence=0.5)[0] == 0.5
    assert penalties(alpha_frequency=0.5)[1] == 0.5
    assert penalties(temperature=0.1) == ((0.0, 0.0) if kind is CompletionBody else (1.0, 0.1))


def test_too_many_prompts_are_refused_before_each_gets_the_suffix(monkeypatch):
    monkeypatch.setattr(prompts, "fill_in", None)
    with pytest.raises(BatchTooLarge):
        to_request(CompletionBody, {"prompt": ["a"] * 3, "suffix": "b"}, Config(max_prompts=2))


def test_stops_are_merged():
    assert chat(stop="x").stop_texts == [b"\nUser:", b"x"]
    assert chat(stop=["x", ""], stop_tokens=[5, "y"], stop_token_ids=[7]).stop_texts == [b"y", b"x"]
    assert chat(stop=["x"], stop_tokens=[5, "y"], stop_token_ids=[7]).stop_ids == [5, 7]
    assert chat(ignore_eos=True).stop_texts == []
    assert chat(ignore_eos=True, stop_tokens=["z"]).stop_texts == [b"z"]
    assert completion(suffix="c").stop_texts == [prompts.FIM_MARK.encode()]
    assert completion(suffix="c", stop_tokens=["x"]).stop_texts == [b"x", prompts.FIM_MARK.encode()]
    assert completion(suffix="c", stop_tokens=[]).stop_texts == [prompts.FIM_MARK.encode()]
    assert completion(suffix="c", stop_tokens=["x"], ignore_eos=True).stop_texts == [b"x"]
    with pytest.raises(InvalidRequest, match="at most 64") as error:
        chat(stop=["x"] * 65)
    assert error.value.param == "stop"


def test_n_repeats_each_prompt_and_is_bounded():
    request = completion(prompt=["a", "b"], n=2)
    assert (request.prompts, request.copies, request.num_rows) == ([[97], [98]], 2, 4)
    assert [Sequence(request, index).prompt for index in range(4)] == [[97], [97], [98], [98]]
    with pytest.raises(BatchTooLarge) as error:
        to_request(CompletionBody, {"prompt": ["a"] * 3, "n": 2}, Config(max_prompts=5))
    assert (error.value.param, error.value.size) == ("n", 6)


@pytest.mark.parametrize(
    ("prompt", "right"),
    [
        ("ab", [[97, 98]]), (["ab", "c"], [[97, 98], [99]]), ([97, 98], [[97, 98]]), ([[97], [98]], [[97], [98]]),
        ("<|endoftext|>", [[0]]), (None, [[0]]), ("", [[0]]), (["", [1]], [[0], [1]]),
        ("<|endoftext|>ab", [[0, 97, 98]]), (["<|endoftext|><|endoftext|>a", "b"], [[0, 0, 97], [98]]),
    ],
)  # fmt: skip
def test_forms_of_a_prompt(prompt, right):
    assert completion(prompt=prompt).prompts == right


def test_only_the_start_of_a_raw_prompt_can_hold_the_end_token():
    end = "<|endoftext|>"
    for request in (
        completion(prompt="a" + end), completion(prompt=end, suffix="b"), chat(messages=[{"role": "user", "content": end}]),
        chat(system=end), chat(messages=[{"role": "assistant", "content": end}]),
        to_request(ResponseBody, {"input": end, "instructions": end}),
    ):  # fmt: skip
        assert 0 not in request.prompts[0]
        assert end in text_of(request)


def test_texts_and_ids_are_the_same_prompts_to_an_evaluation():
    """Windows of a document, the first behind the end token, sent as texts that detokenize gave."""
    world = tokenizer.for_vocab(65536)
    app = SimpleNamespace(loaded_tokenizer=None, encode=None)
    model = SimpleNamespace(entry=ModelEntry("m", []), tokenizer=world)

    async def loaded(model) -> tokenizer.Tokenizer:
        return world

    async def encoded(context, texts: list[str], field: str) -> list[list[int]]:
        return [world.encode(text) for text in texts]

    def answer_of(route, **fields) -> dict:
        return json.loads(
            asyncio.run(route(SimpleNamespace(body=fields, body_bytes=0, config=CONFIG, app=app, model=model))).body
        )

    app.loaded_tokenizer, app.encode = loaded, encoded
    ids = world.encode("The old bridge and the river.\n\n  Über 世界, done.\n" * 20)
    windows = [[0, *ids[:50]], *(ids[start - 1 : start + 50] for start in range(50, len(ids), 50)), [0], [0, 0, *ids[:3]]]
    for window in windows:
        text = answer_of(detokenize, tokens=window)["prompt"]
        assert answer_of(tokenize, prompt=text)["tokens"] == window
        assert request_of(read(CompletionBody, {"prompt": text}), ids=world.ids).prompts == [window]
    assert answer_of(tokenize, prompt=HI) == answer_of(tokenize, messages=HI), "as lm-evaluation-harness sends them"
    assert answer_of(detokenize, tokens=[97, 0, 98])["prompt"] == world.decode([97]) + "<|endoftext|>" + world.decode([98])
    templated = answer_of(tokenize, messages=[{"role": "user", "content": "<|endoftext|>"}])
    assert 0 not in templated["tokens"]


@pytest.mark.parametrize("prompt", [5, {}, [[[1]]], [300], [-1], [[1], [256]], [1.5], []])
def test_what_is_no_prompt(prompt):
    with pytest.raises(InvalidRequest) as error:
        completion(prompt=prompt)
    assert error.value.param.startswith("prompt")


def test_an_empty_session_id_is_none():
    assert chat(session_id="").session is None
    assert chat(session_id="", n=2).copies == 2
    assert chat(session_id="s").session.name == "s"


def test_the_end_token_echoes_as_the_text_it_has():
    prompts = ["<|endoftext|>", [0], "ab", "<|endoftext|>ab", [0, 97, 98]]
    assert answer_to(CompletionFormatter, CompletionBody, prompt=prompts, echo=True).echoes == ["", "", "ab", "ab", "ab"]
    filled = answer_to(CompletionFormatter, CompletionBody, prompt="<|endoftext|>ab", suffix="c", echo=True)
    assert filled.echoes == ["<|endoftext|>ab"], "which was fed as text"


def test_echo_with_logprobs_scores_the_prompt_and_shares_nothing():
    request = completion(echo=True, logprobs=3)
    assert (request.prompt_logprobs, request.sampling.logprobs, request.cache) == (3, 3, False)
    assert completion(logprobs=3).prompt_logprobs is None
    assert completion(echo=True).prompt_logprobs is None
    assert completion(logprobs=False).sampling.logprobs is None
    assert completion(logprobs=0).sampling.logprobs == 0


def test_limits_and_the_newer_name():
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    for fields, name in (
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"), ({"logit_bias": {str(k): 0 for k in range(2000)}}, "logit_bias"),
        ({"top_logprobs": 1}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 99}, "logprobs"),
        ({"session_id": "s", "n": 2}, "n"), ({"session_id": "s" * 257}, "session_id"), ({"max_tokens": 2**21}, "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"1": 101}}, "logit_bias"), ({"seed": 2**64}, "seed"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as error:
            chat(**fields)
        assert error.value.param.startswith(name), fields
    assert chat(logit_bias={"3": -5, "65535": 2.5}).sampling.logit_bias == ((3, -5.0), (65535, 2.5))


def test_minus_one_token_is_as_many_as_the_server_allows():
    config = Config(max_tokens_limit=777)
    for kind, fields in (
        (ChatBody, {"messages": HI, "max_tokens": -1}), (ChatBody, {"messages": HI, "max_completion_tokens": -1}),
        (CompletionBody, {"max_tokens": -1}), (ResponseBody, {"input": "hi", "max_output_tokens": -1}),
    ):  # fmt: skip
        assert to_request(kind, fields, config).max_tokens == 777
        name, _ = fields.popitem()
        with pytest.raises(InvalidRequest) as error:
            to_request(kind, {**fields, name: -2}, config)
        assert error.value.param == name


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "User: hi\n\nAssistant: <think>\n</think>\n"),
        ({"enable_think": True}, "User: hi\n\nAssistant: <think"),
        ({"think": True}, "User: hi\n\nAssistant: <think"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "User: hi\n\nAssistant: <think"),
        ({"reasoning_effort": "low"}, "User: hi (think a bit)\n\nAssistant: <think"),
        ({"reasoning_effort": "high", "enable_think": False}, "User: hi\n\nAssistant: <think>\n</think>\n"),
        ({"think_type": "en_long", "enable_think": False}, "User: hi (think a lot)\n\nAssistant: <think"),
        ({"think_type": "prefer_chinese"}, "User: hi\n\nAssistant: <think>嗯"),
        ({"reasoning_effort": "max"}, "User: hi (think a lot)\n\nAssistant: <think"),
        ({"enable_thinking": True}, "User: hi\n\nAssistant: <think"),
        ({"enable_thinking": False, "reasoning_effort": "high"}, "User: hi\n\nAssistant: <think>\n</think>\n"),
        ({"enable_thinking": True, "reasoning_effort": "high"}, "User: hi (think a lot)\n\nAssistant: <think"),
        ({"thinking": {"type": "enabled"}}, "User: hi\n\nAssistant: <think"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, "User: hi\n\nAssistant: <think>\n</think>\n"),
        ({"thinking": True}, "User: hi\n\nAssistant: <think"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "User: hi (think a bit)\n\nAssistant: <think"),
        ({"reasoning": {"enabled": True}}, "User: hi\n\nAssistant: <think"),
        ({"reasoning": {"effort": None}, "thinking": None}, "User: hi\n\nAssistant: <think>\n</think>\n"),
        ({"chat_template_kwargs": {"thinking": True, "other": 1}}, "User: hi\n\nAssistant: <think"),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "User: hi (think a lot)\n\nAssistant: <think"),
        ({"system": "Be kind."}, "System: Be kind.\n\nUser: hi\n\nAssistant: <think>\n</think>\n"),
        ({"contents": "more"}, "User: hi\n\nUser: more\n\nAssistant: <think>\n</think>\n"),
        ({"messages": [], "contents": ["hi"]}, "User: hi\n\nAssistant: <think>\n</think>\n"),
    ],
)
def test_templates(fields, end):
    assert text_of(chat(**fields)) == end


def test_roles_and_parts():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "42", "tool_call_id": "x"},
        {"role": "developer", "content": "D"},
        {"role": "assistant", "content": "<think>no</think>yes"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I "}, {"type": "text", "text": "will not"}]},
        {"role": "assistant", "content": None, "refusal": "No.", "prefix": False},
    ]
    assert text_of(to_request(ChatBody, {"messages": messages})) == (
        "System: D\n\nUser: ab\n\nUser: Function output:\n42\n\nAssistant: yes\n\nAssistant: I will not\n\nAssistant: No.\n\n"
        "Assistant: <think>\n</think>\n"
    )
    for wrong in ({"prefix": True}, {"partial": True}, {"content": [{"type": "refusal"}]}):
        with pytest.raises(InvalidRequest) as error:
            to_request(ChatBody, {"messages": [*HI, {"role": "assistant", "content": "a", **wrong}]})
        assert error.value.param == f"messages[1].{next(iter(wrong))}"


def test_fields_that_would_change_the_text_are_refused_by_name():
    for fields in ({"mirostat": 2}, {"typical_p": 0.5}):
        with pytest.raises(InvalidRequest) as error:
            chat(**fields)
        assert (error.value.param, error.value.code) == (next(iter(fields)), "unsupported_parameter")
    for name, value in (
        ("typical_p", 0.9), ("thinking_budget", 100), ("thinking.budget_tokens", 1024), ("reasoning.max_tokens", 10),
        ("chat_template_kwargs.thinking_budget", 9), ("prefix", "a"), ("no_repeat_ngram_size", 3),
        ("echo", True), ("suffix", "b"), ("min_new_tokens", 5),
    ):  # fmt: skip
        outer, _, inner = name.partition(".")
        with pytest.raises(InvalidRequest) as error:
            chat(**{outer: {inner: value} if inner else value})
        assert (error.value.param, error.value.code) == (name, "unsupported_parameter")
    neutral = {
        "min_p": 0,
        "repetition_penalty": 1.0,
        "repeat_penalty": 1,
        "repeat_last_n": 64,
        "thinking_budget": -1,
        "reasoning": {},
        "prefix": "",
        "echo": False,
    }
    assert chat(tools=[], response_format={"type": "text"}, top_a=None, unknown=[1], **neutral) == chat()


@pytest.mark.parametrize("make", [chat, completion, lambda **fields: to_request(ResponseBody, {"input": "hi", **fields})])
def test_min_p_and_the_repetition_penalty_by_all_their_names(make):
    sampling = make(min_p=0.1, repetition_penalty=1.2).sampling
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.2)
    assert make(repeat_penalty=1.3, repeat_last_n=-1).sampling.repetition_penalty == 1.3
    assert make(rep_pen=0.7, rep_pen_range=0).sampling.repetition_penalty == 0.7
    assert make(repetition_penalty=1.0, repeat_penalty=1.3, repeat_last_n=64).sampling.repetition_penalty == 1
    for name, value in (("min_p", 1.5), ("repetition_penalty", 0), ("repeat_penalty", 101), ("rep_pen", -1)):
        with pytest.raises(InvalidRequest) as error:
            make(**{name: value})
        assert error.value.param == name
    for name in ("repeat_last_n", "repetition_penalty_range", "rep_pen_range"):
        with pytest.raises(InvalidRequest) as error:
            make(repetition_penalty=1.1, **{name: 64})
        assert error.value.param == name


def test_responses_become_conversations():
    def response(**fields) -> Request:
        return to_request(ResponseBody, {"store": False, **fields})

    assert text_of(response(input="hi", instructions="Be kind.")) == "System: Be kind.\n\nUser: hi\n\nAssistant:"
    items = [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}, {"role": "assistant", "content": "b"}, "c"]
    assert text_of(response(input=items)) == "User: a\n\nAssistant: b\n\nUser: c\n\nAssistant:"
    following = response(input="hi", instructions="Be short.", previous_response_id="resp_1")
    assert text_of(following) == "System: Be short.\n\nUser: hi\n\nAssistant:", "instructions are those of this turn"
    assert text_of(response(input="hi", previous_response_id="resp_1")) == "User: hi\n\nAssistant:"
    assert (following.session.name, following.session.keep, following.session.must_exist) == ("resp_1", False, True)
    branch = to_request(ResponseBody, {"input": "hi", "previous_response_id": "resp_1"}).session
    assert (branch.name, branch.keep, branch.must_exist) == ("resp_1", True, True)
    assert branch.save_as not in (None, "resp_1")
    kept = read(ResponseBody, {"input": "hi", "own_id": "resp_1", "_own_id": "resp_1"})
    assert request_of(kept).session.name == kept.own_id != "resp_1", "nobody chooses where it is kept"
    assert response(input="hi", max_output_tokens=3).max_tokens == 3
    assert response(input="hi").max_tokens == 1024
    for fields in (
        {},
        {"input": ""},
        {"input": 5},
        {"input": "a", "background": True},
        {"input": [{"type": "reasoning", "summary": []}]},
        {"input": "a", "prompt": {"id": "pmpt_1"}},
        {"input": "a", "metadata": {str(number): "v" for number in range(17)}},
    ):
        with pytest.raises(InvalidRequest):
            response(**fields)


def test_items_of_a_history():
    """Thoughts are left out as in chats; what would be lost silently is refused in words."""
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    said = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "status": "completed"}
    request = to_request(ResponseBody, {"input": ["a", thought, said, "b"], "reasoning": {"effort": "none", "summary": "auto"}})
    assert text_of(request) == "User: a\n\nAssistant: No.\n\nUser: b\n\nAssistant:"
    for item, why in (
        ({"type": "computer_call", "id": "c"}, "not supported"),
        ({"type": "item_reference", "id": "m"}, "not kept"),
    ):
        with pytest.raises(InvalidRequest, match=why) as error:
            to_request(ResponseBody, {"input": ["a", item]})
        assert error.value.param == "input[1]"


# --- before the tokenizer is there ---


class LoadingClient(SimpleNamespace):
    """Stands in for the channel of a process whose engine is in `phase`."""

    def __init__(self, phase: str):
        super().__init__(phase=phase, tickets={}, info=None)

    def introduce(self, info: EngineInfo) -> None:
        self.info = info
        self.on_info(info)

    def check(self) -> None:
        if self.phase != "ready":
            raise Unavailable("the model is still loading", code="loading")


def test_requests_wait_for_the_tokenizer_of_a_ready_engine(tmp_path):
    """Another process may have said that the server is ready; this one says that it is not, but serves."""

    async def run() -> None:
        client = LoadingClient("ready")
        app = HttpApp(CONFIG, client, SimpleNamespace(), tmp_path)
        with pytest.raises(Unavailable, match="tokenizer is still loading"):
            app.check()
        call = RequestContext(app, "POST", "/", {}, body={"tokens": [97]})
        waiting = asyncio.create_task(app.encode(call, ["ab"], "prompt"))
        asking = asyncio.create_task(detokenize(call))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert not asking.done()
        client.introduce(EngineInfo(model="m", fingerprint="f" * 32, vocab_size=256))
        assert await waiting == [[97, 98]]
        assert json.loads((await asking).body)["prompt"] == "a"
        app.check()
        client.phase = "loading"
        with pytest.raises(Unavailable, match="model is still loading"):
            await app.encode(call, ["ab"], "prompt")

    asyncio.run(run())


def test_without_an_engine_nothing_waits(tmp_path):
    app = HttpApp(CONFIG, LoadingClient("lost"), SimpleNamespace(), tmp_path)
    with pytest.raises(Unavailable, match="model is still loading"):
        asyncio.run(app.loaded_tokenizer(app.models.default))


def test_a_tokenizer_that_does_not_come_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("routes.http.http_app.TOKENIZER_SECONDS", 0.0)
    app = HttpApp(CONFIG, LoadingClient("ready"), SimpleNamespace(), tmp_path)
    with pytest.raises(Unavailable, match="tokenizer is still loading"):
        asyncio.run(app.encode(RequestContext(app, "POST", "/", {}), ["ab"], "prompt"))


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_conversation_is_templated_once_and_a_long_one_not_on_the_event_loop(tmp_path, monkeypatch, size):
    threads = []

    def conversation(turns, tail: str, gap: str) -> str:
        threads.append(threading.get_ident())
        return turns[-1].text[:5] + tail

    monkeypatch.setattr(prompts, "conversation", conversation)
    client = LoadingClient("ready")
    figures = SimpleNamespace(observe=lambda number: None)
    app = HttpApp(CONFIG, client, SimpleNamespace(num_prompts=figures, max_tokens=figures), tmp_path)
    client.introduce(EngineInfo(model="m", fingerprint="f" * 32, vocab_size=256))
    call = RequestContext(app, "POST", "/", {}, body_bytes=size)
    request = asyncio.run(app.to_request(call, read(ChatBody, {"messages": [{"content": "a" * size}]})))
    assert request.prompts
    assert len(threads) == 1
    assert (threads[0] == threading.get_ident()) == (size == 1)


# --- answers ---


def answer_to(kind, body_kind, **fields):
    """An answer whose events a test makes up."""
    asked = {"messages": HI, "prompt": "ab", "input": "hi"}
    body = read(body_kind, {body_kind.field: asked[body_kind.field], **fields})
    model = SimpleNamespace(info=EngineInfo(model="m", fingerprint="f" * 32), tokenizer=BYTES)
    call = SimpleNamespace(id="id", model=model, config=CONFIG, model_name="m")
    return kind(call, body, request_of(body))


def step(deltas=(), finishes=(), scores=()) -> Progress:
    return Progress("r", list(deltas), list(finishes), list(scores))


def payloads(data: bytes | None) -> list:
    lines = (data or b"").decode().split("\n\n")
    assert lines.pop() == ""
    found = [line.split("data: ", 1)[1] for line in lines]
    return [line if line == "[DONE]" else json.loads(line) for line in found]


def test_a_chat_from_events():
    events = [
        step([Delta(1, "B", 1)]),
        step([Delta(0, "a", 1)], [Finish(1, "length", 38, 1)]),
        step([], [Finish(0, "stop", 38, 2)]),
    ]
    whole = answer_to(ChatFormatter, ChatBody, n=2)
    *nothing, document = [whole.document(event) for event in events]
    assert nothing == [None, None]
    document = json.loads(document)
    assert [choice["message"]["content"] for choice in document["choices"]] == ["a", "B"]
    assert [choice["finish_reason"] for choice in document["choices"]] == ["stop", "length"]
    num_prompt = 38  # as the rows say, which know what stands between two turns
    usage = {key: document["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert usage == {"prompt_tokens": num_prompt, "completion_tokens": 3, "total_tokens": num_prompt + 3}

    stream = answer_to(ChatFormatter, ChatBody, n=2, stream_options={"include_usage": True})
    chunks = [chunk for event in events for chunk in payloads(stream.chunks(event))]
    assert chunks.pop() == "[DONE]"
    last = chunks.pop()
    assert (last["choices"], last["usage"]) == ([], document["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    shown = [(c["choices"][0]["index"], c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in chunks]
    role = {"role": "assistant", "content": "", "refusal": None}
    assert shown == [
        (0, role, None), (1, role, None), (1, {"content": "B"}, None), (0, {"content": "a"}, None),
        (1, {}, "length"), (0, {}, "stop"),
    ]  # fmt: skip


def test_no_usage_unless_asked():
    stream = answer_to(ChatFormatter, ChatBody)
    *chunks, done = payloads(stream.chunks(step([Delta(0, "a", 1)], [Finish(0, "stop", 1, 1)])))
    assert done == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)


def test_failures():
    failed = Failure("r", "Overloaded", "full", None, "queue_full", 1.0)
    right = {"error": {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}}
    whole = answer_to(ChatFormatter, ChatBody)
    error = whole.document(failed)
    assert (error.status, error_document(error, form="openai")) == (429, right)
    assert payloads(answer_to(CompletionFormatter, CompletionBody).chunks(failed)) == [right]
    broken = step([], [Finish(0, "error", 1, 0, "not finite")])
    *_, last = payloads(answer_to(ChatFormatter, ChatBody).chunks(broken))
    assert "not finite" in last["error"]["message"], "and no [DONE] after it"
    (event,) = payloads(answer_to(ResponseFormatter, ResponseBody).chunks(failed))
    assert (event["type"], event["error"]) == ("error", right["error"])


def test_a_response_and_its_stream():
    """The stream ends with the response, as the official API's does, and nothing follows that event."""
    events = [step([Delta(0, " a", 1)]), step([Delta(0, "b", 1)], [Finish(0, "stop", 4, 3)])]
    fields = {"store": False, "reasoning": {"effort": "none"}}
    whole, stream = (answer_to(ResponseFormatter, ResponseBody, **fields) for _ in range(2))
    response = json.loads([whole.document(event) for event in events][-1])
    assert response["output"][0]["content"][0]["text"] == "ab"
    assert (response["background"], response["store"], response["service_tier"]) == (False, False, "default")
    assert response["reasoning"] == {"effort": "none", "summary": None}
    assert response["completed_at"] >= response["created_at"]
    told = [payload for event in events for payload in payloads(stream.chunks(event))]
    assert [event["type"] for event in told if "delta" in event] == ["response.output_text.delta"] * 2
    assert told[0]["response"]["completed_at"] is None
    last = told[-1]
    assert (last["type"], last["response"]["usage"]) == ("response.completed", response["usage"])
    cut = answer_to(ResponseFormatter, ResponseBody, max_output_tokens=-1)
    response = json.loads(cut.document(step([Delta(0, "a", 1)], [Finish(0, "length", 4, 1)])))
    assert (response["status"], response["completed_at"], response["max_output_tokens"]) == ("incomplete", None, None)


def test_one_choice_that_fails_fails_the_answer_once_and_at_the_end():
    events = [step([], [Finish(1, "error", 1, 0, "not finite")]), step([Delta(0, "a", 1)]), step([], [Finish(0, "stop", 1, 1)])]
    whole, stream = (answer_to(ChatFormatter, ChatBody, n=2, stream_options={"include_usage": True}) for _ in range(2))
    *nothing, last = [whole.document(event) for event in events]
    assert nothing == [None, None]
    assert "choice 1: not finite" in last.message
    chunks = [chunk for event in events for chunk in payloads(stream.chunks(event))]
    assert [list(chunk) for chunk in chunks if "error" in chunk] == [["error"]]
    assert "error" in chunks[-1]
    assert all(chunk["choices"] for chunk in chunks[:-1]), "no usage of what failed"


def test_tokens_of_a_chat_are_its_text_and_a_stop_id_is_none_of_it():
    tokens = [TokenLogprob(97, -0.5, [(97, -0.5), (255, -1.0)]), TokenLogprob(98, -1.0, []), TokenLogprob(99, -2.0, [])]
    answer = answer_to(ChatFormatter, ChatBody, logprobs=True, top_logprobs=2, stop_token_ids=[99])
    document = json.loads(answer.document(step([Delta(0, "ab", 3, tokens)], [Finish(0, "stop", 1, 3)])))
    content = document["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in content] == ["a", "b"]
    assert content[0]["top_logprobs"][1] == {"token": "bytes:\\xff", "logprob": -1.0, "bytes": [255]}


def test_the_older_form_of_logprobs():
    prompt = [TokenLogprob(98, -1.5, [(98, -1.5)])]
    sampled = [
        TokenLogprob(0xC3, -0.1, [(5, -0.05)]),
        TokenLogprob(0xA9, -0.2, [(0xA9, -0.2)]),
        TokenLogprob(0, -0.3, [(0, -0.3)]),
    ]
    events = [step([], [], [PromptScore(0, prompt)]), step([Delta(0, "é", 3, sampled)], [Finish(0, "stop", 2, 3)])]
    whole = answer_to(CompletionFormatter, CompletionBody, echo=True, logprobs=1)
    choice = json.loads([whole.document(event) for event in events][-1])["choices"][0]
    assert choice["text"] == "abé"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "bytes:\\xc3", "bytes:\\xa9", "<|endoftext|>"],
        "token_logprobs": [None, -1.5, -0.1, -0.2, -0.3],
        "top_logprobs": [
            None,
            {"b": -1.5},
            {"\x05": -0.05, "bytes:\\xc3": -0.1},
            {"bytes:\\xa9": -0.2},
            {"<|endoftext|>": -0.3},
        ],
        "text_offset": [0, 1, 2, 2, 3],
    }
    stream = answer_to(CompletionFormatter, CompletionBody, echo=True, logprobs=1)
    *chunks, _ = [chunk for event in events for chunk in payloads(stream.chunks(event))]
    joined = {
        key: [value for c in chunks for value in (c["choices"][0]["logprobs"] or {key: []})[key]] for key in choice["logprobs"]
    }
    assert joined == choice["logprobs"]
    assert "".join(c["choices"][0]["text"] for c in chunks) == "abé"


def test_thoughts_and_their_tokens():
    fields = {"enable_think": True}
    answer = answer_to(ChatFormatter, ChatBody, **fields)
    deltas = [Delta(0, ">\nHm", 2), Delta(0, ".\n</thi", 2), Delta(0, "nk>\n\nYes", 2), Delta(0, "!", 1)]
    document = json.loads(answer.document(step(deltas, [Finish(0, "stop", 1, 7)])))
    message = document["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes!")
    assert document["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    raw = answer_to(ChatFormatter, ChatBody, separate_reasoning=False, **fields)
    message = json.loads(raw.document(step(deltas, [Finish(0, "stop", 1, 7)])))["choices"][0]["message"]
    assert message["content"] == "<think>\nHm.\n</think>\n\nYes!"
    assert "reasoning_content" not in message


@pytest.mark.parametrize(
    "fields", [{"include_reasoning": False}, {"reasoning_format": "hidden"}, {"reasoning": {"exclude": True}}]
)
def test_a_hidden_thought_is_counted_and_not_shown(fields):
    texts = [">", "Hm", ".", "</think>", "\n\nYes", "!"]
    deltas = [Delta(0, text, 1, [TokenLogprob(97 + place, -1.0, [])]) for place, text in enumerate(texts)]
    events = [*(step([delta]) for delta in deltas), step([], [Finish(0, "stop", 1, 6)])]
    asked = {"enable_think": True, "logprobs": True, "stream_options": {"include_usage": True}, **fields}
    whole, stream = (answer_to(ChatFormatter, ChatBody, **asked) for _ in range(2))
    document = json.loads([whole.document(event) for event in events][-1])
    (choice,) = document["choices"]
    assert (choice["message"]["content"], "reasoning_content" in choice["message"]) == ("Yes!", False)
    assert [token["token"] for token in choice["logprobs"]["content"]] == ["e", "f"], "those of the answer"
    assert document["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    *chunks, last, _ = [chunk for event in events for chunk in payloads(stream.chunks(event))]
    assert last["usage"] == document["usage"]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Yes!"
    assert not any("reasoning_content" in choice["delta"] for choice in choices)
    assert [token for choice in choices for token in (choice["logprobs"] or {}).get("content", [])] == choice["logprobs"][
        "content"
    ]
    cut = answer_to(ChatFormatter, ChatBody, **asked)
    ended = payloads(cut.chunks(step([Delta(0, ">Hm</thi", 3)], [Finish(0, "length", 1, 3)])))
    assert not any(
        "reasoning_content" in chunk["choices"][0]["delta"] for chunk in ended if chunk != "[DONE]" and chunk["choices"]
    )


def test_formats_of_thoughts():
    def shown(**fields) -> str:
        return read(ChatBody, {"messages": HI, **fields}).thought_shown

    assert shown() == shown(reasoning_format="parsed") == shown(include_reasoning=True) == "apart"
    assert shown(separate_reasoning=False) == shown(reasoning_format="raw") == shown(reasoning_format="none") == "within"
    assert shown(separate_reasoning=False, include_reasoning=False) == "hidden"
    with pytest.raises(InvalidRequest) as error:
        chat(reasoning_format="no such")
    assert error.value.param == "reasoning_format"


@pytest.mark.parametrize(
    ("text", "begun", "right"),
    [
        (">\nHm.\n</think>\n\nYes", "", ("Hm.", "Yes")),
        ("> a < b </think> c </think> d", "", ("a < b", "c </think> d")),
        (">\nnever ends \n</thin", "", ("never ends \n</thin", "")),
        (">\n\n</think>\nYes ", "", ("", "Yes ")),
        ("，好。</think>Yes", "嗯", ("嗯，好。", "Yes")),
        ("", "嗯", ("嗯", "")),
        ("", "", ("", "")),
        (">", "", ("", "")),
    ],
)
def test_a_thought_is_told_from_the_answer_wherever_it_is_cut(text, begun, right):
    for cuts in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        thought = ReasoningParser(begun)
        parts = [thought.feed(text[start:end]) for start, end in itertools.pairwise((0, *cuts, len(text)))]
        told = "".join(part[0] for part in parts) + thought.finish(), "".join(part[1] for part in parts)
        assert told == right, cuts


# --- keys ---


def test_keys_and_the_password():
    digest = "sha256:81b637d8fcd2c6da6359e6963113a1170de795e4b725b84d1e0b4cfd9ec58ce9"  # of "bob"
    secrets = Secrets("owner", read_api_keys(f"alice=a=1,bob={digest}", None))
    assert [secrets.caller([given]) for given in ("owner", "a=1", "bob")] == ["", "alice", "bob"]
    assert secrets.caller(["bob", "bob"]) == "bob"
    for wrong in ([], [""], ["x"], ["bob", "a=1"], ["bob", None], [digest], ["alice"], [5], ["\udcff"]):
        with pytest.raises(Unauthorized):
            secrets.caller(wrong)
    assert not Secrets(None, None)


@pytest.mark.parametrize(
    "keys", ["alice", "=k", "alice=", "a b=k", "alice=k,alice=l", "alice=sha256:12", "ä=k", "alice=sha256:" + "A" * 64]
)
def test_keys_that_are_refused(keys):
    with pytest.raises(UsageError) as error:
        read_api_keys(keys, None)
    assert "sha256:12" not in error.value.message


def test_a_file_of_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# callers\nalice one\n\nbob  two\n")
    file.chmod(0o600)
    resolved = Config(api_key_file=str(file), api_keys="carol=three").resolved()
    assert (resolved.host, resolved.api_key_file) == ("0.0.0.0", None)
    assert "one" not in resolved.api_keys
    assert Secrets(None, resolved.api_keys).caller(["two"]) == "bob"
    file.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        Config(api_key_file=str(file)).resolved()
    file.chmod(0o600)
    file.write_text("alice one two\n")
    with pytest.raises(UsageError, match="line 1"):
        Config(api_key_file=str(file)).resolved()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent / "live"))
    import openai_checks

    sys.exit(openai_checks.main(openai_checks.ADAPTER))
