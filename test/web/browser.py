"""What the browser tests share: where Chromium is, and a server that plays back what a test wrote."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

from routes import page

ABOUT = {
    "name": "rwkv_batch", "version": "0", "model": "recorded", "engine": "ready",
    "limits": {"max_prompts": 4096}, "sampling_defaults": {"temperature": 1.0},
}  # fmt: skip


def find_chromium() -> str | None:
    """The browser's program, under one of its names."""
    return next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


Events = Callable[[dict], Iterator[dict]]


@contextmanager
def playback(events: Events, answers: dict[str, dict] | None = None) -> Iterator[str]:
    """Serve the page with its own headers; every stream is `events(body)`, every other call its entry in `answers`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/" and "text/html" in self.headers.get("Accept", ""):
                self.send_file("index.html")
            elif self.path.startswith("/web/"):
                self.send_file(self.path.removeprefix("/web/"))
            else:
                self.send_json({"/": ABOUT, "/healthz": ABOUT, **(answers or {})}.get(self.path, {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            if self.path == "/apply_template":
                self.send_json({"prompt": "x"})
            elif body.get("stream"):
                self.stream(events(body))
            else:
                self.send_json((answers or {}).get(self.path, {}))

        def send_file(self, name: str) -> None:
            plain = page.reply(SimpleNamespace(headers={}), name)
            self.send_whole(plain.body, plain.content_type, plain.headers)

        def send_json(self, document: dict) -> None:
            self.send_whole(json.dumps(document).encode(), "application/json", {})

        def send_whole(self, data: bytes, content_type: str, headers: dict[str, str]) -> None:
            self.send_response(200)
            for name, value in {**headers, "Content-Type": content_type, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def stream(self, chunks: Iterator[dict]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            try:
                for chunk in chunks:
                    self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                pass  # the page has left

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()


def at_pace(num_rows: int, tokens_per_second: float, seconds: float, chunk_size: int = 4) -> Events:
    """Rows that are written together at a steady pace, as one step after another brings them."""

    def events(_: dict) -> Iterator[dict]:
        pause = num_rows * chunk_size / tokens_per_second
        piece = " lorem ipsum dolor sit"
        began, step = time.monotonic(), 0
        while (due := began + step * pause) < began + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            step += 1
            yield {"choices": [{"index": row, "delta": {"content": piece}} for row in range(num_rows)]}
        ends = [{"index": row, "delta": {"content": ""}, "finish_reason": "length"} for row in range(num_rows)]
        yield {"choices": ends, "usage": {"completion_tokens": step * num_rows * chunk_size}}

    return events
