"""Tuned states: loaded, mixed and removed while the server runs, with the routes and bodies of RWKV-Infer."""

import time
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from routes.http.context import RequestContext
from routes.http.replies import Response, json_reply
from routes.http.variants import checked_weights, served, served_ids
from routes.schemas import MAX_WEIGHTS, Body, Texts, Weights, validate
from rwkv_batch.errors import Conflict, InvalidRequest, NotFound
from rwkv_batch.served.folders import file_below, view_name
from rwkv_batch.served.variants import LoadState, RemoveStates, SetWeights, Variant, VariantsNow, id_of

SUFFIXES = (".pth", ".st", ".safetensors")

Optional = BeforeValidator(lambda value: None if value == "" else value)  # RWKV-Infer's clients send "" for the default
Temperature = Annotated[Annotated[float, Field(ge=0, le=1000)] | None, Optional]
Portion = Annotated[Annotated[float, Field(ge=0, le=1)] | None, Optional]
Flag = Annotated[bool | None, Optional]


class NamedState(Body):
    """What these bodies share. Numbers may be texts."""

    state_viewname: str = ""
    default_temperature: Temperature = None
    default_top_p: Portion = None

    def name(self) -> str:
        """The state's name. Raises InvalidRequest."""
        return view_name(self.state_viewname, "state_viewname")

    def defaults(self) -> dict[str, float | None]:
        """What requests that send none get."""
        return {"temperature": self.default_temperature, "top_p": self.default_top_p}


class LoadStateBody(NamedState):
    """POST /loadstatemodel.

    transpose  whether the file has key and value the other way round; without it its ending says so
    replace    whether a state of this name gives way
    """

    state_filename: str = ""
    transpose: Flag = None
    replace: Flag = None


class LoadMixBody(NamedState):
    """POST /mrss_loadstatemodel. The weights are those of the files in their order, and last that of the model's own start."""

    state_filenames: Annotated[Texts, Field(max_length=MAX_WEIGHTS)] = Field(default_factory=list)
    contain_originalstate: Flag = None
    state_gatingweight: Weights = Field(default_factory=list)
    transpose: Flag = None
    replace: Flag = None


class SetWeightsBody(NamedState):
    """POST /mrss_set_gatingweight; `state_viewname` may be the whole id."""

    state_gatingweight: Weights = Field(default_factory=list)


class RemoveBody(Body):
    """POST /removestatemodel; without a name all states go."""

    state_viewname: str | None = None


async def load_state(context: RequestContext) -> Response:
    """POST /loadstatemodel: have a tuned state under a name."""
    body = validate(LoadStateBody, context.body)
    order = LoadState(
        name=new_name(context, body),
        files=[file_of(context, body.state_filename, "state_filename")],
        transpose=body.transpose,
        replace=bool(body.replace),
        **body.defaults(),
    )
    return await loaded(context, order)


async def load_mix(context: RequestContext) -> Response:
    """POST /mrss_loadstatemodel: have a mix of several."""
    body = validate(LoadMixBody, context.body)
    if not body.state_filenames:
        raise InvalidRequest("state_filenames: names no file", param="state_filenames")
    if len(body.state_filenames) > context.config.mrssmax:
        raise InvalidRequest(f"state_filenames: at most {context.config.mrssmax} (--mrssmax)", param="state_filenames")
    original = bool(body.contain_originalstate)
    order = LoadState(
        name=new_name(context, body),
        files=[file_of(context, name, f"state_filenames[{i}]") for i, name in enumerate(body.state_filenames)],
        transpose=body.transpose,
        original=original,
        weights=checked_weights(body.state_gatingweight, len(body.state_filenames) + original, "state_gatingweight"),
        replace=bool(body.replace),
        **body.defaults(),
    )
    return await loaded(context, order)


async def set_weights(context: RequestContext) -> Response:
    """POST /mrss_set_gatingweight: give a mix other weights, of requests from now on."""
    body = validate(SetWeightsBody, context.body)
    known = known_state(context, body.name())
    if known.kind != "mix":
        raise InvalidRequest(f"state_viewname: {known.name!r} is a single state", param="state_viewname")
    weights = checked_weights(body.state_gatingweight, len(known.weights), "state_gatingweight")
    now = await context.app.execute(SetWeights(name=known.name, weights=weights, **body.defaults()), context.model)
    return success(context, now, known.name)


async def remove(context: RequestContext) -> Response:
    """POST /removestatemodel: forget a state, or all of them. Rows that began with one are not concerned."""
    body = validate(RemoveBody, context.body)
    name = None if body.state_viewname is None else known_state(context, body.state_viewname.strip()).name
    before = len(own_variants(context))
    now = await context.app.execute(RemoveStates(name=name), context.model)
    return json_reply({"status": "success", "removed": before - len(now.variants), "models": served_ids(context)})


def new_name(context: RequestContext, body: NamedState) -> str:
    """The name of what is to be loaded. Raises InvalidRequest, Conflict."""
    name = body.name()
    if name in context.app.models.names:
        raise Conflict("state_viewname: is the model's name", param="state_viewname", code="name_taken")
    return name


def file_of(context: RequestContext, name: str, field: str) -> str:
    """The file that a body names. Raises Forbidden, InvalidRequest, NotFound."""
    return str(file_below(context.config.states_dir, name, field=field, flag="--states-dir", suffixes=SUFFIXES))


def known_state(context: RequestContext, name: str) -> Variant:
    """A state by its name or its whole id. Raises NotFound."""
    found = next((one for one in own_variants(context) if name in (one.name, id_of(context.model_name, one))), None)
    if found is None:
        raise NotFound(f"state_viewname: there is no state {name!r}", param="state_viewname", code="no_such_state")
    return found


def own_variants(context: RequestContext) -> list[Variant]:
    """Those of the model that the body means."""
    return served(context)[context.model_name]


async def loaded(context: RequestContext, order: LoadState) -> Response:
    """Have it loaded by all engines."""
    began = time.monotonic()
    now = await context.app.execute(order, context.model)
    return success(context, now, order.name, transposed=now.transposed, seconds=round(time.monotonic() - began, 3))


def success(context: RequestContext, now: VariantsNow, name: str, **more: Any) -> Response:
    """RWKV-Infer's answer, and what it came to."""
    info = context.model.info
    variant = next((one for one in now.variants if one.name == name), None)
    facts = {"model": f"{context.model_name} {name}", "layers": info.layers if info else 0, **more}
    weights = {"state_gatingweight": variant.weights} if variant is not None and variant.weights else {}
    return json_reply({"status": "success", **facts, **weights})
