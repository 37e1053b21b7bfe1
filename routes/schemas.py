"""The JSON bodies of the native routes, and how they become requests.

Types are as lax as the reference's were ("5" for 5, 1 for true, null for the default), ranges are closed, numbers are finite.
Every refusal is InvalidRequest and names the field; no message repeats what the client sent.
"""

import json
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import msgspec
import pydantic_core
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from rwkv_batch.config import Config
from rwkv_batch.errors import BatchTooLarge, InvalidRequest
from rwkv_batch.request import Loop, Request
from rwkv_batch.served.models import Defaults
from rwkv_batch.session_messages import Session
from rwkv_batch.text import prompts
from rwkv_batch.text.prompts import Turn
from sampling.params import SamplingParams

DEFAULT_STOPS: list[int | str] = ["\nUser:"]  # token 0 always ends a row, listed or not
MAX_ID = 2**31 - 1
END_ID = 0
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
MAX_STOPS = 4096  # more are refused before they are looked at; the setting is lower
MAX_NAME = 64  # characters of a client's own key that an error names
TEXT_PARTS = ("text", "input_text", "output_text")

# Checking ends at the first wrong entry, for an error about each of millions takes gigabytes.
Names = Annotated[list[str], Field(fail_fast=True)]
Texts = Annotated[Names, BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]  # one is a list of one
Ids = Annotated[list[int], Field(fail_fast=True)]

MAX_WEIGHTS = 32  # of states that are mixed
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None
Weights = Annotated[list[Annotated[float, Field(ge=-1000, le=1000)]], Field(max_length=MAX_WEIGHTS, fail_fast=True)]

SLICE_BYTES = 2**17  # of a body that are looked at in one go: some milliseconds
FIELD_BYTES = 2**20  # a larger body is not read once more to find which field is at fault
_NOT_MARKS = bytes(set(range(256)) - set(b"[]{},:"))

SomeBody = TypeVar("SomeBody", bound="Body")


class Body(BaseModel):
    """What all native bodies share. Unknown fields are ignored; null stands for the default."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())

    model: str = Field("rwkv7", max_length=256)
    _end: str | None = PrivateAttr(None)  # the model's own, see Defaults

    @model_validator(mode="before")
    @classmethod
    def null_is_default(cls, data: Any) -> Any:
        """Drop nulls, so that the defaults apply."""
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    def of_model(self, defaults: Defaults) -> Self:
        """The body with what its model says where the client says nothing."""
        if defaults == Defaults():
            return self
        given = {"temperature": defaults.temperature, "top_p": defaults.top_p}
        wanted = type(self).model_fields.keys() - self.model_fields_set
        body = self.model_copy(update={name: value for name, value in given.items() if value is not None and name in wanted})
        body._end = defaults.end
        return body

    @property
    def gap(self) -> str:
        """What stands between the turns of a conversation."""
        return self._end or prompts.GAP


class SamplingBody(Body):
    """The sampling fields; defaults are those of the newest reference. `stop_field` is what errors call the stops."""

    stop_field: ClassVar[str] = "stop_tokens"
    filtered: ClassVar[bool] = True  # whether the route's rule has filters and penalties

    max_tokens: int = Field(8192, ge=0, le=MAX_ID)
    stop_tokens: list[int | str] = Field(default_factory=DEFAULT_STOPS.copy)
    temperature: float = Field(1.0, ge=0, le=1000)
    top_k: int = Field(50, ge=-1, le=MAX_ID)
    top_p: float = Field(0.6, ge=-1, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=MIN_REPETITION, le=MAX_REPETITION)
    alpha_presence: float = Field(2.0, ge=-100, le=100)
    alpha_frequency: float = Field(0.2, ge=-100, le=100)
    alpha_decay: float = Field(0.996, ge=0, le=1)
    noise: float = Field(1.5, ge=0, le=1000)  # read by the big and the plain batch only, and only when sent
    seed: Seed = None
    ignore_eos: bool = False
    stream: bool = False
    pad_zero: bool = False  # token 0 before every prompt; v2 has its own default
    enable_think: bool = False  # read where a chat template is used
    chunk_size: int = Field(4, ge=1, le=1_048_576)
    use_prefix_cache: bool = True
    state: str | None = Field(None, max_length=256)
    mrss_gatingweight: Weights | None = None

    @field_validator("stop_tokens", mode="before")
    @classmethod
    def read_stops(cls, value: Any) -> Any:
        """One entry or a list; ids are numbers, everything written as text is text."""
        entries = value if isinstance(value, list) else [value]
        if len(entries) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} entries")
        return [stop for stop in (_stop(entry) for entry in entries) if stop != ""]

    def sampling(self) -> SamplingParams:
        """The controls of the main sampler."""
        return SamplingParams(
            rule="joint",
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            alpha_presence=self.alpha_presence,
            alpha_frequency=self.alpha_frequency,
            alpha_decay=self.alpha_decay,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )

    def stops(self, config: Config) -> tuple[list[int], list[bytes]]:
        """Ids and texts that end a row. Raises InvalidRequest above the limits."""
        if len(self.stop_tokens) > config.max_stops:
            raise InvalidRequest(f"{self.stop_field}: at most {config.max_stops} entries", param=self.stop_field)
        own = [self._end] if self._end and "stop_tokens" not in self.model_fields_set else []
        ids = [stop for stop in self.stop_tokens if isinstance(stop, int)]
        texts = [stop.encode() for stop in (*self.stop_tokens, *own) if isinstance(stop, str)]
        if any(len(text) > config.max_stop_bytes for text in texts):
            raise InvalidRequest(
                f"{self.stop_field}: at most {config.max_stop_bytes} bytes for one text", param=self.stop_field
            )
        return ids, texts

    def most_tokens(self, config: Config) -> int:
        """How many tokens one row may get."""
        return self.max_tokens

    def check_limits(self, config: Config) -> None:
        """Raise InvalidRequest when more tokens are asked for than the server allows, or what the rule does not have."""
        for name, neutral in {"min_p": 0, "repetition_penalty": 1}.items():
            if not self.filtered and getattr(self, name) != neutral:
                raise InvalidRequest(f"{name}: not supported by this route", param=name)
        if self.most_tokens(config) > config.max_tokens_limit:
            raise InvalidRequest(f"max_tokens: at most {config.max_tokens_limit}", param="max_tokens")


class PromptsBody(SamplingBody):
    """A body that becomes prompts, one row each. `field` is where they are, `loop` admits them."""

    field: ClassVar[str] = "contents"
    loop: ClassVar[Loop] = "sync"

    def texts(self) -> list[str]:
        """The prompts. Raises InvalidRequest when they cannot be made."""
        raise NotImplementedError

    def check_count(self, texts: list[str], config: Config) -> None:
        """Raise InvalidRequest for no prompts or too many."""
        if not texts:
            raise InvalidRequest("Empty prompts list", param=self.field)
        if len(texts) > config.max_prompts:
            raise BatchTooLarge(len(texts), config.max_prompts, param=self.field)

    def session(self, config: Config) -> Session | None:
        """The state to continue, None for routes without sessions. Raises InvalidRequest."""
        return None

    def with_defaults(self, config: Config) -> Self:
        """The body with the server's seed and noise, where it has some and the request has none."""
        found = {} if config.seed is None or self.seed is not None else {"seed": config.seed}
        if config.noise is not None and "noise" not in self.model_fields_set:
            found["noise"] = config.noise
        return self.model_copy(update=found) if found else self

    def checked_texts(self, config: Config) -> list[str]:
        """The prompts of a body that keeps to the limits; templates, so it takes time for long texts. Raises InvalidRequest."""
        self.check_limits(config)
        texts = self.texts()
        self.check_count(texts, config)
        return texts

    def to_request(self, texts: list[str], request_id: str, config: Config, encode: Callable[[str], list[int]]) -> Request:
        """The engine's form of this body and its `checked_texts`; tokenises, so it takes time for long ones.

        Raises InvalidRequest.
        """
        stop_ids, stop_texts = self.stops(config)
        session = self.session(config)
        prompts = prompt_ids(texts, self.field, config, encode)
        return Request(
            id=request_id,
            prompts=[ids if ids == [END_ID] else [END_ID, *ids] for ids in prompts] if self.pad_zero else prompts,
            sampling=self.with_defaults(config).sampling(),
            max_tokens=self.most_tokens(config),
            stop_ids=stop_ids,
            stop_texts=stop_texts,
            loop=self.loop,
            chunk_size=self.chunk_size if self.stream else 0,
            session=session,
            cache=self.use_prefix_cache,
        )


class ContentsBody(PromptsBody):
    """A body with raw prompts: native chat completions and its relatives."""

    contents: Texts = Field(default_factory=list)

    def texts(self) -> list[str]:
        """The prompts as they are."""
        return self.contents


class Message(BaseModel):
    """One message of a conversation; a content of several text parts is joined."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = "user"
    content: str = ""

    @field_validator("role", mode="before")
    @classmethod
    def lower_role(cls, value: Any) -> Any:
        """Some clients write "User"; null is the default."""
        return value.lower() if isinstance(value, str) else "user" if value is None else value

    @field_validator("content", mode="before")
    @classmethod
    def join_parts(cls, value: Any) -> Any:
        """Null is no text; parts are texts or {"type": "text", "text": ...}."""
        if not isinstance(value, list):
            return "" if value is None else value
        texts = []
        for part in value:
            text = part.get("text") if isinstance(part, dict) and part.get("type") in TEXT_PARTS else part
            if not isinstance(text, str):
                raise ValueError("only text parts can be read")
            texts.append(text)
        return "".join(texts)

    def turn(self) -> Turn:
        """For the chat template; a tool's result becomes a user turn, as the models were trained."""
        if self.role in ("tool", "function"):
            return Turn("user", prompts.FUNCTION_OUTPUT + self.content)
        return Turn("system" if self.role == "developer" else self.role, self.content)


Messages = Annotated[list[Message], Field(fail_fast=True)]


def prompt_ids(texts: list[str], field: str, config: Config, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Tokens of each text; an empty one is fed token 0. Raises InvalidRequest naming the entry that is too long."""
    prompts = []
    for index, text in enumerate(texts):
        try:
            ids = encode(text) or [END_ID]
        except InvalidRequest as error:
            raise InvalidRequest(f"{field}[{index}]: {error.message}", param=f"{field}[{index}]") from None
        if len(ids) > config.max_prompt_tokens:
            raise InvalidRequest(
                f"{field}[{index}]: at most {config.max_prompt_tokens} tokens, not {len(ids)}", param=f"{field}[{index}]"
            )
        prompts.append(ids)
    return prompts


def session_name(name: str, config: Config, field: str = "session_id") -> str:
    """A session's name. Raises InvalidRequest for one that is too long."""
    if len(name.encode()) > config.max_session_bytes:
        raise InvalidRequest(f"{field}: at most {config.max_session_bytes} bytes", param=field)
    return name


def _stop(entry: Any) -> int | str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, float) and math.isfinite(entry) and entry.is_integer():
        entry = int(entry)
    if not isinstance(entry, int) or isinstance(entry, bool):
        raise ValueError("each entry is a token id or a text")
    if not 0 <= entry <= MAX_ID:
        raise ValueError(f"a token id is between 0 and {MAX_ID}")
    return entry


def parse(data: bytes, config: Config) -> dict[str, Any]:
    """The object in a JSON body; of a repeated key the last value counts. Raises InvalidRequest."""
    for _ in inspect(data, config):
        pass
    return read(data)


def read(data: bytes) -> dict[str, Any]:
    """The object in a JSON body that `inspect` let pass. Raises InvalidRequest."""
    try:
        found = pydantic_core.from_json(data, allow_inf_nan=True, cache_strings="keys")
    except ValueError as error:
        field = _surrogate_field(data) if any(word in str(error) for word in ("surrogate", "hex escape")) else None
        if field is not None:
            raise InvalidRequest(f"invalid request: {field}: half of a surrogate pair", param=field) from None
        raise InvalidRequest(f"Invalid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest("invalid request: the body must be a JSON object")
    return found


class _Password(msgspec.Struct):
    password: msgspec.Raw = msgspec.Raw(b"null")  # whatever it is, so that nothing is made of a large one


_read_password = msgspec.json.Decoder(_Password).decode


def password_in(data: bytes) -> Any:
    """The field `password` of a JSON body that `inspect` let pass; what is no text is False, and all else is skipped.

    Takes no memory and little time, so that a body of nobody known is not parsed. Raises InvalidRequest.
    """
    try:
        raw = _read_password(data).password
        return msgspec.json.decode(raw, type=str | None)
    except msgspec.ValidationError:
        return False
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"Invalid JSON: {error}") from None


def inspect(data: bytes, config: Config) -> Iterator[None]:
    """Raise InvalidRequest for JSON that is nested too deep or has too many parts, before any of it takes memory.

    Time is linear in the length. Yields after each slice, so that a long body can be looked at between other work. What is not
    JSON may pass as far as it goes: the parser ends where it stops being that.
    """
    num_marks = num_opened = 0
    for begin in range(0, len(data), SLICE_BYTES):
        marks = data[begin : begin + SLICE_BYTES].translate(None, _NOT_MARKS)
        num_marks += len(marks)
        num_opened += marks.count(b"[") + marks.count(b"{")
        yield
    if num_opened > config.max_body_depth or num_marks >= config.max_body_values:
        yield from _inspect_outside_strings(data, config)


def _inspect_outside_strings(data: bytes, config: Config) -> Iterator[None]:
    in_string = escaped = False
    num_values, num_opened, depth = 1, 0, 0
    for begin in range(0, len(data), SLICE_BYTES):
        part = data[begin + escaped : begin + SLICE_BYTES]  # without its first character where that is an escaped one
        escaped = (len(part) - len(part.rstrip(b"\\"))) % 2 == 1
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        marks = b"".join(pieces[in_string::2]).translate(None, _NOT_MARKS)
        in_string ^= len(pieces) % 2 == 0
        num_values += len(marks) - marks.count(b"]") - marks.count(b"}")
        if num_values > config.max_body_values:
            raise InvalidRequest(f"invalid request: more than {config.max_body_values} values")
        num_opened += marks.count(b"[") + marks.count(b"{")
        if num_opened > config.max_body_parts:
            raise InvalidRequest(f"invalid request: more than {config.max_body_parts} arrays and objects")
        for bracket in marks.translate(None, b",:"):
            depth += 1 if bracket in b"[{" else -1
            if depth > config.max_body_depth:
                raise InvalidRequest(f"invalid request: nested deeper than {config.max_body_depth} levels")
            if depth <= 0:
                return  # the one value of the body has ended
        yield


def _surrogate_field(data: bytes) -> str | None:
    """The top-level field that holds half a surrogate pair, which the strict parser can only place by line and column."""
    if len(data) > FIELD_BYTES:
        return None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    for key, value in found.items() if isinstance(found, dict) else ():
        try:
            json.dumps([key, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return key.encode("ascii", "replace").decode()[:64]
        except RecursionError:
            return None
    return None


def validate(kind: type[SomeBody], data: dict[str, Any]) -> SomeBody:
    """Check a parsed body. Raises InvalidRequest naming the first field that is wrong."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ""
        for part in first["loc"]:
            name = str(part)[:MAX_NAME]
            field += f"[{name}]" if isinstance(part, int) else f".{name}" if field else name
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"invalid request: {field}: {message}", param=field) from None
    except OverflowError:
        raise InvalidRequest("invalid request: a number is out of range") from None
