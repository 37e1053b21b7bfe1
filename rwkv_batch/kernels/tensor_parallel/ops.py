"""The ops of one rank: those of a whole model, with products of other shapes than C x C."""

import dataclasses

from torch import Tensor

from rwkv_batch.kernels.layer_kernels import LayerKernels, MatrixKernels
from rwkv_batch.kernels.ops import KernelOps
from rwkv_batch.kernels.variants import GEMV, GEMV_RKV, LoraPlacement, Product, Variant


class ShardOps(KernelOps):
    """All ops of one rank on its GPU; what they return of a sum is the rank's part, in `part`.

    Kernels that do r, k and v together with low-rank pairs take them as wide as the model; these are narrower.
    """

    @property
    def part(self) -> Tensor:
        """Where each part of a sum is [max_tokens, C], that of fewer tokens at its beginning."""
        return self.buffers.all.y

    def variant(self, name: Product, num_tokens: int, matrix: MatrixKernels) -> Variant:
        """See `KernelOps.variant`."""
        variant = super().variant(name, num_tokens, matrix)
        return GEMV if variant == GEMV_RKV else variant

    def _rkv_variants(self, num_tokens: int, layer: LayerKernels) -> list[Variant]:
        variants = super()._rkv_variants(num_tokens, layer)
        fitting = [variant for variant in variants if variant.lora is not LoraPlacement.FUSED and variant != GEMV_RKV]
        if GEMV_RKV not in variants:
            return fitting
        return [*fitting, GEMV, dataclasses.replace(GEMV, lora=LoraPlacement.CONCURRENT)]

    def take_choices(self, other: "ShardOps") -> None:
        """Do products as another rank does, where this one can: its part of the head may be smaller."""
        for (name, num_tokens), variant in other._chosen.items():
            if variant in self.variants(name, num_tokens, self.prepared.layers[-1]):
                self.choose(name, num_tokens, variant)
