"""The door between forward pass and draw through which a row learns which tokens it may sample: a grammar's, for example.

A step is submitted before the ids of the one before are read, so a masked row cannot run in every step: after each draw it sits
out until its next mask is known, while the others go on. Masks lie at fixed places on the device (`sampling.masks.SlotMasks`),
to which they are copied in front of the step, so that a captured one draws under them too.
"""

import time
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from rwkv_batch.request import Sequence

MOST_SHARE = 0.6  # of a step, in which the next one waits for masks; it is to be submitted before this one ends
SHARE_STEP = 0.01  # by which the share grows after a wait that was not too long
SHRINKING = 0.75  # what is left of it after one that was
LONG_STEP = 0.1  # seconds between two steps; what takes longer says nothing about the pace


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


class MaskPatience:
    """How long a step may wait for masks while the device is busy with the one before: a share of what such steps take.

    The share is found by trial, because what is left has to do for the host's part of a step, however small the model is.
    """

    def __init__(self) -> None:
        self._read_at = 0.0  # when a step was read last
        self._pace = 0.0  # seconds from one to the next
        self._share = MOST_SHARE

    def deadline(self) -> float:
        """Return when waiting ends, on the monotonic clock."""
        return self._read_at + self._share * self._pace

    def judge(self, *, was_long: bool) -> None:
        """A step was submitted after a wait; `was_long`: the device had come to the end of the one before by then."""
        self._share = self._share * SHRINKING if was_long else min(MOST_SHARE, self._share + SHARE_STEP)

    def note_step(self, *, is_typical: bool) -> None:
        """A step was read; `is_typical`: it is of the kind in which others wait for masks."""
        now = time.monotonic()
        if is_typical:
            self._pace += (min(now - self._read_at, LONG_STEP) - self._pace) / 8
        self._read_at = now
