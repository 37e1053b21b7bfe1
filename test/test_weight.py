"""A quantised model runs on every op as one with the matrices that its values and scales mean."""

from dataclasses import fields, replace

import pytest
import torch
from kernel_recorder import make_launcher
from models import TINY, random_weights

from rwkv_batch.kernels import self_check
from rwkv_batch.kernels.ops import KernelOps
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.model.weight import Weight
from rwkv_batch.model.weights import Layer, Weights


def quantised(weight: Weight, name: str = "int8") -> Weight:
    return Weight.quantised(weight.dense(), name)


def expanded(weight: Weight) -> Weight:
    return Weight(weight.dense(weight.scales.dtype))


def mapped(weights: Weights, change) -> Weights:
    """Return the model with every large matrix changed."""

    def layer_of(layer: Layer) -> Layer:
        values = {f.name: getattr(layer, f.name) for f in fields(layer)}
        return Layer(**{name: change(value) if isinstance(value, Weight) else value for name, value in values.items()})

    return replace(weights, layers=[layer_of(layer) for layer in weights.layers], head=change(weights.head))


def run(weights: Weights) -> torch.Tensor:
    """Return logits of a prefill and of a decode step."""
    model, state = Model(weights), State(weights.shape, 3)
    prompt = model.forward(torch.arange(7, 47), PackedRows([1], [40]), state)
    return torch.cat((prompt, model.forward(torch.tensor([5]), PackedRows([1], [1]), state)))


def test_a_plain_weight_is_its_tensor():
    values = torch.randn(3, 4, 5)
    weight = Weight(values)
    assert weight.dense() is values
    assert weight.dense(torch.float32) is values
    assert weight.part(1).dense().data_ptr() == values[1].data_ptr()
    assert weight.nbytes == values.nbytes


def test_reference_ops_run_quantised_matrices():
    plain = random_weights(TINY)
    small = mapped(plain, quantised)
    assert torch.equal(run(small), run(mapped(small, expanded)))
    expected = run(plain)
    assert 0 < (run(small) - expected).norm() < 2e-2 * expected.norm()
    matrices = [getattr(plain.layers[0], name) for name in ("rkv", "output", "ffn_key", "ffn_value")]
    assert sum(quantised(m).nbytes for m in matrices) < 0.3 * sum(m.nbytes for m in matrices)
    assert small.num_bytes < 0.6 * plain.num_bytes


@pytest.mark.parametrize("hopper", [True, False])
def test_kernels_are_prepared_from_quantised_matrices(monkeypatch, hopper):
    """What they read is what the scales say."""
    small = mapped(self_check.random_weights(torch.device("cpu")), quantised)
    launched = []
    for weights in (small, mapped(small, expanded)):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", torch.zeros)
            launcher, recorder = make_launcher(patch, hopper=hopper)
            model = Model(weights, KernelOps(weights, launcher, max_tokens=16, max_rows=16))
            state = State(weights.shape, 8, shift_dtype=torch.float16, wkv_dtype=torch.float16)
            model.forward(torch.arange(6), PackedRows([3, 0], [5, 1]), state)
            launched.append(recorder.take())
    assert launched[0] == launched[1]
