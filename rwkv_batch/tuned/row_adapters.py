"""The adapters of single rows that an engine has: loaded by orders while it runs, found by requests, back after a restart.

A row keeps the adapter that it began with, whatever is loaded, replaced or removed meanwhile.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from rwkv_batch.config import Config
from rwkv_batch.errors import (
    CheckpointError,
    Conflict,
    Forbidden,
    NotFound,
    RwkvBatchError,
    StorageFailed,
    Unprocessable,
    UsageError,
)
from rwkv_batch.model.adapters import adapter_file
from rwkv_batch.model.adapters.adapter import Scaling
from rwkv_batch.model.adapters.bank import AdapterBank, LoadedAdapter
from rwkv_batch.model.weights import ModelShape, Weights
from rwkv_batch.served.variants import ADAPTER, AdapterOrder, LoadAdapter, RemoveAdapters, Variant, VariantsNow
from rwkv_batch.tuned.registry import Start
from rwkv_batch.tuned.remembered import Remembered

log = logging.getLogger("rwkv_batch.engine")

Answered = Callable[[VariantsNow | RwkvBatchError], None]
FIELD = "adapter_filename"
RANKS = 256  # that there is room for where single rows have adapters


class Entry(NamedTuple):
    """One that is loaded under a name."""

    order: LoadAdapter
    variant: Variant
    adapter: LoadedAdapter


class RowAdapters:
    """What is loaded. Methods may be called from any thread; one load runs at a time, in a thread of its own.

    bank     where they are; None = this engine has no room for any
    changed  is called whenever the variants are others
    """

    def __init__(self, bank: AdapterBank | None):
        self.bank = bank
        self.changed: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._loaded: dict[str, Entry] = {}
        self._busy_with: str | None = None
        self._remembered = Remembered(LoadAdapter, "adapters")

    @property
    def variants(self) -> list[Variant]:
        """What there is, in the order in which it was loaded."""
        return [entry.variant for entry in list(self._loaded.values())]

    def find(self, key: str) -> Start:
        """What a request's rows have; NotFound when it is not there any more."""
        for entry in list(self._loaded.values()):
            if entry.variant.key == key:
                return Start(key, (None,), entry.adapter)
        raise NotFound("the adapter that this request names was removed", param="model", code="model_not_found")

    def execute(self, order: AdapterOrder, answer: Answered) -> None:
        """Carry out an order; `answer` is called once, for a load in a thread of its own. Raises what refuses it at once."""
        if isinstance(order, RemoveAdapters):
            answer(self._remove(order.name))
            return
        with self._lock:
            if self._busy_with is not None:
                raise Conflict(f"{self._busy_with!r} is being loaded", code="load_running", retry_after=1.0)
            self._check(order)
            self._busy_with = order.name

        def run() -> None:
            try:
                result: VariantsNow | RwkvBatchError = self.load(order)
            except RwkvBatchError as error:
                result = error
            except Exception:
                log.exception("an adapter could not be loaded")
                result = StorageFailed("the adapter could not be loaded; the log says why", code="load_failed")
            with self._lock:
                self._busy_with = None
            answer(result)

        threading.Thread(target=run, name="adapter", daemon=True).start()

    def load(self, order: LoadAdapter) -> VariantsNow:
        """Load it in this thread. Raises what refuses it."""
        began, file = time.monotonic(), Path(order.file)
        with self._lock:
            self._check(order)
        adapter = _read(file, order.scaling)
        try:
            loaded = self.bank.load(adapter)
        except RwkvBatchError as error:
            error.message = _short(error.message, file)
            error.param = FIELD
            raise
        variant = Variant(
            name=order.name, kind="adapter", key=ADAPTER + loaded.key, temperature=order.temperature, top_p=order.top_p
        )
        with self._lock:
            self._put({**self._loaded, order.name: Entry(order, variant, loaded)})
        level = logging.WARNING if adapter.assumed else logging.INFO
        log.log(level, "%r for single rows: %s; %.2f s", order.name, adapter.line(), time.monotonic() - began)
        return VariantsNow(variants=self.variants, adapter=loaded.report)

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
                    log.error("the adapter %r, loaded before, is not there any more: %s", order.name, error.message)
        self._remembered.write_to(file)
        with self._lock:
            self._write()

    def _check(self, order: LoadAdapter) -> None:
        """Raise what refuses a load whatever its file holds; with the lock."""
        if self.bank is None:
            raise Forbidden(
                f"{FIELD}: needs a server with --adapter-ranks, the room for adapters", param=FIELD, code="no_adapters"
            )
        if order.name in self._loaded and not order.replace:
            raise Conflict(
                f"adapter_viewname: {order.name!r} is there already; `replace` says to take its place",
                param="adapter_viewname", code="name_taken",
            )  # fmt: skip

    def _remove(self, name: str | None) -> VariantsNow | RwkvBatchError:
        with self._lock:
            if name is not None and name not in self._loaded:
                return NotFound(f"there is no adapter {name!r}", param="adapter_viewname", code="no_such_adapter")
            self._put({known: entry for known, entry in self._loaded.items() if name not in (None, known)})
        return VariantsNow(variants=self.variants)

    def _put(self, loaded: dict[str, Entry]) -> None:
        """These are there now; with the lock."""
        self._loaded = loaded
        self._write()
        self.changed()

    def _write(self) -> None:
        self._remembered.write([entry.order for entry in self._loaded.values()])


def columns_of(config: Config) -> int:
    """Return how many ranks of adapters for single rows there is room for."""
    return RANKS * bool(config.row_adapter) if config.adapter_ranks is None else config.adapter_ranks


def bank_for(config: Config, weights: Weights, num_slots: int, *, only_adding: bool) -> AdapterBank | None:
    """Return the room for adapters of single rows, None where there is to be none or can be none. UsageError."""
    if not columns_of(config):
        return None
    if not isinstance(weights.shape, ModelShape):
        why = f"rows of {weights.architecture} have no adapters of their own; --adapter merges one"
        if config.row_adapter:
            raise UsageError(f"--row-adapter: {why}", param="row_adapter")
        log.info("--adapter-ranks: %s", why)
        return None
    return AdapterBank(weights, columns_of(config), num_slots, only_adding=only_adding)


def row_adapters_of(config: Config, bank: AdapterBank | None) -> RowAdapters:
    """Return the adapters that requests may name for their rows, those of `--row-adapter` loaded. UsageError."""
    adapters = RowAdapters(bank)
    for order in row_orders_of(config.row_adapter or ""):
        try:
            adapters.load(order)
        except RwkvBatchError as error:
            raise UsageError(f"--row-adapter {order.name}: {error.message}", param="row_adapter") from None
    return adapters


def row_orders_of(adapters: str) -> list[LoadAdapter]:
    """The adapters of `--row-adapter`: NAME=FILE[:SCALE], several separated by commas. UsageError."""
    orders: dict[str, LoadAdapter] = {}
    for text in filter(None, (part.strip() for part in adapters.split(","))):
        name, _, file = (part.strip() for part in text.partition("="))
        if not name or not file:
            raise UsageError(f"--row-adapter: wants NAME=FILE[:SCALE], not {text!r}", param="row_adapter")
        if name in orders:
            raise UsageError(f"--row-adapter: {name!r} comes twice", param="row_adapter")
        path, scaling = adapter_file.parse(file)
        orders[name] = LoadAdapter(name=name, file=str(Path(path).expanduser().absolute()), scaling=scaling.text)
    return list(orders.values())


def _read(file: Path, scaling: str) -> adapter_file.Adapter:
    """Read a file; Unprocessable for whatever cannot be used, Conflict when it changes meanwhile."""
    try:
        before = file.stat()
        adapter = adapter_file.read(file, Scaling.parse(scaling) if scaling else None)
        after = file.stat()
    except CheckpointError as error:
        raise Unprocessable(f"{FIELD}: {_short(error.message, file)}", param=FIELD, code="adapter_unusable") from None
    except OSError as error:
        raise Unprocessable(f"{FIELD}: {file.name}: {error.strerror}", param=FIELD, code="adapter_unusable") from None
    if (before.st_size, before.st_mtime_ns, before.st_ino) != (after.st_size, after.st_mtime_ns, after.st_ino):
        raise Conflict(f"{FIELD}: {file.name} changed while it was read", param=FIELD, code="file_changed", retry_after=1.0)
    return adapter


def _short(message: str, file: Path) -> str:
    """A message without the folder, which callers need not know."""
    return message.replace(str(file.parent) + os.sep, "")
