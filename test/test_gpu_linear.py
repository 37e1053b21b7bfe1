"""The kernels of cuda/linear/ for few tokens and for low-rank pairs on a GPU against float64: tokens, overlap, errors."""

import functools

import pytest
import torch
from models import SHAPES, random_weights

pytestmark = pytest.mark.gpu

FEW = (1, 2, 3, 4, 5, 7, 8, 9, 16)
MANY = (17, 63, 64, 65, 128, 129, 320, 513, 960, 1023, 1024, 1025, 4096)
HALF_EPS = 2.0**-11
SUM_EPS = 2e-6  # of fp32 sums, relative to the sum of absolute values


@pytest.fixture(scope="module")
def linear(launcher):
    from rwkv_batch.kernels.linear import Linear

    return Linear(launcher)


@pytest.fixture(scope="module")
def gemm(launcher):
    from rwkv_batch.kernels.gemm import Gemm

    product = Gemm(launcher)
    if not product.available:
        pytest.skip("needs a Hopper GPU")
    return product


def random(*shape, scale=1.0, seed=0, dtype=torch.float16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)


def empty(*shape, dtype=torch.float16):
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def full_mask(units):
    return torch.full((units // 32,), -1, dtype=torch.int32, device="cuda")


def product64(x, weight_t, bias=None):
    """(x weight_t + bias, bound of the error of its sum in fp32), float64."""
    exact = x.double() @ weight_t.double()
    bound = SUM_EPS * (x.double().abs() @ weight_t.double().abs())
    return (exact if bias is None else exact + bias.double()), bound


def assert_close(out, exact, bound):
    assert out.isfinite().all()
    rounding = HALF_EPS if out.dtype == torch.float16 else 2.0**-22
    excess = ((out.double() - exact).abs() - bound - exact.abs() * rounding * 1.01 - 1e-7).max().item()
    assert excess <= 0, f"off by {excess:.2e} more than rounding explains"


def relu_square64(x):
    return x.clamp(min=0).square().clamp(max=65504)


class TestGemv:
    def test_no_tokens(self, linear):
        """As of a step whose logits nobody wants; nothing is read."""
        linear.gemv(random(3, 768)[:0], random(768, 768), empty(3, 768)[:0])
        torch.cuda.synchronize()

    @pytest.mark.parametrize("n", FEW)
    @pytest.mark.parametrize(
        ("problems", "rows", "width"), [(1, 320, 320), (3, 768, 768), (1, 1001, 1024), (1, 10240, 2560), (3, 4096, 4096)]
    )
    def test_against_float64(self, linear, n, problems, rows, width):
        x, weight = random(problems, n, width), random(problems, rows, width, scale=width**-0.5, seed=1)
        out = empty(problems, n, rows)
        linear.gemv(x, weight, out)
        assert_close(out, *product64(x, weight.mT))

    @pytest.mark.parametrize("n", [1, 4, 16])
    def test_head_of_odd_height(self, linear, n):
        x, weight, out = random(n, 768), random(65531, 768, scale=0.03, seed=1), empty(n, 65531)
        linear.gemv(x, weight, out)
        assert_close(out, *product64(x, weight.mT))

    @pytest.mark.parametrize("n", [1, 3, 8, 11])
    def test_relu_square(self, linear, n):
        x, weight, out = random(n, 1024, scale=30), random(4096, 1024, scale=0.2, seed=1), empty(n, 4096)
        linear.gemv(x, weight, out, relu_square=True)
        exact, bound = product64(x, weight.mT)
        assert (exact > 256).any()  # squares beyond fp16 are clamped
        assert_close(out, relu_square64(exact), 2 * exact.abs() * bound + bound * bound)

    def test_same_bits_for_any_number_of_tokens(self, linear):
        x, weight, out = random(16, 2048), random(1024, 2048, seed=1), empty(16, 1024)
        linear.gemv(x, weight, out)
        for n in FEW:
            part = empty(n, 1024)
            linear.gemv(x[16 - n :].contiguous(), weight, part)
            assert torch.equal(part, out[16 - n :])


def random_lora(width, ranks, *, has_v=True, seed=5):
    from rwkv_batch.kernels.linear import Lora

    ranks = tuple(r if has_v or i != 2 else 0 for i, r in enumerate(ranks))
    down = random(sum(ranks), width, scale=width**-0.5, seed=seed)
    up = random(sum(ranks) * width, scale=0.1, seed=seed + 1)
    w0, a0, v0 = random(3, width, seed=seed + 2, dtype=torch.float32).unbind()
    return Lora(down, up, w0.clone(), a0.clone(), v0.clone() if has_v else None, ranks)


def run_down(linear, mixed, lora, **options):
    hidden = empty(mixed.shape[1], lora.rank)
    linear.lora_down(mixed, lora, hidden, **options)
    return hidden


def run_up(linear, hidden, lora, **options):
    n, c = hidden.shape[0], lora.width
    w_raw, a, v_mix, g = empty(n, c, dtype=torch.float32), empty(n, c), empty(n, c), empty(n, c)
    linear.lora_up(hidden, lora, w_raw, a, v_mix if lora.v0 is not None else None, g, **options)
    return [w_raw, a, g] + ([v_mix] if lora.v0 is not None else [])


def assert_lora(mixed, lora, hidden, outputs):
    """Both halves of all pairs against float64."""
    w_raw, a, g, *v_mix = outputs
    outputs = {"w": (w_raw, lora.w0), "a": (a, lora.a0), "v": (*v_mix, lora.v0), "g": (g, None)}
    row = 0
    for name, plane, rank in zip("wavg", (3, 4, 2, 5), lora.ranks, strict=True):
        if rank == 0:
            continue
        exact, bound = product64(mixed[plane], lora.down[row : row + rank].T)
        part = hidden[:, row : row + rank]
        final = {"w": torch.tanh, "g": torch.sigmoid}.get(name, lambda t: t)
        assert_close(part, final(exact), bound + 1e-6)
        out, bias = outputs[name]
        matrix = lora.up[row * lora.width : (row + rank) * lora.width].view(lora.width, rank)
        exact, bound = product64(part, matrix.T, bias)
        assert_close(out, exact.sigmoid() if name in "av" else exact, bound + 1e-6)
        row += rank


class TestLora:
    @pytest.mark.parametrize("n", FEW + MANY)
    @pytest.mark.parametrize(
        ("width", "ranks", "has_v"),
        [(320, (32, 32, 32, 64), False), (768, (64, 64, 32, 128), True), (2560, (96, 96, 64, 320), True)],
    )
    def test_against_float64(self, linear, n, width, ranks, has_v):
        mixed, lora = random(6, n, width), random_lora(width, ranks, has_v=has_v)
        hidden = run_down(linear, mixed, lora)
        assert_lora(mixed, lora, hidden, run_up(linear, hidden, lora))

    @pytest.mark.parametrize("n", [1, 8, 16, 64, 320, 1024])
    @pytest.mark.parametrize("ranks", [(128, 128, 96, 480), (192, 192, 128, 384)])
    def test_large_models(self, linear, n, ranks):
        mixed, lora = random(6, n, 4096), random_lora(4096, ranks)
        hidden = run_down(linear, mixed, lora)
        assert_lora(mixed, lora, hidden, run_up(linear, hidden, lora))

    @pytest.mark.parametrize("n", [17, 128, 129, 320, 511, 2000])
    @pytest.mark.parametrize(("width", "has_v"), [(576, False), (1024, True)])
    def test_every_grouped_config(self, linear, n, width, has_v):
        """All are right, and the order of a token's sums depends on `splits` alone."""
        from rwkv_batch.kernels.linear import GroupedConfig

        if not linear.hopper:
            pytest.skip("needs a Hopper GPU")
        mixed, lora = random(6, n, width), random_lora(width, (96, 32, 64, 160), has_v=has_v)
        whole = [
            GroupedConfig(32, 1, 3),
            GroupedConfig(64, 1, 1),
            GroupedConfig(64, 1, 3),
            GroupedConfig(128, 1, 2),
            GroupedConfig(160, 1, 1),
            GroupedConfig(256, 1, 1),
            GroupedConfig(32, 1, 4, 64),
            GroupedConfig(64, 1, 2, 64),
            GroupedConfig(128, 1, 1, 64),
        ]
        first, *others = [
            run_up(linear, run_down(linear, mixed, lora, config=whole[0]), lora, config=config) for config in whole
        ]
        assert all(torch.equal(a, b) for other in others for a, b in zip(other, first, strict=True))
        for splits in range(1, 9):
            cut = [GroupedConfig(tile, splits, 1) for tile in (32, 64, 128, 160)]
            configs = [*cut, GroupedConfig(32, splits, 1, 64), GroupedConfig(64, splits, 1, 64)] if splits > 1 else whole
            hidden, *others = [run_down(linear, mixed, lora, config=config) for config in configs]
            assert all(torch.equal(other, hidden) for other in others), splits
            assert_lora(mixed, lora, hidden, run_up(linear, hidden, lora, config=whole[3]))

    def test_grouped_prefill(self, linear):
        mixed, lora = random(6, 9001, 2048), random_lora(2048, (96, 96, 64, 256))
        hidden = run_down(linear, mixed, lora)
        assert_lora(mixed, lora, hidden, run_up(linear, hidden, lora))

    def test_configs_that_do_not_fit(self, linear):
        from rwkv_batch.kernels.launch import KernelLaunchFailed
        from rwkv_batch.kernels.linear import GroupedConfig

        lora, mixed = random_lora(128, (32, 32, 32, 32)), random(6, 200, 128)
        for config in (
            GroupedConfig(48),
            GroupedConfig(512),
            GroupedConfig(64, 3),
            GroupedConfig(64, 9),
            GroupedConfig(256, 2),
            GroupedConfig(64, 1, 4),
            GroupedConfig(64, 1, 1, 32),
            GroupedConfig(160, 1, 1, 64),
        ):
            with pytest.raises(KernelLaunchFailed):
                run_down(linear, mixed, lora, config=config)

    @pytest.mark.parametrize("n", FEW)
    @pytest.mark.parametrize(
        ("width", "ranks", "has_v"),
        [
            (256, (32, 32, 32, 64), False),
            (768, (64, 64, 32, 128), True),
            (2048, (96, 96, 64, 256), True),
            (2560, (96, 96, 64, 512), False),
            (4096, (128, 128, 96, 480), True),
        ],
    )
    def test_beside_a_product(self, gemm, n, width, ranks, has_v):
        """Both halves in one launch with r, k and v, in every way that is offered: right, and nothing depends on the others."""
        from rwkv_batch.kernels.tiled import tiles_of

        lora, weight = random_lora(width, ranks, has_v=has_v), random(3, width, width, scale=width**-0.5)
        mixed, matrix, copy = random(6, 16, width, seed=3), gemm.prepare(weight), gemm.prepare(torch.zeros_like(weight))
        copy.tiled = tiles_of(weight)

        def run(tokens, config, matrix=matrix):
            x, k = mixed[:, tokens].contiguous(), len(mixed[0, tokens])
            rkv, hidden, w_raw = empty(3, k, width), empty(k, lora.rank), empty(k, width, dtype=torch.float32)
            a, g, v_mix = (empty(k, width) for _ in range(3))
            gemm.inputs(x, matrix, lora, rkv, hidden, (w_raw, a, v_mix if has_v else None, g), config)
            return rkv, hidden, [w_raw, a, g] + [v_mix] * has_v

        whole = None
        for config in gemm.inputs_configs(n, matrix, lora):
            rkv, hidden, outputs = run(slice(16 - n, 16), config)
            assert_lora(mixed[:, 16 - n :], lora, hidden, outputs)
            assert_close(rkv, *product64(mixed[:3, 16 - n :], weight.mT))
            for _ in range(3):
                again = run(slice(16 - n, 16), config)
                assert torch.equal(again[1], hidden)
                assert all(torch.equal(a, b) for a, b in zip(again[2], outputs, strict=True))
            again = run(slice(16 - n, 16), config, copy)
            assert torch.equal(again[0], rkv)
            assert torch.equal(again[1], hidden)
            whole = whole or run(slice(0, 16), gemm.inputs_configs(16, matrix, lora)[0])
            assert torch.equal(hidden, whole[1][16 - n :])
            assert all(torch.equal(a, b[16 - n :]) for a, b in zip(outputs, whole[2], strict=True))
        assert whole or gemm.num_sms < 132  # of an H200; smaller GPUs have no room for the widest beside r, k and v

    @pytest.mark.parametrize("n", [17, 32, 33, 64, 100, 320, 960, 1100])
    @pytest.mark.parametrize(
        ("width", "ranks", "has_v"),
        [
            (256, (32, 32, 32, 64), False),
            (320, (32, 64, 32, 96), True),
            (768, (64, 64, 32, 128), True),
            (2048, (96, 96, 64, 256), True),
            (4096, (128, 128, 96, 480), True),
        ],
    )
    def test_beside_a_product_of_many_tokens(self, gemm, n, width, ranks, has_v):
        """Both halves in one launch with r, k, v: right in every way that is offered, the same in all, whatever the others."""
        from rwkv_batch.kernels.tiled import tiles_of

        lora, weight = random_lora(width, ranks, has_v=has_v), random(3, width, width, scale=width**-0.5)
        mixed, matrix, copy = random(6, n, width, seed=3), gemm.prepare(weight), gemm.prepare(torch.zeros_like(weight))
        copy.tiled = tiles_of(weight)

        def run(x, config, matrix=matrix):
            k = x.shape[1]
            rkv, hidden, w_raw = empty(3, k, width), empty(k, lora.rank), empty(k, width, dtype=torch.float32)
            a, g, v_mix = (empty(k, width) for _ in range(3))
            gemm.inputs(x, matrix, lora, rkv, hidden, (w_raw, a, v_mix if has_v else None, g), config)
            return [rkv[0], rkv[1], rkv[2], hidden, w_raw, a, g] + [v_mix] * has_v

        configs = gemm.inputs_configs(n, matrix, lora)
        assert configs
        first = run(mixed, configs[0])
        assert_lora(mixed, lora, first[3], first[4:])
        assert_close(torch.stack(first[:3]), *product64(mixed[:3], weight.mT))
        for config in configs:
            for each in (matrix, copy, matrix):
                again = run(mixed, config, each)
                assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True)), config
        few = mixed[:, n - 17 :].contiguous()
        for one, other in zip(first, run(few, gemm.inputs_configs(17, matrix, lora)[0]), strict=True):
            assert torch.equal(one[n - 17 :], other)

    def test_beside_a_product_does_not_fit(self, gemm):
        from rwkv_batch.kernels.gemm import TileConfig

        def run(n, width, ranks, config):
            lora, matrix = random_lora(width, ranks), gemm.prepare(random(3, width, width))
            rkv, hidden, w_raw = empty(3, n, width), empty(n, lora.rank), empty(n, width, dtype=torch.float32)
            gates = (w_raw, *(empty(n, width) for _ in range(3)))
            gemm.inputs(random(6, n, width), matrix, lora, rkv, hidden, gates, config)

        small = (32, 32, 32, 32)
        for n, width, ranks, config in (
            (17, 256, small, TileConfig(64, 16, 1, 5, 12)),
            (17, 256, small, TileConfig(64, 32, 1, 9, 12)),
            (8, 320, small, TileConfig(64, 8, 1, 5, 15)),
            (8, 256, (32, 32, 32, 544), TileConfig(64, 8, 1, 5, 12)),
            (8, 256, small, TileConfig(64, 8, 2, 5, 12)),
            (8, 4096, small, TileConfig(64, 8, 1, 5, 192)),
        ):
            with pytest.raises(ValueError, match="config"):
                run(n, width, ranks, config)

    @pytest.mark.parametrize("layer", [0, 1])
    @pytest.mark.parametrize("name", ["tiny", "wide ranks"])
    def test_pack_of_a_layer(self, linear, name, layer):
        from rwkv_batch.kernels.linear import Lora

        weights = random_weights(SHAPES[name]).layers[layer]
        moved = {key: None if t is None else t.to("cuda") for key, t in vars(weights).items()}
        layer = type(weights)(**moved)
        mixed = random(6, 21, layer.w0.shape[0])
        w_raw, a, g, *v_mix = run_up(linear, run_down(linear, mixed, Lora.of(layer)), Lora.of(layer))
        _, _, x_v, x_w, x_a, x_g = mixed.float().unbind()
        close = {"atol": 5e-3, "rtol": 5e-3}
        torch.testing.assert_close(w_raw, layer.w0 + (x_w @ layer.w1).tanh() @ layer.w2, **close)
        torch.testing.assert_close(a.float(), (layer.a0 + x_a @ layer.a1 @ layer.a2).sigmoid(), **close)
        torch.testing.assert_close(g.float(), (x_g @ layer.g1).sigmoid() @ layer.g2, **close)
        if layer.v0 is not None:
            torch.testing.assert_close(v_mix[0].float(), (layer.v0 + x_v @ layer.v1 @ layer.v2).sigmoid(), **close)

    def test_ranks_are_padded(self):
        from rwkv_batch.kernels.linear import Lora

        lora = Lora.of(random_weights(SHAPES["one head"]).layers[0])  # ranks 8, 16, (8,) 24
        assert lora.ranks == (32, 32, 0, 32)
        assert lora.down.shape == (96, 64)
        assert not lora.down[8:32].any()
        assert lora.up.view(3, 64, 32)[0, :, 8:].count_nonzero() == 0

    @pytest.mark.parametrize("n", [3, 8, 16, 17, 64, 200, 400, 960, 1500])
    def test_a_token_is_its_own(self, linear, n):
        """Neither the place of a token nor what the others hold, be it infinite, changes a bit of its results."""
        lora = random_lora(1024, (64, 64, 32, 128))
        mixed = random(6, n, 1024)
        hidden = run_down(linear, mixed, lora)
        outputs = run_up(linear, hidden, lora)
        order = torch.randperm(n, device="cuda")
        moved_hidden = run_down(linear, mixed[:, order].contiguous(), lora)
        assert torch.equal(moved_hidden, hidden[order])
        for moved, out in zip(run_up(linear, moved_hidden, lora), outputs, strict=True):
            assert torch.equal(moved, out[order])
        mixed[:, 1:] = torch.inf
        alone = run_down(linear, mixed, lora)
        assert torch.equal(alone[0], hidden[0])
        for broken, out in zip(run_up(linear, alone, lora), outputs, strict=True):
            assert torch.equal(broken[0], out[0])

    @pytest.mark.parametrize("n", FEW)
    @pytest.mark.parametrize("has_v", [True, False])
    def test_project_equals_its_parts(self, linear, n, has_v):
        lora = random_lora(768, (64, 64, 32, 128), has_v=has_v)
        mixed, weight = random(6, n, 768), random(3, 768, 768, seed=1)
        rkv, hidden, expected = empty(3, n, 768), empty(n, lora.rank), empty(3, n, 768)
        linear.project(mixed, weight, lora, rkv, hidden)
        linear.gemv(mixed[:3], weight, expected)
        assert torch.equal(rkv, expected)
        assert torch.equal(hidden, run_down(linear, mixed, lora))


def sparse_hidden(n, units, off=0.9, seed=3):
    values = relu_square64(random(n, units, seed=seed, dtype=torch.float32)) + 2**-14
    kept = torch.rand(n, units, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) >= off
    return (values * kept).half()


def assert_same_bits_with_any_others(project, counts, width):
    """A token's result is the same alone, with any number of others, and beside one that is infinite."""
    most = max(counts)
    hidden, weight, out = sparse_hidden(most, 4 * width), random(4 * width, width, seed=1), empty(most, width)
    project(hidden, weight, out)
    hidden[3, ::7] = torch.inf
    for n in counts:
        part = empty(n, width)
        project(hidden[most - n :].contiguous(), weight, part)
        fine = [i for i in range(n) if most - n + i != 3]
        assert torch.equal(part[fine], out[most - n :][fine])


class TestSparseFfn:
    @pytest.mark.parametrize("n", range(1, 9))
    @pytest.mark.parametrize("width", [64, 320, 768, 1024, 2048, 2560, 4096])
    def test_against_float64(self, linear, n, width):
        units = 4 * width + (4 if width == 320 else 0)
        hidden, weight = sparse_hidden(n, units), random(units, width, scale=0.05, seed=1)
        out = empty(n, width)
        linear.sparse_ffn(hidden, weight, out)
        assert_close(out, *product64(hidden, weight))

    @pytest.mark.parametrize("off", [0.0, 1.0])
    @pytest.mark.parametrize("n", [1, 2, 4, 8])
    def test_all_or_nothing(self, linear, n, off):
        hidden, weight, out = sparse_hidden(n, 8192, off), random(8192, 2048, scale=0.05, seed=1), empty(n, 2048)
        linear.sparse_ffn(hidden, weight, out)
        assert_close(out, *product64(hidden, weight))

    def test_rows_of_inactive_units_are_not_read(self, linear):
        hidden, weight, out = sparse_hidden(3, 4096), random(4096, 1024, seed=1), empty(3, 1024)
        weight[(hidden == 0).all(0)] = torch.nan
        linear.sparse_ffn(hidden, weight, out)
        assert out.isfinite().all()

    @pytest.mark.parametrize("width", [768, 2048, 4096])
    def test_same_bits_with_any_others(self, linear, width):
        assert_same_bits_with_any_others(linear.sparse_ffn, range(1, 9), width)


class TestMaskedFfn:
    @pytest.fixture(autouse=True)
    def _hopper(self, linear):
        if not linear.hopper:
            pytest.skip("needs a Hopper GPU")

    @staticmethod
    def union(linear, hidden, weight, out):
        active_mask = full_mask(hidden.shape[1])
        linear.build_active_mask(hidden, active_mask)
        linear.masked_ffn(hidden, active_mask, weight, out)

    @pytest.mark.parametrize("n", FEW)
    @pytest.mark.parametrize(
        ("units", "width"),
        [
            (32, 128),  # most blocks and warps have none
            (96, 128),
            (544, 256),  # blocks' parts of odd numbers of steps
            (2080, 128),
            (3072, 768),
            (8192, 2048),
            (10240, 2560),
            (16384, 4096),
            (20512, 4352),  # a block has all units: more steps of a warp than words of the mask are read at a time
        ],
    )
    def test_against_float64(self, linear, n, units, width):
        hidden, weight, out = sparse_hidden(n, units), random(units, width, scale=0.05, seed=1), empty(n, width)
        self.union(linear, hidden, weight, out)
        assert_close(out, *product64(hidden, weight))

    @pytest.mark.parametrize("off", [0.0, 0.5, 0.999, 1.0])
    @pytest.mark.parametrize("n", [1, 8, 16])
    def test_any_share_of_units(self, linear, n, off):
        hidden, weight, out = sparse_hidden(n, 8192, off), random(8192, 2048, scale=0.05, seed=1), empty(n, 2048)
        self.union(linear, hidden, weight, out)
        assert_close(out, *product64(hidden, weight))

    @pytest.mark.parametrize("off", [0.0, 0.9, 0.999, 1.0])
    @pytest.mark.parametrize("n", FEW)
    def test_active_mask(self, linear, n, off):
        hidden, active_mask = sparse_hidden(n, 8224, off), full_mask(8224)
        hidden[0, 77] = -0.0
        linear.build_active_mask(hidden, active_mask)
        bits = active_mask[:, None] >> torch.arange(32, device="cuda") & 1
        assert torch.equal(bits.flatten().bool(), (hidden != 0).any(0))

    def test_bits_do_not_depend_on_the_mask(self, linear):
        """Whatever else is marked, and however often hidden changes where it lies."""
        weight, out, expected = random(8192, 2048, seed=1), empty(16, 2048), empty(16, 2048)
        hidden = empty(16, 8192)
        for seed in range(20):
            hidden.copy_(sparse_hidden(16, 8192, 0.99, seed=seed))
            self.union(linear, hidden, weight, out)
            linear.masked_ffn(hidden, full_mask(8192), weight, expected)  # all bits are set
            assert torch.equal(out, expected)

    def test_rows_of_inactive_units_are_not_read(self, linear):
        hidden, weight, out = sparse_hidden(3, 16384), random(16384, 4096, seed=1), empty(3, 4096)
        whole = torch.arange(16384, device="cuda") % 8192 < 512  # what each of two blocks reads before it knows
        weight[(hidden == 0).all(0) & ~whole] = torch.nan
        self.union(linear, hidden, weight, out)
        assert out.isfinite().all()

    @pytest.mark.parametrize("width", [768, 2048, 4096])
    def test_same_bits_with_any_others(self, linear, width):
        assert_same_bits_with_any_others(functools.partial(self.union, linear), FEW, width)


@pytest.mark.parametrize("shape", [(1, 1024), (3, 1288), (960, 16384)])
def test_relu_square(linear, shape):
    hidden = random(*shape, scale=120)
    expected = relu_square64(hidden.double()).half()
    linear.relu_square_(hidden)
    assert torch.equal(hidden, expected)
    assert hidden.max() == 65504


@pytest.mark.parametrize("n", [1, 4, 8, 16, 64, 320, 1024])
def test_overlapping_launches_give_the_same(launcher, n):
    """A chain of dependent launches in a graph, that writes and rereads the same buffers, many times over."""
    from rwkv_batch.kernels.gemm import Gemm
    from rwkv_batch.kernels.linear import MAX_GEMV, MAX_SPARSE, Linear

    width = 1024
    lora = random_lora(width, (64, 64, 32, 128))
    first, second = random(4 * width, width, scale=0.03, seed=7), random(4 * width, width, scale=0.03, seed=8)
    mixed = random(6, n, width)
    x, hidden, inner = mixed[0], empty(n, lora.rank), empty(n, 4 * width)
    w_raw, a, v_mix = empty(n, width, dtype=torch.float32), empty(n, width), empty(n, width)
    active_mask, weight = full_mask(4 * width), random(3, width, width, scale=0.03, seed=6)
    rkv, g = empty(3, n, width), empty(n, width)

    def chain(linear, gemm):
        matrix = gemm.prepare(weight) if gemm.available else None
        configs = gemm.inputs_configs(n, matrix, lora) if gemm.available else []
        for _ in range(4):
            for config in configs:
                gemm.inputs(mixed, matrix, lora, rkv, hidden, (w_raw, a, v_mix, g), config)
                linear.lora_up(hidden, lora, w_raw, a, v_mix, mixed[5])
            linear.lora_down(mixed, lora, hidden)
            linear.lora_up(hidden, lora, w_raw, a, v_mix, mixed[5])
            if n <= MAX_GEMV:
                linear.gemv(x, first, inner)
            linear.relu_square_(inner)
            if n <= MAX_SPARSE:
                linear.sparse_ffn(inner, second, x)
            if linear.masked_ffn_fits(n, *second.shape):
                linear.build_active_mask(inner, active_mask)
                linear.masked_ffn(inner, active_mask, second, mixed[1])

    def results(pdl):
        mixed.copy_(random(6, n, width))
        inner.copy_(random(n, 4 * width, scale=0.5, seed=9))
        linear, gemm = Linear(launcher, pdl=pdl), Gemm(launcher, pdl=pdl)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                launcher.use_current_stream()
                chain(linear, gemm)
        finally:
            launcher.use_current_stream()
        graph.replay()
        torch.cuda.synchronize()
        return [t.clone() for t in (mixed, hidden, inner, w_raw, a, v_mix, rkv, g)]

    expected = results(pdl=False)
    for _ in range(5):
        for got, want in zip(results(pdl=True), expected, strict=True):
            assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_errors_name_the_argument(linear):
    x, weight, out, active_mask = random(2, 128), random(64, 128), empty(2, 64), full_mask(64)
    for name, call in {
        "x": lambda: linear.gemv(x.float(), weight, out),
        "weight": lambda: linear.gemv(x, weight[:, :64], out),
        "out": lambda: linear.gemv(x, weight, out.t()),
        "N 17": lambda: linear.gemv(random(17, 128), weight, empty(17, 64)),
        "N 9": lambda: linear.sparse_ffn(random(9, 64), weight, empty(9, 128)),
        "N 17, F 64": lambda: linear.masked_ffn(random(17, 64), active_mask, weight, empty(17, 128)),
        "F 40": lambda: linear.build_active_mask(random(2, 40), active_mask),
        "active_mask": lambda: linear.build_active_mask(random(2, 128), active_mask),
        "hidden": lambda: linear.lora_down(random(6, 2, 128), random_lora(128, (32, 32, 32, 32)), out),
    }.items():
        with pytest.raises(ValueError, match=name):
            call()
