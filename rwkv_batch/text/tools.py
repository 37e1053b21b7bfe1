"""Tools as a model is told of them, and the grammar that makes it call one. Knows nothing of any wire.

    System: Tools:
    [
    {"name":"get_weather","description":"...","arguments":{"city":{"type":"string"}}}
    ]
    Return only a JSON function call.

and a call in a fenced block is what RWKV-7 G1 was trained on, see `tool_calls`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rwkv_batch.text.json_text import compact
from rwkv_batch.text.tool_calls import ToolCallParser

FORCED = "Return only a JSON function call."
FREE = "To use a tool, return only a JSON function call. Otherwise answer in words."
MOST_CALLS = 16  # that a grammar lets a reply make
SHARED = ("$defs", "definitions")  # parts of a schema that its properties refer to
NESTING = ("properties", "$defs", "definitions")  # mappings of names to schemas
ALTERNATIVES = ("anyOf", "oneOf", "prefixItems")
# How llguidance writes JSON, https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md: without blanks.
COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}


@dataclass(frozen=True)
class Tool:
    """What may be called. `parameters` is the JSON schema of the arguments, an object's; `strict`: it must be obeyed."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False

    def described(self) -> dict[str, Any]:
        """As a model is told of it: properties for the arguments, and which are required where not all are."""
        schema = self.parameters
        properties = schema.get("properties") or {}
        required = [name for name in properties if name in (schema.get("required") or [])]
        return {
            "name": self.name,
            **({"description": self.description} if self.description else {}),
            "arguments": properties,
            **({"required": required} if required and len(required) < len(properties) else {}),
            **{key: schema[key] for key in SHARED if schema.get(key)},
        }


@dataclass(frozen=True)
class Toolbox:
    """The tools that one reply may call.

    forced   the reply is a call and nothing else
    limit    how many calls it may make, None = any number
    several  a forced reply may make more than the one call that models were trained to make
    """

    tools: tuple[Tool, ...] = ()
    forced: bool = False
    limit: int | None = None
    several: bool = False

    def __bool__(self) -> bool:
        return bool(self.tools)

    def text(self) -> str:
        """What the system block says of the tools."""
        lines = ",\n".join(compact(tool.described()) for tool in self.tools)
        return f"Tools:\n[\n{lines}\n]\n{FORCED if self.forced else FREE}"

    def parser(self, *, opened: bool, after: str = "") -> ToolCallParser:
        """What finds the calls in the reply; see there."""
        return ToolCallParser([tool.name for tool in self.tools], opened=opened, limit=self.limit, after=after)

    def grammar(self, *, thinks: bool, answer: str | None = None) -> str:
        """What a reply must be, in Lark's syntax as llguidance has it.

        thinks  the prompt ends in "<think", and the thought comes first; else a forced reply's ends in "```json"
        answer  the right side of a rule for what a reply that is not forced may be instead of calls
        """
        return "\n".join(self._rules(thinks=thinks, answer=answer))

    def _rules(self, *, thinks: bool, answer: str | None) -> Iterator[str]:
        fence, closing = "```json\n", "\n```"
        further = f" ({literal(closing + chr(10) + fence)} call){{0,{MOST_CALLS - 1}}}" if self.limit is None else ""
        if self.forced and not self.several:
            further = ""
        begun = "\n" if self.forced and not thinks else fence
        yield f"calls: {literal(begun)} call{further} {literal(closing)}"
        yield f"start: {'thought gap ' if thinks else ''}{'calls' if self.forced else '(calls | answer)'}"
        if answer is not None:
            yield f"answer: {answer}"
        if thinks:
            yield "thought[lazy]: /(?s:.*)<\\/think>/"
            yield "gap: /\\n{0,2}/"
        yield "call: " + " | ".join(f"call_{number}" for number in range(len(self.tools)))
        for number, tool in enumerate(self.tools):
            head = literal('{"name":' + compact(tool.name) + ',"arguments":')
            yield f"call_{number}: {head} arguments_{number} {literal('}')}"
            yield f"arguments_{number}: %json {json.dumps(arguments_schema(tool))}"


def literal(text: str) -> str:
    """A text in Lark's syntax."""
    return json.dumps(text)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema that a grammar holds a tool's arguments to: an object with the properties that are named and no others.

    What the grammar cannot express is an error where the tool is strict, and passed over elsewhere.
    """
    says_more = tool.parameters.keys() & {"$ref", *ALTERNATIVES, "allOf", "patternProperties", "additionalProperties"}
    schema = tool.parameters if says_more else {"properties": {}, **tool.parameters}
    return {**closed(schema), "type": "object", "x-guidance": {**COMPACT, "lenient": not tool.strict}}


def closed(schema: Any) -> Any:
    """A schema whose objects take no properties but those they name, where it says nothing of others."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key in NESTING:
        if isinstance(found.get(key), dict):
            found[key] = {name: closed(inner) for name, inner in found[key].items()}
    for key in ALTERNATIVES:
        if isinstance(found.get(key), list):
            found[key] = [closed(inner) for inner in found[key]]
    if isinstance(found.get("items"), dict):
        found["items"] = closed(found["items"])
    if "properties" in found and not found.keys() & {"allOf", "patternProperties", "unevaluatedProperties"}:
        found.setdefault("additionalProperties", False)
    return found
