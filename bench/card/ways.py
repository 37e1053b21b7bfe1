#!/usr/bin/env python3
"""How long whole decode steps take by each way to do a product, and by each plan of steps of few rows, on one GPU.

    python bench/card/ways.py --size 0.1b [--product rkv] [--batches 64,320,960] [--few 1,2,4,8] [--out FILE]

Weights and steps are those of `bench/engine.py`, forward alone; µs, the fastest of some replays of a graph. All other products
are done as the tuner has chosen. Ways take turns in one process, on one card, since cards differ by more than ways do.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

from bench.engine import Bench, Options
from bench.synth_checkpoint import SIZES
from rwkv_batch.kernels.few.plan import CANDIDATES
from rwkv_batch.kernels.variants import PRODUCTS, Product, Variant
from rwkv_batch.model.packed_rows import CapturedRows

REPLAYS = 9
SHOWN = 8  # ways of a step that are printed, the fastest

Times = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.1b")
    parser.add_argument("--product", choices=PRODUCTS, default="rkv")
    parser.add_argument("--batches", default="64,320,960", help="rows of steps to try all ways of the product with")
    parser.add_argument("--few", default="", help="rows of steps to try all plans with, up to 8")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    many, few = ([int(rows) for rows in text.split(",") if rows] for text in (args.batches, args.few))
    steps = Steps(Bench(Options(args.size), [*few, *many], []))
    found = {f"{rows} rows, {args.product}": steps.by_variants(args.product, rows) for rows in many}
    found |= {f"{rows} rows, plans": steps.by_plans(rows) for rows in few}
    for label, times in found.items():
        fastest = sorted(times, key=times.__getitem__)[:SHOWN]
        print(args.size, label, *(f"{times[way]:10.1f}  {way}" for way in fastest), sep="\n", flush=True)
    if args.out:
        about = {"date": date.today().isoformat(), "device": torch.cuda.get_device_name(0), "size": args.size}
        args.out.write_text(json.dumps(about | {"us": found}, indent=1) + "\n")


class Steps:
    """Decode steps of a bench's model."""

    def __init__(self, bench: Bench):
        self.model, self.state, self.ops = bench.model, bench.state, bench.model.ops

    def by_variants(self, product: Product, num_rows: int) -> Times:
        """What a step takes by each variant of a product on offer."""
        layer = self.ops.prepared.layers[-1]
        matrix = self.ops.prepared.head if product == "head" else getattr(layer, product)
        chosen = self.ops.variant(product, num_rows, matrix)

        def ways() -> Iterable[str]:
            for variant in self.ops.variants(product, num_rows, layer):
                self.ops.choose(product, num_rows, variant)
                yield name_of(variant) + " (chosen)" * (variant == chosen)

        times = {way: self._time(num_rows) for way in ways()}
        self.ops.choose(product, num_rows, chosen)
        return times

    def by_plans(self, num_rows: int) -> Times:
        """What a step of few rows takes without a plan and by each."""
        chosen, plans = self.ops.plans.pop(num_rows, None), [plan for plan in CANDIDATES if self.ops.fits(num_rows, plan)]
        times = {"no plan": self._time(num_rows)}
        for plan in plans:
            self.ops.plans[num_rows] = plan
            times[str(plan) + " (chosen)" * (plan == chosen)] = self._time(num_rows)
        self.ops.plans.pop(num_rows, None)
        if chosen is not None:
            self.ops.plans[num_rows] = chosen
        return times

    @torch.inference_mode()
    def _time(self, num_rows: int) -> float:
        rows = CapturedRows.decode(torch.arange(num_rows, device=self.model.weights.device))
        return self.ops.launcher.time(lambda: self.model.forward(None, rows, self.state), rounds=REPLAYS) * 1e3


def name_of(variant: Variant) -> str:
    """A variant in a line."""
    cut, lora = variant.config, variant.lora_config
    name = str(variant.method)
    if cut is not None:
        name += f" {cut.height}x{cut.tile}, split {cut.split}, {cut.stages} stages, {cut.clusters} at once"
    return f"{name}; pairs {variant.lora}" + ("" if lora is None else f" {lora.height}x{lora.tile}, split {lora.splits}")


if __name__ == "__main__":
    main()
