"""POST /v1/chat/completions with `contents`: raw prompts in, one choice for each, whole or as a stream."""

import time
from typing import Any

from routes.reply import DONE, Answer, Call, Plain, dumps, error_document, sse
from routes.schemas import ContentsBody, validate
from rwkv_batch.channel import Event, error_of
from rwkv_batch.errors import EngineFailed, InvalidRequest
from rwkv_batch.request import Failure, Finish

ID = "rwkv7-batch"


async def completions(call: Call) -> Plain | Answer:
    """Complete each text of `contents`."""
    if call.body.get("contents") is None and call.body.get("messages") is not None:
        raise InvalidRequest(
            "this path takes contents, a list of raw prompts; messages (the OpenAI form) will be served here later",
            param="messages",
        )
    body = validate(ContentsBody, call.body)
    request = await call.site.to_request(call, body)
    if body.stream:
        return await call.site.stream(call, request, Chunks(len(request.prompts), body.chunk_size).feed)
    return await call.site.document(call, request, Document(ID, body.model, len(request.prompts)).feed)


def usage_of(finishes: list[Finish]) -> dict[str, int]:
    """Token counts over all rows."""
    prompt = sum(finish.prompt_tokens for finish in finishes)
    completion = sum(finish.completion_tokens for finish in finishes)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Document:
    """Collects the events of one request into a chat.completion."""

    def __init__(self, answer_id: str, model: str, num_rows: int):
        self.id = answer_id
        self.model = model
        self.texts: list[list[str]] = [[] for _ in range(num_rows)]
        self.finishes: dict[int, Finish] = {}

    def feed(self, event: Event) -> bytes | None:
        """Take one event; the last returns the document, or the error body when the request or all of its rows failed."""
        if isinstance(event, Failure):
            return dumps(error_document(error_of(event))).encode()
        for delta in event.deltas:
            self.texts[delta.index].append(delta.text)
        for finish in event.finishes:
            self.finishes[finish.index] = finish
        if len(self.finishes) < len(self.texts):
            return None
        return dumps(self.body()).encode()

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
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
            "usage": usage_of(list(self.finishes.values())),
        }


class Chunks:
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
        if isinstance(event, Failure):
            return sse(error_document(error_of(event)))
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

    def _texts(self, due: list[int]) -> bytes:
        choices = []
        for index in due:
            text = "".join(self.texts[index])
            self.texts[index].clear()
            self.num_tokens[index] = 0
            if text:
                choices.append({"index": index, "delta": {"content": text}})
        return sse({"object": "chat.completion.chunk", "choices": choices}) if choices else b""

    def _ends(self, finishes: list[Finish]) -> bytes:
        self.finishes.update((finish.index, finish) for finish in finishes)
        choices = [{"index": end.index, "delta": {"content": ""}, "finish_reason": end.reason} for end in finishes]
        chunk: dict[str, Any] = {"object": "chat.completion.chunk", "choices": choices}
        if len(self.finishes) < len(self.texts):
            return sse(chunk)
        chunk["usage"] = usage_of(list(self.finishes.values()))
        broken = next((end.error for end in self.finishes.values() if end.reason in ("error", "cancelled")), None)
        if broken is None and all(end.reason in ("stop", "length") for end in self.finishes.values()):
            return sse(chunk) + DONE
        return sse(chunk) + sse(error_document(EngineFailed(broken or "a row was cancelled")))
