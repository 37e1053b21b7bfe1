#!/usr/bin/env python3
"""Compare this project with the PyPI package `rwkv` on your own weights: greedy text, then tokens a second.

    python bench/verify.py --model-path RWKV-x070-World-0.1B.pth [--tokens 64] [--threads N]

Prints where the two texts part, if they do, and how close the two best logits were there: fp32 sums rounded in another order
may turn near-ties, anything else is an error. Exits with 1 then.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from rwkv_batch.engine.build import tune_cpu, usable_cpus, valid_ids
from rwkv_batch.errors import CheckpointError, RwkvBatchError
from rwkv_batch.model import checkpoint
from rwkv_batch.model import weights as weights_module
from rwkv_batch.model.architectures import model_class
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.state import State
from rwkv_batch.text.tokenizer import for_vocab

PROMPTS = [
    "The Eiffel tower is in the city of",
    "User: What is the capital of Japan?\n\nAssistant:",
    "English: Good morning, how are you today?\n\nChinese:",
    "User: 请用一句话介绍北京。\n\nAssistant: <think>\n</think>\n",
    "def fibonacci(n):\n",
    "Once upon a time, there was a small fox who",
    "1, 2, 3, 4, 5,",
    "The three laws of thermodynamics are",
]
NEAR_TIE = 1e-3


def ours(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float], float, float]:
    """Return (greedy ids, margins of the best over the second logit, seconds of prefill, seconds of decode)."""
    state, ids, margins = State(model.weights.shape, 1), [], []
    started = time.perf_counter()
    logits = model.forward(torch.tensor(prompt), PackedRows([0], [len(prompt)]), state)
    prefilled = time.perf_counter()
    one = PackedRows([0], [1])
    for _ in range(count):
        best = logits[0].topk(2)
        ids.append(int(model.weights.output_ids[best.indices[0]]))
        margins.append(float(best.values[0] - best.values[1]))
        logits = model.forward(torch.tensor(ids[-1:]), one, state)
    return ids, margins, prefilled - started, time.perf_counter() - prefilled


def theirs(model, prompt: list[int], count: int) -> tuple[list[int], float, float]:
    """Return (greedy ids, seconds of prefill, seconds of decode)."""
    ids = []
    started = time.perf_counter()
    logits, state = model.forward(prompt, None)
    prefilled = time.perf_counter()
    for _ in range(count):
        ids.append(int(logits.argmax()))
        logits, state = model.forward([ids[-1]], state)
    return ids, prefilled - started, time.perf_counter() - prefilled


def load_peer(file: Path, tensors: dict[str, torch.Tensor], architecture: str) -> Any:
    """Return the package's model, None where it is not installed."""
    os.environ.update(RWKV_V7_ON="1" if architecture == "RWKV-7" else "0", RWKV_JIT_ON="1", RWKV_CUDA_ON="0")
    try:
        from rwkv.model import RWKV
    except ImportError:
        return None
    peer = RWKV(model=str(file).removesuffix(".pth"), strategy="cpu fp32")
    if architecture != "RWKV-7":  # there it rounds what it makes of the embedding to the type of the file
        norm = (tensors[f"blocks.0.ln0.{kind}"].float() for kind in ("weight", "bias"))
        table = tensors["emb.weight"].float()
        peer.w["emb.weight"] = torch.nn.functional.layer_norm(table, table.shape[1:], *norm)
    return peer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    tune_cpu(args.threads or usable_cpus())
    try:
        file = checkpoint.find_checkpoint(args.model_path)
        if file.suffix != ".pth":
            raise CheckpointError(f"{file}: the package rwkv reads .pth files only")
        tensors = checkpoint.read_file(file)
        tokenizer = for_vocab(weights_module.check_tensors(tensors, str(file)).vocab_size)
        weights = weights_module.load(file, valid_ids=lambda vocab_size: valid_ids(tokenizer))
    except RwkvBatchError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    model = model_class(weights.architecture)(weights)
    for line in weights_module.iter_summary(weights):
        print(line)
    peer = load_peer(file, tensors, weights.architecture)
    if peer is None:
        print("error: this comparison needs the PyPI package rwkv: pip install rwkv", file=sys.stderr)
        return 2
    wrong, seconds = 0, [0.0] * 4
    num_prompt = 0
    for text in PROMPTS:
        prompt = tokenizer.encode(text)
        num_prompt += len(prompt)
        ids, margins, *spent = ours(model, prompt, args.tokens)
        peer_ids, *peer_spent = theirs(peer, prompt, args.tokens)
        seconds = [a + b for a, b in zip(seconds, [*spent, *peer_spent], strict=True)]
        print(f"\n{text!r}\n  {tokenizer.decode(ids)!r}")
        if ids != peer_ids:
            at = next(i for i, pair in enumerate(zip(ids, peer_ids, strict=True)) if pair[0] != pair[1])
            near = margins[at] < NEAR_TIE
            wrong += not near
            print(f"  parts from rwkv at token {at}, margin {margins[at]:.2e}: {'a near-tie' if near else 'AN ERROR'}")
    num_decoded = args.tokens * len(PROMPTS)
    print(f"\n{len(PROMPTS) - wrong} of {len(PROMPTS)} texts agree with rwkv (near-ties apart)")
    print(f"{'tokens/s':10}{'prefill':>10}{'decode':>10}")
    print(f"{'ours':10}{num_prompt / seconds[0]:10.1f}{num_decoded / seconds[1]:10.1f}")
    print(f"{'rwkv':10}{num_prompt / seconds[2]:10.1f}{num_decoded / seconds[3]:10.1f}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
