#!/usr/bin/env python3
"""What adapters of single rows cost: decode and prefill steps whose rows are spread over several LoRAs, against plain ones.

    python bench/served/adapters.py --size 7.2b [--rows 1,8,64,320] [--adapters 8] [--rank 32] [--out FILE]

Weights and adapters are random ones of a published shape. Both kinds of step are the server's own captured graphs, sampling
included, and take turns, since the card's clock falls as it warms up; medians of --iters steps. "share" is the plain step's
time over the other's: the speed that is left. "mixed" has adapters in every other row only. --ways takes other ways to multiply
into the turns: "behind", whose first halves run behind the products, and "torch". One GPU, nothing beside it.
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

from bench.synth_checkpoint import SIZES, synth
from rwkv_batch import __version__
from rwkv_batch.config import Config
from rwkv_batch.engine import build
from rwkv_batch.engine.decode_graphs import DecodeGraphs
from rwkv_batch.engine.engine import Way
from rwkv_batch.engine.prefill_graphs import PrefillGraphs
from rwkv_batch.kernels import compiler
from rwkv_batch.kernels.adapted.ops import AdaptedKernelOps
from rwkv_batch.kernels.adapted.products import TorchProducts
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.adapters.adapter import Adapter
from rwkv_batch.model.adapters.bank import PUBLISHED
from rwkv_batch.model.adapters.changes import LoraChange
from rwkv_batch.model.quantized import FORMATS, Quantisation
from sampling.params import SamplingParams

WARM_UP = 3


def random_lora(weights: weights_module.Weights, rank: int, seed: int) -> Adapter:
    """Return a LoRA of all six matrices of each layer."""
    generator = torch.Generator(device=weights.device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=weights.device) * 0.01

    changes = {}
    for i, layer in enumerate(weights.layers):
        for name, (attribute, transposed) in PUBLISHED.items():
            outs, ins = getattr(layer, attribute).shape[:: -1 if transposed else 1]
            changes[f"blocks.{i}.{name}.weight"] = LoraChange(draw(rank, ins), draw(outs, rank))
    return Adapter(f"random {seed}", "none", ("LoRA",), changes, {}, 1.0, False, f"{seed:032x}")


class Bench:
    """An engine with adapters in it."""

    def __init__(self, args: argparse.Namespace, rows: list[int], prefills: list[tuple[int, int]]):
        quant = Quantisation("" if args.quant == "none" else args.quant)
        tensors = synth(args.size, device="cuda", place="cuda")
        weights = weights_module.from_tensors(tensors, name=args.size, dtype=torch.float16, device="cuda:0", quant=quant)
        slots = max([*rows, *(count for count, _ in prefills)])
        tokens = max([slots, *(count * length for count, length in prefills)])
        config = Config(ops="kernels", adapter_ranks=args.adapters * args.rank)
        self.engine = build.build_engine(
            config, weights, slots, max_tokens=tokens, library=compiler.library(), graph_sizes=sorted(rows)
        )
        self.loaded = [self.engine.bank.load(random_lora(weights, args.rank, seed)) for seed in range(args.adapters)]
        self.iters = args.iters
        self.ways = {"adapted": self.engine.adapted}
        self.ways |= {name: self._way(name, sorted(rows), prefills) for name in args.ways.split(",") if name}
        params = SamplingParams(temperature=1.0, top_k=50, top_p=0.6, ignore_eos=True)
        self.engine.sampler.start_many(list(range(slots)), [params] * slots, list(range(slots)))
        self.engine.state.last_ids.random_(1, 60000)

    def _way(self, name: str, rows: list[int], prefills: list[tuple[int, int]]) -> Way:
        """Capture steps that multiply in another way."""
        engine = self.engine
        products = TorchProducts(engine.bank, engine.model.ops.linear) if name == "torch" else None
        ops = AdaptedKernelOps(engine.model.ops, engine.bank, products)
        ops.down_first = False
        model, tokens = build.model_of(engine.model.weights, ops, name), [count * length for count, length in prefills]
        longer = PrefillGraphs(model, engine.sampler, engine.state, max_tokens=max([0, *tokens]))
        longer.sizes, longer._long = sorted({*tokens} & {*engine.prefills.sizes}), []
        way = Way(model, DecodeGraphs(model, engine.sampler, engine.state, rows), longer)
        for captured in way[1:]:
            captured.capture()
        return way

    @torch.inference_mode()
    def decode(self, count: int) -> dict[str, object]:
        """Return the figures of decode steps of so many rows."""
        slots, engine = list(range(count)), self.engine
        found: dict[str, object] = {"decode": count}
        for name, every in (("all", 1), ("mixed", 2)):
            self._spread(slots, every)
            plain, *others = self._medians(
                *(lambda g=g: g.replay(slots) for g in (engine.graphs, *(w.graphs for w in self.ways.values())))
            )
            found |= {f"plain_ms_{name}": plain}
            for way, taken in zip(self.ways, others, strict=True):
                share = "share" if way == "adapted" else f"share_of_{way}"
                found |= {f"{way}_ms_{name}": taken, f"{share}_{name}": plain / taken}
        return found

    @torch.inference_mode()
    def prefill(self, count: int, length: int) -> dict[str, object]:
        """Return the figures of prompts; only where both kinds of step were captured."""
        slots, engine = list(range(count)), self.engine
        prompts = torch.randint(1, 60000, (count, length)).tolist()
        if not all(way.prefills.fits(count * length, count) for way in (engine, engine.adapted)):
            return {"prefill": f"{count}x{length}", "captured": False}
        self._spread(slots, 1)
        ways = {name: way for name, way in self.ways.items() if way.prefills.fits(count * length, count)}
        graphs = (engine.prefills, *(way.prefills for way in ways.values()))
        plain, *others = self._medians(*(lambda g=g: g.replay(slots, prompts, count) for g in graphs))
        found = {"prefill": f"{count}x{length}", "plain_ms": plain}
        for way, taken in zip(ways, others, strict=True):
            found |= {f"{way}_ms": taken, "share" if way == "adapted" else f"share_of_{way}": plain / taken}
        return found

    def _spread(self, slots: list[int], every: int) -> None:
        """Give every so many rows an adapter, in turn."""
        chosen = [self.loaded[slot // every % len(self.loaded)] if slot % every == 0 else None for slot in slots]
        self.engine.bank.assign(slots, chosen)

    def _medians(self, *runs: Callable[[], object]) -> list[float]:
        """Milliseconds of each; they take turns."""
        times: list[list[float]] = [[] for _ in runs]
        for _ in range(WARM_UP + self.iters):
            for run, taken in zip(runs, times, strict=True):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                run()
                end.record()
                end.synchronize()
                taken.append(begin.elapsed_time(end))
        return [statistics.median(taken[WARM_UP:]) for taken in times]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.1b")
    parser.add_argument("--rows", default="1,8,64,320")
    parser.add_argument("--prefill", default="1x128,1x512,8x64")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--quant", choices=("none", *FORMATS), default="none")
    parser.add_argument("--ways", default="", help="other ways to multiply: behind, torch")
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--out", help="write the figures to this file, beside those of other sizes already there")
    args = parser.parse_args()
    rows = [int(count) for count in args.rows.split(",") if count]
    prefills = [tuple(map(int, shape.split("x"))) for shape in args.prefill.split(",") if shape]
    bench = Bench(args, rows, prefills)
    found = [bench.decode(count) for count in rows] + [bench.prefill(*shape) for shape in prefills]
    for row in found:
        print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    if args.out:
        file = Path(args.out)
        content = json.loads(file.read_text()) if file.exists() else {}
        content[f"{args.size} {args.quant} {args.adapters}x{args.rank}"] = {
            "date": date.today().isoformat(), "device": torch.cuda.get_device_name(0), "torch": torch.__version__,
            "rwkv_batch": __version__, "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30, "rows": found,
        }  # fmt: skip
        file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
