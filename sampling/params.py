"""The sampling controls of one row, and their defaults. Plain Python: no torch here.

The rules themselves are in `sampling/reference.py`.
"""

from typing import Literal

import msgspec

Rule = Literal["joint", "sequential", "gumbel", "noise"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """One row's controls. Out-of-range values are refused at the door (`routes/schemas.py`), not here.

    rule             "joint": top_k and top_p cut together on the full softmax, the boundary token keeps just enough weight
                     (native v1); "sequential": top_k first, then top_p inside it (native v2, as FlashInfer does);
                     "gumbel": plain sampling at `temperature`; "noise": argmax of logits/T + U(0, noise)
    temperature      0 = greedy (ties go to the lowest id), whatever the rule
    top_k            <= 0 or above the vocabulary = off; 1 = greedy
    top_p            0 = greedy; >= 1 or < 0 = off
    alpha_presence   subtracted from a token's logit at its first appearance
    alpha_frequency  added to the penalty at each later appearance (at the first too when alpha_presence is 0)
    alpha_decay      factor on all penalties of the row, once a step
    noise            width of the uniform noise, rule "noise" only
    seed             None = fresh for every row
    logit_bias       (id, bias) pairs added to the logits before the penalties
    ignore_eos       the end token is masked, so that exactly max_tokens tokens come
    min_tokens       the end token is masked for this many tokens
    logprobs         None, or how many of the most likely tokens to report beside the chosen one
    """

    rule: Rule = "joint"
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.6
    alpha_presence: float = 2.0
    alpha_frequency: float = 0.2
    alpha_decay: float = 0.996
    noise: float = 0.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the row takes the largest logit, so that no randomness and no filter is needed."""
        if self.temperature <= 0 or (self.rule == "noise" and self.noise <= 0):
            return True
        return self.rule in ("joint", "sequential") and (self.top_k == 1 or self.top_p == 0)

    @property
    def penalized(self) -> bool:
        """Whether the row carries a penalty vector."""
        return self.rule in ("joint", "sequential") and (self.alpha_presence != 0 or self.alpha_frequency != 0)
