"""The decode step as CUDA graphs, one for each size of batch, with the sampling inside.

A graph replays launches on fixed addresses: slots are read from one device array, ids are left in another and, by slot, in
`State.last_ids`, where the next step finds them. Rows that fill a graph up have slot -1 and are passed over by every kernel.
"""

import bisect
import logging
import time

import torch
from torch import Tensor

from rwkv_batch.engine.staging import Staging
from rwkv_batch.model.packed_rows import CapturedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from sampling.base import GraphSampler, Sampled

log = logging.getLogger("rwkv_batch.engine")

SMALL = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
LARGE = (640, 768, 960, 1024)
STEP = 256  # between larger ones


def buckets_for(num_slots: int, num_spare: int = 0) -> list[int]:
    """Return the batch sizes to capture for up to `num_slots` rows, ascending; the last one takes them all.

    There is one for all but the `num_spare` spare slots, in which the batch of a single large request runs.
    """
    usual = num_slots - num_spare
    sizes = [size for size in (*SMALL, *LARGE, *range(LARGE[-1] + STEP, usual, STEP)) if size < usual]
    return sorted({*sizes, usual, num_slots})


class DecodeGraphs:
    """Captured decode steps of one model, sampler and state.

    Memory and time: all graphs share one pool; a graph takes about 0.1 s to capture.
    """

    def __init__(self, model: Model, sampler: GraphSampler, state: State, sizes: list[int] | None = None):
        self.model = model
        self.sampler = sampler
        self.state = state
        self.sizes = sizes or buckets_for(state.num_slots)
        device, largest = model.weights.device, self.sizes[-1]
        self.num_replays = 0
        self._slots = torch.full((largest,), -1, dtype=torch.int64, device=device)
        self._ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._finite = torch.zeros(largest, dtype=torch.bool, device=device)
        self._drawn_slots = self._slots.clone()  # the same, -1 for rows that do not sample
        self._staging, self._drawn_staging = Staging(largest, device), Staging(largest, device)
        self._current: list[int] = []  # what `_slots` holds
        self._current_drawn: list[int] = []
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, Tensor] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, the largest first, so that the smaller ones find their memory in the pool."""
        started = time.monotonic()
        stream = torch.cuda.Stream(self._slots.device)
        stream.wait_stream(torch.cuda.current_stream(self._slots.device))  # which may still be filling what a step reads
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            with torch.cuda.stream(stream):
                self._step(size)  # every kernel runs once before it is captured
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._logits[size] = self._step(size)
            self._graphs[size] = graph
        seconds = time.monotonic() - started
        log.info("captured %d decode graphs, up to %d rows, in %.1f s", len(self.sizes), self.sizes[-1], seconds)

    def _step(self, size: int) -> Tensor:
        slots = self._slots[:size]
        logits = self.model.forward(None, CapturedRows.decode(slots), self.state)
        self.sampler.launch(logits, self._drawn_slots[:size], out_ids=self._ids[:size], out_finite=self._finite[:size])
        return logits

    def replay(self, slots: list[int], num_sampled: int | None = None) -> tuple[Sampled, Tensor]:
        """Run one decode step of distinct `slots`, of which the first `num_sampled`, or all, sample; does not wait.

        Returns what they sampled and the logits [B, U], both on the device and overwritten by the next replay.
        """
        num_rows = len(slots)
        num_sampled = num_rows if num_sampled is None else num_sampled
        size = self.sizes[bisect.bisect_left(self.sizes, num_rows)]
        if slots != self._current:
            self._staging.send(slots + [-1] * (size - num_rows), self._slots)  # a graph reads no further
            self._current = list(slots)
        drawn = slots[:num_sampled] + [-1] * (size - num_sampled)
        if drawn != self._current_drawn:
            self._drawn_staging.send(drawn, self._drawn_slots)
            self._current_drawn = drawn
        self.state.advance(slots, [1] * num_rows, logged=self.state.logs(size))
        self._graphs[size].replay()
        self.num_replays += 1
        return Sampled(self._ids[:num_sampled], self._finite[:num_sampled]), self._logits[size][:num_rows]
