"""One stage: some layers of a model on one device, with their state, ops and captured steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.engine.decode_graphs import DecodeGraphs
from rwkv_batch.engine.prefill_graphs import PrefillGraphs
from rwkv_batch.kernels.ops import KernelOps
from rwkv_batch.model import reference_ops
from rwkv_batch.model.packed_rows import StepRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.model.weights import Weights


class PlainStageOps:
    """`reference_ops` with a way in and a way out. Room for steps of `max_tokens`."""

    prepare = staticmethod(reference_ops.prepare)
    embed = staticmethod(reference_ops.embed)
    add_norm_mix = staticmethod(reference_ops.add_norm_mix)
    time_mix = staticmethod(reference_ops.time_mix)
    channel_mix = staticmethod(reference_ops.channel_mix)
    logits = staticmethod(reference_ops.logits)

    def __init__(self, weights: Weights, max_tokens: int):
        self._room = torch.zeros(2, max_tokens, weights.shape.width, device=weights.device)
        self._left: tuple[Tensor, Tensor, Tensor] | None = None

    def way_in(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return where x and v_first [N, C] of the next step are to be put."""
        x, v_first = self._room[:, :num_tokens].unbind()
        return x, v_first

    def enter(self, num_tokens: int, rows: StepRows) -> tuple[Tensor, Tensor]:
        """Begin a step with what was put there."""
        return self.way_in(num_tokens)

    def leave(self, x: Tensor, y: Tensor, v_first: Tensor) -> None:
        """The last layer's results."""
        self._left = x, y, v_first

    def way_out(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the results of the first `num_tokens` tokens of the last step."""
        x, y, v_first = self._left
        return x[:num_tokens], y[:num_tokens], v_first[:num_tokens]


class KernelStageOps(KernelOps):
    """`KernelOps` with a way in and a way out: its buffers, which lie at the same places in every step, captured or not."""

    def way_in(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """See `PlainStageOps`."""
        return self.buffers.all.x[:num_tokens], self.buffers.all.v_first[:num_tokens]

    def enter(self, num_tokens: int, rows: StepRows) -> tuple[Tensor, Tensor]:
        """See `PlainStageOps`. Launches go to torch's current stream until the next step, as behind `embed`."""
        self.launcher.use_current_stream()
        now = self.begin(num_tokens)
        self._layout = None if rows.is_decode else rows.layout
        return now.x, now.v_first

    def leave(self, x: Tensor, y: Tensor, v_first: Tensor) -> None:
        """See `PlainStageOps`."""

    def way_out(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `PlainStageOps`."""
        b = self.buffers.all
        return b.x[:num_tokens], b.y[:num_tokens], b.v_first[:num_tokens]


class StageModel(Model):
    """The forward pass through a stage's layers, with the embedding in the first stage and the head in the last."""

    def __init__(self, weights: Weights, ops: Any, ops_name: str, *, is_first: bool, is_last: bool):
        super().__init__(weights, ops, ops_name)
        self.is_first = is_first
        self.is_last = is_last

    @torch.inference_mode()
    def forward(self, tokens: Tensor | None, rows: StepRows, state: State, *, logits_of: Tensor | None = None) -> Tensor:
        """See `Model.forward`. What comes in and goes out between stages are the ops' `way_in` and `way_out`; of `tokens` a
        later stage takes the number. Only the last stage returns logits."""
        state.advance(rows.slots, rows.lengths)
        if self.is_first:
            x, v_first = self.ops.embed(self._prepared.embedding, tokens, rows, state.last_ids), None
        else:
            x, v_first = self.ops.enter(len(rows.slot_tensor) if tokens is None else len(tokens), rows)
        x, y, v_first = self.run_layers(x, v_first, rows, state)
        if not self.is_last:
            self.ops.leave(x, y, v_first)
            return x
        if logits_of is None and not rows.is_decode:
            logits_of = rows.last_token_index
        return self.ops.logits(x, y, self._prepared, logits_of)


class NoSampler:
    """Takes the sampler's place in the captured steps of a stage that samples nothing."""

    def launch(self, logits: Tensor, slots: Tensor, **out: Tensor) -> None:
        """Do nothing."""


@dataclass(eq=False)
class Stage:
    """One stage.

    layers    of the model
    stream    where its steps run; None on a CPU
    graphs    captured decode steps, None = launched kernel by kernel; prefills likewise
    """

    layers: range
    model: StageModel
    state: State
    stream: torch.cuda.Stream | None = None
    graphs: DecodeGraphs | None = None
    prefills: PrefillGraphs | None = None

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.model.weights.device

    @contextmanager
    def active(self) -> Iterator[None]:
        """What is submitted inside goes to this stage's device and stream."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield
