"""What the stages of a pipeline launch and copy, without a card: launches are noted, and streams run in any order."""

import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from kernel_recorder import make_launcher

from rwkv_batch.config import Config
from rwkv_batch.engine.decode_graphs import DecodeGraphs
from rwkv_batch.engine.pipeline import build, costs, hops
from rwkv_batch.engine.pipeline.build import Pipeline
from rwkv_batch.engine.pipeline.hops import Hop, IdRelay
from rwkv_batch.engine.pipeline.split import Cost
from rwkv_batch.engine.prefill_graphs import PrefillGraphs
from rwkv_batch.kernels import self_check
from rwkv_batch.kernels.autotune import Autotuner
from rwkv_batch.kernels.ops import KernelOps
from rwkv_batch.model.packed_rows import CapturedRows, PackedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from sampling.reference import ReferenceSampler

CPU = torch.device("cpu")


class Sampler(ReferenceSampler):
    """One that could be captured."""

    def launch(self, logits, slots, *, out_ids=None, out_finite=None):
        pass

    def report_logprobs(self, sampled, logits, slots, needs):
        return sampled


@pytest.fixture
def card(monkeypatch):
    """Two stages on a card that notes what is launched: (engine, notes, the weights)."""
    launcher, recorder = make_launcher(monkeypatch, content=False)
    weights = self_check.random_weights(CPU)
    monkeypatch.setattr(build, "Launcher", lambda library, device: launcher)
    monkeypatch.setattr(build.compiler, "library_like", lambda like, index: launcher.library)
    monkeypatch.setattr(build.self_check, "failing", lambda *args, **more: frozenset())
    monkeypatch.setattr(build, "make_sampler", lambda name, slots, ids, device, *args, **more: Sampler(slots, ids, device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(DecodeGraphs, "__init__", lambda self, model, sampler, state, sizes: vars(self).update(
        model=model, sizes=sizes, sampler=sampler))  # fmt: skip
    monkeypatch.setattr(DecodeGraphs, "capture", lambda self: None)
    monkeypatch.setattr(
        PrefillGraphs, "__init__", lambda self, model, sampler, state, max_tokens: vars(self).update(sizes=[16])
    )
    monkeypatch.setattr(PrefillGraphs, "capture", lambda self: None)
    monkeypatch.setattr(costs, "measure", lambda *args: None)
    tuned = []
    monkeypatch.setattr(Autotuner, "tune", lambda self, sizes: (tuned.append((self.products, sizes)), self.decode_step(3)))
    pipeline = Pipeline.over([CPU, CPU], Config(), weights.shape, weights.dtype)
    options = {"max_tokens": 64, "library": launcher.library, "wkv_dtype": torch.float16}
    engine = pipeline.build_engine(Config(), weights, 32, **options)
    return SimpleNamespace(engine=engine, recorder=recorder, weights=weights, launcher=launcher, tuned=tuned)


def test_stages_launch_what_one_device_does(card):
    whole = Model(card.weights, KernelOps(card.weights, card.launcher, max_tokens=64, max_rows=32))
    state = State(card.weights.shape, 32, shift_dtype=torch.float16, wkv_dtype=torch.float16)
    slots = torch.arange(5)
    for tokens, rows in ((None, CapturedRows.decode(slots)), (torch.ones(9, dtype=torch.int64), PackedRows([3, 1], [8, 1]))):
        card.recorder.clear()
        whole.forward(tokens, rows, state)
        expected = [note[0] for note in card.recorder.take()]
        found = []
        for stage in card.engine.model.stages:
            stage.model.forward(tokens, rows, stage.state)
            found.append([note[0] for note in card.recorder.take()])
        assert [name for names in found for name in names] == expected
        assert all(found)


def test_each_stage_has_its_tables_and_its_way_in_and_out(card):
    first, last = card.engine.model.stages
    assert first.model.weights.embedding is card.weights.embedding
    assert last.model.weights.head is card.weights.head
    assert max(len(last.model.weights.embedding), len(first.model.weights.head.values)) <= 8
    assert [len(stage.model.ops.buffers.logits) >= 32 for stage in (first, last)] == [True, True]
    x, v_first = last.model.ops.way_in(7)
    entered = last.model.ops.enter(7, CapturedRows.decode(torch.arange(7)))
    assert [t.data_ptr() for t in entered] == [x.data_ptr(), v_first.data_ptr()]
    assert (x.dtype, v_first.dtype) == (torch.float32, torch.float16)
    first.model.ops.begin(7)
    assert [t.data_ptr() for t in first.model.ops.way_out(5)] == [
        getattr(first.model.ops._now, name).data_ptr() for name in ("x", "y", "v_first")
    ]
    assert ["head" in products for products, _ in card.tuned] == [True, False], "the last one comes first"
    assert all(stage.graphs.sizes[-1] == 16 + Config().mrssmax - 1 for stage in (first, last))


@pytest.mark.parametrize("names", [("a", "a"), ("a", "b"), ("a", "b", "a")])
def test_costs_are_told_from_times_of_stages(names):
    """A layer takes 2 on "a" and 3 on "b", the head 4."""
    layer, counts = {"a": 2.0, "b": 3.0}, [5, 4, 3][: len(names)]
    times = [layer[name] * count for name, count in zip(names, counts, strict=True)]
    times[-1] += 4.0
    found = costs._told_by(times, counts, names, Cost(3.0, 4.0))
    assert found == pytest.approx({f"layer {name}": layer[name] for name in names} | {f"head {names[-1]}": 4.0})


# --- streams that run in any order ------------------------------------------------------------------------------------------


class World:
    """Streams of two devices, each a queue of work; what may go on does so in random order."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.queues = {}
        self.current = {}

    def put(self, stream, ready, work):
        self.queues.setdefault(stream, []).append((ready, work))

    def run(self, steps=None):
        while steps is None or steps > 0:
            able = [queue for queue in self.queues.values() if queue and queue[0][0]()]
            if not able:
                assert steps is not None or not any(self.queues.values()), "everybody waits"
                return
            self.rng.choice(able).pop(0)[1]()
            steps = steps if steps is None else steps - 1


class Stream:
    def __init__(self, world, device):
        self.world, self.device = world, device

    def wait_event(self, event):
        wanted = event.recorded
        self.world.put(self, lambda: event.done >= wanted, lambda: None)


class Event:
    def __init__(self):
        self.recorded = self.done = 0

    def record(self, stream):
        self.recorded += 1
        number = self.recorded
        stream.world.put(stream, lambda: True, lambda: setattr(self, "done", number))


class Array:
    """A tensor of a device: what writes it does so when its stream comes to it."""

    def __init__(self, world, device, values):
        self.world, self.device, self.values = world, device, values

    def __getattr__(self, name):
        return getattr(self.values, name)

    def __getitem__(self, where):
        return Array(self.world, self.device, self.values[where])

    def __len__(self):
        return len(self.values)

    def view(self, *args):
        return Array(self.world, self.device, self.values.view(*args))

    def copy_(self, source, non_blocking=False):
        self.world.put(self.world.current[source.device], lambda: True, lambda: self.values.copy_(source.values))


@pytest.fixture
def world(monkeypatch, request):
    world = World(request.param)

    @contextmanager
    def inside(stream):
        before = world.current[stream.device]
        world.current[stream.device] = stream
        yield
        world.current[stream.device] = before

    def zeros(size, dtype, device):
        return Array(world, device, torch.zeros(size, dtype=dtype))

    def add(x, y, out):
        world.put(world.current[x.device], lambda: True, lambda: torch.add(x.values, y.values, out=out.values))

    cuda = SimpleNamespace(
        Stream=lambda device: Stream(world, device), Event=Event, stream=inside, current_stream=lambda d: world.current[d]
    )
    fake = SimpleNamespace(
        cuda=cuda, zeros=zeros, add=add, **{name: getattr(torch, name) for name in ("uint8", "float32", "int64")}
    )
    monkeypatch.setattr(hops, "torch", fake)
    return world


@pytest.mark.parametrize("world", range(12), indirect=True)
@pytest.mark.parametrize("apart", [True, False])
def test_steps_find_what_was_sent_to_them_in_any_order_of_the_streams(world, apart):
    """Two stages, whose arrays are those of the next step at once, and ids that go back; on two cards, or on one."""
    first, second = torch.device("cuda", 0), torch.device("cuda", int(apart))
    main = {0: Stream(world, first), 1: Stream(world, second)}
    world.current = {first: main[0], second: main[1]}
    hop = Hop(first, second, 4, 2, torch.float16)
    ids = [Array(world, device, torch.zeros(3, dtype=torch.int64)) for device in (second, first)]
    relay = IdRelay(*ids, num_places=4)
    arrays = [
        [Array(world, device, torch.zeros(4, 2, dtype=dtype)) for dtype in (torch.float32, torch.float16, torch.float16)]
        for device in (first, second)
    ]
    fed, arrived = [], []
    for step in range(40):
        slot, rows = step % 3, 1 + step % 4
        world.current[first] = main[0]
        if step >= 3:
            relay.receive([slot])
        x, y, v = (array[:rows] for array in arrays[0])

        def compute(step=step, slot=slot, own=(x, y, v)):
            fed.append(int(ids[1].values[slot]))
            for number, array in enumerate(own):
                array.values.fill_(100 * number + step)

        world.put(main[0], lambda: True, compute)
        hop.send(x, y, v)
        world.current[second] = main[1]
        x, _, v = (array[:rows] for array in arrays[1])
        hop.receive(x, v)

        def draw(step=step, slot=slot, own=(x, v)):
            arrived.append([array.values.flatten().tolist() for array in own])
            ids[0].values[slot] = step

        world.put(main[1], lambda: True, draw)
        relay.send([slot])
        world.run(world.rng.choice((0, 0, 0, 5, 40)))
    world.run()
    assert fed[3:] == list(range(37)), "what was sampled in its slot before"
    counts = [2 * (1 + step % 4) for step in range(40)]
    assert arrived == [[[100.0 + 2 * step] * n, [200.0 + step] * n] for step, n in enumerate(counts)]
