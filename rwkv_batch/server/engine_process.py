"""The engine's process: loads the model, then steps until told to stop."""

import faulthandler
import logging
import math
import os
import sys
import threading
import time

from rwkv_batch import metrics
from rwkv_batch.errors import CheckpointError, UsageError
from rwkv_batch.ipc.server import EngineServer
from rwkv_batch.server import lines
from rwkv_batch.server.control import BEAT_SECONDS, Control, address_in
from rwkv_batch.server.exit_codes import EXIT_ENGINE, EXIT_LOST, EXIT_USAGE

log = logging.getLogger(__name__)


def run(control: Control) -> int:
    """Load, then step until told to stop; returns the exit code."""
    config = control.config
    faulthandler.enable()
    server = EngineServer(address_in(control.folder), heartbeat=config.heartbeat, peer_seconds=config.peer_seconds)
    server.on_beat = metrics.EngineMetrics().update
    stopping = threading.Event()

    def stop() -> None:
        stopping.set()
        if server.core is None:
            lines.leave(0)
        server.core.stop()

    control.listen({"drain": server.drain, "stop": stop})
    watching = (control, server, config.watchdog_seconds, stopping)
    threading.Thread(target=watch, args=watching, name="watchdog", daemon=True).start()
    server.start()
    try:
        if config.fake_engine is not None:
            from rwkv_batch.engine.stub_engine import build_stub as build
        else:
            from rwkv_batch.engine.build import build_engine_loop as build
        core = build(config, server.deliver)
    except (UsageError, CheckpointError) as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    server.attach(core)
    control.report("ready", info=core.info)
    try:
        core.run()
    except Exception:
        log.exception("the engine cannot go on")
    server.close()
    if not stopping.is_set():
        return EXIT_ENGINE
    return EXIT_LOST if core.lost_sessions else 0


def watch(control: Control, server: EngineServer, seconds: float, stopping: threading.Event) -> None:
    """Give signs of life as long as the core goes on; end this process when it takes longer than `seconds` for a step.

    A core that stops takes its time to write its sessions, and the supervisor bounds that.
    """
    pause = min(BEAT_SECONDS, (seconds or math.inf) / 4)
    last_step, stuck = None, 0.0
    while True:
        time.sleep(pause)
        stuck += pause  # not by the clock: it also runs while this process sleeps
        if server.core is None or stopping.is_set() or server.core.last_step != last_step:
            last_step, stuck = server.core and server.core.last_step, 0.0
        if seconds and stuck > seconds:
            log.error("no step for %.0f s: the engine hangs and ends", stuck)
            lines.ERR.flush()
            faulthandler.dump_traceback(all_threads=True)
            os._exit(EXIT_ENGINE)
        control.beat()
