"""What HTTP processes and the engine process say to each other, and its bytes. Knows nothing of models, sockets or HTTP."""

import time
from collections.abc import Iterable
from typing import Any

import msgspec

from rwkv_batch.request import Failure, Progress, Request, Text
from rwkv_batch.served.variants import Variant, VariantOrder, VariantsNow
from rwkv_batch.session_messages import Deleted, Page, SessionCommand

HIGH_WATER = 10_000  # of these that wait for an HTTP process that does not read: ten seconds of the quickest steps
SUBMIT_HIGH_WATER = 10_000  # that wait for the engine
PHASES = ("ready", "loading", "draining", "lost")  # what is told of several engines is the first of these that one is in
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)  # what decoding raises


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine runs, as HTTP processes are told: the engine may be lost and another one started in its seat.

    index     number of the engine, never given to another seat of this server
    address   ipc:// path
    device    what it was given, as --devices names it, "0" or "cpu"; empty: that is left to the engine
    sessions  whether it keeps sessions
    """

    index: int = 0
    address: str
    device: str = ""
    sessions: bool = True


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the loaded engine is; sent to every HTTP process when it is ready.

    model           name for people, without folder and ending
    fingerprint     identifies the weights; empty when there are none
    device          as torch names it, "cpu" or "cuda:0 NVIDIA H200"
    dtype, ops      what was chosen, "fp16", "kernels"
    quant           format of the large matrices, "int8"; empty = dtype
    weight_bytes    memory that the weights take
    slots           sequences decoded at the same time
    prefill_budget  prompt tokens of one step
    vocab_size      columns of the logits
    layers, width   shape, for the start-up lines
    parameters      number of weights
    load_seconds    time that loading took
    state_bytes     most that the file of one session takes; 0 = no sessions
    adapters        what was merged into it, each as its file was understood
    variants        what it can be asked for in beside its plain form; changes while it runs
    """

    model: str
    fingerprint: str = ""
    device: str = "cpu"
    dtype: str = "fp32"
    quant: str = ""
    weight_bytes: int = 0
    ops: str = "reference"
    slots: int = 0
    prefill_budget: int = 0
    vocab_size: int = 65536
    layers: int = 0
    width: int = 0
    parameters: int = 0
    load_seconds: float = 0.0
    state_bytes: int = 0
    adapters: list[dict[str, Any]] = []
    variants: list[Variant] = []


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """HTTP process: here I am."""

    pid: int


class Alive(msgspec.Struct, tag="alive", array_like=True, frozen=True):
    """HTTP process: still here."""


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """HTTP process: run this.

    endpoint  the path that was called
    given_id  the caller's own id of the request
    whole     id of the request that this is a part of; empty: it is no part
    now       refuse it when not all of its rows find a free slot: another engine is thought to have some
    """

    request: Request
    endpoint: str = ""
    given_id: str = ""
    whole: str = ""
    now: bool = False


class RequestId(msgspec.Struct, frozen=True):
    """What must be readable of a request, so that its owner can be told that the rest is not."""

    id: str


class Unreadable(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """A `Submit` of which only the id can be read."""

    request: RequestId


class Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    """HTTP process: nobody wants this any more."""

    request_id: str


class Ask(msgspec.Struct, tag="ask", array_like=True, frozen=True):
    """HTTP process: which requests run or wait, of all HTTP processes? With `stop` they are ended.

    question    comes back with the answer
    request_id  only this request, or all parts of this call
    endpoint    only requests of this path
    """

    question: str
    stop: bool = False
    request_id: str | None = None
    endpoint: str | None = None


class Execute(msgspec.Struct, tag="execute", array_like=True, frozen=True):
    """HTTP process: carry out a command about sessions or variants. `question` comes back with the result."""

    question: str
    command: SessionCommand | VariantOrder


class CommandResult(msgspec.Struct, tag="command_result", array_like=True, frozen=True):
    """Engine: what came of it; exactly one of the two is there."""

    question: str
    answer: Page | Deleted | VariantsNow | None
    failure: Failure | None = None


class Status(msgspec.Struct, tag="status", array_like=True, frozen=True):
    """Engine: sign of life. `phase` is "loading", "ready" or "draining"; `info` is there once the model is loaded.

    others  rows that other HTTP processes have there; so it is in `Accepted` and `Batch`
    """

    phase: str
    info: EngineInfo | None
    stats: dict[str, int | float]
    others: int = 0


class Accepted(msgspec.Struct, tag="accepted", array_like=True, frozen=True):
    """Engine: these requests wait or run."""

    request_ids: list[str]
    others: int = 0


class Live(msgspec.Struct, array_like=True):
    """A request that runs or waits. `created` is epoch seconds, `tokens` counts what was sampled; `whole`: see `Submit`."""

    id: str
    endpoint: str
    created: float
    prompts: int
    prompt_tokens: int
    max_tokens: int
    ended: int = 0
    tokens: int = 0
    given_id: str = ""
    whole: str = ""


class Found(msgspec.Struct, tag="found", array_like=True, frozen=True):
    """Engine: the requests that were asked for, oldest first."""

    question: str
    requests: list[Live]


class Batch(msgspec.Struct, tag="batch", array_like=True, frozen=True):
    """Engine: what one step brought all requests of this HTTP process, and which of them failed."""

    progress: list[Progress | Text]
    failures: list[Failure]
    others: int = 0


class Forgotten(msgspec.Struct, tag="forgotten", array_like=True, frozen=True):
    """Engine: you did not drain, or I do not know you; your tickets are cancelled, say hello again."""


ToEngine = Hello | Alive | Submit | Cancel | Ask | Execute
ToHttp = Status | Accepted | Batch | Found | CommandResult | Forgotten

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_unreadable = msgspec.msgpack.Decoder(Unreadable).decode
decode_to_http = msgspec.msgpack.Decoder(ToHttp).decode


def live_of(message: Submit) -> Live:
    """What is known of a request when it comes in."""
    request = message.request
    prompt_tokens = sum(map(len, request.prompts))
    return Live(
        request.id, message.endpoint, time.time(), request.num_rows, prompt_tokens, request.max_tokens,
        given_id=message.given_id, whole=message.whole,
    )  # fmt: skip


def matches(question: Ask, live: Live) -> bool:
    """Whether a request is one of those asked for, by our id or the caller's own.

    The requests of a call have its id, a hyphen and a number.
    """
    wanted = question.request_id
    if (
        wanted is not None
        and wanted not in (live.id, live.given_id or None, live.whole or None)
        and not live.id.startswith(wanted + "-")
    ):
        return False
    return question.endpoint is None or live.endpoint == question.endpoint


def joined(found: Iterable[Live]) -> list[Live]:
    """Requests, oldest first, the parts of one as one: of their rows those that some engine has."""
    whole: dict[str, Live] = {}
    for live in sorted(found, key=lambda live: live.created):
        name = live.whole or live.id
        one = whole.get(name)
        if one is None:
            whole[name] = msgspec.structs.replace(live, id=name, whole="")
        else:
            one.prompts += live.prompts
            one.prompt_tokens += live.prompt_tokens
            one.ended += live.ended
            one.tokens += live.tokens
    return list(whole.values())
