"""From the engine's events to Anthropic's messages and events."""

from typing import Any

from routes.anthropic.schemas import MessagesChat
from routes.http.context import RequestContext
from routes.http.replies import dumps, error_document
from routes.openai.calls import GatheredCall
from routes.openai.chat_answers import ChatFormatter
from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.request import Delta, Event, Failure, Finish, Request
from rwkv_batch.text.tool_calls import CallArguments, CallBegan, CallEnded, Piece, Text

EMPTY_THOUGHT = {"type": "thinking", "thinking": "", "signature": ""}
EMPTY_TEXT = {"type": "text", "text": ""}


class MessageFormatter(ChatFormatter):
    """A message, whole or as events."""

    def __init__(self, context: RequestContext, body: MessagesChat, request: Request):
        super().__init__(context, body, request)
        self.stop_sequences = frozenset(stop for stop in body.stop if isinstance(stop, str))
        self.message = {"id": f"msg_{context.id}", "type": "message", "role": "assistant", "model": context.model_name}
        self.signature = context.id  # clients send it back with the thought, which is left out then
        self._open = ""  # kind of the block that is being written
        self._num_blocks = 0

    # --- a document ---

    def finished(self) -> dict[str, Any]:
        """The message."""
        message, calls = self.choice(0)["message"], self.replies[0].calls
        content = []
        if thought := message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": thought, "signature": self.signature})
        if message["content"] or not (content or calls):
            content.append({"type": "text", "text": message["content"] or ""})
        content += [{**begun(call), "input": call.as_object} for call in calls]
        return {**self.message, "content": content, **self._end(), "usage": self._counts()}

    def _end(self) -> dict[str, Any]:
        """Why the message ended."""
        finish = self.finishes[0]
        if finish.reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if finish.stop_text in self.stop_sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_text}
        if self.replies[0].calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _counts(self) -> dict[str, Any]:
        """The usage, in which cached tokens are none of the input's."""
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return usage_of(usage["prompt_tokens"] - cached, usage["completion_tokens"], cached, self.num_reasoning)

    # --- a stream ---

    def chunks(self, event: Event) -> bytes | None:
        """Take one event; return the events that it becomes."""
        if isinstance(event, Failure):
            return self._failed(event.exception()).encode()
        out = []
        if not self._began:
            self._began = True
            begun = {**self.message, "content": [], "stop_reason": None, "stop_sequence": None}
            out.append(named("message_start", message={**begun, "usage": usage_of(self.num_prompt, 0)}))
        for delta in event.deltas:
            self.num_tokens += delta.tokens
            out.append(self.delta_chunk(delta))
        for finish in event.finishes:
            self._note(finish)
            out.append(self.end_chunk(finish) if self.error is None else self._failed(self.error))
        return "".join(out).encode() or None

    def delta_chunk(self, delta: Delta) -> str:
        """See Formatter."""
        thought, text, _ = self._split(delta)
        return self._thought(thought) + self._pieces(self.replies[0].feed(text))

    def end_chunk(self, finish: Finish) -> str:
        """See Formatter."""
        rest = self._thought(self.thoughts[0].finish()) if self.splits and not self.hides else ""
        rest += self._pieces(self.replies[0].finish())
        empty = self._begin("text", EMPTY_TEXT) if self._num_blocks == 0 else ""
        end = named("message_delta", delta=self._end(), usage=self._counts())
        return rest + empty + self._close() + end + named("message_stop")

    def _thought(self, thought: str) -> str:
        return self._begin("thinking", EMPTY_THOUGHT) + self._delta("thinking_delta", thinking=thought) if thought else ""

    def _pieces(self, pieces: list[Piece]) -> str:
        """What pieces of the reply are in events; each call is a block."""
        out = []
        for piece in pieces:
            match piece:
                case Text(text):
                    out.append(self._begin("text", EMPTY_TEXT) + self._delta("text_delta", text=text))
                case CallBegan(place, _):
                    out.append(self._begin(f"call {place}", begun(self.replies[0].calls[place])))
                case CallArguments(_, text):
                    out.append(self._delta("input_json_delta", partial_json=text))
                case CallEnded():
                    out.append(self._close())
        return "".join(out)

    def _begin(self, kind: str, block: dict[str, Any]) -> str:
        """The start of a block, unless one of its kind is open; then the ping that clients have come to know."""
        if self._open == kind:
            return ""
        closed = self._close()
        self._open, self._num_blocks = kind, self._num_blocks + 1
        start = named("content_block_start", index=self._num_blocks - 1, content_block=block)
        return closed + start + (named("ping") if self._num_blocks == 1 else "")

    def _close(self) -> str:
        """The end of the open block."""
        if not self._open:
            return ""
        signed = self._delta("signature_delta", signature=self.signature) if self._open == "thinking" else ""
        self._open = ""
        return signed + named("content_block_stop", index=self._num_blocks - 1)

    def _delta(self, kind: str, **added: str) -> str:
        return named("content_block_delta", index=self._num_blocks - 1, delta={"type": kind, **added})

    def _failed(self, error: RwkvBatchError) -> str:
        return f"event: error\ndata: {dumps(error_document(error, 'anthropic'))}\n\n"


def begun(call: GatheredCall) -> dict[str, Any]:
    """A block of a call, without its arguments."""
    return {"type": "tool_use", "id": call.id.replace("call_", "toolu_", 1), "name": call.name, "input": {}}


def named(name: str, **fields: Any) -> str:
    """One event."""
    return f"event: {name}\ndata: {dumps({'type': name, **fields})}\n\n"


def usage_of(read: int, written: int, cached: int = 0, thought: int = 0) -> dict[str, Any]:
    """Anthropic's form of token counts."""
    return {
        "input_tokens": read,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": written,
        "output_tokens_details": {"thinking_tokens": thought},
        "service_tier": "standard",
    }
