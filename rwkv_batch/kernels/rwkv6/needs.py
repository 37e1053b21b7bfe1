"""Which RWKV-6 models the kernels take."""

import logging
from typing import TypeVar

from rwkv_batch.errors import UsageError
from rwkv_batch.kernels.mix import MAX_WIDTH
from rwkv_batch.kernels.rwkv6.recurrence import HEAD_SIZE
from rwkv_batch.model.architectures import Shape
from rwkv_batch.model.quantized import Quantisation
from rwkv_batch.model.rwkv6.weights import Rwkv6Shape

log = logging.getLogger("rwkv_batch.engine")

Kernels = TypeVar("Kernels")
RANK_UNIT = 4  # ranks of low-rank pairs are multiples of this


def has_kernels(shape: Shape, quant: Quantisation) -> bool:
    """Return whether the kernels take a model of this shape; they take every RWKV-7."""
    if not isinstance(shape, Rwkv6Shape):
        return True
    ranks = shape.rank_mix % RANK_UNIT == shape.rank_decay % RANK_UNIT == 0
    sizes = shape.width % HEAD_SIZE == 0 and shape.width <= MAX_WIDTH and shape.ffn_width % HEAD_SIZE == 0
    return ranks and sizes and shape.head_size == HEAD_SIZE and not quant.format


def kernels_for(kernels: Kernels | None, shape: Shape, quant: Quantisation, wanted: str, name: str) -> Kernels | None:
    """Return the kernels where they take the model, else None, and say so. `wanted`: what `--ops` says; UsageError."""
    if kernels is None or has_kernels(shape, quant):
        return kernels
    why = f"{name}: the kernels take RWKV-6 in fp16, with heads of 64 values and widths in multiples of 64 up to {MAX_WIDTH}"
    if wanted == "kernels":
        raise UsageError(f"--ops kernels: {why}", param="ops")
    log.warning("WITHOUT KERNELS, many times slower: %s", why)
    return None
