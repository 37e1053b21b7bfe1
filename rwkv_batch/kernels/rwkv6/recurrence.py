"""Calls of cuda/wkv/wkv6.cu: RWKV-6's recurrence, and the gate of its channel mix. Shapes and rules: see `kernels/mix.py`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.kernels.launch import INT, POINTER, Launcher, check, pointer
from rwkv_batch.kernels.mix import STATE_TYPES
from rwkv_batch.model.packed_rows import RowLayout

HALF = torch.float16
HEAD_SIZE = 64  # what the kernels take


@dataclass(frozen=True)
class Wkv6Layer:
    """A layer's vectors, fp32 [C]: u, what a token's own key counts for it, and the group norm's."""

    bonus: Tensor
    norm_weight: Tensor
    norm_bias: Tensor


class Recurrence:
    """The kernels on one device. `pdl`: see `Mix`."""

    def __init__(self, launcher: Launcher, *, pdl: bool = False):
        self._launcher = launcher
        self._pdl = int(pdl)
        self._wkv = launcher.bind("rwkv_wkv6", *[POINTER] * 9, INT, *[POINTER] * 3, *[INT] * 4)
        self._gate = launcher.bind("rwkv_gate", *[POINTER] * 2, *[INT] * 2)

    def decode(
        self, rkvg: Tensor, w_raw: Tensor, layer: Wkv6Layer, state: Tensor, slots: Tensor, out: Tensor,
        *, inputs_ready: bool = False,
    ) -> None:  # fmt: skip
        """One token for each row: from r, k, v, g [4, B, C] to out [B, C], what goes into the output matrix.

        w_raw         [B, C] fp32: w = exp(-exp(w_raw)), the bias is in it
        state         [S, H, 64 value, 64 key] fp16 or fp32, updated in place; slots [B] int64, -1 = padding.
        inputs_ready  promises that whatever wrote `state` and `slots` had ended before the preceding kernel began
        """
        check("slots", slots, self._launcher.device, torch.int64, (len(out),))
        self._run(rkvg, w_raw, layer, state, None, slots, out, int(inputs_ready))

    def prefill(self, rkvg: Tensor, w_raw: Tensor, layer: Wkv6Layer, state: Tensor, rows: RowLayout, out: Tensor) -> None:
        """The same for packed rows of any lengths, token by token."""
        check("slots", rows.slots, self._launcher.device, torch.int64, rows.slots.shape)
        check("cu_seqlens", rows.cu_seqlens, self._launcher.device, torch.int32, (len(rows.slots) + 1,))
        self._run(rkvg, w_raw, layer, state, rows.cu_seqlens, rows.slots, out, 0)

    def gate(self, gate: Tensor, y: Tensor) -> None:
        """y [N, C] = sigmoid(gate) y."""
        check("gate", gate, self._launcher.device, HALF, y.shape)
        check("y", y, self._launcher.device, HALF, y.shape)
        self._launcher.launch(self._gate, pointer(gate), pointer(y), y.numel(), self._pdl)

    def _run(
        self, rkvg: Tensor, w_raw: Tensor, layer: Wkv6Layer, state: Tensor, starts: Tensor | None, slots: Tensor, out: Tensor,
        inputs_ready: int,
    ) -> None:  # fmt: skip
        device, (n, c) = self._launcher.device, out.shape
        check("rkvg", rkvg, device, HALF, (4, n, c))
        check("w_raw", w_raw, device, torch.float32, (n, c))
        check("out", out, device, HALF, (n, c))
        for name, vector in vars(layer).items():
            check(name, vector, device, torch.float32, (c,))
        if state.dtype not in STATE_TYPES:
            raise ValueError(f"state: expected fp16 or fp32, got {state.dtype}")
        check("state", state, device, state.dtype, (len(state), c // HEAD_SIZE, HEAD_SIZE, HEAD_SIZE))
        inputs = (*rkvg.unbind(), w_raw, *vars(layer).values(), state)
        sizes = (len(slots), c // HEAD_SIZE, inputs_ready, self._pdl)
        pointers = map(pointer, (starts, slots, out))
        self._launcher.launch(self._wkv, *map(pointer, inputs), STATE_TYPES[state.dtype], *pointers, *sizes)
