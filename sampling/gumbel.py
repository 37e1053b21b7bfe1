"""The largest of x after noise, in plain torch: rules "gumbel" (which big batches use) and "noise".

Gumbel-max (Gumbel, 1954; Maddison, Tarlow and Minka, "A* sampling", 2014): the argmax of x plus Gumbel noise is an exact draw
from softmax(x). It needs no sum over the columns and no sorting, and noise only where it can decide.
"""

from collections.abc import Callable

import torch
from torch import Tensor

MIN_EXPONENTIAL = 6.2e-5
MAX_GUMBEL = 9.69  # -log(MIN_EXPONENTIAL), rounded up
NUM_TRIED = 16  # columns whose noise is evaluated to learn which others can win


def gumbel(u: Tensor) -> Tensor:
    """Return a Gumbel number for each uniform number, capped below MAX_GUMBEL."""
    return (-u.log()).clamp_(min=MIN_EXPONENTIAL).log().neg_()


def perturbed_argmax(
    x: Tensor, largest_noise: Tensor, lift: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the column of the largest x after noise [R] int64, ties to the lowest, and the largest x [R].

    Noise is evaluated where it can matter only: first on a few of the best columns, then on all that the most noise would lift
    to the best of those.

    Args:
        x: [R, U] fp32, overwritten
        largest_noise: [R] fp32, what the noise stays below
        lift: takes values of x [n], their rows [n] and their columns [n], and returns the values after noise [n]
    """
    num_rows, num_columns = x.shape
    best, tried = x.topk(min(NUM_TRIED, num_columns))  # [R, n]
    rows = torch.arange(num_rows, device=x.device).repeat_interleave(best.shape[1])
    bar = lift(best.flatten(), rows, tried.flatten()).view_as(best).amax(-1)
    bar = bar - largest_noise - 1e-6 * bar.abs()  # the last term covers the rounding of the sums
    flat = x.flatten()
    can_win = (x >= bar[:, None]).flatten().nonzero()[:, 0]  # [n], places in flat x
    rows = can_win // num_columns
    flat.index_copy_(0, can_win, lift(flat.index_select(0, can_win), rows, can_win - rows * num_columns))
    return flat.view_as(x).argmax(-1), best[:, 0]
