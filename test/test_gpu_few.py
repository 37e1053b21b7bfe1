"""Decode steps of few rows in fewer launches (cuda/few/) against the same steps with a launch for each op."""

import pytest
import torch

from rwkv_batch.kernels import compiler, self_check
from rwkv_batch.kernels.few.ops import FewRowOps
from rwkv_batch.kernels.few.plan import FewPlan
from rwkv_batch.kernels.few.tuning import FewTuner
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.variants import GEMV, GEMV_RKV, SPARSE
from rwkv_batch.model import reference_ops
from rwkv_batch.model.packed_rows import CapturedRows, PackedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State

pytestmark = pytest.mark.gpu

HALF = torch.float16
SLOTS, LAYERS, VOCAB = 12, 3, 4096
COSINE, RELATIVE, RELATIVE_OF_STATES = 0.99999, 1.7e-3, 4e-3
# width: ranks of w, a, v, g
WIDTHS = {
    320: (32, 32, 16, 64),
    768: (64, 64, 32, 128),
    1088: (64, 64, 48, 160),
    2048: (96, 96, 64, 256),
    4096: (128, 128, 96, 480),
}
PAIRS, WHOLE = FewPlan(pairs=True), FewPlan(4, pairs=True, norms=True, sparse=True)
PLANS = [
    FewPlan(),
    FewPlan(7),
    FewPlan(6, sparse=True),
    PAIRS,
    FewPlan(3, pairs=True, sparse=True),
    FewPlan(5, pairs=True, norms=True),
    WHOLE,
]
ORDER = [7, 0, 4, 11, 2, 5, 9, 10]


@pytest.fixture(scope="module", params=WIDTHS)
def model(request):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper")
    patch = pytest.MonkeyPatch()
    patch.setattr(self_check, "RANKS", WIDTHS[request.param])
    patch.setattr(self_check, "VOCAB", VOCAB)
    weights = self_check.random_weights(torch.device("cuda:0"), LAYERS, width=request.param)
    patch.undo()
    ops = FewRowOps(weights, Launcher(compiler.library(), weights.device), max_tokens=16, max_rows=16)
    for size in range(1, 9):  # whose sums have the same order
        for name, variant in (("rkv", GEMV_RKV), ("output", GEMV), ("ffn_key", GEMV), ("ffn_value", SPARSE), ("head", GEMV)):
            ops.choose(name, size, variant)
    return Model(weights, ops, "kernels")


def state_of(model: Model, seed: int = 0) -> State:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    state = State(model.weights.shape, SLOTS, shift_dtype=HALF, wkv_dtype=HALF, device="cuda")
    for part in (state.shift, state.wkv):
        part.normal_(0, 0.5, generator=generator)
    state.last_ids.random_(1, VOCAB, generator=generator)
    return state


def steps(model: Model, slots: list[int], plan: FewPlan | None, count: int = 3) -> tuple[torch.Tensor, State]:
    """Return the logits of some steps, and the state behind them."""
    ops, state = model.ops, state_of(model)
    ops.plans = {len(slots): plan} if plan else {}
    rows = CapturedRows.decode(torch.tensor(slots, device="cuda"))
    logits = [model.forward(None, rows, state).clone() for _ in range(count)]
    ops.plans = {}
    return torch.stack(logits).float(), state


def plans(model: Model, num_rows: int, candidates: list[FewPlan]) -> list[FewPlan]:
    """Return the candidates, without the norms where there are too many rows for them."""
    fits = model.ops.fits
    candidates = [plan if fits(num_rows, plan) else plan._replace(norms=False) for plan in candidates]
    return [plan for plan in dict.fromkeys(candidates) if fits(num_rows, plan)]


def agree(got: torch.Tensor, expected: torch.Tensor, relative: float = RELATIVE) -> None:
    got, expected = got.double().flatten(1), expected.double().flatten(1)
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() >= COSINE
    assert (got - expected).norm() <= relative * expected.norm()


@pytest.mark.parametrize("num_rows", [1, 2, 5, 8])
@torch.inference_mode()
def test_it_gives_nearly_the_same(model, num_rows):
    """Sums have another order."""
    slots = ORDER[:num_rows]
    expected, other = steps(model, slots, None)
    for plan in plans(model, num_rows, PLANS):
        got, state = steps(model, slots, plan)
        agree(got.flatten(0, 1), expected.flatten(0, 1))
        agree(state.shift, other.shift, RELATIVE_OF_STATES)
        agree(state.wkv, other.wkv, RELATIVE_OF_STATES)


@torch.inference_mode()
def test_padding_touches_no_state(model):
    slots = [3, -1, 8]
    _, expected = steps(model, [3, 8, 5], None)
    before = state_of(model)
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    for plan in plans(model, 3, PLANS):
        got, state = steps(model, slots, plan)
        full, others = steps(model, [3, 5, 8], plan)
        assert torch.equal(got[:, ::2], full[:, ::2]), plan
        for part, of_others, at_first in (
            (state.shift.flatten(0, 1), others.shift.flatten(0, 1), before.shift.flatten(0, 1)),
            (state.wkv, others.wkv, before.wkv),
        ):
            assert torch.equal(part[:, untouched], at_first[:, untouched]), plan
            assert torch.equal(part[:, [3, 8]], of_others[:, [3, 8]]), plan
        agree(state.wkv[:, [3, 8]], expected.wkv[:, [3, 8]], RELATIVE_OF_STATES)
        agree(state.shift[:, :, [3, 8]], expected.shift[:, :, [3, 8]], RELATIVE_OF_STATES)


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others(model):
    for plan in plans(model, 4, PLANS):
        first, state = steps(model, [4, 2, 7, 9], plan)
        other, moved = steps(model, [10, 4, -1, 0], plan)
        assert torch.equal(first[:, 0], other[:, 1]), plan
        assert torch.equal(state.shift[:, :, 4], moved.shift[:, :, 4]), plan
        assert torch.equal(state.wkv[:, 4], moved.wkv[:, 4]), plan


@torch.inference_mode()
def test_logits_are_those_of_the_reference_in_fp32(model):
    device, slots = torch.device("cuda:0"), [3, 8]
    start, judge = state_of(model), Model(model.weights, reference_ops)
    state = State(model.weights.shape, SLOTS, device="cuda")
    state.shift.copy_(start.shift), state.wkv.copy_(start.wkv), state.last_ids.copy_(start.last_ids)
    tokens, rows = start.last_ids[slots], PackedRows(slots, [1] * len(slots), device)
    expected = torch.stack([judge.forward(tokens, rows, state).float() for _ in range(3)])
    for plan in plans(model, 2, PLANS):
        got, _ = steps(model, slots, plan)
        agree(got.flatten(0, 1), expected.flatten(0, 1))


@pytest.mark.parametrize("num_rows", [1, 8])
@torch.inference_mode()
def test_captured_steps_replay(model, num_rows):
    """Many replays without a pause between them."""
    slots = ORDER[:num_rows]
    for plan in plans(model, num_rows, [WHOLE]):
        expected, other = steps(model, slots, plan, count=64)
        model.ops.plans = {num_rows: plan}
        state, rows = state_of(model), CapturedRows.decode(torch.tensor(slots, device="cuda"))
        model.forward(None, rows, state)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model.forward(None, rows, state)
        model.ops.plans = {}
        for _ in range(63):
            graph.replay()
        assert torch.equal(logits.float(), expected[-1])
        assert torch.equal(state.wkv, other.wkv)
        assert torch.equal(state.shift, other.shift)


@torch.inference_mode()
def test_the_check_of_a_plan_knows_right_from_wrong(model, monkeypatch):
    state = state_of(model)
    rows = {size: CapturedRows.decode(torch.arange(size, device="cuda")) for size in (1, 4)}
    tuner = FewTuner(model.ops, state, lambda size: model.forward(None, rows[size], state))
    for size in rows:
        for plan in plans(model, size, PLANS):
            assert tuner._is_right(size, plan), plan
    few, layer = model.ops.few, model.ops.prepared.layers[1]
    right = few.product

    def without_a_tile(x, weight, out, **options) -> None:
        right(x, weight, out, **options)
        if weight is layer.output.weight:
            out[:, 8:16] = 0

    monkeypatch.setattr(few, "product", without_a_tile)
    assert not tuner._is_right(1, FewPlan())
