"""Kills the engine at random moments under turns of many sessions, and knows every turn that was acknowledged.

No such turn is lost, comes twice or out of its order: versions follow one another, tokens add up, and a turn whose answer did
not arrive happens exactly once when it is sent again with its key. What is said afterwards is what undisturbed sessions say.
"""

import asyncio
import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from server_process import ServerProcess, wait_until

from bench.client import call, open_stream

STATE, STATUS = "/state/chat/completions", "/state/status"
GREEDY = {"top_k": 1, "alpha_presence": 2.0, "alpha_frequency": 0.5, "stop_tokens": [], "ignore_eos": True}
TOKENS = 6  # of a turn
HIDDEN = 3  # bytes, and so tokens at most, of a character that a turn's end cuts off
PATIENCE = 120.0  # seconds until a turn that is sent again and again must have been acknowledged
BROKEN = (OSError, asyncio.IncompleteReadError, ValueError)


@dataclass
class Turn:
    """What a client was told of one turn."""

    text: str
    version: int
    tokens: int
    grown: int  # tokens of the prompt and of the answer
    replayed: bool


@dataclass
class Client:
    """The client of one session: turns in order, each with its key, each sent again until it is answered.

    prompts  what its turns say is of this name: a control has another session and the same prompts
    """

    server: ServerProcess
    session: str
    prompts: str
    rng: random.Random
    turns: list[Turn] = field(default_factory=list)
    refusals: tuple[int, ...] = (409, 429, 503)
    num_sent_again: int = 0
    num_replayed: int = 0  # whose first answer did not arrive although the turn had happened

    async def send(self, number: int) -> Turn | str:
        """Send turn `number`; what the server said, or why there is no answer."""
        body = {
            "contents": [f"User: {number} {self.prompts}\n\nAssistant:"], "session_id": self.session, "max_tokens": TOKENS,
            "idempotency_key": f"{self.session} {number}", "stream": self.rng.random() < 0.5, **GREEDY,
        }  # fmt: skip
        try:
            async with await open_stream(self.server.host, self.server.port, STATE, body) as stream:
                if stream.status != 200:
                    content = await stream.read()
                    assert stream.status in self.refusals, (self.session, number, stream.status, content)
                    return content.decode()
                if body["stream"]:
                    *events, end = [payload async for payload in stream.events()]
                    return turn_of([json.loads(event) for event in events]) if end == b"[DONE]" else end.decode()
                return turn_of([json.loads(await stream.read())])
        except BROKEN as error:
            return repr(error)

    async def take_turn(self) -> None:
        """Take the next turn, however often it must be sent."""
        number, deadline = len(self.turns) + 1, time.monotonic() + PATIENCE
        again = 0
        while isinstance(turn := await self.send(number), str):
            assert time.monotonic() < deadline, f"{self.session}, turn {number}: {turn}\n{self.server.output[-5000:]}"
            again = 1
            await asyncio.sleep(0.1)
        self.num_sent_again += again
        self.num_replayed += turn.replayed
        assert turn.version == number, f"{self.session}: turn {number} is version {turn.version}"
        before = self.turns[-1].tokens if self.turns else 0
        assert 0 <= before + turn.grown - turn.tokens <= HIDDEN, f"{self.session}, turn {number}: {before} tokens, then {turn}"
        assert again or not turn.replayed, f"{self.session}, turn {number}: {turn}"
        self.turns.append(turn)

    async def run(self, stop: asyncio.Event) -> None:
        """Take turns until told to stop; the last one is acknowledged too."""
        while not stop.is_set():
            await self.take_turn()

    async def check(self) -> None:
        """The session is where its client is, and its last turn is answered again, not run again."""
        found = await call(self.server.host, self.server.port, STATUS, {"session_id": self.session})
        entries = [(entry["version"], entry["tokens"]) for entry in found.json()["sessions"]]
        assert entries == [(turn.version, turn.tokens) for turn in self.turns[-1:]], (self.session, entries)
        if self.turns:
            again = await self.send(len(self.turns))
            assert isinstance(again, Turn), (self.session, again)
            assert again.replayed
            assert (again.text, again.version, again.tokens) == (self.turns[-1].text, len(self.turns), self.turns[-1].tokens)


def turn_of(documents: list[dict[str, Any]]) -> Turn | str:
    """A turn from its whole answer or its chunks; what is wrong where it has no end."""
    last = documents[-1]
    if "session" not in last or any("error" in document for document in documents):
        return str(last)
    parts = [choice.get("delta") or choice["message"] for document in documents for choice in document["choices"]]
    usage, session = last["usage"], last["session"]
    assert session["durable"]
    assert usage["completion_tokens"] == TOKENS
    text = "".join(part["content"] for part in parts)
    return Turn(text, session["version"], session["tokens"], usage["total_tokens"], session.get("replayed", False))


async def everybody(work) -> None:
    """Wait for all; the first failure cancels the others."""
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)


def back(server: ServerProcess, engine: int) -> float:
    """Wait until another engine than this one answers; seconds that took."""

    def ready() -> bool:
        return server.children("engine") not in ([], [engine]) and server.get("/readyz")[0] == 200

    return wait_until(ready, 30, "the engine is back")


async def kill_rounds(server: ServerProcess, clients: list[Client], kills: int, rng: random.Random) -> list[float]:
    """Kill the engine so often, and check what the clients were told; seconds of each restart.

    The moment is random among the first three turns of each session, and inside a turn.
    """
    restarts = []
    for _ in range(kills):
        stop = asyncio.Event()
        running = asyncio.ensure_future(everybody(client.run(stop) for client in clients))
        wanted = sum(len(client.turns) for client in clients) + rng.randrange(3 * len(clients))
        while sum(len(client.turns) for client in clients) < wanted and not running.done():
            await asyncio.sleep(0.01)
        await asyncio.sleep(rng.uniform(0.02, 0.1))
        (engine,) = server.children("engine")
        os.kill(engine, signal.SIGKILL)
        restarts.append(await asyncio.to_thread(back, server, engine))
        stop.set()
        await running
        await everybody(client.check() for client in clients)
    return restarts


async def compare(server: ServerProcess, clients: list[Client]) -> None:
    """What a session says next is what one says that nobody disturbed, and so was all it said before."""

    async def one(client: Client) -> None:
        control = Client(server, f"control of {client.session}", client.prompts, client.rng)
        await client.take_turn()
        for turn in client.turns:
            await control.take_turn()
            same = control.turns[-1]
            assert (same.text, same.version, same.tokens) == (turn.text, turn.version, turn.tokens), client.session

    await everybody(one(client) for client in clients)


def disturb(server: ServerProcess, name: str, *, sessions: int, kills: int, seed: int) -> tuple[list[Client], list[float]]:
    """Kill and compare; (the clients, seconds of each restart). Prints what the clients went through."""
    rng = random.Random(seed)
    names = [f"{name} {number}" for number in range(sessions)]
    clients = [Client(server, one, one, random.Random(f"{seed} {one}")) for one in names]

    async def run() -> list[float]:
        restarts = await kill_rounds(server, clients, kills, rng)
        await compare(server, clients)
        await everybody(client.take_turn() for client in clients)  # of all answers only the last thousand are kept
        return restarts

    restarts = asyncio.run(run())
    turns, again, replayed = (
        sum(map(count, clients)) for count in (lambda c: len(c.turns), lambda c: c.num_sent_again, lambda c: c.num_replayed)
    )
    print(f"{kills} kills, {sessions} sessions: {turns} turns, {again} sent again, {replayed} of them had happened")
    assert again >= kills, "no turn was in progress when the engine was killed"
    return clients, restarts


def check_all(server: ServerProcess, clients: list[Client]) -> None:
    """On another server over the same files: all sessions are where their clients are, and go on."""

    async def one(client: Client) -> None:
        client.server = server
        await client.check()
        await client.take_turn()

    asyncio.run(everybody(one(client) for client in clients))
