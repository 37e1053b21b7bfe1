"""What models are told of tools, and the grammar that makes them call one; needs no model."""

import json

import pytest

from rwkv_batch.text import prompts
from rwkv_batch.text.prompts import Call
from rwkv_batch.text.tool_calls import CallBegan
from rwkv_batch.text.tools import Tool, Toolbox, arguments_schema, closed

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}}, "required": ["city"]}
WEATHER = Tool("get_weather", "Tells the weather", CITY)
NOW = Tool("now")


def test_tools_are_told_in_few_words():
    assert Toolbox((WEATHER, NOW), forced=True).text() == (
        'Tools:\n[\n{"name":"get_weather","description":"Tells the weather","arguments":{"city":{"type":"string"},'
        '"unit":{"enum":["c","f"]}},"required":["city"]},\n{"name":"now","arguments":{}}\n]\nReturn only a JSON function call.'
    )
    assert "Otherwise answer in words." in Toolbox((NOW,)).text()
    shared = Tool("f", "", {"properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"], "$defs": {"A": {"type": "null"}}})
    assert json.dumps(shared.described()) == (
        '{"name": "f", "arguments": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "null"}}}'
    )
    assert Tool("f", "", {"properties": None, "required": None}).described() == {"name": "f", "arguments": {}}


def test_calls_in_a_history_are_what_models_write():
    calls = [Call("f", '{"a": 1}'), Call("g", "")]
    blocks = '```json\n{"name":"f","arguments":{"a": 1}}\n```\n```json\n{"name":"g","arguments":{}}\n```'
    assert prompts.with_calls("", calls) == blocks
    assert prompts.with_calls("Let me look.", calls) == "Let me look.\n" + blocks
    assert prompts.with_calls("No.", []) == "No."


def test_objects_take_no_other_properties_where_the_schema_says_nothing_of_them():
    inner = {"type": "object", "properties": {"x": {}}}
    found = closed({"properties": {"a": inner, "b": {"type": "array", "items": inner}, "c": {"anyOf": [inner, True]}}})
    shut = {**inner, "additionalProperties": False}
    assert found["properties"] == {"a": shut, "b": {"type": "array", "items": shut}, "c": {"anyOf": [shut, True]}}
    assert found["additionalProperties"] is False
    for kept in ({"properties": {}, "additionalProperties": True}, {"properties": {}, "allOf": [inner]}, {"type": "object"}):
        assert closed(kept) == kept
    assert arguments_schema(NOW)["additionalProperties"] is False
    assert "properties" not in arguments_schema(Tool("f", "", {"$ref": "#/$defs/A", "$defs": {"A": inner}}))


def matcher(grammar: str):
    """What llguidance makes of a grammar, over the bytes as tokens."""
    llguidance = pytest.importorskip("llguidance")

    class Bytes:
        eos_token_id, bos_token_id, special_token_ids = 0, None, (0,)
        tokens = (b"<end>", *(bytes([byte]) for byte in range(1, 256)))

        def __call__(self, text):
            return list(text.encode() if isinstance(text, str) else text)

    tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
    found = llguidance.LLMatcher(tokens, grammar)
    assert not found.get_error(), found.get_error()
    return found


def allows(grammar: str, text: str) -> bool:
    found = matcher(grammar)
    ids = list(text.encode())
    return found.try_consume_tokens(ids) == len(ids) and found.is_accepting()


def test_the_grammar_of_a_forced_reply():
    box = Toolbox((WEATHER, NOW, Tool('世"界😀')), forced=True)
    grammar = box.grammar(thinks=False)
    good = '\n{"name":"get_weather","arguments":{"city":"Kyoto","unit":"c"}}\n```'
    assert allows(grammar, good)
    assert allows(grammar, '\n{"name":"now","arguments":{}}\n```')
    assert allows(grammar, '\n{"name":"世\\"界😀","arguments":{}}\n```')
    for bad in (
        "", "\n```", good[1:], good + "\n", good[:-4], good.replace('"c"', '"k"'), good.replace('"city":"Kyoto",', ""),
        good.replace("get_weather", "now"), good.replace("get_weather", "other"), good.replace(":{", ": {"),
        good.replace('"c"', '"c","more":1'), good + "\n```json" + good,
    ):  # fmt: skip
        assert not allows(grammar, bad), bad
    several = Toolbox((WEATHER, NOW), forced=True, several=True).grammar(thinks=False)
    assert allows(several, good)
    assert allows(several, good + "\n```json" + good)
    assert not allows(several, good + "\n```json" + good * 2)
    one = Toolbox((WEATHER,), forced=True, several=True, limit=1).grammar(thinks=False)
    assert not allows(one, good + "\n```json" + good)


def test_a_thought_comes_first():
    grammar = Toolbox((NOW,), forced=True).grammar(thinks=True)
    call = '\n```json\n{"name":"now","arguments":{}}\n```'
    assert allows(grammar, f"> Hm: <b> ```json \n</think>{call}")
    assert allows(grammar, f"></think>{call}")
    assert not allows(grammar, "> Hm.</think>\nNo.")
    assert not allows(grammar, f"> Hm.</think> I think{call}")
    assert allows(grammar, f"></think>{call[1:]}")


def test_an_answer_may_be_words_of_a_grammar_instead_of_calls():
    box = Toolbox((NOW,))
    grammar = box.grammar(thinks=False, answer='%json {"type":"integer"}')
    call = '```json\n{"name":"now","arguments":{}}\n```'
    assert allows(grammar, "12")
    assert allows(grammar, call)
    assert allows(grammar, f"{call}\n{call}"), "several, as in any answer that is free to call"
    assert not allows(grammar, "twelve")
    assert not allows(grammar, f"12\n{call}")
    assert not allows(Toolbox((NOW,), limit=1).grammar(thinks=False, answer="/a/"), f"{call}\n{call}")
    assert allows(box.grammar(thinks=True, answer="/a+/"), "> Hm.</think>\naaa")


def test_what_a_grammar_cannot_express_matters_where_the_tool_is_strict():
    schema = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}}
    loose = Toolbox((Tool("f", "", schema),), forced=True).grammar(thinks=False)
    assert allows(loose, '\n{"name":"f","arguments":{"a":3}}\n```')
    strict = Toolbox((Tool("f", "", schema, strict=True),), forced=True).grammar(thinks=False)
    with pytest.raises(AssertionError, match="not"):
        matcher(strict)


def test_the_parser_finds_what_the_grammar_makes():
    box = Toolbox((WEATHER, NOW), forced=True, limit=1)
    pieces = box.parser(opened=True).feed('\n{"name":"get_weather","arguments":{"city":"Kyoto"}}\n```')
    assert pieces[0] == CallBegan(0, "get_weather")
    assert not Toolbox()
    assert box
