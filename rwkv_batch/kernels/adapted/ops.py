"""The kernel ops for steps in which rows have adapters: products by the same kernels, and beside each what adapters add.

What is added comes in two halves (`products.py`): the first needs the inputs alone and runs in front of the product, the second
adds to its result. All addresses are fixed and nothing waits for the device, so steps are captured as others are. The squared
ReLU is taken with what is added, which belongs in front of it.
"""

import dataclasses

from torch import Tensor

from rwkv_batch.kernels.adapted.products import AdapterProducts, GroupedProducts, TorchProducts
from rwkv_batch.kernels.adapted.thin import MAX_COLUMNS
from rwkv_batch.kernels.layer_kernels import LayerKernels, MatrixKernels
from rwkv_batch.kernels.mix import Mix
from rwkv_batch.kernels.ops import KernelOps
from rwkv_batch.kernels.variants import Product
from rwkv_batch.model.adapters.bank import AdapterBank, MatrixBank
from rwkv_batch.model.packed_rows import StepRows


class AdaptedKernelOps(KernelOps):
    """Like `plain` ops, whose weights, buffers and choice of variants it shares, with the adapters of a bank.

    products  how what adapters add is multiplied; None = by kernels where they take so many columns
    """

    def __init__(self, plain: KernelOps, bank: AdapterBank, products: AdapterProducts | None = None):
        vars(self).update(vars(plain))
        # What begins a step comes behind the tables of adapters, which kernels then find whole before they wait.
        self.first_mix = Mix(self.launcher)
        self.bank = bank
        max_tokens = len(self.buffers.all.x)
        if products is None and bank.num_columns <= MAX_COLUMNS:
            products = GroupedProducts(bank, self.launcher, max_tokens)
        self.products = products or TorchProducts(bank, self.linear)
        self.down_first = True  # whether the first half runs in front of the product, else behind it
        layers = zip(self.prepared.layers, bank.layers, strict=True)
        self._beside: dict[MatrixKernels, MatrixBank] = {
            getattr(layer, item.name): banks[item.name]
            for layer, banks in layers
            for item in dataclasses.fields(layer)
            if item.name in banks
        }

    def embed(self, embedding: Tensor, tokens: Tensor | None, rows: StepRows, last_ids: Tensor) -> Tensor:
        """See `reference_ops.embed`. Begins a step."""
        self.launcher.use_current_stream()
        self.products.begin(rows, len(rows.slot_tensor) if tokens is None else len(tokens))
        return super().embed(embedding, tokens, rows, last_ids)

    def attention_inputs(self, mixed: Tensor, layer: LayerKernels) -> None:
        """Project as for other steps, and add to r, k and v."""
        bank = self._beside[layer.rkv]
        if self.down_first:
            self.products.down(mixed[:3], bank)
        super().attention_inputs(mixed, layer)
        if not self.down_first:
            self.products.down(mixed[:3], bank)
        self.products.up(self._now.rkv, bank)

    def product(self, name: Product, x: Tensor, matrix: MatrixKernels, out: Tensor) -> None:
        """One of the plain products: "output" or "head", which has no adapters."""
        bank = self._beside.get(matrix)
        if bank is not None and self.down_first:
            self.products.down(x, bank)
        super().product(name, x, matrix, out)
        self._add(bank, x, out)

    def ffn_key(self, x: Tensor, layer: LayerKernels, out: Tensor) -> None:
        """The first product of the channel mix, then the squared ReLU."""
        bank = self._beside[layer.ffn_key]
        if self.down_first:
            self.products.down(x, bank)
        self._multiply(self.variant("ffn_key", len(x), layer.ffn_key), x, layer.ffn_key, out)
        self._add(bank, x, out, square=True)

    def ffn_value(self, hidden: Tensor, layer: LayerKernels, out: Tensor) -> None:
        """The second, of which most inputs are zero."""
        bank = self._beside[layer.ffn_value]
        if self.down_first:
            self.products.down(hidden, bank)
        super().ffn_value(hidden, layer, out)
        self._add(bank, hidden, out)

    def _add(self, bank: MatrixBank | None, x: Tensor, out: Tensor, *, square: bool = False) -> None:
        if bank is None:
            return
        if not self.down_first:
            self.products.down(x, bank)
        self.products.up(out, bank, square=square)

    def _squares_late(self, num_tokens: int, layer: LayerKernels) -> bool:
        return False  # it is done before "ffn_value" in any case

    def _key_leaves_mask(self, num_tokens: int, layer: LayerKernels) -> bool:
        return False  # which units are active is known after the squared ReLU only
