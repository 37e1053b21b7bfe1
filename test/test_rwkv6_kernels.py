"""RWKV-6 on kernels: on the emulated card against plain torch, what a captured step launches, and when there are none."""

import logging
from types import SimpleNamespace

import pytest
import torch
from emulated_card import launcher_for
from kernel_recorder import make_launcher
from rwkv6_models import SHAPES6, TINY6, random_tensors6

from rwkv_batch.config import Config
from rwkv_batch.engine import build as engine_build
from rwkv_batch.engine import memory
from rwkv_batch.errors import UsageError
from rwkv_batch.kernels import self_check as first_check
from rwkv_batch.kernels.rwkv6 import self_check
from rwkv_batch.kernels.rwkv6.autotune import Rwkv6Autotuner
from rwkv_batch.kernels.rwkv6.layer_kernels import Rwkv6LayerKernels
from rwkv_batch.kernels.rwkv6.needs import has_kernels, kernels_for
from rwkv_batch.kernels.rwkv6.ops import Rwkv6Buffers, Rwkv6HipOps, Rwkv6KernelOps
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.packed_rows import CapturedRows, PackedRows
from rwkv_batch.model.quantized import PLAIN, Quantisation
from rwkv_batch.model.rwkv6.forward import Model
from rwkv_batch.model.rwkv6.weights import Rwkv6Shape
from rwkv_batch.model.state import State

HALF = torch.float16
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("wavefront", "backwards"), [(64, False), *(pytest.param(32, back, marks=pytest.mark.long) for back in (False, True))]
)
def test_the_check_of_the_first_start_passes(card, monkeypatch, wavefront, backwards):
    card.be(wavefront, backwards=backwards)
    launcher = launcher_for(card, monkeypatch)
    assert self_check._agrees(launcher, HALF, ([1], [1, 2]), seed=0)
    monkeypatch.setattr(first_check, "_samples", lambda launcher: True)
    monkeypatch.setattr(first_check, "_fills", lambda *args: True)
    monkeypatch.setattr(first_check, "_captures", lambda *args: True)
    monkeypatch.setattr(self_check, "CASES", ([1],))
    monkeypatch.setattr(self_check, "agrees", lambda *args: False)
    assert first_check.failing(launcher, HALF, architecture="RWKV-6") == [first_check.RWKV6]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("decay", [2.0, pytest.param(8.0, marks=pytest.mark.long)])
@torch.inference_mode()
def test_a_checkpoint_gives_the_logits_of_plain_torch(card, monkeypatch, decay):
    """For prompts and single tokens by turns, beside a row that is none; decays of any strength."""
    card.be(64)
    weights = weights_module.from_tensors(dict(random_tensors6(decay=decay)), dtype=HALF)
    ops = Rwkv6HipOps(weights, launcher_for(card, monkeypatch), max_tokens=40, max_rows=4)
    plain, tested = Model(weights), Model(weights, ops, "kernels")
    states = [State(weights.shape, 4, shift_dtype=HALF) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    for slots, lengths in (([2, 0], [17, 1]), ([0, 2], [1, 1])):
        tokens, rows = torch.randint(1, 500, (sum(lengths),), generator=generator), PackedRows(slots, lengths)
        one, other = (model.forward(tokens, rows, state).float() for model, state in zip((plain, tested), states, strict=True))
        assert float((one - other).norm()) < 5e-3 * float(one.norm())
    before = [t.clone() for t in (states[1].wkv[:, [1, 3]], states[1].shift[:, :, [1, 3]])]
    states[1].last_ids[2] = states[0].last_ids[2] = 7
    captured = tested.forward(None, CapturedRows.decode(torch.tensor([-1, 2])), states[1])[1].float()
    expected = plain.forward(None, PackedRows([2], [1]), states[0])[0]
    assert float((captured - expected).norm()) < 5e-3 * float(expected.norm())
    for one, other in zip(before, (states[1].wkv[:, [1, 3]], states[1].shift[:, :, [1, 3]]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_all_of_the_check_in_fp32(card, monkeypatch):
    card.be(64)
    assert self_check.agrees(launcher_for(card, monkeypatch), torch.float32)


@torch.inference_mode()
def test_a_step_is_launches_alone(monkeypatch):
    """Fourteen a layer, on the same addresses whoever the rows are."""
    launcher, recorder = make_launcher(monkeypatch, content=False)
    weights = self_check.random_weights(CPU)
    ops = Rwkv6KernelOps(weights, launcher, max_tokens=64, max_rows=64)
    model, state = Model(weights, ops, "kernels"), State(weights.shape, 64, shift_dtype=HALF, wkv_dtype=HALF)
    slots = torch.arange(8)
    notes = []
    for first in (0, 8):
        slots.copy_(torch.arange(first, first + 8))
        recorder.clear()
        model.forward(None, CapturedRows.decode(slots), state)
        notes.append(recorder.take())
    assert notes[0] == notes[1]
    names = [note[0] for note in notes[0]]
    assert names.count("rwkv_wkv6") == names.count("rwkv_gate") == weights.shape.num_layers
    assert names.count("rwkv_thin_down") == names.count("rwkv_thin_up") == 2 * weights.shape.num_layers
    assert len(names) <= 1 + 15 * weights.shape.num_layers + 2


def test_each_product_is_tuned(monkeypatch, tmp_path):
    monkeypatch.setenv("RWKV_BATCH_KERNEL_CACHE", str(tmp_path))
    launcher, _ = make_launcher(monkeypatch)
    weights = self_check.random_weights(CPU)
    ops = Rwkv6KernelOps(weights, launcher, max_tokens=200, max_rows=64)
    model, state = Model(weights, ops, "kernels"), State(weights.shape, 64, shift_dtype=HALF, wkv_dtype=HALF)
    steps = lambda rows: model.forward(None, CapturedRows.decode(torch.arange(rows)), state)  # noqa: E731
    Rwkv6Autotuner(ops, steps).tune([1, 8, 160])
    assert {name for name, _ in ops._chosen} == {"rkvg", "output", "ffn_receptance", "ffn_key", "ffn_value", "head"}
    assert {size for _, size in ops._chosen} == {1, 8, 160}


def test_what_the_kernels_do_not_take_runs_in_plain_torch(caplog):
    shape = Rwkv6Shape(2, 128, 448, 512, rank_mix=32, rank_decay=64, head_size=64)
    assert has_kernels(shape, PLAIN)
    assert not has_kernels(shape, Quantisation("int8"))
    for change in ({"head_size": 8}, {"width": 96}, {"width": 8192}, {"ffn_width": 100}, {"rank_mix": 30}):
        assert not has_kernels(Rwkv6Shape(**{**vars(shape), **change}), PLAIN)
    taken, quant = object(), Quantisation("int8")
    assert kernels_for(taken, shape, PLAIN, "auto", "m.pth") is taken
    with caplog.at_level(logging.WARNING):
        assert kernels_for(taken, shape, quant, "auto", "m.pth") is None
    assert "WITHOUT KERNELS" in caplog.text
    with pytest.raises(UsageError, match=r"--ops kernels: m.pth: the kernels take RWKV-6"):
        kernels_for(taken, shape, quant, "kernels", "m.pth")


def test_the_memory_that_kernels_need_is_known_before(monkeypatch):
    launcher, _ = make_launcher(monkeypatch)
    weights = weights_module.from_tensors(dict(random_tensors6(TINY6)), dtype=HALF)
    ops = Rwkv6KernelOps(weights, launcher, max_tokens=70, max_rows=9)
    b = ops.buffers
    own = (*vars(b.all).values(), b.last, b.logits, b.active_mask, ops.thin._hidden)
    held = sum(tensor.nbytes for tensor in own)
    outputs = weights.head.shape[0]
    missing = 9 * 2 * (weights.shape.vocab_size - -(-outputs // 8) * 8)
    assert Rwkv6Buffers.num_bytes(weights.shape, max_tokens=70, max_rows=9) == held + missing
    layer = ops.prepared.layers[0]
    copies = sum(t.nbytes for t in (layer.mix_down, layer.mix_up, layer.decay_down, layer.decay_up))
    assert Rwkv6LayerKernels.num_bytes(weights.shape) == copies
    gpu = SimpleNamespace(type="cuda")
    plan = engine_build.plan_memory(Config(), weights.shape, gpu, HALF, HALF, 70)
    assert plan.buffers > memory.kernel_bytes(weights.shape, 70) > memory.OVERHEAD


def test_the_engine_takes_the_kernels_where_the_check_passes(card, monkeypatch, caplog):
    """And plain torch where it does not."""
    card.be(64)
    launcher_for(card, monkeypatch)
    weights = weights_module.from_tensors(dict(random_tensors6(SHAPES6["one layer"])), dtype=HALF)
    for graphs in (engine_build.DecodeGraphs, engine_build.PrefillGraphs):
        monkeypatch.setattr(graphs, "capture", lambda self: None)
        monkeypatch.setattr(f"{graphs.__module__}.Staging", lambda *args: None)
    for wrong, ops_type in (([], "kernels"), ([first_check.RWKV6], "kernels but RWKV-6")):
        monkeypatch.setattr(first_check, "failing", lambda *args, wrong=wrong, **named: wrong)
        engine = engine_build.build_engine(Config(), weights, 2, max_tokens=16, library=card.library, graph_sizes=[1, 2])
        assert engine.model.ops_name == ops_type
        assert isinstance(engine.model.ops, Rwkv6HipOps) is (not wrong)
