"""What steps launch, call by call: which kernel, on which stream, with which sizes and which memory.

`results/launches.json` holds digests of what was launched when every choice here was last timed on an H200: a change of the
Python must leave them as they are, or say why not and write them anew: `python test/test_kernel_ops.py`.
"""

import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import kernel_recorder
import msgspec
import pytest
import torch
from kernel_recorder import make_launcher

from rwkv_batch.kernels import compiler, measured, self_check
from rwkv_batch.kernels.autotune import Autotuner
from rwkv_batch.kernels.gemm import INPUTS_STAGED, MAX_INPUTS_STAGES, Gemm
from rwkv_batch.kernels.linear import MAX_SPARSE, GroupedConfig
from rwkv_batch.kernels.mix import Mix
from rwkv_batch.kernels.ops import KernelOps
from rwkv_batch.kernels.quant.dequantise import Dequantiser
from rwkv_batch.kernels.quant.few_tokens import WHOLE_CODES, QuantLinear
from rwkv_batch.kernels.quant.matrix import QuantMatrix
from rwkv_batch.kernels.variants import CUBLAS, GEMV_RKV, QUANT_METHODS, LoraPlacement, Method, Variant
from rwkv_batch.model import quantized
from rwkv_batch.model.packed_rows import CapturedRows, PackedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.model.weight import Weight
from rwkv_batch.model.weights import Layer, ModelShape, Weights

GOLDEN = Path(__file__).parent / "results" / "launches.json"
PRODUCTS = ("rkv", "output", "ffn_key", "ffn_value", "head")
DECODE = (1, 3, 4, 5, 8, 9, 16, 17, 33, 64, 70, 128)
WAYS = (1, 5, 8, 16, 17, 64, 70, 128)
PREFILL = ([1], [2], [16], [40, 1, 7, 33], [5, 1, 90], [128])
TUNED = (1, 4, 8, 16, 24, 64, 70, 128)
# layers, width, feed-forward width, vocabulary, ranks of w, a, v, g
PUBLISHED = {
    "0.1b": ModelShape(1, 768, 3072, 8192, 64, 64, 32, 128),
    "1.5b": ModelShape(1, 2048, 8192, 8192, 96, 96, 64, 256),
    "2.9b": ModelShape(1, 2560, 10240, 8192, 96, 96, 64, 320),
    "7.2b": ModelShape(1, 4096, 16384, 8192, 128, 128, 96, 480),
    "320": ModelShape(1, 320, 1280, 4100, 32, 32, 16, 64),
}
TOKENS = (1, 5, 8, 16, 17, 64, 65, 128, 320, 4096)


def digest(notes: list) -> str:
    return hashlib.sha256(json.dumps(notes).encode()).hexdigest()[:12]


def numbered(weights: Weights) -> Weights:
    """Fill every tensor with numbers of its own, the same on every machine."""
    own = (weights.embedding, weights.head.values, weights.ln_out_weight, weights.ln_out_bias)
    tensors = [*own, *(t for layer in weights.layers for t in layer.tensors)]
    for number, tensor in enumerate(tensors):
        values = torch.arange(tensor.numel(), dtype=torch.int64).mul_(7).add_(13 * number).remainder_(509)
        tensor.copy_(values.view(tensor.shape))
    weights.head = Weight(weights.head.values[:509].clone())  # so that it must be filled up
    return weights


class Steps:
    """A small model whose launches are noted."""

    def __init__(self, monkeypatch, *, hopper: bool, max_tokens: int = 160):
        monkeypatch.setattr(torch, "empty", torch.zeros)
        self.launcher, self.recorder = make_launcher(monkeypatch, hopper=hopper)
        self.weights = numbered(self_check.random_weights(torch.device("cpu")))
        self.ops = KernelOps(self.weights, self.launcher, max_tokens=max_tokens, max_rows=128)
        self.model = Model(self.weights, self.ops)
        self.state = State(self.weights.shape, 130, shift_dtype=torch.float16, wkv_dtype=torch.float16)
        for number, tensor in enumerate((*self.state.time_shift, *self.state.channel_shift, *self.state.layer_wkv)):
            tensor.fill_(number + 1)

    def decode(self, num_rows: int) -> str:
        slots = torch.arange(1, num_rows + 1)
        self.recorder.clear()
        self.model.forward(None, CapturedRows.decode(slots), self.state)
        return digest(self.recorder.take())

    def prefill(self, lengths: list[int]) -> str:
        tokens, slots = torch.arange(sum(lengths)), [(7 * i + 3) % 130 for i in range(len(lengths))]
        self.recorder.clear()
        self.model.forward(tokens, PackedRows(slots, lengths), self.state)
        return digest(self.recorder.take())

    def every_variant(self, num_tokens: int) -> dict[str, list[str]]:
        """Return what a decode step launches with each variant of each product, in order."""
        found = {}
        for product in PRODUCTS:
            found[product] = []
            for variant in self.ops.variants(product, num_tokens, self.ops.prepared.layers[-1]):
                self.ops.choose(product, num_tokens, variant)
                found[product].append(self.decode(num_tokens))
                self.ops.choose(product, num_tokens, None)
        return found

    def tune(self) -> list:
        self.recorder.clear()
        Autotuner(self.ops, self.decode_step).tune(list(TUNED))
        return [note for note in self.recorder.take() if note[0] == "tune cublas"]

    def decode_step(self, num_rows: int) -> None:
        self.model.forward(None, CapturedRows.decode(torch.arange(1, num_rows + 1)), self.state)


def empty_weights(shape: ModelShape) -> Weights:
    """Return weights of which nothing is ever read, so that they take no memory."""

    def half(*dims: int) -> torch.Tensor:
        return torch.empty(*dims, dtype=torch.float16)

    c, f, vector = shape.width, shape.ffn_width, torch.zeros(shape.width)
    ranks = {"w": shape.rank_w, "a": shape.rank_a, "g": shape.rank_g}
    layer = Layer(
        **{f"{norm}_{kind}": vector for norm in ("ln1", "ln2", "ln_x") for kind in ("weight", "bias")},
        att_mix=torch.zeros(6, 1, c),
        ffn_mix=torch.zeros(1, 1, c),
        **{f"{name}1": half(c, rank) for name, rank in ranks.items()},
        **{f"{name}2": half(rank, c) for name, rank in ranks.items()},
        v1=half(c, shape.rank_v),
        v2=half(shape.rank_v, c),
        **dict.fromkeys(("w0", "a0", "v0", "k_k", "k_a", "one_minus_k_a"), vector),
        r_k=torch.zeros(shape.num_heads, 64),
        rkv=Weight(half(3, c, c)),
        output=Weight(half(c, c)),
        ffn_key=Weight(half(f, c)),
        ffn_value=Weight(half(f, c)),
    )
    embedding, head, ids = half(shape.vocab_size, c), half(shape.vocab_size, c), torch.arange(shape.vocab_size)
    return Weights(shape, torch.float16, "", embedding, [layer], vector, vector, Weight(head), ids)


def published(monkeypatch, name: str, *, hopper: bool = True, num_sms: int = 132) -> Iterator[tuple[int, list]]:
    """Yield, for numbers of tokens, what each variant of each product launches, in order."""
    launcher, recorder = make_launcher(monkeypatch, hopper=hopper, content=False, num_sms=num_sms)
    weights = empty_weights(PUBLISHED[name])
    ops = KernelOps(weights, launcher, max_tokens=TOKENS[-1], max_rows=TOKENS[-1])
    model, state = Model(weights, ops), State(weights.shape, 2, shift_dtype=torch.float16, wkv_dtype=torch.float16)
    for num_tokens in TOKENS:
        rows, found = CapturedRows.decode(torch.zeros(num_tokens, dtype=torch.int64)), []
        for product in PRODUCTS:
            for variant in [None, *ops.variants(product, num_tokens, ops.prepared.layers[0])]:
                ops.choose(product, num_tokens, variant)
                recorder.clear()
                model.forward(None, rows, state)
                found.append(recorder.take())
                ops.choose(product, num_tokens, None)
        yield num_tokens, found


def record(monkeypatch) -> dict:
    """Return everything that the golden file holds."""
    golden = {}
    for hopper in (True, False):
        with monkeypatch.context() as patch:
            steps = Steps(patch, hopper=hopper)
            found = golden["hopper" if hopper else "other"] = {}
            found["decode"] = {str(n): steps.decode(n) for n in DECODE}
            found["prefill"] = {str(lengths): steps.prefill(lengths) for lengths in PREFILL}
            found["ways"] = {str(n): steps.every_variant(n) for n in WAYS}
            found["tuning"] = digest(steps.tune())
            steps.recorder.content = False  # timing has left random numbers in the buffers
            found["tuned"] = {str(n): steps.decode(n) for n in DECODE}
    for name in PUBLISHED:
        for kind in ({}, {"hopper": False}, {"num_sms": 114}) if name == "0.1b" else ({},):
            with monkeypatch.context() as patch:
                sizes = {str(n): f"{len(found)} {digest(found)}" for n, found in published(patch, name, **kind)}
            golden[" ".join([name, *map(str, kind.items())])] = sizes
    return golden


def test_every_step_launches_what_it_did(monkeypatch, tmp_path):
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    expected, got = json.loads(GOLDEN.read_text()), record(monkeypatch)
    for name, part in expected.items():
        for key in part:
            assert got[name][key] == part[key], f"{name}, {key}"
    assert got == expected


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("n", [17, 32, 64, 100, 320, 960, 4096])
def test_cuts_of_inputs_fit(monkeypatch, name, n):
    """In shared memory, as many stages as the kernel has barriers for, no more thread blocks than tiles."""
    shape = PUBLISHED[name]
    launcher, _ = make_launcher(monkeypatch)
    layer = KernelOps(empty_weights(shape), launcher, max_tokens=8, max_rows=8).prepared.layers[0]
    if layer.rkv.gemm is None:
        pytest.skip("no tensor cores for this width")
    configs = Gemm(launcher).inputs_configs(n, layer.rkv.gemm, layer.lora)
    assert 0 < len(configs) == len(set(configs)) <= 32
    for config in configs:
        assert (config.height + config.tile) * 128 * config.stages + config.height // 64 * INPUTS_STAGED + 1024 <= 226 << 10
        assert 3 <= config.stages <= MAX_INPUTS_STAGES
        pairs = [math.ceil(rank / config.height) + math.ceil(shape.width / config.height) for rank in layer.lora.ranks if rank]
        tiles = sum(pairs) + 3 * math.ceil(shape.width / config.height)
        assert config.clusters <= tiles * math.ceil(n / config.tile)


def test_steps_differ(monkeypatch):
    """Otherwise the digests show nothing."""
    steps = Steps(monkeypatch, hopper=True)
    ways = steps.every_variant(16)
    assert len(set(ways["rkv"])) == len(ways["rkv"]) > 8
    assert len({steps.decode(n) for n in DECODE}) == len(DECODE)


def test_plain_models_ask_for_no_kernel_of_quantised_ones(monkeypatch):
    """Their library may have none. What is bound in a constructor must be there."""
    named = set()
    launcher, _ = make_launcher(monkeypatch)
    find = kernel_recorder.Library.__getattr__
    monkeypatch.setattr(kernel_recorder.Library, "__getattr__", lambda self, name: named.add(name) or find(self, name))
    for quant in ("", "int8"):
        named.clear()
        launcher.library = kernel_recorder.Library(launcher.library._recorder, hopper=True)
        KernelOps(self_check.random_weights(torch.device("cpu"), quant=quant), launcher, max_tokens=16, max_rows=16)
        assert any("quant" in name or name == "rwkv_turn_over" for name in named) == bool(quant)
        assert "rwkv_gemv" in named


def test_what_was_tuned_is_remembered(monkeypatch, tmp_path):
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    found, timed = [], []
    for _ in range(2):
        with monkeypatch.context() as patch:
            steps, count = Steps(patch, hopper=True), 0
            time = steps.launcher.time

            def counted(run, time=time, **options):
                nonlocal count
                count += 1
                return time(run, **options)

            patch.setattr(steps.launcher, "time", counted)
            steps.tune()
            timed.append(count)
            steps.recorder.content = False
            found.append([steps.decode(n) for n in TUNED])
    assert found[0] == found[1]
    assert timed[0] > 100
    assert timed[1] == 0


@pytest.mark.parametrize("quant", quantized.FORMATS)
def test_a_quantised_matrix_is_made_dense_right_before_its_product(monkeypatch, quant):
    """No product fetches it early; and nothing else of a step is launched differently."""
    launcher, recorder = make_launcher(monkeypatch, content=False)
    weights = self_check.random_weights(torch.device("cpu"), quant=quant)
    ops = KernelOps(weights, launcher, max_tokens=160, max_rows=160)
    model, state = Model(weights, ops), State(weights.shape, 130, shift_dtype=torch.float16, wkv_dtype=torch.float16)
    names = []
    for product in PRODUCTS:
        for variant in ops.variants(product, 128, ops.prepared.layers[0]):
            if variant.method not in (Method.CUBLAS, Method.GEMM):
                continue
            for other in PRODUCTS:
                ops.choose(other, 128, CUBLAS)
            ops.choose(product, 128, variant)
            recorder.clear()
            model.forward(None, CapturedRows.decode(torch.arange(128)), state)
            notes = [note for note in recorder.take() if note[0] in ("rwkv_dequantise", "rwkv_gemm", "cublas")]
            assert [note[0] == "rwkv_dequantise" for note in notes] == [True, False] * (4 * 2 + 1)
            assert not any(note[-1] for note in notes if note[0] == "rwkv_gemm"), "launched to overlap"
            names += [note[0] for note in notes]
    assert {"cublas", "rwkv_gemm"} <= {*names}


@pytest.mark.parametrize("num_tokens", [1, 16])
@pytest.mark.parametrize("quant", quantized.FORMATS)
def test_few_tokens_read_quantised_matrices_as_they_are_stored(monkeypatch, quant, num_tokens):
    launcher, recorder = make_launcher(monkeypatch, content=False)
    weights = self_check.random_weights(torch.device("cpu"), quant=quant)
    ops = KernelOps(weights, launcher, max_tokens=160, max_rows=160)
    model, state = Model(weights, ops), State(weights.shape, 130, shift_dtype=torch.float16, wkv_dtype=torch.float16)
    assert GEMV_RKV in ops.variants("rkv", num_tokens, ops.prepared.layers[0])
    assert GEMV_RKV not in ops.variants("rkv", 17, ops.prepared.layers[0])
    model.forward(None, CapturedRows.decode(torch.arange(num_tokens)), state)
    names = [note[0] for note in recorder.take()]
    assert names.count("rwkv_quant_project") == 2
    assert names.count("rwkv_quant_gemv") == 2 * 2 + 1
    masked = num_tokens > MAX_SPARSE and quant in WHOLE_CODES
    assert names.count("rwkv_quant_sparse_ffn") == 2 * (num_tokens <= MAX_SPARSE)
    assert names.count("rwkv_quant_masked_ffn") == 2 * masked
    assert "rwkv_build_active_mask" not in names  # the product before leaves it
    assert "rwkv_gemm" not in names


@pytest.mark.parametrize("num_tokens", [1, 8, 16])
@pytest.mark.parametrize("quant", quantized.FORMATS)
def test_what_one_layer_offers_every_layer_takes(monkeypatch, quant, num_tokens):
    """The first has no pair for v."""
    launcher, recorder = make_launcher(monkeypatch, content=False)
    weights = self_check.random_weights(torch.device("cpu"), quant=quant)
    ops = KernelOps(weights, launcher, max_tokens=160, max_rows=160)
    model, state = Model(weights, ops), State(weights.shape, 130, shift_dtype=torch.float16, wkv_dtype=torch.float16)
    names = set()
    for product in PRODUCTS:
        for layer in ops.prepared.layers:
            for variant in ops.variants(product, num_tokens, layer):
                ops.choose(product, num_tokens, variant)
                model.forward(None, CapturedRows.decode(torch.arange(num_tokens)), state)
                names |= {note[0] for note in recorder.take()}
                ops.choose(product, num_tokens, None)
    assert "rwkv_quant_gemv" in names
    assert ("rwkv_quant_inputs" in names) == (quant in ("int8", "fp8"))  # others want widths of 512


def test_many_tokens_do_a_product_as_the_nearest_tuned_number_does(monkeypatch):
    launcher, _ = make_launcher(monkeypatch, hopper=True)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    ops = KernelOps(numbered(self_check.random_weights(torch.device("cpu"))), launcher, max_tokens=1100, max_rows=4)
    assert ops.many_tokens == [1024]
    layer = ops.prepared.layers[0]
    tile = ops.gemm.tile_config(1024, layer.rkv.gemm)
    ops.choose("rkv", 1024, Variant(Method.GEMM, tile, LoraPlacement.RESERVED, GroupedConfig(64)))
    ops.choose("output", 1024, Variant(Method.GEMM, tile))
    found = {
        n: (ops.variant("rkv", n, layer.rkv), ops.variant("output", n, layer.output)) for n in (512, 700, 1024, 1500, 1600)
    }
    beside = Variant(Method.GEMM, None, LoraPlacement.CONCURRENT)  # cut up anew, since another number of tokens has other tiles
    assert found[700] == (beside, Variant(Method.GEMM))
    assert found[1024] == (Variant(Method.GEMM, tile, LoraPlacement.RESERVED, GroupedConfig(64)), Variant(Method.GEMM, tile))
    assert found[512] == (CUBLAS, CUBLAS), "too few to be near"
    assert found[1500][0] == beside
    assert found[1600] == (CUBLAS, CUBLAS), "too many"


@pytest.mark.parametrize(("step", "wins"), [(0.9, True), (0.999, False)])
def test_many_tokens_are_done_untuned_unless_a_whole_step_gains(monkeypatch, tmp_path, step, wins):
    """A step takes `step` times as long with every variant but the untuned one; alone, the last variant is the fastest."""
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    launcher, _ = make_launcher(monkeypatch, hopper=True)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    ops = KernelOps(numbered(self_check.random_weights(torch.device("cpu"))), launcher, max_tokens=1024, max_rows=4)
    ways = ("rkv", "output", "ffn_key", "ffn_value")
    untuned = {name: ops.variant(name, 1024, getattr(ops.prepared.layers[0], name)) for name in ways}
    tuner = Autotuner(ops, lambda num_rows: None, prefill_step=lambda size: "step")
    seconds = iter(range(10_000, 0, -1))

    def time(run, rounds=4):
        return 9 * step ** sum(ops._chosen[name, 1024] != untuned[name] for name in ways) if run == "step" else next(seconds)

    monkeypatch.setattr(launcher, "time", time)
    monkeypatch.setattr("rwkv_batch.kernels.autotune.LEAD_ALONE", 1)
    tuner.tune([1024])
    assert [ops._chosen[name, 1024] != untuned[name] for name in ways] == [wins] * 4


@pytest.mark.parametrize(
    ("rows", "heads", "tokens", "spreads"),
    [
        (1, 12, 256, True),
        (1, 64, 4096, True),
        (4, 12, 2048, True),
        (2, 64, 2048, False),  # enough to keep the GPU busy
        (1, 12, 255, False),
        (4, 12, 512, False),  # rows too short
    ],
)
def test_few_long_rows_have_their_recurrence_spread_over_the_gpu(monkeypatch, rows, heads, tokens, spreads):
    mix = Mix(make_launcher(monkeypatch, hopper=True)[0])
    least = (tokens // 16 + rows) * heads * 11136
    room = torch.empty(least, dtype=torch.uint8, device="meta")
    assert mix.spreads(rows, heads, tokens, room) is spreads
    assert not mix.spreads(rows, heads, tokens, room[:-1])
    assert not mix.spreads(rows, heads, tokens, None)
    older = Mix(make_launcher(monkeypatch, hopper=False)[0])
    assert not older.spreads(rows, heads, tokens, room)


def test_a_long_prompt_is_spread_over_the_gpu(monkeypatch):
    steps = Steps(monkeypatch, hopper=True, max_tokens=300)
    for lengths, kernel in (([256], "rwkv_wkv_spread"), ([255], "rwkv_wkv_chunks"), ([200, 56], "rwkv_wkv_chunks")):
        steps.recorder.clear()
        steps.model.forward(torch.arange(sum(lengths)), PackedRows(list(range(len(lengths))), lengths), steps.state)
        names = [note[0] for note in steps.recorder.take()]
        assert [name for name in names if name.startswith("rwkv_wkv")] == [kernel] * len(steps.weights.layers)


def test_tensors_that_do_not_fit_are_named(monkeypatch):
    launcher, _ = make_launcher(monkeypatch)
    linear, dequantise = QuantLinear(launcher), Dequantiser(launcher)
    weight = Weight.quantised(torch.randn(48, 128), "int4")
    matrix = QuantMatrix.of(weight)
    half = {"dtype": torch.float16}
    linear.gemv(torch.zeros(3, 128, **half), matrix, torch.zeros(3, 50, **half))
    for x, out, name in (
        (torch.zeros(3, 64, **half), torch.zeros(3, 48, **half), "x"),
        (torch.zeros(3, 128), torch.zeros(3, 48, **half), "x"),
        (torch.zeros(3, 128, **half), torch.zeros(3, 40, **half), "out"),
        (torch.zeros(3, 128, **half), torch.zeros(4, 48, **half), "out"),
        (torch.zeros(17, 128, **half), torch.zeros(17, 48, **half), "gemv"),
        (torch.zeros(2, 3, 128, **half), torch.zeros(2, 3, 48, **half), "gemv"),
    ):
        with pytest.raises(ValueError, match=name):
            linear.gemv(x, matrix, out)
    with pytest.raises(ValueError, match="out"):
        dequantise(matrix, torch.zeros(48, 64, **half))
    for wrong in (
        replace(weight, values=weight.values.view(torch.int8)),
        replace(weight, values=weight.values[:, :32]),
        replace(weight, scales=weight.scales.float()),
        replace(weight, scales=weight.scales[:40]),
        replace(weight, values=weight.values.view(-1)[8:2056].view(32, 64), scales=weight.scales[:32]),
    ):
        with pytest.raises(ValueError, match=r"values|scales"):
            QuantMatrix.of(wrong)


@pytest.mark.parametrize("num_tokens", [40, 128])
@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_products_of_8_bit_matrices(monkeypatch, quant, num_tokens):
    """Every way is a launch of its own kernel, after one that quantises the tokens if it wants that; squares are taken once."""
    launcher, recorder = make_launcher(monkeypatch, content=False)
    weights = self_check.random_weights(torch.device("cpu"), quant=quant)
    ops = KernelOps(weights, launcher, max_tokens=160, max_rows=160)
    layer, seen = ops.prepared.layers[0], set()
    x, hidden = torch.zeros(num_tokens, self_check.WIDTH).half(), torch.zeros(num_tokens, 4 * self_check.WIDTH).half()
    for variant in ops.variants("ffn_key", num_tokens, layer):
        if variant.method not in QUANT_METHODS:
            continue
        seen.add(variant.method)
        for value in (Variant(Method.CUBLAS), variant):
            ops.choose("ffn_key", num_tokens, variant)
            ops.choose("ffn_value", num_tokens, replace(value, config=None))
            recorder.clear()
            ops.ffn_key(x, layer, hidden)
            names = [note[0] for note in recorder.notes]
            ops.ffn_value(hidden, layer, x)
            notes, by_library = recorder.take(), variant.method is Method.FP8_CUBLAS
            late = by_library and value is variant
            if variant.method is Method.QUANT_GEMM:
                assert names == [f"rwkv_quant_gemm_{quant}"]
            else:
                assert names[:2] == ["rwkv_quantise_rows", "cublas" if by_library else "rwkv_quant_gemm_fp8_fp8"]
            squared = [note for note in notes if note[0] == "rwkv_relu_square"]
            squared += [note for note in notes if note[0] == "rwkv_quantise_rows" and note[-2]]
            squared += [note for note in notes if note[0].startswith("rwkv_quant_gemm") and note[-8]]
            assert len(squared) == 1, notes
            assert late == (squared[0][0] == "rwkv_quantise_rows")
    for variant in ops.variants("rkv", num_tokens, layer):
        if variant.lora is LoraPlacement.RESERVED:
            ops.choose("rkv", num_tokens, variant)
            recorder.clear()
            ops.attention_inputs(ops.begin(num_tokens).mixed, layer)
            assert {note[1] for note in recorder.take() if note[0] == "rwkv_lora_down"} == {"side"}
    expected = {Method.QUANT_GEMM}
    if quant == "fp8" and num_tokens > 64:
        expected |= {Method.FP8, Method.FP8_CUBLAS}
    assert seen == expected


@pytest.mark.parametrize("lengths", [[1, 1, 1], [40, 1, 7]])
def test_reference_ops_in_the_place_of_kernels_compute_the_same(monkeypatch, lengths):
    """With all of them replaced, nothing that a kernel should have computed is used."""
    launcher, _ = make_launcher(monkeypatch)
    weights = self_check.random_weights(torch.device("cpu"))
    ops = self_check.PartlyReferenceOps(weights, launcher, frozenset(self_check.OPS), max_tokens=64, max_rows=8)
    results = []
    for model in (Model(weights), Model(weights, ops)):
        state = State(weights.shape, 4, shift_dtype=torch.float16)
        tokens = torch.arange(sum(lengths))
        results.append(
            [model.forward(tokens, PackedRows([2, 0, 1], lengths), state).float().clone() for _ in range(2)] + [state.wkv]
        )
    for expected, got in zip(*results, strict=True):
        assert (got - expected).norm() <= 1e-2 * expected.norm()


def test_what_was_measured_on_such_cards_is_not_timed(monkeypatch, tmp_path):
    def tuned(folder: str) -> tuple[dict, int]:
        monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / folder))
        measured.measured.cache_clear()
        steps, timed = Steps(monkeypatch, hopper=True), []
        time = steps.launcher.time
        monkeypatch.setattr(steps.launcher, "time", lambda run, rounds=4: timed.append(1) or time(run, rounds))
        Autotuner(steps.ops, steps.decode_step).tune([1, 70])
        return steps.ops._chosen, len(timed)

    shipped = tmp_path / "shipped"
    monkeypatch.setattr(measured, "FOLDER", shipped)
    first, num_timed = tuned("a")
    assert num_timed > 50
    found = measured.Measured(sources=compiler.sources_digest())
    known = msgspec.json.decode((tmp_path / "a" / "variants-no-card.json").read_bytes(), type=dict[str, Variant])
    digest = "cuda-sm_90a-0123"
    found.variants = {measured.portable(key.replace("digest", digest), digest): way for key, way in known.items()}
    assert all(",cuda-sm_90a," in key for key in found.variants)
    shipped.mkdir()
    monkeypatch.setattr(kernel_recorder.Library, "_name", "/kernels/cuda-sm_90a-4567.so")  # of another compiler
    try:
        for sources, expected in ((found.sources, 0), ("others", num_timed)):
            found.sources = sources
            measured.file_of("no card").write_bytes(msgspec.json.encode(found))
            assert tuned(sources) == (first, expected)
        some = {key: way for key, way in found.variants.items() if key.startswith("rkv,")}
        measured.file_of("no card").write_bytes(msgspec.json.encode(measured.Measured(compiler.sources_digest(), some)))
        assert 0 < tuned("some")[1] < num_timed
        measured.file_of("no card").write_text("[")
        assert tuned("broken") == (first, num_timed)
    finally:
        measured.measured.cache_clear()


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv(compiler.CACHE_VARIABLE, folder)
        GOLDEN.write_text(json.dumps(record(patch), indent=1) + "\n")
    sys.exit(0)
