"""The models that a server has, and orders to load and remove one, as HTTP processes and supervisor tell them each other."""

from typing import Any

import msgspec


class Defaults(msgspec.Struct, frozen=True):
    """What a request that does not say gets from its model.

    end  text that ends an answer, and stands between the turns of a conversation
    """

    temperature: float | None = None
    top_p: float | None = None
    end: str | None = None


class ModelEntry(msgspec.Struct, frozen=True):
    """A model and the numbers of the engines that run it."""

    name: str
    engines: list[int]
    defaults: Defaults = Defaults()


class ModelTable(msgspec.Struct, frozen=True):
    """All models that requests can name, the default one first. `version` rises with each change."""

    version: int
    models: list[ModelEntry]

    def entry(self, name: str) -> ModelEntry | None:
        """The model of this name."""
        return next((entry for entry in self.models if entry.name == name), None)

    def changed(self, models: list[ModelEntry]) -> "ModelTable":
        """The next version."""
        return ModelTable(self.version + 1, models)


class LoadModel(msgspec.Struct, frozen=True, tag="load"):
    """Serve the model of a file. It takes the place of the model of its name, else of the default one, or with `keep` stands
    beside all others.

    file      absolute path
    settings  of its engine that differ from the server's own, by their names in `Config`
    """

    file: str
    name: str
    settings: dict[str, str] = {}
    defaults: Defaults = Defaults()
    keep: bool = False
    replace: bool = False


class RemoveModel(msgspec.Struct, frozen=True, tag="remove"):
    """Serve a model no longer."""

    name: str


ModelOrder = LoadModel | RemoveModel


class Loaded(msgspec.Struct, frozen=True):
    """What came of an order: the model, what it is, and how long it took. `models`: the names that are served now."""

    name: str
    seconds: float
    models: list[str]
    layers: int = 0
    width: int = 0
    parameters: int = 0
    fingerprint: str = ""
    quant: str = ""
    weight_bytes: int = 0
    adapters: list[dict[str, Any]] = []
