"""Servers under Ray Serve, which places, watches, restarts and scales them. From the repository's root:

    serve run deploy.ray_serve:build nodes=2 port=8000 args="--state-url postgresql://… --snapshots /mnt/states"

Each replica is a whole server on a machine of its own, all of whose GPUs it has. Callers reach the servers through HAProxy
(`haproxy-cluster.cfg`), for which `port` is the same everywhere. Ray's own proxy passes calls on too, a few: it takes 12 ms
for a call and a millisecond of CPU for each chunk. A new `args` is a rolling upgrade: replica after replica ends and starts.

    nodes    servers, or "2-8": as many as their calls need, `calls` for each
    port     of every server; 0 = a free one, where only Ray's proxy is used
    gpus     of a machine that a server takes
    args     of app.py; settings that are secret belong into its environment (RWKV_BATCH_STATE_URL)
    python   which runs app.py; it need not be Ray's
    drain    seconds that a server which is to end has for its calls
"""

import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from pydantic import BaseModel
from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

APP = Path(__file__).resolve().parent.parent / "app.py"
START_SECONDS = 600.0  # a large model comes from a slow disk
# Of one connection, or made again by whoever sends on.
HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "date", "server"}
CALLS = 1000  # of a replica through Ray's proxy
NUMBER_OF_TERM = int(signal.SIGTERM)


class Settings(BaseModel):
    """What stands behind `serve run deploy.ray_serve:build`, see above."""

    nodes: str = "1"
    port: int = 0
    gpus: float = 0
    cpus: float = 1
    calls: float = 200
    args: str = ""
    python: str = sys.executable
    drain: float = 100


def die_with_parent() -> None:
    """Run in the child before it is the server: it ends, and with it its own children, when the replica does."""
    ctypes.CDLL(None).prctl(1, NUMBER_OF_TERM, 0, 0, 0)  # PR_SET_PDEATHSIG


class Server:
    """The replica: one server as a child."""

    def __init__(self, settings: dict):
        self.settings = Settings(**settings)
        folder = Path(tempfile.mkdtemp(prefix="rwkv"))
        self.log_path = folder / "server.log"
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("ROBYN_", "PYTHON"))}
        environ |= {"XDG_RUNTIME_DIR": str(folder), "PYTHONUNBUFFERED": "1"}
        command = [self.settings.python, str(APP), "--port", str(self.settings.port), *shlex.split(self.settings.args)]
        with open(self.log_path, "wb") as out:
            self.child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ, cwd=folder, preexec_fn=die_with_parent
            )
        self.url = self._wait()
        self._calls: aiohttp.ClientSession | None = None
        print(f"a server listens at {self.url}", flush=True)

    def _wait(self) -> str:
        """The server's address, once it takes requests; RuntimeError with its last words when it ends."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            said = self.log_path.read_text(errors="replace")
            if self.child.poll() is not None:
                raise RuntimeError(f"the server ended with {self.child.returncode}: {said[-2000:]}")
            if found := re.search(r"address  http://\S+:(\d+)", said):
                url = f"http://127.0.0.1:{found[1]}"
                if self._answers(f"{url}/readyz"):
                    return url
            time.sleep(0.1)
        raise RuntimeError(f"the server did not start within {START_SECONDS:g} s")

    @staticmethod
    def _answers(url: str) -> bool:
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def check_health(self) -> None:
        """Raise when this replica has to be replaced. An engine that crashed is none of it: the server starts it again."""
        if self.child.poll() is not None:
            raise RuntimeError(f"the server ended with {self.child.returncode}")
        if not self._answers(f"{self.url}/healthz"):
            raise RuntimeError("the server does not answer")

    def __del__(self):
        """Let the server finish what it does, when Ray ends the replica."""
        if hasattr(self, "child") and self.child.poll() is None:
            self.child.terminate()
            try:
                self.child.wait(self.settings.drain)
            except subprocess.TimeoutExpired:
                self.child.kill()

    async def __call__(self, request: Request) -> Response:
        """Pass a call on, and its answer back as it comes."""
        if self._calls is None:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._calls = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
            )
        if request.url.path == "/_server":
            about = {"url": self.url, "pid": self.child.pid}
            return Response(json.dumps(about), media_type="application/json")
        headers = {name: value for name, value in request.headers.items() if name not in HOP}
        headers.setdefault("x-forwarded-for", request.client.host if request.client else "unknown")
        url = f"{self.url}{request.url.path}{f'?{request.url.query}' if request.url.query else ''}"
        answer = await self._calls.request(request.method, url, data=await request.body(), headers=headers)

        async def chunks() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.content.iter_any():
                    yield chunk
            finally:
                answer.close()  # a client that leaves ends its rows

        kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
        return StreamingResponse(chunks(), status_code=answer.status, headers=kept)


def build(settings: Settings) -> serve.Application:
    """The application that `serve run` starts."""
    low, _, high = settings.nodes.partition("-")
    options = {
        "max_ongoing_requests": CALLS,
        "graceful_shutdown_timeout_s": settings.drain + 5,
        "health_check_period_s": 2,
        "health_check_timeout_s": 15,
        "ray_actor_options": {"num_cpus": settings.cpus, "num_gpus": settings.gpus},
    }
    if settings.port:
        options["max_replicas_per_node"] = 1
    if high:
        options["autoscaling_config"] = {
            "min_replicas": int(low), "max_replicas": int(high), "target_ongoing_requests": settings.calls,
            "downscale_delay_s": 600,
        }  # fmt: skip
    else:
        options["num_replicas"] = int(low)
    return serve.deployment(Server, name="rwkv_batch", **options).bind(settings.model_dump())
