"""Which sequences run next and with which ids. Plain Python: no torch, no model."""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rwkv_batch.request import Sequence

PREFILL_CHUNK = 32  # prompts are cut at multiples of this many tokens, the chunk of the matrix form of prefill
SCORED_TOKENS = 512  # a plan feeds of prompts whose every token is scored: their logits are 256 KiB a token


@dataclass(slots=True)
class Row:
    """One sequence's part of a step.

    ids     tokens to feed, or empty: feed the id sampled for this slot in the step before, which the host may not know yet
    sample  whether the logits after the last fed token are sampled
    keeps   whether they are kept instead, to be sampled in front of the row's next step
    draws   whether the logits kept before are sampled in front of the step, which then feeds that id
    start   whether this is the sequence's first row: the slot's state is overwritten and its controls are set
    """

    sequence: Sequence
    ids: list[int]
    sample: bool
    start: bool = False
    keeps: bool = False
    draws: bool = False


@dataclass(slots=True)
class Plan:
    """The rows of one step; slots are distinct. A list that was in a plan is never changed: if it comes again, so do its rows.

    masked  whether some of them sample under a mask
    mixes   whether some of them have followers
    plain   whether all feed what they sampled last, sample, and have neither masks nor followers
    groups  bits of the groups of rows that sample and go on: what is known of them waits for this step's ids
    """

    rows: list[Row] = field(default_factory=list)
    masked: bool = False
    mixes: bool = False
    groups: int = 0
    plain: bool = False


class FreeSlots:
    """The slots nobody owns; the lowest free ones are taken first, so that live rows stay close together."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._heap = list(range(num_slots))

    def __len__(self) -> int:
        return len(self._heap)

    def take(self) -> int:
        """Return the lowest free slot; IndexError when there is none."""
        return heapq.heappop(self._heap)

    def give(self, slot: int) -> None:
        """Take a slot back."""
        heapq.heappush(self._heap, slot)


class Batch:
    """The rows of one request, in order: those that wait and those that own a slot. A loop says which of them start when."""

    def __init__(self, sequences: Iterable[Sequence]):
        self.waiting = deque(sequences)
        self.running: set[Sequence] = set()
        self.width = self.waiting[0].request.width if self.waiting else 1  # slots that a row takes

    @property
    def ready(self) -> bool:
        """Whether a row of this batch may start as soon as there is room for one."""
        raise NotImplementedError

    def start(self, room: int) -> list[Sequence]:
        """Move one turn's worth of rows, at most `room` >= 1 of them, from waiting to running and return them, if `ready`."""
        raise NotImplementedError

    def _start(self, num_rows: int) -> list[Sequence]:
        """Start the first `num_rows` waiting rows."""
        rows = [self.waiting.popleft() for _ in range(num_rows)]
        self.running.update(rows)
        return rows


class PrefillQueue:
    """The started sequences whose prompts are not wholly fed, and who of them is fed next.

    Requests take turns. A turn is up to a quarter of what the plan may feed, spent on the request's sequences in order: short
    prompts are fed whole in the order they came, and a long one goes on after everybody else had a turn. Turns are taken until
    the plan is full, so a request alone gets all of it. Prompts that are scored share a smaller budget and do not hold up the
    others. A sequence with a cut is fed up to it and goes on in the next plan, before its request's others. A turn that ended
    there, or because the plan was full, goes on in the next plan too, before all others.
    """

    def __init__(self, budget: int, may_begin: Callable[[Sequence], bool] = lambda sequence: True):
        """Chunks are multiples of PREFILL_CHUNK, or of a smaller budget, or end at a cut or a prompt's end.

        budget     tokens a plan may feed, >= 1
        may_begin  called before a sequence is fed first; False: it is to be forgotten, and added again later
        """
        self.budget = budget
        self._may_begin = may_begin
        self._chunk = min(PREFILL_CHUNK, budget)
        self._requests: OrderedDict[str, deque[Sequence]] = OrderedDict()  # the next to have its turn is first
        self._rests: dict[str, int] = {}  # tokens left of turns that ended with the plan or at a cut

    def __bool__(self) -> bool:
        return bool(self._requests)

    def is_next(self, sequence: Sequence) -> bool:
        """Whether the next turn of the sequence's request is its own."""
        sequences = self._requests.get(sequence.request.id)
        return sequences is not None and sequences[0] is sequence

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose prompt is to be fed from `num_prefilled` on, behind those of its request."""
        self._requests.setdefault(sequence.request.id, deque()).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a queued sequence; KeyError or ValueError if it is not queued."""
        sequences = self._requests[sequence.request.id]
        sequences.remove(sequence)
        if not sequences:
            del self._requests[sequence.request.id]
            self._rests.pop(sequence.request.id, None)

    def take(self, limit: int | None = None) -> list[Row]:
        """Return the rows of the next plan and forget the sequences they complete.

        They feed at most `budget` tokens together, and at most `limit`, or a chunk, where that is less.
        """
        fed_before: dict[Sequence, int] = {}
        paused: list[Sequence] = []
        left, scored_left = min(self.budget, max(limit or self.budget, self._chunk)), SCORED_TOKENS
        whole, turn = left, max(self._chunk, left // 4 // self._chunk * self._chunk)
        passed_over: list[tuple[str, deque[Sequence]]] = []  # scored ones that wait for the next plan
        while self._requests:
            request_id, sequences = self._requests.popitem(last=False)
            scored = sequences[0].request.prompt_logprobs is not None
            width = sequences[0].request.width  # a token of its prompts is fed so many times
            chunk = max(1, min(self._chunk, whole // width))
            longest = max(turn, chunk * width)
            rest = min(self._rests.pop(request_id, longest), longest)
            num_paused = len(paused)
            limit = min(rest, left, scored_left if scored else left) // width
            spent = width * self._take_turn(sequences, limit, chunk, fed_before, paused)
            goes_on = rest - spent >= chunk * width and (bool(sequences) or len(paused) > num_paused)
            if goes_on:
                self._rests[request_id] = rest - spent
            if scored and not spent and left >= self._chunk:
                passed_over.append((request_id, sequences))
                continue
            if sequences:
                self._requests[request_id] = sequences
                if goes_on:
                    self._requests.move_to_end(request_id, last=False)
                if not spent:
                    break
            left -= spent
            scored_left -= spent if scored else 0
        self._put_back(passed_over, paused)
        return [_prompt_row(sequence, start) for sequence, start in fed_before.items()]

    def _put_back(self, passed_over: list[tuple[str, deque[Sequence]]], paused: list[Sequence]) -> None:
        """Queue again who waits for the next plan."""
        for request_id, sequences in reversed(passed_over):
            self._requests[request_id] = sequences
            self._requests.move_to_end(request_id, last=False)
        for sequence in reversed(paused):
            self._requests.setdefault(sequence.request.id, deque()).appendleft(sequence)
            if sequence.request.id in self._rests:
                self._requests.move_to_end(sequence.request.id, last=False)

    def _take_turn(
        self, sequences: deque[Sequence], limit: int, chunk: int, fed_before: dict[Sequence, int], paused: list[Sequence]
    ) -> int:
        """Feed `sequences` up to `limit` tokens; return how many it were. Those that are complete or may not begin are dropped,
        those that have come to a cut are moved to `paused`."""
        left = limit
        while sequences:
            sequence = sequences[0]
            if sequence.num_prefilled == sequence.cached and not self._may_begin(sequence):
                sequences.popleft()
                continue
            end = sequence.cuts[0] if sequence.cuts else len(sequence.prompt)
            rest = end - sequence.num_prefilled
            num_tokens = rest if rest <= left else left // chunk * chunk
            if not num_tokens:
                break
            fed_before.setdefault(sequence, sequence.num_prefilled)
            sequence.num_prefilled += num_tokens
            left -= num_tokens
            if num_tokens == rest:
                sequences.popleft()
                if end < len(sequence.prompt):
                    paused.append(sequence)
        return limit - left


def _prompt_row(sequence: Sequence, start: int) -> Row:
    """Return the row that feeds the prompt from `start` to `num_prefilled`."""
    complete = sequence.num_prefilled == len(sequence.prompt)
    return Row(
        sequence=sequence,
        ids=sequence.prompt[start : sequence.num_prefilled],
        sample=complete and sequence.request.max_tokens > 0 and not sequence.finalizing,
        start=start == sequence.cached and not (sequence.finalizing or sequence.resumed),
    )
