"""Calls of cuda/linear/quant_gemv.cu and quant_ffn.cu: products of few tokens with quantised matrices, read as stored.

N tokens, width C, feed-forward width F; x and results are fp16, sums fp32. A token's result depends neither on the others nor
on its place among them, nor on N.
"""

import math

import torch
from torch import Tensor

from rwkv_batch.kernels.gemm import FEW_INPUTS, INPUTS_UNIT, MAX_INPUTS_WIDTH, MAX_RANK, PAIR_ROWS, TileConfig
from rwkv_batch.kernels.launch import INT, POINTER, Launcher, check, pointer
from rwkv_batch.kernels.linear import MASK_UNITS, MAX_GEMV, MAX_MASKED, MAX_SPARSE, PLANES, Lora
from rwkv_batch.kernels.quant.matrix import HALF, QuantMatrix

MAX_PROBLEMS = 7
TILE_ROWS = 16
WHOLE_CODES = ("int8", "fp8", "int4", "nf4")  # formats of one plane
PAIR_SHARES = (1.0, 1.3, 1.7)  # thread blocks of the low-rank pairs, by their share of the bytes


class QuantLinear:
    """The kernels on one device; ValueError, naming the argument, for tensors they cannot take.

    pdl  as of `Linear`
    """

    def __init__(self, launcher: Launcher, *, pdl: bool = False):
        self.launcher = launcher
        self.pdl = pdl
        self._gemv = launcher.bind("rwkv_quant_gemv", *[POINTER] * 5, *[INT] * 9)
        self.hopper = launcher.hopper
        self.num_sms = torch.cuda.get_device_properties(launcher.device).multi_processor_count
        self._inputs = launcher.bind("rwkv_quant_inputs", *[POINTER] * 15, *[INT] * 9)
        self._arrived = torch.zeros(self.num_sms + 1, dtype=torch.int64, device=launcher.device)  # thread blocks of `inputs`
        self._masked_ffn = launcher.bind("rwkv_quant_masked_ffn", *[POINTER] * 5, *[INT] * 5)
        self._sparse_ffn = launcher.bind("rwkv_quant_sparse_ffn", *[POINTER] * 4, *[INT] * 5)
        self._project = launcher.bind("rwkv_quant_project", *[POINTER] * 6, *[INT] * 9)

    def gemv(
        self,
        x: Tensor,
        matrix: QuantMatrix,
        out: Tensor,
        *,
        relu_square: bool = False,
        active_mask: Tensor | None = None,
        config: TileConfig | None = None,
    ) -> None:
        """out [P, N, M] = x [P, N, K] matrix [P, M, K]^T; or without P. N <= 16, P <= 7.

        out          may have more columns than M, which stay as they are
        relu_square  out = min(max(out, 0)^2, 65504)
        active_mask  [M / 32] int32, with `relu_square` and without P: a bit for each column that is not all zeros
        config       one of `configs`
        """
        lead, n = x.shape[:-2], x.shape[-2]
        self._check("x", x, (*lead, n, matrix.K))
        self._check("out", out, (*lead, n, max(matrix.M, out.shape[-1])))
        if matrix.transposed or lead != matrix.shape[:-2] or not 0 < n <= MAX_GEMV or matrix.batch > MAX_PROBLEMS:
            raise ValueError(f"gemv: {list(matrix.shape)} does not fit x {list(x.shape)}, or that has over {MAX_GEMV} rows")
        if active_mask is not None:
            self._check("active_mask", active_mask, (matrix.M // MASK_UNITS,), torch.int32)
            if matrix.M % MASK_UNITS or matrix.batch > 1 or not relu_square:
                raise ValueError("active_mask: of one matrix with whole words of rows and a squared ReLU")
        pointers = map(pointer, (x, matrix.values, matrix.scales, out, active_mask))
        sizes = matrix.code, matrix.batch, n, matrix.M, matrix.K, out.shape[-1], int(relu_square)
        self.launcher.launch(self._gemv, *pointers, *sizes, config.clusters if config else 0, self.pdl)

    def configs(self, n: int) -> list[TileConfig | None]:
        """Return ways to cut up `gemv` and `project` for N tokens: with a thread block to a multiprocessor, or two."""
        pair = TileConfig(TILE_ROWS, 8, 1, 3, 2 * self.num_sms)
        return [None, pair] if self.hopper and n <= 8 else [None]  # more tokens take the registers of two

    def project(
        self,
        mixed: Tensor,
        matrix: QuantMatrix,
        lora: Lora,
        rkv: Tensor,
        hidden: Tensor,
        *,
        config: TileConfig | None = None,
    ) -> None:
        """`gemv` of r, k, v and `Linear.lora_down` in one launch, where K allows: rkv [3, N, C] and hidden [N, R]; N <= 16.

        mixed [6, N, C] in the order r, k, v, w, a, g; `matrix` [3, C, C] of r, k, v.
        """
        n, c = mixed.shape[1], lora.width
        self._check("mixed", mixed, (PLANES, n, c))
        self._check("rkv", rkv, (3, n, c))
        self._check("hidden", hidden, (n, lora.rank))
        if matrix.shape != (3, c, c) or matrix.transposed or not 0 < n <= MAX_GEMV:
            raise ValueError(f"project: {list(matrix.shape)} is not [3, {c}, {c}], or there are over {MAX_GEMV} tokens: {n}")
        pointers = map(pointer, (mixed, matrix.values, matrix.scales, lora.down, rkv, hidden))
        blocks = config.clusters if config else 0
        self.launcher.launch(self._project, *pointers, matrix.code, n, c, *lora.ranks, blocks, self.pdl)

    def inputs(
        self,
        mixed: Tensor,
        matrix: QuantMatrix,
        lora: Lora,
        rkv: Tensor,
        hidden: Tensor,
        gates: tuple[Tensor | None, ...],
        config: TileConfig,
    ) -> None:
        """`project` and `Linear.lora_up` in one launch, as `Gemm.inputs` says.

        config  one of `inputs_configs` of this layer or another, whose ranks may differ
        """
        n, c = mixed.shape[1], lora.width
        self._check("mixed", mixed, (PLANES, n, c))
        self._check("rkv", rkv, (3, n, c))
        self._check("hidden", hidden, (n, lora.rank))
        for name, out in zip(("w_raw", "a", "v_mix", "g"), gates, strict=True):
            if name != "v_mix" or lora.v0 is not None:
                self._check(name, out, (n, c), torch.float32 if name == "w_raw" else HALF)
        if not (self.inputs_configs(n, matrix, lora) and 0 < config.clusters <= min(_tiles(matrix), self.num_sms - 1)):
            raise ValueError(f"config: {config} does not fit {n} tokens and this matrix")
        tensors = (mixed, matrix.values, matrix.scales, lora.down, lora.up, lora.w0, lora.a0, lora.v0, rkv, hidden, *gates)
        pointers = map(pointer, (*tensors, self._arrived))
        self.launcher.launch(self._inputs, *pointers, matrix.code, n, c, *lora.ranks, config.clusters, self.pdl)

    def inputs_configs(self, n: int, matrix: QuantMatrix, lora: Lora) -> list[TileConfig]:
        """Return ways to cut up `inputs` for N tokens, which differ in `clusters`, the thread blocks of r, k and v."""
        c = lora.width
        fits = matrix.shape == (3, c, c) and matrix.format in WHOLE_CODES and n <= FEW_INPUTS
        aligned = matrix.scales.data_ptr() % 16 == 0 and c % (INPUTS_UNIT if matrix.format in ("int8", "fp8") else 512) == 0
        if not (self.hopper and fits and aligned and c <= MAX_INPUTS_WIDTH and max(lora.ranks) <= MAX_RANK):
            return []
        pairs_bytes = 2 * lora.rank * c * HALF.itemsize
        even = self.num_sms * pairs_bytes / (pairs_bytes + matrix.nbytes)
        fewest = math.ceil(lora.rank / PAIR_ROWS)  # with less they would be waited for
        blocks = {min(_tiles(matrix), self.num_sms - max(fewest, round(even * share))) for share in PAIR_SHARES}
        return [TileConfig(TILE_ROWS, 8 if n <= 8 else 16, 1, 8, count) for count in sorted(blocks) if count > 0]

    def sparse_ffn(self, hidden: Tensor, matrix: QuantMatrix, out: Tensor) -> None:
        """out [N, C] = hidden [N, F] matrix [F, C], each token reading the rows of units that are on in it.

        N <= 8; F a multiple of 4; `matrix` transposed.
        """
        n, f, c = len(hidden), matrix.K, matrix.M
        self._check("hidden", hidden, (n, f))
        self._check("out", out, (n, c))
        if not matrix.transposed or f % 4 or n > MAX_SPARSE:
            raise ValueError(f"sparse_ffn: N {n} or F {f} does not fit, or {list(matrix.shape)} is not [F, C]")
        pointers = map(pointer, (hidden, matrix.values, matrix.scales, out))
        self.launcher.launch(self._sparse_ffn, *pointers, matrix.code, n, f, c, self.pdl)

    def masked_ffn(self, hidden: Tensor, active_mask: Tensor, matrix: QuantMatrix, out: Tensor) -> None:
        """out [N, C] = hidden [N, F] matrix [F, C], reading once the rows of units that are on in some token.

        For what `masked_ffn_fits` says yes to; `active_mask` as of `Linear.masked_ffn`. In formats of groups, a weight is fp16:
        its scale cannot wait for the sum.
        """
        n, f, c = len(hidden), matrix.K, matrix.M
        self._check("hidden", hidden, (n, f))
        self._check("out", out, (n, c))
        self._check("active_mask", active_mask, (f // MASK_UNITS,), torch.int32)
        if not self.masked_ffn_fits(n, matrix):
            raise ValueError(f"masked_ffn: {matrix.format}, N {n}, F {f} or C {c} does not fit, or the GPU is no Hopper")
        pointers = map(pointer, (hidden, active_mask, matrix.values, matrix.scales, out))
        self.launcher.launch(self._masked_ffn, *pointers, matrix.code, n, f, c, self.pdl)

    def masked_ffn_fits(self, n: int, matrix: QuantMatrix) -> bool:
        """Return whether `masked_ffn` takes N tokens and this matrix."""
        fits = matrix.transposed and matrix.K % MASK_UNITS == 0 and matrix.M % 128 == 0 and matrix.scales.data_ptr() % 4 == 0
        return self.hopper and fits and n <= MAX_MASKED and matrix.format in WHOLE_CODES

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = HALF) -> None:
        check(name, tensor, self.launcher.device, dtype, shape)


def _tiles(matrix: QuantMatrix) -> int:
    return matrix.batch * math.ceil(matrix.M / TILE_ROWS)
