#!/usr/bin/env python3
"""Load a running server and measure what its clients see.

    python bench/serve.py --url http://127.0.0.1:8000 --concurrency 64 --num-prompts 512
    python bench/serve.py --request-rate 20 --num-prompts 400 --dialect openai --model M --out result.json

Closed loop by default: each of `--concurrency` clients sends its next request when its last has ended. With `--request-rate`
requests arrive by a Poisson process whatever the server does, which shows queueing that a closed loop hides. Several client
processes share the work, so that the client is not what is measured; its own share of the CPU is in the result, and a run in
which it is near 100 % says nothing about the server. Tokens are counted by the `usage` the server reports; from a server that
reports none, by events, which is said. Works against any server that speaks the native or the OpenAI dialect over HTTP.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.client import open_stream

PATHS = {"native": "/v1/chat/completions", "openai": "/v1/chat/completions"}
TEXT = (
    "the river ran under an old bridge where two children counted boats and wrote their names in a small book "
    "while the evening train crossed the valley with its windows lit and nobody on it knew the way home"
)
WORDS = TEXT.split()


@dataclass
class Record:
    """One request. Times in seconds; `gaps` are those between events with text."""

    began: float
    status: int = 0
    error: str = ""
    first: float | None = None
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_events: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def prompt_text(rng: random.Random, num_words: int) -> str:
    """Different for every request, so that no cache of prefixes helps."""
    return f"{rng.getrandbits(32):08x} " + " ".join(rng.choice(WORDS) for _ in range(max(0, num_words - 1)))


def make_body(args: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """One request in the dialect."""
    body: dict[str, Any] = {"max_tokens": args.max_tokens, "temperature": args.temperature, "stream": True}
    if args.model:
        body["model"] = args.model
    if args.ignore_eos:
        body["ignore_eos"] = True
    if args.dialect == "native":
        contents = [prompt_text(rng, args.prompt_words) for _ in range(args.rows)]
        return {**body, "contents": contents, "chunk_size": args.chunk_size, **({"stop_tokens": []} if args.ignore_eos else {})}
    message = {"role": "user", "content": prompt_text(rng, args.prompt_words)}
    return {
        **body,
        "messages": [message],
        "stream_options": {"include_usage": True},
        **({"n": args.rows} if args.rows > 1 else {}),
    }


def has_text(event: dict[str, Any]) -> bool:
    """Whether an event brings text, reasoning included."""
    return any(
        choice.get("text") or choice.get("delta", {}).get("content") or choice.get("delta", {}).get("reasoning_content")
        for choice in event.get("choices", [])
    )


async def one_request(args: argparse.Namespace, rng: random.Random) -> Record:
    """Send one request and read its stream."""
    host, port = urlsplit(args.url).hostname or "127.0.0.1", urlsplit(args.url).port or 80
    headers = {"Authorization": f"Bearer {args.password}"} if args.password else {}
    record = Record(time.time())
    began = last = time.perf_counter()
    try:
        async with await open_stream(host, port, args.path or PATHS[args.dialect], make_body(args, rng), headers) as stream:
            record.status = stream.status
            if stream.status != 200:
                record.error = (await stream.read())[:200].decode(errors="replace")
                return record
            done = False
            async for payload in stream.events():
                now = time.perf_counter()
                if payload == b"[DONE]":
                    done = True
                    continue
                event = json.loads(payload)
                if "error" in event:
                    record.error = str(event["error"])[:200]
                if event.get("usage"):
                    record.prompt_tokens = event["usage"]["prompt_tokens"]
                    record.completion_tokens = event["usage"]["completion_tokens"]
                if has_text(event):
                    record.num_events += 1
                    if record.first is None:
                        record.first = now - began
                    else:
                        record.gaps.append(now - last)
                    last = now
            if not done and not record.error:
                record.error = "ended without [DONE]"
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"[:200]
    record.total = time.perf_counter() - began
    return record


async def closed_loop(args: argparse.Namespace, part: int) -> list[Record]:
    """This process's clients, each with one request at a time."""
    left = iter(range(share(args.num_prompts, args.processes, part)))
    records: list[Record] = []

    async def client(number: int) -> None:
        rng = random.Random(f"{args.seed} {part} {number}")
        for _ in left:
            records.append(await one_request(args, rng))

    await asyncio.gather(*(client(number) for number in range(share(args.concurrency, args.processes, part))))
    return records


async def poisson(args: argparse.Namespace, part: int) -> list[Record]:
    """This process's arrivals; several Poisson processes add up to one."""
    rng = random.Random(f"{args.seed} {part}")
    tasks = []
    due = time.perf_counter()
    for number in range(share(args.num_prompts, args.processes, part)):
        due += rng.expovariate(args.request_rate / args.processes)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one_request(args, random.Random(f"{args.seed} {part} {number}"))))
    return list(await asyncio.gather(*tasks))


def share(total: int, parts: int, part: int) -> int:
    """An even part of a total."""
    return total // parts + (part < total % parts)


def client_process(args: argparse.Namespace, part: int) -> tuple[list[Record], float]:
    """One client process: its records, and its CPU time in seconds."""
    before = time.process_time()
    records = asyncio.run((poisson if args.request_rate else closed_loop)(args, part))
    return records, time.process_time() - before


def percentile(values: list[float], share_below: float) -> float | None:
    """The value below which a share of the values lies; None of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share_below * len(ordered)))] if ordered else None


def spread(values: list[float]) -> dict[str, float | None]:
    """Mean and percentiles in milliseconds."""
    found = {"mean": sum(values) / len(values) if values else None, "p50": percentile(values, 0.5)}
    found |= {"p90": percentile(values, 0.9), "p99": percentile(values, 0.99), "max": max(values, default=None)}
    return {name: None if value is None else round(value * 1000, 3) for name, value in found.items()}


def summarize(args: argparse.Namespace, records: list[Record], cpu_seconds: float) -> dict[str, Any]:
    """What the run showed."""
    good = [record for record in records if not record.error]
    began = min(record.began for record in records)
    seconds = max(record.began + record.total for record in records) - began
    by_usage = all(record.completion_tokens is not None for record in good)
    tokens = sum(record.completion_tokens if by_usage else record.num_events for record in good)
    errors: dict[str, int] = {}
    for record in records:
        if record.error:
            errors[f"{record.status} {record.error}"] = errors.get(f"{record.status} {record.error}", 0) + 1
    return {
        "requests": len(records),
        "failed": len(records) - len(good),
        "errors": errors,
        "seconds": round(seconds, 3),
        "requests_per_second": round(len(good) / seconds, 3),
        "tokens": tokens,
        "tokens_counted_by": "usage" if by_usage else "events",
        "tokens_per_second": round(tokens / seconds, 2),
        "prompt_tokens_per_second": round(sum(record.prompt_tokens or 0 for record in good) / seconds, 2),
        "ttft_ms": spread([record.first for record in good if record.first is not None]),
        "itl_ms": spread([gap for record in good for gap in record.gaps]),
        "e2e_ms": spread([record.total for record in good]),
        "client_cpu_percent": round(100 * cpu_seconds / seconds / args.processes, 1),
    }


def print_table(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """For people."""
    kind = f"Poisson, {args.request_rate:g} requests/s" if args.request_rate else f"closed loop, {args.concurrency} clients"
    rows = f", {args.rows} rows each" if args.rows > 1 else ""
    print(f"{args.url}  {args.dialect}, {kind}{rows}, max_tokens {args.max_tokens}, {args.processes} client processes")
    r = result
    print(f"  {r['requests']} requests, {r['failed']} failed, {r['seconds']:.1f} s, {r['requests_per_second']:.2f}/s")
    print(f"  {r['tokens_per_second']:.1f} tokens/s out by {r['tokens_counted_by']}, {r['prompt_tokens_per_second']:.1f} in")
    print(f"  {'ms':6}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}")
    for name in ("ttft", "itl", "e2e"):
        values = result[f"{name}_ms"]
        print(f"  {name:6}" + "".join(f"{'-' if values[k] is None else format(values[k], '.1f'):>10}" for k in values))
    print(f"  each client process used {result['client_cpu_percent']:.0f} % of a CPU")
    for error, count in sorted(result["errors"].items(), key=lambda item: -item[1])[:5]:
        print(f"  {count} x {error}")


def plot(path: str, records: list[Record], result: dict[str, Any]) -> None:
    """Distributions of TTFT, ITL and E2E; needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    figure = Figure(figsize=(12, 4))
    good = [record for record in records if not record.error]
    series = {
        "TTFT": [record.first for record in good if record.first is not None],
        "ITL": [gap for record in good for gap in record.gaps],
        "E2E": [record.total for record in good],
    }
    for number, (name, values) in enumerate(series.items(), 1):
        axes = figure.add_subplot(1, 3, number)
        axes.ecdf([value * 1000 for value in values])
        axes.set_xlabel(f"{name}, ms")
        axes.set_ylabel("share of cases")
        axes.grid(alpha=0.3)
    figure.suptitle(f"{result['requests']} requests, {result['tokens_per_second']:.0f} tokens/s")
    figure.tight_layout()
    figure.savefig(path)


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--path", help="default: that of the dialect")
    parser.add_argument("--dialect", choices=list(PATHS), default="native")
    parser.add_argument(
        "--password", default=os.environ.get("RWKV_BATCH_PASSWORD"), help="sent as Bearer; also RWKV_BATCH_PASSWORD"
    )
    parser.add_argument("--model", help="sent in the body; some servers insist on it")
    parser.add_argument("--concurrency", type=int, default=64, help="clients of the closed loop")
    parser.add_argument("--request-rate", type=float, default=0.0, help="arrivals a second; 0 = closed loop")
    parser.add_argument("--num-prompts", type=int, default=256, help="requests in all")
    parser.add_argument("--rows", type=int, default=1, help="prompts a request (native), n (openai)")
    parser.add_argument("--prompt-words", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--chunk-size", type=int, default=1, help="native only; 1 makes ITL the time of a token")
    parser.add_argument("--ignore-eos", action="store_true", help="always generate max_tokens, where the server can")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write settings, result and machine here, JSON")
    parser.add_argument("--raw", action="store_true", help="with --out: every request too")
    parser.add_argument("--plot", help="write distributions here, PNG or SVG; needs matplotlib")
    return parser.parse_args()


def main() -> int:
    """Run, print, write; 1 when a request failed."""
    args = read_arguments()
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        parts = pool.starmap(client_process, [(args, part) for part in range(args.processes)])
    records = [record for part, _ in parts for record in part]
    result = summarize(args, records, sum(cpu for _, cpu in parts))
    print_table(args, result)
    if args.out:
        settings = {name: value for name, value in vars(args).items() if name != "password"}
        machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        document = {"date": time.strftime("%Y-%m-%d"), "settings": settings, "machine": machine, "result": result}
        if args.raw:
            document["requests"] = [asdict(record) for record in records]
        Path(args.out).write_text(json.dumps(document, indent=2) + "\n")
    if args.plot:
        plot(args.plot, records, result)
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
