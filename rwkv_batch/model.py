"""RWKV-7: the one forward pass, for packed rows of any lengths; the ops are handed in.

Decode (every row one token), prefill (long rows) and any mixture are the same call. Knows nothing of requests or sampling.
"""

from types import ModuleType

import torch

from rwkv_batch import reference
from rwkv_batch.reference import Rows
from rwkv_batch.state import State
from rwkv_batch.weights import Weights


class Model:
    """Weights and the ops that run them. `ops` is `reference`, or a supplier of kernels with the same names."""

    def __init__(self, weights: Weights, ops: ModuleType = reference):
        self.weights = weights
        self.ops = ops

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, rows: Rows, state: State, *, logits_of: torch.Tensor | None = None) -> torch.Tensor:
        """Feed tokens [N] to the rows' slots, whose states move on in place.

        logits_of  positions among the N whose logits are wanted; None = the last token of each row
        Returns logits [B, U] fp32 (or [len(logits_of), U]); column j is token `weights.output_ids[j]`.
        """
        ops, w = self.ops, self.weights
        x = w.embedding[tokens].float()  # [N, C]
        first_value = None
        for i, layer in enumerate(w.layers):
            normed = ops.layer_norm(x, layer.ln1_weight, layer.ln1_bias)
            mixed = ops.shift_mix(normed, layer.att_mix, state.time_shift[i], rows)
            y, first_value = ops.time_mix(mixed, layer, state.layer_wkv[i], rows, first_value)
            x = x + y
            normed = ops.layer_norm(x, layer.ln2_weight, layer.ln2_bias)
            mixed = ops.shift_mix(normed, layer.ffn_mix, state.channel_shift[i], rows)
            x = x + ops.channel_mix(mixed[0], layer)
        state.elapsed[rows.slot_index] += rows.length_tensor
        if logits_of is not None:
            x = x[logits_of]
        elif not rows.is_decode:
            x = x[rows.last]
        return ops.linear(ops.layer_norm(x, w.ln_out_weight, w.ln_out_bias), w.head)
