#!/usr/bin/env python3
"""Time of one sampling step on a GPU: the kernel beside FlashInfer, where it is installed, and beside any other sampler.

    python bench/sampling.py [--columns 65536] [--peer peer.py] [--out bench/results/sampling.json]

Eight steps on eight sets of logits make a CUDA graph; the median of its replays, divided by eight, counts. "peaked" logits are
normal noise with twenty likely tokens a row, as a trained model gives; "flat" ones are the noise alone. Rows with penalties
have sampled HISTORY tokens before, rows with a repetition penalty have them in their prompts, and a mask allows half of the
columns. FlashInfer starts from fp32 probabilities, so the softmax before it is not counted, and
knows no penalties. A peer is a Python file with NAME, VERSION and

    calls(logits, controls, penalized) -> list of functions without arguments, one for each of the sets of fp32 logits, or None
"""

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from rwkv_batch import __version__
from rwkv_batch.kernels.compiler import library
from sampling.kernel import KernelSampler
from sampling.masks import pack
from sampling.params import SamplingParams

BATCHES = (1, 64, 320, 960)
SETS = 8
HISTORY = 500
CASES = {
    "greedy": {"temperature": 0},
    "top_k 50, top_p 0.6": {"top_k": 50, "top_p": 0.6},
    "v2: top_k 50, top_p 0.6": {"rule": "sequential", "top_k": 50, "top_p": 0.6},
    "top_k 50": {"top_k": 50, "top_p": 1.0},
    "top_p 0.6": {"top_k": 0, "top_p": 0.6},
    "no filter": {"top_k": 0, "top_p": 1.0},
    "gumbel": {"rule": "gumbel"},
}
LIMITS = {"fp16 with min_p": {"min_p": 0.05}, "fp16 with repetition penalty": {"repetition_penalty": 1.2}}
COLUMNS = ("fp16", "fp16 with penalties", *LIMITS, "fp16 masked", "fp32", "flashinfer", "peer", "peer with penalties")


def make_logits(kind: str, batch: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """SETS times [batch, columns]."""
    sets = []
    for seed in range(SETS):
        generator = torch.Generator("cuda").manual_seed(seed)
        logits = torch.randn(batch, columns, generator=generator, device="cuda") * (2 if kind == "peaked" else 1)
        if kind == "peaked":
            likely = torch.randint(columns, (batch, 20), generator=generator, device="cuda")
            logits.scatter_add_(1, likely, torch.rand(batch, 20, generator=generator, device="cuda") * 8 + 6)
        sets.append(logits.to(dtype))
    return sets


def microseconds(calls: list[Callable]) -> float:
    """Median time of one of `calls`, all captured into a graph; where that fails, of calling them one after the other."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    run = graph.replay
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError:  # a peer may do what cannot be captured
        torch.cuda.synchronize()

        def run() -> None:
            for call in calls:
                call()

    times = []
    for _ in range(25):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[5:])


def ours(sets: list[torch.Tensor], controls: dict, *, penalized: bool = False, masked: bool = False) -> float:
    """One step of the kernel."""
    batch, columns = sets[0].shape
    sampler = KernelSampler(batch, torch.arange(columns), "cuda", library(0))
    penalty = {"alpha_presence": 1.0, "alpha_frequency": 0.1} if penalized else {"alpha_presence": 0, "alpha_frequency": 0}
    slots = list(range(batch))
    prompts = torch.randint(columns, (batch, HISTORY)).tolist()
    sampler.start_many(slots, [SamplingParams(**controls, **penalty, seed=i) for i in slots], [0] * batch, prompts)
    if masked:
        words = pack(torch.rand(batch, columns, device="cuda") < 0.5).cpu()
        sampler.masks.put(dict(zip(slots, words, strict=True)))
    index = torch.tensor(slots, device="cuda")
    if penalized:
        logits = torch.zeros_like(sets[0])
        for column in torch.randint(columns, (HISTORY, batch, 1), device="cuda"):
            logits.scatter_(1, column, 60)
            sampler.launch(logits, index)
            logits.scatter_(1, column, 0)
    sampled = sampler.sample(sets[0], index)
    if controls.get("top_k") == 50 and not (penalized or masked or "repetition_penalty" in controls):
        ranks = (sets[0] > sets[0].gather(1, sampled.ids[:, None])).sum(1)
        assert int(ranks.max()) < 50
    return microseconds([lambda logits=logits: sampler.launch(logits, index) for logits in sets])


def flashinfer(sets: list[torch.Tensor], controls: dict) -> float | None:
    """One step of FlashInfer from probabilities; None where it has no counterpart."""
    try:
        from flashinfer import sampling
    except ImportError:
        return None
    if controls.get("rule") == "gumbel":
        return microseconds([lambda x=x: sampling.sampling_from_logits(x) for x in sets])
    probs = [logits.softmax(-1) for logits in sets]
    k, p = controls.get("top_k"), controls.get("top_p")
    if k and p < 1:
        both, order = sampling.top_k_top_p_sampling_from_probs, "top_k_first" if "rule" in controls else "joint"
        return microseconds([lambda q=q: both(q, k, p, filter_apply_order=order) for q in probs])
    if k:
        return microseconds([lambda q=q: sampling.top_k_sampling_from_probs(q, k) for q in probs])
    if p and p < 1:
        return microseconds([lambda q=q: sampling.top_p_sampling_from_probs(q, p) for q in probs])
    if p:
        return microseconds([lambda q=q: sampling.sampling_from_probs(q) for q in probs])
    return None


def load_peer(file: str):
    """The module in `file`."""
    spec = importlib.util.spec_from_file_location("peer", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def version_of(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, default=65536)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--peer")
    parser.add_argument("--out")
    args = parser.parse_args()
    peer = load_peer(args.peer) if args.peer else None
    result = {
        "date": date.today().isoformat(), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "rwkv_batch": __version__, "flashinfer": version_of("flashinfer-python"),
        "peer": f"{peer.NAME} {peer.VERSION}" if peer else None, "columns": args.columns, "history": HISTORY,
        "microseconds": [],
    }  # fmt: skip
    widths = (9, 10, 9, 12, 9, 9, 12, 9, 10)
    heads = ("fp16", "+penalty", "+min_p", "+repetition", "+mask", "fp32", "FlashInfer", "peer", "+penalty")
    print(f"{'us a step':10}{'case':26}{'B':>5}" + "".join(f"{head:>{w}}" for head, w in zip(heads, widths, strict=True)))
    for kind in ("peaked", "flat"):
        for batch in args.batches:
            half, full = (make_logits(kind, batch, args.columns, t) for t in (torch.float16, torch.float32))
            for name, controls in CASES.items():
                filtered = name != "gumbel"
                cells = [ours(half, controls), ours(half, controls, penalized=True) if filtered else None]
                cells += [ours(half, controls | limit) if filtered else None for limit in LIMITS.values()]
                cells += [ours(half, controls, masked=True), ours(full, controls), flashinfer(full, controls)]
                for penalized in (False, True):
                    calls = peer.calls(full, controls, penalized) if peer else None
                    cells.append(microseconds(calls) if calls else None)
                cells = [None if cell is None else round(cell, 1) for cell in cells]
                row = {"logits": kind, "case": name, "batch": batch, **dict(zip(COLUMNS, cells, strict=True))}
                result["microseconds"].append(row)
                text = "".join(f"{'-' if c is None else c:>{w}}" for c, w in zip(cells, widths, strict=True))
                print(f"{kind:10}{name:26}{batch:5}{text}", flush=True)
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
