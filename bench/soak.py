#!/usr/bin/env python3
"""Mixed load on every route for as long as you like, checked against right texts; processes may be killed meanwhile.

    python app.py --model-path M.pth --port 8000 --max-crashes 1000 & SERVER=$!
    python bench/soak.py --minutes 15 --clients 64 --supervisor-pid $SERVER --kills 10 --http-kills 10 [--out FILE]

The right texts are what the server says before the load, one request at a time, greedily. `--right` says how much of its text a
row has to repeat beside others: all (exact), the first N characters (prefix:N) or nothing (none); the shares are printed in any
case. A GPU rounds otherwise in other batch sizes, unless the server runs with --batch-invariant, so a row of a random model may
leave its text there; --least is the share of rows that has to keep to it. Always checked: statuses, form, order and number of
rows, counts of tokens, versions and tokens of sessions, nodes of dialogues, that no turn is lost or done twice over kills, and
that no row has another prompt's text or the mark of another session.

With `--supervisor-pid` (the server's first process, on this machine) descriptors, threads and memory are read after a tenth of
the time and at the end, idle both times. Exits with 1 when anything was wrong.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.client import open_stream

GREEDY = {"temperature": 0, "alpha_presence": 0, "alpha_frequency": 0, "presence_penalty": 0, "frequency_penalty": 0}
TOKENS, TURN_TOKENS = 24, 12
FULL = {**GREEDY, "ignore_eos": True, "stop_tokens": []}  # every row has its max_tokens
SUBJECTS = (
    *("a cat", "a red ball", "the moon", "Tom", "an old house", "a bird"),
    *("the sea", "apples", "a long road", "a blue hat", "rain", "a dog"),
)
QUESTIONS = ("Tell me a story about {}.", "What is {}?", "Where is {}?")
TURNS = (
    "User: My mark is {mark}. Tell me about {subject}.\n\nAssistant:",
    "User: And then?\n\nAssistant:",
    "User: Why?\n\nAssistant:",
)
MARK = re.compile(r"#[0-9a-f]{8}#")
NUM_SCRIPTS = 8
FOREIGN = 16  # characters that another prompt's text shares with a row by no accident
FAULTS_SHOWN = 30
KEPT = 200  # sessions that stay until the end, at most
REPORT_SECONDS = 30.0
SETTLE_SECONDS = 11.0  # idle threads of pools end after ten


@dataclass
class Exchange:
    """One call and its answer. `document` for a whole answer, `events` for a stream's payloads; `broken`: it was cut off."""

    began: float
    status: int = 0
    document: Any = None
    events: list[Any] = field(default_factory=list)
    broken: str = ""

    @property
    def ok(self) -> bool:
        """Whether the call was answered as asked."""
        return self.status == 200 and not self.broken and not self.error

    @property
    def error(self) -> str:
        """What the server said went wrong, in whichever form."""
        found = [self.document, *self.events]
        return next((json.dumps(item)[:300] for item in found if isinstance(item, dict) and item.get("error")), "")


@dataclass
class Rows:
    """What a generation gave, in whichever form."""

    texts: list[str]
    reasons: list[str | None]
    usage: dict[str, int]
    session: dict[str, Any] | None = None
    node: int | None = None


@dataclass(frozen=True)
class Kind:
    """One way to ask for rows. `body` takes the numbers of prompts, more than one at once where there are `many`."""

    path: str
    body: Callable[[list[int]], dict[str, Any]]
    many: bool = True
    streams: tuple[bool, ...] = (False, True)  # whether it can be a stream, and whether it must
    tokens: int = TOKENS  # of each row; 0 = until its end
    copies: int = 1


def subject(number: int) -> str:
    """What a prompt asks for; all are different."""
    return QUESTIONS[number // len(SUBJECTS) % len(QUESTIONS)].format(SUBJECTS[number % len(SUBJECTS)])


def prompt(number: int) -> str:
    """A raw prompt."""
    return f"User: {subject(number)}\n\nAssistant:"


def raw(numbers: list[int], **more: Any) -> dict[str, Any]:
    """A native body."""
    return {**FULL, "contents": [prompt(number) for number in numbers], "max_tokens": TOKENS, **more}


def chat(numbers: list[int], **more: Any) -> dict[str, Any]:
    """A conversation of one message."""
    return {**FULL, "messages": [{"role": "user", "content": subject(numbers[0])}], "max_tokens": TOKENS, **more}


def unended(numbers: list[int]) -> dict[str, Any]:
    """A native body whose rows end where they like."""
    return {**GREEDY, "contents": [prompt(number) for number in numbers], "max_tokens": 40}


def fim(numbers: list[int]) -> dict[str, Any]:
    """Gaps to fill."""
    texts = [prompt(number) for number in numbers]
    return {**FULL, "prefix": texts, "suffix": [" the end"] * len(texts), "max_tokens": TOKENS}


def translation(numbers: list[int]) -> dict[str, Any]:
    """Sentences to translate."""
    return {"source_lang": "en", "target_lang": "zh-CN", "text_list": [subject(number) for number in numbers]}


def batch(numbers: list[int]) -> dict[str, Any]:
    """Prompts of the batch route, greedy by nature."""
    return {"prompts": [prompt(number) for number in numbers], "max_tokens": TOKENS}


def completion(numbers: list[int]) -> dict[str, Any]:
    """OpenAI's raw prompts."""
    return {**FULL, "prompt": [prompt(number) for number in numbers], "max_tokens": TOKENS}


KINDS = {
    "v1": Kind("/v1/chat/completions", raw),
    "v1 to the end": Kind("/v1/chat/completions", unended, tokens=0),
    "v2": Kind("/v2/chat/completions", raw),
    "v3": Kind("/v3/chat/completions", chat, many=False),
    "fim": Kind("/FIM/v1/batch-FIM", fim),
    "big batch": Kind("/big_batch/completions", partial(raw, noise=0), streams=(True,), tokens=0),
    "batch": Kind("/v1/batch/completions", batch, streams=(False,), tokens=0),
    "translate": Kind("/translate/v1/batch-translate", translation, streams=(False,), tokens=0),
    "openai chat": Kind("/openai/v1/chat/completions", partial(chat, n=2), many=False, copies=2),
    "openai completions": Kind("/v1/completions", completion),
}
WEIGHTS = {**dict.fromkeys(KINDS, 6), "session": 10, "dialogue": 5, "responses": 5, "leave": 8, "stop": 2, "bad": 4, "look": 4}


def main() -> None:
    """Run and print a summary as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--password", default=os.environ.get("RWKV_BATCH_PASSWORD", ""))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="prompts of one request, at most")
    parser.add_argument("--prompts", type=int, default=24, help="how many different ones, at most 36")
    parser.add_argument("--right", default="exact", help="exact, prefix:N or none")
    parser.add_argument("--least", type=float, default=1.0, help="share of the rows that have to be right")
    parser.add_argument("--supervisor-pid", type=int, default=0)
    parser.add_argument("--kills", type=int, default=0, help="kill -9 of the engine process, evenly over the time")
    parser.add_argument("--http-kills", type=int, default=0, help="the same of one HTTP process")
    parser.add_argument("--growth-mib", type=float, default=96.0, help="memory that a process may have more at the end")
    parser.add_argument("--settle", type=float, default=SETTLE_SECONDS, help="idle seconds before figures are read")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    args = parser.parse_args()
    if (args.kills or args.http_kills) and not args.supervisor_pid:
        parser.error("--kills and --http-kills need --supervisor-pid")
    result = asyncio.run(Soak(args).run())
    print(json.dumps(result, indent=1, ensure_ascii=False))
    if args.out:
        write(args.out, result)
    sys.exit(1 if result["faults"] else 0)


def write(path: str, result: dict[str, Any]) -> None:
    """Replace the file of results; what is read from it is always whole."""
    text = json.dumps({"date": time.strftime("%Y-%m-%d"), **result}, indent=1, ensure_ascii=False) + "\n"
    Path(path + ".part").write_text(text)
    os.replace(path + ".part", path)


class Soak:
    """One run against one server."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.host, self.port = urlsplit(args.url).hostname, urlsplit(args.url).port or 80
        self.headers = {"Authorization": f"Bearer {args.password}"} if args.password else {}
        self.rng = random.Random(args.seed)
        self.right: dict[tuple[str, int], str] = {}
        self.scripts: list[list[Rows]] = []
        self.counts: Counter[str] = Counter()
        self.rows: dict[str, Counter[str]] = defaultdict(Counter)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.faults: Counter[str] = Counter()
        self.examples: list[str] = []
        self.disturbed: list[list[float]] = []  # [from, until] in which calls may fail
        self.kept: dict[str, tuple[int, int | None]] = {}  # sessions that stay: version, tokens where they are known

    # --- the course ---

    async def run(self) -> dict[str, Any]:
        """Learn the right texts, load, look, load and kill, look."""
        await self.learn()
        reporter = asyncio.create_task(self.report())
        total = self.args.minutes * 60
        await self.load(total / 10)
        early = await self.look_at_processes()
        killer = asyncio.create_task(self.kill_at_times(total * 0.9))
        await self.load(total * 0.9)
        await killer
        await self.check_kept()
        late = await self.look_at_processes()
        reporter.cancel()
        self.compare(early, late)
        self.check_shares()
        return self.summary(early, late)

    async def report(self) -> None:
        """Write what is known so far to --out, again and again: a run may be cut off by those who lend the machine."""
        began = time.monotonic()
        while self.args.out:
            await asyncio.sleep(REPORT_SECONDS)
            write(self.args.out, {"ended": False, "seconds_so_far": round(time.monotonic() - began), **self.summary({}, {})})

    async def learn(self) -> None:
        """Ask everything once, alone."""
        for name, kind in KINDS.items():
            for number in range(self.args.prompts):
                exchange = await self.exchange(kind.path, kind.body([number]) | {"stream": kind.streams[0]})
                self.right[name, number] = rows_of(good(name, exchange)).texts[0]
        for number in range(self.args.prompts):
            previous = None
            for index in range(2):
                exchange = await self.exchange("/v1/responses", response_to(number, previous, stream=False))
                previous, self.right[f"responses {index}", number] = response_of(good("responses", exchange))
            await self.exchange(f"/v1/responses/{previous}", method="DELETE")
        for number in range(NUM_SCRIPTS):
            session, turns = f"right {uuid.uuid4().hex}", []
            for index in range(len(TURNS)):
                exchange = await self.exchange("/state/chat/completions", turn(number, index) | {"session_id": session})
                turns.append(rows_of(good("session", exchange)))
            self.scripts.append(turns)
            await self.exchange("/state/delete", {"session_id": session})

    async def load(self, seconds: float) -> None:
        """All clients ask for so long."""
        until = time.monotonic() + seconds

        async def client(rng: random.Random) -> None:
            while time.monotonic() < until:
                name = rng.choices(list(WEIGHTS), WEIGHTS.values())[0]
                began = time.monotonic()
                try:
                    await (self.ask(name, rng) if name in KINDS else getattr(self, f"do_{name}")(rng))
                except Exception as error:  # a checker that stumbles over an answer has found something
                    self.fault(name, f"{type(error).__name__}: {error}")
                self.counts[name] += 1
                if not self.is_disturbed(began):
                    self.seconds[name].append(time.monotonic() - began)

        await asyncio.gather(*(client(random.Random(self.rng.getrandbits(64))) for _ in range(self.args.clients)))

    # --- calls ---

    async def exchange(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> Exchange:
        """One call, read to its end."""
        found = Exchange(time.monotonic())
        try:
            async with asyncio.timeout(600):
                opened = await open_stream(self.host, self.port, path, body, {**self.headers, **(headers or {})}, method)
                async with opened as stream:
                    found.status = stream.status
                    data = await stream.read()
            if stream.headers.get("content-type", "").startswith("text/event-stream"):
                found.events = list(payloads(data))
            else:
                found.document = json.loads(data) if "json" in stream.headers.get("content-type", "") else data
        except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError) as error:
            found.broken = f"{type(error).__name__}: {error}"
        return found

    async def accept(self, name: str, exchange: Exchange) -> bool:
        """Whether an answer is one; a failure is a fault unless a process was killed meanwhile."""
        if exchange.ok:
            return True
        if self.is_disturbed(exchange.began):
            self.counts["failed beside a kill"] += 1
            await asyncio.sleep(0.2)
        else:
            self.fault(name, f"status {exchange.status} {exchange.broken} {exchange.error}")
        return False

    def is_disturbed(self, began: float) -> bool:
        """Whether a process was away at any time since then."""
        return any(begin <= time.monotonic() and began <= until for begin, until in self.disturbed)

    def fault(self, name: str, what: str) -> None:
        """Note something wrong."""
        self.faults[name] += 1
        if len(self.examples) < FAULTS_SHOWN:
            self.examples.append(f"{time.strftime('%H:%M:%S')} {name}: {what[:600]}")

    def demand(self, name: str, holds: bool, what: str) -> None:
        """Note a fault unless it holds."""
        if not holds:
            self.fault(name, what)

    def check_text(self, name: str, key: tuple[str, int], text: str, right: str) -> bool:
        """Compare a row with its right text; returns whether it is exactly that."""
        seen = self.rows[name]
        seen["all"] += 1
        seen["exact"] += text == right
        length = int(self.args.right.partition(":")[2] or 0)
        same = text == right if self.args.right == "exact" else text[:length] == right[:length]
        seen["right"] += same
        if not same and self.args.least >= 1:
            self.fault(name, f"{key}: {text!r} is not {right!r}")
        if text[:FOREIGN] != right[:FOREIGN] and len(text) >= FOREIGN:
            others = [k for k, other in self.right.items() if k[0] == key[0] and other[:FOREIGN] == text[:FOREIGN]]
            self.demand(name, not others, f"{key} has the text of {others}: {text!r}")
        return text == right

    async def ask(self, name: str, rng: random.Random) -> None:
        """Rows of known prompts, in one of the ways there are."""
        kind = KINDS[name]
        size = rng.choice((1, 1, 2, self.args.rows)) if kind.many else 1
        numbers = [rng.randrange(self.args.prompts) for _ in range(size)]
        body = kind.body(numbers)
        if stream := rng.choice(kind.streams):
            body |= {"stream": True, "chunk_size": rng.choice((1, 4, 16)), "stream_options": {"include_usage": True}}
        exchange = await self.exchange(kind.path, body)
        if not await self.accept(name, exchange):
            return
        self.demand(name, bool(exchange.events) == stream, "a stream for a whole answer, or the other way round")
        rows = rows_of(exchange)
        self.demand(name, len(rows.texts) == size * kind.copies, f"{len(rows.texts)} rows for {size} prompts")
        if kind.tokens:
            self.demand(name, set(rows.reasons) == {"length"}, f"ends {rows.reasons}")
            count = rows.usage.get("completion_tokens")
            self.demand(name, count == kind.tokens * len(rows.texts), f"{count} tokens in {len(rows.texts)} rows")
        for index, text in enumerate(rows.texts):
            number = numbers[index // kind.copies]
            self.check_text(name, (name, number), text, self.right[name, number])

    # --- sessions ---

    async def insist(self, name: str, path: str, body: dict[str, Any]) -> Rows | None:
        """A turn that is tried again, under one key, until it is answered: however many processes die, it happens once."""
        body |= {"idempotency_key": uuid.uuid4().hex}
        while True:
            exchange = await self.exchange(path, body)
            if exchange.ok:
                return rows_of(exchange)
            if not await self.accept(name, exchange) and not self.is_disturbed(exchange.began):
                return None

    def check_turn(self, name: str, script: int, index: int, rows: Rows, on_track: bool) -> bool:
        """Look at a turn's answer; returns whether the session is still where the right one was."""
        right = self.scripts[script][index]
        foreign = set(MARK.findall(rows.texts[0])) - {mark(script)}
        self.demand(name, not foreign, f"the mark of another session: {foreign}")
        self.demand(name, rows.usage.get("completion_tokens") == TURN_TOKENS, f"tokens: {rows.usage}")
        if not on_track:  # its state is that of another text by now
            return False
        exact = self.check_text(name, (name, script), rows.texts[0], right.texts[0])
        if exact and rows.session:
            self.demand(name, rows.session["tokens"] == right.session["tokens"], f"{rows.session}, right is {right.session}")
        return exact

    async def do_session(self, rng: random.Random) -> None:
        """A script of turns; at times copied, turned back, exported and imported on the way."""
        script, session, version, on_track = rng.randrange(NUM_SCRIPTS), f"soak {uuid.uuid4().hex}", 0, True
        for index in range(len(TURNS)):
            more = {"session_id": session, "expect_version": version, "stream": rng.random() < 0.5}
            rows = await self.insist("session", "/state/chat/completions", turn(script, index) | more)
            if rows is None:
                return
            version += 1
            found = (rows.session or {}).get("version")
            self.demand("session", found == version, f"version {found}, expected {version}")
            on_track = self.check_turn("session", script, index, rows, on_track)
            way = rng.random()
            if way < 0.1 and index:
                rewound = await self.exchange("/state/rewind", {"session_id": session, "expect_version": version})
                if not await self.accept("rewind", rewound):
                    return
                version = rewound.document["sessions"][0]["version"]
                rows = await self.insist(
                    "session", "/state/chat/completions", turn(script, index) | more | {"expect_version": version}
                )
                if rows is None:
                    return
                version += 1
                on_track = self.check_turn("rewound", script, index, rows, on_track)
            elif way < 0.2:
                other = f"soak {uuid.uuid4().hex}"
                if not await self.accept(
                    "fork", await self.exchange("/state/fork", {"session_id": session, "copies": [other]})
                ):
                    return
                await self.exchange("/state/delete", {"session_id": session})
                session, version = other, 1
        if rng.random() < 0.1:
            session, version = await self.carry_over(session, version)
        if len(self.kept) >= KEPT or rng.random() < 0.8:
            deleted = await self.exchange("/state/delete", {"session_id": session})
            self.demand("session", deleted.status in (200, 404) or self.is_disturbed(deleted.began), f"delete {deleted.status}")
        else:
            self.kept[session] = (version, self.scripts[script][-1].session["tokens"] if on_track else None)

    async def carry_over(self, session: str, version: int) -> tuple[str, int]:
        """Export a session and import it under another name; returns what to go on with."""
        exported = await self.exchange("/state/export", {"session_id": session})
        if not await self.accept("export", exported):
            return session, version
        other = f"soak-{uuid.uuid4().hex}"
        imported = await self.exchange(f"/state/import?session_id={other}&overwrite=true", exported.document)
        if not await self.accept("import", imported):
            return session, version
        await self.exchange("/state/delete", {"session_id": session})
        return other, imported.document["sessions"][0]["version"]

    async def do_dialogue(self, rng: random.Random) -> None:
        """The same scripts as nodes; the last turn is taken twice, from one node."""
        script, name = rng.randrange(NUM_SCRIPTS), f"tree{uuid.uuid4().hex}"
        node, nodes, on_track = 0, {0}, True
        for index in (0, 1, 2, 2):
            body = turn(script, index) | {"session_id": name, "dialogue_idx": node, "stream": rng.random() < 0.5}
            rows = await self.insist("dialogue", "/multi_state/chat/completions", body)
            if rows is None:
                return
            self.demand("dialogue", rows.node is not None and rows.node not in nodes, f"node {rows.node} after {nodes}")
            exact = self.check_turn("dialogue", script, index, rows, on_track)
            nodes.add(rows.node)
            if index < 2:
                node, on_track = rows.node, on_track and exact
        await self.exchange("/state/delete", {"session_id": name, "delete_prefix": True})

    async def do_responses(self, rng: random.Random) -> None:
        """Two responses, the second after the first."""
        number, names = rng.randrange(self.args.prompts), []
        for index in range(2):
            body = response_to(number, names[-1] if names else None, stream=rng.random() < 0.5)
            exchange = await self.exchange("/v1/responses", body)
            if not await self.accept("responses", exchange):
                break
            name, text = response_of(exchange)
            names.append(name)
            key = (f"responses {index}", number)
            if not self.check_text("responses", key, text, self.right[key]):
                break
        for name in names:
            await self.exchange(f"/v1/responses/{name}", method="DELETE")

    async def check_kept(self) -> None:
        """Every session that was acknowledged is there, at its version."""
        at_once = asyncio.Semaphore(self.args.clients)

        async def check(session: str, version: int, tokens: int | None) -> None:
            async with at_once:
                exchange = await self.exchange("/state/status", {"session_id": session})
                if not await self.accept("kept", exchange):
                    return
                found = (exchange.document.get("sessions") or [{}])[0]
                self.demand("kept", found.get("version") == version, f"{session}: {found}, expected version {version}")
                self.demand("kept", tokens in (None, found.get("tokens")), f"{session}: {found}, expected {tokens} tokens")
                await self.exchange("/state/delete", {"session_id": session})

        await asyncio.gather(*(check(session, *expected) for session, expected in self.kept.items()))

    # --- what gives no text ---

    async def do_leave(self, rng: random.Random) -> None:
        """Ask for much and go."""
        body = {**FULL, "contents": [prompt(0)] * rng.choice((1, 3)), "max_tokens": 10_000, "stream": rng.random() < 0.6}
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(rng.uniform(0, 1.5)):
                async with await open_stream(self.host, self.port, "/v1/chat/completions", body, self.headers) as stream:
                    try:
                        await stream.read()
                    finally:
                        if rng.random() < 0.5:
                            stream.reset()

    async def do_stop(self, rng: random.Random) -> None:
        """Have one's own request ended."""
        name = uuid.uuid4().hex
        body = {**FULL, "contents": [prompt(1)], "max_tokens": 10_000, "stream": True, "chunk_size": 1}
        running = asyncio.create_task(self.exchange("/v1/chat/completions", body, {"X-Request-Id": name}))
        await asyncio.sleep(rng.uniform(0.5, 1.5))
        while not running.done():
            stopped = await self.exchange("/v1/server/stop", {"request_id": name})
            if not await self.accept("stop", stopped) or stopped.document["stopped"]:
                break
            await asyncio.sleep(0.2)
        exchange = await running
        self.demand("stop", "[DONE]" not in exchange.events, "a stopped stream ended as if it were whole")

    async def do_bad(self, rng: random.Random) -> None:
        """What cannot be understood is refused."""
        path = rng.choice(("/v1/chat/completions", "/state/fork", "/v1/responses", "/translate/v1/batch-translate"))
        body = rng.choice((b"{", b"[]", b'{"contents": 5}', b'{"contents": ["a"], "max_tokens": "x"}', b"\xff", b""))
        exchange = await self.exchange(path, body)
        refused = 400 <= exchange.status < 500
        self.demand(
            "bad", refused or self.is_disturbed(exchange.began), f"{path} {body!r}: {exchange.status} {exchange.broken}"
        )

    async def do_look(self, rng: random.Random) -> None:
        """Read figures and lists."""
        path = rng.choice(("/metrics", "/stats", "/healthz", "/v1/models", "/v1/server/status", "/readyz"))
        await self.accept(path, await self.exchange(path))

    # --- processes ---

    async def kill_at_times(self, seconds: float) -> None:
        """Kill processes, evenly over the time and by turns."""
        roles = ["engine"] * self.args.kills + ["http"] * self.args.http_kills
        self.rng.shuffle(roles)
        began = time.monotonic()
        for index, role in enumerate(roles):
            await asyncio.sleep(max(0.0, began + seconds * (index + 0.3) / len(roles) - time.monotonic()))
            await self.kill(role)

    async def kill(self, role: str) -> None:
        """End one process and wait for the next."""
        before = children(self.args.supervisor_pid, role)
        victim = self.rng.choice(before)
        span = [time.monotonic(), float("inf")]
        self.disturbed.append(span)
        os.kill(victim, signal.SIGKILL)
        self.counts[f"kills of {role}"] += 1
        while True:
            await asyncio.sleep(0.2)
            now = children(self.args.supervisor_pid, role)
            if len(now) == len(before) and victim not in now and await self.all_answer():
                break
            if time.monotonic() - span[0] > 300:
                self.fault("kill", f"{role} did not come back within 300 s")
                break
        self.seconds[f"back after a kill of {role}"].append(time.monotonic() - span[0])
        span[1] = time.monotonic() + 1

    async def all_answer(self) -> bool:
        """Whether every HTTP process says that the engine is ready, and rows come; connections are spread by chance."""
        missing = set(children(self.args.supervisor_pid, "http"))
        for _ in range(20 * len(missing)):
            exchange = await self.exchange("/stats")
            if not exchange.ok or exchange.document["engine"]["phase"] != "ready":
                return False
            missing.discard(exchange.document["http"]["pid"])
            if not missing:
                return (await self.exchange("/v1/chat/completions", raw([0], max_tokens=1))).ok
        return False

    async def look_at_processes(self) -> dict[str, Any]:
        """Threads, descriptors and MiB of the server's processes, once it is idle."""
        await asyncio.sleep(self.args.settle)
        deadline = time.monotonic() + SETTLE_SECONDS  # what was left by its client may take a busy machine longer to notice
        while True:
            exchange = await self.exchange("/stats")
            stats = exchange.document["engine"] if exchange.ok else {}
            if stats.get("sequences_running") == 0 or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        self.demand("idle", stats.get("sequences_running") == 0, f"rows run without a request: {stats}")
        found: dict[str, Any] = {"gpu_mib": gpu_mib()}
        for role in ("engine", "http") if self.args.supervisor_pid else ():
            figures = [process_figures(pid) for pid in children(self.args.supervisor_pid, role)]
            found[role] = dict(zip(("threads", "descriptors", "mib"), map(max, zip(*figures, strict=True)), strict=True))
        return found

    def compare(self, early: dict[str, Any], late: dict[str, Any]) -> None:
        """Nothing grows."""
        for role in ("engine", "http") if self.args.supervisor_pid else ():
            idle = 4 if self.args.settle >= SETTLE_SECONDS else 32  # else some threads of pools are still there
            for name, more in (("threads", idle), ("descriptors", 6), ("mib", self.args.growth_mib)):
                before, after = early[role][name], late[role][name]
                self.demand("growth", after <= before + more, f"{name} of {role}: {before} -> {after}")
        self.demand("growth", late["gpu_mib"] <= early["gpu_mib"] + 512, f"GPU MiB: {early['gpu_mib']} -> {late['gpu_mib']}")

    def check_shares(self) -> None:
        """Enough rows keep to their right text."""
        if self.args.right == "none":
            return
        for name, seen in self.rows.items():
            share = seen["right"] / seen["all"]
            self.demand("share", share >= self.args.least, f"{name}: {share:.3f} of {seen['all']} rows are right")

    def summary(self, early: dict[str, Any], late: dict[str, Any]) -> dict[str, Any]:
        """Everything that was counted."""
        total = Counter()
        for seen in self.rows.values():
            total += seen
        return {
            "minutes": self.args.minutes,
            "clients": self.args.clients,
            "right": self.args.right,
            "counts": dict(self.counts),
            "rows": dict(total),
            "shares": {name: round(seen["exact"] / seen["all"], 4) for name, seen in self.rows.items()},
            "seconds": {name: quantiles(values) for name, values in sorted(self.seconds.items())},
            "processes": {"early": early, "late": late},
            "sessions_checked": len(self.kept),
            "faults": dict(self.faults),
            "examples": self.examples,
        }


def good(name: str, exchange: Exchange) -> Exchange:
    """The same; without right texts there is nothing to do."""
    if not exchange.ok:
        sys.exit(f"{name}: status {exchange.status} {exchange.broken} {exchange.error}")
    return exchange


def mark(script: int) -> str:
    """What only one script's sessions have seen."""
    return f"#{script * 0x1F3D5B79 % 2**32:08x}#"


def turn(script: int, index: int) -> dict[str, Any]:
    """The body of a session's turn, but for the session."""
    text = TURNS[index].format(mark=mark(script), subject=SUBJECTS[script % len(SUBJECTS)])
    return {**FULL, "contents": [text], "max_tokens": TURN_TOKENS}


def response_to(number: int, previous: str | None, *, stream: bool) -> dict[str, Any]:
    """The body of a response, the second with the id of the first."""
    body = {"input": subject(number), "temperature": 0, "max_output_tokens": TURN_TOKENS, "stream": stream}
    return body | ({"previous_response_id": previous} if previous else {})


def response_of(exchange: Exchange) -> tuple[str, str]:
    """(id, text) of a response."""
    document = exchange.document or next(event["response"] for event in reversed(exchange.events) if "response" in event)
    return document["id"], "".join(part["text"] for item in document["output"] for part in item.get("content", ()))


def payloads(data: bytes) -> list[Any]:
    """The `data:` lines of a stream, parsed; `[DONE]` as a text."""
    found = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in found]


def rows_of(exchange: Exchange) -> Rows:
    """A generation's rows from any form of answer. Raises AssertionError for one that has not the form it should."""
    if exchange.events:
        return rows_of_stream(exchange.events)
    document = exchange.document
    if "translations" in document:
        return Rows([item["text"] for item in document["translations"]], [], {})
    choices = document["choices"] if "choices" in document else document["results"]
    assert [choice["index"] for choice in choices] == list(range(len(choices))), "the rows are out of order"
    texts = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]
    session, node = document.get("session"), document.get("dialogue_idx")
    return Rows(texts, [choice["finish_reason"] for choice in choices], document["usage"], session, node)


def rows_of_stream(events: list[Any]) -> Rows:
    """The same from a stream's events, each row joined."""
    assert events[-1] == "[DONE]", "the stream has no end"
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    found = Rows([], [], {})
    for event in events[:-1]:
        found.usage = event.get("usage") or found.usage
        found.session = event.get("session") or found.session
        found.node = event.get("dialogue_idx", found.node)
        for choice in event.get("choices", ()):
            index = choice["index"]
            assert reasons.get(index) is None, "a row goes on behind its end"
            texts[index] = texts.get(index, "") + (
                (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]
            )
            reasons[index] = choice.get("finish_reason")
    assert sorted(texts) == list(range(len(texts))), "a row is missing"
    found.texts = [texts[index] for index in range(len(texts))]
    found.reasons = [reasons[index] for index in range(len(texts))]
    return found


def quantiles(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and largest of some seconds."""
    ordered = sorted(values)
    named = {"median": len(ordered) // 2, "p99": int(len(ordered) * 0.99), "most": -1}
    return {name: round(ordered[index], 3) for name, index in named.items()} if ordered else {}


def children(parent: int, role: str) -> list[int]:
    """Process ids of one role among a process's children."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parts = (path / "cmdline").read_bytes().split(b"\0")
            its_parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if its_parent == parent and [b"--role", role.encode()] in map(list, itertools.pairwise(parts)):
                found.append(int(path.name))
    return sorted(found)


def process_figures(pid: int) -> tuple[int, int, int]:
    """(threads, descriptors, resident MiB) of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    threads, resident = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("Threads", "VmRSS"))
    return threads, len(os.listdir(f"/proc/{pid}/fd")), resident // 1024


def gpu_mib() -> int:
    """Memory in use on the GPUs that this process may see; 0 without one."""
    if shutil.which("nvidia-smi") is None:
        return 0
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    command = ["nvidia-smi", *(["-i", seen] if seen else []), "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(command, capture_output=True, text=True).stdout.split() or ["0"]))


if __name__ == "__main__":
    main()
