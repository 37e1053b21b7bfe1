"""The ops of `reference_ops` for steps in which rows have adapters: the same products, and beside each what adapters add."""

import copy
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from rwkv_batch.model.adapters.bank import MATRICES, AdapterBank, MatrixBank
from rwkv_batch.model.adapters.changes import change_inputs
from rwkv_batch.model.packed_rows import StepRows
from rwkv_batch.model.weights import Layer, Weights


class RowAdapterOps:
    """Ops in plain torch with the adapters of a bank beside the model's matrices. `plain`: what they are for other steps."""

    def __init__(self, bank: AdapterBank, plain: ModuleType):
        self.bank = bank
        self.add_norm_mix, self.time_mix, self.channel_mix, self.logits = (
            plain.add_norm_mix, plain.time_mix, plain.channel_mix, plain.logits,
        )  # fmt: skip
        self.numbers: Tensor | None = None  # of the step that runs: each token's adapter
        self.foreign: Tensor | None = None
        self._embed = plain.embed

    def prepare(self, weights: Weights) -> Weights:
        """Return the weights with something beside each large matrix."""
        layers = [self._beside(layer, banks) for layer, banks in zip(weights.layers, self.bank.layers, strict=True)]
        return replace(weights, layers=layers)

    def embed(self, embedding: Tensor, tokens: Tensor | None, rows: StepRows, last_ids: Tensor) -> Tensor:
        """See `reference_ops.embed`. Begins a step."""
        self.numbers = self.bank.numbers_of(rows)
        self.foreign = self.bank.foreign(self.numbers)
        return self._embed(embedding, tokens, rows, last_ids)

    def _beside(self, layer: Layer, banks: dict[str, MatrixBank]) -> Layer:
        layer = copy.copy(layer)
        for name in MATRICES:
            weight = getattr(layer, name)
            vars(layer)[name] = replace(weight, beside=Beside(self, banks[name]))
        return layer


class Beside:
    """What the adapters make of the product with one matrix."""

    def __init__(self, ops: RowAdapterOps, bank: MatrixBank):
        self._ops = ops
        self._bank = bank

    def __call__(self, x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        """Return y [N, out] for inputs x [N, in]; `product` multiplies with the matrix itself."""
        bank, ops = self._bank, self._ops
        hidden = torch.mm(x.to(bank.down.dtype), bank.down.t()).masked_fill_(ops.foreign, 0)
        forms = dict(bank.forms)  # another thread may load one
        y = product(self._inputs(x, forms))
        for number, form in forms.items():
            if form.outputs is not None:
                y = torch.where((ops.numbers == number).unsqueeze(1), y * form.outputs, y)
        return y + torch.mm(hidden, bank.up).to(y.dtype)

    def _inputs(self, x: Tensor, forms: dict) -> Tensor:
        for number, form in forms.items():
            if form.inputs is not None:
                x = torch.where((self._ops.numbers == number).unsqueeze(1), change_inputs(x, form.inputs), x)
        return x
