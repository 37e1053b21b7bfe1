"""The JSON body of the Responses API."""

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field, PrivateAttr, field_validator, model_validator

from routes.formats import TextOptions
from routes.openai.answers import new_id
from routes.openai.conversation import ChatMessage, Prompted
from routes.openai.schemas import NO_LIMIT, GenerationBody, at_most
from routes.schemas import MAX_ID, Names
from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest
from rwkv_batch.request import Grammar, Request
from rwkv_batch.session_messages import Session
from rwkv_batch.text.prompts import Turn

PREFIX = "resp"
ROOT = re.compile(PREFIX + "_[0-9a-f]{24}")  # of the first response of a conversation, by which a proxy finds its server
LATER_DIGITS = 12  # that tell the later ones apart
MAX_METADATA = 16  # as OpenAI allows
TOOL_TOKENS = 4096  # the most that an answer with tools has unless the request says it: as many as a chat's

CALLS = ("function_call", "custom_tool_call")  # items of the input that the model said
OUTPUTS = ("function_call_output", "custom_tool_call_output")  # and what it was told then
# Items that are left out: thoughts, as in chats, and what tools did that are run by the server that offers them.
LEFT_OUT = (
    "reasoning", "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "mcp_call",
    "mcp_list_tools",
)  # fmt: skip


class Item(ChatMessage):
    """One item of the input: a message, a call, or what it brought; or one that is left out."""

    type: str = "message"

    @model_validator(mode="before")
    @classmethod
    def shape(cls, data: Any) -> Any:
        """As a message of a chat has it."""
        if not isinstance(data, dict):
            return data
        kind = data.get("type") or "message"
        if kind == "message":
            return {**data, "type": kind}
        if kind in CALLS:
            return {"type": kind, "role": "assistant", "tool_calls": [data]}
        if kind in OUTPUTS:
            return {"type": kind, "role": "tool", "content": data.get("output")}
        if kind in LEFT_OUT:
            return {"type": kind}
        if kind == "item_reference":
            raise ValueError("items are not kept by this server; send their messages, or previous_response_id")
        raise ValueError("type: not supported by this server")

    def joins(self, before: "Item | None") -> bool:
        """Whether it is a further part of what the model said at once."""
        return self.type in CALLS and before is not None and before.role == "assistant"


class ResponseBody(GenerationBody, Prompted):
    """POST responses."""

    field: ClassVar[str] = "input"
    no_thought: ClassVar[str] = "Assistant:"
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
        """A text is a user's message, alone or in a list."""
        items = [value] if isinstance(value, str) else value
        return [{"content": item} if isinstance(item, str) else item for item in items] if isinstance(items, list) else items

    @model_validator(mode="after")
    def take_output_limit(self) -> "ResponseBody":
        """`max_output_tokens` is what responses call `max_tokens`. An agent, which often sends neither, may write a file."""
        if self.max_output_tokens is not None:
            self.max_tokens = self.max_output_tokens
        elif self.tools and "max_tokens" not in self.model_fields_set:
            self.max_tokens = TOOL_TOKENS
        return self

    @property
    def own_id(self) -> str:
        """The id of the response; it begins with that of its conversation's first one."""
        root = ROOT.match(self.previous_response_id or "")
        return self._own_id if root is None else f"{root[0]}_{self._own_id[-LATER_DIGITS:]}"

    def check_limits(self, config: Config) -> None:
        """Raise InvalidRequest when more is asked for than the server allows, or than it can."""
        super().check_limits(config)
        self.check_tools(config)
        unsupported = {
            "n": self.n > 1,
            "background": self.background,
            "conversation": self.conversation is not None,
            "prompt": self.prompt is not None,
            "include": "message.output_text.logprobs" in self.include,
            "top_logprobs": self.top_logprobs > 0,
        }
        for name in (name for name, wanted in unsupported.items() if wanted):
            raise InvalidRequest(f"{name}: not supported by this server", param=name, code="unsupported_parameter")

    def wanted_grammar(self) -> Grammar | None:
        """See FormatFields and Prompted."""
        return self.with_calls(self.text.format.grammar("text.format") or super().wanted_grammar())

    def to_request(self, texts: list[Any], request_id: str, config: Config, encode: Callable[[Any], list[int]]) -> Request:
        """The engine's form; tokens come one by one behind a thought, so that they can be counted."""
        request = super().to_request(texts, request_id, config, encode)
        return msgspec.structs.replace(request, chunk_size=1) if self.thinks else request

    @property
    def tells_tools(self) -> bool:
        """See Prompted. The state of the previous response has seen the tools that the results of calls come from."""
        only_results = all(item.type in OUTPUTS for item in self.input)
        return super().tells_tools and not (self.previous_response_id and only_results)

    def texts(self) -> list[str]:
        """The one prompt. Instructions are those of this turn: a later one has them again, or others, in front of its input."""
        turns: list[Turn] = []
        before = None
        for item in (item for item in self.input if item.type not in LEFT_OUT):
            turn = item.turn()
            if item.joins(before):
                turn = Turn(turn.role, "\n".join(filter(None, (turns.pop().text.rstrip(), turn.text))))
            turns.append(turn)
            before = item
        if not any(turn.text.strip() for turn in turns):
            raise InvalidRequest("input: a text, or messages with some", param="input")
        return [self.prompt_of([Turn("system", self.instructions), *turns])]

    def session(self, config: Config) -> Session | None:
        """The previous response's state is continued, and what becomes of it kept under the own id."""
        previous = self.previous_response_id
        if previous is None:
            return Session(name=self.own_id, response=True) if self.store else None
        return Session(name=previous, must_exist=True, keep=self.store, save_as=self.own_id, response=True)
