"""A model's tensors as the kernels read them, prepared once: one object a layer."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.kernels.gemm import Gemm, GemmLora, GemmMatrix
from rwkv_batch.kernels.linear import Lora
from rwkv_batch.kernels.mix import WkvLayer
from rwkv_batch.kernels.quant.matrix import QuantMatrix, Scratch
from rwkv_batch.model.weight import Weight
from rwkv_batch.model.weights import Layer, Weights

PLANES = (0, 2, 3, 1, 4, 5)  # of `Layer.att_mix`, so that r, k and v stand together: r, k, v, w, a, g
OUTPUT_UNIT = 8  # logits of a row begin at multiples of 16 bytes


@dataclass(frozen=True, eq=False)
class MatrixKernels:
    """A matrix for the kernels.

    weight  in fp16; of a quantised matrix the room for that, which all share and `Dequantiser` fills
    gemm    how `Gemm` reads it, None where it cannot
    quant   the matrix itself where it is quantised
    """

    weight: Tensor
    gemm: GemmMatrix | None
    quant: QuantMatrix | None = None

    @classmethod
    def of(cls, weight: Weight, gemm: Gemm, scratch: Scratch, *, transposed: bool = False) -> "MatrixKernels":
        """Prepare a weight [M, K] or [batch, M, K]; `transposed`: [K, M]. Of other types than fp16, a copy is made."""
        if weight.format:
            quant, dense = QuantMatrix.of(weight), scratch.view(weight.shape)
        else:
            quant, dense = None, weight.dense(torch.float16)
        return cls(dense, _described(dense, gemm, transposed=transposed), quant)

    @classmethod
    def of_head(cls, head: Weight, gemm: Gemm, scratch: Scratch) -> "MatrixKernels":
        """Prepare the head. In fp16 rows are added up to a multiple of OUTPUT_UNIT."""
        if not head.format:
            return cls.of(Weight(_padded(head.dense(torch.float16))), gemm, scratch)
        dense = scratch.view((whole_units(head.shape[0]), head.shape[1]))
        return cls(dense, _described(dense, gemm), QuantMatrix.of(head))

    @property
    def nbytes(self) -> int:
        """Bytes that a product must read."""
        return self.weight.nbytes if self.quant is None else self.quant.nbytes


@dataclass(frozen=True, eq=False)
class LayerKernels:
    """A layer; the names are those of `Layer`, which `source` is.

    lora       the low-rank pairs
    gemm_lora  how `Gemm` reads their first halves, None where it cannot
    att_mix    [6, C] in the order of PLANES
    ffn_mix    [1, C]
    """

    source: Layer
    ln1_weight: Tensor
    ln1_bias: Tensor
    ln2_weight: Tensor
    ln2_bias: Tensor
    att_mix: Tensor
    ffn_mix: Tensor
    rkv: MatrixKernels
    output: MatrixKernels
    ffn_key: MatrixKernels
    ffn_value: MatrixKernels
    lora: Lora
    gemm_lora: GemmLora | None
    wkv: WkvLayer

    @classmethod
    def of(cls, layer: Layer, gemm: Gemm, scratch: Scratch) -> "LayerKernels":
        """Prepare `layer`."""
        rkv, lora = MatrixKernels.of(layer.rkv, gemm, scratch), Lora.of(layer)
        return cls(
            source=layer,
            ln1_weight=layer.ln1_weight,
            ln1_bias=layer.ln1_bias,
            ln2_weight=layer.ln2_weight,
            ln2_bias=layer.ln2_bias,
            att_mix=layer.att_mix[list(PLANES), 0].contiguous(),
            ffn_mix=layer.ffn_mix[:, 0],
            rkv=rkv,
            output=MatrixKernels.of(layer.output, gemm, scratch),
            ffn_key=MatrixKernels.of(layer.ffn_key, gemm, scratch),
            ffn_value=MatrixKernels.of(layer.ffn_value, gemm, scratch, transposed=True),
            lora=lora,
            gemm_lora=None if rkv.gemm is None else gemm.prepare_lora(lora.down, lora.ranks),
            wkv=WkvLayer(layer.k_k, layer.k_a, layer.r_k.flatten(), layer.ln_x_weight, layer.ln_x_bias),
        )


@dataclass(frozen=True, eq=False)
class ModelKernels:
    """A whole model; the names are those of `Weights`, which `source` is.

    head         its `weight` has rows added up to a multiple of OUTPUT_UNIT
    num_outputs  rows that count
    """

    source: Weights
    embedding: Tensor
    layers: list[Any]
    ln_out_weight: Tensor
    ln_out_bias: Tensor
    head: MatrixKernels
    num_outputs: int

    @classmethod
    def of(cls, weights: Weights, gemm: Gemm, layer_kernels: Any = LayerKernels) -> "ModelKernels":
        """Prepare `weights`; `layer_kernels`: of their architecture."""
        scratch = Scratch.for_weights(weights, OUTPUT_UNIT)
        return cls(
            source=weights,
            embedding=weights.embedding,
            layers=[layer_kernels.of(layer, gemm, scratch) for layer in weights.layers],
            ln_out_weight=weights.ln_out_weight,
            ln_out_bias=weights.ln_out_bias,
            head=MatrixKernels.of_head(weights.head, gemm, scratch),
            num_outputs=weights.head.shape[0],
        )


def whole_units(num_outputs: int) -> int:
    """Return how many logits a row has room for."""
    return -(-num_outputs // OUTPUT_UNIT) * OUTPUT_UNIT


def _described(matrix: Tensor, gemm: Gemm, *, transposed: bool = False) -> GemmMatrix | None:
    fits = gemm.available and not (matrix.shape[-1] % 64 or matrix.shape[-2] % 64)
    return gemm.prepare(matrix, transposed=transposed) if fits else None


def _padded(head: Tensor) -> Tensor:
    """Return the head with a multiple of OUTPUT_UNIT rows; what is added lies behind it in the file, or is zero."""
    rows = whole_units(head.shape[0])
    if (head.storage_offset() + rows * head.shape[1]) * head.element_size() <= head.untyped_storage().nbytes():
        return head.as_strided((rows, head.shape[1]), head.stride())
    return torch.nn.functional.pad(head, (0, 0, 0, rows - head.shape[0]))
