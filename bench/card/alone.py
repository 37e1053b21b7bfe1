#!/usr/bin/env python3
"""How long products of up to 64 rows and norms of prefills take by themselves, on one Hopper GPU.

    python bench/card/alone.py [--sizes 0.1b,1.5b,7.2b] [--out FILE]

µs, by replaying a graph of launches that go over more memory than the L2 cache holds. For each product the fastest of the ways
to cut it up that the tuner chooses from, of weights as they are stored and of their copy in tiles; for norms six planes and
one. Run it in two checkouts, on one card, to compare them.
"""

import argparse
import json
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

from bench.synth_checkpoint import SIZES
from rwkv_batch.kernels import compiler
from rwkv_batch.kernels.gemm import Gemm
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.mix import Mix
from rwkv_batch.kernels.tiled import tiles_of
from rwkv_batch.model.packed_rows import RowLayout

DEVICE = torch.device("cuda", 0)
ROWS = (8, 16, 32, 64)
PREFILLS = ((64, 4), (1, 1024), (32, 512))
MOST_BYTES = 256 << 20  # that a graph goes over
MOST_CALLS = 24
FEW_CALLS = 4
VOCABULARY = 65536


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.1b,1.5b,7.2b")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(1)
    launcher = Launcher(compiler.library(0), DEVICE)
    launcher.use_current_stream()
    found = {}
    for size in args.sizes.split(","):
        width = SIZES[size][1]
        found[size] = {"products": products(launcher, width), "norms": norms(launcher, width)}
        for kind, cases in found[size].items():
            print(size, kind, ", ".join(f"{case} {us:.1f}" for case, us in cases.items()), flush=True)
    if args.out:
        about = {"date": date.today().isoformat(), "device": torch.cuda.get_device_name(0), "kernels": launcher.digest}
        args.out.write_text(json.dumps(about | {"us": found}, indent=1) + "\n")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).half()


def replayed(launcher: Launcher, calls: list[Callable[[], object]]) -> float:
    """Microseconds of one of them."""
    return round(launcher.time(lambda: [call() for call in calls], rounds=6) * 1e3 / len(calls), 2)


def calls_over(num_bytes: int) -> int:
    return max(1, min(MOST_CALLS, MOST_BYTES // num_bytes + 1))


def products(launcher: Launcher, width: int) -> dict[str, float]:
    """Of all large matrices: name, rows and whether tiled -> µs."""
    gemm, found = Gemm(launcher), {}
    shapes = {  # results, values that are summed, matrices, whether it is stored the other way round
        "rkv": (width, width, 3, False), "output": (width, width, 1, False), "key": (4 * width, width, 1, False),
        "value": (width, 4 * width, 1, True), "head": (VOCABULARY, width, 1, False),
    }  # fmt: skip
    for name, (M, K, batch, transposed) in shapes.items():
        lead, stored = (batch,) if batch > 1 else (), (K, M) if transposed else (M, K)
        count = calls_over(2 * M * K * batch)
        matrices = [gemm.prepare(random(*lead, *stored) * 0.02, transposed) for _ in range(count)]
        as_stored = [matrix.weight.mT if transposed else matrix.weight for matrix in matrices]
        copied = {"": [None] * count, " tiled": [tiles_of(weight) for weight in as_stored]}
        for rows in ROWS:
            x, out = random(*lead, rows, K), torch.empty(*lead, rows, M, dtype=torch.float16, device=DEVICE)

            ways = [
                [partial(gemm.gemm, x, matrix, out, config=config) for matrix in matrices]
                for config in gemm.tile_configs(rows, matrices[0])
            ]
            for kind, copies in copied.items():
                for matrix, copy in zip(matrices, copies, strict=True):
                    matrix.tiled = copy
                found[f"{name} {rows}{kind}"] = min(replayed(launcher, calls) for calls in ways)
    return found


def norms(launcher: Launcher, width: int) -> dict[str, float]:
    """Prompts × tokens and planes -> µs of a norm with its blends."""
    mix, found = Mix(launcher, pdl=True), {}
    for rows, length in PREFILLS:
        n = rows * length
        layout, shift = RowLayout.of(list(range(rows)), [length] * rows, DEVICE), random(rows, width)
        x, normed = torch.randn(n, width, device=DEVICE), torch.empty(n, width, dtype=torch.float16, device=DEVICE)
        weight, bias = torch.randn(2, width, device=DEVICE).unbind()
        for planes in (6, 1):
            count = max(FEW_CALLS, calls_over(n * width * (10 + 2 * planes)))
            ratios = torch.rand(planes, width, device=DEVICE)
            inputs = [(x.clone(), random(n, width), random(planes, n, width)) for _ in range(count)]

            calls = [
                partial(mix.add_norm_mix_prefill, x, y, weight, bias, ratios, shift, layout, normed, out)
                for x, y, out in inputs
            ]
            found[f"{rows}x{length}, {planes}"] = replayed(launcher, calls)
    return found


if __name__ == "__main__":
    main()
