"""The engine's process: loads the model, then steps until told to stop."""

import contextlib
import faulthandler
import logging
import math
import os
import re
import sys
import threading
import time
from pathlib import Path

from rwkv_batch import metrics
from rwkv_batch.errors import CheckpointError, EngineFailed, NoMemory, RwkvBatchError, UsageError
from rwkv_batch.ipc.server import EngineServer
from rwkv_batch.kernels import compiler
from rwkv_batch.request import Failure
from rwkv_batch.server import lines
from rwkv_batch.server.control import BEAT_SECONDS, Control, address_in, freeze_loaded
from rwkv_batch.server.exit_codes import EXIT_ENGINE, EXIT_LOST, EXIT_USAGE
from rwkv_batch.sessions.remote.messages import path_in

log = logging.getLogger(__name__)


def run(control: Control) -> int:
    """Load, then step until told to stop; returns the exit code."""
    config = control.config
    faulthandler.enable()
    stay_on(control.birth.cpus)
    if config.fake_engine is None:
        threading.Thread(target=read_ahead, args=(Path(config.model_path or ""),), name="read ahead", daemon=True).start()
        compiler.build_early(config)
    server = EngineServer(
        address_in(control.folder, control.birth.index), heartbeat=config.heartbeat, peer_seconds=config.peer_seconds
    )
    server.on_beat = metrics.EngineMetrics(control.birth.index).update
    stopping = threading.Event()

    def stop() -> None:
        stopping.set()
        if server.core is None:
            lines.leave(0)
        server.core.stop()

    def drain() -> None:
        server.drain()
        threading.Thread(target=wait_idle, args=(control, server), name="drain", daemon=True).start()

    control.listen({"drain": drain, "stop": stop})
    watching = (control, server, config.watchdog_seconds, stopping)
    threading.Thread(target=watch, args=watching, name="watchdog", daemon=True).start()
    server.start()
    try:
        if config.fake_engine is not None:
            from rwkv_batch.engine.stub_engine import build_stub

            core = build_stub(config, server.deliver)
        else:
            from rwkv_batch.engine.build import build_engine_loop

            core = build_engine_loop(config, server.deliver, path_in(control.folder) if config.has_store else None)
        core.remember_in(control.folder / f"{Path(server.address).name}.states")
    except (UsageError, CheckpointError) as error:
        control.report("failed", failure=Failure.of("", error))
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    except Exception as error:
        control.report("failed", failure=Failure.of("", without_memory(error)))
        raise
    freeze_loaded(collect_rarely=True)
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


def read_ahead(file: Path, meminfo: Path = Path("/proc/meminfo")) -> None:
    """Have the system read a model's file into memory, if that is large enough, while torch is imported.

    Who maps a file that lies on a disk waits for some pages of it at a time, which is far below what the disk can do.
    """
    with contextlib.suppress(OSError, AttributeError):  # no such file, no Linux: whoever reads it says what is wrong
        free = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo.read_text(), re.M)
        if free is None or int(free[1]) * 1024 < file.stat().st_size:
            return
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def without_memory(error: Exception) -> RwkvBatchError:
    """What is told of a fault that ended the start: that memory was short, where it was, else that it failed."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # that of torch
        return NoMemory("the engine ran out of memory while it started: " + " ".join(str(error).split())[:300])
    return EngineFailed("the engine failed while it started; its log says how")


def stay_on(cpus: list[int]) -> None:
    """Keep this process, whose threads all start later, on these CPUs; none = all."""
    if cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)


def wait_idle(control: Control, server: EngineServer) -> None:
    """Tell the supervisor when nothing is left to do."""
    while server.core is not None and any(server.core.stats().get(f"requests_{what}", 0) for what in ("running", "waiting")):
        time.sleep(0.1)
    control.report("idle")


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
