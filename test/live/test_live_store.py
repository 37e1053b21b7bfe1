"""Sessions of two engines while the processes that have them are killed and stand still: each turn counts once."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from server_process import ServerProcess

SESSIONS = 6
AGAIN = {409, 503}  # what a client may try again, with the same key


@pytest.mark.faults
@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.long)])
def test_turns_with_keys_are_kept_once_whatever_ends(tiny_checkpoint: Path, tmp_path, kills):
    args = ("--devices", "cpu,cpu", "--no-access-log", "--lease-seconds", "0.5", "--max-crashes", "1000")
    with ServerProcess(*args, folder=tmp_path, model=tiny_checkpoint) as server:
        versions, errors, stopping = [0] * SESSIONS, [], threading.Event()

        def live(number: int) -> None:
            try:
                while not stopping.is_set():
                    version = turn(server, number, f"{number}-{versions[number]}")
                    assert version == versions[number] + 1, "a turn was lost, or done twice"
                    versions[number] = version
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=live, args=(number,)) for number in range(SESSIONS)]
        for thread in threads:
            thread.start()
        rng = random.Random(0)
        for number in range(kills):
            before = list(versions)
            wait_until(lambda before=before: errors or all(now > then for now, then in zip(versions, before, strict=True)), 60)
            hurt(server, ("store", "engine", "stop", "store")[number % 4], rng)
        stopping.set()
        for thread in threads:
            thread.join()
        assert not errors, server.output[-3000:]
        assert "Traceback" not in server.output


def turn(server: ServerProcess, number: int, key: str) -> int:
    """Run a turn, as often as it takes; return the version it made."""
    body = {
        "contents": ["User: hi\n\nAssistant:"], "session_id": f"s{number}", "max_tokens": 4, "idempotency_key": key,
    }  # fmt: skip
    deadline = time.monotonic() + 60
    while True:
        status, answer = server.post(body, "/state/chat/completions")
        if status == 200:
            return answer["session"]["version"]
        assert status in AGAIN, answer
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)


def hurt(server: ServerProcess, how: str, rng: random.Random) -> None:
    """Kill the store or an engine, or let an engine stand still for longer than its leases last."""
    processes = server.children("store" if how == "store" else "engine")
    if not processes:
        return
    process = rng.choice(processes)
    if how == "stop":
        os.kill(process, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(process, signal.SIGCONT)
    else:
        os.kill(process, signal.SIGKILL)


def wait_until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
