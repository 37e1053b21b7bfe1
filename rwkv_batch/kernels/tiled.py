"""A second copy of the large matrices in the order in which a product of few rows reads them (cuda/linear/gemm.cu, Hopper).

In a matrix as it is stored the 64 rows of a piece lie a row apart; in its copy each thread block reads one run of memory from
its beginning to its end.

Small models have one more copy of `ffn_value`, which is stored by units: by outputs, so that steps of few rows can do it as
they do `ffn_key` (cuda/few/plain_products.cu).
"""

import logging
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rwkv_batch.model.weights import ModelShape

if TYPE_CHECKING:
    from rwkv_batch.kernels.gemm import Gemm, GemmMatrix
    from rwkv_batch.kernels.ops import KernelOps

log = logging.getLogger("rwkv_batch.engine")

SIDE = 64  # rows and values of a piece
UNITS = 8  # of 16 bytes, of a row of a piece
TURNED_UNITS = 4096  # of the feed-forward, up to which there is a copy of `ffn_value` by outputs
CHECKED_ROWS = 24  # of x, of the products that are compared


def num_bytes(shape: ModelShape) -> int:
    """Bytes of the copies of a model."""
    turned = shape.ffn_width <= TURNED_UNITS
    layer = 4 * shape.width * shape.inner_width + (2 + turned) * shape.width * shape.ffn_width
    return 2 * (shape.num_layers * layer + shape.vocab_size * shape.width)


def tiles_of(weight: Tensor) -> Tensor:
    """Return W [..., M, K], fp16, sizes multiples of 64, as pieces [M / 64, K / 64, 64, 64], the matrices after one another.

    A piece lies as in shared memory, by the copy engine's 128-byte swizzle: unit i of row r is at i ^ r % 8.
    """
    units = weight.contiguous().view(torch.complex128)  # any type of 16 bytes
    pieces = units.view(-1, SIDE, units.shape[-1] // UNITS, UNITS).transpose(1, 2)
    row, unit = torch.arange(SIDE, device=weight.device)[:, None], torch.arange(UNITS, device=weight.device)
    return pieces[:, :, row, unit ^ row % UNITS].contiguous().view(weight.dtype)


def tile(ops: "KernelOps") -> None:
    """Have products by `Gemm` read copies, which are made now, where they give the same bits."""
    if not ops.gemm.available or ops.quant:
        return
    model = ops.prepared
    layers = [(layer.rkv, layer.output, layer.ffn_key, layer.ffn_value) for layer in model.layers]
    matrices = [matrix.gemm for matrix in [*sum(layers, ()), model.head] if matrix.gemm is not None]
    for matrix in matrices:
        matrix.tiled = tiles_of(matrix.weight.mT if matrix.transposed else matrix.weight)
    for value in (layer.ffn_value.gemm for layer in model.layers if layer.ffn_value.gemm is not None):
        if value.K <= TURNED_UNITS:
            value.turned = value.weight.mT.contiguous()
    ops.launcher.use_current_stream()
    if all(agrees(ops.gemm, matrix) for matrix in matrices[: len(layers[0])]):
        return
    log.error("tiled weights give WRONG RESULTS on this card: they are not used")
    for matrix in matrices:
        matrix.tiled = matrix.turned = None


def agrees(gemm: "Gemm", matrix: "GemmMatrix") -> bool:
    """Return whether a product with the copy has the bits of one without."""
    lead, device = (matrix.batch,) if matrix.stacked else (), matrix.weight.device
    count = math.prod((*lead, CHECKED_ROWS, matrix.K))
    x = torch.linspace(-1, 1, count, device=device).half().view(*lead, CHECKED_ROWS, matrix.K)
    tiled, results = matrix.tiled, []
    for matrix.tiled in (None, tiled):
        out = torch.empty(*lead, CHECKED_ROWS, matrix.M, dtype=torch.float16, device=device)
        results.append(gemm.gemm(x, matrix, out))
    return torch.equal(*results)
