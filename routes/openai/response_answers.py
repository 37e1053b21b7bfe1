"""From the engine's events to the documents and events of the Responses API."""

import time
from typing import Any

from routes.http.context import RequestContext
from routes.http.replies import dumps, error_document
from routes.openai.answers import Formatter, new_id
from routes.openai.response_body import ResponseBody
from routes.openai.schemas import NO_LIMIT
from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.request import Delta, Event, Failure, Request


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
            "text": body.text.told(),
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
