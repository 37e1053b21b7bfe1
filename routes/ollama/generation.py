"""POST /api/chat and /api/generate."""

from routes.http.context import RequestContext
from routes.http.replies import json_reply
from routes.http.streams import LINES, Reply
from routes.ollama.answers import ChatLines, GenerateLines, Lines, RawLines, Said, as_message, as_response, now
from routes.ollama.schemas import ChatRequest, GenerateRequest, OllamaBody, OllamaChat, OllamaCompletion
from routes.openai.schemas import GenerationBody, read
from routes.schemas import validate


async def chat(context: RequestContext) -> Reply:
    """POST /api/chat: answer a conversation; without messages say that the model is loaded."""
    body = validate(ChatRequest, context.body)
    if not body.messages:
        return nothing_to_say(body, as_message(Said()))
    return await answer(context, read(OllamaChat, body.in_openai_form()), ChatLines)


async def generate(context: RequestContext) -> Reply:
    """POST /api/generate: answer or complete a prompt, or fill the gap before `suffix`; without a prompt as /api/chat."""
    body = validate(GenerateRequest, context.body)
    if not body.prompt and not body.suffix:
        return nothing_to_say(body, as_response(Said()))
    kind, lines = (OllamaCompletion, RawLines) if body.is_raw else (OllamaChat, GenerateLines)
    return await answer(context, read(kind, body.in_openai_form()), lines)


def nothing_to_say(body: OllamaBody, said: dict[str, object]) -> Reply:
    """What is said to a client that wants the model to be there, or not to be there, which changes nothing here."""
    reason = "unload" if body.unloads else "load"
    return json_reply({"model": body.model, "created_at": now(), **said, "done": True, "done_reason": reason})


async def answer(context: RequestContext, body: GenerationBody, kind: type[Lines]) -> Reply:
    """Run it."""
    request = await context.app.to_request(context, body)
    lines = kind(context, body, request)
    if body.stream:
        return await context.app.stream(context, request, lines.chunks, LINES)
    return await context.app.document(context, request, lines.document)
