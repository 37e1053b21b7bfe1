"""Kernels that read quantised matrices, against float64 on what the codes mean; and engines of quantised models.

Every format, sizes of published models, columns of large values.

Up to 16 tokens only the sums in fp32 and the result's fp16 round. A weight that was made fp16 has 2^-11 of itself as well.
"""

import pytest
import torch

from bench.synth_checkpoint import synth
from rwkv_batch.config import Config
from rwkv_batch.engine import build
from rwkv_batch.kernels import compiler
from rwkv_batch.model.packed_rows import CapturedRows, PackedRows
from rwkv_batch.model.quantized import FORMATS, Quantisation
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.model.weight import Weight
from rwkv_batch.model.weights import from_tensors

pytestmark = pytest.mark.gpu

FEW = (16, 1, 2, 3, 7, 8, 9, 15)
HALF_EPS = 2.0**-11
SUM_EPS = 2e-6  # of fp32 sums, relative to the sum of absolute values
# Published widths with the heights of their products; widths that only the kernel of all other cases takes; an odd height.
SHAPES = [(3, 768, 768), (1, 4096, 1024), (3, 2048, 2048), (1, 10240, 2560), (1, 16384, 4096), (3, 4096, 4096), (1, 5120, 5120)]
ODD = [(1, 320, 320), (1, 1001, 1024), (1, 65529, 768), (2, 24, 64)]
PAIRS = [(512, (32, 32, 32, 64)), (768, (64, 64, 32, 128)), (2048, (96, 96, 64, 256)), (4096, (128, 128, 96, 480))]
WHOLE = ("int8", "fp8", "int4", "nf4")
RELATIVE = 1e-2  # of logits
ROUNDED_TOKENS = 0.2  # the same where tokens become e4m3: in a random model, what that does to each product adds up
_engines: dict[tuple, object] = {}


@pytest.fixture(scope="module")
def quant(launcher):
    from rwkv_batch.kernels.quant.few_tokens import QuantLinear

    return QuantLinear(launcher, pdl=True)


@pytest.fixture(scope="module")
def linear(launcher):
    from rwkv_batch.kernels.linear import Linear

    return Linear(launcher, pdl=True)


def random(*shape, scale=1.0, seed=0, dtype=torch.float16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)


def empty(*shape, dtype=torch.float16):
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def matrix(name, *shape, transposed=False, seed=1):
    """(what kernels read, what it means in fp32); one column in a thousand is thirty times as large."""
    from rwkv_batch.kernels.quant.matrix import QuantMatrix

    values = random(*shape, scale=shape[-2 if transposed else -1] ** -0.5, seed=seed)
    values[..., 7::1000] *= 30
    weight = Weight.quantised(values, name, transposed=transposed)
    return QuantMatrix.of(weight), weight.dense()


def sparse_hidden(n, f, seed=3):
    generator = torch.Generator("cuda").manual_seed(seed)
    on = torch.rand(n, f, generator=generator, device="cuda") < 0.25
    return random(n, f, seed=seed).clamp_min_(0) * on


def assert_close(out, x, dense, extra=0.0):
    """`out` is x [.., N, K] times dense [.., M, K], transposed; extra: what each product may be off by, relatively."""
    exact = x.double() @ dense.double().mT
    sums = x.double().abs() @ dense.double().abs().mT
    excess = (out.double() - exact).abs() - SUM_EPS * sums - exact.abs() * HALF_EPS * 1.01 - 1e-7
    if extra:  # errors of single products are independent
        excess -= 6 * extra * (x.double().square() @ dense.double().square().mT).sqrt()
    assert out.isfinite().all()
    assert excess.max() <= 0, f"off by {float(excess.max()):.2e} more than rounding explains"


class TestDequantise:
    @pytest.mark.parametrize("transposed", [False, True])
    @pytest.mark.parametrize("name", FORMATS)
    def test_each_value_is_rounded_once(self, launcher, name, transposed):
        from rwkv_batch.kernels.quant.dequantise import Dequantiser

        for shape in ((64, 64), (1000, 768), (4096, 320)) + (((3, 512, 2048),) if not transposed else ()):
            quantised, dense = matrix(name, *shape, transposed=transposed)
            out = empty(*shape)
            Dequantiser(launcher)(quantised, out)
            assert ((out.double() - dense.double()).abs() <= dense.double().abs() * HALF_EPS * 1.01 + 3e-8).all()

    def test_rows_behind_the_matrix_stay(self, launcher):
        from rwkv_batch.kernels.quant.dequantise import Dequantiser

        quantised, _ = matrix("int8", 13, 128)
        out = empty(16, 128)
        Dequantiser(launcher)(quantised, out)
        assert out[:13].isfinite().all()
        assert out[13:].isnan().all()


class TestGemv:
    @pytest.mark.parametrize("shape", SHAPES + ODD, ids=str)
    @pytest.mark.parametrize("name", FORMATS)
    def test_against_float64(self, quant, name, shape):
        """And the same bits for any number of tokens."""
        problems, rows, width = shape
        quantised, dense = matrix(name, *shape)
        tokens, whole = random(problems, 16, width), None
        for n in FEW:
            x, out = tokens[:, 16 - n :].contiguous(), empty(problems, n, -(-rows // 8) * 8)
            quant.gemv(x, quantised, out)
            out = out[..., :rows]
            assert_close(out, x, dense)
            whole = out if n == 16 else whole
            assert torch.equal(out, whole[:, 16 - n :])

    @pytest.mark.parametrize("width", [1024, 5120])
    @pytest.mark.parametrize("name", FORMATS)
    def test_relu_square(self, quant, name, width):
        quantised, dense = matrix(name, 4096, width)
        x, out = random(3, width, scale=200), empty(3, 4096)
        quant.gemv(x, quantised, out, relu_square=True)
        exact = x.double() @ dense.double().mT
        bound = SUM_EPS * (x.double().abs() @ dense.double().abs().mT)
        assert (exact > 256).any()  # squares beyond fp16 are clamped
        square = exact.clamp(min=0).square().clamp(max=65504)
        assert (
            (out.double() - square).abs() <= 2 * exact.abs() * bound + bound * bound + square * HALF_EPS * 1.01 + 1e-7
        ).all()

    @pytest.mark.parametrize("width", [512, 5120])
    @pytest.mark.parametrize("name", FORMATS)
    def test_tells_which_units_are_on(self, quant, name, width):
        quantised, _ = matrix(name, 4096, width)
        for n in FEW:
            x = random(1, width) * torch.linspace(0.5, 2, n, device="cuda")[:, None].half()  # so that few are on in any
            out, mask = empty(n, 4096), torch.full((128,), -7, dtype=torch.int32, device="cuda")
            quant.gemv(x, quantised, out, relu_square=True, active_mask=mask)
            bits = mask[:, None] >> torch.arange(32, device="cuda") & 1
            on, positive = bits.flatten().bool(), (out > 0).any(0)
            assert on[positive].all()
            assert (on & ~positive).sum() <= 4  # a square may be too small for fp16

    @pytest.mark.parametrize("name", FORMATS)
    def test_what_others_hold_changes_no_bit(self, quant, name):
        quantised, _ = matrix(name, 1024, 2048)
        x, out, other = random(11, 2048), empty(11, 1024), empty(11, 1024)
        quant.gemv(x, quantised, out)
        order = torch.randperm(11, device="cuda")
        quant.gemv(x[order].contiguous(), quantised, other)
        assert torch.equal(other, out[order])
        x[1:] = torch.inf
        quant.gemv(x, quantised, other)
        assert torch.equal(other[0], out[0])


def random_lora(width, ranks, *, has_v=True):
    from rwkv_batch.kernels.linear import Lora

    ranks = tuple(r if has_v or i != 2 else 0 for i, r in enumerate(ranks))
    down, up = random(sum(ranks), width, scale=width**-0.5, seed=5), random(sum(ranks) * width, scale=0.1, seed=6)
    w0, a0, v0 = random(3, width, seed=7, dtype=torch.float32).unbind()
    return Lora(down, up, w0.clone(), a0.clone(), v0.clone() if has_v else None, ranks)


class TestProject:
    @pytest.mark.parametrize("n", [1, 3, 8, 9, 16])
    @pytest.mark.parametrize(("width", "ranks"), PAIRS)
    @pytest.mark.parametrize("name", FORMATS)
    def test_equals_its_parts(self, quant, linear, name, width, ranks, n):
        quantised, dense = matrix(name, 3, width, width)
        lora, mixed = random_lora(width, ranks, has_v=n != 3), random(6, n, width)
        rkv, alone, hidden, expected = empty(3, n, width), empty(3, n, width), empty(n, lora.rank), empty(n, lora.rank)
        quant.project(mixed, quantised, lora, rkv, hidden)
        quant.gemv(mixed[:3], quantised, alone)
        linear.lora_down(mixed, lora, expected)
        assert torch.equal(rkv, alone)
        assert_close(rkv, mixed[:3], dense)
        torch.testing.assert_close(hidden, expected, atol=1e-3, rtol=2e-3)

    @pytest.mark.parametrize("n", [1, 8, 13])
    @pytest.mark.parametrize(("width", "ranks"), PAIRS)
    @pytest.mark.parametrize("name", WHOLE)
    def test_both_halves_of_the_pairs_beside_it(self, quant, linear, name, width, ranks, n):
        """In every way that is offered, again and again."""
        quantised, dense = matrix(name, 3, width, width)
        lora, mixed = random_lora(width, ranks, has_v=n != 8), random(6, n, width)

        def gates():
            return [empty(n, width, dtype=torch.float32), *(empty(n, width) for _ in range(3))]

        hidden, expected = empty(n, lora.rank), gates()
        linear.lora_down(mixed, lora, hidden)
        linear.lora_up(hidden, lora, *expected)
        for config in quant.inputs_configs(n, quantised, lora):
            for _ in range(5):
                rkv, got, hidden = empty(3, n, width), gates(), empty(n, lora.rank)
                quant.inputs(mixed, quantised, lora, rkv, hidden, tuple(got), config)
                assert_close(rkv, mixed[:3], dense)
                for one, other in zip(got, expected, strict=True):
                    torch.testing.assert_close(one, other, atol=2e-3, rtol=4e-3, equal_nan=True)
                assert lora.v0 is not None or got[2].isnan().all()


class TestSparse:
    @pytest.mark.parametrize(("f", "c"), [(1280, 320), (3072, 768), (8192, 2048), (16384, 4096), (1000, 128), (20480, 5120)])
    @pytest.mark.parametrize("name", FORMATS)
    def test_against_float64(self, quant, linear, name, f, c):
        quantised, dense = matrix(name, f, c, transposed=True)
        whole = sparse_hidden(16, f)
        first = {}
        for n in (1, 2, 8, 11, 16):
            hidden, out = whole[:n].contiguous(), empty(n, c)
            if n <= 8:
                quant.sparse_ffn(hidden, quantised, out)
                assert_close(out, hidden, dense.mT)
                assert torch.equal(out[0], first.setdefault("sparse", out[0]))
            if quant.masked_ffn_fits(n, quantised):
                mask, out = torch.empty(f // 32, dtype=torch.int32, device="cuda"), empty(n, c)
                linear.build_active_mask(hidden, mask)
                quant.masked_ffn(hidden, mask, quantised, out)
                assert_close(out, hidden, dense.mT, extra=HALF_EPS if FORMATS[name].grouped else 0)
                assert torch.equal(out[0], first.setdefault("masked", out[0]))
                mask.fill_(-1)
                again = empty(n, c)
                quant.masked_ffn(hidden, mask, quantised, again)
                assert torch.equal(again, out)
        if quant.hopper and name in WHOLE and f % 32 == 0 and c % 128 == 0:
            assert "masked" in first


@pytest.mark.parametrize("name", FORMATS)
def test_the_start_check_finds_nothing_here(launcher, name):
    from rwkv_batch.kernels import self_check

    assert self_check.failing(launcher, torch.float16, quant=name) == []


@torch.inference_mode()
@pytest.mark.parametrize("name", FORMATS)
def test_an_engine_says_what_the_reference_says(name):
    """Logits of decode and prefill; greedy tokens are the same in any company and slot of one size of graph."""
    engine = engine_of(name)
    weights, device = engine.model.weights, torch.device("cuda:0")
    judge, state = Model(weights), State(weights.shape, 16, device="cuda")
    tokens = torch.randint(1, 4096, (24, 8), generator=torch.Generator("cuda").manual_seed(3), device="cuda")
    slots = [3, 0, 9, 15, 7, 4, 12, 1]
    index = torch.tensor(slots, device="cuda")
    engine.state.clear(slots)
    got, expected = [], []
    for step in tokens:
        engine.state.last_ids[index] = step
        got.append(engine.model.forward(None, CapturedRows.decode(index), engine.state).float())
        expected.append(judge.forward(step, PackedRows(slots, [1] * 8, device), state).float())
    text = tokens.flatten()
    for model, where, logits in ((engine.model, engine.state, got), (judge, state, expected)):
        where.clear([5, 6])
        logits.append(model.forward(text, PackedRows([5, 6], [150, 42], device), where).float().clone())
    relative = (torch.cat(got) - torch.cat(expected)).norm() / torch.cat(expected).norm()
    assert relative <= (ROUNDED_TOKENS if name == "fp8" else RELATIVE)


@torch.inference_mode()
@pytest.mark.parametrize("name", FORMATS)
def test_rows_do_not_depend_on_their_company(name):
    engine = engine_of(name)

    def decode(slots, batch):
        """Ids that `batch` of the slots are led to, each from an id of its own."""
        engine.state.clear(range(24))
        engine.state.last_ids.copy_(torch.arange(24, device="cuda") % 8 + 5)
        return [engine.graphs.replay(slots[:batch])[0].ids.tolist() for _ in range(12)]

    for batches in ([1], [8, 5, 7], [16, 9, 15]):
        whole = decode(list(range(16)), batches[0])
        for batch in batches[1:]:
            assert decode(list(range(16)), batch) == [step[:batch] for step in whole]
        moved = decode([slot + 8 for slot in range(16)], batches[0])  # which hold the same ids
        assert moved == whole


def engine_of(name):
    key = name, "engine"
    if key not in _engines:
        _engines.clear()  # one at a time is enough memory
        tensors = synth((4, 1024, 64, 64, 32, 128, 1.15), vocab=4096, seed=7, device="cuda", place="cuda")
        weights = from_tensors(tensors, dtype=torch.float16, device="cuda:0", progress=False, quant=Quantisation(name))
        _engines[key] = build.build_engine(
            Config(ops="kernels"), weights, 24, max_tokens=256, library=compiler.library(), graph_sizes=[1, 8, 16, 24]
        )
    return _engines[key]
