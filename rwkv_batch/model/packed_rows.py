"""Rows of different lengths packed one after another into one step, without padding."""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch

CHUNK = 32  # tokens a chunk; decays of half a chunk stay above e^-9.7, so both factors of a decay ratio fit into fp32
CONTINUES = -1  # in RowLayout.previous_slot: the token before is in this step
NO_SLOT = -2  # there too: there is no token before


@dataclass
class PackedRows:
    """Which tokens of a step belong to which slot, as far as the host knows.

    slots    B distinct slots
    lengths  tokens of each row, all >= 1; their sum is N
    """

    slots: list[int]
    lengths: list[int]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_captured: ClassVar[bool] = False

    @cached_property
    def is_decode(self) -> bool:
        """Whether every row is one token long."""
        return len(self.lengths) == sum(self.lengths)

    @cached_property
    def cu_seqlens(self) -> list[int]:
        """[B+1]: row b owns tokens cu_seqlens[b] to cu_seqlens[b+1] - 1."""
        return [0, *itertools.accumulate(self.lengths)]

    @cached_property
    def layout(self) -> "RowLayout":
        """The same for kernels."""
        return RowLayout.of(self.slots, self.lengths, self.device)

    @cached_property
    def first_token_index(self) -> torch.Tensor:
        """[B] int64: position of each row's first token."""
        return self.tensor(self.cu_seqlens[:-1])

    @cached_property
    def last_token_index(self) -> torch.Tensor:
        """[B] int64: position of each row's last token."""
        return self.tensor([start - 1 for start in self.cu_seqlens[1:]])

    @cached_property
    def slot_tensor(self) -> torch.Tensor:
        """[B] int64."""
        return self.tensor(self.slots)

    @cached_property
    def slot_index(self) -> torch.Tensor | slice:
        """[B] int64, or a slice when the slots follow one another: then the state is worked on without a copy."""
        return _slice_of(self.slots) or self.slot_tensor

    @cached_property
    def single(self) -> list[int]:
        """Rows of one token: their wkv takes the one-step form."""
        return [b for b, length in enumerate(self.lengths) if length == 1]

    @cached_property
    def single_at(self) -> tuple[torch.Tensor, torch.Tensor | slice]:
        """Positions and slots of the rows of one token."""
        at = self.tensor([self.cu_seqlens[b] for b in self.single])
        slots = [self.slots[b] for b in self.single]
        return at, _slice_of(slots) or self.tensor(slots)

    @cached_property
    def chunks(self) -> "Chunks":
        """The chunks of all rows longer than one token."""
        return Chunks.of(self)

    def tensor(self, values: list[int]) -> torch.Tensor:
        """Return int64 numbers on the rows' device; the host does not wait for what that has to do before."""
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)


class CapturedRows:
    """Rows of a captured step, which only the device knows: whoever replays it says how they are filled and counts the tokens.

    is_decode         whether every row is one token long
    slot_tensor       [B] int64, -1 = no row
    last_token_index  [B] int64, of a prefill step
    layout            of a prefill step
    """

    slots = lengths = ()  # what the host knows
    is_captured = True

    def __init__(self, slot_tensor: torch.Tensor, layout: "RowLayout | None", last_token_index: torch.Tensor | None):
        self.slot_tensor = slot_tensor
        self.layout = layout
        self.last_token_index = last_token_index
        self.is_decode = layout is None

    @classmethod
    def decode(cls, slots: torch.Tensor) -> "CapturedRows":
        """One token for each slot of a tensor [B] int64."""
        return cls(slots, None, None)

    @classmethod
    def prefill(cls, layout: "RowLayout", last_token_index: torch.Tensor) -> "CapturedRows":
        """Rows of any lengths."""
        return cls(layout.slots, layout, last_token_index)


@dataclass(frozen=True)
class RowLayout:
    """Where the rows of a prefill step lie, on the device.

    slots             [B] int64, distinct, -1 for a row whose state is not kept
    cu_seqlens        [B+1] int32: row b owns tokens cu_seqlens[b] to cu_seqlens[b+1] - 1
    last_token_index  [B] int32: position of each row's last token
    previous_slot     [N] int32: for a row's first token its slot, or -2 when it has none; -1 for the others
    """

    slots: torch.Tensor
    cu_seqlens: torch.Tensor
    last_token_index: torch.Tensor
    previous_slot: torch.Tensor

    @classmethod
    def of(cls, slots: Sequence[int], lengths: Sequence[int], device: torch.device | str) -> "RowLayout":
        """Build it from each row's slot and length (>= 1) with one copy to the device, which the host does not wait for."""
        cu_seqlens, previous_slot = [0], array("q")  # no list of numbers for all tokens: the device may be waiting
        for slot, length in zip(slots, lengths, strict=True):
            cu_seqlens.append(cu_seqlens[-1] + length)
            previous_slot.append(slot if slot >= 0 else NO_SLOT)
            previous_slot.extend(array("q", [CONTINUES]) * (length - 1))
        last_token_index = [start - 1 for start in cu_seqlens[1:]]
        packed = array("q", [*slots, *cu_seqlens, *last_token_index]) + previous_slot
        packed = torch.frombuffer(packed, dtype=torch.int64).to(device, non_blocking=True)
        small = packed[len(slots) :].int()
        return cls(packed[: len(slots)], *small.split([len(cu_seqlens), len(slots), len(previous_slot)]))


StepRows = PackedRows | CapturedRows  # what a step is told of its rows


@dataclass
class Chunks:
    """Rows of more than one token, cut into chunks of CHUNK tokens, the last one padded.

    slots    [R] int64 of these rows, the longest row first
    index    [M, CHUNK] int64: chunk m's tokens as positions among the N (padding: 0); ordered by number of the chunk within
             its row, then by row as in `slots`
    padding  [M, CHUNK] bool, None when there is none
    in_order whether the chunks follow one another as the tokens do, so that nothing need be gathered
    counts   counts[c] rows have a chunk number c
    """

    slots: torch.Tensor
    index: torch.Tensor
    padding: torch.Tensor | None
    in_order: bool
    counts: list[int]

    @classmethod
    def of(cls, rows: PackedRows) -> "Chunks":
        """Cut the rows that are long enough; there must be one."""
        order = sorted((b for b, n in enumerate(rows.lengths) if n > 1), key=lambda b: -rows.lengths[b])
        starts, ends, counts = [], [], []
        for offset in range(0, rows.lengths[order[0]], CHUNK):
            live = [b for b in order if rows.lengths[b] > offset]
            counts.append(len(live))
            starts += [rows.cu_seqlens[b] + offset for b in live]
            ends += [rows.cu_seqlens[b + 1] for b in live]
        index = rows.tensor(starts)[:, None] + torch.arange(CHUNK, device=rows.device)
        padding = index >= rows.tensor(ends)[:, None]
        padded = any(length % CHUNK for length in rows.lengths if length > 1)
        slots = rows.tensor([rows.slots[b] for b in order])
        in_order = len(rows.lengths) == 1 and not padded
        return cls(slots, index.masked_fill_(padding, 0), padding if padded else None, in_order, counts)


def _slice_of(slots: list[int]) -> slice | None:
    """Return the slice that selects `slots`, if they follow one another."""
    end = slots[0] + len(slots)
    return slice(slots[0], end) if slots == list(range(slots[0], end)) else None
