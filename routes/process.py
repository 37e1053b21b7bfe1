"""An HTTP process: Robyn with our routes."""

import asyncio
import contextlib
import logging
import os
import socket
import stat
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable

from robyn import Robyn
from robyn.argument_parser import Config as RobynConfig
from robyn.robyn import HttpMethod

from routes import ROUTES, dialects
from routes.http.endpoint import endpoint, preflight, release_iterators, unknown
from routes.http.http_app import HttpApp
from routes.http.served import Models
from rwkv_batch import metrics
from rwkv_batch.config import Config
from rwkv_batch.errors import Unavailable
from rwkv_batch.ipc.client import EngineClient
from rwkv_batch.server import lines
from rwkv_batch.server.control import BEAT_SECONDS, Control, freeze_loaded
from rwkv_batch.text.tokenizer import WORLD_ROWS

log = logging.getLogger(__name__)

MEET_SECONDS = 5.0  # that a new HTTP process gives an engine that is there to show itself
SWITCH_SECONDS = 0.05  # the HTTP processes' threads hold the interpreter's lock for microseconds; forced switches only cost
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "TRACE"]


def run(control: Control) -> int:
    """Serve until told to stop; returns the exit code of a server that ended by itself."""
    config, folder = control.config, control.folder
    pace = {"heartbeat": config.heartbeat, "peer_seconds": config.peer_seconds}
    client = EngineClient(control.birth.seats, **pace, number=control.birth.index)
    models = Models(client, control.birth.models, control.report)
    if config.fake_engine is None:
        models.tokenizers.begin(WORLD_ROWS)  # most models have it: so it is there when the engine is
    app = HttpApp(config, client, metrics.HttpMetrics(), folder, models)

    def drain() -> None:
        app.draining = True
        threading.Thread(target=wait_idle, daemon=True).start()

    def wait_idle() -> None:
        while not app.idle:
            time.sleep(0.02)
        time.sleep(0.1)  # what was handed to Robyn last is still being written
        control.report("idle")

    def stop() -> None:
        app.draining = True
        client.fail_all(Unavailable("the server is stopping", code="draining"))
        deadline = time.monotonic() + 1.0
        while not app.idle and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.1)
        lines.leave(0)

    def beat(loop: asyncio.AbstractEventLoop) -> None:
        control.beat()
        loop.call_later(BEAT_SECONDS, beat, loop)

    async def up() -> None:
        try:
            restore = narrow_affinity(control.birth.index, config.pin_http)
            tune_listener(config)
            loop = asyncio.get_running_loop()
            loop.call_later(0.5, restore)  # the pool has its size by then
            loop.call_later(0.05, control.report, "ready")
            beat(loop)
        except Exception:
            log.exception("the HTTP process cannot start")
            lines.leave(1)

    sys.setswitchinterval(SWITCH_SECONDS)
    # Robyn reads its settings there.
    sys.argv = ["app.py", "--log-level", "WARNING", "--workers", "1", "--disable-openapi"]
    robyn = Robyn(str(folder / "app.py"), config=RobynConfig())  # where it looks for a robyn.env to load, so not here
    register(robyn, app)
    robyn.startup_handler(up)
    orders = {"drain": drain, "stop": stop, "seats": client.use, "models": models.told}
    control.listen(orders | dict.fromkeys(("loaded", "failed"), lambda told: models.answered(*told)))
    client.start()
    deadline = time.monotonic() + (MEET_SECONDS if control.birth.engine_ready else 0.0)
    while (client.phase == "lost" or not app.models.default.ready) and time.monotonic() < deadline:
        time.sleep(0.005)  # who listens before would refuse what its neighbours answer
    freeze_loaded()
    robyn.start(config.host or "127.0.0.1", config.port, _check_port=False)
    return 1


def register(robyn: Robyn, app: HttpApp) -> None:
    """Give Robyn the table, HEAD beside every GET, OPTIONS everywhere, and an answer of ours for all the rest."""
    app.release_iterators = release_iterators
    methods_by_path: dict[str, list[str]] = defaultdict(list)
    for route in ROUTES:
        for method in [route.method, "HEAD"] if route.method == "GET" else [route.method]:
            methods_by_path[route.path].append(method)
            reads = "nothing" if method != "POST" else "file" if route.takes_file else "json"
            handler = endpoint(
                app,
                route.handler,
                access=route.access,
                form=dialects.form_of_errors if route.form == "chat" else route.form,
                reads=reads,
                may_be_empty=route.may_be_empty,
            )
            add(robyn, method, route.path, handler)
    others = endpoint(app, unknown(dict(methods_by_path)), access="open")
    asked = endpoint(app, preflight, access="open")
    for path in ("/", "/*rest"):
        add(robyn, "OPTIONS", path, asked)
        for method in METHODS:
            if path != "/" or method not in methods_by_path["/"]:
                add(robyn, method, path, others)


def add(robyn: Robyn, method: str, path: str, handler: object) -> None:
    """Register one handler."""
    robyn.add_route(getattr(HttpMethod, method), path, handler)


def narrow_affinity(index: int, keep: bool) -> Callable[[], None]:
    """Put all threads on one CPU, another for each HTTP process; returns what undoes it, nothing when it is to be kept.

    Each waiting stream holds a thread of a pool whose size is 512 divided by the CPUs that are visible when the server below is
    built, right after the startup handler: 512 with one CPU, 4 with 128. Staying there halves the cost of a chunk, because
    threads that hand the interpreter's lock to each other then do so on one CPU.
    """
    if not hasattr(os, "sched_setaffinity"):
        return lambda: None
    everywhere = sorted(os.sched_getaffinity(0), reverse=True)

    def put(cpus: set[int]) -> bool:
        try:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:  # a thread that has just ended
            return put(cpus)
        except OSError:
            return False
        return True

    turned = everywhere[index % len(everywhere) :] + everywhere[: index % len(everywhere)]
    if not any(put({cpu}) for cpu in turned):
        log.warning("the threads cannot be put on one CPU: few streams will run at a time")
    return (lambda: None) if keep else (lambda: put(set(everywhere)))


def tune_listener(config: Config) -> None:
    """Options that accepted connections inherit: dead and stuck peers are noticed by the kernel."""
    for name in os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"):
        with contextlib.suppress(OSError, ValueError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            listener = socket.socket(fileno=os.dup(int(name)))
            with listener:
                if listener.family in (socket.AF_INET, socket.AF_INET6) and listener.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                ):
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for option, value in (
                        ("TCP_KEEPIDLE", 30),
                        ("TCP_KEEPINTVL", 10),
                        ("TCP_KEEPCNT", 3),
                        ("TCP_USER_TIMEOUT", int(config.stream_stall_seconds * 1000)),
                    ):
                        if hasattr(socket, option):
                            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
