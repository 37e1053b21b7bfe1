"""Two stand-in engines behind one front."""

import contextlib
import queue

import pytest
from test_channel import Engine, drain, request, wait_until

from rwkv_batch import session_messages
from rwkv_batch.errors import Unavailable
from rwkv_batch.ipc.client import EngineClient
from rwkv_batch.ipc.messages import Ask, EngineInfo
from rwkv_batch.ipc.router import EngineRouter
from rwkv_batch.request import Request
from rwkv_batch.session_messages import Deleted, Session
from sampling.params import SamplingParams

NAMES = ("one", "two")


class Pool:
    """The sessions of one engine, which says who was asked."""

    def __init__(self, worker):
        self.worker, self.asked = worker, []

    def execute(self, command, answer) -> None:
        self.asked.append(command)
        answer(Deleted(found=True, count=1))


@pytest.fixture
def engines(tmp_path):
    """Two engines of different names, and a router over them."""
    with contextlib.ExitStack() as stack:
        addresses = [f"ipc://{tmp_path}/{name}" for name in NAMES]
        running = [stack.enter_context(contextlib.closing(Engine(address))) for address in addresses]
        for engine, name in zip(running, NAMES, strict=True):
            engine.server.info = EngineInfo(model=name, slots=4)
            engine.pool = Pool(engine.worker)
            engine.worker.execute = engine.pool.execute
        router = EngineRouter([EngineClient(address, heartbeat=0.05) for address in addresses])
        stack.enter_context(contextlib.closing(router))
        router.start()
        wait_until(lambda: [client.info and client.info.model for client in router.clients] == list(NAMES))
        wait_until(lambda: all(client.ready and client.stats for client in router.clients))
        yield router, running


def with_session(namespace: str) -> Request:
    prompts, sampling = [[1, 2]], SamplingParams(seed=7)
    return Request(
        id=f"of {namespace}", prompts=prompts, sampling=sampling, max_tokens=5, session=Session(name="s"), namespace=namespace
    )


def namespaces_of(router) -> list[str]:
    """One namespace that lives in each engine."""
    return [next(str(i) for i in range(100) if router.home(str(i)) is client) for client in router.clients]


def test_requests_go_to_either_engine_and_to_the_one_with_less_to_do(engines):
    router, _ = engines
    first, second = router.clients
    long = router.submit(request("a", max_tokens=100_000))
    wait_until(lambda: first.tickets)
    assert router.client_for(request("b")) is second
    assert len(drain(router.submit(request("b")))) == 5
    assert set(router.tickets) == set(first.tickets) == {"a"}
    long.cancel()
    drain(long)


def test_each_engine_has_its_own_info_figures_and_sessions(engines):
    router, running = engines
    assert [client.info.model for client in router.clients] == list(NAMES)
    assert router.info.model == "one"
    assert router.stats["slots"] == sum(client.stats["slots"] for client in router.clients)
    for namespace, engine, client in zip(namespaces_of(router), running, router.clients, strict=True):
        assert router.client_for(with_session(namespace)) is client
        answers = queue.SimpleQueue()
        action = session_messages.Delete(namespace=namespace, name="s")
        router.execute(action, answers.put)
        assert answers.get(timeout=30).found
        assert engine.pool.asked == [action]


def test_a_question_about_requests_is_answered_by_all(engines):
    router, _ = engines
    tickets = [client.submit(request(name, max_tokens=100_000)) for client, name in zip(router.clients, NAMES, strict=True)]
    answers = queue.SimpleQueue()

    def live() -> set[str]:
        router.ask(Ask("q"), answers.put)
        return {live.id for live in answers.get(timeout=30)}

    wait_until(lambda: live() == set(NAMES))
    router.fail_all(Unavailable("the end"))
    assert [drain(ticket)[-1].message for ticket in tickets] == ["the end", "the end"]


def test_the_other_engine_serves_while_one_is_lost(engines):
    router, running = engines
    running[0].close()
    wait_until(lambda: router.clients[0].phase == "lost")
    router.check()
    assert router.ready
    assert len(drain(router.submit(request("a")))) == 5
