"""Routes of the reference's relatives: POST /v1/batch/completions in two forms, and POST /v1/tokens/count."""

import secrets
import time
from typing import Any, ClassVar

from pydantic import Field

from routes.http.context import RequestContext
from routes.http.off_loop import off_loop
from routes.http.replies import Response, json_reply
from routes.http.streams import Reply
from routes.native.chat import DocumentFormatter, reply_to, usage_of
from routes.schemas import Body, ContentsBody, Messages, PromptsBody, Texts, validate
from rwkv_batch.errors import InvalidRequest
from rwkv_batch.text import prompts
from sampling.params import SamplingParams


class BatchContentsBody(ContentsBody):
    """The form with `contents`: native chat completions with another id and larger chunks."""

    chunk_size: int = Field(8, ge=1, le=1_048_576)


class BatchPromptsBody(PromptsBody):
    """The form with `prompts`: greedy, whatever `temperature` says; only `noise`, when it was sent, changes that."""

    field: ClassVar[str] = "prompts"
    filtered: ClassVar[bool] = False
    prompts: Texts = Field(default_factory=list)
    max_tokens: int = Field(100, ge=0, le=2**31 - 1)

    def texts(self) -> list[str]:
        """The prompts as they are."""
        return self.prompts

    def sampling(self) -> SamplingParams:
        """Greedy, or the largest of logits/T + U(0, noise)."""
        noise = self.noise if "noise" in self.model_fields_set else 0.0
        return SamplingParams(
            rule="noise", temperature=self.temperature, noise=noise, alpha_presence=0.0, alpha_frequency=0.0, seed=self.seed,
            ignore_eos=self.ignore_eos,
        )  # fmt: skip


class BatchDocumentFormatter(DocumentFormatter):
    """The answer to `prompts`. Times are in seconds since the call came in."""

    def __init__(self, context: RequestContext, model: str, num_rows: int):
        super().__init__(f"batch-{secrets.token_hex(4)}", model, num_rows)
        self.began = context.began

    def body(self) -> dict[str, Any]:
        """The finished answer."""
        document = super().body()
        seconds = time.monotonic() - self.began
        usage = usage_of(list(self.finishes.values()))
        results = [
            {"index": choice["index"], "text": choice["message"]["content"], "finish_reason": choice["finish_reason"]}
            | ({"error": choice["error"]} if "error" in choice else {})
            for choice in document["choices"]
        ]
        return {
            "id": self.id,
            "object": "batch_completion",
            "created": document["created"],
            "model": self.model,
            "results": results,
            "batch_size": len(results),
            "inference_time": seconds,
            "speed_stats": {
                "total_tokens": usage["completion_tokens"],
                "tokens_per_second": usage["completion_tokens"] / max(seconds, 1e-9),
            },
            "usage": usage,
        }


class CountBody(Body):
    """What to count: the first of the three that is there."""

    text: str | None = None
    messages: Messages = Field(default_factory=list)
    contents: Texts | None = None
    enable_think: bool = False

    def joined(self) -> tuple[str, str]:
        """The text whose tokens count, and the field it stands in. Raises InvalidRequest when there is none."""
        if self.text is not None:
            return self.text, "text"
        if self.messages:
            tail = prompts.chat_tail(think=self.enable_think)
            return prompts.conversation([message.turn() for message in self.messages], tail, self.gap), "messages"
        if self.contents is not None:
            return "".join(self.contents), "contents"
        raise InvalidRequest("Missing text or messages", param="text")


async def completions(context: RequestContext) -> Reply:
    """Complete a batch; `prompts` or `contents` tells which form is meant."""
    if context.body.get("prompts") is None:
        return await reply_to(context, BatchContentsBody, "rwkv7-fast-batch")
    body = validate(BatchPromptsBody, context.body)
    request = await context.app.to_request(context, body)
    return await context.app.document(context, request, BatchDocumentFormatter(context, body.model, len(request.prompts)).feed)


async def tokens_count(context: RequestContext) -> Response:
    """How many tokens a text has."""
    text, field = await off_loop(
        context.body_bytes, validate(CountBody, context.body).of_model(context.model.entry.defaults).joined
    )
    try:
        (ids,) = await context.app.encode(context, [text], field)
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace(f"{field}[0]", field, 1), param=field) from None
    return json_reply({"tokens": len(ids) if text else 0})  # an empty prompt is fed token 0
