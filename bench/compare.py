#!/usr/bin/env python3
"""Two checkouts of this project on the same GPU, by turns: whether a change made the engine or the server slower.

    python bench/compare.py BEFORE AFTER [--sizes 0.1b,1.5b,7.2b] [--rounds 2] [--out FILE]
    python bench/compare.py BEFORE AFTER --sizes "" --http-model M.pth [--rounds 2]

Each round runs each checkout's own `bench/engine.py` in a fresh process, first the one, then the other. A cell is the best of
the rounds, for what disturbs a run only makes it slower; the ratio is AFTER to BEFORE in tokens/s. With `--http-model` each
checkout serves that checkpoint and AFTER's `bench/http_ladder.py` drives it.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

LADDER = ("batch", "batch_stream", "streams", "single", "singles_16")
START_SECONDS = 180


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--sizes", default="0.1b,1.5b,7.2b")
    parser.add_argument("--batches", default="1,8,64,320,960")
    parser.add_argument("--prefill", default="1x1024,32x512")
    parser.add_argument("--http-model", type=Path)
    parser.add_argument("--port", type=int, default=8400)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    trees = {"before": args.before.resolve(), "after": args.after.resolve()}
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "revisions": {who: revision(tree) for who, tree in trees.items()},
    }
    for size in filter(None, args.sizes.split(",")):
        runs: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
        for _ in range(args.rounds):
            for who, tree in trees.items():
                runs[who].append(engine(tree, size, args))
        result[size] = compared(runs)
        show(size, result[size])
        write(args.out, result)
    if args.http_model:
        runs = {"before": [], "after": []}
        for _ in range(args.rounds):
            for who, tree in trees.items():
                runs[who].append(ladder(tree, trees["after"], args))
        result["http"] = compared(runs)
        show("http", result["http"])
        write(args.out, result)


def engine(tree: Path, size: str, args: argparse.Namespace) -> dict[str, float]:
    """Tokens/s of each cell of one run of a checkout's engine bench."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "engine.json"
        options = ["--size", size, "--batches", args.batches, "--prefill", args.prefill, "--out", str(out)]
        subprocess.run([sys.executable, "bench/engine.py", *options], cwd=tree, check=True, stdout=subprocess.DEVNULL)
        (run,) = json.loads(out.read_text()).values()
    cells = {}
    for row in run["rows"]:
        cell = f"decode {row['decode']}" if "decode" in row else f"prefill {row['prefill']}"
        cells |= {
            f"{cell} {key.removesuffix('tok_s').rstrip('_')}".strip(): value
            for key, value in row.items()
            if key.endswith("tok_s")
        }
    return cells


def ladder(tree: Path, after: Path, args: argparse.Namespace) -> dict[str, float]:
    """Tokens/s of each rung of the HTTP ladder, against a server of one checkout."""
    with served(tree, args), tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ladder.json"
        command = [sys.executable, "bench/http_ladder.py", "--url", f"http://127.0.0.1:{args.port}", "--out", str(out)]
        subprocess.run(command, cwd=after, check=True, stdout=subprocess.DEVNULL)
        run = json.loads(out.read_text())
    return {rung: run[rung]["tokens_per_second"] for rung in LADDER}


@contextlib.contextmanager
def served(tree: Path, args: argparse.Namespace) -> Iterator[None]:
    """A server of that checkout, until the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--model-path", str(args.http_model), "--port", str(args.port), "--host", "127.0.0.1", "--slots", "320"]
        options += ["--state-db", f"{folder}/sessions.db"]
        process = subprocess.Popen([sys.executable, "app.py", *options], cwd=tree, stdout=subprocess.DEVNULL)
        try:
            wait_until_ready(args.port, process)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def wait_until_ready(port: int, process: subprocess.Popen) -> None:
    """Return when the server takes requests; raises SystemExit when it ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.3)
    sys.exit("the server did not become ready")


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Best of the rounds and their ratio, by cell; all rounds besides."""
    before, after = ({cell: max(run[cell] for run in some) for cell in some[0]} for some in (runs["before"], runs["after"]))
    cells = {cell: {"before": before[cell], "after": after[cell], "ratio": after[cell] / before[cell]} for cell in before}
    return {"cells": cells, "rounds": runs}


def show(name: str, found: dict[str, Any]) -> None:
    for cell, figures in found["cells"].items():
        print(f"{name:5} {cell:24} {figures['before']:12,.1f} {figures['after']:12,.1f}  {figures['ratio']:.3f}", flush=True)


def revision(tree: Path) -> str:
    """The checkout's commit, or its folder's name where git knows nothing of it."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=tree, capture_output=True, text=True, check=False)
    return found.stdout.strip() if (tree / ".git").exists() else os.path.basename(tree)


def write(out: Path | None, result: dict[str, Any]) -> None:
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
