"""From the engine's events to llama.cpp's documents and events."""

import json
from typing import Any

import msgspec

from routes.http.context import RequestContext
from routes.http.replies import error_document
from routes.llamacpp.bounds import Bounds
from routes.llamacpp.schemas import LlamaBody, LlamaCompletion
from routes.openai.answers import CompletionFormatter
from routes.timed import Timings
from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.request import Delta, Event, Failure, Finish, Progress, Request
from rwkv_batch.text.prompts import FIM_MARK

compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # an editor's pattern has no place for blanks


class LlamaFormatter(CompletionFormatter):
    """A completion in llama.cpp's form; several come as a list."""

    def __init__(self, context: RequestContext, body: LlamaCompletion, request: Request, sent: LlamaBody):
        super().__init__(context, body, request)
        self.sent = sent
        self.timings = Timings(context.began)
        self.context_tokens = context.config.max_prompt_tokens
        self.counts = [0] * self.num_choices
        self.has_newline = [False] * self.num_choices
        self.context = context
        self.bounds = Bounds(sent.n_indent, sent.t_max_predict_ms / 1e3) if self.num_choices == 1 else None
        self._over = False  # the editor wants no more

    def _bounded(self, event: Event) -> Event | None:
        """An event, up to where the editor wants no more; there the rest is cancelled, and nothing follows."""
        if self._over:
            return None
        self.timings.note(event)
        if isinstance(event, Failure):
            return event
        deltas = []
        for delta in event.deltas:
            self.counts[delta.index] += delta.tokens
            text = delta.text
            if self.bounds is not None:
                text, self._over = self.bounds.feed(delta.text, self.timings.generation)
            self.has_newline[delta.index] |= "\n" in text
            deltas.append(msgspec.structs.replace(delta, text=text))
            if self._over:
                break
        if not self._over:
            return Progress(event.request_id, deltas, event.finishes, event.scores)
        if not event.finishes and self.context.ticket is not None:
            self.context.ticket.cancel()
        return Progress(event.request_id, deltas, [Finish(0, "length", self.num_prompt, self.counts[0])], event.scores)

    # --- a document ---

    def document(self, event: Event) -> Any:
        """See Formatter."""
        wanted = self._bounded(event)
        return super().document(wanted) if wanted is not None else None

    def _written(self) -> bytes:
        results = [self._result(self.finishes[index], "".join(self.texts[index])) for index in range(self.num_choices)]
        return compact(results if len(results) > 1 else results[0]).encode()

    # --- a stream ---

    def chunks(self, event: Event) -> bytes | None:
        """Take one event; return what is sent for it. Nothing but the last result says that it ends."""
        event = self._bounded(event)
        if event is None:
            return None
        if isinstance(event, Failure):
            return self._failed(event.exception()).encode()
        out = [self.delta_chunk(delta) for delta in event.deltas]
        for finish in event.finishes:
            self._note(finish)
            out.append(self.end_chunk(finish))
        if len(self.finishes) == self.num_choices and self.error is not None:
            out.append(self._failed(self.error))
        return "".join(out).encode() or None

    def delta_chunk(self, delta: Delta) -> str:
        """See Formatter."""
        self.num_tokens += delta.tokens
        if not delta.text or self.sent.warms_up:
            return ""
        num_prompt = len(self.request.prompts[delta.index // self.num_copies])
        piece = {"index": delta.index, "content": delta.text, "tokens": [], "stop": False, "id_slot": -1}
        return self._event({**piece, "tokens_predicted": self.counts[delta.index], "tokens_evaluated": num_prompt})

    def end_chunk(self, finish: Finish) -> str:
        """See Formatter."""
        return self._event(self._result(finish, "")) if finish.reason in ("stop", "length") else ""

    def _event(self, piece: dict[str, Any]) -> str:
        return f"data: {compact(piece)}\n\n"

    def _failed(self, error: RwkvBatchError) -> str:
        return self._event(error_document(error, form="openai"))

    # --- both ---

    def _result(self, finish: Finish, text: str) -> dict[str, Any]:
        """The end of a choice, with its text where that was not sent yet."""
        warms_up = self.sent.warms_up
        num_written = 0 if warms_up else finish.completion_tokens
        by_word = finish.stop_text if finish.reason == "stop" and finish.stop_text != FIM_MARK else None
        result = {
            "index": finish.index,
            "content": "" if warms_up else text,
            "tokens": [],
            "id_slot": -1,
            "stop": True,
            "model": self.head["model"],
            "tokens_predicted": num_written,
            "tokens_evaluated": finish.prompt_tokens,
            "generation_settings": self._settings(),
            "has_new_line": self.has_newline[finish.index],
            "truncated": False,
            "stop_type": "limit" if finish.reason == "length" or warms_up else "word" if by_word else "eos",
            "stopping_word": by_word or "",
            "tokens_cached": finish.prompt_tokens + num_written,
            "timings": self._timings(finish, num_written),
        }
        return result if not self.sent.response_fields else picked(result, self.sent.response_fields)

    def _settings(self) -> dict[str, Any]:
        sampling = self.request.sampling
        return {
            "n_ctx": self.context_tokens,
            "n_predict": self.sent.n_predict,
            "seed": sampling.seed if sampling.seed is not None else -1,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "stop": [text.decode(errors="replace") for text in self.request.stop_texts],
            "ignore_eos": sampling.ignore_eos,
            "stream": self.sent.in_openai_form().get("stream") is True,
        }

    def _timings(self, finish: Finish, num_written: int) -> dict[str, Any]:
        """Counts and milliseconds of the two parts; tokens from the cache were not read."""
        num_read = finish.prompt_tokens - finish.cached_tokens
        return {
            "cache_n": finish.cached_tokens,
            **part("prompt", num_read, self.timings.prompt),
            **part("predicted", num_written, self.timings.generation),
        }


def part(name: str, count: int, seconds: float) -> dict[str, Any]:
    """How long some tokens took."""
    return {
        f"{name}_n": count,
        f"{name}_ms": round(seconds * 1e3, 3),
        f"{name}_per_token_ms": round(seconds * 1e3 / count, 3) if count else 0.0,
        f"{name}_per_second": round(count / seconds, 3) if seconds > 0 else 0.0,
    }


def picked(result: dict[str, Any], fields: list[str]) -> dict[str, Any]:
    """Only these fields; `a/b` is b inside of a, under that name."""
    found = {}
    for path in fields:
        value: Any = result
        for key in path.split("/"):
            if not isinstance(value, dict) or key not in value:
                break
            value = value[key]
        else:
            found[path] = value
    return found
