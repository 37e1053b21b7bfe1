"""POST /v1/fim/completions: Mistral's way to fill in the middle, answered in the form of a chat."""

from typing import Any

from pydantic import Field

from routes.http.context import RequestContext
from routes.http.streams import Reply
from routes.openai.answers import CompletionFormatter
from routes.openai.chat import answer_with
from routes.openai.schemas import NO_LIMIT, CompletionBody, read
from routes.schemas import MAX_ID, Seed
from rwkv_batch.errors import InvalidRequest
from rwkv_batch.request import Delta, Finish


class FimCompletionBody(CompletionBody):
    """One prompt and what follows the gap; without a suffix the prompt is the end of a file."""

    suffix: str = ""
    max_tokens: int = Field(4096, ge=NO_LIMIT, le=MAX_ID)
    random_seed: Seed = None


class FimFormatter(CompletionFormatter):
    """chat.completion and its chunks."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def choice(self, index: int) -> dict[str, Any]:
        """See Formatter."""
        message = {"role": "assistant", "content": "".join(self.texts[index]), "tool_calls": None, "prefix": False}
        return {"index": index, "message": message, "finish_reason": self.finishes[index].reason}

    def first_chunk(self, index: int) -> str:
        """See Formatter."""
        return self._delta(index, {"role": "assistant", "content": ""})

    def delta_chunk(self, delta: Delta) -> str:
        """See Formatter."""
        return self._delta(delta.index, {"content": delta.text}) if delta.text else ""

    def end_chunk(self, finish: Finish) -> str:
        """See Formatter."""
        return self._delta(finish.index, {"content": ""}, finish.reason)

    def _delta(self, index: int, delta: dict[str, Any], reason: str | None = None) -> str:
        return self.chunk({"index": index, "delta": delta, "finish_reason": reason})


async def fim_completions(context: RequestContext) -> Reply:
    """POST fim/completions: fill the gap between `prompt` and `suffix`."""
    data = {**context.body, "echo": False, "logprobs": None}
    if not isinstance(data.get("prompt"), str):
        raise InvalidRequest("prompt: a text", param="prompt")
    body = read(FimCompletionBody, {**data, "suffix": data.get("suffix") or ""})
    if body.seed is None:
        body.seed = body.random_seed
    request = await context.app.to_request(context, body)
    return await answer_with(context, request, FimFormatter(context, body, request), stream=body.stream)
