"""Matrix products through torch, in the places of `MatMul` and `Linear`; graph-capturable, since nothing is waited for.

Operands and results are fp16 unless said otherwise. Products are rounded to fp16 before what is done to them, as in
`model/reference_ops.py`.
"""

import torch
from torch import Tensor

from rwkv_batch.kernels.launch import check
from rwkv_batch.kernels.linear import Lora
from rwkv_batch.model.reference_ops import LARGEST_HALF

HALF = torch.float16
PLANES = (3, 4, 2, 5)  # of `mixed`, where the inputs of w, a, v and g are


class TorchMatMul:
    """In the place of `MatMul`."""

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor, *, in_out: bool = False) -> None:
        """out [N, M] = x [N, K] times weight [M, K] transposed, or with a leading dimension as many; `in_out`: it is [K, M]."""
        torch.matmul(x, weight if in_out else weight.transpose(-1, -2), out=out)


class TorchLinear:
    """In the place of `Linear`, as far as nothing but such products is chosen."""

    def __init__(self, device: torch.device):
        self.device = device

    def lora_down(self, mixed: Tensor, lora: Lora, hidden: Tensor) -> None:
        """hidden [N, R] = tanh(x_w w1), x_a a1, x_v v1, sigmoid(x_g g1) side by side, of mixed [6, N, C]."""
        n = mixed.shape[1]
        self._check("mixed", mixed, (6, n, lora.width))
        self._check("hidden", hidden, (n, lora.rank))
        for plane, first, last in zip(PLANES, *_spans(lora), strict=True):
            if last > first:
                torch.mm(mixed[plane], lora.down[first:last].t(), out=hidden[:, first:last])
        (_, _, _, g), (w, _, _, end) = _spans(lora)
        hidden[:, :w].tanh_()
        hidden[:, g:end].sigmoid_()

    def lora_up(
        self, hidden: Tensor, lora: Lora, w_raw: Tensor, a: Tensor, v_mix: Tensor | None, g: Tensor, *, beside: bool = False
    ) -> None:
        """From hidden [N, R], all [N, C]: w_raw fp32, a, v_mix but in layer 0, and g; see `Linear.lora_up`."""
        n = hidden.shape[0]
        self._check("hidden", hidden, (n, lora.rank))
        self._check("w_raw", w_raw, (n, lora.width), torch.float32)
        by_w, by_a, by_v, by_g = (
            hidden[:, first:last] @ lora.up[first * lora.width : last * lora.width].view(lora.width, -1).t()
            if last > first
            else None
            for first, last in zip(*_spans(lora), strict=True)
        )
        torch.add(by_w, lora.w0, out=w_raw)
        a.copy_((by_a + lora.a0).sigmoid_())
        if lora.v0 is not None:
            v_mix.copy_((by_v + lora.v0).sigmoid_())
        g.copy_(by_g)

    def relu_square_(self, hidden: Tensor) -> None:
        """hidden [N, F] = min(max(hidden, 0)^2, 65504) in place."""
        hidden.relu_().square_().clamp_(max=LARGEST_HALF)

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = HALF) -> None:
        check(name, tensor, self.device, dtype, shape)


def _spans(lora: Lora) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where w, a, v and g begin and end among the R ranks."""
    lasts = tuple(sum(lora.ranks[: i + 1]) for i in range(4))
    return (0, *lasts[:3]), lasts
