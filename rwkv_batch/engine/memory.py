"""How much memory the engine needs on its device, and how many slots fit into what is free.

Sizes are asked of what will be allocated; only the sum is made here.
"""

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from rwkv_batch.config import MAX_SLOTS, Config, logs_states
from rwkv_batch.errors import NoMemory
from rwkv_batch.kernels import tiled
from rwkv_batch.kernels.adapted.products import GroupedProducts
from rwkv_batch.kernels.linear import Lora
from rwkv_batch.kernels.ops import Buffers
from rwkv_batch.kernels.quant.many_tokens import ManyTokens
from rwkv_batch.kernels.quant.matrix import Scratch
from rwkv_batch.kernels.rwkv6.layer_kernels import Rwkv6LayerKernels
from rwkv_batch.kernels.rwkv6.ops import Rwkv6Buffers
from rwkv_batch.kernels.states.log import WkvLog, runs_on
from rwkv_batch.model.adapters.bank import AdapterBank
from rwkv_batch.model.quantized import PLAIN, Quantisation
from rwkv_batch.model.rwkv6.weights import Rwkv6Shape
from rwkv_batch.model.state import State
from rwkv_batch.model.weights import ModelShape
from rwkv_batch.scheduling.plan import SCORED_TOKENS
from rwkv_batch.tuned.row_adapters import columns_of
from sampling.kernel import KernelSampler

log = logging.getLogger("rwkv_batch.engine")

MIB = 2**20
UNLIMITED = 2**62
CHECKPOINTS = 2  # states that a turn of a session holds beside its slot
STATE_SHARE = 4  # automatic slots take at most this fraction (one in four) of the memory left beside the weights
SESSION_SHARE = 2  # automatic L1 takes at most one in two of the bytes that nothing else is planned for,
L2_SHARE, L2_BYTES = 4, 64 * 2**30  # automatic L2 one in four of the host's that are free, and so many,
CPU_SHARE, CPU_BYTES = 32, 512 * MIB  # and each of them, where the host's memory is the device's, one in 32
MAX_SESSIONS = 1_048_576
TILED_SHARE = 4  # automatic tiled weights take at most one in four of the bytes that nothing else is planned for
LEAST_SESSIONS, LEAST_BYTES = 16, 2**31  # what automatic L1 has in any case, before slots are counted
OVERHEAD = 256 * MIB  # cuBLASLt's workspace, captured graphs, what torch's allocator rounds up
LESS_MEMORY = ("--slots", "--prefill-budget", "--prefix-cache-mib", "--l1-sessions", "--max-logit-bias")  # the first: anywhere


@dataclass(frozen=True)
class MemoryPlan:
    """What an engine needs on `device`.

    dtype      of the weights
    wkv_dtype  of the recurrent state
    buffers    bytes needed however many slots there are: kernels, sessions, prefixes
    sampling   bytes of a slot beside its state and its log
    quant      how the large matrices are kept
    log        whether steps keep a log beside states in fp16, counted also where there are too few slots for one
    tiled      whether kernels get a copy of the large matrices: "on", of which `buffers` count the bytes, "off" or "auto"

    Every slot may be a turn of a session: its checkpoints are counted, though a server without sessions does without them.
    """

    device: torch.device
    shape: ModelShape
    dtype: torch.dtype
    wkv_dtype: torch.dtype = torch.float32
    buffers: int = 0
    sampling: int = 0
    quant: Quantisation = PLAIN
    log: bool = False
    tiled: str = "off"

    @property
    def weights(self) -> int:
        """Bytes of the model."""
        return self.shape.count_bytes(self.dtype, self.quant)

    @property
    def state(self) -> int:
        """Bytes of one state, the shift taken as fp32."""
        return State.num_bytes(self.shape, 1, wkv_dtype=self.wkv_dtype)

    @property
    def beside(self) -> int:
        """Bytes of a slot beside its state."""
        logged = self.log and self.wkv_dtype == torch.float16 and isinstance(self.shape, ModelShape)
        return self.sampling + (WkvLog.num_bytes(self.shape) if logged else 0)

    @property
    def tiled_bytes(self) -> int:
        """Bytes of a copy of the large matrices."""
        return tiled.num_bytes(self.shape)

    def slots(self, wanted: int, automatic: int, name: str) -> int:
        """Say what is needed and what is free, and return the number of slots; NoMemory when it does not fit.

        wanted     0 = as many as memory allows, `automatic` at most
        name       the checkpoint's, for messages
        """
        free, weights, state = free_memory(self.device), self.weights, self.state
        slots, per_slot = wanted, state + self.beside
        if not slots:
            room = free - weights - self.buffers
            slots = max(1, min(automatic, room // STATE_SHARE // per_slot))
        checkpoints = slots * CHECKPOINTS * state
        needed = weights + self.buffers + slots * per_slot + checkpoints
        log.info(
            "needs %s MiB: weights %s, buffers, sessions and prefixes %s, %d slots of %.1f MiB, their checkpoints at most %s;"
            " free on %s: %s MiB",
            f"{needed / MIB:,.0f}", f"{weights / MIB:,.0f}", f"{self.buffers / MIB:,.0f}", slots, per_slot / MIB,
            f"{checkpoints / MIB:,.0f}", self.device, f"{free / MIB:,.0f}",
        )  # fmt: skip
        if needed > free:
            where = "GPU memory" if self.device.type == "cuda" else "memory"
            rest = f"; buffers, sessions and prefixes: {self.buffers / MIB:,.0f}" if self.buffers else ""
            flags = LESS_MEMORY if self.buffers else LESS_MEMORY[:1]
            advice = f"; it takes less with a smaller {' or '.join(flags)}" if weights < free else ""
            raise NoMemory(
                f"{name}: needs {needed / MIB:,.0f} MiB of {where} ({slots} slots, {CHECKPOINTS} checkpoints each;"
                f" weights: {weights / MIB:,.0f}{rest}), only {free / MIB:,.0f} MiB are free{advice}"
            )
        return slots

    def spare_slots(self, slots: int, share: float) -> int:
        """Return the number of spare slots beside `slots`: that share of them, rounded, and fewer where memory is short."""
        room = free_memory(self.device) - self.weights - self.buffers
        fitting = room // (self.state * (1 + CHECKPOINTS) + self.beside)
        spare = max(0, min(int(slots * share + 0.5), min(fitting, MAX_SLOTS) - slots))
        log.info("and %d spare slots", spare)
        return spare

    def left(self, slots: int) -> int:
        """Bytes on the device that nothing is planned for, beside so many slots of both kinds."""
        return free_memory(self.device) - self.weights - self.buffers - slots * (self.state * (1 + CHECKPOINTS) + self.beside)

    def tiles(self, slots: int) -> bool:
        """Return whether kernels get a copy of the large matrices, beside so many slots of both kinds."""
        has = self.tiled == "on" or (self.tiled == "auto" and self.tiled_bytes <= self.left(slots) // TILED_SHARE)
        if self.tiled != "off":
            log.info("tiled weights: %s", f"{self.tiled_bytes / MIB:,.0f} MiB" if has else "no room for a copy")
        return has

    def session_bytes(self, slots: int) -> int:
        """Bytes on the device for sessions, where no setting says how many, beside so many slots of both kinds."""
        if self.device.type == "cpu":
            return min(free_memory(self.device) // CPU_SHARE, CPU_BYTES)
        left = self.left(slots)
        least = kept_bytes(self.shape, self.wkv_dtype, LEAST_SESSIONS, LEAST_BYTES)
        return least + max(0, left) // SESSION_SHARE


def plan_memory(
    config: Config,
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    wkv_dtype: torch.dtype,
    budget: int | None,
    quant: Quantisation = PLAIN,
) -> MemoryPlan:
    """Return what is needed on the device. `budget`: tokens of a step that kernels run; None = reference ops."""
    if budget is None:
        return MemoryPlan(device, shape, dtype, wkv_dtype, quant=quant)
    if config.l1_sessions is None and config.l1_mib is None:
        limits = LEAST_SESSIONS, LEAST_BYTES
    else:
        limits = (
            MAX_SESSIONS if config.l1_sessions is None else config.l1_sessions,
            UNLIMITED if config.l1_mib is None else config.l1_mib * MIB,
        )
    kept = kept_bytes(shape, wkv_dtype, *limits) + config.prefix_cache_mib * MIB
    newest = isinstance(shape, ModelShape)
    columns = columns_of(config) * newest
    adapters = AdapterBank.num_bytes(shape, columns, dtype) + GroupedProducts.num_bytes(columns, budget)
    buffers = kernel_bytes(shape, budget, quant) + kept + adapters
    sampling, logged = sampling_bytes(shape, config.max_logit_bias), logs_states(config) and runs_on(device)
    choice = "off" if quant.format or config.tp > 1 or config.pp_devices or not newest else config.tiled_weights
    choice = choice if runs_on(device) else "off"
    if choice != config.tiled_weights == "on":
        log.warning("--tiled-weights on: is for models of RWKV-7 that are not quantised, on one Hopper GPU an engine")
    if choice == "on":
        buffers += tiled.num_bytes(shape)
    return MemoryPlan(device, shape, dtype, wkv_dtype, buffers, sampling, quant, logged, choice)


def session_levels(config: Config, memory: MemoryPlan, num_slots: int) -> dict[str, int]:
    """Return how many sessions, and how many bytes of them, are kept on the device (L1) and on the host (L2)."""
    automatic = {"l1": memory.session_bytes(num_slots), "l2": l2_bytes(memory.device) // config.num_engines}
    levels = {}
    for level, num_bytes in automatic.items():
        sessions, mib = getattr(config, f"{level}_sessions"), getattr(config, f"{level}_mib")
        levels[f"{level}_sessions"] = UNLIMITED if sessions is None else sessions
        levels[f"{level}_bytes"] = mib * MIB if mib is not None else num_bytes if sessions is None else UNLIMITED
    states = [
        f"{min(levels[f'{level}_sessions'], levels[f'{level}_bytes'] // memory.state):,} in {where} memory"
        for level, where in (("l1", "device"), ("l2", "host"))
    ]
    log.info("states of sessions: %s", ", ".join(states))
    return levels


def l2_bytes(device: torch.device) -> int:
    """Bytes of the host for sessions, where no setting says how many."""
    free = free_memory(torch.device("cpu"))
    return min(free // L2_SHARE, L2_BYTES) if device.type == "cuda" else min(free // CPU_SHARE, CPU_BYTES)


def kernel_bytes(shape: ModelShape | Rwkv6Shape, max_tokens: int, quant: Quantisation = PLAIN) -> int:
    """Bytes of the kernels' buffers for steps of `max_tokens`, and of their copies of the low-rank pairs."""
    if isinstance(shape, Rwkv6Shape):
        buffers = Rwkv6Buffers.num_bytes(shape, max_tokens=max_tokens, max_rows=SCORED_TOKENS)
        return buffers + shape.num_layers * Rwkv6LayerKernels.num_bytes(shape) + OVERHEAD
    buffers = Buffers.num_bytes(shape, max_tokens=max_tokens, max_rows=SCORED_TOKENS)
    if quant.format:
        buffers += Scratch.num_bytes(shape, quant_head=quant.head)
        buffers += ManyTokens.num_bytes(shape, quant.format, max_tokens=max_tokens)
    return buffers + shape.num_layers * Lora.num_bytes(shape) + OVERHEAD


def kept_bytes(shape: ModelShape, wkv_dtype: torch.dtype, sessions: int, limit: int) -> int:
    """Bytes that so many sessions may take on the device, `limit` at most."""
    return min(limit, State.num_bytes(shape, sessions, wkv_dtype=wkv_dtype))


def sampling_bytes(shape: ModelShape | Rwkv6Shape, max_logit_bias: int) -> int:
    """Bytes of a slot's logits, which are kept while a grammar's mask is made, and of its sampling controls."""
    buffers = Rwkv6Buffers if isinstance(shape, Rwkv6Shape) else Buffers
    logits = buffers.num_bytes(shape, max_tokens=0, max_rows=1) - buffers.num_bytes(shape, max_tokens=0, max_rows=0)
    return 2 * logits + KernelSampler.num_bytes(1, shape.vocab_size, max_logit_bias)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = 2**62
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):  # macOS does not say
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
        free = int(line.split()[1]) * 1024
    for folder, limit, used, cached in CGROUPS:  # a container's own limit
        if (folder / limit).exists() and (folder / used).exists() and (text := (folder / limit).read_text().strip()).isdigit():
            free = min(free, int(text) - int((folder / used).read_text()) + cached_bytes(folder / "memory.stat", cached))
    return max(free, 0)


def cached_bytes(file: Path, name: str) -> int:
    """Bytes of files, such as a checkpoint just written, that count as used in a container and make room when asked."""
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return next((int(value) for key, value in lines if key == name), 0)


CGROUPS = [
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
]


def device_name(device: torch.device) -> str:
    """Return what people are told of a device."""
    return str(device) if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"


def in_use(device: torch.device) -> dict[str, int]:
    """Bytes that this process holds now: resident in host memory, and what torch has taken of a GPU, used or not."""
    found = {}
    with contextlib.suppress(OSError):  # no Linux
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["host_memory_bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        found["device_memory_bytes"] = torch.cuda.memory_reserved(device)
    return found
