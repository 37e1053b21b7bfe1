"""What a check asks of a model, which is in this process (`local.py`) or behind a URL (`remote.py`)."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rwkv_batch.text.tokenizer import Tokenizer


class Likely(NamedTuple):
    """A token by its name and its log-probability."""

    token: str
    logprob: float


class Scored(NamedTuple):
    """How likely a token of a given text was, and whether no other was likelier at its place."""

    logprob: float
    is_best: bool


@dataclass(frozen=True)
class Written:
    """What was written behind each prompt; `num_tokens` of all, in `seconds`."""

    texts: list[str]
    reasons: list[str]
    num_tokens: int
    seconds: float


class Target(Protocol):
    """A model. What it cannot do raises a RwkvBatchError.

    model  its name
    place  where it runs
    """

    model: str
    place: str

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""

    def likely(self, prompts: list[str], top: int) -> list[list[Likely]]:
        """Return the tokens that are likeliest behind each prompt, the likeliest first."""

    def write(self, prompts: list[str], *, max_tokens: int, noise: float, seed: int, stops: list[str]) -> Written:
        """Go on with each prompt by the largest of logits + U(0, noise)."""

    def draw(self, prompts: list[str], *, max_tokens: int, seed: int | None) -> list[list[str]]:
        """Return the names of the tokens drawn behind each prompt at temperature 1, or the likeliest where `seed` is None."""

    def score(self, rows: list[list[int]]) -> list[list[Scored]]:
        """Return how likely the ids of each row are, but for the first, which follows nothing."""

    def close(self) -> None:
        """Give back what was taken."""
