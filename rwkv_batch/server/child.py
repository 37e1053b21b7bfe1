"""One child of the supervisor, seen from there: a fresh interpreter that runs the program again with `--role`.

It has one socket to the supervisor as its standard input: the settings come in by it, orders, reports and signs of life pass
over it, and its end means that the other side is dead. The child's side is `control`.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rwkv_batch.config import Config
from rwkv_batch.ipc.messages import Seat
from rwkv_batch.served.models import ModelTable

log = logging.getLogger(__name__)

STACKS_SECONDS = 1.0  # that a silent child gets to say where it hangs


class Birth(msgspec.Struct):
    """The first line a child reads.

    seats      where the engines are
    cpus       those it is to stay on; none = all
    arguments  what its role is told beside the settings
    models     which the engines run, for processes that send them requests
    """

    config: Config
    folder: str
    index: int
    parent: int
    engine_ready: bool
    seats: list[Seat] = []
    cpus: list[int] = []
    arguments: list[str] = []
    models: ModelTable | None = None


class Child:
    """One process and the socket to it. `program` starts it, given its role; `environ` is what it has beside ours."""

    def __init__(
        self,
        program: Sequence[str],
        role: str,
        index: int,
        config: Config,
        folder: Path,
        engine_ready: bool = False,
        arguments: Sequence[str] = (),
        *,
        seats: Sequence[Seat] = (),
        environ: Mapping[str, str] | None = None,
        cpus: Sequence[int] = (),
        models: ModelTable | None = None,
    ):
        self.role = role
        self.index = index
        self.ready = False
        self.idle = False
        self._alone = len(seats) < 2
        self.silent = 0.0  # seconds since its last sign of life, as `wait` counts them
        self.suspected = False
        silence = config.engine_silence_seconds if role in ("engine", "store") else config.http_silence_seconds
        self._patience = (config.start_silence_seconds, silence)
        self._unread = b""
        self.socket, theirs = socket.socketpair()
        hidden = ("ROBYN_", "RWKV_BATCH_PASSWORD", "RWKV_BATCH_API_KEY", "RWKV_BATCH_CONFIG")
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
        environ = inherited | dict(environ or {})
        if role == "http":
            environ["TOKIO_WORKER_THREADS"] = "1"  # of a runtime that stays idle; the default is one thread for each CPU
        with theirs:
            try:
                self.process = subprocess.Popen([*program, "--role", role], stdin=theirs, env=environ, process_group=0)
            except OSError:
                self.socket.close()
                raise
        with contextlib.suppress(OSError):  # it has ended already: the next turn finds it dead
            birth = Birth(
                config, str(folder), index, os.getpid(), engine_ready, list(seats), list(cpus), list(arguments), models
            )
            self.socket.sendall(msgspec.json.encode(birth) + b"\n")
        self.socket.setblocking(False)

    @property
    def key(self) -> str:
        """The name of its figures."""
        return key_of(self.role, self.index)

    @property
    def name(self) -> str:
        """For people."""
        if self.role == "engine":
            return "the engine" if self._alone else f"engine {self.index}"
        if self.role == "store":
            return "the store"
        return f"HTTP process {self.index}" if self.role == "http" else self.role

    def order(self, word: str) -> None:
        """Send "drain" or "stop"; a dead child does not mind."""
        self._send(word.encode())

    def tell(self, word: str, what: Any) -> None:
        """Say something that has more to it than a word, see `control.HEARD`."""
        self._send(word.encode() + b" " + msgspec.json.encode(what))

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            self.socket.sendall(line + b"\n")

    def reports(self) -> list[dict[str, Any]]:
        """What the child has said since last time, without its signs of life."""
        with contextlib.suppress(OSError):
            while data := self.socket.recv(65536):
                self._unread += data
                self.silent, self.suspected = 0.0, False
        *lines, self._unread = self._unread.split(b"\n")
        return [msgspec.json.decode(line) for line in lines if line]

    def wait(self, seconds: float) -> None:
        """So much time has passed without a word: a child that is silent for too long shows its stacks and is killed."""
        before, self.silent = self.silent, self.silent + seconds
        patience = self._patience[self.ready]
        if not patience or self.silent <= patience:
            return
        if not self.suspected:
            self.suspected = True
            log.error("%s has given no sign of life for %.0f s and is killed", self.name, self.silent)
            self.process.send_signal(signal.SIGUSR2)
        elif before <= patience + STACKS_SECONDS < self.silent:
            self.process.kill()


def key_of(role: str, index: int) -> str:
    """What processes that follow one another have in common."""
    return f"{role}-{index}"
