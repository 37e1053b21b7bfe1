"""Grammars as requests name them: made from what clients send, held to their limits. llguidance, which reads them, is optional.

`Grammar` itself is one of the nouns of `rwkv_batch.request`, since it crosses the process border with its request.
"""

import importlib.util
import json
import re
from functools import cache
from typing import Any

from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest, NotInstalled
from rwkv_batch.request import Grammar

PACKAGE = "llguidance"
ANY_OBJECT: dict[str, Any] = {"type": "object"}  # the schema that OpenAI's "json_object" stands for
OPTIONS = "x-guidance"  # the key of a schema under which llguidance finds how to read it

# How JSON is written unless a schema says otherwise: on one line, as most of what models have read. It also leaves nothing to
# choose between the end of one value and the name of the next.
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

THOUGHT = "start: thought gap answer\nthought[lazy]: /(?s:.*)<\\/think>/\ngap: /\\n{0,2}/\nanswer: "


def of_schema(schema: dict[str, Any] | bool, param: str, *, lenient: bool = False) -> Grammar:
    """The grammar of JSON texts that `schema` allows; keys keep their order, for it is the order of the answer's.

    lenient  whether keywords that are not known are ignored, and not refused
    """
    if lenient and isinstance(schema, dict):
        given = schema.get(OPTIONS)
        schema = {**schema, OPTIONS: {**(given if isinstance(given, dict) else {}), "lenient": True}}
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")), param)


def of_choices(choices: list[str], param: str) -> Grammar:
    """The grammar of texts of which each is one of `choices`."""
    return Grammar("lark", "start: " + " | ".join(map(json.dumps, choices)), param)


def after_thought(grammar: Grammar) -> Grammar:
    """The grammar of a thought, which is free up to its end tag, and behind it a text that `grammar` allows.

    Raises InvalidRequest for a grammar in Lark's or llama.cpp's syntax, which has rules of its own.
    """
    return Grammar("lark", THOUGHT + as_rule(grammar, "a thought"), grammar.param)


def as_rule(grammar: Grammar, beside: str) -> str:
    """A grammar as the right side of a rule, so that it can stand beside others.

    Raises InvalidRequest for a grammar in Lark's or llama.cpp's syntax, which has rules of its own.
    """
    if grammar.kind == "lark":
        raise InvalidRequest(f"{grammar.param}: not together with {beside}", param=grammar.param)
    if grammar.kind == "regex":
        return f"/{_between_slashes(grammar.source)}/"
    schema = json.loads(grammar.source)
    if isinstance(schema, dict):
        given = schema.get(OPTIONS)
        schema = {**schema, OPTIONS: {**STYLE, **(given if isinstance(given, dict) else {})}}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def check(grammar: Grammar, config: Config) -> None:
    """Raise InvalidRequest for a grammar that is too long, NotInstalled where there is nothing to read it.

    Whether it is right is found out later, by whoever compiles it.
    """
    param = grammar.param
    try:
        size = len(grammar.source.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param}: has a lone surrogate at character {error.start}", param=param) from None
    if size > config.max_grammar_bytes:
        raise InvalidRequest(f"{param}: at most {config.max_grammar_bytes} bytes, not {size}", param=param)
    if not installed():
        raise NotInstalled(missing(grammar), param=param)


def missing(grammar: Grammar) -> str:
    """What to say where nothing can read a grammar."""
    return f"{grammar.param}: this server lacks {PACKAGE}; pip install 'rwkv-batch[grammar]' adds it"


@cache
def installed() -> bool:
    """Whether grammars can be read here."""
    return importlib.util.find_spec(PACKAGE) is not None


def _between_slashes(regex: str) -> str:
    """A regex as Lark writes it."""
    return re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), regex, flags=re.DOTALL)
