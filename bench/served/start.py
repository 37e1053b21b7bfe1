#!/usr/bin/env python3
"""How long a server takes from its start to its first token, and where the time goes, by the lines of its log.

    python bench/served/start.py [--out FILE] -- --model-path M.pth --state-db ""

What stands behind `--` is given to app.py. For a start on a card never seen, set RWKV_BATCH_KERNEL_CACHE to an empty folder.
"""

import argparse
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MARKS = {
    "building": "building the",
    "needs": r"needs [\d,]+ MiB",
    "weights": "fingerprint",
    "built": "built in",
    "checked": "checked the kernels",
    "tuned": "tuned the products",
    "captured": "captured",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=300, help="seconds after which it is given up")
    parser.add_argument("--out")
    parser.add_argument("--log", help="write the server's log to this file, each line behind its second")
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    lines: list[str] = []
    try:
        found = measure(args.flags, args.limit, lines)
    finally:
        if args.log:
            Path(args.log).write_text("".join(lines))
    print(json.dumps(found, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")


def measure(flags: list[str], limit: float, lines: list[str]) -> dict[str, float]:
    """Seconds after the start of app.py, of each mark the last line; the log is added to `lines`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-u", str(ROOT / "app.py"), "--host", "127.0.0.1", "--port", str(port), *flags]
    found: dict[str, float] = {}
    began = time.monotonic()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def read() -> None:
        for line in server.stdout or ():
            seconds = round(time.monotonic() - began, 2)
            lines.append(f"{seconds:6.2f} {line}")
            found.update({name: seconds for name, mark in MARKS.items() if re.search(mark, line)})

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while not is_ready(port):
            if server.poll() is not None or time.monotonic() - began > limit:
                raise SystemExit("the server does not start")
            time.sleep(0.05)
        found["ready"] = round(time.monotonic() - began, 2)
        first_token(port)
        found["first_token"] = round(time.monotonic() - began, 2)
    finally:
        server.terminate()
        server.wait(60)
        reader.join(5)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def is_ready(port: int) -> bool:
    """Whether prompts are taken."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2):
            return True
    except OSError:
        return False


def first_token(port: int) -> None:
    """Wait for the first token of a stream."""
    body = {"prompt": "User: Hi\n\nAssistant:", "max_tokens": 4, "stream": True, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        next(line for line in answer if line.startswith(b"data:"))


if __name__ == "__main__":
    main()
