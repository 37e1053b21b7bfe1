#!/usr/bin/env python3
"""What the whole path costs: one batch, many streams and single requests over HTTP beside the engine's speed; mixed load.

    python app.py --model-path M.pth --port 8000 --slots 320 &
    python bench/http_ladder.py --url http://127.0.0.1:8000 --engine-tokens-per-second 23000 [--mixed 20000] [--out FILE]

Prompts of 16 words, all different, 256 tokens each, end tokens ignored. "batch" is one request of --rows prompts, whole and
as a stream; "streams" are as many requests of one prompt; "singles" are 16 requests of one prompt at once against one alone,
each the median of three rounds by turns.
Mixed load joins, leaves and cancels at random; the GPU's and the processes' memory is read at a tenth of it and at its end.
"""

import argparse
import asyncio
import json
import random
import shutil
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import serve
from bench.client import call, open_stream

TOKENS = 256
STREAMS_OF_CLIENT = 40  # at most, of a client process
ROUNDS = 3  # of one and of sixteen streams, by turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--rows", type=int, default=320)
    parser.add_argument("--engine-tokens-per-second", type=float, default=0.0, help="of the engine at --rows, for the ratios")
    parser.add_argument("--mixed", type=int, default=0, help="requests of mixed load")
    parser.add_argument("--processes", type=int, default=8, help="client processes")
    parser.add_argument("--out")
    args = parser.parse_args()
    asyncio.run(batch(args, 4, stream=False, tokens=16))  # warm
    result = {
        "batch": asyncio.run(batch(args, args.rows, stream=False)),
        "batch_stream": asyncio.run(batch(args, args.rows, stream=True)),
        "streams": streams(args, args.rows, args.rows),
    }
    turns = [(streams(args, 1, 1), streams(args, 16, 16)) for _ in range(ROUNDS)]
    for name, runs in zip(("single", "singles_16"), zip(*turns, strict=True), strict=True):
        result[name] = sorted(runs, key=lambda run: run["seconds"])[ROUNDS // 2]
    result["singles_16"]["times_one"] = result["singles_16"]["seconds"] / result["single"]["seconds"]
    if args.engine_tokens_per_second:
        for name in ("batch", "batch_stream", "streams"):
            result[name]["of_engine"] = result[name]["tokens_per_second"] / args.engine_tokens_per_second
    if args.mixed:
        result["mixed"] = mixed(args)
    stats = asyncio.run(stats_of(args))
    result["graph_steps"], result["eager_decode_steps"] = (
        stats.get(name) for name in ("graph_steps_total", "eager_decode_steps_total")
    )
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), **result}, indent=1) + "\n")
    if result["graph_steps"] and result["eager_decode_steps"]:
        sys.exit("decode steps ran outside the captured graphs")


def body_of(rng: random.Random, rows: int, tokens: int, stream: bool) -> dict:
    """A native request of `rows` different prompts."""
    contents = [serve.prompt_text(rng, 16) for _ in range(rows)]
    settings = {"max_tokens": tokens, "ignore_eos": True, "stop_tokens": [], "stream": stream, "chunk_size": 1}
    return {"contents": contents, "temperature": 1.0, "top_k": 50, "top_p": 0.6, **settings}


async def batch(args: argparse.Namespace, rows: int, *, stream: bool, tokens: int = TOKENS) -> dict:
    """One request of many prompts."""
    host, port = urlsplit(args.url).hostname, urlsplit(args.url).port
    body = body_of(random.Random(1), rows, tokens, stream)
    began = time.perf_counter()
    async with await open_stream(host, port, "/v1/chat/completions", body) as answer:
        content = await answer.read()
    seconds = time.perf_counter() - began
    assert answer.status == 200, content[:300]
    return {"rows": rows, "seconds": seconds, "tokens_per_second": rows * tokens / seconds}


def streams(args: argparse.Namespace, concurrency: int, requests: int, *, tokens: int = TOKENS) -> dict:
    """So many requests of one prompt at once, through the load generator."""
    processes = min(args.processes, -(-concurrency // STREAMS_OF_CLIENT))  # those of one process start together
    argv = ["serve", "--url", args.url, "--concurrency", str(concurrency), "--num-prompts", str(requests)]
    argv += ["--prompt-words", "16", "--max-tokens", str(tokens), "--ignore-eos", "--processes", str(processes)]
    keep, sys.argv = sys.argv, argv
    try:
        options = serve.read_arguments()
    finally:
        sys.argv = keep
    with serve.multiprocessing.get_context("spawn").Pool(processes) as pool:
        parts = pool.starmap(serve.client_process, [(options, part) for part in range(processes)])
    found = serve.summarize(options, [record for part, _ in parts for record in part], sum(cpu for _, cpu in parts))
    wanted = ("requests", "failed", "errors", "seconds", "tokens_per_second", "ttft_ms", "itl_ms", "client_cpu_percent")
    return {name: found[name] for name in wanted}


def mixed(args: argparse.Namespace) -> dict:
    """Random joins, leaves and cancels; memory before and after."""
    host, port = urlsplit(args.url).hostname, urlsplit(args.url).port
    memory: dict[str, dict] = {}
    counts = {"whole": 0, "left": 0, "failed": 0}

    async def one(rng: random.Random) -> None:
        body = body_of(rng, rng.choice((1, 1, 1, 2, 5)), rng.choice((1, 8, 24, 60)), True)
        body["temperature"] = rng.choice((0, 0.7, 1.0))
        body["presence_penalty"] = rng.choice((0, 0.5))
        leave = rng.random() < 0.2
        async with await open_stream(host, port, "/v1/chat/completions", body) as answer:
            ended = False
            async for payload in answer.events():
                ended = payload == b"[DONE]"
                if leave and not ended:
                    answer.reset()
                    counts["left"] += 1
                    return
        counts["whole" if ended else "failed"] += 1

    async def run() -> None:
        rng = random.Random(3)
        left = iter(range(args.mixed))

        async def client(number: int) -> None:
            own = random.Random(number)
            for i in left:
                if i == args.mixed // 10:
                    memory["at a tenth"] = await used(host, port)
                try:
                    await one(own)
                except (OSError, asyncio.IncompleteReadError):
                    counts["failed"] += 1

        await asyncio.gather(*(client(rng.getrandbits(40)) for _ in range(256)))
        await asyncio.sleep(2)
        memory["at the end"] = await used(host, port)

    began = time.perf_counter()
    asyncio.run(run())
    return {"requests": args.mixed, "seconds": time.perf_counter() - began, **counts, "memory": memory}


async def used(host: str, port: int) -> dict:
    """MiB on the GPU and of the server's processes, and what the server says of its slots."""
    gpu = await output_of("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    found = (await output_of("pgrep", "-f", "app.py")).split()
    resident = 0
    for pid in found:
        status = Path(f"/proc/{pid}/status")
        if status.exists():
            resident += next((int(x.split()[1]) for x in status.read_text().splitlines() if x.startswith("VmRSS")), 0)
    stats = (await call(host, port, "/stats")).json()["engine"]
    return {"gpu_mib": int(gpu or 0), "processes_mib": resident // 1024, "slots_free": stats["slots_free"]}


async def stats_of(args: argparse.Namespace) -> dict:
    """What the server says of its engine."""
    return (await call(urlsplit(args.url).hostname, urlsplit(args.url).port, "/stats")).json()["engine"]


async def output_of(*command: str) -> str:
    """What a command prints; nothing where there is no such command."""
    if shutil.which(command[0]) is None:
        return ""
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode().strip()


if __name__ == "__main__":
    main()
