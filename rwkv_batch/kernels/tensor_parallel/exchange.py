"""Calls of cuda/exchange.cu: what the ranks of one model on several cards tell each other, inside captured steps too.

Every rank's part of a sum is at a fixed place that all cards reach. Up to FEW_BYTES sent in all, each rank sends its part to
the others; beyond, each sums a share of the places. A rank that waits for others longer than `patience` ends with an error, and
`trouble` says what it waited for.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from rwkv_batch.errors import EngineFailed
from rwkv_batch.kernels.launch import INT, POINTER, KernelLaunchFailed, Launcher, check, pointer
from rwkv_batch.kernels.layer_kernels import whole_units
from rwkv_batch.model.tensor_parallel.on_device import current

HALF = torch.float16
MAX_RANKS = 8
FLAGS = 3 * 128 * MAX_RANKS  # as cuda/exchange.cuh has them
FEW_BYTES = 2**19  # that a rank sends in all, up to which it sends its part to all others
WORD = 4  # bytes of a part that go with an epoch each
WAITED_FOR = {1: "a part of a sum", 2: "the share of a large sum", 3: "the ids of a step", 4: "the logits"}


class ExchangeArgs(ctypes.Structure):
    """`Ranks` of cuda/exchange.cuh, field by field."""

    _fields_ = (
        ("rank", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("inbox", ctypes.c_void_p * MAX_RANKS),
        ("ids", ctypes.c_void_p * MAX_RANKS),
        ("flags", ctypes.c_void_p * MAX_RANKS),
        ("step", ctypes.c_void_p),
        ("trouble", ctypes.c_void_p),
        ("patience", ctypes.c_uint64),
        ("words", ctypes.c_int64),
    )


class KernelExchange:
    """The `Exchange` of ranks on cards, and the same one rank at a time, for steps that are captured.

    launchers  of the ranks, in their order
    parts      where each rank's part of a sum is [max_tokens, C]
    columns    of the logits that each rank makes
    num_sums   that a step takes: all of them are taken in every step, an even number
    max_rows   whose logits a step may ask for, and that decode in one
    patience   seconds that a rank waits for the others
    """

    def __init__(
        self,
        launchers: Sequence[Launcher],
        parts: Sequence[Tensor],
        columns: Sequence[slice],
        *,
        num_sums: int,
        max_rows: int,
        patience: float,
    ):
        self.launchers, self.parts, self.columns = list(launchers), list(parts), list(columns)
        self.num_sums = num_sums
        count, library = len(self.launchers), launchers[0].library
        if (built := library.rwkv_exchange_args_size()) != ctypes.sizeof(ExchangeArgs):
            raise RuntimeError(f"exchanges take {built} bytes, and exchange.py describes {ctypes.sizeof(ExchangeArgs)}")
        self._few_bytes = FEW_BYTES // (count - 1)
        words = self._few_bytes // WORD
        self._memory = [self._memory_of(launcher.device, words, max_rows) for launcher in self.launchers]
        self._trouble = torch.zeros(count, 4, dtype=torch.int32, pin_memory=launchers[0].device.type == "cuda")
        self._args = [self._args_of(rank, words, patience) for rank in range(count)]
        self._parts = (ctypes.c_void_p * MAX_RANKS)(*map(pointer, self.parts))
        self._numbers = [0] * count  # of each rank's next sum in its step
        self.tokens = [torch.zeros(max_rows, dtype=torch.int64, device=launcher.device) for launcher in self.launchers]
        self._num_outputs = columns[-1].stop
        width = whole_units(self._num_outputs)
        self._logits = torch.empty(max_rows, width, dtype=HALF, device=launchers[0].device)
        functions = {
            "_sum": ("rwkv_exchange_sum", POINTER, POINTER, *[INT] * 5),
            "_begin": ("rwkv_exchange_begin", *[POINTER] * 4, *[INT] * 3),
            "_join": ("rwkv_exchange_join", POINTER, POINTER, INT, POINTER, *[INT] * 6),
        }
        for name, (function, *types) in functions.items():  # of each rank's own copy of the library
            setattr(self, name, [launcher.bind(function, *types) for launcher in self.launchers])
        self._prepare()

    @property
    def most_few(self) -> int:
        """The most values of a part that each rank sends to all others."""
        return self._few_bytes // HALF.itemsize

    def _prepare(self) -> None:
        """Load every kernel on every card: loaded by its first launch, it might wait for a card that waits for it."""
        for launcher in self.launchers:
            with current(launcher.device):
                if error := launcher.library.rwkv_exchange_setup():
                    raise KernelLaunchFailed(f"rwkv_exchange_setup failed with CUDA error {error}")

    @staticmethod
    def _memory_of(device: torch.device, words: int, max_rows: int) -> dict[str, Tensor]:
        with current(device):
            return {
                "inbox": torch.zeros(2 * MAX_RANKS * words, dtype=torch.int64, device=device),
                "ids": torch.zeros(max_rows, dtype=torch.int64, device=device),
                "flags": torch.zeros(FLAGS, dtype=torch.int32, device=device),
                "step": torch.zeros(1, dtype=torch.int32, device=device),
            }

    def _args_of(self, rank: int, words: int, patience: float) -> ExchangeArgs:
        shared = {
            name: (ctypes.c_void_p * MAX_RANKS)(*(pointer(memory[name]) for memory in self._memory))
            for name in ("inbox", "ids", "flags")
        }
        return ExchangeArgs(
            rank=rank,
            count=len(self.launchers),
            **shared,
            step=pointer(self._memory[rank]["step"]),
            trouble=pointer(self._trouble[rank]),
            patience=int(patience * 1e9),
            words=words,
        )

    # The `Exchange` of a step in which all ranks are driven together.

    def begin(self) -> None:
        """See `Exchange.begin`."""
        for rank, launcher in enumerate(self.launchers):
            with current(launcher.device):
                self.begin_one(rank)

    def add(self, parts: Sequence[Tensor]) -> None:
        """See `Exchange.add`; sums are fp32, results fp16."""
        for rank, (launcher, part) in enumerate(zip(self.launchers, parts, strict=True)):
            with current(launcher.device):
                self.add_one(rank, part)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See `Exchange.join`."""
        for rank, (launcher, part) in enumerate(zip(self.launchers, parts, strict=True)):
            with current(launcher.device):
                logits = self.join_one(rank, part)
        return logits

    # The same of one rank, whose device is the current one; all ranks must do the same, in the same order.

    def begin_one(self, rank: int, slots: Tensor | None = None, last_ids: Tensor | None = None) -> Tensor | None:
        """Begin a step. With `slots` [B] int64, return what rank 0 feeds them: its `last_ids[slots]`, 0 where a slot is -1."""
        launcher, rows = self.launchers[rank], 0 if slots is None else len(slots)
        launcher.use_current_stream()
        self._numbers[rank] = 0
        tokens = None
        if slots is not None:
            check("slots", slots, launcher.device, torch.int64, (rows,))
            tokens = self.tokens[rank][:rows]
            if rank == 0:
                check("last_ids", last_ids, launcher.device, torch.int64, last_ids.shape)
        arguments = (pointer(last_ids) if rank == 0 else None, pointer(slots), pointer(tokens), rows, self.num_sums, 1)
        launcher.launch(self._begin[rank], ctypes.addressof(self._args[rank]), *arguments)
        return tokens

    def add_one(self, rank: int, part: Tensor) -> None:
        """Replace the rank's part [N, C] by the sum of all ranks'."""
        place = self.parts[rank]
        check("part", part, place.device, HALF, (len(part), place.shape[1]))
        if part.data_ptr() != place.data_ptr() or len(part) > len(place):
            raise ValueError("part: it is not where the other ranks look for it")
        number, launcher = self._numbers[rank], self.launchers[rank]
        self._numbers[rank] = number + 1
        many = part.nbytes > self._few_bytes
        arguments = (ctypes.addressof(self._args[rank]), ctypes.addressof(self._parts), part.numel(), many)
        launcher.launch(self._sum[rank], *arguments, number, self.num_sums, 1)

    def join_one(self, rank: int, part: Tensor) -> Tensor:
        """Send the rank's columns of the logits [B, columns] to rank 0; return rank 0's [B, U], whole behind all calls."""
        columns, rows = self.columns[rank], len(part)
        if part.stride(1) != 1 or part.shape[1] != columns.stop - columns.start or rows > len(self._logits):
            raise ValueError(f"part: expected adjacent columns {columns}, got {list(part.shape)}")
        widths = [whole_units(each.stop - each.start) for each in self.columns]
        launcher = self.launchers[rank]
        to = (pointer(self._logits), self._logits.stride(0), columns.start)
        own = (ctypes.addressof(self._args[rank]), pointer(part), part.stride(0))
        launcher.launch(self._join[rank], *own, *to, widths[rank], max(widths), rows, 1)
        return self._logits[:rows, : self._num_outputs]

    def trouble(self) -> EngineFailed | None:
        """Return what a rank has waited for in vain, None where all is well or nothing is known."""
        for what, rank, missing, epoch in self._trouble.tolist():
            if what:
                late = ", ".join(str(other) for other in range(MAX_RANKS) if missing >> other & 1)
                return EngineFailed(f"rank {rank} waited in vain for {WAITED_FOR.get(what, what)} of rank {late} ({epoch})")
        return None
