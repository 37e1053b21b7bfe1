"""What the engine side receives and what it gives back: requests, sequences, deltas, finishes. Plain Python.

`Request`, `Delta`, `Finish` and `Progress` cross the process border as msgpack, so they are msgspec structs; `Sequence` is
the engine's own record of one row and never leaves it.
"""

from typing import Literal

import msgspec

from sampling.params import SamplingParams

Loop = Literal["sync", "continuous"]
Reason = Literal["stop", "length", "error", "cancelled"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One submitted request: `prompts[i]` becomes choice i.

    id          unique among live requests
    prompts     token ids, never empty (an empty text is fed token 0 by the route)
    sampling    controls shared by all rows; without a seed every row draws a fresh one
    max_tokens  sampled tokens a row, the stop token included; 0 gives empty text
    stop_ids    ids that end a row and are not shown; 0, the end token, always ends it
    stop_texts  byte strings that end a row wherever they appear, and are not shown
    loop        which loop admits the rows
    chunk_size  sampled tokens a row gathers before they are delivered; 0 = everything at the row's end
    session     name of the state to continue and to commit to, or None
    """

    id: str
    prompts: list[list[int]]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: list[int] = []
    stop_texts: list[bytes] = []
    loop: Loop = "sync"
    chunk_size: int = 1
    session: str | None = None


class Delta(msgspec.Struct, array_like=True, frozen=True):
    """Text that became safe to show in one step: `tokens` counts the sampled tokens since the last delta of this row."""

    index: int
    text: str
    tokens: int


class Finish(msgspec.Struct, array_like=True, frozen=True):
    """The end of one row. `error` is set exactly when `reason` is "error"."""

    index: int
    reason: Reason
    prompt_tokens: int
    completion_tokens: int
    error: str | None = None


class Progress(msgspec.Struct, array_like=True, frozen=True):
    """What one step brought one request: all its rows' deltas, then the rows that ended with it."""

    request_id: str
    deltas: list[Delta]
    finishes: list[Finish]


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """The whole request failed: `error` is the class name in `errors.py`, the rest its fields."""

    request_id: str
    error: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None


class Sequence:
    """One row being decoded.

    prompt       ids to feed before the first sampling; when settling, ids to feed before the state is kept
    num_fed      ids of `prompt` already put into a plan
    num_sampled  samplings already put into a plan; runs one ahead of the ids the host has seen
    slot         index into the state arrays, -1 while waiting and after the end
    initial      the state to start from (a `Snapshot`), None for the empty one
    settling     whether the row has ended and only its state is brought to the end of the visible text
    """

    __slots__ = ("index", "initial", "num_fed", "num_sampled", "prompt", "request", "settling", "slot")

    def __init__(self, request: Request, index: int):
        self.request = request
        self.index = index
        self.prompt = request.prompts[index]
        self.num_fed = 0
        self.num_sampled = 0
        self.slot = -1
        self.initial = None
        self.settling = False

    def __repr__(self) -> str:
        fed = f"fed {self.num_fed}/{len(self.prompt)}, sampled {self.num_sampled}"
        return f"Sequence({self.request.id!r}[{self.index}], slot {self.slot}, {fed})"
