"""The products of cuda/linear/: few tokens, low-rank pairs, the sparse half of the channel mix.

N tokens, width C, feed-forward width F; operands and results are fp16 unless said otherwise, sums are fp32. A token's result
depends neither on the other tokens nor on its place among them. Up to 16 tokens it does not depend on N either, and in
`sparse_ffn` never. Beyond, lora_up has one other order of sums; that of lora_down changes with the number of thread blocks that
share one, see `lora_down_config`.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_batch.kernels.launch import INT, POINTER, Launcher, check, pointer
from rwkv_batch.model.weights import Layer, ModelShape

HALF = torch.float16
MAX_GEMV = 16  # tokens
MAX_SPARSE = 8  # tokens of `sparse_ffn`
MAX_MASKED = 16  # tokens of `masked_ffn`
MASK_UNITS = 32  # units to a word of the active mask
RANK_UNIT = 32  # the kernels' ranks are multiples of this
PLANES = 6  # of `mixed`: r, k, v, w, a, g
GROUPED_ROWS = 128  # rows of weights of a tile of grouped products (cuda/grouped/grouped.cu), or half as many
FEW_GROUPED, MANY_GROUPED = 64, 128  # tokens up to which lora_up, and from which lora_down, is cut up by other rules
GROUPED_K = 64  # values of k that are loaded at a time
SPLIT_US = 3.0  # that thread blocks which share a tile take to add their sums
RESERVED_CONFIGS = 2  # to be timed


class GroupedConfig(NamedTuple):
    """How a grouped product is cut up: see `GroupedCut` in cuda/linear/products.cuh. No tile: not grouped.

    tile    tokens of a tile: 32, 64, 128, 160 or 256; where `height` is 64, up to 128
    splits  thread blocks that share a tile's K and add their sums in a fixed order, 1 to 8; of lora_down
    blocks  thread blocks to a multiprocessor
    height  rows of weights of a tile: 64 or 128
    """

    tile: int = 0
    splits: int = 1
    blocks: int = 1
    height: int = GROUPED_ROWS


SMALL_LORA_UP = GroupedConfig(64, 1, 3)  # small parts, also for where a kernel beside it leaves little room before its end
# The same of few tokens: the first with which no multiprocessor gets more than one tile.
FEW_LORA_UP = (GroupedConfig(32, height=64), GroupedConfig(64, height=64), GroupedConfig(32), GroupedConfig(64))


@dataclass(frozen=True)
class Lora:
    """A layer's low-rank pairs packed for the kernels; ranks are padded with zeros to multiples of 32, their sum is R.

    down   [R, C]: the rows of w, a, v, g
    up     [R * C]: [C, rank] of w, a, v, g, one after another
    w0, a0, v0  [C] fp32; v0 is None in layer 0, which has no v
    ranks  of w, a, v, g, padded
    """

    down: Tensor
    up: Tensor
    w0: Tensor
    a0: Tensor
    v0: Tensor | None
    ranks: tuple[int, int, int, int]

    @classmethod
    def of(cls, layer: Layer) -> "Lora":
        """Pack the pairs of `layer`."""
        downs, ups, ranks = [], [], []
        for first, second in ((layer.w1, layer.w2), (layer.a1, layer.a2), (layer.v1, layer.v2), (layer.g1, layer.g2)):
            rank = 0 if first is None else first.shape[1]
            padded = _padded(rank)
            ranks.append(padded)
            if rank:
                downs.append(torch.nn.functional.pad(first.t().to(HALF), (0, 0, 0, padded - rank)))
                ups.append(torch.nn.functional.pad(second.t().to(HALF), (0, padded - rank)).reshape(-1))
        v0 = None if layer.v0 is None else layer.v0.float()
        lora = cls(torch.cat(downs), torch.cat(ups), layer.w0.float(), layer.a0.float(), v0, tuple(ranks))
        assert lora.down.shape == (lora.rank, layer.w1.shape[0])
        return lora

    @staticmethod
    def max_rank(shape: ModelShape) -> int:
        """Return R of a layer that has all four pairs."""
        return sum(map(_padded, (shape.rank_w, shape.rank_a, shape.rank_v, shape.rank_g)))

    @classmethod
    def num_bytes(cls, shape: ModelShape) -> int:
        """Bytes of the matrices of such a layer; they are copies."""
        return cls.max_rank(shape) * (shape.width + shape.inner_width) * HALF.itemsize

    @property
    def rank(self) -> int:
        """R, the sum of the ranks."""
        return sum(self.ranks)

    @property
    def width(self) -> int:
        """C, the model's."""
        return self.down.shape[1]

    @property
    def outputs(self) -> int:
        """What `lora_up` has of each pair: C, or a shard's part of it."""
        return self.w0.shape[0]


class Linear:
    """The kernels of cuda/linear/ for few tokens; ValueError, naming the argument, for tensors they cannot take.

    pdl  programmatic dependent launch: a kernel may start, and fetch its weights, while the one before it in the stream ends;
         its weights must not be written by that one
    """

    def __init__(self, launcher: Launcher, *, pdl: bool = False):
        self.launcher = launcher
        self.pdl = pdl
        self.num_sms = torch.cuda.get_device_properties(launcher.device).multi_processor_count
        self.hopper = launcher.hopper
        self._gemv = launcher.bind("rwkv_gemv", *[POINTER] * 3, *[INT] * 6)
        self._project = launcher.bind("rwkv_project", *[POINTER] * 5, *[INT] * 7)
        self._lora_down = launcher.bind("rwkv_lora_down", *[POINTER] * 3, *[INT] * 11)
        self._lora_up = launcher.bind("rwkv_lora_up", *[POINTER] * 9, *[INT] * 11)
        self._sparse_ffn = launcher.bind("rwkv_sparse_ffn", *[POINTER] * 3, *[INT] * 4)
        self._masked_ffn = launcher.bind("rwkv_masked_ffn", *[POINTER] * 4, *[INT] * 4)
        self._build_active_mask = launcher.bind("rwkv_build_active_mask", *[POINTER] * 2, *[INT] * 3)
        self._relu_square = launcher.bind("rwkv_relu_square", POINTER, INT, INT)

    def gemv(self, x: Tensor, weight: Tensor, out: Tensor, *, relu_square: bool = False) -> None:
        """out [P, N, M] = x [P, N, K] weight [P, M, K]^T; or without P. N <= 16, P <= 7, K a multiple of 64.

        relu_square  out = min(max(out, 0)^2, 65504)
        """
        problems = x.shape[0] if x.dim() == 3 else 1
        n, k, m = x.shape[-2], x.shape[-1], weight.shape[-2]
        lead = x.shape[:-2]
        self._check("x", x, (*lead, n, k))
        self._check("weight", weight, (*lead, m, k))
        self._check("out", out, (*lead, n, m))
        _require(n <= MAX_GEMV and problems <= 7 and k % 64 == 0, f"gemv: N {n}, P {problems} or K {k} does not fit")
        pointers = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
        self.launcher.launch(self._gemv, *pointers, problems, n, m, k, int(relu_square), self.pdl)

    def project(self, mixed: Tensor, weight: Tensor, lora: Lora, rkv: Tensor, hidden: Tensor) -> None:
        """`gemv` of r, k, v and `lora_down` in one launch: rkv [3, N, C] and hidden [N, R]; N <= 16.

        mixed [6, N, C] in the order r, k, v, w, a, g; weight [3, C, C] of r, k, v.
        """
        n, c = mixed.shape[1], lora.width
        self._check("mixed", mixed, (PLANES, n, c))
        self._check("weight", weight, (3, c, c))
        self._check("rkv", rkv, (3, n, c))
        self._check("hidden", hidden, (n, lora.rank))
        _require(n <= MAX_GEMV, f"project: at most {MAX_GEMV} tokens, not {n}")
        pointers = (mixed.data_ptr(), weight.data_ptr(), lora.down.data_ptr(), rkv.data_ptr(), hidden.data_ptr())
        self.launcher.launch(self._project, *pointers, n, c, *lora.ranks, self.pdl)

    def lora_down(self, mixed: Tensor, lora: Lora, hidden: Tensor, *, config: GroupedConfig | None = None) -> None:
        """hidden [N, R] = tanh(x_w w1), x_a a1, x_v v1, sigmoid(x_g g1) side by side, of mixed [6, N, C].

        config  instead of that for N tokens
        """
        n, c = mixed.shape[1], lora.width
        self._check("mixed", mixed, (PLANES, n, c))
        self._check("hidden", hidden, (n, lora.rank))
        grouped = self.hopper and n > MAX_GEMV
        config = config or (lora_down_config(n, c, lora.ranks, self.num_sms) if grouped else GroupedConfig())
        pointers = (mixed.data_ptr(), lora.down.data_ptr(), hidden.data_ptr())
        self.launcher.launch(self._lora_down, *pointers, n, c, *lora.ranks, *config, self.pdl)

    def lora_up(
        self,
        hidden: Tensor,
        lora: Lora,
        w_raw: Tensor,
        a: Tensor,
        v_mix: Tensor | None,
        g: Tensor,
        *,
        beside: bool = False,
        config: GroupedConfig | None = None,
    ) -> None:
        """From hidden [N, R], all [N, C]: the pairs' second halves.

        w_raw   fp32, w0 + h_w w2: what the decay is the sigmoid of
        a       sigmoid(a0 + h_a a2)
        v_mix   sigmoid(v0 + h_v v2), not written in layer 0
        g       h_g g2
        beside  while another kernel has the multiprocessors, or some of them
        config  instead of that for N tokens
        """
        n, c = hidden.shape[0], lora.outputs
        self._check("hidden", hidden, (n, lora.rank))
        self._check("w_raw", w_raw, (n, c), torch.float32)
        self._check("a", a, (n, c))
        self._check("g", g, (n, c))
        if lora.v0 is not None:
            _require(v_mix is not None, "v_mix: needed in a layer with v")
            self._check("v_mix", v_mix, (n, c))
        inputs = (hidden.data_ptr(), lora.up.data_ptr(), lora.w0.data_ptr(), lora.a0.data_ptr(), pointer(lora.v0))
        outputs = (w_raw.data_ptr(), a.data_ptr(), pointer(v_mix), g.data_ptr())
        grouped = self.hopper and n > MAX_GEMV
        if config is None:
            config = lora_up_config(n, c, lora.ranks, self.num_sms, beside=beside) if grouped else GroupedConfig()
        self.launcher.launch(self._lora_up, *inputs, *outputs, n, c, *lora.ranks, *config, self.pdl)

    def sparse_ffn(self, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        """out [N, C] = hidden [N, F] weight [F, C], each token reading the rows of units that are on in it.

        N <= 8; F a multiple of 4, C of 64.
        """
        n, f, c = self._check_sparse(hidden, weight, out)
        _require(n <= MAX_SPARSE and f % 4 == 0 and c % 64 == 0, f"sparse_ffn: N {n}, F {f} or C {c} does not fit")
        self.launcher.launch(self._sparse_ffn, hidden.data_ptr(), weight.data_ptr(), out.data_ptr(), n, f, c, self.pdl)

    def masked_ffn(self, hidden: Tensor, active_mask: Tensor, weight: Tensor, out: Tensor) -> None:
        """out [N, C] = hidden [N, F] weight [F, C], reading once the rows of units that are on in some token.

        N <= 16; F a multiple of 32, C of 128; on Hopper GPUs; `weight` finite.

        active_mask  of hidden, as `build_active_mask` or `Gemm.gemm` leave it
        """
        n, f, c = self._check_sparse(hidden, weight, out)
        _require(self.masked_ffn_fits(n, f, c), f"masked_ffn: N {n}, F {f} or C {c} does not fit, or the GPU is no Hopper")
        self._check("active_mask", active_mask, (f // MASK_UNITS,), torch.int32)
        pointers = (hidden.data_ptr(), active_mask.data_ptr(), weight.data_ptr(), out.data_ptr())
        self.launcher.launch(self._masked_ffn, *pointers, n, f, c, self.pdl)

    def build_active_mask(self, hidden: Tensor, active_mask: Tensor) -> None:
        """active_mask [F / 32] int32: bit i of word w says whether unit 32 w + i of hidden [N, F] is on in some token."""
        n, f = hidden.shape
        self._check("hidden", hidden, (n, f))
        _require(f % MASK_UNITS == 0, f"build_active_mask: F {f} is no multiple of {MASK_UNITS}")
        self._check("active_mask", active_mask, (f // MASK_UNITS,), torch.int32)
        self.launcher.launch(self._build_active_mask, hidden.data_ptr(), active_mask.data_ptr(), n, f, self.pdl)

    def masked_ffn_fits(self, n: int, f: int, c: int) -> bool:
        """Return whether `masked_ffn` takes N tokens, F units and width C."""
        return self.hopper and n <= MAX_MASKED and f % 32 == 0 and c % 128 == 0

    def relu_square_(self, hidden: Tensor) -> None:
        """hidden [N, F] = min(max(hidden, 0)^2, 65504) in place; N * F a multiple of 8."""
        self._check("hidden", hidden, hidden.shape)
        count = hidden.numel()
        _require(count % 8 == 0, f"relu_square_: {count} values are no multiple of 8")
        self.launcher.launch(self._relu_square, hidden.data_ptr(), count // 8, self.pdl)

    def _check_sparse(self, hidden: Tensor, weight: Tensor, out: Tensor) -> tuple[int, int, int]:
        n, f, c = hidden.shape[0], *weight.shape
        self._check("hidden", hidden, (n, f))
        self._check("weight", weight, (f, c))
        self._check("out", out, (n, c))
        return n, f, c

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = HALF) -> None:
        check(name, tensor, self.launcher.device, dtype, shape)


def _padded(rank: int) -> int:
    """Return the rank that the kernels work with."""
    return -(-rank // RANK_UNIT) * RANK_UNIT


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@functools.lru_cache(4096)
def lora_down_config(N: int, C: int, ranks: tuple[int, ...], num_sms: int) -> GroupedConfig:
    """Return how lora_down is cut up: as many thread blocks share a tile as the GPU holds for all tiles at once."""
    rows, steps = sum(math.ceil(rank / GROUPED_ROWS) for rank in ranks), C // GROUPED_K
    if N < MANY_GROUPED:
        splits = next(splits for splits in (8, 4, 2, 1) if splits <= max(1, steps // 2))
        return GroupedConfig(32 if N <= 32 else 64, splits, height=GROUPED_ROWS // 2)
    at_once = num_sms // 16 * 16  # clusters lie within some 16 multiprocessors
    for splits in (8, 4, 2):
        for tile in (64, 128, 160):
            if rows * math.ceil(N / tile) * splits <= at_once and splits <= steps // 2:
                return GroupedConfig(tile, splits)
    whole = (GroupedConfig(128, 1, 2), GroupedConfig(160), GroupedConfig(256))
    return min(whole, key=lambda config: _rounds(config, rows, N, num_sms) * _step(config.tile))


def lora_up_config(N: int, C: int, ranks: tuple[int, ...], num_sms: int, *, beside: bool = False) -> GroupedConfig:
    """Return how lora_up is cut up: where there are enough large tiles, two thread blocks write and multiply in turn.

    beside  while another kernel has the multiprocessors, or some of them
    """
    pairs = sum(rank > 0 for rank in ranks)
    if N <= FEW_GROUPED:
        tile = 32 if N <= 32 else 64
        few = [config for config in FEW_LORA_UP if config.tile <= tile and not beside]
        fits = (config for config in few if math.ceil(C / config.height) * math.ceil(N / config.tile) * pairs <= num_sms)
        return next(fits, GroupedConfig(tile, 1, 2))
    tiles = math.ceil(C / GROUPED_ROWS) * math.ceil(N / 128) * pairs
    return GroupedConfig(128, 1, 2) if tiles > 1.5 * num_sms and not beside else SMALL_LORA_UP


def reserved_configs(N: int, C: int, ranks: tuple[int, ...], num_sms: int) -> list[GroupedConfig]:
    """Return ways to cut up lora_down on multiprocessors that another kernel leaves free, the best by estimate first."""
    rows, steps = sum(math.ceil(rank / GROUPED_ROWS) for rank in ranks), C // GROUPED_K

    def taken(config: GroupedConfig) -> float:
        return _rounds(config, rows, N, num_sms) * (steps / config.splits * _step(config.tile) + SPLIT_US * (config.splits > 1))

    all_splits = [splits for splits in (1, 2, 4) if splits <= steps // 2]
    best = [min((GroupedConfig(tile, splits) for tile in (64, 128, 160)), key=taken) for splits in all_splits]
    return sorted(best, key=taken)[:RESERVED_CONFIGS]


def _rounds(config: GroupedConfig, rows: int, N: int, num_sms: int) -> int:
    """Return how often each multiprocessor gets a thread block, when `rows` tiles of weights meet N tokens."""
    return math.ceil(rows * math.ceil(N / config.tile) * config.splits / num_sms)


def _step(tile: int) -> float:
    """Return the us that a multiprocessor takes for GROUPED_K values of k of a tile: multiplying or loading."""
    return max(2.3e-5 * GROUPED_ROWS * tile, 1.75e-3 * (GROUPED_ROWS + tile))
