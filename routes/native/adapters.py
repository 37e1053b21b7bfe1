"""Adapters of single rows: loaded and removed while the server runs. `routes/models.py` has those that are merged."""

import time
from pathlib import Path
from typing import Annotated

from pydantic import Field

from routes.http.context import RequestContext
from routes.http.replies import Response, json_reply
from routes.http.variants import served_ids
from routes.native.tuned import Flag, Optional, Portion, Temperature, own_variants
from routes.schemas import Body, validate
from rwkv_batch.errors import Conflict, Forbidden, InvalidRequest, NotFound
from rwkv_batch.served.folders import file_below, real_path, view_name
from rwkv_batch.served.variants import LoadAdapter, RemoveAdapters, id_of

SUFFIXES = (".pth", ".safetensors", ".st", ".pt", ".bin")
BESIDE = ("init_pissa.pth", "adapter_config.json")  # what is read with a file
FIELD, FLAG = "adapter_filename", "--adapters-dir"
Factor = Annotated[Annotated[float, Field(ge=-1000, le=1000)] | None, Optional]
Alpha = Annotated[Annotated[float, Field(ge=-1_000_000, le=1_000_000)] | None, Optional]


class LoadAdapterBody(Body):
    """POST /loadadapter. Numbers may be texts.

    adapter_scaling  what the adapter is multiplied by, or `lora_alpha`, which its rank divides; else as the file says
    replace          whether an adapter of this name gives way
    """

    adapter_filename: str = ""
    adapter_viewname: str = ""
    adapter_scaling: Factor = None
    lora_alpha: Alpha = None
    default_temperature: Temperature = None
    default_top_p: Portion = None
    replace: Flag = None

    def scaling(self) -> str:
        """It as the setting has it, "" = not given. Raises InvalidRequest."""
        if self.adapter_scaling is not None and self.lora_alpha is not None:
            raise InvalidRequest("lora_alpha: adapter_scaling says it already", param="lora_alpha")
        if self.lora_alpha is not None:
            return f"alpha={self.lora_alpha!r}"
        return "" if self.adapter_scaling is None else repr(self.adapter_scaling)


class RemoveAdapterBody(Body):
    """POST /removeadapter; without a name all go."""

    adapter_viewname: str | None = None


async def load_adapter(context: RequestContext) -> Response:
    """POST /loadadapter: have an adapter under a name."""
    body, began = validate(LoadAdapterBody, context.body), time.monotonic()
    name = view_name(body.adapter_viewname, "adapter_viewname")
    known = next((one for one in own_variants(context) if one.name == name), None)
    if name in context.app.models.names or (known is not None and known.kind != "adapter"):
        raise Conflict(f"adapter_viewname: {name!r} is the name of something else", param="adapter_viewname", code="name_taken")
    order = LoadAdapter(
        name=name, file=str(file_of(context, body.adapter_filename)), scaling=body.scaling(),
        temperature=body.default_temperature, top_p=body.default_top_p, replace=bool(body.replace),
    )  # fmt: skip
    now = await context.app.execute(order, context.model)
    facts = {"model": f"{context.model_name} {name}", "seconds": round(time.monotonic() - began, 3)}
    return json_reply({"status": "success", **facts, **now.adapter})


async def remove_adapter(context: RequestContext) -> Response:
    """POST /removeadapter: forget an adapter, or all. Rows that have one keep it."""
    body = validate(RemoveAdapterBody, context.body)
    name = body.adapter_viewname
    if name is not None:
        wanted = name.strip()
        found = (one for one in own_variants(context) if one.kind == "adapter")
        known = next((one for one in found if wanted in (one.name, id_of(context.model_name, one))), None)
        if known is None:
            raise NotFound(
                f"adapter_viewname: there is no adapter {wanted!r}", param="adapter_viewname", code="no_such_adapter"
            )
        name = known.name
    await context.app.execute(RemoveAdapters(name=name), context.model)
    return json_reply({"status": "success", "models": served_ids(context)})


def file_of(context: RequestContext, name: str) -> Path:
    """The file that a body names; what is read beside it lies in the folder too. Raises what `file_below` does."""
    folder = context.config.adapters_dir
    file = file_below(folder, name, field=FIELD, flag=FLAG, suffixes=SUFFIXES)
    root = real_path(Path(folder).expanduser())
    for beside in (file.with_name(other) for other in BESIDE):
        if beside.exists() and not real_path(beside).is_relative_to(root):
            raise Forbidden(
                f"{FIELD}: {beside.name} beside it is not in the folder of {FLAG}", param=FIELD, code="outside_folder"
            )
    return file
