"""Which dialect a call is in, on the paths that take several."""

from typing import Any
from urllib.parse import unquote

from routes.anthropic import messages as anthropic
from routes.http.context import RequestContext
from routes.http.replies import Form
from routes.http.streams import Reply
from routes.native import chat as native_chat
from routes.openai import chat as openai_chat

NATIVE_FIELDS = ("contents", "text_list", "prefix", "suffix", "dialogue_idx", "chats")


def is_native(body: dict[str, Any] | str | bytes) -> bool:
    """Whether a body is clearly not OpenAI's form of a chat; it may be one that could not be parsed."""
    if isinstance(body, dict):
        return any(field in body for field in NATIVE_FIELDS)
    quoted = (f'"{field}"' for field in NATIVE_FIELDS)
    return any((field if isinstance(body, str) else field.encode()) in body for field in quoted)


def form_of_errors(body: dict[str, Any] | str | bytes) -> Form:
    """OpenAI's unless the body is clearly native."""
    return "native" if is_native(body) else "openai"


async def chat_completions(context: RequestContext) -> Reply:
    """POST /v1/chat/completions: complete each text of `contents`, or in OpenAI's form answer `messages`."""
    is_chat = context.body.get("contents") is None and context.body.get("messages") is not None
    context.form = "openai" if is_chat else "native"
    return await (openai_chat.chat_completions(context) if is_chat else native_chat.completions(context))


async def models(context: RequestContext) -> Reply:
    """GET models, in the form that the client's headers ask for."""
    return await (anthropic.models if anthropic.is_spoken(context) else openai_chat.models)(context)


async def model(context: RequestContext) -> Reply:
    """GET models/{id}, likewise."""
    if anthropic.is_spoken(context):
        context.form = "anthropic"
        return await anthropic.model(context, unquote(context.params["model"]))
    return await openai_chat.model(context)
