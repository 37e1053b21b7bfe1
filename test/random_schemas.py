"""Random JSON schemas out of the keywords that a grammar can hold, all of texts of bounded length."""

import random
from typing import Any

KEYS = ("name", "ag e", "é", 'quo"te', "a/b", "x1", "$id2", "items")
PATTERNS = ("^[a-f0-9]{2,6}$", "^(yes|no)$", "^\\d{1,3}-[A-Z]?$", "^.{0,4}x$", "[é中]{1,3}$")
FORMATS = ("date", "ipv4", "ipv6", "uuid", "email", "hostname")  # times have leap seconds, of which jsonschema knows none


def schema(seed: int) -> dict[str, Any]:
    """Return the schema of a seed."""
    rng = random.Random(seed)
    found = value(rng, 3)
    found["$defs"] = {"leaf": value(rng, 0), "list": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 3}}
    return found


def value(rng: random.Random, depth: int) -> dict[str, Any]:
    """Return a schema with at most `depth` levels of objects and arrays."""
    leaves = (text, integer, number, literal, constant, simple, several)
    return rng.choice(leaves if depth == 0 else (*leaves, record, record, record, row, row, union, both, reference))(rng, depth)


def text(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 12}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS), "maxLength": 64}
    low = rng.randrange(4)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(9)}


def integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-200, 200)
    kind = rng.randrange(3)
    if kind == 0:
        return {"type": "integer", "minimum": low, "exclusiveMaximum": low + 1 + rng.randrange(1000)}
    if kind == 1:
        return {"type": "integer", "exclusiveMinimum": low, "maximum": low + 1 + rng.randrange(1000)}
    return {"type": "integer", "multipleOf": rng.choice((2, 5, 10)), "minimum": 0, "maximum": 500}


def number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = round(rng.uniform(-50, 50), 2)
    return {"type": "number", "minimum": low, "maximum": low + rng.randrange(1, 90)}


def literal(rng: random.Random, depth: int) -> dict[str, Any]:
    options = ["a", "b c", 'q"', "é", 1, -2.5, True, None, [1, "x"], {"k": 1}]
    return {"enum": rng.sample(options, rng.randrange(1, 5))}


def constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(["a long constant text", 12, None, {"k": [1, 2]}, ""])}


def simple(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(("boolean", "null")), "title": "t", "description": "d", "default": None}


def several(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": ["string", "null", "boolean"], "maxLength": 5}


def record(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(KEYS, rng.randrange(1, 5))
    made: dict[str, Any] = {"type": "object", "properties": {name: value(rng, depth - 1) for name in names}}
    made["required"] = [name for name in names if rng.random() < 0.6]
    kind = rng.randrange(3)
    if kind == 0:
        made["patternProperties"] = {"^p[0-9]{1,2}$": value(rng, 0)}
    made["additionalProperties"] = False
    if kind == 1:
        made["minProperties"] = min(1, len(made["required"]))
    return made


def row(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    made: dict[str, Any] = {"type": "array", "minItems": low, "maxItems": low + rng.randrange(3)}
    if rng.random() < 0.4:
        made["prefixItems"] = [value(rng, 0) for _ in range(rng.randrange(1, 3))]
    made["items"] = value(rng, depth - 1)
    return made


def union(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"anyOf": [value(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
    return {"oneOf": [integer(rng, 0), record(rng, depth - 1), {"type": "null"}]}


def both(rng: random.Random, depth: int) -> dict[str, Any]:
    first, second = rng.sample(KEYS, 2)
    parts = [
        {"properties": {first: value(rng, 0)}, "required": [first]},
        {"properties": {second: value(rng, depth - 1)}, "required": [second]},
    ]
    return {"type": "object", "allOf": parts, "maxProperties": 2}


def reference(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"$ref": rng.choice(("#/$defs/leaf", "#/$defs/list"))}
