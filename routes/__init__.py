"""The table of routes: what answers where, and what needs no password."""

from collections import defaultdict
from typing import NamedTuple

from robyn import Robyn
from robyn.robyn import HttpMethod

from routes import admin, batch, big_batch, chat, fim, reply, translate


class Route(NamedTuple):
    """One line of the table."""

    method: str
    path: str
    handler: reply.Handler
    access: reply.Access = "password"
    may_be_empty: bool = False  # a POST without a body is one with an empty object


ROUTES = [
    Route("POST", "/v1/chat/completions", chat.completions),
    Route("POST", "/v2/chat/completions", chat.completions_v2),
    Route("POST", "/v3/chat/completions", chat.completions_v3),
    Route("POST", "/FIM/v1/batch-FIM", fim.batch_fim),
    Route("POST", "/translate/v1/batch-translate", translate.batch_translate, access="translate"),
    Route("POST", "/v1/immersive_translate", translate.batch_translate, access="translate"),
    Route("POST", "/big_batch/completions", big_batch.completions),
    Route("GET", "/big_batch/completions-status", big_batch.completions_status),
    Route("POST", "/big_batch/clean", big_batch.clean, may_be_empty=True),
    Route("POST", "/v1/batch/completions", batch.completions),
    Route("POST", "/v1/tokens/count", batch.tokens_count),
    Route("GET", "/v1/server/status", admin.server_status),
    Route("POST", "/v1/server/stop", admin.server_stop, may_be_empty=True),
    Route("GET", "/v1/models", admin.models, access="open"),
    Route("GET", "/healthz", admin.healthz, access="open"),
    Route("GET", "/readyz", admin.readyz, access="open"),
    Route("GET", "/metrics", admin.figures),
    Route("GET", "/stats", admin.stats),
    Route("GET", "/", admin.index),
]

METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD"]


def register(app: Robyn, site: reply.Site) -> None:
    """Give Robyn the table, HEAD beside every GET, OPTIONS everywhere, and an answer of ours for all the rest."""
    methods_by_path: dict[str, list[str]] = defaultdict(list)
    for route in ROUTES:
        for method in [route.method, "HEAD"] if route.method == "GET" else [route.method]:
            methods_by_path[route.path].append(method)
            handler = reply.endpoint(
                site, route.handler, access=route.access, reads_body=method == "POST", may_be_empty=route.may_be_empty
            )
            add(app, method, route.path, handler)
    others = reply.endpoint(site, reply.unknown(dict(methods_by_path)), access="open")
    preflight = reply.endpoint(site, reply.preflight, access="open")
    for path in ("/", "/*rest"):
        add(app, "OPTIONS", path, preflight)
        for method in METHODS:
            if path != "/" or method not in methods_by_path["/"]:
                add(app, method, path, others)


def add(app: Robyn, method: str, path: str, handler: object) -> None:
    """Register one handler."""
    app.add_route(getattr(HttpMethod, method), path, handler)
