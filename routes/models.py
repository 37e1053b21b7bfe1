"""Models that come and go while the server runs: POST /loadmodel, /removemodel and /switch-model, GET /models."""

import asyncio
import codecs
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from routes.http.context import RequestContext
from routes.http.replies import Response, json_reply
from routes.http.variants import served_ids
from routes.schemas import Body, validate
from rwkv_batch.config import MODEL_SUFFIXES, Config
from rwkv_batch.errors import CheckpointError, InvalidRequest
from rwkv_batch.served.architectures import architecture_of
from rwkv_batch.served.folders import file_below, view_name
from rwkv_batch.served.glance import names_in
from rwkv_batch.served.models import Defaults, LoadModel, RemoveModel

FLAG = "--models-dir"
MAX_END = 64  # bytes of an end token
ESCAPE = re.compile(r"""\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[nrt\\'"])""")
TYPES = ("fp32", "bf16", "fp16")
FORMATS = ("int8", "fp8", "int4", "nf4", "fp6", "fp5")
ADAPTERS = (".pth", ".pt", ".bin", ".safetensors", ".st")  # endings of their files
Mode = Literal["lora", "dora", "pissa", "bone", "disha", "bat", "hybrid"]
DEVICE = re.compile(r"(?:cuda|cpu|mps|dml)(?::\d+)?")  # the word that may stand before it; the server's own device counts


class LoadBody(Body):
    """Which model to serve, as RWKV-Infer's clients send it: numbers may be texts, and "" stands for the default.

    adapter_mode  what kind the adapter is; its file says so itself
    keep     serve it beside what is served, instead of in the place of the model of its name or of the default one
    replace  with `keep`: a model of this name gives way
    """

    model_filename: str = ""
    model_viewname: str = ""
    model_strategy: str = ""
    adapter_filename: str = ""
    adapter_mode: Mode | None = None
    adapter_scaling: float | None = Field(None, ge=-1000, le=1000)
    default_temperature: float | None = Field(None, ge=0, le=1000)
    default_top_p: float | None = Field(None, ge=0, le=1)
    endtoken: str | None = None
    keep: bool = False
    replace: bool = False

    @model_validator(mode="before")
    @classmethod
    def empty_is_default(cls, data: Any) -> Any:
        """Drop empty texts."""
        return {key: value for key, value in data.items() if value != ""} if isinstance(data, dict) else data

    @field_validator("endtoken")
    @classmethod
    def read_escapes(cls, value: str | None) -> str | None:
        """`\\n` and the like may come as two characters, because shells and JSON are in the way."""
        if value is None:
            return None
        text = ESCAPE.sub(lambda found: codecs.decode(found[0], "unicode_escape"), value)
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise ValueError("half of a surrogate pair") from None
        if size > MAX_END:
            raise ValueError(f"at most {MAX_END} bytes")
        return text

    def order(self, config: Config) -> LoadModel:
        """What the supervisor is asked for; reads a part of the file. Raises what `checked_file` does, InvalidRequest."""
        settings = settings_of(self.model_strategy, "model_strategy")
        if self.adapter_filename:
            settings["adapter"] = adapter_of(config, self.adapter_filename, self.adapter_scaling)
        return LoadModel(
            file=str(checked_file(config, self.model_filename, "model_filename")),
            name=view_name(self.model_viewname or stem(self.model_filename), "model_viewname"),
            settings=settings,
            defaults=Defaults(self.default_temperature, self.default_top_p, self.endtoken),
            keep=self.keep,
            replace=self.replace,
        )


class RemoveBody(Body):
    """Which model to serve no longer."""

    model_viewname: str = ""


class SwitchBody(Body):
    """The same as RWKV-Runner's clients send it; what else they send says nothing here."""

    model: str = Field("", max_length=4096)
    strategy: str = ""

    def order(self, config: Config) -> LoadModel:
        """See LoadBody."""
        return LoadModel(
            file=str(checked_file(config, self.model, "model")),
            name=view_name(stem(self.model), "model"),
            settings=settings_of(self.strategy, "strategy"),
        )


def stem(name: str) -> str:
    """A file's name without folder and ending."""
    last = Path(name).name
    return last.removesuffix(next((suffix for suffix in MODEL_SUFFIXES if last.endswith(suffix)), ""))


def checked_file(config: Config, name: str, field: str) -> Path:
    """The checkpoint of this name, as far as a glance tells that it is one. Raises what `file_below` and `names_in` do."""
    file = file_below(config.models_dir, name, field=field, flag=FLAG, suffixes=MODEL_SUFFIXES)
    architecture_of(names_in(file), file.name)
    return file


def adapter_of(config: Config, name: str, scaling: float | None) -> str:
    """The setting for an adapter that is merged into the model. Raises what `checked_file` does."""
    field = "adapter_filename"
    file = file_below(config.adapters_dir, name, field=field, flag="--adapters-dir", suffixes=ADAPTERS)
    if {",", ":"} & set(str(file)):
        raise InvalidRequest(f"{field}: commas and colons cannot be in the path of an adapter", param=field)
    names_in(file)
    return str(file) if scaling is None else f"{file}:{scaling:g}"


def settings_of(strategy: str, field: str) -> dict[str, str]:
    """The settings that a strategy stands for: a type, a format, or both ("fp16i8"), behind a device. Raises InvalidRequest."""
    words = strategy.lower().split()
    if len(words) > 1 and DEVICE.fullmatch(words[0]):
        del words[0]
    if not words:
        return {}
    word = words[0]
    if len(words) == 1 and word in TYPES:
        return {"dtype": word, "quant": "none"}
    if len(words) == 1 and word in FORMATS:
        return {"quant": word}
    if len(words) == 1 and word.endswith("i8") and word[:-2] in TYPES:
        return {"dtype": word[:-2], "quant": "int8"}
    raise InvalidRequest(f"{field}: one of {', '.join((*TYPES, *FORMATS, 'fp16i8', 'bf16i8'))}, or empty", param=field)


async def load(context: RequestContext) -> Response:
    """POST /loadmodel: serve the model of a file."""
    return await serve(context, validate(LoadBody, context.body), "model_filename")


async def switch(context: RequestContext) -> Response:
    """POST /switch-model: serve the model of a file instead of the default one."""
    return await serve(context, validate(SwitchBody, context.body), "model")


async def serve(context: RequestContext, body: LoadBody | SwitchBody, field: str) -> Response:
    """Have the file looked at and loaded; `field` is where it was named. Raises what that failed with."""
    try:
        return await carry_out(context, await asyncio.to_thread(body.order, context.config))
    except CheckpointError as error:
        error.param = error.param or field
        raise


async def remove(context: RequestContext) -> Response:
    """POST /removemodel: serve a model no longer."""
    name = validate(RemoveBody, context.body).model_viewname
    names = context.app.models.names
    if not name and len(names) > 1:
        raise InvalidRequest(f"model_viewname: which of {', '.join(names)}", param="model_viewname")
    return await carry_out(context, RemoveModel(name or names[0]))


async def carry_out(context: RequestContext, order: LoadModel | RemoveModel) -> Response:
    """Have it done. Raises what it failed with."""
    done = await context.app.models.order(order)
    about = {"status": "success", "model": done.name, "models": done.models, "seconds": round(done.seconds, 3)}
    if isinstance(order, LoadModel):
        facts = ("layers", "width", "parameters", "fingerprint", "quant", "weight_bytes", "adapters")
        about |= {name: getattr(done, name) for name in facts}
    return json_reply(about)


async def index(context: RequestContext) -> Response:
    """GET /models: the names that `model` can have, as RWKV-Infer lists them."""
    return json_reply([{"object": "models", "id": name} for name in served_ids(context)])
