"""What Ollama's clients ask before they chat: its version, the models, and what they can do."""

from datetime import UTC, datetime
from typing import Any

from routes.http.context import RequestContext
from routes.http.replies import Response, json_reply
from routes.http.variants import served_ids
from routes.ollama.schemas import ShowRequest
from routes.schemas import validate
from rwkv_batch.ipc.messages import EngineInfo
from rwkv_batch.text.chat_template import CHAT_TEMPLATE

VERSION = "0.12.6"  # of the API that is spoken here; clients refuse older ones
CAPABILITIES = ["completion", "tools", "insert", "thinking"]
FAMILY = "rwkv7"
FOREVER = "2318-01-01T00:00:00Z"  # until when the model stays loaded


def info_of(context: RequestContext) -> EngineInfo:
    """What is known of the model; little while it loads."""
    return context.model.info or EngineInfo(model=context.model_name)


def short(number: int) -> str:
    """A number of weights as people say it: 11M, 7.2B."""
    size, unit = (number / 1e9, "B") if number >= 1e9 else (number / 1e6, "M")
    return f"{size:.1f}".removesuffix(".0") + unit


def details(context: RequestContext) -> dict[str, Any]:
    """What the model is, for people."""
    info = info_of(context)
    return {
        "parent_model": "",
        "format": "rwkv",
        "family": FAMILY,
        "families": [FAMILY],
        "parameter_size": short(info.parameters),
        "quantization_level": (info.quant or info.dtype).upper().replace("FP", "F"),
    }


def described(context: RequestContext, name: str) -> dict[str, Any]:
    """The model, or what it can be asked for in."""
    info = info_of(context)
    return {
        "name": name,
        "model": name,
        "size": info.weight_bytes,
        "digest": info.fingerprint,
        "details": details(context),
    }


def since(context: RequestContext) -> str:
    """When this process started."""
    return datetime.fromtimestamp(int(context.app.started), UTC).isoformat().replace("+00:00", "Z")


async def version(context: RequestContext) -> Response:
    """GET /api/version."""
    return json_reply({"version": VERSION})


async def tags(context: RequestContext) -> Response:
    """GET /api/tags: the model, and behind it what it can be asked for in."""
    models = [{**described(context, name), "modified_at": since(context)} for name in served_ids(context)]
    return json_reply({"models": models})


async def running(context: RequestContext) -> Response:
    """GET /api/ps: the models that are loaded."""
    if not context.app.client.ready:
        return json_reply({"models": []})
    model = described(context, context.model_name)
    on_device = 0 if info_of(context).device.startswith("cpu") else model["size"]
    more = {"expires_at": FOREVER, "size_vram": on_device, "context_length": context.config.max_prompt_tokens}
    return json_reply({"models": [{**model, **more}]})


async def show(context: RequestContext) -> Response:
    """POST /api/show: the model, whatever name is asked for, as with all routes."""
    validate(ShowRequest, context.body)
    info = info_of(context)
    return json_reply(
        {
            "license": "",
            "modelfile": "",
            "parameters": "",
            "template": CHAT_TEMPLATE,
            "details": details(context),
            "model_info": {
                "general.architecture": FAMILY,
                "general.basename": context.model_name,
                "general.parameter_count": info.parameters,
                f"{FAMILY}.block_count": info.layers,
                f"{FAMILY}.context_length": context.config.max_prompt_tokens,
                f"{FAMILY}.embedding_length": info.width,
                f"{FAMILY}.vocab_size": info.vocab_size,
            },
            "capabilities": CAPABILITIES,
            "modified_at": since(context),
        }
    )
