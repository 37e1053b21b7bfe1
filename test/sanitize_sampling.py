#!/usr/bin/env python3
"""A few launches of the sampling kernel on every path, for NVIDIA's compute-sanitizer to watch:

compute-sanitizer --tool memcheck --error-exitcode 1 python test/sanitize_sampling.py
compute-sanitizer --tool racecheck --error-exitcode 1 python test/sanitize_sampling.py
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from rwkv_batch.kernels.compiler import library
from sampling.kernel import KernelSampler
from sampling.masks import pack
from sampling.params import SamplingParams

CONTROLS = [
    {"temperature": 0},
    {"top_k": 50, "top_p": 0.6},
    {"top_k": 0, "top_p": 0.9},
    {"top_k": 0, "top_p": 1.0},
    {"top_k": 900, "top_p": 1.0, "logit_bias": ((3, 5.0), (200, -100.0)), "min_tokens": 2},
    {"rule": "sequential", "top_k": 40, "top_p": 0.8},
    {"rule": "sequential", "top_k": 800, "top_p": 0.9},
    {"rule": "gumbel"},
    {"rule": "noise", "noise": 1.5},
    {"top_k": 0, "top_p": 0.2},
    {"top_k": 0, "top_p": 0.4, "temperature": 9.0},
    {"top_k": 0, "top_p": 0.99, "logit_bias": ((9, 3.0),), "min_tokens": 1},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.1},
    {"top_k": 0, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3},
    {"top_k": 700, "top_p": 0.9, "temperature": 3.0, "min_p": 0.01, "repetition_penalty": 0.8},
    {"rule": "sequential", "top_k": 40, "top_p": 0.8, "min_p": 0.2},
    {"temperature": 0, "repetition_penalty": 2.0},
]


def main() -> None:
    """Launch rows of all controls on logits of several types, sizes, alignments and characters."""
    types = (torch.float16, torch.bfloat16, torch.float32)
    for shape in ((256, 256), (1003, 1008), (9999, 9999), (65536, 65536)):
        launch(2, *shape, types)  # few rows: several blocks for each
    launch(8, 9999, 9999, types[:1])  # a block for each


def launch(copies: int, num_columns: int, stride: int, types: Sequence[torch.dtype]) -> None:
    """Sample twice from rows of all controls, so many times over."""
    params = [SamplingParams(**controls, alpha_presence=0.5 * (i % 2), seed=i) for i, controls in enumerate(CONTROLS * copies)]
    num_rows, lib = len(params), library(0)
    slots = torch.arange(num_rows, device="cuda")
    allowed = torch.rand(num_columns, generator=torch.Generator().manual_seed(1)) < 0.9
    allowed[5] = True
    prompts = [[row, 5, num_columns - 1] for row in range(num_rows)]
    for dtype, masked in itertools.product(types, (range(num_rows), range(0, num_rows, 3), ())):
        sampler = KernelSampler(num_rows, torch.arange(num_columns), "cuda", lib)
        sampler.masks.put(dict.fromkeys(masked, pack(allowed)))
        sampler.start_many(list(range(num_rows)), params, [0] * num_rows, prompts)
        for scale in (3.0, 0.0):  # of noise, and all equal
            logits = (torch.randn(num_rows, stride, device="cuda") * scale).to(dtype)[:, :num_columns]
            logits[[3, 8], 5] = float("nan")
            sampled = sampler.sample(logits, slots.masked_fill(slots == 7, -1))
        assert sampled.finite.tolist() == [row not in (3, 8) for row in range(num_rows)]
    torch.cuda.synchronize()
    print("launched", num_columns, sampler.controls.step.tolist())


if __name__ == "__main__":
    main()
