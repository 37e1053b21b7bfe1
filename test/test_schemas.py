"""Bodies to requests: lax types, closed ranges, errors that name the field."""

import contextlib
import json
import time
import tracemalloc

import pytest
import quiet_robyn  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import routes
from routes.native.batch import BatchPromptsBody
from routes.native.big_batch import BigBatchBody
from routes.native.chat import V3Body
from routes.openai.schemas import ChatBody
from routes.openai.schemas import read as read_openai
from routes.schemas import SLICE_BYTES, Body, ContentsBody, inspect, parse, password_in, validate
from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest
from rwkv_batch.request import Request
from sampling.params import SamplingParams


def encode(text: str) -> list[int]:
    return list(text.encode())


def read(text: str | bytes, **limits) -> Request:
    data = text.encode() if isinstance(text, str) else text
    body, config = validate(ContentsBody, parse(data, Config())), Config(**limits)
    return body.to_request(body.checked_texts(config), "id", config, encode)


def refusal(text: str | bytes, **limits) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        read(text, **limits)
    return error.value


def test_defaults_are_those_of_the_newest_reference():
    request = read('{"contents": ["ab"]}')
    assert request == Request(
        id="id",
        prompts=[[97, 98]],
        sampling=SamplingParams(temperature=1.0, top_k=50, top_p=0.6, alpha_presence=2, alpha_frequency=0.2, alpha_decay=0.996),
        max_tokens=8192,
        stop_texts=[b"\nUser:"],
        chunk_size=0,
    )
    assert read('{"contents": ["ab"], "stream": true}').chunk_size == 4
    body = validate(ContentsBody, {})
    assert (body.model, body.stream, body.pad_zero, body.enable_think, body.chunk_size) == ("rwkv7", False, False, False, 4)


def test_a_seed_and_a_noise_of_the_server_stand_in_for_those_not_sent():
    def sampling(kind, body: dict, **settings) -> SamplingParams:
        read, config = validate(kind, {"contents": ["a"], "prompts": ["a"], **body}), Config(**settings)
        return read.to_request(["a"], "id", config, encode).sampling

    assert sampling(ContentsBody, {}).seed is None
    assert sampling(ContentsBody, {}, seed=7).seed == 7
    assert sampling(ContentsBody, {"seed": 0}, seed=7).seed == 0
    assert sampling(ContentsBody, {}, noise=3) == sampling(ContentsBody, {})
    assert sampling(BigBatchBody, {}, seed=7).rule == "gumbel"
    for kind in (BigBatchBody, BatchPromptsBody):
        assert (sampling(kind, {}, noise=3).rule, sampling(kind, {}, noise=3).noise) == ("noise", 3)
        assert sampling(kind, {"noise": 0.5}, noise=3).noise == 0.5
        assert sampling(kind, {"noise": 0}, noise=3).greedy


def test_null_is_the_default_everywhere():
    fields = dict.fromkeys(ContentsBody.model_fields)
    assert validate(ContentsBody, {**fields, "contents": ["ab"]}) == validate(ContentsBody, {"contents": ["ab"]})


def test_types_are_as_lax_as_they_were():
    body = validate(ContentsBody, {"max_tokens": "5", "top_k": 5.0, "temperature": "0.5", "stream": "true", "chunk_size": "2"})
    assert (body.max_tokens, body.top_k, body.temperature, body.stream, body.chunk_size) == (5, 5, 0.5, True, 2)
    assert validate(ContentsBody, {"contents": "one", "unknown": object()}).contents == ["one"]


@pytest.mark.parametrize(
    ("stops", "ids", "texts"),
    [
        ("null", [], [b"\nUser:"]),
        ("[]", [], []),
        ("[0, 261, 24281]", [0, 261, 24281], []),
        ('[0, 261, "\\nUser:"]', [0, 261], [b"\nUser:"]),
        ("5", [5], []),
        ('"5"', [], [b"5"]),
        ('"✿"', [], ["✿".encode()]),
        ('["261", ""]', [], [b"261"]),
        ("[5.0]", [5], []),
    ],
)
def test_stops(stops, ids, texts):
    request = read('{"contents": "a", "stop_tokens": %s}' % stops)  # noqa: UP031
    assert (request.stop_ids, request.stop_texts) == (ids, texts)


def test_an_empty_prompt_is_fed_token_0():
    assert read('{"contents": ["", "a"]}').prompts == [[0], [97]]


RANGES = {
    "max_tokens": (0, 1_048_576),
    "temperature": (0, 1000),
    "top_k": (-1, 2**31 - 1),
    "top_p": (-1, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "alpha_presence": (-100, 100),
    "alpha_frequency": (-100, 100),
    "alpha_decay": (0, 1),
    "noise": (0, 1000),
    "chunk_size": (1, 1_048_576),
    "seed": (-(2**63), 2**64 - 1),
}


@pytest.mark.parametrize("kind", [BatchPromptsBody, BigBatchBody])
@pytest.mark.parametrize("field", ["min_p", "repetition_penalty"])
def test_routes_without_filters_say_so(kind, field):
    body = {"contents": ["a"], "prompts": ["a"], "min_p": 0, "repetition_penalty": 1}
    validate(kind, body).checked_texts(Config())
    with pytest.raises(InvalidRequest) as error:
        validate(kind, {**body, field: 0.5}).checked_texts(Config())
    assert error.value.param == field


@pytest.mark.parametrize("field", RANGES)
def test_ranges_are_closed(field):
    low, high = RANGES[field]
    for value in (low, high, f'"{low}"'):
        read(json.dumps({"contents": "a"})[:-1] + f', "{field}": {value}}}')
    for value in (
        low - 1,
        high + 1,
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        '"nan"',
        '"inf"',
        2**64,
        -(2**64),
        "[]",
        '"x"',
        "{}",
    ):
        error = refusal(json.dumps({"contents": "a"})[:-1] + f', "{field}": {value}}}')
        assert error.param == field, (value, error.message)
        assert field in error.message


def test_errors_do_not_repeat_what_the_client_sent():
    for body in (
        '{"contents": [{"canary": 1}]}',
        '{"model": ["canary"]}',
        '{"max_tokens": "canary"}',
        '{"stop_tokens": [["canary"]]}',
    ):
        assert "canary" not in refusal(body).message


def test_limits_are_settings():
    assert refusal('{"contents": ["a", "b"]}', max_prompts=1).param == "contents"
    assert refusal('{"contents": ["a", "abc"]}', max_prompt_tokens=2).param == "contents[1]"
    assert refusal('{"contents": "a", "max_tokens": 9}', max_tokens_limit=8).param == "max_tokens"
    assert refusal('{"contents": "a", "stop_tokens": [1, 2]}', max_stops=1).param == "stop_tokens"
    assert refusal('{"contents": "a", "stop_tokens": ["abc"]}', max_stop_bytes=2).param == "stop_tokens"


def test_half_a_surrogate_pair_names_its_field():
    assert refusal('{"model": "m", "contents": ["ok", "\\ud83d x"]}').param == "contents"
    assert refusal('{"contents": ["\\udc00"]}').param == "contents"
    assert read('{"contents": ["\\ud83d\\ude00"]}').prompts == [list("😀".encode())]


def test_depth_is_bounded_quickly():
    began = time.process_time()
    for depth in (65, 200, 1000, 1_000_000):
        for left, right in (("[", "]"), ('{"a":', "}")):
            text = '{"x": ' + left * depth + "1" + right * depth + "}"
            refusal(text)
    assert time.process_time() - began < 2
    assert read('{"contents": "a", "x": ' + "[" * 60 + "]" * 60 + "}").prompts == [[97]]


def test_a_hundred_thousand_prompts_are_refused_quickly():
    body = json.dumps({"contents": ["a" * 90] * 100_000})
    began = time.process_time()
    assert refusal(body).param == "contents"
    assert time.process_time() - began < 1


def kinds_of(kind: type) -> list[type]:
    """A class and all that are made from it."""
    return [kind, *(inner for direct in kind.__subclasses__() for inner in kinds_of(direct))]


def num_errors(kind: type, body: dict) -> int:
    """How many errors the check of a body tells."""
    try:
        kind.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


def test_checking_ends_at_the_first_wrong_entry():
    assert routes.ROUTES, "all bodies are known by now"
    needed = {"target_lang": "en", "text_list": [], "to": "en", "text": "", "texts": [], "max_tokens": 1}
    needed["messages"] = [{"role": "user", "content": "a"}]
    counts = {
        (kind, name): num_errors(kind, {**needed, field.alias or name: [object()] * 9})
        for kind in kinds_of(Body)
        for name, field in kind.model_fields.items()
    }
    assert max(counts.values()) <= 4, "a union tells of each of its types, and none of all nine entries"
    found = {name for (_, name), count in counts.items() if count}
    assert found >= {"contents", "messages", "chats", "prompt", "prefix", "text_list", "copies", "input", "tokens", "stop"}


def test_arrays_and_objects_are_counted_before_they_are_read():
    config = Config(max_body_parts=100)
    for part in ("[]", "{}", '{"role": "user"}'):
        with pytest.raises(InvalidRequest, match="more than 100 arrays and objects"):
            parse(('{"contents": [' + f"{part}," * 100 + part + "]}").encode(), config)
    text = "[{" * 1000 + '\\"' + "[" * 100
    assert parse(json.dumps({"contents": [text], "messages": [{}] * 60}).encode(), config)["contents"] == [text]


def test_values_and_names_are_counted_before_they_are_read():
    config = Config(max_body_values=1024)
    for unit in ("1", '""', "0.5", "null", '"[,]{:}"'):
        assert len(parse(('{"a": [' + ",".join([unit] * 1021) + "]}").encode(), config)["a"]) == 1021
        with pytest.raises(InvalidRequest, match="more than 1024 values"):
            parse(('{"a": [' + ",".join([unit] * 1025) + "]}").encode(), config)
    with pytest.raises(InvalidRequest, match="more than 1024 values"):
        parse(json.dumps(dict.fromkeys(map(str, range(1000)), 0)).encode(), config)


def repeated(head: str, unit: str, tail: str = ""):
    return lambda size: (head + unit * (size // len(unit)) + tail).encode()


HOSTILE = {
    "open string of escaped quotes": repeated("[" * 65 + '"', '\\"'),
    "open string in few brackets": repeated('{"a": ["', '\\"'),
    "open string of backslashes": repeated("[" * 65 + '"', "\\"),
    "quotes": repeated('["', '"'),
    "short strings": repeated('{"a": [', '"a",', "1]}"),
    "short strings in deep brackets": repeated("[" * 65, '"a",'),
    "brackets in a string": repeated('{"contents": ["', "[", '"]}'),
    "marks in a string": repeated('{"contents": ["', "],:{", '"]}'),
    "nesting": repeated("", "["),
    "nesting of objects": repeated("", '{"a":'),
    "closing brackets": repeated("[" * 64, "]"),
    "empty arrays": repeated('{"a": [', "[],", "1]}"),
    "empty objects": repeated('{"a": [', "{},", "1]}"),
    "numbers": repeated('{"a": [', "1,", "1]}"),
    "fractions": repeated('{"a": [', "0.123456789012345678,", "1]}"),
    "numbers of 4,000 digits": repeated('{"a": [', "9" * 4000 + ",", "1]}"),
    "fractions of 4,000 digits": repeated('{"a": [', "0." + "9" * 4000 + ",", "1]}"),
    "one number": repeated('{"a": ', "9", "}"),
    "one name again and again": repeated("{", '"a": 1,', '"a": 1}'),
    "many names": lambda size: json.dumps(dict.fromkeys(map(str, range(size // 14)), 0)).encode(),
    "escapes": repeated('{"a": "', "\\u0041", '"}'),
    "half pairs": repeated('{"a": "', "\\ud800", '"}'),
    "blanks": repeated("{", " ", "}"),
    "what is not UTF-8": lambda size: b'{"a": "' + b"\xff" * size,
    "NUL": repeated("", "\0"),
}


def seconds(work, *args) -> float:
    """CPU time of a call that may refuse, the least of three."""
    times = []
    for _ in range(3):
        began = time.process_time()
        with contextlib.suppress(InvalidRequest):
            work(*args)
        times.append(time.process_time() - began)
    return min(times)


@pytest.mark.parametrize("shape", HOSTILE)
def test_hostile_bodies_take_time_by_their_length(shape):
    config = Config()
    small, large = (HOSTILE[shape](size) for size in (2**18, 2**21))
    for work in (lambda data: parse(data, config), password_in if "nesting" not in shape else len):
        first = seconds(work, small)
        assert seconds(work, large) < 8 * 4 * max(first, 0.002)


@pytest.mark.parametrize("shape", HOSTILE)
def test_looking_for_the_password_takes_little_memory(shape):
    data = HOSTILE[shape](2**22)
    config = Config()
    tracemalloc.start()
    try:
        with contextlib.suppress(InvalidRequest):
            for _ in inspect(data, config):
                pass
            password_in(data)
        assert tracemalloc.get_traced_memory()[1] < 5 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", HOSTILE)
def test_a_slice_of_a_body_is_looked_at_in_little_time(shape):
    data = HOSTILE[shape](2**22)
    began, longest = time.process_time(), 0.0
    with contextlib.suppress(InvalidRequest):
        for _ in inspect(data, Config()):
            longest = max(longest, time.process_time() - began)
            began = time.process_time()
    assert longest < 0.25  # some 20 ms where nothing else runs


@given(st.data())
def test_slices_cut_strings_and_escapes_anywhere(data):
    """What is counted does not depend on where the slices end: strings, escapes and marks lie across the border."""
    text = data.draw(st.text(alphabet='"\\[]{},:a', max_size=12))
    body = json.dumps({"x": "y" * (SLICE_BYTES - data.draw(st.integers(0, 40))), "contents": [text, [1, [2, {text: 3}]]]})
    values = 14  # beside those of `more`
    assert parse(body.encode(), Config(max_body_values=2**20, max_body_depth=5))["contents"][0] == text
    for shift in range(2):
        limit = Config(max_body_values=1024)
        padded = body[:-1] + ', "more": [' + ",".join("1" * (1024 - values - 1 + shift)) + "]}"
        if shift:
            with pytest.raises(InvalidRequest, match="more than 1024 values"):
                parse(padded.encode(), limit)
        else:
            parse(padded.encode(), limit)


def test_the_password_is_found_and_nothing_else():
    assert password_in(b'{"contents": ["a"], "password": "p\\u00e4"}') == "p\u00e4"
    assert password_in(b'{"password": "a", "x": {"password": "c"}, "password": "b"}') == "b"
    for data in (b"{}", b'{"password": null}', b'{"x": {"password": "a"}}'):
        assert password_in(data) is None
    for data in (b'{"password": 5}', b'{"password": ["a"]}', b'{"password": {}}', b"[]", b'"a"'):
        assert password_in(data) is False
    for data in (b"", b"{", b'{"a": NaN}', b'{"password": "\\ud800"}', b"\xff"):
        with pytest.raises(InvalidRequest, match="JSON"):
            password_in(data)


def test_a_key_of_the_clients_is_not_repeated_at_length():
    error = refusal(json.dumps({"contents": "a", "stop_tokens": {"k" * 9999: 1}}))
    assert len(error.message) < 200
    with pytest.raises(InvalidRequest) as refused:
        read_openai(ChatBody, {"messages": [{"content": "a"}], "logit_bias": {"k" * 9999: 1}})
    assert len(refused.value.message) < 300
    assert len(refused.value.param) < 100


def test_roles():
    def prompt(*messages: dict) -> str:
        (text,) = validate(V3Body, {"messages": list(messages)}).texts()
        return text.removesuffix("\n\nAssistant: <think>\n</think>")

    assert prompt({"role": "User", "content": "a"}) == "User: a"
    assert prompt({"role": None, "content": [{"type": "text", "text": "a"}, "b"]}) == "User: ab"
    assert prompt({"role": "developer", "content": "s"}, {"content": "a"}) == "System: s\n\nUser: a"
    assert prompt({"role": "tool", "content": "5"}) == "User: Function output:\n5"
    with pytest.raises(InvalidRequest) as error:
        prompt({"role": "narrator", "content": "a"})
    assert error.value.param == "messages[0].role"


@given(st.binary(max_size=300) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_parse_or_are_refused(data):
    with contextlib.suppress(InvalidRequest):
        assert isinstance(parse(data, Config()), dict)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*ContentsBody.model_fields, "other"]), json_values, max_size=6))
def test_any_object_becomes_a_request_or_is_refused(body):
    try:
        request = read(json.dumps(body).encode())
    except InvalidRequest:
        return
    assert all(request.prompts)
    assert 0 <= request.max_tokens <= 1_048_576
    assert 0 <= request.sampling.temperature <= 1000
