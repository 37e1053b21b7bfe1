"""The HIP kernels' bodies on the CPU, with wavefronts of 64 lanes and of 32, and what the engine makes of an AMD card."""

import ctypes
import json
import logging
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from emulated_card import Card, launcher_for

from rwkv_batch.config import Config
from rwkv_batch.engine import build as engine_build
from rwkv_batch.engine.decode_graphs import DecodeGraphs
from rwkv_batch.engine.prefill_graphs import PrefillGraphs
from rwkv_batch.errors import UsageError
from rwkv_batch.kernels import compiler, self_check
from rwkv_batch.kernels.hip.ops import AdaptedHipOps, HipOps
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.mix import Mix
from rwkv_batch.kernels.quant.dequantise import Dequantiser
from rwkv_batch.kernels.quant.matrix import QuantMatrix
from rwkv_batch.model import quantized, reference_ops
from rwkv_batch.model.adapters.bank import AdapterBank
from rwkv_batch.model.packed_rows import PackedRows, RowLayout
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.model.weight import Weight
from sampling import self_check as sampling_check
from sampling.kernel import KernelSampler
from sampling.params import SamplingParams

HALF = torch.float16
# Lanes of a wavefront, and whether those that can go on do so backwards.
ORDERS = {"64": (64, False), "64 backwards": (64, True), "32": (32, False), "32 backwards": (32, True)}
long = pytest.mark.long


@pytest.fixture
def launcher(request, card, monkeypatch) -> Launcher:
    wavefront, backwards = ORDERS[getattr(request, "param", "64")]
    card.be(wavefront, backwards=backwards)
    return launcher_for(card, monkeypatch)


def orders(*quick: str) -> list:
    """All, of which those that are not `quick` are for long runs."""
    return [pytest.param(name, marks=() if name in quick else long) for name in ORDERS]


# The emulated card.


def mistake(card: Card, number: int) -> tuple[int, list[int]]:
    out = (ctypes.c_int * 64)()
    return card.library.make_mistake(number, out, None), list(out)


@pytest.mark.parametrize(("wavefront", "backwards"), ORDERS.values(), ids=ORDERS)
def test_what_no_card_can_do_is_told(card, wavefront, backwards):
    card.be(wavefront, backwards=backwards)
    for number, told in ((0, "meet at different places"), (1, "waits for others at a shuffle")):
        assert mistake(card, number)[0] == 719
        assert told in card.message()
    assert mistake(card, 2)[0] == (719 if wavefront == 64 else 0), "a barrier is one of a whole wavefront"
    assert mistake(card, 3)[1] != [t ^ 1 for t in range(64)], "lanes are not in step"
    votes = mistake(card, 4)[1]
    assert votes[0] != -1, "of another group, a lane knows nothing"
    error, out = mistake(card, 5)
    right = [(6 if t < 32 else 38) + 8 for t in range(64)]
    assert (error, out) == (0, right), "and behind a mistake, others run"


# The kernels.


@pytest.mark.parametrize("launcher", orders("64", "32 backwards"), indirect=True)
def test_the_forward_pass(launcher, monkeypatch):
    """Two tokens and a prompt, all through kernels."""
    weights = self_check.random_weights(launcher.device)
    expecting = Model(weights, self_check.partly_reference(weights, launcher, {*self_check.OPS}, max_tokens=32, max_rows=3))
    tested = Model(weights, HipOps(weights, launcher, max_tokens=32, max_rows=3))
    for lengths in ([1, 1], [17, 1, 2]):
        for one, other in zip(*(self_check._run(model, lengths, HALF) for model in (expecting, tested)), strict=True):
            assert float((one - other).norm()) <= 2e-2 * float(one.norm())


@pytest.mark.parametrize("launcher", orders("64"), indirect=True)
def test_a_prompt_has_the_bits_of_its_tokens_one_by_one(launcher):
    """However its tokens are dealt out, and where blocks asked to share a row cannot meet."""
    launcher.use_current_stream()
    mixer, generator, lengths, slots, width = Mix(launcher), torch.Generator().manual_seed(0), [5, 1, 3], [2, 0, 3], 512

    def randn(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, generator=generator)

    layer = (randn(width), randn(width), torch.rand(6, width, generator=generator))
    x, y, shift = randn(9, width), randn(9, width).half(), randn(4, width).half()
    one_by_one, expected = shift.clone(), torch.empty(6, 9, width, dtype=HALF)
    first = 0
    for length, slot in zip(lengths, slots, strict=True):
        for t in range(first, first + length):
            out = torch.empty(6, 1, width, dtype=HALF)
            mixer.add_norm_mix_decode(x[t : t + 1].clone(), y[t : t + 1], *layer, one_by_one, torch.tensor([slot]), out)
            expected[:, t] = out[:, 0]
        first += length
    rows = RowLayout.of(slots, lengths, torch.device("cpu"))
    for run, parts in ((None, None), (1, 1), (2, 2)):
        out, after = torch.empty_like(expected), shift.clone()
        mixer.add_norm_mix_prefill(x.clone(), y, *layer, after, rows, torch.empty_like(y), out, run=run, parts=parts)
        assert torch.equal(out, expected)
        assert torch.equal(after, one_by_one)


@long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("state", [HALF, torch.float32])
@pytest.mark.parametrize("launcher", ORDERS, indirect=True)
def test_the_check_of_the_first_start(launcher, state):
    """All of it but the graphs, which a CPU has not."""
    assert self_check.failing(launcher, state) == [self_check.GRAPHS]


@pytest.mark.parametrize("quant", quantized.FORMATS)
def test_quantised_matrices(launcher, quant):
    launcher.use_current_stream()
    for transposed in (False, True):
        matrix = torch.randn(40, 128, generator=torch.Generator().manual_seed(0))
        weight, out = Weight.quantised(matrix, quant, transposed=transposed), torch.empty(40, 128, dtype=HALF)
        Dequantiser(launcher)(QuantMatrix.of(weight), out)
        expected = weight.dense(torch.float32)
        assert ((out - expected).abs() <= expected.abs() * 2**-11 * 1.01 + 3e-8).all()


def test_slots_are_filled_and_copied(launcher):
    assert self_check._fills(launcher, HALF)


SAMPLED = [*(("64", rule) for rule in sampling_check.CHECKED), *(("32 backwards", rule) for rule in ("joint", "noise"))]


@pytest.mark.parametrize(("launcher", "rule"), SAMPLED, indirect=["launcher"])
def test_every_rule_samples_what_the_reference_does(launcher, monkeypatch, rule):
    monkeypatch.setattr(sampling_check, "CHECKED", {rule: sampling_check.CHECKED[rule]})
    monkeypatch.setattr(sampling_check, "STEPS", 1)
    monkeypatch.setattr(sampling_check, "COLUMNS", 1003)
    assert sampling_check.check(launcher.device, launcher.library) == []


@long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("launcher", ORDERS, indirect=True)
def test_every_rule_in_a_large_vocabulary(launcher, monkeypatch):
    monkeypatch.setattr(sampling_check, "STEPS", 4)
    monkeypatch.setattr(sampling_check, "COLUMNS", 65536)
    assert sampling_check.check(launcher.device, launcher.library) == []


@long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("quant", quantized.FORMATS)
def test_steps_with_quantised_matrices(launcher, monkeypatch, quant):
    monkeypatch.setattr(self_check, "CASES", ([1, 1], [5, 1]))
    monkeypatch.setattr(self_check, "QUANT_WIDTH", self_check.WIDTH)
    monkeypatch.setattr(reference_ops, "INT8_ROWS", 0)  # which a CPU multiplies in bf16, and no card
    expected: self_check.Expected = {}
    for name in self_check.PRODUCTS:
        assert self_check._agrees(name, launcher, HALF, quant, 0, expected)


def test_bounds_of_halves_are_rounded_up(launcher):
    """HIP's own function rounds to the nearest: then noise would pass over columns that win."""
    columns = 4096
    logits = 1 + torch.arange(columns)[None] * 1e-7  # all between two halves
    sampler = KernelSampler(1, torch.arange(columns), "cpu", launcher.library)
    sampler.start_many([0], [SamplingParams(rule="noise", noise=1e-9)], [0])
    assert sampler.sample(logits, torch.tensor([0]), [0]).ids.tolist() == [int(logits.argmax())]


def test_rows_may_have_adapters(launcher):
    """What one row has changes nothing of the other."""
    plain, adapted = logits_of_two_rows(launcher)
    assert torch.equal(plain[0], adapted[0])
    assert not torch.allclose(plain[1], adapted[1], atol=0.01)


@torch.inference_mode()
def logits_of_two_rows(launcher) -> list[torch.Tensor]:
    """Without adapters, and with one that the second row has."""
    device = launcher.device
    weights = self_check.random_weights(device)
    plain = HipOps(weights, launcher, max_tokens=2, max_rows=2)
    bank = AdapterBank(weights, 8, 2, only_adding=True)
    for banks in bank.layers:
        for name in ("rkv", "output", "ffn_key", "ffn_value"):
            banks[name].down.fill_(0.02), banks[name].up.fill_(0.02)
    bank.owner[:4], bank.of_slot[1] = 1, 1
    found = []
    for ops in (plain, AdaptedHipOps(plain, bank)):
        state = State(weights.shape, 2, shift_dtype=HALF, wkv_dtype=HALF, device=device)
        tokens, rows = torch.tensor([3, 3], device=device), PackedRows([0, 1], [1, 1], device)
        found.append(Model(weights, ops).forward(tokens, rows, state).clone())
    return found


# The engine.


class Graph:
    """A graph that takes the model's steps anew when it is replayed."""

    def __init__(self):
        self.steps = []

    def replay(self) -> None:
        for step in self.steps:
            step()


def captured(monkeypatch, *, wrong: bool = False) -> None:
    """Let torch capture steps of models."""
    forward, capturing = Model.forward, []

    def noted(*arguments):
        capturing[-1].steps.append(lambda: forward(*arguments)) if capturing and not wrong else None
        return forward(*arguments)

    @contextmanager
    def graph(graph: Graph, stream=None, pool=None):
        capturing.append(graph)
        yield
        capturing.clear()

    monkeypatch.setattr(Model, "forward", noted)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)


def test_captured_steps_are_checked(launcher, monkeypatch):
    for wrong in (False, True):
        with monkeypatch.context() as patch:
            captured(patch, wrong=wrong)
            assert self_check._captures(launcher, HALF, "") is not wrong


def run(model: Model, state, sampler) -> tuple[list[int], torch.Tensor]:
    """Return the ids and the last logits of a prompt and some decode steps."""
    sampler.start_many([0], [SamplingParams(temperature=0)], [0])
    ids, tokens, slots = [], [3, 1, 4, 1, 5], torch.tensor([0])
    for _ in range(5):
        logits = model.forward(torch.tensor(tokens), PackedRows([0], [len(tokens)]), state)
        tokens = sampler.sample(logits, slots, [0]).ids.tolist()
        ids += tokens
    return ids, logits.float().clone()


def engine_of(card: Card | None, **settings):
    weights = self_check.random_weights(torch.device("cpu"))
    library = card and card.library
    return engine_build.build_engine(Config(**settings), weights, 3, max_tokens=32, library=library, graph_sizes=[1, 3])


@torch.inference_mode()
def test_the_engine_takes_the_kernels_where_the_check_passes(card, launcher, monkeypatch, caplog):
    """In graphs, without tuning; and where those cannot be had without them, and says so, or refuses by that name."""
    file = Path(card.library._name).with_suffix(".json")
    file.unlink(missing_ok=True)
    monkeypatch.setattr(self_check, "_check_all", lambda *args: ([], []))
    for graphs in (DecodeGraphs, PrefillGraphs):
        monkeypatch.setattr(graphs, "capture", lambda self: None)
        monkeypatch.setattr(f"{graphs.__module__}.Staging", lambda *args: None)
    engine = engine_of(card, ops="kernels")
    assert isinstance(engine.model.ops, HipOps)
    assert (engine.model.ops_name, engine.graphs.sizes) == ("kernels", [1, 3])
    assert json.loads(file.read_text()), "what was found is remembered"
    file.unlink()

    monkeypatch.setattr(self_check, "_check_all", lambda *args: ([], [self_check.GRAPHS]))
    with caplog.at_level(logging.ERROR):
        engine = engine_of(card)
    assert "captured steps" in caplog.text
    assert (engine.model.ops_name, engine.graphs) == ("kernels but graphs", None)
    plain = engine_of(None, ops="reference")
    expected, expected_logits = run(plain.model, plain.state, plain.sampler)
    found, logits = run(engine.model, engine.state, engine.sampler)
    assert found == expected
    assert float((logits - expected_logits).norm()) <= 2e-2 * float(expected_logits.norm())
    with pytest.raises(UsageError, match="graphs"):
        engine_of(card, ops="kernels")


def test_an_amd_card_gets_the_kernels_that_hipcc_builds(card, launcher, monkeypatch, caplog, tmp_path):
    gpu, asked = torch.device("cuda", 0), []
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(compiler.shutil, "which", lambda name: "/bin/true" if name == "hipcc" else None)

    def built(toolchain: compiler.Toolchain, arch: str, quant: bool) -> Path:
        asked.append((toolchain.name, arch))
        return Path(card.library._name)

    monkeypatch.setattr(compiler, "build", built)
    compiler.library.cache_clear()
    try:
        assert engine_build.find_kernels(Config(ops="kernels"), gpu).result()._name == card.library._name
        assert asked == [("hip", "gfx90a")]
        compiler.library.cache_clear()
        monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
        monkeypatch.setenv("ROCM_PATH", str(tmp_path))
        with caplog.at_level(logging.ERROR):
            assert engine_build.find_kernels(Config(), gpu) is None
        assert "WITHOUT KERNELS" in caplog.text
        assert "hipcc" in caplog.text
        with pytest.raises(UsageError, match="hipcc"):
            engine_build.find_kernels(Config(ops="kernels"), gpu)
    finally:
        compiler.library.cache_clear()
