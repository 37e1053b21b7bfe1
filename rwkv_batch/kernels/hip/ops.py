"""The ops of the forward pass on AMD GPUs: the kernels of `hip/` for all but the matrix products, those through torch."""

from types import SimpleNamespace

from rwkv_batch.kernels.adapted.ops import AdaptedKernelOps
from rwkv_batch.kernels.hip.products import TorchLinear, TorchMatMul
from rwkv_batch.kernels.layer_kernels import LayerKernels, MatrixKernels
from rwkv_batch.kernels.ops import KernelOps
from rwkv_batch.kernels.quant.dequantise import Dequantiser
from rwkv_batch.kernels.variants import CUBLAS, Product, Variant
from rwkv_batch.model.weights import ModelShape


class HipOps(KernelOps):
    """As `KernelOps`, but there is one way to do each product: there is nothing to time and to choose.

    A quantised matrix becomes fp16 right before its product.
    """

    def make_products(self, shape: ModelShape, max_tokens: int) -> None:
        self.matmul = TorchMatMul()
        self.linear = TorchLinear(self.launcher.device)
        self.gemm = SimpleNamespace(available=False)
        self.dequantise = Dequantiser(self.launcher)
        self.quant_linear = self.many = None

    def variant(self, name: Product, num_tokens: int, matrix: MatrixKernels) -> Variant:
        return CUBLAS  # what torch calls here is the library of AMD

    def variants(self, name: Product, num_tokens: int, layer: LayerKernels) -> list[Variant]:
        return [CUBLAS]


class AdaptedHipOps(AdaptedKernelOps, HipOps):
    """The same where rows have adapters."""
