"""Sets of columns as bits: which tokens a row may sample, which have occurred in it.

Column u of U is bit u % 32 of word u // 32; words are int32, W = ceil(U / 32) of them. The bits behind the last column mean
nothing. Read as bytes, as kernels do, column u is bit u % 8 of byte u // 8.
"""

import torch
from torch import Tensor

WORD = 32


def num_words(num_columns: int) -> int:
    """Return W."""
    return -(-num_columns // WORD)


def pack(flags: Tensor) -> Tensor:
    """Return flags [..., U] bool as words [..., W] int32."""
    padded = torch.nn.functional.pad(flags.to(torch.int32), (0, -flags.shape[-1] % WORD))
    bits = padded.unflatten(-1, (-1, WORD)) << torch.arange(WORD, dtype=torch.int32, device=flags.device)
    return bits.sum(-1, dtype=torch.int32)  # the bits are distinct, so that no sum carries


def unpack(words: Tensor, num_columns: int) -> Tensor:
    """Return words [..., W] int32 as flags [..., U] bool."""
    shifts = torch.arange(WORD, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 1).flatten(-2)[..., :num_columns].bool()
