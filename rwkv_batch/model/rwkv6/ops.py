"""RWKV-6's ops in plain torch, which judge its kernels; those that RWKV-7 has too are of `reference_ops.py`, as the rules are.

Ops take packed rows: N tokens of B rows one after another, described by `PackedRows`. Arithmetic is fp32.
"""

import torch
import torch.nn.functional as F

from rwkv_batch.model.packed_rows import CHUNK, PackedRows
from rwkv_batch.model.reference_ops import GROUP_NORM_EPS, add_norm_mix, embed, linear, logits, prepare, project
from rwkv_batch.model.reference_ops import channel_mix as squared_relu
from rwkv_batch.model.rwkv6.weights import Rwkv6Layer

__all__ = ["add_norm_mix", "channel_mix", "embed", "logits", "prepare", "time_mix", "wkv"]
PAIRS = {"cpu": 2**21, "cuda": 2**25}  # decays between pairs of tokens that are worked on at a time
NO_MORE = 1e6  # of -log w: exp(-1e6) is 0, and what is above might be infinite


def time_mix(mixed: torch.Tensor, layer: Rwkv6Layer, wkv_state: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """The attention-like half of a block: mixed [3, N, C] by `att_mix`; wkv_state [S, H, K, K] updated in place -> [N, C]."""
    blend, x, previous = mixed.unbind()
    n, c = x.shape
    heads = (n, *layer.bonus.shape)
    parts = project(blend, layer.mix_down).tanh_()
    parts = parts.view(n, 5, -1).transpose(0, 1)
    by_token = torch.bmm(parts.to(layer.mix_up.dtype), layer.mix_up).float().add_(layer.mix)
    x_w, x_k, x_v, x_r, x_g = torch.addcmul(x, previous - x, by_token).unbind()
    log_w = project(project(x_w, layer.decay_down).tanh_(), layer.decay_up, layer.decay).exp_().clamp_(max=NO_MORE).neg_()
    r, k, v = linear(x_r, layer.receptance), linear(x_k, layer.key), linear(x_v, layer.value)
    y = wkv(r.view(heads), log_w.view(heads), k.view(heads), v.view(heads), layer.bonus, wkv_state, rows)
    y = torch.group_norm(y.view(n, c), heads[1], layer.ln_x_weight, layer.ln_x_bias, GROUP_NORM_EPS)
    return linear(y * F.silu(linear(x_g, layer.gate)), layer.output)


def channel_mix(mixed: torch.Tensor, layer: Rwkv6Layer) -> torch.Tensor:
    """The feed-forward half: mixed [2, N, C] by `ffn_mix` -> [N, C], squared ReLU behind a gate."""
    return linear(mixed[1], layer.ffn_receptance).sigmoid_().mul_(squared_relu(mixed[:1], layer))


def wkv(r, log_w, k, v, bonus: torch.Tensor, state: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """The recurrence y = (S + v (u k)^T) r, S <- S diag(w) + v k^T, for each row from its slot's state.

    r, log_w, k, v  [N, H, K] fp32; w = exp(log_w), which may be 0
    bonus           u [H, K]: what the token's own key counts for it
    state           [S, H, K value, K key], updated in place
    Returns y [N, H, K] fp32. Rows of one token take one step; longer ones a chunk at a time.
    """
    own = (r * bonus * k).sum(-1, keepdim=True) * v
    if rows.is_decode:
        return own.add_(_step(r, log_w, k, v, state, rows.slot_index))
    if rows.single:
        at, slots = rows.single_at
        own[at] += _step(*(t[at] for t in (r, log_w, k, v)), state, slots)
    _chunks(r, log_w, k, v, state, rows, own)
    return own


def _step(r, log_w, k, v, state: torch.Tensor, slots: torch.Tensor | slice) -> torch.Tensor:
    """What one token of each of B rows reads of its state [B, H, K], and the state behind it."""
    s = state[slots].float()
    y = (s @ r.unsqueeze(-1)).squeeze(-1)
    state[slots] = torch.addcmul(s * log_w.exp().unsqueeze(-2), v.unsqueeze(-1), k.unsqueeze(-2)).to(state.dtype)
    return y


def _chunks(r, log_w, k, v, state: torch.Tensor, rows: PackedRows, y: torch.Tensor) -> None:
    """Add to y's positions what the tokens of longer rows read of their states and of earlier tokens of their chunks.

    With G_i the decay from a chunk's start through token i: y_i = S_0 (G_{i-1} r_i) + sum_{j<i} v_j (k_j G_{i-1}/G_j . r_i).
    Nothing bounds a decay from below, so a ratio is not split into two factors, one of which might overflow: it is taken as
    exp(log G_{i-1} - log G_j), never above 1, for each pair of tokens. The sums are fp64, since after one strong decay fp32
    would have lost what tells later tokens apart.
    """
    chunks = rows.chunks
    s = state[chunks.slots].float()  # [R, H, K, K], of which the rows with a chunk number c come first
    at_once = max(1, PAIRS[r.device.type] // (CHUNK * CHUNK * r.shape[1] * r.shape[2]))
    start = 0
    for count in chunks.counts:
        for first in range(0, count, at_once):
            last = min(first + at_once, count)
            index = chunks.index[start + first : start + last]
            real = None if chunks.padding is None else ~chunks.padding[start + first : start + last]
            out = _chunk(*(t[index].transpose(1, 2) for t in (r, log_w, k, v)), s[first:last], real).transpose(1, 2)
            if real is None:
                y[index] += out
            else:
                y[index[real]] += out[real]
        start += count
    state[chunks.slots] = s.to(state.dtype)


def _chunk(r, log_w, k, v, s: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """What the tokens of one chunk of some rows read [R, H, CHUNK, K], beside their own; s [R, H, K, K] moves on in place.

    real  [R, CHUNK]: which tokens are no padding, None = all
    """
    if real is not None:  # padded tokens must change nothing
        log_w, k = (t * real[:, None, :, None] for t in (log_w, k))
    through = log_w.double().cumsum(2)  # log G_i
    before = through - log_w
    unseen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=r.device).triu()[:, :, None]  # token i sees none of j >= i
    ratios = (before.unsqueeze(3) - through.unsqueeze(2)).float().masked_fill_(unseen, -torch.inf).exp_()
    scores = (ratios.mul_(k.unsqueeze(2)) @ r.unsqueeze(-1)).squeeze(-1)
    out = scores @ v + (r * before.float().exp()) @ s.transpose(2, 3)
    to_end = (through[:, :, -1:] - through).float().exp()
    s.mul_(through[:, :, -1:].float().exp()).add_(v.transpose(2, 3) @ (k * to_end))
    return out
