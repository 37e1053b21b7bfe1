#!/usr/bin/env python3
"""What answers held to a JSON schema cost those beside them, and how fast they are themselves, over HTTP.

    python app.py --model-path M.pth --port 8000 --slots 320 &
    python bench/served/grammar.py --url http://127.0.0.1:8000 [--seconds 30] [--rounds 2] [--out FILE]

By turns: `--plain` streams alone; as many plain ones as both kinds together; `--plain` streams with `--constrained` ones beside
them. The second is there because a step of more rows is longer whatever they are, and because short answers mean more prompts:
its further streams answer with as many tokens as the schema's answers have. Each client sends its next request when its last
has ended. Gaps are those between events with text, of the `--plain` streams; a row's pace is its tokens, by the usage that the
server reports, over the time from its first text to its last. Ends with 1 where an answer was not what its schema allows.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench import serve
from bench.client import open_stream

Kind = Literal["plain", "short", "constrained"]

WARM_SECONDS = 3.0
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 8, "maxLength": 40},
        "summary": {"type": "string", "minLength": 40, "maxLength": 160},
        "sentiment": {"enum": ["positive", "neutral", "negative"]},
        "confidence": {"type": "integer", "minimum": 0, "maximum": 100},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 16}, "minItems": 2, "maxItems": 5},
        "author": {
            "type": "object",
            "properties": {"first_name": {"type": "string", "maxLength": 16}, "age": {"enum": list(range(1, 100))}},
            "required": ["first_name", "age"],
            "additionalProperties": False,
        },
    },
    "required": ["title", "summary", "sentiment", "confidence", "tags", "author"],
    "additionalProperties": False,
}


@dataclass
class Answer:
    """One request. Times in seconds."""

    error: str = ""
    valid: bool = True
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--password")
    parser.add_argument("--plain", type=int, default=256, help="streams without a schema")
    parser.add_argument("--constrained", type=int, default=64, help="streams with one")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the three loads, all rounds together")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--processes", type=int, default=8, help="client processes")
    parser.add_argument("--out")
    return parser.parse_args()


def body_of(args: argparse.Namespace, rng: random.Random, kind: Kind) -> dict[str, Any]:
    """A chat."""
    message = {"role": "user", "content": serve.prompt_text(rng, 16)}
    body = {
        "messages": [message],
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if kind != "constrained":
        return {**body, "ignore_eos": True, "max_tokens": args.max_tokens if kind == "plain" else args.short_tokens}
    format = {"type": "json_schema", "json_schema": {"name": "note", "schema": SCHEMA, "strict": True}}
    return {**body, "response_format": format, "max_tokens": 4 * args.max_tokens}


async def ask(args: argparse.Namespace, rng: random.Random, kind: Kind) -> Answer:
    """Send one request and read its stream."""
    where = urlsplit(args.url)
    headers = {"Authorization": f"Bearer {args.password}"} if args.password else {}
    answer, text = Answer(), []
    try:
        async with await open_stream(
            where.hostname, where.port or 80, "/v1/chat/completions", body_of(args, rng, kind), headers
        ) as stream:
            if stream.status != 200:
                return Answer(error=f"{stream.status} {(await stream.read())[:200].decode(errors='replace')}")
            async for payload in stream.events():
                event = {} if payload == b"[DONE]" else json.loads(payload)
                if "error" in event:
                    answer.error = str(event["error"])[:200]
                if event.get("usage"):
                    answer.tokens = event["usage"]["completion_tokens"]
                if serve.has_text(event):
                    now = time.perf_counter()
                    if answer.first:
                        answer.gaps.append(now - answer.last)
                    answer.first, answer.last = answer.first or now, now
                    text += [choice["delta"]["content"] for choice in event["choices"]]
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"[:200]
    answer.valid = kind != "constrained" or bool(answer.error) or is_note("".join(text))
    return answer


def is_note(text: str) -> bool:
    """Whether a text is JSON that the schema allows, as far as a few lines can tell."""
    try:
        note = json.loads(text)
    except ValueError:
        return False
    return (
        list(note) == SCHEMA["required"]
        and 8 <= len(note["title"]) <= 40
        and note["sentiment"] in SCHEMA["properties"]["sentiment"]["enum"]
        and 0 <= note["confidence"] <= 100
        and 2 <= len(note["tags"]) <= 5
        and list(note["author"]) == ["first_name", "age"]
    )


def client_process(args: argparse.Namespace, part: int, numbers: dict[Kind, int], seconds: float) -> dict[Kind, list[Answer]]:
    """This process's share of the clients, until the time is up: answers by their kind."""

    async def run() -> dict[Kind, list[Answer]]:
        ends = time.perf_counter() + seconds
        found: dict[Kind, list[Answer]] = {kind: [] for kind in numbers}

        async def client(number: int, kind: Kind) -> None:
            rng = random.Random(f"{part} {number} {kind} {seconds}")
            while time.perf_counter() < ends:
                found[kind].append(await ask(args, rng, kind))

        shares = {kind: serve.share(number, args.processes, part) for kind, number in numbers.items()}
        await asyncio.gather(*(client(number, kind) for kind, share in shares.items() for number in range(share)))
        return found

    return asyncio.run(run())


def load(args: argparse.Namespace, numbers: dict[Kind, int], seconds: float) -> dict[Kind, list[Answer]]:
    """The answers of one run, by their kind; `numbers` of clients."""
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        found = pool.starmap(client_process, [(args, part, numbers, seconds) for part in range(args.processes)])
    return {kind: [answer for part in found for answer in part[kind]] for kind in numbers}


def told(answers: list[Answer]) -> dict[str, Any]:
    """The figures of answers of one kind."""
    good = [answer for answer in answers if not answer.error]
    paces = [(answer.tokens - 1) / (answer.last - answer.first) for answer in good if answer.last > answer.first]
    return {
        "answers": len(answers),
        "failed": len(answers) - len(good),
        "errors": sorted({answer.error for answer in answers if answer.error})[:5],
        "invalid": sum(not answer.valid for answer in good),
        "tokens": sum(answer.tokens for answer in good),
        "tokens_per_second_a_row": round(statistics.median(paces), 2) if paces else None,
        "itl_ms": serve.spread([gap for answer in good for gap in answer.gaps]),
    }


def ratios(after: dict[str, Any], before: dict[str, Any]) -> dict[str, float]:
    """Gaps over gaps."""
    names = [name for name in ("mean", "p50", "p99") if before["itl_ms"][name]]
    return {name: round(after["itl_ms"][name] / before["itl_ms"][name], 3) for name in names}


def main() -> None:
    args = read_arguments()
    args.short_tokens = args.max_tokens
    warm = load(args, {"plain": args.plain, "constrained": args.constrained}, WARM_SECONDS)
    args.short_tokens = round(statistics.median([answer.tokens for answer in warm["constrained"] if not answer.error] or [100]))
    loads: dict[str, dict[Kind, int]] = {
        "alone": {"plain": args.plain},
        "as many plain": {"plain": args.plain, "short": args.constrained},
        "beside": {"plain": args.plain, "constrained": args.constrained},
    }
    found: dict[str, dict[Kind, list[Answer]]] = {name: {kind: [] for kind in numbers} for name, numbers in loads.items()}
    for _ in range(args.rounds):
        for name, numbers in loads.items():
            for kind, new in load(args, numbers, args.seconds / args.rounds).items():
                found[name][kind] += new
    figures = {name: {kind: told(answers) for kind, answers in kinds.items()} for name, kinds in found.items()}
    after, held = figures["beside"]["plain"], figures["beside"]["constrained"]
    pace, plain_pace = held["tokens_per_second_a_row"], after["tokens_per_second_a_row"]
    result = {
        "streams": {"plain": args.plain, "constrained": args.constrained},
        "rounds": args.rounds,
        "tokens_a_short_answer": args.short_tokens,
        **figures,
        "plain_itl_times_alone": ratios(after, figures["alone"]["plain"]),
        "plain_itl_times_as_many_plain": ratios(after, figures["as many plain"]["plain"]),
        "constrained_pace_of_plain": round(pace / plain_pace, 3) if pace and plain_pace else None,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), **result}, indent=1) + "\n")
    if held["failed"] or held["invalid"] or after["failed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
