"""POST /v1/messages and what goes with it."""

from datetime import UTC, datetime
from typing import Any

from routes.anthropic.answers import MessageFormatter
from routes.anthropic.schemas import CountBody, MessagesBody, MessagesChat
from routes.http.context import RequestContext
from routes.http.off_loop import off_loop
from routes.http.replies import Response, json_reply
from routes.http.streams import Reply
from routes.http.variants import served_ids
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


def described(context: RequestContext, name: str) -> dict[str, Any]:
    """The model, or what it can be asked for in, in Anthropic's form."""
    created = datetime.fromtimestamp(int(context.app.started), UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created,
        "max_input_tokens": context.config.max_prompt_tokens,
        "max_tokens": context.config.max_tokens_limit,
    }


async def models(context: RequestContext) -> Response:
    """GET /v1/models: the model, and behind it what it can be asked for in."""
    ids = served_ids(context)
    data = [described(context, name) for name in ids]
    return json_reply({"data": data, "has_more": False, "first_id": ids[0], "last_id": ids[-1]})


async def model(context: RequestContext, name: str) -> Response:
    """GET /v1/models/{id}."""
    ids = served_ids(context)
    if name not in ids:
        raise NotFound(f"no such model; this server has {', '.join(ids)}", param="model")
    return json_reply(described(context, name))
