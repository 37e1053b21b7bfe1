"""The door between forward pass and draw through which a row learns which tokens it may sample: a grammar's, for example.

A step is submitted before the ids of the one before are read, so a masked row cannot run in every step: after each draw it sits
out until its next mask is known, while the others go on. Such a step is launched kernel by kernel where others are replayed
from a graph, in which the draw follows the forward pass at once.
"""

from collections.abc import Sequence as Ordered
from typing import Protocol

import torch
from torch import Tensor

from rwkv_batch.request import Sequence
from sampling.masks import unpack


class TokenMask(Protocol):
    """What one row may sample. Called in the engine's thread and never waits; masks may be made in another.

    The first token's is ready before the row starts.
    """

    def ready(self) -> bool:
        """Return whether the next token's mask is known; not between `take` and `accept`."""

    def take(self) -> Tensor:
        """Return the columns of the logits that are allowed as words [ceil(U / 32)] int32 on the CPU. A draw follows.

        Column u is bit u % 32 of word u // 32 (`sampling.masks.pack`). The words are not changed before the next `take`.
        """

    def accept(self, id: int) -> None:
        """The id that was drawn."""


def mask_logits(logits: Tensor, sequences: Ordered[Sequence]) -> None:
    """Set what a row may not sample to -inf; logits [B, U] of the sequences [B], of which some have masks."""
    places = [place for place, sequence in enumerate(sequences) if sequence.mask is not None]
    words = torch.stack([sequences[place].mask.take() for place in places]).to(logits.device, non_blocking=True)
    for row, columns in zip(places, unpack(words, logits.shape[1]), strict=True):
        logits[row].masked_fill_(~columns, -torch.inf)
