"""The fields that say what an answer must look like, and the grammar that each becomes."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routes.formats import FormatFields
from routes.native.chat import V1Body, V2Body, V3Body
from routes.native.state import StateBody
from routes.openai.response_body import ResponseBody
from routes.openai.schemas import ChatBody, CompletionBody, read
from routes.schemas import validate
from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest
from rwkv_batch.request import Grammar
from rwkv_batch.text.grammar import STYLE

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
SOURCE = '{"type":"object","properties":{"b":{},"a":{}}}'


def wanted(kind=ChatBody, **fields) -> Grammar | None:
    return read(kind, {"messages": [{"content": "hi"}], "prompt": "hi", **fields}).wanted_grammar()


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "grammar": "", "guided_json": None}, None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
            Grammar("json_schema", SOURCE, "response_format.json_schema.schema"),
        ),
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type":"object"}', "response_format")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Grammar("json_schema", SOURCE, "response_format")),
        ({"guided_json": SCHEMA}, Grammar("json_schema", SOURCE, "guided_json")),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar("json_schema", SOURCE, "guided_json")),
        ({"json_schema": True}, Grammar("json_schema", "true", "json_schema")),
        ({"guided_regex": "a+"}, Grammar("regex", "a+", "guided_regex")),
        ({"regex": "a+"}, Grammar("regex", "a+", "regex")),
        ({"guided_choice": ["a", 'b"']}, Grammar("lark", 'start: "a" | "b\\""', "guided_choice")),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"', "guided_grammar")),
        ({"grammar": 'root ::= "a"'}, Grammar("lark", 'root ::= "a"', "grammar")),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", SOURCE, "structured_outputs.json")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_schema", '{"type":"object"}', "structured_outputs.json")),
        ({"structured_outputs": {"regex": "a"}}, Grammar("regex", "a", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar("lark", 'start: "a"', "structured_outputs.choice")),
        ({"structured_outputs": {"grammar": "start: a"}}, Grammar("lark", "start: a", "structured_outputs.grammar")),
    ],
)
def test_each_way_to_ask_becomes_a_grammar(fields, grammar):
    assert wanted(**fields) == grammar
    assert wanted(CompletionBody, **fields) == grammar


def test_a_schema_that_is_not_strict_is_read_leniently():
    asked = {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}, "strict": False}}
    assert json.loads(wanted(response_format=asked).source) == {"uniqueItems": True, "x-guidance": {"lenient": True}}


def test_responses_ask_by_the_format_of_their_text():
    format = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    body = read(ResponseBody, {"input": "hi", "text": {"format": format, "verbosity": "low"}})
    assert body.wanted_grammar() == Grammar("json_schema", SOURCE, "text.format.schema")
    assert body.text.told() == {"format": format}
    body = read(ResponseBody, {"input": "hi", "text": {"format": None}})
    assert (body.wanted_grammar(), body.text.told()) == (None, {"format": {"type": "text"}})


def test_a_thought_is_free_and_the_answer_behind_it_is_not():
    grammar = wanted(guided_json=SCHEMA, enable_think=True)
    assert grammar.kind == "lark"
    head, tail = grammar.source.split("%json ")
    assert json.loads(tail) == {**SCHEMA, "x-guidance": STYLE}
    assert "</think>" in head.replace("\\", "")
    assert wanted(guided_regex=r"a/b\/c", enable_think=True).source.endswith(r"answer: /a\/b\/c/")
    with pytest.raises(InvalidRequest, match="guided_grammar: not together"):
        wanted(guided_grammar="start: a", enable_think=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as error:
        wanted(**fields)
    assert error.value.param.startswith(param)


def test_the_request_carries_the_grammar():
    for kind, fields in ((ChatBody, {"messages": [{"content": "hi"}]}), (CompletionBody, {"prompt": "hi"})):
        body = read(kind, {**fields, "guided_regex": "a+", "n": 2})
        request = body.to_request(body.checked_texts(Config()), "r", Config(), lambda text: [1])
        assert (request.grammar, request.copies) == (Grammar("regex", "a+", "guided_regex"), 2)


@pytest.mark.parametrize("kind", [V1Body, V2Body, V3Body, StateBody])
def test_native_chats_have_the_same_fields(kind):
    def asked(**fields):
        body = validate(kind, {"contents": ["a"], **fields})
        return body.to_request(body.checked_texts(Config()), "r", Config(), lambda text: [1]).grammar

    assert asked() is asked(response_format=None) is asked(response_format={"type": "text"}) is None
    assert asked(guided_regex="a+") == Grammar("regex", "a+", "guided_regex")
    assert asked(response_format={"type": "json_object"}).source == '{"type":"object"}'
    with pytest.raises(InvalidRequest, match="response_format"):
        asked(response_format={"type": "yaml"})
    thinks = asked(guided_regex="a+", enable_think=True)
    assert thinks.kind == ("lark" if kind is V3Body else "regex"), "others have no template in which to think"


KEYS = st.sampled_from(
    ["type", "json_schema", "schema", "strict", "json", "json_object", "regex", "choice", "grammar", "x-guidance", "properties",
     "items", "enum", "const", "anyOf", "$ref", "$defs", "pattern", "minLength", "required", "format", "name"]
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(["text", "object", "json_object"])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


@given(st.sampled_from(sorted(FormatFields.model_fields)), VALUES)
@settings(max_examples=settings().max_examples // 2)
def test_anything_is_a_grammar_or_refused(name, value):
    with contextlib.suppress(InvalidRequest):
        found = wanted(**{name: value})
        assert found is None or (found.kind in ("json_schema", "regex", "lark") and found.param.startswith(name))
    with contextlib.suppress(InvalidRequest):
        read(ResponseBody, {"input": "a", "text": {"format": value}}).wanted_grammar()
