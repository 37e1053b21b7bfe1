"""The tuned states that an engine has: loaded by orders while it runs, found by what requests say, and back after a restart.

A snapshot is never changed and a slot is always a copy, so loading, replacing and removing touch no row that runs.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from rwkv_batch.errors import Conflict, NotFound, RwkvBatchError, StorageFailed, UsageError
from rwkv_batch.model.adapters.bank import LoadedAdapter
from rwkv_batch.model.state import Snapshot, State
from rwkv_batch.served.variants import ListVariants, LoadState, RemoveStates, SetWeights, Variant, VariantOrder, VariantsNow
from rwkv_batch.tuned.remembered import Remembered
from rwkv_batch.tuned.state_file import TunedState, read_state

log = logging.getLogger("rwkv_batch.engine")

Answered = Callable[[VariantsNow | RwkvBatchError], None]


class Start(NamedTuple):
    """What rows begin with: one state, or those of a mix in their order; None is the model's own start."""

    key: str
    parts: tuple[Snapshot | None, ...]
    adapter: LoadedAdapter | None = None
    mixed: bool = False


class Loaded(NamedTuple):
    """One entry."""

    order: LoadState
    variant: Variant
    start: Start


class TunedStates:
    """What is loaded. Methods may be called from any thread; one load runs at a time, in a thread of its own.

    state       the engine's, on whose device and in whose types snapshots are kept
    max_states  states in all
    changed     is called with the variants whenever they are others
    """

    def __init__(
        self,
        state: State,
        *,
        max_states: int = 64,
    ):
        self.state = state
        self.max_states = max_states
        self.changed: Callable[[list[Variant]], None] = lambda variants: None
        self._lock = threading.Lock()
        self._loaded: dict[str, Loaded] = {}
        self._starts: dict[str, Start] = {}
        self._busy_with: str | None = None
        self._remembered = Remembered(LoadState, "states")

    @property
    def variants(self) -> list[Variant]:
        """What there is, in the order in which it was loaded."""
        return [loaded.variant for loaded in list(self._loaded.values())]

    @property
    def num_states(self) -> int:
        """States in memory."""
        return sum(len(loaded.order.files) for loaded in list(self._loaded.values()))

    def find(self, key: str) -> Start:
        """What a request's rows begin with; NotFound when it is not there any more."""
        start = self._starts.get(key)
        if start is None:
            raise NotFound("the state that this request names was removed", param="model", code="model_not_found")
        return start

    def execute(self, order: VariantOrder, answer: Answered) -> None:
        """Carry out an order; `answer` is called once, for a load in a thread of its own."""
        if not isinstance(order, LoadState):
            answer(self._tried(lambda: self._change(order)))
            return
        with self._lock:
            if self._busy_with is not None:
                raise Conflict(f"{self._busy_with!r} is being loaded", code="load_running", retry_after=1.0)
            self._check(order)
            self._busy_with = order.name

        def run() -> None:
            result = self._tried(lambda: self.load(order))
            with self._lock:
                self._busy_with = None
            answer(result)

        threading.Thread(target=run, name="tuned-state", daemon=True).start()

    def load(self, order: LoadState, field: str = "state_filename") -> VariantsNow:
        """Load it in this thread. Raises what refuses it."""
        began = time.monotonic()
        half = self.state.wkv.dtype == torch.float16
        read = [
            read_state(Path(file), self.state.shape, transpose=order.transpose, half=half, field=field) for file in order.files
        ]
        loaded = self._entry(order, read)
        with self._lock:
            self._check(order)
            self._put({**self._loaded, order.name: loaded})
        for file, state in zip(order.files, read, strict=True):
            how = "with key and value swapped" if state.transposed else "as it is"
            log.info("state %r: %s, %s, %.2f s", order.name, Path(file).name, how, time.monotonic() - began)
        return VariantsNow(variants=self.variants, transposed=[state.transposed for state in read])

    def remember_in(self, file: Path) -> None:
        """Load what `file` says, which an engine that ended has left, and keep it up with what is loaded from now on."""
        orders = self._remembered.left_in(file)
        if orders is not None:
            with self._lock:
                self._put({})
            for order in orders:
                try:
                    self.load(msgspec.structs.replace(order, replace=True))
                except RwkvBatchError as error:
                    log.error("the state %r, loaded before, is not there any more: %s", order.name, error.message)
        self._remembered.write_to(file)
        with self._lock:
            self._write()

    def _tried(self, work: Callable[[], VariantsNow]) -> VariantsNow | RwkvBatchError:
        try:
            return work()
        except RwkvBatchError as error:
            return error
        except Exception:
            log.exception("an order about states failed")
            return StorageFailed("the order could not be carried out; the log says why", code="load_failed")

    def _check(self, order: LoadState) -> None:
        """Raise what refuses a load whatever its files hold."""
        known = self._loaded.get(order.name)
        if known is not None and not order.replace:
            raise Conflict(
                f"state_viewname: {order.name!r} is there already; `replace` says to take its place",
                param="state_viewname", code="name_taken",
            )  # fmt: skip
        num_states = self.num_states - (len(known.order.files) if known is not None else 0)
        if num_states + len(order.files) > self.max_states:
            raise StorageFailed(
                f"--max-states: {self.max_states} states at most, {self.num_states} are loaded", code="too_many_states"
            )

    def _entry(self, order: LoadState, read: list[TunedState]) -> Loaded:
        mixed = order.weights is not None
        parts = (*(self._snapshot(state.wkv, order.name) for state in read), *((None,) if mixed and order.original else ()))
        keys = [state.key for state in read]
        key = hashlib.blake2b(repr((keys, order.original)).encode(), digest_size=16).hexdigest() if mixed else keys[0]
        weights = [*order.weights, *[0.0] * (len(parts) - len(order.weights))] if mixed else []
        variant = Variant(
            name=order.name, kind="mix" if mixed else "state", key=key, temperature=order.temperature, top_p=order.top_p,
            weights=weights,
        )  # fmt: skip
        return Loaded(order, variant, Start(key, parts, mixed=mixed))

    def _snapshot(self, wkv: torch.Tensor, name: str) -> Snapshot:
        try:
            return self.state.snapshot_of(wkv)
        except torch.OutOfMemoryError:
            needed, device = wkv.numel() * self.state.wkv.element_size(), self.state.wkv.device
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
            raise StorageFailed(
                f"no memory for the state {name!r}: needs {needed:,} bytes, {free:,} are free", code="out_of_memory"
            ) from None

    def _change(self, order: SetWeights | RemoveStates | ListVariants) -> VariantsNow:
        with self._lock:
            match order:
                case SetWeights():
                    self._put({**self._loaded, order.name: self._reweighted(order)})
                case RemoveStates(name=None):
                    self._put({})
                case RemoveStates():
                    self._loaded_as(order.name)
                    self._put({name: loaded for name, loaded in self._loaded.items() if name != order.name})
        return VariantsNow(variants=self.variants)

    def _reweighted(self, order: SetWeights) -> Loaded:
        old = self._loaded_as(order.name)
        if old.variant.kind != "mix":
            raise NotFound(f"{order.name!r} is a single state and has no weights", param="state_viewname", code="no_such_state")
        given = {name: getattr(order, name) for name in ("temperature", "top_p") if getattr(order, name) is not None}
        if order.weights is not None:
            given["weights"] = [*order.weights, *[0.0] * (len(old.start.parts) - len(order.weights))]
        return old._replace(
            order=msgspec.structs.replace(old.order, **given), variant=msgspec.structs.replace(old.variant, **given)
        )

    def _loaded_as(self, name: str) -> Loaded:
        loaded = self._loaded.get(name)
        if loaded is None:
            raise NotFound(f"there is no state {name!r}", param="state_viewname", code="no_such_state")
        return loaded

    def _put(self, loaded: dict[str, Loaded]) -> None:
        """These are there now; with the lock."""
        self._loaded = loaded
        self._starts = {entry.start.key: entry.start for entry in loaded.values()}
        self._write()
        self.changed(self.variants)

    def _write(self) -> None:
        self._remembered.write([entry.order for entry in self._loaded.values()])


def orders_of(states: str, folder: str | None) -> list[LoadState]:
    """The states of `--state`: NAME=FILE, several separated by commas; FILE lies where it says, or in `folder`. UsageError."""
    orders = []
    for entry in filter(None, (part.strip() for part in states.split(","))):
        name, _, file = (part.strip() for part in entry.partition("="))
        if not name or not file:
            raise UsageError(f"--state: wants NAME=FILE, not {entry!r}", param="state")
        places = [Path(file).expanduser(), *([Path(folder).expanduser() / file] if folder else [])]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise UsageError(f"--state {name}: no such file: {file}", param="state")
        if any(order.name == name for order in orders):
            raise UsageError(f"--state: {name!r} comes twice", param="state")
        orders.append(LoadState(name=name, files=[str(found.resolve())]))
    return orders
