"""The table of routes: what answers where, and what needs no password."""

from collections import defaultdict
from typing import NamedTuple

from robyn import Robyn
from robyn.robyn import HttpMethod

from routes import admin, chat, reply


class Route(NamedTuple):
    """One line of the table."""

    method: str
    path: str
    handler: reply.Handler
    public: bool = False


ROUTES = [
    Route("POST", "/v1/chat/completions", chat.completions),
    Route("GET", "/v1/models", admin.models, public=True),
    Route("GET", "/healthz", admin.healthz, public=True),
    Route("GET", "/readyz", admin.readyz, public=True),
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
            handler = reply.endpoint(site, route.handler, public=route.public, reads_body=method == "POST")
            add(app, method, route.path, handler)
    others = reply.endpoint(site, reply.unknown(dict(methods_by_path)), public=True, reads_body=False)
    preflight = reply.endpoint(site, reply.preflight, public=True, reads_body=False)
    for path in ("/", "/*rest"):
        add(app, "OPTIONS", path, preflight)
        for method in METHODS:
            if path != "/" or method not in methods_by_path["/"]:
                add(app, method, path, others)


def add(app: Robyn, method: str, path: str, handler: object) -> None:
    """Register one handler."""
    app.add_route(getattr(HttpMethod, method), path, handler)
