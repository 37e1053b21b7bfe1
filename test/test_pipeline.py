"""An engine in stages says what one on a single device says: `--pp-devices`, with CPUs in the cards' place."""

import itertools
import queue
import random
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import SHAPES, TINY, random_tensors, random_weights
from rwkv6_models import random_tensors6
from test_grammar_masks import PERSON, GrammarHarness
from test_mixed_states import PROMPT, Mixed
from test_sessions import SessionHarness
from test_worker import GREEDY, Harness

from rwkv_batch.config import Config
from rwkv_batch.engine import build
from rwkv_batch.engine.memory import MIB
from rwkv_batch.engine.pipeline.build import Pipeline
from rwkv_batch.engine.pipeline.hops import Hop, IdRelay
from rwkv_batch.engine.pipeline.split import Cost, estimated, split
from rwkv_batch.engine.pipeline.state import StagedSnapshot
from rwkv_batch.errors import UsageError
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.quantized import PLAIN
from rwkv_batch.model.state import Snapshot
from rwkv_batch.model.tensor_reader import TensorReader
from rwkv_batch.model.weights import ModelShape
from rwkv_batch.request import Request
from rwkv_batch.scheduling.prefix_cache import PrefixCache
from rwkv_batch.session_messages import Export, Fork, Import
from rwkv_batch.text.grammar import of_schema
from sampling.params import SamplingParams

CPU = torch.device("cpu")
THREE = SHAPES["wide ranks"]  # layers
SEEDED = SamplingParams(temperature=1, top_p=0.9, seed=5, alpha_presence=0.3, alpha_frequency=0.2, ignore_eos=True)


def prompts_of(rng, count, longest=200):
    lengths = [rng.choice((1, 2, 31, 32, 33, rng.randrange(1, longest))) for _ in range(count)]
    return [[rng.randrange(1, 256) for _ in range(length)] for length in lengths]


class Watched(Harness):
    """Notes how many steps are under way, and that no row has two that are not read when it is in a third."""

    def __init__(self, **fields):
        super().__init__(**fields)
        self.most = 0
        self.unread = Counter()
        submit, read = self.engine.submit, self.engine.read

        def submitting(plan):
            step = submit(plan)
            self.unread.update(step.sequences)
            assert max(self.unread.values(), default=0) <= 2
            self.most = max(self.most, len(self.worker._flight._steps) + 1)
            return step

        def reading(step):
            self.unread.subtract(step.sequences)
            return read(step)

        self.engine.submit, self.engine.read = submitting, reading


@pytest.mark.parametrize(
    ("stages", "shape", "mixed"),
    [(2, TINY, True), (3, THREE, False), pytest.param(2, TINY, False, marks=pytest.mark.long)],
)
def test_tokens_are_those_of_one_device(stages, shape, mixed):
    """More rows than slots, greedy and drawn, prompts of any length in chunks, requests that come while others run."""
    rng = random.Random(f"{stages}{mixed}")
    prompts = prompts_of(rng, 10, longest=150)
    texts = []
    for count in (1, stages):
        harness = Watched(slots=6, budget=64, mixed=mixed, shape=shape, stages=count)
        for number, params in ((0, GREEDY), (4, SEEDED), (8, GREEDY)):
            harness.submit(f"{number}", prompts[number : number + 4], sampling=params, max_tokens=10, loop="continuous")
            for _ in range(3):
                harness.worker.step()
        harness.run()
        texts.append(harness.texts)
        assert harness.most == count + 1, "steps under way when one is submitted"
        assert harness.scheduler.num_free == 6
    assert texts[0] == texts[1]
    assert sum(len(rows) for rows in texts[0].values()) == 10


def test_a_row_alone_and_a_long_prompt():
    """Fewer rows than stages; a prompt in many chunks, several of them under way."""
    prompt = prompts_of(random.Random(1), 1)[0] + [7] * 500
    one, three = Watched(shape=THREE, mixed=False), Watched(shape=THREE, mixed=False, stages=3, budget=64)
    for harness in (one, three):
        harness.submit("r", [prompt], max_tokens=9)
        harness.run()
    assert three.texts == one.texts
    assert three.most == 4
    assert three.engine.state.elapsed[0] >= len(prompt)


def test_rows_that_are_cancelled_leave_no_trace():
    rng = random.Random(2)
    prompts = prompts_of(rng, 6, longest=70)
    whole = Harness(shape=THREE)
    whole.submit("r", prompts, max_tokens=10, loop="continuous")
    whole.run()
    harness = Harness(shape=THREE, stages=3, mixed=False, slots=5)
    for i, prompt in enumerate(prompts):
        harness.submit(f"{i}", [prompt], max_tokens=10)
        harness.submit(f"gone {i}", [prompt[::-1], [3, 4]], max_tokens=50)
        for _ in range(rng.randrange(1, 7)):
            harness.worker.step()
        harness.worker.cancel(f"gone {i}")
    harness.run()
    assert [harness.texts[f"{i}"][0] for i in range(6)] == [whole.texts["r"][i] for i in range(6)]
    assert harness.scheduler.num_free == 5
    assert not harness.failures


def ordered(harness, action):
    """What comes of an order, for which the engine may have to compute a state."""
    found = queue.SimpleQueue()
    harness.sessions.execute(action, found.put)
    until = time.monotonic() + 60
    while found.empty() and time.monotonic() < until:
        harness.run()
        time.sleep(0.001)
    return found.get(timeout=1)


def test_a_session_moves_between_one_device_and_several(tmp_path):
    """Every turn on another engine, on one file: the texts of one engine, and states of the same bytes."""
    turns = [[5, 6, 7] * 20, [9] * 40, [11, 12], [13] * 33]
    with SessionHarness(tmp_path / "one.db", vocab=256, shape=THREE, mixed=False) as harness:
        expected = [harness.turn("s", turn, max_tokens=17)[0] for turn in turns]
        assert ordered(harness, Export(name="s", path=str(tmp_path / "one.state"))).sessions
    found = []
    for number, (turn, stages) in enumerate(zip(turns, (3, 1, 2, 3), strict=True)):
        with SessionHarness(tmp_path / "many.db", vocab=256, shape=THREE, mixed=False, stages=stages) as harness:
            found.append(harness.turn("s", turn, id=f"{number}", max_tokens=17)[0])
            if number == 3:
                assert ordered(harness, Export(name="s", path=str(tmp_path / "many.state"))).sessions
                assert ordered(harness, Import(name="t", path=str(tmp_path / "one.state"))).sessions
                assert ordered(harness, Fork(name="t", copies=["u", "v"])).sessions
                again = [harness.turn(name, [17, 18], max_tokens=6)[0] for name in ("s", "t", "u", "v")]
    assert found == expected
    assert (tmp_path / "many.state").read_bytes() == (tmp_path / "one.state").read_bytes()
    assert len(set(again)) == 1


def test_prefixes_are_shared():
    prompt = [(i * 7 + i // 5) % 255 + 1 for i in range(200)]
    harness = Harness(shape=THREE, slots=16, budget=64, mixed=False, stages=3)
    harness.scheduler.prefixes = PrefixCache(2**30)
    for name in ("a", "b"):
        harness.submit(name, [prompt] * 4, max_tokens=8)
        harness.run()
    assert len({*harness.texts["a"].values(), *harness.texts["b"].values()}) == 1
    assert harness.finishes["b"][0].cached_tokens >= 128
    plain = Harness(shape=THREE)
    plain.submit("r", [prompt], max_tokens=8)
    plain.run()
    assert harness.texts["a"][0] == plain.texts["r"][0]


def test_rows_with_a_grammar_beside_rows_without():
    """They sit out steps until their masks are made, and say what they say on one device; the others too."""
    texts = []
    for stages in (1, 2):
        harness = GrammarHarness(stages=stages)
        harness.submit("plain", [[5, 6], [7, 8, 9]], sampling=SEEDED, max_tokens=25)
        texts.append((*harness.say(of_schema(PERSON, "response_format"), copies=3), harness.texts["plain"]))
    assert texts[0][1] == ["stop"] * 3
    assert texts[0] == texts[1]


def test_tuned_states_and_their_mixes(tmp_path):
    texts = []
    for name, stages in (("one", 1), ("two", 2)):
        folder = tmp_path / name
        folder.mkdir()
        harness = Mixed(folder, stages=stages)
        texts.append([harness.text(PROMPT, state=harness.key("1")), harness.mixed_text(PROMPT, [0.3, 0.4, 0.03])])
    assert texts[0] == texts[1]


def test_snapshots_are_cut_and_joined():
    weights = random_weights(THREE, 256)
    harness = Harness(shape=THREE, stages=2)
    state, copies, shape = harness.engine.state, harness.copies, weights.shape
    whole = Snapshot(torch.randn(3, 2, shape.width), torch.randn(3, shape.num_heads, 64, 64), 7)
    state.put_each([2, 4], [whole, whole])
    state.put_many([1, 3], whole)
    for taken in state.take_many([1, 2, 3, 4]):
        assert isinstance(taken, StagedSnapshot)
        assert [part.wkv.shape[0] for part in taken.parts] == [len(stage.layers) for stage in harness.engine.model.stages]
        joined = copies.to_host(taken, copies.mark())
        assert torch.equal(joined.shift, whole.shift)
        assert torch.equal(joined.wkv, whole.wkv)
        assert (joined.elapsed, taken.num_bytes) == (7, whole.num_bytes)
        assert copies.is_finite(taken, None)
    state.put(0, taken)
    assert torch.equal(state.take(0).wkv, whole.wkv)
    state.clear([0])
    assert not state.take(0).wkv.any()
    taken.parts[1].wkv[0, 0, 0, 0] = float("nan")
    assert not copies.is_finite(taken, None)
    with pytest.raises(ValueError, match="this model needs"):
        state.put(0, Snapshot(torch.zeros(4, 2, shape.width), torch.zeros(4, shape.num_heads, 64, 64), 0))


def test_the_ids_of_a_step_reach_the_first_stage_once_and_in_order():
    source, target = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    relay = IdRelay(source, target, num_places=2)
    relay.receive([0, 1])
    for ids, slots in (([1, 0, 0, 0], [0]), ([1, 2, 0, 0], [1]), ([1, 2, 3, 0], [2])):
        source.copy_(torch.tensor(ids))
        relay.send(slots)
    relay.receive([0])  # whose message has made room for later ones
    assert target[0] == 1
    relay.receive([2])
    assert target.tolist() == [1, 2, 3, 0]
    target[3] = 9
    relay.receive([1, 3])
    assert target.tolist() == [1, 2, 3, 9], "nothing new for these"


def test_a_hop_carries_steps_of_any_length_in_order():
    hop = Hop(CPU, CPU, max_tokens=5, width=64, dtype=torch.float16)
    for num_tokens in (5, 1, 3, 5):
        x, y, v = torch.randn(num_tokens, 64), torch.randn(num_tokens, 64).half(), torch.randn(num_tokens, 64).half()
        hop.send(x, y, v)
        got_x, got_v = torch.empty(num_tokens, 64), torch.empty(num_tokens, 64, dtype=torch.float16)
        hop.receive(got_x, got_v)
        assert torch.equal(got_x, x + y)
        assert torch.equal(got_v, v)


@settings(max_examples=40)
@given(st.integers(1, 9), st.lists(st.floats(0.2, 5), min_size=1, max_size=3), st.floats(0, 6))
def test_the_split_is_the_best_there_is(num_layers, layer_costs, head):
    costs = [Cost(layer, head) for layer in layer_costs]
    if len(costs) > num_layers:
        with pytest.raises(UsageError, match="each needs one"):
            split(num_layers, costs)
        return

    def longest(counts):
        return max(n * cost.layer + (i == len(costs) - 1) * head for i, (n, cost) in enumerate(zip(counts, costs, strict=True)))

    ranges = split(num_layers, costs)
    assert [i for layers in ranges for i in layers] == list(range(num_layers))
    assert all(ranges)
    ways = [c for c in itertools.product(range(1, num_layers + 1), repeat=len(costs)) if sum(c) == num_layers]
    assert longest([len(layers) for layers in ranges]) == pytest.approx(min(map(longest, ways)))


def test_the_head_counts_as_layers():
    """7.2B: it weighs as much as a layer and a third, and so does its stage."""
    shape = ModelShape(32, 4096, 16384, 65536, 128, 128, 96, 480)
    cost = estimated(shape, torch.float16)
    assert 1.2 < cost.head / cost.layer < 1.4
    assert [len(layers) for layers in split(32, [cost] * 2)] == [17, 15]
    assert [len(layers) for layers in split(32, [cost] * 4)] == [9, 8, 8, 7]


def test_each_layer_goes_straight_to_its_device(monkeypatch):
    placed, taken = [], {}
    place_on, pop = TensorReader.place_on, TensorReader._pop
    monkeypatch.setattr(TensorReader, "place_on", lambda self, device: (placed.append(device), place_on(self, device)))

    def popped(self, key):
        taken[key] = placed[-1] if placed else "first"
        return pop(self, key)

    monkeypatch.setattr(TensorReader, "_pop", popped)
    devices = [torch.device("cpu"), torch.device("cpu"), torch.device("cpu", 0)]  # the last one has a name of its own
    weights_module.from_tensors(dict(random_tensors(THREE, 256)), layer_devices=devices, progress=False)
    assert taken["emb.weight"] == "first"
    assert {str(taken[key]) for key in taken if key.startswith("blocks.1.")} == {"cpu"}
    assert {str(taken[key]) for key in taken if key.startswith(("blocks.2.", "head", "ln_out"))} == {"cpu:0"}


def test_memory_is_planned_for_each_stage(monkeypatch):
    shape, fp16 = ModelShape(32, 4096, 16384, 65536, 128, 128, 96, 480), torch.float16
    config = Config(prefix_cache_mib=512, l1_sessions=16)
    pipeline = Pipeline.over([torch.device("cuda", i) for i in range(2)], config, shape, fp16)

    def plan_of(config, shape, device):
        return build.plan_memory(config, shape, device, fp16, fp16, 1024)

    plan, whole = pipeline.plan(plan_of), plan_of(config, shape, torch.device("cuda"))
    assert sum(stage.weights for stage in plan.stages) == whole.weights
    assert plan.state == whole.state
    assert sum(stage.state for stage in plan.stages) == whole.state
    assert plan.stages[0].sampling == 0 < plan.stages[1].sampling == whole.sampling
    free = {0: 24 * 2**30, 1: 16 * 2**30}
    monkeypatch.setattr("rwkv_batch.engine.memory.free_memory", lambda device: free[device.index])
    slots = plan.slots(0, 10_000, "m")
    assert slots == plan.stages[1].slots(0, 10_000, "m") < plan.stages[0].slots(0, 10_000, "m")
    assert plan.session_bytes(slots) // MIB > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"pp_devices": "0,cpu"}, "pp_devices"), ({"pp_devices": "0,0"}, "pp_devices"), ({"pp_devices": "x"}, "pp_devices"),
        ({"pp_devices": "cpu,cpu", "devices": "cpu,cpu"}, "devices"), ({"pp_devices": "cpu,cpu", "tp": 2}, "tp"),
        ({"pp_devices": "cpu,cpu", "device": "cuda:1"}, "pp_devices"), ({"pp_devices": "0,1", "device": "cpu"}, "pp_devices"),
        ({"pp_devices": "cpu,cpu", "row_adapter": "a=b"}, "row_adapter"),
        ({"pp_devices": "cpu,cpu", "ops": "compile"}, "ops"),
    ],
)  # fmt: skip
def test_what_a_pipeline_does_not_do_is_refused_by_name(fields, param):
    with pytest.raises(UsageError) as refused:
        Config(**fields).resolved()
    assert refused.value.param == param


def test_another_architecture_is_refused():
    shape = weights_module.check_tensors(random_tensors6(), "six")
    with pytest.raises(UsageError, match="RWKV-7") as refused:
        Pipeline.of(Config(pp_devices="cpu,cpu"), shape, torch.float32, PLAIN, None)
    assert refused.value.param == "pp_devices"


def test_a_server_of_stages_is_put_together_from_settings(tmp_path):
    """More stages than layers, and cards that are not there, are refused."""
    torch.save(random_tensors(TINY, 256), tmp_path / "tiny.pth")
    chosen = {"model_path": str(tmp_path / "tiny.pth"), "slots": 4, "threads": 1, "state_db": ""}
    texts, infos = [], []
    for fields in ({"device": "cpu"}, {"pp_devices": "cpu,cpu"}):
        events = []
        loop = build.build_engine_loop(Config(**chosen, **fields).resolved(), events.append)
        loop.submit(Request(id="r", prompts=[[5, 6, 7]], sampling=GREEDY, max_tokens=6), b"test")
        while not any(event.finishes for batch in events for event in batch[b"test"]):
            loop.step()
        texts.append("".join(d.text for batch in events for event in batch[b"test"] for d in event.deltas))
        infos.append(loop.info)
    assert texts[0] == texts[1]
    assert [info.device for info in infos] == ["cpu", "cpu, cpu"]
    assert infos[0].fingerprint == infos[1].fingerprint
    with pytest.raises(UsageError, match="3 devices for 2 layers"):
        build.build_engine_loop(Config(**chosen, pp_devices="cpu,cpu,cpu").resolved(), lambda batch: None)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="sees no"):
            build.build_engine_loop(Config(**chosen, pp_devices="0,1").resolved(), lambda batch: None)
