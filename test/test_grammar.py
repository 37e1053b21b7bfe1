"""Grammars of requests: their limits."""

import pytest

from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest, NotInstalled
from rwkv_batch.text import grammar
from rwkv_batch.text.grammar import Grammar


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
