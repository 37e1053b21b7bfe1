"""Finds by timing how each product of RWKV-6 is done; see `kernels/autotune.py`."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rwkv_batch.kernels.autotune import Autotuner
from rwkv_batch.kernels.rwkv6.ops import RKVG, Rwkv6Activations, Rwkv6KernelOps
from rwkv_batch.kernels.variants import RWKV6_PRODUCTS, Product


class Rwkv6Autotuner(Autotuner):
    """Chooses the variants of one set of ops."""

    blended = ("mixed", "inputs")

    def __init__(self, ops: Rwkv6KernelOps, decode_step: Callable[[int], object], **prefill_step: Any):
        super().__init__(ops, decode_step, RWKV6_PRODUCTS, **prefill_step)

    def _operands(self, name: Product, b: Rwkv6Activations) -> tuple[Tensor, Tensor]:
        if name == "rkvg":
            return b.inputs[:RKVG], b.rkvg
        if name == "ffn_receptance":
            return b.mixed[1], b.heads
        return b.hidden if name == "ffn_value" else b.heads, b.hidden if name == "ffn_key" else b.y
