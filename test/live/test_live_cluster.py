"""Two servers, HAProxy and PostgreSQL on one machine: processes are killed and stopped, servers restarted, under load."""

import asyncio
import os
import random
import signal
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from memory_model import write_memory
from server_process import STRICT, ServerProcess, wait_until
from session_checker import GREEDY, STATE, Client, Turn, everybody

from bench.client import call, open_stream

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

NOTICED = 0.25  # seconds until a death is known: what was sent to the dead process meanwhile was on its way to it
GO_ON = 3.0  # within which a session goes on elsewhere


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_memory(tmp_path_factory.mktemp("memory") / "bytes.pth", 256)


@dataclass
class Failed:
    """A call without an answer, and when it ran."""

    began: float
    ended: float
    why: str


@dataclass
class Caller(Client):
    """A client of the proxy that notes what failed, and when each turn was acknowledged."""

    refusals: tuple[int, ...] = (409, 429, 502, 503)
    failed: list[Failed] = field(default_factory=list)
    acknowledged: list[float] = field(default_factory=list)

    async def send(self, number: int) -> Turn | str:
        """See `Client`."""
        began = time.monotonic()
        turn = await super().send(number)
        now = time.monotonic()
        if isinstance(turn, str):
            self.failed.append(Failed(began, now, turn))
        else:
            self.acknowledged.append(now)
        return turn


async def events(server: ServerProcess, body: dict[str, Any]) -> list[bytes]:
    """The payloads of a stream."""
    async with await open_stream(server.host, server.port, STATE, body) as stream:
        return [payload async for payload in stream.events()]


async def kill_one(cluster: Cluster, rng: random.Random) -> tuple[str, float]:
    """kill -9 of a random process; what it was, and when."""
    pids = await asyncio.to_thread(cluster.pids)
    kind = rng.choice(sorted(pids))
    os.kill(rng.choice(pids[kind]), signal.SIGKILL)
    return kind, time.monotonic()


def unexplained(callers: list[Caller], kills: list[tuple[str, float]]) -> list[Failed]:
    """The calls that failed although no process was killed while they ran, or just before."""
    return [
        failed
        for caller in callers
        for failed in caller.failed
        if not any(failed.began - NOTICED <= when <= failed.ended for _, when in kills)
    ]


def pauses(callers: list[Caller], kills: list[tuple[str, float]]) -> dict[str, list[float]]:
    """After each kill, how long the session took that took longest until its next turn was acknowledged."""
    found: dict[str, list[float]] = {}
    for kind, when in kills:
        waits = [next((at - when for at in caller.acknowledged if at >= when), 0.0) for caller in callers]
        found.setdefault(kind, []).append(round(max(waits), 2))
    return found


@pytest.mark.parametrize(("sessions", "kills"), [(12, int(os.environ.get("KILLS", "100")))])
def test_a_random_process_is_killed_again_and_again(folder, checkpoint, sessions, kills):
    """No acknowledged turn is lost or comes twice; only calls on their way to the dead process fail; sessions go on at once."""
    rng = random.Random(0)
    with Cluster(folder, checkpoint, "--snapshot-tokens", "128") as cluster:  # to feed 2,048 again takes a CPU seconds
        callers = [Caller(cluster, f"s{n}", f"s{n}", random.Random(n)) for n in range(sessions)]
        killed: list[tuple[str, float]] = []

        async def run() -> None:
            stop = asyncio.Event()
            running = asyncio.ensure_future(everybody(caller.run(stop) for caller in callers))
            while len(killed) < kills and not running.done():
                await asyncio.sleep(rng.uniform(0.5, 1.5))
                killed.append(await kill_one(cluster, rng))
                await asyncio.sleep(GO_ON)
                await asyncio.to_thread(wait_until, cluster.all_ready, 60, "all servers are back")
            stop.set()
            await running
            await everybody(caller.check() for caller in callers)

        asyncio.run(run())
        times, strange = pauses(callers, killed), unexplained(callers, killed)
        turns, failures = sum(len(c.turns) for c in callers), sum(len(c.failed) for c in callers)
        print(
            f"\n{len(killed)} kills: {turns} turns acknowledged, {failures} calls failed, {len(strange)} of them not on"
            f" their way to what died; longest pause of any of {sessions} sessions:"
        )
        for kind, seconds in sorted(times.items()):
            print(f"    {kind}, {len(seconds)} kills: median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s")
        assert not strange, strange[:5]
        assert not STRICT or statistics.median(times["engine"] + times["supervisor"]) < GO_ON


def test_an_engine_that_is_stopped_in_the_middle_of_a_turn(folder, checkpoint):
    """Its session goes on elsewhere; when it wakes up its client gets 409, and nothing is lost or doubled."""
    with Cluster(folder, checkpoint) as cluster:
        first, second = cluster.servers
        turn = {"contents": ["User: one\n\nAssistant:"], "session_id": "s", "max_tokens": 8, **GREEDY}

        async def run() -> None:
            before = await call(first.host, first.port, STATE, turn)
            assert before.json()["session"]["version"] == 1
            (engine,) = first.children("engine")
            long = asyncio.ensure_future(events(first, turn | {"max_tokens": 3000, "stream": True}))
            await asyncio.to_thread(wait_until, lambda: first.engine_stats()["requests_running"] >= 1, 20, "the turn runs")
            os.kill(engine, signal.SIGSTOP)
            began = time.monotonic()
            elsewhere = await call(second.host, second.port, STATE, turn)
            assert (elsewhere.status, elsewhere.json()["session"]["version"]) == (200, 2), elsewhere
            assert not STRICT or time.monotonic() - began < GO_ON
            os.kill(engine, signal.SIGCONT)
            late = await long
            assert b"went on elsewhere" in late[-1], late[-3:]
            third = await call(first.host, first.port, STATE, turn)
            assert third.json()["session"]["version"] == 3

        asyncio.run(run())


def test_a_rolling_restart_fails_no_call(folder, checkpoint):
    with Cluster(folder, checkpoint, "--drain-least-seconds", "2") as cluster:
        callers = [Caller(cluster, f"s{n}", f"s{n}", random.Random(n)) for n in range(12)]

        async def run() -> None:
            stop = asyncio.Event()
            running = asyncio.ensure_future(everybody(caller.run(stop) for caller in callers))
            for server in list(cluster.servers):
                await asyncio.sleep(1)
                before = cluster.restarts
                server.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(
                    wait_until, lambda before=before: cluster.restarts > before and cluster.all_ready(), 60, "it is back"
                )
                await asyncio.sleep(1)  # until the proxy has seen that
            stop.set()
            await running
            await everybody(caller.check() for caller in callers)

        asyncio.run(run())
        failed = [failed for caller in callers for failed in caller.failed]
        print(f"\nrolling restart: {sum(len(caller.turns) for caller in callers)} turns, {len(failed)} calls failed")
        assert not failed, failed[:5]
