"""Puts an engine over several devices together, where `--tp` asks for one."""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from rwkv_batch.config import Config
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.memory import MemoryPlan
from rwkv_batch.errors import UsageError
from rwkv_batch.model.architectures import Shape
from rwkv_batch.model.quantized import Quantisation
from rwkv_batch.model.state import State
from rwkv_batch.model.tensor_parallel.forward import Rank, ShardedModel, ShardedWeights
from rwkv_batch.model.tensor_parallel.on_device import current
from rwkv_batch.model.tensor_parallel.shard import Shard, shard_shape
from rwkv_batch.model.tensor_parallel.state import ShardedState
from rwkv_batch.model.weights import ModelShape, Weights
from sampling.factory import make_sampler

log = logging.getLogger("rwkv_batch.engine")


@dataclass(frozen=True)
class ShardPlan(MemoryPlan):
    """What rank 0 needs, which has the whole states of sessions beside its shard of the model; others need less.

    whole  the model's shape
    """

    whole: Shape | None = None

    @property
    def state(self) -> int:
        """Bytes of a whole state, as a snapshot has it."""
        return State.num_bytes(self.whole, 1, wkv_dtype=self.wkv_dtype)


@dataclass(frozen=True)
class Spread:
    """Which devices an engine is spread over, the first of which samples, and the shape of the model."""

    devices: tuple[torch.device, ...]
    shape: ModelShape

    @classmethod
    def of(cls, config: Config, device: torch.device, shape: Shape, quant: Quantisation) -> "Spread | None":
        """Return how the settings spread this model, None = not at all; UsageError, with the reason, where that is not done."""
        if config.tp == 1:
            return None
        if not isinstance(shape, ModelShape):
            raise UsageError(f"--tp {config.tp}: only models of RWKV-7 run on several cards", param="tp")
        if quant.format:
            raise UsageError(f"--tp {config.tp}: the model is quantised; only plain ones run on several cards", param="tp")
        shard_shape(shape, config.tp)
        if device.type == "cpu":
            return cls((device,) * config.tp, shape)
        if torch.version.hip:
            raise UsageError(f"--tp {config.tp}: not on AMD GPUs", param="tp")
        if torch.cuda.device_count() < config.tp:
            seen = f"torch {torch.__version__} sees {torch.cuda.device_count()} of the cards"
            raise UsageError(f"--tp {config.tp}: {seen} of --devices {config.devices}", param="tp")
        return cls(tuple(torch.device("cuda", index) for index in range(config.tp)), shape)

    def plan(self, memory: MemoryPlan) -> MemoryPlan:
        """Return what rank 0 needs instead of a device that has all."""
        values = {field.name: getattr(memory, field.name) for field in fields(MemoryPlan)}
        return ShardPlan(**values | {"shape": shard_shape(self.shape, len(self.devices))}, whole=self.shape)

    def load(self, tensors: dict[str, torch.Tensor], read: Callable[..., Weights]) -> ShardedWeights:
        """Return the weights of all ranks. `read`: `from_tensors` but for the tensors, the device and the shard."""
        ranks = []
        for rank, device in enumerate(self.devices):
            with current(device):
                ranks.append(read(dict(tensors), device=device, shard=Shard(rank, len(self.devices))))
            log.info("rank %d has %s MiB on %s", rank, f"{ranks[-1].num_bytes / 2**20:,.0f}", device)
        tensors.clear()
        return ShardedWeights(self.shape, ranks)


def build_sharded(
    config: Config,
    weights: ShardedWeights,
    num_slots: int,
    *,
    wkv_dtype: torch.dtype,
    library: ctypes.CDLL | None = None,
) -> Engine:
    """Return an engine as `build_engine` does, over the devices of the weights."""
    if library is not None:
        raise UsageError(f"--tp {config.tp}: on GPUs with --ops reference only so far", param="tp")
    states = [State(own.shape, num_slots, wkv_dtype=wkv_dtype, device=own.device) for own in weights.ranks]
    state = ShardedState(weights.shape, states)
    ranks = [Rank(own) for own in weights.ranks]
    model = ShardedModel(weights, ranks, ops_name=f"reference on {len(ranks)} ranks")
    return Engine(model, make_sampler(config.sampler, num_slots, weights.output_ids, weights.device), state)
