"""Sets of columns as bits: which tokens a row may sample, which have occurred in it.

Column u of U is bit u % 32 of word u // 32; words are int32, W = ceil(U / 32) of them. The bits behind the last column mean
nothing. Read as bytes, as kernels do, column u is bit u % 8 of byte u // 8.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

WORD = 32


def num_words(num_columns: int) -> int:
    """Return W."""
    return -(-num_columns // WORD)


def pack(flags: Tensor) -> Tensor:
    """Return flags [..., U] bool as words [..., W] int32."""
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -flags.shape[-1] % WORD)).unflatten(-1, (-1, 8))
    values = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=flags.device)
    return (padded * values).sum(-1, dtype=torch.uint8).view(torch.int32)  # all machines that run this are little-endian


def words_of(places: Iterable[int], num_places: int) -> Tensor:
    """Return the words [W] int32 in which these bits of `num_places` are set, without a look at the others."""
    data = bytearray(4 * num_words(num_places))
    for place in places:
        data[place // 8] |= 1 << place % 8
    return torch.frombuffer(data, dtype=torch.int32)


def unpack(words: Tensor, num_columns: int) -> Tensor:
    """Return words [..., W] int32 as flags [..., U] bool."""
    shifts = torch.arange(WORD, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 1).flatten(-2)[..., :num_columns].bool()


class SlotMasks:
    """Which columns the rows of slots may sample, on the device, where a captured graph reads them. S slots.

    A row whose mask allows no column, or only such whose logits are -inf, is not finite, as one that has nothing but -inf.

    lines   [S] int32: the line of `words` that holds a slot's mask; -1 = its row may sample every column
    words   [S, W] int32
    memory  [S + S * W] int32: both, so that one copy of its first places writes what a step needs
    masked  slots whose line is not -1, as the host knows it
    """

    def __init__(self, num_slots: int, num_columns: int, device: torch.device | str):
        width = num_words(num_columns)
        self.num_slots = num_slots
        self.memory = torch.full((num_slots * (1 + width),), -1, dtype=torch.int32, device=device)
        self.lines = self.memory[:num_slots]
        self.words = self.memory[num_slots:].view(num_slots, width)
        self.masked: frozenset[int] = frozenset()

    def put(self, masks: Mapping[int, Tensor], buffer: Tensor | None = None) -> None:
        """Mask these slots, and no others.

        Args:
            masks: words [W] int32 on the CPU, by slot
            buffer: host memory like `memory`, from which nothing else is copied before this copy is done; None = fresh memory
        """
        width = self.words.shape[1]
        length = self.num_slots + len(masks) * width
        host = torch.empty(length, dtype=torch.int32) if buffer is None else buffer[:length]
        host[: self.num_slots] = -1
        if masks:
            host[torch.tensor(list(masks))] = torch.arange(len(masks), dtype=torch.int32)
            torch.stack(list(masks.values()), out=host[self.num_slots :].view(len(masks), width))
        self.memory[:length].copy_(host, non_blocking=True)
        self.masked = frozenset(masks)

    def allowed(self, slots: Tensor, num_columns: int) -> Tensor:
        """Return which columns the rows of `slots` [B] may sample [B, U] bool; waits for nothing."""
        lines = self.lines.index_select(0, slots)
        flags = unpack(self.words.index_select(0, lines.clamp(min=0)), num_columns)
        return flags.logical_or_((lines < 0)[:, None])
