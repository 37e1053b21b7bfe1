#!/usr/bin/env python3
"""How many streams and chunks a second the HTTP side carries, with a fake engine of 20 ms steps behind it.

    python bench/served/frontend.py [--streams 64,256,512] [--workers 1,2,4] [--seconds 4] [--out bench/results/frontend.json]

Every stream gets one token each step, sent as its own chunk. The table says how many chunks a second came of those the engine
made, the time between two chunks of a stream (20 ms when nothing is late) and the CPU of each side. Beside it, when FastAPI and
uvicorn are installed in the same environment, one uvicorn process over the same engine process and the same messages.
"""

import argparse
import asyncio
import importlib.util
import itertools
import json
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

STEP_MS = 20
BODY = {"contents": ["a"], "stream": True, "chunk_size": 1, "stop_tokens": []}


class Reader(asyncio.Protocol):
    """One stream; notes when text arrives and how many events came, nothing else, so that the client costs little."""

    def __init__(self, port: int, num_tokens: int):
        body = json.dumps({**BODY, "max_tokens": num_tokens}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.request = head.encode() + body
        self.arrivals: list[tuple[float, int]] = []
        self.done = asyncio.get_running_loop().create_future()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self.transport = transport
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Count the events in a piece."""
        if num := data.count(b'"content": " w'):
            self.arrivals.append((time.perf_counter(), num))
        if b"[DONE]" in data and not self.done.done():
            self.done.set_result(None)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """A stream that broke counts as ended."""
        if not self.done.done():
            self.done.set_result(None)


async def read_streams(port: int, num: int, num_tokens: int) -> list[list[tuple[float, int]]]:
    """Open streams together and read them to their ends."""
    loop = asyncio.get_running_loop()
    readers = [(await loop.create_connection(lambda: Reader(port, num_tokens), "127.0.0.1", port))[1] for _ in range(num)]
    await asyncio.gather(*(reader.done for reader in readers))
    return [reader.arrivals for reader in readers]


def client_process(port: int, num: int, num_tokens: int) -> tuple[list[list[tuple[float, int]]], float]:
    """Arrivals of some streams, and the CPU seconds that reading them took."""
    before = time.process_time()
    return asyncio.run(read_streams(port, num, num_tokens)), time.process_time() - before


def cpu_seconds(pid: int) -> float:
    """CPU time a process has used."""
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int, role: str) -> list[int]:
    """The server's processes of one role."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid and words[-3:-1] == [b"--role", role.encode()]:
            found.append(int(path.name))
    return found


class Server:
    """app.py with the fake engine; as a context manager it is stopped."""

    def __init__(self, num_workers: int, slots: int):
        self.folder = tempfile.TemporaryDirectory(prefix="frontend-")
        self.log = open(Path(self.folder.name) / "log", "w+")  # noqa: SIM115 - closed in __exit__
        flags = f"--fake-engine {STEP_MS} --port 0 --slots {slots} --queue 4096 --http-workers {num_workers} --no-access-log"
        environ = {**os.environ, "XDG_RUNTIME_DIR": self.folder.name}
        command = [sys.executable, str(ROOT / "app.py"), *flags.split()]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=environ)

    def __enter__(self) -> "Server":
        deadline = time.monotonic() + 30
        while not (found := re.search(r"address  http://\S+:(\d+)", Path(self.log.name).read_text())):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(Path(self.log.name).read_text())
            time.sleep(0.05)
        self.port = int(found[1])
        time.sleep(1.0)  # every process has its tokenizer and has widened its threads
        return self

    def __exit__(self, *_: object) -> None:
        for _ in range(2):
            self.process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        self.process.wait(20)
        self.log.close()
        self.folder.cleanup()

    @property
    def engine_address(self) -> str:
        """Where another HTTP process can reach the engine."""
        return f"ipc://{next(Path(self.folder.name).glob('rwkv-batch-*'))}/engine-0"


def measure(name: str, port: int, pids: list[int], num_streams: int, seconds: float) -> dict[str, Any]:
    """One cell of the table; the first quarter of the time is left out, while streams are still being opened."""
    num_tokens = round(seconds * 1000 / STEP_MS)
    num_clients = 2 if num_streams > 64 else 1
    shares = [num_streams // num_clients + (part < num_streams % num_clients) for part in range(num_clients)]
    before = [cpu_seconds(pid) for pid in pids]
    began = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(num_clients) as pool:
        parts = pool.starmap(client_process, [(port, num, num_tokens) for num in shares])
    wall = time.perf_counter() - began
    server_cpu = sum(cpu_seconds(pid) for pid in pids) - sum(before)
    streams = [arrivals for part, _ in parts for arrivals in part]
    start = max(arrivals[0][0] for arrivals in streams if arrivals)
    end = min(arrivals[-1][0] for arrivals in streams if arrivals)
    num_chunks, gaps = 0, []
    for arrivals in streams:
        inside = [(when, num) for when, num in arrivals if start <= when <= end]
        num_chunks += sum(num for _, num in inside)
        gaps += [b[0] - a[0] for a, b in itertools.pairwise(inside)]
    gaps.sort()
    total = sum(num for arrivals in streams for _, num in arrivals)
    return {
        "server": name,
        "streams": num_streams,
        "chunks_per_second": round(num_chunks / (end - start)) if end > start else 0,
        "offered_per_second": num_streams * 1000 // STEP_MS,
        "complete": total == num_streams * num_tokens,
        "gap_ms_p50": round(gaps[len(gaps) // 2] * 1000, 1) if gaps else None,
        "gap_ms_p99": round(gaps[len(gaps) * 99 // 100] * 1000, 1) if gaps else None,
        "server_cpu_percent": round(100 * server_cpu / wall),
        "client_cpu_percent": round(100 * sum(cpu for _, cpu in parts) / wall),
        "microseconds_per_chunk": round(server_cpu / total * 1e6, 1) if total else None,
    }


FASTAPI = """
import asyncio, json, sys
sys.path.insert(0, {root!r})
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from unittest import mock
with mock.patch.object(sys, "argv", ["x"]):
    from routes.native.chat import ChunkFormatter
    from routes.schemas import ContentsBody, parse, validate
from rwkv_batch.ipc.client import EngineClient
from rwkv_batch.ipc.tickets import Ticket
from rwkv_batch.config import Config

app, config, pending = FastAPI(), Config(), []
client = EngineClient({address!r})

def flush(items):
    for queue, data in items:
        queue.put_nowait(data)

def tick():  # one wake-up of the loop for all streams of a step
    global pending
    if pending:
        items, pending = pending, []
        client.loop.call_soon_threadsafe(flush, items)

client.tick = tick

@app.post("/v1/chat/completions")
async def chat(request: Request):
    client.loop = asyncio.get_running_loop()
    body = validate(ContentsBody, parse(await request.body(), 64))
    made = body.to_request(body.checked_texts(config), "u%d" % id(request), config, lambda text: list(text.encode()))
    chunks, queue = ChunkFormatter(1, body.chunk_size), asyncio.Queue()
    def translate(event):
        if data := chunks.feed(event):
            pending.append((queue, data))
    ticket = client.submit(made, translate, ended=lambda: pending.append((queue, None)))
    async def stream():
        while (data := await queue.get()) is not None:
            yield data
    return StreamingResponse(stream(), media_type="text/event-stream")

client.start()
uvicorn.run(app, port={port}, log_level="error", access_log=False)
"""


def measure_fastapi(num_streams: int, seconds: float) -> dict[str, Any]:
    """One uvicorn process in front of the same engine."""
    with Server(1, max(512, num_streams)) as server:
        port = server.port + 1 if server.port < 65000 else server.port - 1
        program = FASTAPI.format(root=str(ROOT), address=server.engine_address, port=port)
        uvicorn = subprocess.Popen([sys.executable, "-c", program])
        try:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                try:
                    asyncio.run(read_streams(port, 1, 2))
                    break
                except OSError:
                    time.sleep(0.2)
            return measure("FastAPI + uvicorn", port, [uvicorn.pid], num_streams, seconds)
        finally:
            uvicorn.terminate()
            uvicorn.wait(10)


def main() -> int:
    """Measure all cells, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="64,256,512")
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--out", help="write the table here, JSON")
    args = parser.parse_args()
    cells = []
    head = ("server", "streams", "chunks/s", "of", "gap p50", "p99 ms", "server CPU", "client CPU", "us/chunk")
    print(f"{head[0]:20}" + "".join(f"{word:>11}" for word in head[1:]))

    def show(cell: dict[str, Any]) -> None:
        cells.append(cell)
        keys = ("streams", "chunks_per_second", "offered_per_second", "gap_ms_p50", "gap_ms_p99")
        more = (f"{cell['server_cpu_percent']} %", f"{cell['client_cpu_percent']} %", cell["microseconds_per_chunk"])
        values = [cell[key] for key in keys] + list(more)
        print(
            f"{cell['server']:20}"
            + "".join(f"{value!s:>11}" for value in values)
            + ("" if cell["complete"] else "  incomplete")
        )

    for num_streams in map(int, args.streams.split(",")):
        for workers in map(int, args.workers.split(",")):
            if num_streams > workers * 470:
                print(f"Robyn x {workers:<12}{num_streams:>11}  skipped: one HTTP process takes 480 answers (--max-streams)")
                continue
            with Server(workers, max(512, num_streams)) as server:
                pids = children(server.process.pid, "http")
                show(measure(f"Robyn x {workers}", server.port, pids, num_streams, args.seconds))
        if importlib.util.find_spec("fastapi") and importlib.util.find_spec("uvicorn"):
            show(measure_fastapi(num_streams, args.seconds))
        else:
            print("FastAPI + uvicorn     skipped: not installed in this environment")
    if args.out:
        machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        document = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "step_ms": STEP_MS, "cells": cells}
        Path(args.out).write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
