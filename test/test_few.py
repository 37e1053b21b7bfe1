"""Decode steps of few rows in fewer launches: which kernels a plan launches, and what falls back."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
from kernel_recorder import make_launcher

from rwkv_batch.kernels import compiler, measured, self_check
from rwkv_batch.kernels.few import tuning
from rwkv_batch.kernels.few.ops import FewRowOps
from rwkv_batch.kernels.few.plan import CANDIDATES, FewPlan
from rwkv_batch.kernels.variants import GEMV, GEMV_RKV, SPARSE
from rwkv_batch.model.packed_rows import CapturedRows, PackedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State

PLAIN, INPUTS, WKV, VALUE = "rwkv_plain_product", "rwkv_plain_inputs", "rwkv_wkv_pairs", "rwkv_sparse_value"
NORMED_INPUTS, NORMED_KEY, LAST_NORM = "rwkv_normed_inputs", "rwkv_normed_product", "rwkv_last_norm"
NORM, PROJECT, UP, RECURRENCE = "rwkv_add_norm_mix_decode", "rwkv_project", "rwkv_lora_up", "rwkv_wkv_decode"


def turn(ops: FewRowOps) -> None:
    """Give a model the copies that `tiled.tile` makes of `ffn_value`."""
    for value in (layer.ffn_value.gemm for layer in ops.prepared.layers):
        value.turned = value.weight.mT.contiguous()


class Steps:
    def __init__(self, monkeypatch, *, hopper: bool = True):
        self.launcher, self.recorder = make_launcher(monkeypatch, hopper=hopper)
        weights = self_check.random_weights(torch.device("cpu"))
        self.ops = FewRowOps(weights, self.launcher, max_tokens=64, max_rows=16)
        if hopper:
            turn(self.ops)
        for name, variant in (("rkv", GEMV_RKV), ("output", GEMV), ("ffn_key", GEMV), ("ffn_value", SPARSE), ("head", GEMV)):
            for size in range(1, 10):
                self.ops.choose(name, size, variant)
        self.model = Model(weights, self.ops)
        self.state = State(weights.shape, 20, shift_dtype=torch.float16, wkv_dtype=torch.float16)

    def decode(self, num_rows: int) -> list[tuple]:
        self.recorder.clear()
        self.model.forward(None, CapturedRows.decode(torch.arange(num_rows)), self.state)
        return self.recorder.take()

    def prefill(self, length: int) -> list[str]:
        self.recorder.clear()
        self.model.forward(torch.arange(length), PackedRows([3], [length]), self.state)
        return [note[0] for note in self.recorder.take()]


@pytest.fixture
def steps(monkeypatch) -> Steps:
    return Steps(monkeypatch)


@pytest.mark.parametrize(
    ("plan", "layer", "last"),
    [
        (None, [NORM, PROJECT, UP, RECURRENCE, "rwkv_gemv", NORM, "rwkv_gemv", "rwkv_sparse_ffn"], "rwkv_add_norm"),
        (FewPlan(), [NORM, PROJECT, UP, RECURRENCE, PLAIN, NORM, PLAIN, "rwkv_sparse_ffn"], "rwkv_add_norm"),
        (FewPlan(pairs=True), [NORM, INPUTS, WKV, PLAIN, NORM, PLAIN, "rwkv_sparse_ffn"], "rwkv_add_norm"),
        (FewPlan(6, sparse=True), [NORM, PROJECT, UP, RECURRENCE, PLAIN, NORM, PLAIN, VALUE], "rwkv_add_norm"),
        (FewPlan(4, True, True, True), [NORMED_INPUTS, WKV, PLAIN, NORMED_KEY, VALUE], LAST_NORM),
        (FewPlan(4, pairs=True, turned=True), [NORM, INPUTS, WKV, PLAIN, NORM, PLAIN, PLAIN], "rwkv_add_norm"),
        (FewPlan(4, True, True, turned=True), [NORMED_INPUTS, WKV, PLAIN, NORMED_KEY, PLAIN], LAST_NORM),
    ],
    ids=str,
)
def test_a_plan_takes_fewer_launches(steps, plan, layer, last):
    steps.ops.plans = {3: plan} if plan else {}
    layers = len(steps.model.weights.layers)
    assert [note[0] for note in steps.decode(3)] == ["rwkv_embed", *layer * layers, last, "rwkv_gemv"]


def test_turned_values_are_read_by_outputs(steps):
    steps.ops.plans = {3: FewPlan(4, pairs=True, turned=True)}
    handed = []
    launch = steps.launcher.launch
    steps.launcher.launch = lambda function, *arguments: (
        handed.append((function.__name__, arguments)),
        launch(function, *arguments),
    )
    steps.decode(3)
    read = [arguments[1] for name, arguments in handed if name == PLAIN][2::3]  # behind "output" and "ffn_key"
    assert read == [layer.ffn_value.gemm.turned.data_ptr() for layer in steps.ops.prepared.layers]


def test_what_a_launch_reads_of_others_it_does_not_write(steps):
    """The residual stream and the normalised rows go to and fro between two places."""
    steps.ops.plans = {2: FewPlan(4, True, True, True)}
    notes = [note for note in steps.decode(2) if note[0] in (NORMED_INPUTS, NORMED_KEY)]
    x, x_out, normed, carried = ([note[2 + i] for note in notes] for i in (0, 1, 8, 9))
    assert x[0] == x_out[0], "nothing is added in front of the first layer"
    assert all(a != b for a, b in zip(x[1:], x_out[1:], strict=True))
    assert x[1:] == x_out[:-1]
    assert carried == ["-", *normed[:-1]]
    assert all(a != b for a, b in zip(normed, carried, strict=True))


def test_other_steps_are_as_ever(steps):
    steps.ops.plans = {2: FewPlan(4, True, True, True)}
    for names in (steps.prefill(2), [note[0] for note in steps.decode(3)]):
        assert not {PLAIN, INPUTS, NORMED_INPUTS, NORMED_KEY, WKV, VALUE, LAST_NORM} & {*names}


def test_logits_of_some_rows(steps):
    """Of a step that is not captured."""
    steps.ops.plans = {3: FewPlan(4, True, True, True)}
    rows = PackedRows([4, 0, 7], [1, 1, 1])
    logits = steps.model.forward(torch.arange(3), rows, steps.state, logits_of=torch.tensor([2]))
    assert logits.shape == (1, steps.model.weights.head.shape[0])
    assert steps.recorder.take()[-2][0] == LAST_NORM


@pytest.mark.parametrize(
    ("rows", "plan", "hopper"),
    [
        (9, FewPlan(), True),
        (1, FewPlan(), False),
        (1, FewPlan(norms=True), True),  # which are the pairs' too
        (1, FewPlan(turned=True), True),  # of which no copy has been made
        (8, FewPlan(pairs=True, norms=True), True),  # whose width of 320 takes two warps a row
    ],
)
def test_what_cannot_be_done_so(monkeypatch, rows, plan, hopper):
    monkeypatch.setattr(self_check, "WIDTH", 320)
    weights = self_check.random_weights(torch.device("cpu"), width=320)
    ops = FewRowOps(weights, make_launcher(monkeypatch, hopper=hopper)[0], max_tokens=16, max_rows=16)
    assert not ops.fits(rows, plan)
    assert ops.fits(4, FewPlan(pairs=True, norms=True)) == hopper


@pytest.mark.parametrize("quant", ["int8"])
def test_quantised_models_have_none(monkeypatch, quant):
    weights = self_check.random_weights(torch.device("cpu"), quant=quant)
    ops = FewRowOps(weights, make_launcher(monkeypatch, hopper=True)[0], max_tokens=16, max_rows=16)
    assert not any(ops.fits(1, plan) for plan in CANDIDATES)


# Choosing.

BEST = FewPlan(4, pairs=True)
DIGEST = "cuda-sm_90a-0123"


class TimedSteps:
    """Ops whose steps take 1 ms, and by a plan what `times` says; those by `wrong` plans give wrong results."""

    def __init__(
        self, times: dict[FewPlan, float], wrong: tuple[FewPlan, ...] = (), *, only_state: bool = False, dtype=torch.float16
    ):
        self.plans: dict[int, FewPlan] = {}
        self.times, self.wrong, self.only_state, self.count = times, wrong, only_state, 0
        self.fits = lambda size, plan: size <= 8
        self.prepared = SimpleNamespace(source=SimpleNamespace(shape=SimpleNamespace(width=64, ffn_width=256, num_layers=3)))
        self.launcher = SimpleNamespace(device="cpu", digest=DIGEST, time=self.time)
        self.state = State(self_check.random_weights(torch.device("cpu"), num_layers=3).shape, 8, wkv_dtype=dtype)
        self.tuner = tuning.FewTuner(self, self.state, self.step)

    def time(self, run, rounds: int) -> float:
        self.count += 1
        run()
        return self.times.get(next(iter(self.plans.values()), None), 1.0)

    def step(self, size: int) -> torch.Tensor:
        right = self.plans.get(size) not in self.wrong
        self.state.wkv[:, :size] *= 0.9
        if not right:
            self.state.wkv[1, 0, 2, :8] = 0  # a few numbers of one head
        return torch.arange(8.0).repeat(size, 1) * (1 if right or self.only_state else -1)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    measured.measured.cache_clear()
    yield tmp_path
    measured.measured.cache_clear()


@pytest.mark.parametrize(
    ("times", "wrong", "chosen"),
    [
        ({}, (), None),
        ({BEST: 0.8, FewPlan(6): 0.9}, (), BEST),
        ({BEST: 0.8}, (BEST,), None),
        ({BEST: 0.999}, (), None),  # too little to tell
        ({BEST: 1.2}, (), None),
    ],
)
def test_the_fastest_plan_that_is_right_is_chosen(folder, times, wrong, chosen):
    steps = TimedSteps(times, wrong)
    steps.tuner.tune([2, 16])
    expected = {2: chosen} if chosen else {}
    assert steps.plans == expected
    again = TimedSteps(times, wrong)
    again.tuner.tune([2, 16])
    assert again.plans == expected
    assert again.count == 0, "it is remembered"


def test_a_few_wrong_numbers_of_a_state_are_noticed(folder):
    steps = TimedSteps({BEST: 0.8}, (BEST,), only_state=True)
    steps.tuner.tune([1])
    assert not steps.plans


def test_pairs_are_for_states_of_fp16(folder):
    steps = TimedSteps({BEST: 0.8, FewPlan(6): 0.9}, dtype=torch.float32)
    steps.tuner.tune([1])
    assert steps.plans == {1: FewPlan(6)}


def test_more_rows_are_not_tried_where_fewer_gain_nothing(folder):
    steps = TimedSteps({})
    steps.tuner.tune([1])
    count = steps.count
    steps.tuner.tune([1, 2, 3])
    assert steps.count == count


def test_what_was_measured_on_such_cards_is_checked_and_not_timed(folder):
    keys = {size: measured.portable(TimedSteps({}).tuner._key(size), DIGEST) for size in (1, 2, 3)}
    shipped = measured.Measured(compiler.sources_digest(), plans={keys[1]: BEST, keys[2]: None, keys[3]: FewPlan(6)})
    measured.file_of("a card").write_bytes(msgspec.json.encode(shipped))
    steps = TimedSteps({}, (FewPlan(6),))
    steps.tuner.tune([1, 2, 3])
    assert (steps.plans, steps.count) == ({1: BEST}, 0)
