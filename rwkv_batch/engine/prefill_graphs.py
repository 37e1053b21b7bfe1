"""Prefill steps as CUDA graphs, where these are faster than kernels that are launched one by one.

A graph is captured for a number of tokens and a number of rows, and fed what fits: surplus tokens belong to no row, surplus
rows have slot -1. What a step is fed - tokens, slots, where rows begin and end - is one array on the device at a fixed place.
Which numbers of tokens are worth a graph, and from how many on a step is filled up to it, depends on the model, the card and
the host.
"""

import bisect
import logging
import math
import time
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rwkv_batch.engine.staging import Staging, on_host
from rwkv_batch.kernels.launch import fastest_replay
from rwkv_batch.model.packed_rows import CONTINUES, NO_SLOT, CapturedRows, RowLayout
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.scheduling.plan import PREFILL_CHUNK
from sampling.base import GraphSampler, Sampled

log = logging.getLogger("rwkv_batch.engine")

TOKENS = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)
LONG = (640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)  # captured as far as it pays
LEAD = 1.03  # how many times as fast a long step's graph must be
SLOW_MS = 10.0  # where the largest of TOKENS takes so long, a stall is a small part of it: long steps are run once less
TYPICAL_ROWS = 4  # that graphs for more than one row are measured with
MANY_ROWS = 32  # of a graph for more than one row, or as many as there are slots


def rows_of_graphs(num_slots: int) -> list[int]:
    """Return for how many rows there are graphs, ascending."""
    return sorted({1, min(MANY_ROWS, num_slots)})


class PrefillGraphs:
    """Captured prefill steps of one model, sampler and state, the sampling of the rows that end in them included.

    sizes  numbers of tokens, ascending; `capture` adds those of LONG that pay
    times  tokens -> milliseconds in which a step of one row is replayed, of a few of TOKENS; `capture` measures them
    """

    def __init__(self, model: Model, sampler: GraphSampler, state: State, *, max_tokens: int):
        self.model = model
        self.sampler = sampler
        self.state = state
        self.sizes = [size for size in TOKENS if size <= max_tokens]
        self.rows = rows_of_graphs(state.num_slots)
        self.times: dict[int, float] = {}
        self.num_replays = 0
        self._long = [size for size in LONG if size <= max_tokens]
        device, length = model.weights.device, inputs_length(max([0, *self.sizes, *self._long]), self.rows[-1])
        self._inputs = torch.zeros(length, dtype=torch.int64, device=device)
        self._staging = Staging(length, device)
        self._ids = torch.zeros(self.rows[-1], dtype=torch.int64, device=device)
        self._finite = torch.zeros(self.rows[-1], dtype=torch.bool, device=device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._fewest: dict[tuple[int, int], int] = {}  # tokens that a graph of LONG is used for
        self._logits: dict[tuple[int, int], Tensor] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, the largest first, so that the smaller ones find their memory in the pool; then the long ones.

        The first slots are fed what means nothing.
        """
        started = time.monotonic()
        stream, pool = torch.cuda.Stream(self._inputs.device), torch.cuda.graph_pool_handle()
        timed = sizes_to_time(self.sizes)
        for size in reversed(self.sizes):
            for num_rows in reversed(self.rows):  # one row last, so that it is what was fed
                self._capture(size, num_rows, stream, pool, rounds=1)
            if size in timed:
                self.times[size] = fastest_replay(self._graphs[size, 1], rounds=2)
        for size in self._long:
            if not self._pays(size, stream, pool):
                break
            for num_rows in self.rows[1:]:
                self._capture(size, num_rows, stream, pool, rounds=1)
                self._fewest[size, num_rows] = self._fewest[size, 1]
            self.sizes.append(size)
        seconds, largest = time.monotonic() - started, max(self.sizes, default=0)
        log.info("captured %d prefill graphs, up to %d tokens, in %.1f s", len(self._graphs), largest, seconds)

    def _pays(self, num_tokens: int, stream: torch.cuda.Stream, pool: tuple[int, int]) -> bool:
        """Capture the step of one row and find from how many tokens on it is faster than launched kernel by kernel.

        False, and no graph is kept, where it never is. Steps of more rows are taken to do likewise.
        """
        size, rounds = (num_tokens, 1), 2 if max(self.times.values(), default=0.0) >= SLOW_MS else 3
        launching, launched = self._capture(*size, stream, pool, rounds=rounds)
        self._fewest[size] = fewest_tokens(num_tokens, launching, launched, fastest_replay(self._graphs[size], rounds))
        if self._fewest[size] <= num_tokens:
            return True
        del self._graphs[size], self._logits[size]
        return False

    def _feed(self, num_tokens: int, num_rows: int) -> None:
        """Give the step tokens: one row of them where it has but one, else some rows of equal length."""
        count = min(num_rows, TYPICAL_ROWS)
        prompts = [[0] * (num_tokens // count)] * count
        self._inputs.copy_(on_host(step_inputs(range(count), prompts, 0, num_tokens, num_rows, len(self._inputs))))

    def step_of_one_row(self, num_tokens: int) -> Callable[[], Tensor]:
        """Return what starts a step of one row, kernel by kernel, until another one is fed; it changes slot 0."""
        self._feed(num_tokens, 1)
        return lambda: self.model.forward(*step_rows(self._inputs, num_tokens, 1)[:2], self.state)

    def _capture(
        self, num_tokens: int, num_rows: int, stream: torch.cuda.Stream, pool: tuple[int, int], *, rounds: int
    ) -> tuple[float, float]:
        """Capture the step; return the milliseconds in which the host launches its kernels, and in which they have run then.

        rounds  that the step runs before: every kernel must have run once; the first time takes longer, and counts if alone
        """
        self._feed(num_tokens, num_rows)
        stream.wait_stream(torch.cuda.current_stream(self._inputs.device))
        times = []
        with torch.cuda.stream(stream):
            for _ in range(rounds):
                stream.synchronize()
                started = time.perf_counter()
                self._step(num_tokens, num_rows)
                launching = time.perf_counter() - started
                stream.synchronize()
                times.append((launching * 1e3, (time.perf_counter() - started) * 1e3))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            self._logits[num_tokens, num_rows] = self._step(num_tokens, num_rows)
        self._graphs[num_tokens, num_rows] = graph
        launching, launched = map(min, zip(*times[min(1, rounds - 1) :], strict=True))
        return launching, launched

    def _step(self, num_tokens: int, num_rows: int) -> Tensor:
        tokens, rows, sampled = step_rows(self._inputs, num_tokens, num_rows)
        logits = self.model.forward(tokens, rows, self.state)
        self.sampler.launch(logits, sampled, out_ids=self._ids[:num_rows], out_finite=self._finite[:num_rows])
        return logits

    def fits(self, num_tokens: int, num_rows: int) -> bool:
        """Whether there is a graph for so much, which is faster than launching kernel by kernel."""
        if not self.sizes or num_tokens > self.sizes[-1] or num_rows > self.rows[-1]:
            return False
        return num_tokens >= self._fewest.get(self._size(num_tokens, num_rows), 0)

    def _size(self, num_tokens: int, num_rows: int) -> tuple[int, int]:
        """Return the tokens and the rows of the smallest graph that fits."""
        return self.sizes[bisect.bisect_left(self.sizes, num_tokens)], self.rows[bisect.bisect_left(self.rows, num_rows)]

    def replay(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], num_sampled: int) -> tuple[Sampled, Tensor]:
        """Feed each slot its part of a prompt and sample the first `num_sampled` of them; does not wait for the step.

        Returns what is sampled and the logits of these rows, both on the device and overwritten by the next replay.
        """
        lengths = [len(prompt) for prompt in prompts]
        num_tokens, num_rows = self._size(sum(lengths), len(slots))
        length = inputs_length(num_tokens, num_rows)
        self._staging.send(step_inputs(slots, prompts, num_sampled, num_tokens, num_rows, length), self._inputs)
        self.state.advance(slots, lengths)
        self._graphs[num_tokens, num_rows].replay()
        self.num_replays += 1
        logits = self._logits[num_tokens, num_rows]
        return Sampled(self._ids[:num_sampled], self._finite[:num_sampled]), logits[:num_sampled]


def sizes_to_time(sizes: Sequence[int]) -> set[int]:
    """Return which of ascending numbers of tokens tell best what steps cost by their tokens."""
    chunks = [size for size in sizes if size >= PREFILL_CHUNK]
    return {chunks[0], chunks[len(chunks) // 2], chunks[-1]} if chunks else set()


def fewest_tokens(num_tokens: int, launching: float, launched: float, replayed: float) -> int:
    """Return from how many tokens on a step, filled up to `num_tokens`, takes no longer than one that is launched as it is.

    launching, launched, replayed  for all the tokens: until the host has launched them, until they have run then, in a graph
    More than `num_tokens` where that is hardly ever so.
    """
    if replayed <= launching:  # which takes as long for fewer tokens
        return 0
    return math.ceil(num_tokens * replayed / launched) if replayed * LEAD <= launched else num_tokens + 1


def step_rows(inputs: Tensor, num_tokens: int, num_rows: int) -> tuple[Tensor, CapturedRows, Tensor]:
    """Return the tokens, the rows and the slots to sample of a captured step that is fed `step_inputs` at a fixed place."""
    tokens, slots, sampled, last, small = inputs[: inputs_length(num_tokens, num_rows)].split(
        [num_tokens, num_rows, num_rows, num_rows, num_rows + 1 + num_tokens]
    )
    starts, previous_slot = small.int().split([num_rows + 1, num_tokens])
    return tokens, CapturedRows.prefill(RowLayout(slots, starts, last.int(), previous_slot), last), sampled


def inputs_length(num_tokens: int, num_rows: int) -> int:
    """Return how long `step_inputs` are."""
    return 2 * num_tokens + 4 * num_rows + 1


def step_inputs(
    slots: Sequence[int], prompts: Sequence[Sequence[int]], num_sampled: int, num_tokens: int, num_rows: int, length: int
) -> array:
    """Return tokens, slots, slots to sample, last positions, starts, and where each token's predecessor is, filled up; int64.

    Tokens are many, and the device waits for them, so no list is made of them.
    """
    tokens, starts, previous = array("q"), [0], array("q")
    for slot, prompt in zip(slots, prompts, strict=True):
        tokens.extend(prompt)
        starts.append(len(tokens))
        previous.append(slot)
        previous.extend(array("q", [CONTINUES]) * (len(prompt) - 1))
    missing, absent = num_tokens - len(tokens), num_rows - len(slots)
    few = [*slots, *[-1] * absent, *slots[:num_sampled], *[-1] * (num_rows - num_sampled)]
    few += [*(start - 1 for start in starts[1:]), *[0] * absent, *starts, *[len(tokens)] * absent]
    inputs = tokens + array("q", [0]) * missing + array("q", few) + previous + array("q", [NO_SLOT]) * missing
    return inputs + array("q", [0]) * (length - len(inputs))
