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
WIDTH, VOCAB, RANK_MIX, RANK_DECAY, LAYERS, SLOTS = 256, 512, 32, 64, 2, 100
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
        tokens = torch.randint(0, VOCAB, (sum(lengths),), generator=generator, device=weights.device)
        logits.append(model.forward(tokens, PackedRows(slots, lengths, weights.device), state).float().clone())
    return [*logits, state.shift.float(), state.wkv.float()]


def random_weights(device: torch.device, seed: int = 0) -> Weights:
    """Return a small model of random numbers in fp16."""
    generator, c, f = torch.Generator(device=device).manual_seed(seed), WIDTH, 4 * WIDTH

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
            mix_down=matrix(c, len(MIXES) * RANK_MIX), mix_up=matrix(len(MIXES), RANK_MIX, c, inputs=8 * RANK_MIX),
            decay=normal(c, std=2, mean=-2), decay_down=matrix(c, RANK_DECAY),
            decay_up=matrix(RANK_DECAY, c, inputs=RANK_DECAY),
            bonus=normal(c // 64, 64, std=0.5), rkvg=Weight(matrix(4, c, c)), output=Weight(matrix(c, c)),
            ffn_mix=torch.rand(2, 1, c, generator=generator, device=device),
            ffn_key=Weight(matrix(f, c)), ffn_receptance=Weight(matrix(c, c)),
            ffn_value=Weight(matrix(f, c, inputs=f), transposed=True),
        )  # fmt: skip

    return Weights(
        shape=Rwkv6Shape(LAYERS, c, f, VOCAB, rank_mix=RANK_MIX, rank_decay=RANK_DECAY, head_size=64),
        dtype=torch.float16,
        fingerprint="",
        embedding=normal(VOCAB, c).half(),
        layers=[layer() for _ in range(LAYERS)],
        ln_out_weight=normal(c, std=0.1, mean=1),
        ln_out_bias=normal(c, std=0.1),
        head=Weight(matrix(VOCAB, c)),
        output_ids=torch.arange(VOCAB, device=device),
        architecture="RWKV-6",
    )
