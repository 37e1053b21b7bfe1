"""Which variant of the model a request means, and what follows from that for its fields."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from routes.schemas import Body, SamplingBody, SomeBody
from rwkv_batch.errors import InvalidRequest, NotFound
from rwkv_batch.request import Request
from rwkv_batch.served.variants import Choice, ListVariants, Variant, choices, id_of, resolve

if TYPE_CHECKING:
    from routes.http.context import RequestContext
    from routes.http.served import ServedModel

DEFAULT_MODEL = Body.model_fields["model"].default
NAMED_IDS = 20  # in an error


def variants_of(models: Iterable["ServedModel"]) -> dict[str, list[Variant]]:
    """Those of each model."""
    return {model.name: model.info.variants if model.info is not None else [] for model in models}


def served(context: "RequestContext") -> dict[str, list[Variant]]:
    """The variants of each model, as far as this process knows."""
    return variants_of(context.app.models.all)


def served_choices(context: "RequestContext") -> list[Choice]:
    """All that a request may name, for the lists of models."""
    return choices(served(context))


def served_ids(context: "RequestContext") -> list[str]:
    """Their names."""
    return [id_of(*choice) for choice in served_choices(context)]


async def choose(context: "RequestContext", body: SamplingBody) -> Variant | None:
    """What a body asks for by its model, or by the name of a state alone; None is the plain model. NotFound, InvalidRequest.

    With nothing served but one plain model, any name goes. A name that is not known is asked for once more: another process
    may have had it loaded just now.
    """
    known = served(context) | variants_of([context.model])  # which may have gone from the list meanwhile
    found = _found(context, body, known)
    if isinstance(found, NotFound):
        now = await context.app.execute(ListVariants(), context.model)
        found = _found(context, body, {**known, context.model_name: now.variants})
    if isinstance(found, NotFound):
        raise found
    return found


def _found(context: "RequestContext", body: SamplingBody, served: Mapping[str, Sequence[Variant]]) -> Variant | NotFound | None:
    by_model = _by_model(context, body, served)
    if body.state is None or isinstance(by_model, NotFound):
        return by_model
    by_name = next((variant for variant in served[context.model_name] if variant.name == body.state), None)
    if by_name is None:
        return _unknown("state", f"no such state: {body.state!r}", served)
    if by_model not in (None, by_name):
        raise InvalidRequest("state: another one than that of model", param="state")
    return by_name


def _by_model(
    context: "RequestContext", body: SamplingBody, served: Mapping[str, Sequence[Variant]]
) -> Variant | NotFound | None:
    wanted, own = body.model, {context.model_name: served[context.model_name]}
    choice = resolve(wanted, own)
    if choice is not None:
        return choice.variant
    if wanted in ("", DEFAULT_MODEL):
        return None
    if len(choices(own)) == 1 and not wanted.startswith(f"{context.model_name} "):
        return None
    return _unknown("model", f"no such model: {wanted!r}", served)


def _unknown(field: str, problem: str, served: Mapping[str, Sequence[Variant]]) -> NotFound:
    ids = [id_of(*choice) for choice in choices(served)]
    more = f" and {len(ids) - NAMED_IDS} more" if len(ids) > NAMED_IDS else ""
    there = ", ".join(map(repr, ids[:NAMED_IDS]))
    return NotFound(f"{field}: {problem}; this server has {there}{more}", param=field, code="model_not_found")


def with_defaults(body: SomeBody, variant: Variant | None) -> SomeBody:
    """The body with what the variant says where the client says nothing."""
    if variant is None:
        return body
    defaults = {"temperature": variant.temperature, "top_p": variant.top_p}
    update = {name: value for name, value in defaults.items() if value is not None and name not in body.model_fields_set}
    return body.model_copy(update=update) if update else body


def fields_of(body: SamplingBody, variant: Variant | None) -> dict[str, Any]:
    """The fields of a request that say what its rows begin with. Raises InvalidRequest."""
    weights = body.mrss_gatingweight
    if variant is None or variant.kind != "mix":
        if weights is not None:
            raise InvalidRequest("mrss_gatingweight: needs a model that mixes states", param="mrss_gatingweight")
        return {} if variant is None else {"state": variant.key}
    given = variant.weights if weights is None else checked_weights(weights, len(variant.weights), "mrss_gatingweight")
    return {"state": variant.key, "weights": given}


def checked_weights(weights: list[float], num_parts: int, field: str) -> list[float]:
    """The weights of a mix, padded with 0. Raises InvalidRequest for those that make no mix."""
    if len(weights) > num_parts:
        raise InvalidRequest(f"{field}: {len(weights)} weights for {num_parts} states", param=field)
    if sum(weights) <= 0:
        raise InvalidRequest(f"{field}: their sum must be more than 0", param=field)
    return [*weights, *[0.0] * (num_parts - len(weights))]


def check_mixed(request: Request) -> None:
    """Raise InvalidRequest for what an answer of mixed states cannot have."""
    if not request.weights:
        return
    if request.session is not None:
        raise InvalidRequest("session_id: a session keeps one state, and this model mixes several", param="session_id")
    if request.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs: not with a model that mixes states", param="prompt_logprobs")
