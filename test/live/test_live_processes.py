"""Start, stop, and what happens when a process dies or hangs, on real processes."""

import asyncio
import contextlib
import fcntl
import http.client
import json
import os
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from memory_model import write_memory
from server_process import PATIENCE, ROOT, STRICT, ServerProcess, wait_until

from bench.client import open_stream

pytestmark = pytest.mark.faults

CHAT = "/v1/chat/completions"
GOOD = {"contents": ["a"], "max_tokens": 2}
FRESH = ("--heartbeat", "0.05")


def run_app(*args: str, env: dict[str, str] | None = None, seconds: float = 60) -> subprocess.CompletedProcess:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("RWKV_BATCH_")}
    command = [sys.executable, str(ROOT / "app.py"), *args]
    return subprocess.run(command, env=environ | (env or {}), capture_output=True, text=True, timeout=seconds)


async def follow(port: int, num_tokens: int, results: list, begun: list | None = None, **more) -> None:
    """Read a stream to its end; appends (number of words, last payload), whatever happens, and to `begun` at the first word."""
    words, last = 0, b""
    body = {"contents": ["a"], "max_tokens": num_tokens, "stream": True, "chunk_size": 1, **more}
    try:
        async with await open_stream("127.0.0.1", port, CHAT, body) as stream:
            if stream.status != 200:
                last = b"status %d" % stream.status
                return
            async for payload in stream.events():
                last = payload
                if payload.startswith(b'{"object"'):
                    words += sum(bool(part["delta"]["content"]) for part in json.loads(payload)["choices"])
                    if begun is not None and words == 1:
                        begun.append(port)
    except (OSError, asyncio.IncompleteReadError):
        last = b"broken"
    finally:
        results.append((words, last))


async def disturbed(port: int, num: int, num_tokens: int, disturb) -> list[tuple[int, bytes]]:
    """Follow streams while something happens to the server, once all have begun."""
    results: list[tuple[int, bytes]] = []
    begun: list = []
    jobs = [asyncio.create_task(follow(port, num_tokens, results, begun)) for _ in range(num)]
    while len(begun) < num and not results:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(disturb)
    await asyncio.gather(*jobs)
    return results


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def can_listen(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        probe.listen()
    return True


def serves(server: ServerProcess) -> bool:
    return server.post(GOOD)[0] == 200


def test_wrong_settings_are_one_line_and_status_2(folder):
    (folder / "open").write_text("x")
    for args, word in [
        (["--prot", "1"], "--prot"),
        (["--port", "x"], "--port"),
        (["--port", "70000"], "--port"),
        (["--pp-devices", "[0,0]"], "--pp-devices"),
        (["--pp-devices", "cpu,cpu", "--devices", "cpu,cpu"], "--devices"),
        (["--model-path", "/nowhere/x"], "--model-path"),
        (["--password-file", str(folder / "open")], "chmod 600"),
        (["--config", "/nowhere/x.toml"], "--config"),
        (["--host", "no such host"], "--host"),
    ]:
        done = run_app(*args)
        assert done.returncode == 2, (args, done)
        assert word in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stdout == ""


def test_help_is_ours_and_quick():
    began = time.monotonic()
    done = run_app("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: app.py ")
    assert "--model-path" in done.stdout
    assert "--compile-rust-path" not in done.stdout
    assert time.monotonic() - began < 2 * PATIENCE


def test_busy_port_ends_within_a_second(folder):
    with ServerProcess("--http-workers", "1", folder=folder) as server:
        began = time.monotonic()
        done = run_app("--fake-engine", "20", "--port", str(server.port))
        assert done.returncode == 2
        assert "cannot listen" in done.stderr
        assert time.monotonic() - began < 1.0 * PATIENCE
        assert serves(server)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert run_app("--fake-engine", "20", "--port", str(other.getsockname()[1])).returncode == 2


def test_start_up_says_what_runs_where(folder):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    with ServerProcess("--http-workers", "1", folder=folder) as server:
        signal.signal(signal.SIGHUP, before)
        server.process.send_signal(signal.SIGHUP)
        for word in (
            "model    fake",
            "device",
            "limits",
            f"address  http://127.0.0.1:{server.port}  (no password",
            "try      curl",
        ):
            assert word in server.output
        command = server.output.partition("try      ")[2].partition("\n")[0]
        done = subprocess.run(command.replace("curl", "curl -s"), shell=True, capture_output=True, text=True, timeout=30)
        if done.returncode != 127:
            assert done.stdout.endswith("data: [DONE]\n\n")
        assert server.get("/readyz")[0] == 200  # a hang-up means nothing


def test_killed_http_process_costs_its_own_streams_only(folder):
    with ServerProcess(*FRESH, folder=folder, step_ms=50) as server:
        victim = server.children("http")[0]
        began = []

        def kill() -> None:
            os.kill(victim, signal.SIGKILL)
            began.append(time.monotonic())
            wait_until(lambda: len(server.children("http")) == 2 and server.all_ready(2), 2.0, "serving again")
            began.append(time.monotonic())

        results = asyncio.run(disturbed(server.port, 40, 80, kill))
        whole = [words for words, last in results if last == b"[DONE]"]
        broken = [words for words, last in results if last == b"broken"]
        print(f"{len(whole)} streams whole, {len(broken)} broken, both processes serve after {began[1] - began[0]:.2f} s")
        assert whole
        assert broken
        assert len(whole) + len(broken) == 40
        assert set(whole) == {80}
        wait_until(lambda: server.engine_stats()["slots_free"] == 320, 2.0, "slots free")


TRAILER = b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-Trailer: valid\r\n\r\n"
MALFORMED = b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\n"


def test_a_chunked_body_that_aborts_robyn_costs_one_http_process(folder):
    with ServerProcess(*FRESH, folder=folder) as server:
        engine = server.children("engine")

        def both_serve() -> bool:
            statuses = {server.post(GOOD)[0] for _ in range(10)}
            assert statuses == {200}  # the new one listens once it knows the engine, and refuses nobody
            return server.all_ready(2)

        for body in (TRAILER, MALFORMED):
            before = set(server.children("http"))
            with socket.create_connection((server.host, server.port)) as connection:
                connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\n" + body)
                connection.settimeout(20)
                with contextlib.suppress(OSError):
                    connection.recv(100)
            began = time.monotonic()
            wait_until(lambda: len(set(server.children("http")) - before) == 1, 1.0, "a new process")  # noqa: B023
            wait_until(both_serve, 2.0, "serving again")
            print(f"both processes serve again after {time.monotonic() - began:.2f} s")
            assert len(before & set(server.children("http"))) == 1
            assert serves(server)
        assert server.children("engine") == engine
        page = server.get("/metrics")[1]
        assert 'rwkv_batch:process_ends_total{how="SIGABRT",role="http"} 2.0' in page
        totals = [line for line in page.splitlines() if line.startswith("rwkv_batch:request_success_total")]
        assert sum(float(line.split()[-1]) for line in totals) >= 20
        (run_folder,) = server.run_folder.iterdir()
        assert len(list((run_folder / "metrics").iterdir())) == 3 * 4  # two HTTP processes, engine, supervisor


@pytest.mark.long
def test_many_malformed_bodies_do_not_end_the_server(folder):
    with ServerProcess("--http-workers", "1", folder=folder) as server:
        for _ in range(3):
            with socket.create_connection((server.host, server.port)) as connection:
                connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n")
            time.sleep(0.1)
            wait_until(lambda: serves(server), 3.0, "serving again")
        assert server.process.poll() is None


def test_killed_engine_gives_typed_errors_then_serves_again(folder):
    with ServerProcess(*FRESH, folder=folder, step_ms=20) as server:
        answers = []

        def kill() -> None:
            os.kill(server.children("engine")[0], signal.SIGKILL)
            began = time.monotonic()
            while time.monotonic() - began < 60:
                answers.append(server.request("POST", CHAT, GOOD))
                if answers[-1][0] == 200 and time.monotonic() - began > 0.3:
                    print(f"serving again after {time.monotonic() - began:.2f} s")
                    return
                time.sleep(0.02)

        results = asyncio.run(disturbed(server.port, 20, 5000, kill))
        assert all(json.loads(last)["error"].startswith("the engine was lost") for _, last in results), results
        statuses = [status for status, _, _ in answers]
        assert set(statuses) <= {200, 503}
        assert statuses[-1] == 200
        assert 503 in statuses or not STRICT  # who asks late meets the next engine
        for status, answer, headers in answers:
            if status == 503:
                assert list(answer) == ["error"]
                assert int(headers["retry-after"]) >= 1
        assert "Traceback" not in server.output


def test_killed_engine_cuts_long_plain_answers_off(folder):
    with ServerProcess(*FRESH, "--http-workers", "1", folder=folder, step_ms=20) as server:

        async def scenario() -> None:
            body = {"contents": ["a"], "max_tokens": 1000}
            async with await open_stream("127.0.0.1", server.port, CHAT, body) as stream:
                assert stream.status == 200
                await asyncio.sleep(0.4)
                os.kill(server.children("engine")[0], signal.SIGKILL)
                with pytest.raises((OSError, asyncio.IncompleteReadError)):
                    await stream.read()

        asyncio.run(scenario())


def test_killed_supervisor_takes_everything_with_it(folder):
    with ServerProcess(folder=folder, step_ms=20) as server:
        pids = [*server.children("http"), *server.children("engine")]
        assert len(pids) == 3
        server.process.kill()
        took = wait_until(lambda: not any(map(alive, pids)), 2.0, "children gone")
        print(f"all children gone after {took:.2f} s")
        wait_until(lambda: can_listen(server.port), 2.0, "the port free")  # a zombie's threads may end after it
        left = list(server.run_folder.iterdir())
        assert len(left) == 1
    with ServerProcess("--http-workers", "1", folder=folder) as server:
        assert left[0] not in server.run_folder.iterdir()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_signal_lets_50_streams_finish(folder, number):
    with ServerProcess(folder=folder, step_ms=50) as server:
        refused = []

        def stop() -> None:
            server.process.send_signal(number)
            wait_until(lambda: server.get("/readyz")[0] == 503, 1.0, "draining")
            for _ in range(5):
                refused.append(server.request("POST", CHAT, GOOD))
            again = server.request("POST", CHAT, GOOD, {"X-Retry-Elsewhere": "1"})
            assert (again[0], again[1]) == (425, refused[0][1])  # a proxy knows that nothing was done
            assert server.get("/healthz")[0] == 200

        results = asyncio.run(disturbed(server.port, 50, 80, stop))
        assert results == [(80, b"[DONE]")] * 50
        for status, answer, headers in refused:
            assert status == 503
            assert "shutting down" in answer["error"]
            assert "retry-after" in headers
        assert server.process.wait(60) == 0
        assert list(server.run_folder.iterdir()) == []
        assert "Traceback" not in server.output


def test_streams_that_outlast_the_drain_end_with_an_error(folder):
    with ServerProcess("--drain-seconds", "0.5", folder=folder, step_ms=20) as server:
        results = asyncio.run(disturbed(server.port, 10, 5000, lambda: server.process.send_signal(signal.SIGTERM)))
        assert all(json.loads(last) == {"error": "the server is stopping"} for _, last in results), results
        assert server.process.wait(60) == 0


def test_a_second_signal_stops_at_once(folder):
    with ServerProcess(folder=folder, step_ms=20) as server:

        def stop() -> None:
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.get("/readyz")[0] == 503, 1.0, "draining")
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(2 * PATIENCE) == 128 + signal.SIGTERM

        results = asyncio.run(disturbed(server.port, 10, 5000, stop))
        lost = b'{"error": "the engine was lost while it worked on this request"}'  # where the engine was the first to go
        assert {last for _, last in results} <= {b"broken", lost}
        assert list(server.run_folder.iterdir()) == []


def test_an_idle_server_stops_quickly_and_signals_to_the_whole_group_do_no_harm(folder):
    with ServerProcess(folder=folder) as server:
        for pid in (*server.children("http"), *server.children("engine")):
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)
        assert serves(server)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        print(f"stopped after {time.monotonic() - began:.2f} s")
        assert time.monotonic() - began < 2.0 * PATIENCE


def test_a_hung_step_ends_the_engine_which_comes_back(folder):
    env = {"RWKV_BATCH_FAULT": "hang:3"}
    with ServerProcess("--watchdog-seconds", "3", "--http-workers", "1", folder=folder, env=env) as server:
        assert serves(server)
        assert serves(server)
        began = time.monotonic()
        with pytest.raises((OSError, http.client.HTTPException)):  # it was answering for longer than a second
            server.request("POST", CHAT, {"contents": ["a"], "max_tokens": 100})
        assert time.monotonic() - began < 5 * PATIENCE
        wait_until(lambda: serves(server), 5.0, "serving again")
        assert "the engine hangs and ends" in server.output
        assert "ended with status 70" in server.output


# A server's own children get these ways to hang: the thread that steps, or that runs the event loop, acts on signals.
HANGING = """
import itertools, signal, sys
if "--role" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, lambda *_: all(iter(lambda: True, None)))
    signal.signal(signal.SIGWINCH, lambda *_: sum(itertools.repeat(0)))
"""
SPIN, HOLD_LOCK = signal.SIGUSR1, signal.SIGWINCH


def test_processes_that_hang_are_replaced_and_a_server_that_slept_is_not(folder):
    (folder / "sitecustomize.py").write_text(HANGING)
    args = ("--http-silence-seconds", "2", "--engine-silence-seconds", "2", "--watchdog-seconds", "2", "--max-crashes", "9")
    with ServerProcess(*FRESH, *args, folder=folder, env={"PYTHONPATH": str(folder)}) as server:

        def replaced(role: str, *numbers: signal.Signals) -> None:
            before = server.children(role)
            for pid, number in zip(before, numbers, strict=True):
                os.kill(pid, number)
            what = f"{role} after {', '.join(number.name for number in numbers)}"
            took = wait_until(lambda: not set(before) & set(server.children(role)) and server.all_ready(2), 8.0, what)
            print(f"{what}: replaced after {took:.1f} s")
            assert serves(server)

        replaced("http", signal.SIGSTOP, SPIN)
        replaced("engine", HOLD_LOCK)
        assert server.output.count("has given no sign of life") == 3
        assert 'sitecustomize.py", line 5 in' in server.output  # it says where it hangs

        everybody = [*server.children("http"), *server.children("engine")]
        for pid in (server.process.pid, *everybody):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5)
        for pid in (server.process.pid, *everybody):
            os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)
        assert [*server.children("http"), *server.children("engine")] == everybody
        assert serves(server)

        os.kill(server.children("engine")[0], signal.SIGSTOP)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 1
        print(f"stopped with a frozen engine after {time.monotonic() - began:.1f} s")
        assert time.monotonic() - began < 5 * PATIENCE


def sessions_kept(folder: Path) -> int:
    """How many the database of a server that ran in this folder has."""
    with contextlib.closing(sqlite3.connect(folder / "rwkv_batch_sessions.db")) as connection:
        return connection.execute("SELECT sum(sessions) FROM kept_counts").fetchone()[0]


def test_http_processes_that_do_not_stop_cost_the_engine_nothing(folder):
    args = ("--drain-seconds", "0", "--durability", "shutdown", "--threads", "1", "--http-silence-seconds", "0")
    model = write_memory(folder / "bytes.pth", 256)
    with ServerProcess(*args, folder=folder, model=model) as server:
        assert server.post({"contents": ["a"], "max_tokens": 2, "session_id": "s"}, "/state/chat/completions")[0] == 200
        for pid in server.children("http"):
            os.kill(pid, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 1
        assert "killing what has not ended: HTTP process 0, HTTP process 1" in server.output
    assert sessions_kept(folder) == 1


def test_nobody_has_to_read_what_the_server_says(folder):
    """Standard output closed, as by `| head`; standard error a pipe that is full; and the terminal goes."""
    said, logged = os.pipe(), os.pipe()
    fcntl.fcntl(logged[1], fcntl.F_SETPIPE_SZ, 4096)
    model = write_memory(folder / "bytes.pth", 256)
    args = ("--durability", "shutdown", "--threads", "1", "--http-workers", "1")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may themselves run under nohup
    server = ServerProcess(*args, folder=folder, model=model, stdout=said[1], stderr=logged[1], wait=False)
    signal.signal(signal.SIGHUP, before)
    with server:
        os.close(said[1])
        text = b""
        while not (found := re.search(rb"address  http://\S+:(\d+)", text)):
            text += os.read(said[0], 65536)
        server.port = int(found[1])
        os.close(said[0])
        wait_until(lambda: server.get("/readyz")[0] == 200, 20, "ready")
        turn = {"contents": ["a"], "max_tokens": 2, "session_id": "s"}
        assert server.post(turn, "/state/chat/completions")[0] == 200
        began = time.monotonic()
        for _ in range(60):
            assert server.get("/healthz?" + "x" * 100)[0] == 200
        assert time.monotonic() - began < 5 * PATIENCE
        stream = {**turn, "session_id": "t", "max_tokens": 300, "stream": True, "stop_tokens": [], "chunk_size": 1}

        async def interrupted() -> list[bytes]:
            async with await open_stream("127.0.0.1", server.port, "/state/chat/completions", stream) as opened:
                events = opened.events()
                first = await anext(events)
                server.process.send_signal(signal.SIGHUP)
                server.process.send_signal(signal.SIGHUP)
                return [first, *[payload async for payload in events]]

        assert asyncio.run(interrupted())[-1] == b"[DONE]"
        assert server.process.wait(60) == 0
    os.close(logged[1])
    assert os.read(logged[0], 65536)
    os.close(logged[0])
    assert sessions_kept(folder) == 2


def test_sessions_that_cannot_be_written_at_the_end_are_an_exit_code(folder):
    args = ("--durability", "shutdown", "--threads", "1", "--http-workers", "1")
    with ServerProcess(*args, folder=folder, model=write_memory(folder / "bytes.pth", 256)) as server:
        turn = {"contents": ["a"], "max_tokens": 2, "session_id": "s"}
        assert server.post(turn, "/state/chat/completions")[0] == 200
        (engine,) = server.children("engine")
        resource.prlimit(engine, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))  # as good as a full disk
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 74


def test_repeated_crashes_end_the_server_with_71(folder):
    env = {"RWKV_BATCH_FAULT": "crash:1"}
    with ServerProcess("--max-crashes", "2", "--http-workers", "1", folder=folder, env=env) as server:
        for crash in range(2):
            wait_until(lambda: server.get("/readyz")[0] == 200, 5.0, "ready")
            status, answer = server.post({"contents": ["a"], "max_tokens": 100})
            assert status == 503
            last = crash == 1  # the HTTP process then hears of the engine's end and of its own, in either order
            assert "engine" in answer["error"] or (last and answer["error"] == "the server is stopping"), answer
        assert server.process.wait(60) == 71


STEP, ROW = ("fail:1", "the step failed"), ("row:1", "the logits of this row were not finite")


@pytest.mark.parametrize(("fault", "message"), [ROW, pytest.param(*STEP, marks=pytest.mark.long)])
def test_a_failed_request_or_row_ends_its_stream(folder, fault, message):
    with ServerProcess("--http-workers", "1", folder=folder, env={"RWKV_BATCH_FAULT": fault}) as server:
        results: list = []
        asyncio.run(follow(server.port, 20, results, contents=["a", "b"]))
        assert json.loads(results[0][1]) == {"error": message}
        assert serves(server)


@pytest.mark.parametrize(("fault", "message"), [STEP, pytest.param(*ROW, marks=pytest.mark.long)])
def test_a_failed_request_or_row_says_so(folder, fault, message):
    with ServerProcess("--http-workers", "1", folder=folder, env={"RWKV_BATCH_FAULT": fault}) as server:
        status, answer = server.post({"contents": ["a", "b"], "max_tokens": 20})
        if fault == "fail:1":
            assert (status, answer) == (500, {"error": message})
        else:
            assert status == 200
            assert [choice["finish_reason"] for choice in answer["choices"]] == ["error", "length"]
            assert answer["choices"][0]["error"] == message
        assert serves(server)
