"""POST /infill, POST /completion, GET /props."""

from routes.http.context import RequestContext
from routes.http.replies import Response, json_reply
from routes.http.streams import Reply
from routes.llamacpp.answers import LlamaFormatter
from routes.llamacpp.schemas import CompletionRequest, InfillRequest, LlamaBody, LlamaCompletion
from routes.openai.chat import answer_with
from routes.openai.schemas import read
from routes.schemas import validate
from rwkv_batch import __version__
from rwkv_batch.text.chat_template import CHAT_TEMPLATE
from rwkv_batch.text.tokenizer import END_TEXT


async def infill(context: RequestContext) -> Reply:
    """POST /infill: what belongs at the cursor of an editor."""
    return await answer(context, validate(InfillRequest, context.body))


async def completion(context: RequestContext) -> Reply:
    """POST /completion: go on with a prompt."""
    return await answer(context, validate(CompletionRequest, context.body))


async def answer(context: RequestContext, sent: LlamaBody) -> Reply:
    """Run it."""
    body = read(LlamaCompletion, sent.in_openai_form())
    request = await context.app.to_request(context, body)
    return await answer_with(context, request, LlamaFormatter(context, body, request, sent), stream=body.stream)


async def props(context: RequestContext) -> Response:
    """GET /props: what clients want to know of the server before they begin."""
    info = context.model.info
    return json_reply(
        {
            "default_generation_settings": {"n_ctx": context.config.max_prompt_tokens, "id": 0, "is_processing": False},
            "total_slots": info.slots if info is not None else 0,
            "model_alias": context.model_name,
            "model_path": context.model_name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": CHAT_TEMPLATE,
            "bos_token": END_TEXT,
            "eos_token": END_TEXT,
            "build_info": f"rwkv_batch {__version__}",
            "is_sleeping": False,
        }
    )
