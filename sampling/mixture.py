"""Mixed logits: several states' opinions of the next token, weighed, before one of them is drawn (MRSS, multi recurrent state
sampling; OpenMOSE, RWKV-Infer, 2024).

With z_j the logits of state j and g_j its weight, the token is drawn from softmax(sum_j g_j z_j / sum_j g_j). What penalties
take from a logit is the same in all states, so it may be taken from the mixture once.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Mixture(NamedTuple):
    """Whose logits are mixed for each of B rows, K at most.

    slots    [B, K] int64; a row that mixes fewer has its first slot again, with weight 0
    weights  [B, K] fp32; the sum of each row is 1
    """

    slots: Tensor
    weights: Tensor


def mix_logits(logits: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Return [B, U], in the dtype of `logits` [S, U]: row b is the sum of weights[b, j] times the logits of slots[b, j].

    Sums are in fp32. What has weight 0 does not count, whatever it is. Nothing is waited for, so a CUDA graph can capture it.
    """
    mixed = torch.zeros(len(slots), logits.shape[1], dtype=torch.float32, device=logits.device)
    for column, weight in zip(slots.unbind(1), weights.unsqueeze(2).unbind(1), strict=True):
        part = logits.index_select(0, column).float()
        mixed += torch.where(weight != 0, part * weight, 0.0)
    return mixed.to(logits.dtype)
