"""What is served beside generation: the model list, signs of life, figures."""

import time

from routes import page
from routes.http.context import Call
from routes.http.replies import Plain, json_reply
from routes.schemas import Body, SamplingBody, validate
from rwkv_batch import __version__, metrics
from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.ipc.channel import Live

LIMITS = ("max_prompts", "max_tokens_limit", "max_body_mib", "max_streams", "queue", "http_workers")
SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "alpha_presence", "alpha_frequency", "alpha_decay")
SHOWN = ("fingerprint", "device", "dtype", "ops", "vocab_size")


async def index(call: Call) -> Plain:
    """GET /: the page for a browser; for others what this is, its limits, and the sampling of a request that sends none."""
    if page.is_asked_for(call):
        return page.reply(call, "index.html")
    call.caller = call.site.authorize(call.headers, {})
    name = {"name": "rwkv_batch", "version": __version__}
    about = {**name, "model": call.model_name, "engine": call.site.client.phase}
    limits = {name: getattr(call.config, name) for name in LIMITS}
    defaults = {name: SamplingBody.model_fields[name].default for name in SAMPLING}
    return json_reply({**about, "limits": limits, "sampling_defaults": defaults})


async def healthz(call: Call) -> Plain:
    """GET /healthz: this process answers; the engine may be loading or restarting."""
    return json_reply({"status": "ok", "model": call.model_name, "engine": call.site.client.phase})


async def readyz(call: Call) -> Plain:
    """GET /readyz: 200 when a generation request would be taken, else 503 with the reason."""
    try:
        call.site.check()
    except RwkvBatchError as error:
        return json_reply({"status": "unavailable", "error": error.message}, 503)
    return json_reply({"status": "ready", "model": call.model_name})


async def stats(call: Call) -> Plain:
    """GET /stats: the engine's figures and this HTTP process's."""
    client = call.site.client
    info = client.info
    return json_reply(
        {
            "engine": {
                "phase": client.phase,
                "model": call.model_name,
                **({key: getattr(info, key) for key in SHOWN} if info else {}),
                **client.stats,
            },
            "http": {
                "pid": call.site.pid,
                "uptime_seconds": round(time.time() - call.site.started, 1),
                "answers_in_progress": call.site.figures.active,
                "draining": call.site.draining,
            },
        }
    )


class StopBody(Body):
    """Which request to stop; none = all."""

    request_id: str | None = None


async def server_status(call: Call) -> Plain:
    """GET /v1/server/status: the engine, its slots, and the requests of all HTTP processes."""
    client = call.site.client
    figures, info = client.stats, client.info
    slots, free = figures.get("slots", 0), figures.get("slots_free", 0)
    active = [described(call, live) for live in (await call.site.ask() if client.ready else [])]
    return json_reply(
        {
            "status": client.phase,
            "api_version": "v1",
            "engine_version": __version__,
            "model": {"id": call.model_name, "name": call.model_name},
            "capabilities": {"stop": True, "pause": False, "resume": False, "dynamic_loading": False},
            "prefill_chunk_size": info.prefill_budget if info else 0,
            "prefill_queue": {
                "hard_max_bsz": call.config.max_prompts,
                "dynamic_max_bsz": slots,
                "reserved_bsz": slots - free,
                "available_bsz": free,
                "queued_requests": figures.get("requests_waiting", 0),
            },
            "active_request": active[0] if active else None,
            "active_requests": active,
            "paused_requests": [],
        }
    )


async def server_stop(call: Call) -> Plain:
    """POST /v1/server/stop: end one request, by the id in its X-Request-Id header, or without an id all of them.

    Its caller gets 409, or an error event when the answer has begun.
    """
    body = validate(StopBody, call.body)
    stopped = await call.site.ask(stop=True, request_id=body.request_id)
    left = await call.site.ask()
    active = described(call, left[0]) if left else None
    return json_reply(
        {"ok": True, "stopped": bool(stopped), "requests": [live.id for live in stopped], "active_request": active}
    )


def described(call: Call, live: Live) -> dict[str, object]:
    """A request that runs or waits, for people."""
    return {
        "request_id": live.id,
        "given_id": live.given_id or None,
        "endpoint": live.endpoint,
        "model": call.model_name,
        "created": live.created,
        "prompts": live.prompts,
        "prompts_ended": live.ended,
        "prompt_tokens": live.prompt_tokens,
        "generated_tokens": live.tokens,
        "max_tokens": live.max_tokens,
    }


async def figures(call: Call) -> Plain:
    """GET /metrics: the figures of all processes for Prometheus."""
    return Plain(metrics.page(), content_type=metrics.CONTENT_TYPE)
