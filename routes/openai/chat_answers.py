"""From the engine's events to the answers of chats."""

from typing import Any

from routes.http.context import RequestContext
from routes.openai.answers import Formatter
from routes.openai.reasoning import ReasoningParser
from routes.openai.schemas import ChatBody
from rwkv_batch.request import Delta, Finish, Request, TokenLogprob

THINK_TAG = "<think"  # what the prompt of a thinking chat ends in


class ChatFormatter(Formatter):
    """chat.completion and chat.completion.chunk."""

    prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, context: RequestContext, body: ChatBody, request: Request):
        super().__init__(context, body, request)
        self.num_top = body.num_logprobs
        self.thoughts = [ReasoningParser(body.thought_begun) if body.splits else None for _ in range(self.num_choices)]
        raw = body.how_to_think != "fast" and not body.splits
        self.raw_start = THINK_TAG + (">" + body.thought_begun if body.thought_begun else "") if raw else ""
        self.splits = body.splits
        self.hides = body.splits and body.thought_shown == "hidden"
        self.contents: list[list[str]] = [[self.raw_start] for _ in range(self.num_choices)]
        self.reasonings: list[list[str]] = [[] for _ in range(self.num_choices)]
        self.logprobs: list[list[dict[str, Any]]] = [[] for _ in range(self.num_choices)]

    def take(self, delta: Delta) -> None:
        """See Formatter."""
        thought, text, logprobs = self._split(delta)
        self.reasonings[delta.index].append(thought)
        self.contents[delta.index].append(text)
        self.logprobs[delta.index] += self._described(logprobs)

    def choice(self, index: int) -> dict[str, Any]:
        """See Formatter."""
        message: dict[str, Any] = {"role": "assistant"}
        if self.splits and not self.hides:
            message["reasoning_content"] = "".join(self.reasonings[index]) + self.thoughts[index].finish()
        return {
            "index": index,
            "message": {**message, "content": "".join(self.contents[index]), "refusal": None},
            "logprobs": None if self.num_top is None else {"content": self.logprobs[index], "refusal": None},
            "finish_reason": self.finishes[index].reason,
        }

    def first_chunk(self, index: int) -> str:
        """The role."""
        return self._chunk(index, {"role": "assistant", "content": self.raw_start, "refusal": None})

    def delta_chunk(self, delta: Delta) -> str:
        """See Formatter."""
        thought, text, tokens = self._split(delta)
        logprobs = None
        if self.num_top is not None and tokens:
            logprobs = {"content": self._described(tokens), "refusal": None}
        if not (thought or text or logprobs or self.tells_usage_often):
            return ""
        added = {"reasoning_content": thought} if thought else {}
        return self._chunk(delta.index, added | ({"content": text} if text or not thought else {}), logprobs)

    def end_chunk(self, finish: Finish) -> str:
        """The reason, after what was held back."""
        rest = ""
        if self.splits and not self.hides:
            thought = self.thoughts[finish.index].finish()
            rest = self._chunk(finish.index, {"reasoning_content": thought}) if thought else ""
        return rest + self._chunk(finish.index, {}, reason=finish.reason)

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> str:
        return self.chunk({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})

    def _split(self, delta: Delta) -> tuple[str, str, list[TokenLogprob] | None]:
        """What a piece adds to the thought and to the answer, and its log-probabilities; counts the thought's tokens."""
        thought = self.thoughts[delta.index]
        if thought is None:
            return "", delta.text, delta.logprobs
        began_inside = thought.thinking
        if began_inside:
            self.num_reasoning += delta.tokens
        inside, answer = thought.feed(delta.text)
        return ("", answer, None if began_inside else delta.logprobs) if self.hides else (inside, answer, delta.logprobs)

    def _described(self, tokens: list[TokenLogprob] | None) -> list[dict[str, Any]]:
        """The tokens that are visible: a stop id is not."""
        describe = self.vocabulary.described
        return [
            {**describe(token.id, token.logprob), "top_logprobs": [describe(*top) for top in token.top]}
            for token in tokens or ()
            if token.id not in self.hidden
        ]
