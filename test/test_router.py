"""Which engine gets what: the choice alone, then two stand-in engines behind one client."""

import contextlib
import queue
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_channel import Engine, drain, request, wait_until
from test_worker import Harness

from rwkv_batch import session_messages
from rwkv_batch.errors import StorageFailed, Unavailable
from rwkv_batch.ipc.client import EngineClient
from rwkv_batch.ipc.messages import PHASES, Ask, EngineInfo, Seat
from rwkv_batch.ipc.router import Router, room_of
from rwkv_batch.ipc.server import EngineServer
from rwkv_batch.request import Request
from rwkv_batch.served.variants import ListVariants, LoadState, RemoveStates, Variant, VariantsNow
from rwkv_batch.session_messages import Deleted, Session
from sampling.params import SamplingParams

NAMES = ("one", "two")


def at(index: int, rows: int = 0, slots: int = 16, phase: str = "ready", *, sessions: bool = True) -> SimpleNamespace:
    """An engine as the router sees it."""
    return SimpleNamespace(seat=Seat(index=index, address="", sessions=sessions), phase=phase, load=(rows, slots))


def with_session(name: str, namespace: str = "") -> Request:
    prompts, sampling = [[1, 2]], SamplingParams(seed=7)
    session = Session(name=name)
    return Request(id=name, prompts=prompts, sampling=sampling, max_tokens=5, session=session, namespace=namespace)


@pytest.mark.parametrize(
    ("engines", "chosen"),
    [
        ([at(0, 5), at(1, 4)], 1),
        ([at(0, 5, 320), at(1, 4, 16)], 0),  # the larger one has more room
        ([at(0, 5), at(1, 0, phase="loading")], 0),
        ([at(0, phase="lost"), at(1, phase="draining"), at(2, phase="loading")], 2),  # whose phase says why it is refused
        ([at(3, phase="lost")], 3),
    ],
)
def test_the_engine_with_the_fewest_rows_for_its_slots_gets_a_request(engines, chosen):
    for number in range(4):
        assert Router(number).link_for(request("a"), engines).seat.index == chosen


def test_there_may_be_no_engine_at_all():
    assert Router().link_for(request("a"), []) is None
    assert Router().link_for(with_session("a"), []) is None


@given(st.integers(1, 8), st.integers(0, 3), st.lists(st.integers(1, 5), max_size=40))
def test_rows_are_spread_evenly(num_engines, number, requests):
    router, engines = Router(number), [at(index) for index in range(num_engines)]
    for num_rows in requests:
        engine = router.link_for(request("a", num_rows), engines)
        engine.load = (engine.load[0] + num_rows, 16)
    rows = [engine.load[0] for engine in engines]
    assert max(rows) - min(rows) <= max(requests, default=0)


def test_processes_break_ties_in_different_orders():
    engines = [at(index) for index in range(4)]
    assert {Router(number).link_for(request("a"), engines).seat.index for number in range(4)} == {0, 1, 2, 3}


@given(st.text(max_size=8), st.text(max_size=8), st.sets(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_a_session_has_one_home_and_moves_only_when_that_is_lost(namespace, name, indices, data):
    engines = [at(index, rows=index) for index in sorted(indices)]
    turned = data.draw(st.permutations(engines))
    home = Router(data.draw(st.integers(0, 9))).home(namespace, name, engines)
    assert Router().home(namespace, name, turned) is home
    assert Router().link_for(with_session(name, namespace), turned) is home
    assert Router().home(namespace, name + ":7", engines) is Router().home(namespace, name + ":12", engines)
    lost = data.draw(st.sampled_from(engines))
    lost.phase = data.draw(st.sampled_from(PHASES[1:]))
    now = Router().home(namespace, name, engines)
    assert (now is home) == (lost is not home or len(engines) == 1)


def test_sessions_are_spread_over_the_engines():
    engines = [at(index) for index in range(4)]
    homes = [Router().home("", f"session-{number}", engines).seat.index for number in range(400)]
    assert all(70 < homes.count(index) < 130 for index in range(4))


def test_sessions_live_only_where_some_are_kept():
    engines = [at(0), *(at(index, sessions=False) for index in range(1, 4))]
    for phase in PHASES:
        engines[0].phase = phase
        assert {Router().home("", str(number), engines).seat.index for number in range(20)} == {0}
    assert {Router(number).link_for(request("a"), engines).seat.index for number in range(3)} == {1, 2, 3}  # 0 is lost


def prompts_of(num_prompts: int, copies: int = 1, max_tokens: int = 5, request_id: str = "a") -> Request:
    """A request whose prompts differ in length, so that their rows can be told apart."""
    prompts = [[1] * (1 + number % 7) for number in range(num_prompts)]
    return Request(id=request_id, prompts=prompts, sampling=SamplingParams(seed=7), max_tokens=max_tokens, copies=copies)


ENGINES = st.lists(
    st.tuples(st.integers(0, 500), st.integers(1, 320), st.sampled_from(("ready", "ready", "lost"))), min_size=1, max_size=8
)


@given(st.integers(1, 400), st.integers(1, 20), ENGINES, st.integers(0, 3))
def test_every_row_goes_to_one_engine_or_waits(num_prompts, copies, found, number):
    engines = [at(index, rows, slots, phase) for index, (rows, slots, phase) in enumerate(found)]
    wanted, router = prompts_of(num_prompts, copies), Router(number)
    parts, waiting = router.spread(wanted, engines)
    assert parts
    assert [row for _, rows in (*parts, (None, waiting)) for row in rows] == list(range(wanted.num_rows))
    unit = copies if num_prompts > 1 else 1
    serving = [engine for engine in engines if engine.phase == "ready"]
    for engine, rows in parts:
        assert rows.start % unit == rows.stop % unit == 0
        assert [len(part.prompts) * part.copies for part in [wanted.part("p", rows)]] == [len(rows)]
        assert engine.phase == "ready" or not serving
        if len(parts) > 1:
            assert len(rows) <= room_of(engine)
            engine.load = (engine.load[0] + len(rows), engine.load[1])
    for _ in range(1000):  # every row ends, and all that wait are handed on
        if not waiting:
            break
        for engine in serving:
            engine.load = (0, engine.load[1])
        engine, rows = router.further(wanted, waiting, engines)
        assert (rows.start, rows.stop % unit) == (waiting.start, 0)
        waiting = waiting[len(rows) :]
    assert not waiting


@pytest.mark.parametrize(
    ("wanted", "engines", "counts"),
    [
        (prompts_of(8), [at(0), at(1)], [8]),  # few rows stay together
        (prompts_of(1, 16), [at(0), at(1)], [16]),  # and so do those of one prompt
        (prompts_of(1, 20), [at(0), at(1)], [10, 10]),  # where they have room
        (prompts_of(32), [at(0), at(1)], [16, 16]),
        (prompts_of(24), [at(0, 8), at(1)], [8, 16]),
        (prompts_of(8, 4), [at(0), at(1)], [16, 16]),
        (prompts_of(100), [at(0), at(1, 16)], [18, 2]),  # all slots, and some that wait; 80 rows wait here
        (prompts_of(100), [at(0, 18), at(1, 18)], [1]),  # so that the queue refuses it, if anybody does
        (prompts_of(100), [at(0), at(1, phase="loading")], [100]),
    ],
)
def test_the_rows_of_a_request_are_spread_over_free_slots(wanted, engines, counts):
    parts, waiting = Router().spread(wanted, engines)
    assert [len(rows) for _, rows in parts] == counts
    assert len(waiting) == wanted.num_rows - sum(counts)


def test_rows_wait_until_there_is_room_for_many():
    router, wanted = Router(), prompts_of(1000)
    full, free = [at(0, 360, 320), at(1, 340, 320)], [at(0, 360, 320), at(1, 310, 320)]
    assert router.further(wanted, range(500, 1000), full) is None
    engine, rows = router.further(wanted, range(500, 1000), free)
    assert (engine, rows) == (free[1], range(500, 550))
    assert router.further(wanted, range(990, 1000), full) == (full[1], range(990, 1000))
    assert router.further(wanted, range(500, 1000), []) is None


class Pool:
    """The sessions of one engine, which says who was asked."""

    def __init__(self, worker):
        self.worker, self.asked = worker, []

    def execute(self, command, answer) -> None:
        self.asked.append(command)
        answer(Deleted(found=True, count=1))


@pytest.fixture
def engines(tmp_path):
    """Two engines of different names, and a client of both."""
    with contextlib.ExitStack() as stack:
        seats = [Seat(index=index, address=f"ipc://{tmp_path}/{name}") for index, name in enumerate(NAMES)]
        running = [stack.enter_context(contextlib.closing(Engine(seat.address))) for seat in seats]
        for engine, name in zip(running, NAMES, strict=True):
            engine.server.info = EngineInfo(model=name, slots=320)
            engine.pool = Pool(engine.worker)
            engine.worker.execute = engine.pool.execute
        client = stack.enter_context(contextlib.closing(EngineClient(seats, heartbeat=0.05)))
        client.start()
        wait_until(lambda: all(link.ready and link.stats for link in client.links))
        yield client, running


def test_requests_go_to_either_engine_and_to_the_one_with_less_to_do(engines):
    client, _ = engines
    long = client.submit(request("a", max_tokens=100_000))
    wait_until(lambda: long.accepted)
    (busy,) = [link for link in client.links if link.open_rows]
    for name in "bc":
        assert len(drain(client.submit(request(name)))) == 5
    wait_until(lambda: set(client.tickets) == {"a"})
    assert list(busy.parts) == ["a"]
    long.cancel()
    drain(long)
    wait_until(lambda: [link.open_rows for link in client.links] == [0, 0])
    wait_until(
        lambda: client.stats["generation_tokens_total"] == sum(link.stats["generation_tokens_total"] for link in client.links)
    )


def test_each_engine_has_its_own_info_figures_and_sessions(engines):
    client, running = engines
    assert [link.info.model for link in client.links] == list(NAMES)
    assert client.info.model == "one"
    assert client.stats["slots"] == sum(link.stats["slots"] for link in client.links) == 640
    answers = queue.SimpleQueue()
    commands = [session_messages.Delete(name=str(number)) for number in range(20)]
    for command in commands:
        client.execute(command, answers.put)
        assert answers.get(timeout=30).found
    asked = [engine.pool.asked for engine in running]
    assert all(asked)
    assert sorted(command.name for some in asked for command in some) == sorted(command.name for command in commands)


def test_an_order_about_states_is_carried_out_by_all_engines_or_none(engines):
    client, running = engines
    asked, refusing, answers = [[], []], set(), queue.SimpleQueue()

    def executing(index: int):
        def execute(command, answer) -> None:
            asked[index].append(command)
            if index in refusing and isinstance(command, LoadState):
                raise StorageFailed("no memory")
            running[index].worker.info = EngineInfo(model=NAMES[index], variants=[Variant(name="s", key="k")])
            answer(VariantsNow(variants=[Variant(name="s", key="k")]))

        return execute

    for index, engine in enumerate(running):
        engine.worker.execute = executing(index)
    load = LoadState(name="s", files=["f"])
    client.execute(load, answers.put)
    assert [variant.name for variant in answers.get(timeout=30).variants] == ["s"]
    assert asked == [[load], [load]]
    assert [variant.name for variant in client.info.variants] == ["s"], "told before the answer"
    refusing.add(1)
    client.execute(load, answers.put)
    assert answers.get(timeout=30).exception().message == "no memory"
    wait_until(lambda: asked[0][1:] == [load, RemoveStates(name="s")])
    assert asked[1][1:] == [load]
    running[1].close()
    wait_until(lambda: client.links[1].phase == "lost")
    client.execute(load, answers.put)
    assert answers.get(timeout=30).exception().code == "engine_lost"
    client.execute(ListVariants(), answers.put)
    assert [variant.name for variant in answers.get(timeout=30).variants] == ["s"]
    assert asked[0][3:] == [ListVariants()], "a load that not all could do is given to none"


def test_a_question_about_requests_is_answered_by_all(engines):
    client, _ = engines
    tickets = [client.submit(request(name, max_tokens=100_000)) for name in NAMES]
    answers = queue.SimpleQueue()

    def live() -> set[str]:
        client.ask(Ask("q"), answers.put)
        return {live.id for live in answers.get(timeout=30)}

    wait_until(lambda: live() == set(NAMES))
    wait_until(lambda: [len(link.parts) for link in client.links] == [1, 1])
    client.fail_all(Unavailable("the end"))
    assert [drain(ticket)[-1].message for ticket in tickets] == ["the end", "the end"]


def test_a_lost_engine_costs_its_own_requests_and_the_other_serves(engines):
    client, running = engines
    tickets = [client.submit(request(str(number), max_tokens=100_000 if number < 8 else 200)) for number in range(16)]
    wait_until(lambda: all(ticket.accepted for ticket in tickets))
    theirs = [list(link.parts) for link in client.links]
    assert list(map(len, theirs)) == [8, 8]
    running[0].close()
    wait_until(lambda: client.links[0].phase == "lost")
    client.check()
    for ticket in tickets:
        ended = ticket.request_id in theirs[0]
        assert not ended or drain(ticket)[-1].exception().code == "engine_lost"
        assert ended or ticket.failure is None
    assert len(drain(client.submit(request("a")))) == 5
    answers = queue.SimpleQueue()
    client.ask(Ask("q"), answers.put)
    assert {live.id for live in answers.get(timeout=30)} <= set(theirs[1])
    for ticket in tickets:
        ticket.cancel()


def test_engines_come_and_go(engines, tmp_path):
    client, running = engines
    one, two = (link.seat for link in client.links)
    three = Seat(index=2, address=f"ipc://{tmp_path}/three")
    with contextlib.closing(Engine(three.address)):
        client.use([two, three])
        wait_until(lambda: [link.seat for link in client.links] == [two, three] and all(link.ready for link in client.links))
        wait_until(lambda: running[0].server.num_peers == 0)
        assert len(drain(client.submit(request("a")))) == 5
        ticket = client.submit(request("b", max_tokens=100_000))
        wait_until(lambda: ticket.accepted)
        client.use([one])
        assert drain(ticket)[-1].exception().code == "engine_lost"
        wait_until(lambda: client.ready)
        assert len(drain(client.submit(request("c")))) == 5
        client.use([])
        wait_until(lambda: client.phase == "lost")
        with pytest.raises(Unavailable):
            client.submit(request("d"))


def texts_of(items: list, num_rows: int) -> list[str]:
    texts = [""] * num_rows
    for event in items:
        for delta in event.deltas:
            texts[delta.index] += delta.text
    return texts


def test_a_request_of_many_rows_runs_on_both_engines_and_ends_as_one(engines):
    client, running = engines
    ticket = client.submit(prompts_of(700, max_tokens=3), endpoint="/x")  # 640 slots
    items = drain(ticket)
    assert texts_of(items, 700) == [" w0 w1 w2"] * 700
    finishes = {finish.index: finish for event in items for finish in event.finishes}
    assert [finishes[row].prompt_tokens for row in range(700)] == [1 + row % 7 for row in range(700)]
    assert (ticket.accepted, ticket.failure, ticket.open_rows) == (True, None, 0)
    assert all(engine.worker.stats()["generation_tokens_total"] > 300 for engine in running)
    wait_until(lambda: [link.open_rows for link in client.links] == [0, 0])
    assert (client._handed, client._waiting, [link.parts for link in client.links]) == ({}, {}, [{}, {}])


def test_rows_that_wait_follow_as_others_end(engines):
    client, running = engines
    ticket = client.submit(prompts_of(2000, max_tokens=2))
    assert texts_of(drain(ticket, 60), 2000) == [" w0 w1"] * 2000
    assert sum(engine.worker.stats()["generation_tokens_total"] for engine in running) == 4000


def test_a_request_in_parts_is_seen_stopped_and_cancelled_as_one(engines):
    client, running = engines
    answers = queue.SimpleQueue()

    def live(**more) -> list:
        client.ask(Ask("q", **more), answers.put)
        return answers.get(timeout=30)

    def idle() -> bool:
        return all(engine.worker.stats()["slots_free"] == 320 for engine in running)

    stopped, cancelled = (client.submit(prompts_of(100, 1, 100_000, name), given_id="mine") for name in ("a", "b"))
    wait_until(
        lambda: (
            [(one.id, one.prompts, one.prompt_tokens, one.whole) for one in live()]
            == [("a", 100, 395, ""), ("b", 100, 395, "")]
        )
    )
    assert [one.id for one in live(request_id="a", stop=True)] == ["a"]
    assert drain(stopped)[-1].exception().code == "cancelled"
    wait_until(lambda: [one.id for one in live(request_id="mine")] == ["b"])
    cancelled.cancel()
    drain(cancelled)
    wait_until(idle)
    more = client.submit(prompts_of(2000, 1, 100_000, "c"))
    wait_until(lambda: more.accepted)
    more.cancel()  # with rows that no engine has
    drain(more)
    wait_until(idle)
    assert client._waiting == client._handed == client.tickets == {}


def test_a_request_in_parts_fails_as_one_with_an_engine(engines):
    client, running = engines
    ticket = client.submit(prompts_of(2000, 1, 100_000))
    wait_until(lambda: ticket.accepted and all(link.parts for link in client.links))
    running[1].close()
    *_, last = drain(ticket)
    assert last.exception().code == "engine_lost"
    wait_until(lambda: running[0].worker.stats()["slots_free"] == 320)
    assert client._waiting == client._handed == {}


def test_what_one_engine_refuses_another_one_takes(engines):
    """One whose queue is full, or that ends; 429 comes when all are full."""
    client, running = engines
    running[0].worker.queue = 0
    tickets = [client.submit(request(str(number))) for number in range(8)]
    assert [len(drain(ticket)) for ticket in tickets] == [5] * 8
    assert running[0].worker.stats()["generation_tokens_total"] == 0
    running[1].worker.queue = 0
    (refused,) = drain(client.submit(request("full")))
    assert (refused.exception().status, refused.code) == (429, "queue_full")
    (refused,) = drain(client.submit(prompts_of(100)))
    assert refused.code == "queue_full"
    running[0].worker.queue = running[1].worker.queue = 512
    running[1].worker.drain()  # which the client does not know yet
    tickets = [client.submit(request(str(number))) for number in range(8)]
    assert [len(drain(ticket)) for ticket in tickets] == [5] * 8


class RealEngine(Harness):
    """An engine with a tiny model, and its end of the channel."""

    def __init__(self, address: str):
        self.server = EngineServer(address, heartbeat=0.05)
        super().__init__(slots=16)
        self.worker.info = EngineInfo(model="tiny", slots=16)
        self.server.start()
        self.server.attach(self.worker)
        self.thread = threading.Thread(target=self.worker.run, daemon=True)
        self.thread.start()

    def deliver(self, batch: dict) -> None:
        self.server.deliver(batch)

    def close(self) -> None:
        self.worker.stop()
        self.thread.join(30)
        self.server.close()


@pytest.mark.parametrize("copies", [1, 24])
def test_seeded_text_is_the_same_on_one_engine_and_in_parts_on_two(tmp_path, copies):
    params = SamplingParams(seed=7, temperature=1.0, top_k=0, top_p=1.0, ignore_eos=True)
    prompts = [list(b"a prompt and its number: %d" % number) for number in range(24 // copies)]
    wanted = Request(id="a", prompts=prompts, copies=copies, sampling=params, max_tokens=10)
    said, shares = [], []
    with contextlib.ExitStack() as stack:
        seats = [Seat(index=index, address=f"ipc://{tmp_path}/{index}") for index in range(3)]
        for seat in seats:
            stack.enter_context(contextlib.closing(RealEngine(seat.address)))
        for some in (seats[:1], seats[1:]):
            client = stack.enter_context(contextlib.closing(EngineClient(some, heartbeat=0.05)))
            client.start()
            wait_until(lambda client=client: all(link.ready for link in client.links))
            said.append(texts_of(drain(client.submit(wanted), 60), 24))
            wait_until(lambda client=client: client.stats["generation_tokens_total"] == 240)
            shares.append([link.stats["generation_tokens_total"] for link in client.links])
    assert said[0] == said[1]
    assert len(set(said[0])) > 20
    assert shares == [[240], [120, 120]]


def test_two_processes_fill_two_engines_and_only_what_is_over_waits(tmp_path):
    """Neither sees what the other one is sending: an engine without a free slot says so, as long as another one has some."""
    seats = [Seat(index=index, address=f"ipc://{tmp_path}/{index}") for index in range(2)]
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(contextlib.closing(Engine(seat.address, slots=16))) for seat in seats]
        clients = [stack.enter_context(contextlib.closing(EngineClient(seats, heartbeat=0.05, number=n))) for n in range(2)]
        for client in clients:
            client.start()
        wait_until(lambda: all(link.ready for client in clients for link in client.links))
        tickets = [clients[n % 2].submit(request(str(n), max_tokens=100_000)) for n in range(32)]
        wait_until(lambda: all(ticket.accepted for ticket in tickets))
        assert [sum(len(client.links[n].parts) for client in clients) for n in range(2)] == [16, 16]
        wait_until(lambda: all(link.load == (16, 16) for client in clients for link in client.links))
        over = [clients[0].submit(request(f"over {n}", max_tokens=100_000)) for n in range(8)]
        wait_until(lambda: all(ticket.accepted for ticket in over))
        wait_until(lambda: [engine.worker.stats()["sequences_waiting"] for engine in running] == [4, 4])
        clients[1].fail_all(Unavailable("the end"))
        wait_until(lambda: all(link.others == 0 for link in clients[0].links))
        wait_until(lambda: sum(link.open_rows for link in clients[0].links) == 24)
        wait_until(lambda: all(ticket.failure is not None or ticket.first_at is not None for ticket in over))
