"""Calls of cuda/few/: what a decode step of up to 8 rows does in one launch where more rows take two or three.

Shapes and results are those of the kernels that are put together (`Mix`, `Linear`), N rows of width C; no method allocates or
waits. All launches overlap with the one before (programmatic dependent launch); states, shift states and slots must have been
written before that one began, as with `inputs_ready` there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.kernels.launch import INT, POINTER, Launcher, check, pointer
from rwkv_batch.kernels.linear import Lora
from rwkv_batch.kernels.mix import WkvLayer
from rwkv_batch.model.weights import HEAD_SIZE

HALF = torch.float16
MAX_ROWS = 8
MAX_WIDTH = 4096
WARPS, COLUMNS_OF_WARP = 8, 256  # of a thread block that takes the norms


@dataclass(frozen=True)
class Carried:
    """Normalised rows [N, C] that have yet to go to their slots [N] of the shift state [S, C]."""

    rows: Tensor
    shift: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Norm:
    """A residual sum, layer norm and blend that the products behind them take upon themselves.

    x        [N, C] fp32, the residual stream
    x_out    where x + y goes: other memory; x itself where y is None
    y        [N, C] or None
    weight, bias  [C] fp32; mix [planes, C] fp32
    shift    [S, C], slots [N] int64
    normed   [N, C]: what has to go to shift[slots] later
    carried  of an earlier one of the same slots, which this one takes there
    """

    x: Tensor
    x_out: Tensor
    y: Tensor | None
    weight: Tensor
    bias: Tensor
    mix: Tensor
    shift: Tensor
    slots: Tensor
    normed: Tensor
    carried: Carried | None

    def check(self, device: torch.device, planes: int) -> None:
        """Raise ValueError for what does not fit."""
        n, c = self.x.shape
        if not norm_fits(n, c):
            raise ValueError(f"x: {n} rows of width {c} are too many")
        if self.y is not None and self.x_out.data_ptr() == self.x.data_ptr():
            raise ValueError("x_out: must be other memory than x")
        rows, vectors = (("x", self.x), ("x_out", self.x_out)), (("weight", self.weight), ("bias", self.bias))
        for name, tensor in rows:
            check(name, tensor, device, torch.float32, (n, c))
        for name, tensor in vectors:
            check(name, tensor, device, torch.float32, (c,))
        check("mix", self.mix, device, torch.float32, (planes, c))
        check("shift", self.shift, device, HALF, (len(self.shift), c))
        check("slots", self.slots, device, torch.int64, (n,))
        check("normed", self.normed, device, HALF, (n, c))
        if self.y is not None:
            check("y", self.y, device, HALF, (n, c))
        if self.carried is not None:
            check("carried.rows", self.carried.rows, device, HALF, (n, c))
            check("carried.shift", self.carried.shift, device, HALF, (len(self.carried.shift), c))
            if self.carried.rows.data_ptr() == self.normed.data_ptr():
                raise ValueError("normed: must be other memory than carried.rows")

    @property
    def pointers(self) -> list[int | None]:
        """Return what kernels take."""
        carried = (None, None) if self.carried is None else (self.carried.rows, self.carried.shift)
        own = (self.x, self.x_out, self.y, self.weight, self.bias, self.mix, self.shift, self.slots, self.normed)
        return [pointer(tensor) for tensor in (*own, *carried)]


def norm_fits(rows: int, width: int) -> bool:
    """Return whether a thread block can take the norm of so many rows."""
    return width % 64 == 0 and rows * -(-width // COLUMNS_OF_WARP) <= WARPS


class FewRows:
    """The kernels on one Hopper GPU."""

    def __init__(self, launcher: Launcher):
        self.launcher = launcher
        self._inputs = launcher.bind("rwkv_normed_inputs", *[POINTER] * 15, *[INT] * 8)
        self._product = launcher.bind("rwkv_normed_product", *[POINTER] * 14, *[INT] * 6)
        self._plain = launcher.bind("rwkv_plain_product", *[POINTER] * 4, *[INT] * 6)
        self._plain_inputs = launcher.bind("rwkv_plain_inputs", *[POINTER] * 5, *[INT] * 8)
        self._value = launcher.bind("rwkv_sparse_value", *[POINTER] * 3, *[INT] * 4)
        self._wkv = launcher.bind("rwkv_wkv_pairs", *[POINTER] * 17, *[INT] * 7)
        self._last_norm = launcher.bind("rwkv_last_norm", *[POINTER] * 8, *[INT] * 3)

    def normed_inputs(self, norm: Norm, weight: Tensor, lora: Lora, rkv: Tensor, hidden: Tensor, *, stages: int) -> None:
        """`Mix.add_norm_mix_decode` and `Linear.project` in one launch: rkv [3, N, C], hidden [N, R].

        weight  [3, C, C]
        stages  of 16 KiB of weights on the way at once, at most
        """
        n, c = norm.x.shape
        device = self.launcher.device
        norm.check(device, 6)
        check("weight", weight, device, HALF, (3, c, c))
        check("rkv", rkv, device, HALF, (3, n, c))
        check("hidden", hidden, device, HALF, (n, lora.rank))
        pointers = (*norm.pointers, *map(pointer, (weight, lora.down, rkv, hidden)))
        self.launcher.launch(self._inputs, *pointers, n, c, *lora.ranks, stages, 1)

    def normed_product(
        self,
        norm: Norm,
        weight: Tensor,
        out: Tensor,
        *,
        relu_square: bool,
        active_mask: Tensor | None = None,
        stages: int,
    ) -> None:
        """The same with one product: out [N, M], weight [M, C], M a multiple of 8. active_mask: see `Gemm.gemm`."""
        n, c = norm.x.shape
        m, device = len(weight), self.launcher.device
        norm.check(device, 1)
        self._check_product(weight, out, active_mask, (n, m, c))
        pointers = (*norm.pointers, *map(pointer, (weight, out, active_mask)))
        self.launcher.launch(self._product, *pointers, n, c, m, relu_square, stages, 1)

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        relu_square: bool = False,
        active_mask: Tensor | None = None,
        stages: int,
    ) -> None:
        """`Linear.gemv`: out [N, M] = x [N, K] weight [M, K]^T, K a multiple of 64, at most 4096."""
        (n, k), m = x.shape, len(weight)
        check("x", x, self.launcher.device, HALF, (n, k))
        self._check_product(weight, out, active_mask, (n, m, k))
        pointers = map(pointer, (x, weight, out, active_mask))
        self.launcher.launch(self._plain, *pointers, n, m, k, relu_square, stages, 1)

    def _check_product(self, weight: Tensor, out: Tensor, active_mask: Tensor | None, sizes: tuple[int, int, int]) -> None:
        n, m, k = sizes
        check("weight", weight, self.launcher.device, HALF, (m, k))
        check("out", out, self.launcher.device, HALF, (n, m))
        if active_mask is not None:
            check("active_mask", active_mask, self.launcher.device, torch.int32, (-(-m // 32),))

    def inputs(self, mixed: Tensor, weight: Tensor, lora: Lora, rkv: Tensor, hidden: Tensor, *, stages: int) -> None:
        """`Linear.project`: rkv [3, N, C] and hidden [N, R] of mixed [6, N, C], weight [3, C, C]."""
        n, c = mixed.shape[1:]
        device = self.launcher.device
        check("mixed", mixed, device, HALF, (6, n, c))
        check("weight", weight, device, HALF, (3, c, c))
        check("rkv", rkv, device, HALF, (3, n, c))
        check("hidden", hidden, device, HALF, (n, lora.rank))
        pointers = map(pointer, (mixed, weight, lora.down, rkv, hidden))
        self.launcher.launch(self._plain_inputs, *pointers, n, c, *lora.ranks, stages, 1)

    def sparse_value(self, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        """`Linear.sparse_ffn`: out [N, C] = hidden [N, F] weight [F, C], F a multiple of 32."""
        (n, f), c = hidden.shape, weight.shape[1]
        check("hidden", hidden, self.launcher.device, HALF, (n, f))
        check("weight", weight, self.launcher.device, HALF, (f, c))
        check("out", out, self.launcher.device, HALF, (n, c))
        self.launcher.launch(self._value, *map(pointer, (hidden, weight, out)), n, f, c, 1)

    def wkv(
        self,
        rkv: Tensor,
        hidden: Tensor,
        lora: Lora,
        v_first: Tensor,
        layer: WkvLayer,
        state: Tensor,
        slots: Tensor,
        out: Tensor,
    ) -> None:
        """`Linear.lora_up` and `Mix.wkv_decode` in one launch; v_first is written where `lora` has no v."""
        n, c = out.shape
        device = self.launcher.device
        check("rkv", rkv, device, HALF, (3, n, c))
        check("hidden", hidden, device, HALF, (n, lora.rank))
        check("v_first", v_first, device, HALF, (n, c))
        check("out", out, device, HALF, (n, c))
        check("slots", slots, device, torch.int64, (n,))
        check("state", state, device, HALF, (len(state), c // HEAD_SIZE, HEAD_SIZE, HEAD_SIZE))
        inputs = (*rkv.unbind(), hidden, lora.up, lora.w0, lora.a0, lora.v0, v_first, *vars(layer).values(), state, slots, out)
        sizes = (n, c // HEAD_SIZE, *lora.ranks, 1)
        self.launcher.launch(self._wkv, *map(pointer, inputs), *sizes)

    def last_norm(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, out: Tensor, carried: Carried) -> None:
        """`Mix.add_norm` of all rows; and `carried` goes to its slots."""
        n, c = x.shape
        device = self.launcher.device
        for name, tensor in (("y", y), ("out", out), ("carried.rows", carried.rows)):
            check(name, tensor, device, HALF, (n, c))
        check("x", x, device, torch.float32, (n, c))
        tensors = (x, y, weight, bias, out, carried.rows, carried.shift, carried.slots)
        self.launcher.launch(self._last_norm, *map(pointer, tensors), n, c, 1)
