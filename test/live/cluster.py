"""Servers that share their sessions in a PostgreSQL of the tests' own, behind the recipe of HAProxy for several."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from postgres_server import PostgresServer, find_program
from server_process import ROOT, ServerProcess, wait_until

RECIPE = ROOT / "deploy" / "haproxy-cluster.cfg"
FLAGS = ("--threads", "1", "--http-workers", "1", "--heartbeat", "0.05", "--host", "127.0.0.1", "--max-crashes", "1000")


def needed() -> str:
    """Where HAProxy is; skips the test where that or PostgreSQL is not installed."""
    haproxy = shutil.which("haproxy", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    if haproxy is None:
        pytest.skip("haproxy is not installed")
    if find_program("initdb") is None:
        pytest.skip("PostgreSQL is not installed")
    pytest.importorskip("psycopg", reason="requirements-cluster.txt is not installed")
    return haproxy


def free_ports(count: int) -> list[int]:
    """Ports that nobody has, all different."""
    with contextlib.ExitStack() as probes:
        found = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in found:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in found]


class Cluster:
    """Servers at fixed ports, started again when they end, as systemd would; `host` and `port` are the proxy's."""

    def __init__(self, folder: Path, checkpoint: Path, *flags: str, num_servers: int = 2, env: dict[str, str] | None = None):
        haproxy = needed()
        self.folder = folder
        self.checkpoint = checkpoint
        self.flags = flags
        self.env = env or {}
        self.host = "127.0.0.1"
        self.port, *self.ports = free_ports(num_servers + 1)
        self.closing = False
        self.restarts = 0
        self.database = PostgresServer(fsync="on", synchronous_commit="on", full_page_writes="on")
        self.url = self.database.new_url()
        self.servers = [self.start(index) for index in range(num_servers)]
        try:
            for server in self.servers:
                server.wait_ready(120)
        except AssertionError:
            for server in self.servers:
                server.close()
            self.database.close()
            raise
        config = folder / "haproxy.cfg"
        config.write_text(self.recipe())
        self.proxy_log = folder / "haproxy.log"
        with open(self.proxy_log, "wb") as out:
            self.proxy = subprocess.Popen([haproxy, "-db", "-f", str(config)], stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        wait_until(lambda: socket.create_connection((self.host, self.port), 5).close() is None, 10, "the proxy listens")
        self.keeper = threading.Thread(target=self.keep, daemon=True)
        self.keeper.start()

    def start(self, index: int) -> ServerProcess:
        """Start the server that has this place."""
        shared = ["--snapshots", str(self.folder / "states"), "--port", str(self.ports[index])]
        env = {"RWKV_BATCH_STATE_URL": self.url, **self.env}
        server = ServerProcess(*FLAGS, *shared, *self.flags, model=self.checkpoint, folder=self.folder, env=env, wait=False)
        server.port = self.ports[index]
        return server

    def recipe(self) -> str:
        """The shipped recipe with these ports, of an ordinary user."""
        text = RECIPE.read_text().replace("bind :8080", f"bind {self.host}:{self.port}")
        text = re.sub(r"^  (user|group) .*\n", "", text, flags=re.MULTILINE).replace(
            "maxconn 8192", "maxconn 500\n  nbthread 1"
        )
        text = text.replace("maxconn 6000", "maxconn 400").replace("log /dev/log local0", "log stdout format raw local0")
        for number, port in enumerate(self.ports, 1):
            text = text.replace(f"10.0.0.{number}:8000", f"{self.host}:{port}")
        return text

    def keep(self) -> None:
        """Start servers again that have ended."""
        while not self.closing:
            for index, server in enumerate(self.servers):
                if server.process.poll() is not None and not self.closing:
                    self.restarts += 1
                    self.servers[index] = self.start(index)
            time.sleep(0.1)

    @property
    def output(self) -> str:
        """What was said lately."""
        said = [server.output[-2500:] for server in self.servers]
        return "\n".join([*said, self.proxy_log.read_text()[-2500:]])

    def pids(self) -> dict[str, list[int]]:
        """The processes that can be killed, by what they are."""
        found: dict[str, list[int]] = {"engine": [], "http": [], "supervisor": [], "database": []}
        for server in self.servers:
            if server.process.poll() is None:
                found["supervisor"].append(server.process.pid)
                for role in ("engine", "http"):
                    found[role] += server.children(role)
        with contextlib.suppress(Exception):  # it is starting again
            found["database"] = self.database.pids()
        return {kind: pids for kind, pids in found.items() if pids}

    def all_ready(self) -> bool:
        """Whether each server takes requests."""
        with contextlib.suppress(OSError):
            return all(server.process.poll() is None and server.get("/readyz")[0] == 200 for server in self.servers)
        return False

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.closing = True
        self.keeper.join()
        self.proxy.terminate()
        self.proxy.wait(30)
        for server in self.servers:
            with contextlib.suppress(OSError):
                server.process.send_signal(signal.SIGCONT)
            server.close()
        self.database.close()
