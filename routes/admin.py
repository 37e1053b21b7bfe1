"""What is served beside generation: the model list, signs of life, figures."""

import time

from routes import page
from routes.http.context import RequestContext
from routes.http.replies import Response, json_reply
from routes.http.variants import served_ids
from routes.schemas import Body, SamplingBody, validate
from rwkv_batch import __version__, metrics
from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.ipc.messages import Live

LIMITS = ("max_prompts", "max_tokens_limit", "max_body_mib", "max_streams", "queue", "http_workers")
SAMPLING = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "alpha_presence", "alpha_frequency", "alpha_decay",
)  # fmt: skip
SHOWN = ("fingerprint", "device", "dtype", "quant", "weight_bytes", "ops", "vocab_size", "adapters")


async def index(context: RequestContext) -> Response:
    """GET /: the page for a browser; for others what this is, its limits, and the sampling of a request that sends none."""
    if page.is_asked_for(context):
        return page.reply(context, "index.html")
    context.caller = context.app.authorize(context.headers, {})
    name = {"name": "rwkv_batch", "version": __version__}
    about = {**name, "model": context.model_name, "engine": context.app.client.phase}
    limits = {name: getattr(context.config, name) for name in LIMITS}
    defaults = {name: SamplingBody.model_fields[name].default for name in SAMPLING}
    return json_reply({**about, "limits": limits, "sampling_defaults": defaults})


async def healthz(context: RequestContext) -> Response:
    """GET /healthz: this process answers; the engine may be loading or restarting."""
    return json_reply({"status": "ok", "model": context.model_name, "engine": context.app.client.phase})


async def readyz(context: RequestContext) -> Response:
    """GET /readyz: 200 when a generation request would be taken, else 503 with the reason."""
    try:
        context.app.check()
    except RwkvBatchError as error:
        return json_reply({"status": "unavailable", "error": error.message, "engines": phases(context)}, 503)
    return json_reply({"status": "ready", "model": context.model_name, "engines": phases(context)})


def phases(context: RequestContext) -> list[str]:
    """How each engine is."""
    return [link.phase for link in context.app.client.links]


async def stats(context: RequestContext) -> Response:
    """GET /stats: the engines' figures, added up and of each, and this HTTP process's."""
    client = context.app.client
    info = context.model.info
    return json_reply(
        {
            "engine": {
                "phase": client.phase,
                "model": context.model_name,
                "models": served_ids(context),
                **({key: getattr(info, key) for key in SHOWN} if info else {}),
                **client.stats,
            },
            "engines": [
                {
                    "index": link.seat.index,
                    "phase": link.phase,
                    "model": link.info.model if link.info else None,
                    "device": link.info.device if link.info else link.seat.device,
                    "card": link.seat.device or None,
                    "sessions": link.seat.sessions,
                    **link.stats,
                }
                for link in client.links
            ],
            "http": {
                "pid": context.app.pid,
                "uptime_seconds": round(time.time() - context.app.started, 1),
                "answers_in_progress": context.app.figures.active,
                "draining": context.app.draining,
            },
        }
    )


class StopBody(Body):
    """Which request to stop; none = all."""

    request_id: str | None = None


async def server_status(context: RequestContext) -> Response:
    """GET /v1/server/status: the engines, their slots, and the requests of all HTTP processes."""
    client = context.app.client
    figures, info = client.stats, client.info
    slots, free = figures.get("slots", 0), figures.get("slots_free", 0)
    active = [described(context, live) for live in (await context.app.ask() if client.ready else [])]
    return json_reply(
        {
            "status": client.phase,
            "api_version": "v1",
            "engine_version": __version__,
            "model": {"id": context.model_name, "name": context.model_name},
            "capabilities": {
                "stop": True,
                "pause": False,
                "resume": False,
                "dynamic_loading": context.config.models_dir is not None,
            },
            "prefill_chunk_size": info.prefill_budget if info else 0,
            "prefill_queue": {
                "hard_max_bsz": context.config.max_prompts,
                "dynamic_max_bsz": slots,
                "reserved_bsz": slots - free,
                "available_bsz": free,
                "queued_requests": figures.get("requests_waiting", 0),
            },
            "engines": [
                {
                    "index": link.seat.index,
                    "status": link.phase,
                    "slots": link.stats.get("slots", 0),
                    "slots_free": link.stats.get("slots_free", 0),
                    "queued_requests": link.stats.get("requests_waiting", 0),
                }
                for link in client.links
            ],
            "active_request": active[0] if active else None,
            "active_requests": active,
            "paused_requests": [],
        }
    )


async def server_stop(context: RequestContext) -> Response:
    """POST /v1/server/stop: end one request, by the id in its X-Request-Id header, or without an id all of them.

    Its caller gets 409, or an error event when the answer has begun.
    """
    body = validate(StopBody, context.body)
    stopped = await context.app.ask(stop=True, request_id=body.request_id)
    left = await context.app.ask()
    active = described(context, left[0]) if left else None
    return json_reply(
        {"ok": True, "stopped": bool(stopped), "requests": [live.id for live in stopped], "active_request": active}
    )


def described(context: RequestContext, live: Live) -> dict[str, object]:
    """A request that runs or waits, for people."""
    return {
        "request_id": live.id,
        "given_id": live.given_id or None,
        "endpoint": live.endpoint,
        "model": context.model_name,
        "created": live.created,
        "prompts": live.prompts,
        "prompts_ended": live.ended,
        "prompt_tokens": live.prompt_tokens,
        "generated_tokens": live.tokens,
        "max_tokens": live.max_tokens,
    }


async def figures(context: RequestContext) -> Response:
    """GET /metrics: the figures of all processes for Prometheus."""
    return Response(metrics.page(), content_type=metrics.CONTENT_TYPE)
