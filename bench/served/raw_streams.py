#!/usr/bin/env python3
"""Many one-token streams of a quick model at once, read as cheaply as a client can, so that the server is what is measured.

    python app.py --model-path M.pth --port 8000 --slots 340 --queue 4096 --http-workers 4 --no-access-log --state-db "" &
    python bench/served/raw_streams.py --url http://127.0.0.1:8000 --max-tokens 64      # warm
    python bench/served/raw_streams.py --url http://127.0.0.1:8000 [--engine-tokens-per-second 367519] [--out FILE]

Unlike `bench/serve.py`, which parses every event, this reads sockets and counts: events by their prefix, tokens by the `usage`
at the end of each stream. A stream without it has failed. "tokens_an_event" is above 1 where the server joins texts.
"client_cpu_percent" is of each client process; near 100 the run says nothing about the server.
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import select
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench import serve

USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
TAIL = 3000  # bytes at the end of a stream in which its usage is
PATIENCE = 10.0  # seconds without a byte on any stream


@dataclass
class Part:
    """What a client process has read; seconds from its first request sent."""

    tokens: int = 0
    events: int = 0
    reads: int = 0
    ended: int = 0
    first: float | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0


def request(args: argparse.Namespace, rng: random.Random) -> bytes:
    """A whole HTTP request."""
    body = {
        "contents": [serve.prompt_text(rng, 16)],
        "max_tokens": args.max_tokens,
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 0.6,
    }
    body |= {"stream": True, "chunk_size": 1, "ignore_eos": True, "stop_tokens": []}
    content = json.dumps(body).encode()
    head = ["POST /v1/chat/completions HTTP/1.1", f"Host: {urlsplit(args.url).netloc}", "Content-Type: application/json"]
    head += ["Connection: close", f"Content-Length: {len(content)}", "", ""]
    return "\r\n".join(head).encode() + content


def read(sockets: dict[int, socket.socket], poll: select.epoll) -> Iterator[tuple[int, bytes]]:
    """Yield what comes: (stream, bytes), none at its end; RuntimeError when nothing comes for long."""
    while sockets:
        ready = poll.poll(PATIENCE)
        if not ready:
            raise RuntimeError(f"nothing came for {PATIENCE:g} s; {len(sockets)} streams are open")
        for number, _ in ready:
            data = sockets[number].recv(262_144)
            if not data:
                poll.unregister(number)
                sockets.pop(number).close()
            yield number, data


def client(args: argparse.Namespace, number: int, barrier: Any, results: Any) -> None:
    """One client process with its share of the streams."""
    rng, poll, sockets, tails, part = random.Random(f"{args.seed} {number}"), select.epoll(), {}, {}, Part()
    where = urlsplit(args.url)
    for _ in range(serve.share(args.streams, args.processes, number)):
        opened = socket.create_connection((where.hostname, where.port or 80))
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets[opened.fileno()], tails[opened.fileno()] = opened, b""
        poll.register(opened.fileno(), select.EPOLLIN)
    requests = [request(args, rng) for _ in sockets]
    barrier.wait(PATIENCE)  # in vain where another process has failed
    began, cpu_before = time.monotonic(), time.process_time()
    for opened, content in zip(sockets.values(), requests, strict=True):
        opened.sendall(content)
    for stream, data in read(sockets, poll):
        part.reads += 1
        part.first = part.first or time.monotonic() - began
        part.events += data.count(b"data: ")
        tails[stream] = (tails[stream] + data)[-TAIL:]
        if not data and (usage := USAGE.search(tails[stream])):
            part.tokens += int(usage[1])
            part.ended += 1
    part.seconds, part.cpu_seconds = time.monotonic() - began, time.process_time() - cpu_before
    results.put(part)


def summarize(args: argparse.Namespace, parts: list[Part]) -> dict[str, Any]:
    """What all client processes read."""
    seconds, tokens = max(part.seconds for part in parts), sum(part.tokens for part in parts)
    events, reads = sum(part.events for part in parts), sum(part.reads for part in parts)
    found = {
        "streams": args.streams, "failed": args.streams - sum(part.ended for part in parts), "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1), "tokens_an_event": round(tokens / max(1, events), 3),
        "events_a_read": round(events / max(1, reads), 2), "first_ms": round(1e3 * min(part.first or 0.0 for part in parts), 1),
        "client_cpu_percent": round(100 * sum(part.cpu_seconds for part in parts) / seconds / args.processes, 1),
    }  # fmt: skip
    if args.engine_tokens_per_second:
        found["of_engine"] = found["tokens_per_second"] / args.engine_tokens_per_second
    return found


def main() -> int:
    """Run, print, write; 1 when a stream failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=320)
    parser.add_argument("--max-tokens", type=int, default=3072)
    parser.add_argument("--processes", type=int, default=4, help="client processes")
    parser.add_argument("--engine-tokens-per-second", type=float, default=0.0, help="of bench/engine.py, for the ratio")
    parser.add_argument("--seed", type=int, default=time.time_ns(), help="of the prompts; default: others each time")
    parser.add_argument("--out")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(args.processes), context.Queue()
    clients = [context.Process(target=client, args=(args, number, barrier, results)) for number in range(args.processes)]
    for process in clients:
        process.start()
    for process in clients:
        process.join()  # each puts one small part, which the pipe holds
    if any(process.exitcode for process in clients):
        return 1
    found = summarize(args, [results.get() for _ in clients])
    print(json.dumps(found))
    if args.out:
        document = {"date": time.strftime("%Y-%m-%d"), "cpus": os.cpu_count(), "max_tokens": args.max_tokens, **found}
        Path(args.out).write_text(json.dumps(document, indent=1) + "\n")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
