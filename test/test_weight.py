"""A quantised model runs on every op as one with the matrices that its values and scales mean."""

from dataclasses import fields, replace

import pytest
import torch
from models import TINY, random_weights

from rwkv_batch.model import reference_ops
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.quantized import FORMATS
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.model.weight import Weight
from rwkv_batch.model.weights import Layer, Weights


def quantised(weight: Weight, name: str = "int8") -> Weight:
    return Weight.quantised(weight.dense(), name, transposed=weight.transposed)


def expanded(weight: Weight) -> Weight:
    return Weight(weight.dense())


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


@pytest.mark.parametrize("name", FORMATS)
def test_reference_ops_run_quantised_matrices(name):
    plain = random_weights(TINY)
    small = mapped(plain, lambda weight: quantised(weight, name))
    expected, meant = run(plain), run(mapped(small, expanded))
    rounding = 1e-2 if name == "int8" else 1e-5  # a decode step takes bf16 times int8
    assert (run(small) - meant).norm() < rounding * meant.norm()
    assert 0 < (run(small) - expected).norm() < (2e-2 if name == "int8" else 0.3) * expected.norm()
    rounded = mapped(small, lambda weight: replace(weight, rounds_inputs=True))
    assert 1e-3 < (run(rounded) - meant).norm() / meant.norm() < 0.1
    matrices = [getattr(plain.layers[0], name) for name in ("rkv", "output", "ffn_key", "ffn_value")]
    assert sum(quantised(m, name).nbytes for m in matrices) < 0.3 * sum(m.nbytes for m in matrices)
    assert small.num_bytes < 0.6 * plain.num_bytes


def test_a_token_that_nothing_answers_to_gives_zeros():
    """No unit of the feed-forward half is active."""
    plain = random_weights(TINY).layers[0]
    layer = replace(plain, ffn_value=quantised(plain.ffn_value), ffn_key=Weight(-plain.ffn_key.values.abs()))
    assert not reference_ops.channel_mix(torch.ones(1, 1, 128), layer).any()
