"""Every op of the forward pass in plain torch: the CPU path, and the judge of every kernel.

Ops take packed rows: N tokens of B rows one after another, described by `PackedRows`. Arithmetic is fp32 whatever the weights'
dtype; only what multiplies an int8 matrix on a CPU is bf16 where tokens are few. `kernels/ops.py` offers the same names and
signatures. RWKV-7 is described in Peng et al., "RWKV-7 Goose" (2025).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import torch
import torch.nn.functional as F

from rwkv_batch.model import quantized
from rwkv_batch.model.packed_rows import CHUNK, PackedRows
from rwkv_batch.model.weight import Weight
from rwkv_batch.model.weights import HEAD_SIZE, Layer, Weights

LOG_W_SCALE = -0.6065306597126334  # -exp(-0.5): log w = LOG_W_SCALE * sigmoid(.)
GROUP_NORM_EPS = 64e-5
LARGEST_HALF = 65504.0
BAGS = 4  # parts that the sparse half of the channel mix is summed in
TRANSPOSED_ROWS = (3, 16)  # the least and most rows that `linear` multiplies transposed on a CPU
TRANSPOSED_HEIGHT = 16384  # the least height of the matrix there
INT8_ROWS = 8  # the most that torch multiplies by bytes faster than by floats, on a CPU
DECODED = {"cpu": 2**18, "cuda": 2**24}  # numbers of a quantised matrix that are decoded at a time
LARGEST_FP8 = 448.0


def prepare(weights: Weights) -> Weights:
    """Return what `Model` hands to the ops: here the weights as they are."""
    return weights


def embed(embedding: torch.Tensor, tokens: torch.Tensor | None, rows: PackedRows, last_ids: torch.Tensor) -> torch.Tensor:
    """Return the rows of `embedding` [V, C] for tokens [N], or for each row's `last_ids[slot]` -> [N, C]."""
    return embedding[last_ids[rows.slot_index] if tokens is None else tokens].float()


def add_norm_mix(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mix: torch.Tensor,
    shift,
    rows: PackedRows,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + y [N, C] and its layer norm, shifted and mixed [K, N, C]; see `shift_mix`."""
    x = x if y is None else x + y
    return x, shift_mix(layer_norm(x, weight, bias), mix, shift, rows)


def logits(x: torch.Tensor, y: torch.Tensor, weights: Weights, index: torch.Tensor | None) -> torch.Tensor:
    """Return the logits [n, U] of x + y [N, C] at positions `index` [n], None = all."""
    x = x + y if index is None else x[index] + y[index]
    return linear(layer_norm(x, weights.ln_out_weight, weights.ln_out_bias), weights.head)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Layer norm over the last dimension, eps 1e-5: [N, C] -> [N, C]."""
    return torch.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """[N, in] times weight [out, in] -> [N, out] fp32."""
    if weight.beside is not None:
        return weight.beside(x, partial(linear, weight=replace(weight, beside=None)))
    if weight.format:
        return _quantised_linear(x, weight)
    matrix = weight.dense()
    if matrix.dtype != torch.float32:
        return F.linear(x.to(matrix.dtype), matrix).float()
    if TRANSPOSED_ROWS[0] <= x.shape[0] <= TRANSPOSED_ROWS[1] and matrix.shape[0] >= TRANSPOSED_HEIGHT and not x.is_cuda:
        return torch.mm(matrix, x.t()).t()  # for these shapes MKL reads the matrix twice or thrice the other way round
    return F.linear(x, matrix)


def _quantised_linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """[N, in] times a quantised weight [out, in] -> [N, out] fp32."""
    x = quantized.ordered(fp8_rounded(x) if weight.rounds_inputs else x, weight.format)
    grouped = quantized.FORMATS[weight.format].grouped
    if weight.format == "int8" and x.shape[0] <= INT8_ROWS and not x.is_cuda:
        ones = torch.ones(weight.shape[0], dtype=torch.bfloat16)
        return torch._weight_int8pack_mm(x.bfloat16(), weight.values, ones).float().mul_(weight.scales.t())
    y = torch.empty(x.shape[0], weight.shape[0], device=x.device)
    for at, numbers in _decoded(weight):
        y[:, at] = F.linear(x, numbers)
    return y if grouped else y.mul_(weight.scales.t())


def _quantised_project(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """[N, in] times a quantised weight [in, out], transposed -> [N, out] fp32; of one token, inputs of zero are left out."""
    x = fp8_rounded(x) if weight.rounds_inputs else x
    grouped = quantized.FORMATS[weight.format].grouped
    if x.shape[0] == 1:
        on = x.view(-1).nonzero().view(-1)
        x, weight = x[:, on], weight.rows(on)
    y = torch.zeros(x.shape[0], weight.shape[1], device=x.device)
    for at, numbers in _decoded(weight):
        y.addmm_(x[:, at], numbers)
    return y if grouped else y.mul_(weight.scales)


def _decoded(weight: Weight) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield rows of a quantised weight, in the order in which they are stored, scaled where each group has a scale."""
    rows, columns = weight.shape
    step = max(1, DECODED[weight.values.device.type] // columns)
    for start in range(0, rows, step):
        at = slice(start, min(rows, start + step))
        numbers = quantized.decode(weight.values[at], weight.format)
        if quantized.FORMATS[weight.format].grouped:
            groups = numbers.view(len(numbers), -1, quantized.BLOCK)
            numbers = (groups * weight.scales[at].float().unsqueeze(2)).view(len(numbers), columns)
        yield at, numbers


def fp8_rounded(x: torch.Tensor) -> torch.Tensor:
    """Return the inputs [N, in] as products with e4m3 on both sides see them: a scale for each token."""
    scales = (x.abs().amax(1, keepdim=True) / LARGEST_FP8).clamp_min_(quantized.SMALLEST_SCALE)
    return (x / scales).to(torch.float8_e4m3fn).float() * scales


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[N, in] times weight [in, out], plus bias [out] -> [N, out] fp32."""
    if weight.dtype != torch.float32:
        y = torch.mm(x.to(weight.dtype), weight).float()
        return y if bias is None else y + bias
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def shift_mix(x: torch.Tensor, mix: torch.Tensor, shift: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """Blend each token [N, C] with the one before it, in K proportions: mix [K, 1, C] -> [K, N, C].

    The token before a row's first comes from `shift` [S, C], which then takes the row's last token.
    """
    kept = shift[rows.slot_index]
    if rows.is_decode:
        mixed = torch.lerp(x, kept.to(x.dtype), mix)
        if isinstance(rows.slot_index, slice):
            kept.copy_(x)
        else:
            shift[rows.slot_index] = x.to(shift.dtype)
        return mixed
    previous = x.roll(1, 0)
    previous[rows.first_token_index] = kept.to(x.dtype)
    mixed = torch.lerp(x, previous, mix)
    shift[rows.slot_index] = x[rows.last_token_index].to(shift.dtype)
    return mixed


def time_mix(
    mixed: torch.Tensor, layer: Layer, wkv_state: torch.Tensor, rows: PackedRows, v_first: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention-like half of a block: mixed [6, N, C], wkv_state [S, H, 64, 64] updated in place.

    v_first  the values of layer 0 [N, C], None in layer 0 itself
    Returns the output [N, C] and the first values [N, C].
    """
    x_r, x_w, x_k, x_v, x_a, x_g = mixed.unbind()
    r, k, v = linear(x_r, layer.receptance), linear(x_k, layer.key), linear(x_v, layer.value)
    n, c = r.shape  # of a shard, less than the width of the model
    heads = (n, c // HEAD_SIZE, HEAD_SIZE)
    log_w = project(project(x_w, layer.w1).tanh_(), layer.w2, layer.w0).sigmoid_().mul_(LOG_W_SCALE)
    a = project(project(x_a, layer.a1), layer.a2, layer.a0).sigmoid_()
    g = project(project(x_g, layer.g1).sigmoid_(), layer.g2)
    if v_first is None:
        v_first = v
    else:
        v = torch.lerp(v, v_first, project(project(x_v, layer.v1), layer.v2, layer.v0).sigmoid_())
    kk = (k * layer.k_k).view(heads)
    kk.div_(torch.linalg.vector_norm(kk, dim=-1, keepdim=True).clamp_min_(1e-12))
    k = k.mul_(torch.addcmul(layer.one_minus_k_a, a, layer.k_a)).view(heads)
    r, v = r.view(heads), v.view(heads)
    y = wkv(r, log_w.view(heads), k, v, kk, a.view(heads), wkv_state, rows)
    y = torch.group_norm(y.view(n, c), heads[1], layer.ln_x_weight, layer.ln_x_bias, GROUP_NORM_EPS)
    bonus = (r * layer.r_k).mul_(k).sum(-1, keepdim=True)
    return linear(y.view(heads).addcmul_(bonus, v).view(n, c).mul_(g), layer.output), v_first


def channel_mix(mixed: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The feed-forward half: mixed [1, N, C] -> [N, C], with squared ReLU between the two matrices."""
    return units_product(linear(mixed[0], layer.ffn_key).relu_().square_(), layer.ffn_value)


def units_product(hidden: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Feed-forward units [N, F], of which most are zero, times weight [F, C], kept transposed -> [N, C] fp32."""
    if weight.beside is not None:
        return weight.beside(hidden, partial(units_product, weight=replace(weight, beside=None)))
    if weight.format:
        return _quantised_project(hidden.clamp_(max=LARGEST_HALF), weight)
    value = weight.dense()
    if value.dtype == torch.float16:
        hidden.clamp_(max=LARGEST_HALF)  # as the kernels do
    if hidden.shape[0] == 1 and hidden.dtype == value.dtype and not hidden.is_cuda:
        # About nine in ten units of a trained model are off: reading only the others' rows saves most of the matrix.
        # Several bags of indices, since one thread sums each.
        hidden = hidden.view(-1)
        on = hidden.nonzero().view(-1)
        bags = torch.arange(0, on.numel(), -(-on.numel() // BAGS)) if on.numel() else on.new_zeros(1)
        strength = hidden.index_select(0, on)
        return F.embedding_bag(on, value, bags, mode="sum", per_sample_weights=strength).sum(0, keepdim=True)
    return project(hidden, value)


def wkv(r, log_w, k, v, kk, a, state: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """The recurrence S <- S diag(w) - (S kk) (a kk)^T + v k^T, y = S r, for each row from its slot's state.

    r, log_w, k, v, kk, a  [N, H, 64] fp32; w = exp(log_w)
    state                  [S, H, 64 value, 64 key], updated in place
    Returns y [N, H, 64] fp32. Rows of one token take one step; longer ones the matrix form, a chunk at a time.
    """
    if rows.is_decode:
        return _wkv_step(r, log_w, k, v, kk, a, state, rows.slot_index)
    y = torch.empty_like(r)
    if rows.single:
        at, slots = rows.single_at
        y[at] = _wkv_step(*(t[at] for t in (r, log_w, k, v, kk, a)), state, slots)
    _wkv_chunks(r, log_w, k, v, kk, a, state, rows, y)
    return y


def _wkv_step(r, log_w, k, v, kk, a, state, slots) -> torch.Tensor:
    """One token for each of B rows: [B, H, 64] -> [B, H, 64]."""
    shape = r.shape
    s = state[slots]  # a view when the slots follow one another, else a copy
    work = s.float().view(-1, HEAD_SIZE, HEAD_SIZE)
    flat = (-1, HEAD_SIZE)
    r, w, k, v = r.view(flat), log_w.exp().view(flat), k.view(flat), v.view(flat)
    # S kk and S (w r) come from one pass over S; y = S_new r then needs only dot products on top.
    pair = torch.stack((kk.view(flat), w * r), 2)
    removed, kept = torch.bmm(work, pair).unbind(2)
    inputs = torch.stack((kk.view(flat) * a.view(flat), k), 1)  # [B * H, 2, 64]
    outputs = torch.stack((removed.neg(), v), 2)  # [B * H, 64, 2]
    dots = torch.bmm(inputs, r.unsqueeze(2))
    y = torch.bmm(outputs, dots).squeeze(2).add_(kept)
    work.mul_(w.unsqueeze(1)).baddbmm_(outputs, inputs)
    if not (isinstance(slots, slice) and state.dtype == torch.float32):  # otherwise `work` is the state itself
        state[slots] = work.view_as(s).to(state.dtype)
    return y.view(shape)


def _wkv_chunks(r, log_w, k, v, kk, a, state, rows: PackedRows, y: torch.Tensor) -> None:
    """The chunked matrix form, written into y's positions.

    With b = -a kk, let G_i be the decay from a chunk's start through token i. Unrolled,
    u_i = S_{i-1} kk_i = S_0 (G_{i-1} kk_i) + sum_{j<i} u_j (b_j G_{i-1}/G_j . kk_i) + v_j (k_j G_{i-1}/G_j . kk_i),
    a unit lower triangular system for all u at once; outputs and the next chunk's state are then matrix products.
    (The WY form of generalised delta rules: Yang et al., "Parallelizing linear transformers with the delta rule", 2024.)
    Every decay is counted from the chunk's middle, so that a ratio G_i/G_j splits into two factors that cannot overflow.
    """
    chunks = rows.chunks
    m, heads = chunks.index.shape[0], r.shape[1]
    batch = m * heads

    def cut(t: torch.Tensor) -> torch.Tensor:  # [N, H, 64] -> [M, H, CHUNK, 64]
        return (t.view(m, CHUNK, heads, HEAD_SIZE) if chunks.in_order else t[chunks.index]).transpose(1, 2)

    def room(*dims: int) -> torch.Tensor:
        return torch.empty(batch, *dims, dtype=torch.float32, device=r.device)

    real = None if chunks.padding is None else ~chunks.padding[:, None, :, None]  # padded tokens must change nothing

    through = cut(log_w) if real is None else cut(log_w) * real
    through = through.reshape(batch, CHUNK, HEAD_SIZE).cumsum(1)  # log G_i
    middle = through[:, -1:] / 2
    rise = (through - middle).exp()  # G_i counted from the middle
    half = middle.exp()  # from the start to the middle, and from there to the end
    before = room(CHUNK, HEAD_SIZE)  # G_{i-1}
    before[:, :1] = 1 / half
    before[:, 1:] = rise[:, :-1]
    fall = rise.reciprocal()

    kk = cut(kk).reshape(batch, CHUNK, HEAD_SIZE)
    left = room(2, CHUNK, HEAD_SIZE)  # kk and r, decayed to their places
    torch.mul(kk, before, out=left[:, 0])
    torch.mul(cut(r).reshape(batch, CHUNK, HEAD_SIZE), rise, out=left[:, 1])
    if real is not None:
        fall *= real.expand(m, heads, CHUNK, HEAD_SIZE).reshape(batch, CHUNK, HEAD_SIZE)
    right = room(2, CHUNK, HEAD_SIZE)  # b and k
    torch.mul(kk.mul_(fall).neg_(), cut(a).reshape(batch, CHUNK, HEAD_SIZE), out=right[:, 0])
    torch.mul(cut(k).reshape(batch, CHUNK, HEAD_SIZE), fall, out=right[:, 1])
    uv = room(2, CHUNK, HEAD_SIZE)
    uv[:, 1].view(m, heads, CHUNK, HEAD_SIZE).copy_(cut(v))

    left, right = left.view(batch, -1, HEAD_SIZE), right.view(batch, -1, HEAD_SIZE)
    scores = torch.bmm(left, right.transpose(1, 2)).view(batch, 2, CHUNK, 2, CHUNK).mul_(_causal(r.device))
    right_side = room(CHUNK, 2 * HEAD_SIZE)
    right_side[:, :, :HEAD_SIZE] = left[:, :CHUNK]
    torch.bmm(scores[:, 0, :, 1], uv[:, 1], out=right_side[:, :, HEAD_SIZE:])
    solved = torch.linalg.solve_triangular(scores[:, 0, :, 0].neg(), right_side, upper=False, unitriangular=True)
    u_state, u_own = solved[:, :, :HEAD_SIZE], solved[:, :, HEAD_SIZE:]
    within = scores[:, 1].reshape(batch, CHUNK, 2 * CHUNK)
    query, uv_flat = left[:, CHUNK:], uv.view(batch, 2 * CHUNK, HEAD_SIZE)

    s = state[chunks.slots].float().view(-1, HEAD_SIZE, HEAD_SIZE)
    out = room(CHUNK, HEAD_SIZE)
    start = 0
    for count in chunks.counts:
        end = start + count * heads
        live = s[: count * heads].mul_(half[start:end])
        turned = live.transpose(1, 2)
        uv[start:end, 0] = torch.baddbmm(u_own[start:end], u_state[start:end], turned)
        torch.baddbmm(torch.bmm(within[start:end], uv_flat[start:end]), query[start:end], turned, out=out[start:end])
        live.baddbmm_(uv_flat[start:end].transpose(1, 2), right[start:end]).mul_(half[start:end])
        start = end
    state[chunks.slots] = s.view(-1, heads, HEAD_SIZE, HEAD_SIZE).to(state.dtype)
    out = out.view(m, heads, CHUNK, HEAD_SIZE).transpose(1, 2)
    if chunks.in_order:
        y.view(m, CHUNK, heads, HEAD_SIZE).copy_(out)
    elif chunks.padding is None:
        y[chunks.index] = out
    else:
        y[chunks.index[~chunks.padding]] = out[~chunks.padding]


@cache
def _causal(device: torch.device) -> torch.Tensor:
    """[2, CHUNK, 1, CHUNK] mask: kk's line sees only earlier tokens, r's also its own."""
    ones = torch.ones(CHUNK, CHUNK, device=device)
    return torch.stack((ones.tril(-1), ones.tril()))[:, :, None]
