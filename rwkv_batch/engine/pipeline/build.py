"""Puts the engine of a pipeline together: which layers on which device, and each stage's ops, state and captured steps."""

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from rwkv_batch.config import Config, logs_states
from rwkv_batch.engine.decode_graphs import DecodeGraphs, buckets_for
from rwkv_batch.engine.memory import MemoryPlan
from rwkv_batch.engine.pipeline import costs
from rwkv_batch.engine.pipeline.engine import PipelineEngine
from rwkv_batch.engine.pipeline.hops import Hop, IdRelay
from rwkv_batch.engine.pipeline.memory import NO_HEAD, PipelinePlan, plan_stages
from rwkv_batch.engine.pipeline.model import PipelineGraphs, PipelineModel, PipelinePrefills
from rwkv_batch.engine.pipeline.split import described, estimated, split
from rwkv_batch.engine.pipeline.stage import KernelStageOps, NoSampler, PlainStageOps, Stage, StageModel
from rwkv_batch.engine.pipeline.state import PipelineState
from rwkv_batch.engine.prefill_graphs import PrefillGraphs
from rwkv_batch.errors import UsageError
from rwkv_batch.kernels import compiler, self_check
from rwkv_batch.kernels.autotune import IN_PLACE_ROWS, Autotuner
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.quant.matrix import quant_format
from rwkv_batch.kernels.states.fill import StateFill
from rwkv_batch.kernels.states.log import WkvLog
from rwkv_batch.kernels.variants import PRODUCTS
from rwkv_batch.model.architectures import Shape
from rwkv_batch.model.packed_rows import CapturedRows
from rwkv_batch.model.quantized import PLAIN, Quantisation
from rwkv_batch.model.state import State
from rwkv_batch.model.weight import Weight
from rwkv_batch.model.weights import ModelShape, Weights
from rwkv_batch.scheduling.plan import SCORED_TOKENS
from sampling.base import GraphSampler, Sampler
from sampling.factory import make_sampler

log = logging.getLogger("rwkv_batch.engine")


@dataclass(frozen=True)
class Pipeline:
    """Which layers are on which device.

    dtype, quant  of the weights
    """

    config: Config
    shape: ModelShape
    devices: Sequence[torch.device]
    ranges: Sequence[range]
    dtype: torch.dtype
    quant: Quantisation = PLAIN

    @classmethod
    def of(
        cls, config: Config, shape: Shape, dtype: torch.dtype, quant: Quantisation, library: compiler.Building | None
    ) -> "Pipeline | None":
        """Return how a model is spread over the devices of the settings, None = not at all; UsageError where it cannot be.

        library  kernels of the first device; None = plain torch
        """
        if not config.pipeline_devices:
            return None
        if not isinstance(shape, ModelShape):
            raise UsageError("--pp-devices: only models of RWKV-7 run in stages", param="pp_devices")
        devices = [device_of(name) for name in config.pipeline_devices]
        if torch.version.hip and devices[0].type == "cuda":
            raise UsageError("--pp-devices: not on AMD GPUs", param="pp_devices")
        return cls.over(devices, config, shape, dtype, quant, on_kernels=library is not None)

    @classmethod
    def over(
        cls,
        devices: Sequence[torch.device],
        config: Config,
        shape: ModelShape,
        dtype: torch.dtype,
        quant: Quantisation = PLAIN,
        *,
        on_kernels: bool = False,
    ) -> "Pipeline":
        """Return the same over these devices, of which one may come more than once."""
        estimate = estimated(shape, dtype, quant)
        known = costs.recalled(shape, quant, devices, estimate) if on_kernels else [estimate] * len(devices)
        ranges = split(shape.num_layers, known)
        how = "estimated" if known[0] is estimate else "measured"
        log.info("a pipeline, by %s costs: %s", how, described(ranges, devices))
        return cls(config, shape, devices, ranges, dtype, quant)

    @property
    def layer_devices(self) -> list[torch.device]:
        """The device of each layer."""
        return [device for layers, device in zip(self.ranges, self.devices, strict=True) for _ in layers]

    @property
    def pieces(self) -> int:
        """Into how many steps a prompt is cut that one device would be fed in one: so that each stage has a part of it, and
        another one comes when it is done."""
        return 2 * len(self.devices)

    def plan(self, plan_of: Callable[..., MemoryPlan]) -> PipelinePlan:
        """Return what the stages need. `plan_of`: `engine.build.plan_memory` but for settings, shape and device."""
        return plan_stages(plan_of, self.config, self.shape, self.ranges, self.devices)

    def build_engine(
        self,
        config: Config,
        weights: Weights,
        num_slots: int,
        *,
        num_spare: int = 0,
        max_tokens: int,
        library: ctypes.CDLL | None = None,
        wkv_dtype: torch.dtype = torch.float32,
        graph_sizes: list[int] | None = None,
    ) -> PipelineEngine:
        """See `engine.build.build_engine`; `graph_sizes` are of groups."""
        builder = StageBuilder(self, config, weights, num_slots, num_spare, max_tokens, library, wkv_dtype)
        builder.sizes = graph_sizes or builder.sizes
        stages = builder.stages()
        state = PipelineState(weights.shape, stages)
        last, width, room = stages[-1], weights.shape.width, builder.room
        values = torch.float32 if library is None else torch.float16
        hops = [Hop(a.device, b.device, room, width, values) for a, b in pairwise(stages)]
        relay = IdRelay(last.state.last_ids, stages[0].state.last_ids, 2 * (len(stages) + 2))
        model = PipelineModel(weights, stages, hops, relay)
        if last.graphs is not None:
            costs.measure(self.shape, self.quant, stages, estimated(self.shape, self.dtype, self.quant))
        state.clear(range(num_slots))
        for stage in stages:
            with stage.active():
                stage.state.last_ids.zero_()
            if stage.stream is not None:
                torch.cuda.synchronize(stage.device)
        graphs = None if last.graphs is None else PipelineGraphs(model)
        prefills = None if last.prefills is None else PipelinePrefills(model)
        return PipelineEngine(model, builder.sampler, state, graphs, prefills)


def device_of(name: str) -> torch.device:
    """Return one of the devices; UsageError when there is no such."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or int(name) >= torch.cuda.device_count():
        raise UsageError(f"--pp-devices: torch {torch.__version__} sees no GPU {name}", param="pp_devices")
    return torch.device("cuda", int(name))


class StageBuilder:
    """Makes the stages, the last one first: its sampler says whether steps can be captured.

    num_slots, num_spare, max_tokens  as in `build.build_engine`
    """

    def __init__(
        self,
        pipeline: Pipeline,
        config: Config,
        weights: Weights,
        num_slots: int,
        num_spare: int,
        max_tokens: int,
        library: ctypes.CDLL | None,
        wkv_dtype: torch.dtype,
    ):
        self.pipeline = pipeline
        self.config = config
        self.weights = weights
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.library = library
        self.wkv_dtype = wkv_dtype
        self.sampler: Sampler | None = None
        # Tokens of a step: where there are no kernels, it may feed prompts and decode.
        self.room = max_tokens + num_slots if library is None else max(max_tokens, num_slots)
        count = len(pipeline.devices)
        # A row goes to the group with the fewest slots, so one that takes several may fill a group up to as many more.
        usual, most = -(-(num_slots - num_spare) // count), -(-num_slots // count) + config.mrssmax - 1
        most = min(most, num_slots)
        self.sizes = [most] if config.batch_invariant else buckets_for(most, most - min(usual, most))

    def stages(self) -> list[Stage]:
        """Return all of them."""
        make = self._plain if self.library is None else self._with_kernels
        return [make(i) for i in reversed(range(len(self.pipeline.devices)))][::-1]

    def _plain(self, i: int) -> Stage:
        """Return a stage that runs in plain torch."""
        own = self._weights(i)
        ops = PlainStageOps(own, self.room)
        state = State(own.shape, self.num_slots, wkv_dtype=self.wkv_dtype, device=own.device)
        if self._is_last(i):
            self.sampler = make_sampler(self.config.sampler, self.num_slots, self.weights.output_ids, own.device)
        return self._stage(i, own, ops, "reference", state)

    def _with_kernels(self, i: int) -> Stage:
        """Return a stage that runs the kernels, tuned and with its steps captured where the sampler allows it.

        UsageError where kernels give wrong results on its card.
        """
        device = self.pipeline.devices[i]
        with torch.cuda.device(device):
            launcher = Launcher(self.library if i == 0 else compiler.library_like(self.library, device.index), device)
            own = self._weights(i)
            file = Path(launcher.library._name).with_suffix(".json")
            if failing := self_check.failing(launcher, self.wkv_dtype, file, quant=quant_format(own)):
                raise UsageError(f"--pp-devices: wrong results on {device} from {', '.join(failing)}", param="pp_devices")
            limits = {"max_rows": self.num_slots + SCORED_TOKENS if self._is_last(i) else IN_PLACE_ROWS}
            ops = KernelStageOps(own, launcher, max_tokens=self.room, **limits)
            fill, types = StateFill(launcher), {"shift_dtype": torch.float16, "wkv_dtype": self.wkv_dtype}
            state = State(own.shape, self.num_slots, **types, device=device, fill=fill)
            if logs_states(self.config):
                WkvLog.beside(state, ops)
            if self._is_last(i):
                options = {"last_ids": state.last_ids, "max_bias": self.config.max_logit_bias}
                ids = self.weights.output_ids
                self.sampler = make_sampler(self.config.sampler, self.num_slots, ids, device, launcher.library, **options)
            stage = self._stage(i, own, ops, "kernels", state)
            if isinstance(self.sampler, GraphSampler):
                with stage.active():
                    self._capture(stage, ops)
            torch.cuda.synchronize(device)
        return stage

    def _capture(self, stage: Stage, ops: KernelStageOps) -> None:
        """Choose how the products of a stage are done, and capture its steps."""
        model, state = stage.model, stage.state
        sampler = self.sampler if model.is_last else NoSampler()
        stage.graphs = DecodeGraphs(model, sampler, state, self.sizes)
        if not self.config.batch_invariant:
            stage.prefills = PrefillGraphs(model, sampler, state, max_tokens=self.max_tokens)
        slots = torch.tensor([*range(self.num_slots)] + [-1] * IN_PLACE_ROWS, device=stage.device)
        state.last_ids.random_(1, len(stage.model.weights.embedding))  # steps that are timed want rows that differ
        for tensor in (ops.buffers.all.x, ops.buffers.all.v_first):  # nothing comes in while they are
            tensor.normal_()

        def decode_step(num_rows: int) -> torch.Tensor:
            return model.forward(None, CapturedRows.decode(slots[:num_rows]), state)

        products = PRODUCTS if model.is_last else tuple(name for name in PRODUCTS if name != "head")
        prefill_sizes = stage.prefills.sizes if stage.prefills is not None else ()
        Autotuner(ops, decode_step, products).tune(sorted({*self.sizes, *prefill_sizes}))
        stage.graphs.capture()
        if stage.prefills is not None:
            stage.prefills.capture()

    def _stage(self, i: int, own: Weights, ops: Any, ops_name: str, state: State) -> Stage:
        model = StageModel(own, ops, ops_name, is_first=i == 0, is_last=self._is_last(i))
        return Stage(self.pipeline.ranges[i], model, state, self._stream(i))

    def _is_last(self, i: int) -> bool:
        return i == len(self.pipeline.devices) - 1

    def _stream(self, i: int) -> torch.cuda.Stream | None:
        """Return the device's usual stream; where a later stage has it, one of its own."""
        devices = self.pipeline.devices
        if devices[i].type == "cpu":
            return None
        taken = devices[i] in devices[i + 1 :]
        return torch.cuda.Stream(devices[i]) if taken else torch.cuda.default_stream(devices[i])

    def _weights(self, i: int) -> Weights:
        """Return a stage's part of the weights; tables that other stages have are as small as the ops allow."""
        whole, layers, device = self.weights, self.pipeline.ranges[i], self.pipeline.devices[i]
        own = {
            "shape": replace(whole.shape, num_layers=len(layers)),
            "layers": whole.layers[layers.start : layers.stop],
            "ln_out_weight": whole.ln_out_weight.to(device),
            "ln_out_bias": whole.ln_out_bias.to(device),
            "start": None,
        }
        if i > 0:
            own["embedding"] = whole.embedding.new_zeros(2, whole.shape.width, device=device)
        if not self._is_last(i):
            own["head"] = Weight(torch.zeros(NO_HEAD, whole.shape.width, dtype=whole.dtype, device=device))
        return replace(whole, **own)
