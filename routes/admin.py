"""What is served beside generation: the model list, signs of life, figures."""

import time

from routes.reply import Call, Plain, json_reply
from rwkv_batch import __version__, metrics
from rwkv_batch.errors import RwkvBatchError

SHOWN = ("fingerprint", "device", "dtype", "ops", "vocab_size")


async def index(call: Call) -> Plain:
    """GET /: what this is."""
    name = {"name": "rwkv_batch", "version": __version__}
    return json_reply({**name, "model": model_name(call), "engine": call.site.client.phase})


async def models(call: Call) -> Plain:
    """GET /v1/models: the one model."""
    model = {"id": model_name(call), "object": "model", "created": int(call.site.started), "owned_by": "rwkv_batch"}
    return json_reply({"object": "list", "data": [model]})


async def healthz(call: Call) -> Plain:
    """GET /healthz: this process answers; the engine may be loading or restarting."""
    return json_reply({"status": "ok", "model": model_name(call), "engine": call.site.client.phase})


async def readyz(call: Call) -> Plain:
    """GET /readyz: 200 when a generation request would be taken, else 503 with the reason."""
    try:
        call.site.check()
    except RwkvBatchError as error:
        return json_reply({"status": "unavailable", "error": error.message}, 503)
    return json_reply({"status": "ready", "model": model_name(call)})


async def stats(call: Call) -> Plain:
    """GET /stats: the engine's figures and this HTTP process's."""
    client = call.site.client
    info = client.info
    return json_reply(
        {
            "engine": {
                "phase": client.phase,
                "model": model_name(call),
                **({key: getattr(info, key) for key in SHOWN} if info else {}),
                **client.stats,
            },
            "http": {
                "pid": call.site.pid,
                "uptime_seconds": round(time.time() - call.site.started, 1),
                "answers_in_progress": call.site.active,
                "draining": call.site.draining,
            },
        }
    )


async def figures(call: Call) -> Plain:
    """GET /metrics: the figures of all processes for Prometheus."""
    return Plain(metrics.page(), content_type=metrics.CONTENT_TYPE)


def model_name(call: Call) -> str:
    """The served name: the setting, else what the engine loaded."""
    if call.config.served_model_name is None and call.site.client.info is not None:
        return call.site.client.info.model
    return call.config.model_name
