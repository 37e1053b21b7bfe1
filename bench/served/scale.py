#!/usr/bin/env python3
"""How the speed grows with the engines of a host: forward alone, separate streams and one large request over HTTP.

    python bench/served/scale.py --devices 0,1,2,3 --size 7.2b --model-path M.pth [--counts 1,2,4] [--out FILE]
    python bench/served/scale.py --devices auto --size 7.2b --model-path M.pth --tokens 128       # quick: about 40 s a count
    python bench/served/scale.py --devices cpu,cpu --fake-engine 20        # plausible or not, with stand-ins

For each count the first so many devices are used. "forward" is `bench/engine.py` at --rows rows in one process for each card,
all at once; "streams" is a server with --devices and --rows streams of one prompt for each, --tokens tokens each, one token a
chunk; "request" is one streamed request of as many prompts, of which a short one warms the server up. "linear" is a figure
beside that of one device times the count, "engines" how evenly the tokens were shared out: the least any engine made beside the
most, "start_seconds" what the server took until it answered.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench import http_ladder
from rwkv_batch.devices import card_environ, engine_devices

ROOT = Path(__file__).resolve().parent.parent.parent
START_SECONDS = 600  # for all engines to load and to tune their kernels
NAMES = ("forward", "streams", "request")
FORWARD_STEPS = 100  # of which the median is taken
WARM_TOKENS = 8


class Server:
    """app.py on these devices; as a context manager it is stopped."""

    def __init__(self, devices: list[str], args: argparse.Namespace):
        self.folder = tempfile.TemporaryDirectory(prefix="scale-")
        self.log = open(Path(self.folder.name) / "log", "w+")  # noqa: SIM115 - closed in __exit__
        flags = ["--devices", ",".join(devices), "--port", "0", "--slots", str(args.rows), "--no-access-log"]
        flags += ["--queue", str(args.rows * len(devices)), "--state-db", ""]
        flags += ["--fake-engine", str(args.fake_engine)] if args.fake_engine is not None else ["--model-path", args.model_path]
        environ = {**os.environ, "XDG_RUNTIME_DIR": self.folder.name}
        command = [sys.executable, str(ROOT / "app.py"), *flags, *args.flag]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=environ)

    def __enter__(self) -> "Server":
        began = time.monotonic()
        deadline = began + START_SECONDS
        while not (found := re.search(r"address  (http://\S+)  .*; (\d+) HTTP", Path(self.log.name).read_text())):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(Path(self.log.name).read_text())
            time.sleep(0.1)
        self.url, self.http_processes = found[1], int(found[2])
        self.start_seconds = time.monotonic() - began
        time.sleep(1.0)  # every process has its tokenizer and has widened its threads
        return self

    def __exit__(self, *_: object) -> None:
        for _ in range(2):
            self.process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        self.process.wait(60)
        self.log.close()
        self.folder.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--counts", help="how many of them, such as 1,2,4; default: 1, 2, 4 and so on, and all")
    parser.add_argument("--rows", type=int, default=320, help="of each engine")
    parser.add_argument("--tokens", type=int, default=http_ladder.TOKENS, help="that each stream samples")
    parser.add_argument("--size", help="of random weights for the forward pass, which is left out without it")
    parser.add_argument("--model-path", default="", help="what the server serves")
    parser.add_argument("--fake-engine", type=float, help="stand-ins instead, milliseconds a step")
    parser.add_argument("--processes", type=int, help="client processes; default: a third of the CPUs")
    parser.add_argument("--flag", action="append", default=[], help="given to the server too, such as --flag=--http-workers=8")
    parser.add_argument("--out")
    args = parser.parse_args()
    args.processes = args.processes or max(2, (os.cpu_count() or 2) // 3)
    devices = engine_devices(args.devices, os.environ)
    counts = [int(count) for count in args.counts.split(",")] if args.counts else doubling(len(devices))
    document = {
        "date": time.strftime("%Y-%m-%d"), "cpus": os.cpu_count(), "machine": platform.machine(), "rows": args.rows,
        "tokens": args.tokens,
        "model": args.model_path or args.size or f"stand-in, {args.fake_engine:g} ms a step", "counts": {},
    }  # fmt: skip
    for count in counts:
        found = document["counts"][str(count)] = measure(devices[:count], args)
        for name in NAMES:
            one = document["counts"].get("1", {}).get(name)
            if name in found and one:
                found[f"{name}_linear"] = found[name] / one / count
        if args.out:
            Path(args.out).write_text(json.dumps(document, indent=1) + "\n")
        print_table(document)


def doubling(most: int) -> list[int]:
    """1, 2, 4 and so on, and the most."""
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})


def measure(devices: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of each way."""
    found: dict[str, Any] = {"devices": devices}
    if args.size and "cpu" not in devices:
        began = time.monotonic()
        found["forward"] = forward(devices, args)
        print(f"forward on {len(devices)}: {found['forward']:,.0f} tokens/s, {time.monotonic() - began:.0f} s", flush=True)
    if args.model_path or args.fake_engine is not None:
        with Server(devices, args) as server:
            found["http_processes"], found["start_seconds"] = server.http_processes, server.start_seconds
            found |= over_http(server.url, args, args.rows * len(devices))
    return found


def forward(devices: list[str], args: argparse.Namespace) -> float:
    """What the engines make together, each on its card, without a server."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{device}.json") for device in devices]
        options = ["--size", args.size, "--batches", str(args.rows), "--prefill", "", "--iters", str(FORWARD_STEPS)]
        running = [
            subprocess.Popen(
                [sys.executable, str(ROOT / "bench" / "engine.py"), *options, "--out", str(file)],
                env={**os.environ, **card_environ(device, os.environ)},
                stdout=subprocess.DEVNULL,
            )
            for device, file in zip(devices, files, strict=True)
        ]
        ended = [process.wait() for process in running]
        if any(ended):
            raise RuntimeError("bench/engine.py has failed")
        return sum(model["rows"][0]["engine_tok_s"] for file in files for model in json.loads(file.read_text()).values())


def over_http(url: str, args: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Streams, then one request."""
    options = SimpleNamespace(url=url, processes=args.processes)
    asyncio.run(http_ladder.batch(options, rows, stream=True, tokens=WARM_TOKENS))
    before = asyncio.run(tokens_of(options))
    streams = http_ladder.streams(options, rows, rows, tokens=args.tokens)
    made = [now - then for now, then in zip(asyncio.run(tokens_of(options)), before, strict=True)]
    request = asyncio.run(http_ladder.batch(options, rows, stream=True, tokens=args.tokens))
    return {
        "streams": streams["tokens_per_second"], "failed": streams["failed"], "ttft_ms": streams["ttft_ms"],
        "itl_ms": streams["itl_ms"], "client_cpu_percent": streams["client_cpu_percent"], "engines": min(made) / max(made),
        "request": request["tokens_per_second"],
    }  # fmt: skip


async def tokens_of(options: SimpleNamespace) -> list[int]:
    """What each engine has made so far, told at its next sign of life."""
    await asyncio.sleep(1.0)
    answer = (await http_ladder.call(*http_ladder.urlsplit(options.url).netloc.split(":"), "/stats")).json()
    return [engine["generation_tokens_total"] for engine in answer["engines"]]


def print_table(document: dict[str, Any]) -> None:
    """For people."""
    print(f"{document['model']}, {document['rows']} rows for each engine, {document['cpus']} CPUs; tokens/s (linear)")
    print(f"{'engines':>8}" + "".join(f"{name:>20}" for name in NAMES) + f"{'evenly':>9}{'failed':>8}")
    for count, found in document["counts"].items():
        cells = [f"{found[name]:,.0f} ({found.get(f'{name}_linear', 1):.2f})" if name in found else "-" for name in NAMES]
        even = f"{found['engines']:.2f}" if "engines" in found else "-"
        print(f"{count:>8}" + "".join(f"{cell:>20}" for cell in cells) + f"{even:>9}{found.get('failed', 0):>8}")


if __name__ == "__main__":
    main()
