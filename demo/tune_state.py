"""Train an initial state for the built-in model, on a CPU in minutes: answers of rows that begin with it begin with MARK.

    python -m demo.tune_state [OUT] [--steps 150]      two minutes of one core

Writes RWKV-PEFT's format, to be used with `--state meow=demo/tuned/meow.pth`.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from demo import tuning

MARK = " Meow!"
FILE = tuning.TUNED / "meow.pth"


def marked(answer: str) -> str:
    """Return an answer as rows with the state are to give it."""
    return MARK + answer


def save(state: Tensor, file: Path) -> None:
    """Write a state [L, H, value, key] as RWKV-PEFT does."""
    file.parent.mkdir(exist_ok=True)
    torch.save({f"blocks.{i}.att.time_state": layer.clone() for i, layer in enumerate(state.detach().bfloat16())}, file)


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=FILE)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rate", type=float, default=0.03)
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts, model = tuning.Texts(marked), tuning.DemoModel()
    state = torch.zeros(model.layers, model.heads, tuning.HEAD, tuning.HEAD, requires_grad=True)
    with torch.no_grad():
        print(f"held-out loss without: {float(model.loss(texts.held)):.3f}")
    tuning.train([state], lambda rows: model.loss(rows, initial=state), texts.trained, steps=args.steps, rate=args.rate)
    with torch.no_grad():
        print(f"held-out loss with: {float(model.loss(texts.held, initial=state)):.3f}")
    save(state, args.out)
    loop = tuning.served(state=f"meow={args.out}")
    key = loop.tuned.variants[0].key
    for question, answer in zip(tuning.held_out(), tuning.answers(loop, tuning.held_out(), state=key), strict=True):
        print(f"{question} ->{answer!r}")


if __name__ == "__main__":
    main()
