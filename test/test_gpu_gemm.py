"""The Hopper matrix product against torch in fp32: values, and that a row depends on itself alone."""

import pytest
import torch

from rwkv_batch.kernels.gemm import TileConfig

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gemm():
    """The product; the test is skipped where there is none."""
    from rwkv_batch.kernels.compiler import library
    from rwkv_batch.kernels.gemm import Gemm
    from rwkv_batch.kernels.launch import Launcher

    product = Gemm(Launcher(library(0), "cuda:0"))
    if not product.available:
        pytest.skip("needs a Hopper GPU")
    product.launcher.use_current_stream()
    return product


def random(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).half()


def multiply(gemm, x, matrix, **options):
    """The product into an output full of NaN."""
    out = torch.full((*x.shape[:-1], matrix.M), torch.nan, dtype=torch.float16, device="cuda")
    return gemm.gemm(x, matrix, out, **options)


def relative_error(out, reference):
    return ((out.double() - reference).norm() / reference.norm()).item()


SHAPES = [(64, 64), (320, 64), (64, 320), (768, 768), (3072, 768), (2048, 2048), (4096, 1024), (192, 4096), (1024, 4160)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("M", "K"), SHAPES)
def test_values(gemm, M, K, transposed):
    torch.manual_seed(M + K + transposed)
    weight = random(K, M) if transposed else random(M, K)
    matrix = gemm.prepare(weight, transposed)
    w = (weight if transposed else weight.T).double()
    for n in (1, 5, 8, 9, 16, 31, 64, 65, 100, 128, 160, 161, 200, 256, 257, 320, 513, 960):
        x = random(n, K, scale=K**-0.5)
        reference = x.double() @ w
        assert relative_error(multiply(gemm, x, matrix), reference) < 4e-4, n
        squared = multiply(gemm, x, matrix, relu_square=True)
        assert relative_error(squared, reference.clamp(min=0) ** 2) < 4e-4, n


@pytest.mark.parametrize("n", [1, 5, 8, 9, 16])
def test_active_mask(gemm, n):
    """Which columns are not all zeros, also where squares of the smallest sums round to zero."""
    matrix = gemm.prepare(random(8256, 512))
    x = random(n, 512, scale=512**-0.5 / 1000) * (torch.rand(n, 1, device="cuda") < 0.6)
    x[0] = 0
    configs = [TileConfig(height, 8 if n <= 8 else 16, 1, 4, clusters) for height in (64, 128) for clusters in (129, 20)]
    expected = multiply(gemm, x, matrix, relu_square=True, config=configs[0])
    for config in configs:
        active_mask = torch.full((258,), -1, dtype=torch.int32, device="cuda")
        out = multiply(gemm, x, matrix, relu_square=True, config=config, active_mask=active_mask)
        bits = active_mask[:, None] >> torch.arange(32, device="cuda") & 1
        assert torch.equal(bits.flatten().bool(), (out != 0).any(0)), config
        assert torch.equal(out, expected), config
    with pytest.raises(ValueError, match="active_mask"):
        multiply(gemm, x, matrix, active_mask=active_mask[:5])
    with pytest.raises(ValueError, match="active_mask"):
        multiply(gemm, x, matrix, config=configs[0]._replace(split=2), active_mask=active_mask)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked(gemm, transposed):
    """Three products with inputs of their own in one launch, tiles that stick out of one not reaching into the next."""
    torch.manual_seed(1)
    K, M = 320, 576
    weight = random(3, K, M) if transposed else random(3, M, K)
    matrix = gemm.prepare(weight, transposed)
    for n in (1, 7, 33, 130, 330):
        x = random(3, n, K, scale=K**-0.5)
        reference = x.double() @ (weight if transposed else weight.mT).double()
        assert relative_error(multiply(gemm, x, matrix), reference) < 4e-4


@pytest.mark.parametrize("transposed", [False, True])
def test_every_config(gemm, transposed):
    """Any cut gives the same product."""
    from rwkv_batch.kernels.gemm import TILES, TileConfig

    torch.manual_seed(2)
    M, K, n = 448, 1088, 150
    weight = random(K, M) if transposed else random(M, K)
    matrix = gemm.prepare(weight, transposed)
    x = random(n, K, scale=K**-0.5)
    reference = x.double() @ (weight if transposed else weight.T).double()
    for height, tiles in TILES.items():
        for tile in tiles:
            for split in (1, 2, 4, 8):
                for stages, clusters in ((3, 1), (3, 3), (4, 100)):
                    config = TileConfig(height, tile, split, stages, clusters)
                    assert relative_error(multiply(gemm, x, matrix, config=config), reference) < 4e-4, config


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("M", "K"), [(448, 1088), (64, 64), (768, 3072), (2048, 2048), (4096, 4096)])
def test_a_copy_in_tiles_gives_the_same_bits(gemm, M, K, transposed):
    """In every cut, also where a tile of 128 rows has half a piece too many."""
    from rwkv_batch.kernels.gemm import TILES, TileConfig
    from rwkv_batch.kernels.tiled import tiles_of

    torch.manual_seed(5)
    weight = random(K, M) if transposed else random(M, K)
    matrix, copy = gemm.prepare(weight, transposed), gemm.prepare(torch.zeros_like(weight), transposed)
    copy.tiled = tiles_of(weight.T if transposed else weight)
    splits = [split for split in (1, 2, 4, 8) if 64 * split <= K]
    for n in (1, 8, 40, 64, 150, 320):
        x = random(n, K, scale=K**-0.5)
        for height, tiles in TILES.items():
            for tile, split in ((tile, split) for tile in tiles for split in splits):
                for config in (TileConfig(height, tile, split, 3, 3), TileConfig(height, tile, split, 4, 100)):
                    outs = [multiply(gemm, x, each, config=config, relu_square=n == 40) for each in (matrix, copy)]
                    assert torch.equal(*outs), (n, config)


@pytest.mark.parametrize("width", [320, 768, 2048, 4096])
def test_copies_of_stacked_weights(gemm, width):
    """r, k and v alone, and with the first halves of the low-rank pairs."""
    from rwkv_batch.kernels.tiled import tiles_of

    torch.manual_seed(width)
    ranks = (32, 32, 32, 64)
    weight, down = random(3, width, width), random(sum(ranks), width)
    matrix, copy = gemm.prepare(weight), gemm.prepare(torch.zeros_like(weight))
    copy.tiled = tiles_of(weight)
    pairs = gemm.prepare_lora(down, ranks)

    def half(*dims):
        return torch.full(dims, torch.nan, dtype=torch.float16, device="cuda")

    for n in (1, 8, 33, 64, 130):
        x = random(6, n, width, scale=width**-0.5)
        for config in gemm.tile_configs(n, matrix):
            assert torch.equal(*(multiply(gemm, x[:3], each, config=config) for each in (matrix, copy))), (n, config)
        for config in gemm.project_configs(n, matrix, pairs):
            found = [(half(3, n, width), half(n, sum(ranks))) for _ in range(2)]
            for each, outs in zip((matrix, copy), found, strict=True):
                gemm.project(x, each, pairs, *outs, config)
            assert all(map(torch.equal, *found)), (n, config)


def test_relu_square_saturates(gemm):
    matrix = gemm.prepare(torch.full((64, 64), 4.0, dtype=torch.float16, device="cuda"))
    out = multiply(gemm, torch.full((3, 64), 4.0, dtype=torch.float16, device="cuda"), matrix, relu_square=True)
    assert (out == 65504).all()
    nan = torch.full((3, 64), torch.nan, dtype=torch.float16, device="cuda")
    assert multiply(gemm, nan, matrix, relu_square=True).isnan().all()


@pytest.mark.parametrize(("M", "K"), [(768, 768), (2048, 2048), (4096, 4096), (16384, 4096), (4096, 16384)])
def test_a_row_depends_on_itself_alone(gemm, M, K):
    """Bit-equal whatever the other rows, the position, NaN next to it; and the number of rows, where K is split alike."""
    torch.manual_seed(3)
    matrix = gemm.prepare(random(M, K))
    row = random(1, K, scale=K**-0.5)
    expected = {}
    for n in (1, 5, 8, 16, 40, 64, 96, 128, 320, 512, 960):
        x = random(n, K, scale=K**-0.5)
        x[n // 2] = row
        out = multiply(gemm, x, matrix)[n // 2]
        assert torch.equal(out, expected.setdefault(gemm.tile_config(n, matrix).split, out)), n
        for position in (0, n // 3, n - 1):
            x = torch.full((n, K), torch.nan, dtype=torch.float16, device="cuda")
            x[position] = row
            assert torch.equal(multiply(gemm, x, matrix)[position], out), (n, position)


def test_in_a_graph_after_writers_of_its_input(gemm):
    """Starting early, a product still sees what the kernels before it wrote, and leaves its output to those after it."""
    torch.manual_seed(4)
    C = 1024
    matrices = [gemm.prepare(random(C, C, scale=C**-0.5)) for _ in range(8)]
    x, buffers = random(8, C), [torch.empty(8, C, dtype=torch.float16, device="cuda") for _ in range(2)]

    def chain():
        gemm.launcher.use_current_stream()
        value = x
        for i, matrix in enumerate(matrices):
            value = gemm.gemm(value, matrix, buffers[i % 2])
            if i == 3:
                value.mul_(2)
        return value

    expected = x
    for i, matrix in enumerate(matrices):
        expected = torch.nn.functional.linear(expected.double(), matrix.weight.double()).half() * (2 if i == 3 else 1)
    graph = torch.cuda.CUDAGraph()
    chain()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = chain()
    gemm.launcher.use_current_stream()
    results = []
    for _ in range(50):
        graph.replay()
        results.append(out.clone())
    assert relative_error(results[0], expected.double()) < 3e-3
    assert all(torch.equal(r, results[0]) for r in results)


def test_in_a_graph_after_copies_and_other_streams(gemm):
    """A graph's other nodes before a product, and branches that join, are waited for."""
    torch.manual_seed(5)
    C = 512
    matrix = gemm.prepare(random(C, C, scale=C**-0.5))
    source, x, y, left, right = (random(16, C) for _ in range(5))
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        gemm.launcher.use_current_stream()
        x.copy_(source)
        gemm.gemm(x, matrix, left)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            gemm.launcher.use_current_stream()
            gemm.gemm(left, matrix, right)
            right.mul_(3)
        main.wait_stream(side)
        gemm.launcher.use_current_stream()
        gemm.gemm(right, matrix, y)
    gemm.launcher.use_current_stream()
    for _ in range(10):
        source.normal_()
        graph.replay()
        expected = source
        for factor in (1, 3, 1):
            expected = (torch.nn.functional.linear(expected.double(), matrix.weight.double()).half()) * factor
        assert relative_error(y, expected.double()) < 3e-3


def test_refused(gemm):
    with pytest.raises(ValueError, match="multiples of 64"):
        gemm.prepare(random(96, 64))
    matrix = gemm.prepare(random(64, 128))
    with pytest.raises(ValueError, match="x: expected"):
        multiply(gemm, random(4, 64), matrix)


@pytest.mark.parametrize(
    ("width", "ranks"),
    [(320, (32, 32, 0, 64)), (768, (64, 64, 32, 128)), (2048, (96, 96, 64, 256)), (4096, (128, 128, 96, 480))],
)
def test_project(gemm, width, ranks):
    """r, k, v and the first halves of the low-rank pairs in one launch, in every way that is offered."""
    torch.manual_seed(width)
    weight, down = random(3, width, width), random(sum(ranks), width)
    matrix, pairs = gemm.prepare(weight), gemm.prepare_lora(down, ranks)
    functions = (torch.tanh, torch.nn.Identity(), torch.nn.Identity(), torch.sigmoid)
    for n in (1, 7, 16, 33, 64, 65, 130, 320, 960):
        x = random(6, n, width, scale=width**-0.5)
        halves = zip((3, 4, 2, 5), down.double().split(ranks), functions, strict=True)
        hidden = torch.cat([function(x[plane].double() @ part.T) for plane, part, function in halves], 1)
        rkv = x[:3].double() @ weight.mT.double()
        for config in gemm.project_configs(n, matrix, pairs):
            outs = [torch.full(t.shape, torch.nan, dtype=torch.float16, device="cuda") for t in (rkv, hidden)]
            gemm.project(x, matrix, pairs, *outs, config)
            assert relative_error(outs[0], rkv) < 4e-4, (n, config)
            assert relative_error(outs[1], hidden) < 6e-4, (n, config)
            alone = [torch.empty_like(t[..., :1, :]) for t in outs]
            if n <= 64 and config.tile <= 64:
                gemm.project(x[:, n // 2 : n // 2 + 1].contiguous(), matrix, pairs, *alone, config)
                assert torch.equal(alone[0][:, 0], outs[0][:, n // 2])
                assert torch.equal(alone[1][0], outs[1][n // 2])


@pytest.mark.parametrize(("M", "K"), [(768, 768), (768, 3072), (2048, 2048), (4096, 1024)])
def test_every_config_that_is_offered(gemm, M, K):
    torch.manual_seed(4)
    weight = random(M, K)
    matrix = gemm.prepare(weight)
    for n in (1, 16, 17, 33, 64):
        x = random(n, K, scale=K**-0.5)
        reference = x.double() @ weight.T.double()
        for config in gemm.tile_configs(n, matrix):
            assert relative_error(multiply(gemm, x, matrix, config=config), reference) < 4e-4, (n, config)
