"""The kernel ops for steps in which rows have adapters: products by the same kernels, and beside each what adapters add.

That is two thin products of torch's (`model/adapters/bank.py` has the tables), in fp16 with sums in fp32. All addresses are
fixed and nothing waits for the device, so steps are captured as others are. The squared ReLU is a pass of its own, for what
adapters add belongs in front of it.
"""

import dataclasses

import torch
from torch import Tensor

from rwkv_batch.kernels.layer_kernels import LayerKernels, MatrixKernels
from rwkv_batch.kernels.ops import KernelOps
from rwkv_batch.kernels.variants import Product
from rwkv_batch.model.adapters.bank import AdapterBank, MatrixBank
from rwkv_batch.model.packed_rows import StepRows


class AdaptedKernelOps(KernelOps):
    """Like `plain` ops, whose weights, buffers and choice of variants it shares, with the adapters of a bank."""

    def __init__(self, plain: KernelOps, bank: AdapterBank):
        vars(self).update(vars(plain))
        self.bank = bank
        self._foreign: Tensor | None = None  # of the step that runs
        layers = zip(self.prepared.layers, bank.layers, strict=True)
        self._beside: dict[MatrixKernels, MatrixBank] = {
            getattr(layer, item.name): banks[item.name]
            for layer, banks in layers
            for item in dataclasses.fields(layer)
            if item.name in banks
        }

    def embed(self, embedding: Tensor, tokens: Tensor | None, rows: StepRows, last_ids: Tensor) -> Tensor:
        """See `reference_ops.embed`. Begins a step."""
        self._foreign = self.bank.foreign(self.bank.numbers_of(rows))
        return super().embed(embedding, tokens, rows, last_ids)

    def attention_inputs(self, mixed: Tensor, layer: LayerKernels) -> None:
        """Project as for other steps, and add to r, k and v."""
        super().attention_inputs(mixed, layer)
        bank = self._beside[layer.rkv]
        hidden = torch.bmm(mixed[:3], bank.down.transpose(1, 2)).masked_fill_(self._foreign, 0)
        self._now.rkv.baddbmm_(hidden, bank.up)

    def product(self, name: Product, x: Tensor, matrix: MatrixKernels, out: Tensor) -> None:
        """One of the plain products: "output" or "head", which has no adapters."""
        super().product(name, x, matrix, out)
        if matrix in self._beside:
            self._add(matrix, x, out)

    def ffn_key(self, x: Tensor, layer: LayerKernels, out: Tensor) -> None:
        """The first product of the channel mix, then the squared ReLU."""
        self._multiply(self.variant("ffn_key", len(x), layer.ffn_key), x, layer.ffn_key, out)
        self._add(layer.ffn_key, x, out)
        self.linear.relu_square_(out)

    def ffn_value(self, hidden: Tensor, layer: LayerKernels, out: Tensor) -> None:
        """The second, of which most inputs are zero."""
        super().ffn_value(hidden, layer, out)
        self._add(layer.ffn_value, hidden, out)

    def _add(self, matrix: MatrixKernels, x: Tensor, out: Tensor) -> None:
        bank = self._beside[matrix]
        out.addmm_(torch.mm(x, bank.down.t()).masked_fill_(self._foreign, 0), bank.up)

    def _squares_late(self, num_tokens: int, layer: LayerKernels) -> bool:
        return False  # it is done before "ffn_value" in any case

    def _key_leaves_mask(self, num_tokens: int, layer: LayerKernels) -> bool:
        return False  # which units are active is known after the squared ReLU only
