"""POST /v1/messages and what goes with it."""

from datetime import UTC, datetime
from typing import Any

from routes.anthropic.answers import MessageFormatter
from routes.anthropic.schemas import CountBody, MessagesBody, MessagesChat
from routes.http.context import RequestContext
from routes.http.off_loop import off_loop
from routes.http.replies import Response, json_reply
from routes.http.streams import Reply
from routes.openai.chat import answer_with
from routes.openai.schemas import read
from routes.schemas import validate
from rwkv_batch.errors import NotFound


def is_spoken(context: RequestContext) -> bool:
    """Whether a client of Anthropic's API calls; it says so in a header."""
    return context.headers.get("anthropic-version") is not None


async def create(context: RequestContext) -> Reply:
    """POST /v1/messages: answer a conversation."""
    body = read(MessagesChat, validate(MessagesBody, context.body).in_openai_form())
    request = await context.app.to_request(context, body)
    return await answer_with(context, request, MessageFormatter(context, body, request), stream=body.stream)


async def count_tokens(context: RequestContext) -> Response:
    """POST /v1/messages/count_tokens: how many tokens a conversation is."""
    body = read(MessagesChat, validate(CountBody, context.body).in_openai_form()).of_model(context.model.entry.defaults)
    texts = await off_loop(context.body_bytes, body.checked_texts, context.config)
    (ids,) = await context.app.encode(context, texts, "messages")
    return json_reply({"input_tokens": len(ids)})


def described(context: RequestContext) -> dict[str, Any]:
    """The one model in Anthropic's form."""
    created = datetime.fromtimestamp(int(context.app.started), UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": context.model_name,
        "display_name": context.model_name,
        "created_at": created,
        "max_input_tokens": context.config.max_prompt_tokens,
        "max_tokens": context.config.max_tokens_limit,
    }


async def models(context: RequestContext) -> Response:
    """GET /v1/models: a list of one."""
    model = described(context)
    return json_reply({"data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]})


async def model(context: RequestContext, name: str) -> Response:
    """GET /v1/models/{id}."""
    if name != context.model_name:
        raise NotFound(f"no such model; this server has {context.model_name}", param="model")
    return json_reply(described(context))
