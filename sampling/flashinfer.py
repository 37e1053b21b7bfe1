"""Rule "sequential" with FlashInfer's filters, for those who want exactly theirs. Optional: requirements-cuda.txt.

FlashInfer only cuts: its filters, top_k and then top_p inside it, say which columns of a sequential row are kept. (A row with
min_p or a repetition penalty is cut by the kernel's own filters.) The kernel of `kernel.py` does the rest, the draw with its
Philox numbers included; so seeds hold, and a captured graph draws anew in every replay. FlashInfer compiles its filters at
first use (about a minute): `warm` does that, before anything is served.
"""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from sampling.base import Sampled
from sampling.kernel import KernelSampler
from sampling.params import SamplingParams


def missing() -> str | None:
    """Return why FlashInfer cannot be used, in one line; None when it can."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed (pip install -r requirements-cuda.txt)"
    return None


class FlashInferSampler(KernelSampler):
    """`KernelSampler`, but sequential rows are filtered by FlashInfer. Arguments as there."""

    def __init__(self, num_slots: int, ids: Tensor, *args, **options):
        super().__init__(num_slots, ids, *args, **options)
        from flashinfer import sampling

        self._filters = sampling
        # Of the sequential rows; of the others U and 1, which mean off.
        self._top_k = torch.full((num_slots,), len(ids), dtype=torch.int32, device=self.device)
        self._top_p = torch.ones(num_slots, dtype=torch.float32, device=self.device)

    def warm(self) -> None:
        """Compile the filters, if they are not in FlashInfer's cache, and run them once."""
        probabilities = torch.full((1, len(self.ids)), 1 / len(self.ids), device=self.device)
        self._kept(probabilities, self._top_k[:1], self._top_p[:1])
        torch.cuda.synchronize(self.device)

    def start_many(
        self,
        slots: Sequence[int],
        params: Sequence[SamplingParams],
        choices: Sequence[int],
        prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        """See `Controls.start_many`."""
        super().start_many(slots, params, choices, prompts)
        index = torch.tensor(slots).to(self.device, non_blocking=True)
        method = self._method.index_select(0, index)
        cut_here = [not (self.needs[slot].floored or self.needs[slot].repeated) for slot in slots]
        ours = (method == self._codes["sequential"]) & torch.tensor(cut_here).to(self.device, non_blocking=True)
        top_k = self.controls.top_k.index_select(0, index)
        top_p = self.controls.top_p.index_select(0, index)
        self._top_k.index_copy_(0, index, torch.where(ours, top_k, len(self.ids)))
        self._top_p.index_copy_(0, index, torch.where(ours, top_p.clamp(max=1), 1.0))
        plain = torch.where(ours, self._codes["plain"], method)  # of what is left the kernel draws without a filter
        self._method.index_copy_(0, index, plain)

    def launch(self, logits: Tensor, slots: Tensor, **options) -> Sampled:
        """See `KernelSampler.launch`."""
        safe = slots.clamp(min=0)
        x = self._adjusted(logits, safe) / self.controls.temperature.index_select(0, safe)[:, None]
        q = x.softmax(-1)
        kept = self._kept(q, self._top_k.index_select(0, safe), self._top_p.index_select(0, safe))
        return super().launch(torch.where(kept | q.isnan(), logits, -torch.inf), slots, **options)  # NaN rows stay so

    def _kept(self, q: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        """Return which of the columns both filters keep [B, U] bool; q [B, U] fp32, top_k and top_p [B]."""
        all_k, all_p = (top_k == len(self.ids))[:, None], (top_p == 1)[:, None]
        best = torch.where(all_k, q, self._filters.top_k_renorm_probs(q, top_k))
        inside = self._filters.top_p_renorm_probs(best, top_p)
        return torch.where(all_p, all_k | (best > 0), inside > 0)

    def _adjusted(self, logits: Tensor, slots: Tensor) -> Tensor:
        """Return the logits [B, U] fp32 after bias, masked end token and penalties, as the kernel will see them."""
        controls = self.controls
        z = logits.float().scatter_add(
            1, controls.bias_columns.index_select(0, slots), controls.bias_values.index_select(0, slots)
        )
        masked = controls.step.index_select(0, slots) < controls.first_end.index_select(0, slots)
        z[:, 0] = torch.where(masked, -torch.inf, z[:, 0])
        z.masked_fill_(~self.masks.allowed(slots, len(self.ids)), -torch.inf)
        return z - self.penalties(slots)
