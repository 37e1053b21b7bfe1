"""The fields by which a request offers tools, and how calls of them stand in messages."""

import re
from collections import Counter
from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest
from rwkv_batch.text.json_text import compact
from rwkv_batch.text.prompts import Call
from rwkv_batch.text.tools import Tool, Toolbox

KINDS = ("function", "custom")  # tools of other kinds are run by the server that offers them, and so are dropped here
GROUP = "namespace"  # a group of tools, which are called by its name and their own
WORDS = {"none": "none", "auto": "auto", "required": "required", "any": "required"}
CUSTOM_INPUT = "input"  # the one argument of a custom tool, which takes text
_NAME = re.compile(r"[^\s\"\\\x00-\x1f]{1,128}")


class ToolSpec(BaseModel):
    """One tool. Chats have what it is inside `function` or `custom`, responses beside `type`; both are read everywhere."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    type: str = "function"
    name: str = ""
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False
    format: dict[str, Any] = Field(default_factory=dict)
    tools: Annotated[list["ToolSpec"], Field(fail_fast=True)] = Field(default_factory=list)  # of a group
    namespace: str = ""  # the group it is in

    @model_validator(mode="before")
    @classmethod
    def flatten(cls, data: Any) -> Any:
        """One form for both; null is the default. Of a tool that is dropped only the type is looked at."""
        if not isinstance(data, dict):
            return data
        kind = data.get("type") or "function"
        if kind == GROUP:
            return {key: data[key] for key in ("type", "name", "description", "tools") if data.get(key) is not None}
        if kind not in KINDS:
            return {"type": kind}
        inner = data.get(kind)
        flat = {**data, **inner} if isinstance(inner, dict) else data
        return {key: value for key, value in flat.items() if value is not None and key in OWN_FIELDS} | {"type": kind}

    @model_validator(mode="after")
    def check(self) -> "ToolSpec":
        """A function has a name that can be told from others, and a schema that is an object's."""
        if self.type in KINDS and not _NAME.fullmatch(self.name):
            raise ValueError("name: 1 to 128 characters without blanks, quotes and backslashes")
        if not isinstance(self.parameters.get("properties") or {}, dict):
            raise ValueError("parameters.properties: an object")
        if not isinstance(self.parameters.get("required") or [], list):
            raise ValueError("parameters.required: a list")
        return self

    def told(self) -> dict[str, Any]:
        """As a response repeats it."""
        head = {"type": self.type, "name": self.name, "description": self.description or None}
        if self.type == GROUP:
            return {
                **head,
                "description": self.description,
                "tools": [tool.told() for tool in self.tools if tool.type in KINDS],
            }
        if self.type == "custom":
            return {**head, "format": self.format or None}
        return {**head, "parameters": self.parameters, "strict": self.strict}

    def tool(self, name: str) -> Tool:
        """As models are told of it, by this name; a custom tool takes one text."""
        if self.type == "function":
            return Tool(name, self.description, self.parameters, self.strict)
        nested = self.format.get("grammar")
        grammar = nested if isinstance(nested, dict) else self.format
        definition = grammar.get("definition")
        lines = [self.description, *([definition] if isinstance(definition, str) else [])]
        schema = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
        return Tool(name, "\n".join(filter(None, lines)), schema)


OWN_FIELDS = ToolSpec.model_fields.keys() - {"tools", "namespace"}


class ToolFields(BaseModel):
    """The fields that offer tools; `functions` and `function_call` are what came before them."""

    tools: Annotated[list[ToolSpec], Field(fail_fast=True)] = Field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[ToolSpec], Field(fail_fast=True)] = Field(default_factory=list)
    function_call: Any = None
    rwkv_tool_compat_mode: bool = True

    @property
    def has_functions(self) -> bool:
        """Whether the request has the older fields, so that the answer has its call in the older place."""
        return not self.tools and bool(self.functions)

    @cached_property
    def specs(self) -> dict[str, ToolSpec]:
        """The tools that count, by the names that models are told: their own, behind that of their group where two are alike.

        Raises InvalidRequest for two of one name.
        """
        found: list[ToolSpec] = []
        for spec in (self.tools or self.functions) if self.rwkv_tool_compat_mode else ():
            group = [inner.model_copy(update={"namespace": spec.name}) for inner in spec.tools]
            found += [each for each in (group if spec.type == GROUP else [spec]) if each.type in KINDS]
        counts = Counter(spec.name for spec in found)
        named = [f"{spec.namespace}.{spec.name}" if counts[spec.name] > 1 and spec.namespace else spec.name for spec in found]
        if len(set(named)) < len(named):
            raise InvalidRequest("tools: two tools have one name", param="tools")
        return dict(zip(named, found, strict=True))

    @cached_property
    def toolbox(self) -> Toolbox:
        """The tools that this answer may call. Raises InvalidRequest for a choice that cannot be."""
        field, given = ("function_call", self.function_call) if self.has_functions else ("tool_choice", self.tool_choice)
        mode, names = read_choice(given, field)
        if names is not None and not names <= self.specs.keys():
            raise InvalidRequest(f"{field}: no tool of that name is offered", param=field)
        if mode == "required" and not self.specs:
            raise InvalidRequest(f"{field}: there is no tool to call", param=field)
        if mode == "none":
            return Toolbox()
        tools = tuple(spec.tool(name) for name, spec in self.specs.items() if names is None or name in names)
        single = self.parallel_tool_calls is False or self.has_functions
        return Toolbox(tools, mode == "required", limit=1 if single else None, several=self.parallel_tool_calls is True)

    @property
    def told_tools(self) -> list[dict[str, Any]]:
        """The tools that count, as a response repeats them."""
        return [spec.told() for spec in self.tools if spec.type in (*KINDS, GROUP)]

    @property
    def told_choice(self) -> Any:
        """The choice among them, as a response repeats it."""
        given = self.tool_choice
        if isinstance(given, dict) and given.get("type") in KINDS:
            return {"type": given["type"], "name": named(given)}
        return WORDS[given] if isinstance(given, str) else given or "auto"

    def check_tools(self, config: Config) -> None:
        """Raise InvalidRequest for more tools than the server allows, or a choice among them that cannot be."""
        field = "functions" if self.has_functions else "tools"
        if max(len(self.tools or self.functions), len(self.specs)) > config.max_tools:
            raise InvalidRequest(f"{field}: at most {config.max_tools}", param=field)
        if self.toolbox and len(self.toolbox.text().encode()) > config.max_tools_bytes:
            raise InvalidRequest(f"{field}: at most {config.max_tools_bytes} bytes of names and schemas", param=field)


def read_choice(given: Any, field: str) -> tuple[str, set[str] | None]:
    """Whether tools must be called ("none", "auto", "required"), and the names of those that may be, None = all.

    Raises InvalidRequest.
    """
    if given is None:
        return "auto", None
    if isinstance(given, str) and given in WORDS:
        return WORDS[given], None
    if isinstance(given, dict) and given.get("type") == "allowed_tools":
        inner = given.get("allowed_tools") if isinstance(given.get("allowed_tools"), dict) else given
        mode, tools = inner.get("mode", "auto"), inner.get("tools")
        names = [named(tool) for tool in tools if offers(tool)] if isinstance(tools, list) else []
        if names and all(isinstance(name, str) for name in names) and isinstance(mode, str) and mode in WORDS:
            return WORDS[mode], set(names)
    elif offers(given) and isinstance(named(given), str):
        return "required", {named(given)}
    raise InvalidRequest(f"{field}: none, auto, required, or a tool that is offered", param=field)


def offers(tool: Any) -> bool:
    """Whether an entry of a choice, or the choice itself, is a tool of a kind that is not dropped."""
    return isinstance(tool, dict) and tool.get("type", "function") in KINDS


def named(tool: dict[str, Any]) -> Any:
    """The name in an entry of a choice."""
    inner = tool.get(tool.get("type", "function"))
    return (inner if isinstance(inner, dict) else tool).get("name")


def as_json(value: Any) -> str:
    """Arguments as JSON text; some clients send the object itself, or nothing."""
    return value if isinstance(value, str) else compact(value if value is not None else {})


class CallSpec(BaseModel):
    """A call in an earlier answer, as an entry of `tool_calls`, or as an item of a response's input."""

    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: str = ""

    @model_validator(mode="before")
    @classmethod
    def flatten(cls, data: Any) -> Any:
        """What is called may stand inside `function` or `custom`; a custom tool's input becomes its one argument."""
        if not isinstance(data, dict):
            return data
        inner = next((data[kind] for kind in KINDS if isinstance(data.get(kind), dict)), data)
        if isinstance(inner.get(CUSTOM_INPUT), str) and "arguments" not in inner:
            return {"name": inner.get("name"), "arguments": compact({CUSTOM_INPUT: inner[CUSTOM_INPUT]})}
        return {"name": inner.get("name"), "arguments": as_json(inner.get("arguments"))}

    def call(self) -> Call:
        """For the chat template."""
        return Call(self.name, self.arguments)
