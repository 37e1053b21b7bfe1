"""How a decode step of few rows is done in fewer launches."""

from typing import NamedTuple


class FewPlan(NamedTuple):
    """What of such a step is done by the kernels of cuda/few/: `output` and `ffn_key`, and what is on here.

    stages  of 16 KiB of weights that are on their way at once, of `ffn_key`, and with `pairs` of the attention's inputs
    pairs   r, k, v and the first halves of the low-rank pairs are one launch, the second halves part of the recurrence's,
            whose state is fp16
    norms   the norms are part of the launches of those products; only with `pairs`
    sparse  `ffn_value` reads for each row the rows of weights of its own active units
    turned  `ffn_value` is a product as `ffn_key` is, of a copy that has the weights of an output side by side; see `tiled.py`
    """

    stages: int = 4
    pairs: bool = False
    norms: bool = False
    sparse: bool = False
    turned: bool = False


# What is timed, beside steps without a plan.
CANDIDATES = (
    FewPlan(4, pairs=True, norms=True, sparse=True),
    FewPlan(6, pairs=True, norms=True, sparse=True),
    FewPlan(4, pairs=True),
    FewPlan(4, pairs=True, turned=True),
    FewPlan(4, pairs=True, norms=True, turned=True),
    FewPlan(8, pairs=True, sparse=True),
    FewPlan(6),
    FewPlan(8),
)
