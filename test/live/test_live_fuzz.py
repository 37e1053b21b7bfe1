"""Thousands of almost right bodies on all routes of a real server with a random model: each gets a designed answer, in time."""

import asyncio
import json
import shlex
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import quiet_robyn  # noqa: F401
from bodies import Case, Mutator, examples
from scripted_server import start
from server_process import PATIENCE, ServerProcess, process_figures, wait_until

from bench.client import open_stream
from routes import ROUTES

pytestmark = pytest.mark.faults

CHAT = "/v1/chat/completions"
CLIENTS = 6
LONGEST = 10.0  # s of a call
POSTS = [route.path for route in ROUTES if route.method == "POST"]
OTHERS = [(route.method, route.path) for route in ROUTES if route.method != "POST" and not route.path.startswith("/web/")]
IMPORT = "/state/import"
END_OTHERS = ("/v1/server/stop", "/big_batch/clean")  # they end other calls, so they come when there are none
# What may be kept is bounded tightly, so that memory is flat soon.
FLAGS = shlex.split(
    "--slots 32 --max-tokens-limit 64 --max-prompts 64 --session-wait-seconds 2 --translate-ratio 0.5 --l1-sessions 4 "
    "--l2-sessions 4 --prefix-cache-mib 8 --translate-memory-mib 1 --log-level info"
)
GREEDY = {"contents": ["Once upon a time"], "max_tokens": 16, "temperature": 0, "stop_tokens": [], "ignore_eos": True}


def test_every_route_that_takes_a_body_has_an_example():
    for path in POSTS:
        assert path == IMPORT or examples(path), path


@dataclass
class Findings:
    """What came back."""

    statuses: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")

    def take(self, case: Case, status: int, body: bytes, seconds: float, whole: bool) -> None:
        """Look at one answer."""
        late = status == 200 and not whole  # it failed after its first second: then there is no other way to say so
        self.statuses["cut off" if late else status] += 1
        self.slowest = max(self.slowest, (seconds, f"{case.path} {(case.body or b'')[:200]!r}"))
        wrong = [
            (f"status {status}", status >= 500 or not (status == 200 or 400 <= status < 500)),
            ("an internal error", b"internal error" in body or b'"internal"' in body),
            (f"{seconds:.1f} s", seconds > LONGEST * PATIENCE),
            ("no answer", not whole and not late),
            ("an error of another form", 400 <= status < 500 and not is_error(body)),
        ]
        reasons = [reason for reason, is_so in wrong if is_so]
        if reasons and len(self.faults) < 20:
            self.faults.append(
                f"{', '.join(reasons)}: {case.method} {case.path} {case.headers} {(case.body or b'')[:600]!r} -> {body[:300]!r}"
            )


def is_error(body: bytes) -> bool:
    try:
        return not {"error", "message"}.isdisjoint(json.loads(body))  # the latter from /state/delete, as the reference has it
    except ValueError:
        return False


async def ask(port: int, case: Case, findings: Findings) -> None:
    """Send one case and read its answer to the end."""
    status, body, whole = 0, b"", True
    began = time.monotonic()
    try:
        async with asyncio.timeout(LONGEST * PATIENCE + 5):
            async with await open_stream("127.0.0.1", port, case.path, case.body, case.headers, case.method) as stream:
                status = stream.status
                body = await stream.read()
    except (OSError, asyncio.IncompleteReadError, TimeoutError):
        whole = False
    findings.take(case, status, body, time.monotonic() - began, whole)


async def ask_all(port: int, cases: list[Case], findings: Findings, clients: int) -> None:
    left = iter(cases)

    async def client() -> None:
        for case in left:
            await ask(port, case, findings)

    await asyncio.gather(*(client() for _ in range(clients)))


def canary(server: ServerProcess) -> str:
    status, answer = server.post(GREEDY)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


def fill(server: ServerProcess) -> None:
    """Take as much memory for a step as any step takes: its temporary arrays stay with the allocator."""
    rows = {"contents": ["a"] * 64, "max_tokens": 4}
    scored = {"prompt": ["x y " * 1000] * 2, "max_tokens": 1, "echo": True, "logprobs": 5, "temperature": 0.7}
    for path, body in ((CHAT, rows), ("/big_batch/completions", rows), ("/v1/completions", scored)):
        assert server.post(body, path)[0] == 200


def is_idle(server: ServerProcess) -> bool:
    stats = server.engine_stats()
    return stats["slots_free"] == stats["slots"] and stats["requests_waiting"] == 0


def resident(server: ServerProcess) -> list[int]:
    """MiB of the engine and of the HTTP processes."""
    return [process_figures(pid)[2] // 1024 for role in ("engine", "http") for pid in server.children(role)]


def exported(server: ServerProcess) -> bytes:
    """A session as a file."""
    assert server.post({"contents": ["a"], "session_id": "f2", "max_tokens": 2}, "/state/chat/completions")[0] == 200
    return asyncio.run(export(server.port))


async def export(port: int) -> bytes:
    async with await open_stream("127.0.0.1", port, "/state/export", {"session_id": "f2"}) as stream:
        assert stream.status == 200
        return await stream.read()


@pytest.mark.parametrize(
    ("seed", "count", "growth_mib"),
    [(1, 400, 128), pytest.param(2, 10_000, 96, marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
)
def test_almost_right_bodies_get_designed_answers(tiny_checkpoint: Path, folder: Path, seed: int, count: int, growth_mib: int):
    with start(tiny_checkpoint, folder, *FLAGS) as server:
        right = canary(server)
        fill(server)
        mutator = Mutator(seed, exported(server))
        draws = [partial(mutator.case, path) for path in POSTS]
        draws += [partial(mutator.without_body, method, path) for method, path in OTHERS]
        cases = [draws[number % len(draws)]() for number in range(count)]
        together = [case for case in cases if not case.path.startswith(END_OTHERS)]
        alone = [case for case in cases if case.path.startswith(END_OTHERS)]
        processes = server.children("engine"), server.children("http")
        findings, began = Findings(), time.monotonic()
        first = len(together) // 4
        asyncio.run(ask_all(server.port, together[:first], findings, CLIENTS))
        early = resident(server)
        asyncio.run(ask_all(server.port, together[first:], findings, CLIENTS))
        asyncio.run(ask_all(server.port, alone, findings, 1))
        late = resident(server)
        seconds = time.monotonic() - began
        print(f"{count} bodies in {seconds:.0f} s, slowest {findings.slowest[0]:.1f} s; MiB {early} -> {late}")
        print(dict(findings.statuses), findings.slowest)
        assert findings.faults == [], "\n".join(findings.faults)
        assert (server.children("engine"), server.children("http")) == processes
        assert "Traceback" not in server.output
        wait_until(lambda: is_idle(server), 5, "all slots free")
        assert canary(server) == right
        assert findings.statuses["cut off"] < count / 50
        assert findings.statuses[200] > count / 10  # otherwise they were not almost right
        assert findings.statuses[400] > count / 10
        assert all(after <= before + growth_mib for before, after in zip(early, late, strict=True))
