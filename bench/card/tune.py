#!/usr/bin/env python3
"""Measure how this card does each product fastest, and write it to the file that is shipped for such cards.

    python bench/card/tune.py [--sizes 0.1b,1.5b,7.2b] [--quant none,int8] [--slots 320] [--out FILE]

Nothing that was found out or shipped before is used. Weights are random ones of published shapes (`bench/synth_checkpoint.py`).
The sizes of steps are those of a server with so many slots and its other defaults. FILE is by default the card's in
`rwkv_batch/kernels/measured`; what it has from the same kernel sources, of other models say, is kept.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import msgspec
import torch

from bench.synth_checkpoint import SIZES, synth
from rwkv_batch.config import Config
from rwkv_batch.engine import build
from rwkv_batch.kernels import compiler, measured
from rwkv_batch.kernels.card_cache import recall
from rwkv_batch.kernels.few.tuning import Plans
from rwkv_batch.kernels.measured import Measured
from rwkv_batch.kernels.variants import Variant
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.quantized import FORMATS, Quantisation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.1b,1.5b,7.2b")
    parser.add_argument("--quant", default="none", help="formats, with commas between them")
    parser.add_argument("--slots", type=int, default=build.GPU_SLOTS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    card = torch.cuda.get_device_name(0)
    file = args.out or measured.file_of(card)  # not in the folder below
    sizes, formats = args.sizes.split(","), args.quant.split(",")
    if unknown := [*({*sizes} - {*SIZES}), *({*formats} - {"none", *FORMATS})]:
        parser.error(f"unknown: {', '.join(unknown)}")
    library = compiler.library()  # in the cache of every day
    with tempfile.TemporaryDirectory() as folder:
        os.environ[compiler.CACHE_VARIABLE] = folder
        measured.FOLDER = Path(folder)  # where nothing is shipped
        for size in sizes:
            for quant in formats:
                tune(size, "" if quant == "none" else quant, args.slots, library)
        found = gathered(Path(folder), card, Path(library._name).stem)
    if file.exists():
        old = msgspec.json.decode(file.read_bytes(), type=Measured)
        if old.sources == found.sources:
            found.variants, found.plans = old.variants | found.variants, old.plans | found.plans
        found.algorithms = {name: old.algorithms.get(name, {}) | new for name, new in found.algorithms.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(found, order="sorted"), indent=1) + b"\n")
    num_algorithms = sum(map(len, found.algorithms.values()))
    print(f"{file}: {len(found.variants)} choices, {len(found.plans)} plans, {num_algorithms} algorithms of cuBLASLt")


def tune(size: str, quant: str, slots: int, library: object) -> None:
    """Have the tuner choose for one model."""
    started = time.monotonic()
    weights = weights_module.from_tensors(
        synth(size, device="cuda", place="cuda"), dtype=torch.float16, device=torch.device("cuda", 0), quant=Quantisation(quant)
    )
    spare = int(slots * Config().spare_slots + 0.5)
    sizes = {"num_spare": spare, "max_tokens": build.GPU_PREFILL}
    build.build_engine(Config(ops="kernels"), weights, slots + spare, **sizes, library=library, tiled=True)
    print(f"{size} {quant}: {time.monotonic() - started:.0f} s")


def gathered(folder: Path, card: str, digest: str) -> Measured:
    """Return what the tuner left in the folder."""
    found, suffix = Measured(sources=compiler.sources_digest()), f"-{card.replace(' ', '-')}"
    for key, variant in recall(folder / f"variants{suffix}.json", dict[str, Variant]).items():
        found.variants[measured.portable(key, digest)] = variant
    for key, plan in recall(folder / f"few{suffix}.json", Plans).items():
        found.plans[measured.portable(key, digest)] = plan
    for file in sorted(folder.glob(f"matmul*{suffix}-*.json")):
        name = file.stem.replace(suffix, "")
        found.algorithms[name] = recall(file, dict[str, list[int]])
    return found


if __name__ == "__main__":
    main()
