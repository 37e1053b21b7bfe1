#!/usr/bin/env python3
"""CPU speed of one random 0.1B model in fp32, beside the PyPI package `rwkv` in the same run.

    python bench/cpu.py [--model-path M.pth] [--size 0.1b] [--threads N] [--quant int8] [--out bench/results/cpu.json]

Decode at B = 1, 2, 4, 16, 64, prefill of 512 tokens, medians; runs of the two alternate, so that a change of the machine's pace
meets both. The share of the memory bandwidth that B = 1 reaches counts the bytes a step must read (all matrices but the rows
of inactive feed-forward units) against a plain sum over a large array. With --quant the model in that format takes turns too.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.synth_checkpoint import synth
from rwkv_batch import __version__
from rwkv_batch.engine.build import tune_cpu, usable_cpus
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.quantized import FORMATS, Quantisation
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State

BATCHES = (1, 2, 4, 16, 64)
PREFILL = 512


def timed(function) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


class Ours:
    """One decode step or prefill of this project."""

    def __init__(self, path: str, quant: str = ""):
        self.model = Model(weights_module.load(path, quant=Quantisation(quant)))
        self.state = State(self.model.weights.shape, max(BATCHES))
        self.rows = {batch: PackedRows(list(range(batch)), [1] * batch) for batch in BATCHES}
        self.tokens = torch.randint(1, 60000, (PREFILL,), generator=torch.Generator().manual_seed(1))

    def decode(self, batch: int) -> None:
        self.model.forward(self.tokens[:batch], self.rows[batch], self.state)

    def prefill(self) -> None:
        self.model.forward(self.tokens, PackedRows([0], [PREFILL]), self.state)

    def bytes_read(self) -> int:
        """Bytes a B = 1 step reads: every matrix, of ffn.value only the rows of active units."""
        w = self.model.weights
        active = []
        keep = self.model.ops.channel_mix

        def counting(mixed, layer):
            active.append(int((torch.relu(mixed[0] @ layer.ffn_key.dense().t()) > 0).sum()))
            return keep(mixed, layer)

        self.model.ops.channel_mix = counting
        self.decode(1)
        self.model.ops.channel_mix = keep
        skipped = sum((w.shape.ffn_width - n) * w.shape.width * w.head.values.element_size() for n in active)
        return w.num_bytes - w.embedding.nbytes - skipped


class Peer:
    """The same of `rwkv`."""

    def __init__(self, path: str):
        os.environ.update(RWKV_V7_ON="1", RWKV_JIT_ON="1", RWKV_CUDA_ON="0")
        from rwkv.model import RWKV

        self.model = RWKV(model=path.removesuffix(".pth"), strategy="cpu fp32")
        self.tokens = torch.randint(1, 60000, (PREFILL,), generator=torch.Generator().manual_seed(1)).tolist()
        _, self.state = self.model.forward(self.tokens[:5], None)

    def decode(self) -> None:
        _, self.state = self.model.forward(self.tokens[:1], self.state)

    def prefill(self) -> None:
        self.model.forward(self.tokens, None)


def read_bandwidth() -> float:
    """GB/s of a sum over 400 MB, the best of ten."""
    data = torch.ones(100_000_000)
    return data.nbytes / min(timed(lambda: data.sum()) for _ in range(10)) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path")
    parser.add_argument("--size", default="0.1b")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--quant", choices=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    args = parser.parse_args()
    tune_cpu(args.threads or usable_cpus())
    with tempfile.TemporaryDirectory() as folder:
        path = args.model_path
        if path is None:
            path = f"{folder}/{args.size}.pth"
            torch.save(synth(args.size), path)
        ours, peer = Ours(path), Peer(path)
        kinds = {"ours": ours} | ({args.quant: Ours(path, args.quant)} if args.quant else {})
    samples: dict[str, list[float]] = {}

    def sample(name: str, function, tokens: int, repeats: int) -> None:
        samples.setdefault(name, []).extend(tokens / timed(function) for _ in range(repeats))

    for warm in range(args.rounds + 1):
        sample("rwkv decode B=1", peer.decode, 1, 8)
        for batch in BATCHES:
            for name, one in kinds.items():
                sample(
                    f"{name} decode B={batch}", lambda one=one, batch=batch: one.decode(batch), batch, 8 if batch == 1 else 3
                )
        sample("rwkv prefill 512", peer.prefill, PREFILL, 1)
        for name, one in kinds.items():
            sample(f"{name} prefill 512", one.prefill, PREFILL, 2)
        if warm == 0:
            samples.clear()
    rates = {name: statistics.median(values) for name, values in samples.items()}
    bandwidth = read_bandwidth()
    used = ours.bytes_read() * rates["ours decode B=1"] / 1e9
    ratios = {
        "decode B=1 / rwkv": rates["ours decode B=1"] / rates["rwkv decode B=1"],
        "decode B=16 / rwkv B=1": rates["ours decode B=16"] / rates["rwkv decode B=1"],
        "prefill 512 / rwkv": rates["ours prefill 512"] / rates["rwkv prefill 512"],
        "decode B=1 share of read bandwidth": used / bandwidth,
    }
    for name, rate in rates.items():
        print(f"{name:22}{rate:10.1f} tokens/s   ({min(samples[name]):.1f} to {max(samples[name]):.1f})")
    print(f"{'read bandwidth':22}{bandwidth:10.1f} GB/s, of which B=1 uses {used:.1f}")
    for name, ratio in ratios.items():
        print(f"{name:36}{ratio:8.2f}")
    result = {
        "date": date.today().isoformat(), "cpu": cpu_name(), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "rwkv_batch": __version__, "model": args.model_path or f"random {args.size}, fp32", "tokens_per_second": rates,
        "ratios": ratios, "read_bandwidth_gb_s": bandwidth,
    }  # fmt: skip
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(result, indent=2) + "\n")


def cpu_name() -> str:
    """The processor's name, where the system tells it."""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
