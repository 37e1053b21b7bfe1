"""Many streams at once, and clients that leave: everything starts, nothing starves, nothing leaks."""

import asyncio
import http.client
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from server_process import PATIENCE, ServerProcess, process_figures, wait_until

from bench.client import open_stream

pytestmark = pytest.mark.faults

FRESH = ("--heartbeat", "0.05")  # figures in /stats are at most so old (s)
CHAT = "/v1/chat/completions"

SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <string.h>
/* 128 CPUs as long as a thread may use all real ones; a narrowed mask is shown as it is. */
int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set) {
    static int (*real)(pid_t, size_t, cpu_set_t *);
    if (!real) real = dlsym(RTLD_NEXT, "sched_getaffinity");
    int result = real(pid, size, set);
    if (result < 0 || CPU_COUNT_S(size, set) < 2) return result;
    if (size < 16) { errno = EINVAL; return -1; }
    for (int cpu = 0; cpu < 128; cpu++) CPU_SET_S(cpu, size, set);
    return result;
}
"""


async def one_stream(port: int, num_tokens: int, began: float, **more) -> dict:
    """Read one stream to its end: when the first text came, the longest pause, whether all words came in order."""
    times, text, done = [], "", False
    body = {"contents": ["a"], "max_tokens": num_tokens, "stream": True, "chunk_size": 1, **more}
    async with await open_stream("127.0.0.1", port, CHAT, body) as stream:
        assert stream.status == 200
        async for payload in stream.events():
            if payload == b"[DONE]":
                done = True
                continue
            part = json.loads(payload)["choices"][0]
            if part["delta"]["content"]:
                times.append(time.monotonic() - began)
                text += part["delta"]["content"]
    assert text == "".join(f" w{i}" for i in range(num_tokens))
    assert done
    return {"first": times[0], "pause": max((b - a for a, b in itertools.pairwise(times)), default=0)}


async def many_streams(port: int, num: int, num_tokens: int) -> list[dict]:
    began = time.monotonic()
    return await asyncio.gather(*(one_stream(port, num_tokens, began) for _ in range(num)))


def run_streams(folder: Path, num: int, num_tokens: int, env: dict[str, str] | None = None) -> list[dict]:
    with ServerProcess(folder=folder, step_ms=20, env=env) as server:
        results = asyncio.run(many_streams(server.port, num, num_tokens))
    first, pause = max(r["first"] for r in results), max(r["pause"] for r in results)
    print(f"{num} streams of {num_tokens} tokens at 20 ms: last first token {first:.2f} s, longest pause {pause:.3f} s")
    return results


@pytest.mark.parametrize("num", [320])
def test_separate_streams_all_start_with_default_flags(folder, num):
    results = run_streams(folder, num, 40)
    assert max(r["first"] for r in results) < 3.0 * PATIENCE
    assert max(r["pause"] for r in results) < 1.0 * PATIENCE


@pytest.fixture
def many_cpus(folder) -> dict[str, str]:
    """An environment in which programs see 128 CPUs."""
    if not shutil.which("gcc"):
        pytest.skip("gcc is not installed")
    (folder / "shim.c").write_text(SHIM)
    shim = folder / "shim.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", shim, folder / "shim.c", "-ldl"], check=True)
    count = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
    if subprocess.run(count, env={"LD_PRELOAD": str(shim)}, capture_output=True).stdout.strip() != b"128":
        pytest.skip("the shim needs a machine with at least two CPUs")
    return {"LD_PRELOAD": str(shim)}


@pytest.mark.long
def test_separate_streams_all_start_on_a_machine_with_128_cpus(folder, many_cpus):
    results = run_streams(folder, 320, 40, many_cpus)
    assert max(r["first"] for r in results) < 3.0 * PATIENCE
    assert max(r["pause"] for r in results) < 1.0 * PATIENCE


@pytest.mark.parametrize("cpus", ["real", pytest.param("128", marks=pytest.mark.long)])
def test_waiting_streams_do_not_hold_up_running_ones(folder, cpus, request):
    """304 streams wait for one of 16 slots. Each holds a thread of a pool, which 128 CPUs would make 4 threads small."""

    async def scenario(port: int) -> list[dict]:
        running = [asyncio.create_task(one_stream(port, 75, time.monotonic())) for _ in range(16)]
        await asyncio.to_thread(wait_until, lambda: server.engine_stats()["slots_free"] == 0, 2.0, "all slots taken")
        body = {"contents": ["a"], "max_tokens": 100, "stream": True}
        waiting = await asyncio.gather(*(open_stream("127.0.0.1", port, CHAT, body) for _ in range(304)))
        assert {stream.status for stream in waiting} == {200}
        results = await asyncio.gather(*running)
        for stream in waiting:
            stream.reset()
        return results

    env = request.getfixturevalue("many_cpus") if cpus == "128" else {}
    with ServerProcess(*FRESH, "--slots", "16", folder=folder, step_ms=20, env=env) as server:
        results = asyncio.run(scenario(server.port))
    pause = max(r["pause"] for r in results)
    print(f"16 streams beside 304 that wait, {cpus} CPUs: longest pause {pause:.3f} s")
    assert pause < 0.5 * PATIENCE


async def leave(port: int, rng: random.Random, *, stream: bool) -> None:
    """Ask for a long answer and leave at a random moment, half of the time with RST, sometimes before the head came."""
    body = {
        "contents": ["a" * rng.choice([1, 1, 1, 3000])],
        "max_tokens": 100_000,
        "stream": stream,
        "chunk_size": rng.choice([1, 4]),
    }
    patience = rng.uniform(0.0, 1.5 if stream else 2.0)
    try:
        async with asyncio.timeout(patience):
            async with await open_stream("127.0.0.1", port, CHAT, body) as answer:
                try:
                    async for _ in answer.chunks():
                        pass
                finally:
                    if rng.random() < 0.5:
                        answer.reset()
    except TimeoutError:
        pass


def events_by_line(text: str) -> list:
    """Every line that is not empty is an event, behind `data: ` or whatever else takes so much room: LLMPerf."""
    cut = [line.strip()[6:] for line in text.split("\n") if line.strip()]
    return [json.loads(data) for data in cut if data != "[DONE]"]


def events_by_prefix(text: str) -> list:
    """Every line that is not empty is an event, maybe behind `data: `: the benchmarks of SGLang and conRWKV."""
    lines = [line.strip().removeprefix("data: ") for line in text.split("\n") if line.strip()]
    return [json.loads(data) for data in lines if data != "[DONE]"]


def events_by_blank_line(text: str) -> list:
    """Every empty line ends an event, also one without data: openai-go before 3.43."""
    found, data = [], ""
    for line in text.split("\n")[:-1]:
        if line.startswith("data:"):
            data += line[5:].strip()
        elif not line:
            if data == "[DONE]":
                return found
            found.append(json.loads(data))
            data = ""
    raise AssertionError("no [DONE]")


@pytest.mark.parametrize("ping", ["15", "0.2"])
def test_old_clients_read_a_stream_that_waits_for_its_slot(folder, ping):
    """By default they see no comment for 15 s; where there is one, it is a line without a blank line behind it."""

    async def scenario(port: int) -> str:
        taker = await open_stream("127.0.0.1", port, CHAT, {"contents": ["a"], "max_tokens": 40, "stream": True})
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "stream": True}
        waiter = await open_stream("127.0.0.1", port, "/v1/chat/completions", body)
        _, text = await asyncio.gather(taker.read(), waiter.read())
        return text.decode()

    flags = ("--slots", "1", "--http-workers", "1", "--ping-seconds", ping)
    with ServerProcess(*flags, folder=folder, step_ms=40) as server:
        text = asyncio.run(scenario(server.port))
    readers = [events_by_blank_line] if ping != "15" else [events_by_blank_line, events_by_line, events_by_prefix]
    for reader in readers:
        words = [event["choices"][0]["delta"].get("content") or "" for event in reader(text)]
        assert "".join(words) == " w0 w1 w2 w3 w4"
    assert (": ping\n" in text) == (ping != "15")


def test_who_leaves_disturbs_nobody_elsewhere(folder):
    """Streams to other addresses get no comment when a client leaves; that of the one who left ends, though nothing flows."""

    async def scenario(server: ServerProcess) -> bytes:
        body = {"contents": ["a"], "max_tokens": 60, "stream": True, "chunk_size": 1000}
        quiet = await open_stream("127.0.0.1", server.port, CHAT, body)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        data = json.dumps({**body, "max_tokens": 100_000}).encode()
        for _ in range(5):
            left = socket.create_connection((server.host, server.port), source_address=("127.0.0.2", 0))
            left.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            assert left.recv(100).startswith(b"HTTP/1.1 200")
            left.close()
        await asyncio.to_thread(wait_until, lambda: server.engine_stats()["sequences_running"] <= 1, 2.0, "slots free")
        return await quiet.read()

    with ServerProcess(*FRESH, "--slots", "64", "--http-workers", "1", folder=folder, step_ms=40) as server:
        text = asyncio.run(scenario(server))
    assert text.endswith(b"data: [DONE]\n\n")
    assert not [line for line in text.split(b"\n") if line.startswith(b":")]


FORMS = {
    CHAT: {"contents": ["a"]},
    "/v2/chat/completions": {"contents": ["a", "b"]},
    "/openai/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/batch/completions": {"contents": ["a"]},
    "/FIM/v1/batch-FIM": {"prefix": ["a"], "suffix": ["b"]},
    "/translate/v1/batch-translate": {"source_lang": "en", "target_lang": "de", "text_list": ["a"]},
}


async def outcome(port: int, path: str, body: dict) -> str:
    """How a call ends for its client: by "status", by an end that is "cut", or with a "success"."""
    async with await open_stream("127.0.0.1", port, path, {"max_tokens": 100_000, **body}) as answer:
        try:
            text = await answer.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            return "cut"
        return "status" if answer.status >= 400 else "success" if json.loads(text) else ""


async def ends_of_all_forms(server: ServerProcess, fail) -> tuple[dict[str, str], bytes]:
    """How calls that wait for over a second end when `fail` is called, and all of a stream beside them."""
    stream = await open_stream("127.0.0.1", server.port, CHAT, {"contents": ["a"], "max_tokens": 100_000, "stream": True})
    calls = [asyncio.create_task(outcome(server.port, path, body)) for path, body in FORMS.items()]
    await asyncio.sleep(1.6)
    fail()
    return dict(zip(FORMS, await asyncio.gather(*calls), strict=True)), await stream.read()


def test_answers_that_fail_after_they_began_are_no_success(folder):
    """The status has said 200 by then; a stream beside them gets its error and a whole end."""
    with ServerProcess("--http-workers", "1", folder=folder, step_ms=50) as server:
        idle_one = http.client.HTTPConnection(server.host, server.port, timeout=30)
        idle_one.request("GET", "/healthz")
        assert idle_one.getresponse().read()
        (engine,) = server.children("engine")
        ends, stream = asyncio.run(ends_of_all_forms(server, lambda: os.kill(engine, signal.SIGKILL)))
        assert "success" not in ends.values(), ends
        assert b'"error"' in stream
        assert b"[DONE]" not in stream
        idle_one.request("GET", "/healthz")  # on the same connection
        assert idle_one.getresponse().status == 200
        idle_one.close()


def test_a_server_that_must_stop_leaves_no_success_behind(folder):
    with ServerProcess("--http-workers", "1", "--drain-seconds", "0.5", folder=folder, step_ms=50) as server:
        ends, _ = asyncio.run(ends_of_all_forms(server, lambda: server.process.send_signal(signal.SIGTERM)))
        assert "success" not in ends.values(), ends


async def leave_many(port: int, num_streams: int, num_plain: int, seed: int) -> None:
    rng = random.Random(seed)
    jobs = [leave(port, rng, stream=True) for _ in range(num_streams)] + [
        leave(port, rng, stream=False) for _ in range(num_plain)
    ]
    await asyncio.gather(*jobs)


def figures(server: ServerProcess) -> list[tuple[int, int, int]]:
    return [process_figures(pid) for pid in (*server.children("http"), *server.children("engine"))]


def idle(server: ServerProcess) -> bool:
    time.sleep(0.06)
    stats = server.engine_stats()
    return stats["slots_free"] == stats["slots"] and stats["requests_waiting"] == 0


def leave_and_look(folder: Path, num_streams: int, num_plain: int, rounds: int) -> None:
    with ServerProcess(*FRESH, "--slots", "64", "--prefill-budget", "64", folder=folder, step_ms=20) as server:
        asyncio.run(leave_many(server.port, num_streams, num_plain, 0))  # threads and buffers of the first round stay
        wait_until(lambda: idle(server), 2.5, "slots free")
        time.sleep(11)  # idle pool threads end after ten seconds
        before = figures(server)
        for turn in range(rounds):
            asyncio.run(leave_many(server.port, num_streams, num_plain, turn + 1))
            took = wait_until(lambda: idle(server), 2.0, "slots free")
            print(f"{num_streams} streams and {num_plain} plain calls left: all {64} slots free after {took:.2f} s")
        time.sleep(11)
        after = figures(server)
        print("threads, descriptors, KiB:", before, "->", after)
        for (threads0, fds0, kib0), (threads1, fds1, kib1) in zip(before, after, strict=True):
            assert threads1 <= threads0 + 4
            assert fds1 <= fds0 + 4
            assert kib1 <= kib0 + 16 * 1024
        assert server.post({"contents": ["a"], "max_tokens": 2})[0] == 200
        assert server.get("/stats")[1]["http"]["answers_in_progress"] == 0


def test_clients_that_leave_free_their_slots(folder):
    """Also without any other traffic: an idle server must notice by itself."""
    with ServerProcess(*FRESH, "--slots", "64", "--prefill-budget", "64", folder=folder, step_ms=20) as server:
        asyncio.run(leave_many(server.port, 60, 10, 0))
        took = wait_until(lambda: idle(server), 2.0, "slots free")
        print(f"60 streams and 10 plain calls left: all slots free after {took:.2f} s")


@pytest.mark.long
def test_300_streams_and_50_plain_clients_leave_and_nothing_grows(folder):
    leave_and_look(folder, 300, 50, rounds=3)


def test_a_reader_that_does_not_read_is_cut_off_alone(folder):
    async def scenario(port: int) -> tuple[float, str]:
        rows = ["a"] * 64
        body = {"contents": rows, "max_tokens": 100_000, "stream": True, "chunk_size": 1}
        lazy = await open_stream("127.0.0.1", port, CHAT, body)
        lazy.reader._transport.pause_reading()
        began = time.monotonic()
        while time.monotonic() - began < 60:
            other = await one_stream(port, 20, time.monotonic())
            assert other["pause"] < 0.5 * PATIENCE
            stats = json.loads(await (await open_stream("127.0.0.1", port, "/stats")).read())["engine"]
            if stats["sequences_running"] == 0 and time.monotonic() - began > 1:
                break
            await asyncio.sleep(0.2)
        lazy.reset()
        return time.monotonic() - began

    flags = ("--slots", "128", "--stream-stall-seconds", "2", "--stream-buffer-mib", "1", "--http-workers", "1")
    with ServerProcess(*flags, folder=folder, step_ms=2) as server:
        seconds = asyncio.run(scenario(server.port))
        print(f"cut off after {seconds:.1f} s")
        assert seconds < min(60, 20 * PATIENCE)
        assert "does not read" in server.output or "end=gone" in server.output  # the kernel may be first


def test_queue_full_is_429_with_retry_after(folder):
    async def scenario(port: int) -> tuple[list[int], dict]:
        body = {"contents": ["a"], "max_tokens": 100_000, "stream": True}
        streams = [await open_stream("127.0.0.1", port, CHAT, body) for _ in range(12)]
        refused = [stream for stream in streams if stream.status != 200]
        result = [stream.status for stream in streams], refused[0].headers, json.loads(await refused[0].read())
        for stream in streams:
            stream.reset()
        return result

    with ServerProcess(*FRESH, "--slots", "2", "--queue", "5", folder=folder, step_ms=20) as server:
        statuses, headers, answer = asyncio.run(scenario(server.port))
        # Requests become rows at the next step, so up to two more than five may have been let in.
        assert 3 <= statuses.count(429) <= 7
        assert set(statuses) == {200, 429}
        assert int(headers["retry-after"]) >= 1
        assert "queue is full" in answer["error"]
        wait_until(lambda: idle(server), 2.0, "slots free")
        assert server.post({"contents": ["a"], "max_tokens": 2})[0] == 200


def test_many_at_the_same_time_are_no_more_than_a_process_takes(folder):
    """They are counted from the moment they are let in, not when their answers begin."""

    async def scenario(port: int) -> list[int]:
        body = {"contents": ["a"], "max_tokens": 100_000, "stream": True}
        streams = await asyncio.gather(*(open_stream("127.0.0.1", port, CHAT, body) for _ in range(60)))
        for stream in streams:
            stream.reset()
        return [stream.status for stream in streams]

    with ServerProcess("--max-streams", "4", "--http-workers", "1", folder=folder, step_ms=100) as server:
        statuses = asyncio.run(scenario(server.port))
    assert (statuses.count(200), statuses.count(429)) == (4, 56)


def test_more_answers_than_a_process_takes_are_429(folder):
    async def scenario(port: int) -> list[int]:
        body = {"contents": ["a"], "max_tokens": 100_000, "stream": True}
        streams = [await open_stream("127.0.0.1", port, CHAT, body) for _ in range(6)]
        for stream in streams:
            stream.reset()
        return [stream.status for stream in streams]

    with ServerProcess("--max-streams", "4", "--http-workers", "1", folder=folder, step_ms=20) as server:
        assert asyncio.run(scenario(server.port)) == [200] * 4 + [429] * 2
