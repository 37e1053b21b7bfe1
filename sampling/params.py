"""The sampling controls of one row, and their defaults. Plain Python: no torch here.

The rules themselves are in `sampling/reference.py`.
"""

from typing import Literal

import msgspec

Rule = Literal["joint", "sequential", "gumbel", "noise"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """One row's controls. Out-of-range values are refused at the door (`routes/schemas.py`), not here.

    min_p acts where vLLM has it (`v1/sample/sampler.py`): behind temperature and in front of top_k and top_p, which see only
    what it leaves. Hugging Face has it behind both, llama.cpp in front of temperature (`common_params_sampling::samplers`).

    The repetition penalty is CTRL's (Keskar et al., 2019) as vLLM and Hugging Face apply it: in front of the other penalties,
    to each token that occurred in the prompt or the answer, however often. The prompt is what this request sent, found in the
    prefix cache or not; what a session saw in earlier turns does not count, for nobody keeps those ids.

    rule             "joint": top_k and top_p cut together on the full softmax, the boundary token keeps just enough weight
                     (native v1); "sequential": top_k first, then top_p inside it (native v2, as FlashInfer does);
                     "gumbel": plain sampling at `temperature`; "noise": argmax of logits/T + U(0, noise)
    temperature      0 = greedy (ties go to the lowest id), whatever the rule
    top_k            <= 0 or above the vocabulary = off; 1 = greedy
    top_p            0 = greedy; >= 1 or < 0 = off
    min_p            tokens less likely than this share of the likeliest one's probability are not sampled; 0 = off. For rules
                     "joint" and "sequential" only, as top_k, top_p and all penalties
    alpha_presence   subtracted from a token's logit at its first appearance
    alpha_frequency  added to the penalty at each later appearance (at the first too when alpha_presence is 0)
    alpha_decay      factor on all penalties of the row, once a step
    repetition_penalty  logits above 0 are divided by it, others multiplied; 1 = off
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
    min_p: float = 0.0
    alpha_presence: float = 2.0
    alpha_frequency: float = 0.2
    alpha_decay: float = 0.996
    repetition_penalty: float = 1.0
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
        return self.filtered and (self.alpha_presence != 0 or self.alpha_frequency != 0 or self.repeated)

    @property
    def repeated(self) -> bool:
        """Whether the row carries a set of the tokens that occurred."""
        return self.filtered and self.repetition_penalty != 1

    @property
    def floored(self) -> bool:
        """Whether min_p may cut something off."""
        return self.filtered and self.min_p > 0 and not self.greedy

    @property
    def filtered(self) -> bool:
        """Whether the rule has filters and penalties."""
        return self.rule in ("joint", "sequential")
