"""The door between forward pass and draw through which a row learns which tokens it may sample: a grammar's, for example.

A step is submitted before the ids of the one before are read, so a masked row cannot run in every step: after each draw it sits
out until its next mask is known, while the others go on. Masks lie at fixed places on the device (`sampling.masks.SlotMasks`),
to which they are copied in front of the step, so that a captured one draws under them too.
"""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from rwkv_batch.request import Sequence


class TokenMask(Protocol):
    """What one row may sample. Called in the engine's thread and never waits; masks may be made in another.

    The first token's is ready before the row starts.
    """

    def ready(self) -> bool:
        """Return whether the next token's mask is known; not between `take` and `accept`."""

    def take(self) -> Tensor:
        """Return the columns of the logits that are allowed as words [ceil(U / 32)] int32 on the CPU. A draw follows.

        Column u is bit u % 32 of word u // 32 (`sampling.masks.pack`). Where none is allowed whose logit is not -inf, the draw
        gives no id: the row ends with an error.
        """

    def accept(self, id: int) -> None:
        """The id that was drawn."""


def take_masks(sequences: Iterable[Sequence]) -> dict[int, Tensor]:
    """Return the next masks of those that have one, by slot; a draw of all of them follows."""
    return {sequence.slot: sequence.mask.take() for sequence in sequences if sequence.mask is not None}
