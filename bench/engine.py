#!/usr/bin/env python3
"""Speed of the engine on one GPU: decode and prefill ladders, forward alone and with sampling inside.

    python bench/engine.py --size 7.2b [--batches 1,8,64,320,960] [--prefill 1x1024,32x512] [--out bench/results/engine.json]
    python bench/engine.py --size 7.2b --quant int8 --out bench/results/quant-h200.json
    python bench/engine.py --model-path M.pth
    python bench/engine.py --size 7.2b --arch sm_80             the kernels of older cards, on this one

Without a checkpoint the weights are random ones of a published shape whose feed-forward is as sparse as a trained model's
(`bench/synth_checkpoint.py`). Every row has its own prompt. Decode is one CUDA graph replay a step, as in the server; the
median of --iters replays is given, timed with events. "forward" is the graph without the sampler, "engine" the server's own
graph with it (temperature 1, top_k 50, top_p 0.6). The roofline counts, for a step, the weights read once or the products'
time in fp16, whichever is longer, and the state read and written once; for a prefill the products alone. A prefill runs as in
the server: from a graph, with sampling, where it captured one so large.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.synth_checkpoint import SIZES, synth
from rwkv_batch import __version__
from rwkv_batch.config import Config
from rwkv_batch.engine import build
from rwkv_batch.kernels import compiler
from rwkv_batch.model import checkpoint
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.packed_rows import CapturedRows, PackedRows
from rwkv_batch.model.quantized import FORMATS, Quantisation
from rwkv_batch.model.weight import Weight
from sampling.params import SamplingParams

COPY_BYTES, FLOPS = 4.29e12, 758e12  # device copy and dense fp16 product, measured on an H200
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.1b")
    parser.add_argument("--model-path")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128,256,320,512,960")
    parser.add_argument("--prefill", default="1x128,1x1024,1x4096,8x1024,32x512")
    parser.add_argument("--wkv-state", choices=("fp16", "fp32"), default="fp16")
    parser.add_argument("--wkv-log", action=argparse.BooleanOptionalAction, help="as the server's, and like it on by default")
    parser.add_argument("--untiled", action="store_true", help="without a copy of the large matrices for small steps")
    parser.add_argument("--quant", choices=("none", *FORMATS), default="none", help="how the large matrices are kept")
    parser.add_argument("--arch", help="build the kernels for this older architecture")
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--out", help="write the figures to this file, beside those of other sizes already there")
    args = parser.parse_args()
    if args.arch:
        os.environ[compiler.ARCH_VARIABLE] = args.arch
    batches = [int(batch) for batch in args.batches.split(",") if batch]
    prefills = [tuple(map(int, shape.split("x"))) for shape in args.prefill.split(",") if shape]
    options = Options(**{field.name: getattr(args, field.name) for field in fields(Options)})
    bench = Bench(options, batches, prefills)
    rows = [bench.decode(batch) for batch in batches] + [bench.prefill(*shape) for shape in prefills]
    for row in rows:
        print("  ".join(f"{key} {value:,.5g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, load {bench.load_seconds:.1f} s")
    if args.out:
        bench.write(Path(args.out), rows)


@dataclass(frozen=True)
class Options:
    """Which model, and how: as the arguments of the same names."""

    size: str
    model_path: str | None = None
    wkv_state: str = "fp16"
    wkv_log: bool | None = None
    quant: str = "none"
    arch: str | None = None
    untiled: bool = False
    iters: int = 20


class Bench:
    """One model on the GPU, and its engine."""

    def __init__(self, args: Options, batches: list[int], prefills: list[tuple[int, int]]):
        self.args = args
        self.device = torch.device("cuda", 0)
        self.arch = compiler.arch_of_device(0)
        name = args.model_path or f"random {args.size}"
        quant = Quantisation("" if args.quant == "none" else args.quant)
        if args.model_path:
            tensors = checkpoint.read_file(Path(args.model_path))
        else:
            tensors = synth(args.size, device="cuda", place="cuda")
        started = time.monotonic()
        weights = weights_module.from_tensors(tensors, name=name, dtype=torch.float16, device=self.device, quant=quant)
        torch.cuda.synchronize()
        self.load_seconds = time.monotonic() - started
        slots = max([*batches, *(count for count, _ in prefills)])
        tokens = max([count * length for count, length in prefills] + [slots])
        config = Config(
            ops="kernels",
            wkv_state=args.wkv_state,
            wkv_log=args.wkv_log,
            batch_invariant=not prefills,  # then none are captured
        )
        self.engine = build.build_engine(
            config,
            weights,
            slots,
            max_tokens=tokens,
            library=compiler.library(quant=bool(quant.format)),
            graph_sizes=batches or [slots],
            tiled=not args.untiled,
        )
        self.model, self.state = self.engine.model, self.engine.state
        logged = {None: "", True: "wkv-log", False: "no wkv-log"}[args.wkv_log]
        self.name = " ".join(part for part in (name, quant.format, args.arch, args.untiled and "untiled", logged) if part)
        generator = torch.Generator(device=self.device).manual_seed(1)
        self.tokens = torch.randint(1, 60000, (tokens,), generator=generator, device=self.device)
        params = SamplingParams(temperature=1.0, top_k=50, top_p=0.6, ignore_eos=True)
        self.engine.sampler.start_many(list(range(slots)), [params] * slots, list(range(slots)))
        self.state.clear(list(range(slots)))
        self.state.last_ids.copy_(self.tokens[:slots])
        for start in range(0, slots, 64):  # states of real use: after a prompt each
            some = list(range(start, min(start + 64, slots)))
            length = max(1, min(32, tokens // len(some)))
            self.model.forward(
                self.tokens[: length * len(some)], PackedRows(some, [length] * len(some), self.device), self.state
            )

    def decode(self, batch: int) -> dict:
        """Return the figures of one batch size."""
        replay, logits = self.captured_decode(batch)
        host_slots = list(range(batch))
        forward, engine = self._medians(replay, lambda: self.engine.graphs.replay(host_slots))
        finite = bool(torch.isfinite(logits).all())
        floor = self._decode_floor(batch)
        return {
            "decode": batch, "forward_ms": forward, "forward_tok_s": batch / forward * 1e3,
            "engine_tok_s": batch / engine * 1e3, "engine_of_forward": forward / engine,
            "of_roofline": floor / forward, "finite": finite,
        }  # fmt: skip

    def captured_decode(self, batch: int) -> tuple[Callable[[], None], torch.Tensor]:
        """Capture a decode step without sampling; returns what replays it, and its logits."""
        rows = CapturedRows.decode(torch.arange(batch, device=self.device))
        with torch.inference_mode():
            self.model.forward(None, rows, self.state)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self.model.forward(None, rows, self.state)

        def replay(_rows: CapturedRows = rows) -> None:  # the graph reads them
            graph.replay()

        return replay, logits

    def prefill(self, count: int, length: int) -> dict:
        """Return the figures of `count` prompts of `length` tokens, logits of their last tokens included."""
        run, captured = self.prefill_step(count, length)
        (seconds,) = self._medians(run)
        flops = 2 * count * length * (self._matrices()[0] - self.model.weights.head.shape.numel())
        floor = flops / FLOPS * 1e3
        return {
            "prefill": f"{count}x{length}", "captured": captured, "ms": seconds, "tok_s": count * length / seconds * 1e3,
            "of_roofline": floor / seconds,
        }  # fmt: skip

    def prefill_step(self, count: int, length: int) -> tuple[Callable[[], None], bool]:
        """Return what runs a prefill as the server would, and whether from a graph, which samples too."""
        slots = list(range(count))
        rows = PackedRows(slots, [length] * count, self.device)
        tokens = self.tokens[: count * length]
        prompts = tokens.view(count, length).tolist()
        captured = self.engine.prefills.fits(count * length, count)

        def run() -> None:
            self.state.clear(slots)
            if captured:
                self.engine.prefills.replay(slots, prompts, count)
            else:
                self.model.forward(tokens, rows, self.state)

        return run, captured

    def write(self, file: Path, rows: list[dict]) -> None:
        """Put the figures under the model's name into the file."""
        file.parent.mkdir(parents=True, exist_ok=True)
        content = json.loads(file.read_text()) if file.exists() else {}
        content[self.name] = {
            "date": date.today().isoformat(), "device": torch.cuda.get_device_name(0), "torch": torch.__version__,
            "cuda": torch.version.cuda, "rwkv_batch": __version__,
            "arch": self.arch, "kernels": compiler.Toolchain.cuda().digest(self.arch),
            "wkv_state": self.args.wkv_state, "quant": self.args.quant, "matrix_bytes": self._matrices()[1],
            "load_seconds": self.load_seconds,
            "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30, "rows": rows,
        }  # fmt: skip
        file.write_text(json.dumps(content, indent=1) + "\n")

    def _medians(self, *runs: Callable[[], object]) -> list[float]:
        """Milliseconds of each; they take turns, since the card's clock falls as it warms up."""
        times = [[] for _ in runs]
        for _ in range(WARM_UP + self.args.iters):
            for run, taken in zip(runs, times, strict=True):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                run()
                end.record()
                end.synchronize()
                taken.append(begin.elapsed_time(end))
        return [statistics.median(taken[WARM_UP:]) for taken in times]

    def _matrices(self) -> tuple[int, int]:
        """Values of all matrices, and bytes."""
        weights = self.model.weights
        all_fields = [getattr(layer, field.name) for layer in weights.layers for field in fields(layer)]
        large = [weights.head, *(value for value in all_fields if isinstance(value, Weight))]
        pairs = [t for t in all_fields if isinstance(t, torch.Tensor) and t.dtype == torch.float16]
        values = sum(weight.shape.numel() for weight in large) + sum(t.numel() for t in pairs)
        return values, sum(weight.nbytes for weight in large) + sum(t.nbytes for t in pairs)

    def _decode_floor(self, batch: int) -> float:
        """Milliseconds."""
        values, weight_bytes = self._matrices()
        state = 2 * batch * (self.state.wkv[:, 0].nbytes + self.state.shift[:, :, 0].nbytes)
        return (max(weight_bytes / COPY_BYTES, 2 * batch * values / FLOPS) + state / COPY_BYTES) * 1e3


if __name__ == "__main__":
    main()
