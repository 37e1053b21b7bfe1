"""A quantised matrix as the kernels read it, and the room in which it is made fp16 again."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rwkv_batch.model import quantized
from rwkv_batch.model.architectures import BaseLayer
from rwkv_batch.model.weight import Weight
from rwkv_batch.model.weights import ModelShape, Weights

HALF = torch.float16
CODES = {name: code for code, name in enumerate(("int8", "fp8", "int4", "nf4", "fp6", "fp5"))}  # cuda/linear/quant.cuh
LEAST_CAPABILITY = {"fp8": (8, 9)}  # of cards that multiply in a format; others: LEAST
LEAST = (8, 0)


def supported_formats(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the formats that NVIDIA cards of a compute capability, such as (9, 0), can run."""
    return tuple(name for name in CODES if capability >= LEAST_CAPABILITY.get(name, LEAST))


@dataclass(frozen=True, eq=False)
class QuantMatrix:
    """A matrix [M, K], or `batch` of them; nothing is copied.

    format          as `quantized.FORMATS` calls it; `code` is its number in C
    values, scales  see `rwkv_batch/model/quantized.py`
    transposed      stored [K, M]; then there is one
    stacked         whether `batch` is a dimension
    """

    format: str
    values: Tensor
    scales: Tensor
    batch: int
    M: int
    K: int
    transposed: bool
    stacked: bool

    @classmethod
    def of(cls, weight: Weight) -> "QuantMatrix":
        """Describe a quantised weight; ValueError, naming the tensor, where it is not as the kernels read it."""
        *lead, rows, columns = weight.shape
        values, scales, transposed = weight.values, weight.scales, weight.transposed
        expected = {
            "values": (values, quantized.value_dtype(weight.format), weight.values.shape),
            "scales": (
                scales,
                quantized.FORMATS[weight.format].scale_dtype,
                quantized.scales_shape(weight.format, tuple(weight.shape), transposed=transposed),
            ),
        }
        for name, (tensor, dtype, shape) in expected.items():
            if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape) or not tensor.is_contiguous():
                raise ValueError(f"{name}: expected contiguous {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
        if columns % quantized.BLOCK or len(lead) > 1 or (lead and transposed):
            raise ValueError(f"values: {list(weight.shape)} is no matrix with rows of a multiple of {quantized.BLOCK}")
        if values.data_ptr() % 16:
            raise ValueError("values: must begin at a multiple of 16 bytes")
        m, k = (columns, rows) if transposed else (rows, columns)
        return cls(weight.format, values, scales, math.prod(lead), m, k, transposed, bool(lead))

    @property
    def code(self) -> int:
        """Number of the format in C."""
        return CODES[self.format]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix as it is stored, batch included."""
        rows = (self.K, self.M) if self.transposed else (self.M, self.K)
        return (self.batch, *rows) if self.stacked else rows

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes


class Scratch:
    """Room for one quantised matrix at a time in fp16, the largest of a model."""

    def __init__(self, num_values: int, device: torch.device):
        self._values = torch.zeros(num_values, dtype=HALF, device=device)

    @classmethod
    def for_weights(cls, weights: Weights, unit: int) -> "Scratch":
        """Allocate what a model's quantised matrices need. `unit`: what the head's rows are filled up to a multiple of."""
        head = weights.head
        sizes = [math.ceil(head.shape[0] / unit) * unit * head.shape[1]] if head.format else []
        sizes += [weight.shape.numel() for layer in weights.layers for weight in _matrices(layer) if weight.format]
        return cls(max(sizes, default=0), weights.device)

    @staticmethod
    def num_bytes(shape: ModelShape, *, quant_head: bool = True) -> int:
        """Bytes for a model of this shape, quantised."""
        c, f = shape.width, shape.ffn_width
        return max(3 * c * c, f * c, (shape.vocab_size + 7) // 8 * 8 * c if quant_head else 0) * HALF.itemsize

    def view(self, shape: Iterable[int]) -> Tensor:
        """Return the room as a matrix, which any other that is asked for shares."""
        shape = torch.Size(shape)
        return self._values[: shape.numel()].view(shape)


def _matrices(layer: BaseLayer) -> list[Weight]:
    values = (getattr(layer, item.name) for item in fields(layer))
    return [value for value in values if isinstance(value, Weight)]


def quant_format(weights: Weights) -> str:
    """Return the format of a model's quantised matrices, "" where none is."""
    formats = {weight.format for layer in weights.layers for weight in _matrices(layer)} | {weights.head.format}
    return "+".join(sorted(formats - {""}))
