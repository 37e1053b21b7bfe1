"""The kernel ops, with decode steps of few rows in fewer launches where that was found to be faster (`tuning.py`)."""

import torch
from torch import Tensor

from rwkv_batch.kernels.few.kernels import MAX_ROWS, MAX_WIDTH, Carried, FewRows, Norm, norm_fits
from rwkv_batch.kernels.few.plan import FewPlan
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.layer_kernels import LayerKernels, MatrixKernels, ModelKernels
from rwkv_batch.kernels.linear import MASK_UNITS
from rwkv_batch.kernels.ops import HALF, KernelOps
from rwkv_batch.kernels.variants import Method, Product
from rwkv_batch.model.packed_rows import StepRows
from rwkv_batch.model.weights import Weights

OUTPUT_STAGES = 4  # of `output`, which is small, and before which the products behind it want to begin


class FewRowOps(KernelOps):
    """All ops, for one set of weights on one GPU.

    plans  how decode steps of so many rows are done; others, and all of quantised models, as `KernelOps` does them
    """

    def __init__(self, weights: Weights, launcher: Launcher, *, max_tokens: int, max_rows: int):
        super().__init__(weights, launcher, max_tokens=max_tokens, max_rows=max_rows)
        self.plans: dict[int, FewPlan] = {}
        self.few = FewRows(launcher) if launcher.hopper and not self.quant else None
        self._plan: FewPlan | None = None
        self._norm: Norm | None = None  # left to the next product
        self._carried: Carried | None = None
        width, device = weights.shape.width, launcher.device
        self._x = torch.empty(MAX_ROWS, width, dtype=torch.float32, device=device)  # in turns with the step's own
        self._normed = torch.empty(2, MAX_ROWS, width, dtype=HALF, device=device)  # in turns
        self._turn = 0

    def fits(self, num_rows: int, plan: FewPlan) -> bool:
        """Return whether a step of so many rows can be done so."""
        width = self.prepared.source.shape.width
        if self.few is None or num_rows > MAX_ROWS or width % 64 or width > MAX_WIDTH:
            return False
        if plan.turned and self._turned(self.prepared.layers[0]) is None:
            return False
        return not plan.norms or (plan.pairs and norm_fits(num_rows, width))

    def embed(self, embedding: Tensor, tokens: Tensor | None, rows: StepRows, last_ids: Tensor) -> Tensor:
        """See `reference_ops.embed`. Begins a step."""
        x = super().embed(embedding, tokens, rows, last_ids)
        self._plan = self.plans.get(len(x)) if rows.is_decode else None
        self._norm = self._carried = None
        return x

    def add_norm_mix(
        self, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, mix: Tensor, shift: Tensor, rows: StepRows
    ) -> tuple[Tensor, Tensor]:
        """See `reference_ops.add_norm_mix`; where the product behind it does it, what is returned as mixed means nothing."""
        if not (self._plan and self._plan.norms):
            return super().add_norm_mix(x, y, weight, bias, mix, shift, rows)
        x_out = x
        if y is not None:
            x_out = self._x[: len(x)] if x.data_ptr() == self._now.x.data_ptr() else self._now.x
        self._turn ^= 1
        normed = self._normed[self._turn, : len(x)]
        self._norm = Norm(x, x_out, y, weight, bias, mix, shift, rows.slot_tensor, normed, self._carried)
        self._carried = Carried(normed, shift, rows.slot_tensor)
        return x_out, self._now.mixed[: len(mix)]

    def time_mix(
        self, mixed: Tensor, layer: LayerKernels, wkv_state: Tensor, rows: StepRows, v_first: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `reference_ops.time_mix`."""
        b, plan, lora = self._now, self._plan, layer.lora
        if not (plan and plan.pairs):
            return super().time_mix(mixed, layer, wkv_state, rows, v_first)
        hidden, norm, self._norm = self.buffers.lora_hidden(mixed.shape[1], lora.rank), self._norm, None
        if norm is None:
            self.few.inputs(mixed, layer.rkv.weight, lora, b.rkv, hidden, stages=plan.stages)
        else:
            self.few.normed_inputs(norm, layer.rkv.weight, lora, b.rkv, hidden, stages=plan.stages)
        self.few.wkv(b.rkv, hidden, lora, b.v_first, layer.wkv, wkv_state, rows.slot_tensor, b.heads)
        self.product("output", b.heads, layer.output, b.y)
        return b.y, b.v_first

    def ffn_key(self, x: Tensor, layer: LayerKernels, out: Tensor) -> None:
        """The first product of the channel mix, with the squared ReLU behind it, and the norm in front where it was left."""
        if self._plan is None:
            return super().ffn_key(x, layer, out)
        mask = self.buffers.active_mask if self._key_leaves_mask(len(x), layer) else None
        options = {"relu_square": True, "active_mask": mask, "stages": self._plan.stages}
        norm, self._norm = self._norm, None
        if norm is None:
            self.few.product(x, layer.ffn_key.weight, out, **options)
        else:
            self.few.normed_product(norm, layer.ffn_key.weight, out, **options)

    def _key_leaves_mask(self, num_tokens: int, layer: LayerKernels) -> bool:
        if self._plan is None:
            return super()._key_leaves_mask(num_tokens, layer)
        masked = self.variant("ffn_value", num_tokens, layer.ffn_value).method is Method.MASKED
        return masked and not (self._plan.sparse or self._plan.turned) and len(layer.ffn_key.weight) % MASK_UNITS == 0

    def ffn_value(self, hidden: Tensor, layer: LayerKernels, out: Tensor) -> None:
        """The second."""
        if self._plan and self._plan.turned:
            self.few.product(hidden, self._turned(layer), out, stages=self._plan.stages)
        elif self._plan and self._plan.sparse:
            self.few.sparse_value(hidden, layer.ffn_value.weight, out)
        else:
            super().ffn_value(hidden, layer, out)

    @staticmethod
    def _turned(layer: LayerKernels) -> Tensor | None:
        return layer.ffn_value.gemm and layer.ffn_value.gemm.turned

    def product(self, name: Product, x: Tensor, matrix: MatrixKernels, out: Tensor) -> None:
        """One of the plain products: "output" or "head"."""
        if self._plan and name == "output":
            self.few.product(x, matrix.weight, out, stages=OUTPUT_STAGES)
        else:
            super().product(name, x, matrix, out)

    def logits(self, x: Tensor, y: Tensor, model: ModelKernels, index: Tensor | None) -> Tensor:
        """See `reference_ops.logits`."""
        if self._carried is None:
            return super().logits(x, y, model, index)
        last = self.buffers.last[: len(x)]
        self.few.last_norm(x, y, model.ln_out_weight, model.ln_out_bias, last, self._carried)
        self._carried = None
        last = last if index is None else last[index]
        logits = self.buffers.logits[: len(last)]
        self.product("head", last, model.head, logits)
        return logits[:, : model.num_outputs]
