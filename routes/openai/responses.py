"""The Responses API. The state of each answer is kept as a session under the response's id, so an answer can be continued any
number of times until it is old (`--response-ttl-hours`) or there are too many (`--max-responses`); its text is not kept.
"""

import time
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from routes.http.context import RequestContext
from routes.http.off_loop import off_loop
from routes.http.replies import Response, dumps, error_document, json_reply
from routes.http.streams import Reply
from routes.openai.answers import Formatter, new_id
from routes.openai.chat import answer_with
from routes.openai.schemas import NO_LIMIT, ChatMessage, GenerationBody, at_most, read
from routes.openai.thinking import ThinkingFields
from routes.schemas import MAX_ID, Names
from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest, NotFound, RwkvBatchError
from rwkv_batch.request import Delta, Event, Failure, Request
from rwkv_batch.session_messages import Delete, Session
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
    text: dict[str, Any] = Field(default_factory=dict)
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
            "text": (self.text.get("format") or {"type": "text"}) != {"type": "text"},
        }
        for name in (name for name, wanted in unsupported.items() if wanted):
            raise InvalidRequest(f"{name}: not supported by this server", param=name, code="unsupported_parameter")

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


class ResponseFormatter(Formatter):
    """A response, whole or as events."""

    def __init__(self, context: RequestContext, body: ResponseBody, request: Request):
        super().__init__(context, body, request)
        self.body = body
        self.item_id = new_id("msg")
        self.parts: list[str] = []
        self._num_events = 0

    def take(self, delta: Delta) -> None:
        """Keep a piece; the blank that follows `Assistant:` is no part of the answer."""
        self._add(delta)

    def _add(self, delta: Delta) -> str:
        text = delta.text if self.parts else delta.text.lstrip()
        if text:
            self.parts.append(text)
        return text

    def finished(self) -> dict[str, Any]:
        """The response when it has ended."""
        ended = self.finishes[0].reason == "stop"
        return self._response("completed" if ended else "incomplete", [self._item("completed" if ended else "incomplete")])

    def chunks(self, event: Event) -> bytes | None:
        """Take one event; return the events of the Responses API that it becomes."""
        if isinstance(event, Failure):
            return self._failed(event.exception())
        out = []
        if not self._began:
            self._began = True
            for name in ("response.created", "response.in_progress"):
                out.append(self._event(name, response=self._response("in_progress", [])))
            out.append(self._event("response.output_item.added", output_index=0, item=self._item("in_progress")))
            out.append(self._at("response.content_part.added", part=self._part("")))
        for delta in event.deltas:
            self.num_tokens += delta.tokens
            if text := self._add(delta):
                out.append(self._at("response.output_text.delta", delta=text, logprobs=[]))
        for finish in event.finishes:
            self._note(finish)
            out.append(self._end() if self.error is None else self._failed(self.error))
        return b"".join(out) or None

    def _end(self) -> bytes:
        text, response = "".join(self.parts), self.finished()
        return b"".join(
            (
                self._at("response.output_text.done", text=text, logprobs=[]),
                self._at("response.content_part.done", part=self._part(text)),
                self._event("response.output_item.done", output_index=0, item=response["output"][0]),
                self._event(f"response.{response['status']}", response=response),
            )
        )

    def _failed(self, error: RwkvBatchError) -> bytes:
        return self._event("error", **error_document(error, form="openai"))

    def _event(self, name: str, **more: Any) -> bytes:
        data = dumps({"type": name, "sequence_number": self._num_events, **more})
        self._num_events += 1
        return f"event: {name}\ndata: {data}\n\n".encode()

    def _at(self, name: str, **more: Any) -> bytes:
        """An event that concerns the text."""
        return self._event(name, item_id=self.item_id, output_index=0, content_index=0, **more)

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part("".join(self.parts))]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self.body
        return {
            "id": body.own_id,
            "object": "response",
            "created_at": self.head["created"],
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions or None,
            "max_output_tokens": None if body.max_output_tokens == NO_LIMIT else body.max_output_tokens,
            "metadata": body.metadata,
            "model": self.head["model"],
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": body.store,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._counts(),
        }

    def _counts(self) -> dict[str, Any]:
        """The usage by the names that responses have."""
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


async def create(context: RequestContext) -> Reply:
    """POST responses: answer, and keep the state that the next call can name."""
    body = read(ResponseBody, context.body)
    request = await context.app.to_request(context, body)
    previous = body.previous_response_id
    if previous is not None and not previous.startswith(PREFIX + "_"):
        raise missing(previous)
    try:
        return await answer_with(context, request, ResponseFormatter(context, body, request), stream=body.stream)
    except NotFound:
        raise missing(previous) from None


async def count(context: RequestContext) -> Response:
    """POST responses/input_tokens: how many tokens the input of a conversation's first turn is."""
    body = read(ResponseBody, context.body)
    if body.previous_response_id is not None:
        raise InvalidRequest("previous_response_id: only a first turn is counted", param="previous_response_id")
    texts = await off_loop(context.body_bytes, body.checked_texts, context.config)
    (ids,) = await context.app.encode(texts, "input")
    return json_reply({"object": "response.input_tokens", "input_tokens": len(ids)})


async def delete(context: RequestContext) -> Response:
    """DELETE responses/{id}: forget the state."""
    name = context.params["response"]
    deleted = name.startswith(PREFIX + "_") and (await context.app.manage(Delete(namespace=context.namespace, name=name))).found
    return json_reply({"id": name, "object": "response", "deleted": deleted})


async def retrieve(context: RequestContext) -> Response:
    """GET responses/{id}: texts are not kept."""
    raise NotFound("the server keeps the state of a response to be continued, not its text", code="not_supported")


def missing(name: str | None) -> NotFound:
    """What is said of a response that is not there."""
    return NotFound(f"Response '{name}' not found or expired", param="previous_response_id", code="previous_response_not_found")
