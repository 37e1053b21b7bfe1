"""The decode step of an engine over several cards as CUDA graphs: one for each rank and size of batch, replayed together.

A rank's graph begins with the ids that rank 0 has sampled, and ends with its columns of the logits on their way to rank 0,
whose graph samples. The ranks wait for each other on the device, so a thread that replays all graphs in turn is enough.
"""

import bisect
import logging
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from rwkv_batch.engine.decode_graphs import buckets_for
from rwkv_batch.engine.staging import Staging
from rwkv_batch.kernels.tensor_parallel.exchange import KernelExchange
from rwkv_batch.model.packed_rows import CapturedRows
from rwkv_batch.model.state import State
from rwkv_batch.model.tensor_parallel.forward import Rank, ShardedModel
from rwkv_batch.model.tensor_parallel.on_device import current
from rwkv_batch.model.tensor_parallel.state import ShardedState
from sampling.base import GraphSampler, Sampled

log = logging.getLogger("rwkv_batch.engine")


class RankGraphs:
    """The captured decode steps of one rank. `number`: of the rank."""

    def __init__(self, rank: Rank, number: int, exchange: KernelExchange, state: State, largest: int):
        self.rank, self.number, self.exchange, self.state = rank, number, exchange, state
        self.device = rank.device
        with current(self.device):
            self.slots = torch.full((largest,), -1, dtype=torch.int64, device=self.device)
            self.stream = torch.cuda.Stream(self.device)
            self.staging = Staging(largest, self.device)
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def launch(self, size: int) -> Tensor:
        """Start a whole step of this rank, and return rank 0's logits [size, U]; the rank's device is the current one."""
        slots, number = self.slots[:size], self.number
        tokens = self.exchange.begin_one(number, slots, self.state.last_ids)
        steps = self.rank.steps(tokens, CapturedRows.decode(slots), self.state, None)
        for _ in range(self.rank.num_sums):
            self.exchange.add_one(number, next(steps))
        return self.exchange.join_one(number, next(steps))

    def steps(self, size: int) -> Iterator[Tensor]:
        """Yield where `launch` would need other ranks; last the logits."""
        slots = self.slots[:size]
        tokens = self.exchange.begin_one(self.number, slots, self.state.last_ids)
        yield from self.rank.steps(tokens, CapturedRows.decode(slots), self.state, None)


class ShardedDecodeGraphs:
    """Captured decode steps over several cards, with the face of `DecodeGraphs`."""

    def __init__(
        self,
        model: ShardedModel,
        exchange: KernelExchange,
        sampler: GraphSampler,
        state: ShardedState,
        sizes: list[int] | None = None,
    ):
        self.sampler = sampler
        self.state = state
        self.exchange = exchange
        self.sizes = sizes or buckets_for(state.num_slots)
        self.num_replays = 0
        largest, device = self.sizes[-1], model.weights.device
        self._ranks = [
            RankGraphs(rank, number, exchange, own, largest)
            for number, (rank, own) in enumerate(zip(model.ranks, state.ranks, strict=True))
        ]
        self._drawn_slots = torch.full((largest,), -1, dtype=torch.int64, device=device)
        self._drawn_staging = Staging(largest, device)
        self._ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._finite = torch.zeros(largest, dtype=torch.bool, device=device)
        self._current: list[int] = []  # what the ranks' slots hold
        self._current_drawn: list[int] = []
        self._logits: dict[int, Tensor] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, the largest first; each runs once before, since a kernel's first launch may wait for a card."""
        started = time.monotonic()
        for size in reversed(self.sizes):
            self._run_together(size)
            for rank in self._ranks:
                with current(rank.device):
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=rank.pool, stream=rank.stream):
                        logits = rank.launch(size)
                        if rank.number == 0:
                            self._sample(logits, size)
                            self._logits[size] = logits
                    rank.graphs[size] = graph
        seconds = time.monotonic() - started
        text = "captured %d decode graphs on %d cards, up to %d rows, in %.1f s"
        log.info(text, len(self.sizes), len(self._ranks), self.sizes[-1], seconds)

    def _run_together(self, size: int) -> None:
        """Run a step of all ranks kernel by kernel, in step, and wait for it."""
        running = [rank.steps(size) for rank in self._ranks]

        def parts() -> list[Tensor]:
            found = []
            for rank, steps in zip(self._ranks, running, strict=True):
                with current(rank.device):
                    found.append(next(steps))
            return found

        for _ in range(self.exchange.num_sums):
            self.exchange.add(parts())
        logits = self.exchange.join(parts())
        with current(self._ranks[0].device):
            self._sample(logits, size)
        for rank in self._ranks:
            torch.cuda.synchronize(rank.device)

    def _sample(self, logits: Tensor, size: int) -> None:
        self.sampler.launch(logits, self._drawn_slots[:size], out_ids=self._ids[:size], out_finite=self._finite[:size])

    def replay(self, slots: list[int], num_sampled: int | None = None) -> tuple[Sampled, Tensor]:
        """See `DecodeGraphs.replay`; results are on rank 0's device."""
        num_rows = len(slots)
        num_sampled = num_rows if num_sampled is None else num_sampled
        size = self.sizes[bisect.bisect_left(self.sizes, num_rows)]
        drawn = slots[:num_sampled] + [-1] * (size - num_sampled)
        if drawn != self._current_drawn:
            self._drawn_staging.send(drawn, self._drawn_slots)
            self._current_drawn = drawn
        if slots != self._current:
            for rank in self._ranks:
                with current(rank.device):
                    rank.staging.send(slots + [-1] * (size - num_rows), rank.slots)  # a graph reads no further
            self._current = list(slots)
        for rank in self._ranks:
            with current(rank.device):
                rank.graphs[size].replay()
        self.state.advance(slots, [1] * num_rows)
        self.num_replays += 1
        return Sampled(self._ids[:num_sampled], self._finite[:num_sampled]), self._logits[size][:num_rows]
