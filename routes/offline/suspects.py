"""Which request it is that ends the engine, where several were in progress."""

import asyncio
import math
from collections import deque
from typing import NamedTuple


class _Suspect(NamedTuple):
    turn: asyncio.Future[bool]
    was_tried: bool


class Suspects:
    """Requests that were in progress when an engine was lost.

    They go again, and nothing else beside them, until one is alone with its fault. The first time they go in groups, as many as
    each group is large; a group that the engine is lost with again goes one by one. So three losses find one request among
    hundreds, and the others are answered meanwhile.
    """

    def __init__(self) -> None:
        self._lost: list[_Suspect] = []  # with the engine that ended last
        self._groups: deque[list[_Suspect]] = deque()  # that are still to go
        self._num_going = 0

    @property
    def are_left(self) -> bool:
        """Whether one waits or goes again, so that nothing else may begin."""
        return bool(self._num_going or len(self))

    def __len__(self) -> int:
        """How many wait."""
        return len(self._lost) + sum(map(len, self._groups))

    async def turn(self, *, was_tried: bool) -> bool:
        """Wait for one's turn to go again; returns whether one goes alone.

        was_tried  whether the engine was lost with it in a group
        """
        suspect = _Suspect(asyncio.get_running_loop().create_future(), was_tried)
        self._lost.append(suspect)
        return await suspect.turn

    def leave(self) -> None:
        """One whose turn it was is answered, or waits for another."""
        self._num_going -= 1

    def release(self, num_open: int) -> None:
        """Have the next group go, if all of the `num_open` requests in progress wait here."""
        if not len(self) or num_open > len(self):
            return
        lost, self._lost = self._lost, []
        size = 1 if any(suspect.was_tried for suspect in lost) else math.isqrt(len(lost))
        groups = [lost[start : start + size] for start in range(0, len(lost), max(size, 1))]
        self._groups.extendleft(reversed(groups))
        self._let_go(self._groups.popleft())

    def release_all(self) -> None:
        """Nobody is tried any more."""
        for group in (self._lost, *self._groups):
            self._let_go(group)
        self._lost = []
        self._groups.clear()

    def _let_go(self, group: list[_Suspect]) -> None:
        for suspect in group:
            if not suspect.turn.done():
                suspect.turn.set_result(len(group) == 1)
                self._num_going += 1
