"""The forward pass of RWKV-7 over several ranks: that of `rwkv7.py`, with a sum over all ranks behind each half of a block."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from rwkv_batch.model import reference_ops
from rwkv_batch.model.packed_rows import PackedRows, StepRows
from rwkv_batch.model.state import State
from rwkv_batch.model.tensor_parallel.exchange import Exchange, PlainExchange
from rwkv_batch.model.tensor_parallel.on_device import current
from rwkv_batch.model.tensor_parallel.state import ShardedState
from rwkv_batch.model.weights import ModelShape, Weights


@dataclass
class ShardedWeights:
    """A whole model, a shard on each rank, with what `Weights` tells of a model."""

    shape: ModelShape
    ranks: Sequence[Weights]

    def __post_init__(self) -> None:
        first = self.ranks[0]
        self.dtype, self.device, self.fingerprint = first.dtype, first.device, first.fingerprint
        self.architecture, self.quant, self.output_ids = first.architecture, first.quant, first.output_ids
        self.embedding = first.embedding

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(weights.num_bytes for weights in self.ranks)

    @cached_property
    def start(self) -> Tensor | None:
        """See `Weights`."""
        if self.ranks[0].start is None:
            return None
        return torch.cat([weights.start.to(self.device) for weights in self.ranks], 1)


class Rank:
    """One rank's part of the forward pass, on its device."""

    def __init__(self, weights: Weights, ops: ModuleType = reference_ops):
        self.weights = weights
        self.ops = ops
        self.device = weights.device
        self._prepared = ops.prepare(weights)

    @property
    def num_sums(self) -> int:
        """How many sums a step takes."""
        return 2 * len(self._prepared.layers)

    def steps(self, tokens: Tensor | None, rows: StepRows, state: State, logits_of: Tensor | None) -> Iterator[Tensor]:
        """Feed tokens as `Model.forward` does, pausing wherever other ranks are needed.

        Yields `num_sums` times a part [N, C] of a sum, which is to be in its place before this goes on; last the rank's
        columns of the logits.
        """
        ops, w = self.ops, self._prepared
        x = ops.embed(w.embedding, tokens, rows, state.last_ids)
        y, v_first = None, None
        for i, layer in enumerate(w.layers):
            x, mixed = ops.add_norm_mix(x, y, layer.ln1_weight, layer.ln1_bias, layer.att_mix, state.time_shift[i], rows)
            y, v_first = ops.time_mix(mixed, layer, state.layer_wkv[i], rows, v_first)
            yield y
            x, mixed = ops.add_norm_mix(x, y, layer.ln2_weight, layer.ln2_bias, layer.ffn_mix, state.channel_shift[i], rows)
            y = ops.channel_mix(mixed, layer)
            yield y
        if logits_of is None and not rows.is_decode:
            logits_of = rows.last_token_index
        yield ops.logits(x, y, w, logits_of)


class ShardedModel:
    """All ranks of one model, with the face of `Model`. One thread drives them, in step."""

    def __init__(self, weights: ShardedWeights, ranks: Sequence[Rank], exchange: Exchange | None = None, ops_name: str = ""):
        self.weights = weights
        self.ranks = list(ranks)
        self.exchange = exchange or PlainExchange()
        self.ops_name = ops_name or "reference"
        self._rows: tuple[PackedRows | None, list[PackedRows]] = (None, [])  # of the last step: most repeat theirs

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor | None, rows: PackedRows, state: ShardedState, *, logits_of: Tensor | None = None
    ) -> Tensor:
        """See `Model.forward`; tensors are rank 0's, and so are the logits."""
        state.advance(rows.slots, rows.lengths)
        if tokens is None:
            tokens = state.last_ids[rows.slot_index]
        running = []
        for rank, own_rows, own in zip(self.ranks, self._rows_of_ranks(rows), state.ranks, strict=True):
            of = None if logits_of is None else logits_of.to(rank.device)
            running.append(rank.steps(tokens.to(rank.device), own_rows, own, of))
        self.exchange.begin()
        return self.drive(running)

    def drive(self, running: Sequence[Iterator[Tensor]]) -> Tensor:
        """Take the steps of all ranks to their end, each a piece at a time, and return the logits."""
        for _ in range(self.ranks[0].num_sums):
            self.exchange.add(self._go_on(running))
        return self.exchange.join(self._go_on(running))

    def _go_on(self, running: Sequence[Iterator[Tensor]]) -> list[Tensor]:
        parts = []
        for rank, steps in zip(self.ranks, running, strict=True):
            with current(rank.device):
                parts.append(next(steps))
        return parts

    def _rows_of_ranks(self, rows: PackedRows) -> list[PackedRows]:
        known, of_ranks = self._rows
        if known is not rows:
            of_ranks = [
                rows if rank.device == rows.device else PackedRows(rows.slots, rows.lengths, rank.device) for rank in self.ranks
            ]
            self._rows = (rows, of_ranks)
        return of_ranks
