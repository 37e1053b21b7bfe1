"""Filling in the middle as editors ask for it: marks of other families, llama.cpp's and Mistral's routes."""

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import quiet_robyn  # noqa: F401
from test_openai_adapter import BYTES, CONFIG, payloads, request_of, step, text_of

from routes import ROUTES
from routes.llamacpp.answers import LlamaFormatter
from routes.llamacpp.bounds import Bounds
from routes.llamacpp.completion import props
from routes.llamacpp.schemas import CompletionRequest, InfillRequest, LlamaCompletion
from routes.mistral import FimCompletionBody, FimFormatter
from routes.openai.schemas import CompletionBody, read
from routes.schemas import validate
from rwkv_batch.errors import EngineFailed, InvalidRequest
from rwkv_batch.ipc.messages import EngineInfo
from rwkv_batch.request import Delta, Failure, Finish, Request
from rwkv_batch.text.fim_marks import FAMILIES, find_gap
from rwkv_batch.text.prompts import FIM_MARK, fill_in

SENT = json.loads(Path(__file__).with_name("client_requests.json").read_text(encoding="utf-8"))
FILLED = fill_in("def f():\n    ", "\n    return x\n")


def context_of() -> SimpleNamespace:
    info = EngineInfo(model="m", fingerprint="f" * 32, slots=7)
    model = SimpleNamespace(info=info, tokenizer=BYTES)
    return SimpleNamespace(id="id", model=model, config=CONFIG, model_name="m", form="openai", began=0.0, ticket=None)


def infill(**fields) -> Request:
    return request_of(read(LlamaCompletion, validate(InfillRequest, fields).in_openai_form()))


def completion(**fields) -> Request:
    return request_of(read(LlamaCompletion, validate(CompletionRequest, fields).in_openai_form()))


def answer_to(kind=InfillRequest, **fields) -> LlamaFormatter:
    sent = validate(kind, {"input_prefix": "a", "input_suffix": "b", "prompt": "c", **fields})
    body = read(LlamaCompletion, sent.in_openai_form())
    return LlamaFormatter(context_of(), body, request_of(body), sent)


# --- marks ---


@pytest.mark.parametrize(
    "prompt",
    [
        "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
        "<|fim_suffix|>S<|fim_prefix|>P<|fim_middle|>",
        "<|endoftext|><fim_prefix>P<fim_suffix>S<fim_middle>",
        "<fim_prefix><fim_suffix>S<fim_middle>P",
        "<fim-prefix>P<fim-suffix>S<fim-middle>",
        "<|code_prefix|>P<|code_suffix|>S<|code_middle|>",
        "<[fim-suffix]>S<[fim-prefix]>P<[fim-middle]>",
        "<｜fim▁begin｜>P<｜fim▁hole｜>S<｜fim▁end｜>",
        "<PRE> P <SUF>S <MID>",
        "<s>[SUFFIX]S[PREFIX]P",
    ],
)
def test_the_marks_of_each_family(prompt):
    parts = {"P": "def f():\n    ", "S": "\n    return x\n"}
    prompt = re.sub(r"(?<=[>\] ])[PS](?=[<\[ ]|$)", lambda match: parts[match[0]], prompt)
    assert find_gap(prompt) == (parts["P"], parts["S"])
    assert text_of(request_of(read(CompletionBody, {"prompt": prompt}))) == FILLED


def test_every_family_is_tried():
    for family in FAMILIES:
        assert find_gap(f"{family.suffix}s{family.prefix}p{family.middle}") == ("p", "s"), family


def test_other_files_come_before_the_prefix():
    repository = "<|repo_name|>r\n<|file_sep|>a.py\nx = 1\n<|file_sep|>b.py\n<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>"
    assert find_gap(repository) == ("r\na.py\nx = 1\nb.py\np", "s")
    assert find_gap("+++++ a.py\nx = 1\n[SUFFIX]s[PREFIX]p") == ("+++++ a.py\nx = 1\np", "s")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Once upon a time",
        "<|fim_prefix|>a<|fim_suffix|>b",
        "<|fim_prefix|>a<|fim_middle|>b<|fim_suffix|>c",
        "<|fim_prefix|>a<fim_suffix>b<|fim_middle|>",
        "the marks <|fim_prefix|>, <|fim_suffix|>, <|fim_middle|> and <|fim_middle|>",
        "[PREFIX] and [SUFFIX]",
    ],
)
def test_other_texts_stay_as_they_are(text):
    assert find_gap(text) is None
    assert text_of(request_of(read(CompletionBody, {"prompt": text or " "}))) == (text or " ")


def test_marked_prompts_among_others():
    marked = "<fim_prefix>a<fim_suffix>b<fim_middle>"
    request = request_of(read(CompletionBody, {"prompt": ["x", marked, [120]]}))
    assert [bytes(prompt).decode() for prompt in request.prompts] == ["x", fill_in("a", "b"), "x"]
    assert request.stop_texts == [FIM_MARK.encode()]
    assert request_of(read(CompletionBody, {"prompt": marked, "ignore_eos": True})).stop_texts == []
    for raw in ({"echo": True}, {"suffix": "c"}):
        text = text_of(request_of(read(CompletionBody, {"prompt": marked, **raw})))
        assert text.endswith(marked), "what comes back, or has a suffix already, is no template"


# --- llama.cpp ---


def test_an_infill_is_a_gap():
    request = infill(input_prefix="p\n", input_suffix="s", prompt="l", input_extra=[{"filename": "x.py", "text": "x"}])
    assert text_of(request) == fill_in("x.py\nx\n\np\nl", "s")
    assert (request.stop_texts, request.chunk_size, request.max_tokens) == ([FIM_MARK.encode()], 1, 4096)
    assert text_of(infill()) == fill_in("", "")


def test_fields_of_llamacpp():
    request = completion(
        prompt="ab", n_predict=5, temperature=0.5, top_k=40, top_p=0.25, seed=3, stop=["x"], n_cmpl=2, cache_prompt=False,
        repeat_penalty=1.0, samplers=["top_k"], t_max_predict_ms=1, id_slot=0, logit_bias=[[5, 1.5], [6, False]],
    )  # fmt: skip
    sampling = request.sampling
    assert (request.prompts, request.max_tokens, request.stop_texts, request.copies) == ([[97, 98]], 5, [b"x"], 2)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 40, 0.25, 3)
    assert sampling.logit_bias == ((5, 1.5), (6, -100.0))
    assert request.cache is False
    assert completion(prompt="a", seed=-1).sampling.seed is None
    assert completion(prompt="a", n_predict=-1).max_tokens == CONFIG.max_tokens_limit
    for prompt in ([97, 98], ["ab"], [[97, 98]], {"prompt_string": "ab"}):
        assert completion(prompt=prompt).prompts == [[97, 98]]


def test_a_completion_may_have_a_form():
    assert completion(prompt="a", json_schema={"type": "object"}).grammar.kind == "json_schema"
    assert completion(prompt="a", grammar='root ::= "yes" | "no"').grammar.kind == "lark"
    assert completion(prompt="a", min_p=0.1, repeat_penalty=1.25).sampling.repetition_penalty == 1.25


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, "b"]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"n_predict": "x"}, "n_predict"),
        ({"n_probs": 3}, "n_probs"),
        ({"mirostat": 2}, "mirostat"),
        ({"temperature": -1}, "temperature"),
        ({"logit_bias": [["a", 1]]}, "logit_bias"),
        ({"response_fields": ["a"] * 999}, "response_fields"),
    ],
)
def test_what_is_refused_is_named(fields, name):
    with pytest.raises(InvalidRequest) as error:
        completion(**{"prompt": "a", **fields})
    assert error.value.param.startswith(name)


def test_a_result_is_compact_and_tells_its_times():
    formatter = answer_to()
    assert formatter.document(step([Delta(0, "x\n", 2)])) is None
    data = formatter.document(step([], [Finish(0, "stop", 30, 3, cached_tokens=20, stop_text=FIM_MARK)]))
    assert re.search(rb'"content":"x\\n"', data), "an editor looks for it without a blank"
    result = json.loads(data)
    assert (result["stop"], result["stop_type"], result["stopping_word"], result["truncated"]) == (True, "eos", "", False)
    assert (result["tokens_predicted"], result["tokens_evaluated"], result["tokens_cached"]) == (3, 30, 33)
    timings = result["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (20, 10, 3)
    assert timings["prompt_ms"] > 0
    assert result["has_new_line"]


@pytest.mark.parametrize(
    ("finish", "right"),
    [
        (Finish(0, "length", 3, 4), ("limit", "")),
        (Finish(0, "stop", 3, 4), ("eos", "")),
        (Finish(0, "stop", 3, 4, stop_text="END"), ("word", "END")),
    ],
)
def test_why_a_result_ended(finish, right):
    result = json.loads(answer_to(CompletionRequest).document(step([], [finish])))
    assert (result["stop_type"], result["stopping_word"]) == right


def test_only_the_fields_that_are_wanted():
    formatter = answer_to(response_fields=["content", "timings/prompt_n", "generation_settings/n_predict", "no/such", ""])
    formatter.document(step([Delta(0, "x", 1)]))
    result = json.loads(formatter.document(step([], [Finish(0, "stop", 30, 3)])))
    assert result == {"content": "x", "timings/prompt_n": 30, "generation_settings/n_predict": 4096}


def test_a_warm_up_reads_the_prompt_and_says_nothing():
    assert infill(input_prefix="a", n_predict=0).max_tokens == 1
    formatter = answer_to(n_predict=0)
    result = json.loads(formatter.document(step([Delta(0, "x", 1)], [Finish(0, "length", 30, 1)])))
    assert (result["content"], result["tokens_predicted"], result["timings"]["predicted_n"]) == ("", 0, 0)
    assert result["timings"]["prompt_n"] == 30


def test_several_results_are_a_list():
    formatter = answer_to(n_cmpl=2)
    formatter.document(step([Delta(1, "y", 1), Delta(0, "x", 1)], [Finish(1, "stop", 3, 2)]))
    results = json.loads(formatter.document(step([], [Finish(0, "stop", 3, 2)])))
    assert [(result["index"], result["content"]) for result in results] == [(0, "x"), (1, "y")]


def test_a_stream_of_llamacpp():
    formatter = answer_to(stream=True)
    events = payloads(formatter.chunks(step([Delta(0, "x", 1), Delta(0, "", 1)])))
    events += payloads(formatter.chunks(step([Delta(0, "\n", 1)], [Finish(0, "length", 30, 3)])))
    assert [event["content"] for event in events] == ["x", "\n", ""]
    assert [event["stop"] for event in events] == [False, False, True]
    assert (events[1]["tokens_predicted"], events[-1]["tokens_predicted"]) == (3, 3)
    assert events[-1]["has_new_line"]


def test_a_stream_that_fails_never_stops_well():
    for last in (Failure.of("r", EngineFailed("broken")), step([], [Finish(0, "error", 3, 1, "broken")])):
        (event,) = payloads(answer_to(stream=True).chunks(last))
        assert "broken" in event["error"]["message"]


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "min_indent", "wanted"),
    [
        ("a\n    b\nc\nd", 4, "a\n    b\n"),
        ("a\n    b\n  c", 4, "a\n    b\n  "),
        ("    a\n\nb", 2, "    a\n"),
        ("a\n\tb\n  c", 1, "a\n\tb\n  c"),
        ("a\nb\n", 0, "a\nb\n"),
        ("a\n    ", 9, "a\n    "),
    ],
)
def test_a_text_ends_where_a_line_is_indented_less(size, text, min_indent, wanted):
    bounds, shown = Bounds(min_indent, 0), ""
    for place in range(0, len(text), size):
        piece, ended = bounds.feed(text[place : place + size], 1e9)
        shown += piece
        if ended:
            break
    assert shown == wanted
    assert ended == (shown != text)


def test_a_text_ends_at_a_newline_when_its_time_is_over():
    bounds = Bounds(0, 1.0)
    assert bounds.feed("a\nb", 0.9) == ("a\nb", False)
    assert bounds.feed("c", 1.1) == ("c", False)
    assert bounds.feed("d\ne", 1.2) == ("d\n", True)


@pytest.mark.parametrize("stream", [False, True])
def test_what_an_editor_does_not_want_is_cancelled(stream):
    formatter = answer_to(n_indent=4, stream=stream)
    cancelled = []
    formatter.context.ticket = SimpleNamespace(cancel=lambda: cancelled.append(True))
    call = formatter.chunks if stream else formatter.document
    first = call(step([Delta(0, "a\n", 2)]))
    last = call(step([Delta(0, "b", 1), Delta(0, "c", 1)]))
    assert cancelled == [True]
    assert call(step([Delta(0, "d", 1)], [Finish(0, "length", 3, 5)])) is None, "nothing follows the end"
    results = payloads(first + last) if stream else [json.loads(last)]
    assert "".join(result["content"] for result in results) == "a\n"
    assert (results[-1]["stop"], results[-1]["stop_type"], results[-1]["tokens_predicted"]) == (True, "limit", 3)
    assert results[-1]["has_new_line"]


def test_props():
    found = json.loads(asyncio.run(props(context_of())).body)
    assert found["default_generation_settings"]["n_ctx"] == CONFIG.max_prompt_tokens
    assert found["total_slots"] == 7


# --- Mistral ---


def mistral(**fields) -> FimFormatter:
    body = read(FimCompletionBody, {"prompt": "a", **fields})
    return FimFormatter(context_of(), body, request_of(body))


def test_mistrals_form():
    assert text_of(request_of(read(FimCompletionBody, {"prompt": "a", "suffix": "b"}))) == fill_in("a", "b")
    assert text_of(request_of(read(FimCompletionBody, {"prompt": "a"}))) == fill_in("a", "")
    formatter = mistral()
    formatter.document(step([Delta(0, "x", 1)]))
    answer = json.loads(formatter.document(step([], [Finish(0, "stop", 3, 2)])))
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "x"
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 2)
    events = payloads(mistral(stream=True).chunks(step([Delta(0, "x", 1)], [Finish(0, "length", 3, 1)])))
    assert events.pop() == "[DONE]"
    assert [event["choices"][0]["delta"]["content"] for event in events] == ["", "x", ""], "every chunk has a choice"
    assert events[-1]["choices"][0]["finish_reason"] == "length"


# --- what editors send ---


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64])
def test_seeds_of_mistral_have_the_bounds_of_all_seeds(seed):
    with pytest.raises(InvalidRequest, match="random_seed"):
        read(FimCompletionBody, {"prompt": "a", "random_seed": seed})


@pytest.mark.parametrize("name", [name for name, sent in SENT.items() if "messages" not in sent["body"]])
def test_bodies_of_editors(name):
    sent = SENT[name]
    kinds = {"/infill": InfillRequest, "/completion": CompletionRequest}
    if sent["path"] in kinds:
        body = read(LlamaCompletion, validate(kinds[sent["path"]], sent["body"]).in_openai_form())
    else:
        body = read(FimCompletionBody if "/fim/" in sent["path"] else CompletionBody, sent["body"])
    text = text_of(request_of(body))
    assert text.startswith("✿prefix✿✿suffix✿")
    assert not re.search(r"<\|?fim_", text)


def test_the_routes_are_in_the_table():
    table = {(route.method, route.path): route for route in ROUTES}
    for method, path in (
        ("POST", "/infill"), ("POST", "/completion"), ("POST", "/v1/fim/completions"), ("POST", "/openai/v1/fim/completions"),
        ("GET", "/props"),
    ):  # fmt: skip
        assert table[method, path].access == "password"
