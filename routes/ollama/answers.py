"""From the engine's events to Ollama's documents and lines."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from routes.http.context import RequestContext
from routes.http.replies import dumps, error_document
from routes.ollama.schemas import OllamaChat, OllamaCompletion
from routes.openai.answers import CompletionFormatter, Formatter
from routes.openai.calls import GatheredCall
from routes.openai.chat_answers import ChatFormatter
from routes.timed import Timings
from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.request import Delta, Event, Failure, Request
from rwkv_batch.text.tool_calls import CallEnded, Piece, Text


class Said(NamedTuple):
    """A piece of an answer, or all of it."""

    thought: str = ""
    text: str = ""
    calls: tuple[GatheredCall, ...] = ()


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """A duration as Ollama tells it."""
    return round(seconds * 1e9)


def as_message(said: Said) -> dict[str, Any]:
    """A piece of an answer of /api/chat."""
    message: dict[str, Any] = {"role": "assistant", "content": said.text}
    if said.thought:
        message["thinking"] = said.thought
    if said.calls:
        message["tool_calls"] = [called(call, place) for place, call in enumerate(said.calls)]
    return {"message": message}


def as_response(said: Said) -> dict[str, Any]:
    """A piece of an answer of /api/generate."""
    return {"response": said.text, **({"thinking": said.thought} if said.thought else {})}


def called(call: GatheredCall, place: int) -> dict[str, Any]:
    """A call in Ollama's form, whose arguments are an object."""
    return {"id": call.id, "function": {"index": place, "name": call.name, "arguments": call.as_object}}


class Lines(Formatter):
    """What Ollama's answers share. As a stream they are a line for each piece and one with the figures, else all in one."""

    form: Callable[[Said], dict[str, Any]]  # as_message or as_response

    def __init__(self, context: RequestContext, body: Any, request: Request):
        super().__init__(context, body, request)
        self.timings = Timings(context.began)
        self.model = body.model

    def pieces(self, delta: Delta) -> list[Said]:
        """What an event's piece of the text brings."""
        raise NotImplementedError

    def rest(self) -> list[Said]:
        """What was held back, at the end."""
        return []

    def whole(self) -> Said:
        """All of it."""
        raise NotImplementedError

    def document(self, event: Event) -> Any:
        """See Formatter."""
        self.timings.note(event)
        return super().document(event)

    def finished(self) -> dict[str, Any]:
        """The whole answer."""
        return self._line(self.whole(), **self._end())

    def chunks(self, event: Event) -> bytes | None:
        """Take one event; return its lines, if any."""
        self.timings.note(event)
        if isinstance(event, Failure):
            return self._failed(event.exception()).encode()
        out = []
        for delta in event.deltas:
            self.num_tokens += delta.tokens
            out += [dumps(self._line(said, done=False)) + "\n" for said in self.pieces(delta)]
        for finish in event.finishes:
            self._note(finish)
            if self.error is not None:
                out.append(self._failed(self.error))
                continue
            out += [dumps(self._line(said, done=False)) + "\n" for said in self.rest()]
            out.append(dumps(self._line(Said(), **self._end())) + "\n")
        return "".join(out).encode() or None

    def _line(self, said: Said, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "created_at": now(), **type(self).form(said), **more}

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
    """/api/chat. A call comes whole; one that the tokens were too few for does not come."""

    form = as_message

    def __init__(self, context: RequestContext, body: OllamaChat, request: Request):
        super().__init__(context, body, request)

    def pieces(self, delta: Delta) -> list[Said]:
        """See Lines."""
        thought, text, _ = self._split(delta)
        return [*([Said(thought)] if thought else []), *self._said(self.replies[0].feed(text))]

    def rest(self) -> list[Said]:
        """See Lines."""
        thought = self.thoughts[0].finish() if self.splits and not self.hides else ""
        return [*([Said(thought)] if thought else []), *self._said(self.replies[0].finish())]

    def whole(self) -> Said:
        """See Lines."""
        message = self.choice(0)["message"]
        calls = tuple(call for call in self.replies[0].calls if call.ended)
        return Said(message.get("reasoning_content") or "", message["content"] or "", calls)

    def _said(self, pieces: list[Piece]) -> list[Said]:
        said = []
        for piece in pieces:
            match piece:
                case Text(text):
                    said.append(Said(text=text))
                case CallEnded(place):
                    said.append(Said(calls=(self.replies[0].calls[place],)))
        return said


class GenerateLines(ChatLines):
    """/api/generate with a template."""

    form = as_response


class RawLines(Lines, CompletionFormatter):
    """/api/generate without one."""

    form = as_response

    def __init__(self, context: RequestContext, body: OllamaCompletion, request: Request):
        super().__init__(context, body, request)

    def pieces(self, delta: Delta) -> list[Said]:
        """See Lines."""
        return [Said(text=delta.text)] if delta.text else []

    def whole(self) -> Said:
        """See Lines."""
        return Said(text="".join(self.texts[0]))
