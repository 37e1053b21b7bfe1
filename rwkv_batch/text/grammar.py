"""Grammars as requests name them: made from what clients send, held to their limits. llguidance, which reads them, is optional.

`Grammar` itself is one of the nouns of `rwkv_batch.request`, since it crosses the process border with its request.
"""

import importlib.util
import json
from functools import cache
from typing import Any

from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest, NotInstalled
from rwkv_batch.request import Grammar

PACKAGE = "llguidance"
ANY_OBJECT = '{"type":"object"}'  # the schema that OpenAI's "json_object" stands for


def of_schema(schema: dict[str, Any] | bool, param: str) -> Grammar:
    """The grammar of JSON texts that `schema` allows; keys keep their order, for it is the order of the answer's."""
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")), param)


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
