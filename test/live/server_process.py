"""Starts app.py as users do, on a free port, and looks at its processes from outside."""

import atexit
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# `make test-long` holds the server to its bounds on time. Elsewhere other processes may have the cores, and a bound is there
# to tell what is slow from what never comes.
STRICT = "STRICT_TIMES" in os.environ
PATIENCE = 1 if STRICT else 20


class ServerProcess:
    """A running server. Output goes to `self.log_path`; `with` stops it."""

    def __init__(
        self,
        *args: str,
        folder: Path,
        env: dict[str, str] | None = None,
        step_ms: float = 5,
        model: Path | None = None,
        wait: bool = True,
        stdout: int | None = None,
        stderr: int | None = None,
    ):
        self.log_path = folder / f"server-{time.monotonic_ns()}.log"
        # The same for all servers of a test, and with a path short enough for sockets.
        self.run_folder = Path(tempfile.gettempdir(), f"rb{zlib.crc32(str(folder).encode()):08x}")
        self.run_folder.mkdir(exist_ok=True)
        atexit.register(shutil.rmtree, self.run_folder, ignore_errors=True)
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("RWKV_BATCH_", "ROBYN_"))}
        environ |= {"XDG_RUNTIME_DIR": str(self.run_folder), "PYTHONUNBUFFERED": "1", **(env or {})}
        engine = ["--fake-engine", str(step_ms)] if model is None else ["--model-path", str(model), "--device", "cpu"]
        command = [sys.executable, str(ROOT / "app.py"), *engine, "--port", "0", *args]
        with open(self.log_path, "wb") as out:
            ends = {"stdout": out if stdout is None else stdout, "stderr": out if stderr is None else stderr}
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **ends, env=environ, cwd=folder)
        self.host = "127.0.0.1"
        self.port = 0
        if wait:
            self.wait_ready()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def output(self) -> str:
        """All lines so far."""
        return self.log_path.read_text(errors="replace")

    def wait_ready(self, seconds: float = 60) -> None:
        """Wait until the server and all its HTTP processes answer; AssertionError with the output when they do not."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.output
            if found := re.search(r"address  http://\S+:(\d+)  .*; (\d+) HTTP", self.output):
                self.port = int(found[1])
                if self.all_ready(int(found[2])):
                    return
            time.sleep(0.05)
        raise AssertionError(f"not ready after {seconds} s:\n{self.output}")

    def all_ready(self, num_http: int) -> bool:
        """Whether each HTTP process answers that it is ready; connections are spread over them by chance."""
        pids = set()
        for _ in range(20 * num_http):
            try:
                if self.get("/readyz")[0] != 200:
                    return False
                pids.add(self.get("/stats", self.headers)[1]["http"]["pid"])
            except (OSError, http.client.HTTPException):
                return False
            if len(pids) == num_http:
                return True
        return False

    headers: dict[str, str] = {}  # noqa: RUF012 - replaced by tests that set a password

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 60
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, parsed JSON or text, headers in lower case); `body` is sent as it is when bytes, else as JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            reply = connection.getresponse()
            text = reply.read().decode()
            found = {name.lower(): value for name, value in reply.getheaders()}
            parsed = json.loads(text) if found.get("content-type", "").startswith("application/json") and text else text
            return reply.status, parsed, found

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """(status, body)"""
        return self.request("GET", path, headers=headers)[:2]

    def post(self, body: Any, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """(status, body)"""
        return self.request("POST", path, body, headers)[:2]

    def engine_stats(self) -> dict[str, Any]:
        """The engine's part of /stats."""
        return self.get("/stats", self.headers)[1]["engine"]

    def children(self, role: str) -> list[int]:
        """Process ids of one role."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parts = (path / "cmdline").read_bytes().split(b"\0")
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and parts[-3:-1] == [b"--role", role.encode()]:
                    found.append(int(path.name))
        return sorted(found)

    def close(self) -> None:
        """End everything, gently first."""
        if self.process.poll() is None:
            for number in (signal.SIGTERM, signal.SIGTERM):
                self.process.send_signal(number)
                time.sleep(0.05)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def without_comments(stream: str) -> str:
    """An event stream without its comments, each of which is a line."""
    return re.sub(r"^:.*\n", "", stream, flags=re.MULTILINE)


def wait_until(condition, seconds: float, what: str) -> float:
    """Wait for a condition; returns how long it took, AssertionError when it never came. A minute unless times are strict."""
    began = time.monotonic()
    seconds = seconds if STRICT else max(seconds, 60)
    while time.monotonic() - began < seconds:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if condition():
                return time.monotonic() - began
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {seconds} s")


def process_figures(pid: int) -> tuple[int, int, int]:
    """(threads, descriptors, resident KiB) of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    threads = int(re.search(r"Threads:\s+(\d+)", status)[1])
    resident = int(re.search(r"VmRSS:\s+(\d+)", status)[1])
    return threads, len(os.listdir(f"/proc/{pid}/fd")), resident
