"""The native chat routes: prompts in, one choice for each, whole or as a stream; what the other native routes share of it."""

import time
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
from pydantic import Field

from routes.formats import FormatFields
from routes.http.context import RequestContext
from routes.http.replies import DONE, dumps, error_document, sse
from routes.http.streams import Reply
from routes.schemas import ContentsBody, Messages, PromptsBody, validate
from rwkv_batch.config import Config
from rwkv_batch.errors import EngineFailed, InvalidRequest, RwkvBatchError
from rwkv_batch.request import Event, Failure, Finish, Grammar, Loop, Request, Text
from rwkv_batch.text import prompts
from rwkv_batch.text.grammar import after_thought
from rwkv_batch.text.prompts import Turn
from sampling.params import SamplingParams

NATIVE_ID = "rwkv7-batch"
V3_ID = "rwkv7-batch-v3"
COMPLETION = "chat.completion"


class V1Body(ContentsBody, FormatFields):
    """Raw prompts, and what each answer must look like."""

    def to_request(self, texts: list[str], request_id: str, config: Config, encode: Callable[[str], list[int]]) -> Request:
        """The engine's form. Raises InvalidRequest."""
        request = super().to_request(texts, request_id, config, encode)
        return msgspec.structs.replace(request, grammar=self.checked_grammar(config))


class V2Body(V1Body):
    """Raw prompts for the continuous batch; token 0 in front of each unless it is refused, top_k before top_p."""

    loop: ClassVar[Loop] = "continuous"
    pad_zero: bool = True

    def sampling(self) -> SamplingParams:
        """The controls of the v2 sampler."""
        return msgspec.structs.replace(super().sampling(), rule="sequential")


class V3Body(V1Body):
    """Texts that each become the one turn of a chat, or the messages of one conversation."""

    messages: Messages = Field(default_factory=list)

    @property
    def field(self) -> str:
        """Where the prompts are; `contents` wins."""
        return "contents" if self.contents or not self.messages else "messages"

    def texts(self) -> list[str]:
        """The prompts. A user's only message is the same as one of `contents`."""
        tail = prompts.chat_tail(think=self.enable_think, closed=prompts.NO_THINK_V3)
        if self.field == "contents":
            return [prompts.one_turn(text, tail, self.gap) for text in self.contents]
        if len(self.messages) == 1 and self.messages[0].role == "user":
            return [prompts.one_turn(self.messages[0].content, tail, self.gap)]
        return [templated([message.turn() for message in self.messages], tail, "messages", self.gap)]

    def wanted_grammar(self) -> Grammar | None:
        """See FormatFields; a thought comes first and is free."""
        wanted = super().wanted_grammar()
        return after_thought(wanted) if wanted is not None and self.enable_think else wanted


def templated(turns: list[Turn], tail: str, field: str, gap: str) -> str:
    """A conversation with an open answer. Raises InvalidRequest naming `field` when nobody says anything."""
    prompt = prompts.conversation(turns, tail, gap)
    if prompt == tail:
        raise InvalidRequest(f"Empty prompt: no text in {field}", param=field)
    return prompt


async def completions(context: RequestContext) -> Reply:
    """POST /v1/chat/completions with `contents`: complete each text."""
    if context.body.get("contents") is None and context.body.get("text_list") is not None:
        raise InvalidRequest(
            "this path takes contents; for text_list, the form of a translation, the URL is /translate/v1/batch-translate",
            param="text_list",
        )
    return await reply_to(context, V1Body, NATIVE_ID)


async def completions_v2(context: RequestContext) -> Reply:
    """POST /v2/chat/completions: the same in the continuous batch, with another sampler."""
    return await reply_to(context, V2Body, NATIVE_ID)


async def completions_v3(context: RequestContext) -> Reply:
    """POST /v3/chat/completions: chat, templated here."""
    return await reply_to(context, V3Body, V3_ID)


async def reply_to(context: RequestContext, kind: type[PromptsBody], answer_id: str, object_name: str = COMPLETION) -> Reply:
    """Check the body as `kind` and answer with a stream or a document, as it asks."""
    body = validate(kind, context.body)
    request = await context.app.to_request(context, body)
    num_rows = len(request.prompts)
    if body.stream:
        return await context.app.stream(context, request, ChunkFormatter(num_rows, body.chunk_size).feed)
    return await context.app.document(context, request, DocumentFormatter(answer_id, body.model, num_rows, object_name).feed)


def usage_of(finishes: list[Finish]) -> dict[str, Any]:
    """Token counts over all rows; those taken from the prefix cache are told when there are some."""
    prompt = sum(finish.prompt_tokens for finish in finishes)
    completion = sum(finish.completion_tokens for finish in finishes)
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    if cached := sum(finish.cached_tokens for finish in finishes):
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage


class DocumentFormatter:
    """Collects the events of one request into a chat.completion, or the native document called `object_name`."""

    def __init__(self, answer_id: str, model: str, num_rows: int, object_name: str = COMPLETION):
        self.id = answer_id
        self.object_name = object_name
        self.model = model
        self.texts: list[list[str]] = [[] for _ in range(num_rows)]
        self.finishes: dict[int, Finish] = {}

    def feed(self, event: Event) -> bytes | RwkvBatchError | None:
        """Take one event; the last returns the document, or the error when the request or all of its rows failed."""
        if isinstance(event, Failure):
            return event.exception()
        for delta in event.deltas:
            self.texts[delta.index].append(delta.text)
        for finish in event.finishes:
            self.finishes[finish.index] = finish
        if len(self.finishes) < len(self.texts):
            return None
        errors = [finish.error for finish in self.finishes.values() if finish.error is not None]
        return EngineFailed(errors[0]) if len(errors) == len(self.texts) else dumps(self.body()).encode()

    def body(self) -> dict[str, Any]:
        """The finished answer; a row that ended with an error says so beside its text."""
        choices = []
        for index, parts in enumerate(self.texts):
            finish = self.finishes[index]
            choice: dict[str, Any] = {
                "index": index,
                "message": {"role": "assistant", "content": "".join(parts)},
                "finish_reason": finish.reason,
            }
            if finish.error is not None:
                choice["error"] = finish.error
            choices.append(choice)
        return {
            "id": self.id,
            "object": self.object_name,
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
            "usage": usage_of(list(self.finishes.values())),
        }


BEGIN, END = b'data: {"object": "chat.completion.chunk", "choices": [', b"]}\n\n"  # of a chunk


class ChunkFormatter:
    """Turns the events of one request into a stream of chat.completion.chunk.

    A chunk follows a step in which a row has at least `chunk_size` collected tokens or has ended; all such rows share it, rows
    with empty text are left out. Rows that ended then get a choice with empty content and their finish_reason; the last of
    these chunks carries the usage.
    """

    def __init__(self, num_rows: int, chunk_size: int):
        self.chunk_size = chunk_size
        self.texts: list[list[str]] = [[] for _ in range(num_rows)]
        self.num_tokens = [0] * num_rows
        self.finishes: dict[int, Finish] = {}

    def feed(self, event: Event) -> bytes | None:
        """Take one step's events; return the bytes to send, if any."""
        if isinstance(event, Text) and event.tokens >= self.chunk_size and not self.num_tokens[event.index]:  # most
            return b"".join((BEGIN, self._choice(event.index, event.text).encode(), END)) if event.text else None
        if isinstance(event, Failure):
            return sse(error_document(event.exception()))
        due = [finish.index for finish in event.finishes]
        for delta in event.deltas:
            self.texts[delta.index].append(delta.text)
            self.num_tokens[delta.index] += delta.tokens
            if self.num_tokens[delta.index] >= self.chunk_size:
                due.append(delta.index)
        if not due:
            return None
        sent = self._texts(sorted(set(due)))
        if event.finishes:
            sent += self._ends(event.finishes)
        return sent or None

    def summary(self) -> dict[str, Any]:
        """What the last chunk carries beside the ends of rows."""
        return {"usage": usage_of(list(self.finishes.values()))}

    def _texts(self, due: list[int]) -> bytes:
        choices = []
        for index in due:
            text = "".join(self.texts[index])
            self.texts[index].clear()
            self.num_tokens[index] = 0
            if text:
                choices.append(self._choice(index, text))
        if not choices:
            return b""
        return b"".join((BEGIN, ", ".join(choices).encode(), END))

    def _choice(self, index: int, text: str) -> str:
        # Put together by hand: this is done for each token of each stream, and takes an eighth of the time so.
        return f'{{"index": {index}, "delta": {{"content": {dumps(text)}}}}}'

    def _ends(self, finishes: list[Finish]) -> bytes:
        self.finishes.update((finish.index, finish) for finish in finishes)
        choices = [{"index": end.index, "delta": {"content": ""}, "finish_reason": end.reason} for end in finishes]
        chunk: dict[str, Any] = {"object": "chat.completion.chunk", "choices": choices}
        if len(self.finishes) < len(self.texts):
            return sse(chunk)
        chunk |= self.summary()
        broken = next((end.error for end in self.finishes.values() if end.reason in ("error", "cancelled")), None)
        if broken is None and all(end.reason in ("stop", "length") for end in self.finishes.values()):
            return sse(chunk) + DONE
        return sse(chunk) + sse(error_document(EngineFailed(broken or "a row was cancelled")))
