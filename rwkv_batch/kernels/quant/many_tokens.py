"""The ways to do a product of many tokens with an 8-bit matrix, and what they need beside it.

QUANT_GEMM  the matrix becomes fp16 in registers (`QuantGemm`)
FP8         tokens become e4m3 too (`RowQuantiser`), then `QuantGemm`
FP8_CUBLAS  the same with cuBLASLt; a matrix that is stored [K, M], which it cannot read, is turned over first
"""

import torch
from torch import Tensor

from rwkv_batch.kernels.cublaslt import WORKSPACE_BYTES
from rwkv_batch.kernels.gemm import LEAST_RESERVED
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.linear import MAX_GEMV, Lora, reserved_configs
from rwkv_batch.kernels.quant.cublaslt_fp8 import MatMulFp8
from rwkv_batch.kernels.quant.gemm import FORMATS, QuantGemm, QuantGemmMatrix, leaves_mask
from rwkv_batch.kernels.quant.matrix import QuantMatrix
from rwkv_batch.kernels.quant.rows import E4M3, Order, QuantRows, RowQuantiser
from rwkv_batch.kernels.variants import LoraPlacement, Method, Variant
from rwkv_batch.model.weights import ModelShape

QUANTISED_TOKENS = 64  # up to which tokens stay fp16: weights are what is read then, and nothing is gained
DEQUANTISED_TOKENS = 256  # from which, untimed, int8 matrices are rather made fp16 as a whole
MAX_SPARING = 4  # configs that leave multiprocessors for the low-rank pairs
TURNED_TOKENS = 1024  # from which, untimed, it pays to turn a matrix over for cuBLASLt


class ManyTokens:
    """The products of one model on one device.

    quant       format of its matrices
    max_tokens  of a step
    """

    def __init__(self, launcher: Launcher, quant: str, shape: ModelShape, max_tokens: int):
        self.launcher = launcher
        self.gemm = QuantGemm(launcher)
        self.quantiser = RowQuantiser(launcher)
        self._handles: dict[QuantMatrix, QuantGemmMatrix | None] = {}
        self._cublas = MatMulFp8(launcher, fast=True) if quant == "fp8" else None
        width = _row_bytes(shape) if quant == "fp8" else 0
        self._values = torch.empty(max_tokens * width, dtype=torch.uint8, device=launcher.device)
        self._scales = torch.empty(max_tokens * 3 if width else 0, dtype=torch.float32, device=launcher.device)

    @staticmethod
    def fits(quant: str) -> bool:
        """Return whether there are such products for matrices of this format."""
        return quant in FORMATS

    @staticmethod
    def num_bytes(shape: ModelShape, quant: str, *, max_tokens: int) -> int:
        """Bytes that are allocated, for quantised tokens and cuBLASLt."""
        return max_tokens * (_row_bytes(shape) + 12) + WORKSPACE_BYTES if quant == "fp8" else 0

    def variants(self, num_tokens: int, matrix: QuantMatrix) -> list[Variant]:
        """Return the ways in which a product of so many tokens can be done."""
        handle = self._handle(matrix)
        if handle is None:
            return []
        found = [Variant(Method.QUANT_GEMM, config) for config in self.gemm.tile_configs(num_tokens, handle)]
        if self._quantises(num_tokens, matrix):
            configs = self.gemm.tile_configs(num_tokens, handle, quantised_rows=True)
            found += [Variant(Method.FP8, config) for config in configs]
            found += [Variant(Method.FP8_CUBLAS)] * self._cublas_fits(num_tokens, matrix)
        return found

    def sparing_variants(self, num_tokens: int, matrix: QuantMatrix, lora: Lora) -> list[Variant]:
        """Return ways to do r, k, v that leave multiprocessors for the low-rank pairs."""
        handle, found = self._handle(matrix), []
        if handle is None or num_tokens <= MAX_GEMV:
            return found
        ways = (
            [(Method.QUANT_GEMM, False), (Method.FP8, True)]
            if self._quantises(num_tokens, matrix)
            else [(Method.QUANT_GEMM, False)]
        )
        for method, quantised in ways:
            configs = self.gemm.tile_configs(num_tokens, handle, quantised_rows=quantised)
            sparing = [
                (config, self.gemm.reserved_sms(num_tokens, handle, config, quantised_rows=quantised)) for config in configs
            ]
            for config, free in [(config, free) for config, free in sparing if free >= LEAST_RESERVED][:MAX_SPARING]:
                for lora_config in reserved_configs(num_tokens, lora.width, lora.ranks, free):
                    found.append(Variant(method, config, LoraPlacement.RESERVED, lora_config))
        return found

    def variant(self, num_tokens: int, matrix: QuantMatrix) -> Variant | None:
        """Return the way where nothing was timed; None = as in fp16."""
        if self._handle(matrix) is None:
            return None
        if self._quantises(num_tokens, matrix):
            cublas = self._cublas_fits(num_tokens, matrix) and (not matrix.transposed or num_tokens >= TURNED_TOKENS)
            return Variant(Method.FP8_CUBLAS if cublas else Method.FP8)
        return Variant(Method.QUANT_GEMM) if num_tokens <= DEQUANTISED_TOKENS else None

    def __call__(
        self,
        variant: Variant,
        x: Tensor,
        matrix: QuantMatrix,
        out: Tensor,
        scratch: Tensor,
        *,
        square_x: bool = False,
        relu_square: bool = False,
        active_mask: Tensor | None = None,
    ) -> None:
        """Do a product as `QuantGemm.gemm` says.

        scratch      fp16, as many values as the matrix; what it holds may be lost
        square_x     max(x, 0)^2 is what the matrix meets; of variants with quantised tokens
        relu_square  is left to the caller by FP8_CUBLAS
        """
        if variant.method is Method.QUANT_GEMM:
            self.gemm.gemm(x, self._handle(matrix), out, relu_square, variant.config, active_mask)
            return
        order = Order.FRAGMENTS
        if variant.method is Method.FP8_CUBLAS:
            order = Order.NATURAL if matrix.transposed else Order.LIKE_WEIGHTS
        rows = self.quantiser(x, self._rows(x.shape, order), relu_square=square_x)
        if variant.method is Method.FP8:
            self.gemm.gemm(rows, self._handle(matrix), out, relu_square, variant.config)
            return
        for call in self._calls(rows, matrix, out, scratch, turn=True):
            self._cublas(*call)

    def tune(self, x: Tensor, matrices: list[QuantMatrix], out: Tensor, scratch: Tensor) -> None:
        """Let cuBLASLt choose how it does a product."""
        if self._quantises(x.shape[-2], matrices[0]) and self._cublas_fits(x.shape[-2], matrices[0]):
            self.launcher.use_current_stream()
            rows = self.quantiser(x, self._rows(x.shape, Order.NATURAL))
            self._cublas.tune_rows(
                [call for matrix in matrices for call in self._calls(rows, matrix, out, scratch, turn=False)]
            )

    def save(self) -> None:
        """Remember what was chosen for the next start."""
        if self._cublas is not None:
            self._cublas.save()

    def leaves_mask(self, variant: Variant, num_tokens: int, matrix: QuantMatrix) -> bool:
        """Return whether a product tells which of its columns are not all zeros."""
        if variant.method is not Method.QUANT_GEMM:
            return False
        handle = self._handle(matrix)
        return leaves_mask(variant.config or self.gemm.tile_configs(num_tokens, handle)[0], num_tokens, handle)

    def _handle(self, matrix: QuantMatrix) -> QuantGemmMatrix | None:
        if matrix not in self._handles:
            self._handles[matrix] = self.gemm.prepare(matrix) if self.gemm.available else None
        return self._handles[matrix]

    def _quantises(self, num_tokens: int, matrix: QuantMatrix) -> bool:
        return num_tokens > QUANTISED_TOKENS and matrix.format == "fp8" and self.quantiser.fits(matrix.K)

    def _cublas_fits(self, num_tokens: int, matrix: QuantMatrix) -> bool:
        aligned = not matrix.stacked or num_tokens % 4 == 0  # the scales of each plane
        return aligned and self._cublas is not None and self._cublas.fits(matrix.M, matrix.K)

    def _rows(self, shape: torch.Size, order: Order) -> QuantRows:
        values = self._values[: shape.numel()].view(E4M3).view(shape)
        return QuantRows(values, self._scales[: shape[:-1].numel()].view(shape[:-1]), order)

    def _calls(
        self, rows: QuantRows, matrix: QuantMatrix, out: Tensor, scratch: Tensor, *, turn: bool
    ) -> list[tuple[QuantRows, Tensor, Tensor, Tensor]]:
        """Return what to hand to cuBLASLt, one matrix after another. `turn`: turn a matrix [K, M] over for it."""
        if matrix.transposed:
            turned = scratch.view(-1).view(E4M3)[: matrix.M * matrix.K].view(matrix.M, matrix.K)
            if turn:
                self.quantiser.turn_over(matrix.values, turned)
            return [(rows, turned, matrix.scales, out)]
        if not matrix.stacked:
            return [(rows, matrix.values, matrix.scales, out)]
        return [
            (QuantRows(rows.values[i], rows.scales[i], rows.order), matrix.values[i], matrix.scales[i], out[i])
            for i in range(matrix.batch)
        ]


def _row_bytes(shape: ModelShape) -> int:
    """Return the most that a product takes of a token: r, k and v are three, of the width."""
    return max(3 * shape.width, shape.ffn_width)
