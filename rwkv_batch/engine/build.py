"""Puts the engine together from the settings: which weights on which device, how many slots, how large a prefill.

Imported by the engine process only; everything here may take long and says so.
"""

import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rwkv_batch.config import COMPILE_MODE, Config, find_model, logs_states
from rwkv_batch.engine.decode_graphs import DecodeGraphs, buckets_for
from rwkv_batch.engine.engine import Engine, Way
from rwkv_batch.engine.engine_loop import CHECKPOINT_TOKENS, EngineLoop, checkpoint_distance
from rwkv_batch.engine.memory import MIB, device_name, plan_memory, session_levels
from rwkv_batch.engine.pipeline.build import Pipeline
from rwkv_batch.engine.pipeline.copies import StagedCopies
from rwkv_batch.engine.prefill_graphs import PrefillGraphs
from rwkv_batch.engine.tensor_parallel.build import Spread, build_sharded
from rwkv_batch.errors import RwkvBatchError, UsageError
from rwkv_batch.grammar.masks import Grammars
from rwkv_batch.ipc.messages import EngineInfo
from rwkv_batch.kernels import compiler, self_check
from rwkv_batch.kernels.adapted.ops import AdaptedKernelOps
from rwkv_batch.kernels.autotune import IN_PLACE_ROWS, Autotuner
from rwkv_batch.kernels.few.ops import FewRowOps
from rwkv_batch.kernels.few.tuning import FewTuner
from rwkv_batch.kernels.hip.ops import AdaptedHipOps, HipOps
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.quant.matrix import quant_format, supported_formats
from rwkv_batch.kernels.rwkv6 import self_check as rwkv6
from rwkv_batch.kernels.rwkv6.autotune import Rwkv6Autotuner
from rwkv_batch.kernels.rwkv6.needs import kernels_for
from rwkv_batch.kernels.states.fill import StateFill
from rwkv_batch.kernels.states.log import WkvLog
from rwkv_batch.kernels.tiled import tile
from rwkv_batch.model import checkpoint, reference_ops
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.adapters import adapter_file
from rwkv_batch.model.adapters.row_ops import RowAdapterOps
from rwkv_batch.model.architectures import model_class
from rwkv_batch.model.packed_rows import CapturedRows
from rwkv_batch.model.quantized import PLAIN, Quantisation
from rwkv_batch.model.quantized_file import Stored, described, stored_as
from rwkv_batch.model.state import State
from rwkv_batch.model.tensor_parallel.forward import ShardedWeights
from rwkv_batch.model.weights import DTYPES
from rwkv_batch.request import Failure, Progress
from rwkv_batch.scheduling.pace import PrefillPace
from rwkv_batch.scheduling.plan import SCORED_TOKENS
from rwkv_batch.scheduling.prefix_cache import PrefixCache
from rwkv_batch.scheduling.scheduler import Scheduler
from rwkv_batch.served.architectures import NEWEST, architecture_of
from rwkv_batch.sessions import postgres, remote, sqlite
from rwkv_batch.sessions.pool import StatePool
from rwkv_batch.sessions.state_file import StateFile
from rwkv_batch.sessions.store import SessionStore
from rwkv_batch.sessions.transfer import Copies
from rwkv_batch.text.tokenizer import Tokenizer, for_vocab
from rwkv_batch.tuned.registry import TunedStates, orders_of
from rwkv_batch.tuned.row_adapters import bank_for, columns_of, row_adapters_of
from rwkv_batch.tuned.variants import EngineVariants
from sampling.base import GraphSampler
from sampling.factory import make_sampler

log = logging.getLogger("rwkv_batch.engine")

CPU_SLOTS, CPU_PREFILL, CPU_BUSY_PREFILL = 64, 256, 64
GPU_SLOTS, GPU_PREFILL, GPU_BUSY_PREFILL = 320, 4096, 512
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
ONE_THREAD_BYTES = 200 * MIB  # of weights; for less, threads wait for one another longer than they work


def build_engine_loop(
    config: Config, deliver: Callable[[dict[bytes, list[Progress | Failure]]], None], store_path: Path | None = None
) -> EngineLoop:
    """Load the model of `config` and return a loop ready to run; CheckpointError or UsageError, one line, if it cannot be.

    store_path  where the store process listens, None = this process has the session file to itself
    """
    started = time.monotonic()
    device = choose_device(config.device)
    store = open_store(config, store_path) if config.state_db or config.state_url else None
    dtype = choose_dtype(config, device)
    version = checkpoint.version_of(find_model(config))
    tensors, name, stored = read_model(config)
    quant = choose_quant(config, name, stored)
    kernels = find_kernels(config, device, architecture_of(tensors, name), quant=bool(quant.format))
    check_quant(quant, device)
    adapters = adapter_file.read_all(config.adapter or "")
    shape = weights_module.check_tensors(tensors, name, stored, quant)
    kernels = kernels_for(kernels, shape, quant, config.ops, name)
    if device.type == "cpu":
        few = shape.count_bytes(dtype) < ONE_THREAD_BYTES
        tune_cpu(config.threads or (1 if few else max(1, usable_cpus() // config.num_engines)))
    tokenizer = for_vocab(shape.vocab_size)
    on_cpu = device.type == "cpu"
    pipeline = Pipeline.of(config, shape, dtype, quant, kernels)
    for place in pipeline.devices if pipeline is not None else ():
        check_quant(quant, place)
    num_stages, pieces = (1, 1) if pipeline is None else (len(pipeline.devices), pipeline.pieces)
    budget = config.prefill_budget or (CPU_PREFILL if on_cpu else GPU_PREFILL) // pieces
    wkv_dtype = choose_wkv_dtype(config, kernels)
    plan = partial(plan_memory, dtype=dtype, wkv_dtype=wkv_dtype, budget=None if kernels is None else budget, quant=quant)
    memory = plan(config, shape, device) if pipeline is None else pipeline.plan(plan)
    spread = Spread.of(config, device, shape, quant)
    memory = memory if spread is None else spread.plan(memory)
    num_slots = memory.slots(config.slots, CPU_SLOTS if on_cpu else GPU_SLOTS * num_stages, name)
    num_spare = memory.spare_slots(num_slots, config.spare_slots)
    tiled = pipeline is None and memory.tiles(num_slots + num_spare)
    read = partial(
        weights_module.from_tensors,
        name=name,
        dtype=dtype,
        valid_ids=lambda vocab_size: valid_ids(tokenizer),
        quant=quant,
        stored=stored,
        adapters=adapters,
        layer_devices=pipeline and pipeline.layer_devices,
    )
    weights = read(tensors, device=device) if spread is None else spread.load(tensors, read)
    checkpoint.check_version(Path(name), version)
    for line in weights_module.iter_summary(weights):
        log.info("%s", line)
    if kernels is not None and kernels.busy and not quant.format and weights.architecture == NEWEST:
        self_check.rehearse(device, wkv_dtype)
    library = None if kernels is None else kernels.result()
    if kernels is not None and library is None:  # what was planned for them does not hold
        del weights
        torch.cuda.empty_cache()
        return build_engine_loop(replace(config, ops="reference"), deliver, store_path)
    build = partial(build_engine, tiled=tiled) if pipeline is None else partial(pipeline.build_engine, wkv_dtype=wkv_dtype)
    engine = build(config, weights, num_slots + num_spare, num_spare=num_spare, max_tokens=budget, library=library)
    scheduler = Scheduler(
        num_slots=num_slots + num_spare,
        spare_slots=num_spare,
        prefill_budget=budget,
        mixed=on_cpu,
        busy_budget=busy_budget(config, on_cpu=on_cpu),
        prefixes=build_prefixes(config),
        late_draws=not on_cpu and pipeline is None,  # a draw of its own would wait for what the last stage has to do
        pace=build_pace(config, engine, budget, mixed=on_cpu),
        num_groups=num_stages,
    )
    levels = session_levels(config, memory, num_slots + num_spare) if store is not None else {}
    copies = None if pipeline is None else StagedCopies(engine.state, engine.model.stages)
    sessions = build_sessions(config, weights, levels, store, copies) if store is not None else None
    grammars = Grammars(tokenizer, weights.output_ids.tolist())
    tuned = EngineVariants(build_tuned(config, engine.state), row_adapters_of(config, engine.bank))
    engine_loop = EngineLoop(
        engine,
        scheduler,
        tokenizer,
        deliver,
        sessions=sessions,
        grammars=grammars,
        tuned=tuned,
        queue=config.queue,
        checkpoint_tokens=CHECKPOINT_TOKENS if on_cpu else checkpoint_distance(memory.state),
    )
    engine_loop.info = EngineInfo(
        model=config.model_name,
        fingerprint=weights.fingerprint,
        device=", ".join(map(device_name, [device] if pipeline is None else pipeline.devices)),
        dtype=next(name for name, known in DTYPES.items() if known == dtype),
        quant=quant.format,
        weight_bytes=weights.num_bytes,
        ops=engine.model.ops_name,
        slots=num_slots,
        prefill_budget=budget,
        vocab_size=shape.vocab_size,
        layers=shape.num_layers,
        width=shape.width,
        parameters=shape.count_bytes(torch.int8),
        load_seconds=time.monotonic() - started,
        state_bytes=sessions.file.size(engine.state.shift.dtype, engine.state.wkv.dtype) if sessions is not None else 0,
        adapters=[adapter.report() for adapter in adapters],
        variants=tuned.variants,
    )
    tuned.tell(engine_loop.show_variants)
    return engine_loop


def busy_budget(config: Config, *, on_cpu: bool) -> int | None:
    """Return how many prompt tokens a plan may feed while rows decode, whatever they take; None = as many as any plan."""
    if config.busy_prefill_budget:
        return config.busy_prefill_budget
    if config.itl_budget_ms:
        return None
    return CPU_BUSY_PREFILL if on_cpu else GPU_BUSY_PREFILL


def build_pace(config: Config, engine: Engine, budget: int, *, mixed: bool) -> PrefillPace | None:
    """Return what bounds the time that prompts take from rows that decode, if anything does."""
    if not config.itl_budget_ms:
        return None
    known = {} if engine.prefills is None else {"captured": engine.prefills.sizes, "times": engine.prefills.times}
    return PrefillPace(config.itl_budget_ms, budget=budget, mixed=mixed, **known)


def open_store(config: Config, store_path: Path | None = None) -> SessionStore:
    """Return where sessions outlive the server, which is not connected to yet. UsageError.

    store_path  where the store process listens, None = this process has the session file to itself
    """
    if config.state_url is not None:
        if config.state_key_file is not None:
            raise UsageError("--state-key-file: is for --state-db; encrypt what PostgreSQL and its folder lie on",
                             param="state_key_file")  # fmt: skip
        return postgres.open_store(
            config.state_url,
            config.snapshots,
            config.durability,
            lease_seconds=config.lease_seconds,
            versions=config.session_versions,
            replay_seconds=config.replay_seconds,
            response_seconds=config.response_ttl_hours * 3600,
            max_responses=config.max_responses,
        )
    if config.snapshots is not None:
        raise UsageError("--snapshots: belongs to --state-url", param="snapshots")
    return sqlite.open_store(config) if store_path is None else remote.open_store(store_path, config)


def build_sessions(
    config: Config, weights: weights_module.Weights, levels: dict[str, int], store: SessionStore, copies: Copies | None = None
) -> StatePool:
    """Return the pool of sessions in `store`. `levels`: as `session_levels` gives them; `copies`: of a pipeline."""
    return StatePool(
        store,
        StateFile(weights.fingerprint, weights.shape),
        weights.device,
        durability=config.durability,
        snapshot_tokens=config.snapshot_tokens,
        snapshot_rate=config.snapshot_mib_s * MIB or None,
        finish_seconds=config.engine_stop_seconds / 2,
        relaxed_seconds=config.relaxed_seconds,
        **levels,
        wait_seconds=config.session_wait_seconds,
        max_waiting=config.session_waiting,
        drops_oldest=config.drop_oldest_sessions,
        copies=copies,
    )


def build_tuned(config: Config, state: State) -> TunedStates:
    """Return the tuned states that requests may name, those of `--state` loaded. UsageError."""
    tuned = TunedStates(state, max_states=config.max_states)
    for order in orders_of(config.state or "", config.states_dir):
        try:
            tuned.load(order, f"--state {order.name}")
        except RwkvBatchError as error:
            raise UsageError(error.message, param="state") from None
    return tuned


def build_prefixes(config: Config) -> PrefixCache | None:
    """Return the cache of prefixes, None when it gets no memory."""
    if not config.prefix_cache_mib:
        return None
    return PrefixCache(
        config.prefix_cache_mib * MIB, min_tokens=config.prefix_min_tokens, every_tokens=config.prefix_every_tokens
    )


def find_kernels(
    config: Config, device: torch.device, architecture: str = NEWEST, *, quant: bool = True
) -> compiler.Building | None:
    """Have the kernels for `device` built, if need be; None = reference ops. UsageError when they are asked for in vain.

    quant  whether the model is quantised
    """
    if architecture != NEWEST and (config.compile or config.ops == "compile"):
        param = "compile" if config.compile else "ops"
        raise UsageError(f"--{param} {getattr(config, param)}: {architecture} cannot be compiled", param=param)
    if device.type == "cpu":
        if config.ops == "kernels":
            raise UsageError("--ops kernels: there are kernels for GPUs only", param="ops")
        return None
    if not compiler.wanted(config):
        if config.ops == "kernels":
            raise UsageError("--ops kernels: runs in fp16, without --compile", param="ops")
        return None
    return compiler.Building.begin(device.index or 0, quant=quant, required=config.ops == "kernels")


def choose_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the type of the weights."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return torch.float32 if device.type == "cpu" else torch.float16


def choose_quant(config: Config, name: str, stored: Stored | None) -> Quantisation:
    """Return how the matrices are kept; UsageError where the file has them otherwise."""
    if stored is None:
        return PLAIN if config.quant in ("auto", "none") else Quantisation(config.quant, config.quant_head)
    if config.quant not in ("auto", stored.quant.format):
        raise UsageError(f"--quant {config.quant}: {name} is quantised as {described(stored.quant)} already", param="quant")
    if stored.quant.head and not config.quant_head:
        raise UsageError(f"--no-quant-head: the head of {name} is quantised already", param="quant_head")
    return stored.quant


def check_quant(quant: Quantisation, device: torch.device) -> None:
    """Raise UsageError, naming the card and the formats that it runs, where it cannot run this one."""
    if not quant.format or device.type != "cuda":
        return
    runs = supported_formats(compiler.capability(device.index or 0))
    if quant.format not in runs:
        card = torch.cuda.get_device_name(device)
        raise UsageError(f"--quant {quant.format}: {card} cannot run it; it can run {', '.join(runs) or 'none'}", param="quant")


def choose_wkv_dtype(config: Config, library: ctypes.CDLL | compiler.Building | None) -> torch.dtype:
    """Return the type of the recurrent state."""
    if config.wkv_state != "auto":
        return DTYPES[config.wkv_state]
    return torch.float32 if library is None else torch.float16


def build_engine(
    config: Config,
    weights: weights_module.Weights | ShardedWeights,
    num_slots: int,
    *,
    num_spare: int = 0,
    max_tokens: int,
    library: ctypes.CDLL | None = None,
    graph_sizes: list[int] | None = None,
    tiled: bool = False,
) -> Engine:
    """Return an engine with everything that takes time behind it: kernels checked, products tuned, graphs captured.

    num_spare    how many of the slots are seldom taken
    max_tokens   of one step
    graph_sizes  batch sizes to capture, ascending; None = a ladder up to `num_slots`
    tiled        whether there is room for a copy of the large matrices, see `kernels/tiled.py`
    """
    device, wkv_dtype, newest = weights.device, choose_wkv_dtype(config, library), weights.architecture == NEWEST
    if isinstance(weights, ShardedWeights):
        sizes = {"num_spare": num_spare, "max_tokens": max_tokens, "graph_sizes": graph_sizes}
        return build_sharded(config, weights, num_slots, **sizes, wkv_dtype=wkv_dtype, library=library)
    if library is None:
        state = State(weights.shape, num_slots, wkv_dtype=wkv_dtype, device=device)
        mode = config.compile or (COMPILE_MODE if config.ops == "compile" else None)
        ops = compiled_ops(mode) if mode else reference_ops
        sampler = make_sampler(config.sampler, num_slots, weights.output_ids, device)
        bank = bank_for(config, weights, num_slots, only_adding=False)
        adapted = None if bank is None else Way(model_of(weights, RowAdapterOps(bank, reference_ops), "reference"))
        return Engine(model_of(weights, ops, "compile" if mode else "reference"), sampler, state, bank=bank, adapted=adapted)
    launcher = Launcher(library, device)
    limits = {"max_tokens": max(max_tokens, num_slots), "max_rows": num_slots + SCORED_TOKENS}
    file = Path(library._name).with_suffix(".json")
    failing = self_check.failing(launcher, wkv_dtype, file, quant=quant_format(weights), architecture=weights.architecture)
    if failing and config.ops == "kernels":
        raise UsageError(f"--ops kernels: wrong results on this card from {', '.join(failing)}", param="ops")
    fill = None if self_check.FILL in failing else StateFill(launcher)
    state = State(weights.shape, num_slots, shift_dtype=torch.float16, wkv_dtype=wkv_dtype, device=device, fill=fill)
    kind = "reference" if self_check.SAMPLER in failing else config.sampler
    options = {"last_ids": state.last_ids, "max_bias": config.max_logit_bias}
    sampler = make_sampler(kind, num_slots, weights.output_ids, device, library, **options)
    if failing or not isinstance(sampler, GraphSampler):  # what runs in plain torch cannot be captured
        if columns_of(config):
            raise UsageError("--adapter-ranks, --row-adapter: need kernels that all work here, or --ops reference", param="ops")
        ops = self_check.partly_reference(weights, launcher, frozenset(failing), **limits)
        return Engine(model_of(weights, ops, " but ".join(["kernels", *failing])), sampler, state)
    plain, with_adapters = (HipOps, AdaptedHipOps) if torch.version.hip else (FewRowOps, AdaptedKernelOps)
    ops = plain(weights, launcher, **limits) if newest else rwkv6.ops_for(weights, launcher, **limits)
    sizes = graph_sizes or ([num_slots] if config.batch_invariant else buckets_for(num_slots, num_spare))
    model = model_of(weights, ops, "kernels")
    graphs = DecodeGraphs(model, sampler, state, sizes)
    prefills = None if config.batch_invariant else PrefillGraphs(model, sampler, state, max_tokens=max_tokens)
    if not torch.version.hip:  # there each product is done in one way
        if newest and logs_states(config):
            WkvLog.beside(state, ops)
        if newest and tiled:
            tile(ops)
        slots = torch.tensor([*range(num_slots)] + [-1] * IN_PLACE_ROWS, device=device)
        state.last_ids.random_(1, len(weights.embedding))  # steps that are timed want rows that differ
        tuner = (Autotuner if newest else Rwkv6Autotuner)(
            ops,
            lambda num_rows: model.forward(None, CapturedRows.decode(slots[:num_rows]), state),
            prefill_step=prefills and prefills.step_of_one_row,
            decode_rows=num_slots,
        )
        tuner.tune(sorted({*sizes, *([*prefills.sizes, *ops.many_tokens] if prefills else ())}))
        if newest:
            FewTuner(ops, state, tuner.decode_step).tune(sizes)
    bank, adapted = bank_for(config, weights, num_slots, only_adding=True), None
    if bank is not None:
        own = model_of(weights, with_adapters(ops, bank), "kernels")
        more = None if prefills is None else PrefillGraphs(own, sampler, state, max_tokens=max_tokens)
        adapted = Way(own, DecodeGraphs(own, sampler, state, sizes), more)
    for captured in (graphs, prefills, *(adapted[1:] if adapted else ())):
        if captured is not None:
            captured.capture()
    state.last_ids.zero_()
    state.clear(range(num_slots))
    return Engine(model, sampler, state, graphs, prefills, bank=bank, adapted=adapted)


def model_of(weights: weights_module.Weights, ops: Any, ops_name: str) -> Any:
    """Return the model that runs weights of their architecture on `ops`."""
    return model_class(weights.architecture)(weights, ops, ops_name)


def compiled_ops(mode: str) -> SimpleNamespace:
    """Return the reference ops through torch.compile; UsageError when it knows no such mode."""
    known = torch._inductor.list_mode_options()
    if mode not in known:
        raise UsageError(f"--compile {mode}: must be one of {', '.join(known)}", param="compile")
    log.info("operations through torch.compile (%s): the first steps of every shape are slow", mode)
    names = ("embed", "add_norm_mix", "time_mix", "channel_mix", "logits")
    compiled = {name: torch.compile(getattr(reference_ops, name), mode=mode) for name in names}
    return SimpleNamespace(prepare=reference_ops.prepare, **compiled)


def choose_device(wanted: str) -> torch.device:
    """Return the device to run on; UsageError when there is no such device."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda"):
        index = int(wanted[5:] or 0)
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise UsageError(f"--device {wanted}: torch {torch.__version__} sees no such GPU", param="device")
        return torch.device("cuda", index)
    return torch.device("cpu")


def tune_cpu(threads: int) -> None:
    """Set the number of threads, and let glibc keep what tensors give back: fresh pages cost a prefill a sixth of its time."""
    torch.set_num_threads(threads)
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, 32 * MIB)
            mallopt(M_TRIM_THRESHOLD, 1024 * MIB)


def usable_cpus() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_model(config: Config) -> tuple[dict[str, torch.Tensor], str, Stored | None]:
    """Return the checkpoint's tensors, its name, and how it is quantised."""
    file = find_model(config)
    return checkpoint.read_file(file), str(file), stored_as(file)


def valid_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that stand for something, the end token included."""
    return [token for token, data in enumerate(tokenizer.token_bytes) if data is not None]
