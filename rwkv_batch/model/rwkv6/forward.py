"""RWKV-6: the forward pass, for packed rows of any lengths. The same call as `rwkv_batch/model/rwkv7.py` has."""

from typing import Any

import torch

from rwkv_batch.model import reference_ops
from rwkv_batch.model.packed_rows import StepRows
from rwkv_batch.model.rwkv6 import ops as own_ops
from rwkv_batch.model.state import State
from rwkv_batch.model.weights import Weights


class Model:
    """Weights and the ops that run them. `ops`: RWKV-6's, in plain torch where RWKV-7's would be."""

    def __init__(self, weights: Weights, ops: Any = own_ops, ops_name: str = "reference"):
        self.weights = weights
        self.ops = own_ops if ops is reference_ops else ops
        self.ops_name = ops_name
        self._prepared = self.ops.prepare(weights)

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor | None, rows: StepRows, state: State, *, logits_of: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Feed tokens [N] to the rows' slots, whose states move on in place.

        tokens     None = each row, of one token, is fed what was sampled last in its slot
        logits_of  positions among the N whose logits are wanted; None = the last token of each row
        Returns logits [B, U] (or [len(logits_of), U]); column j is token `weights.output_ids[j]`. Kernel ops' next step
        overwrites them.
        """
        ops, w = self.ops, self._prepared
        state.advance(rows.slots, rows.lengths)
        x, y = ops.embed(w.embedding, tokens, rows, state.last_ids), None  # [N, C]
        for i, layer in enumerate(w.layers):
            norm = layer.ln1_weight, layer.ln1_bias
            x, mixed = ops.add_norm_mix(x, y, *norm, layer.att_mix, state.time_shift[i], rows)
            y = ops.time_mix(mixed, layer, state.layer_wkv[i], rows)
            norm = layer.ln2_weight, layer.ln2_bias
            x, mixed = ops.add_norm_mix(x, y, *norm, layer.ffn_mix, state.channel_shift[i], rows)
            y = ops.channel_mix(mixed, layer)
        if logits_of is None and not rows.is_decode:
            logits_of = rows.last_token_index
        return ops.logits(x, y, w, logits_of)
