"""Norms, token shift and the wkv recurrence on a GPU against float64 formulas in plain torch."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import layer_norm

from rwkv_batch.model import reference_ops

pytestmark = pytest.mark.gpu

ROUNDING = 1.2e-3  # relative RMS that two roundings to fp16 stay well below
CHUNKS = 3e-3  # and that the factors of the matrix form may be off by
BATCHES = [1, 2, 7, 8, 9, 63, 64, 65, 320]
WIDTHS = [320, 768, 2048, 4096]
HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlapping"])
def mix(request):
    """The kernels."""
    from rwkv_batch.kernels.compiler import library
    from rwkv_batch.kernels.launch import Launcher
    from rwkv_batch.kernels.mix import Mix

    torch.manual_seed(1)
    launcher = Launcher(library(0), torch.device("cuda:0"))
    launcher.use_current_stream()
    return Mix(launcher, pdl=request.param)


def packed(slots, lengths):
    from rwkv_batch.model.packed_rows import RowLayout

    return RowLayout.of(slots, lengths, "cuda:0")


def randn(*shape, dtype=HALF, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def uniform(*shape, dtype=HALF):
    return torch.rand(*shape, device="cuda").to(dtype)


def scattered_slots(batch, num_slots, padding=0):
    """Distinct slots in no order, and `padding` rows without one."""
    slots = torch.randperm(num_slots, device="cuda")[:batch]
    if padding:
        slots[torch.randperm(batch)[:padding]] = -1
    return slots


def poisoned(state, slots):
    """The state with NaN in the slots that are not in use."""
    free = torch.ones(len(state), dtype=torch.bool, device="cuda")
    free[slots[slots >= 0]] = False
    state[free] = torch.nan
    return free


def assert_close(got, expected, bound=ROUNDING):
    """Relative RMS of the difference."""
    assert got.shape == expected.shape
    expected = expected.double()
    error = (got.double() - expected).norm() / expected.norm()
    assert error <= bound, f"relative error {error:.2e}"


def same_bits(a, b):
    bits = torch.int16 if a.dtype == HALF else torch.int32
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def norm_inputs(tokens, width, planes, num_slots):
    x = randn(tokens, width, dtype=FLOAT, scale=3) + 5 * randn(width, dtype=FLOAT)
    return SimpleNamespace(
        x=x,
        y=randn(tokens, width),
        weight=1 + randn(width, dtype=FLOAT, scale=0.2),
        bias=randn(width, dtype=FLOAT, scale=0.2),
        mix=uniform(planes, width, dtype=FLOAT),
        shift=randn(num_slots, width),
    )


def norm64(x, weight, bias):
    return layer_norm(x.double(), x.shape[-1:], weight.double(), bias.double(), 1e-5)


def test_embed(mix):
    table, ids = randn(100, 320), torch.randint(100, (50,), device="cuda")
    x = torch.empty(50, 320, device="cuda")
    mix.embed(ids, table, x)
    assert torch.equal(x, table[ids].float())


def test_embed_decode(mix):
    table, last_ids = randn(100, 768), torch.randint(100, (40,), device="cuda")
    slots = scattered_slots(20, 40, padding=3)
    x = torch.full((20, 768), torch.nan, device="cuda")
    mix.embed_decode(last_ids, slots, table, x)
    real = slots >= 0
    assert torch.equal(x[real], table[last_ids[slots[real]]].float())
    assert not x[~real].any()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("planes", [6, 1])
def test_add_norm_mix_decode(mix, width, planes):
    for batch in BATCHES:
        a = norm_inputs(batch, width, planes, batch + 5)
        slots = scattered_slots(batch, batch + 5, padding=batch // 3)
        free, before = poisoned(a.shift, slots), a.shift.clone()
        y = None if batch == 7 else a.y
        total = a.x if y is None else a.x + y.float()
        normed = norm64(total, a.weight, a.bias)
        real = slots >= 0
        previous = a.shift[slots.clamp_min(0)].double()
        expected = torch.lerp(normed, previous, a.mix.double()[:, None])
        out = torch.empty(planes, batch, width, dtype=HALF, device="cuda")
        mix.add_norm_mix_decode(a.x, y, a.weight, a.bias, a.mix, a.shift, slots, out)
        assert torch.equal(a.x, total)
        assert_close(out[:, real], expected[:, real])
        assert_close(a.shift[slots[real]], normed[real])
        assert same_bits(a.shift[free], before[free])


def test_a_row_does_not_depend_on_how_it_is_spread_nor_on_its_neighbours(mix):
    a = norm_inputs(320, 4096, 6, 320)
    results = []
    ways = [(320, None), (320, 2), (320, 8), (319, 4), (318, 2), (130, 1), (64, None), (64, 1), (16, 4), (2, 8), (1, 1)]
    for count, parts in ways:
        x, shift = a.x[:count].clone(), a.shift.clone()
        out = torch.empty(6, count, 4096, dtype=HALF, device="cuda")
        slots = torch.arange(count, device="cuda")
        mix.add_norm_mix_decode(
            x, a.y[:count], a.weight, a.bias, a.mix, shift, slots, out, parts=parts, inputs_ready=count != 64
        )
        results.append((out, shift, x))
    whole, shifts, total = results[0]
    for out, shift, x in results:
        count = len(x)
        assert same_bits(out, whole[:, :count])
        assert same_bits(shift[:count], shifts[:count])
        assert same_bits(x, total[:count])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("planes", [6, 1])
@pytest.mark.parametrize("lengths", [[1], [5], [1, 1, 1], [33, 1, 16, 64, 2, 1, 130], [700]])
def test_add_norm_mix_prefill_is_bit_equal_to_decode(mix, width, planes, lengths):
    tokens, batch = sum(lengths), len(lengths)
    a = norm_inputs(tokens, width, planes, batch + 5)
    slots = scattered_slots(batch, batch + 5, padding=1 if batch > 3 else 0)
    free, before = poisoned(a.shift, slots), a.shift.clone()
    expected_shift = a.shift.clone()
    expected = torch.empty(planes, tokens, width, dtype=HALF, device="cuda")
    starts = [sum(lengths[:b]) for b in range(batch)]
    for t in range(max(lengths)):
        live = [b for b in range(batch) if lengths[b] > t]
        at = torch.tensor([starts[b] + t for b in live], device="cuda")
        out = torch.empty(planes, len(live), width, dtype=HALF, device="cuda")
        arguments = (a.weight, a.bias, a.mix, expected_shift, slots[live].contiguous(), out)
        mix.add_norm_mix_decode(a.x[at], a.y[at], *arguments)
        expected[:, at] = out
    rows = packed(slots.tolist(), lengths)
    real = torch.cat([torch.full((n,), slots[b] >= 0, device="cuda") for b, n in enumerate(lengths)])
    for run, parts in ((None, None), (1, 1), (4, 1), (16, 1), (8, 2 if width % 512 == 0 else 1)):
        x, shift = a.x.clone(), a.shift.clone()
        out = torch.empty_like(expected)
        mix.add_norm_mix_prefill(x, a.y, a.weight, a.bias, a.mix, shift, rows, torch.empty_like(a.y), out, run=run, parts=parts)
        assert torch.equal(x, a.x + a.y.float())
        assert same_bits(out[:, real], expected[:, real])
        assert same_bits(shift, expected_shift)
        assert same_bits(shift[free], before[free])


def test_add_norm(mix):
    for width in WIDTHS:
        a = norm_inputs(77, width, 1, 1)
        index = torch.tensor([76, 0, 31], device="cuda")
        expected = norm64(a.x + a.y.float(), a.weight, a.bias)
        some, all_rows = torch.empty(3, width, dtype=HALF, device="cuda"), torch.empty(77, width, dtype=HALF, device="cuda")
        mix.add_norm(a.x, a.y, index, a.weight, a.bias, some)
        mix.add_norm(a.x, a.y, None, a.weight, a.bias, all_rows)
        assert_close(some, expected[index])
        assert_close(all_rows, expected)


def wkv_inputs(tokens, width, first_layer=False):
    from rwkv_batch.kernels.mix import WkvInputs, WkvLayer

    inputs = WkvInputs(
        r=randn(tokens, width),
        k=randn(tokens, width),
        v=randn(tokens, width),
        w_raw=randn(tokens, width, dtype=FLOAT, scale=3) - 2,
        a=uniform(tokens, width),
        v_mix=None if first_layer else uniform(tokens, width),
        g=randn(tokens, width),
        v_first=randn(tokens, width),
    )
    layer = WkvLayer(
        k_k=0.85 + randn(width, dtype=FLOAT, scale=0.1),
        k_a=1 + randn(width, dtype=FLOAT, scale=0.1),
        r_k=randn(width, dtype=FLOAT, scale=0.1),
        norm_weight=1 + randn(width, dtype=FLOAT, scale=0.2),
        norm_bias=randn(width, dtype=FLOAT, scale=0.2),
    )
    return inputs, layer


def take(inputs, index):
    """The inputs of some tokens."""
    return type(inputs)(**{name: None if t is None else t[index].contiguous() for name, t in vars(inputs).items()})


def wkv64(inputs, layer, state, slots, lengths):
    """(out [N, C], first values [N, C], the slots' new states) in float64, one token after another."""
    i = SimpleNamespace(**{name: None if t is None else t.double() for name, t in vars(inputs).items()})
    p = SimpleNamespace(**{name: t.double() for name, t in vars(layer).items()})
    tokens, width = i.r.shape
    heads = (tokens, width // 64, 64)
    v = i.v if i.v_mix is None else torch.lerp(i.v, i.v_first, i.v_mix)
    v_first = v if i.v_mix is None else i.v_first
    w = torch.exp(reference_ops.LOG_W_SCALE * i.w_raw.sigmoid()).view(heads)
    kk = (i.k * p.k_k).view(heads)
    kk = kk / kk.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    k = (i.k * (1 - p.k_a + i.a * p.k_a)).view(heads)
    inserted = kk * i.a.view(heads)
    r, v = i.r.view(heads), v.view(heads)
    y = torch.empty(heads, dtype=torch.float64, device="cuda")
    s = state[slots.clamp_min(0)].double()
    lengths = torch.tensor(lengths)
    starts = lengths.cumsum(0) - lengths
    for t in range(int(lengths.max())):
        live = (lengths > t).nonzero().view(-1)
        at, live = (starts[live] + t).cuda(), live.cuda()
        old = s[live]
        removed = (old * kk[at, :, None]).sum(-1, keepdim=True)
        new = old * w[at, :, None] - removed * inserted[at, :, None] + v[at, :, :, None] * k[at, :, None]
        y[at] = (new * r[at, :, None]).sum(-1)
        s[live] = new
    y = torch.group_norm(y.view(tokens, width), heads[1], p.norm_weight, p.norm_bias, reference_ops.GROUP_NORM_EPS)
    bonus = (r * p.r_k.view(heads[1:]) * k).sum(-1, keepdim=True)
    return (y.view(heads) + bonus * v).view(tokens, width) * i.g, v_first, s


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("width", [64, *WIDTHS])
def test_wkv_decode(mix, width, dtype):
    for batch in BATCHES:
        inputs, layer = wkv_inputs(batch, width, first_layer=batch in (8, 65))
        state = randn(batch + 5, width // 64, 64, 64, dtype=dtype)
        slots = scattered_slots(batch, batch + 5, padding=batch // 3)
        free, before = poisoned(state, slots), state.clone()
        real = slots >= 0
        expected, v_first, new_state = wkv64(inputs, layer, state, slots, [1] * batch)
        out = torch.empty(batch, width, dtype=HALF, device="cuda")
        mix.wkv_decode(inputs, layer, state, slots, out)
        early_state, early = before.clone(), torch.zeros_like(out)
        torch.cuda.synchronize()
        mix.wkv_decode(inputs, layer, early_state, slots, early, inputs_ready=True)
        assert same_bits(early[real], out[real])
        assert same_bits(early_state, state)
        assert_close(out[real], expected[real])
        assert_close(state[slots[real]], new_state[real], 5e-4 if dtype == HALF else 1e-6)
        assert same_bits(inputs.v_first[real], v_first[real].half())
        assert same_bits(state[free], before[free])


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "chunks"])
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("width", [64, 320, 2048])
@pytest.mark.parametrize("lengths", [[1], [2], [17], [1, 1, 1, 1], [33, 1, 16, 64, 2, 1, 15, 130], [500]])
def test_wkv_prefill(mix, width, lengths, dtype, exact):
    tokens, batch = sum(lengths), len(lengths)
    inputs, layer = wkv_inputs(tokens, width, first_layer=batch == 8)
    state = randn(batch + 3, width // 64, 64, 64, dtype=dtype)
    slots = scattered_slots(batch, batch + 3, padding=1 if batch > 3 else 0)
    free, before = poisoned(state, slots), state.clone()
    real_rows = slots >= 0
    real = torch.cat([real_rows[b].expand(n) for b, n in enumerate(lengths)])
    expected, v_first, new_state = wkv64(inputs, layer, state, slots, lengths)
    out = torch.empty(tokens, width, dtype=HALF, device="cuda")
    mix.wkv_prefill(inputs, layer, state, packed(slots.tolist(), lengths), out, exact=exact)
    state_bound = CHUNKS if not exact else 5e-4 if dtype == HALF else 1e-5
    assert_close(out[real], expected[real], ROUNDING if exact else CHUNKS)
    assert_close(state[slots[real_rows]], new_state[real_rows], state_bound)
    assert same_bits(inputs.v_first[real], v_first[real].half())
    assert same_bits(state[free], before[free])


def spread(mix, inputs, layer, state, rows, out):
    """Do the recurrence with all chunks prepared at once, in no more room than that needs; `inputs` stay as they are."""
    from rwkv_batch.kernels.mix import CHUNK, CHUNK_BYTES

    tokens, width = out.shape
    if not mix._launcher.hopper:
        pytest.skip("needs a Hopper GPU")
    own = dataclasses.replace(inputs, w_raw=inputs.w_raw.clone())
    least = (tokens // CHUNK + len(rows.slots)) * (width // 64) * CHUNK_BYTES
    room = torch.full((least,), 0x7F, dtype=torch.uint8, device="cuda")
    before, mix.spread_tokens = mix.spread_tokens, 0
    assert mix.spreads(len(rows.slots), width // 64, tokens, room)
    mix.wkv_prefill(own, layer, state, rows, out, room=room)
    mix.spread_tokens = before


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize(
    ("width", "lengths"),
    [
        (64, [1]),
        (320, [17]),
        (4096, [300]),
        (768, [16, 32]),
        (512, [33, 1, 16, 64, 2, 1, 15, 130]),
        (64, [1 + k % 3 * 7 for k in range(40)]),
    ],
)
def test_wkv_prefill_spread_over_the_gpu(mix, width, lengths, dtype):
    tokens, batch = sum(lengths), len(lengths)
    inputs, layer = wkv_inputs(tokens, width, first_layer=batch == 8)
    state = randn(batch + 3, width // 64, 64, 64, dtype=dtype)
    slots = scattered_slots(batch, batch + 3, padding=1 if batch > 3 else 0)
    free, before = poisoned(state, slots), state.clone()
    out, real_rows = torch.full((tokens, width), torch.nan, dtype=HALF, device="cuda"), slots >= 0
    expected, v_first, new_state = wkv64(inputs, layer, state, slots, lengths)
    spread(mix, inputs, layer, state, packed(slots.tolist(), lengths), out)
    real = torch.cat([real_rows[b].expand(n) for b, n in enumerate(lengths)])
    assert_close(out[real], expected[real], CHUNKS)
    assert_close(state[slots[real_rows]], new_state[real_rows], CHUNKS)
    assert same_bits(inputs.v_first[real], v_first[real].half())
    assert same_bits(state[free], before[free])


@pytest.mark.parametrize("w_raw", [None, -20.0, -9.0, -6.0, 20.0])
def test_wkv_prefill_of_4096_tokens_spread_over_the_gpu(mix, w_raw):
    inputs, layer = wkv_inputs(4096, 128)
    if w_raw is not None:
        inputs.w_raw.fill_(w_raw)
    slots, state = torch.tensor([1], device="cuda"), torch.zeros(2, 2, 64, 64, device="cuda")
    expected, _, new_state = wkv64(inputs, layer, state, slots, [4096])
    out = torch.empty(4096, 128, dtype=HALF, device="cuda")
    spread(mix, inputs, layer, state, packed([1], [4096]), out)
    assert_close(out, expected, CHUNKS)
    assert_close(state[slots], new_state, CHUNKS)


def test_wkv_prefill_spread_over_the_gpu_in_pieces(mix):
    """Whole chunks give the same bits with a state of fp32."""
    inputs, layer = wkv_inputs(416, 768)
    results = []
    for pieces in ([416], [32, 384], [256, 160]):
        state, out, start = torch.zeros(3, 12, 64, 64, device="cuda"), torch.empty(416, 768, dtype=HALF, device="cuda"), 0
        for length in pieces:
            part = slice(start, start + length)
            spread(mix, take(inputs, part), layer, state, packed([1], [length]), out[part])
            start += length
        results.append((out, state))
    assert all(same_bits(out, results[0][0]) and same_bits(state, results[0][1]) for out, state in results)


def test_wkv_prefill_spread_over_the_gpu_in_a_graph(mix):
    """Each replay gives the same bits, also where it is fed fewer tokens than were captured."""
    inputs, layer = wkv_inputs(512, 768)
    rows, states = packed([1, -1], [416, 96]), torch.zeros(3, 12, 64, 64, device="cuda")
    rows.cu_seqlens[2] = 416  # the last 96 tokens belong to no row
    out, graph, results = torch.empty(512, 768, dtype=HALF, device="cuda"), torch.cuda.CUDAGraph(), []

    def steps():
        states.zero_()
        out.fill_(torch.nan)
        for _ in range(2):  # from where the first ends
            mix._launcher.use_current_stream()
            spread(mix, inputs, layer, states, rows, out)

    steps()
    results.append((out[:416].clone(), states.clone()))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        steps()
    mix._launcher.use_current_stream()
    for _ in range(4):
        graph.replay()
        results.append((out[:416].clone(), states.clone()))
    assert all(same_bits(one, results[0][0]) and same_bits(state, results[0][1]) for one, state in results)
    assert torch.isfinite(results[0][0]).all()


@pytest.mark.parametrize("w_raw", [-20.0, 20.0], ids=["no decay", "strongest decay"])
def test_wkv_prefill_at_the_ends_of_the_decay(mix, w_raw):
    inputs, layer = wkv_inputs(300, 320)
    inputs.w_raw.fill_(w_raw)
    inputs.k.mul_(8)
    inputs.r.mul_(8)
    slots, state = torch.tensor([0], device="cuda"), torch.zeros(1, 5, 64, 64, device="cuda")
    expected, _, new_state = wkv64(inputs, layer, state, slots, [300])
    out = torch.empty(300, 320, dtype=HALF, device="cuda")
    mix.wkv_prefill(inputs, layer, state, packed([0], [300]), out)
    assert_close(out, expected, CHUNKS)
    assert_close(state, new_state, CHUNKS)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "chunks"])
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_wkv_prefill_in_pieces_and_token_by_token(mix, dtype, exact):
    tokens, width = 200, 768
    inputs, layer = wkv_inputs(tokens, width)
    slots = torch.tensor([1], device="cuda")
    runs = []
    for pieces in ([200], [64, 136], [1, 100, 99], [1] * 200):
        state = torch.zeros(3, width // 64, 64, 64, dtype=dtype, device="cuda")
        outs, start = [], 0
        for length in pieces:
            part = take(inputs, slice(start, start + length))
            out = torch.empty(length, width, dtype=HALF, device="cuda")
            if length == 1:
                mix.wkv_decode(part, layer, state, slots, out)
            else:
                mix.wkv_prefill(part, layer, state, packed([1], [length]), out, exact=exact)
            outs.append(out)
            start += length
        runs.append((torch.cat(outs), state[1]))
    for out, state in runs[1:]:
        assert_close(out, runs[0][0], ROUNDING if exact and dtype == FLOAT else CHUNKS)
        assert_close(state, runs[0][1], 1e-5 if exact and dtype == FLOAT else CHUNKS)


def test_state_kept_in_fp16_does_not_drift(mix):
    """512 decode steps, the state rounded after each, against float64."""
    batch, width, steps = 4, 768, 512
    slots = torch.tensor([3, 0, 4, 1], device="cuda")
    errors = {}
    for dtype in (HALF, FLOAT):
        torch.manual_seed(2)
        state = torch.zeros(5, width // 64, 64, 64, dtype=dtype, device="cuda")
        exact = state.double()
        _, layer = wkv_inputs(batch, width)
        for _ in range(steps):
            inputs, _ = wkv_inputs(batch, width)
            out = torch.empty(batch, width, dtype=HALF, device="cuda")
            expected, _, exact[slots] = wkv64(inputs, layer, exact, slots, [1] * batch)
            mix.wkv_decode(inputs, layer, state, slots, out)
        errors[dtype] = float((state.double() - exact)[slots].norm() / exact[slots].norm())
        assert_close(out, expected, 3e-3)
    assert errors[HALF] < 1.5e-3
    assert errors[FLOAT] < 1e-5


def test_arguments_are_checked_by_name(mix):
    a = norm_inputs(2, 320, 6, 4)
    out = torch.empty(6, 2, 320, dtype=HALF, device="cuda")
    slots = torch.arange(2, device="cuda")
    with pytest.raises(ValueError, match="slots"):
        mix.add_norm_mix_decode(a.x, a.y, a.weight, a.bias, a.mix, a.shift, slots.int(), out)
    x = torch.empty(2, 328, device="cuda")
    with pytest.raises(ValueError, match="width"):
        mix.add_norm_mix_decode(x, None, a.weight, a.bias, a.mix, a.shift, slots, out)
