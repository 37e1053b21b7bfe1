#!/usr/bin/env python3
"""What prompts add to the gaps of streams beside them, how soon their first token comes, and how soon those of many at once.

    python app.py --model-path M.pth --port 8000 --slots 320 [--itl-budget-ms 15] &
    python bench/served/pace.py --url http://127.0.0.1:8000 [--streams 64] [--tokens 16000] [--burst 320] [--out FILE]

`--streams` answers are read all the time; beside them prompts of about `--tokens` tokens come one after another, each when the
one before has had its first token and `--pause` seconds are over. A gap lies between two events with text of one stream; one
that ends while a prompt waits for its first token counts as "beside", the others as "alone". Then `--burst` requests of 16
words come at once to a server that has nothing else to do, `--rounds` times. Prompts are all different: no cached prefix helps.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench import http_ladder, serve
from bench.client import open_stream

WARM_SECONDS = 2.0
ANSWER_TOKENS = 400
Times = list[tuple[float, float]]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16_000, help="of a prompt that comes, about: a word is a token")
    parser.add_argument("--prompts", type=int, default=6, help="that come")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two of them")
    parser.add_argument("--burst", type=int, default=320, help="requests at once; 0 = none")
    parser.add_argument("--rounds", type=int, default=3, help="of them")
    parser.add_argument("--processes", type=int, default=8, help="client processes")
    parser.add_argument("--label", default="", help="told in the result")
    parser.add_argument("--out")
    return parser.parse_args()


async def events_of(args: argparse.Namespace, rng: random.Random, words: int, max_tokens: int) -> Times:
    """Send one request; return when it was sent and when its texts came: (since when one waited, until when)."""
    where = urlsplit(args.url)
    settings = {"max_tokens": max_tokens, "ignore_eos": True, "stop_tokens": [], "stream": True, "chunk_size": 1}
    body = {"contents": [serve.prompt_text(rng, words)], "temperature": 1.0, **settings}
    times, last = [], time.monotonic()
    async with await open_stream(where.hostname, where.port or 80, "/v1/chat/completions", body) as stream:
        if stream.status != 200:
            raise RuntimeError(f"{stream.status} {(await stream.read())[:200].decode(errors='replace')}")
        async for payload in stream.events():
            if payload != b"[DONE]" and serve.has_text(json.loads(payload)):
                now = time.monotonic()
                times.append((last, now))
                last = now
    return times


def stream_process(args: argparse.Namespace, part: int, stop: Any) -> Times:
    """This process's share of the streams, until told to stop: the gaps between their tokens."""
    gaps: Times = []

    async def client(number: int) -> None:
        rng = random.Random(f"{part} {number}")
        while not stop.is_set():
            gaps.extend((await events_of(args, rng, 16, rng.randrange(ANSWER_TOKENS // 2, ANSWER_TOKENS)))[1:])

    async def run() -> None:
        await asyncio.gather(*(client(number) for number in range(serve.share(args.streams, args.processes, part))))

    asyncio.run(run())
    return gaps


def prompts_in_turn(args: argparse.Namespace) -> Times:
    """Long prompts one after another: when each was sent, and when its first token came."""
    waits = []
    for number in range(args.prompts):
        time.sleep(args.pause)
        waits.append(asyncio.run(events_of(args, random.Random(f"long {number}"), args.tokens, 2))[0])
    return waits


def beside(args: argparse.Namespace) -> dict[str, Any]:
    """Long prompts beside streams."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(args.processes) as pool:
        stop = manager.Event()
        parts = pool.starmap_async(stream_process, [(args, part, stop) for part in range(args.processes)])
        time.sleep(WARM_SECONDS)
        began = time.monotonic()
        waits = prompts_in_turn(args)
        ended = time.monotonic()
        stats = asyncio.run(http_ladder.stats_of(args))
        stop.set()
        gaps = [gap for part in parts.get() for gap in part if began <= gap[1] <= ended]
    found: dict[bool, list[float]] = {True: [], False: []}
    for since, until in gaps:
        found[any(sent <= until <= first for sent, first in waits)].append(until - since)
    return {
        "gap_beside_ms": serve.spread(found[True]),
        "gap_alone_ms": serve.spread(found[False]),
        "first_token_of_prompts_ms": serve.spread([first - sent for sent, first in waits]),
        **{name: stats[name] for name in ("prefill_allowance_tokens", "prefill_ms_per_1000_tokens") if name in stats},
    }


def main() -> None:
    args = read_arguments()
    result: dict[str, Any] = {"label": args.label, "streams": args.streams, "tokens": args.tokens, **beside(args)}
    if args.burst:
        runs = [http_ladder.streams(args, args.burst, args.burst) for _ in range(args.rounds + 1)][1:]  # the first one warms
        result["burst"] = sorted(runs, key=lambda run: run["ttft_ms"]["p99"])[len(runs) // 2]
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
