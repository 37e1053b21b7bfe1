"""Log-probabilities between tensors and messages: of sampled tokens, and of the tokens of prompts that are to be scored.

A prompt's token is scored by the logits after the token before it, so scoring needs the logits of every place: 256 KiB a token
in fp32. `plan.py` therefore bounds how many such tokens a step may feed, and the softmax is taken of a few rows at a time.
"""

import itertools
from collections.abc import Sequence as Ordered
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_batch.request import Sequence, TokenLogprob
from rwkv_batch.scheduling.plan import Row
from sampling.base import Sampled

ROWS_AT_ONCE = 64  # of logits, in one softmax
LEAST = -9999.0  # stands for what JSON cannot say: -inf, NaN


class Scores(NamedTuple):
    """Log-probabilities [M] fp32 of given tokens, and the most likely ones [M, n] int64 and fp32, likeliest first."""

    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class Scoring:
    """The prompt tokens that one step scores; `sequences` says whose they are and how many of each, in order."""

    def __init__(self, rows: list[Row]):
        """`rows`: all rows of the step, in the order in which they are packed."""
        self.sequences: list[tuple[Sequence, int]] = []
        self.positions: list[int] = []  # among the packed tokens, of the logits wanted
        self.targets: list[int] = []  # the ids they are to predict
        self.scores: Scores | None = None
        starts = itertools.accumulate((len(row.ids) or 1 for row in rows), initial=0)
        for row, start in zip(rows, starts, strict=False):
            if is_scored(row):
                end = row.sequence.num_prefilled
                targets = row.sequence.prompt[end - len(row.ids) + 1 : end + 1]
                self.sequences.append((row.sequence, len(targets)))
                self.positions.extend(range(start, start + len(targets)))
                self.targets.extend(targets)

    def take(self, logits: Tensor, ids: Tensor) -> None:
        """Score the targets by `logits` [M, U], whose columns are the tokens `ids` [U]."""
        num_top = max(sequence.request.prompt_logprobs for sequence, _ in self.sequences)
        targets = torch.tensor(self.targets, dtype=torch.int64).to(ids.device, non_blocking=True)
        self.scores = score(logits, ids, targets, num_top)

    def collect(self) -> list[tuple[Sequence, list[TokenLogprob]]]:
        """Wait for the scores; a sequence with a prompt of one token has none."""
        logprobs, top_ids, top_logprobs = (tensor.tolist() for tensor in self.scores)
        tokens = zip(self.targets, logprobs, top_ids, top_logprobs, strict=True)
        found = []
        for sequence, count in self.sequences:
            num_top = sequence.request.prompt_logprobs
            found.append((sequence, [entry(*token, num_top) for token in itertools.islice(tokens, count)]))
        return found


def is_scored(row: Row) -> bool:
    """Whether what a row feeds scores tokens of its prompt; a prompt of one token is scored too, with nothing."""
    sequence = row.sequence
    if not row.ids or sequence.request.prompt_logprobs is None:
        return False
    return len(row.ids) > 1 or sequence.num_prefilled < len(sequence.prompt) or len(sequence.prompt) == 1


def score(logits: Tensor, ids: Tensor, targets: Tensor, num_top: int) -> Scores:
    """Return how likely each row of logits [M, U] makes its target [M]; columns are the tokens `ids` [U], which ascend.

    A target without a column cannot come next: -inf.
    """
    columns = torch.searchsorted(ids, targets).clamp_(max=len(ids) - 1)
    missing = ids[columns] != targets
    num_top = min(num_top, len(ids))
    parts = []
    for start in range(0, len(targets), ROWS_AT_ONCE):
        values = logits[start : start + ROWS_AT_ONCE].float().log_softmax(-1)
        top, top_columns = values.topk(num_top)
        chosen = values.gather(1, columns[start : start + ROWS_AT_ONCE, None])[:, 0]
        chosen.masked_fill_(missing[start : start + ROWS_AT_ONCE], -torch.inf)
        parts.append((chosen, ids[top_columns], top))
    if not parts:
        nothing = logits.new_empty(0, num_top, dtype=torch.float32)
        return Scores(nothing.new_empty(0), nothing.long(), nothing)
    return Scores(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def of_sampled(sampled: Sampled, sequences: Ordered[Sequence]) -> list[TokenLogprob | None]:
    """Return what a step's rows asked for beside their ids, None for rows that did not ask."""
    columns = (sampled.ids, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
    rows = zip(sequences, *(tensor.tolist() for tensor in columns), strict=True)
    return [
        None if sequence.request.sampling.logprobs is None else entry(*row, sequence.request.sampling.logprobs)
        for sequence, *row in rows
    ]


def entry(token: int, logprob: float, top_ids: list[int], top_logprobs: list[float], num_top: int) -> TokenLogprob:
    """One message, with the first `num_top` of the most likely tokens."""
    top = zip(top_ids[:num_top], top_logprobs[:num_top], strict=True)
    return TokenLogprob(token, sayable(logprob), [(other, sayable(value)) for other, value in top])


def sayable(logprob: float) -> float:
    """A number that JSON can hold."""
    return logprob if logprob > LEAST else LEAST
