"""The log beside the states: bit for bit what steps without one compute, whatever is done to slots in between."""

import random

import pytest
import torch

from rwkv_batch.engine.decode_graphs import DecodeGraphs
from rwkv_batch.engine.pipeline.stage import NoSampler
from rwkv_batch.engine.prefill_graphs import PrefillGraphs
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.ops import KernelOps
from rwkv_batch.kernels.self_check import random_weights
from rwkv_batch.kernels.states import log as log_module
from rwkv_batch.kernels.states.fill import StateFill
from rwkv_batch.kernels.states.log import WkvLog
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State

pytestmark = pytest.mark.gpu

DEVICE, HALF = torch.device("cuda", 0), torch.float16
SLOTS = 96


@pytest.fixture(scope="module")
def launcher():
    """The kernels."""
    from rwkv_batch.kernels.compiler import library

    torch.manual_seed(1)
    return Launcher(library(0), DEVICE)


def same(one, other):
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize(("heads", "rows"), [(1, 1), (5, 37), (12, 90), (64, 130)])
@torch.inference_mode()
def test_outputs_and_states_have_the_bits_of_the_kernel_without_a_log(launcher, heads, rows):
    assert log_module.agrees(launcher, heads, rows)


@torch.inference_mode()
def test_captured_steps_with_a_log_are_those_without_one(launcher, monkeypatch):
    """Decode steps of many rows and of few, prompts in graphs and launched, snapshots, forks and slots begun anew."""
    monkeypatch.setattr(log_module, "LEAST_HEADS", 24 * 6)
    weights = random_weights(DEVICE, num_layers=3, width=384)
    ops = KernelOps(weights, launcher, max_tokens=256, max_rows=SLOTS)
    model, rng, built = Model(weights, ops, "kernels"), random.Random(2), []
    for keeps in (False, True):
        options = {"shift_dtype": HALF, "wkv_dtype": HALF, "device": DEVICE, "fill": StateFill(launcher)}
        state = State(weights.shape, SLOTS, **options)
        if keeps:
            WkvLog.beside(state, ops)
        graphs = DecodeGraphs(model, NoSampler(), state, [4, 16, 24, 64, SLOTS])
        prefills = PrefillGraphs(model, NoSampler(), state, max_tokens=256)
        graphs.capture()
        prefills.capture()
        state.clear(range(SLOTS))
        state.last_ids.copy_(torch.arange(SLOTS) + 1)
        built.append((state, graphs, prefills))
    assert [state.logs(24) for state, *_ in built] == [False, True]
    assert not built[1][0].logs(23)
    kept = [[], []]

    def act(what, number, slots, other):
        state, graphs, prefills = built[number]
        match what:
            case "many" | "few":
                return graphs.replay(sorted(slots))[1]
            case "prompt":
                return prefills.replay(slots, [[7, 8, 9]] * len(slots), len(slots))[1] if prefills.fits(9, 3) else None
            case "eager":
                tokens = torch.arange(2 * len(slots), device=DEVICE)
                return model.forward(tokens, PackedRows(slots, [2] * len(slots), DEVICE), state)
            case "one eager":
                return model.forward(None, PackedRows(slots, [1] * len(slots), DEVICE), state)
            case "take":
                kept[number] += state.take_many(slots)
            case "fork":
                state.put_many(other, state.take(slots[0]))
            case "put" if kept[number]:
                state.put_each(slots, [kept[number][i % len(kept[number])] for i in slots])
            case "clear":
                state.clear(slots)
        return None

    counts = {"many": 24, "few": 3, "prompt": 3, "eager": 3, "one eager": 3, "take": 3, "fork": 1, "put": 3, "clear": 2}
    for turn in range(150):
        what = rng.choice([*counts, *["many"] * 8])
        count = rng.randint(counts[what], SLOTS) if what == "many" else counts[what]
        slots, other = rng.sample(range(SLOTS), count), rng.sample(range(SLOTS), 2)
        results = []
        for number in (0, 1):
            result = act(what, number, slots, other)
            results.append(None if result is None else result.clone())
        assert results[0] is None or same(*results), (turn, what)
    snapshots = [state.take_many(range(SLOTS)) + kept[i] for i, (state, *_) in enumerate(built)]
    for one, two in zip(*snapshots, strict=True):
        assert same(one.wkv, two.wkv)
        assert same(one.shift, two.shift)
        assert one.elapsed == two.elapsed
