"""RWKV-6 on a GPU: plain torch against the same on the CPU, kernels against plain torch, engines as the server has them."""

import random

import pytest
import torch
from models import TINY, random_tensors
from rwkv6_models import TINY6, random_tensors6
from test_model import random_split, run
from test_rwkv6 import answer, looped, model_of

from rwkv_batch.kernels import compiler
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.rwkv6.ops import Rwkv6KernelOps
from rwkv_batch.model.packed_rows import CapturedRows, PackedRows
from rwkv_batch.model.rwkv6.forward import Model
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


@pytest.mark.parametrize("quant", ["int8", "fp8", "int4"])
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


def test_an_engine_runs_it_on_kernels_and_in_graphs(tmp_path):
    """Greedy ids are those of plain torch, up to where rounding decides; sessions and cached prefixes go on."""
    rng = random.Random(5)
    begin, more = ([rng.randrange(1, 256) for _ in range(n)] for n in (90, 20))
    with looped(tmp_path, random_tensors6(TINY6, 256), device="cuda") as loop:
        assert loop.info.ops == "kernels"
        found, finish = answer(loop, begin + more, cache=False)
        assert (len(found), finish.reason) == (8, "length")
        answer(loop, begin, max_tokens=0, session=Session(name="s", separate=False))
        assert len(answer(loop, more, session=Session(name="s", separate=False))[0]) == 8
        assert loop.engine.stats()["graph_steps_total"] > 0
        assert loop.engine.stats()["graph_prefill_steps_total"] > 0
    other = tmp_path / "plain"
    other.mkdir()
    with looped(other, random_tensors6(TINY6, 256), device="cuda", ops="reference") as loop:
        assert loop.info.ops == "reference"
        assert answer(loop, begin + more, cache=False)[0][:3] == found[:3]


SHAPES = {"tiny": TINY6, "1024": (2, 1024, 64, 3584, 32, 64), "2560": (1, 2560, 64, 8960, 64, 128)}


@pytest.mark.parametrize("wkv_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_kernels_give_what_plain_torch_gives(name, wkv_dtype):
    """Prompts and single tokens by turns, also from a captured graph, with rows that are none."""
    weights = model_of(random_tensors6(SHAPES[name]), dtype=torch.float16, device=GPU).weights
    launcher = Launcher(compiler.library(), GPU)
    plain, tested = Model(weights), Model(weights, Rwkv6KernelOps(weights, launcher, max_tokens=600, max_rows=330), "kernels")
    states = [
        State(weights.shape, 330, shift_dtype=torch.float16, wkv_dtype=dtype, device=GPU)
        for dtype in (torch.float32, wkv_dtype)
    ]

    def agree(*pair: torch.Tensor) -> bool:
        one, other = (t.float() for t in pair)
        return float((one - other).norm()) <= 1e-2 * float(one.norm())

    for lengths in ([500], [1], [1] * 7, [1] * 64, [1] * 320, [40, 1, 7, 33], [1] * 16):
        slots = random.Random(len(lengths)).sample(range(330), len(lengths))
        tokens, rows = torch.randint(1, 500, (sum(lengths),), device=GPU), PackedRows(slots, lengths, torch.device(GPU))
        one, other = (model.forward(tokens, rows, state) for model, state in zip((plain, tested), states, strict=True))
        assert agree(one, other), lengths
    assert agree(states[0].wkv, states[1].wkv)
    assert agree(states[0].shift, states[1].shift)
    slots, graph = torch.tensor([5, -1, 9, 300], device=GPU), torch.cuda.CUDAGraph()
    for state in states:
        state.last_ids.copy_(torch.arange(len(state.last_ids), device=GPU) % 500)
    tested.forward(None, CapturedRows.decode(slots), states[1])
    plain.forward(None, PackedRows([5, 9, 300], [1] * 3, torch.device(GPU)), states[0])
    with torch.cuda.graph(graph):
        other = tested.forward(None, CapturedRows.decode(slots), states[1])
    for chosen in ([5, 9, 300], [17, 2, 44]):
        slots.copy_(torch.tensor([chosen[0], -1, *chosen[1:]], device=GPU))
        graph.replay()
        one = plain.forward(None, PackedRows(chosen, [1] * 3, torch.device(GPU)), states[0])
        assert agree(one, other[[0, 2, 3]])
    assert agree(states[0].wkv, states[1].wkv)


@torch.inference_mode()
def test_a_row_does_not_depend_on_its_neighbours():
    weights = model_of(random_tensors6(), dtype=torch.float16, device=GPU).weights
    model = Model(weights, Rwkv6KernelOps(weights, Launcher(compiler.library(), GPU), max_tokens=64, max_rows=64), "kernels")
    seen = []
    for others in (3, 400):
        state = State(weights.shape, 64, shift_dtype=torch.float16, wkv_dtype=torch.float16, device=GPU)
        tokens = torch.full((64,), others, device=GPU)
        for token in (9, 10, 11):
            tokens[20] = token
            seen.append(model.forward(tokens, PackedRows(list(range(64)), [1] * 64, torch.device(GPU)), state)[20].clone())
    assert all(torch.equal(*pair) for pair in zip(seen[:3], seen[3:], strict=True))


def test_rwkv7_beside_it_still_has_its_kernels(tmp_path):
    with looped(tmp_path, dict(random_tensors(TINY, 256)), device="cuda") as loop:
        assert loop.info.ops == "kernels"
        assert len(answer(loop, [5, 6, 7])[0]) == 8
