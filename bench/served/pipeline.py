#!/usr/bin/env python3
"""Speed of a pipeline beside one card with the whole model: decode full and of one row, prompts, without a server.

    python bench/served/pipeline.py --size 7.2b --devices 0,1 [--rows 320] [--batches 1,320] [--prompt 4096] [--out FILE]
    python bench/served/pipeline.py --size 13.3b --devices 0,1 --out FILE
    python bench/served/pipeline.py --size tiny --devices cpu,cpu --vocab 512 --rows 4 --seconds 0.5   # to try it

Random weights of a published shape. Steps are submitted and read as the engine's loop does it. "one" is the whole model on the
first device with --rows rows, "stages" the pipeline with as many rows for each device; "of DP" is its speed beside that of a
copy of the model on each card. "prompt" feeds prompts of --prompt tokens one after another to rows that sample once. With
--captured steps of prefill run from graphs where they pay, as in a server; their tuning takes longer than all else.
"""

import argparse
import gc
import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

from bench.synth_checkpoint import SIZES, synth
from rwkv_batch.config import Config
from rwkv_batch.engine import build
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.pipeline.build import Pipeline
from rwkv_batch.kernels import compiler
from rwkv_batch.model import weights as weights_module
from rwkv_batch.request import Request
from rwkv_batch.scheduling.plan import Plan
from rwkv_batch.scheduling.scheduler import Scheduler
from sampling.params import SamplingParams

PARAMS = SamplingParams(temperature=1.0, top_k=50, top_p=0.6, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="7.2b")
    parser.add_argument("--devices", default="0,1", help="of the pipeline; cpu,cpu to try it")
    parser.add_argument("--rows", type=int, default=320, help="for each device")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of a prompt; 0 = none are fed")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each figure")
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--captured", action="store_true", help="prefill from graphs too")
    parser.add_argument("--only", choices=("one", "stages"), help="default: both")
    parser.add_argument("--out", help="write the figures here")
    args = parser.parse_args()
    devices = [torch.device(name if name == "cpu" else f"cuda:{name}") for name in args.devices.split(",")]
    document: dict[str, Any] = {"size": args.size, "devices": args.devices, "rows": args.rows, "torch": torch.__version__}
    if devices[0].type == "cuda":
        document["card"] = torch.cuda.get_device_name(devices[0])
    for name in ("one", "stages"):
        if args.only in (None, name):
            document[name] = measure(devices if name == "stages" else devices[:1], args)
            print(name, json.dumps(document[name]), flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(document, indent=1) + "\n")
    if "one" in document and "stages" in document:
        for figure in ("full_tok_s", "prompt_tok_s"):
            if figure in document["one"]:
                document[f"{figure}_of_dp"] = document["stages"][figure] / document["one"][figure] / len(devices)
        document["row_tok_s_of_one"] = document["stages"]["row_tok_s"] / document["one"]["row_tok_s"]
        print({key: round(value, 3) for key, value in document.items() if "_of_" in key})
    if args.out:
        Path(args.out).write_text(json.dumps(document, indent=1) + "\n")


def measure(devices: list[torch.device], args: argparse.Namespace) -> dict[str, Any]:
    """Figures of the model on these devices."""
    gc.collect()  # an engine before this one
    began, on_gpu, count = time.monotonic(), devices[0].type == "cuda", len(devices)
    if on_gpu:
        torch.cuda.set_device(devices[0])
        torch.cuda.empty_cache()
    tensors = synth(args.size, vocab=args.vocab, **({"device": "cuda", "place": "cuda"} if on_gpu else {}))
    shape = weights_module.check_tensors(tensors, args.size)
    dtype = torch.float16 if on_gpu else torch.float32
    library = compiler.library(devices[0].index) if on_gpu else None
    config = Config(ops="kernels" if on_gpu else "reference", batch_invariant=not args.captured)
    slots = args.rows * count
    budget = 4096 if count == 1 else 4096 // (2 * count)
    sizes = sorted({1, args.rows})
    found: dict[str, Any] = {"synth_s": time.monotonic() - began}
    pipeline = Pipeline.over(devices, config, shape, dtype, on_kernels=on_gpu) if count > 1 else None
    places = pipeline.layer_devices if pipeline else devices * shape.num_layers
    weights = weights_module.from_tensors(tensors, name=args.size, dtype=dtype, progress=False, layer_devices=places)
    options = {"max_tokens": budget, "library": library, "graph_sizes": sizes}
    if pipeline:
        found["layers"] = [len(layers) for layers in pipeline.ranges]
        engine = pipeline.build_engine(config, weights, slots, **options, wkv_dtype=build.choose_wkv_dtype(config, library))
    else:
        engine = build.build_engine(config, weights, slots, **options)
    found["start_s"] = time.monotonic() - began
    if on_gpu:
        found["gib"] = [round(torch.cuda.memory_allocated(device) / 2**30, 1) for device in devices]
    found["full_tok_s"] = Decoding(engine, slots, count, budget).speed(args.seconds)
    found["row_tok_s"] = Decoding(engine, 1, count, budget).speed(args.seconds / 2)
    if args.prompt:
        found["prompt_tok_s"] = prompts(engine, count, budget, args)
    return found


class Steps:
    """An engine's steps, as many under way as its loop has."""

    def __init__(self, engine: Engine, scheduler: Scheduler):
        self.engine = engine
        self.scheduler = scheduler
        self._flight: deque[tuple[Any, int]] = deque()

    def submit(self, plan: Plan) -> list[Any]:
        """Start a step; return what was sampled in those that are read for it."""
        step, read = self.engine.submit(plan), []
        groups = self.scheduler.num_groups
        while self._flight and (len(self._flight) >= groups or any(other & plan.groups for _, other in self._flight)):
            read += self.engine.collect(self._flight.popleft()[0])
        self._flight.append((step, plan.groups))
        return read

    def finish(self) -> list[Any]:
        """Read all that are under way."""
        read = []
        while self._flight:
            read += self.engine.collect(self._flight.popleft()[0])
        return read


class Decoding:
    """`rows` rows that decode and do not end."""

    def __init__(self, engine: Engine, rows: int, num_groups: int, budget: int):
        self.scheduler = Scheduler(num_slots=engine.state.num_slots, prefill_budget=budget, mixed=False, num_groups=num_groups)
        self.steps = Steps(engine, self.scheduler)
        self.scheduler.add(Request(id="r", prompts=[[1 + i % 400] for i in range(rows)], sampling=PARAMS, max_tokens=2**30))

    def speed(self, seconds: float) -> float:
        """Tokens a second, the first quarter of the time left out."""
        began = time.perf_counter()
        self._tokens(began + seconds / 4)
        warm = time.perf_counter()
        count = self._tokens(began + seconds)
        speed = count / (time.perf_counter() - warm)
        self.scheduler.cancel("r")
        return speed

    def _tokens(self, until: float) -> int:
        count = 0
        while count == 0 or time.perf_counter() < until:
            for _ in range(8):
                count += len(self.steps.submit(self.scheduler.next_plan()))
        return count + len(self.steps.finish())


def prompts(engine: Engine, num_groups: int, budget: int, args: argparse.Namespace) -> float:
    """Tokens a second of long prompts, one request each; warmed up by one."""
    scheduler = Scheduler(num_slots=engine.state.num_slots, prefill_budget=budget, mixed=False, num_groups=num_groups)
    steps, fed, began, number = Steps(engine, scheduler), 0, time.perf_counter(), 0
    while number < 2 or time.perf_counter() - began < args.seconds:
        if number == 1:
            steps.finish()
            fed, began = 0, time.perf_counter()
        prompt = [1 + (i * 7 + number) % 400 for i in range(args.prompt)]
        [sequence] = scheduler.add(Request(id=f"{number}", prompts=[prompt], sampling=PARAMS, max_tokens=1))
        while sequence.num_prefilled < len(prompt):
            plan = scheduler.next_plan()
            fed += sum(len(row.ids) for row in plan.rows)
            steps.submit(plan)
        scheduler.finish(sequence)
        number += 1
    steps.finish()
    return fed / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
