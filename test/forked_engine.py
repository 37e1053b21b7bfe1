"""Engines of a tiny model on demand, each in a process of its own that begins in milliseconds: torch is loaded once.

python forked_engine.py ADDRESS SESSIONS.db    each line on stdin starts one, whose process id is answered
"""

import os
import signal
import sys
from pathlib import Path

import torch
from models import TINY, random_weights, tokenizer_for

from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.engine_loop import EngineLoop
from rwkv_batch.ipc.messages import EngineInfo
from rwkv_batch.ipc.server import EngineServer
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.scheduling.scheduler import Scheduler
from rwkv_batch.sessions.pool import StatePool
from rwkv_batch.sessions.sqlite.database import SessionDatabase
from rwkv_batch.sessions.state_file import StateFile
from sampling.reference import ReferenceSampler

SLOTS = 64


def serve(address: str, path: str, snapshot_tokens: int) -> None:
    """Run an engine until it is killed."""
    weights = random_weights(TINY, 256)
    sessions = StatePool(
        SessionDatabase(path),
        StateFile(weights.fingerprint, weights.shape),
        torch.device("cpu"),
        snapshot_tokens=snapshot_tokens,
        l1_sessions=8,
        l2_sessions=8,
    )
    server = EngineServer(address)
    loop = EngineLoop(
        Engine(Model(weights), ReferenceSampler(SLOTS, weights.output_ids), State(weights.shape, SLOTS)),
        Scheduler(num_slots=SLOTS, prefill_budget=256, mixed=True),
        tokenizer_for(256),
        server.deliver,
        sessions=sessions,
    )
    loop.info = EngineInfo(model="tiny")
    server.start()
    server.attach(loop)
    loop.run()


def main(address: str, path: str) -> None:
    """Start what is asked for. Every second engine writes whole states often."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    random_weights(TINY, 256)
    for number, _ in enumerate(sys.stdin):
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        engine = os.fork()
        if not engine:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(address, path, 64 if number % 2 else 2048)
            os._exit(1)
        print(engine, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
