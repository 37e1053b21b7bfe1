#!/usr/bin/env python3
"""Time of one sampling step on a GPU: the kernel in a CUDA graph, beside FlashInfer where it is installed.

    python bench/sampling.py [--columns 65536] [--out bench/results/sampling.json]

Eight launches on eight sets of logits make a graph; the median of its replays, divided by eight, counts. "peaked" logits are
normal noise with twenty likely tokens a row, as a trained model gives; "flat" ones are the noise alone. FlashInfer starts from
probabilities, so the softmax before it is not counted. Results of both are checked to lie in the kept set before timing.
"""

import argparse
import json
import statistics
import sys
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from rwkv_batch import __version__
from rwkv_batch.kernels import library
from sampling.params import SamplingParams
from sampling.rapid import RapidSampler

BATCHES = (1, 64, 320, 960)
SETS = 8
CASES = {
    "greedy": {"temperature": 0},
    "top_k 50, top_p 0.6": {"top_k": 50, "top_p": 0.6},
    "top_p 0.6": {"top_k": 0, "top_p": 0.6},
    "v2: top_k 50, top_p 0.6": {"rule": "sequential", "top_k": 50, "top_p": 0.6},
    "no filter": {"top_k": 0, "top_p": 1.0},
    "gumbel": {"rule": "gumbel"},
}


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


def microseconds(calls: list) -> float:
    """Median time of one of `calls`, all captured into a graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(30):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[5:])


def ours(sets: list[torch.Tensor], controls: dict, penalized: bool) -> float:
    """One step of the kernel."""
    batch, columns = sets[0].shape
    sampler = RapidSampler(batch, torch.arange(columns), "cuda", library(0))
    penalty = {"alpha_presence": 1.0, "alpha_frequency": 0.1} if penalized else {"alpha_presence": 0, "alpha_frequency": 0}
    slots = list(range(batch))
    sampler.start_many(slots, [SamplingParams(**controls, **penalty, seed=i) for i in slots], [0] * batch)
    index = torch.tensor(slots, device="cuda")
    sampled = sampler.sample(sets[0], index)
    if controls.get("top_k", 0) == 50 and not penalized:
        ranks = (sets[0] > sets[0].gather(1, sampled.ids[:, None])).sum(1)
        assert int(ranks.max()) < 50
    return microseconds([lambda logits=logits: sampler.launch(logits, index) for logits in sets])


def flashinfer(sets: list[torch.Tensor], controls: dict) -> float | None:
    """One step of FlashInfer from probabilities; None where it has no counterpart."""
    try:
        from flashinfer import sampling
    except ImportError:
        return None
    probs = [logits.float().softmax(-1) for logits in sets]
    k, p = controls.get("top_k"), controls.get("top_p")
    if k and p:
        return microseconds([lambda q=q: sampling.top_k_top_p_sampling_from_probs(q, k, p) for q in probs])
    if p and p < 1:
        return microseconds([lambda q=q: sampling.top_p_sampling_from_probs(q, p) for q in probs])
    if p:
        return microseconds([lambda q=q: sampling.sampling_from_probs(q) for q in probs])
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, default=65536)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = []
    print(f"{'us a step':10}{'case':28}{'B':>5}{'fp16':>9}{'+penalty':>9}{'fp32':>9}{'FlashInfer':>12}")
    for kind in ("peaked", "flat"):
        for batch in args.batches:
            half, full = (make_logits(kind, batch, args.columns, t) for t in (torch.float16, torch.float32))
            for name, controls in CASES.items():
                row = {"logits": kind, "case": name, "batch": batch, "fp16": ours(half, controls, False)}
                row["fp16 with penalties"] = ours(half, controls, True) if name != "gumbel" else None
                row["fp32"] = ours(full, controls, False)
                row["flashinfer"] = flashinfer(full, controls)
                rows.append(row)
                cells = [row["fp16"], row["fp16 with penalties"], row["fp32"], row["flashinfer"]]
                text = "".join(f"{'-' if c is None else f'{c:.1f}':>{w}}" for c, w in zip(cells, (9, 9, 9, 12), strict=True))
                print(f"{kind:10}{name:28}{batch:5}{text}", flush=True)
    result = {
        "date": date.today().isoformat(), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "rwkv_batch": __version__, "columns": args.columns, "microseconds": rows,
    }  # fmt: skip
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
