"""What adapters of single rows add to the products of a step: by kernels of ours, or by torch."""

from typing import Protocol

import torch
from torch import Tensor

from rwkv_batch.kernels.adapted.thin import MAX_COLUMNS, Grouping, Thin
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.linear import Linear
from rwkv_batch.model.adapters.bank import RKV, AdapterBank, MatrixBank
from rwkv_batch.model.packed_rows import StepRows


class AdapterProducts(Protocol):
    """The two halves of what is added. All tensors fp16, sums fp32; nothing waits for the device."""

    def begin(self, rows: StepRows, tokens: int) -> None:
        """Take in which rows a step has."""

    def down(self, x: Tensor, bank: MatrixBank) -> None:
        """Multiply the inputs [N, K], or [P, N, K] of a stacked bank, by each token's own columns."""

    def up(self, out: Tensor, bank: MatrixBank, *, square: bool = False) -> None:
        """Add to out [N, M], or [P, N, M], what comes of the `down` before; `square`: then the squared ReLU of all tokens."""


class GroupedProducts:
    """By the kernels of cuda/linear/adapters.cu: an adapter's columns are read by its own tokens alone.

    max_tokens  of a step
    """

    def __init__(self, bank: AdapterBank, launcher: Launcher, max_tokens: int):
        self.bank = bank
        self._grouping = Grouping(launcher, bank.num_columns, max_tokens)
        self._thin = Thin(launcher, Thin.num_values(len(RKV), bank.num_columns, max_tokens), pdl=torch.version.hip is None)

    @classmethod
    def num_bytes(cls, num_columns: int, max_tokens: int) -> int:
        """Bytes of what is kept on the device."""
        words = Grouping.room(num_columns, max_tokens) + Thin.num_values(len(RKV), num_columns, max_tokens)
        return 4 * words if 0 < num_columns <= MAX_COLUMNS else 0

    def begin(self, rows: StepRows, tokens: int) -> None:
        """See AdapterProducts."""
        self._grouping.group(rows, tokens, self.bank.of_slot, self.bank.owner)

    def down(self, x: Tensor, bank: MatrixBank) -> None:
        """See AdapterProducts."""
        self._thin.down(x, bank.down, self._grouping)

    def up(self, out: Tensor, bank: MatrixBank, *, square: bool = False) -> None:
        """See AdapterProducts."""
        self._thin.add_up(bank.up, out, bank.down.shape[-1], self._grouping, square=square)


class TorchProducts:
    """By two products of torch's over the columns of all adapters, with those that are not a token's own cleared between."""

    def __init__(self, bank: AdapterBank, linear: Linear):
        self.bank = bank
        self._linear = linear
        self._foreign: Tensor | None = None  # of the step that runs
        self._hidden: Tensor | None = None

    def begin(self, rows: StepRows, tokens: int) -> None:
        """See AdapterProducts."""
        self._foreign = self.bank.foreign(self.bank.numbers_of(rows))

    def down(self, x: Tensor, bank: MatrixBank) -> None:
        """See AdapterProducts."""
        self._hidden = torch.matmul(x, bank.down.transpose(-1, -2)).masked_fill_(self._foreign, 0)

    def up(self, out: Tensor, bank: MatrixBank, *, square: bool = False) -> None:
        """See AdapterProducts."""
        if out.dim() == 3:
            out.baddbmm_(self._hidden, bank.up)
        else:
            out.addmm_(self._hidden, bank.up)
        if square:
            self._linear.relu_square_(out)
