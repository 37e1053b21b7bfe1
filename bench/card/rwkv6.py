#!/usr/bin/env python3
"""RWKV-6 on a card: captured steps on kernels, with the sampling inside, against the forward pass in plain torch.

    python bench/card/rwkv6.py [--width 4096] [--layers 8] [--rows 1,8,64] [--prefill 1x512,8x64] [--out FILE]

Weights are random, ranks as in published models of 7B. "floor" is the time of reading the matrices once, and of reading and
writing the states of the rows, at 4.2 TB/s. One GPU, nothing beside it.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

from rwkv_batch import __version__
from rwkv_batch.config import Config
from rwkv_batch.engine import build
from rwkv_batch.kernels import compiler
from rwkv_batch.kernels.rwkv6.self_check import random_weights
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.rwkv6.forward import Model
from rwkv_batch.model.rwkv6.weights import Rwkv6Shape
from rwkv_batch.model.state import State
from sampling.params import SamplingParams

GPU, HEAD, VOCAB, BYTES_A_MS = torch.device("cuda:0"), 64, 65536, 4.2e9


class Bench:
    """An engine on kernels, and the same weights in plain torch."""

    def __init__(self, width: int, layers: int, rows: list[int], prefills: list[tuple[int, int]]):
        shape = Rwkv6Shape(layers, width, 4 * width, VOCAB, rank_mix=64, rank_decay=128, head_size=HEAD)
        slots = max([*rows, *(count for count, _ in prefills)])
        tokens = max([slots, *(count * length for count, length in prefills)])
        weights = random_weights(GPU, shape=shape)
        self.engine = build.build_engine(
            Config(ops="kernels"), weights, slots, max_tokens=tokens, library=compiler.library(), graph_sizes=sorted(rows)
        )
        params = SamplingParams(temperature=1.0, top_k=50, top_p=0.6, ignore_eos=True)
        self.engine.sampler.start_many(list(range(slots)), [params] * slots, list(range(slots)))
        self.engine.state.last_ids.random_(1, 60000)
        self.plain, self.state = Model(weights), State(shape, slots, wkv_dtype=torch.float32, device=GPU)
        names = ("rkvg", "output", "ffn_key", "ffn_receptance", "ffn_value")
        matrices = [weights.head, *(getattr(layer, name) for layer in weights.layers for name in names)]
        self.matrix_bytes = sum(tensor.nbytes for matrix in matrices for tensor in matrix.tensors())
        self.state_bytes = 2 * layers * width * HEAD * 2  # fp16, read and written

    @torch.inference_mode()
    def decode(self, count: int) -> dict[str, object]:
        """Return the figures of decode steps of so many rows."""
        slots, tokens = list(range(count)), torch.randint(1, 60000, (count,), device=GPU)
        packed = PackedRows(slots, [1] * count, GPU)
        return {
            "decode": count,
            "kernels_ms": median_ms(lambda: self.engine.graphs.replay(slots), 15),
            "plain_ms": median_ms(lambda: self.plain.forward(tokens, packed, self.state), 9),
            "floor_ms": (self.matrix_bytes + count * self.state_bytes) / BYTES_A_MS,
        }

    @torch.inference_mode()
    def prefill(self, count: int, length: int) -> dict[str, object]:
        """Return the figures of prompts."""
        slots, prompts = list(range(count)), torch.randint(1, 60000, (count, length)).tolist()
        packed, tokens = PackedRows(slots, [length] * count, GPU), torch.tensor(prompts, device=GPU).flatten()
        return {
            "prefill": f"{count}x{length}",
            "kernels_ms": median_ms(lambda: self.engine.prefills.replay(slots, prompts, count), 9),
            "plain_ms": median_ms(lambda: self.plain.forward(tokens, packed, self.state), 4),
        }


def median_ms(run: Callable[[], object], count: int) -> float:
    """Milliseconds; the first third warms up."""
    times = []
    for _ in range(count):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[count // 3 :])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--prefill", default="1x512,8x64")
    parser.add_argument("--out", help="write the figures to this file, beside others already there")
    args = parser.parse_args()
    rows = [int(count) for count in args.rows.split(",") if count]
    prefills = [tuple(map(int, shape.split("x"))) for shape in args.prefill.split(",") if shape]
    bench = Bench(args.width, args.layers, rows, prefills)
    found = [bench.decode(count) for count in rows] + [bench.prefill(*shape) for shape in prefills]
    for row in found:
        print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))
    if args.out:
        file = Path(args.out)
        content = json.loads(file.read_text()) if file.exists() else {}
        content[f"{args.layers} layers of {args.width}"] = {
            "date": date.today().isoformat(), "device": torch.cuda.get_device_name(0), "torch": torch.__version__,
            "rwkv_batch": __version__, "rows": found,
        }  # fmt: skip
        file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
