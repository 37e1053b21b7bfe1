"""Finds by timing how each product is done for each size of step; what was found is remembered for the card."""

import logging
import time
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from rwkv_batch.kernels.card_cache import recall, remember
from rwkv_batch.kernels.compiler import cache_folder
from rwkv_batch.kernels.layer_kernels import LayerKernels, MatrixKernels
from rwkv_batch.kernels.measured import measured, portable
from rwkv_batch.kernels.ops import KernelOps
from rwkv_batch.kernels.variants import MASKED, PRODUCTS, Product, Variant

log = logging.getLogger("rwkv_batch.engine")

TIMED_BYTES = 256 * 2**20  # of weights that a timing reads, more than stay in the L2 cache
IN_PLACE_ROWS = 64  # that any decode step can have, and up to which kernels overlap most
FEW_ROWS = 16  # up to which a variant's own time says less than what it leaves room for beside it
# How many times as long as the fastest a variant may take to be compared in whole steps, and how many are, at most.
RIVAL_TIME = 1.12
RIVAL_TIME_OF_FEW_ROWS = 1.3
RIVAL_TIME_OF_MANY_ROWS = 1.06
MAX_RIVALS = 6
MAX_RIVALS_OF_MANY_ROWS = 3
# The same of whole steps: those variants are compared again, beside what was chosen for the other products meanwhile.
LAST_RIVAL_TIME = 1.015
MAX_LAST_RIVALS = 3
# For many tokens, where cards are short of power in whole steps and not in a single product's: how many times as fast as what
# is done untuned a variant must be alone, and then a whole step with it.
LEAD_ALONE, LEAD_IN_STEP = 1.03, 1.005
ACTIVE_SHARE = 0.25  # of the feed-forward units that are positive, half of all: about what a trained model has

Times = dict[Variant, float]


class Autotuner:
    """Chooses the variants of one set of ops.

    decode_step   starts a decode step of so many rows
    products      that the ops are asked for
    prefill_step  prepares a prefill step of so many tokens and returns what starts it; wanted for `many_tokens` of the ops
    decode_rows   that a decode step can have
    """

    blended = ("mixed",)  # of the buffers, those that products read beside "heads"

    def __init__(
        self,
        ops: KernelOps,
        decode_step: Callable[[int], object],
        products: tuple[Product, ...] = PRODUCTS,
        *,
        prefill_step: Callable[[int], Callable[[], object]] | None = None,
        decode_rows: int = IN_PLACE_ROWS,
    ):
        self.ops = ops
        self.prefill_step = prefill_step
        self.products = products
        self.decode_step = decode_step
        self.decode_rows = decode_rows
        self._max_rows = len(ops.buffers.logits)

    def tune(self, sizes: list[int]) -> None:
        """Choose for every number of tokens how each product is done."""
        ops, launcher = self.ops, self.ops.launcher
        card, started, num_timed = torch.cuda.get_device_name(launcher.device), time.monotonic(), 0
        file = cache_folder() / f"variants-{card.replace(' ', '-')}.json"
        known, shipped = recall(file, dict[str, Variant]), measured(card).variants
        generator = torch.Generator(device=launcher.device).manual_seed(0)
        for name in (*self.blended, "heads"):
            getattr(ops.buffers.all, name).normal_(generator=generator)
        for size in sizes:
            keys: dict[Product, str] = {}
            times: dict[Product, Times] = {}
            for name in self.products:
                if name == "head" and size > self._max_rows:
                    continue
                runs = self._runs(name, size)
                key = keys[name] = self._key(name, size, list(runs))
                if known.get(key) not in runs:
                    known[key] = shipped.get(portable(key, launcher.digest))
                if known[key] not in runs:
                    times[name] = {variant: launcher.time(run) for variant, run in runs.items()}
                    known[key] = min(times[name], key=times[name].get)
                    num_timed += 1
                ops.choose(name, size, known[key])
            if size <= min(max(IN_PLACE_ROWS, self.decode_rows), self._max_rows):
                known |= {keys[name]: variant for name, variant in self._choose_in_place(size, times).items()}
            elif size in ops.many_tokens and self.prefill_step is not None:
                known |= {keys[name]: variant for name, variant in self._choose_for_many(size, times).items()}
        ops.matmul.save()
        if ops.many is not None:
            ops.many.save()
        remember(file, known)
        if num_timed:
            log.info("tuned the products for this card in %.1f s: %d timed", time.monotonic() - started, num_timed)

    def _key(self, name: Product, size: int, offer: list[Variant]) -> str:
        """Return what a choice holds for: the product, the kernels, and the variants that it was made from."""
        shape = self.ops.prepared.source.shape
        digest = zlib.crc32(msgspec.json.encode(offer))
        quant = f",{self.ops.quant}" if self.ops.quant else ""
        return f"{name},{size},{shape.width},{shape.ffn_width},{self.ops.launcher.digest}{quant},{digest:08x}"

    def _choose_in_place(self, size: int, alone: dict[Product, Times]) -> dict[Product, Variant]:
        """Choose for each product, of the variants that took little longer alone, the one with which a whole step is fastest.

        Up to IN_PLACE_ROWS it goes through the products twice: what was chosen first was timed beside variants that others have
        left since.
        """
        many = size > IN_PLACE_ROWS
        most = RIVAL_TIME_OF_FEW_ROWS if size <= FEW_ROWS else RIVAL_TIME_OF_MANY_ROWS if many else RIVAL_TIME
        count = MAX_RIVALS_OF_MANY_ROWS if many else MAX_RIVALS
        rivals = {name: _fastest(times, most, count) for name, times in alone.items()}
        for _ in range(1 if many else 2):
            for name, variants in rivals.items():
                times: Times = {}
                for variant in variants if len(variants) > 1 else []:
                    self.ops.choose(name, size, variant)
                    times[variant] = self.ops.launcher.time(lambda: self.decode_step(size), rounds=6)
                if times:
                    rivals[name] = _fastest(times, LAST_RIVAL_TIME, MAX_LAST_RIVALS)
                self.ops.choose(name, size, rivals[name][0])
        return {name: variants[0] for name, variants in rivals.items()}

    def _choose_for_many(self, size: int, alone: dict[Product, Times]) -> dict[Product, Variant]:
        """Choose for each product what is done untuned, unless its fastest variant is clearly faster, alone and in a step."""
        if not alone:
            return {}
        chosen = {name: self._untuned(name, size) for name in alone}
        for name, variant in chosen.items():
            self.ops.choose(name, size, variant)
        step, launcher = self.prefill_step(size), self.ops.launcher
        whole = launcher.time(step, rounds=6)
        for name, times in alone.items():
            fastest = min(times, key=times.get)
            if times[fastest] * LEAD_ALONE > times[chosen[name]]:
                continue
            self.ops.choose(name, size, fastest)
            taken = launcher.time(step, rounds=6)
            if taken * LEAD_IN_STEP < whole:
                whole, chosen[name] = taken, fastest
            self.ops.choose(name, size, chosen[name])
        return chosen

    def _untuned(self, name: Product, size: int) -> Variant:
        """Return how so many tokens do a product that was not tuned; nothing is chosen for it then."""
        self.ops.choose(name, size, None)
        return self.ops.variant(name, size, self._matrix(name, self.ops.prepared.layers[0]))

    def _runs(self, name: Product, size: int) -> dict[Variant, Callable[[], object]]:
        """Return what to time: each variant of a product of `size` tokens, over several layers' weights."""
        ops = self.ops
        b = ops.begin(size)
        layers = ops.prepared.layers
        layers = layers[: max(1, TIMED_BYTES // self._matrix(name, layers[0]).nbytes)]
        if name == "ffn_value":
            b.hidden.normal_().relu_().mul_(torch.rand_like(b.hidden) > 1 - ACTIVE_SHARE)
            if MASKED in ops.variants(name, size, layers[0]):
                ops.launcher.use_current_stream()
                ops.linear.build_active_mask(b.hidden, ops.buffers.active_mask)
        if name == "head":
            x, y = ops.buffers.last[:size].normal_(), ops.buffers.logits[:size]
            matrices = [ops.prepared.head]
        else:
            x, y = self._operands(name, b)
            matrices = [getattr(layer, name) for layer in layers]
        ops.matmul.tune([(x, matrix.weight, y) for matrix in matrices], in_out=name == "ffn_value")
        if ops.many is not None and matrices[0].quant is not None:
            ops.many.tune(x, [matrix.quant for matrix in matrices], y, matrices[0].weight)
        once = {
            "rkv": lambda layer: ops.attention_inputs(b.mixed, layer),
            "ffn_key": lambda layer: ops.ffn_key(x, layer, y),
            "ffn_value": lambda layer: ops.ffn_value(x, layer, y),
        }.get(name, lambda layer: ops.product(name, x, self._matrix(name, layer), y))

        def run(variant: Variant) -> None:
            ops.choose(name, size, variant)
            for layer in layers[: len(matrices)]:
                once(layer)

        variants = ops.variants(name, size, layers[-1])
        if size in ops.many_tokens:
            variants = list(dict.fromkeys([self._untuned(name, size), *variants]))
        return {variant: lambda variant=variant: run(variant) for variant in variants}

    def _operands(self, name: Product, b: Any) -> tuple[Tensor, Tensor]:
        """Return what a product reads and writes of the room for a step."""
        narrow = name == "ffn_key" and b.heads.shape != b.y.shape  # heads of a shard
        x = b.mixed[:3] if name == "rkv" else b.hidden if name == "ffn_value" else b.mixed[0] if narrow else b.heads
        return x, b.rkv if name == "rkv" else b.hidden if name == "ffn_key" else b.y

    def _matrix(self, name: Product, layer: LayerKernels) -> MatrixKernels:
        return self.ops.prepared.head if name == "head" else getattr(layer, name)


def _fastest(times: Times, most: float, count: int) -> list[Variant]:
    """Return the variants that took up to `most` times as long as the fastest, at most so many, the fastest first."""
    return [variant for variant in sorted(times, key=times.get) if times[variant] <= most * min(times.values())][:count]
