"""Steps are fed what they should be however far behind the device is: here it does nothing before somebody waits for it."""

from collections import Counter
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from models import TINY, random_weights
from test_worker import GREEDY, Harness, Memory, tokenizer_for

from rwkv_batch.engine import prefill_graphs
from rwkv_batch.engine.decode_graphs import DecodeGraphs
from rwkv_batch.engine.engine import Engine, _Readback
from rwkv_batch.engine.engine_loop import EngineLoop
from rwkv_batch.engine.prefill_graphs import LONG, TOKENS, PrefillGraphs, fewest_tokens
from rwkv_batch.engine.staging import BUFFERS, MaskStaging, Staging
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.request import Request, Text
from rwkv_batch.scheduling.scheduler import Scheduler
from rwkv_batch.session_messages import Session
from sampling.masks import SlotMasks
from sampling.reference import ReferenceSampler

CPU = torch.device("cpu")


class Stream:
    """The laziest device there may be. `fed`: what each step has read of its inputs."""

    def __init__(self):
        self.queue = []
        self.num_done = 0
        self.fed = []

    def run(self, end):
        while self.num_done < end:
            self.queue[self.num_done]()
            self.num_done += 1


@pytest.fixture
def stream(monkeypatch):
    stream = Stream()

    class Event:
        end = 0

        def record(self):
            self.end = len(stream.queue)

        def synchronize(self):
            stream.run(self.end)

        def query(self):
            return stream.num_done >= self.end

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return stream


class DeviceArray:
    """An array on the device: a copy out of pinned memory reads it when the stream comes to it."""

    def __init__(self, stream, values):
        self.stream = stream
        self.values = values

    def __getitem__(self, where):
        return DeviceArray(self.stream, self.values[where])

    def copy_(self, source, non_blocking):
        assert non_blocking
        self.stream.queue.append(lambda: self.values.copy_(source))


class Graph:
    """Reads the first places of its inputs."""

    def __init__(self, inputs, count):
        self.inputs = inputs
        self.count = count

    def replay(self):
        stream = self.inputs.stream
        stream.queue.append(lambda: stream.fed.append(self.inputs.values[: self.count].tolist()))


def test_a_buffer_is_not_written_before_its_copy_is_done(stream):
    staging, target, arrived = Staging(8, CPU), DeviceArray(stream, torch.zeros(8, dtype=torch.int64)), []
    sent = [[i] * (1 + i % 8) for i in range(5 * BUFFERS)]
    for values in sent:
        staging.send(values, target)
        stream.queue.append(lambda count=len(values): arrived.append(target.values[:count].tolist()))
    stream.run(len(stream.queue))
    assert arrived == sent


def test_masks_reach_their_slots_however_late(stream):
    masks = SlotMasks(4, 70, "cpu")
    staging, arrived = MaskStaging(masks), []
    masks.memory = DeviceArray(stream, masks.memory)
    sent = [{slot: torch.full((3,), 10 * i + slot, dtype=torch.int32) for slot in range(i % 5)} for i in range(10)]
    for some in sent:
        staging.send(some)
        assert masks.masked == set(some)
        lines = [masks.lines, masks.words]
        stream.queue.append(lambda lines=lines: arrived.append([line.clone() for line in lines]))
    stream.run(len(stream.queue))
    for some, (lines, words) in zip(sent, arrived, strict=True):
        assert [line >= 0 for line in lines.tolist()] == [slot in some for slot in range(4)]
        assert all(torch.equal(words[lines[slot]], some[slot]) for slot in some)


def engine_of(stream, budget):
    """Return an engine whose prefill steps are captured; what they sample does not matter."""
    weights = random_weights(TINY, 256)
    model, sampler, state = Model(weights), ReferenceSampler(64, weights.output_ids), State(weights.shape, 64)
    prefills = PrefillGraphs(model, sampler, state, max_tokens=min(budget, 512))
    prefills._inputs = DeviceArray(stream, prefills._inputs)
    for size in prefills.sizes:
        for num_rows in prefills.rows:
            prefills._graphs[size, num_rows] = Graph(prefills._inputs, size)
            prefills._logits[size, num_rows] = torch.zeros(num_rows, len(weights.output_ids))
    engine = Engine(model, sampler, state, None, prefills)
    engine._readback = _Readback(64, CPU)
    return engine


def feed(stream, prompts, budget, max_tokens=1):
    """Run one turn of a session for each prompt; return what steps should be fed, and how many the host was ahead at most."""
    engine, expected, ahead = engine_of(stream, budget), [], 0
    replay = engine.prefills.replay

    def noted(slots, pieces, num_sampled):
        expected.append([token for piece in pieces for token in piece])
        return replay(slots, pieces, num_sampled)

    engine.prefills.replay = noted
    scheduler = Scheduler(num_slots=64, prefill_budget=budget, mixed=False, busy_budget=512)
    worker = EngineLoop(engine, scheduler, tokenizer_for(256), lambda batch: None, sessions=Memory())
    waiting = list(enumerate(prompts))
    while waiting or worker._active or worker._flight:
        if waiting:
            number, prompt = waiting.pop(0)
            request = Request(
                id=f"{number}", prompts=[prompt], sampling=GREEDY, max_tokens=max_tokens, session=Session(name=f"{number}")
            )
            worker.submit(request, b"test")
        worker.step()
        ahead = max(ahead, len(expected) - len(stream.fed))
    stream.run(len(stream.queue))
    return expected, ahead


@pytest.mark.parametrize(
    ("budget", "lengths", "max_tokens"),
    [(512, [4500], 1), (64, [1000], 0), (4096, [200 + 37 * i for i in range(8)] * 3, 0)],
)
def test_prompts_reach_the_device_whole(stream, budget, lengths, max_tokens):
    """A long prompt alone, and turns of sessions that are only fed: no step samples anything, so nobody reads ids."""
    prompts = [[(i * 7919 + i // 255 + number) % 255 + 1 for i in range(length)] for number, length in enumerate(lengths)]
    expected, ahead = feed(stream, prompts, budget, max_tokens)
    assert len(expected) > 2 * BUFFERS
    assert [fed[: len(tokens)] for fed, tokens in zip(stream.fed, expected, strict=True)] == expected
    assert ahead <= 2, "who comes now waits behind that many steps"


def test_decode_steps_get_their_slots(stream):
    weights = random_weights(TINY, 256)
    graphs = DecodeGraphs(Model(weights), ReferenceSampler(8, weights.output_ids), State(weights.shape, 8), [4, 8])
    graphs._slots = DeviceArray(stream, graphs._slots)
    for size in graphs.sizes:
        graphs._graphs[size] = Graph(graphs._slots, size)
        graphs._logits[size] = torch.zeros(size, len(weights.output_ids))
    steps = [[(i + j) % 8 for j in range(1 + i * 3 % 8)] for i in range(4 * BUFFERS)]
    for slots in steps:
        graphs.replay(slots)
    stream.run(len(stream.queue))
    sizes = [4 if len(slots) <= 4 else 8 for slots in steps]
    assert stream.fed == [slots + [-1] * (size - len(slots)) for slots, size in zip(steps, sizes, strict=True)]


class AsCaptured:
    """Decode steps as graphs run them: over slots, whoever has them."""

    def __init__(self, engine):
        self.engine = engine
        self.num_replays = 0

    def replay(self, slots, num_sampled=None):
        engine, self.num_replays = self.engine, self.num_replays + 1
        rows = PackedRows(slots, [1] * len(slots))
        logits = engine.model.forward(None, rows, engine.state)
        sampled = engine.sampler.sample(logits[:num_sampled], rows.slot_tensor[:num_sampled], slots[:num_sampled])
        engine.state.last_ids[rows.slot_tensor[:num_sampled]] = sampled.ids
        return sampled, logits


def test_captured_steps_that_come_again_are_fed_as_if_they_were_put_together():
    """Rows come and end while others go on; nothing is put together where the rows are those of the step before."""
    texts, rest = [], []
    for captured in (False, True):
        harness = Harness(slots=6, mixed=False)
        engine, events, again = harness.engine, [], []
        if captured:
            engine.graphs = AsCaptured(engine)
            engine._way = engine._way._replace(graphs=engine.graphs)
            plain = engine._replay_steady
            engine._replay_steady = lambda steady, plain=plain, again=again: (again.append(steady), plain(steady))[1]
        deliver = harness.deliver
        harness.worker.deliver = lambda batch, deliver=deliver, events=events: (events.extend(batch[b"test"]), deliver(batch))
        for number, (count, length) in enumerate([(3, 30), (1, 9), (1, 50), (2, 17), (1, 40)]):
            prompts = [[number * 16 + i + 1, 7, 9] for i in range(count)]
            harness.submit(f"{number}", prompts, max_tokens=length, chunk_size=1 + number % 3, loop="continuous")
            for _ in range(8):
                harness.worker.step()
        harness.run()
        assert not harness.failures
        texts.append({name: dict(rows) for name, rows in harness.texts.items()})
        alone = [event for event in events if event.request_id in "124" and event.deltas and not event.finishes]
        assert alone
        assert all(type(event) is Text for event in alone), "one row's text is told as such"
        rest = again
    assert texts[0] == texts[1]
    assert len(rest) == engine.graphs.num_replays
    assert 3 < len({id(steady) for steady in rest}) < len(rest) / 2


@pytest.mark.parametrize(
    ("launching", "launched", "replayed", "fewest"),
    [
        (2.0, 2.1, 1.5, 0),  # the host is too slow: for fewer tokens too
        (5.0, 7.3, 6.7, 940),  # so many take 6.7 ms when they are launched
        (5.0, 26.3, 26.1, 1025),  # never
    ],
)
def test_a_long_step_is_filled_up_while_that_is_faster_than_launching_it(stream, launching, launched, replayed, fewest):
    assert fewest_tokens(1024, launching, launched, replayed) == fewest
    prefills = engine_of(stream, 512).prefills
    prefills.sizes.append(1024)
    prefills._fewest = {(1024, 1): fewest}
    assert prefills.fits(512, 1)
    assert all(prefills.fits(n, 1) == (fewest <= n <= 1024) for n in (513, 939, 940, 1024, 1025))
    assert prefills.fits(600, 2)


class Clock:
    """A card that captures: the host launches a step in `launching` milliseconds, which runs for so many a token.

    runs  how often steps of so many tokens and rows were launched before they were captured
    """

    def __init__(self, monkeypatch, launching, per_token):
        self.launching, self.per_token = launching, per_token
        self.now = self.ends = 0.0
        self.capturing = False
        self.runs = Counter()
        self.fed = self.replayed = ()
        for name, value in {
            "Stream": lambda device=None: self, "current_stream": lambda device=None: self, "stream": nullcontext,
            "graph": self.graph, "graph_pool_handle": lambda: None, "CUDAGraph": SimpleNamespace,
            "Event": SimpleNamespace,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(prefill_graphs, "time", SimpleNamespace(perf_counter=self.seconds, monotonic=self.seconds))
        monkeypatch.setattr(prefill_graphs, "fastest_replay", self.replay)
        feed = PrefillGraphs._feed
        monkeypatch.setattr(PrefillGraphs, "_feed", lambda prefills, *size: (feed(prefills, *size), setattr(self, "fed", size)))
        monkeypatch.setattr(PrefillGraphs, "_step", lambda prefills, *size: self.step(size))

    def seconds(self):
        return self.now / 1e3

    def synchronize(self):
        self.now = max(self.now, self.ends)

    def wait_stream(self, stream):
        pass

    @contextmanager
    def graph(self, graph, pool, stream):
        self.synchronize()
        self.capturing = graph
        yield
        self.capturing = None

    def step(self, size):
        if self.capturing:
            self.capturing.size = size
            return torch.zeros(1)
        self.runs[size] += 1
        begins, self.now = max(self.now, self.ends), self.now + self.launching
        self.ends = max(begins + size[0] * self.per_token, self.now)
        return None

    def replay(self, graph, rounds):
        assert self.fed == graph.size, "a graph reads what was fed for one of its size"
        self.replayed += (graph.size,)
        return graph.size[0] * self.per_token


def captured_on(clock, max_tokens, slots=64):
    weights = random_weights(TINY, 256)
    sampler, state = ReferenceSampler(slots, weights.output_ids), State(weights.shape, slots)
    prefills = PrefillGraphs(Model(weights), sampler, state, max_tokens=max_tokens)
    prefills.capture()
    return prefills


@pytest.mark.parametrize(("max_tokens", "timed"), [(4096, [32, 256, 512]), (64, [32, 64]), (32, [32]), (16, []), (8, [])])
@pytest.mark.parametrize("slots", [1, 64])
def test_the_times_of_a_few_captured_steps_are_kept(monkeypatch, max_tokens, timed, slots):
    prefills = captured_on(Clock(monkeypatch, 2.0, 0.025), max_tokens, slots)
    assert sorted(prefills.times) == timed
    assert prefills.times == {size: pytest.approx(0.025 * size) for size in timed}


@pytest.mark.parametrize(
    ("launching", "per_token", "kept"),
    [
        (12.9, 0.05, 0),  # a graph of 640 tokens, which take 32, gains nothing
        (40.0, 0.05, 2),  # 896 take 44.8
        (10.0, 0.0125, 2),
        (1000.0, 0.05, len(LONG)),
    ],
)
def test_long_steps_are_captured_as_far_as_one_row_gains_by_it(monkeypatch, launching, per_token, kept):
    clock = Clock(monkeypatch, launching, per_token)
    prefills = captured_on(clock, 4096)
    assert prefills.sizes == [*TOKENS, *LONG[:kept]]
    assert set(prefills._graphs) == {(size, num_rows) for size in prefills.sizes for num_rows in (1, 32)}
    assert all(prefills.fits(size, num_rows) for size in prefills.sizes for num_rows in (1, 32))
    measured = {(size, 1): 2 if per_token == 0.05 else 3 for size in LONG[: kept + 1]}
    others = {(size, num_rows): 1 for size, num_rows in prefills._graphs if (size, num_rows) not in measured}
    assert clock.runs == measured | others, "every kernel has run before it is captured"
