"""Ollama's bodies, and the chats and completions in OpenAI's form that they become."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from routes.http.replies import dumps
from routes.openai.schemas import ChatBody, CompletionBody
from routes.openai.thinking import EFFORTS, Effort
from routes.schemas import Body, Ids
from routes.timed import TimedBody
from rwkv_batch.errors import InvalidRequest

MAX_TOKENS = 4096  # without num_predict
# Options by the names that they have here. Others concern how a model is loaded, or bound what has no bound here.
OPTIONS = {
    "num_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "temperature": "temperature", "top_k": "top_k",
    "top_p": "top_p", "min_p": "min_p", "typical_p": "typical_p", "tfs_z": "tfs_z", "mirostat": "mirostat", "seed": "seed",
    "stop": "stop", "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "alpha_presence": "alpha_presence", "alpha_frequency": "alpha_frequency", "alpha_decay": "alpha_decay",
}  # fmt: skip


class Inner(BaseModel):
    """What all parts of a body share: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


def refuse_images(value: Any) -> Any:
    """Nothing here sees."""
    if value:
        raise ValueError("this model reads text only")
    return value


class CalledFunction(Inner):
    """What a model called."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Call(Inner):
    """One call of a tool in the history."""

    id: str | None = None
    function: CalledFunction


class Message(Inner):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: list[Any] | None = None
    tool_calls: Annotated[list[Call] | None, Field(fail_fast=True)] = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    check_images = field_validator("images")(refuse_images)

    @field_validator("content", mode="before")
    @classmethod
    def null_is_empty(cls, value: Any) -> Any:
        """Some clients send null beside calls of tools."""
        return "" if value is None else value

    def in_openai_form(self) -> dict[str, Any]:
        """A message of a chat."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.role == "tool":
            message |= {"tool_call_id": self.tool_call_id or self.tool_name or "", "name": self.tool_name}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id or f"call_{place}",
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": dumps(call.function.arguments)},
                }
                for place, call in enumerate(self.tool_calls)
            ]
        return message


class OllamaBody(Body):
    """What /api/chat and /api/generate share."""

    stream: bool = True
    options: dict[str, Any] = Field(default_factory=dict)
    format: str | dict[str, Any] = ""
    think: bool | Effort = False
    logprobs: bool = False
    keep_alive: Any = None
    state: str | None = None

    @field_validator("format")
    @classmethod
    def know_format(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        """JSON, or a schema of it."""
        if isinstance(value, str) and value not in ("", "json"):
            raise ValueError('"json", or a schema')
        return value

    @field_validator("logprobs")
    @classmethod
    def refuse_logprobs(cls, value: bool) -> bool:
        """OpenAI's routes have them."""
        if value:
            raise ValueError("not on this route; /v1/chat/completions and /v1/completions have them")
        return value

    @property
    def unloads(self) -> bool:
        """Whether a request without a prompt asks that the model be unloaded, instead of loaded."""
        return self.keep_alive in (0, "0", "0s")

    def common(self) -> dict[str, Any]:
        """The fields of any OpenAI body. Nulls among the options are their defaults."""
        fields = {own: self.options.get(theirs) for theirs, own in OPTIONS.items()}
        if fields["max_tokens"] in (None, -2):  # -2: until the context is full, which it never is
            fields["max_tokens"] = MAX_TOKENS if fields["max_tokens"] is None else -1
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.format}}
        return {**fields, "model": self.model, "state": self.state, "stream": self.stream}

    @property
    def how_to_think(self) -> str:
        """A `think_type`."""
        return EFFORTS[self.think] if isinstance(self.think, str) else "free" if self.think else "fast"


class ChatRequest(OllamaBody):
    """POST /api/chat."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(default_factory=list)
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] = Field(default_factory=list)

    def in_openai_form(self) -> dict[str, Any]:
        """The body of a chat."""
        messages = [message.in_openai_form() for message in self.messages]
        tools = {"tools": self.tools} if self.tools else {}
        return {**self.common(), **tools, "messages": messages, "think_type": self.how_to_think}


class GenerateRequest(OllamaBody):
    """POST /api/generate: a prompt that is a user's message, or with `raw` or `suffix` is completed as it is."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    template: str = ""
    context: Ids = Field(default_factory=list)
    images: list[Any] = Field(default_factory=list)

    check_images = field_validator("images")(refuse_images)

    @field_validator("template", "context")
    @classmethod
    def refuse_own(cls, value: Any) -> Any:
        """Each would give another text."""
        if value:
            raise ValueError("not supported by this server; raw takes a prompt as it is, /api/chat a history")
        return value

    @property
    def is_raw(self) -> bool:
        """Whether no template is applied."""
        return self.raw or bool(self.suffix)

    def in_openai_form(self) -> dict[str, Any]:
        """The body of a chat, or if `is_raw` of a completion. Raises InvalidRequest where a field has no meaning."""
        if not self.is_raw:
            system = [{"role": "system", "content": self.system}] if self.system else []
            messages = [*system, {"role": "user", "content": self.prompt}]
            return {**self.common(), "messages": messages, "think_type": self.how_to_think}
        if self.suffix and self.raw:
            raise InvalidRequest("raw mode does not support template, system, or context", param="raw")
        return {**self.common(), "prompt": self.prompt, **({"suffix": self.suffix} if self.suffix else {})}


class ShowRequest(Body):
    """POST /api/show."""


class OllamaChat(TimedBody, ChatBody):
    """The chat that a body of Ollama's is."""

    stop_field: ClassVar[str] = "options.stop"


class OllamaCompletion(TimedBody, CompletionBody):
    """The completion that a body of Ollama's is."""

    stop_field: ClassVar[str] = "options.stop"
