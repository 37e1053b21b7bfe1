"""The OpenAI routes that generate, and the list of models."""

from urllib.parse import unquote

from routes.http.context import RequestContext
from routes.http.replies import Response, json_reply
from routes.http.streams import Reply
from routes.http.variants import served, served_choices, served_ids
from routes.openai.answers import CompletionFormatter, Formatter
from routes.openai.chat_answers import ChatFormatter
from routes.openai.schemas import ChatBody, CompletionBody, read
from rwkv_batch.errors import InvalidRequest, NotFound
from rwkv_batch.request import Request
from rwkv_batch.served.variants import Choice, id_of, resolve


async def chat_completions(context: RequestContext) -> Reply:
    """POST chat/completions: answer a conversation."""
    if context.body.get("text_list") is not None:
        raise InvalidRequest(
            "this path takes messages; for text_list, the form of a translation, the URL is /translate/v1/batch-translate",
            param="text_list",
        )
    body = read(ChatBody, context.body)
    if body.session_id is None and context.config.session_header is not None:
        body.session_id = context.headers.get(context.config.session_header.lower())
    request = await context.app.to_request(context, body)
    return await answer_with(context, request, ChatFormatter(context, body, request), stream=body.stream)


async def completions(context: RequestContext) -> Reply:
    """POST completions: go on with each prompt."""
    if context.body.get("messages") is not None and context.body.get("prompt") is None:
        raise InvalidRequest("this path takes prompt; messages go to chat/completions", param="messages")
    body = read(CompletionBody, context.body)
    request = await context.app.to_request(context, body)
    return await answer_with(context, request, CompletionFormatter(context, body, request), stream=body.stream)


async def answer_with(context: RequestContext, request: Request, formatter: Formatter, *, stream: bool) -> Reply:
    """Run the request. Raises what it failed with while nothing was sent."""
    if stream:
        return await context.app.stream(context, request, formatter.chunks)
    return await context.app.document(context, request, formatter.document)


async def embeddings(context: RequestContext) -> Response:
    """POST embeddings: there are none."""
    raise NotFound("this server makes no embeddings", code="not_supported")


def described(context: RequestContext, choice: Choice) -> dict[str, object]:
    """A model or a variant of one; `root` and `parent`, which vLLM's list has, are what its load generator reads."""
    return {
        "id": id_of(*choice),
        "object": "model",
        "created": int(context.app.started),
        "owned_by": "rwkv_batch",
        "root": choice.model,
        "parent": None if choice.variant is None else choice.model,
        "max_model_len": context.config.max_prompt_tokens,
    }


async def models(context: RequestContext) -> Response:
    """GET models: the model, and behind it what it can be asked for in."""
    return json_reply({"object": "list", "data": [described(context, choice) for choice in served_choices(context)]})


async def model(context: RequestContext) -> Response:
    """GET models/{id}."""
    choice = resolve(unquote(context.params["model"]), served(context))
    if choice is None:
        there = ", ".join(served_ids(context))
        raise NotFound(f"no such model; this server has {there}", param="model", code="model_not_found")
    return json_reply(described(context, choice))


async def health(context: RequestContext) -> Response:
    """GET health: 200 when a generation request would be taken. Raises Unavailable, Overloaded."""
    context.app.check()
    return json_reply({"status": "healthy"})
