#!/usr/bin/env python3
"""Speed of the command `batch` beside that of the engine alone, fed the same requests by nobody else.

    python bench/batch_file.py [--lines 2000] [--tokens 256] [--out bench/results/batch-file.json] [-- server flags]
    python bench/batch_file.py --lines 4000 -- --model-path M.pth --slots 320
    python bench/batch_file.py --lines 4000 -- --fake-engine 0          the host's work alone, with a stand-in for the engine

The lines are chats with prompts of 20 to --characters characters, every 50th of ten times that, and each is answered with
--tokens tokens. "command" is what the command says of itself: from its first line to its last, without the loading. "engine"
is the engine's loop in this process, which gets all requests at once and whose texts go nowhere.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from routes.openai.schemas import ChatBody, read
from rwkv_batch import __version__
from rwkv_batch.config import MAX_QUEUE, Config
from rwkv_batch.config_sources import load
from rwkv_batch.engine.build import build_engine_loop
from rwkv_batch.engine.stub_engine import build_stub
from rwkv_batch.request import Failure, Progress, Request
from rwkv_batch.text.tokenizer import for_vocab

SUMMARY = re.compile(r"([\d,]+) lines in ([\d.]+) s .*?([\d,]+) prompt tokens, ([\d,]+) tokens")
ROOT = Path(__file__).resolve().parent.parent
WORDS = re.findall(r"\w+", "the fox and her friend found a small boat under the old tree and went to see what the river brings")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--characters", type=int, default=2000)
    parser.add_argument("--out", help="write the figures to this file, beside those of other models already there")
    parser.add_argument("flags", nargs="*", help="flags of the server, behind --")
    args = parser.parse_args()
    config = replace(load(args.flags, {}), queue=MAX_QUEUE)
    bodies = [body_of(index, args.tokens, args.characters) for index in range(args.lines)]
    with tempfile.TemporaryDirectory() as folder:
        command = run_command(Path(folder), bodies, args.flags)
        engine = run_engine(replace(config, state_db=f"{folder}/sessions.db"), bodies)
    figures = {
        "date": date.today().isoformat(), "rwkv_batch": __version__, **engine.pop("about"), "lines": args.lines,
        "flags": args.flags,         "tokens_a_line": args.tokens, "command": command, "engine": engine,
        "command_of_engine": command["tok_s"] / engine["tok_s"],
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    if args.out:
        file = Path(args.out)
        content = json.loads(file.read_text()) if file.exists() else {}
        content[f"{config.model_name}, {figures['slots']} slots"] = figures
        file.write_text(json.dumps(content, indent=1) + "\n")


def body_of(index: int, tokens: int, most: int) -> dict:
    """One request; the same for the same index."""
    dice = random.Random(index)
    length = 10 * most if index % 50 == 49 else dice.randint(20, most)
    text = " ".join(dice.choices(WORDS, k=length // 4))[:length]
    return {
        "model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "min_tokens": tokens,
        "ignore_eos": True, "temperature": 1, "seed": index,
    }  # fmt: skip


def run_command(folder: Path, bodies: list[dict], flags: list[str]) -> dict:
    """Figures of the command."""
    lines = [
        {"custom_id": str(index), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for index, body in enumerate(bodies)
    ]
    (folder / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, str(ROOT / "app.py"), "batch", str(folder / "in"), str(folder / "out"), *flags]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    found = SUMMARY.search(ended.stderr)
    if ended.returncode or not found:
        raise SystemExit(f"the command ended with {ended.returncode}:\n{ended.stderr}")
    num_lines, seconds, prompt_tokens, tokens = (float(text.replace(",", "")) for text in found.groups())
    return {
        "seconds": seconds, "lines_s": num_lines / seconds, "tok_s": tokens / seconds, "prompt_tok_s": prompt_tokens / seconds,
        "tokens": tokens,
    }  # fmt: skip


def run_engine(config: Config, bodies: list[dict]) -> dict:
    """Figures of the engine's loop."""
    ended = threading.Event()
    left, tokens = len(bodies), 0

    def deliver(events: dict[str, list[Progress | Failure]]) -> None:
        nonlocal left, tokens
        for event in (event for items in events.values() for event in items):
            if isinstance(event, Failure):
                raise RuntimeError(event.message)
            left -= len(event.finishes)
            tokens += sum(finish.completion_tokens for finish in event.finishes)
        if left == 0:
            ended.set()

    core = (build_engine_loop if config.fake_engine is None else build_stub)(config, deliver)
    info = core.info
    requests = requests_of(bodies, config, info.vocab_size)
    running = threading.Thread(target=core.run, daemon=True)
    running.start()
    began = time.monotonic()
    for request in requests:
        core.submit(request, b"bench")
    while not ended.wait(0.05):
        if not running.is_alive():
            raise SystemExit("the engine has ended")
    seconds = time.monotonic() - began
    core.stop()
    running.join(60)
    about = {"device": info.device, "dtype": info.dtype, "slots": info.slots, "parameters": info.parameters}
    return {"about": about, "seconds": seconds, "lines_s": len(bodies) / seconds, "tok_s": tokens / seconds}


def requests_of(bodies: list[dict], config: Config, vocab_size: int) -> list[Request]:
    """What the routes make of the bodies."""
    encode = for_vocab(vocab_size).ids
    checked = [read(ChatBody, body) for body in bodies]
    return [body.to_request(body.checked_texts(config), str(i), config, encode) for i, body in enumerate(checked)]


if __name__ == "__main__":
    main()
