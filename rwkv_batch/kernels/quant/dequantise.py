"""Calls of cuda/linear/dequantise.cu: a quantised matrix as fp16."""

from torch import Tensor

from rwkv_batch.kernels.launch import INT, POINTER, Launcher, check, pointer
from rwkv_batch.kernels.quant.matrix import HALF, QuantMatrix


class Dequantiser:
    """The kernel on one device."""

    def __init__(self, launcher: Launcher, *, pdl: bool = True):
        self.launcher = launcher
        self.pdl = pdl
        self._dequantise = launcher.bind("rwkv_dequantise", *[POINTER] * 3, *[INT] * 5)

    def __call__(self, matrix: QuantMatrix, out: Tensor) -> None:
        """out = the matrix as it is stored, each value rounded once; fp16, and as the matrix or with more rows, which stay.

        What reads `out` next must not be launched to overlap (`pdl`): such kernels fetch weights before they wait.
        """
        rows, columns = matrix.shape[-2:]
        check("out", out, self.launcher.device, HALF, (*matrix.shape[:-2], max(rows, out.shape[-2]), columns))
        pointers = map(pointer, (matrix.values, matrix.scales, out))
        self.launcher.launch(
            self._dequantise, *pointers, matrix.code, matrix.batch * rows, columns, matrix.transposed, self.pdl
        )  # fmt: skip
