"""Calls of cuda/quant/quant_rows.cu: activations as e4m3 with a scale a row, and e4m3 matrices turned over."""

import enum
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_batch.kernels.launch import INT, POINTER, Launcher, check, pointer

E4M3 = torch.float8_e4m3fn
MAX_COLUMNS = 16384  # of a row that is quantised


class Order(enum.IntEnum):
    """Where the values of k stand in each 64; as `Order` in cuda/quant/quant_rows.cu."""

    LIKE_WEIGHTS = 0  # as matrices that are not transposed are stored, see `rwkv_batch/model/quantized.py`
    FRAGMENTS = 1  # as `QuantGemm` wants it
    NATURAL = 2


class QuantRows(NamedTuple):
    """Activations: `values` e4m3 [.., N, K] times `scales` fp32 [.., N], in an order."""

    values: Tensor
    scales: Tensor
    order: Order

    @classmethod
    def empty(cls, shape: tuple[int, ...], order: Order, device: torch.device | str) -> "QuantRows":
        """Return room for activations of this shape."""
        return cls(torch.empty(shape, dtype=E4M3, device=device), torch.empty(shape[:-1], device=device), order)


class RowQuantiser:
    """The kernels on one device."""

    def __init__(self, launcher: Launcher, *, pdl: bool = True):
        self.launcher = launcher
        self.pdl = pdl
        self._quantise = launcher.bind("rwkv_quantise_rows", *[POINTER] * 3, *[INT] * 5)
        self._turn_over = launcher.bind("rwkv_turn_over", *[POINTER] * 2, *[INT] * 3)

    @staticmethod
    def fits(columns: int) -> bool:
        """Return whether rows of so many values can be quantised."""
        return columns % 64 == 0 and columns <= MAX_COLUMNS

    def __call__(self, x: Tensor, out: QuantRows, *, relu_square: bool = False) -> QuantRows:
        """Quantise x [.., N, K] fp16, K a multiple of 64, at most 16,384: each row's largest value becomes 448.

        relu_square  quantise max(x, 0)^2 instead
        """
        check("x", x, self.launcher.device, torch.float16, out.values.shape)
        check("values", out.values, self.launcher.device, E4M3, x.shape)
        check("scales", out.scales, self.launcher.device, torch.float32, x.shape[:-1])
        pointers = map(pointer, (x, out.values, out.scales))
        self.launcher.launch(
            self._quantise, *pointers, out.scales.numel(), x.shape[-1], int(out.order), int(relu_square), self.pdl
        )  # fmt: skip
        return out

    def turn_over(self, matrix: Tensor, out: Tensor) -> None:
        """out [M, K] = matrix [K, M] of bytes, transposed; sizes multiples of 64."""
        rows, columns = matrix.shape
        check("matrix", matrix, self.launcher.device, E4M3, (rows, columns))
        check("out", out, self.launcher.device, E4M3, (columns, rows))
        self.launcher.launch(self._turn_over, pointer(matrix), pointer(out), rows, columns, self.pdl)
