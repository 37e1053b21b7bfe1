"""Which sequences run next and with which ids. Plain Python: no torch, no model."""

import heapq
from dataclasses import dataclass, field

from rwkv_batch.request import Sequence


@dataclass(slots=True)
class Row:
    """One sequence's part of a step.

    ids     tokens to feed, or empty: feed the id sampled for this slot in the step before, which the host may not know yet
    sample  whether the logits after the last fed token are sampled
    start   whether this is the sequence's first row: the slot's state is overwritten and its controls are set
    """

    sequence: Sequence
    ids: list[int]
    sample: bool
    start: bool = False


@dataclass(slots=True)
class Plan:
    """The rows of one step; slots are distinct."""

    rows: list[Row] = field(default_factory=list)


class FreeSlots:
    """The slots nobody owns; the lowest free ones are taken first, so that live rows stay close together."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._heap = list(range(num_slots))

    def __len__(self) -> int:
        return len(self._heap)

    def take(self) -> int:
        """Return the lowest free slot; IndexError when there is none."""
        return heapq.heappop(self._heap)

    def give(self, slot: int) -> None:
        """Take a slot back."""
        heapq.heappush(self._heap, slot)
