"""Two engines behind one address, and what the loss of one costs."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_process import PATIENCE, STRICT, ServerProcess

from bench.client import open_stream

CHAT = "/v1/chat/completions"
READY = ["ready", "ready"]


ARGS = ("--devices", "cpu,cpu", "--http-workers", "2", "--no-access-log")


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of two stand-in engines."""
    with ServerProcess(*ARGS, folder=tmp_path_factory.mktemp("stubs")) as running:
        wait_until(lambda: running.get("/readyz")[1]["engines"] == READY, 30)
        yield running


@pytest.fixture(scope="module")
def pair(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of two engines with a model that says anything."""
    with ServerProcess(*ARGS, folder=tmp_path_factory.mktemp("pair"), model=tiny_checkpoint) as running:
        wait_until(lambda: running.get("/readyz")[1]["engines"] == READY, 30)
        yield running


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def figures(server: ServerProcess, name: str) -> list[float]:
    """One of each engine."""
    return [engine.get(name, -1) for engine in server.get("/stats")[1]["engines"]]


def texts(server: ServerProcess, prompts: list[str], **more) -> list[str]:
    """What the model says to each."""
    body = {"contents": prompts, "max_tokens": 12, "temperature": 1, "seed": 7, "ignore_eos": True, **more}
    status, answer = server.post(body)
    assert status == 200, answer
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(prompts)))
    return [choice["message"]["content"] for choice in answer["choices"]]


@pytest.mark.long
def test_seeded_text_is_the_same_on_one_engine_and_in_parts_on_two(pair, random_model):
    before = figures(pair, "generation_tokens_total")
    many = [f"User: number {number}\n\nAssistant:" for number in range(40)]
    assert texts(pair, many) == texts(random_model, many)
    wait_until(lambda: sum(figures(pair, "generation_tokens_total")) == sum(before) + 40 * 12, 30)
    assert all(now > then for now, then in zip(figures(pair, "generation_tokens_total"), before, strict=True))
    alone = texts(random_model, many[:1])
    assert all(texts(pair, many[:1]) == alone for _ in range(4))


def test_figures_are_those_of_each_engine_and_add_up(stubs):
    words = "".join(f" w{number}" for number in range(12))
    assert texts(stubs, ["a" * (1 + number) for number in range(700)]) == [words] * 700  # 640 slots
    wait_until(lambda: sum(figures(stubs, "generation_tokens_total")) == 700 * 12, 30)
    wait_until(lambda: figures(stubs, "sequences_running") == [0, 0], 30)
    stats = stubs.get("/stats")[1]
    for name in ("slots", "slots_free", "generation_tokens_total", "steps_total"):
        assert stats["engine"][name] == sum(engine[name] for engine in stats["engines"]), name
    assert [(engine["index"], engine["card"], engine["phase"]) for engine in stats["engines"]] == [
        (0, "cpu", "ready"),
        (1, "cpu", "ready"),
    ]
    status = stubs.get("/v1/server/status")[1]
    assert status["prefill_queue"]["dynamic_max_bsz"] == sum(engine["slots"] for engine in status["engines"]) == 640

    def of_each(name: str) -> dict[str, float]:
        found = re.findall(rf'^rwkv_batch:{name}{{engine="(\d)"}} (\S+)$', stubs.get("/metrics")[1], re.M)
        return {engine: float(value) for engine, value in found}

    wait_until(lambda: of_each("num_requests_running") == {"0": 0, "1": 0}, 30)
    assert of_each("state_slots_usage_ratio") == {"0": 0, "1": 0}
    assert of_each("engine_slots") == {"0": 320, "1": 320}
    totals = of_each("generation_tokens_total")
    assert min(totals.values()) > 0
    assert sum(totals.values()) == 700 * 12


async def follow(port: int, numbers: list[int], errors: list[str], number: int) -> None:
    """Read an answer without end, count its texts, note its error."""
    body = {
        "contents": ["User: hi\n\nAssistant:"],
        "max_tokens": 1_000_000,
        "ignore_eos": True,
        "chunk_size": 64,
        "stream": True,
    }
    async with await open_stream("127.0.0.1", port, CHAT, body) as stream:
        assert stream.status == 200
        async for payload in stream.events():
            event = {} if payload == b"[DONE]" else json.loads(payload)
            if "error" in event:
                errors.append(event["error"])
            numbers[number] += 1
    numbers[number] = -1


async def losing_one(server: ServerProcess, num: int) -> None:
    numbers, errors = [0] * num, []
    jobs = [asyncio.create_task(follow(server.port, numbers, errors, number)) for number in range(num)]

    async def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, (numbers, errors, server.output[-2000:])
            await asyncio.sleep(0.05)

    try:
        await until(lambda: all(numbers))
        running: list[float] = []
        while sum(running) != num:
            running = await asyncio.to_thread(figures, server, "sequences_running")
        assert min(running) > 0
        os.kill(server.children("engine")[1], signal.SIGKILL)  # the younger child
        began = time.monotonic()
        lost = int(running[1])
        await until(lambda: numbers.count(-1) == lost)
        assert len(errors) == lost
        assert all(error["message"] if isinstance(error, dict) else error for error in errors)
        others = {number: count for number, count in enumerate(numbers) if count > 0}
        await until(lambda: all(numbers[number] > count + 1 for number, count in others.items()))
        assert (await asyncio.to_thread(server.post, {"contents": ["a"], "max_tokens": 2}))[0] == 200
        assert (numbers.count(-1), len(errors)) == (lost, lost)
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
    await until(lambda: server.get("/readyz")[1]["engines"] == READY)
    print(f"back after {time.monotonic() - began:.1f} s")
    assert time.monotonic() - began < 10 or not STRICT


def test_a_killed_engine_costs_its_rows_one_error_each_and_nothing_else(stubs):
    asyncio.run(losing_one(stubs, 64))
    wait_until(lambda: figures(stubs, "sequences_running") == [0, 0], 10 * PATIENCE)
    assert "Traceback" not in stubs.output


@pytest.mark.long
def test_sessions_go_on_while_an_engine_is_away_and_after_that_of_the_store(pair):
    def turn(name: str) -> tuple[int, int]:
        body = {"contents": ["User: hi\n\nAssistant:"], "session_id": name, "max_tokens": 4}
        status, answer = pair.post(body, "/state/chat/completions")
        return status, answer["session"]["version"] if status == 200 else 0

    names = [f"session {number}" for number in range(6)]
    assert [turn(name) for name in names] == [(200, 1)] * 6
    os.kill(pair.children("engine")[0], signal.SIGKILL)
    wait_until(lambda: pair.get("/readyz")[1]["engines"] != READY, 30)
    assert [turn(name) for name in names] == [(200, 2)] * 6  # wherever each was
    wait_until(lambda: pair.get("/readyz")[1]["engines"] == READY, 60)
    assert [turn(name) for name in names] == [(200, 3)] * 6
    (store,) = pair.children("store")
    os.kill(store, signal.SIGKILL)
    wait_until(lambda: pair.children("store") not in ([], [store]), 30)
    wait_until(lambda: turn(names[0])[0] == 200, 30)
    assert [turn(name)[0] for name in names] == [200] * 6
    assert "Traceback" not in pair.output
