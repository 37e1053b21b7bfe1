"""Slots, model and sampler: the one place that steps the model.

`submit` starts a step and returns at once where the device allows; `read` waits for its ids. Sampled ids stay on the device
as the next step's input, so a caller may submit the next step before it has seen them. Knows nothing of text or requests' ends.
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple

import torch

from rwkv_batch.engine import logprobs, memory
from rwkv_batch.engine.decode_graphs import DecodeGraphs
from rwkv_batch.engine.logprobs import Scoring, is_scored
from rwkv_batch.engine.prefill_graphs import PrefillGraphs
from rwkv_batch.engine.staging import MaskStaging, on_host
from rwkv_batch.engine.token_mask import take_masks
from rwkv_batch.errors import Unavailable
from rwkv_batch.model.adapters.bank import AdapterBank
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import Snapshot, State, Together
from rwkv_batch.request import Sequence, TokenLogprob
from rwkv_batch.scheduling.plan import Plan, Row
from sampling.base import Sampled, Sampler
from sampling.mixture import Mixture, mix_logits

READBACKS = 8  # readings of ids that may be on their way to the host: of two steps, two of each


class Token(NamedTuple):
    """What one step sampled for one sequence; `id` is None when the row's logits were not finite."""

    sequence: Sequence
    id: int | None
    logprobs: TokenLogprob | None = None  # for rows that asked


class Way(NamedTuple):
    """How steps run: the model, and what was captured of it."""

    model: Model
    graphs: DecodeGraphs | None = None
    prefills: PrefillGraphs | None = None


class Steady(NamedTuple):
    """A captured decode step that may come again as it was: the rows of its plan, how it ran, and what was made of them.

    reports  whether some ask for log-probabilities
    """

    planned: list[Row] | None
    way: Way
    slots: list[int]
    sequences: list[Sequence]
    reports: bool = False


@dataclass
class Step:
    """A submitted step: the sequences sampled, and what for: on the device, or on its way to the host until `arrived`.

    scoring  the prompt tokens that the step scores, if any
    early    what was sampled in front of the step, if anything, for which one need not wait until the step ends
    """

    sequences: list[Sequence]
    sampled: Sampled | None
    arrived: torch.cuda.Event | None = None
    scoring: Scoring | None = None
    early: "Step | None" = None


class Engine:
    """`num_slots` sequences in flight on one device.

    state     the state arrays, whose number of slots is the engine's
    graphs    captured decode steps; None = every step is launched kernel by kernel
    prefills  captured prefill steps; None = likewise
    bank      adapters that single rows may have; None = none
    adapted   how steps run in which a row has one
    readbacks  readings of ids that may be on their way to the host
    """

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        state: State,
        graphs: DecodeGraphs | None = None,
        prefills: PrefillGraphs | None = None,
        *,
        bank: AdapterBank | None = None,
        adapted: Way | None = None,
        readbacks: int = READBACKS,
    ):
        self.model = model
        self.sampler = sampler
        self.state = state
        self.graphs = graphs
        self.prefills = prefills
        self.bank = bank
        self.adapted = adapted
        self._way = Way(model, graphs, prefills)  # of the step that is being submitted
        self._steady = Steady(None, self._way, [], [])
        self.device = model.weights.device
        start = model.weights.start
        self._begin = state.snapshot_of(start) if start is not None else None  # what rows without a state begin with
        self.num_eager_decodes = 0
        self._thread = 0
        self._decode_rows = PackedRows([], [])  # of the last step if that was all decode: most steps repeat their slots
        self._send_masks = MaskStaging(sampler.masks).send if self.device.type == "cuda" else sampler.masks.put
        self._kept: torch.Tensor | None = None  # logits [S, U] of rows that sample in front of their next step
        self._readback = _Readback(state.num_slots, self.device, readbacks) if self.device.type == "cuda" else None

    @torch.inference_mode()
    def submit(self, plan: Plan) -> Step:
        """Start one step: feed every row of the plan, sample those that ask for it."""
        if self._thread != threading.get_ident():  # kernels go to the device that is current in the thread
            self._thread = threading.get_ident()
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
        if plan.plain and not self.sampler.masks.masked and (steady := self._steady_of(plan.rows)).way.graphs is not None:
            return self._replay_steady(steady)
        rows = plan.rows if not plan.mixes else [part for row in plan.rows for part in with_followers(row)]
        rows = sorted(rows, key=_slot)  # neighbouring slots are worked on in place
        starting = [row.sequence for row in rows if row.start]
        if starting:
            self._start(starting)
        if plan.masked or self.sampler.masks.masked:
            self._send_masks(take_masks(row.sequence for row in rows if row.sample or row.draws))
        for row in rows:
            if row.sequence.forced and row.ids:
                self.sampler.count(row.sequence.slot, row.sequence.forced)
                row.sequence.forced = []
        early = self._draw([row for row in rows if row.draws])
        step = self._run(rows)
        step.early = early
        return step

    def _steady_of(self, planned: list[Row]) -> Steady:
        """What is made of the rows of a plan that only decode; the same as before where the rows are."""
        if planned is not self._steady.planned:
            sequences = sorted((row.sequence for row in planned), key=attrgetter("slot"))
            slots = [sequence.slot for sequence in sequences]
            reports = any(self.sampler.needs[slot].logprobs is not None for slot in slots)
            self._steady = Steady(planned, self._way_of(sequences), slots, sequences, reports)
        return self._steady

    def _way_of(self, sequences: list[Sequence]) -> Way:
        adapted = self.bank is not None and any(sequence.adapter is not None for sequence in sequences)
        return self.adapted if adapted else Way(self.model, self.graphs, self.prefills)

    def _draw(self, rows: list[Row]) -> Step | None:
        """Sample rows from the logits that were kept of them."""
        if not rows:
            return None
        slots = [row.sequence.slot for row in rows]
        slot_tensor = torch.tensor(slots).to(self.device, non_blocking=True)
        mixture = mixture_of([row.sequence for row in rows], self.device)
        kept = mix_logits(self._kept, *mixture) if mixture is not None else self._kept.index_select(0, slot_tensor)
        logits = kept[:, : len(self.sampler.ids)]
        sampled = self.sampler.sample(logits, slot_tensor, slots)
        if mixture is not None:
            self.state.last_ids[mixture.slots] = sampled.ids[:, None].expand_as(mixture.slots)
        else:
            self.state.last_ids[slot_tensor] = sampled.ids
        return self._step([row.sequence for row in rows], sampled)

    def _keep(self, rows: list[Row], logits: torch.Tensor) -> None:
        """Keep the logits [B, U] of rows until they are sampled."""
        num_columns = logits.shape[1]
        if self._kept is None:  # lines of whole 32 bytes, which samplers read faster
            self._kept = torch.empty(self.state.num_slots, -(-num_columns // 16) * 16, dtype=logits.dtype, device=self.device)
        slots = torch.tensor([row.sequence.slot for row in rows]).to(self.device, non_blocking=True)
        self._kept[:, :num_columns].index_copy_(0, slots, logits)

    def _run(self, rows: list[Row]) -> Step:
        decoding = not any(row.ids for row in rows)
        self._way = self._way_of([row.sequence for row in rows])
        if decoding and self._way.graphs is not None:
            return self._replay(rows)
        if self._is_captured(rows):
            return self._replay_prefill(rows)
        self.num_eager_decodes += decoding
        packed = self._pack(rows)
        sampling = [i for i, row in enumerate(rows) if row.sample]
        keeping = [i for i, row in enumerate(rows) if row.keeps]
        all_sample = len(sampling) == len(rows)
        scoring = Scoring(rows) if any(is_scored(row) for row in rows) else None
        logits_of = None
        if not all_sample or scoring is not None:
            logits_of = packed.tensor([packed.cu_seqlens[i + 1] - 1 for i in sampling + keeping])
        if scoring is not None:
            logits_of = torch.cat((logits_of, torch.tensor(scoring.positions, dtype=torch.int64, device=self.device)))
        tokens = None if decoding else self._tokens(rows, packed)
        logits = self._way.model.forward(tokens, packed, self.state, logits_of=logits_of)
        if scoring is not None:
            scoring.take(logits[len(sampling) + len(keeping) :], self.sampler.ids)
        if keeping:
            self._keep([rows[i] for i in keeping], logits[len(sampling) : len(sampling) + len(keeping)])
        logits = logits[: len(sampling)]
        if not sampling:
            return self._unsampled(scoring)
        slots = packed.slots if all_sample else [packed.slots[i] for i in sampling]
        slot_tensor = packed.slot_tensor if all_sample else packed.tensor(slots)
        sampled = self.sampler.sample(logits, slot_tensor, slots)
        self.state.last_ids[slot_tensor] = sampled.ids
        step = self._step([rows[i].sequence for i in sampling], sampled)
        step.scoring = scoring
        return step

    def read(self, step: Step) -> Iterable[tuple[Sequence, int | None, TokenLogprob | None]]:
        """Wait for a step and give what `Token` has of each of its rows; also for a step without rows, or the host would run
        far ahead of the device. It is to be looked at once: most steps make no object for each row."""
        if step.arrived is not None:
            step.arrived.synchronize()
        if step.sampled is None:
            return ()
        ids, finite = step.sampled.ids.tolist(), step.sampled.finite
        if step.sampled.logprobs is not None:
            rows = zip(step.sequences, ids, finite.tolist(), logprobs.of_sampled(step.sampled, step.sequences), strict=True)
            return [(sequence, id, report) if ok else (sequence, None, None) for sequence, id, ok, report in rows]
        known = finite.tolist()  # an operation of torch would let go of the interpreter's lock, and wait to have it again
        if False in known:
            ids = [id if ok else None for id, ok in zip(ids, known, strict=True)]
        return zip(step.sequences, ids, repeat(None, len(ids)), strict=True)

    def collect(self, step: Step) -> list[Token]:
        """The same as a list."""
        return [Token(*row) for row in self.read(step)]

    def stats(self) -> dict[str, int]:
        """Memory held; steps so far that ran as captured graphs, and decode steps launched operation by operation."""
        ways = [way for way in (self, self.adapted) if way is not None]
        return {
            "graph_steps_total": sum(way.graphs.num_replays for way in ways if way.graphs is not None),
            "graph_prefill_steps_total": sum(way.prefills.num_replays for way in ways if way.prefills is not None),
            "eager_decode_steps_total": self.num_eager_decodes,
            **memory.in_use(self.device),
        }

    def take(self, slot: int) -> Snapshot:
        """Return a copy of a slot's state after all steps submitted so far; Unavailable when there is no memory for it."""
        return self.take_many([slot])[0]

    def take_of(self, sequence: Sequence) -> Snapshot | Together:
        """Return a copy of a sequence's state, and of its followers' if it has any; Unavailable as `take`."""
        if not sequence.followers:
            return self.take(sequence.slot)
        return Together(tuple(self.take_many([part.slot for part in (sequence, *sequence.followers)])))

    @torch.inference_mode()
    def take_many(self, slots: list[int]) -> list[Snapshot]:
        """Return a copy of each slot's state as `take` does, all or none."""
        try:
            return self.state.take_many(slots)
        except torch.OutOfMemoryError:
            raise Unavailable("the device has no memory left for another state", code="out_of_memory") from None

    @torch.inference_mode()
    def put(self, slot: int, snapshot: Snapshot) -> None:
        """Overwrite a slot's state after all steps submitted so far."""
        self.state.put(slot, snapshot)

    def _replay(self, rows: list[Row]) -> Step:
        """Decode one token for each row; those that do not sample keep their logits."""
        rows.sort(key=lambda row: row.keeps)
        sampling, keeping = [row for row in rows if row.sample], [row for row in rows if row.keeps]
        sampled, logits = self._way.graphs.replay([row.sequence.slot for row in rows], len(sampling))
        if keeping:
            self._keep(keeping, logits[len(sampling) :])
        return self._replayed(sampling, sampled, logits[: len(sampling)]) if sampling else self._unsampled()

    def _replay_steady(self, steady: Steady) -> Step:
        """Decode and sample one token for each row."""
        self._way = steady.way
        sampled, logits = self._way.graphs.replay(steady.slots)
        if steady.reports:
            sampled = self._reported(steady.slots, sampled, logits)
        return self._step(steady.sequences, sampled)

    def _reported(self, slots: list[int], sampled: Sampled, logits: torch.Tensor) -> Sampled:
        slot_tensor = torch.tensor(slots).to(self.device, non_blocking=True)
        return self.sampler.report_logprobs(sampled, logits, slot_tensor, [self.sampler.needs[slot] for slot in slots])

    def _is_captured(self, rows: list[Row]) -> bool:
        """Whether there is a graph of a prefill step that can feed these rows."""
        prefills = self._way.prefills
        if prefills is None or not prefills.fits(sum(len(row.ids) for row in rows), len(rows)):
            return False
        return all(row.ids and not row.keeps and not is_scored(row) for row in rows)

    def _replay_prefill(self, rows: list[Row]) -> Step:
        """Feed each row its ids, and sample those that ask for it."""
        rows.sort(key=lambda row: not row.sample)
        sampling = [row for row in rows if row.sample]
        slots = [row.sequence.slot for row in rows]
        sampled, logits = self._way.prefills.replay(slots, [row.ids for row in rows], len(sampling))
        return self._replayed(sampling, sampled, logits) if sampling else self._unsampled()

    def _replayed(self, rows: list[Row], sampled: Sampled, logits: torch.Tensor) -> Step:
        slots = [row.sequence.slot for row in rows]
        if any(self.sampler.needs[slot].logprobs is not None for slot in slots):
            sampled = self._reported(slots, sampled, logits)
        return self._step([row.sequence for row in rows], sampled)

    def _step(self, sequences: list[Sequence], sampled: Sampled) -> Step:
        """Send what was sampled to the host where that is another place."""
        if self._readback is None:
            return Step(sequences, sampled)
        return Step(sequences, *self._readback.start(sampled))

    def _unsampled(self, scoring: Scoring | None = None) -> Step:
        """A step of which no ids come."""
        if self._readback is None:
            return Step([], None, scoring=scoring)
        done = torch.cuda.Event()
        done.record()
        return Step([], None, done, scoring)

    def _start(self, sequences: list[Sequence]) -> None:
        """Give slots to new sequences: their initial states, their controls."""
        for sequence in sequences:
            if isinstance(sequence.initial, Together):
                for part, initial in zip([sequence, *sequence.followers], sequence.initial.parts, strict=True):
                    part.initial = initial
        empty = [s.slot for s in sequences if s.initial is None]
        if self._begin is None:
            self.state.clear(empty)
        elif empty:
            self.state.put_many(empty, self._begin)
        starts: dict[Snapshot, list[int]] = {}  # many rows may start from one
        for sequence in sequences:
            if sequence.initial is not None:
                starts.setdefault(sequence.initial, []).append(sequence.slot)
                sequence.initial = None
        alone = {snapshot: slots[0] for snapshot, slots in starts.items() if len(slots) == 1}
        self.state.put_each([*alone.values()], [*alone])
        for snapshot, slots in starts.items():
            if len(slots) > 1:
                self.state.put_many(slots, snapshot)
        slots = [s.slot for s in sequences]
        if self.bank is not None:
            self.bank.assign(slots, [s.adapter for s in sequences])
        self.sampler.start_many(
            slots,
            [s.request.sampling for s in sequences],
            [s.index for s in sequences],
            [s.prompt for s in sequences],
        )

    def _pack(self, rows: list[Row]) -> PackedRows:
        slots = [row.sequence.slot for row in rows]
        lengths = [len(row.ids) or 1 for row in rows]
        known = self._decode_rows
        if known.slots == slots and known.lengths == lengths:
            return known
        packed = PackedRows(slots, lengths, self.device)
        if packed.is_decode:
            self._decode_rows = packed
        return packed

    def _tokens(self, rows: list[Row], packed: PackedRows) -> torch.Tensor:
        """Return the ids to feed [N]: those of prompts, and of the other rows what was sampled last."""
        tokens = on_host([id for row in rows for id in row.ids or (0,)]).to(self.device)
        decoding = [b for b, row in enumerate(rows) if not row.ids]
        if decoding:
            tokens[packed.first_token_index[decoding]] = self.state.last_ids[packed.slot_tensor[decoding]]
        return tokens


class _Readback:
    """Pinned places for what steps sampled: copies run while the host goes on, and never wait for a step after theirs.

    A step's ids are to be read before `num_places` more readings begin.
    """

    def __init__(self, num_rows: int, device: torch.device, num_places: int = READBACKS):
        pinned = device.type == "cuda"
        ids = torch.empty(num_places, num_rows, dtype=torch.int64, pin_memory=pinned)
        finite = torch.empty(num_places, num_rows, dtype=torch.bool, pin_memory=pinned)
        self._places = list(zip(ids, finite, strict=True))
        self._next = 0

    def start(self, sampled: Sampled) -> tuple[Sampled, torch.cuda.Event]:
        """Begin to copy; the result may be read once the event has come."""
        ids, finite = (place[: len(sampled.ids)] for place in self._places[self._next])
        self._next = (self._next + 1) % len(self._places)
        ids.copy_(sampled.ids, non_blocking=True)
        finite.copy_(sampled.finite, non_blocking=True)
        rest = (None if t is None else t.to("cpu", non_blocking=True) for t in sampled[2:])
        arrived = torch.cuda.Event()
        copied = Sampled(ids, finite, *rest)
        arrived.record()
        return copied, arrived


def with_followers(row: Row) -> Iterator[Row]:
    """Yield a row and those of its followers, which are fed the same and sample nothing themselves."""
    yield row
    for follower in row.sequence.followers:
        yield Row(follower, ids=row.ids, sample=False, start=row.start, keeps=row.keeps)


def mixture_of(sequences: list[Sequence], device: torch.device) -> Mixture | None:
    """Return whose logits are mixed for each of these rows, None where each has its own."""
    width = max(1 + len(sequence.followers) for sequence in sequences)
    if width == 1:
        return None
    slots, weights = [], []
    for sequence in sequences:
        own = [sequence.slot, *(follower.slot for follower in sequence.followers)]
        given = sequence.request.weights if sequence.followers else [1.0]
        padding = width - len(own)
        slots.append(own + own[:1] * padding)
        weights.append([weight / sum(given) for weight in given] + [0.0] * padding)
    return Mixture(
        torch.tensor(slots).to(device, non_blocking=True),
        torch.tensor(weights, dtype=torch.float32).to(device, non_blocking=True),
    )


def _slot(row: Row) -> int:
    return row.sequence.slot
