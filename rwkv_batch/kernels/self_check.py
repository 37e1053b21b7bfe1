"""Each op's kernels against the reference op, once, on the card that is there; what fails runs on the reference op instead.

A driver, a compiler or a card that nobody tried must cost speed, never right answers. The result is kept beside the built
library, so that the check runs once for each build and card; but a check that came to no result runs again at the next start.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from rwkv_batch.kernels.card_cache import recall, remember
from rwkv_batch.kernels.hip.ops import HipOps
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.layer_kernels import PLANES, MatrixKernels
from rwkv_batch.kernels.mix import SPREAD_TOKENS
from rwkv_batch.kernels.ops import KernelOps
from rwkv_batch.kernels.rwkv6 import self_check as rwkv6
from rwkv_batch.kernels.states.fill import StateFill
from rwkv_batch.kernels.variants import Method, Product, Variant
from rwkv_batch.model import reference_ops
from rwkv_batch.model.packed_rows import CapturedRows, PackedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.model.weight import Weight
from rwkv_batch.model.weights import HEAD_SIZE, Layer, ModelShape, Weights
from rwkv_batch.served.architectures import NEWEST
from sampling import self_check as sampling_check

log = logging.getLogger("rwkv_batch.engine")

SAMPLER, FILL, GRAPHS, RWKV6 = "sampler", "state", "graphs", "RWKV-6"
OPS = ("embed", "add_norm_mix", "time_mix", "channel_mix", "logits")
PRODUCTS: dict[str, tuple[Product, ...]] = {  # of these ops
    "time_mix": ("rkv", "output"),
    "channel_mix": ("ffn_key", "ffn_value"),
    "logits": ("head",),
}
TOLERANCE = 1e-2  # relative RMS; fp16 rounding between kernels leaves about 1e-3
# Of products whose tokens are rounded to e4m3: with that rounding alone, in plain torch, time_mix differs by up to 0.12 here.
TOLERANCES = dict.fromkeys((Method.FP8, Method.FP8_CUBLAS), 0.25)
WIDTH, VOCAB, RANKS = 256, 512, (32, 32, 16, 64)
QUANT_WIDTH = 1024  # of quantised models: narrow ones are read by other kernels than those of use
SLOTS = 100
EXTENT = 4  # of the check; raised when it sees more, so that cards checked before are checked again
CASES = ([1], [1] * 7, [1] * 16, [1] * 70, [40, 1, 7, 33])  # lengths of rows
RESTORED = {plane: i for i, plane in enumerate(PLANES)}
ORDER = [RESTORED[i] for i in range(len(PLANES))]  # from the kernels' order of planes back to the reference's


Expected = dict[tuple[int, int], list[Tensor]]  # by the seed of the weights and the number of the case


class PartlyReferenceOps(KernelOps):
    """Kernel ops of which some are replaced by the reference's. No CUDA graph can hold those."""

    def __init__(self, weights: Weights, launcher: Launcher, replaced: frozenset[str], **limits: int):
        super().__init__(weights, launcher, **limits)
        self.replaced = replaced

    def embed(self, embedding, tokens, rows, last_ids):
        x = super().embed(embedding, tokens, rows, last_ids)
        return x.copy_(reference_ops.embed(embedding, tokens, rows, last_ids)) if "embed" in self.replaced else x

    def add_norm_mix(self, x, y, weight, bias, mix, shift, rows):
        if "add_norm_mix" not in self.replaced:
            return super().add_norm_mix(x, y, weight, bias, mix, shift, rows)
        ours = len(mix) == len(PLANES)  # in the kernels' order
        added, mixed = reference_ops.add_norm_mix(x, y, weight, bias, (mix[ORDER] if ours else mix)[:, None], shift, rows)
        return x.copy_(added), (mixed[list(PLANES)] if ours else mixed).half()

    def time_mix(self, mixed, layer, wkv_state, rows, v_first):
        if "time_mix" not in self.replaced:
            return super().time_mix(mixed, layer, wkv_state, rows, v_first)
        first = None if v_first is None else v_first.float()
        y, first = reference_ops.time_mix(mixed[ORDER].float(), layer.source, wkv_state, rows, first)
        return y.half(), self._now.v_first.copy_(first)

    def channel_mix(self, mixed, layer):
        if "channel_mix" not in self.replaced:
            return super().channel_mix(mixed, layer)
        return reference_ops.channel_mix(mixed.float(), layer.source).half()

    def logits(self, x, y, model, index):
        if "logits" not in self.replaced:
            return super().logits(x, y, model, index)
        return reference_ops.logits(x, y, model.source, index)


class PartlyReferenceHipOps(PartlyReferenceOps, HipOps):
    """The same on AMD GPUs."""


def partly_reference(weights: Weights, launcher: Launcher, replaced: frozenset[str], **limits: int) -> KernelOps | ModuleType:
    """Return the kernel ops of this card but for some, which are the reference's; of RWKV-6, all or none."""
    if weights.architecture != NEWEST:
        return reference_ops if RWKV6 in replaced else rwkv6.ops_for(weights, launcher, **limits)
    ops = PartlyReferenceHipOps if torch.version.hip else PartlyReferenceOps
    return ops(weights, launcher, replaced, **limits)


def failing(
    launcher: Launcher, wkv_dtype: torch.dtype, file: Path | None = None, *, quant: str = "", architecture: str = NEWEST
) -> list[str]:
    """Return the names of ops, SAMPLER and FILL, whose kernels disagree with the reference here; remembered in `file`.

    quant         format of the matrices, "" = fp16
    architecture  of the model; of RWKV-6 the ops are checked together, as RWKV6

    On AMD GPUs, GRAPHS too, where a captured step does not do what the same launches do.
    What cannot be run counts too, until the next start. OutOfMemoryError where there is no memory to find it out.
    """
    key = f"{torch.cuda.get_device_name(launcher.device)}, torch {torch.__version__}, state {wkv_dtype}, check {EXTENT}"
    key += f", {quant}" if quant else ""
    key += f", {architecture}" if architecture != NEWEST else ""
    known = recall(file, dict[str, list[str]]) if file is not None else {}
    wrong = known.get(key)
    if wrong is None or not {*wrong} <= {*OPS, SAMPLER, FILL, GRAPHS, RWKV6}:
        started = time.monotonic()
        wrong, broken = _check_all(launcher, wkv_dtype, quant, architecture)
        log.info("checked the kernels against plain torch in %.1f s", time.monotonic() - started)
        if file is not None and not broken:
            remember(file, known | {key: wrong})
        wrong += broken
    for name in wrong:
        if name == GRAPHS:
            log.error("captured steps give WRONG RESULTS or none on this card: kernels are launched one by one, slowly")
        else:
            log.error("the kernels of %s give WRONG RESULTS or none on this card: it runs in plain torch, slowly", name)
    return wrong


def rehearse(device: torch.device, wkv_dtype: torch.dtype) -> None:
    """Run what the check of a model that is not quantised compares with: torch takes its time to load each of its own kernels,
    which so passes while ours are being built."""
    with contextlib.suppress(RuntimeError), torch.inference_mode():  # the check itself finds out what cannot be run
        model = Model(random_weights(device), reference_ops)
        for lengths in CASES:
            _run(model, lengths, wkv_dtype)
        sampling_check.rehearse(device)


def _check_all(
    launcher: Launcher, wkv_dtype: torch.dtype, quant: str, architecture: str = NEWEST
) -> tuple[list[str], list[str]]:
    """Return the names of what gives wrong results and of what cannot be run."""
    expected: Expected = {}
    checks: dict[str, Callable[[], bool]] = {
        name: lambda name=name: _is_right(name, launcher, wkv_dtype, quant, expected) for name in OPS
    }
    if architecture != NEWEST:
        checks = {RWKV6: lambda: rwkv6.agrees(launcher, wkv_dtype)}
    checks[SAMPLER] = lambda: _samples(launcher)
    checks[FILL] = lambda: _fills(launcher, wkv_dtype)
    if torch.version.hip:
        checks[GRAPHS] = lambda: _captures(launcher, wkv_dtype, quant)
    wrong, broken = [], []
    for name, agrees in checks.items():
        try:
            if not agrees():
                wrong.append(name)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            log.error("%s: %s", name, error)
            broken.append(name)
    return wrong, broken


def _samples(launcher: Launcher) -> bool:
    wrong = sampling_check.check(launcher.device, launcher.library)
    if wrong:
        log.error("sampling rules that the kernel gets wrong: %s", "; ".join(wrong))
    return not wrong


def _is_right(name: str, launcher: Launcher, wkv_dtype: torch.dtype, quant: str, expected: Expected) -> bool:
    """Return whether the op agrees for one of two models: where a head's output nearly vanishes, the norm behind it blows up
    rounding, and random numbers may hit that in one of them."""
    return any(_agrees(name, launcher, wkv_dtype, quant, seed, expected) for seed in range(2))


@torch.inference_mode()
def _agrees(name: str, launcher: Launcher, wkv_dtype: torch.dtype, quant: str, seed: int, all_expected: Expected) -> bool:
    """Run the forward pass with only this op on kernels, in every way that these sizes can be done, beside one with none.

    all_expected  what those with none gave, which is the same for every op
    """
    width = QUANT_WIDTH if quant else WIDTH
    weights = random_weights(launcher.device, quant=quant, width=width, seed=seed)
    limits = {"max_tokens": 256, "max_rows": 128}
    ops = partly_reference(weights, launcher, frozenset(OPS) - {name}, **limits)
    tested = Model(weights, ops)
    for number, lengths in enumerate(CASES):
        if (seed, number) not in all_expected:
            model = Model(weights, partly_reference(weights, launcher, frozenset(OPS), **limits))
            all_expected[seed, number] = _run(model, lengths, wkv_dtype)
        expected = all_expected[seed, number]
        ways = [(*way, SPREAD_TOKENS) for way in [("head", 0, None), *_variants(ops, name, lengths)]]
        if name == "time_mix" and max(lengths) > 1:
            ways.append(("head", 0, None, 1))  # so that rows as short as these have their recurrence spread over the GPU too
        for product, num_tokens, variant, spread_tokens in ways:
            ops.choose(product, num_tokens, variant)
            ops.mix.spread_tokens = spread_tokens
            tolerance = _tolerance(ops, name, lengths)
            try:
                got = _run(tested, lengths, wkv_dtype)
            except (RuntimeError, ValueError):
                log.error("op %s (%s by %s) cannot be run for rows of %s", name, product, variant, lengths)
                raise
            for one, other in zip(expected, got, strict=True):
                if not float((one - other).norm()) <= tolerance * float(one.norm()):  # NaN is a failure too
                    log.error("op %s (%s by %s): wrong for rows of %s", name, product, variant, lengths)
                    return False
            ops.choose(product, num_tokens, None)
    return True


def _tolerance(ops: KernelOps, name: str, lengths: list[int]) -> float:
    """Return how much the op may differ, as it is done now."""
    ways = [ops.variant(product, size, _matrix(ops, product)) for product, size in _sizes(name, lengths)]
    return max([TOLERANCE, *(TOLERANCES.get(way.method, 0) for way in ways)])


def _variants(ops: KernelOps, name: str, lengths: list[int]) -> list[tuple[Product, int, Variant]]:
    """Return the op's products, their tokens in such a step, and how they can be done."""
    layer = ops.prepared.layers[0]
    return [(product, size, way) for product, size in _sizes(name, lengths) for way in ops.variants(product, size, layer)]


def _sizes(name: str, lengths: list[int]) -> list[tuple[Product, int]]:
    return [(product, len(lengths) if product == "head" else sum(lengths)) for product in PRODUCTS.get(name, ())]


def _matrix(ops: KernelOps, product: Product) -> MatrixKernels:
    return ops.prepared.head if product == "head" else getattr(ops.prepared.layers[0], product)


@torch.inference_mode()
def _captures(launcher: Launcher, wkv_dtype: torch.dtype, quant: str) -> bool:
    """Take two decode steps launch by launch, and the same from the state before them by a graph of one."""
    device, num_rows = launcher.device, 3
    weights = random_weights(device, quant=quant, width=QUANT_WIDTH if quant else WIDTH)
    model = Model(weights, HipOps(weights, launcher, max_tokens=num_rows, max_rows=num_rows))
    state = State(weights.shape, num_rows, shift_dtype=torch.float16, wkv_dtype=wkv_dtype, device=device)
    rows = CapturedRows.decode(torch.arange(num_rows, device=device))
    stream, graph, seen = torch.cuda.Stream(device), torch.cuda.CUDAGraph(), []

    def step() -> Tensor:
        return model.forward(None, rows, state)

    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for captured in (False, True):
            if captured:
                stream.synchronize()
                with torch.cuda.graph(graph, stream=stream):
                    logits = step()
            state.clear(range(num_rows))
            state.last_ids.copy_(torch.arange(num_rows))
            for _ in range(2):
                if captured:
                    graph.replay()
                else:
                    logits = step()
                seen.append([t.float().clone() for t in (logits, state.shift, state.wkv)])
    stream.synchronize()
    return all(
        float((one - other).norm()) <= TOLERANCE * float(one.norm())
        for before, after in zip(seen[:2], seen[2:], strict=True)
        for one, other in zip(before, after, strict=True)
    )


@torch.inference_mode()
def _fills(launcher: Launcher, wkv_dtype: torch.dtype) -> bool:
    """Copy one slot into some others, clear some more and let some change places, with the kernels and without."""
    shape, states = ModelShape(2, WIDTH, 4 * WIDTH, VOCAB, *RANKS), []
    for fill in (None, StateFill(launcher)):
        state = State(shape, SLOTS, shift_dtype=torch.float16, wkv_dtype=wkv_dtype, device=launcher.device, fill=fill)
        generator = torch.Generator(device=launcher.device).manual_seed(0)
        for tensor in (state.shift, state.wkv):
            tensor.normal_(generator=generator)
        state.put_many(range(1, SLOTS, 7), state.take(0))
        state.clear(range(2, SLOTS, 7))
        state.put_each(range(0, SLOTS, 2), state.take_many(range(SLOTS - 1, 0, -2)))
        states.append(state)
    one, other = states
    return torch.equal(one.shift, other.shift) and torch.equal(one.wkv, other.wkv)


def _run(model: Model, lengths: list[int], wkv_dtype: torch.dtype) -> list[Tensor]:
    """Return the logits of two steps and the state after them."""
    weights = model.weights
    generator = torch.Generator(device=weights.device).manual_seed(len(lengths))
    state = State(weights.shape, SLOTS, shift_dtype=torch.float16, wkv_dtype=wkv_dtype, device=weights.device)
    slots = [(7 * i + 3) % SLOTS for i in range(len(lengths))]
    logits = []
    for _ in range(2):
        tokens = torch.randint(0, VOCAB, (sum(lengths),), generator=generator, device=weights.device)
        logits.append(model.forward(tokens, PackedRows(slots, lengths, weights.device), state).float())
    return [*(t.clone() for t in logits), state.shift.float(), state.wkv.float()]


def random_weights(device: torch.device, num_layers: int = 2, *, quant: str = "", width: int = WIDTH, seed: int = 0) -> Weights:
    """Return a small model of random numbers in fp16, its matrices in the format `quant`."""
    generator, ffn_width = torch.Generator(device=device).manual_seed(seed), 4 * width

    def normal(*dims: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(*dims, generator=generator, device=device) * std + mean

    def matrix(*dims: int, inputs: int = width) -> Tensor:
        return normal(*dims, std=inputs**-0.5).half()

    def layer(first: bool) -> Layer:
        rank_w, rank_a, rank_v, rank_g = RANKS
        k_a = normal(width, std=0.1, mean=1)
        return Layer(
            **{f"{norm}_{kind}": normal(width, std=0.1, mean=float(kind == "weight"))
               for norm in ("ln1", "ln2", "ln_x") for kind in ("weight", "bias")},
            att_mix=torch.rand(6, 1, width, generator=generator, device=device),
            ffn_mix=torch.rand(1, 1, width, generator=generator, device=device),
            w0=normal(width, mean=-2), a0=normal(width), v0=None if first else normal(width, mean=1),
            w1=matrix(width, rank_w), w2=matrix(rank_w, width, inputs=rank_w),
            a1=matrix(width, rank_a), a2=matrix(rank_a, width, inputs=rank_a),
            v1=None if first else matrix(width, rank_v), v2=None if first else matrix(rank_v, width, inputs=rank_v),
            g1=matrix(width, rank_g), g2=matrix(rank_g, width, inputs=rank_g),
            k_k=normal(width, std=0.1, mean=0.8), k_a=k_a, one_minus_k_a=1 - k_a,
            r_k=normal(width // HEAD_SIZE, HEAD_SIZE, std=0.1),
            rkv=Weight.quantised(matrix(3, width, width), quant), output=Weight.quantised(matrix(width, width), quant),
            ffn_key=Weight.quantised(matrix(ffn_width, width), quant),
            ffn_value=Weight.quantised(matrix(ffn_width, width, inputs=ffn_width), quant, transposed=True),
        )  # fmt: skip

    return Weights(
        shape=ModelShape(num_layers, width, ffn_width, VOCAB, *RANKS),
        dtype=torch.float16,
        fingerprint="",
        embedding=normal(VOCAB, width).half(),
        layers=[layer(first=i == 0) for i in range(num_layers)],
        ln_out_weight=normal(width, std=0.1, mean=1),
        ln_out_bias=normal(width, std=0.1),
        head=Weight.quantised(matrix(VOCAB, width), quant),
        output_ids=torch.arange(VOCAB, device=device),
    )
