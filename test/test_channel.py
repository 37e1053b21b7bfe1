"""Both ends of the channel in one process: what arrives, and what a dead or stuck peer costs."""

import collections
import contextlib
import os
import queue
import random
import threading
import time

import pytest
import zmq

from rwkv_batch import session_messages
from rwkv_batch.engine.stub_engine import StubEngine
from rwkv_batch.errors import EngineFailed, Overloaded, Unavailable
from rwkv_batch.ipc import link as link_end
from rwkv_batch.ipc import messages
from rwkv_batch.ipc import server as server_end
from rwkv_batch.ipc.client import EngineClient
from rwkv_batch.ipc.late_texts import LATE_MESSAGES, LateTexts
from rwkv_batch.ipc.server import EngineServer
from rwkv_batch.ipc.tickets import Ticket
from rwkv_batch.request import Delta, Failure, Finish, Progress, Request, Text
from sampling.params import SamplingParams


def wait_until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def request(request_id: str, num_rows: int = 1, max_tokens: int = 5) -> Request:
    return Request(id=request_id, prompts=[[1, 2]] * num_rows, sampling=SamplingParams(seed=7), max_tokens=max_tokens)


def drain(ticket: Ticket, seconds: float = 30.0) -> list:
    """Everything up to END."""
    items = []
    while (item := ticket.take(seconds)) is not Ticket.END:
        items.append(item)
    with pytest.raises(queue.Empty):
        ticket.take(0.01)
    return items


class Engine:
    """A server with a fake worker in a thread."""

    def __init__(self, address: str, step_seconds: float = 0.005, peer_seconds: float = 15.0, **more):
        self.server = EngineServer(address, heartbeat=0.05, peer_seconds=peer_seconds)
        self.worker = StubEngine(self.server.deliver, step_seconds=step_seconds, **more)
        self.server.start()
        self.server.attach(self.worker)
        self.thread = threading.Thread(target=self.worker.run, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.worker.stop()
        self.thread.join(5)
        self.server.close()


@pytest.fixture
def address(tmp_path) -> str:
    return f"ipc://{tmp_path}/engine"


@pytest.fixture
def opened():
    """Give it what has a close(): that is called when the test ends, also when it fails.

    What a failed test left open would be closed by the garbage collector, which waits forever for zmq sockets.
    """
    with contextlib.ExitStack() as stack:
        yield lambda thing: stack.enter_context(contextlib.closing(thing))


@pytest.fixture
def engine(address, opened):
    return opened(Engine(address))


@pytest.fixture
def client(address, opened):
    running = opened(EngineClient(address, heartbeat=0.05))
    running.start()
    return running


def test_rows_come_in_order_and_end(engine, client):
    wait_until(lambda: client.ready)
    assert client.info == engine.worker.info
    ticket = client.submit(request("a", num_rows=3))
    events = drain(ticket)
    assert ticket.accepted
    texts = ["", "", ""]
    for event in events:
        for delta in event.deltas:
            texts[delta.index] += delta.text
    assert texts == [" w0 w1 w2 w3 w4"] * 3
    assert [finish.reason for event in events for finish in event.finishes] == ["length"] * 3
    assert client.tickets == {}


def test_nothing_can_be_submitted_before_the_model_is_there(address, client, opened):
    with pytest.raises(Unavailable, match="not running"):
        client.submit(request("a"))
    server = opened(EngineServer(address, heartbeat=0.05))
    server.start()
    wait_until(lambda: client.phase == "loading")
    with pytest.raises(Unavailable, match="loading"):
        client.submit(request("a"))
    server.attach(StubEngine(server.deliver))
    wait_until(lambda: client.ready)
    server.drain()
    wait_until(lambda: client.phase == "draining")
    with pytest.raises(Unavailable, match="shutting down"):
        client.submit(request("a"))


def test_who_waits_for_the_model_need_not_wait_for_a_beat(address, client, opened):
    server = opened(EngineServer(address, heartbeat=60.0, peer_seconds=60.0))
    server.start()
    wait_until(lambda: client.phase == "loading")
    server.attach(StubEngine(server.deliver))
    wait_until(lambda: client.ready)


def test_a_refusal_is_the_workers_own_error(address, client, opened):
    opened(Engine(address, slots=1, queue=1, step_seconds=0.05))
    wait_until(lambda: client.ready)
    tickets = [client.submit(request(str(i), max_tokens=1000)) for i in range(6)]
    wait_until(lambda: sum(ticket.failure is not None for ticket in tickets) >= 4)
    refused = [ticket for ticket in tickets if ticket.failure]
    error = refused[0].failure.exception()
    assert isinstance(error, Overloaded)
    assert (error.status, error.retry_after, error.code) == (429, 1.0, "queue_full")
    assert not refused[0].accepted


def test_cancel_frees_the_slot_and_ends_the_ticket(engine, client):
    wait_until(lambda: client.ready)
    ticket = client.submit(request("a", num_rows=4, max_tokens=100_000))
    ticket.take(30)
    ticket.cancel()
    ticket.cancel()
    wait_until(lambda: engine.worker.stats()["slots_free"] == 320)
    drain(ticket)
    assert client.tickets == {}


def test_a_cancel_before_the_request_was_sent_still_reaches_the_engine(engine, client):
    wait_until(lambda: client.ready)
    for i in range(50):
        client.submit(request(str(i), max_tokens=100_000)).cancel()
    time.sleep(0.1)
    wait_until(lambda: engine.worker.stats()["slots_free"] == 320)
    assert client.tickets == {}


def test_a_cancel_that_is_read_before_its_request_still_counts(engine, client):
    wait_until(lambda: client.ready)
    tickets = []

    class Asked(collections.deque):  # looked at between the requests to send and the cancels
        def __bool__(self) -> bool:
            if not tickets:
                tickets.append(client.submit(request("a", max_tokens=100_000)))
                tickets[0].cancel()
            return len(self) > 0

    client._asked = Asked()
    wait_until(lambda: tickets and tickets[0].done and not client._outbox)
    assert drain(tickets[0]) == []
    time.sleep(0.1)
    assert engine.worker.stats()["slots_free"] == 320


def test_a_lost_engine_fails_all_tickets_and_a_new_one_is_found(address, client, opened):
    engine = opened(Engine(address))
    wait_until(lambda: client.ready)
    tickets = [client.submit(request(str(i), max_tokens=100_000)) for i in range(10)]
    for ticket in tickets:
        ticket.take(30)
    engine.close()
    for ticket in tickets:
        last = drain(ticket)[-1]
        assert isinstance(last, Failure)
        assert isinstance(last.exception(), Unavailable)
    wait_until(lambda: client.phase == "lost")
    with pytest.raises(Unavailable, match="restarted"):
        client.submit(request("b"))
    opened(Engine(address))
    wait_until(lambda: client.ready)
    assert len(drain(client.submit(request("b")))) == 5


def test_callbacks_come_once(engine, client):
    wait_until(lambda: client.ready)
    calls = []
    ticket = client.submit(
        request("a", max_tokens=3),
        format_event=lambda event: b"x",
        answered=lambda: calls.append("answered"),
        ended=lambda: calls.append("ended"),
    )
    assert drain(ticket) == [b"x"] * 3
    wait_until(lambda: len(calls) == 2)
    assert calls == ["answered", "ended"]
    assert ticket.reader.num_put == ticket.reader.num_taken == 3


def test_a_translation_that_raises_ends_its_own_ticket_only(engine, client):
    wait_until(lambda: client.ready)

    def fails(event):
        raise ValueError

    bad, good = client.submit(request("a", max_tokens=1000), fails), client.submit(request("b"))
    assert len(drain(good)) == 5
    assert drain(bad) == []
    assert isinstance(bad.failure.exception(), EngineFailed)
    wait_until(lambda: engine.worker.stats()["slots_free"] == 320)


def test_callbacks_that_raise_do_not_end_the_client(address, engine):
    def fails(*args):
        raise ValueError

    # closed before pytest describes a failure: two threads that format tracebacks at once are too much for Python 3.11
    with contextlib.closing(EngineClient(address, heartbeat=0.05, tick=fails)) as client:
        client.busy = client.on_info = client.observe = fails
        client.start()
        wait_until(lambda: client.ready)
        for answered in (client.submit(request(name), answered=fails, ended=fails) for name in "ab"):
            assert len(drain(answered)) == 5
        cancelled = client.submit(request("c", max_tokens=100_000), answered=fails, ended=fails)
        cancelled.cancel()
        drain(cancelled)
        client.ask(messages.Ask("another"), fails)
        assert ask(client) == []
        answers = queue.SimpleQueue()
        for answer in (fails, answers.put):
            client.execute(session_messages.Status(), answer)
        assert isinstance(answers.get(timeout=30), Failure)


def test_a_beat_that_raises_does_not_end_the_server(engine, client):
    beats = queue.SimpleQueue()

    def fails(stats):
        beats.put(stats)
        raise ValueError

    wait_until(lambda: client.ready)
    engine.server.on_beat = fails
    for _ in range(3):
        beats.get(timeout=30)
    assert len(drain(client.submit(request("a")))) == 5
    engine.server.on_beat = lambda stats: None


class Peer:
    """An HTTP process that does only what a test says."""

    def __init__(self, address: str, name: bytes = b"peer"):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, name)
        self.socket.setsockopt(zmq.RCVHWM, 10)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def send(self, message) -> None:
        self.socket.send(messages.encode(message))

    def receive(self, kind: type, seconds: float = 30.0):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.socket.poll(100) and isinstance(message := messages.decode_to_http(self.socket.recv()), kind):
                return message
        raise AssertionError(f"no {kind.__name__}")

    def close(self) -> None:
        self.socket.close()
        self.context.term()


class Recorder:
    """A worker that only notes whose requests it has: the test itself makes the steps."""

    info = messages.EngineInfo(model="none")

    def __init__(self):
        self.owners: dict[str, bytes] = {}

    def submit(self, request: Request, owner: bytes) -> None:
        self.owners[request.id] = owner

    def cancel(self, request_id: str) -> None:
        self.owners.pop(request_id, None)

    def cancel_owner(self, owner: bytes) -> None:
        self.owners = {request_id: other for request_id, other in self.owners.items() if other != owner}

    def sampled(self) -> dict:
        return {}

    def stats(self) -> dict:
        return {}


def test_texts_are_joined_where_the_thread_is_behind():
    """Each request is told the same in the same order, in fewer events."""
    rng, told = random.Random(1), []
    late = LateTexts(told.append)
    came = []
    for number in range(400):
        name, index = rng.choice("abc"), rng.choice([0, 0, 0, 1])
        text = Text(name, index, f" {number}", 1)
        whole = Progress(name, [Delta(index, f" {number}", 1)], [Finish(index, "length", 1, 1)])
        came.append(rng.choice([text] * 6 + [whole, Failure(name, "EngineFailed", f"{number}")]))
        late.add(came[-1])
        if number % 50 == 49:
            late.flush()
    assert {name: said(name, told) for name in "abc"} == {name: said(name, came) for name in "abc"}
    assert len(told) < len(came) * 0.7


def said(name, events):
    """What a request was told: the text of each row between its other events, and how many tokens."""
    found = [(None, "", 0)]
    for event in events:
        if event.request_id != name:
            continue
        if isinstance(event, Failure) or event.finishes:
            found.append(event)
        elif isinstance(found[-1], tuple) and found[-1][0] == event.index:
            found[-1] = (event.index, found[-1][1] + event.text, found[-1][2] + event.tokens)
        else:
            found.append((event.index, event.text, event.tokens))
    return found


def test_a_client_that_was_held_up_is_told_all(address, client, opened, monkeypatch):
    """More steps wait than it looks at one by one."""
    server, worker = opened(EngineServer(address)), Recorder()
    server.attach(worker)
    server.start()
    wait_until(lambda: client.ready)
    ticket = client.submit(request("a"))
    wait_until(lambda: ticket.accepted)
    held, plain, steps = threading.Event(), client._feed, 3 * LATE_MESSAGES
    monkeypatch.setattr(client, "_feed", lambda link, event: (held.wait(30), plain(link, event)))
    for number in range(steps):
        server.deliver({worker.owners["a"]: [Text("a", 0, f" {number}", 1)]})
        wait_until(lambda: not server._outbox)
    server.deliver({worker.owners["a"]: [Progress("a", [], [Finish(0, "length", 1, steps)])]})
    held.set()
    texts = [event for event in drain(ticket) if isinstance(event, Text)]
    assert "".join(event.text for event in texts) == "".join(f" {number}" for number in range(steps))
    assert sum(event.tokens for event in texts) == steps
    assert len(texts) < steps


def test_a_peer_that_does_not_read_loses_its_own_tickets_only(address, client, opened, monkeypatch):
    monkeypatch.setattr(server_end, "HIGH_WATER", 20)
    server, worker = opened(EngineServer(address, heartbeat=60.0, peer_seconds=60.0)), Recorder()
    server.attach(worker)
    server.start()
    stuck = opened(Peer(address))
    stuck.send(messages.Hello(1))
    stuck.send(messages.Submit(request("stuck")))
    stuck.receive(messages.Accepted)
    wait_until(lambda: client.ready)
    good = client.submit(request("good"))
    wait_until(lambda: good.accepted)

    def step() -> Progress:  # the next one begins when this one is read: only who does not read falls behind, at any speed
        progress = {name: Progress(name, [Delta(0, "x" * 10_000, 1)], []) for name in worker.owners}
        server.deliver({owner: [progress[name]] for name, owner in worker.owners.items()})
        event = good.take(30)
        assert event == progress["good"]
        return event

    wait_until(lambda: step() and server.num_peers == 1)
    assert list(worker.owners) == ["good"]
    step()

    def told() -> bool:  # it wakes up, finds old messages, and learns that it was given up
        stuck.send(messages.Alive())
        return stuck.socket.poll(100) and isinstance(messages.decode_to_http(stuck.socket.recv()), messages.Forgotten)

    wait_until(told)


def test_a_peer_that_vanishes_or_falls_silent_is_given_up(address, opened):
    engine = opened(Engine(address, step_seconds=0.05, peer_seconds=60.0))
    gone, silent = opened(Peer(address, b"gone")), opened(Peer(address, b"silent"))

    def num_sequences() -> int:
        stats = engine.worker.stats()
        return stats["sequences_waiting"] + stats["sequences_running"]

    for peer in (gone, silent):
        peer.send(messages.Hello(1))
        peer.send(messages.Submit(request(str(id(peer)), max_tokens=100_000)))
        peer.receive(messages.Accepted)
    gone.close()
    wait_until(lambda: engine.server.num_peers == 1)
    wait_until(lambda: num_sequences() == 1)
    engine.server.peer_seconds = 0.1
    wait_until(lambda: engine.server.num_peers == 0)
    wait_until(lambda: num_sequences() == 0)


def test_requests_of_a_peer_that_vanished_can_be_stopped(address, client, opened):
    server = opened(EngineServer(address, heartbeat=10.0))  # so that nobody has noticed yet
    server.attach(StubEngine(server.deliver))
    server.start()
    wait_until(lambda: client.ready)
    assert ask(client) == []  # the first sign of life was given, the next is far
    gone = opened(Peer(address))
    gone.send(messages.Hello(1))
    for name in ("a", "b"):
        gone.send(messages.Submit(request(name)))
        gone.receive(messages.Accepted)
    gone.close()
    time.sleep(0.1)
    assert [live.id for live in ask(client, stop=True)] == ["a", "b"]
    assert ask(client) == []


def test_an_unknown_peer_is_told_and_garbage_is_dropped(engine, address, client, opened):
    peer = opened(Peer(address))
    peer.send(messages.Submit(request("a")))
    peer.receive(messages.Forgotten)
    for garbage in (
        b"",
        b"\xff" * 100,
        b"\x92\xa6submit\x81\xa2id\xa1\xff",
        messages.encode(["submit", {"id": 5}]),
        messages.encode(["nothing"]),
    ):
        peer.socket.send(garbage)
    peer.close()
    wait_until(lambda: client.ready)
    assert len(drain(client.submit(request("b")))) == 5


def test_a_request_that_cannot_be_read_ends_with_an_error(engine, client):
    wait_until(lambda: client.ready)
    other = client.submit(request("a"))
    (ended,) = drain(client.submit(request("b", max_tokens="five")), 5)
    assert isinstance(ended.exception(), EngineFailed)
    assert len(drain(other)) == 5
    assert client.tickets == {}


def test_a_client_that_was_forgotten_comes_back_with_a_new_identity(engine, client):
    wait_until(lambda: client.ready)
    ticket = client.submit(request("a", max_tokens=100_000))
    ticket.take(30)
    (before,) = engine.server._peers
    engine.server._peers.clear()
    assert isinstance(drain(ticket)[-1], Failure)
    wait_until(lambda: client.ready)
    (after,) = engine.server._peers
    assert before != after
    assert len(drain(client.submit(request("b")))) == 5


def test_an_engine_that_cannot_be_read_is_given_up_and_greeted_anew(engine, client):
    wait_until(lambda: client.ready)
    ticket = client.submit(request("a", max_tokens=100_000))
    ticket.take(30)
    (owner,) = engine.server._peers
    engine.server._answers.append((owner, ["nothing"]))
    assert drain(ticket)[-1].exception().code == "engine_lost"
    wait_until(lambda: client.ready)
    assert len(drain(client.submit(request("b")))) == 5


def test_an_engine_that_does_not_read_refuses_what_cannot_be_queued(address, opened, monkeypatch):
    monkeypatch.setattr(link_end, "SUBMIT_HIGH_WATER", 2)
    client = opened(EngineClient(address, heartbeat=60.0))  # nobody is at this address
    client.links[0].phase = "ready"
    client.start()
    answers = queue.SimpleQueue()
    for _ in range(4):
        client.execute(session_messages.Status(), answers.put)
    assert answers.get(timeout=30).exception().code == "engine_busy"
    (ended,) = drain(client.submit(request("b")))
    assert ended.exception().code == "engine_busy"


def test_failures_carry_every_field():
    error = Failure.of("a", Overloaded("full", param="p", retry_after=3.0)).exception()
    assert (type(error), error.message, error.param, error.code, error.retry_after) == (
        Overloaded,
        "full",
        "p",
        "queue_full",
        3.0,
    )
    assert isinstance(Failure("a", "NoSuchClass", "m").exception(), EngineFailed)
    assert isinstance(Failure("a", "annotations", "m").exception(), EngineFailed)


def test_messages_survive_the_wire():
    for message in (
        messages.Submit(request("ä", 2)),
        messages.Cancel("a"),
        messages.Alive(),
        messages.Hello(os.getpid()),
    ):
        assert messages.decode_to_engine(messages.encode(message)) == message
    progress = Progress("a", [Delta(0, "文", 1)], [Finish(0, "error", 1, 2, "why")])
    for message in (
        messages.Batch([progress], [Failure("b", "Overloaded", "m", None, "c", 1.5)]),
        messages.Status("ready", messages.EngineInfo(model="m"), {"a": 1, "b": 0.5}),
        messages.Accepted(["a", "b"]),
        messages.Forgotten(),
    ):
        assert messages.decode_to_http(messages.encode(message)) == message


def ask(client: EngineClient, **question) -> list[messages.Live]:
    """What the engine answers about its requests."""
    answers: queue.SimpleQueue = queue.SimpleQueue()
    client.ask(messages.Ask("q", **question), answers.put)
    return answers.get(timeout=30)


def test_the_engine_knows_the_requests_of_all_clients(address, engine, client):
    other = EngineClient(address, heartbeat=0.05)
    other.start()
    wait_until(lambda: client.ready and other.ready)
    try:
        mine = client.submit(request("a", num_rows=2, max_tokens=10_000), endpoint="/x")
        wait_until(lambda: ask(client))  # two clients' messages arrive in any order
        theirs = [other.submit(request(name, max_tokens=10_000), endpoint="/y") for name in ("b-1", "b-2", "c")]
        short = client.submit(request("d"), endpoint="/x")
        drain(short)
        wait_until(lambda: len(ask(client)) == 4 and all(live.tokens for live in ask(client)))
        first = ask(client)[0]
        assert (first.id, first.endpoint, first.prompts, first.prompt_tokens, first.max_tokens) == ("a", "/x", 2, 4, 10_000)
        assert [live.id for live in ask(client, endpoint="/y")] == ["b-1", "b-2", "c"]
        assert [live.id for live in ask(client, request_id="b", stop=True)] == ["b-1", "b-2"]
        for ticket in theirs[:2]:
            *_, last = drain(ticket)
            assert (last.exception().status, last.message) == (409, "Request cancelled")
        assert ask(client, request_id="nobody", stop=True) == []
        theirs[2].cancel()
        wait_until(lambda: [live.id for live in ask(client)] == ["a"])
        mine.cancel()
        other.submit(request("e", max_tokens=10_000))
        wait_until(lambda: [live.id for live in ask(client)] == ["e"])
    finally:
        other.close()
    wait_until(lambda: ask(client) == [])  # the engine notices that they have lost their client
