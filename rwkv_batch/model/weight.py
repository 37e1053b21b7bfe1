"""A matrix of the model, which may be quantised."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rwkv_batch.model import quantized


@dataclass(frozen=True, eq=False)
class Weight:
    """The matrix is `values`, or what they and `scales` mean in their format, see `quantized.py`.

    values         [.., rows, columns]; of a quantised matrix as the format has them
    scales         None = not quantised
    format         one of `quantized.FORMATS`, "" = not quantised
    transposed     the matrix is [in, out] and, if quantised, stored in its natural order
    rounds_inputs  the plain ops round what it is multiplied by to e4m3 too, to show what that costs
    beside         gives the plain ops' product from the inputs and the product with the matrix itself: adapters of single rows
    """

    values: Tensor
    scales: Tensor | None = None
    format: str = ""
    transposed: bool = False
    rounds_inputs: bool = False
    beside: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor] | None = None

    @classmethod
    def quantised(cls, matrix: Tensor, name: str, *, transposed: bool = False) -> "Weight":
        """Return a matrix in a format, on the matrix's device; `name` "" = as it is."""
        if not name:
            return cls(matrix, transposed=transposed)
        return cls(*quantized.quantise(matrix, name, transposed=transposed), name, transposed)

    @property
    def shape(self) -> torch.Size:
        """Of the matrix."""
        if not self.format:
            return self.values.shape
        return torch.Size((*self.values.shape[:-1], quantized.matrix_columns(self.format, self.values.shape[-1])))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Yield what is kept."""
        yield self.values
        if self.scales is not None:
            yield self.scales

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the matrix, where possible without a copy; None = in its own type, fp32 if it is quantised."""
        if self.format:
            return quantized.dequantise(
                self.values, self.scales, self.format, dtype or torch.float32, transposed=self.transposed
            )
        return self.values if dtype is None else self.values.to(dtype)

    def part(self, index: int) -> "Weight":
        """Return one of several stacked matrices."""
        return replace(self, values=self.values[index], scales=None if self.scales is None else self.scales[index])

    def room_for(self, count: int) -> "Weight":
        """Return room for so many matrices like this one, stacked."""
        values, scales = (None if t is None else t.new_empty(count, *t.shape) for t in (self.values, self.scales))
        return replace(self, values=values, scales=scales)

    def put(self, index: int, part: "Weight") -> None:
        """Write one of several stacked matrices."""
        for whole, one in zip(self.tensors(), part.tensors(), strict=True):
            whole[index].copy_(one)

    def rows(self, index: slice | Tensor) -> "Weight":
        """Return some rows [m, columns] of one matrix; of a slice, without a copy."""
        shared = self.scales is None or (self.transposed and not quantized.FORMATS[self.format].grouped)
        return replace(self, values=self.values[index], scales=self.scales if shared else self.scales[index])

    def to(self, device: torch.device | str) -> "Weight":
        """Return it on another device."""
        return replace(self, values=self.values.to(device), scales=None if self.scales is None else self.scales.to(device))
