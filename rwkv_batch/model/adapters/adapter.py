"""A trained set of changes, and what becomes of a checkpoint's tensors with some of them."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rwkv_batch.errors import CheckpointError
from rwkv_batch.model.adapters.changes import Change, tensors_of

ASSUMED_FACTOR = 2.0  # of LoRA and DoRA whose file does not say it: RWKV-Infer's default


@dataclass(frozen=True)
class Scaling:
    """What the product of the two halves is multiplied by, as far as it was given: a factor, or alpha, which rank divides."""

    factor: float | None = None
    alpha: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Scaling":
        """Read `1.5` or `alpha=32`; ValueError if it is neither."""
        kind, _, number = text.rpartition("=")
        value = float(number)
        if kind not in ("", "alpha") or not math.isfinite(value):
            raise ValueError(text)
        return cls(alpha=value) if kind else cls(value)

    @property
    def text(self) -> str:
        """What `parse` reads; "" where it was not given."""
        return f"alpha={self.alpha!r}" if self.alpha is not None else "" if self.factor is None else repr(self.factor)

    @property
    def given(self) -> bool:
        """Whether it was."""
        return self.factor is not None or self.alpha is not None

    def of(self, rank: int) -> float:
        """Return the factor of a change of this rank."""
        return self.factor if self.alpha is None else self.alpha / rank


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter, as its file has it.

    name         of the file, for messages
    container    who wrote it: "RWKV-PEFT", "HF PEFT" or "web-rwkv"
    kinds        what it is: "LoRA", "DoRA", ..
    changes      by the published name of the matrix
    replaced     whole tensors, by name
    scaling      None = it has none; one number where all matrices have the same
    assumed      whether the scaling was neither in the file nor given
    fingerprint  32 hex digits of all that
    """

    name: str
    container: str
    kinds: tuple[str, ...]
    changes: dict[str, Change]
    replaced: dict[str, Tensor]
    scaling: float | list[float] | None
    assumed: bool
    fingerprint: str

    @property
    def rank(self) -> int:
        """The largest of its changes."""
        return max((change.rank for change in self.changes.values()), default=0)

    def report(self) -> dict[str, object]:
        """Return what a person wants to know of it, as JSON."""
        return {
            "file": Path(self.name).name,
            "kind": ", ".join(self.kinds),
            "container": self.container,
            "rank": self.rank,
            "matrices": _counted(self.changes),
            "replaced": sorted(self.replaced),
            "scaling": self.scaling,
            "assumed": self.assumed,
        }

    def line(self) -> str:
        """Return the same as a line."""
        matrices = ", ".join(f"{name} {count}x" for name, count in _counted(self.changes).items()) or "no matrices"
        parts = [f"{', '.join(self.kinds)} ({self.container})", f"rank {self.rank}" if self.rank else "", matrices]
        if self.replaced:
            parts.append(f"{len(self.replaced)} tensors replaced")
        if self.scaling is not None:
            parts.append(f"scaling {self.scaling}" + (" ASSUMED: neither the file nor you say it" if self.assumed else ""))
        return f"adapter {self.name}: " + "; ".join(part for part in parts if part)

    def check_fits(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise CheckpointError where it is for a model of other tensors."""
        for key, change in self.changes.items():
            matrix = tensors.get(key)
            if matrix is None or matrix.dim() != 2:
                raise CheckpointError(f"{self.name}: changes {key}, which the model does not have")
            if (why := change.misfit(*matrix.shape)) is not None:
                raise CheckpointError(f"{self.name}: does not fit the model: at {key} it {why}")
        for key, tensor in self.replaced.items():
            if key not in tensors:
                raise CheckpointError(f"{self.name}: has a tensor {key}, which the model does not have")
            if _dims(tensor) != _dims(tensors[key]):
                found, wanted = list(tensor.shape), list(tensors[key].shape)
                raise CheckpointError(f"{self.name}: does not fit the model: {key} {found} instead of {wanted}")


class Merge:
    """What several adapters, one after another, make of a checkpoint's tensors."""

    def __init__(self, adapters: Sequence[Adapter] = ()):
        self.adapters = list(adapters)
        self._changes: dict[str, list[Change]] = {}
        self._replaced: dict[str, Tensor] = {}
        for adapter in adapters:
            for key, tensor in adapter.replaced.items():
                self._replaced[key] = tensor
                self._changes.pop(key, None)  # of what is no longer there
            for key, change in adapter.changes.items():
                self._changes.setdefault(key, []).append(change)

    def check_fits(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise CheckpointError where one of them is for another model."""
        for adapter in self.adapters:
            adapter.check_fits(tensors)

    def replace(self, tensors: dict[str, Tensor]) -> None:
        """Put whole tensors in their places; matrices are changed one by one, by `merged`."""
        tensors.update(self._replaced)

    def merged(self, key: str, tensor: Tensor) -> Tensor:
        """Return what becomes of one tensor of the checkpoint, on its device: fp32 where it is changed."""
        for change in self._changes.get(key, ()):
            tensor = change.merged(tensor)
        return tensor

    def fingerprint(self, model: str) -> str:
        """Return that of the changed model; `model`: that of the plain one."""
        if not self.adapters:
            return model
        parts = [model, *(adapter.fingerprint for adapter in self.adapters)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]


def fingerprint_of(changes: Mapping[str, Change], replaced: Mapping[str, Tensor]) -> str:
    """Return 32 hex digits over all that they do."""
    digest = hashlib.sha256()
    for key in sorted(changes):
        digest.update(f"{key} {type(changes[key]).__name__}".encode())
        _add(digest, tensors_of(changes[key]))
    for key in sorted(replaced):
        digest.update(key.encode())
        _add(digest, [replaced[key]])
    return digest.hexdigest()[:32]


def _add(digest: "hashlib._Hash", tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        digest.update(f"{list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())


def _counted(changes: Iterable[str]) -> dict[str, int]:
    """Return how many layers' matrices of each name there are."""
    counts: dict[str, int] = {}
    for key in changes:
        name = key.removesuffix(".weight")
        name = name.split(".", 2)[2] if name.startswith("blocks.") else name
        counts[name] = counts.get(name, 0) + 1
    return counts


def _dims(tensor: Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]  # published vectors are [1, 1, C]
