"""From the engine's events to the answers of chats."""

from typing import Any

from routes.http.context import RequestContext
from routes.openai.answers import Formatter
from routes.openai.calls import GatheredCall, GatheredReply, in_message
from routes.openai.schemas import ChatBody
from rwkv_batch.request import Delta, Finish, Request, TokenLogprob
from rwkv_batch.text.reasoning import END, ReasoningParser
from rwkv_batch.text.tool_calls import CallArguments, CallBegan, CallEnded, Piece, Text

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
        self.has_functions = body.has_functions
        after = END if raw else ""
        self.replies = [GatheredReply(body, opened=body.opens_call, after=after) for _ in range(self.num_choices)]
        self.reasonings: list[list[str]] = [[] for _ in range(self.num_choices)]
        self.logprobs: list[list[dict[str, Any]]] = [[] for _ in range(self.num_choices)]

    def take(self, delta: Delta) -> None:
        """See Formatter."""
        thought, text, logprobs = self._split(delta)
        self.reasonings[delta.index].append(thought)
        self.replies[delta.index].feed(text)
        self.logprobs[delta.index] += self._described(logprobs)

    def choice(self, index: int) -> dict[str, Any]:
        """See Formatter."""
        reply = self.replies[index]
        reply.finish()
        message: dict[str, Any] = {"role": "assistant"}
        if self.splits and not self.hides:
            message["reasoning_content"] = "".join(self.reasonings[index]) + self.thoughts[index].finish()
        text = self.raw_start + reply.text
        message |= {"content": text or None if reply.calls else text, "refusal": None}
        if reply.calls and self.has_functions:
            message["function_call"] = in_message(reply.calls[0])["function"]
        elif reply.calls:
            message["tool_calls"] = [in_message(call) for call in reply.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": None if self.num_top is None else {"content": self.logprobs[index], "refusal": None},
            "finish_reason": self._reason(self.finishes[index]),
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
        deltas = [{"reasoning_content": thought}] if thought else []
        deltas += self._deltas(delta.index, self.replies[delta.index].feed(text))
        if not deltas and (logprobs or self.tells_usage_often):
            deltas = [{"content": ""}]
        if len(deltas) > 1 and deltas[0].keys() | deltas[1].keys() == {"reasoning_content", "content"}:
            deltas[:2] = [deltas[0] | deltas[1]]
        chunks = [self._chunk(delta.index, each, None if place else logprobs) for place, each in enumerate(deltas)]
        return "".join(chunks)

    def end_chunk(self, finish: Finish) -> str:
        """The reason, after what was held back."""
        rest = ""
        if self.splits and not self.hides:
            thought = self.thoughts[finish.index].finish()
            rest = self._chunk(finish.index, {"reasoning_content": thought}) if thought else ""
        for delta in self._deltas(finish.index, self.replies[finish.index].finish()):
            rest += self._chunk(finish.index, delta)
        return rest + self._chunk(finish.index, {}, reason=self._reason(finish))

    def _reason(self, finish: Finish) -> str:
        """Why a choice ended; a call counts unless the tokens were too few for all of it."""
        if finish.reason != "stop" or not self.replies[finish.index].calls:
            return finish.reason
        return "function_call" if self.has_functions else "tool_calls"

    def _deltas(self, index: int, pieces: list[Piece]) -> list[dict[str, Any]]:
        """What pieces of a reply are in chunks. A custom tool's input comes as a whole."""
        calls = self.replies[index].calls
        deltas = []
        for piece in pieces:
            match piece:
                case Text(text):
                    deltas.append({"content": text})
                case CallBegan(place, _) if not calls[place].custom:
                    began = GatheredCall(calls[place].name, custom=False, id=calls[place].id)
                    deltas.append(self._call_delta(place, in_message(began)))
                case CallArguments(place, text) if not calls[place].custom:
                    deltas.append(self._call_delta(place, {"function": {"arguments": text}}))
                case CallEnded(place) if calls[place].custom:
                    deltas.append(self._call_delta(place, in_message(calls[place])))
        return deltas

    def _call_delta(self, place: int, call: dict[str, Any]) -> dict[str, Any]:
        return {"function_call": call["function"]} if self.has_functions else {"tool_calls": [{"index": place, **call}]}

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
