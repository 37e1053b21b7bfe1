#!/usr/bin/env python3
"""What an engine over several cards takes for a step, beside one card: `--tp` without HTTP.

    python bench/served/tensor_parallel.py --size 7.2b --tp 1,2 --rows 1,64,320 [--out FILE]

"step" is a captured decode step with its sampling, replayed as the engine does, in milliseconds (median); "sum" what adding up
so many rows over the cards takes in a graph of sums alone, in microseconds; "cosine" the logits of a prompt and of decode steps
behind it beside those of one card; "equal" whether all ranks have the same residual stream, bit for bit. With --prompts short
prompts run from graphs, as in a server; their tuning takes longer than all else.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from datetime import date
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench.synth_checkpoint import SIZES, synth
from rwkv_batch.config import Config
from rwkv_batch.engine import build
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.tensor_parallel.build import ShardedEngine, Spread
from rwkv_batch.kernels import compiler
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.quantized import PLAIN
from rwkv_batch.model.tensor_parallel.on_device import current
from sampling.params import SamplingParams

PROMPT, STEPS = 256, 16  # tokens and decode steps that are compared
CAPTURED_PROMPTS, LONG_PROMPT = (64, 512), 2048  # tokens of prompts that are timed
WARM_UP, SUM_REPLAYS = 10, 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="7.2b")
    parser.add_argument("--tp", default="1,2")
    parser.add_argument("--rows", default="1,64,320")
    parser.add_argument("--prompts", action="store_true", help="time captured prefills too")
    parser.add_argument("--iters", type=int, default=100)
    parser.add_argument("--out", help="write the figures to this file")
    args = parser.parse_args()
    rows = [int(number) for number in args.rows.split(",")]
    tensors = synth(args.size, device="cuda", place="cuda")
    judge, found = None, []
    for count in map(int, args.tp.split(",")):
        started = time.monotonic()
        engine = engine_on(count, tensors, args, rows)
        line = {"tp": count, "start_seconds": time.monotonic() - started, **steps(engine, rows, args.iters)}
        logits = compared(engine, rows[-1])
        if judge is None:
            judge = logits
        cosine = torch.nn.functional.cosine_similarity(judge.double().flatten(), logits.double().flatten(), dim=0)
        line["cosine"] = float(cosine)
        if isinstance(engine, ShardedEngine):
            shifts = [state.shift.cpu() for state in engine.state.ranks]
            line["equal"] = all(torch.equal(shifts[0], shift) for shift in shifts)
            line |= sums(engine, rows)
        found.append(line)
        print("  ".join(f"{k} {v:,.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()), flush=True)
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        if args.out:
            about = {"date": date.today().isoformat(), "device": torch.cuda.get_device_name(0), "size": args.size}
            Path(args.out).write_text(json.dumps(about | {"torch": torch.__version__, "rows": found}, indent=1) + "\n")


def engine_on(count: int, tensors: dict[str, torch.Tensor], args: argparse.Namespace, rows: list[int]) -> Engine:
    """Return the engine on so many cards."""
    read = partial(weights_module.from_tensors, name=args.size, dtype=torch.float16, progress=False)
    config, device = (
        Config(ops="kernels", tp=count, batch_invariant=not args.prompts, watchdog_seconds=20),
        torch.device("cuda", 0),
    )
    if count == 1:
        weights = read(dict(tensors), device=device)
    else:
        weights = Spread.of(config, device, weights_module.shape_of(tensors, args.size), PLAIN).load(dict(tensors), read)
    library = compiler.library()
    engine = build.build_engine(config, weights, rows[-1], max_tokens=LONG_PROMPT, library=library, graph_sizes=rows)
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.6, ignore_eos=True)
    engine.sampler.start_many(list(range(rows[-1])), [params] * rows[-1], list(range(rows[-1])))
    return engine


def steps(engine: Engine, rows: list[int], iters: int) -> dict[str, float]:
    """Milliseconds of a decode step by rows, tokens a second, and milliseconds of a prompt."""
    found = {}
    for count in rows:
        slots = list(range(count))
        found[f"step_ms_{count}"] = median_ms(lambda slots=slots: engine.graphs.replay(slots), iters)
        found[f"tok_s_{count}"] = count / found[f"step_ms_{count}"] * 1e3
    tokens = torch.randint(1, 60000, (LONG_PROMPT,), device=engine.device)
    rows_of_long = PackedRows([0], [LONG_PROMPT], engine.device)
    found[f"prefill_ms_{LONG_PROMPT}"] = median_ms(lambda: engine.model.forward(tokens, rows_of_long, engine.state), 10)
    for length in CAPTURED_PROMPTS if engine.prefills is not None else ():
        prompt = tokens[:length].tolist()
        found[f"prefill_ms_{length}"] = median_ms(lambda prompt=prompt: engine.prefills.replay([0], [prompt], 1), 10)
    return found


def median_ms(run, iters: int) -> float:
    """Milliseconds on rank 0's card, of runs that follow one another as an engine's steps do: four at a time."""
    times = []
    for _ in range(WARM_UP + iters):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(4):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 4)
    return statistics.median(times[WARM_UP:])


@torch.inference_mode()
def compared(engine: Engine, slots: int) -> torch.Tensor:
    """Return logits of a prompt and of decode steps with the same tokens on every engine."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 60000, (PROMPT + STEPS,), generator=generator)
    engine.state.clear(range(slots))
    first = engine.model.forward(ids[:PROMPT].to(engine.device), PackedRows([0], [PROMPT], engine.device), engine.state)
    logits = [first.float().cpu()]
    for id in ids[PROMPT:].tolist():
        engine.state.last_ids[0] = id
        logits.append(engine.graphs.replay([0])[1].float().cpu())
    return torch.cat(logits)


@torch.inference_mode()
def sums(engine: ShardedEngine, rows: list[int]) -> dict[str, float]:
    """Microseconds of one sum of so many rows, of all that a step takes in a graph."""
    exchange, found = engine.graphs.exchange, {}
    for count in rows:
        graphs = []
        for rank, part in enumerate(exchange.parts):
            part[:count].zero_()
            with current(part.device):
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(part.device)):
                    exchange.begin_one(rank)
                    for _ in range(exchange.num_sums):
                        exchange.add_one(rank, part[:count])
                graphs.append(graph)

        def run(graphs=graphs) -> None:
            for graph in graphs:
                graph.replay()

        found[f"sum_us_{count}"] = median_ms(run, SUM_REPLAYS) * 1e3 / exchange.num_sums
    return found


if __name__ == "__main__":
    main()
