"""deploy/ray_serve.py under Ray itself, which is in an environment of its own: `make test-ray`."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ROOT, wait_until

RAY = os.environ.get("RAY_PYTHON", "")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not RAY, reason="RAY_PYTHON names no Python with Ray: make test-ray"),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(port: int, path: str, body: object = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())


def servers(port: int, count: int) -> dict[int, str]:
    """The servers' processes and addresses, when so many were seen; Ray's proxy spreads calls over them."""
    found = {}
    for _ in range(30):
        with contextlib.suppress(OSError, ValueError):
            about = get(port, "/_server")
            found[about["pid"]] = about["url"]
        if len(found) == count:
            break
    return found


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Ray Serve's port, with two servers behind it."""
    folder, port = tmp_path_factory.mktemp("ray"), free_port()
    environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_ENABLE_HA_PROXY": "0", "PYTHONPATH": str(ROOT)}
    config = folder / "serve.yaml"
    args = "--fake-engine 5 --http-workers 1 --host 127.0.0.1"
    config.write_text(
        f"http_options: {{host: 127.0.0.1, port: {port}}}\napplications:\n- name: rwkv\n  route_prefix: /\n"
        f"  import_path: deploy.ray_serve:build\n"
        f"  args: {{nodes: '2', cpus: 0.1, drain: 10, python: {sys.executable}, args: '{args}'}}\n"
    )
    bin_folder, home = Path(RAY).parent, tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short enough for sockets
    with open(folder / "log", "wb") as out:
        subprocess.run(
            [bin_folder / "ray", "start", "--head", "--num-cpus", "2", "--port", str(free_port()), "--temp-dir", home,
             "--include-dashboard", "true", "--dashboard-port", str(free_port()), "--disable-usage-stats"],
            env=environ, stdout=out, stderr=out, check=True, cwd=ROOT,
        )  # fmt: skip
        try:
            address = {**environ, "RAY_ADDRESS": "auto"}
            running = subprocess.Popen(
                [bin_folder / "serve", "run", str(config)], env=address, stdout=out, stderr=out, cwd=ROOT
            )
            try:
                wait_until(lambda: len(servers(port, 2)) == 2, 240, f"two servers: {folder / 'log'}")
                yield port
            finally:
                running.send_signal(signal.SIGINT)
                running.wait(120)
        finally:
            subprocess.run([bin_folder / "ray", "stop", "--force"], env=environ, stdout=out, stderr=out)
            shutil.rmtree(home, ignore_errors=True)


def test_calls_are_answered_and_a_server_that_dies_is_replaced(port):
    answer = get(port, "/v1/chat/completions", {"contents": ["hi"], "max_tokens": 3})
    assert answer["choices"][0]["message"]["content"]
    before = servers(port, 2)
    victim = min(before)
    os.kill(victim, signal.SIGKILL)

    def replaced() -> bool:
        now = servers(port, 2)
        return len(now) == 2 and victim not in now

    seconds = wait_until(replaced, 120, "the server is replaced")
    print(f"\nreplaced after {seconds:.1f} s")


def test_a_server_dies_with_its_replica(port):
    """Nothing is left behind that holds a GPU."""
    pid = min(servers(port, 2))
    with open(f"/proc/{pid}/stat") as stat:
        replica = int(stat.read().rpartition(")")[2].split()[1])
    os.kill(replica, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 60, "the server has ended")
    began = time.monotonic()
    wait_until(lambda: len(servers(port, 2)) == 2, 120, "there are two servers again")
    print(f"\nback after {time.monotonic() - began:.1f} s")
