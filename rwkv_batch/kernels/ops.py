"""The ops of the forward pass as GPU kernels, with the names and meanings of `model/reference_ops.py`.

Buffers are made once for the largest step and reused by every layer and step, so that a CUDA graph may capture them: what an op
returns is overwritten by the next layer, and logits by the next step. The residual stream is fp32,
all between kernels fp16.

A product can be done in several ways (`variants.py`), which differ in the order of their sums; `autotune.py` times them for the
sizes of decode graphs and short prefills. So a row's logits may differ in the last bits between sizes, never with its
neighbours in one size.
"""

import dataclasses
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rwkv_batch.kernels.cublaslt import MatMul
from rwkv_batch.kernels.gemm import Gemm
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.layer_kernels import LayerKernels, MatrixKernels, ModelKernels, whole_units
from rwkv_batch.kernels.linear import (
    MASK_UNITS,
    MAX_GEMV,
    MAX_SPARSE,
    Linear,
    Lora,
    reserved_configs,
)
from rwkv_batch.kernels.mix import Mix, WkvInputs
from rwkv_batch.kernels.quant.dequantise import Dequantiser
from rwkv_batch.kernels.quant.few_tokens import QuantLinear
from rwkv_batch.kernels.quant.many_tokens import ManyTokens
from rwkv_batch.kernels.quant.matrix import QuantMatrix, quant_format
from rwkv_batch.kernels.states.log import WkvLog
from rwkv_batch.kernels.variants import (
    CUBLAS,
    GEMM,
    GEMV,
    GEMV_RKV,
    MASKED,
    QUANT_METHODS,
    SPARSE,
    LoraPlacement,
    Method,
    Product,
    Variant,
    known_variant,
    many_tokens,
)
from rwkv_batch.model.packed_rows import RowLayout, StepRows
from rwkv_batch.model.weights import ModelShape, Weights

HALF = torch.float16
MAX_VIEWS = 64  # kept; views are cheap to make and need not be kept for every length of prefill
GEMV_ROWS = 4  # up to which dot products are taken where nothing was timed


@dataclass
class Activations:
    """Room for a step of N tokens; fp16 [N, C] but where said."""

    x: Tensor  # fp32, the residual stream
    mixed: Tensor  # [6, N, C]
    rkv: Tensor  # [3, N, C]
    normed: Tensor
    w_raw: Tensor  # fp32, of the decay, before the sigmoid
    a: Tensor
    v_mix: Tensor
    g: Tensor
    v_first: Tensor
    heads: Tensor
    y: Tensor
    hidden: Tensor  # [N, F]

    @classmethod
    def of(cls, num_tokens: int, shape: ModelShape, device: torch.device) -> "Activations":
        """Allocate them."""
        plane, inner = (num_tokens, shape.width), (num_tokens, shape.inner_width)
        dims = {"mixed": (6, *plane), "rkv": (3, *inner), "hidden": (num_tokens, shape.ffn_width)}
        dims |= dict.fromkeys(("w_raw", "a", "v_mix", "g", "v_first", "heads"), inner)
        single = ("x", "w_raw")
        return cls(**{
            item.name: torch.empty(
                dims.get(item.name, plane), dtype=torch.float32 if item.name in single else HALF, device=device
            )
            for item in fields(cls)
        })  # fmt: skip

    def first(self, num_tokens: int) -> "Activations":
        """Return contiguous views for fewer tokens of the same memory."""
        return type(self)(**{name: _shrink(tensor, num_tokens) for name, tensor in vars(self).items()})


class Buffers:
    """Everything that kernel ops write to, for steps of `max_tokens` that ask for the logits of `max_rows`.

    last         [max_rows, C]: the inputs of the head
    logits       [max_rows, U], U a multiple of OUTPUT_UNIT
    active_mask  bits of the feed-forward units that are not zero in every token
    """

    activations_type = Activations
    max_rank = staticmethod(Lora.max_rank)

    def __init__(self, shape: ModelShape, num_outputs: int, *, max_tokens: int, max_rows: int, device: torch.device):
        self.all = self.activations_type.of(max_tokens, shape, device)
        self._lora = torch.empty(max_tokens * self.max_rank(shape), dtype=HALF, device=device)
        self.last = torch.empty(max_rows, shape.width, dtype=HALF, device=device)
        self.logits = torch.empty(max_rows, whole_units(num_outputs), dtype=HALF, device=device)
        self.active_mask = torch.empty(-(-shape.ffn_width // MASK_UNITS), dtype=torch.int32, device=device)
        self._views: dict[int, Activations] = {}

    @classmethod
    def num_bytes(cls, shape: ModelShape, *, max_tokens: int, max_rows: int) -> int:
        """Bytes of all of them, where every id of the vocabulary has a logit."""
        device = torch.device("meta")
        buffers = cls(shape, shape.vocab_size, max_tokens=max_tokens, max_rows=max_rows, device=device)
        own = (buffers._lora, buffers.last, buffers.logits, buffers.active_mask)
        return sum(tensor.nbytes for tensor in (*own, *vars(buffers.all).values()))

    def activations(self, num_tokens: int) -> Activations:
        """Return the room for a step of so many tokens."""
        if num_tokens not in self._views:
            if len(self._views) > MAX_VIEWS:
                self._views.clear()
            self._views[num_tokens] = self.all.first(num_tokens)
        return self._views[num_tokens]

    def lora_hidden(self, num_tokens: int, rank: int) -> Tensor:
        """Return the room between the two halves of the low-rank pairs [N, R]."""
        return self._lora[: num_tokens * rank].view(num_tokens, rank)


class KernelOps:
    """All ops, for one set of weights on one GPU, and steps of `max_tokens` that ask for the logits of `max_rows`."""

    def __init__(self, weights: Weights, launcher: Launcher, *, max_tokens: int, max_rows: int):
        self.launcher = launcher
        self.mix = self.first_mix = Mix(launcher, pdl=True)  # the second begins a step
        self.quant = quant_format(weights)
        self.make_products(weights.shape, max_tokens)
        self.prepared = ModelKernels.of(weights, self.gemm)
        num_outputs = self.prepared.num_outputs
        self.buffers = Buffers(weights.shape, num_outputs, max_tokens=max_tokens, max_rows=max_rows, device=launcher.device)
        self.many_tokens = [] if self.quant else many_tokens(max_tokens)
        self._side = torch.cuda.Stream(launcher.device)
        self._chosen: dict[tuple[Product, int], Variant] = {}  # by product and tokens
        self._now = self.buffers.all  # of the step that runs
        self._layout: RowLayout | None = None  # of a prefill step
        self.log: WkvLog | None = None  # of the states that captured steps change

    def make_products(self, shape: ModelShape, max_tokens: int) -> None:
        """Make ready what multiplies."""
        launcher = self.launcher
        self.matmul, self.linear = MatMul(launcher), Linear(launcher, pdl=True)
        # A weight that was made fp16 by the kernel before must not be fetched while that one ends.
        self.gemm = Gemm(launcher, pdl=not self.quant)
        if self.quant:  # else the library may lack them
            self.dequantise = Dequantiser(launcher)
            self.quant_linear = QuantLinear(launcher, pdl=True)
        self.many = ManyTokens(launcher, self.quant, shape, max_tokens) if ManyTokens.fits(self.quant) else None

    def prepare(self, weights: Weights) -> ModelKernels:
        """Return what `Model` hands to the ops; `weights` are those that the ops were made for."""
        if weights is not self.prepared.source:
            raise ValueError("weights: others than the kernels were prepared for")
        return self.prepared

    def begin(self, num_tokens: int) -> Activations:
        """Return the room that the next products of so many tokens write to."""
        self._now = self.buffers.activations(num_tokens)
        return self._now

    # The ops, in the order in which a step calls them.

    def embed(self, embedding: Tensor, tokens: Tensor | None, rows: StepRows, last_ids: Tensor) -> Tensor:
        """See `reference_ops.embed`. Begins a step: launches go to torch's current stream until the next one."""
        self.launcher.use_current_stream()
        self.begin(len(rows.slot_tensor) if tokens is None else len(tokens))
        self._layout = None if rows.is_decode else rows.layout
        if tokens is None:
            self.first_mix.embed_decode(last_ids, rows.slot_tensor, embedding, self._now.x)
        else:
            self.first_mix.embed(tokens, embedding, self._now.x)
        return self._now.x

    def add_norm_mix(
        self, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, mix: Tensor, shift: Tensor, rows: StepRows
    ) -> tuple[Tensor, Tensor]:
        """See `reference_ops.add_norm_mix`; `x` is changed in place, and six planes come in the order of PLANES."""
        mixed = self._now.mixed[: len(mix)]
        if self._layout is None:
            # What this layer remembers was written a step ago, the slots before this one.
            self.mix.add_norm_mix_decode(x, y, weight, bias, mix, shift, rows.slot_tensor, mixed, inputs_ready=True)
        else:
            self.mix.add_norm_mix_prefill(x, y, weight, bias, mix, shift, self._layout, self._now.normed, mixed)
        return x, mixed

    def time_mix(
        self, mixed: Tensor, layer: LayerKernels, wkv_state: Tensor, rows: StepRows, v_first: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `reference_ops.time_mix`; `mixed` is overwritten."""
        b = self._now
        self.attention_inputs(mixed, layer)
        inputs = WkvInputs(*b.rkv.unbind(), b.w_raw, b.a, None if v_first is None else b.v_mix, b.g, b.v_first)
        if self._layout is None:
            log = self.log and self.log.of(wkv_state, rows)
            self.mix.wkv_decode(inputs, layer.wkv, wkv_state, rows.slot_tensor, b.heads, log=log, inputs_ready=True)
        else:
            self.mix.wkv_prefill(inputs, layer.wkv, wkv_state, self._layout, b.heads, room=self.buffers.all.mixed)
        self.product("output", b.heads, layer.output, b.y)
        return b.y, b.v_first

    def channel_mix(self, mixed: Tensor, layer: LayerKernels) -> Tensor:
        """See `reference_ops.channel_mix`."""
        b = self._now
        self.ffn_key(mixed[0], layer, b.hidden)
        self.ffn_value(b.hidden, layer, b.y)
        return b.y

    def logits(self, x: Tensor, y: Tensor, model: ModelKernels, index: Tensor | None) -> Tensor:
        """See `reference_ops.logits`; fp16, in a buffer that the next step overwrites."""
        num_rows = x.shape[0] if index is None else len(index)
        last, logits = self.buffers.last[:num_rows], self.buffers.logits[:num_rows]
        self.mix.add_norm(x, y, index, model.ln_out_weight, model.ln_out_bias, last)
        self.product("head", last, model.head, logits)
        return logits[:, : model.num_outputs]

    # Products.

    def attention_inputs(self, mixed: Tensor, layer: LayerKernels) -> None:
        """Project r, k and v, and everything that goes through a low-rank pair, into the buffers of this step."""
        num_tokens = mixed.shape[1]
        variant, lora, rkv = self.variant("rkv", num_tokens, layer.rkv), layer.lora, self._now.rkv
        hidden = self.buffers.lora_hidden(num_tokens, lora.rank)
        if variant.lora is LoraPlacement.FUSED:
            kernels, matrix = (self.gemm, layer.rkv.gemm) if layer.rkv.quant is None else (self.quant_linear, layer.rkv.quant)
            kernels.inputs(mixed, matrix, lora, rkv, hidden, self._gates(lora), variant.config)
        elif variant.lora is LoraPlacement.FUSED_DOWN:
            if variant.method is not Method.GEMV:
                self.gemm.project(mixed, layer.rkv.gemm, layer.gemm_lora, rkv, hidden, variant.config)
            elif layer.rkv.quant is None:
                self.linear.project(mixed, layer.rkv.weight, lora, rkv, hidden)
            else:
                self.quant_linear.project(mixed, layer.rkv.quant, lora, rkv, hidden, config=variant.config)
            self._lora_up(hidden, lora)
        elif variant.lora is LoraPlacement.BEFORE:
            self.linear.lora_down(mixed, lora, hidden)
            self._lora_up(hidden, lora)
            self._multiply(variant, mixed[:3], layer.rkv, rkv)
        else:
            self._rkv_beside_lora(mixed, layer, variant, hidden)

    def _rkv_beside_lora(self, mixed: Tensor, layer: LayerKernels, variant: Variant, hidden: Tensor) -> None:
        """On two streams: neither fills the GPU to its end, and they share no memory."""
        main = torch.cuda.current_stream(self.launcher.device)
        self._side.wait_stream(main)
        self.launcher.stream = self._side.cuda_stream
        self.linear.lora_down(mixed, layer.lora, hidden, config=variant.lora_config)
        self._lora_up(hidden, layer.lora, beside=variant.lora is LoraPlacement.RESERVED)
        self.launcher.stream = main.cuda_stream
        self._multiply(variant, mixed[:3], layer.rkv, self._now.rkv)
        main.wait_stream(self._side)

    def _lora_up(self, hidden: Tensor, lora: Lora, *, beside: bool = False) -> None:
        self.linear.lora_up(hidden, lora, *self._gates(lora), beside=beside)

    def _gates(self, lora: Lora) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        b = self._now
        return b.w_raw, b.a, None if lora.v0 is None else b.v_mix, b.g

    def ffn_key(self, x: Tensor, layer: LayerKernels, out: Tensor) -> None:
        """The first product of the channel mix, with the squared ReLU behind it."""
        variant = self.variant("ffn_key", len(x), layer.ffn_key)
        mask = self.buffers.active_mask if self._key_leaves_mask(len(x), layer) else None
        if variant.method is Method.GEMV:
            if layer.ffn_key.quant is None:
                return self.linear.gemv(x, layer.ffn_key.weight, out, relu_square=True)
            options = {"relu_square": True, "active_mask": mask, "config": variant.config}
            return self.quant_linear.gemv(x, layer.ffn_key.quant, out, **options)
        if variant.method in QUANT_METHODS:
            self.many(variant, x, layer.ffn_key.quant, out, layer.ffn_key.weight, relu_square=True, active_mask=mask)
            if variant.method is Method.FP8_CUBLAS and not self._squares_late(len(x), layer):
                self.linear.relu_square_(out)
            return
        self._make_dense(layer.ffn_key)
        if variant.method is Method.CUBLAS:
            self.matmul(x, layer.ffn_key.weight, out)
            self.linear.relu_square_(out)
        else:
            self.gemm.gemm(x, layer.ffn_key.gemm, out, relu_square=True, config=variant.config, active_mask=mask)

    def ffn_value(self, hidden: Tensor, layer: LayerKernels, out: Tensor) -> None:
        """The second, of which most inputs are zero."""
        matrix = layer.ffn_value
        variant = self.variant("ffn_value", len(hidden), matrix)
        kernels, weight = self._few(matrix)
        if variant.method in QUANT_METHODS:
            self.many(variant, hidden, matrix.quant, out, matrix.weight, square_x=self._squares_late(len(hidden), layer))
        elif variant.method is Method.SPARSE:
            kernels.sparse_ffn(hidden, weight, out)
        elif variant.method is Method.MASKED:
            mask = self.buffers.active_mask
            if not self._key_leaves_mask(len(hidden), layer):
                self.linear.build_active_mask(hidden, mask)
            kernels.masked_ffn(hidden, mask, weight, out)
        else:
            self._make_dense(matrix)
            if variant.method is Method.CUBLAS:
                self.matmul(hidden, matrix.weight, out, in_out=True)
            else:
                self.gemm.gemm(hidden, matrix.gemm, out, config=variant.config)

    def product(self, name: Product, x: Tensor, matrix: MatrixKernels, out: Tensor) -> None:
        """One of the plain products: "output" or "head"."""
        self._multiply(self.variant(name, len(x), matrix), x, matrix, out)

    def _multiply(self, variant: Variant, x: Tensor, matrix: MatrixKernels, out: Tensor) -> None:
        if variant.method is Method.GEMV and matrix.quant is None:
            return self.linear.gemv(x, matrix.weight, out)
        if variant.method is Method.GEMV:
            return self.quant_linear.gemv(x, matrix.quant, out, config=variant.config)
        if variant.method in QUANT_METHODS:
            return self.many(variant, x, matrix.quant, out, matrix.weight)
        self._make_dense(matrix)
        if variant.method is Method.CUBLAS:
            self.matmul(x, matrix.weight, out)
        else:
            self.gemm.gemm(x, matrix.gemm, out, config=variant.config)

    def _few(self, matrix: MatrixKernels) -> tuple[Linear, Tensor] | tuple[QuantLinear, QuantMatrix]:
        """Return the kernels for few tokens that read a matrix, and what they read."""
        return (self.linear, matrix.weight) if matrix.quant is None else (self.quant_linear, matrix.quant)

    def _make_dense(self, matrix: MatrixKernels) -> None:
        """Fill `matrix.weight` where it is only the room for a quantised one."""
        if matrix.quant is not None:
            self.dequantise(matrix.quant, matrix.weight)

    def _squares_late(self, num_tokens: int, layer: LayerKernels) -> bool:
        """Return whether "ffn_key" leaves the squared ReLU to what quantises the tokens of "ffn_value"."""
        quantised = self.variant("ffn_value", num_tokens, layer.ffn_value).method in (Method.FP8, Method.FP8_CUBLAS)
        return quantised and self.variant("ffn_key", num_tokens, layer.ffn_key).method is Method.FP8_CUBLAS

    def _key_leaves_mask(self, num_tokens: int, layer: LayerKernels) -> bool:
        """Return whether "ffn_key" is done so that it tells which units are active, for MASKED "ffn_value"."""
        if self.variant("ffn_value", num_tokens, layer.ffn_value).method is not Method.MASKED:
            return False
        variant, matrix = self.variant("ffn_key", num_tokens, layer.ffn_key), layer.ffn_key.gemm
        if variant.method in QUANT_METHODS:
            return self.many.leaves_mask(variant, num_tokens, layer.ffn_key.quant)
        if variant.method is not Method.GEMM:
            return variant.method is Method.GEMV and layer.ffn_key.quant is not None and layer.ffn_key.quant.M % MASK_UNITS == 0
        config = variant.config or self.gemm.tile_config(num_tokens, matrix)
        return config.leaves_mask(num_tokens, matrix)

    def variant(self, name: Product, num_tokens: int, matrix: MatrixKernels) -> Variant:
        """Return how a product of so many tokens is done."""
        if (chosen := known_variant(name, num_tokens, self._chosen, self.many_tokens)) is not None:
            return chosen
        if matrix.quant is not None:
            if num_tokens > GEMV_ROWS and name == "ffn_value" and self.quant_linear.masked_ffn_fits(num_tokens, matrix.quant):
                return MASKED
            if num_tokens <= (MAX_SPARSE if name == "ffn_value" else MAX_GEMV):
                return {"ffn_value": SPARSE, "rkv": GEMV_RKV}.get(name, GEMV)
            return (self.many and self.many.variant(num_tokens, matrix.quant)) or CUBLAS
        if num_tokens <= GEMV_ROWS:
            return SPARSE if name == "ffn_value" else GEMV_RKV if name == "rkv" else GEMV
        if name == "ffn_value" and self.linear.masked_ffn_fits(num_tokens, *matrix.weight.shape):
            return MASKED
        return GEMM if name == "ffn_key" and matrix.gemm else CUBLAS  # which would leave the squared ReLU to another pass

    def choose(self, name: Product, num_tokens: int, variant: Variant | None) -> None:
        """Do a product of so many tokens in this way from now on; None: as where nothing was tuned."""
        self._chosen.pop((name, num_tokens), None)
        if variant is not None:
            self._chosen[name, num_tokens] = variant

    def variants(self, name: Product, num_tokens: int, layer: LayerKernels) -> list[Variant]:
        """Return the ways in which a product of so many tokens can be done here; the layers are alike, or nearly."""
        matrix = self.prepared.head if name == "head" else getattr(layer, name)
        if matrix.quant is not None:
            return self._quant_variants(name, num_tokens, matrix, layer.lora)
        if name == "rkv":
            return self._rkv_variants(num_tokens, layer)
        variants = [CUBLAS]
        if matrix.gemm is not None:
            variants += [Variant(Method.GEMM, tile) for tile in self.gemm.tile_configs(num_tokens, matrix.gemm)]
        if name == "ffn_value":
            fits = self.linear.masked_ffn_fits(num_tokens, *matrix.weight.shape)
            return variants + [SPARSE] * (num_tokens <= MAX_SPARSE) + [MASKED] * fits
        return variants + [GEMV] * (num_tokens <= MAX_GEMV)

    def _quant_variants(self, name: Product, num_tokens: int, matrix: MatrixKernels, lora: Lora) -> list[Variant]:
        """The same of a quantised matrix."""
        dense = [CUBLAS]
        if matrix.gemm is not None:
            dense.append(Variant(Method.GEMM, self.gemm.tile_config(num_tokens, matrix.gemm)))
        if self.many is not None:
            dense += self.many.variants(num_tokens, matrix.quant)
        few = [Variant(Method.GEMV, tile) for tile in self.quant_linear.configs(num_tokens)] if num_tokens <= MAX_GEMV else []
        if name == "rkv":
            places = (LoraPlacement.BEFORE, LoraPlacement.CONCURRENT)
            found = [dataclasses.replace(variant, lora=place) for place in places for variant in dense + few]
            found += [dataclasses.replace(variant, lora=LoraPlacement.FUSED_DOWN) for variant in few]
            found += self.many.sparing_variants(num_tokens, matrix.quant, lora) if self.many else []
            tiles = self.quant_linear.inputs_configs(num_tokens, matrix.quant, lora)
            return found + [Variant(Method.GEMV, tile, LoraPlacement.FUSED) for tile in tiles]
        if name == "ffn_value":
            masked = self.quant_linear.masked_ffn_fits(num_tokens, matrix.quant)
            return dense + [SPARSE] * (num_tokens <= MAX_SPARSE) + [MASKED] * masked
        return dense + few

    def _rkv_variants(self, num_tokens: int, layer: LayerKernels) -> list[Variant]:
        matrix, lora, gemm = layer.rkv.gemm, layer.lora, Method.GEMM
        tiles = [None] if matrix is None else [None, self.gemm.tile_config(num_tokens, matrix)]
        variants = [
            Variant(gemm if tile else Method.CUBLAS, tile, placement)
            for placement in (LoraPlacement.BEFORE, LoraPlacement.CONCURRENT)
            for tile in tiles
        ]
        if matrix is not None:
            tiles = self.gemm.project_configs(num_tokens, matrix, layer.gemm_lora)
            variants += [Variant(gemm, tile, LoraPlacement.FUSED_DOWN) for tile in tiles]
            for tile in self.gemm.sparing_configs(num_tokens, matrix):
                configs = reserved_configs(num_tokens, lora.width, lora.ranks, self.gemm.reserved_sms(tile))
                variants += [Variant(gemm, tile, LoraPlacement.RESERVED, config) for config in configs]
            tiles = self.gemm.inputs_configs(num_tokens, matrix, lora)
            variants += [Variant(gemm, tile, LoraPlacement.FUSED) for tile in tiles]
        return variants + [GEMV_RKV] * (num_tokens <= MAX_GEMV)


def _shrink(tensor: Tensor, n: int) -> Tensor:
    """Return the first part of [.., max, C] as a contiguous [.., n, C]."""
    dims = (*tensor.shape[:-2], n, tensor.shape[-1])
    return tensor.view(-1)[: torch.Size(dims).numel()].view(dims)
