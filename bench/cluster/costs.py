#!/usr/bin/env python3
"""Measure what sessions in a shared database, and a proxy in front, cost a turn.

    python app.py --fake-engine 5 --port 8000 & sudo haproxy -D -f deploy/haproxy-cluster.cfg    (with this server in it)
    python bench/cluster/costs.py --state-url postgresql://… [--direct http://127.0.0.1:8000 --proxy http://127.0.0.1:8080
        --proxy-pid PID] [--out bench/results/cluster-cpu.json]

turns    the two statements of a turn of 320 tokens, one turn at a time and 16 that end together, and CPU of the client
proxy    a short call by turns with and without the proxy, and 32 streams of one chunk a token: CPU of the proxy for each chunk
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.client import call, open_stream  # noqa: E402
from rwkv_batch.sessions.postgres.database import PostgresStore  # noqa: E402
from rwkv_batch.sessions.postgres.objects import Folder  # noqa: E402
from rwkv_batch.sessions.store import NewVersion, Source  # noqa: E402

TOKENS = 320
CHAT = "/v1/chat/completions"


def spread(seconds: list[float]) -> dict[str, float]:
    """Milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return {name: round(value * 1e3, 3) for name, value in (("p50", cuts[49]), ("p90", cuts[89]), ("p99", cuts[98]))}


def measure_turns(url: str, group: int, rounds: int) -> dict[str, Any]:
    """Turns of `group` sessions that end together, round after round."""
    with tempfile.TemporaryDirectory() as folder:
        store = PostgresStore(url, Folder(folder))
        names = [f"bench {group} {os.getpid()} {number}" for number in range(group)]
        last: dict[str, NewVersion] = {}
        claims, writes, cpu = [], [], 0.0
        for turn in range(1, rounds + 11):
            new, began_cpu = [], time.process_time()
            for name in names:
                began = time.perf_counter()
                claim = store.claim("", name)
                claims.append(time.perf_counter() - began)
                before = last.get(name)
                source = Source(name, before.version, before.updated) if before else None
                ids = list(range(TOKENS))
                version = NewVersion("", name, turn, turn * TOKENS, 0, None, time.time(), source=source, ids=ids, claim=claim)
                new.append(version)
            began = time.perf_counter()
            store.write(new)
            writes.append(time.perf_counter() - began)
            last = {version.name: version for version in new}
            if turn == 10:  # statements are prepared
                claims, writes, cpu = [], [], 0.0
            else:
                cpu += time.process_time() - began_cpu
        for name in names:
            store.delete("", name, prefix=False)
        store.close()
    turns = [sum(claims[number * group : (number + 1) * group]) / group + write / group for number, write in enumerate(writes)]
    return {
        "together": group, "rounds": rounds, "claim_ms": spread(claims), "write_ms": spread(writes), "turn_ms": spread(turns),
        "client_cpu_ms": round(cpu / rounds / group * 1e3, 3),
    }  # fmt: skip


async def measure_calls(direct: str, proxy: str, count: int) -> dict[str, Any]:
    """A call of one token, by turns straight and through the proxy."""
    body = {"contents": ["hi"], "max_tokens": 1}
    seconds: dict[str, list[float]] = {direct: [], proxy: []}
    for _ in range(count):
        for url in (direct, proxy):
            at = urlsplit(url)
            began = time.perf_counter()
            reply = await call(at.hostname, at.port, CHAT, body)
            seconds[url].append(time.perf_counter() - began)
            assert reply.status == 200, reply
    added = statistics.median(b - a for a, b in zip(seconds[direct], seconds[proxy], strict=True))
    return {"direct_ms": spread(seconds[direct]), "proxy_ms": spread(seconds[proxy]), "added_ms": round(added * 1e3, 3)}


async def measure_chunks(proxy: str, pid: int, streams: int, tokens: int) -> dict[str, Any]:
    """CPU of the proxy for each chunk of streams through it."""
    at, chunks = urlsplit(proxy), 0

    async def read() -> None:
        nonlocal chunks
        body = {"contents": ["hi"], "max_tokens": tokens, "stream": True, "chunk_size": 1}
        async with await open_stream(at.hostname, at.port, CHAT, body) as stream:
            async for _ in stream.events():
                chunks += 1

    before = cpu_of(pid)
    await asyncio.gather(*(read() for _ in range(streams)))
    return {"streams": streams, "chunks": chunks, "cpu_us_a_chunk": round((cpu_of(pid) - before) / chunks * 1e6, 1)}


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-url")
    parser.add_argument("--direct")
    parser.add_argument("--proxy")
    parser.add_argument("--proxy-pid", type=int)
    parser.add_argument("--note", default="", help="about the machine, for the result")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "cluster-cpu.json")
    args = parser.parse_args()
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load": round(os.getloadavg()[0], 1)}
    machine |= {"note": args.note} if args.note else {}
    result: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "machine": machine}
    if args.state_url:
        result["turns"] = [measure_turns(args.state_url, group, args.rounds // group + 10) for group in (1, 16)]
    if args.proxy:
        result["calls"] = asyncio.run(measure_calls(args.direct, args.proxy, args.rounds))
        result["chunks"] = asyncio.run(measure_chunks(args.proxy, args.proxy_pid, 32, 200))
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
