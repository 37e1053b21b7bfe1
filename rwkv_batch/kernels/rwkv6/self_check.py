"""RWKV-6's kernels against plain torch, once, on the card that is there; see `kernels/self_check.py`."""

import torch
from torch import Tensor

from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.rwkv6.ops import Rwkv6HipOps, Rwkv6KernelOps
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.rwkv6.forward import Model
from rwkv_batch.model.rwkv6.weights import MIXES, Rwkv6Layer, Rwkv6Shape
from rwkv_batch.model.state import State
from rwkv_batch.model.weight import Weight
from rwkv_batch.model.weights import Weights

TOLERANCE = 1e-2  # relative RMS; fp16 rounding between kernels leaves about 1e-3
SMALL = Rwkv6Shape(num_layers=2, width=256, ffn_width=1024, vocab_size=512, rank_mix=32, rank_decay=64, head_size=64)
SLOTS = 100
CASES = ([1], [1] * 7, [1] * 16, [1] * 70, [40, 1, 7, 33])  # lengths of rows


def ops_for(weights: Weights, launcher: Launcher, **limits: int) -> Rwkv6KernelOps:
    """Return the kernel ops of this card."""
    return (Rwkv6HipOps if torch.version.hip else Rwkv6KernelOps)(weights, launcher, **limits)


@torch.inference_mode()
def agrees(launcher: Launcher, wkv_dtype: torch.dtype, cases: tuple[list[int], ...] = CASES) -> bool:
    """Return whether two steps of each kind give the logits and states of plain torch, for one of two models."""
    return any(_agrees(launcher, wkv_dtype, cases, seed) for seed in range(2))


def _agrees(launcher: Launcher, wkv_dtype: torch.dtype, cases: tuple[list[int], ...], seed: int) -> bool:
    weights = random_weights(launcher.device, seed)
    models = Model(weights), Model(weights, ops_for(weights, launcher, max_tokens=128, max_rows=128), "kernels")
    for lengths in cases:
        for one, other in zip(*(_run(model, lengths, wkv_dtype) for model in models), strict=True):
            if not float((one - other).norm()) <= TOLERANCE * float(one.norm()):  # NaN is a failure too
                return False
    return True


def _run(model: Model, lengths: list[int], wkv_dtype: torch.dtype) -> list[Tensor]:
    """Return the logits of two steps and the state after them."""
    weights = model.weights
    generator = torch.Generator(device=weights.device).manual_seed(len(lengths))
    state = State(weights.shape, SLOTS, shift_dtype=torch.float16, wkv_dtype=wkv_dtype, device=weights.device)
    slots = [(7 * i + 3) % SLOTS for i in range(len(lengths))]
    logits = []
    for _ in range(2):
        tokens = torch.randint(0, weights.shape.vocab_size, (sum(lengths),), generator=generator, device=weights.device)
        logits.append(model.forward(tokens, PackedRows(slots, lengths, weights.device), state).float().clone())
    return [*logits, state.shift.float(), state.wkv.float()]


def random_weights(device: torch.device, seed: int = 0, shape: Rwkv6Shape = SMALL) -> Weights:
    """Return a model of random numbers in fp16; its heads have 64 values."""
    generator, c, f = torch.Generator(device=device).manual_seed(seed), shape.width, shape.ffn_width
    rank_mix, rank_decay = shape.rank_mix, shape.rank_decay

    def normal(*dims: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(*dims, generator=generator, device=device) * std + mean

    def matrix(*dims: int, inputs: int = c) -> Tensor:
        return normal(*dims, std=inputs**-0.5).half()

    def layer() -> Rwkv6Layer:
        blend = torch.rand(3, 1, c, generator=generator, device=device)
        blend[1], blend[2] = 0, 1
        return Rwkv6Layer(
            **{f"{norm}_{kind}": normal(c, std=0.1, mean=float(kind == "weight"))
               for norm in ("ln1", "ln2", "ln_x") for kind in ("weight", "bias")},
            att_mix=blend, mix=torch.rand(len(MIXES), 1, c, generator=generator, device=device),
            mix_down=matrix(c, len(MIXES) * rank_mix), mix_up=matrix(len(MIXES), rank_mix, c, inputs=8 * rank_mix),
            decay=normal(c, std=2, mean=-2), decay_down=matrix(c, rank_decay),
            decay_up=matrix(rank_decay, c, inputs=rank_decay),
            bonus=normal(c // 64, 64, std=0.5), rkvg=Weight(matrix(4, c, c)), output=Weight(matrix(c, c)),
            ffn_mix=torch.rand(2, 1, c, generator=generator, device=device),
            ffn_key=Weight(matrix(f, c)), ffn_receptance=Weight(matrix(c, c)),
            ffn_value=Weight(matrix(f, c, inputs=f), transposed=True),
        )  # fmt: skip

    return Weights(
        shape=shape,
        dtype=torch.float16,
        fingerprint="",
        embedding=normal(shape.vocab_size, c).half(),
        layers=[layer() for _ in range(shape.num_layers)],
        ln_out_weight=normal(c, std=0.1, mean=1),
        ln_out_bias=normal(c, std=0.1),
        head=Weight(matrix(shape.vocab_size, c)),
        output_ids=torch.arange(shape.vocab_size, device=device),
        architecture="RWKV-6",
    )
