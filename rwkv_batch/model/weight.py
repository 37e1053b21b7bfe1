"""A matrix of the model, which may be quantised."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Weight:
    """The matrix is `values`, or `values * scales` where it is quantised.

    values  [.., rows, columns], of any type
    scales  of a floating type, broadcastable to `values`, such as [.., rows, 1] for one scale a row; None = not quantised
    """

    values: Tensor
    scales: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Of the matrix."""
        return self.values.shape

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
        """Return the matrix, where possible without a copy; None = in its own type, that of its scales if any."""
        if self.scales is None:
            return self.values if dtype is None else self.values.to(dtype)
        return (self.values * self.scales).to(dtype or self.scales.dtype)

    def part(self, index: int) -> "Weight":
        """Return one of several stacked matrices."""
        return Weight(self.values[index], None if self.scales is None else self.scales[index])

    def to(self, device: torch.device | str) -> "Weight":
        """Return it on another device."""
        return Weight(*(None if tensor is None else tensor.to(device) for tensor in (self.values, self.scales)))
