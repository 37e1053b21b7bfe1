"""Takes published tensors out of a checkpoint one after another: onto the device, checked there, and converted or quantised."""

import ctypes
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from rwkv_batch.errors import CheckpointError
from rwkv_batch.model.adapters.adapter import Merge
from rwkv_batch.model.quantized_file import SCALES
from rwkv_batch.model.weight import Weight

SPLIT = 512  # rows of a table that are worked on at a time: what they need beside is not worth the memory of a whole table
ROOM_BYTES = 8 * 2**20  # of a room that a tensor passes on its way to a GPU
UPLOAD_THREADS = 4  # that fill rooms; there are twice as many
LARGEST_HALF = torch.finfo(torch.float16).max


class TensorReader:
    """Empties `tensors`, so that beside what is kept there is one tensor of the file at a time.

    name   of the checkpoint, for messages
    dtype  of matrices that are not quantised
    bar    moves on with each tensor
    merge  what adapters make of them
    cut    name and tensor -> the part of it that is read; None = all of each
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        name: str,
        dtype: torch.dtype,
        device: torch.device,
        bar: tqdm,
        merge: Merge | None = None,
        cut: Callable[[str, Tensor], Tensor] | None = None,
    ):
        self._tensors = tensors
        self._name = name
        self._dtype = dtype
        self._device = device
        self._bar = bar
        self._merge = merge or Merge()
        self._cut = cut
        self._upload = Upload()

    def place_on(self, device: torch.device) -> None:
        """Put on `device` what is taken from now on."""
        self._device = device

    def take(self, key: str, as_dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor in `as_dtype`, None = that of all matrices."""
        as_dtype = as_dtype or self._dtype
        return self._numbers(key, halves=as_dtype == torch.float16).to(dtype=as_dtype, copy=True).contiguous()

    def raw(self, key: str) -> Tensor:
        """Return a tensor of finite numbers on the host, in its own type."""
        return self._numbers(key).cpu()

    def vector(self, key: str) -> Tensor:
        """Return a tensor in fp32 and one dimension."""
        return self.take(key, torch.float32).flatten()

    def drop(self, keys: Iterable[str]) -> None:
        """Leave out tensors, where there are such."""
        for key in keys:
            self._tensors.pop(key, None)

    def weight(self, keys: Sequence[str], form: str, *, transposed: bool = False) -> Weight:
        """Return a matrix, several stacked, in a format of `quantized.py`, or "" for none.

        Those in the file are [out, in], `transposed` turns them round; quantised ones are already as they are kept.
        """
        if len(keys) == 1:
            return self._matrix(keys[0], form, transposed)
        stacked: Weight | None = None
        for n, key in enumerate(keys):
            matrix = self._matrix(key, form, transposed)
            stacked = stacked or matrix.room_for(len(keys))
            stacked.put(n, matrix)
        return stacked

    def _matrix(self, key: str, form: str, transposed: bool) -> Weight:
        if key + SCALES in self._tensors:
            values = self._pop(key).clone()  # what is read may be the file itself
            if values.dtype == torch.float8_e4m3fn and bool((values.view(torch.uint8) & 127 == 127).any()):
                raise CheckpointError(f"{self._name}: tensor {key} holds values that are not finite")
            return Weight(values, self._numbers(key + SCALES).clone(), form, transposed)
        if not form:
            matrix = self.take(key)
            return Weight(matrix.t().contiguous() if transposed else matrix, transposed=transposed)
        matrix = self._numbers(key, halves=True)  # what kernels make of codes are halves
        return Weight.quantised(matrix.t().contiguous() if transposed else matrix, form, transposed=transposed)

    def _numbers(self, key: str, *, halves: bool = False) -> Tensor:
        """Return a tensor of finite numbers, as it is in the file; `halves`: no larger than fp16 goes."""
        tensor = self._pop(key)
        low, high = torch.stack(torch.aminmax(tensor)).tolist()
        if not (math.isfinite(low) and math.isfinite(high)):  # aminmax hands NaN on, so this sees every element
            raise CheckpointError(f"{self._name}: tensor {key} holds values that are not finite")
        if halves and max(-low, high) > LARGEST_HALF:
            raise CheckpointError(f"{self._name}: tensor {key} does not fit into fp16")
        return tensor

    def _pop(self, key: str) -> Tensor:
        tensor = self._tensors.pop(key)
        if self._cut is not None:
            tensor = self._cut(key, tensor)
        tensor = self._upload(tensor, self._device)  # checked and converted there: a GPU does both a hundred times faster
        self._bar.update()
        return self._merge.merged(key, tensor)


class Upload:
    """Brings tensors to a device; large ones to a GPU through some rooms of pinned memory, which threads fill meanwhile.

    Copied as it is, a tensor of a mapped file comes at the pace at which one thread goes through the file's pages.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._rooms: list[Tensor] = []

    def __call__(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return the tensor on `device`, not a copy where it is there already."""
        if device.type != "cuda" or tensor.is_cuda or not tensor.is_contiguous() or tensor.nbytes < ROOM_BYTES:
            return tensor.to(device)
        if self._pool is None:
            self.make_rooms(pinned=True)
        result = torch.empty_like(tensor, device=device)
        stream = torch.cuda.current_stream(device)

        def send(room: Tensor, part: Tensor) -> torch.cuda.Event:
            part.copy_(room[: len(part)], non_blocking=True)
            sent = torch.cuda.Event()
            sent.record(stream)
            return sent

        self.through_rooms(_bytes_of(tensor), _bytes_of(result), send)
        return result

    def make_rooms(self, *, pinned: bool) -> None:
        """Get ready for the first large tensor."""
        self._pool = ThreadPoolExecutor(UPLOAD_THREADS, "upload")
        self._rooms = [torch.empty(ROOM_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2 * UPLOAD_THREADS)]

    def through_rooms(self, source: Tensor, target: Tensor, send: Callable[[Tensor, Tensor], Any]) -> None:
        """Copy bytes: fill rooms in turn, and send each on as soon as it is full.

        send  given a room and the part of the target that it is for, begins to copy and returns what can be waited for
        """
        filling: deque[tuple[int, Future, Tensor]] = deque()
        sent: dict[int, Any] = {}

        def send_first() -> None:
            number, filled, part = filling.popleft()
            filled.result()
            sent[number] = send(self._rooms[number], part)

        for i, start in enumerate(range(0, len(source), ROOM_BYTES)):
            if len(filling) == UPLOAD_THREADS:
                send_first()
            number, length = i % len(self._rooms), min(ROOM_BYTES, len(source) - start)
            if number in sent:
                sent.pop(number).synchronize()
            filled = self._pool.submit(ctypes.memmove, self._rooms[number].data_ptr(), source.data_ptr() + start, length)
            filling.append((number, filled, target[start : start + length]))
        while filling:
            send_first()
        for each in sent.values():
            each.synchronize()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
