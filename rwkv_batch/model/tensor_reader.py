"""Takes published tensors out of a checkpoint one after another: onto the device, checked there, and converted or quantised."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from rwkv_batch.errors import CheckpointError
from rwkv_batch.model.adapters.adapter import Merge
from rwkv_batch.model.quantized_file import SCALES
from rwkv_batch.model.weight import Weight

SPLIT = 512  # rows of a table that are worked on at a time: what they need beside is not worth the memory of a whole table
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
        tensor = tensor.to(self._device)  # checked and converted there: a GPU does both a hundred times faster
        self._bar.update()
        return self._merge.merged(key, tensor)
