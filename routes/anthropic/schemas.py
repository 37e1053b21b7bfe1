"""Anthropic's bodies, and the chats in OpenAI's form that they become.

What would change the text and cannot be done is refused by name; beta fields that only concern Anthropic's own service are
ignored, and so are `cache_control` and `metadata`.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from routes.http.replies import dumps
from routes.openai.schemas import ChatBody
from routes.openai.thinking import EFFORTS, Effort
from routes.schemas import MAX_ID, MAX_STOPS, Body, Names
from rwkv_batch.errors import InvalidRequest

BILLING = "x-anthropic-billing-header:"  # begins a block of Claude Code's system prompt
BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
# The first budget of a thought (tokens) that is too large for the words that ask for a length, and the words.
LENGTHS = ((2048, "enShort"), (16384, "free"), (MAX_ID + 1, "enLong"))
PASSED_ON = ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "use_prefix_cache")  # by the same names


class Inner(BaseModel):
    """What all parts of a body share: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


def text_in(value: Any) -> Any:
    """The text of a content that is a text, blocks of text, or null."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return value
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("only blocks of text can be read")
    return "\n".join(texts)


class Block(Inner):
    """A block of a message's content, with the fields of all types that can be read."""

    type: Literal[BLOCKS]
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: str = ""
    is_error: bool | None = None

    @field_validator("type", mode="before")
    @classmethod
    def explain(cls, value: Any) -> Any:
        """Say what cannot be read."""
        if isinstance(value, str) and value not in BLOCKS:
            what = {"image": "images", "document": "documents"}.get(value, "blocks of this type")
            raise ValueError(f"{what} cannot be read by this server, only text, thoughts and calls of tools")
        return value

    read_content = field_validator("content", mode="before")(text_in)


class Message(Inner):
    """One message, whose content is a text or blocks."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Field(fail_fast=True)]

    @field_validator("content", mode="before")
    @classmethod
    def text_is_a_block(cls, value: Any) -> Any:
        """A bare text is one block."""
        return [{"type": "text", "text": value}] if isinstance(value, str) else value

    def in_openai_form(self) -> list[dict[str, Any]]:
        """Results of tools as messages of their own, texts between them joined, thoughts left out."""
        if self.role == "assistant":
            return [self._answer()]
        messages: list[dict[str, Any]] = []
        for block in self.content:
            if block.type == "tool_result":
                text = f"Error: {block.content}" if block.is_error else block.content
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            elif block.type == "text" and messages and messages[-1]["role"] == self.role:
                messages[-1]["content"] += "\n" + block.text
            elif block.type == "text":
                messages.append({"role": self.role, "content": block.text})
        return messages

    def _answer(self) -> dict[str, Any]:
        text = "\n".join(block.text for block in self.content if block.type == "text")
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": dumps(block.input)}}
            for block in self.content
            if block.type == "tool_use"
        ]
        return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


class Thinking(Inner):
    """Whether the model thinks first, and how much."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, le=MAX_ID)
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(Inner):
    """How hard to think, and what form the answer has."""

    effort: Effort | None = None
    format: dict[str, Any] | None = None


class Tool(Inner):
    """A tool; those without a schema are run by Anthropic's servers, and so left out."""

    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Inner):
    """Whether a tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def name_the_tool(self) -> "ToolChoice":
        """One tool has a name."""
        if self.type == "tool" and not self.name:
            raise ValueError("name: which tool")
        return self

    def in_openai_form(self) -> Any:
        """`tool_choice` of a chat."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class CountBody(Body):
    """POST /v1/messages/count_tokens: a conversation."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    system: str = ""
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    output_format: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    mcp_servers: list[Any] = Field(default_factory=list)
    state: str | None = None

    @field_validator("system", mode="before")
    @classmethod
    def read_system(cls, value: Any) -> Any:
        """Blocks are joined, without the one for billing, whose text differs from call to call: no prefix would be cached."""
        if isinstance(value, list):
            value = [part for part in value if not (isinstance(part, dict) and str(part.get("text")).startswith(BILLING))]
        return text_in(value)

    @field_validator("mcp_servers")
    @classmethod
    def refuse_servers(cls, value: list[Any]) -> list[Any]:
        """This server calls no others."""
        if value:
            raise ValueError("not supported by this server")
        return value

    @property
    def how_to_think(self) -> str:
        """A `think_type`. A budget is a wish for a length, for nothing here ends a thought."""
        thinking = self.thinking
        if thinking is None or thinking.type == "disabled":
            return "fast"
        if thinking.budget_tokens is not None:
            return next(words for limit, words in LENGTHS if thinking.budget_tokens < limit)
        words = EFFORTS[self.output_config.effort or "medium"]
        return words if words != "fast" else "enShort"

    def in_openai_form(self) -> dict[str, Any]:
        """The body of a chat. Raises InvalidRequest for an answer that the client has begun."""
        if self.messages[-1].role == "assistant":
            raise InvalidRequest(
                "messages: the last one must be the user's; this server begins each answer itself", param="messages"
            )
        system = [{"role": "system", "content": self.system}] if self.system else []
        chat: dict[str, Any] = {
            "model": self.model,
            "state": self.state,
            "messages": system + [part for message in self.messages for part in message.in_openai_form()],
            "think_type": self.how_to_think,
            "max_tokens": 0,
        }
        if self.thinking is not None and self.thinking.display == "omitted":
            chat["reasoning_format"] = "hidden"
        tools = [tool for tool in self.tools if tool.input_schema is not None]
        if tools:
            chat["tools"] = [
                {
                    "type": "function",
                    "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
                }
                for tool in tools
            ]
            if self.tool_choice is not None:
                chat["tool_choice"] = self.tool_choice.in_openai_form()
                chat["parallel_tool_calls"] = False if self.tool_choice.disable_parallel_tool_use else None
        wanted = self.output_config.format or self.output_format
        if wanted is not None and wanted.get("type") == "json_schema":
            chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.get("schema")}}
        elif wanted is not None:
            raise InvalidRequest("output_config.format: json_schema is the only type", param="output_config.format")
        return chat


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=0, le=MAX_ID)
    stop_sequences: Names = Field(default_factory=list, max_length=MAX_STOPS)
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    use_prefix_cache: bool = True

    def in_openai_form(self) -> dict[str, Any]:
        """See CountBody."""
        passed_on = {name: getattr(self, name) for name in PASSED_ON}
        return {**super().in_openai_form(), **passed_on, "stop": self.stop_sequences}


class MessagesChat(ChatBody):
    """The chat that a body of Anthropic's is."""

    stop_field: ClassVar[str] = "stop_sequences"
