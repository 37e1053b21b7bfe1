"""How much of prompts may be fed between two tokens of rows that decode: what takes no longer than a budget of milliseconds.

What steps take is measured where they run (`PrefillPace.began` and `ended`), what the next one will take is said by `StepCost`.
The bound holds for what is added to a gap; the gap itself is a decode step longer. No prompt starves: a chunk of one is fed
between two tokens however long that takes, so the gap is never less than a decode step and the smallest step of prefill.
While only steps of the smallest size have run, a single plan that tries the next one may exceed the bound.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from rwkv_batch.scheduling.plan import PREFILL_CHUNK, Plan
from rwkv_batch.scheduling.step_cost import StepCost

PROBE_EVERY = 8  # of so many plans that feed beside rows that decode, one may be of another size, to learn what tokens cost
PROBE_GAIN = 1.25  # it is if so many times the tokens would fit were it certain what they cost
MOST_GROWTH = 2  # times the tokens of the largest step that was measured; what many cost does not follow from what few do
LARGE_SHARE = 4  # of what a plan may feed; a further step of prefill before the next token feeds at least this part


class PrefillPace:
    """The allowance of prompt tokens beside rows that decode.

    budget_ms  that prefill may add to the gap between two tokens of a row
    budget     tokens a plan may feed, >= 1
    mixed      whether a plan may feed prompts and decode; if not, several may feed between two that decode
    captured   ascending numbers of tokens; a step that feeds fewer is filled up to the next one
    times      tokens -> milliseconds of steps, measured before the first plan; real ones correct them. Where not `mixed`
    """

    def __init__(
        self,
        budget_ms: float,
        *,
        budget: int,
        mixed: bool,
        captured: Sequence[int] = (),
        times: Mapping[int, float] = MappingProxyType({}),
    ):
        self.budget_ms = budget_ms
        self.mixed = mixed
        self._captured = list(captured)
        chunk, largest = min(PREFILL_CHUNK, budget), max(captured, default=0)
        sizes = {size for size in captured if chunk <= size <= budget}
        sizes.update(size for size in range(chunk, budget + 1, chunk) if size > largest)
        self._sizes = sorted({chunk, *sizes, budget})  # to choose from
        self._large = max(chunk, budget // LARGE_SHARE)
        self._cost = StepCost(3 if mixed else 2)
        self._most = 0.0  # tokens of the largest step that was measured
        self._num_fed = 0  # plans that fed beside rows that decode
        self._added = 0.0  # milliseconds that the plans since the last one that decodes take
        self._under_way: deque[tuple[list[float], float]] = deque()  # features, none of steps not to learn from; when it began
        self._ended_at = 0.0
        for num_tokens, ms in sorted(times.items()):
            self._learn(self._features(num_tokens), ms)

    @property
    def allowance(self) -> int:
        """Prompt tokens that the next plan may feed; a chunk at least.

        A plan that probes is about half as large as it might be, so as to be within the budget. None is smaller than the
        smallest, and while there is no other, nobody knows what a token adds: there the next size is tried.
        """
        size = max(self._largest(self._cost.bound), self._sizes[0])
        if self._num_fed % PROBE_EVERY == 0 and self._largest(self._cost.likely) >= PROBE_GAIN * size:
            smaller = bisect_right(self._sizes, max(size // 2, self._sizes[0])) - 1
            return self._sizes[smaller if size > self._sizes[0] else 1]
        return size

    @property
    def goes_on(self) -> bool:
        """Whether there is time for another plan that feeds, and not too little, before the next that decodes."""
        return self._largest(self._cost.bound) >= self._large

    def stats(self) -> dict[str, int | float]:
        """Figures of this moment: tokens that may be fed between two tokens, what a thousand take in steps of that size."""
        size = max(self._largest(self._cost.bound, added=0.0), self._sizes[0])
        per_thousand = self._cost.expected(self._features(size)) * 1000 / size
        return {"prefill_allowance_tokens": size, "prefill_ms_per_1000_tokens": round(per_thousand, 3)}

    def fed(self, num_tokens: int, *, beside_decoding: bool) -> None:
        """A plan feeds so many tokens; `beside_decoding`: while rows wait for their next."""
        self._num_fed += beside_decoding
        if not self.mixed:
            self._added = self._added + self._cost.expected(self._features(num_tokens)) if beside_decoding else 0.0

    def decoded(self) -> None:
        """A plan decodes and feeds nothing."""
        self._added = 0.0

    def began(self, plan: Plan, at: float) -> None:
        """The step of a plan was given to the device, `at` seconds on a clock."""
        features: list[float] = []
        if self.mixed or plan.rows[0].ids:
            features = self._features(sum(len(row.ids) for row in plan.rows))
            if self.mixed:
                features = [1.0, sum(not row.ids for row in plan.rows), features[-1]]
            if any(row.ids and row.sequence.request.prompt_logprobs is not None for row in plan.rows):
                features = []
        self._under_way.append((features, at))

    def ended(self, at: float) -> None:
        """The step that began first of those under way has ended."""
        features, began_at = self._under_way.popleft()
        seconds = at - max(began_at, self._ended_at)
        self._ended_at = at
        if features and seconds > 0:
            self._learn(features, seconds * 1000)

    def _learn(self, features: list[float], ms: float) -> None:
        self._cost.learn(features, ms)
        self._most = max(self._most, features[-1] * PREFILL_CHUNK)

    def _largest(self, cost: Callable[[list[float]], float], added: float | None = None) -> int:
        """Return the largest of the sizes that takes no longer than what is left of the budget; 0 = none."""
        if not self._cost.num_steps:
            return 0
        left = self.budget_ms - (self._added if added is None else added)
        known = bisect_right(self._sizes, MOST_GROWTH * self._most)
        fitting = bisect_right(self._sizes, left, hi=known, key=lambda size: cost(self._features(size)))
        return self._sizes[fitting - 1] if fitting else 0

    def _features(self, num_tokens: int) -> list[float]:
        """Return those of what prefill adds: where it has steps of its own, they cost something beside their tokens."""
        chunks = self._filled_up(num_tokens) / PREFILL_CHUNK
        return [0.0, 0.0, chunks] if self.mixed else [1.0, chunks]

    def _filled_up(self, num_tokens: int) -> int:
        index = bisect_left(self._captured, num_tokens)
        return self._captured[index] if index < len(self._captured) else num_tokens
