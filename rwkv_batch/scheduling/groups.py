"""Rows that decode, in groups that take turns, so that several steps may be under way of which none waits for another's ids.

One group is all rows in every step. Plain Python: no torch, no model.
"""

from collections.abc import Iterator

from rwkv_batch.request import Sequence
from rwkv_batch.scheduling.plan import Row


class DecodingRows:
    """A row for each sequence that decodes. A sequence stays in the group that held the fewest slots when it came."""

    def __init__(self, num_groups: int = 1):
        self._groups: list[dict[Sequence, Row]] = [{} for _ in range(num_groups)]
        self._listed: list[list[Row] | None] = [None] * num_groups  # the rows of each group, until there are others
        self._slots = [0] * num_groups  # that the rows of each group have
        self._group_of: dict[Sequence, int] = {}
        self._next = 0  # whose turn it is

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._group_of

    def __getitem__(self, sequence: Sequence) -> Row:
        return self._groups[self._group_of[sequence]][sequence]

    def __setitem__(self, sequence: Sequence, row: Row) -> None:
        number = self._group_of.get(sequence)
        if number is None:
            number = self._group_of[sequence] = self._emptiest()
            self._slots[number] += sequence.request.width
        self._groups[number][sequence] = row
        self._listed[number] = None

    def __delitem__(self, sequence: Sequence) -> None:
        number = self._group_of.pop(sequence)
        self._slots[number] -= sequence.request.width
        del self._groups[number][sequence]
        self._listed[number] = None

    def pop(self, sequence: Sequence) -> Row | None:
        """Forget a sequence and return its row, None where it has none."""
        if sequence not in self:
            return None
        row = self[sequence]
        del self[sequence]
        return row

    def bit(self, sequence: Sequence) -> int:
        """The number of the group of a sequence, as a bit."""
        return 1 << self._group_of[sequence]

    def turns(self) -> Iterator[tuple[int, list[Row]]]:
        """Yield the number, as a bit, and the rows of each group that has some, the one whose turn it is first.

        The turn has passed to the next one when it is yielded. While the rows of a group are the same, so is the list, which is
        not to be changed.
        """
        count = len(self._groups)
        for number in [(self._next + i) % count for i in range(count)]:
            if self._groups[number]:
                self._next = (number + 1) % count
                rows = self._listed[number]
                if rows is None:
                    rows = self._listed[number] = list(self._groups[number].values())
                yield 1 << number, rows

    def _emptiest(self) -> int:
        """The group with the fewest slots; of equals the one whose turn is last: a row that comes need not wait for its ids."""
        count = len(self._groups)
        return min(range(count), key=lambda number: (self._slots[number], -((number - self._next) % count)))
