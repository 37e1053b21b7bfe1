"""What goes from one stage to the next: the residual stream and the values of layer 0, and back the ids that were sampled.

A stage's arrays are its next step's as soon as this one is done. So what is to go is copied to a place beside them, from there
to a place on the other device, and from there, in front of the other stage's step, into its arrays. Copies between devices run
on streams of their own, beside the steps of both. Places are used in turn; what guards them:

    a place of the source    its last copy to the target has been done (`arrived`) when it is filled again
    a place of the target    what lay there was taken (`taken`) when the next copy begins

On CPUs all is done in the order in which it is called.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

PLACES = 2  # for steps between two stages; more would not help, since a stage does one at a time


class Lane:
    """Arrays of up to `num_bytes` on their way from one device to another."""

    def __init__(self, source: torch.device, target: torch.device, num_bytes: int, num_places: int = PLACES):
        self.sent = 0  # messages
        self._source, self._target = source, target
        self._from = [torch.zeros(num_bytes, dtype=torch.uint8, device=source) for _ in range(num_places)]
        self._to = [torch.zeros(num_bytes, dtype=torch.uint8, device=target) for _ in range(num_places)]
        self._on_gpu = source.type == "cuda"
        if self._on_gpu:
            self._beside = torch.cuda.Stream(source), torch.cuda.Stream(target)
            self._filled, self._arrived, self._taken = ([torch.cuda.Event() for _ in range(num_places)] for _ in range(3))

    @property
    def num_places(self) -> int:
        """Messages that may be on their way."""
        return len(self._from)

    def fill(self) -> Tensor:
        """Return the array that the source's current stream is to fill before `send`."""
        place = self.sent % self.num_places
        if self._on_gpu:
            torch.cuda.current_stream(self._source).wait_event(self._arrived[place])  # at once where nothing was sent yet
        return self._from[place]

    def send(self, length: int) -> None:
        """Send the first `length` bytes of what was filled, behind what the source's current stream has to do."""
        place, self.sent = self.sent % self.num_places, self.sent + 1
        source, target = self._from[place][:length], self._to[place][:length]
        if not self._on_gpu:
            target.copy_(source)
            return
        ours, theirs = self._beside
        self._filled[place].record(torch.cuda.current_stream(self._source))
        with torch.cuda.stream(theirs), torch.cuda.stream(ours):  # torch's copy waits for the current streams of both devices
            ours.wait_event(self._filled[place])
            ours.wait_event(self._taken[place])
            target.copy_(source, non_blocking=True)
            self._arrived[place].record(ours)

    def receive(self, number: int) -> Tensor:
        """Return a message, one of the last `num_places`, for what the target's current stream does next."""
        place = number % self.num_places
        if self._on_gpu:
            torch.cuda.current_stream(self._target).wait_event(self._arrived[place])
        return self._to[place]

    def take(self, number: int) -> None:
        """What the target's current stream had to do with a message was submitted."""
        if self._on_gpu:
            self._taken[number % self.num_places].record(torch.cuda.current_stream(self._target))


class Hop:
    """The residual stream x [N, C] fp32 and `v_first` [N, C] of steps of `max_tokens` at most, from a stage to the next."""

    def __init__(self, source: torch.device, target: torch.device, max_tokens: int, width: int, dtype: torch.dtype):
        """`dtype`: of v_first."""
        self.num_bytes = max_tokens * width * (4 + dtype.itemsize)
        self._lane = Lane(source, target, self.num_bytes)
        self._received = 0

    def send(self, x: Tensor, y: Tensor, v_first: Tensor) -> None:
        """Send x + y, rounded as the next layer would, and `v_first`; called behind the step in the source's stream."""
        place = self._lane.fill()
        first, second = _views(place, x.shape, v_first.dtype)
        torch.add(x, y, out=first)
        second.copy_(v_first)
        self._lane.send(first.nbytes + second.nbytes)

    def receive(self, x: Tensor, v_first: Tensor) -> None:
        """Overwrite x and v_first with what comes next; called before the step in the target's stream."""
        first, second = _views(self._lane.receive(self._received), x.shape, v_first.dtype)
        x.copy_(first)
        v_first.copy_(second)
        self._lane.take(self._received)
        self._received += 1


class IdRelay:
    """Ids that the last stage has sampled on their way to the first, which feeds them.

    Every message has the ids of all slots, so a later one does for an earlier one.
    """

    def __init__(self, source: Tensor, target: Tensor, num_places: int):
        """`source`, `target`: [S] int64, the ids by slot of the last and the first stage."""
        self._source, self._target = source, target
        self._lane = Lane(source.device, target.device, source.nbytes, num_places)
        self._sampled = [-1] * len(source)  # by slot, the message that first had its last id
        self._taken = -1  # the last message that was taken

    def send(self, slots: Sequence[int]) -> None:
        """These slots have new ids; called behind their draw in the last stage's stream."""
        self._lane.fill().view(torch.int64).copy_(self._source)
        for slot in slots:
            self._sampled[slot] = self._lane.sent
        self._lane.send(self._source.nbytes)

    def receive(self, slots: Sequence[int]) -> None:
        """Have the last ids of these slots at the first stage; called before the step in its stream."""
        needed = max((self._sampled[slot] for slot in slots), default=-1)
        if needed <= self._taken:
            return
        number = max(needed, self._lane.sent - self._lane.num_places)
        self._target.copy_(self._lane.receive(number).view(torch.int64))
        self._lane.take(number)
        self._taken = number


def _views(place: Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the two arrays [N, C] that lie one behind the other in a place: fp32, and of `dtype`."""
    middle, end = shape.numel() * 4, shape.numel() * (4 + dtype.itemsize)
    return place[:middle].view(torch.float32).view(shape), place[middle:end].view(dtype).view(shape)
