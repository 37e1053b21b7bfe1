"""The models that this HTTP process sends requests to: which one a call means, and how they come and go."""

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from rwkv_batch.errors import Forbidden, NotFound
from rwkv_batch.ipc.client import EngineClient
from rwkv_batch.ipc.group import EngineGroup
from rwkv_batch.ipc.messages import EngineInfo
from rwkv_batch.request import Failure
from rwkv_batch.served.models import Loaded, ModelEntry, ModelOrder, ModelTable
from rwkv_batch.served.variants import resolve
from rwkv_batch.text import tokenizer
from rwkv_batch.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Tokenizers:
    """One for each size of vocabulary, loaded in a thread of its own, which takes about a second."""

    def __init__(self) -> None:
        self._loaded: dict[int, Tokenizer] = {}
        self._wanted: set[int] = set()

    def want(self, info: EngineInfo) -> None:
        """Begin to load that of a model, unless that was done before."""
        self.begin(info.vocab_size)

    def begin(self, vocab_size: int) -> None:
        """The same for models with such a vocabulary."""

        def run() -> None:
            try:
                self._loaded[vocab_size] = tokenizer.for_vocab(vocab_size)
            except Exception:
                log.exception("the tokenizer cannot be loaded")

        if vocab_size not in self._wanted:
            self._wanted.add(vocab_size)
            threading.Thread(target=run, name="tokenizer", daemon=True).start()

    def get(self, info: EngineInfo | None) -> Tokenizer | None:
        """That of a model; None while it loads."""
        return self._loaded.get(info.vocab_size) if info is not None else None


class ServedModel:
    """A model as the calls of this process use it. `calls`: the ids of those that do."""

    def __init__(self, entry: ModelEntry, engines: EngineGroup | EngineClient, tokenizers: Tokenizers):
        self.entry = entry
        self.engines = engines
        self.calls: set[str] = set()
        self._tokenizers = tokenizers

    @property
    def name(self) -> str:
        """What requests call it."""
        return self.entry.name

    @property
    def info(self) -> EngineInfo | None:
        """What it is; None until an engine has said so."""
        return self.engines.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Of its vocabulary; None while it loads."""
        return self._tokenizers.get(self.info)

    @property
    def ready(self) -> bool:
        """Whether requests can go there."""
        return self.engines.ready and self.tokenizer is not None


class Models:
    """All models of the table that holds, the default one first.

    report  tells the supervisor; without one nothing can be loaded
    """

    def __init__(self, client: EngineClient, table: ModelTable, report: Callable[..., None] | None = None):
        self.client = client
        self.tokenizers = Tokenizers()
        self.report = report
        self.version = table.version
        self._served = [self._model(entry) for entry in table.models]
        self._going: list[ServedModel] = []
        self._coming: ModelTable | None = None
        self._lock = threading.Lock()
        self._orders: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future]] = {}

    @classmethod
    def one(cls, client: EngineClient, name: str) -> "Models":
        """The one model that all engines run."""
        models = cls(client, ModelTable(0, []))
        models._served = [ServedModel(ModelEntry(name, []), client, models.tokenizers)]
        return models

    @property
    def default(self) -> ServedModel:
        """What serves a request that names no model."""
        return self._served[0]

    @property
    def names(self) -> list[str]:
        """What `model` can be."""
        return [model.name for model in self._served]

    @property
    def all(self) -> list[ServedModel]:
        """The models."""
        return list(self._served)

    def find(self, wanted: Any, call: str) -> ServedModel:
        """The model that a call means, which is kept until the call is no longer in `calls`.

        Raises NotFound where there are several and it is none of them.
        """
        with self._lock:
            named = self._named(wanted)
            if named is None and len(self._served) > 1 and isinstance(wanted, str) and wanted:
                raise NotFound(f"no such model; this server has {', '.join(self.names)}", param="model", code="model_not_found")
            model = named or self._served[0]
            if self.report is not None:  # else no model ever goes
                model.calls.add(call)
            return model

    def _named(self, wanted: Any) -> ServedModel | None:
        """The model of an id, which may name a variant of it that is not known here yet."""
        if not isinstance(wanted, str):
            return None
        choice = resolve(wanted, {model.name: model.info.variants if model.info is not None else [] for model in self._served})
        begins = [model for model in self._served if wanted.startswith(f"{model.name} ")]
        longest = max(begins, key=lambda model: len(model.name), default=None)
        return longest if choice is None else next(model for model in self._served if model.name == choice.model)

    # --- coming and going ---

    def told(self, table: ModelTable) -> None:
        """The supervisor has another table: it holds as soon as this process can use all of it. Any thread."""
        with self._lock:
            self._coming = table
        self.tick()

    def tick(self) -> None:
        """Go on: take the table that was told, and say what is used no longer. Any thread."""
        if self._coming is None and not self._going:
            return
        with self._lock:
            taken = self._coming is not None and self._take(self._coming)
            gone = [model for model in self._going if not model.calls]
            self._going = [model for model in self._going if model.calls]
            if taken or gone:
                used = [number for model in self._going for number in model.entry.engines]
                if self.report is not None:
                    self.report("models", version=self.version, engines=used)

    def _take(self, table: ModelTable) -> bool:
        """Go by a table if all engines that are new in it can be used; returns whether that is so."""
        known = {tuple(model.entry.engines): model for model in (*self._served, *self._going)}
        models = [known.get(tuple(entry.engines)) or self._model(entry) for entry in table.models]
        if not all(model.ready for model in models if model not in self._served):
            return False
        self._going = [model for model in (*self._going, *self._served) if model not in models]
        self._served, self.version, self._coming = models, table.version, None
        return True

    def _model(self, entry: ModelEntry) -> ServedModel:
        return ServedModel(entry, EngineGroup(self.client, entry.engines), self.tokenizers)

    # --- orders ---

    async def order(self, order: ModelOrder) -> Loaded:
        """Have the supervisor carry out an order. Raises what it failed with."""
        if self.report is None:
            raise Forbidden("no models are loaded here", code="no_supervisor")
        question, loop = secrets.token_hex(8), asyncio.get_running_loop()
        future: asyncio.Future[Loaded | Failure] = loop.create_future()
        self._orders[question] = loop, future
        try:
            self.report("order", question=question, order=msgspec.to_builtins(order))
            result = await future
        finally:
            self._orders.pop(question, None)
        if isinstance(result, Failure):
            raise result.exception()
        return result

    def answered(self, question: str, result: Loaded | Failure) -> None:
        """What came of an order. Any thread."""
        loop, future = self._orders.get(question, (None, None))
        if loop is not None:
            loop.call_soon_threadsafe(lambda: future.done() or future.set_result(result))
