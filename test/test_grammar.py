"""Grammars of requests: their limits, and the processes in which bad ones hurt nobody."""

import contextlib
import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest, NotInstalled, Overloaded
from rwkv_batch.text import grammar
from rwkv_batch.text.grammar import Grammar
from rwkv_batch.text.tokenizer import ByteTokenizer

pytest.importorskip("llguidance", reason="requirements-grammar.txt is not installed")

from rwkv_batch.grammar import compiler
from rwkv_batch.grammar.checker import Checker


def exponential(count: int) -> str:
    """A schema that takes for ever to compile."""
    return json.dumps({"type": "string", "allOf": [{"pattern": f".*a.{{{number}}}"} for number in range(10, 10 + count)]})


def schemas() -> st.SearchStrategy:
    """Schemas, right ones and wrong ones."""
    types = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null", "foo"])
    names = st.sampled_from(["a", "b", "$ref", "é"])
    numbers = st.sampled_from([-1, 0, 3, 10**9, 1e300, 0.1])
    texts = st.sampled_from(["a+", "(a|b)*c", "[", "(a+)+$", ".*a.{20}", "date", "ipv4", "#", "#/$defs/a", "\x00"])

    def inner(schema: st.SearchStrategy) -> st.SearchStrategy:
        return st.fixed_dictionaries(
            {},
            optional={
                "type": types | st.lists(types, max_size=3), "properties": st.dictionaries(names, schema, max_size=3),
                "required": st.lists(names, max_size=2), "items": schema, "prefixItems": st.lists(schema, max_size=2),
                "anyOf": st.lists(schema, max_size=3), "allOf": st.lists(schema, max_size=3),
                "oneOf": st.lists(schema, max_size=2),
                "additionalProperties": schema | st.booleans(), "patternProperties": st.dictionaries(texts, schema, max_size=2),
                "minItems": numbers, "maxLength": numbers, "minimum": numbers, "multipleOf": numbers, "pattern": texts,
                "format": texts, "$ref": texts, "$defs": st.dictionaries(names, schema, max_size=2), "not": schema,
                "enum": st.lists(numbers | texts, max_size=3), "const": numbers | texts,
            },
        )  # fmt: skip

    return st.recursive(inner(st.booleans()), inner, max_leaves=8)


def bad_grammars() -> list[tuple[str, str, str]]:
    """Kinds, sources and a word of the refusal."""
    return [
        ("json_schema", "{", "JSON|EOF|expected"),
        ("json_schema", "5", "schema"),
        ("json_schema", "false", "schema"),
        ("json_schema", '{"type": "foo"}', "foo"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems: not supported"),
        ("json_schema", '{"if": {"type": "string"}, "then": {"minLength": 2}}', "if, then: not supported"),
        ("json_schema", '{"$ref": "http://example.com/x"}', "example.com"),
        ("json_schema", '{"$ref": "#"}', "no text fits"),
        ("json_schema", '{"items":' * 100_000 + "{}" + "}" * 100_000, "recursion"),
        ("json_schema", exponential(15), "takes more than"),
        (
            "json_schema",
            json.dumps({"anyOf": [{"properties": {f"p{n}": {"const": n}}} for n in range(20_000)]}),
            "too large|takes",
        ),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "(" * 5000 + "a" + ")" * 5000, "nested"),
        ("regex", "((a{1000}){1000}){1000}", "takes more than|no text|many"),
        ("regex", "()", "empty"),
        ("lark", "start: ", "empty"),
        ("lark", "start: start", "no text fits"),
        ("lark", "start: " + "(" * 100_000 + '"a"' + ")" * 100_000, "nested|takes"),
        ("lark", 'root ::= "a', "end of input"),
    ]


def test_a_schema_keeps_the_order_of_its_keys():
    made = grammar.of_schema({"b": {"é": 1}, "a": 2}, "response_format")
    assert made == Grammar("json_schema", '{"b":{"é":1},"a":2}', "response_format")
    grammar.check(made, Config())


def test_a_long_grammar_is_refused_by_the_name_of_its_field():
    config = Config(max_grammar_bytes=9)
    grammar.check(Grammar("regex", "é" * 4, "guided_regex"), config)
    with pytest.raises(InvalidRequest, match="at most 9 bytes, not 10") as error:
        grammar.check(Grammar("regex", "é" * 5, "guided_regex"), config)
    assert error.value.param == "guided_regex"
    with pytest.raises(InvalidRequest, match="surrogate"):
        grammar.check(Grammar("regex", "\ud800", "guided_regex"), config)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(grammar, "installed", lambda: False)
    with pytest.raises(NotInstalled, match=r"rwkv-batch\[grammar\]") as error:
        grammar.check(Grammar("regex", "a", "guided_regex"), Config())
    assert (error.value.status, error.value.param) == (400, "guided_regex")


@pytest.fixture(scope="module")
def checker():
    found = Checker(seconds=0.5)
    yield found
    found.close()


@pytest.mark.parametrize(("kind", "source", "words"), bad_grammars(), ids=lambda value: str(value)[:24])
def test_a_bad_grammar_is_refused_within_a_second(checker, kind, source, words):
    asked = Grammar(kind, source, "guided_json")
    for _ in range(2):  # the second answer is remembered
        with pytest.raises(InvalidRequest, match=words) as error:
            checker.check(asked)
        assert (error.value.status, error.value.param) == (400, "guided_json")
        assert len(error.value.message) < 400
        assert "\n" not in error.value.message
    assert not checker.passed(asked)


def test_a_model_that_cannot_say_every_byte_says_so():
    tokens = compiler.vocabulary(ByteTokenizer(), [id for id in range(256) if id != ord("e")])
    with pytest.raises(InvalidRequest, match="p: no text fits that this model can say"):
        compiler.matcher(Grammar("regex", "e", "p"), tokens)
    row = compiler.matcher(Grammar("regex", "(xe|ye)", "p"), tokens)
    row.consume_token(ord("x"))
    assert row.compute_ff_tokens() == []
    row.compute_bitmask()
    assert compiler.reason(row.get_error()) == "no text fits that this model can say"


def test_good_grammars_pass_beside_hostile_ones(checker):
    for asked in (
        Grammar("json_schema", "true", "p"),
        Grammar("json_schema", '{"uniqueItems": true, "x-guidance": {"lenient": true}}', "p"),
        Grammar("json_schema", '{"type": "object", "properties": {"child": {"$ref": "#"}}}', "p"),
        Grammar("regex", "(a+)+", "p"),
        Grammar("regex", "a/b\n", "p"),
        Grammar("lark", 'root ::= "a" [0-9]+', "p"),
        grammar.of_choices(["a", "b\n"], "p"),
        grammar.after_thought(Grammar("regex", "a/b\n", "p")),
        grammar.after_thought(grammar.of_schema({"type": "object"}, "p")),
    ):
        checker.check(asked)
        assert checker.passed(asked)


@given(schemas())
@settings(max_examples=settings().max_examples // 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_schema_passes_or_is_refused_in_time(checker, schema):
    began = time.monotonic()
    with contextlib.suppress(InvalidRequest):
        checker.check(grammar.of_schema(schema, "p"))
    assert time.monotonic() - began < 30, "it is the limit of a second and what a busy machine adds"


def test_a_process_that_was_ended_is_replaced(checker):
    checker.check(Grammar("regex", "a", "p"))
    for process in checker._idle:
        process.kill()
        process.wait()
    checker.check(Grammar("regex", "b", "p"))


def test_who_waits_for_too_long_behind_hostile_grammars_is_told_to_come_again():
    checker = Checker(seconds=0.1)
    hostile = [checker.submit(Grammar("json_schema", exponential(14 + number), "p")) for number in range(20)]
    assert checker.submit(Grammar("json_schema", exponential(14), "p")) is hostile[0], "asked once for all"
    errors = [answer.exception(60) for answer in hostile]
    assert "takes more than" in hostile[0].result()
    assert isinstance(errors[-1], Overloaded)
    deadline = time.monotonic() + 60
    while True:  # what was not looked at is not remembered
        try:
            checker.check(Grammar("regex", "a", "p"))
            break
        except Overloaded:
            assert time.monotonic() < deadline
    assert checker.passed(Grammar("regex", "a", "p"))
    checker.close()
