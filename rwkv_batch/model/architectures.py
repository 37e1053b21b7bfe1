"""The modules that read and run checkpoints of each architecture, and what all share.

Another architecture is a folder beside `rwkv6`, and a line in RUNNABLE and in LAYOUTS.
"""

from dataclasses import dataclass, fields
from importlib import import_module
from types import ModuleType
from typing import ClassVar

import torch

from rwkv_batch.errors import CheckpointError
from rwkv_batch.model import quantized
from rwkv_batch.model.quantized import PLAIN, Quantisation
from rwkv_batch.model.weight import Weight
from rwkv_batch.served.architectures import RUNNABLE, architecture_of

# Modules with `shape_of`, which tells a `Shape` from published tensors, and `take_layer`, which makes a layer of them.
LAYOUTS = {"RWKV-7": "rwkv_batch.model.weights", "RWKV-6": "rwkv_batch.model.rwkv6.weights"}


def layout_of(architecture: str) -> ModuleType:
    """Return the module that knows the tensors of `architecture`."""
    return import_module(LAYOUTS[architecture])


def model_class(architecture: str) -> type:
    """Return the `Model` that runs checkpoints of `architecture`."""
    return import_module(RUNNABLE[architecture]).Model


@dataclass(frozen=True)
class Shape:
    """The numbers that fix every tensor of a checkpoint of any architecture: layers, width C, feed-forward F, vocabulary V."""

    num_layers: int
    width: int
    ffn_width: int
    vocab_size: int

    head_size: ClassVar[int]  # values of a head

    @property
    def num_heads(self) -> int:
        """Heads, which make up the width."""
        return self.width // self.head_size

    def tensors(self, *, v_first_residual: bool = False) -> dict[str, tuple[int, ...]]:
        """Return every tensor's name and shape; `v_first_residual`: whether layer 0 carries the unused v0, v1, v2."""
        raise NotImplementedError

    def states(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of a tuned state merged into the model: what its rows begin with."""
        dims = (self.num_heads, self.head_size, self.head_size)
        return {f"blocks.{i}.att.time_state": dims for i in range(self.num_layers)}

    def matrices(self, quant: Quantisation) -> dict[str, bool]:
        """Return the names of what is quantised, and whether it is stored transposed."""
        raise NotImplementedError

    def count_bytes(self, dtype: torch.dtype, quant: Quantisation = PLAIN) -> int:
        """Bytes of all tensors, in `dtype` where they are not quantised."""
        return sum(self.tensor_bytes(dtype, quant).values())

    def tensor_bytes(self, dtype: torch.dtype, quant: Quantisation = PLAIN) -> dict[str, int]:
        """Bytes of each tensor, by name, in `dtype` where it is not quantised."""
        matrices, found = self.matrices(quant), {}
        for name, dims in self.tensors().items():
            if name in matrices:
                transposed = matrices[name]
                found[name] = quantized.num_bytes(quant.format, dims[::-1] if transposed else dims, transposed=transposed)
            else:
                found[name] = torch.Size(dims).numel() * dtype.itemsize
        return found


class BaseLayer:
    """One block of any architecture: a dataclass of tensors, weights and None."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Everything that is kept, scales of quantised matrices included."""
        values = (getattr(self, f.name) for f in fields(self))
        return [t for v in values if v is not None for t in (v.tensors() if isinstance(v, Weight) else (v,))]


def dims_of(tensors: dict[str, torch.Tensor], key: str, count: int, name: str) -> torch.Size:
    """Return a tensor's dimensions; CheckpointError unless it is there and has so many."""
    if key not in tensors or tensors[key].dim() != count:
        raise CheckpointError(
            f"{name}: not an {architecture_of(tensors, name)} checkpoint (no {count}-dimensional tensor {key})"
        )
    return tensors[key].shape


def num_layers_of(tensors: dict[str, torch.Tensor], name: str) -> int:
    """Return the number of layers; CheckpointError where one is missing."""
    names = [key.split(".") for key in tensors]
    layers = {int(n[1]) for n in names if n[0] == "blocks" and len(n) > 1 and n[1].isdecimal() and len(n[1]) < 5}
    if layers != set(range(len(layers))):
        raise CheckpointError(f"{name}: its layers are not numbered 0 to {len(layers) - 1} without gaps")
    return len(layers)
