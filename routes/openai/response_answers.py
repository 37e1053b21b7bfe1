"""From the engine's events to the documents and events of the Responses API."""

import time
from typing import Any, Literal

from routes.http.context import RequestContext
from routes.http.replies import dumps, error_document
from routes.openai.answers import Formatter
from routes.openai.calls import GatheredReply
from routes.openai.response_body import ResponseBody
from routes.openai.response_items import Events, OutputItem
from routes.openai.schemas import NO_LIMIT
from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.request import Delta, Event, Failure, Request
from rwkv_batch.text.reasoning import ReasoningParser
from rwkv_batch.text.tool_calls import CallArguments, CallBegan, CallEnded, Piece, Text


class ResponseFormatter(Formatter):
    """A response, whole or as events."""

    def __init__(self, context: RequestContext, body: ResponseBody, request: Request):
        super().__init__(context, body, request)
        self.body = body
        self.items: list[OutputItem] = []
        self.thought = ReasoningParser(body.thought_begun) if body.thinks else None
        self.reply = GatheredReply(body, opened=body.opens_call)
        self._num_events = 0

    # --- what the reply brings ---

    def take(self, delta: Delta) -> None:
        """See Formatter."""
        self._add(delta)

    def _add(self, delta: Delta) -> bytes:
        """Keep a piece and return its events."""
        thought, text = "", delta.text
        if self.thought is not None:
            self.num_reasoning += delta.tokens if self.thought.thinking else 0
            thought, text = self.thought.feed(text)
        return self._write("reasoning", thought) + b"".join(map(self._take_piece, self.reply.feed(text)))

    def _take_piece(self, piece: Piece) -> bytes:
        match piece:
            case Text(text):  # the blank that follows `Assistant:` is no part of it
                return self._write("message", text if self._open("message") and self.items[-1].parts else text.lstrip())
            case CallBegan(place, _):
                return self._close() + self._begin(OutputItem.of_call(self.reply.calls[place]))
            case CallArguments(_, text):
                return self._told(self.items[-1].add_arguments(text))
            case CallEnded(_):
                return self._close()

    def _write(self, kind: Literal["reasoning", "message"], text: str) -> bytes:
        """Add to the open item of this kind, or begin one."""
        if not text:
            return b""
        begun = b"" if self._open(kind) else self._close() + self._begin(OutputItem.of_text(kind))
        return begun + self._told(self.items[-1].add(text))

    def _open(self, kind: str) -> bool:
        """Whether an item of this kind is being written."""
        return bool(self.items) and (self.items[-1].kind, self.items[-1].status) == (kind, "in_progress")

    def _begin(self, item: OutputItem) -> bytes:
        self.items.append(item)
        return self._told(item.begin())

    def _close(self, status: Literal["completed", "incomplete"] = "completed") -> bytes:
        """End the item that is being written."""
        if not self.items or self.items[-1].status != "in_progress":
            return b""
        return self._told(self.items[-1].end(status))

    def _finish(self) -> bytes:
        """Write what was held back, and end the last item; there is one at least."""
        held = self._write("reasoning", self.thought.finish()) if self.thought is not None else b""
        held += b"".join(map(self._take_piece, self.reply.finish()))
        if not self.items:
            held += self._begin(OutputItem.of_text("message"))
        return held + self._close("completed" if self.finishes[0].reason == "stop" else "incomplete")

    # --- documents and events ---

    def finished(self) -> dict[str, Any]:
        """The response when it has ended."""
        self._finish()
        return self._whole()

    def _whole(self) -> dict[str, Any]:
        ended = self.finishes[0].reason == "stop"
        return self._response("completed" if ended else "incomplete", [item.document() for item in self.items])

    def chunks(self, event: Event) -> bytes | None:
        """Take one event; return the events of the Responses API that it becomes."""
        if isinstance(event, Failure):
            return self._failed(event.exception())
        out = []
        if not self._began:
            self._began = True
            for name in ("response.created", "response.in_progress"):
                out.append(self._event(name, response=self._response("in_progress", [])))
            if self.thought is None and not self.body.toolbox:  # then a message is all that can come
                out.append(self._begin(OutputItem.of_text("message")))
        for delta in event.deltas:
            self.num_tokens += delta.tokens
            out.append(self._add(delta))
        for finish in event.finishes:
            self._note(finish)
            out.append(self._end() if self.error is None else self._failed(self.error))
        return b"".join(out) or None

    def _end(self) -> bytes:
        rest, response = self._finish(), self._whole()
        return rest + self._event(f"response.{response['status']}", response=response)

    def _failed(self, error: RwkvBatchError) -> bytes:
        return self._event("error", **error_document(error, form="openai"))

    def _told(self, events: Events) -> bytes:
        """Events about the last item, nothing where no stream was asked for."""
        if not self._began:
            return b""
        place = len(self.items) - 1
        return b"".join(self._event(f"response.{name}", output_index=place, **fields) for name, fields in events)

    def _event(self, name: str, **more: Any) -> bytes:
        data = dumps({"type": name, "sequence_number": self._num_events, **more})
        self._num_events += 1
        return f"event: {name}\ndata: {data}\n\n".encode()

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
            "parallel_tool_calls": body.toolbox.limit is None,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": body.store,
            "temperature": body.temperature,
            "text": body.text.told(),
            "tool_choice": body.told_choice,
            "tools": body.told_tools,
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
