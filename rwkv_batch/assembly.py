"""Puts the engine together from the settings: which weights on which device, how many slots, how large a prefill.

Imported by the engine process only; everything here may take long and says so.
"""

import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rwkv_batch import weights as weights_module
from rwkv_batch.channel import EngineInfo
from rwkv_batch.config import Config, find_model
from rwkv_batch.engine import Engine
from rwkv_batch.errors import CheckpointError, UsageError
from rwkv_batch.model import Model
from rwkv_batch.request import Failure, Progress
from rwkv_batch.scheduler import Scheduler
from rwkv_batch.state import State
from rwkv_batch.tokenizer import Tokenizer, for_vocab
from rwkv_batch.weights import DTYPES, HEAD_SIZE, ModelShape
from rwkv_batch.worker import Worker
from sampling.reference import ReferenceSampler

log = logging.getLogger("rwkv_batch.engine")

CPU_SLOTS, CPU_PREFILL = 64, 256
GPU_SLOTS, GPU_PREFILL = 320, 4096
STATE_SHARE = 4  # automatic slots take at most this fraction (one in four) of the memory left beside the weights
MIB = 2**20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
ONE_THREAD_BYTES = 200 * MIB  # of weights; for less, threads wait for one another longer than they work


def build_worker(config: Config, deliver: Callable[[dict[bytes, list[Progress | Failure]]], None]) -> Worker:
    """Load the model of `config` and return a worker ready to run; CheckpointError or UsageError, one line, if it cannot be."""
    started = time.monotonic()
    device = choose_device(config.device)
    if config.ops not in ("auto", "reference"):
        raise UsageError(f"--ops {config.ops}: this version has the reference ops only", param="ops")
    dtype = DTYPES[config.dtype if config.dtype != "auto" else ("fp32" if device.type == "cpu" else "fp16")]
    tensors, name = read_model(config)
    shape = weights_module.check_tensors(tensors, name)
    if device.type == "cpu":
        tune_cpu(config.threads or (1 if shape.count_bytes(dtype) < ONE_THREAD_BYTES else usable_cpus()))
    tokenizer = for_vocab(shape.vocab_size)
    num_slots = plan_memory(shape, dtype, device, config.slots, name)
    weights = weights_module.from_tensors(
        tensors, name=name, dtype=dtype, device=device, valid_ids=lambda vocab_size: valid_ids(tokenizer)
    )
    for line in weights_module.iter_summary(weights):
        log.info("%s", line)
    sampler = ReferenceSampler(num_slots, weights.output_ids, device)
    engine = Engine(Model(weights), sampler, State(shape, num_slots, device=device))
    on_cpu = device.type == "cpu"
    budget = config.prefill_budget or (CPU_PREFILL if on_cpu else GPU_PREFILL)
    scheduler = Scheduler(num_slots=num_slots, prefill_budget=budget, mixed=on_cpu)
    worker = Worker(engine, scheduler, tokenizer, deliver, queue=config.queue)
    worker.info = EngineInfo(
        model=config.model_name,
        fingerprint=weights.fingerprint,
        device=str(device) if on_cpu else f"{device} {torch.cuda.get_device_name(device)}",
        dtype=next(name for name, known in DTYPES.items() if known == dtype),
        ops="reference",
        slots=num_slots,
        prefill_budget=budget,
        vocab_size=shape.vocab_size,
        layers=shape.num_layers,
        width=shape.width,
        parameters=shape.count_bytes(torch.int8),
        load_seconds=time.monotonic() - started,
    )
    return worker


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


def read_model(config: Config) -> tuple[dict[str, torch.Tensor], str]:
    """Return the checkpoint's tensors and its name."""
    file = find_model(config)
    return weights_module.read_file(file), str(file)


def valid_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that stand for something, the end token included."""
    return [token for token, data in enumerate(tokenizer.token_bytes) if data is not None]


def plan_memory(shape: ModelShape, dtype: torch.dtype, device: torch.device, slots: int, name: str) -> int:
    """Say what is needed and what is free, and return the number of slots; CheckpointError when it does not fit."""
    free = free_memory(device)
    weights = shape.count_bytes(dtype)
    per_slot = slot_bytes(shape)
    room = free - weights
    if not slots:
        wanted = CPU_SLOTS if device.type == "cpu" else GPU_SLOTS
        slots = max(1, min(wanted, room // STATE_SHARE // per_slot))
    needed = weights + slots * per_slot
    log.info(
        "needs %s MiB: weights %s, %d slots of %.1f MiB; free on %s: %s MiB",
        f"{needed / MIB:,.0f}", f"{weights / MIB:,.0f}", slots, per_slot / MIB, device, f"{free / MIB:,.0f}",
    )  # fmt: skip
    if needed > free:
        where = "GPU memory" if device.type == "cuda" else "memory"
        raise CheckpointError(
            f"{name}: needs {needed / MIB:,.0f} MiB of {where} ({slots} slots), only {free / MIB:,.0f} MiB are free"
        )
    return slots


def slot_bytes(shape: ModelShape) -> int:
    """Bytes of one slot's state, fp32."""
    return 4 * shape.num_layers * (2 * shape.width + shape.num_heads * HEAD_SIZE**2)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**62
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
        free = int(line.split()[1]) * 1024
    for limit, used in CGROUP_FILES:  # a container's own limit
        if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
            free = min(free, int(text) - int(used.read_text()))
    return max(free, 0)


CGROUP_FILES = [
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
]
