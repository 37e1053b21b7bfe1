"""RWKV-7: the one forward pass, for packed rows of any lengths; the ops are handed in.

Decode (every row one token), prefill (long rows) and any mixture are the same call. Knows nothing of requests or sampling.
"""

from types import ModuleType

import torch

from rwkv_batch.model import reference_ops
from rwkv_batch.model.packed_rows import StepRows
from rwkv_batch.model.state import State
from rwkv_batch.model.weights import Weights


class Model:
    """Weights and the ops that run them. `ops` is `reference_ops`, or anything with the same names, such as `KernelOps`."""

    def __init__(self, weights: Weights, ops: ModuleType = reference_ops, ops_name: str = "reference"):
        self.weights = weights
        self.ops = ops
        self.ops_name = ops_name
        self._prepared = ops.prepare(weights)  # with the names of `Weights`

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor | None, rows: StepRows, state: State, *, logits_of: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Feed tokens [N] to the rows' slots, whose states move on in place.

        tokens     None = each row, of one token, is fed what was sampled last in its slot
        logits_of  positions among the N whose logits are wanted; None = the last token of each row
        Returns logits [B, U] (or [len(logits_of), U]); column j is token `weights.output_ids[j]`. fp32 from the reference ops;
        kernels return fp16, in a buffer that the next step overwrites.
        """
        ops, w = self.ops, self._prepared
        state.advance(rows.slots, rows.lengths)
        x = ops.embed(w.embedding, tokens, rows, state.last_ids)  # [N, C]
        x, y, _ = self.run_layers(x, None, rows, state)
        if logits_of is None and not rows.is_decode:
            logits_of = rows.last_token_index
        return ops.logits(x, y, w, logits_of)

    def run_layers(
        self, x: torch.Tensor, v_first: torch.Tensor | None, rows: StepRows, state: State
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take the residual stream x [N, C] through the layers; `v_first` [N, C]: the values of layer 0, None = they have it.

        Returns x, what the last layer adds to it, and the values of layer 0.
        """
        ops, y = self.ops, None
        for i, layer in enumerate(self._prepared.layers):
            x, mixed = ops.add_norm_mix(x, y, layer.ln1_weight, layer.ln1_bias, layer.att_mix, state.time_shift[i], rows)
            y, v_first = ops.time_mix(mixed, layer, state.layer_wkv[i], rows, v_first)
            x, mixed = ops.add_norm_mix(x, y, layer.ln2_weight, layer.ln2_bias, layer.ffn_mix, state.channel_shift[i], rows)
            y = ops.channel_mix(mixed, layer)
        return x, y, v_first
