"""All variants that an engine has: tuned states, mixes of them and adapters, each kind in its registry."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from rwkv_batch.errors import Conflict, RwkvBatchError
from rwkv_batch.served.variants import ADAPTER, AdapterOrder, LoadAdapter, LoadState, Variant, VariantOrder, VariantsNow
from rwkv_batch.tuned.registry import Start, TunedStates
from rwkv_batch.tuned.row_adapters import RowAdapters


class EngineVariants:
    """Both registries as one. Methods may be called from any thread."""

    def __init__(self, states: TunedStates, adapters: RowAdapters):
        self.states = states
        self.adapters = adapters

    @property
    def variants(self) -> list[Variant]:
        """What there is."""
        return self.states.variants + self.adapters.variants

    def tell(self, changed: Callable[[list[Variant]], None]) -> None:
        """Have `changed` called with the variants whenever they are others."""
        self.states.changed = lambda variants: changed(self.variants)
        self.adapters.changed = lambda: changed(self.variants)

    def find(self, key: str) -> Start:
        """What a request's rows begin with; NotFound when it is not there any more."""
        return self.adapters.find(key) if key.startswith(ADAPTER) else self.states.find(key)

    def execute(self, order: VariantOrder, answer: Callable[[VariantsNow | RwkvBatchError], None]) -> None:
        """Carry out an order; `answer` is called once. Raises what refuses it at once."""

        def whole(result: VariantsNow | RwkvBatchError) -> None:
            answer(msgspec.structs.replace(result, variants=self.variants) if isinstance(result, VariantsNow) else result)

        if isinstance(order, LoadState | LoadAdapter):
            others = self.states if isinstance(order, LoadAdapter) else self.adapters
            if any(variant.name == order.name for variant in others.variants):
                field = "adapter_viewname" if isinstance(order, LoadAdapter) else "state_viewname"
                raise Conflict(f"{field}: {order.name!r} is the name of something else", param=field, code="name_taken")
        (self.adapters if isinstance(order, AdapterOrder) else self.states).execute(order, whole)

    def remember_in(self, file: Path) -> None:
        """Load what an engine before this one has left in `file` and beside it, and keep that up."""
        self.states.remember_in(file)
        self.adapters.remember_in(file.with_name(file.name + ".adapters"))
