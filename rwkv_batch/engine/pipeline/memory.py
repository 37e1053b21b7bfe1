"""What each stage needs on its device, and how many slots and sessions fit into all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from rwkv_batch.config import Config
from rwkv_batch.engine.memory import MemoryPlan
from rwkv_batch.engine.pipeline.hops import PLACES
from rwkv_batch.engine.pipeline.split import layers_of
from rwkv_batch.model.state import State
from rwkv_batch.model.weights import ModelShape

NO_HEAD = 8  # columns of the logits of a stage that has none
GPU_STEP = 4096  # tokens of a step at most, where no setting says
BYTES_OF_HOP = 6  # of x and v_first


@dataclass(frozen=True)
class StagePlan(MemoryPlan):
    """A stage's. `own_weights`: bytes of its layers and tables."""

    own_weights: int = 0

    @property
    def weights(self) -> int:
        """See MemoryPlan."""
        return self.own_weights


@dataclass(frozen=True)
class PipelinePlan:
    """All stages', with `MemoryPlan`'s questions; sizes are those of whole states."""

    stages: Sequence[StagePlan]
    shape: ModelShape
    wkv_dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where it samples."""
        return self.stages[-1].device

    @property
    def state(self) -> int:
        """See MemoryPlan."""
        return State.num_bytes(self.shape, 1, wkv_dtype=self.wkv_dtype)

    def slots(self, wanted: int, automatic: int, name: str) -> int:
        """See MemoryPlan."""
        return min(stage.slots(wanted, automatic, name) for stage in self.stages)

    def spare_slots(self, slots: int, share: float) -> int:
        """See MemoryPlan."""
        return min(stage.spare_slots(slots, share) for stage in self.stages)

    def session_bytes(self, slots: int) -> int:
        """See MemoryPlan."""
        return min(stage.session_bytes(slots) * self.state // stage.state for stage in self.stages)


def plan_stages(
    plan_of: Callable[..., MemoryPlan],
    config: Config,
    shape: ModelShape,
    ranges: Sequence[range],
    devices: Sequence[torch.device],
) -> PipelinePlan:
    """Return what is needed. `plan_of`: `engine.build.plan_memory` but for settings, shape and device."""
    last, plans = len(ranges) - 1, []
    for i, (layers, device) in enumerate(zip(ranges, devices, strict=True)):
        part = replace(shape, num_layers=len(layers), vocab_size=shape.vocab_size if i == last else NO_HEAD)
        plan = plan_of(_part_of(config, len(layers) / shape.num_layers), part, device)
        given = {field.name: getattr(plan, field.name) for field in fields(MemoryPlan)}
        if plan.buffers:  # of kernels
            budget = config.prefill_budget or GPU_STEP
            given["buffers"] += ((i > 0) + (i < last)) * PLACES * budget * shape.width * BYTES_OF_HOP
            given["sampling"] *= i == last
        sizes = shape.tensor_bytes(plan.dtype, plan.quant)
        own = sum(size for name, size in sizes.items() if _is_in(name, layers, is_first=i == 0, is_last=i == last))
        plans.append(StagePlan(**given, own_weights=own))
    return PipelinePlan(plans, shape, plans[0].wkv_dtype)


def _is_in(name: str, layers: range, *, is_first: bool, is_last: bool) -> bool:
    layer = layers_of(name)
    if layer is not None:
        return layer in layers
    return is_first if name == "emb.weight" else is_last


def _part_of(config: Config, share: float) -> Config:
    """Settings with a stage's share of what is given for whole states."""
    l1 = config.l1_mib if config.l1_mib is None else round(config.l1_mib * share)
    return replace(config, l1_mib=l1, prefix_cache_mib=round(config.prefix_cache_mib * share))
