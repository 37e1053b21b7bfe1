"""Every sampling rule in plain torch: what the CPU runs, and the judge of the sampling kernels.

Arithmetic is float32 whatever the type of the logits. A row's result is the same bit for bit alone and in company. For one row
with logits l, in this order:

1. z = l + logit bias; the end token is -inf while it is masked, and so is what the row's token mask forbids. Rules "joint" and
   "sequential": z of each token that occurred is multiplied by the repetition penalty, or where it is above 0 by its inverse;
   z = z - penalties.
2. Greedy rows take the largest z, ties to the lowest id. Nothing below concerns them but 6.
3. min_p of rules "joint" and "sequential": z below the largest one + temperature * log(min_p) becomes -inf, so that what
   follows sees only what is left. x = z / temperature.
4. "joint" and "sequential": q = softmax(x), a filter turns q into weights w (`joint_cut`, `sequential_cut`), and the token is
   drawn by the inverse of the distribution function in ascending order of ids: the first column whose running sum of w
   exceeds u * (sum of w). A kernel gets the same order from a scan over blocks of columns.
   A "joint" row with top_p >= 0.25 and no top_k gets there by rejection, so that no boundary has to be found: candidates are
   drawn in this way from q itself until one is kept. A candidate stands, when the row's mass is laid out from the largest q
   down, at a random place within the share of its equals, and is kept when that is inside the first top_p: with S the mass of
   larger columns, E that of equal ones and a second number v, when S + v * E < top_p. So, with theta and edge of `joint_cut`, a
   column above theta is kept for sure, one below it never, and one equal to it with the probability edge / theta.
5. "gumbel": the largest x + g with g = -log(max(-log u, 6.2e-5)), u for each column; this is an exact draw from softmax(x),
   but for g being capped near 9.7. "noise": the largest x + noise * u. Ties to the lowest id.
6. The sampled token has occurred. Penalised rows: every penalty is multiplied by alpha_decay, then the sampled token's grows
   by alpha_presence if it was exactly 0 before this step, else by alpha_frequency (`Controls` holds the frequency as presence
   where presence is 0).

The random numbers are laid out in `base.py`. Running sums are rounded as the device adds them up, so devices agree up to
rounding at the borders between columns.

On a CUDA device greedy rows, unfiltered rows and penalties wait for nothing. The filters read back whether the best columns
held the boundary, rejection reads back which rows are done, and noise how many columns can win; the kernels do none of it.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sampling.base import EOS_ID, RULES, Controls, Needs, Sampled
from sampling.gumbel import MAX_GUMBEL, gumbel, perturbed_argmax
from sampling.masks import WORD, SlotMasks, unpack
from sampling.params import SamplingParams
from sampling.philox import MASK, philox, uniform

FIRST_SIZE = 64  # how many of the best columns a filter looks at first
LAST_SIZE = 4096  # and at most, before it takes all
PART = 256  # columns
CACHED = 1 << 18  # columns that are worked on together where that takes several ops
BELOW_ONE = 1 - 2.0**-24
NUM_AHEAD = 16  # steps whose draw numbers are made at once
CANDIDATES = 4  # for whom numbers are made at once in a step
GUMBEL = RULES.index("gumbel")

Cut = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]]


class ReferenceSampler:
    """The `Sampler` of `base.py` in torch ops.

    Args:
        num_slots: S
        ids: [U] int64 on the device, strictly increasing; column j of the logits is token ids[j]
        device: where logits, controls and results live
    """

    def __init__(self, num_slots: int, ids: Tensor, device: torch.device | str = "cpu"):
        if ids.ndim != 1 or ids.dtype != torch.int64 or len(ids) == 0 or not bool((ids[1:] > ids[:-1]).all()):
            raise ValueError(f"ids: expected [U] int64, strictly increasing, got {tuple(ids.shape)} {ids.dtype}")
        self.controls = Controls(num_slots, ids, device)
        self.needs = self.controls.needs
        self.masks = SlotMasks(num_slots, len(ids), device)
        self.ids = ids.to(device)
        # Numbers for draws, by step % NUM_AHEAD.
        self._skipped: set[int] = set()  # slots whose step has moved on without a draw
        self._ahead = torch.zeros(num_slots, NUM_AHEAD, CANDIDATES, 2, dtype=torch.float32, device=device)

    def start_many(
        self,
        slots: Sequence[int],
        params: Sequence[SamplingParams],
        choices: Sequence[int],
        prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        """See `Controls.start_many`."""
        self.controls.start_many(slots, params, choices, prompts)

    def count(self, slot: int, ids: Sequence[int]) -> None:
        """See `Controls.count`."""
        self.controls.count(slot, ids)
        self._skipped.add(slot)

    def sample(self, logits: Tensor, slots: Tensor, slot_list: Sequence[int] | None = None) -> Sampled:
        """Sample one token for each row of `logits` [B, U]; see `Sampler.sample`."""
        num_rows, num_columns = len(slots), len(self.ids)
        if logits.shape != (num_rows, num_columns):
            raise ValueError(f"logits: expected [{num_rows}, {num_columns}], got {list(logits.shape)}")
        slot_list = slots.tolist() if slot_list is None else slot_list
        needs = [self.controls.needs[slot] for slot in slot_list]
        biased = z = bias_and_mask(self.controls, logits, slots, needs, self.controls.step)
        if not self.masks.masked.isdisjoint(slot_list):
            z = z.float().masked_fill(~self.masks.allowed(slots, num_columns), -torch.inf)
        repeated = [row for row, need in enumerate(needs) if need.repeated]
        if repeated:
            z = self._repetition_penalized(z, slots, self._index(repeated))
        penalized = [row for row, need in enumerate(needs) if need.penalized]
        if penalized:
            index = self._index(penalized) if len(penalized) < num_rows else None  # None: all rows
            penalties = at(self.controls.penalties, at(slots, index))  # [R, U]
            z = subtract(z, penalties, index)
        if any(need.floored for need in needs):
            z = above_floor(z, at(self.controls.min_p_depth, slots))
        columns, finite = self._find_columns(z, slots, slot_list, needs)
        if penalized:
            self._add_hits(penalties, at(columns, index), at(slots, index))
        if repeated:
            index = self._index(repeated)
            self._add_seen(at(columns, index), at(slots, index), at(finite, index))
        self.controls.advance(slots, slot_list)

        sampled = Sampled(torch.where(finite, at(self.ids, columns), EOS_ID), finite)
        return (
            with_logprobs(self.ids, sampled, biased, columns, needs) if any(n.logprobs is not None for n in needs) else sampled
        )

    def _repetition_penalized(self, z: Tensor, slots: Tensor, index: Tensor) -> Tensor:
        """Return z [B, U] fp32, a new tensor, with the repetition penalty in the rows at index [R]."""
        slots, some = at(slots, index), at(z, index).float()
        factor = at(self.controls.repetition, slots)[:, None]
        seen = unpack(at(self.controls.seen, slots), len(self.ids))
        penalized = some * torch.where(some > 0, 1 / factor, factor)
        return z.float().index_copy(0, index, torch.where(seen, penalized, some))

    def _add_seen(self, columns: Tensor, slots: Tensor, finite: Tensor) -> None:
        """Note that the columns [R] have occurred in the slots [R], where rows are finite [R] bool."""
        seen, words = self.controls.seen, columns // WORD
        bits = finite.long() << (columns % WORD)
        seen[slots, words] = seen[slots, words] | bits.to(torch.int32)

    def _add_hits(self, penalties: Tensor, columns: Tensor, slots: Tensor) -> None:
        """Move penalties [R, U] of the slots [R] on by one step: decay, then the hit of the sampled columns [R]."""
        controls = self.controls
        columns = columns[:, None]
        fresh = penalties.gather(1, columns) == 0
        hit = torch.where(fresh, at(controls.alpha_presence, slots)[:, None], at(controls.alpha_frequency, slots)[:, None])
        penalties.mul_(at(controls.alpha_decay, slots)[:, None]).scatter_add_(1, columns, hit)
        controls.penalties.index_copy_(0, slots, penalties)

    def _find_columns(self, z: Tensor, slots: Tensor, slot_list: Sequence[int], needs: list[Needs]) -> tuple[Tensor, Tensor]:
        """Return each row's column [B] int64 and whether the row is finite [B] bool; each method runs once, on all its rows."""
        groups: dict[str, list[int]] = {}
        for row, need in enumerate(needs):
            groups.setdefault(need.method, []).append(row)
        if len(groups) == 1:
            return self._find(next(iter(groups)), z, slots, slot_list)
        columns = torch.empty_like(slots)
        finite = torch.empty_like(slots, dtype=torch.bool)
        for method, rows in groups.items():
            index = self._index(rows)
            part_columns, part_finite = self._find(method, at(z, index), at(slots, index), [slot_list[row] for row in rows])
            columns.index_copy_(0, index, part_columns)
            finite.index_copy_(0, index, part_finite)
        return columns, finite

    def _find(self, method: str, z: Tensor, slots: Tensor, slot_list: Sequence[int]) -> tuple[Tensor, Tensor]:
        if method == "greedy":
            return self._greedy(z)
        if method == "perturbed":
            return self._perturbed(z, slots)
        q = self._tempered(z, slots).softmax(-1)
        numbers = self._draw_numbers(slots, slot_list)
        u = numbers[:, 0, :1]
        finite = ~q[:, 0].isnan()  # one NaN, one +inf or nothing but -inf makes the whole row NaN
        if method == "plain":
            return draw_plain(q, u), finite
        top_p = at(self.controls.top_p, slots)[:, None]
        if method == "rejection":
            return self._draw_by_rejection(q, top_p, numbers, finite, slots), finite
        top_k = at(self.controls.top_k, slots).long()[:, None]
        return draw_filtered(q, top_k, top_p, u, joint_cut if method == "joint" else sequential_cut), finite

    def _draw_by_rejection(self, q: Tensor, top_p: Tensor, numbers: Tensor, finite: Tensor, slots: Tensor) -> Tensor:
        """Return the first candidate of each row that top_p keeps [R] int64; `numbers` are those of the first ones."""
        parts = in_parts(q)
        masses, maxima = parts.sum(-1), parts.amax(-1)
        columns = torch.zeros_like(slots)
        rows = finite.nonzero()[:, 0]  # that have no token yet
        numbers = at(numbers, rows)
        for index in itertools.count():
            if not len(rows):
                return columns
            if index and index % CANDIDATES == 0:
                some = at(slots, rows)
                numbers = self._candidate_numbers(some, at(self.controls.step, some), index)
            u = numbers[:, index % CANDIDATES]
            drawn = draw(parts, masses, rows, u[:, :1])
            columns.index_copy_(0, rows, drawn)
            rest = ~is_kept(parts, masses, maxima, rows, drawn, u[:, 1:], at(top_p, rows))
            rows, numbers = rows[rest], numbers[rest]

    def _greedy(self, z: Tensor) -> tuple[Tensor, Tensor]:
        best, columns = z.max(-1)  # the first of equal ones; NaN wins over all
        return columns, best.isfinite()

    def _perturbed(self, z: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        controls = self.controls
        is_gumbel, noise = at(controls.rule, slots) == GUMBEL, at(controls.noise, slots)

        def lift(values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
            u = self._column_numbers(at(slots, rows), at(self.ids, columns))
            return values + torch.where(at(is_gumbel, rows), gumbel(u), at(noise, rows) * u)

        columns, largest = perturbed_argmax(self._tempered(z, slots), torch.where(is_gumbel, MAX_GUMBEL, noise), lift)
        return columns, largest.isfinite()

    def _tempered(self, z: Tensor, slots: Tensor) -> Tensor:
        """Return x [R, U] fp32, a new tensor."""
        return z.float() / at(self.controls.temperature, slots)[:, None]

    def _draw_numbers(self, slots: Tensor, slot_list: Sequence[int]) -> Tensor:
        """Return [R, CANDIDATES, 2], for each row's first draws in this step: u, and the place among equals.

        Philox costs the same for one number as for hundreds, so each slot's are made for NUM_AHEAD steps at once.
        """
        steps = [self.controls.host_step[slot] % NUM_AHEAD for slot in slot_list]
        empty = [row for row, step in enumerate(steps) if step == 0 or slot_list[row] in self._skipped]
        self._skipped.difference_update(slot_list)
        if empty:
            self._draw_ahead(slots if len(empty) == len(steps) else at(slots, self._index(empty)))
        places = [slot * NUM_AHEAD + step for slot, step in zip(slot_list, steps, strict=True)]
        return at(self._ahead.flatten(0, 1), self._index(places))

    def _draw_ahead(self, slots: Tensor) -> None:
        """Fill the draw numbers of the slots around their present step."""
        later = torch.arange(NUM_AHEAD, device=slots.device)
        step = (at(self.controls.step, slots) // NUM_AHEAD * NUM_AHEAD)[:, None] + later
        numbers = self._candidate_numbers(slots.repeat_interleave(NUM_AHEAD), step.flatten(), 0)
        self._ahead.index_copy_(0, slots, numbers.view(-1, NUM_AHEAD, CANDIDATES, 2))

    def _candidate_numbers(self, slots: Tensor, step: Tensor, first: int) -> Tensor:
        """Return [n, CANDIDATES, 2]: the numbers of the candidates from `first` on, of slots [n] at steps [n]."""
        index = torch.arange(first, first + CANDIDATES, device=slots.device).repeat(len(slots))
        slots, step = slots.repeat_interleave(CANDIDATES), step.repeat_interleave(CANDIDATES)
        words = self._words(slots, step, torch.zeros_like(slots), index)
        return uniform(words[:2].T).view(-1, CANDIDATES, 2)

    def _column_numbers(self, slots: Tensor, ids: Tensor) -> Tensor:
        """Return u [n], the noise of token ids[i] in slot slots[i] in this step."""
        words = self._words(slots, at(self.controls.step, slots), torch.ones_like(slots), ids >> 2)  # [4, n]
        return uniform(words.gather(0, (ids & 3)[None])[0])

    def _words(self, slots: Tensor, step: Tensor, purpose: Tensor, block: Tensor) -> Tensor:
        """Return [4, n] random words; the layout is in `base.py`."""
        seed = at(self.controls.seed, slots)
        key = torch.stack((seed, seed >> 32)) & MASK
        counter = torch.stack((step, purpose, at(self.controls.choice, slots), block)) & MASK
        return philox(counter, key)

    def _index(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows).to(self.ids.device, non_blocking=True)


def bias_and_mask(controls: Controls, logits: Tensor, slots: Tensor, needs: Sequence[Needs], step: Tensor) -> Tensor:
    """Return the logits [B, U] with bias and masked end token; the same tensor when no row has either.

    step  [S] int64, by slot: of the token that these logits are for
    """
    if any(need.biased for need in needs):
        columns, values = at(controls.bias_columns, slots), at(controls.bias_values, slots)  # [B, K]
        logits = logits.to(torch.float32, copy=True).scatter_add_(1, columns, values)
    if any(need.end_masked for need in needs):
        masked = at(step, slots) < at(controls.first_end, slots)  # [B]
        end = torch.where(masked, -torch.inf, logits[:, 0])  # the end token is id 0 and ids ascend: column 0
        logits = torch.cat((end[:, None], logits[:, 1:]), 1)
    return logits


def with_logprobs(ids: Tensor, sampled: Sampled, logits: Tensor, columns: Tensor, needs: Sequence[Needs]) -> Sampled:
    """Add the log-probabilities that rows asked for; `logits` [B, U] hold bias and masked end token already."""
    rows = [row for row, need in enumerate(needs) if need.logprobs is not None]
    num_top = min(max(needs[row].logprobs for row in rows), len(ids))
    index = torch.tensor(rows).to(ids.device, non_blocking=True)
    values = at(logits, index).float().log_softmax(-1)  # [R, U]
    chosen = values.gather(1, at(columns, index)[:, None])[:, 0]
    top_columns = best_columns(values, num_top)

    num_rows = len(needs)
    logprobs = chosen.new_full((num_rows,), torch.nan).index_copy_(0, index, chosen)
    top_logprobs = chosen.new_full((num_rows, num_top), torch.nan).index_copy_(0, index, values.gather(1, top_columns))
    top_ids = columns.new_full((num_rows, num_top), -1).index_copy_(0, index, ids[top_columns])
    return sampled._replace(logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)


def report_logprobs(
    controls: Controls, ids: Tensor, sampled: Sampled, logits: Tensor, slots: Tensor, needs: Sequence[Needs]
) -> Sampled:
    """Add the log-probabilities that rows asked for, after another sampler has sampled and counted its step."""
    biased = bias_and_mask(controls, logits, slots, needs, controls.step - 1)
    return with_logprobs(ids, sampled, biased, torch.searchsorted(ids, sampled.ids), needs)


def draw_plain(q: Tensor, u: Tensor) -> Tensor:
    """Return the drawn column of each row [R] int64 by its probabilities q [R, U] and number u [R, 1]."""
    parts = in_parts(q)
    columns = draw(parts, parts.sum(-1), torch.arange(len(q), device=q.device), u)
    return columns.clamp_(max=q.shape[1] - 1)  # for NaN rows


def in_parts(q: Tensor) -> Tensor:
    """Return q [R, U] as [R, parts, PART], with zeros at the end: sums by parts depend neither on other rows nor on threads."""
    padding = -q.shape[1] % PART
    return (torch.nn.functional.pad(q, (0, padding)) if padding else q).view(len(q), -1, PART)


def draw(parts: Tensor, masses: Tensor, rows: Tensor, u: Tensor) -> Tensor:
    """Draw a column of each of `rows` [n] by number u [n, 1]: first the part, then the column in it.

    Args:
        parts: [R, parts, PART] fp32 probabilities
        masses: [R, parts] fp32, their sums
    Returns:
        [n] int64, a place in `parts` even where the row is NaN
    """
    masses = at(masses, rows)
    sums = masses.cumsum(-1)
    target = sums[:, -1:] * u
    part = first_above(sums, target).clamp_(max=sums.shape[1] - 1)
    inside = parts[rows, part[:, 0]].cumsum(-1)  # [n, PART]
    # not below zero and below the sum, whatever the rounding, so that a column with any probability is found
    target = torch.minimum(target - (sums - masses).gather(1, part), inside[:, -1:] * BELOW_ONE).clamp_(min=0)
    return (part * PART + first_above(inside, target).clamp_(max=PART - 1))[:, 0]


def is_kept(
    parts: Tensor, masses: Tensor, maxima: Tensor, rows: Tensor, columns: Tensor, number: Tensor, top_p: Tensor
) -> Tensor:
    """Return [n] bool: whether the candidate's place in its row's mass, from the largest q down, is inside the first top_p.

    Args:
        parts, masses: as in `draw`
        maxima: [R, parts] fp32, the largest of each part
        rows, columns: [n] int64, the candidates
        number: [n, 1] fp32 in (0, 1), the place among equal columns
        top_p: [n, 1] fp32
    """
    value = parts.view(len(parts), -1)[rows, columns][:, None]
    # Of a part with larger columns the largest one is in front of the candidate at least, and at most all of it.
    maxima = at(maxima, rows)
    front = torch.where(maxima > value, 1.0, torch.where(maxima == value, number, 0.0))
    kept = (at(masses, rows) * front).sum(-1) < top_p[:, 0]
    unclear = (~kept & ((maxima * front).sum(-1) < top_p[:, 0])).nonzero()[:, 0]
    for some in unclear.split(max(CACHED // parts[0].numel(), 1)):
        q, v = at(parts, rows[some]), value[some, :, None]
        above, at_least = (larger.mul_(q).sum(-1).sum(-1, True) for larger in (q.clone().gt_(v), q.clone().ge_(v)))
        kept[some] = (above + number[some] * (at_least - above) < top_p[some])[:, 0]
    return kept


def draw_filtered(q: Tensor, top_k: Tensor, top_p: Tensor, u: Tensor, cut: Cut, size: int = FIRST_SIZE) -> Tensor:
    """Return the drawn column of each row [R] int64.

    The search for the boundary looks at the `size` best columns and takes more only for rows whose boundary lies further down.
    After Rapid-Sampling (Triang-jyed-driung) its result is a threshold and a weight for the columns equal to it, so it does
    not depend on `size` nor on the order of equal columns.

    Args:
        q: [R, U] fp32 probabilities
        top_k: [R, 1] int64, U = off
        top_p: [R, 1] fp32, +inf = off
        u: [R, 1] fp32 in (0, 1)
        cut: the filter
    """
    num_columns = q.shape[1]
    size = min(size, num_columns)
    values, columns = q.topk(size)
    theta, edge, num_kept, found = cut(values, top_k, top_p, num_columns)
    drawn = draw_kept(values, columns, theta, edge, num_kept, u)
    if size == num_columns or bool(found.all()):
        return drawn
    rest = (~found[:, 0]).nonzero()[:, 0]
    next_size = size * 8 if size < LAST_SIZE else num_columns
    part = draw_filtered(at(q, rest), at(top_k, rest), at(top_p, rest), at(u, rest), cut, next_size)
    return drawn.index_copy_(0, rest, part)


def joint_cut(values: Tensor, top_k: Tensor, top_p: Tensor, num_columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the boundary of rule "joint": count and mass act together, both on the full softmax.

    theta is the largest value for which at least top_k columns, or columns with at least the mass top_p, have q >= theta.
    Columns above it weigh q. With S and n the mass and number of columns above, the m columns equal to it weigh
    theta * clamp(min((top_p - S) / (theta * m), (top_k - n) / m), 0, 1): enough to make the total top_p, or the number top_k.

    Args:
        values: [R, size] fp32, the largest q of each row, descending
        top_k: [R, 1] int64, U = off
        top_p: [R, 1] fp32, +inf = off
        num_columns: U
    Returns:
        theta: [R, 1] fp32
        edge: [R, 1] fp32, the weight of a column equal to theta
        num_kept: [R, 1] int64, how many of `values` are at least theta
        found: [R, 1] bool, whether `values` hold the boundary with all columns equal to it
    """
    size = values.shape[1]
    mass = mass_of_best(values)
    num_needed = torch.minimum(first_reaching(mass, top_p), top_k)  # more than size where the boundary lies further down
    theta = values.gather(1, (num_needed - 1).clamp_(max=size - 1))
    num_above, num_kept = count_above(values, theta)
    # multiplied by theta, so that a theta of 0 (columns that underflowed) is not divided by
    edge = torch.minimum(top_p - mass.gather(1, num_above), theta * (top_k - num_above)).div_(num_kept - num_above)
    return theta, torch.minimum(edge.clamp_(min=0), theta), num_kept, num_kept < size


def sequential_cut(values: Tensor, top_k: Tensor, top_p: Tensor, num_columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the boundary of rule "sequential": top_k first, then top_p within the mass that top_k left.

    As FlashInfer's filters do, both keep all columns equal to the last one kept; the column that crosses top_p stays whole.
    Arguments and results as in `joint_cut`; `edge` is theta.
    """
    size = values.shape[1]
    mass = mass_of_best(values)
    _, num_best = count_above(values, values.gather(1, (top_k - 1).clamp_(max=size - 1)))
    off = top_k >= num_columns
    total = torch.where(off, 1.0, mass.gather(1, num_best))
    num_needed = torch.minimum(first_reaching(mass, top_p * total), num_best)
    theta = values.gather(1, (num_needed - 1).clamp_(min=0))
    _, num_kept = count_above(values, theta)
    complete = torch.where(off, num_kept < size, (top_k <= size) & (num_best < size))
    return theta, theta, num_kept, complete


def draw_kept(values: Tensor, columns: Tensor, theta: Tensor, edge: Tensor, num_kept: Tensor, u: Tensor) -> Tensor:
    """Draw one of the kept columns of each row by weight, in ascending order of columns.

    Args:
        values, columns: [R, size], descending probabilities and their columns; the first num_kept are at least theta
        theta, edge, num_kept, u: [R, 1]
    Returns:
        [R] int64, a valid column even where the row is NaN
    """
    size = values.shape[1]
    weights = torch.where(values > theta, values, edge)
    order = torch.where(values >= theta, columns, torch.iinfo(torch.int64).max).argsort(-1)  # columns not kept go behind
    sums = weights.gather(1, order).cumsum(-1)
    total = sums.gather(1, (num_kept - 1).clamp_(min=0))
    position = first_above(sums, total * u).clamp_(max=size - 1)
    return columns.gather(1, order.gather(1, position))[:, 0]


def mass_of_best(values: Tensor) -> Tensor:
    """Return [R, size + 1]: the mass of the 0, 1, ... first of `values` [R, size]."""
    return torch.nn.functional.pad(values, (1, 0)).cumsum(-1)


def count_above(values: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many of descending `values` [R, size] are above theta [R, 1], and how many are at least theta; [R, 1] each."""
    rising, bound = -values, -theta
    return first_reaching(rising, bound), first_above(rising, bound)


def best_columns(values: Tensor, num_best: int) -> Tensor:
    """Return the columns [R, num_best] of the largest values [R, U] fp32, largest first, ties to the lowest column."""
    bits = (values + 0.0).view(torch.int32)  # adding 0 makes -0 and 0 the same bits
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # integers in the order of the floats
    num_columns = values.shape[1]
    reverse = torch.arange(num_columns - 1, -1, -1, device=values.device)
    best = ((ordered << 32) | reverse).topk(num_best)[0]
    return num_columns - 1 - (best & MASK)


def subtract(logits: Tensor, penalties: Tensor, index: Tensor | None) -> Tensor:
    """Return z [B, U] fp32, a new tensor: `logits` less `penalties` [R, U] in the rows at index [R], or in all."""
    if index is None:
        return logits.float() - penalties
    return logits.float().index_copy(0, index, at(logits, index).float() - penalties)


def above_floor(z: Tensor, depth: Tensor) -> Tensor:
    """Return z [B, U] fp32, a new tensor, with -inf in place of what lies more than depth [B] below its row's largest."""
    z = z.float()
    return z.masked_fill(z < z.amax(-1, keepdim=True) - depth[:, None], -torch.inf)


def at(x: Tensor, index: Tensor | None) -> Tensor:
    """Return the lines of `x` at `index`, all for None; a third of the cost of `x[index]`."""
    return x if index is None else x.index_select(0, index)


def first_reaching(ascending: Tensor, bound: Tensor) -> Tensor:
    """Return the first position [R, 1] in each row of `ascending` [R, n] that is >= bound [R, 1]; n where none is."""
    return torch.searchsorted(ascending, bound)


def first_above(ascending: Tensor, bound: Tensor) -> Tensor:
    """Return the first position [R, 1] in each row of `ascending` [R, n] that is > bound [R, 1]; n where none is."""
    return torch.searchsorted(ascending, bound, right=True)
