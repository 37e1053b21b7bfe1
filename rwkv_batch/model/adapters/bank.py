"""Adapters of single rows: the matrices of a model stay as they are, and each row's adapter adds to its products.

All adapters of a matrix lie side by side in two thin tables, `down` [columns, in] and `up` [columns, out]; an adapter of rank r
owns r columns of all tables. A step multiplies its tokens with all columns, clears what is not the row's own, and multiplies by
`up`: two products whatever the adapters are, each adapter read once, all on fixed addresses, as a captured graph needs it.
(S-LoRA, Sheng et al. 2023, and Punica, Chen et al. 2023, gather by row, which pays where there are many more columns.)

Which adapter a row has is an array by slot on the device. A row without one gets exact zeros added. Loading writes columns that
no row uses, so it may happen beside steps.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rwkv_batch.errors import NoRoom, Unprocessable
from rwkv_batch.model.adapters.adapter import Adapter
from rwkv_batch.model.adapters.changes import RowForm
from rwkv_batch.model.packed_rows import StepRows
from rwkv_batch.model.weight import Weight
from rwkv_batch.model.weights import ModelShape, Weights

RKV = ("receptance", "key", "value")
PUBLISHED = {  # names in `Layer`, by published name; and whether `Layer` keeps the matrix transposed
    "att.receptance": ("receptance", False),
    "att.key": ("key", False),
    "att.value": ("value", False),
    "att.output": ("output", False),
    "ffn.key": ("ffn_key", False),
    "ffn.value": ("ffn_value", True),
}
NOBODY = -1  # owner of a free column
NONE = 0  # number of "no adapter"


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in the bank. Its columns are free again when nobody refers to this any more.

    key      tells computations apart: the fingerprint of what the file says
    number   of its columns and of the rows that use it; never used again
    """

    key: str
    number: int
    columns: list[int]
    report: dict[str, object]


@dataclass(eq=False)
class MatrixBank:
    """What the adapters add to one matrix, or to several that are stacked.

    down, up  [columns, in] and [columns, out], or stacked; in the type of the weights
    forms     of adapters, by number, that change more than by adding; only plain torch runs those
    """

    down: Tensor
    up: Tensor
    forms: dict[int, RowForm] = field(default_factory=dict)

    def part(self, index: int) -> "MatrixBank":
        """Return one of several that are stacked: views."""
        return MatrixBank(self.down[index], self.up[index])

    def put(self, columns: Tensor, form: RowForm | None) -> None:
        """Write an adapter's columns; None = it leaves this matrix alone."""
        self.down[columns], self.up[columns] = 0, 0
        if form is not None:
            used = columns[: len(form.down)]
            self.down[used] = form.down.to(self.down)
            self.up[used] = form.up.to(self.up)


class AdapterBank:
    """The adapters of one model and one engine.

    columns      of all tables: the sum of the ranks of adapters that can be loaded at a time
    only_adding  whether adapters are refused that change more than by adding, as kernels want it
    """

    def __init__(self, weights: Weights, num_columns: int, num_slots: int, *, only_adding: bool):
        self.weights = weights
        self.num_columns = num_columns
        self.only_adding = only_adding
        device = weights.device
        self.of_slot = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)  # the last one is of no slot: -1
        self.owner = torch.full((num_columns,), NOBODY, dtype=torch.int64, device=device)
        self.layers = [layer_banks(weights.shape, num_columns, weights.dtype, device) for _ in weights.layers]
        self._numbers = itertools.count(NONE + 1)
        self._assigned = [NONE] * num_slots
        self._lock = threading.Lock()
        self._free = list(range(num_columns))

    @classmethod
    def num_bytes(cls, shape: ModelShape, num_columns: int, dtype: torch.dtype) -> int:
        """Bytes of the tables."""
        banks = layer_banks(shape, num_columns, dtype, torch.device("meta"))
        return shape.num_layers * sum(banks[name].down.nbytes + banks[name].up.nbytes for name in STACKED)

    @property
    def num_free(self) -> int:
        """Columns that no adapter has."""
        with self._lock:
            return len(self._free)

    @torch.inference_mode()
    def load(self, adapter: Adapter) -> LoadedAdapter:
        """Put an adapter into the bank, in any thread. CheckpointError where it is for another model, Unprocessable where it
        cannot be used for single rows, NoRoom.
        """
        forms = self._forms(adapter)
        rank = max(len(form.down) for form in forms.values())
        with self._lock:
            if rank > len(self._free):
                free = f"{len(self._free)} of {self.num_columns} ranks are free"
                raise NoRoom(f"{adapter.name}: needs {rank}, but {free}; see --adapter-ranks")
            columns, self._free = self._free[:rank], self._free[rank:]
        loaded = LoadedAdapter(adapter.fingerprint, next(self._numbers), columns, adapter.report())
        weakref.finalize(loaded, self._release, columns, loaded.number)
        index = torch.tensor(columns, device=self.weights.device)
        for i, banks in enumerate(self.layers):
            for name in MATRICES:
                form = forms.get((i, name))
                banks[name].put(index, form)
                if form is not None and not form.is_low_rank:
                    banks[name].forms[loaded.number] = _moved(form, banks[name].down)
        self.owner[index] = loaded.number
        return loaded

    def _forms(self, adapter: Adapter) -> dict[tuple[int, str], RowForm]:
        """Return what it does to each matrix, by layer and name."""
        if adapter.replaced:
            key = next(iter(adapter.replaced))
            raise Unprocessable(f"{adapter.name}: replaces {key}, so it can only be merged into the model, with --adapter")
        forms = {}
        for key, change in adapter.changes.items():
            _, layer, name = key.removesuffix(".weight").split(".", 2) if key.startswith("blocks.") else ("", "", key)
            if name not in PUBLISHED:
                raise Unprocessable(f"{adapter.name}: changes {key}, so it can only be merged into the model, with --adapter")
            if int(layer) >= len(self.weights.layers):
                raise Unprocessable(f"{adapter.name}: changes {key}, which the model does not have")
            attribute, transposed = PUBLISHED[name]
            weight = getattr(self.weights.layers[int(layer)], attribute)
            shape = weight.shape[::-1] if transposed else weight.shape
            if (why := change.misfit(*shape)) is not None:
                raise Unprocessable(f"{adapter.name}: does not fit the model: at {key} it {why}")
            form = change.row_form(*shape, _dense(weight, transposed))
            if form is None or (self.only_adding and not form.is_low_rank):
                raise Unprocessable(
                    f"{adapter.name}: {' and '.join(adapter.kinds)} can only be merged into the model here, with --adapter"
                )
            forms[int(layer), attribute] = form
        return forms

    def _release(self, columns: list[int], number: int) -> None:
        """Nobody refers to an adapter any more; the columns are written when another one gets them."""
        for banks in self.layers:
            for name in MATRICES:
                banks[name].forms.pop(number, None)
        with self._lock:
            self._free += columns

    def assign(self, slots: Sequence[int], adapters: Sequence[LoadedAdapter | None]) -> None:
        """Say which adapters the rows have that are about to begin in these slots. In the thread that steps."""
        numbers = [NONE if adapter is None else adapter.number for adapter in adapters]
        changed = [(slot, number) for slot, number in zip(slots, numbers, strict=True) if self._assigned[slot] != number]
        if not changed:
            return
        for slot, number in changed:
            self._assigned[slot] = number
        places, values = torch.tensor(changed).to(self.of_slot.device, non_blocking=True).unbind(1)
        self.of_slot[places] = values

    def numbers_of(self, rows: StepRows) -> Tensor:
        """Return the number of each token's adapter [N]; captured, it is read anew at each replay."""
        if rows.is_decode:
            return self.of_slot[rows.slot_tensor]
        layout = rows.layout
        tokens = torch.arange(len(layout.previous_slot), dtype=torch.int32, device=self.of_slot.device)
        row = torch.searchsorted(layout.cu_seqlens[1:], tokens, right=True).clamp_(max=len(layout.slots) - 1)
        return self.of_slot[layout.slots[row]]

    def foreign(self, numbers: Tensor) -> Tensor:
        """Return which columns are not those of each token's adapter [N, columns]."""
        return self.owner != numbers.unsqueeze(1)


def layer_banks(shape: ModelShape, num_columns: int, dtype: torch.dtype, device: torch.device) -> dict[str, MatrixBank]:
    """Return empty tables for the matrices of a layer: those of MATRICES, three of them views of "rkv"."""
    c, f = shape.width, shape.ffn_width

    def bank(ins: int, outs: int, *stack: int) -> MatrixBank:
        down, up = (torch.zeros(*stack, num_columns, size, dtype=dtype, device=device) for size in (ins, outs))
        return MatrixBank(down, up)

    banks = {"rkv": bank(c, c, len(RKV)), "output": bank(c, c), "ffn_key": bank(c, f), "ffn_value": bank(f, c)}
    return banks | {name: banks["rkv"].part(i) for i, name in enumerate(RKV)}


STACKED = ("rkv", "output", "ffn_key", "ffn_value")
MATRICES = (*RKV, *STACKED[1:])


def _dense(weight: Weight, transposed: bool) -> Callable[[], Tensor]:
    """Return what gives a matrix [out, in] in fp32."""
    return lambda: weight.dense(torch.float32).t() if transposed else weight.dense(torch.float32)


def _moved(form: RowForm, like: Tensor) -> RowForm:
    inputs, outputs = (None if t is None else t.to(like.device) for t in (form.inputs, form.outputs))
    return RowForm(form.down, form.up, inputs, outputs)
