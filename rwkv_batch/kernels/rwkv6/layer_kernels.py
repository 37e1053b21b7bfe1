"""An RWKV-6 model's tensors as the kernels read them, prepared once: one object a layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.kernels.gemm import Gemm
from rwkv_batch.kernels.layer_kernels import MatrixKernels
from rwkv_batch.kernels.quant.matrix import Scratch
from rwkv_batch.kernels.rwkv6.recurrence import Wkv6Layer
from rwkv_batch.model.rwkv6.weights import MIXES, Rwkv6Layer, Rwkv6Shape

PLANES = tuple(MIXES.index(name) for name in "rkvgw")  # of the mixes, so that r, k, v and g stand together
HALF = torch.float16


@dataclass(frozen=True, eq=False)
class Rwkv6LayerKernels:
    """A layer; the names are those of `Rwkv6Layer`, which `source` is.

    att_mix, ffn_mix    [3, C] and [2, C]
    mix_down, mix_up    [5 * rank, C] and [5, rank, C], `mix` [5, C] fp32: in the order of PLANES
    decay_down, decay_up  [rank, C]
    """

    source: Rwkv6Layer
    ln1_weight: Tensor
    ln1_bias: Tensor
    ln2_weight: Tensor
    ln2_bias: Tensor
    att_mix: Tensor
    ffn_mix: Tensor
    mix: Tensor
    mix_down: Tensor
    mix_up: Tensor
    decay: Tensor
    decay_down: Tensor
    decay_up: Tensor
    rkvg: MatrixKernels
    output: MatrixKernels
    ffn_key: MatrixKernels
    ffn_receptance: MatrixKernels
    ffn_value: MatrixKernels
    wkv: Wkv6Layer

    @classmethod
    def of(cls, layer: Rwkv6Layer, gemm: Gemm, scratch: Scratch) -> "Rwkv6LayerKernels":
        """Prepare `layer`."""
        planes, c = list(PLANES), layer.mix_up.shape[-1]
        names = ("rkvg", "output", "ffn_key", "ffn_receptance")
        return cls(
            source=layer,
            ln1_weight=layer.ln1_weight,
            ln1_bias=layer.ln1_bias,
            ln2_weight=layer.ln2_weight,
            ln2_bias=layer.ln2_bias,
            att_mix=layer.att_mix[:, 0].contiguous(),
            ffn_mix=layer.ffn_mix[:, 0].contiguous(),
            mix=layer.mix[planes, 0].contiguous(),
            mix_down=layer.mix_down.t().reshape(len(planes), -1, c)[planes].reshape(-1, c).to(HALF).contiguous(),
            mix_up=layer.mix_up[planes].to(HALF).contiguous(),
            decay=layer.decay,
            decay_down=layer.decay_down.t().to(HALF).contiguous(),
            decay_up=layer.decay_up.to(HALF).contiguous(),
            **{name: MatrixKernels.of(getattr(layer, name), gemm, scratch) for name in names},
            ffn_value=MatrixKernels.of(layer.ffn_value, gemm, scratch, transposed=True),
            wkv=Wkv6Layer(layer.bonus.flatten(), layer.ln_x_weight, layer.ln_x_bias),
        )

    @staticmethod
    def num_bytes(shape: Rwkv6Shape) -> int:
        """Bytes of the copies that a layer's preparation makes."""
        return 2 * (len(PLANES) * shape.rank_mix + shape.rank_decay) * shape.width * HALF.itemsize
