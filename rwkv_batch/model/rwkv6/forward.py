"""RWKV-6: the forward pass, for packed rows of any lengths. The same call as `rwkv_batch/model/rwkv7.py` has."""

from types import ModuleType

import torch

from rwkv_batch.model import reference_ops
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.rwkv6 import ops as own_ops
from rwkv_batch.model.state import State
from rwkv_batch.model.weights import Weights


class Model:
    """Weights and the ops that run them: `ops` where RWKV-7 has the same, which are the plain ones, else those beside."""

    def __init__(self, weights: Weights, ops: ModuleType = reference_ops, ops_name: str = "reference"):
        self.weights = weights
        self.ops = ops
        self.ops_name = ops_name

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor | None, rows: PackedRows, state: State, *, logits_of: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Feed tokens [N] to the rows' slots, whose states move on in place.

        tokens     None = each row, of one token, is fed what was sampled last in its slot
        logits_of  positions among the N whose logits are wanted; None = the last token of each row
        Returns logits [B, U] (or [len(logits_of), U]) fp32; column j is token `weights.output_ids[j]`.
        """
        ops, w = self.ops, self.weights
        state.advance(rows.slots, rows.lengths)
        x = ops.embed(w.embedding, tokens, rows, state.last_ids)  # [N, C]
        for i, layer in enumerate(w.layers):
            normed = ops.layer_norm(x, layer.ln1_weight, layer.ln1_bias)
            x = x + own_ops.time_mix(normed, layer, state.time_shift[i], state.layer_wkv[i], rows)
            normed = ops.layer_norm(x, layer.ln2_weight, layer.ln2_bias)
            y = own_ops.channel_mix(normed, layer, state.channel_shift[i], rows)
            if i + 1 < len(w.layers):
                x = x + y
        if logits_of is None and not rows.is_decode:
            logits_of = rows.last_token_index
        return ops.logits(x, y, w, logits_of)
