"""Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011), in torch int64, so that the same lines run on every device. It knows nothing of rows, slots or logits.

A kernel reproduces these numbers bit for bit: only integer arithmetic is used, and `uniform` is exact in float32.
"""

import functools

import torch
from torch import Tensor

MASK = 0xFFFFFFFF  # the low 32 bits; words are kept in int64, which has room for the 64-bit products


@functools.cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Multipliers [2, 1], key increments [10, 2, 1], mask and shift, as tensors: scalars are wrapped anew in every op."""
    multipliers = torch.tensor([[0xD2511F53], [0xCD9E8D57]], device=device)
    weyl = torch.tensor([[0x9E3779B9], [0xBB67AE85]], device=device)
    rounds = torch.arange(10, device=device).view(10, 1, 1)
    return multipliers, rounds * weyl, torch.tensor(MASK, device=device), torch.tensor(32, device=device)


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Return the four output words of each counter.

    Args:
        counter: [4, n] int64, words c0..c3, each below 2^32
        key: [2, n] int64, words k0 and k1, each below 2^32
    Returns:
        [4, n] int64, each below 2^32
    """
    multipliers, increments, mask, shift = _constants(counter.device)
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2, words 1 and 3
    for round_key in (key + increments).unbind(0):
        # int64 products wrap, which keeps all 64 bits; `odd` carries unmasked high bits that the mask below drops
        product = (even * multipliers).flip(0)
        even = (product >> shift).bitwise_xor_(odd).bitwise_xor_(round_key).bitwise_and_(mask)
        odd = product
    return torch.stack((even, odd & mask), 1).flatten(0, 1)


def uniform(words: Tensor) -> Tensor:
    """Return float32 numbers in the open interval (0, 1), one for each 32-bit word.

    The 23 high bits x give (2x + 1) * 2^-24: an odd multiple of 2^-24 below 1, which float32 holds exactly.
    """
    return ((words >> 9) * 2 + 1).float() * 2.0**-24
