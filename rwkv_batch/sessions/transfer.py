"""Moves snapshots between the device and the host, beside the steps."""

import math
from contextlib import ExitStack
from typing import NamedTuple

import torch

from rwkv_batch.model.state import Snapshot


class Mark(NamedTuple):
    """An event, and the stream on which it stands behind a copy."""

    event: torch.cuda.Event
    stream: int


class Copies:
    """Moves snapshots between device and host on a stream of its own; a CPU needs no copies."""

    def __init__(self, device: torch.device):
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.on_gpu else None

    def mark(self) -> Mark | None:
        """Return an event behind all that the calling thread has submitted so far."""
        return _mark(torch.cuda.current_stream(self.device)) if self.on_gpu else None

    def wait(self, snapshot: Snapshot, mark: Mark | None) -> None:
        """Make the calling thread's stream wait until `snapshot` has arrived, and keep its memory until that stream is done."""
        if mark is None:
            return
        stream = torch.cuda.current_stream(self.device)
        if stream.cuda_stream != mark.stream:  # else it is behind the copy as it is, and its memory is that stream's
            stream.wait_event(mark.event)
            for tensor in (snapshot.shift, snapshot.wkv):
                if tensor.is_cuda:
                    tensor.record_stream(stream)

    def to_device(self, snapshot: Snapshot) -> tuple[Snapshot, Mark | None]:
        """Begin to copy a snapshot to the device; the mark says when it is there. Does not wait."""
        if not self.on_gpu or snapshot.wkv.is_cuda:
            return snapshot, None
        with torch.cuda.stream(self._stream):
            shift, wkv = (tensor.to(self.device, non_blocking=True) for tensor in (snapshot.shift, snapshot.wkv))
        return Snapshot(shift, wkv, snapshot.elapsed), _mark(self._stream)

    def to_host(self, snapshot: Snapshot, mark: Mark | None) -> Snapshot:
        """Return a copy in page-locked host memory; waits for it."""
        if not snapshot.wkv.is_cuda:
            return snapshot
        with torch.cuda.stream(self._stream):
            if mark is not None:
                self._stream.wait_event(mark.event)
            shift, wkv = (
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in (snapshot.shift, snapshot.wkv)
            )
            done = torch.cuda.Event(blocking=True)  # this thread sleeps meanwhile
            done.record()
        done.synchronize()
        return Snapshot(shift, wkv, snapshot.elapsed)

    def is_finite(self, snapshot: Snapshot, mark: Mark | None) -> bool:
        """Whether no value is NaN or infinite: a sum with one is neither."""
        with ExitStack() as stack:
            if snapshot.wkv.is_cuda:
                stack.enter_context(torch.cuda.stream(self._stream))
                if mark is not None:
                    self._stream.wait_event(mark.event)
            sums = [tensor.sum(dtype=torch.float32) for tensor in (snapshot.shift, snapshot.wkv)]
            return all(math.isfinite(float(value)) for value in sums)


def _mark(stream: torch.cuda.Stream) -> Mark:
    event = torch.cuda.Event()
    event.record(stream)
    return Mark(event, stream.cuda_stream)
