"""How a product can be done: which kernel, how it is cut up, and where the low-rank pairs run. Data only."""

import enum
from dataclasses import dataclass
from typing import Literal

from rwkv_batch.kernels.gemm import TileConfig
from rwkv_batch.kernels.linear import GroupedConfig

Product = Literal["rkv", "rkvg", "output", "ffn_key", "ffn_receptance", "ffn_value", "head"]
PRODUCTS: tuple[Product, ...] = ("rkv", "output", "ffn_key", "ffn_value", "head")
RWKV6_PRODUCTS: tuple[Product, ...] = ("rkvg", "output", "ffn_receptance", "ffn_key", "ffn_value", "head")


class Method(enum.StrEnum):
    """Which kernel multiplies."""

    CUBLAS = "cublas"
    GEMM = "gemm"  # cuda/linear/gemm.cu
    GEMV = "gemv"  # dot products, for few tokens
    SPARSE = "sparse"  # each token reads the rows of its own active units; of "ffn_value"
    MASKED = "masked"  # the rows of units that are active in some token are read once; of "ffn_value"
    QUANT_GEMM = "quant_gemm"  # cuda/quant/quant_gemm.cuh: 8-bit matrices become fp16 in registers
    FP8 = "fp8"  # the same file: e4m3 matrices and tokens
    FP8_CUBLAS = "fp8_cublas"  # cuBLASLt, of e4m3 matrices and tokens


QUANT_METHODS = (Method.QUANT_GEMM, Method.FP8, Method.FP8_CUBLAS)  # see `quant/many_tokens.py`


class LoraPlacement(enum.StrEnum):
    """Where the low-rank pairs run; of "rkv"."""

    BEFORE = "before"  # in launches of their own, before the product
    CONCURRENT = "concurrent"  # the same on another stream, at the same time
    RESERVED = "reserved"  # the same, on multiprocessors that the product leaves free
    FUSED_DOWN = "fused_down"  # the pairs' first halves are part of the product's launch
    FUSED = "fused"  # both halves are


@dataclass(frozen=True)
class Variant:
    """One way to do a product. Which of them is fastest is found by timing, see `autotune.py`.

    config       of methods GEMM, QUANT_GEMM and FP8; None: what `tile_config` of theirs chooses
    lora_config  of placement RESERVED: how the pairs' first halves are cut up
    """

    method: Method
    config: TileConfig | None = None
    lora: LoraPlacement = LoraPlacement.BEFORE
    lora_config: GroupedConfig | None = None


CUBLAS, SPARSE, MASKED = Variant(Method.CUBLAS), Variant(Method.SPARSE), Variant(Method.MASKED)
GEMM = Variant(Method.GEMM)
GEMV = Variant(Method.GEMV)
GEMV_RKV = Variant(Method.GEMV, lora=LoraPlacement.FUSED_DOWN)

MANY_TOKENS = (1024, 2048)  # numbers that are tuned for all others that are not far from them; longer steps gain nothing by it
NEAR = 1.5  # how many times as many, at most, that is


def many_tokens(max_tokens: int) -> list[int]:
    """Return the numbers of many tokens to tune, where a step has up to `max_tokens`."""
    return [size for size in MANY_TOKENS if size <= max_tokens]


def known_variant(
    name: Product, num_tokens: int, chosen: dict[tuple[Product, int], Variant], tuned: list[int]
) -> Variant | None:
    """Return how so many tokens do a product, as was chosen for them or, of many, for the nearest number of `tuned`.

    The latter is cut up as suits so many. None where nothing is known.
    """
    if (name, num_tokens) in chosen:
        return chosen[name, num_tokens]
    near = [size for size in tuned if (name, size) in chosen and max(size, num_tokens) <= NEAR * min(size, num_tokens)]
    if not near:
        return None
    variant = chosen[name, min(near, key=lambda size: max(size, num_tokens) / min(size, num_tokens))]
    before = variant.lora is LoraPlacement.BEFORE
    return Variant(variant.method, None, LoraPlacement.BEFORE if before else LoraPlacement.CONCURRENT)
