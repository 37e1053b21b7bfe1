"""Who owns a slot, and what runs in the next step. Plain Python: no torch, no model, no text.

Requests queue in the order they came. The one in front starts what its loop allows: a wave of a sync batch if it fits, else one
row, and goes to the back while more of it may start. So a free slot never waits, and a request only for one turn of each other.

The last free slots are spare: only a request none of whose rows runs may take one. So one that has its rows in all other slots
does not make the next ones wait for their ends, however long they are: as many requests as there are spare slots, and one more,
always have a row in the next plan.
"""

from collections import deque
from dataclasses import replace

from rwkv_batch.request import Request, Sequence
from rwkv_batch.scheduling.continuous_batch import ContinuousBatch
from rwkv_batch.scheduling.groups import DecodingRows
from rwkv_batch.scheduling.pace import PrefillPace
from rwkv_batch.scheduling.plan import Batch, FreeSlots, Plan, PrefillQueue, Row
from rwkv_batch.scheduling.prefix_cache import PrefixCache
from rwkv_batch.scheduling.sync_batch import SyncBatch


class Scheduler:
    """Rows of all requests in `num_slots` slots.

    spare_slots     slots, of all, that only the first rows of requests may take
    prefill_budget  prompt tokens a plan may feed
    mixed           whether a plan may feed prompts and decode; if not, plans of the two kinds alternate while both have work
    busy_budget     the same of a plan while rows decode, whose next tokens wait for it; None = no less
    prefixes        states that rows may start from, None = each is fed from its first token
    late_draws      whether rows with masks sample in front of their next step instead of behind the last, so that the ids
                    can be read and masks be made while a step runs, and such rows need not sit out every other step
    pace            bounds by time what a plan may feed while rows decode, None = only by `busy_budget`
    num_groups      groups of rows that decode in turn; so many steps may be under way
    """

    def __init__(
        self,
        *,
        num_slots: int,
        spare_slots: int = 0,
        prefill_budget: int,
        mixed: bool,
        busy_budget: int | None = None,
        prefixes: PrefixCache | None = None,
        late_draws: bool = False,
        pace: PrefillPace | None = None,
        num_groups: int = 1,
    ):
        self.num_slots = num_slots
        self.spare_slots = spare_slots
        self.mixed = mixed
        self.busy_budget = busy_budget
        self.prefixes = prefixes
        self.late_draws = late_draws
        self.pace = pace
        self.num_groups = num_groups
        self._free = FreeSlots(num_slots)
        self._batches: dict[str, Batch] = {}  # every live request
        self._queue: deque[Batch] = deque()  # those that are ready to start rows
        self._changed = False  # whether something has changed since no more rows could start
        self._prompts = PrefillQueue(prefill_budget, self._may_begin)
        self._decoding = DecodingRows(num_groups)  # rows whose prompt is fed and that may still sample
        self._groups = 0  # bits of those that sample in the plan
        self._num_mixes = 0  # rows, of those that run, that have followers
        self._masked: set[Sequence] = set()  # rows, of those that run, that sample under a mask
        self._decoded_last = True

    @property
    def num_running(self) -> int:
        """Rows that own a slot."""
        return self.num_slots - len(self._free)

    @property
    def num_waiting(self) -> int:
        """Rows that have not started. Other threads may ask too, so the requests are listed in one go."""
        return sum(len(batch.waiting) for batch in list(self._batches.values()))

    @property
    def num_free(self) -> int:
        """Slots nobody owns."""
        return len(self._free)

    @property
    def awaits_masks(self) -> bool:
        """Whether rows could run in the next plan if their masks were ready."""
        if self._feeds_next or (self._changed and self._queue and self._free):
            return False
        rows = (self._decoding[sequence] for sequence in self._masked if sequence in self._decoding)
        return any(row.keeps == row.draws and not row.sequence.mask.ready() for row in rows)

    def add(self, request: Request) -> list[Sequence]:
        """Queue all rows of `request` and return them in order; ValueError if its id is live or a prompt is empty."""
        if request.id in self._batches:
            raise ValueError(f"request {request.id!r} is live already")
        if not all(request.prompts):
            raise ValueError(f"request {request.id!r} has an empty prompt")
        if request.width > min(self.num_slots, self._prompts.budget):
            raise ValueError(f"{request.width} states cannot be mixed in {self.num_slots} slots")
        sequences = [Sequence(request, index) for index in request.indices]
        if sequences:
            batch = (
                SyncBatch(sequences, max(1, (self.num_slots - self.spare_slots) // request.width))
                if request.loop == "sync"
                else ContinuousBatch(sequences)
            )
            self._batches[request.id] = batch
            self._queue.append(batch)
            self._changed = True
        return sequences

    def next_plan(self) -> Plan | None:
        """Start what may start and return the rows of the next step; None if there is nothing to run.

        Counts what it plans: `num_prefilled` and `num_sampled` are ahead of the device. A row is planned until `finish` or
        `cancel`, or until it has sampled `max_tokens` times; its slot is its own until then too.
        """
        if self._changed:
            self._start_rows()
        self._groups, plain = 0, False
        if self.mixed:
            rows = self._decode()  # before the prompts: a row decodes in the plan after the one that ends its prompt
            rows = rows + prompts if (prompts := self._feed_prompts()) else rows
        elif self._feeds_next:
            rows = self._feed_prompts()
            self._decoded_last = False
        else:
            rows = self._decode()
            plain = not (self._masked or self._num_mixes)
            self._decoded_last = True
            if self.pace is not None:
                self.pace.decoded()
        masked = bool(self._masked) and any((row.sample or row.draws) and row.sequence.mask is not None for row in rows)
        mixes = bool(self._num_mixes) and any(row.sequence.followers for row in rows)
        return Plan(rows, masked, mixes, self._groups, plain) if rows else None

    def resume(self, sequences: list[Sequence]) -> None:
        """Feed rows that waited for the state they start from, and have it now."""
        for sequence in sequences:
            self._prompts.add(sequence)

    def finish(self, sequence: Sequence, *, nonfinite: bool = False) -> None:
        """End a running row: its slot is free for the next plan. KeyError if it does not run.

        nonfinite  its numbers were not finite
        """
        request_id = sequence.request.id
        batch = self._batches[request_id]
        was_ready = batch.ready
        batch.running.remove(sequence)
        self._release(sequence, nonfinite=nonfinite)
        if batch.ready and not was_ready:
            self._queue.append(batch)
        elif not batch.running and not batch.waiting:
            del self._batches[request_id]

    def is_sooner_fed(self, sequence: Sequence, num_ids: int) -> bool:
        """Whether feeding a running row ids that it must say saves more than it costs the others.

        Where prompts have steps of their own, one more step feeds what the row would say in `num_ids`, and the others, which
        decode in all of those, sit out that one.
        """
        return self.mixed or num_ids > len(self._decoding)

    def feed_forced(self, sequence: Sequence, last: int, ids: list[int]) -> None:
        """Feed a running row `ids` as if it had sampled them behind the `last` one, and have it sample behind them.

        No draw of it is in a plan that was not read; the `last` id may have been fed, or be on its way.
        """
        is_fed = self._decoding.pop(sequence).draws
        sequence.resumed = True
        sequence.prompt, sequence.num_prefilled, sequence.cuts = ids if is_fed else [last, *ids], 0, []
        sequence.forced = ids
        sequence.num_sampled += len(ids)
        self._prompts.add(sequence)

    def finalize(self, sequence: Sequence, ids: list[int]) -> None:
        """Stop a running row and feed it `ids` without sampling; it keeps its slot until `finish`."""
        self._decoding.pop(sequence)
        sequence.finalizing = True
        sequence.prompt = ids
        sequence.num_prefilled = 0
        if ids:
            self._prompts.add(sequence)

    def cancel(self, request_id: str) -> list[Sequence]:
        """End all rows of a request and return those that had not ended, in order; none if the request is not live."""
        batch = self._batches.pop(request_id, None)
        if batch is None:
            return []
        if batch.ready:
            self._queue.remove(batch)
            self._changed = True
        for sequence in sorted(batch.running, key=lambda sequence: -sequence.index):  # those that wait for others first
            self._release(sequence)
        return sorted([*batch.running, *batch.waiting], key=lambda sequence: sequence.index)

    @property
    def _feeds_next(self) -> bool:
        """Whether the next plan feeds prompts and no row decodes in it."""
        if self.mixed or not self._prompts:
            return False
        if self._decoded_last or not self._decoding:
            return True
        return self.pace is not None and self.busy_budget is None and self.pace.goes_on

    def _start_rows(self) -> None:
        """Give free slots to the requests in the queue, each its turn."""
        passed_over: list[Batch] = []
        while self._queue and self._free:
            batch = self._queue.popleft()
            room = len(self._free) - self.spare_slots
            if room < batch.width and batch.running:
                passed_over.append(batch)
                continue
            if len(self._free) < batch.width:  # nobody takes what it waits for
                passed_over.append(batch)
                break
            for sequence in batch.start(max(room // batch.width, 1)):
                sequence.slot = self._free.take()
                for follower in sequence.followers:
                    follower.slot = self._free.take()
                self._num_mixes += bool(sequence.followers)
                self._admit(sequence)
            if batch.ready:
                self._queue.append(batch)
        self._queue.extendleft(reversed(passed_over))
        self._changed = False

    def _admit(self, sequence: Sequence) -> None:
        """Have a row fed that has its slot, now or when the state it starts from is there."""
        if self.prefixes is None or self.prefixes.start(sequence, self._prompts.is_next):
            self._prompts.add(sequence)

    def _may_begin(self, sequence: Sequence) -> bool:
        """Whether a row is to be fed now, from the best state there is, and need not wait for one that is being fed."""
        return self.prefixes is None or sequence.resumed or self.prefixes.begin(sequence, self._prompts.is_next)

    def _feed_prompts(self) -> list[Row]:
        """Return the next chunks of prompts; rows that sample with it decode from the next plan on."""
        rows = self._prompts.take(self._busy_limit() if self._decoding else None)
        if self.pace is not None:
            self.pace.fed(sum(len(row.ids) * row.sequence.request.width for row in rows), beside_decoding=bool(self._decoding))
        for row in rows:
            if row.sample and row.sequence.followers:
                row.sample, row.keeps = False, True
                if row.sequence.mask is not None:
                    self._masked.add(row.sequence)
                self._decoding[row.sequence] = Row(row.sequence, ids=[], sample=False, keeps=True, draws=True)
            elif row.sample:
                row.sequence.num_sampled += 1
                if row.sequence.mask is not None:
                    self._masked.add(row.sequence)
                if row.sequence.num_sampled < row.sequence.request.max_tokens:
                    late = self.late_draws and row.sequence.mask is not None
                    self._decoding[row.sequence] = Row(row.sequence, ids=[], sample=not late, keeps=late)
                    self._groups |= self._decoding.bit(row.sequence)
        return rows

    def _busy_limit(self) -> int | None:
        """Return how many prompt tokens a plan may feed while rows decode; None = as many as any plan."""
        if self.pace is None:
            return self.busy_budget
        allowance = self.pace.allowance
        return allowance if self.busy_budget is None else min(allowance, self.busy_budget)

    def _decode(self) -> list[Row]:
        """Return one row for every decoding sequence of the group whose turn it is, but for those whose mask is not ready.

        A group none of whose rows can run is passed over. The rows are the same objects in every plan, and so is the list
        while nothing changes, to save time.
        """
        rows: list[Row] = []
        for bit, rows in self._decoding.turns():
            if self._masked:
                rows = [row for row in rows if row.sequence.mask is None or row.keeps > row.draws or row.sequence.mask.ready()]
            if rows:
                self._groups |= bit
                break
        for row in rows:
            sequence = row.sequence
            if row.keeps > row.draws:  # its first: there is nothing to sample in front of it
                self._decoding[sequence] = replace(row, draws=True)
                continue
            sequence.num_sampled += 1
            if sequence.num_sampled == sequence.request.max_tokens:
                del self._decoding[sequence]
        return rows

    def _release(self, sequence: Sequence, *, nonfinite: bool = False) -> None:
        """Take the slot of a row that ended, and plan it no more."""
        waits = self.prefixes is not None and self.prefixes.waits(sequence)
        if sequence.num_prefilled < len(sequence.prompt) and not waits:
            self._prompts.remove(sequence)
        self._decoding.pop(sequence)
        self._masked.discard(sequence)
        self._free.give(sequence.slot)
        sequence.slot = -1
        self._num_mixes -= bool(sequence.followers)
        for follower in sequence.followers:
            self._free.give(follower.slot)
            follower.slot = -1
        self._changed = True
        for follower in self.prefixes.end(sequence, nonfinite=nonfinite) if self.prefixes is not None else ():
            self._admit(follower)
