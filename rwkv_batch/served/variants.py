"""What a model can be asked for in beside its plain form, and which of it a request means: the one place where names are read.

A request names its model as "<model>" or "<model> <variant>", and both names may have blanks in them, so ids are compared as a
whole and never split. Plain Python; what is said about variants across the process border is here too.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

ADAPTER = "adapter:"  # what keys of adapters begin with


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One variant of a model, as engines tell HTTP processes.

    name         what follows the model's name in an id
    kind         a tuned state, a mix of several (MRSS), or an adapter
    key          tells what its rows compute from what others do: a name may be loaded anew with another file
    temperature  of requests that send none, None = as without the variant
    top_p        likewise
    weights      of the states of a mix, in their order; empty for a single state
    """

    name: str
    kind: Literal["state", "mix", "adapter"] = "state"
    key: str
    temperature: float | None = None
    top_p: float | None = None
    weights: list[float] = []


class LoadState(msgspec.Struct, tag="load_state", frozen=True, kw_only=True):
    """Have a state, or a mix of several, under a name. Conflict when the name is taken, unless `replace`.

    files      where they lie
    transpose  whether the axes of key and value are swapped; None = as the ending of the file says
    original   a mix has the model's own start as its last part too
    weights    of a mix, padded with 0; None = a single state
    """

    name: str
    files: list[str]
    transpose: bool | None = None
    original: bool = False
    weights: list[float] | None = None
    temperature: float | None = None
    top_p: float | None = None
    replace: bool = False


class SetWeights(msgspec.Struct, tag="set_weights", frozen=True, kw_only=True):
    """Give a mix other weights and defaults; None leaves them as they are. NotFound when there is no such mix."""

    name: str
    weights: list[float] | None = None
    temperature: float | None = None
    top_p: float | None = None


class RemoveStates(msgspec.Struct, tag="remove_states", frozen=True, kw_only=True):
    """Forget a state or a mix, None = all. NotFound when there is none of that name."""

    name: str | None = None


class ListVariants(msgspec.Struct, tag="list_variants", frozen=True, kw_only=True):
    """Say which variants there are."""


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True, kw_only=True):
    """Have an adapter for single rows under a name. Conflict when the name is taken, unless `replace`.

    file     where it lies
    scaling  a factor, or "alpha=32"; "" = as the file says
    """

    name: str
    file: str
    scaling: str = ""
    temperature: float | None = None
    top_p: float | None = None
    replace: bool = False


class RemoveAdapters(msgspec.Struct, tag="remove_adapters", frozen=True, kw_only=True):
    """Forget an adapter, None = all. NotFound when there is none of that name."""

    name: str | None = None


StateOrder = LoadState | SetWeights | RemoveStates | ListVariants
AdapterOrder = LoadAdapter | RemoveAdapters
VariantOrder = LoadState | SetWeights | RemoveStates | ListVariants | LoadAdapter | RemoveAdapters


class VariantsNow(msgspec.Struct, tag="variants", frozen=True, kw_only=True):
    """The answer to each of them: the variants that there are now.

    transposed  of the files that were read: whether their axes were swapped
    adapter     that was loaded: what its file was taken for
    """

    variants: list[Variant]
    transposed: list[bool] = []
    adapter: dict[str, Any] = {}


class Choice(NamedTuple):
    """A model, and the variant of it that is meant."""

    model: str
    variant: Variant | None


def id_of(model: str, variant: Variant | None) -> str:
    """The name under which a request asks for it."""
    return model if variant is None else f"{model} {variant.name}"


def choices(served: Mapping[str, Sequence[Variant]]) -> list[Choice]:
    """All that can be asked for: each model, and behind it its variants."""
    return [Choice(model, variant) for model, variants in served.items() for variant in (None, *variants)]


def resolve(wanted: str, served: Mapping[str, Sequence[Variant]]) -> Choice | None:
    """What a request's model means, by the whole id; None when it is none of them. `served`: the variants of each model."""
    return next((choice for choice in choices(served) if id_of(*choice) == wanted), None)
