"""Which layers go to which device: so that no stage takes much longer than the others.

What counts is what a layer costs and what the head and the draw cost. Until that was measured on the cards that are there,
bytes of weights stand for it; then each start measures, and the next one of such a model splits by what was found.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from rwkv_batch.errors import UsageError
from rwkv_batch.model.architectures import Shape
from rwkv_batch.model.quantized import PLAIN, Quantisation

log = logging.getLogger("rwkv_batch.engine")


class Cost(NamedTuple):
    """What a stage takes for each of its layers, and for the head if it has that; in any unit, one for all stages."""

    layer: float
    head: float


def estimated(shape: Shape, dtype: torch.dtype, quant: Quantisation = PLAIN) -> Cost:
    """Return the bytes that a decode step reads of a layer and of the head."""
    found = replace(shape, num_layers=2).tensor_bytes(dtype, quant)  # layer 0 has a little less than others
    layer = sum(size for name, size in found.items() if name.startswith("blocks.1."))
    return Cost(layer, found["head.weight"])


def split(num_layers: int, costs: Sequence[Cost]) -> list[range]:
    """Return the layers of each stage, at least one, so that the stage that takes longest takes as little as can be.

    UsageError when there are more stages than layers.
    """
    if len(costs) > num_layers:
        raise UsageError(
            f"--pp-devices: {len(costs)} devices for {num_layers} layers; each needs one at least", param="pp_devices"
        )
    counts = [1] * len(costs)
    times = [cost.layer for cost in costs]
    times[-1] += costs[-1].head
    for _ in range(num_layers - len(costs)):  # layers are alike, so giving each to whoever is done with it first is best
        first = min(range(len(costs)), key=lambda i: times[i] + costs[i].layer)
        counts[first] += 1
        times[first] += costs[first].layer
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def layers_of(name: str) -> int | None:
    """Return the number of the layer that a published tensor belongs to, None for embedding, head and the norm before it."""
    return int(name.split(".")[1]) if name.startswith("blocks.") else None


def described(ranges: Sequence[range], devices: Sequence[torch.device]) -> str:
    """Say which device has which layers."""
    parts = [f"layers {r.start} to {r.stop - 1} on {device}" for r, device in zip(ranges, devices, strict=True)]
    return ", ".join([*parts[:-1], f"{parts[-1]} with the head"])
