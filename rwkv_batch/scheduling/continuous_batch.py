"""The continuous loop: each free slot takes the next waiting row."""

from rwkv_batch.request import Sequence
from rwkv_batch.scheduling.plan import Batch


class ContinuousBatch(Batch):
    """Rows that start one at a time, so that requests share the slots in turn."""

    @property
    def ready(self) -> bool:
        """Whether a row waits."""
        return bool(self.waiting)

    def start(self, room: int) -> list[Sequence]:
        """Start the next row."""
        return self._start(1)
