"""Asks processes of its own whether grammars can be compiled, and remembers what they said."""

import contextlib
import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from rwkv_batch.errors import InvalidRequest, Overloaded, Unavailable
from rwkv_batch.grammar.check_process import read_frame, write_frame
from rwkv_batch.request import Grammar

log = logging.getLogger(__name__)

PROCESSES = 2  # that check at the same time
PATIENCE = 8  # times `seconds` that a grammar waits for a process
REMEMBERED = 1024  # answers, each of some 100 bytes
ROOT = Path(__file__).resolve().parent.parent.parent  # where the package lies
HIDDEN = "RWKV_BATCH_"  # settings, secrets among them, are no business of a process that reads what strangers send


class Checker:
    """Checks grammars, from any thread. Its processes start with the first grammar; `seconds` is what one may take."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._pool = ThreadPoolExecutor(PROCESSES, "grammars")
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen] = []
        self._answers: OrderedDict[bytes, Future[str | None]] = OrderedDict()

    def check(self, grammar: Grammar) -> None:
        """Raise InvalidRequest for a grammar that cannot be compiled, or takes too long. Waits for that.

        Raises Overloaded where others take all the time there is, and Unavailable where no process can be started.
        """
        refuse(grammar, self.submit(grammar).result())

    def passed(self, grammar: Grammar) -> bool:
        """Whether a grammar was checked and is right."""
        answer = self._answers.get(_key(grammar))
        return answer is not None and answer.done() and answer.exception() is None and answer.result() is None

    def submit(self, grammar: Grammar) -> Future[str | None]:
        """Return what will hold None or what is wrong with a grammar, or raises as `check`; one for all who ask the same."""
        key = _key(grammar)
        with self._lock:
            answer = self._answers.get(key)
            if answer is None:
                answer = self._answers[key] = self._pool.submit(self._ask, grammar, time.monotonic())
                if len(self._answers) > REMEMBERED:
                    self._answers.popitem(last=False)
            self._answers.move_to_end(key)
        answer.add_done_callback(lambda done: self._forget(key, done))
        return answer

    def _forget(self, key: bytes, answer: Future[str | None]) -> None:
        """An answer that says nothing about its grammar is not remembered."""
        if answer.exception() is not None:
            with self._lock:
                if self._answers.get(key) is answer:
                    del self._answers[key]

    def close(self) -> None:
        """End the processes that have nothing to do."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            _end(process)

    def _ask(self, grammar: Grammar, asked: float) -> str | None:
        """What a process says: None, or what is wrong."""
        started = time.monotonic()
        if started - asked > PATIENCE * self.seconds:
            raise Overloaded("other grammars are being compiled", param=grammar.param, code="grammars_waiting")
        is_new = False
        while not is_new and time.monotonic() - started < self.seconds:  # one that waited may have been ended from outside
            process, is_new = self._process()
            started = time.monotonic()
            try:
                write_frame(process.stdin, msgspec.msgpack.encode(grammar))
                data = read_frame(process.stdout)  # it ends itself in time
            except OSError:
                data = None
            if data is not None:
                self._put_back(process)
                return msgspec.msgpack.decode(data)
            _end(process)
        threading.Thread(target=self._replace, daemon=True).start()
        log.info("a grammar of %d bytes could not be compiled in time", len(grammar.source))
        return f"{grammar.param}: compiling takes more than {self.seconds:g} s or too much memory"

    def _replace(self) -> None:
        """Have a process ready for the next grammar."""
        with contextlib.suppress(Unavailable):
            self._put_back(self._start())

    def _put_back(self, process: subprocess.Popen) -> None:
        """A process waits for the next grammar, where not enough others do."""
        with self._lock:
            is_wanted = len(self._idle) < PROCESSES
            if is_wanted:
                self._idle.append(process)
        if not is_wanted:
            _end(process)

    def _process(self) -> tuple[subprocess.Popen, bool]:
        """Return one that waits, a new one if there is none, and whether it is new."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), False
        return self._start(), True

    def _start(self) -> subprocess.Popen:
        environ = {key: value for key, value in os.environ.items() if not key.startswith(HIDDEN)}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "rwkv_batch.grammar.check_process", str(self.seconds)]
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
        except OSError as error:
            raise Unavailable(f"no process to compile grammars in: {error.strerror}", code="no_process") from None
        if read_frame(process.stdout) is None:
            _end(process)
            raise Unavailable("the process that compiles grammars does not start", code="no_process")
        return process


def refuse(grammar: Grammar, answer: str | None) -> None:
    """Raise InvalidRequest where an answer says what is wrong."""
    if answer is not None:
        raise InvalidRequest(answer, param=grammar.param, code="invalid_grammar")


def _end(process: subprocess.Popen) -> None:
    process.kill()
    with contextlib.suppress(OSError):  # what was not written yet
        process.stdin.close()
    process.stdout.close()
    process.wait()


def _key(grammar: Grammar) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()
