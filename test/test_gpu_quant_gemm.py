"""Products with 8-bit matrices on Hopper against the dequantised matrix: values, and that a row depends on itself alone."""

import pytest
import torch

from rwkv_batch.kernels.gemm import TileConfig
from rwkv_batch.kernels.quant.gemm import FP8_TILES, MAX_CLUSTER, SPLITS, TILES, configs, stage_bytes
from rwkv_batch.kernels.quant.matrix import QuantMatrix
from rwkv_batch.kernels.quant.rows import Order, QuantRows
from rwkv_batch.model.weight import Weight

pytestmark = pytest.mark.gpu

FP16_ERROR = 4e-4  # relative RMS: results are rounded to fp16, sums are fp32, values exact
FP8_ERROR = 3e-3  # the tensor cores keep some 14 bits of a sum of e4m3
KINDS = [("int8", False), ("fp8", False), ("fp8", True)]  # format, and whether x is quantised


@pytest.fixture(scope="module")
def gemm(launcher):
    """The product; the test is skipped where there is none."""
    from rwkv_batch.kernels.quant.gemm import QuantGemm

    product = QuantGemm(launcher)
    if not product.available:
        pytest.skip("needs a Hopper GPU")
    return product


@pytest.fixture(scope="module")
def quantiser(launcher):
    from rwkv_batch.kernels.quant.rows import RowQuantiser

    return RowQuantiser(launcher)


def random(*shape, scale=1.0):
    """Normal numbers, one in a thousand columns 30 times as large."""
    columns = (torch.rand(shape[-1], device="cuda") < 1e-3) * 29.0 + 1
    return (torch.randn(*shape, device="cuda") * columns * scale).half()


def quantised(format, *shape, transposed=False):
    return Weight.quantised(random(*shape, scale=shape[-1] ** -0.5), format, transposed=transposed)


def dense(weight):
    """The matrix [.., M, K] in fp64."""
    matrix = weight.dense(torch.float32).double()
    return matrix.mT if weight.transposed else matrix


class Inputs:
    """Rows of x as a kernel takes them, and what they mean in fp64."""

    def __init__(self, x, quantiser, rows, order=Order.FRAGMENTS):
        self.given, self.exact = x, x.double()
        if rows:
            self.given = quantiser(x, QuantRows.empty(x.shape, order, x.device))
            self.exact = meaning(self.given)


def meaning(rows):
    """The numbers of quantised rows in fp64, in their natural order."""
    values = rows.values.double()
    if rows.order is not Order.NATURAL:
        fragment = -3 if rows.order is Order.LIKE_WEIGHTS else -4  # of the axes: quarter or fragment, later half, odd
        blocks = values.unflatten(-1, (-1, 4, 4, 2, 2)).movedim(fragment, -4)  # fragment, quarter, later half, odd
        values = blocks.transpose(-3, -2).flatten(-5)
    return values * rows.scales.double()[..., None]


def multiply(gemm, given, handle, width=None, **options):
    """The product into an output full of NaN."""
    values = given.values if isinstance(given, QuantRows) else given
    shape = (*values.shape[:-1], width or handle.source.M)
    return gemm.gemm(given, handle, torch.full(shape, torch.nan, dtype=torch.float16, device="cuda"), **options)


def relative_error(out, reference):
    return ((out.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("K", [64, 768, 2048, 2560, 4096, 16384])
def test_rows(quantiser, K, order):
    torch.manual_seed(K)
    x = random(37, K)
    x[3] = 0
    for relu_square in (False, True):
        rows = quantiser(x, QuantRows.empty(x.shape, order, "cuda"), relu_square=relu_square)
        expected = x.double().clamp(min=0) ** 2 if relu_square else x.double()
        largest = expected.abs().amax(1)
        assert torch.allclose(rows.scales.double() * 448, largest, rtol=1e-6)
        error = (meaning(rows) - expected).abs()
        assert (error <= expected.abs() / 16 + largest[:, None] / 448 / 1000).all()
    x[5, 7] = torch.nan
    assert meaning(quantiser(x, rows)).isnan().any(1).nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("shape", [(64, 64), (1024, 320), (16384, 4096)])
def test_turn_over(quantiser, shape):
    matrix = torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)
    out = torch.empty(shape[::-1], dtype=torch.float8_e4m3fn, device="cuda")
    quantiser.turn_over(matrix, out)
    assert torch.equal(out.view(torch.uint8), matrix.view(torch.uint8).T)


SHAPES = [(64, 64), (320, 192), (768, 768), (3072, 768), (1024, 4160), (2560, 2560), (4096, 4096)]


@pytest.mark.parametrize(("format", "rows"), KINDS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("M", "K"), SHAPES)
def test_values(gemm, quantiser, M, K, transposed, format, rows):
    torch.manual_seed(M + K + transposed)
    weight = quantised(format, *((K, M) if transposed else (M, K)), transposed=transposed)
    handle, w = gemm.prepare(QuantMatrix.of(weight)), dense(weight)
    for n in (8, 9, 16, 31, 64, 65, 128, 200, 320, 513, 960):
        x = Inputs(random(n, K), quantiser, rows)
        reference, limit = x.exact @ w.T, FP8_ERROR if rows else FP16_ERROR
        assert relative_error(multiply(gemm, x.given, handle), reference) < limit, n
        squared = multiply(gemm, x.given, handle, relu_square=True)
        assert relative_error(squared, (reference.clamp(min=0) ** 2).clamp(max=65504)) < 2 * limit, n


@pytest.mark.parametrize(("format", "rows"), KINDS)
def test_stacked(gemm, quantiser, format, rows):
    """Three products with inputs of their own in one launch, tiles that stick out of one not reaching into the next."""
    torch.manual_seed(1)
    weight = quantised(format, 3, 576, 320)
    handle, w = gemm.prepare(QuantMatrix.of(weight)), dense(weight)
    for n in (7, 33, 130, 330):
        x = Inputs(random(3, n, 320), quantiser, rows)
        assert relative_error(multiply(gemm, x.given, handle), x.exact @ w.mT) < FP8_ERROR


@pytest.mark.parametrize(("format", "rows"), KINDS)
def test_rows_of_the_head(gemm, quantiser, format, rows):
    """A number of weight rows that is no multiple of anything, in an output that is wider."""
    weight = quantised(format, 1001, 512)
    handle = gemm.prepare(QuantMatrix.of(weight))
    for n in (9, 70, 300):
        x = Inputs(random(n, 512), quantiser, rows)
        out = multiply(gemm, x.given, handle, width=1008)
        assert relative_error(out[:, :1001], x.exact @ dense(weight).T) < FP8_ERROR
        assert not out[:, 1001:].any()


@pytest.mark.parametrize(("format", "rows"), KINDS)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_config(gemm, quantiser, transposed, format, rows):
    """Any cut gives the same product, the same each time."""
    torch.manual_seed(2)
    M, K, n = 448, 1088, 150
    weight = quantised(format, *((K, M) if transposed else (M, K)), transposed=transposed)
    handle, x = gemm.prepare(QuantMatrix.of(weight)), Inputs(random(n, K), quantiser, rows)
    reference = x.exact @ dense(weight).T
    for height, tiles in (FP8_TILES if rows else TILES).items():
        for tile in tiles:
            for split in SPLITS:
                for stages, clusters, cast in ((3, 1, 1), (3, 3, 1), (2, 100, 1), (3, 1, 2), (3, 100, 2), (3, 2, 4)):
                    if split * cast > MAX_CLUSTER or (not rows and tile < 8 * cast):
                        continue
                    config = TileConfig(height, tile, split, stages, clusters, cast)
                    out = multiply(gemm, x.given, handle, config=config)
                    assert relative_error(out, reference) < FP8_ERROR, config
                    assert torch.equal(out, multiply(gemm, x.given, handle, config=config)), config


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("n", [9, 16])
def test_active_mask(gemm, n, format):
    """Which columns are not all zeros, also where squares of the smallest sums round to zero."""
    handle = gemm.prepare(QuantMatrix.of(quantised(format, 8256, 512)))
    x = random(n, 512, scale=1 / 1000) * (torch.rand(n, 1, device="cuda") < 0.6)
    x[0] = 0
    for height in TILES:
        config = TileConfig(height, 16, 1, 3, 50)
        active_mask = torch.full((258,), -1, dtype=torch.int32, device="cuda")
        out = multiply(gemm, x, handle, relu_square=True, config=config, active_mask=active_mask)
        bits = active_mask[:, None] >> torch.arange(32, device="cuda") & 1
        assert torch.equal(bits.flatten().bool(), (out != 0).any(0)), config
    with pytest.raises(ValueError, match="active_mask"):
        multiply(gemm, x, handle, config=config._replace(split=2), active_mask=active_mask)


@pytest.mark.parametrize(("format", "rows"), KINDS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("M", "K"), [(768, 768), (4096, 4096), (4096, 16384)])
def test_a_row_depends_on_itself_alone(gemm, quantiser, M, K, transposed, format, rows):
    """Bit-equal whatever the other rows, the position, NaN next to it; and the number of rows, where K is split alike."""
    torch.manual_seed(3)
    weight = quantised(format, *((K, M) if transposed else (M, K)), transposed=transposed)
    handle, row, expected = gemm.prepare(QuantMatrix.of(weight)), random(1, K), {}
    for n in (8, 16, 40, 64, 128, 320, 960):
        x = random(n, K)
        x[n // 2] = row
        out = multiply(gemm, Inputs(x, quantiser, rows).given, handle)[n // 2]
        config = gemm.tile_configs(n, handle, quantised_rows=rows)[0]
        assert torch.equal(out, expected.setdefault((config.split, rows and config.tile > 96), out)), n
        for position in (0, n - 1):
            x = torch.full((n, K), torch.nan, dtype=torch.float16, device="cuda")
            x[position] = row
            assert torch.equal(multiply(gemm, Inputs(x, quantiser, rows).given, handle)[position], out), (n, position)


def test_in_a_graph_after_writers_of_its_input(gemm, quantiser):
    """Starting early, a product still sees what the kernels before it wrote, and leaves its output to those after it."""
    torch.manual_seed(4)
    C = 1024
    handles = [gemm.prepare(QuantMatrix.of(quantised("fp8", C, C))) for _ in range(8)]
    x = random(96, C)
    rows = QuantRows.empty(x.shape, Order.FRAGMENTS, "cuda")
    y, z = torch.empty_like(x), torch.empty_like(x)

    def run(quantise):
        gemm.gemm(x, handles[0], y)
        for handle in handles[1:]:
            gemm.gemm(quantiser(y, rows) if quantise else y, handle, z)
            y.copy_(z)

    for quantise in (False, True):
        gemm.launcher.use_current_stream()
        run(quantise)
        expected = z.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gemm.launcher.use_current_stream()
            run(quantise)
        for _ in range(20):
            z.fill_(torch.nan)
            graph.replay()
            assert torch.equal(z, expected)
        gemm.launcher.use_current_stream()


@pytest.mark.parametrize("fast", [False, True])
def test_cublaslt(launcher, quantiser, fast):
    """cuBLASLt's product of e4m3, with scales of rows on both sides."""
    from rwkv_batch.kernels.quant.cublaslt_fp8 import MatMulFp8

    matmul = MatMulFp8(launcher, fast=fast)
    if not matmul.available:
        pytest.skip("no such product in this cuBLAS")
    for M, K in ((768, 768), (4096, 1024)):
        weight = quantised("fp8", M, K)
        for n in (16, 33, 320, 960):
            x = Inputs(random(n, K), quantiser, True, Order.LIKE_WEIGHTS)
            out = torch.full((n, M), torch.nan, dtype=torch.float16, device="cuda")
            matmul(x.given, weight.values, weight.scales, out)
            assert relative_error(out, x.exact @ dense(weight).T) < (3e-3 if fast else 1e-3), (M, K, n)


def test_configs_fit():
    """Every offer has at least two stages, and no more shared memory than a multiprocessor has."""
    for fp8 in (False, True):
        for n in (8, 16, 64, 100, 320, 960, 4096):
            for m, k in ((64, 64), (768, 3072), (2048, 8192), (4096, 4096), (65536, 4096)):
                offer = configs(n, m, k, 1, 132, fp8)
                assert offer, (n, m, k)
                for config in offer:
                    stages = stage_bytes(config.height, config.tile, config.stages, fp8)
                    sums = config.tile * (config.height + 4) * 4 * (config.split > 1)
                    assert config.stages >= 2, config
                    assert max(stages, sums) <= 225 << 10, config
