"""From the engine's events to Ollama's documents and lines."""

from datetime import UTC, datetime
from typing import Any, ClassVar

from routes.http.context import RequestContext
from routes.http.replies import dumps, error_document
from routes.ollama.schemas import OllamaChat, OllamaCompletion
from routes.openai.answers import CompletionFormatter, Formatter
from routes.openai.chat_answers import ChatFormatter
from routes.timed import Timings
from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.request import Delta, Event, Failure, Request


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """A duration as Ollama tells it."""
    return round(seconds * 1e9)


def as_message(thought: str, text: str) -> dict[str, Any]:
    """A piece of an answer of /api/chat."""
    return {"message": {"role": "assistant", "content": text, **({"thinking": thought} if thought else {})}}


def as_response(thought: str, text: str) -> dict[str, Any]:
    """A piece of an answer of /api/generate."""
    return {"response": text, **({"thinking": thought} if thought else {})}


class Lines(Formatter):
    """What Ollama's answers share. As a stream they are a line for each piece and one with the figures, else all in one."""

    said: ClassVar[Any]  # as_message or as_response

    def __init__(self, context: RequestContext, body: Any, request: Request):
        super().__init__(context, body, request)
        self.timings = Timings(context.began)
        self.model = body.model

    def piece(self, delta: Delta) -> tuple[str, str]:
        """What a piece adds to the thought and to the answer."""
        raise NotImplementedError

    def rest(self) -> str:
        """What was held back of the thought, at the end."""
        return ""

    def whole(self) -> tuple[str, str]:
        """The thought and the answer."""
        raise NotImplementedError

    def document(self, event: Event) -> Any:
        """See Formatter."""
        self.timings.note(event)
        return super().document(event)

    def finished(self) -> dict[str, Any]:
        """The whole answer."""
        return self._line(*self.whole(), **self._end())

    def chunks(self, event: Event) -> bytes | None:
        """Take one event; return its lines, if any."""
        self.timings.note(event)
        if isinstance(event, Failure):
            return self._failed(event.exception()).encode()
        out = []
        for delta in event.deltas:
            self.num_tokens += delta.tokens
            thought, text = self.piece(delta)
            if thought or text:
                out.append(dumps(self._line(thought, text, done=False)) + "\n")
        for finish in event.finishes:
            self._note(finish)
            if self.error is not None:
                out.append(self._failed(self.error))
                continue
            if thought := self.rest():
                out.append(dumps(self._line(thought, "", done=False)) + "\n")
            out.append(dumps(self._line("", "", **self._end())) + "\n")
        return "".join(out).encode() or None

    def _line(self, thought: str, text: str, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "created_at": now(), **type(self).said(thought, text), **more}

    def _end(self) -> dict[str, Any]:
        usage = self.usage()
        return {
            "done": True,
            "done_reason": self.finishes[0].reason,
            "total_duration": nanoseconds(self.timings.total),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": nanoseconds(self.timings.prompt),
            "eval_count": usage["completion_tokens"],
            "eval_duration": nanoseconds(self.timings.generation),
        }

    def _failed(self, error: RwkvBatchError) -> str:
        return dumps(error_document(error)) + "\n"


class ChatLines(Lines, ChatFormatter):
    """/api/chat."""

    said = as_message

    def __init__(self, context: RequestContext, body: OllamaChat, request: Request):
        super().__init__(context, body, request)

    def piece(self, delta: Delta) -> tuple[str, str]:
        """See Lines."""
        return self._split(delta)[:2]

    def rest(self) -> str:
        """See Lines."""
        return self.thoughts[0].finish() if self.splits and not self.hides else ""

    def whole(self) -> tuple[str, str]:
        """See Lines."""
        message = self.choice(0)["message"]
        return message.get("reasoning_content") or "", message["content"] or ""


class GenerateLines(ChatLines):
    """/api/generate with a template."""

    said = as_response


class RawLines(Lines, CompletionFormatter):
    """/api/generate without one."""

    said = as_response

    def __init__(self, context: RequestContext, body: OllamaCompletion, request: Request):
        super().__init__(context, body, request)

    def piece(self, delta: Delta) -> tuple[str, str]:
        """See Lines."""
        return "", delta.text

    def whole(self) -> tuple[str, str]:
        """See Lines."""
        return "", "".join(self.texts[0])
