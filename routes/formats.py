"""What an answer must look like: the fields by which clients of OpenAI, vLLM, SGLang and llama.cpp say it, as one `Grammar`."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest
from rwkv_batch.request import Grammar
from rwkv_batch.text import grammar

Schema = dict[str, Any] | bool | str  # a text is the JSON of one

OTHERS = ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


class StructuredOutputs(BaseModel):
    """`structured_outputs`, vLLM's."""

    model_config = ConfigDict(extra="allow")

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, min_length=1)] | None = None
    grammar: str | None = None


class JsonSchema(BaseModel):
    """OpenAI's wrapping of a schema; `strict` false has unknown keywords ignored."""

    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class Format(BaseModel):
    """`response_format` of chats, and `text.format` of responses, which has the schema's fields beside the type."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None
    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None

    def grammar(self, param: str) -> Grammar | None:
        """What it asks for, None for plain text. Raises InvalidRequest."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return of_json(grammar.ANY_OBJECT if self.schema_ is None else self.schema_, param)
        nested = self.json_schema
        schema = self.schema_ if nested is None else nested.schema_
        where = f"{param}.schema" if nested is None else f"{param}.json_schema.schema"
        if schema is None:
            raise InvalidRequest(f"{where}: is missing", param=where)
        return of_json(schema, where, lenient=(self.strict if nested is None else nested.strict) is False)


class TextOptions(BaseModel):
    """`text` of responses."""

    format: Format = Field(default_factory=Format)

    @field_validator("format", mode="before")
    @classmethod
    def null_is_text(cls, value: Any) -> Any:
        """As everywhere, null is the default."""
        return {} if value is None else value

    def told(self) -> dict[str, Any]:
        """As the response repeats it."""
        return {"format": self.format.model_dump(by_alias=True, exclude_none=True)}


class FormatFields(BaseModel):
    """The fields that say what the answer must look like."""

    response_format: Format | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True, min_length=1)] | None = None
    guided_grammar: str | None = None
    json_schema: Schema | None = None  # of llama.cpp and SGLang, as the next three are
    regex: str | None = None
    ebnf: str | None = None
    grammar: str = ""

    def wanted_grammar(self) -> Grammar | None:
        """What the answer must be, None for anything. Raises InvalidRequest, also when several fields say it."""
        wanted = self._wanted()
        if len(wanted) > 1:
            names = " and ".join(str(found.param) for found in wanted[:2])
            raise InvalidRequest(f"{names}: only one of them can be followed", param=wanted[1].param)
        return wanted[0] if wanted else None

    def checked_grammar(self, config: Config) -> Grammar | None:
        """The same within the server's limits. Raises InvalidRequest, NotInstalled."""
        wanted = self.wanted_grammar()
        if wanted is not None:
            grammar.check(wanted, config)
        return wanted

    def _wanted(self) -> list[Grammar]:
        found: list[Grammar] = []
        if self.response_format is not None and (made := self.response_format.grammar("response_format")):
            found.append(made)
        for name in ("guided_json", "json_schema"):
            if (schema := getattr(self, name)) is not None:
                found.append(of_json(schema, name))
        texts = {"guided_regex": "regex", "regex": "regex", "guided_grammar": "lark", "ebnf": "lark", "grammar": "lark"}
        found += [Grammar(kind, source, name) for name, kind in texts.items() if (source := getattr(self, name))]
        if self.guided_choice is not None:
            found.append(grammar.of_choices(self.guided_choice, "guided_choice"))
        return found + self._structured()

    def _structured(self) -> list[Grammar]:
        asked = self.structured_outputs
        if asked is None:
            return []
        for name in OTHERS:
            if (asked.model_extra or {}).get(name):
                param = f"structured_outputs.{name}"
                raise InvalidRequest(f"{param}: not supported by this server", param=param, code="unsupported_parameter")
        found: list[Grammar] = []
        if asked.json_ is not None or asked.json_object:
            schema = grammar.ANY_OBJECT if asked.json_ is None else asked.json_
            found.append(of_json(schema, "structured_outputs.json"))
        if asked.regex is not None:
            found.append(Grammar("regex", asked.regex, "structured_outputs.regex"))
        if asked.choice is not None:
            found.append(grammar.of_choices(asked.choice, "structured_outputs.choice"))
        if asked.grammar is not None:
            found.append(Grammar("lark", asked.grammar, "structured_outputs.grammar"))
        return found


def of_json(schema: Schema, param: str, *, lenient: bool = False) -> Grammar:
    """The grammar of a schema or of a schema's JSON. Raises InvalidRequest for what is neither."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{param}: Invalid JSON: {error}", param=param) from None
        if not isinstance(schema, dict | bool):
            raise InvalidRequest(f"{param}: a schema is an object", param=param)
    return grammar.of_schema(schema, param, lenient=lenient)
