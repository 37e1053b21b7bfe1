"""The memory that kernel ops work in: made once for the largest step, so that a CUDA graph may capture its addresses."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rwkv_batch.kernels.layer_kernels import OUTPUT_UNIT
from rwkv_batch.kernels.linear import MASK_UNITS, padded_rank
from rwkv_batch.model.weights import ModelShape

HALF = torch.float16
MAX_VIEWS = 64  # kept; views are cheap to make and need not be kept for every length of prefill
SINGLE = ("x", "w_raw")  # in fp32


@dataclass
class Activations:
    """Room for a step of N tokens; fp16 [N, C] but where said."""

    x: Tensor  # fp32, the residual stream
    mixed: Tensor  # [6, N, C]
    rkv: Tensor  # [3, N, C]
    normed: Tensor
    w_raw: Tensor  # fp32, of the decay, before the sigmoid
    a: Tensor
    v_mix: Tensor
    g: Tensor
    v_first: Tensor
    heads: Tensor
    y: Tensor
    hidden: Tensor  # [N, F]

    @classmethod
    def dims(cls, num_tokens: int, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """Return each tensor's dimensions."""
        plane = (num_tokens, shape.width)
        own = {"mixed": (6, *plane), "rkv": (3, *plane), "hidden": (num_tokens, shape.ffn_width)}
        return {item.name: own.get(item.name, plane) for item in fields(cls)}

    @classmethod
    def of(cls, num_tokens: int, shape: ModelShape, device: torch.device) -> "Activations":
        """Allocate them."""
        dims = cls.dims(num_tokens, shape).items()
        return cls(**{name: torch.empty(size, dtype=_dtype(name), device=device) for name, size in dims})

    def first(self, num_tokens: int) -> "Activations":
        """Return contiguous views for fewer tokens of the same memory."""
        return Activations(**{name: _shrink(tensor, num_tokens) for name, tensor in vars(self).items()})


class Buffers:
    """Everything that kernel ops write to, for steps of `max_tokens` that ask for the logits of `max_rows`.

    last         [max_rows, C]: the inputs of the head
    logits       [max_rows, U], U a multiple of OUTPUT_UNIT
    active_mask  bits of the feed-forward units that are not zero in every token
    """

    def __init__(self, shape: ModelShape, num_outputs: int, *, max_tokens: int, max_rows: int, device: torch.device):
        self.all = Activations.of(max_tokens, shape, device)
        self._lora = torch.empty(max_tokens * shape_rank(shape), dtype=HALF, device=device)
        self.last = torch.empty(max_rows, shape.width, dtype=HALF, device=device)
        self.logits = torch.empty(max_rows, _whole(num_outputs), dtype=HALF, device=device)
        self.active_mask = torch.empty(-(-shape.ffn_width // MASK_UNITS), dtype=torch.int32, device=device)
        self._views: dict[int, Activations] = {}

    @classmethod
    def num_bytes(cls, shape: ModelShape, *, max_tokens: int, max_rows: int) -> int:
        """Bytes of all of them, where every id of the vocabulary has a logit."""
        tokens = sum(torch.Size(size).numel() * _dtype(name).itemsize for name, size in Activations.dims(1, shape).items())
        tokens += shape_rank(shape) * HALF.itemsize
        rows = (shape.width + _whole(shape.vocab_size)) * HALF.itemsize
        return max_tokens * tokens + max_rows * rows + -(-shape.ffn_width // MASK_UNITS) * torch.int32.itemsize

    def activations(self, num_tokens: int) -> Activations:
        """Return the room for a step of so many tokens."""
        if num_tokens not in self._views:
            if len(self._views) > MAX_VIEWS:
                self._views.clear()
            self._views[num_tokens] = self.all.first(num_tokens)
        return self._views[num_tokens]

    def lora_hidden(self, num_tokens: int, rank: int) -> Tensor:
        """Return the room between the two halves of the low-rank pairs [N, R]."""
        return self._lora[: num_tokens * rank].view(num_tokens, rank)


def shape_rank(shape: ModelShape) -> int:
    """Return R, the ranks of a layer's low-rank pairs together, padded; of one that has them all."""
    return sum(map(padded_rank, (shape.rank_w, shape.rank_a, shape.rank_v, shape.rank_g)))


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if name in SINGLE else HALF


def _whole(num_outputs: int) -> int:
    return -(-num_outputs // OUTPUT_UNIT) * OUTPUT_UNIT


def _shrink(tensor: Tensor, n: int) -> Tensor:
    """Return the first part of [.., max, C] as a contiguous [.., n, C]."""
    dims = (*tensor.shape[:-2], n, tensor.shape[-1])
    return tensor.view(-1)[: torch.Size(dims).numel()].view(dims)
