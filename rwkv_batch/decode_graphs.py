"""The decode step as CUDA graphs, one for each size of batch, with the sampling inside.

A graph replays launches on fixed addresses: slots are read from one device array, ids are left in another and, by slot, in
`State.last_ids`, where the next step finds them. Rows that fill a graph up have slot -1 and are passed over by every kernel.
"""

import bisect
import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rwkv_batch.kernel_ops import KernelOps
from rwkv_batch.launch import fastest_replay
from rwkv_batch.model import Model
from rwkv_batch.reference import Rows
from rwkv_batch.state import State
from sampling.base import Sampled
from sampling.rapid import RapidSampler

log = logging.getLogger("rwkv_batch.engine")

SMALL = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
LARGE = (640, 768, 960, 1024)
STEP = 256  # between larger ones
STAGES = 4  # slot lists that may be on their way to the device
HALVED_FROM = 448  # rows from which it is tried whether two halves side by side are faster
TIMINGS = 5  # replays of each, of which the best counts


def buckets_for(num_slots: int) -> list[int]:
    """Return the batch sizes to capture for up to `num_slots` rows, ascending; the last one takes them all."""
    sizes = [size for size in (*SMALL, *LARGE, *range(LARGE[-1] + STEP, num_slots, STEP)) if size < num_slots]
    return [*sizes, num_slots]


def halves_of(sizes: list[int]) -> list[int]:
    """Return the sizes of half batches that large ones may be cut into."""
    return sorted({size // 2 for size in sizes if size >= HALVED_FROM and size % 2 == 0} - set(sizes))


class DecodeGraphs:
    """Captured decode steps of one model, sampler and state.

    twin  ops whose steps may run beside those of `model`: then a large batch may be cut into two halves on two streams, so that
          the one's recurrence, which waits for memory, runs beside the other's products, which do not
    Memory and time: all graphs share one pool; a graph takes about 0.1 s to capture.
    """

    def __init__(
        self, model: Model, sampler: RapidSampler, state: State, sizes: list[int] | None = None, twin: KernelOps | None = None
    ):
        self.model = model
        self._second = None if twin is None else Model(model.weights, twin)
        self._side = torch.cuda.Stream(model.weights.device)
        self.sampler = sampler
        self.state = state
        self.sizes = sizes or buckets_for(state.num_slots)
        device, largest = model.weights.device, self.sizes[-1]
        self.num_replays = 0
        self.halved: list[int] = []  # sizes that run as two halves
        self._slots = torch.full((largest,), -1, dtype=torch.int64, device=device)
        self._ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._finite = torch.zeros(largest, dtype=torch.bool, device=device)
        self._staging = torch.empty(STAGES, largest, dtype=torch.int64, pin_memory=True)
        self._stage = 0
        self._current: list[int] = []  # what `_slots` holds
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, Tensor] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, the largest first, so that the smaller ones find their memory in the pool."""
        started = time.monotonic()
        stream = torch.cuda.Stream(self._slots.device)
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            self._graphs[size], self._logits[size] = self._capture(self._whole, size, stream, pool)
            if self._second is not None and size >= HALVED_FROM and size % 2 == 0:
                halves, logits = self._capture(self._halves, size, stream, pool)
                if self._time(halves, size) < self._time(self._graphs[size], size):
                    self._graphs[size], self._logits[size] = halves, logits
                    self.halved.append(size)
        seconds = time.monotonic() - started
        log.info("captured %d decode graphs, up to %d rows, in %.1f s", len(self.sizes), self.sizes[-1], seconds)
        if self.halved:
            log.info("batches of %s rows run as two halves", ", ".join(map(str, sorted(self.halved))))

    def _capture(self, step: Callable[[int], Tensor], size: int, stream: torch.cuda.Stream, pool: tuple):
        """Return the graph of one step and its logits."""
        with torch.cuda.stream(stream):
            step(size)  # every kernel runs once before it is captured
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            logits = step(size)
        return graph, logits

    def _whole(self, size: int) -> Tensor:
        return self._forward_and_sample(self.model, 0, size)

    def _halves(self, size: int) -> Tensor:
        half, main = size // 2, torch.cuda.current_stream(self._slots.device)
        self._second.ops.put_logits_behind(self.model.ops, half)
        self._side.wait_stream(main)
        first = self._forward_and_sample(self.model, 0, half)
        with torch.cuda.stream(self._side):
            self._forward_and_sample(self._second, half, size)
        main.wait_stream(self._side)
        return first.as_strided((size, first.shape[1]), first.stride())

    def _forward_and_sample(self, model: Model, start: int, end: int) -> Tensor:
        slots = self._slots[start:end]
        logits = model.forward(None, Rows.decoding(slots), self.state)
        self.sampler.launch(logits, slots, out_ids=self._ids[start:end], out_finite=self._finite[start:end])
        return logits

    def _time(self, graph: torch.cuda.CUDAGraph, size: int) -> float:
        """Return the milliseconds of a replay with every row in use; the slots hold garbage afterwards, as free ones may."""
        self._slots[:size] = torch.arange(size, device=self._slots.device)
        milliseconds = fastest_replay(graph, TIMINGS)
        self._slots.fill_(-1)
        return milliseconds

    def replay(self, slots: list[int]) -> tuple[Sampled, Tensor]:
        """Run one decode step of distinct `slots`; returns at once.

        Returns what is sampled and the logits [B, U], both on the device and overwritten by the next replay.
        """
        num_rows = len(slots)
        size = self.sizes[bisect.bisect_left(self.sizes, num_rows)]
        if slots != self._current:
            self._send(slots)
        self._graphs[size].replay()
        self.state.advance(slots, [1] * num_rows)
        self.num_replays += 1
        return Sampled(self._ids[:num_rows], self._finite[:num_rows]), self._logits[size][:num_rows]

    def _send(self, slots: list[int]) -> None:
        """Put a slot list on the device. The pinned buffers take turns: a copy may be on its way while the next is written."""
        stage = self._staging[self._stage]
        self._stage = (self._stage + 1) % STAGES
        stage.fill_(-1)
        stage[: len(slots)] = torch.tensor(slots)
        self._slots.copy_(stage, non_blocking=True)
        self._current = list(slots)
