#!/usr/bin/env python3
"""What turns of sessions cost: their rate beside plain rows, one durable turn alone, and what a flood of turns does to streams.

    python app.py --model-path M.pth --port 8000 --http-workers 6 --queue 4096 --state-db /tmp/bench.db &
    python bench/served/sessions.py --url http://127.0.0.1:8000 [--cells 16x64,320x256] [--seconds 12] [--out FILE]

A cell of SESSIONS x TOKENS is a closed loop: each session begins its next turn, of a prompt of its own and exactly that many
tokens, when its last turn has ended. What is reported is steady: --ramp seconds pass first, tokens are counted as they arrive,
and turns in progress at the end are cancelled. Up to --plain-sessions the same is done with as many plain requests. The server
needs room for all sessions of a cell at once (--queue, --http-workers), or refuses some: a 429 or 503 that asks to come back is
obeyed, and counted under "refused". States stay in the server's file of sessions unless --delete is given.

"commit_ms" is what a turn takes from its last text to its end: the end of its state, and the disk.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench.client import call, open_stream
from bench.serve import prompt_text, share, spread

TURN, PLAIN = "/state/chat/completions", "/v1/chat/completions"
PROMPT_WORDS = 16
LONGEST_WAIT = 2.0  # seconds before a refused turn is sent again, whatever the server asks for
ENDLESS = 100_000  # tokens of a stream that is left before its end
BROKEN = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, KeyError)


@dataclass(frozen=True)
class Load:
    """What one client process does.

    start, stop  time.time() between which turns and tokens count; it begins at once and cancels what is in progress at `stop`
    clients      numbers of the closed loops
    session      name of the sessions but for the client's number, None = plain requests
    chunk        tokens an event
    """

    host: str
    port: int
    headers: dict[str, str]
    start: float
    stop: float
    clients: range
    tokens: int
    session: str | None
    chunk: int


@dataclass
class Seen:
    """What the clients of one process saw between `start` and `stop`: seconds, but for the counts."""

    turns: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: float = 0
    refused: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    durable: set[bool] = field(default_factory=set)
    cpu: float = 0.0

    def add(self, other: "Seen") -> None:
        """Take over what another process saw."""
        for name in ("turns", "commits", "gaps"):
            getattr(self, name).extend(getattr(other, name))
        self.tokens += other.tokens
        self.refused += other.refused
        self.failures += other.failures
        self.durable |= other.durable
        self.cpu += other.cpu


class Client:
    """One closed loop."""

    def __init__(self, load: Load, seen: Seen, number: int):
        self.load = load
        self.seen = seen
        self.rng = random.Random(f"{load.session} {load.start} {number}")
        self.session = None if load.session is None else f"{load.session}:{number}"
        self.version: int | None = None  # of the session after its last turn

    async def run(self) -> None:
        """Take turns until cancelled."""
        await asyncio.sleep(self.rng.random() * max(0.0, self.load.start - time.time()) / 2)  # not all in one moment
        while True:
            await asyncio.sleep(await self.turn())

    async def turn(self) -> float:
        """Take one turn; seconds to wait before the next."""
        load, seen = self.load, self.seen
        events = inside = 0  # with text, and of those the ones that count
        ended = False
        began = last = time.time()
        try:
            path = PLAIN if self.session is None else TURN
            async with await open_stream(load.host, load.port, path, self.body(), load.headers) as stream:
                if stream.status != 200:
                    return self.refused(stream.status, stream.headers, await stream.read())
                end: dict[str, Any] = {}
                async for payload in stream.events():
                    now = time.time()
                    event = {"done": True} if payload == b"[DONE]" else json.loads(payload)
                    end |= {name: event[name] for name in ("done", "error", "session") if name in event}
                    if any(choice["delta"].get("content") for choice in event.get("choices", ())):
                        if load.start <= now < load.stop:
                            inside += 1
                            if events:
                                seen.gaps.append(now - last)
                        events += 1
                        last = now
            wrong = self.check(end)
            ended = not wrong
        except BROKEN as error:
            wrong = f"{type(error).__name__}: {error}"
        finally:  # cancelled turns too; an event may bring more tokens than it was asked for, which the end tells
            seen.tokens += load.tokens * inside / max(events, 1) if ended else load.chunk * inside
        if wrong:
            seen.failures[f"200 {wrong}"[:100]] += 1
            return 0.1
        now = time.time()
        if load.start <= now < load.stop:
            seen.turns.append(now - began)
            seen.commits.append(now - last)
        return 0.0

    def body(self) -> dict[str, Any]:
        """A turn, or a plain request, of exactly so many tokens."""
        session = {} if self.session is None else {"session_id": self.session}
        return {
            "contents": [prompt_text(self.rng, PROMPT_WORDS)], "max_tokens": self.load.tokens, "ignore_eos": True,
            "stop_tokens": [], "temperature": 1.0, "top_k": 50, "top_p": 0.6, "stream": True, "chunk_size": self.load.chunk,
            **session,
        }  # fmt: skip

    def refused(self, status: int, headers: dict[str, str], body: bytes) -> float:
        """Note an answer that is no turn; seconds to wait before the next try."""
        message = f"{status} {body.decode(errors='replace')}"[:100]
        if status in (429, 503) and "retry-after" in headers:
            self.seen.refused[message] += 1
            return min(float(headers["retry-after"]), LONGEST_WAIT) * self.rng.uniform(0.5, 1.0)
        self.seen.failures[message] += 1
        return 0.1

    def check(self, end: dict[str, Any]) -> str:
        """What is wrong with the end of a turn, or nothing."""
        if "error" in end or "done" not in end:
            return str(end.get("error", "ended without [DONE]"))
        if self.session is None:
            return ""
        before, self.version = self.version, end["session"]["version"]
        self.seen.durable.add(end["session"]["durable"])
        return "" if before in (None, self.version - 1) else f"version {self.version} after version {before}"


def client_process(load: Load) -> Seen:
    """Run the closed loops of one process until the load's end."""
    seen = Seen()

    async def run() -> None:
        tasks = [asyncio.create_task(Client(load, seen, number).run()) for number in load.clients]
        ended, _ = await asyncio.wait(tasks, timeout=load.stop - time.time(), return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in ended:
            task.result()  # a loop has no end of its own, only an error

    before = time.process_time()
    asyncio.run(run())
    seen.cpu = time.process_time() - before
    return seen


class Bench:
    """The measurements against one server."""

    def __init__(self, args: argparse.Namespace, pool: Any):
        self.args = args
        self.pool = pool
        url = urlsplit(args.url)
        self.host, self.port = url.hostname or "127.0.0.1", url.port or 80
        self.headers = {"Authorization": f"Bearer {args.password}"} if args.password else {}
        self.name = f"bench {random.SystemRandom().getrandbits(32):08x}"

    def get(self, path: str) -> dict[str, Any]:
        """What the server says of itself."""
        return asyncio.run(call(self.host, self.port, path, headers=self.headers)).json()

    def wait_idle(self) -> None:
        """Wait until nothing of the measurement before is left."""
        for _ in range(600):
            engine = self.get("/stats")["engine"]
            if not engine.get("requests_running") and not engine.get("requests_waiting"):
                return
            time.sleep(0.1)
        sys.exit("the server does not become idle")

    def loads(self, first: int, count: int, tokens: int, seconds: float, *, turns: bool, chunk: int, ramp: float) -> list[Load]:
        """What each process does, of the processes that `count` clients need."""
        start = time.time() + ramp
        parts = min(self.args.processes, count)
        shares = [share(count, parts, part) for part in range(parts)]
        begins = [first + sum(shares[:part]) for part in range(parts)]
        session = self.name if turns else None
        return [
            Load(self.host, self.port, self.headers, start, start + seconds, range(begin, begin + size), tokens, session, chunk)
            for begin, size in zip(begins, shares, strict=True)
        ]

    def run(self, *groups: list[Load]) -> list[Seen]:
        """Have all loads done at once; what each group saw."""
        waiting = [[self.pool.apply_async(client_process, (load,)) for load in loads] for loads in groups]
        found = []
        for results in waiting:
            found.append(Seen())
            for result in results:
                found[-1].add(result.get())
        self.wait_idle()
        return found

    def cell(self, sessions: int, tokens: int) -> dict[str, Any]:
        """Turns of so many sessions at once, and as many plain rows."""
        args = self.args
        result: dict[str, Any] = {"sessions": sessions, "tokens": tokens}
        chunk = min(args.chunk_size, tokens)
        for turns, seconds in ((True, args.seconds), (False, args.plain_seconds)):
            if turns or (seconds and sessions <= args.plain_sessions):
                loads = self.loads(0, sessions, tokens, seconds, turns=turns, chunk=chunk, ramp=args.ramp)
                (seen,) = self.run(loads)
                part = {
                    "turns": len(seen.turns),
                    "turns_per_second": round(len(seen.turns) / seconds, 2),
                    "tokens_per_second": round(seen.tokens / seconds, 1),
                    "turn_ms": spread(seen.turns),
                    "refused": dict(seen.refused),
                    "failures": dict(seen.failures),
                    "client_cpu_percent": round(100 * seen.cpu / (seconds + args.ramp) / len(loads), 1),
                }
                if turns:
                    result |= part | {"commit_ms": spread(seen.commits), "durable": sorted(seen.durable)}
                else:
                    result["plain"] = part
        if result.get("plain", {}).get("tokens_per_second"):
            result["of_plain"] = round(result["tokens_per_second"] / result["plain"]["tokens_per_second"], 4)
        print_cell(result)
        return result

    def single(self) -> dict[str, Any]:
        """One turn alone and the same plain request alone, by turns."""
        tokens, seconds = self.args.single_tokens, self.args.single_seconds
        (load,) = self.loads(0, 1, tokens, 1e9, turns=True, chunk=tokens, ramp=0.0)
        plain = Load(**{**vars(load), "session": None})
        seen = {"turn": Seen(), "plain": Seen()}
        clients = [Client(load, seen["turn"], 0), Client(plain, seen["plain"], 0)]

        async def run() -> None:
            for client in clients:  # opens the database
                await client.turn()
            for one in seen.values():
                one.turns.clear()
            end = time.time() + seconds
            while time.time() < end:
                for client in random.sample(clients, 2):
                    await client.turn()

        asyncio.run(run())
        failures = sum((one.failures + one.refused for one in seen.values()), Counter())
        result: dict[str, Any] = {"tokens": tokens, "turns": len(seen["turn"].turns), "failures": dict(failures)}
        result |= {f"{name}_ms": spread(one.turns) for name, one in seen.items()}
        if seen["turn"].turns and seen["plain"].turns:
            difference = statistics.median(seen["turn"].turns) - statistics.median(seen["plain"].turns)
            result["difference_ms"] = round(difference * 1000, 3)
        print(
            f"one turn alone: p50 {result['turn_ms']['p50']} ms, plain {result['plain_ms']['p50']} ms, "
            f"difference {result.get('difference_ms')} ms"
        )
        return result

    def streams(self) -> dict[str, Any]:
        """Time between the tokens of plain streams: alone, beside a flood of plain requests, beside as many turns."""
        args = self.args
        result: dict[str, Any] = {"streams": args.itl_streams, "flood": args.itl_flood, "flood_tokens": args.itl_flood_tokens}
        for name, turns in (("alone", None), ("beside_plain", False), ("beside_turns", True)):
            groups = [self.loads(0, args.itl_streams, ENDLESS, args.itl_seconds, turns=False, chunk=1, ramp=args.ramp)]
            if turns is not None:
                flood = {"turns": turns, "chunk": args.chunk_size, "ramp": args.ramp}
                groups.append(self.loads(0, args.itl_flood, args.itl_flood_tokens, args.itl_seconds, **flood))
            streams, *others = self.run(*groups)
            failures = sum((seen.failures for seen in (streams, *others)), Counter())
            result[name] = {"itl_ms": spread(streams.gaps), "failures": dict(failures)}
            if others:
                result[name]["flood_turns_per_second"] = round(len(others[0].turns) / args.itl_seconds, 2)
                result[name]["flood_refused"] = dict(others[0].refused)
            itl = result[name]["itl_ms"]
            print(f"ITL of {args.itl_streams} streams, {name.replace('_', ' ')}: p50 {itl['p50']} ms, p99 {itl['p99']} ms")
        return result

    def delete(self) -> None:
        """Delete the sessions of this run."""
        body = {"session_id": self.name, "delete_prefix": True}
        asyncio.run(call(self.host, self.port, "/state/delete", body, self.headers))


def print_cell(cell: dict[str, Any]) -> None:
    """For people."""
    plain = f", {cell['of_plain']:.1%} of plain rows" if "of_plain" in cell else ""
    turn, commit = cell["turn_ms"], cell["commit_ms"]
    print(
        f"{cell['sessions']:5} sessions x {cell['tokens']} tokens: {cell['turns_per_second']} turns/s, "
        f"{cell['tokens_per_second']} tokens/s{plain}; turn p50 {turn['p50']} p99 {turn['p99']} ms, "
        f"commit p50 {commit['p50']} p99 {commit['p99']} ms"
    )
    for kind, counts in (("refused", cell["refused"]), ("FAILED", cell["failures"])):
        for message, count in sorted(counts.items(), key=lambda item: -item[1])[:5]:
            print(f"      {kind} {count} x {message}")


def cells_of(args: argparse.Namespace) -> list[tuple[int, int]]:
    """(sessions, tokens) of each cell."""
    if args.cells is not None:
        return [
            (int(sessions), int(tokens)) for sessions, tokens in (cell.split("x") for cell in args.cells.split(",") if cell)
        ]
    return [(int(sessions), int(tokens)) for sessions in args.sessions.split(",") for tokens in args.tokens.split(",")]


def read_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--password", default=os.environ.get("RWKV_BATCH_PASSWORD"), help="sent as Bearer")
    parser.add_argument("--sessions", default="16,64,320,2000")
    parser.add_argument("--tokens", default="64,256", help="of a turn")
    parser.add_argument("--cells", help="instead of all pairs of the two: 16x64,320x256")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each cell's turns")
    parser.add_argument("--plain-seconds", type=float, default=2.5, help="of its plain rows; 0 = none")
    parser.add_argument("--plain-sessions", type=int, default=320, help="largest cell that has plain rows")
    parser.add_argument("--ramp", type=float, default=1.0, help="seconds before anything counts")
    parser.add_argument("--chunk-size", type=int, default=8, help="tokens an event")
    parser.add_argument("--single-seconds", type=float, default=3.0, help="of one turn alone; 0 = leave it out")
    parser.add_argument("--single-tokens", type=int, default=16)
    parser.add_argument("--itl-seconds", type=float, default=3.0, help="of each of the three measurements of ITL; 0 = none")
    parser.add_argument("--itl-streams", type=int, default=32)
    parser.add_argument("--itl-flood", type=int, default=320, help="turns at once beside them")
    parser.add_argument("--itl-flood-tokens", type=int, default=64)
    parser.add_argument("--processes", type=int, default=8, help="client processes")
    parser.add_argument("--delete", action="store_true", help="delete the sessions at the end")
    parser.add_argument("--note", default="", help="goes into the result")
    parser.add_argument("--out", help="write the result here, JSON")
    return parser.parse_args(argv)


def main() -> int:
    """Run, print, write; 1 when a turn failed."""
    args = read_arguments()
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(2 * args.processes) as pool:
        bench = Bench(args, pool)
        engine = bench.get("/stats")["engine"]
        result: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "device": engine.get("device"),
            "model": engine.get("model"),
            "dtype": engine.get("dtype"),
            "slots": engine.get("slots"),
            "rwkv_batch": bench.get("/v1/server/status").get("engine_version"),
            "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
            "settings": {name: value for name, value in vars(args).items() if name not in ("password", "note")},
            "note": args.note,
        }
        bench.run(bench.loads(0, args.processes, 16, args.ramp, turns=False, chunk=1, ramp=args.ramp))  # all are awake
        with contextlib.suppress(KeyboardInterrupt):  # what is known so far is worth writing
            result["single"] = bench.single() if args.single_seconds else None
            result["cells"] = []
            for sessions, tokens in cells_of(args):
                result["cells"].append(bench.cell(sessions, tokens))
            result["itl"] = bench.streams() if args.itl_seconds else None
        if args.delete:
            bench.delete()
    result["seconds"] = round(time.monotonic() - began, 1)
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failures_in(result) else 0


def failures_in(value: Any) -> int:
    """How many failures a result tells of, wherever they are."""
    if isinstance(value, dict):
        return sum(sum(found.values()) if name == "failures" else failures_in(found) for name, found in value.items())
    return sum(map(failures_in, value)) if isinstance(value, list) else 0


if __name__ == "__main__":
    sys.exit(main())
