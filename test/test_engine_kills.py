"""kill -9 of the engine at random moments under turns of many sessions, ten times in seconds: everything between the HTTP
process's end of the channel and the disk is real, the model is tiny, and an engine starts by a fork.

`live/test_live_session_kills.py` does the same to whole servers, more often.
"""

import contextlib
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from models import ROOT

from rwkv_batch.errors import Unavailable
from rwkv_batch.ipc.client import EngineClient
from rwkv_batch.ipc.tickets import Ticket
from rwkv_batch.request import Failure, Request
from rwkv_batch.session_messages import Session
from sampling.params import SamplingParams

pytestmark = pytest.mark.faults

GREEDY = SamplingParams(temperature=0, alpha_presence=0, alpha_frequency=0, ignore_eos=True)
PATIENCE = 60.0  # seconds until a turn that is sent again and again must have been acknowledged


class Turn(NamedTuple):
    """What a client was told of one turn."""

    text: str
    version: int
    tokens: int


class Talker:
    """The client of one session: turns in order, each with its key, each sent again until it is answered."""

    def __init__(self, client: EngineClient, session: str, prompts: str):
        self.client = client
        self.session = session
        self.prompts = prompts
        self.turns: list[Turn] = []
        self.num_sent = self.num_replayed = 0

    def take_turn(self) -> None:
        """Take the next turn."""
        number, until = len(self.turns), time.monotonic() + PATIENCE
        while (turn := self._send(number)) is None:
            assert time.monotonic() < until, f"turn {number} of {self.session} is never answered"
            time.sleep(0.05)
        assert turn.version == number + 1, self.session
        self.turns.append(turn)

    def _send(self, number: int) -> Turn | None:
        """Send a turn; what was said, None when the engine was lost meanwhile."""
        self.num_sent += 1
        request = Request(
            id=f"{self.session}-{number}-{self.num_sent}",
            prompts=[list(f"{number} {self.prompts}".encode())],
            sampling=GREEDY,
            max_tokens=6,
            session=Session(name=self.session, key=f"{self.session} {number}"),
        )
        text = ""
        try:
            ticket = self.client.submit(request)
            while (event := ticket.take(PATIENCE)) is not Ticket.END:
                if isinstance(event, Failure):
                    assert event.error in ("Unavailable", "Conflict"), event
                    return None
                text += "".join(delta.text for delta in event.deltas)
                for finish in event.finishes:
                    kept = finish.session
        except Unavailable:
            return None
        self.num_replayed += kept.replayed
        return Turn(text, kept.version, kept.tokens)


class Engines:
    """One engine at a time."""

    def __init__(self, folder: Path):
        self.address = f"ipc://{folder}/engine"
        script = ROOT / "test" / "forked_engine.py"
        command = [sys.executable, script, self.address, folder / "sessions.db"]
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "test")))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.parent = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, **pipes)
        self.client = EngineClient(self.address, heartbeat=0.1)
        self.engine = 0

    def __enter__(self) -> "Engines":
        self.client.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.kill()
        self.parent.stdin.close()
        self.parent.wait(10)

    def start(self) -> None:
        """Start the next one."""
        self.parent.stdin.write("\n")
        self.parent.stdin.flush()
        self.engine = int(self.parent.stdout.readline())

    def kill(self) -> None:
        """End it without warning, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            while self.engine:
                os.kill(self.engine, signal.SIGKILL)
                time.sleep(0.002)
        self.engine = 0


class Talk:
    """All of them talk at once. `goes_on`: whether one takes another turn."""

    def __init__(self, talkers: list[Talker], goes_on: Callable[[Talker], bool]):
        self.errors: queue.SimpleQueue = queue.SimpleQueue()
        self._goes_on = goes_on
        self._threads = [threading.Thread(target=self._run, args=(talker,), daemon=True) for talker in talkers]
        for thread in self._threads:
            thread.start()

    def _run(self, talker: Talker) -> None:
        try:
            while self._goes_on(talker):
                talker.take_turn()
        except BaseException as error:
            self.errors.put(error)

    def join(self) -> None:
        """Wait for their ends, and raise what one of them raised."""
        for thread in self._threads:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive()
        if not self.errors.empty():
            raise self.errors.get()


MANY_KILLS = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("sessions", "kills"), [(32, 10), pytest.param(32, 100, marks=MANY_KILLS), pytest.param(320, 100, marks=MANY_KILLS)]
)
def test_no_acknowledged_turn_is_lost_doubled_or_reordered(tmp_path, sessions, kills):
    rng = random.Random(sessions)
    with Engines(tmp_path) as engines:
        talkers = [Talker(engines.client, f"s{number}", f"says {number}") for number in range(sessions)]
        stop = threading.Event()
        talk = Talk(talkers, lambda talker: not stop.is_set())
        for _ in range(kills):
            said, until = sum(len(talker.turns) for talker in talkers), time.monotonic() + PATIENCE
            wanted = said + rng.randrange(sessions)
            while (said := sum(len(talker.turns) for talker in talkers)) <= wanted and talk.errors.empty():
                assert time.monotonic() < until
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.05))
            engines.kill()
            engines.start()
        stop.set()
        talk.join()
        sent = sum(talker.num_sent for talker in talkers)
        said = sum(len(talker.turns) for talker in talkers)
        replayed = sum(talker.num_replayed for talker in talkers)
        print(f"{kills} kills: {said} turns, {sent - said} sent again, {replayed} of them had happened")
        assert sent > said, "no turn was in progress when the engine was killed"
        expected = {f"control of {talker.session}": talker for talker in rng.sample(talkers, 6)}
        controls = [Talker(engines.client, name, talker.prompts) for name, talker in expected.items()]
        Talk(controls, lambda control: len(control.turns) < len(expected[control.session].turns)).join()
        assert [control.turns for control in controls] == [talker.turns for talker in expected.values()]
