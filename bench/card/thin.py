#!/usr/bin/env python3
"""What adapters of single rows add, alone: 32 layers of 7.2B's matrices without the products between, kernels against torch.

    python bench/card/thin.py [--out bench/results/adapters-h200.json]

Both are captured and take turns; medians. "floor" is the time of reading the columns that the rows use once, at 4.2 TB/s. What
the whole step costs says `bench/served/adapters.py`. One GPU, nothing beside it.
"""

import argparse
import json
import statistics
import sys
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

from rwkv_batch import __version__
from rwkv_batch.kernels import compiler
from rwkv_batch.kernels.adapted.products import AdapterProducts, GroupedProducts, TorchProducts
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.kernels.linear import Linear
from rwkv_batch.model.adapters.bank import MatrixBank
from rwkv_batch.model.packed_rows import CapturedRows

GPU, WIDTH, HIDDEN, LAYERS = torch.device("cuda:0"), 4096, 16384, 32
MATRICES = 6  # of a layer
BYTES_A_MS = 4.2e9
CASES = [(8, 32, rows) for rows in (1, 8, 64, 128, 320)] + [(32, 16, 64), (1, 64, 64)]  # adapters, rank, rows
ROUNDS, WARM_UP = 14, 4


class Bank:
    """The tables that an AdapterBank has, filled with so many adapters in turn."""

    def __init__(self, adapters: int, rank: int, slots: int):
        self.num_columns = adapters * rank
        self.owner = torch.arange(self.num_columns, device=GPU) // rank + 1
        self.of_slot = torch.tensor([slot % adapters + 1 for slot in range(slots)] + [0], device=GPU)

    def numbers_of(self, rows: CapturedRows) -> torch.Tensor:
        """Return each row's adapter."""
        return self.of_slot[rows.slot_tensor]

    def foreign(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return which columns are not a row's."""
        return self.owner != numbers.unsqueeze(1)


def random_matrix(columns: int, ins: int, outs: int, *stack: int) -> MatrixBank:
    """Return what adapters add to one matrix, or to several."""
    down = torch.randn(*stack, columns, ins, device=GPU).mul_(ins**-0.5).half()
    return MatrixBank(down, torch.randn(*stack, columns, outs, device=GPU).mul_(0.02).half())


def captured(
    products: AdapterProducts, launcher: Launcher, layers: list[dict[str, MatrixBank]], rows: int
) -> torch.cuda.CUDAGraph:
    """Return all layers' halves as one graph."""
    step = CapturedRows.decode(torch.arange(rows, device=GPU))
    x, hidden = torch.randn(3, rows, WIDTH, device=GPU).half(), torch.randn(rows, HIDDEN, device=GPU).relu().half()
    out, wide = torch.zeros(3, rows, WIDTH, device=GPU).half(), torch.zeros(rows, HIDDEN, device=GPU).half()
    ends = {"rkv": (x, out), "output": (x[0], out[0]), "ffn_key": (x[0], wide), "ffn_value": (hidden, out[0])}

    def run() -> None:
        launcher.use_current_stream()
        products.begin(step, rows)
        for layer in layers:
            for name, (source, target) in ends.items():
                products.down(source, layer[name])
                products.up(target, layer[name], square=name == "ffn_key")

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.buffers = (step, x, hidden, out, wide)  # live as long as it does
    return graph


def medians(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Milliseconds of each; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(taken[WARM_UP:]) for name, taken in times.items()}


@torch.inference_mode()
def measure(adapters: int, rank: int, rows: int, launcher: Launcher, linear: Linear) -> dict[str, float]:
    """Return the figures of one case."""
    bank, columns = Bank(adapters, rank, rows), adapters * rank
    sizes = {"rkv": (WIDTH, WIDTH, 3), "output": (WIDTH, WIDTH), "ffn_key": (WIDTH, HIDDEN), "ffn_value": (HIDDEN, WIDTH)}
    layers = [{name: random_matrix(columns, *size) for name, size in sizes.items()} for _ in range(LAYERS)]
    ways = {"kernels": GroupedProducts(bank, launcher, rows), "torch": TorchProducts(bank, linear)}
    times = medians({name: captured(products, launcher, layers, rows) for name, products in ways.items()})
    values = LAYERS * min(rows, adapters) * rank * (4 * 2 * WIDTH + 2 * (WIDTH + HIDDEN))
    found = {"adapters": adapters, "rank": rank, "rows": rows}
    found |= {f"{name}_ms": taken for name, taken in times.items()}
    found |= {f"{name}_us_a_matrix": taken / (MATRICES * LAYERS) * 1e3 for name, taken in times.items()}
    return found | {"floor_ms": 2 * values / BYTES_A_MS}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the figures to this file, beside others already there")
    args = parser.parse_args()
    launcher = Launcher(compiler.library(), GPU)
    launcher.use_current_stream()
    linear, rows = Linear(launcher, pdl=True), []
    for case in CASES:
        rows.append(measure(*case, launcher, linear))
        print("  ".join(f"{key} {value:.4g}" for key, value in rows[-1].items()), flush=True)
    if args.out:
        file = Path(args.out)
        content = json.loads(file.read_text()) if file.exists() else {}
        content["7.2b alone"] = {
            "date": date.today().isoformat(), "device": torch.cuda.get_device_name(0), "torch": torch.__version__,
            "rwkv_batch": __version__, "rows": rows,
        }  # fmt: skip
        file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
