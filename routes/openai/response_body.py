"""The JSON body of the Responses API."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from routes.formats import TextOptions
from routes.openai.answers import new_id
from routes.openai.schemas import NO_LIMIT, ChatMessage, GenerationBody, at_most
from routes.openai.thinking import ThinkingFields
from routes.schemas import MAX_ID, Names
from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest
from rwkv_batch.request import Grammar
from rwkv_batch.session_messages import Session
from rwkv_batch.text import prompts
from rwkv_batch.text.prompts import Turn

TAIL = "Assistant:"  # without a thought
PREFIX = "resp"
MAX_METADATA = 16  # as OpenAI allows


class Item(ChatMessage):
    """One message of the input; other items are refused."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"

    @field_validator("type", mode="before")
    @classmethod
    def explain(cls, value: Any) -> Any:
        """Say what is missing for the items that agents send."""
        if isinstance(value, str) and value.endswith(("_call", "_call_output")):
            raise ValueError("calls of tools and their outputs are not supported by this server")
        if value == "item_reference":
            raise ValueError("items are not kept by this server; send their messages, or previous_response_id")
        return value


class ResponseBody(GenerationBody, ThinkingFields):
    """POST responses."""

    field: ClassVar[str] = "input"
    enable_think: bool | None = None

    input: Annotated[list[Item], Field(fail_fast=True)] = Field(default_factory=list)
    instructions: str = ""
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=NO_LIMIT, le=MAX_ID)
    max_tokens: int = Field(1024, ge=NO_LIMIT, le=MAX_ID)
    top_k: int = Field(50, ge=-1, le=MAX_ID)
    store: bool = True
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA)] = Field(default_factory=dict)
    text: TextOptions = Field(default_factory=TextOptions)
    include: Names = Field(default_factory=list)
    background: bool = False
    top_logprobs: int = 0
    conversation: Any = None
    prompt: Any = None
    _own_id: str = PrivateAttr(default_factory=lambda: new_id(PREFIX))

    @field_validator("input", mode="before")
    @classmethod
    def one_is_a_list(cls, value: Any) -> Any:
        """A text is a user's message, alone or in a list. Thoughts of earlier answers are left out, as in chats."""
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list):
            return items
        said = [item for item in items if not (isinstance(item, dict) and item.get("type") == "reasoning")]
        return [{"content": item} if isinstance(item, str) else item for item in said]

    @model_validator(mode="after")
    def take_output_limit(self) -> "ResponseBody":
        """`max_output_tokens` is what responses call `max_tokens`."""
        if self.max_output_tokens is not None:
            self.max_tokens = self.max_output_tokens
        return self

    @property
    def thought_asked_by(self) -> str:
        """The field that says most about thinking."""
        return next((name for name in ThinkingFields.model_fields if name in self.model_fields_set), "reasoning")

    @property
    def own_id(self) -> str:
        """The id of the response."""
        return self._own_id

    def check_limits(self, config: Config) -> None:
        """Raise InvalidRequest when more is asked for than the server allows, or than it can."""
        super().check_limits(config)
        unsupported = {
            "n": self.n > 1,
            "background": self.background,
            "conversation": self.conversation is not None,
            "prompt": self.prompt is not None,
            "include": "message.output_text.logprobs" in self.include,
            "top_logprobs": self.top_logprobs > 0,
            self.thought_asked_by: self.how_to_think != "fast",
        }
        for name in (name for name, wanted in unsupported.items() if wanted):
            raise InvalidRequest(f"{name}: not supported by this server", param=name, code="unsupported_parameter")

    def wanted_grammar(self) -> Grammar | None:
        """What the answer must be. Raises InvalidRequest."""
        return self.text.format.grammar("text.format") or super().wanted_grammar()

    def texts(self) -> list[str]:
        """The one prompt. Instructions are those of this turn: a later one has them again, or others, in front of its input."""
        turns = [item.turn() for item in self.input]
        if not any(turn.text.strip() for turn in turns):
            raise InvalidRequest("input: a text, or messages with some", param="input")
        return [prompts.conversation([Turn("system", self.instructions), *turns], TAIL)]

    def session(self, config: Config) -> Session | None:
        """The previous response's state is continued, and what becomes of it kept under the own id."""
        previous = self.previous_response_id
        if previous is None:
            return Session(name=self.own_id, response=True) if self.store else None
        return Session(name=previous, must_exist=True, keep=self.store, save_as=self.own_id, response=True)
