"""The five checks. Each asks a target and returns figures that JSON can hold; `table` makes lines of them for people.

The first four are those that Albatross's `batch.py` and its benchmark do: what it expects next, a few greedy texts, many random
ones at once, LAMBADA.
"""

import json
import math
import random
from collections.abc import Callable, Iterator
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import Any

from rwkv_batch.checks.lambada import read_passages
from rwkv_batch.checks.target import Target
from rwkv_batch.errors import UsageError
from rwkv_batch.text import prompts as templates

Result = dict[str, Any]

NEXT_PROMPTS = ("The apple can be", "The cat can't be", "他们发现，这", "Q: 1+1=?\nA: 1+1=2.")
BEGINNINGS = ("也许", "我看到", "他们发现", "我认为", "哈哈", "这是一个有趣的", "List of Emojis:")
QUESTIONS = (
    "Why is the sky blue?",
    "Tell me a short story about a fox and a boy.",
    "What is the difference between a river and a lake?",
    "用三句话介绍一下春天。",
    "How do I boil an egg?",
)
STOP = "\nUser:"
AT_ONCE = 256  # passages in one request
SEED, NOISE = 42, 3.0  # where no setting says another


def next_token(target: Target, *, prompt: list[str] | None = None, top: int = 5) -> Result:
    """What the model expects behind each prompt: its likeliest tokens."""
    asked = prompt or list(NEXT_PROMPTS)
    found = target.likely(asked, top)
    return {
        "prompts": [
            {"prompt": text, "tokens": [{"token": token, "probability": math.exp(logprob)} for token, logprob in tokens]}
            for text, tokens in zip(asked, found, strict=True)
        ]
    }


def generate(target: Target, *, seed: int | None, noise: float | None, prompt: list[str] | None = None,
             max_tokens: int = 10) -> Result:  # fmt: skip
    """What the model writes behind a few beginnings, greedily unless there is noise."""
    asked = prompt or list(BEGINNINGS)
    settings = _settings(seed, 0.0 if noise is None else noise)
    written = target.write(asked, max_tokens=max_tokens, stops=[], **settings)
    texts = [{"prompt": before, "text": text} for before, text in zip(asked, written.texts, strict=True)]
    return {**settings, "max_tokens": max_tokens, "texts": texts}


def questions(target: Target, *, seed: int | None, noise: float | None, out: str, rows: int = 128,
              max_tokens: int = 150) -> Result:  # fmt: skip
    """Answers to questions drawn from five, all at once, into a file of JSON lines; how many tokens a second that makes."""
    settings = _settings(seed, NOISE if noise is None else noise)
    draw = random.Random(settings["seed"])
    asked = [draw.choice(QUESTIONS) for _ in range(rows)]
    texts = [templates.one_turn(question, "Assistant:") for question in asked]
    with _writable(out) as file:
        written = target.write(texts, max_tokens=max_tokens, stops=[STOP], **settings)
        for index, (question, text, reason) in enumerate(zip(asked, written.texts, written.reasons, strict=True)):
            line = {"index": index, "question": question, "answer": text, "finish_reason": reason}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    examples = dict(zip(reversed(asked), reversed(written.texts), strict=True))
    return {
        **settings,
        "rows": rows,
        "max_tokens": max_tokens,
        "tokens": written.num_tokens,
        "seconds": written.seconds,
        "tokens_per_second": written.num_tokens / max(written.seconds, 1e-9),
        "file": out,
        "examples": [{"question": question, "answer": examples[question]} for question in QUESTIONS if question in examples],
    }


def lambada(target: Target, *, file: str, lines: int | None = None) -> Result:
    """How often the model writes the last word of a passage as it is, and how far from sure it is of these words.

    accuracy    share of passages all of whose last word's tokens are the likeliest ones
    perplexity  exp of the mean over passages of -log p(last word)
    """
    passages = read_passages(file, target.tokenizer, lines)
    right, logprob = 0, 0.0
    for start in range(0, len(passages), AT_ONCE):
        batch = passages[start : start + AT_ONCE]
        for passage, scores in zip(batch, target.score([p.before + p.word for p in batch]), strict=True):
            word = scores[-len(passage.word) :]
            right += all(token.is_best for token in word)
            logprob += sum(token.logprob for token in word)
    mean = -logprob / len(passages)
    return {
        "file": file,
        "passages": len(passages),
        "right": right,
        "accuracy": right / len(passages),
        "perplexity": math.exp(mean) if mean < math.log(1e300) else None,
        "loss": mean,
    }


def consistency(target: Target, *, seed: int | None, prompt: list[str] | None = None, rows: int = 16,
                max_tokens: int = 64) -> Result:  # fmt: skip
    """Whether the same rows, asked twice with one seed, get the same tokens: greedily, and drawn."""
    asked = list(islice(cycle(prompt or [*BEGINNINGS, *QUESTIONS]), rows))
    chosen = SEED if seed is None else seed
    runs = []
    for name, used in (("greedy", None), ("drawn", chosen)):
        first, second = (target.draw(asked, max_tokens=max_tokens, seed=used) for _ in range(2))
        difference = next(differences(first, second), None)
        runs.append({"run": name, "tokens": sum(map(len, first)), "equal": difference is None, "difference": difference})
    return {"seed": chosen, "rows": rows, "max_tokens": max_tokens, "runs": runs, "equal": all(run["equal"] for run in runs)}


def differences(first: list[list[str]], second: list[list[str]]) -> Iterator[Result]:
    """Yield where rows part: the row, the token's number, both tokens; None for a row that has ended there."""
    for row, pair in enumerate(zip(first, second, strict=True)):
        for step, (one, other) in enumerate(zip_longest(*pair)):
            if one != other:
                yield {"row": row, "token": step, "first": one, "second": other}
                break


CHECKS: dict[str, Callable[..., Result]] = {
    "next-token": next_token,
    "generate": generate,
    "questions": questions,
    "lambada": lambada,
    "consistency": consistency,
}


def table(name: str, result: Result) -> list[str]:
    """The lines of a check's result."""
    return _TABLES[name](result)


def _next_token_lines(result: Result) -> list[str]:
    lines = []
    for entry in result["prompts"]:
        lines.append(f"Prompt: {entry['prompt']}")
        lines += [f"  {token['token']!r:<20} [probability {token['probability']:.2%}]" for token in entry["tokens"]]
    return lines


def _generate_lines(result: Result) -> list[str]:
    return [entry["prompt"] + entry["text"] for entry in result["texts"]]


def _questions_lines(result: Result) -> list[str]:
    lines = [f"Q: {entry['question']}\nA: {entry['answer'].strip()}\n" for entry in result["examples"]]
    return [
        *lines,
        f"Rows: {result['rows']:,}, at most {result['max_tokens']:,} tokens each, noise {result['noise']:g}, "
        f"seed {result['seed']}",
        f"Throughput: {result['tokens_per_second']:,.2f} tokens/s ({result['tokens']:,} in {result['seconds']:.2f} s)",
        f"Answers: {result['file']}",
    ]


def _lambada_lines(result: Result) -> list[str]:
    perplexity = "beyond all numbers" if result["perplexity"] is None else f"{result['perplexity']:.3f}"
    return [
        f"Passages: {result['passages']:,}",
        f"Accuracy: {result['accuracy']:.2%} ({result['right']:,} right)",
        f"Perplexity: {perplexity}",
    ]


def _consistency_lines(result: Result) -> list[str]:
    lines = []
    for run in result["runs"]:
        told = f"{run['run']:7} {result['rows']:,} rows, {run['tokens']:,} tokens: "
        at = run["difference"]
        if at is None:
            lines.append(told + "the same twice")
        else:
            lines.append(
                told + f"row {at['row']}, token {at['token']}: first {_shown(at['first'])}, then {_shown(at['second'])}"
            )
    return lines


def _shown(token: str | None) -> str:
    return "the end" if token is None else repr(token)


_TABLES: dict[str, Callable[[Result], list[str]]] = {
    "next-token": _next_token_lines,
    "generate": _generate_lines,
    "questions": _questions_lines,
    "lambada": _lambada_lines,
    "consistency": _consistency_lines,
}


def _settings(seed: int | None, noise: float) -> dict[str, Any]:
    return {"seed": SEED if seed is None else seed, "noise": noise}


def _writable(out: str) -> Any:
    try:
        return Path(out).open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from None
