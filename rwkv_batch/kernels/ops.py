"""The ops of the forward pass as GPU kernels, with the names and meanings of `reference.py`.

Buffers are made once for the largest step and reused by every layer and step, so that a CUDA graph may capture them: what an op
returns is overwritten by the next layer, and logits by the next step. The residual stream is fp32, all between kernels fp16.

A product can be done in several ways, which differ in the order of their sums; `tune` times them for the sizes of decode graphs
and short prefills. So a row's logits may differ in the last bits between sizes, never with its neighbours in one size.
"""

import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor

from rwkv_batch.kernels.card_cache import recall, remember
from rwkv_batch.kernels.compiler import cache_folder
from rwkv_batch.kernels.cublaslt import MatMul
from rwkv_batch.kernels.gemm import Down, Gemm, Matrix, Plan
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.linear import MARKS, MAX_GEMV, MAX_SPARSE, SMALL_UP, Linear, LowRank, spare_plans
from rwkv_batch.kernels.linear import Plan as LowRankPlan
from rwkv_batch.kernels.mix import Mix, PackedRows, WkvInputs, WkvLayer
from rwkv_batch.model.reference_ops import Rows
from rwkv_batch.model.weights import Layer, Weights

log = logging.getLogger("rwkv_batch.engine")

HALF = torch.float16
GEMV_ROWS = 4  # up to which dot products are taken where nothing was timed
PLANES = (0, 2, 3, 1, 4, 5)  # of `Layer.att_mix`, so that r, k and v stand together: r, k, v, w, a, g
OUTPUT_UNIT = 8  # logits of a row begin at multiples of 16 bytes
OWN = "own"  # a way: `Gemm` with the plan that it chooses
PROJECT = "project "  # before a plan of "rkv": the pairs' first halves are part of the product
INPUTS = "inputs "  # the same: the pairs are part of the launch with both their halves
BESIDE = " beside"  # in a way of "rkv": the low-rank pairs run at the same time, on another stream
SPARE = " spare "  # before their plan: the same, on multiprocessors that the product leaves free
TIMED_BYTES = 256 * 2**20  # of weights that a timing reads, more than stay in the L2 cache
PRODUCTS = ("rkv", "output", "ffn_key", "ffn_value", "head")
IN_PLACE_ROWS = 64  # up to which ways that are nearly as fast alone are compared in whole steps: kernels overlap there
NEARLY, RIVALS = 1.12, 6  # times the fastest, and how many at most
FEW_ROWS, NEARLY_FEW = 16, 1.3  # up to which a way's own time says less than what it leaves room for beside it
CLOSE, LAST_RIVALS = 1.015, 3  # the same of whole steps, for few rows: those ways are compared again


@dataclass
class Buffers:
    """Room for a step of N tokens; fp16 [N, C] but where said."""

    x: Tensor  # fp32, the residual stream
    mixed: Tensor  # [6, N, C]
    rkv: Tensor  # [3, N, C]
    normed: Tensor
    decay: Tensor  # fp32, before the sigmoid
    rate: Tensor
    blend: Tensor
    gate: Tensor
    first_value: Tensor
    heads: Tensor
    y: Tensor
    hidden: Tensor  # [N, F]

    @classmethod
    def of(cls, n: int, c: int, f: int, device: torch.device) -> "Buffers":
        """Allocate them."""
        dims = {"mixed": (6, n, c), "rkv": (3, n, c), "hidden": (n, f)}
        single = ("x", "decay")
        return cls(**{
            item.name: torch.empty(
                dims.get(item.name, (n, c)), dtype=torch.float32 if item.name in single else HALF, device=device
            )
            for item in fields(cls)
        })  # fmt: skip

    def first(self, n: int) -> "Buffers":
        """Return contiguous views for fewer tokens of the same memory."""
        return Buffers(**{name: _shrink(tensor, n) for name, tensor in vars(self).items()})


@dataclass(frozen=True)
class Prepared:
    """A layer's tensors as the kernels want them."""

    low_rank: LowRank
    wkv: WkvLayer
    att_mix: Tensor  # [6, C] in the order of PLANES
    ffn_mix: Tensor  # [1, C]

    @classmethod
    def of(cls, layer: Layer) -> "Prepared":
        """Prepare `layer`."""
        vectors = WkvLayer(layer.k_k, layer.k_a, layer.r_k.flatten(), layer.ln_x_weight, layer.ln_x_bias)
        return cls(LowRank.pack(layer), vectors, layer.att_mix[list(PLANES), 0].contiguous(), layer.ffn_mix[:, 0])


class KernelOps:
    """All ops, for one set of weights on one GPU.

    max_tokens  of a step
    max_rows    whose logits a step may ask for
    """

    def __init__(self, weights: Weights, launcher: Launcher, *, max_tokens: int, max_rows: int):
        self.launcher = launcher
        self.matmul = MatMul(launcher)
        self.mix = Mix(launcher, overlap=True)
        self.linear = Linear(launcher, overlap=True)
        self.gemm = Gemm(launcher)
        self._side = torch.cuda.Stream(launcher.device)
        self._prepared = {id(layer): Prepared.of(layer) for layer in weights.layers}
        self._mixes = {id(layer.att_mix): self._prepared[id(layer)].att_mix for layer in weights.layers}
        self._mixes |= {id(layer.ffn_mix): self._prepared[id(layer)].ffn_mix for layer in weights.layers}
        self._num_outputs = weights.head.shape[0]
        self._head = _whole_units(weights.head)
        self._matrices = self._describe(weights.layers) if self.gemm.available else {}
        self._downs = self._describe_downs(weights.layers) if self._matrices else {}
        self._key = self._matrices.get(id(weights.layers[0].ffn_key))  # the other layers' are alike
        self._ways: dict[tuple[str, int], str] = {}  # (product, tokens) -> how it is done
        width, ffn_width = weights.shape.width, weights.layers[0].ffn_key.shape[0]
        self._value_shape = ffn_width, width  # of ffn_value
        self._all = Buffers.of(max_tokens, width, ffn_width, launcher.device)
        largest = max(prepared.low_rank.rank for prepared in self._prepared.values())
        self._low = torch.empty(max_tokens * largest, dtype=HALF, device=launcher.device)
        self._last = torch.empty(max_rows, width, dtype=HALF, device=launcher.device)
        self._logits = torch.empty(max_rows, self._head.shape[0], dtype=HALF, device=launcher.device)
        self._marks = torch.empty(-(-ffn_width // MARKS), dtype=torch.int32, device=launcher.device)  # of units that are on
        self._views: dict[int, Buffers] = {}
        self._now = self._all  # of the step that runs
        self._packed: PackedRows | None = None

    # The ops, in the order in which a step calls them.

    def embed(self, embedding: Tensor, tokens: Tensor | None, rows: Rows, last_ids: Tensor) -> Tensor:
        """See `reference.embed`. Begins a step: launches go to torch's current stream until the next one."""
        self.launcher.use_current_stream()
        self._now = self._buffers(len(rows.slot_tensor) if tokens is None else len(tokens))
        self._packed = None if rows.is_decode else rows.packed or PackedRows.of(rows.slots, rows.lengths, rows.device)
        if tokens is None:
            self.mix.embed_decode(last_ids, rows.slot_tensor, embedding, self._now.x)
        else:
            self.mix.embed(tokens, embedding, self._now.x)
        return self._now.x

    def add_norm_mix(
        self, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, mix: Tensor, shift: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """See `reference.add_norm_mix`; `x` is changed in place, and six planes come in the order of PLANES."""
        mixed, mix = self._now.mixed[: len(mix)], self._mixes[id(mix)]
        if self._packed is None:
            # What this layer remembers was written a step ago, the slots before this one.
            self.mix.add_norm_mix_decode(x, y, weight, bias, mix, shift, rows.slot_tensor, mixed, settled=True)
        else:
            self.mix.add_norm_mix_prefill(x, y, weight, bias, mix, shift, self._packed, self._now.normed, mixed)
        return x, mixed

    def time_mix(
        self, mixed: Tensor, layer: Layer, wkv_state: Tensor, rows: Rows, first_value: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `reference.time_mix`."""
        b, prepared = self._now, self._prepared[id(layer)]
        low = self._low_rank_room(mixed.shape[1], prepared.low_rank.rank)
        blend = None if first_value is None else b.blend
        self._attention_inputs(mixed, layer, prepared.low_rank, low)
        inputs = WkvInputs(*b.rkv.unbind(), b.decay, b.rate, blend, b.gate, b.first_value)
        if self._packed is None:
            self.mix.wkv_decode(inputs, prepared.wkv, wkv_state, rows.slot_tensor, b.heads, settled=True)
        else:
            self.mix.wkv_prefill(inputs, prepared.wkv, wkv_state, self._packed, b.heads)
        self._product("output", b.heads, layer.output, b.y)
        return b.y, b.first_value

    def channel_mix(self, mixed: Tensor, layer: Layer) -> Tensor:
        """See `reference.channel_mix`."""
        b = self._now
        self._product("ffn_key", mixed[0], layer.ffn_key, b.hidden)
        self._product("ffn_value", b.hidden, layer.ffn_value, b.y)
        return b.y

    def logits(self, x: Tensor, y: Tensor, weights: Weights, index: Tensor | None) -> Tensor:
        """See `reference.logits`; fp16, in a buffer that the next step overwrites."""
        num_rows = x.shape[0] if index is None else len(index)
        last, logits = self._last[:num_rows], self._logits[:num_rows]
        self.mix.add_norm(x, y, index, weights.ln_out_weight, weights.ln_out_bias, last)
        self._product("head", last, self._head, logits)
        return logits[:, : self._num_outputs]

    # Products and the ways to do them.

    def _attention_inputs(self, mixed: Tensor, layer: Layer, pack: LowRank, low: Tensor) -> None:
        """Project r, k and v, and everything that goes through a low-rank pair."""
        chosen = self._way("rkv", mixed.shape[1])
        way, spare, pairs = chosen.removesuffix(BESIDE).partition(SPARE)
        beside = way != chosen
        if way == "gemv":
            self.linear.project(mixed, layer.rkv, pack, self._now.rkv, low)
            self._low_rank_up(low, pack)
            return
        if way.startswith(INPUTS):
            plan = _plan(way.removeprefix(INPUTS))
            self.gemm.inputs(mixed, self._matrices[id(layer.rkv)], pack, self._now.rkv, low, self._gates(pack), plan)
            return
        if way.startswith(PROJECT):
            down, plan = self._downs[id(pack)], _plan(way.removeprefix(PROJECT))
            self.gemm.project(mixed, self._matrices[id(layer.rkv)], down, self._now.rkv, low, plan)
            self._low_rank_up(low, pack)
            return
        if beside:  # neither fills the GPU to its end, and they share no memory
            main = torch.cuda.current_stream(self.launcher.device)
            self._side.wait_stream(main)
            self.launcher.stream = self._side.cuda_stream
        self.linear.low_rank_down(mixed, pack, low, plan=LowRankPlan(*map(int, pairs.split())) if spare else None)
        self._low_rank_up(low, pack, SMALL_UP if spare else None)
        if beside:
            self.launcher.stream = main.cuda_stream
        if way == "cublas":
            self.matmul(mixed[:3], layer.rkv, self._now.rkv)
        else:
            self.gemm.gemm(mixed[:3], self._matrices[id(layer.rkv)], self._now.rkv, plan=_plan(way))
        if beside:
            main.wait_stream(self._side)

    def _low_rank_up(self, low: Tensor, pack: LowRank, plan: LowRankPlan | None = None) -> None:
        self.linear.low_rank_up(low, pack, *self._gates(pack), plan=plan)

    def _gates(self, pack: LowRank) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        b = self._now
        return b.decay, b.rate, None if pack.v0 is None else b.blend, b.gate

    def _product(self, name: str, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """One of the products of a step: "output", "ffn_key" with the squared ReLU behind it, "ffn_value", "head"."""
        way, squared = self._way(name, len(x)), name == "ffn_key"
        if way == "gemv":
            self.linear.gemv(x, weight, out, relu_square=squared)
        elif way == "sparse":
            self.linear.sparse_project(x, weight, out)
        elif way == "union":
            if not self._key_marks(len(x)):
                self.linear.mark_units(x, self._marks)
            self.linear.union_project(x, self._marks, weight, out)
        elif way == "cublas":
            self.matmul(x, weight, out, in_out=name == "ffn_value")
            if squared:
                self.linear.relu_square_(out)
        else:
            marks = self._marks if squared and self._key_marks(len(x)) else None
            self.gemm.gemm(x, self._matrices[id(weight)], out, relu_square=squared, plan=_plan(way), marks=marks)

    def _key_marks(self, num_tokens: int) -> bool:
        """Return whether "ffn_key" is done so that it marks the units that are on, for the "union" of "ffn_value"."""
        way = self._way("ffn_key", num_tokens)
        if self._way("ffn_value", num_tokens) != "union" or way in ("gemv", "cublas"):
            return False
        plan = _plan(way) or self.gemm.plan(num_tokens, self._key)
        return plan.marks(num_tokens, self._key)

    def _way(self, name: str, num_tokens: int) -> str:
        known = self._ways.get((name, num_tokens))
        if known is not None:
            return known
        if num_tokens <= GEMV_ROWS:
            return "sparse" if name == "ffn_value" else "gemv"
        if name == "ffn_value" and self.linear.union_fits(num_tokens, *self._value_shape):
            return "union"
        return OWN if name == "ffn_key" and self._key else "cublas"  # which would leave the squared ReLU to another pass

    def tune(self, weights: Weights, sizes: list[int], decode_step: Callable[[int], object]) -> None:
        """Choose for every batch size how each product is done; what was found is remembered for the card.

        decode_step  starts a decode step of so many rows
        """
        file = cache_folder() / f"ways-{torch.cuda.get_device_name(self.launcher.device).replace(' ', '-')}.json"
        known = recall(file, dict[str, str])
        shape = weights.shape
        generator = torch.Generator(device=weights.device).manual_seed(0)
        self._all.mixed.normal_(generator=generator)
        self._all.heads.normal_(generator=generator)
        for size in sizes:
            keys: dict[str, str] = {}
            times: dict[str, dict[str, float]] = {}
            for name in PRODUCTS if size <= len(self._last) else PRODUCTS[:-1]:
                runs = self._runs(name, size, weights)
                offer = zlib.crc32(",".join(runs).encode())
                key = keys[name] = f"{name},{size},{shape.width},{shape.ffn_width},{self.launcher.digest},{offer:08x}"
                if known.get(key) not in runs:
                    times[name] = {way: self.launcher.time(run) for way, run in runs.items()}
                    known[key] = min(times[name], key=times[name].get)
                self._ways[name, size] = known[key]
            if size <= min(IN_PLACE_ROWS, len(self._last)):
                self._choose_in_place(size, times, decode_step)
                known |= {keys[name]: self._ways[name, size] for name in times}
        self.matmul.save()
        remember(file, known)

    def _choose_in_place(self, size: int, alone: dict[str, dict[str, float]], decode_step: Callable[[int], object]) -> None:
        """Choose for each product, of the ways that took little longer alone, the one with which a whole step is fastest.

        Few rows go through the products twice: what was chosen first was timed beside ways that others have left since.
        """
        few = size <= FEW_ROWS
        rivals = {name: _fastest(times, NEARLY_FEW if few else NEARLY, RIVALS) for name, times in alone.items()}
        for _ in range(2 if few else 1):
            for name, ways in rivals.items():
                times = {}
                for way in ways if len(ways) > 1 else []:
                    self._ways[name, size] = way
                    times[way] = self.launcher.time(lambda: decode_step(size), rounds=6)
                if times:
                    rivals[name] = _fastest(times, CLOSE, LAST_RIVALS)
                self._ways[name, size] = rivals[name][0]

    def _runs(self, name: str, size: int, weights: Weights) -> dict[str, Callable[[], object]]:
        """Return what to time: each way a product of `size` tokens can be done, over several layers' weights."""
        b = self._now = self._buffers(size)
        layers = weights.layers[: max(1, TIMED_BYTES // _bytes_of(name, weights.layers[0], self._head))]
        if name == "ffn_value":  # as sparse as a trained model's
            b.hidden.normal_().relu_().mul_(torch.rand_like(b.hidden) > 0.75)
            if self.linear.union_fits(size, *self._value_shape):
                self.launcher.use_current_stream()
                self.linear.mark_units(b.hidden, self._marks)
        x, y = b.mixed[:3] if name == "rkv" else b.hidden if name == "ffn_value" else b.heads, b.y
        if name == "head":
            x, y = self._last[:size].normal_(), self._logits[:size]
        elif name == "rkv":
            y = b.rkv
        elif name == "ffn_key":
            y = b.hidden
        matrices = [self._head] if name == "head" else [getattr(layer, name) for layer in layers]
        self.matmul.tune([(x, matrix, y) for matrix in matrices], in_out=name == "ffn_value")

        def run(way: str) -> None:
            self._ways[name, size] = way
            for layer, matrix in zip(weights.layers, matrices, strict=False):
                if name == "rkv":
                    pack = self._prepared[id(layer)].low_rank
                    self._attention_inputs(b.mixed, layer, pack, self._low_rank_room(size, pack.rank))
                else:
                    self._product(name, x, matrix, y)

        return {way: lambda way=way: run(way) for way in self.ways(name, size, layers[-1])}

    def ways(self, name: str, num_tokens: int, layer: Layer) -> list[str]:
        """Return the ways in which one of PRODUCTS, of so many tokens, can be done here; the layers are alike."""
        ways, weight = ["cublas"], self._head if name == "head" else getattr(layer, name)
        matrix, pack = self._matrices.get(id(weight)), self._prepared[id(layer)].low_rank
        if matrix is not None:
            ways += map(_way_of, [self.gemm.plan(num_tokens, matrix)] if name == "rkv" else self.gemm.plans(num_tokens, matrix))
        if name == "rkv":
            ways += [way + BESIDE for way in ways]
        if name == "rkv" and matrix is not None:
            ways += [PROJECT + _way_of(plan) for plan in self.gemm.project_plans(num_tokens, matrix, self._downs[id(pack)])]
            for plan in self.gemm.sparing_plans(num_tokens, matrix):
                downs = spare_plans(num_tokens, pack.width, pack.ranks, self.gemm.spare(plan))
                ways += [_way_of(plan) + SPARE + _way_of(down) for down in downs]
            ways += [INPUTS + _way_of(plan) for plan in self.gemm.inputs_plans(num_tokens, matrix, pack)]
        if name == "ffn_value":
            ways += ["sparse"] * (num_tokens <= MAX_SPARSE) + ["union"] * self.linear.union_fits(num_tokens, *self._value_shape)
        else:
            ways += ["gemv"] * (num_tokens <= MAX_GEMV)
        return ways

    def choose(self, name: str, num_tokens: int, way: str | None) -> None:
        """Do a product of so many tokens in one of its ways from now on; None: as where nothing was tuned."""
        self._ways.pop((name, num_tokens), None)
        if way is not None:
            self._ways[name, num_tokens] = way

    def _describe(self, layers: list[Layer]) -> dict[int, Matrix]:
        """Return how the copy engine reads each matrix that `Gemm` can take."""
        matrices = [(t, False) for layer in layers for t in (layer.rkv, layer.output, layer.ffn_key)]
        matrices += [(layer.ffn_value, True) for layer in layers] + [(self._head, False)]
        suitable = [(t, transposed) for t, transposed in matrices if not (t.shape[-1] % 64 or t.shape[-2] % 64)]
        return {id(t): self.gemm.prepare(t, transposed=transposed) for t, transposed in suitable}

    def _describe_downs(self, layers: list[Layer]) -> dict[int, Down]:
        packs = [self._prepared[id(layer)].low_rank for layer in layers if id(layer.rkv) in self._matrices]
        return {id(pack): self.gemm.prepare_down(pack.down, pack.ranks) for pack in packs}

    # Memory.

    def _buffers(self, num_tokens: int) -> Buffers:
        if num_tokens not in self._views:
            if len(self._views) > 64:  # views are cheap to make and need not be kept for every length of prefill
                self._views.clear()
            self._views[num_tokens] = self._all.first(num_tokens)
        return self._views[num_tokens]

    def _low_rank_room(self, num_tokens: int, rank: int) -> Tensor:
        return self._low[: num_tokens * rank].view(num_tokens, rank)


def _fastest(times: dict[str, float], nearly: float, most: int) -> list[str]:
    """Return the fastest way and those that took up to `nearly` times as long, at most so many, the fastest first."""
    return [way for way in sorted(times, key=times.get) if times[way] <= nearly * min(times.values())][:most]


def _way_of(plan: Plan | LowRankPlan) -> str:
    return " ".join(map(str, plan))


@lru_cache
def _plan(way: str) -> Plan | None:
    return None if way == OWN else Plan(*map(int, way.split()))


def _shrink(tensor: Tensor, n: int) -> Tensor:
    """Return the first part of [.., max, C] as a contiguous [.., n, C]."""
    dims = (*tensor.shape[:-2], n, tensor.shape[-1])
    return tensor.view(-1)[: torch.Size(dims).numel()].view(dims)


def _whole_units(head: Tensor) -> Tensor:
    """Return the head with a multiple of OUTPUT_UNIT rows; what is added lies behind it in the file, or is zero."""
    rows = -(-head.shape[0] // OUTPUT_UNIT) * OUTPUT_UNIT
    if (head.storage_offset() + rows * head.shape[1]) * head.element_size() <= head.untyped_storage().nbytes():
        return head.as_strided((rows, head.shape[1]), head.stride())
    return torch.nn.functional.pad(head, (0, 0, 0, rows - head.shape[0]))


def _bytes_of(name: str, layer: Layer, head: Tensor) -> int:
    return head.nbytes if name == "head" else getattr(layer, name).nbytes
