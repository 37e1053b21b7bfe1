#!/usr/bin/env python3
"""Where the time of a layer goes, part by part, in decode steps and prefills on a GPU, beside what the card could do.

    python bench/card/layers.py [--sizes 0.1b,1.5b,7.2b] [--batches 1,8,64,320,960] [--prefill 1x1024,32x512] [--out FILE]

Steps run as in `bench/engine.py`: decode steps from a graph without sampling, prefills as the server does them. torch's
profiler says when each kernel began and ended. Kernels overlap, so a kernel counts from the end of the one that ended before it
to its own end: so the parts of a layer add up to the layer. The mean over the middle layers is given, in microseconds. Beside
it the floor of each part: its weights read once or its products in fp16, whichever is longer; for norms and recurrence what
they must read and write of tokens and states. Of `ffn_value` a decode step must read the rows of units that any of its tokens
has active.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
from torch.profiler import ProfilerActivity, profile

from bench.engine import COPY_BYTES, FLOPS, Bench, Options
from bench.synth_checkpoint import SIZES

PARTS = ("norm_att", "rkv", "pairs", "recurrence", "output", "norm_ffn", "key", "value")
REPLAYS = 3
BYTES = {  # of a token, for each of the width: the residual stream read and written in fp32, all else once in fp16
    "norm_att": 8 + 2 + 6 * 2, "norm_ffn": 8 + 2 + 2, "recurrence": 7 * 2,
}  # fmt: skip
ACTIVE = 0.12  # of the feed-forward's units, in a token of a trained model
NORM = re.compile(r"\b(?:decode|decode_before|decode_many|prefill|edge)_kernel<(\d)")
PAIRS = re.compile(r"\b(?:grouped|few_ranks|many_tokens|lora)\w*[<(]")
MASKED_VALUE = re.compile(r"\b(?:sparse|masked)_\w+[<(]")
RECURRENCE = re.compile(r"\bwkv_")
SAME_PRODUCT = re.compile(r"splitKreduce|relu_square")


class Kernel(NamedTuple):
    """One launch; microseconds."""

    name: str
    start: float
    end: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.1b,1.5b,7.2b")
    parser.add_argument("--batches", default="1,8,64,320,960")
    parser.add_argument("--prefill", default="1x1024,32x512")
    parser.add_argument("--wkv-log", action=argparse.BooleanOptionalAction, help="as bench/engine.py")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if unknown := {*args.sizes.split(",")} - {*SIZES}:
        parser.error(f"unknown: {', '.join(unknown)}")
    batches = [int(batch) for batch in args.batches.split(",") if batch]
    prefills = [tuple(map(int, shape.split("x"))) for shape in args.prefill.split(",") if shape]
    for size in args.sizes.split(","):
        steps = of_model(Bench(Options(size, wkv_log=args.wkv_log), batches, prefills), batches, prefills)
        for label, step in steps.items():
            parts = ", ".join(f"{part} {us}" for part, us in step["us"].items())
            print(f"{size} {label}: layer {step['layer_us']} us in {step['launches']} launches; {parts}")
        if args.out:
            write(args.out, size, steps)
        torch.cuda.empty_cache()


def of_model(bench: Bench, batches: list[int], prefills: list[tuple[int, int]]) -> dict[str, dict]:
    """Return the parts of a layer in each step."""
    floors = Floors(bench)
    found = {}
    for batch in batches:
        replay, _ = bench.captured_decode(batch)
        found[f"{batch} rows"] = parts_of(timeline(replay)) | {"floor_us": floors.of(batch, batch, decode=True)}
    for count, length in prefills:
        run, _ = bench.prefill_step(count, length)
        found[f"{count}x{length}"] = parts_of(timeline(run)) | {"floor_us": floors.of(count * length, count, decode=False)}
    return found


def timeline(run: Callable[[], object]) -> list[Kernel]:
    """Kernels of some runs, in the order of their ends."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("cat") == "kernel"]
    return sorted((Kernel(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events), key=lambda kernel: kernel.end)


def parts_of(kernels: list[Kernel]) -> dict:
    """Return what a layer takes on average, part by part, and the kernels that did it."""
    layers = windows(kernels)
    sums: dict[str, list[float]] = {part: [] for part in PARTS}
    names: dict[str, list[str]] = {part: [] for part in PARTS}
    for before, layer in layers:
        taken, last = dict.fromkeys(PARTS, 0.0), before
        for kernel, part in zip(layer, classified(layer), strict=True):
            taken[part] += kernel.end - last
            last = kernel.end
            names[part].append(short(kernel.name))
        for part in PARTS:
            sums[part].append(taken[part])
    us = {part: round(statistics.mean(sums[part]), 2) for part in PARTS if names[part]}
    kinds = {part: sorted({*found}, key=found.count, reverse=True)[:4] for part, found in names.items() if found}
    return {"layer_us": round(sum(us.values()), 2), "us": us, "kernels": kinds, "launches": round(len_of(layers), 1)}


def windows(kernels: list[Kernel]) -> list[tuple[float, list[Kernel]]]:
    """From the end of one layer's recurrence to the end of the next one's, without the first and the last two of each run."""
    recurrences = [number for number, kernel in enumerate(kernels) if RECURRENCE.search(kernel.name)]
    if finishes := [number for number in recurrences if "wkv_finish" in kernels[number].name]:
        recurrences = finishes
    each = len(recurrences) // REPLAYS
    kept = [run * each + layer for run in range(REPLAYS) for layer in range(2, each - 2)]
    pairs = [(recurrences[number], recurrences[number + 1]) for number in kept]
    return [(kernels[at].end, kernels[at + 1 : following + 1]) for at, following in pairs]


def classified(layer: list[Kernel]) -> list[str]:
    """Return the part of each kernel: behind the recurrence come the output, the channel mix, and the next layer's inputs."""
    parts, stage = [], ""
    for kernel in layer:
        norm = NORM.search(kernel.name)
        if RECURRENCE.search(kernel.name):
            parts.append("recurrence")
            continue
        if norm or "add_norm" in kernel.name:
            stage = "norm_ffn" if norm and norm[1] == "1" else "norm_att"
        elif PAIRS.search(kernel.name):
            parts.append("pairs")
            continue
        elif MASKED_VALUE.search(kernel.name):
            stage = "value"
        elif "normed_products" in kernel.name:  # the norm is inside
            stage = "key" if stage in ("", "output") else "rkv"
        elif not SAME_PRODUCT.search(kernel.name):
            stage = {"": "output", "norm_ffn": "key", "key": "value", "norm_att": "rkv"}.get(stage, stage)
        parts.append(stage or "output")
    return parts


def short(name: str) -> str:
    """A kernel's name without namespaces, arguments and what cuBLAS adds to it."""
    return re.sub(r"\(anonymous namespace\)::|rwkv::|cublasLt::|void ", "", name).split("(")[0][:48]


def len_of(layers: list[tuple[float, list[Kernel]]]) -> float:
    """Launches of a layer, on average."""
    return statistics.mean(len(layer) for _, layer in layers)


class Floors:
    """What each part of a layer would take at the card's bandwidth and rate of products."""

    def __init__(self, bench: Bench):
        layer = bench.model.weights.layers[-1]
        pairs = [getattr(layer, name + half) for name in "wavg" for half in "12"]
        self.values = {
            "rkv": layer.rkv.shape.numel(), "pairs": sum(matrix.numel() for matrix in pairs if matrix is not None),
            "output": layer.output.shape.numel(), "key": layer.ffn_key.shape.numel(), "value": layer.ffn_value.shape.numel(),
        }  # fmt: skip
        self.width = layer.output.shape[-1]
        self.state_bytes = 2 * bench.state.wkv[:, 0].nbytes / len(bench.model.weights.layers)

    def of(self, tokens: int, rows: int, *, decode: bool) -> dict[str, float]:
        """Microseconds."""
        found = {part: max(2 * values / COPY_BYTES, 2 * tokens * values / FLOPS) * 1e6 for part, values in self.values.items()}
        if decode:
            found["value"] *= 1 - (1 - ACTIVE) ** tokens
        token_bytes = {part: count * self.width for part, count in BYTES.items()}
        found |= {part: tokens * count / COPY_BYTES * 1e6 for part, count in token_bytes.items()}
        found["recurrence"] += rows * self.state_bytes / COPY_BYTES * 1e6
        return {part: round(found[part], 2) for part in PARTS if part in found}


def write(file: Path, size: str, steps: dict[str, dict]) -> None:
    """Put a model's steps into the file, beside those of others."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = json.loads(file.read_text()) if file.exists() else {}
    content |= {"date": date.today().isoformat(), "device": torch.cuda.get_device_name(0), "torch": torch.__version__}
    content.setdefault("models", {})[size] = steps
    file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
