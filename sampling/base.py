"""What every sampler shares: the controls of the slots, the result of a step, the protocol. No sampling rule is here.

Words: a *row* is a line of the logits, a *slot* is where its sequence lives, a *column* is a position in the logits. Column j
is token `ids[j]`; ids that cannot be decoded have no column.

Random numbers, for every sampler on every device (`philox.py`):

    key      k0, k1 = low and high half of the slot's 64-bit seed
    counter  c0 = sampled-token index of the row (0 for its first sampled token), modulo 2^32
             c1 = 0 for a draw, 1 for the noise of a column
             c2 = choice index modulo 2^32
             c3 = 0 for a draw, token id // 4 for the noise of a column; where draws are rejected, how many were before
    word     0 for a draw, 1 for the place of what was drawn among its equals, token id % 4 for the noise of a column
    u        (2 * (word >> 9) + 1) * 2^-24, exact in float32, in (0, 1)

Nothing else enters, so a row's numbers do not depend on its neighbours, its slot, its place in the batch or the filters, and
noise may be left unevaluated on columns that cannot win.
"""

import bisect
import math
import secrets
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from sampling import masks
from sampling.masks import SlotMasks
from sampling.params import SamplingParams

RULES = ("joint", "sequential", "gumbel", "noise")  # the codes in Controls.rule
EOS_ID = 0  # the end token
NEVER = 1 << 62  # a step that no sequence reaches
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
MIN_TOP_P = 1e-9  # below every possible largest probability, so that anything less means the same and would only underflow
REJECTION_FROM = 0.25  # a row with this top_p or more and no top_k is drawn until a draw is kept: at most four times on average

Method = Literal["greedy", "plain", "rejection", "joint", "sequential", "perturbed"]


class Needs(NamedTuple):
    """What a slot's rows need, known on the host, so that a step skips the rest without asking the device.

    method     how the token is found: the largest logit; a draw from the whole softmax; such draws until top_p keeps one (rule
               "joint" by top_p alone); a draw behind one of the two filters; the largest logit after noise (rules "gumbel" and
               "noise")
    penalized  whether there are penalties of any kind; repeated: whether tokens that occurred have a repetition penalty
    floored    whether min_p may cut something off
    logprobs   None, or how many of the most likely tokens to report
    """

    method: Method = "greedy"
    penalized: bool = False
    repeated: bool = False
    floored: bool = False
    biased: bool = False
    end_masked: bool = False
    logprobs: int | None = None


class Controls:
    """The sampling controls of S slots, on the device, where a captured graph reads them. U columns.

    temperature      [S] fp32, within 0.001 .. 1000
    top_k            [S] int32, 1 .. U; U = off
    top_p            [S] fp32, 1e-9 .. 1, or +inf = off
    min_p_depth      [S] fp32, how far below the row's largest logit min_p keeps others, -temperature * log(min_p); +inf = off
    alpha_presence   [S] fp32, what a token's first hit adds to its penalty; alpha_frequency where presence was given as 0
    alpha_frequency  [S] fp32, what each later hit adds
    alpha_decay      [S] fp32
    repetition       [S] fp32, the repetition penalty; 1 = off
    noise            [S] fp32
    rule             [S] int8, index into RULES
    greedy           [S] bool
    penalized        [S] bool
    seed             [S] int64, the bits of the unsigned 64-bit seed
    choice           [S] int64
    step             [S] int64, sampled-token index; a sampler adds one for each row it samples
    first_end        [S] int64, the first step at which the end token may be sampled
    bias_columns     [S, K] int64 and bias_values [S, K] fp32: the logit bias, unused places hold bias 0;
                     None before the first biased row, K doubles when a row needs more (a captured graph is then stale)
    penalties        [S, U] fp32, by column; None before the first penalised row, read only in slots with `penalized`
    seen             [S, W] int32, bits of the columns that occurred in prompt and answer (`masks.py`), in slots with a
                     repetition penalty; None before the first of them
    needs            S host records
    host_step        S host copies of `step`
    """

    def __init__(self, num_slots: int, ids: Tensor, device: torch.device | str):
        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_slots,), value, dtype=dtype, device=device)

        self.num_slots = num_slots
        self.device = torch.device(device)
        self.num_columns = len(ids)
        self._ids = ids.tolist()
        self._host_ids = ids.cpu()
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self.needs = [Needs()] * num_slots
        self.host_step = [0] * num_slots
        self._values: list[dict[str, float] | None] = [None] * num_slots  # what `_set` has set
        self.temperature = full(1, torch.float32)
        self.top_k = full(self.num_columns, torch.int32)
        self.top_p = full(torch.inf, torch.float32)
        self.min_p_depth = full(torch.inf, torch.float32)
        self.alpha_presence = full(0, torch.float32)
        self.alpha_frequency = full(0, torch.float32)
        self.alpha_decay = full(1, torch.float32)
        self.repetition = full(1, torch.float32)
        self.noise = full(0, torch.float32)
        self.rule = full(0, torch.int8)
        self.greedy = full(True, torch.bool)
        self.penalized = full(False, torch.bool)
        self.seed = full(0, torch.int64)
        self.choice = full(0, torch.int64)
        self.step = full(0, torch.int64)
        self.first_end = full(0, torch.int64)
        self.bias_columns: Tensor | None = None
        self.bias_values: Tensor | None = None
        self.penalties: Tensor | None = None
        self.seen: Tensor | None = None

    @classmethod
    def num_bytes(cls, num_slots: int) -> int:
        """Bytes on the device, without logit bias and penalties."""
        controls = cls(num_slots, torch.zeros(1, dtype=torch.int64), "meta")
        return sum(value.nbytes for value in vars(controls).values() if isinstance(value, Tensor) and value.is_meta)

    def start(self, slot: int, params: SamplingParams, choice: int) -> None:
        """Set the controls of one slot that a sequence takes."""
        self.start_many([slot], [params], [choice])

    def start_many(
        self,
        slots: Sequence[int],
        params: Sequence[SamplingParams],
        choices: Sequence[int],
        prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        """Set the controls of slots that sequences take: step 0, no penalties, a fresh seed where none is given.

        Repetition penalties act on the ids in `prompts`, one for each slot; without any on sampled tokens alone.

        A few copies to the device, however many slots there are; what follows from a `SamplingParams` is found once for all
        rows that share the object, as those of a request do.
        """
        if not len(slots) == len(params) == len(choices):
            raise ValueError(f"slots, params and choices differ in length: {len(slots)}, {len(params)}, {len(choices)}")
        if not slots:
            return
        distinct = {id(p): p for p in params}
        place = {key: number for number, key in enumerate(distinct)}
        numbers = [place[id(p)] for p in params]
        controls, biases, needs = zip(*map(self._derive, distinct.values()), strict=True)
        index, source = self._copied(slots, torch.int64), self._copied(numbers, torch.int64)
        self._set([(slot, controls[number]) for slot, number in zip(slots, numbers, strict=True)])
        fresh = memoryview(secrets.token_bytes(8 * len(slots))).cast("q")
        seeds = [seed if p.seed is None else _signed(p.seed) for seed, p in zip(fresh, params, strict=True)]
        self.seed.index_copy_(0, index, self._copied(seeds, torch.int64))
        self.choice.index_copy_(0, index, self._copied(choices, torch.int64))
        self.step.index_fill_(0, index, 0)
        self._start_bias(index, source, biases)
        if any(need.penalized for need in needs):
            self._start_penalties(index)
        repeated = [place for place, number in enumerate(numbers) if needs[number].repeated]
        if repeated:
            self._start_seen([slots[place] for place in repeated], [prompts[place] for place in repeated] if prompts else [])
        for slot, number in zip(slots, numbers, strict=True):
            self.needs[slot] = needs[number]
            self.host_step[slot] = 0

    def _set(self, wanted: list[tuple[int, dict[str, float]]]) -> None:
        """Set controls by slot and name where a slot has others: most sequences want what the one before them had."""
        wanted = [(slot, values) for slot, values in wanted if self._values[slot] != values]
        if not wanted:
            return
        index = self._copied([slot for slot, _ in wanted], torch.int64)
        table = self._copied([list(values.values()) for _, values in wanted], torch.float64)  # exact for all of them
        for name, column in zip(wanted[0][1], table.unbind(1), strict=True):
            control = getattr(self, name)
            control.index_copy_(0, index, column.to(control.dtype))
        for slot, values in wanted:
            self._values[slot] = values

    def advance(self, slots: Tensor, slot_list: Sequence[int]) -> None:
        """Count one sampled token in each slot; `slots` [B] and `slot_list` are the same."""
        self.step.index_add_(0, slots, self._one.expand(len(slot_list)))
        for slot in slot_list:
            self.host_step[slot] += 1

    def count(self, slot: int, ids: Sequence[int]) -> None:
        """Count ids as if they had been sampled in a slot: its next draw has the numbers and the penalties that it had then."""
        self.step[slot] += len(ids)
        self.host_step[slot] += len(ids)
        if self.penalties is not None and self.needs[slot].penalized:
            penalties = self.penalties[slot]
            for column in self.columns_of(ids):
                hit = torch.where(penalties[column] == 0, self.alpha_presence[slot], self.alpha_frequency[slot])
                penalties.mul_(self.alpha_decay[slot])[column] += hit
        if self.seen is not None and self.needs[slot].repeated:
            self.seen[slot] |= self._columns_in(ids).to(self.device)

    def _derive(self, params: SamplingParams) -> tuple[dict[str, float], dict[int, float], Needs]:
        """Return the controls that rows with these parameters share, by name, their logit bias by column, and their needs."""
        bias, first_end = self._bias(params), self._first_end(params)
        controls = {
            "temperature": _temperature(params),
            "top_k": self._top_k(params),
            "top_p": _top_p(params),
            "min_p_depth": self._min_p_depth(params),
            "alpha_presence": params.alpha_presence or params.alpha_frequency,
            "alpha_frequency": params.alpha_frequency,
            "alpha_decay": params.alpha_decay,
            "repetition": params.repetition_penalty if params.repeated else 1.0,
            "noise": params.noise,
            "rule": RULES.index(params.rule),
            "greedy": params.greedy,
            "penalized": params.penalized,
            "first_end": first_end,
        }
        needs = Needs(
            method=self._method(params), penalized=params.penalized, repeated=params.repeated, floored=params.floored,
            biased=bool(bias), end_masked=first_end > 0, logprobs=params.logprobs,
        )  # fmt: skip
        return controls, bias, needs

    def _copied(self, values: Sequence, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)

    def _top_k(self, params: SamplingParams) -> int:
        return params.top_k if 0 < params.top_k <= self.num_columns else self.num_columns

    def _min_p_depth(self, params: SamplingParams) -> float:
        return -_temperature(params) * math.log(params.min_p) if params.floored else torch.inf

    def _first_end(self, params: SamplingParams) -> int:
        if self._ids[0] != EOS_ID:
            return 0
        return NEVER if params.ignore_eos else max(params.min_tokens, 0)

    def _method(self, params: SamplingParams) -> Method:
        if params.greedy:
            return "greedy"
        if params.rule in ("gumbel", "noise"):
            return "perturbed"
        if self._top_k(params) == self.num_columns:
            if _top_p(params) == torch.inf:
                return "plain"
            if params.rule == "joint" and _top_p(params) >= REJECTION_FROM:
                return "rejection"
        return params.rule

    def _bias(self, params: SamplingParams) -> dict[int, float]:
        """Return the logit bias by column; a token named twice gets the sum, a token without a column is left out."""
        bias: dict[int, float] = {}
        for token, value in params.logit_bias:
            column = bisect.bisect_left(self._ids, token)
            if column < self.num_columns and self._ids[column] == token:
                bias[column] = bias.get(column, 0.0) + value
        return bias

    def _start_bias(self, index: Tensor, source: Tensor, biases: Sequence[dict[int, float]]) -> None:
        """Set the bias of slot index[i] to biases[source[i]]."""
        if self.bias_values is not None:
            self.bias_values.index_fill_(0, index, 0)
        longest = max(map(len, biases))
        if not longest:
            return
        self._widen_bias(longest)
        padded = [list(bias.items()) + [(0, 0.0)] * (longest - len(bias)) for bias in biases]
        columns = self._copied([[c for c, _ in row] for row in padded], torch.int64).index_select(0, source)
        values = self._copied([[v for _, v in row] for row in padded], torch.float32).index_select(0, source)
        self.bias_columns[:, :longest].index_copy_(0, index, columns)
        self.bias_values[:, :longest].index_copy_(0, index, values)

    def _widen_bias(self, num_pairs: int) -> None:
        old_width = 0 if self.bias_columns is None else self.bias_columns.shape[1]
        if num_pairs <= old_width:
            return
        width = max(16, 1 << (num_pairs - 1).bit_length())
        columns = torch.zeros(self.num_slots, width, dtype=torch.int64, device=self.device)
        values = torch.zeros(self.num_slots, width, dtype=torch.float32, device=self.device)
        if old_width:
            columns[:, :old_width] = self.bias_columns
            values[:, :old_width] = self.bias_values
        self.bias_columns, self.bias_values = columns, values

    def _start_penalties(self, index: Tensor) -> None:
        if self.penalties is None:
            self.penalties = torch.zeros(self.num_slots, self.num_columns, dtype=torch.float32, device=self.device)
        self.penalties.index_fill_(0, index, 0)

    def _start_seen(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        if self.seen is None:
            width = masks.num_words(self.num_columns)
            self.seen = torch.zeros(self.num_slots, width, dtype=torch.int32, device=self.device)
        index = self._copied(slots, torch.int64)
        if not prompts:
            self.seen.index_fill_(0, index, 0)
            return
        distinct = {id(prompt): self._columns_in(prompt) for prompt in prompts}  # the rows of a prompt's choices share it
        words = torch.stack([distinct[id(prompt)] for prompt in prompts])
        self.seen.index_copy_(0, index, words.to(self.device, non_blocking=True))

    def columns_of(self, ids: Sequence[int]) -> list[int]:
        """Return the columns of sampled ids."""
        return torch.searchsorted(self._host_ids, torch.tensor(ids)).tolist()

    def _columns_in(self, prompt: Sequence[int]) -> Tensor:
        """Return the columns of a prompt's ids as words [W]; ids without one are left out."""
        ids = torch.tensor(prompt, dtype=torch.int64)
        columns = torch.searchsorted(self._host_ids, ids).clamp_(max=self.num_columns - 1)
        flags = torch.zeros(self.num_columns, dtype=torch.bool)
        flags[columns[self._host_ids[columns] == ids]] = True
        return masks.pack(flags)


def _temperature(params: SamplingParams) -> float:
    return min(max(params.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)


def _top_p(params: SamplingParams) -> float:
    return max(params.top_p, MIN_TOP_P) if 0 < params.top_p < 1 else torch.inf


def _signed(seed: int) -> int:
    """Return the low 64 bits of a seed as a signed integer, which int64 tensors hold."""
    bits = seed & ((1 << 64) - 1)
    return bits - (1 << 64) if bits >> 63 else bits


class Sampled(NamedTuple):
    """What one step sampled, on the device. B rows.

    ids           [B] int64 token ids; 0 in rows that are not finite
    finite        [B] bool; False where the row's logits held NaN or +inf, which may go unnoticed under a mask, or nothing but
                  -inf
    logprobs      [B] fp32 log-probability of the sampled token; None when no row asked, NaN in rows that did not
    top_ids       [B, n] int64 most likely tokens, likeliest first, ties to the lowest id; n is the most that a row asked for,
                  so a row that asked for fewer reads its first ones; -1 in rows that did not ask
    top_logprobs  [B, n] fp32

    Log-probabilities are the log-softmax of the model's logits after the logit bias and the masked end token, so that a token
    that cannot be sampled is not reported as likely, and before penalties, temperature and filters: what the model says, not
    what the row's history and filters made of it.
    """

    ids: Tensor
    finite: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


class Sampler(Protocol):
    """Turns logits into token ids, one for each row, and moves the controls of the sampled slots on by one step.

    ids    [U] int64 on the device: column j of the logits is token ids[j]
    needs  by slot, what its rows need
    masks  by slot, which columns its row may sample in the next step; log-probabilities know nothing of them
    """

    ids: Tensor
    needs: Sequence[Needs]
    masks: SlotMasks

    def start_many(
        self,
        slots: Sequence[int],
        params: Sequence[SamplingParams],
        choices: Sequence[int],
        prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        """See `Controls.start_many`."""

    def count(self, slot: int, ids: Sequence[int]) -> None:
        """See `Controls.count`."""

    def sample(self, logits: Tensor, slots: Tensor, slot_list: Sequence[int] | None = None) -> Sampled:
        """Sample one token for each row.

        Args:
            logits: [B, U] fp32, fp16 or bf16; columns masked by the model hold -inf; left unchanged
            slots: [B] int64, distinct
            slot_list: the same slots on the host; a caller that has them saves the device a synchronisation
        """


@runtime_checkable
class GraphSampler(Sampler, Protocol):
    """A sampler whose launch a CUDA graph can capture: nothing is waited for, and everything stays at its place."""

    def launch(
        self, logits: Tensor, slots: Tensor, *, out_ids: Tensor | None = None, out_finite: Tensor | None = None
    ) -> Sampled:
        """Start to sample one token for each row; slot -1 is padding. No log-probabilities are reported.

        out_ids, out_finite: [B] int64 and [B] bool, written instead of new tensors
        """

    def report_logprobs(self, sampled: Sampled, logits: Tensor, slots: Tensor, needs: Sequence[Needs]) -> Sampled:
        """Add the log-probabilities that rows asked for, after `launch` has sampled them; slots and needs are theirs."""
