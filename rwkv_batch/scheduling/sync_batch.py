"""The synchronous loop: the rows of a request start together where there is room, and nobody joins them."""

from collections.abc import Iterable

from rwkv_batch.request import Sequence
from rwkv_batch.scheduling.plan import Batch


class SyncBatch(Batch):
    """Rows that start in waves: as many as wait, at most `num_slots`. The next wave follows when all of one have ended.

    A wave that finds less room starts row by row, for rows do not depend on one another and would only wait beside free slots.
    """

    def __init__(self, sequences: Iterable[Sequence], num_slots: int):
        super().__init__(sequences)
        self._num_slots = num_slots
        self._num_left = 0  # rows of the present wave that have not started

    @property
    def ready(self) -> bool:
        """Whether a row of the present wave waits, or a wave and none runs."""
        return bool(self.waiting) and (self._num_left > 0 or not self.running)

    def start(self, room: int) -> list[Sequence]:
        """Start what is left of the wave if it fits, else one row."""
        if not self.running:
            self._num_left = min(len(self.waiting), self._num_slots)
        num_rows = self._num_left if self._num_left <= room else 1
        self._num_left -= num_rows
        return self._start(num_rows)
