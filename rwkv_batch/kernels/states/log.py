"""Calls of cuda/wkv/wkv_logged.cu: the log beside the wkv states, which saves decode steps of many rows most writes."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rwkv_batch.kernels.launch import INT, POINTER, Launcher, pointer
from rwkv_batch.kernels.mix import LOGGED_BYTES, LOGGED_TOKENS, LayerLog, Mix, WkvInputs, WkvLayer
from rwkv_batch.model.architectures import Shape
from rwkv_batch.model.packed_rows import StepRows
from rwkv_batch.model.state import State
from rwkv_batch.model.weights import HEAD_SIZE, ModelShape

if TYPE_CHECKING:
    from rwkv_batch.kernels.ops import KernelOps

log = logging.getLogger("rwkv_batch.engine")

LEAST_HEADS = 4096  # of all rows of a step, from which the log pays; measured on an H100


class WkvLog:
    """The log of all layers of a state in fp16, on one device. Knows nothing of which slots have something in it.

    vectors  of each layer

    layers   the log of each
    entries  all of them

    Nothing is waited for.
    """

    def __init__(self, launcher: Launcher, state: State, vectors: Sequence[WkvLayer]):
        self._launcher = launcher
        self._wkv = state.wkv
        num_layers, num_slots, num_heads = state.wkv.shape[:3]
        self.least_rows = -(-LEAST_HEADS // num_heads)
        device = state.wkv.device
        dims = (num_layers, num_slots, num_heads, LOGGED_TOKENS, LOGGED_BYTES)
        self.entries = torch.zeros(dims, dtype=torch.uint8, device=device)
        # Slots begin at different phases, so that steps take equally long.
        phase = torch.arange(num_slots, dtype=torch.int32, device=device) % (LOGGED_TOKENS + 1)
        self._standing = torch.stack([phase * num_heads, phase], 1).contiguous()
        self._k_k = torch.stack([layer.k_k for layer in vectors])
        self._k_a = torch.stack([layer.k_a for layer in vectors])
        self.layers = [LayerLog(entries, self._standing, i == num_layers - 1) for i, entries in enumerate(self.entries)]
        self._of = {wkv.data_ptr(): log for wkv, log in zip(state.layer_wkv, self.layers, strict=True)}
        self._flush = launcher.bind("rwkv_wkv_flush", *[POINTER] * 6, *[INT] * 5)

    @classmethod
    def num_bytes(cls, shape: Shape) -> int:
        """Bytes of a slot."""
        return shape.num_layers * shape.num_heads * LOGGED_TOKENS * LOGGED_BYTES

    @classmethod
    def beside(cls, state: State, ops: "KernelOps") -> None:
        """Have captured decode steps of many rows by `ops` keep a log beside these states.

        Not for fp32, nor for few slots; and on Hopper GPUs alone, since no other has been measured.
        """
        many = state.num_slots * state.shape.num_heads >= LEAST_HEADS
        if many and state.wkv.dtype == torch.float16 and ops.launcher.hopper and agrees(ops.launcher):
            ops.log = cls(ops.launcher, state, [layer.wkv for layer in ops.prepared.layers])
            state.keep_log(ops.log)

    def of(self, wkv: Tensor, rows: StepRows) -> LayerLog | None:
        """Return the log of a layer, whose matrices of all slots are `wkv`, where a decode step of these rows keeps one."""
        return self._of.get(wkv.data_ptr()) if rows.is_captured and len(rows.slot_tensor) >= self.least_rows else None

    def flush(self, slots: Sequence[int]) -> None:
        """See `model.state.Log`."""
        self._launch(slots, forget=False)

    def forget(self, slots: Sequence[int]) -> None:
        """See `model.state.Log`."""
        self._launch(slots, forget=True)

    def _launch(self, slots: Sequence[int], *, forget: bool) -> None:
        num_layers, num_slots, num_heads = self._wkv.shape[:3]
        if not 0 <= min(slots) <= max(slots) < num_slots:
            raise ValueError(f"slots: from {min(slots)} to {max(slots)}, there are {num_slots}")
        listed = torch.tensor(slots, dtype=torch.int64).to(self._wkv.device, non_blocking=True)
        arrays = map(pointer, (self._wkv, self.entries, self._standing, self._k_k, self._k_a, listed))
        self._launcher.use_current_stream()
        self._launcher.launch(self._flush, *arrays, len(slots), num_layers, num_slots, num_heads, int(forget))


def runs_on(device: torch.device) -> bool:
    """Whether steps on this device may keep a log."""
    nvidia = device.type == "cuda" and torch.cuda.is_available() and not torch.version.hip
    return nvidia and torch.cuda.get_device_capability(device)[0] == 9


def agrees(launcher: Launcher, num_heads: int = 5, num_rows: int = 37) -> bool:
    """Return whether, on this card, steps with a log have the bits of steps without: rows at all phases side by side, padding,
    slots that are flushed and overwritten in between. Says it in the log where they have not."""
    layers, num_slots, width = 2, num_rows + 5, num_heads * HEAD_SIZE
    device, generator = launcher.device, torch.Generator(launcher.device).manual_seed(num_rows)

    def values(*dims: int) -> Tensor:
        return torch.randn(*dims, generator=generator, device=device)

    shape, mix = ModelShape(layers, width, 4 * width, 256, 8, 8, 8, 8), Mix(launcher, pdl=True)
    vectors = [WkvLayer(*values(5, width).unbind()) for _ in range(layers)]
    plain, logged = (State(shape, num_slots, wkv_dtype=torch.float16, device=device) for _ in range(2))
    plain.wkv.copy_(values(*plain.wkv.shape))
    logged.wkv.copy_(plain.wkv)
    beside, out = WkvLog(launcher, logged, vectors), torch.zeros(2, num_rows, width, dtype=torch.float16, device=device)
    beside.entries.fill_(255)  # NaN, which every token read that was not logged brings in
    right = True
    for step in range(3 * (LOGGED_TOKENS + 1)):
        slots = torch.randperm(num_slots, generator=generator, device=device)
        padded = torch.where(slots % 7 == step % 7, -1, slots)[:num_rows].contiguous()
        for i, layer in enumerate(vectors):
            r, k, v, a, mixed, gate = values(6, num_rows, width).half().unbind()
            raw, first = values(num_rows, width), torch.zeros_like(r)
            inputs = WkvInputs(r, k, v, raw, a.sigmoid(), mixed.sigmoid() if i else None, gate, first)
            launcher.use_current_stream()
            mix.wkv_decode(inputs, layer, plain.layer_wkv[i], padded, out[0])
            mix.wkv_decode(inputs, layer, logged.layer_wkv[i], padded, out[1], log=beside.layers[i])
            right &= torch.equal(*out)
        some = slots[: num_slots // 3].tolist()
        if step % 3 == 1:
            beside.flush(some)
            right &= torch.equal(plain.wkv[:, some], logged.wkv[:, some])
        elif step % 3 == 2:
            plain.wkv[:, some] = logged.wkv[:, some] = 0.5
            beside.forget(some)
    beside.flush(range(num_slots))
    right &= torch.equal(plain.wkv, logged.wkv)
    if not right:
        log.error("decode steps with a log beside the states give OTHER RESULTS on this card: there is none")
    return right
