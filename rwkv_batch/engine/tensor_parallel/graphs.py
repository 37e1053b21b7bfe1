"""The steps of an engine over several cards as CUDA graphs: one for each rank and size of step, replayed together.

The ranks wait for each other on the device, so a thread that replays all graphs in turn is enough. Rank 0's graph ends with the
logits of all, and samples. A decode step begins with the ids that rank 0 sampled last; a prefill step is fed from the host.
"""

import bisect
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.engine.decode_graphs import buckets_for
from rwkv_batch.engine.prefill_graphs import TOKENS, inputs_length, rows_of_graphs, step_inputs, step_rows
from rwkv_batch.engine.staging import Staging
from rwkv_batch.kernels.tensor_parallel.exchange import KernelExchange
from rwkv_batch.model.packed_rows import CapturedRows
from rwkv_batch.model.tensor_parallel.forward import ShardedModel
from rwkv_batch.model.tensor_parallel.on_device import current
from rwkv_batch.model.tensor_parallel.state import ShardedState
from sampling.base import GraphSampler, Sampled

log = logging.getLogger("rwkv_batch.engine")

LONG_TOKENS = (640, 768, 896, 1024)  # of prefills beyond TOKENS: launching takes as many times as long as there are ranks


class Inputs:
    """An array at a fixed place on each rank's device, which its captured steps read."""

    def __init__(self, devices: Sequence[torch.device], length: int, value: int):
        self._devices = list(devices)
        self.of, self._staging = [], []
        for device in self._devices:
            with current(device):
                self.of.append(torch.full((length,), value, dtype=torch.int64, device=device))
                self._staging.append(Staging(length, device))

    def send(self, values: Sequence[int]) -> None:
        """Begin to copy values to the first places on all devices."""
        for device, target, staging in zip(self._devices, self.of, self._staging, strict=True):
            with current(device):
                staging.send(values, target)


class RankGraphs:
    """Captured steps of all ranks, by size of step.

    finish  what is done with rank 0's logits in a step of that size
    """

    def __init__(self, model: ShardedModel, exchange: KernelExchange, finish: Callable[[Tensor, Any], None]):
        self.model = model
        self.exchange = exchange
        self.devices = [rank.device for rank in model.ranks]
        self._finish = finish
        self._streams, self._graphs = [], [{} for _ in self.devices]
        for device in self.devices:
            with current(device):
                self._streams.append(torch.cuda.Stream(device))
        self._pools = [torch.cuda.graph_pool_handle() for _ in self.devices]

    def capture(self, size: Hashable, steps: Callable[[int], Iterator[Tensor]]) -> None:
        """Capture a step of every rank, which runs once before: a kernel's first launch may wait for a card.

        steps  number of a rank -> its step as `Rank.steps` yields it, begun with `KernelExchange.begin_one`
        """
        logits = self.model.drive([steps(number) for number in range(len(self.devices))])
        with current(self.devices[0]):
            self._finish(logits, size)
        for device in self.devices:
            torch.cuda.synchronize(device)
        for number, (device, stream, pool) in enumerate(zip(self.devices, self._streams, self._pools, strict=True)):
            with current(device):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    self._step_alone(number, size, steps(number))
            self._graphs[number][size] = graph

    def _step_alone(self, number: int, size: Hashable, steps: Iterator[Tensor]) -> None:
        for _ in range(self.exchange.num_sums):
            self.exchange.add_one(number, next(steps))
        logits = self.exchange.join_one(number, next(steps))
        if number == 0:
            self._finish(logits, size)

    def replay(self, size: Hashable) -> None:
        """Replay the step of every rank."""
        for device, graphs in zip(self.devices, self._graphs, strict=True):
            with current(device):
                graphs[size].replay()


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
        self._graphs = RankGraphs(model, exchange, self._sample)
        largest, device = self.sizes[-1], model.weights.device
        self._slots = Inputs(self._graphs.devices, largest, -1)
        self._drawn_slots = Inputs([device], largest, -1)  # the same, -1 for rows that do not sample
        self._ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._finite = torch.zeros(largest, dtype=torch.bool, device=device)
        self._current: list[int] = []  # what the ranks' slots hold
        self._current_drawn: list[int] = []
        self._logits: dict[int, Tensor] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, the largest first, so that the smaller ones find their memory in the pool."""
        started = time.monotonic()
        for size in reversed(self.sizes):
            self._graphs.capture(size, lambda number, size=size: self._steps(number, size))
        counts = len(self.sizes), len(self._graphs.devices), self.sizes[-1]
        log.info("captured %d decode graphs on %d cards, up to %d rows, in %.1f s", *counts, time.monotonic() - started)

    def _steps(self, number: int, size: int) -> Iterator[Tensor]:
        slots, state = self._slots.of[number][:size], self.state.ranks[number]
        tokens = self.exchange.begin_one(number, slots, state.last_ids)
        yield from self._graphs.model.ranks[number].steps(tokens, CapturedRows.decode(slots), state, None)

    def _sample(self, logits: Tensor, size: int) -> None:
        self._logits[size] = logits
        out = {"out_ids": self._ids[:size], "out_finite": self._finite[:size]}
        self.sampler.launch(logits, self._drawn_slots.of[0][:size], **out)

    def replay(self, slots: list[int], num_sampled: int | None = None) -> tuple[Sampled, Tensor]:
        """See `DecodeGraphs.replay`; results are on rank 0's device."""
        num_rows = len(slots)
        num_sampled = num_rows if num_sampled is None else num_sampled
        size = self.sizes[bisect.bisect_left(self.sizes, num_rows)]
        if slots != self._current:
            self._slots.send(slots + [-1] * (size - num_rows))  # a graph reads no further
            self._current = list(slots)
        drawn = slots[:num_sampled] + [-1] * (size - num_sampled)
        if drawn != self._current_drawn:
            self._drawn_slots.send(drawn)
            self._current_drawn = drawn
        self.state.advance(slots, [1] * num_rows, logged=self.state.logs(size))
        self._graphs.replay(size)
        self.num_replays += 1
        return Sampled(self._ids[:num_sampled], self._finite[:num_sampled]), self._logits[size][:num_rows]


class ShardedPrefillGraphs:
    """Captured prefill steps over several cards, with the face of `PrefillGraphs`."""

    def __init__(
        self,
        model: ShardedModel,
        exchange: KernelExchange,
        sampler: GraphSampler,
        state: ShardedState,
        *,
        max_tokens: int,
    ):
        self.sampler = sampler
        self.state = state
        self.exchange = exchange
        self.sizes = prefill_sizes(max_tokens)
        self.times: dict[int, float] = {}  # not measured
        self.rows = rows_of_graphs(state.num_slots)
        self.num_replays = 0
        self._graphs = RankGraphs(model, exchange, self._sample)
        device, longest = model.weights.device, inputs_length(max(self.sizes, default=0), self.rows[-1])
        self._inputs = Inputs(self._graphs.devices, longest, 0)
        self._ids = torch.zeros(self.rows[-1], dtype=torch.int64, device=device)
        self._finite = torch.zeros(self.rows[-1], dtype=torch.bool, device=device)
        self._logits: dict[tuple[int, int], Tensor] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, the largest first. Slot 0 is fed what means nothing."""
        started = time.monotonic()
        for size in reversed(self.sizes):
            for rows in reversed(self.rows):
                self._inputs.send(step_inputs([0], [[0] * size], 0, size, rows, inputs_length(size, rows)))
                self._graphs.capture((size, rows), lambda number, key=(size, rows): self._steps(number, key))
        counts = len(self._logits), len(self._graphs.devices), max(self.sizes, default=0)
        log.info("captured %d prefill graphs on %d cards, up to %d tokens, in %.1f s", *counts, time.monotonic() - started)

    def _steps(self, number: int, size: tuple[int, int]) -> Iterator[Tensor]:
        tokens, rows, _ = step_rows(self._inputs.of[number], *size)
        self.exchange.begin_one(number)
        yield from self._graphs.model.ranks[number].steps(tokens, rows, self.state.ranks[number], None)

    def _sample(self, logits: Tensor, size: tuple[int, int]) -> None:
        self._logits[size] = logits
        num_tokens, num_rows = size
        sampled = self._inputs.of[0][num_tokens + num_rows :][:num_rows]
        out = {"out_ids": self._ids[:num_rows], "out_finite": self._finite[:num_rows]}
        self.sampler.launch(logits, sampled, **out)

    def fits(self, num_tokens: int, num_rows: int) -> bool:
        """Whether there are graphs for so much."""
        return bool(self.sizes) and num_tokens <= self.sizes[-1] and num_rows <= self.rows[-1]

    def replay(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], num_sampled: int) -> tuple[Sampled, Tensor]:
        """See `PrefillGraphs.replay`; results are on rank 0's device."""
        lengths = [len(prompt) for prompt in prompts]
        num_tokens = self.sizes[bisect.bisect_left(self.sizes, sum(lengths))]
        num_rows = self.rows[bisect.bisect_left(self.rows, len(slots))]
        length = inputs_length(num_tokens, num_rows)
        self._inputs.send(step_inputs(slots, prompts, num_sampled, num_tokens, num_rows, length))
        self.state.advance(slots, lengths)
        self._graphs.replay((num_tokens, num_rows))
        self.num_replays += 1
        logits = self._logits[num_tokens, num_rows]
        return Sampled(self._ids[:num_sampled], self._finite[:num_sampled]), logits[:num_sampled]


def prefill_sizes(max_tokens: int) -> list[int]:
    """Return the numbers of tokens to capture for prefills of up to `max_tokens`, ascending."""
    return [size for size in (*TOKENS, *LONG_TOKENS) if size <= max_tokens]
