"""The synchronous loop: the rows of a request start together and nobody joins them."""

from collections.abc import Iterable

from rwkv_batch.plan import Batch
from rwkv_batch.request import Sequence


class SyncBatch(Batch):
    """Rows that start in waves: as many as wait, at most `num_slots`. The next wave follows when all of one have ended."""

    def __init__(self, sequences: Iterable[Sequence], num_slots: int):
        super().__init__(sequences)
        self._num_slots = num_slots

    @property
    def ready(self) -> bool:
        """Whether a wave waits and none runs."""
        return bool(self.waiting) and not self.running

    def start(self, num_free: int) -> list[Sequence]:
        """Start the next wave if `num_free` slots are enough for it, else nothing."""
        wave = min(len(self.waiting), self._num_slots)
        return self._start(wave) if wave <= num_free else []
