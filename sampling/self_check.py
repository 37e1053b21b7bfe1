"""Whether the sampler's kernel is right on the card that is there: it and the reference draw the same ids."""

import ctypes
from functools import cache

import torch

from sampling.base import Sampler
from sampling.kernel import KernelSampler
from sampling.params import SamplingParams
from sampling.reference import ReferenceSampler

CHECKED = {  # what `check` runs, by the name of the rule
    "greedy": {"temperature": 0},
    "plain": {"top_k": 0, "top_p": 1.0, "temperature": 0.8},
    "joint": {"top_k": 50, "top_p": 0.9},
    "joint, top_p alone": {"top_k": 0, "top_p": 0.5},
    "joint, small top_p": {"top_k": 0, "top_p": 0.2},
    "joint, large top_k": {"top_k": 700, "top_p": 1.0, "temperature": 1.5},
    "sequential": {"rule": "sequential", "top_k": 40, "top_p": 0.8},
    "min_p": {"top_k": 0, "top_p": 1.0, "min_p": 0.05},
    "repetition penalty": {"rule": "sequential", "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.5},
    "gumbel": {"rule": "gumbel"},
    "noise": {"rule": "noise", "noise": 2.0},
}
STEPS, COLUMNS = 24, 5003
SHARE = 0.9  # of the ids that must agree: a draw at the border between two columns may fall on either side


@torch.inference_mode()
def check(device: torch.device | str, library: ctypes.CDLL) -> list[str]:
    """Return the names of CHECKED for which the kernel and the reference disagree on this card; takes a second."""
    params = _params()
    kernel = KernelSampler(len(params), torch.arange(COLUMNS), device, library)
    same = _drawn(kernel, params, device, STEPS) == _expected(str(device), tuple(CHECKED), STEPS, COLUMNS)
    shares = same.view(len(CHECKED), -1).float().mean(1)  # [names]
    return [name for name, share in zip(CHECKED, shares.tolist(), strict=True) if share < SHARE]


def rehearse(device: torch.device | str) -> None:
    """Draw what `check` compares with, so that it need not be waited for there."""
    _expected(str(device), tuple(CHECKED), STEPS, COLUMNS)


@cache
@torch.inference_mode()
def _expected(device: str, names: tuple[str, ...], num_steps: int, num_columns: int) -> torch.Tensor:
    """Return what the reference draws for these of CHECKED, [rows, steps]."""
    params = _params()
    return _drawn(ReferenceSampler(len(params), torch.arange(num_columns), device), params, device, num_steps)


def _params() -> list[SamplingParams]:
    """Return those of CHECKED, four rows each."""
    return [
        SamplingParams(**more, seed=seed, alpha_presence=0.5 * (seed % 2), alpha_frequency=0.1 * (seed % 2))
        for more in CHECKED.values()
        for seed in range(4)
    ]


def _drawn(sampler: Sampler, params: list[SamplingParams], device: torch.device | str, num_steps: int) -> torch.Tensor:
    """Return what is drawn for these rows from random logits, [rows, steps]."""
    slot_list = list(range(len(params)))
    slots = torch.tensor(slot_list, device=device)
    generator = torch.Generator().manual_seed(1)
    sampler.start_many(slot_list, params, slot_list)
    steps = []
    for _ in range(num_steps):
        logits = (torch.randn(len(params), COLUMNS, generator=generator) * 2).half().to(device)
        steps.append(sampler.sample(logits, slots, slot_list).ids.cpu())
    return torch.stack(steps, 1)
