"""From the engine's events to OpenAI's documents and chunks."""

import codecs
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from routes.http.context import RequestContext
from routes.http.replies import DONE, dumps, error_document, sse
from routes.openai.schemas import CompletionBody, GenerationBody, split_ends
from rwkv_batch.errors import EngineFailed, RwkvBatchError
from rwkv_batch.request import Delta, Event, Failure, Finish, PromptScore, Request, TokenLogprob
from rwkv_batch.text.tokenizer import token_name

WRITTEN_LATER = 1000  # tokens with log-probabilities: a document with more is written outside of the client's thread


class Vocabulary:
    """What tokens are called in answers."""

    def __init__(self, token_bytes: Sequence[bytes | None]):
        self.token_bytes = token_bytes

    def name(self, token: int) -> str:
        """The token's name."""
        return token_name(self.token_bytes[token])

    def described(self, token: int, logprob: float) -> dict[str, Any]:
        """One token of a chat's log-probabilities."""
        return {"token": self.name(token), "logprob": logprob, "bytes": list(self.token_bytes[token]) if token else None}


class Formatter:
    """What the answers to one request share: its events, its counts, and how it goes out, as a document or as chunks.

    error  why the whole request failed, when it did
    """

    prefix = ""
    object_name = ""
    chunk_name = ""

    def __init__(self, context: RequestContext, body: GenerationBody, request: Request):
        info = context.model.info
        self.num_choices = request.num_rows
        self.num_copies = request.copies
        self.hidden = {0, *request.stop_ids}
        self.vocabulary = Vocabulary(context.model.tokenizer.token_bytes)
        self.finishes: dict[int, Finish] = {}
        self.error: RwkvBatchError | None = None
        self.tells_usage = body.stream_options.include_usage
        self.tells_usage_often = self.tells_usage and body.stream_options.continuous_usage_stats
        self.num_tokens = 0
        self.num_reported = 0  # tokens with log-probabilities
        self.num_reasoning = 0
        self.num_prompt = sum(map(len, request.prompts))
        self.head = {
            "id": f"{self.prefix}-{context.id}",
            "object": self.object_name,
            "created": int(time.time()),
            "model": context.model_name,
            "system_fingerprint": f"rwkv-{info.fingerprint[:12] or 'none'}" if info else None,
        }
        self._chunk_head = "data: " + dumps({**self.head, "object": self.chunk_name})[:-1] + ', "choices": '
        self._began = False

    # --- a document ---

    def document(self, event: Event) -> bytes | Callable[[], bytes] | RwkvBatchError | None:
        """Take one event; the last returns the document, what writes a long one, or the error that the request failed with."""
        self._take(event)
        if not isinstance(event, Failure) and len(self.finishes) < self.num_choices:
            return None
        if self.error is not None:
            return self.error
        return self._written if self.num_reported > WRITTEN_LATER else self._written()

    def _written(self) -> bytes:
        return dumps(self.finished()).encode()

    def finished(self) -> dict[str, Any]:
        """The document."""
        choices = [self.choice(index) for index in range(self.num_choices)]
        return {**self.head, "choices": choices, "usage": self.usage()}

    def _take(self, event: Event) -> None:
        """Keep what an event brings."""
        if isinstance(event, Failure):
            self.error = event.exception()
            return
        for scored in event.scores:
            self.num_reported += len(scored.tokens)
            self.take_scores(scored)
        for delta in event.deltas:
            self.num_tokens += delta.tokens
            self.num_reported += len(delta.logprobs or ())
            self.take(delta)
        for finish in event.finishes:
            self._note(finish)

    def _note(self, finish: Finish) -> None:
        self.finishes[finish.index] = finish
        if finish.reason not in ("stop", "length") and self.error is None:
            self.error = EngineFailed(f"choice {finish.index}: {finish.error or 'it was cancelled'}")

    def take_scores(self, scored: PromptScore) -> None:
        """Keep log-probabilities of a prompt."""

    def take(self, delta: Delta) -> None:
        """Keep a piece of a choice."""
        raise NotImplementedError

    def choice(self, index: int) -> dict[str, Any]:
        """A finished choice."""
        raise NotImplementedError

    def usage(self) -> dict[str, Any]:
        """Counts over all choices, which have ended; a prompt with several choices counts once."""
        completion = sum(finish.completion_tokens for finish in self.finishes.values())
        prompt = cached = 0
        for first in range(0, self.num_choices, self.num_copies):
            copies = range(first, first + self.num_copies)  # all but one share what that one computed
            prompt += self.finishes[first].prompt_tokens
            cached += min(self.finishes[index].cached_tokens for index in copies)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning},
        }

    def _usage_so_far(self) -> dict[str, Any]:
        completion = self.num_tokens
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": completion,
            "total_tokens": self.num_prompt + completion,
        }

    # --- a stream ---

    def chunks(self, event: Event) -> bytes | None:
        """Take one event; return the bytes to send, if any. The usage is told when asked for, [DONE] after success only."""
        if isinstance(event, Failure):
            return sse(error_document(event.exception(), form="openai"))
        out = []
        for scored in event.scores:
            self.take_scores(scored)
        if not self._began:
            self._began = True
            out = [self.first_chunk(index) for index in range(self.num_choices)]
        for scored in event.scores:
            out.append(self.scored_chunk(scored.index))
        for delta in event.deltas:
            self.num_tokens += delta.tokens
            out.append(self.delta_chunk(delta))
        for finish in event.finishes:
            self._note(finish)
            if finish.reason in ("stop", "length"):
                out.append(self.end_chunk(finish))
        if len(self.finishes) == self.num_choices:
            out.append(self._last_chunks())
        return "".join(out).encode() or None

    def _last_chunks(self) -> str:
        if self.error is not None:
            return sse(error_document(self.error, form="openai")).decode()
        usage = f'{self._chunk_head}[], "usage": {dumps(self.usage())}}}\n\n' if self.tells_usage else ""
        return usage + DONE.decode()

    def chunk(self, choice: dict[str, Any]) -> str:
        """One event with one choice."""
        usage = ""
        if self.tells_usage:
            usage = f', "usage": {dumps(self._usage_so_far()) if self.tells_usage_often else "null"}'
        return f"{self._chunk_head}[{dumps(choice)}]{usage}}}\n\n"

    def first_chunk(self, index: int) -> str:
        """What a choice begins with."""
        return ""

    def scored_chunk(self, index: int) -> str:
        """What to send when more of a choice's prompt was scored."""
        return ""

    def delta_chunk(self, delta: Delta) -> str:
        """A piece of a choice, "" when there is nothing to show."""
        raise NotImplementedError

    def end_chunk(self, finish: Finish) -> str:
        """The end of a choice."""
        raise NotImplementedError


class CompletionFormatter(Formatter):
    """text_completion, whole and as chunks. All sampled tokens have log-probabilities, the end token too."""

    prefix = "cmpl"
    object_name = chunk_name = "text_completion"

    def __init__(self, context: RequestContext, body: CompletionBody, request: Request):
        super().__init__(context, body, request)
        self.request = request
        self.wants_logprobs = body.logprobs is not None
        self.scored = request.prompt_logprobs is not None
        self.echoes = [self._echo(prompt, raw=body.suffix is None) for prompt in body.prompt] if body.echo else []
        self.texts: list[list[str]] = [[] for _ in range(self.num_choices)]
        self.logprobs = [Logprobs(self.vocabulary) for _ in range(self.num_choices)]
        self.scores: list[list[TokenLogprob]] = [[] for _ in range(self.num_choices)]

    def take_scores(self, scored: PromptScore) -> None:
        """Keep log-probabilities of a prompt."""
        self.scores[scored.index] += scored.tokens

    def take(self, delta: Delta) -> None:
        """See Formatter."""
        self.texts[delta.index].append(delta.text)
        if delta.logprobs:
            self.logprobs[delta.index].pending += delta.logprobs

    def choice(self, index: int) -> dict[str, Any]:
        """See Formatter."""
        logprobs, text = self.logprobs[index], "".join(self.texts[index])
        if self.echoes:
            text = self.echoes[index // self.num_copies] + text
            if self.scored:
                logprobs.add_prompt(self.request.prompts[index // self.num_copies], self.scores[index])
        logprobs.add(logprobs.pending)
        return self._choice(index, text, logprobs.take() if self.wants_logprobs else None, self.finishes[index].reason)

    def first_chunk(self, index: int) -> str:
        """The prompt, when it is wanted and not to be scored."""
        if not self.echoes or self.scored:
            return ""
        return self.chunk(self._choice(index, self.echoes[index // self.num_copies]))

    def scored_chunk(self, index: int) -> str:
        """The prompt, when all of it was scored."""
        prompt, scores = self.request.prompts[index // self.num_copies], self.scores[index]
        if len(scores) < len(prompt) - 1:
            return ""
        logprobs = self.logprobs[index]
        logprobs.add_prompt(prompt, scores)
        return self.chunk(self._choice(index, self.echoes[index // self.num_copies], logprobs.take()))

    def delta_chunk(self, delta: Delta) -> str:
        """See Formatter."""
        logprobs = None
        if self.wants_logprobs and delta.logprobs:
            self.logprobs[delta.index].add(delta.logprobs)
            logprobs = self.logprobs[delta.index].take()
        if not (delta.text or logprobs or self.tells_usage_often):
            return ""
        return self.chunk(self._choice(delta.index, delta.text, logprobs))

    def end_chunk(self, finish: Finish) -> str:
        """See Formatter."""
        return self.chunk(self._choice(finish.index, "", None, finish.reason))

    def _choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}

    def _echo(self, prompt: str | list[int], *, raw: bool) -> str:
        if isinstance(prompt, str):
            return split_ends(prompt)[1] if raw else prompt  # the text of end tokens is empty
        return b"".join(self.vocabulary.token_bytes[token] for token in prompt).decode(errors="replace")


class Logprobs:
    """The older form of log-probabilities, in which places are told by characters of the text."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.pending: list[TokenLogprob] = []
        self._offset = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._parts: dict[str, list[Any]] = self._empty()

    def add_prompt(self, prompt: list[int], scores: list[TokenLogprob]) -> None:
        """Add a prompt; its first token follows nothing and so has no log-probability."""
        self._add(prompt[0], None, None)
        self.add(scores)

    def add(self, tokens: list[TokenLogprob]) -> None:
        """Add tokens. Among the most likely ones the token itself is always found, with the same number."""
        for token in tokens:
            top = {self.vocabulary.name(other): logprob for other, logprob in token.top}
            self._add(token.id, token.logprob, {**top, self.vocabulary.name(token.id): token.logprob})

    def take(self) -> dict[str, list[Any]]:
        """Return what was added since last time."""
        parts, self._parts = self._parts, self._empty()
        return parts

    def _add(self, token: int, logprob: float | None, top: dict[str, float] | None) -> None:
        parts = self._parts
        parts["tokens"].append(self.vocabulary.name(token))
        parts["token_logprobs"].append(logprob)
        parts["top_logprobs"].append(top)
        parts["text_offset"].append(self._offset)
        self._offset += len(self._decode(self.vocabulary.token_bytes[token]))

    def _empty(self) -> dict[str, list[Any]]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def new_id(prefix: str) -> str:
    """An id that nobody has."""
    return f"{prefix}_{secrets.token_hex(12)}"
