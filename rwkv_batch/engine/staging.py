"""Arrays on their way from the host to a fixed place on the device, where a captured graph reads them.

The host runs ahead of the device, and a copy out of pinned memory begins only when the device comes to it: until then nobody
may write there. Every memory that steps use again, and what guards it:

    inputs of captured steps        `Staging`: an event behind each buffer's copy, waited for before the buffer is written again
    masks of tokens                 `MaskStaging`: likewise
    fixed places on the device      the order of one stream: a copy to them waits for the step before, a copy from them goes
                                    before the next step
    ids on their way to the host    `Engine.read`: they are read before the step after the next is submitted, and there are
                                    READBACKS places
    log-probabilities to the host   fresh pinned memory from torch, which is not given out again while a copy uses it
    controls, uncaptured inputs     pageable memory: CUDA has read it when the copy is submitted
    slots to fill                   by value with the launch; those to flush: pageable memory
    snapshots from the host         never changed; torch keeps pinned memory that was let go until its copies are done
    snapshots on the device         never changed; `Copies.wait` tells the allocator of the stream that reads them
    snapshots to the host           `Copies.to_host` waits for the copy
"""

from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sampling.masks import SlotMasks

BUFFERS = 4  # arrays that may be on their way
MASK_BUFFERS = 2  # sets of masks likewise: when a third is sent, the first one's step has been read


def on_host(values: Sequence[int]) -> Tensor:
    """Return numbers as int64, in a tenth of the time that torch.tensor takes for thousands of them."""
    return torch.frombuffer(array("q", values), dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)


class Staging:
    """Pinned buffers of `length` int64 that take turns."""

    def __init__(self, length: int, device: torch.device):
        self._buffers = torch.zeros(BUFFERS, length, dtype=torch.int64, pin_memory=device.type == "cuda").unbind()
        self._copied = [torch.cuda.Event() for _ in self._buffers]
        self._next = 0

    def send(self, values: Sequence[int], target: Tensor) -> None:
        """Begin to copy `values` to the first places of `target`; waits only while all buffers are on their way."""
        buffer, copied, length = self._buffers[self._next], self._copied[self._next], len(values)
        self._next = (self._next + 1) % BUFFERS
        copied.synchronize()  # at once where it was never recorded
        buffer[:length] = on_host(values)
        target[:length].copy_(buffer[:length], non_blocking=True)
        copied.record()


class MaskStaging:
    """Pinned buffers that take turns, each as large as the masks of all slots."""

    def __init__(self, masks: SlotMasks):
        self._masks = masks
        length, pinned = len(masks.memory), masks.memory.is_cuda
        self._buffers = [torch.empty(length, dtype=torch.int32, pin_memory=pinned) for _ in range(MASK_BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in self._buffers]
        self._next = 0

    def send(self, masks: Mapping[int, Tensor]) -> None:
        """Begin to copy masks by slot to their places; other slots have none. Waits only while all buffers are on their way."""
        buffer, copied = self._buffers[self._next], self._copied[self._next]
        self._next = (self._next + 1) % MASK_BUFFERS
        copied.synchronize()  # at once where it was never recorded
        self._masks.put(masks, buffer)
        copied.record()
