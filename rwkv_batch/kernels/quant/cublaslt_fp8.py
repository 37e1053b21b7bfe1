"""Products of e4m3 matrices and e4m3 rows through cuBLASLt, which scales them by row: Hopper GPUs, cuBLAS 12.9 or later."""

import ctypes

import torch
from torch import Tensor

from rwkv_batch.kernels.cublaslt import MatMul, Product
from rwkv_batch.kernels.launch import Launcher, check, pointer
from rwkv_batch.kernels.quant.rows import E4M3, QuantRows

E4M3_TYPE = 28  # cudaDataType_t
DESC_A_SCALE_POINTER, DESC_B_SCALE_POINTER = 17, 18
DESC_FAST_ACCUM = 25
DESC_A_SCALE_MODE, DESC_B_SCALE_MODE = 31, 32
SCALE_OF_EACH_ROW = 3  # CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
LEAST_VERSION = 120900
UNIT = 16  # what M and K are multiples of


class MatMulFp8(MatMul):
    """The products on one device: sums in fp32, results in fp16.

    available  False where the device or the library has none
    fast       sums stay on the tensor cores, in some 14 bits, an error of 1e-3 beside the 3e-2 of e4m3 itself
    """

    NAME = "matmul-fp8"
    INPUT_TYPE = E4M3_TYPE

    def __init__(self, launcher: Launcher, *, fast: bool = False):
        super().__init__(launcher)
        self.fast = fast
        self.available = launcher.hopper and self._lib.cublasLtGetVersion() >= LEAST_VERSION and self._works()

    def fits(self, M: int, K: int) -> bool:
        """Return whether a matrix [M, K] can be multiplied."""
        return self.available and M % UNIT == 0 and K % UNIT == 0

    def __call__(self, x: QuantRows, weight: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write x [N, K] times (weight [M, K] e4m3 with scales of M values) transposed into out [N, M] fp16.

        Values of k stand in one order in both.
        """
        shape = (1, *_check(self.launcher.device, x, weight, scales, out), 1)
        self._run(self._products.get(shape) or self._prepare(shape), x.values, weight, out, x.scales, scales)

    def tune_rows(self, calls: list[tuple[QuantRows, Tensor, Tensor, Tensor]]) -> None:
        """Choose the algorithm of one shape by timing such calls of different weights."""
        self.tune([(x.values, weight, out, x.scales, scales) for x, weight, scales, out in calls])

    def _run(self, product: Product, x: Tensor, weight: Tensor, out: Tensor, x_scales: Tensor, scales: Tensor) -> None:
        self._set(product.desc, DESC_A_SCALE_POINTER, ctypes.c_void_p(pointer(scales)))
        self._set(product.desc, DESC_B_SCALE_POINTER, ctypes.c_void_p(pointer(x_scales)))
        super()._run(product, x, weight, out)

    def _describe(self, transposed: int) -> ctypes.c_void_p:
        desc = super()._describe(transposed)
        for attribute in (DESC_A_SCALE_MODE, DESC_B_SCALE_MODE):
            self._set(desc, attribute, ctypes.c_int32(SCALE_OF_EACH_ROW))
        for attribute in (DESC_A_SCALE_POINTER, DESC_B_SCALE_POINTER):  # any, for the search for algorithms
            self._set(desc, attribute, ctypes.c_void_p(pointer(self._workspace)))
        self._set(desc, DESC_FAST_ACCUM, ctypes.c_int8(self.fast))
        return desc

    def _works(self) -> bool:
        try:
            self._prepare((1, 256, 256, 256, 1))
        except RuntimeError:
            return False
        return True


def _check(device: torch.device, x: QuantRows, weight: Tensor, scales: Tensor, out: Tensor) -> tuple[int, int, int]:
    (N, K), M = x.values.shape, len(weight)
    check("x", x.values, device, E4M3, (N, K))
    check("x.scales", x.scales, device, torch.float32, (N,))
    check("weight", weight, device, E4M3, (M, K))
    check("scales", scales, device, torch.float32, scales.shape)
    check("out", out, device, torch.float16, (N, M))
    if scales.numel() != M:
        raise ValueError(f"scales: {M} are needed, not {scales.numel()}")
    return N, M, K
