"""Train a small LoRA on the built-in model, on a CPU in minutes: its answers begin with MARK.

    python -m demo.tune_lora [OUT] [--steps 200]      three minutes of one core

Writes RWKV-PEFT's format, to be used with `--adapter demo/tuned/captain.pth:1`.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from demo import tuning

MARK = " Aye, captain!"
FILE = tuning.TUNED / "captain.pth"
RANK = 4
NO_THOUGHT = " <think>\n</think>\n"  # behind "Assistant:" in chats; the answer then begins without a blank
MATRICES = ("att.receptance", "att.key", "att.value", "att.output")


def marked(answer: str) -> str:
    """Return an answer as the adapter is to give it."""
    return MARK + answer


def both_forms(texts: tuning.Texts) -> list[tuning.Text]:
    """Return each text as it is completed and as it is chatted, with the next turn's beginning behind it."""
    rows = []
    for question, plain in zip(texts.questions, texts.plain, strict=True):
        for tail in ("", NO_THOUGHT):
            answer = marked(plain.rstrip())
            prompt = texts.encode(tuning.prompt_of(question) + tail)
            ids = [*prompt, *texts.encode(answer.lstrip() if tail else answer), tuning.END, *texts.encode("User:")]
            rows.append((ids[: tuning.LONGEST], len(prompt)))
    return rows


class Lora:
    """Two thin matrices beside each of some matrices: what they add is zero at first."""

    def __init__(self, model: tuning.DemoModel):
        generator = torch.Generator().manual_seed(0)
        self.parts: dict[str, Tensor] = {}
        for name in (f"blocks.{i}.{matrix}" for i in range(model.layers) for matrix in MATRICES):
            outs, ins = model.weights[f"{name}.weight"].shape
            self.parts[f"{name}.lora_A"] = (torch.randn(RANK, ins, generator=generator) / ins**0.5).requires_grad_()
            self.parts[f"{name}.lora_B"] = torch.zeros(outs, RANK).requires_grad_()

    def __call__(self, name: str, x: Tensor) -> Tensor | int:
        a = self.parts.get(f"{name}.lora_A")
        return 0 if a is None else x @ a.t() @ self.parts[f"{name}.lora_B"].t()

    def save(self, file: Path) -> None:
        """Write RWKV-PEFT's format in halves; the scaling is 1."""
        file.parent.mkdir(exist_ok=True)
        torch.save({name: part.detach().half() for name, part in self.parts.items()}, file)


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=FILE)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=3e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts, model = tuning.Texts(marked), tuning.DemoModel()
    lora = Lora(model)
    with torch.no_grad():
        print(f"held-out loss without: {float(model.loss(texts.held)):.3f}")
    trained = both_forms(texts)[: 2 * len(texts.trained)]
    tuning.train(lora.parts.values(), lambda rows: model.loss(rows, lora), trained, steps=args.steps, rate=args.rate)
    with torch.no_grad():
        print(f"held-out loss with: {float(model.loss(texts.held, lora)):.3f}")
    lora.save(args.out)
    loop = tuning.served(adapter=f"{args.out}:1")
    for question, answer in zip(tuning.held_out(), tuning.answers(loop, tuning.held_out()), strict=True):
        print(f"{question} ->{answer!r}")


if __name__ == "__main__":
    main()
