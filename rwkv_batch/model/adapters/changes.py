"""What each kind of adapter makes of a matrix W [out, in], y = W x.

    LoraChange  LoRA, PiSSA          W + B A                                          Hu et al. 2021; Meng et al. 2024
    InputDora   DoRA of OpenMOSE     M * V / (norm of each column of V + 1e-6)        V = W + B A
    OutputDora  DoRA of HF PEFT      m * V / (norm of each row of V)                  Liu et al. 2024
    Bone        Bone, DiSHA, MiSS    W[o, i] + G[i mod r, o]                          Kang and Yin 2024
    InputBat    Bat of RWKV-PEFT     W[a,b] + W[a,b] G[b] + G[b]                      blocks of r x r: a over out, b over in
    OutputBat   Bat of HF PEFT       W[a,b] + W[a,b] G[a] + G[a]

B holds the scaling already. All arithmetic is fp32. Each says what it does to a whole matrix, and most also how to get y for
some rows of a batch from one base product for all: y = outputs * (W D(x)) + U (V x), see `RowForm`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

NORM_EPS = 1e-6  # of InputDora, as it is trained


@dataclass(frozen=True, eq=False)
class RowForm:
    """A change as y = outputs * (W D(x)) + U (V x).

    down     V [rank, in]
    up       U^T [rank, out]
    inputs   D: None = x; [in] = a factor for each input; [in/r, r, r] = x and its blocks times these
    outputs  None = 1; [out]
    """

    down: Tensor
    up: Tensor
    inputs: Tensor | None = None
    outputs: Tensor | None = None

    @property
    def is_low_rank(self) -> bool:
        """Whether the product with W stays as it is."""
        return self.inputs is None and self.outputs is None


class Change(Protocol):
    """What an adapter does to one matrix; all tensors fp32."""

    rank: int  # columns that its `RowForm` takes

    def misfit(self, outs: int, ins: int) -> str | None:
        """Return why it does not fit a matrix [outs, ins], None if it does."""

    def merged(self, matrix: Tensor) -> Tensor:
        """Return the changed matrix [out, in], fp32, on the matrix's device."""

    def row_form(self, outs: int, ins: int, matrix: Callable[[], Tensor]) -> RowForm | None:
        """Return it for some rows of a batch, None where it has no such form. `matrix`: gives W in fp32, if it is needed."""


@dataclass(frozen=True, eq=False)
class LoraChange:
    """a [r, in], b [out, r], the scaling in it."""

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        """Of the change."""
        return self.a.shape[0]

    def misfit(self, outs: int, ins: int) -> str | None:
        """See `Change`."""
        if self.a.shape[0] != self.b.shape[1]:
            return f"its halves have ranks {self.a.shape[0]} and {self.b.shape[1]}"
        return _wrong("changes", (self.b.shape[0], self.a.shape[1]), (outs, ins))

    def merged(self, matrix: Tensor) -> Tensor:
        """See `Change`."""
        return torch.addmm(matrix.float(), self.b.to(matrix.device), self.a.to(matrix.device))

    def row_form(self, outs: int, ins: int, matrix: Callable[[], Tensor]) -> RowForm:
        """See `Change`."""
        return RowForm(self.a, self.b.t())


@dataclass(frozen=True, eq=False)
class InputDora(LoraChange):
    """magnitude [in]: of each column."""

    magnitude: Tensor

    def misfit(self, outs: int, ins: int) -> str | None:
        """See `Change`."""
        return super().misfit(outs, ins) or _wrong("has magnitudes for", (self.magnitude.numel(),), (ins,))

    def merged(self, matrix: Tensor) -> Tensor:
        """See `Change`."""
        changed = super().merged(matrix)
        return changed.mul_(self._factors(changed))

    def row_form(self, outs: int, ins: int, matrix: Callable[[], Tensor]) -> RowForm:
        """See `Change`."""
        factors = self._factors(super().merged(matrix())).to(self.a.device)
        return RowForm(self.a * factors, self.b.t(), inputs=factors)

    def _factors(self, changed: Tensor) -> Tensor:
        return self.magnitude.to(changed.device).flatten() / (changed.norm(dim=0) + NORM_EPS)


@dataclass(frozen=True, eq=False)
class OutputDora(LoraChange):
    """magnitude [out]: of each row."""

    magnitude: Tensor

    def misfit(self, outs: int, ins: int) -> str | None:
        """See `Change`."""
        return super().misfit(outs, ins) or _wrong("has magnitudes for", (self.magnitude.numel(),), (outs,))

    def merged(self, matrix: Tensor) -> Tensor:
        """See `Change`."""
        changed = super().merged(matrix)
        return changed.mul_(self._factors(changed).unsqueeze(1))

    def row_form(self, outs: int, ins: int, matrix: Callable[[], Tensor]) -> RowForm:
        """See `Change`."""
        factors = self._factors(super().merged(matrix())).to(self.a.device)
        return RowForm(self.a, self.b.t() * factors, outputs=factors)

    def _factors(self, changed: Tensor) -> Tensor:
        return self.magnitude.to(changed.device).flatten() / changed.norm(dim=1)


@dataclass(frozen=True, eq=False)
class Bone:
    """g [r, out]: what is added to each r inputs; the last of them may be fewer."""

    g: Tensor

    @property
    def rank(self) -> int:
        """Inputs of a block."""
        return self.g.shape[0]

    def misfit(self, outs: int, ins: int) -> str | None:
        """See `Change`."""
        return _wrong("is for outputs", (self.g.shape[1],), (outs,)) or _wrong_rank(self.rank, ins)

    def merged(self, matrix: Tensor) -> Tensor:
        """See `Change`."""
        ins = matrix.shape[1]
        added = self.g.to(matrix.device).t().repeat(1, -(-ins // self.rank))
        return matrix.float() + added[:, :ins]

    def row_form(self, outs: int, ins: int, matrix: Callable[[], Tensor]) -> RowForm:
        """See `Change`."""
        sums = torch.eye(self.rank, device=self.g.device).repeat(1, -(-ins // self.rank))
        return RowForm(sums[:, :ins], self.g)


@dataclass(frozen=True, eq=False)
class InputBat:
    """g [in/r, r, r]: one block for each r inputs."""

    g: Tensor

    @property
    def rank(self) -> int:
        """Width of a block."""
        return self.g.shape[1]

    def misfit(self, outs: int, ins: int) -> str | None:
        """See `Change`."""
        return _wrong("is for inputs", (self.g.shape[0] * self.rank,), (ins,)) or _not_whole(self.rank, outs)

    def merged(self, matrix: Tensor) -> Tensor:
        """See `Change`."""
        return _blocked(matrix, self.g.to(matrix.device)[None])

    def row_form(self, outs: int, ins: int, matrix: Callable[[], Tensor]) -> RowForm:
        """See `Change`."""
        down = self.g.transpose(0, 1).reshape(self.rank, -1)  # [G_0 G_1 ..]
        up = torch.eye(self.rank, device=self.g.device).repeat(1, outs // self.rank)
        return RowForm(down, up, inputs=self.g)


@dataclass(frozen=True, eq=False)
class OutputBat:
    """g [out/r, r, r]: one block for each r outputs. Needs W times blocks that differ by output, so it can only be merged."""

    g: Tensor

    @property
    def rank(self) -> int:
        """Width of a block."""
        return self.g.shape[1]

    def misfit(self, outs: int, ins: int) -> str | None:
        """See `Change`."""
        return _wrong("is for outputs", (self.g.shape[0] * self.rank,), (outs,)) or _not_whole(self.rank, ins)

    def merged(self, matrix: Tensor) -> Tensor:
        """See `Change`."""
        return _blocked(matrix, self.g.to(matrix.device)[:, None])

    def row_form(self, outs: int, ins: int, matrix: Callable[[], Tensor]) -> None:
        """See `Change`."""


def tensors_of(change: Change) -> list[Tensor]:
    """Return what a change holds."""
    return [getattr(change, item.name) for item in fields(change)]


def change_inputs(x: Tensor, inputs: Tensor | None) -> Tensor:
    """Return D(x) [N, in], see `RowForm`."""
    if inputs is None:
        return x
    if inputs.dim() == 1:
        return x * inputs
    blocks, width, _ = inputs.shape
    pieces = x.view(-1, blocks, width).transpose(0, 1)  # [blocks, N, r]
    return x + torch.bmm(pieces, inputs.transpose(1, 2)).transpose(0, 1).reshape(x.shape)


def _blocked(matrix: Tensor, g: Tensor) -> Tensor:
    """W + W G + G for each block of W; g [out/r or 1, in/r or 1, r, r]."""
    outs, ins, r = *matrix.shape, g.shape[-1]
    blocks = matrix.float().view(outs // r, r, ins // r, r).transpose(1, 2)
    return (blocks + blocks @ g + g).transpose(1, 2).reshape(outs, ins)


def _wrong(what: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str | None:
    return None if tuple(found) == wanted else f"{what} {list(found)} instead of {list(wanted)}"


def _wrong_rank(rank: int, ins: int) -> str | None:
    return None if 0 < rank <= ins else f"has rank {rank}, more than the {ins} inputs"


def _not_whole(rank: int, size: int) -> str | None:
    return f"has blocks of {rank}, which do not divide {size}" if size % rank else None
