"""The built-in page: the files of `web/`, read once, and the headers that keep model text from becoming code."""

import gzip
import hashlib
from pathlib import Path
from typing import NamedTuple

from routes.http.context import Handler, RequestContext
from routes.http.replies import Response
from rwkv_batch.shipped import folder

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "dompurify",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for each time, sent again only when it has changed
}


class File(NamedTuple):
    """One file as it is sent."""

    content_type: str
    data: bytes
    compressed: bytes
    etag: str


def read(root: Path) -> dict[str, File]:
    """All files of the page by their path below `root`; none where it is not there."""
    files = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix in TYPES:
            data = path.read_bytes()
            etag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
            files[path.relative_to(root).as_posix()] = File(TYPES[path.suffix], data, gzip.compress(data, 9, mtime=0), etag)
    return files


FILES = read(folder("web"))


def is_asked_for(context: RequestContext) -> bool:
    """Whether a browser asks for a page rather than a program for JSON."""
    return "index.html" in FILES and "text/html" in (context.headers.get("accept") or "")


def reply(context: RequestContext, name: str) -> Response:
    """One file: 304 when the browser has it already."""
    file = FILES[name]
    headers = HEADERS | {"ETag": file.etag, "Vary": "Accept, Accept-Encoding"}
    if context.headers.get("if-none-match") == file.etag:
        return Response(b"", 304, content_type=file.content_type, headers=headers)
    if "gzip" in (context.headers.get("accept-encoding") or ""):
        return Response(file.compressed, content_type=file.content_type, headers=headers | {"Content-Encoding": "gzip"})
    return Response(file.data, content_type=file.content_type, headers=headers)


def handler(name: str) -> Handler:
    """What answers GET for one file."""

    async def handle(context: RequestContext) -> Response:
        return reply(context, name)

    return handle
