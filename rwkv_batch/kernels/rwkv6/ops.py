"""RWKV-6's ops as GPU kernels, with the names and meanings of `model/rwkv6/ops.py`.

What RWKV-7 has too is done by its kernels: embedding, norms and blends, products, the head. The low-rank pairs that mix each
token with the one before it, and make its decay, are thin products (`kernels/adapted/thin.py`).
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rwkv_batch.kernels.adapted.thin import Thin
from rwkv_batch.kernels.hip.ops import HipOps
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.layer_kernels import ModelKernels
from rwkv_batch.kernels.mix import Mix
from rwkv_batch.kernels.ops import HALF, Activations, Buffers, KernelOps
from rwkv_batch.kernels.rwkv6.layer_kernels import PLANES, Rwkv6LayerKernels
from rwkv_batch.kernels.rwkv6.recurrence import Recurrence
from rwkv_batch.kernels.variants import Product
from rwkv_batch.model.packed_rows import RowLayout, StepRows
from rwkv_batch.model.rwkv6.weights import Rwkv6Shape
from rwkv_batch.model.weights import Weights

RKVG = 4


@dataclass
class Rwkv6Activations(Activations):
    """Room for a step of N tokens; fp16 [N, C] but where said."""

    x: Tensor  # fp32, the residual stream
    mixed: Tensor  # [3, N, C]: of the attention, of whose planes the channel mix has two
    inputs: Tensor  # [5, N, C], in the order of PLANES
    rkvg: Tensor  # [4, N, C]
    normed: Tensor
    w_raw: Tensor  # fp32, log(-log w)
    heads: Tensor  # before the output matrix; the channel mix's gate
    y: Tensor
    hidden: Tensor  # [N, F]

    @classmethod
    def of(cls, num_tokens: int, shape: Rwkv6Shape, device: torch.device) -> "Rwkv6Activations":
        """Allocate them."""
        plane = (num_tokens, shape.width)
        dims = {"mixed": (3, *plane), "inputs": (len(PLANES), *plane), "rkvg": (RKVG, *plane)}
        dims["hidden"] = (num_tokens, shape.ffn_width)
        single = ("x", "w_raw")
        return cls(**{
            item.name: torch.empty(
                dims.get(item.name, plane), dtype=torch.float32 if item.name in single else HALF, device=device
            )
            for item in fields(cls)
        })  # fmt: skip


class Rwkv6Buffers(Buffers):
    """See Buffers."""

    activations_type = Rwkv6Activations

    @staticmethod
    def max_rank(shape: Rwkv6Shape) -> int:
        """No pair has its room here: see `thin_values`."""
        return 0

    @staticmethod
    def thin_values(shape: Rwkv6Shape, max_tokens: int) -> int:
        """Return the numbers between the halves of the low-rank pairs."""
        return Thin.num_values(1, max(len(PLANES) * shape.rank_mix, shape.rank_decay), max_tokens)

    @classmethod
    def num_bytes(cls, shape: Rwkv6Shape, *, max_tokens: int, max_rows: int) -> int:
        """Bytes of all of them, the numbers between the halves of the pairs included."""
        return super().num_bytes(shape, max_tokens=max_tokens, max_rows=max_rows) + 4 * cls.thin_values(shape, max_tokens)


class Rwkv6KernelOps(KernelOps):
    """All ops, for one set of RWKV-6 weights on one GPU. See KernelOps."""

    def __init__(self, weights: Weights, launcher: Launcher, *, max_tokens: int, max_rows: int):
        self.launcher = launcher
        self.mix = self.first_mix = Mix(launcher, pdl=True)
        self.quant = ""
        self.make_products(weights.shape, max_tokens)
        self.prepared = ModelKernels.of(weights, self.gemm, Rwkv6LayerKernels)
        outputs, device = self.prepared.num_outputs, launcher.device
        self.buffers = Rwkv6Buffers(weights.shape, outputs, max_tokens=max_tokens, max_rows=max_rows, device=device)
        self.thin = Thin(launcher, Rwkv6Buffers.thin_values(weights.shape, max_tokens), pdl=torch.version.hip is None)
        self.recurrence = Recurrence(launcher, pdl=torch.version.hip is None)
        self.many_tokens = []
        self._chosen = {}
        self._now = self.buffers.all
        self._layout: RowLayout | None = None

    def time_mix(self, mixed: Tensor, layer: Rwkv6LayerKernels, wkv_state: Tensor, rows: StepRows) -> Tensor:
        """See `model/rwkv6/ops.py`."""
        b = self._now
        self.attention_inputs(mixed, layer)
        if self._layout is None:
            # What this layer remembers was written a step ago, the slots before this one.
            slots = rows.slot_tensor
            self.recurrence.decode(b.rkvg, b.w_raw, layer.wkv, wkv_state, slots, b.heads, inputs_ready=True)
        else:
            self.recurrence.prefill(b.rkvg, b.w_raw, layer.wkv, wkv_state, self._layout, b.heads)
        self.product("output", b.heads, layer.output, b.y)
        return b.y

    def attention_inputs(self, mixed: Tensor, layer: Rwkv6LayerKernels) -> None:
        """Blend each token with the one before it in five ways, and make of them r, k, v, g and the decay."""
        b, width = self._now, mixed.shape[-1]
        self.thin.down(mixed[0], layer.mix_down)
        self.thin.blend_up(layer.mix_up, layer.mix, mixed[1], mixed[2], b.inputs, width)
        self.thin.down(b.inputs[RKVG], layer.decay_down)
        self.thin.bias_up(layer.decay_up, layer.decay, b.w_raw, width)
        self.product("rkvg", b.inputs[:RKVG], layer.rkvg, b.rkvg)

    def channel_mix(self, mixed: Tensor, layer: Rwkv6LayerKernels) -> Tensor:
        """See `model/rwkv6/ops.py`."""
        b = self._now
        self.product("ffn_receptance", mixed[1], layer.ffn_receptance, b.heads)
        self.ffn_key(mixed[0], layer, b.hidden)
        self.ffn_value(b.hidden, layer, b.y)
        self.recurrence.gate(b.heads, b.y)
        return b.y

    def product(self, name: Product, x: Tensor, matrix, out: Tensor) -> None:
        """One of the plain products, of [N, K], or of [P, N, K] by stacked matrices."""
        self._multiply(self.variant(name, x.shape[-2], matrix), x, matrix, out)


class Rwkv6HipOps(Rwkv6KernelOps, HipOps):
    """The same on AMD GPUs."""
