"""The Responses API. The state of each answer is kept as a session under the response's id, so an answer can be continued any
number of times until it is old (`--response-ttl-hours`) or there are too many (`--max-responses`); its text is not kept.
"""

from routes.http.context import RequestContext
from routes.http.off_loop import off_loop
from routes.http.replies import Response, json_reply
from routes.http.streams import Reply
from routes.openai.chat import answer_with
from routes.openai.response_answers import ResponseFormatter
from routes.openai.response_body import PREFIX, ResponseBody
from routes.openai.schemas import read
from rwkv_batch.errors import InvalidRequest, NotFound
from rwkv_batch.session_messages import Delete


async def create(context: RequestContext) -> Reply:
    """POST responses: answer, and keep the state that the next call can name."""
    body = read(ResponseBody, context.body)
    request = await context.app.to_request(context, body)
    previous = body.previous_response_id
    if previous is not None and not previous.startswith(PREFIX + "_"):
        raise missing(previous)
    try:
        return await answer_with(context, request, ResponseFormatter(context, body, request), stream=body.stream)
    except NotFound:
        raise missing(previous) from None


async def count(context: RequestContext) -> Response:
    """POST responses/input_tokens: how many tokens the input of a conversation's first turn is."""
    body = read(ResponseBody, context.body)
    if body.previous_response_id is not None:
        raise InvalidRequest("previous_response_id: only a first turn is counted", param="previous_response_id")
    told = body.of_model(context.model.entry.defaults)
    texts = await off_loop(context.body_bytes, told.checked_texts, context.config)
    (ids,) = await context.app.encode(context, texts, "input")
    return json_reply({"object": "response.input_tokens", "input_tokens": len(ids)})


async def delete(context: RequestContext) -> Response:
    """DELETE responses/{id}: forget the state, whichever model has it."""
    name = context.params["response"]
    command = Delete(namespace=context.namespace, name=name)
    deleted = False
    for model in context.app.models.all if name.startswith(PREFIX + "_") else ():
        deleted = deleted or (await context.app.execute(command, model)).found
    return json_reply({"id": name, "object": "response", "deleted": deleted})


async def retrieve(context: RequestContext) -> Response:
    """GET responses/{id}: texts are not kept."""
    raise NotFound("the server keeps the state of a response to be continued, not its text", code="not_supported")


def missing(name: str | None) -> NotFound:
    """What is said of a response that is not there."""
    return NotFound(f"Response '{name}' not found or expired", param="previous_response_id", code="previous_response_not_found")
