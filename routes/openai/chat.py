"""The OpenAI routes that generate, and the list of models."""

from urllib.parse import unquote

from routes.http.context import Call
from routes.http.replies import Plain, json_reply
from routes.http.streams import Answer as Stream
from routes.openai.answers import Answer, ChatAnswer, CompletionAnswer
from routes.openai.schemas import ChatBody, CompletionBody, read
from rwkv_batch.errors import InvalidRequest, NotFound
from rwkv_batch.request import Request


async def chat_completions(call: Call) -> Plain | Stream:
    """POST chat/completions: answer a conversation."""
    if call.body.get("text_list") is not None:
        raise InvalidRequest(
            "this path takes messages; for text_list, the form of a translation, the URL is /translate/v1/batch-translate",
            param="text_list",
        )
    body = read(ChatBody, call.body)
    if body.session_id is None and call.config.session_header is not None:
        body.session_id = call.headers.get(call.config.session_header.lower())
    request = await call.site.to_request(call, body)
    return await answer_with(call, request, ChatAnswer(call, body, request), stream=body.stream)


async def completions(call: Call) -> Plain | Stream:
    """POST completions: go on with each prompt."""
    if call.body.get("messages") is not None and call.body.get("prompt") is None:
        raise InvalidRequest("this path takes prompt; messages go to chat/completions", param="messages")
    body = read(CompletionBody, call.body)
    request = await call.site.to_request(call, body)
    return await answer_with(call, request, CompletionAnswer(call, body, request), stream=body.stream)


async def answer_with(call: Call, request: Request, answer: Answer, *, stream: bool) -> Plain | Stream:
    """Run the request. Raises what it failed with while nothing was sent."""
    if stream:
        return await call.site.stream(call, request, answer.chunks)
    return await call.site.document(call, request, answer.document)


async def embeddings(call: Call) -> Plain:
    """POST embeddings: there are none."""
    raise NotFound("this server makes no embeddings", code="not_supported")


def described(call: Call) -> dict[str, object]:
    """The one model; `root` and `parent`, which vLLM's list has, are what its load generator reads."""
    name = call.model_name
    return {
        "id": name,
        "object": "model",
        "created": int(call.site.started),
        "owned_by": "rwkv_batch",
        "root": name,
        "parent": None,
        "max_model_len": call.config.max_prompt_tokens,
    }


async def models(call: Call) -> Plain:
    """GET models: a list of one."""
    return json_reply({"object": "list", "data": [described(call)]})


async def model(call: Call) -> Plain:
    """GET models/{id}."""
    if unquote(call.params["model"]) != call.model_name:
        raise NotFound(f"no such model; this server has {call.model_name}", param="model", code="model_not_found")
    return json_reply(described(call))


async def health(call: Call) -> Plain:
    """GET health: 200 when a generation request would be taken. Raises Unavailable, Overloaded."""
    call.site.check()
    return json_reply({"status": "healthy"})
