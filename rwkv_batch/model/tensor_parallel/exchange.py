"""What the ranks tell each other within a step: sums of their parts, and the columns of the logits that each has made.

Sums are taken in the order of ranks on all of them, so that the residual streams stay the same bit for bit: were they not, the
ranks' copies of one text would drift apart.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Exchange(Protocol):
    """The way between the ranks of one model, called in a step's order. Parts come in the order of ranks."""

    def begin(self) -> None:
        """Begin a step."""

    def add(self, parts: Sequence[Tensor]) -> None:
        """Replace each rank's part [N, C] by the sum of all."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the parts [B, U of the rank] side by side on rank 0's device; a later step may overwrite it."""


class PlainExchange:
    """The same in plain torch, on any devices: the judge of the kernels, and what ranks on CPUs use."""

    def begin(self) -> None:
        """See `Exchange.begin`."""

    def add(self, parts: Sequence[Tensor]) -> None:
        """See `Exchange.add`; sums are fp32."""
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.to(total.device).float()
        for part in parts:
            part.copy_(total)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See `Exchange.join`."""
        return torch.cat([part.to(parts[0].device) for part in parts], 1)
