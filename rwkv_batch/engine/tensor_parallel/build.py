"""Puts an engine over several devices together, where `--tp` asks for one."""

import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from rwkv_batch.config import Config, check_beside_tp, logs_states
from rwkv_batch.engine.decode_graphs import buckets_for
from rwkv_batch.engine.engine import Engine, Step
from rwkv_batch.engine.memory import MemoryPlan, free_memory
from rwkv_batch.engine.tensor_parallel.graphs import ShardedDecodeGraphs, ShardedPrefillGraphs, prefill_sizes
from rwkv_batch.errors import UsageError
from rwkv_batch.kernels import compiler, self_check
from rwkv_batch.kernels.autotune import IN_PLACE_ROWS, Autotuner
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.states.fill import StateFill
from rwkv_batch.kernels.states.log import WkvLog
from rwkv_batch.kernels.tensor_parallel.exchange import KernelExchange
from rwkv_batch.kernels.tensor_parallel.links import check_sums, connect
from rwkv_batch.kernels.tensor_parallel.ops import ShardOps
from rwkv_batch.model.architectures import Shape
from rwkv_batch.model.packed_rows import CapturedRows
from rwkv_batch.model.quantized import Quantisation
from rwkv_batch.model.state import State
from rwkv_batch.model.tensor_parallel.forward import Rank, ShardedModel, ShardedWeights
from rwkv_batch.model.tensor_parallel.on_device import current
from rwkv_batch.model.tensor_parallel.shard import Shard, columns_of, shard_shape
from rwkv_batch.model.tensor_parallel.state import ShardedState
from rwkv_batch.model.weights import ModelShape, Weights
from rwkv_batch.request import Sequence, TokenLogprob
from rwkv_batch.scheduling.plan import SCORED_TOKENS, Plan
from sampling.base import GraphSampler
from sampling.factory import make_sampler

log = logging.getLogger("rwkv_batch.engine")

LONGEST_WAIT = 120.0  # seconds for a step, where the watchdog does not say; ranks wait for others half as long


@dataclass(frozen=True)
class ShardPlan(MemoryPlan):
    """What rank 0 needs, which has the whole states of sessions beside its shard of the model; others need less.

    The device is the one on which the least is free.

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
        check_beside_tp(config)  # of a further model too
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
        values |= {"shape": shard_shape(self.shape, len(self.devices)), "device": min(self.devices, key=free_memory)}
        return ShardPlan(**values, whole=self.shape)

    def load(self, tensors: dict[str, torch.Tensor], read: Callable[..., Weights]) -> ShardedWeights:
        """Return the weights of all ranks. `read`: `from_tensors` but for the tensors, the device and the shard."""
        ranks = []
        for rank, device in enumerate(self.devices):
            with current(device):
                ranks.append(read(dict(tensors), device=device, shard=Shard(rank, len(self.devices))))
            log.info("rank %d has %s MiB on %s", rank, f"{ranks[-1].num_bytes / 2**20:,.0f}", device)
        tensors.clear()
        return ShardedWeights(self.shape, ranks)


class ShardedEngine(Engine):
    """An engine over several cards, which says what a card has waited for when it ends for that."""

    def __init__(
        self,
        model: ShardedModel,
        sampler: GraphSampler,
        state: ShardedState,
        graphs: ShardedDecodeGraphs,
        prefills: ShardedPrefillGraphs | None,
    ):
        super().__init__(model, sampler, state, graphs, prefills)
        self._exchange = graphs.exchange

    def submit(self, plan: Plan) -> Step:
        """See `Engine.submit`."""
        with self._told():
            return super().submit(plan)

    def read(self, step: Step) -> Iterable[tuple[Sequence, int | None, TokenLogprob | None]]:
        """See `Engine.read`."""
        with self._told():
            return super().read(step)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if trouble := self._exchange.trouble():
                raise trouble from error
            raise


def build_sharded(
    config: Config,
    weights: ShardedWeights,
    num_slots: int,
    *,
    num_spare: int = 0,
    max_tokens: int,
    wkv_dtype: torch.dtype,
    library: ctypes.CDLL | None = None,
    graph_sizes: list[int] | None = None,
) -> Engine:
    """Return an engine as `build_engine` does, over the devices of the weights."""
    if library is not None:
        sizes = graph_sizes or ([num_slots] if config.batch_invariant else buckets_for(num_slots, num_spare))
        return _on_cards(config, weights, num_slots, max_tokens, wkv_dtype, library, sizes)
    states = [State(own.shape, num_slots, wkv_dtype=wkv_dtype, device=own.device) for own in weights.ranks]
    state = ShardedState(weights.shape, states)
    ranks = [Rank(own) for own in weights.ranks]
    model = ShardedModel(weights, ranks, ops_name=f"reference on {len(ranks)} ranks")
    return Engine(model, make_sampler(config.sampler, num_slots, weights.output_ids, weights.device), state)


def _on_cards(
    config: Config,
    weights: ShardedWeights,
    num_slots: int,
    max_tokens: int,
    wkv_dtype: torch.dtype,
    library: ctypes.CDLL,
    sizes: list[int],
) -> ShardedEngine:
    """Return the engine with kernels, products tuned on rank 0, graphs captured, and the exchange tried out."""
    devices, limits = [own.device for own in weights.ranks], {"max_tokens": max(max_tokens, num_slots)}
    limits["max_rows"] = num_slots + SCORED_TOKENS
    connect(library, devices)
    launchers = [
        Launcher(compiler.library_like(library, device.index) if rank else library, device)
        for rank, device in enumerate(devices)
    ]
    failing = self_check.failing(launchers[0], wkv_dtype, Path(library._name).with_suffix(".json"))
    if failing:
        raise UsageError(f"--tp {config.tp}: wrong results on this card from {', '.join(failing)}", param="tp")
    states, ranks = [], []
    for launcher, own in zip(launchers, weights.ranks, strict=True):
        with current(launcher.device):
            fill, dtypes = StateFill(launcher), {"shift_dtype": torch.float16, "wkv_dtype": wkv_dtype}
            states.append(State(own.shape, num_slots, **dtypes, device=launcher.device, fill=fill))
            ranks.append(Rank(own, ShardOps(own, launcher, **limits)))
            if logs_states(config):
                WkvLog.beside(states[-1], ranks[-1].ops)
            if len(ranks) == 1:  # the others' products begin with what was found for rank 0's
                prompts = [] if config.batch_invariant else prefill_sizes(max_tokens)
                _tune(ranks[0], states[0], sorted({*sizes, *prompts}), len(own.embedding))
            else:
                ranks[-1].ops.take_choices(ranks[0].ops)
    sampler = make_sampler(
        config.sampler, num_slots, weights.output_ids, devices[0], library,
        last_ids=states[0].last_ids, max_bias=config.max_logit_bias,
    )  # fmt: skip
    if not isinstance(sampler, GraphSampler):
        raise UsageError(f"--sampler {config.sampler}: not with --tp {config.tp} on GPUs", param="sampler")
    exchange = KernelExchange(
        launchers,
        [rank.ops.part for rank in ranks],
        columns_of(len(weights.output_ids), len(ranks)),
        num_sums=ranks[0].num_sums,
        max_rows=limits["max_rows"],
        patience=(config.watchdog_seconds or LONGEST_WAIT) / 2,
    )
    check_sums(exchange)
    state = ShardedState(weights.shape, states)
    model = ShardedModel(weights, ranks, exchange, ops_name=f"kernels on {len(ranks)} cards")
    graphs = ShardedDecodeGraphs(model, exchange, sampler, state, sizes)
    graphs.capture()
    prefills = None
    if not config.batch_invariant:
        prefills = ShardedPrefillGraphs(model, exchange, sampler, state, max_tokens=max_tokens)
        prefills.capture()
    state.last_ids.zero_()
    state.clear(range(num_slots))
    return ShardedEngine(model, sampler, state, graphs, prefills)


def _tune(rank: Rank, state: State, sizes: list[int], vocab_size: int) -> None:
    """Choose how a rank does its products, alone: what it would add up with others it leaves as it is."""
    slots = torch.tensor([*range(state.num_slots)] + [-1] * IN_PLACE_ROWS, device=rank.device)
    state.last_ids.random_(1, vocab_size)

    @torch.inference_mode()
    def decode_step(num_rows: int) -> None:
        for _ in rank.steps(None, CapturedRows.decode(slots[:num_rows]), state, None):
            pass

    Autotuner(rank.ops, decode_step).tune(sizes)
