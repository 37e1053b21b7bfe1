"""RWKV-6 on a GPU, in plain torch: against the same on the CPU, and through an engine as the server has it."""

import random

import pytest
import torch
from models import TINY, random_tensors
from rwkv6_models import TINY6, random_tensors6
from test_model import random_split, run
from test_rwkv6 import answer, looped, model_of

from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.state import State
from rwkv_batch.session_messages import Session

pytestmark = pytest.mark.gpu

GPU = "cuda:0"


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-3), (torch.float16, 0.05)])
def test_logits_equal_those_of_the_cpu_for_any_split(dtype, bound):
    rng = random.Random(4)
    tokens = [rng.randrange(512) for _ in range(130)]
    expected = run(model_of(random_tensors6()), tokens, [130])
    model = model_of(random_tensors6(), dtype=dtype, device=GPU)
    for lengths in ([130], random_split(rng, 130)):
        state, found, start = State(model.weights.shape, 3, device=GPU), [], 0
        for n in lengths:
            piece, rows = torch.tensor(tokens[start : start + n], device=GPU), PackedRows([1], [n], torch.device(GPU))
            found.append(model.forward(piece, rows, state, logits_of=torch.arange(n, device=GPU)).cpu())
            start += n
        assert (torch.cat(found) - expected).abs().max() < bound


@pytest.mark.parametrize("quant", ["auto", "int8", "fp8", "int4"])
def test_an_engine_runs_it_without_kernels(quant, tmp_path):
    rng = random.Random(5)
    begin, more = ([rng.randrange(1, 256) for _ in range(n)] for n in (90, 20))
    with looped(tmp_path, random_tensors6(TINY6, 256), device="cuda", quant=quant) as loop:
        assert loop.info.ops == "reference"
        assert loop.info.dtype == "fp16"
        expected, finish = answer(loop, begin + more, cache=False)
        assert (len(expected), finish.reason) == (8, "length")
        answer(loop, begin, max_tokens=0, session=Session(name="s", separate=False))
        assert len(answer(loop, more, session=Session(name="s", separate=False))[0]) == 8
        assert loop.engine.stats()["graph_steps_total"] == 0


def test_rwkv7_beside_it_still_has_its_kernels(tmp_path):
    with looped(tmp_path, dict(random_tensors(TINY, 256)), device="cuda") as loop:
        assert loop.info.ops == "kernels"
        assert len(answer(loop, [5, 6, 7])[0]) == 8
