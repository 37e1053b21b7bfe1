"""What the engine side receives and what it gives back: requests, sequences, deltas, finishes. Plain Python.

`Request`, `Delta`, `Finish`, `Progress` and `Text` cross the process border as msgpack, so they are msgspec structs;
`Sequence` is the engine's own record of one row and never leaves it.
"""

from typing import ClassVar, Literal

import msgspec

from rwkv_batch import errors
from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.session_messages import CommitResult, Session
from sampling.params import SamplingParams

Loop = Literal["sync", "continuous"]
Reason = Literal["stop", "length", "error", "cancelled"]


class Grammar(msgspec.Struct, frozen=True):
    """What the text of a row must be, as a whole: JSON that a schema allows, a match of a regex, a sentence of a grammar.

    kind    what `source` is: a JSON schema as JSON text, a regex, or a grammar as llguidance reads it (Lark's syntax)
    param   the field it came in, which errors name
    """

    kind: Literal["json_schema", "regex", "lark"]
    source: str
    param: str | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One submitted request: each prompt becomes `copies` rows; row i continues `prompts[i // copies]`.

    It is choice `first` + i, and has that index in what the engine says of it.

    id          unique among live requests
    prompts     token ids, never empty (an empty text is fed token 0 by the route)
    sampling    controls shared by all rows; without a seed every row draws a fresh one
    max_tokens  sampled tokens a row, the stop token included; 0 gives empty text
    stop_ids    ids that end a row and are not shown; 0, the end token, always ends it
    stop_texts  byte strings that end a row wherever they appear, and are not shown
    loop        which loop admits the rows
    chunk_size  sampled tokens a row gathers before they are delivered; 0 = everything at the row's end
    session     the named state to continue, or None
    namespace   whose sessions and cached prefixes these are; namespaces never see one another's
    cache       whether prompts may start from cached prefixes and leave some
    copies      rows of each prompt
    first       index of the first row; not 0 in the further parts of a request that several engines share
    prompt_logprobs  None, or how many of the most likely tokens to report at each place of the prompts beside the prompt's own
    grammar     what the text of each row must be, None = anything
    state       what its rows begin with where no session says so: the key of a tuned state or a mix; "" = nothing
    weights     of the states of a mix (MRSS), each row of which is as many rows that share the tokens they draw; else empty
    """

    id: str
    prompts: list[list[int]]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: list[int] = []
    stop_texts: list[bytes] = []
    loop: Loop = "sync"
    chunk_size: int = 1
    session: Session | None = None
    namespace: str = ""
    cache: bool = True
    copies: int = 1
    first: int = 0
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    state: str = ""
    weights: list[float] = []

    @property
    def width(self) -> int:
        """How many slots one row takes: one for each state that it mixes."""
        return max(1, len(self.weights))

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.prompts) * self.copies

    @property
    def indices(self) -> range:
        """Those of its rows."""
        return range(self.first, self.first + self.num_rows)

    def part(self, part_id: str, rows: range) -> "Request":
        """The request of these rows alone; they are copies of one prompt, or all those of some prompts."""
        begin, end = rows.start - self.first, rows.stop - self.first
        if len(self.prompts) == 1:
            return msgspec.structs.replace(self, id=part_id, copies=len(rows), first=rows.start)
        prompts = self.prompts[begin // self.copies : end // self.copies]
        return msgspec.structs.replace(self, id=part_id, prompts=prompts, first=rows.start)


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """A token, its log-probability, and the most likely tokens (id, log-probability) at its place, likeliest first."""

    id: int
    logprob: float
    top: list[tuple[int, float]]


class PromptScore(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of a row's prompt: its next tokens in order, without the first of all, which follows nothing."""

    index: int
    tokens: list[TokenLogprob]


class Delta(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Text that became safe to show in one step: `tokens` counts the sampled tokens since the last delta of this row.

    logprobs  of the tokens that became visible, for rows that asked. The last ones of a row come with its end: all that are
              left, the stop id included, or, when a stop text ended it, those of which something is visible
    """

    index: int
    text: str
    tokens: int
    logprobs: list[TokenLogprob] | None = None


class Finish(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The end of one row. `error` is set exactly when `reason` is "error".

    cached_tokens  how many of the `prompt_tokens` were not computed, but taken from the prefix cache
    session        where the row's state was kept, None for rows that keep none
    stop_text      the stop text that ended it, None when it ended otherwise
    """

    index: int
    reason: Reason
    prompt_tokens: int
    completion_tokens: int
    error: str | None = None
    cached_tokens: int = 0
    session: CommitResult | None = None
    stop_text: str | None = None


class Progress(msgspec.Struct, tag=0, array_like=True, frozen=True, gc=False):
    """What one step brought one request: scores of its prompts, all its rows' deltas, then the rows that ended with it."""

    request_id: str
    deltas: list[Delta]
    finishes: list[Finish]
    scores: list[PromptScore] = []


class Text(msgspec.Struct, tag=1, array_like=True, frozen=True, gc=False):
    """A `Progress` with nothing but one delta without log-probabilities, which nearly all are: it is made for each token of
    each row that is streamed, and takes a quarter of the time so."""

    request_id: str
    index: int
    text: str
    tokens: int

    finishes: ClassVar[tuple[Finish, ...]] = ()
    scores: ClassVar[tuple[PromptScore, ...]] = ()

    @property
    def deltas(self) -> tuple[Delta]:
        """As a `Progress` has it."""
        return (Delta(self.index, self.text, self.tokens),)


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """The whole request failed: `error` is the class name in `errors.py`, the rest its fields."""

    request_id: str
    error: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None

    @classmethod
    def of(cls, request_id: str, error: RwkvBatchError) -> "Failure":
        """A designed error as a message."""
        return cls(request_id, type(error).__name__, error.message, error.param, error.code, error.retry_after)

    def exception(self) -> RwkvBatchError:
        """The error that this message carries; EngineFailed for a class that is not in `errors`."""
        kind = getattr(errors, self.error, None)
        if not (isinstance(kind, type) and issubclass(kind, RwkvBatchError)):
            kind = errors.EngineFailed
        return kind(self.message, param=self.param, code=self.code, retry_after=self.retry_after)


Event = Progress | Text | Failure


class Sequence:
    """One row being decoded.

    prompt         ids to feed before the first sampling; when finalizing, ids to feed before the state is kept
    num_prefilled  ids of `prompt` already put into a plan
    num_sampled    samplings already put into a plan; runs one ahead of the ids the host has seen
    slot           index into the state arrays, -1 while waiting and after the end
    followers      the rows, planned with this one, whose logits are mixed with its own and which are fed what it samples
    initial        the state to start from (a `Snapshot`, with followers `Together`), None for the empty one
    continues      whether that is a session's, which no cached prefix leads to
    cached         leading ids of `prompt` that `initial` has seen already
    recalled       leading ids of `prompt` that are the session's: they lead from `initial` to its state
    num_waits      times it waited for a row of another request to feed what their prompts share
    cuts           places in `prompt`, ascending, where a plan must stop, because the state there is wanted
    adapter        what is added to the model's matrices for it (a `LoadedAdapter`), None for nothing
    mask           which tokens may be sampled next (an `engine.token_mask.TokenMask`), None for all
    forced         ids in `prompt`, not fed yet, that count as sampled, because its grammar allowed nothing else
    resumed        whether `prompt` goes on with an answer that has begun
    finalizing     whether the row has ended and only its state is brought to the end of the visible text
    """

    __slots__ = (
        "adapter", "cached", "continues", "cuts", "finalizing", "followers", "forced", "index", "initial", "mask",
        "num_prefilled", "num_sampled", "num_waits", "prompt", "recalled", "request", "resumed", "slot",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, *, is_leader: bool = True):
        self.request = request
        self.index = index
        self.prompt = request.prompts[(index - request.first) // request.copies]
        self.num_prefilled = 0
        self.num_sampled = 0
        self.slot = -1
        self.followers = [Sequence(request, index, is_leader=False) for _ in range(request.width - 1)] if is_leader else []
        self.initial = None
        self.continues = False
        self.cached = 0
        self.recalled = 0
        self.num_waits = 0
        self.cuts: list[int] = []
        self.adapter = None
        self.mask = None
        self.forced: list[int] = []
        self.resumed = False
        self.finalizing = False

    def __repr__(self) -> str:
        fed = f"fed {self.num_prefilled}/{len(self.prompt)}, sampled {self.num_sampled}"
        return f"Sequence({self.request.id!r}[{self.index}], slot {self.slot}, {fed})"
