"""The JSON bodies of the OpenAI routes. Nulls and unknown fields are tolerated; what would change the text and is not there is
refused by name.
"""

import json
import logging
from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import BeforeValidator, Field, field_validator, model_validator

from routes.formats import FormatFields
from routes.openai.conversation import Conversation
from routes.openai.thinking import BUDGETS, ThoughtFields
from routes.schemas import (
    DEFAULT_STOPS,
    END_ID,
    MAX_ID,
    MAX_NAME,
    MAX_REPETITION,
    MAX_STOPS,
    MIN_REPETITION,
    Body,
    Ids,
    PromptsBody,
    SomeBody,
    session_name,
    validate,
)
from rwkv_batch.config import Config
from rwkv_batch.errors import BatchTooLarge, InvalidRequest
from rwkv_batch.request import Grammar, Loop, Request
from rwkv_batch.session_messages import Session
from rwkv_batch.text import prompts
from rwkv_batch.text.fim_marks import Gap, find_gap
from rwkv_batch.text.tokenizer import END_TEXT
from sampling.params import SamplingParams

log = logging.getLogger(__name__)

# Fields that would change the text, inner ones behind a dot, and the values that do not.
REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "penalty_alpha": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "smoothing_factor": (0,),
    "top_n_sigma": (-1, 0),
    "dynatemp_range": (0,),
    "length_penalty": (1,),
    "typical_p": (1,),
    "typical": (1,),
    "temperature_last": (False,),
    "top_a": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "chat_template": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "prefix": ("", False),
    "suffix": ("",),
    "echo": (False,),
    "structural_tag": (),
    "guidance_scale": (1,),
    "negative_prompt": ("",),
    "min_new_tokens": (0,),
    "return_token_ids": (False,),
    **BUDGETS,
}
# Fields that change nothing here, so that they are not worth a line in the log.
IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "verbosity", "parallel_tool_calls", "password", "cache_prompt", "skip_special_tokens", "spaces_between_special_tokens",
    "include", "truncation", "background", "text", "priority", "prediction", "request_id",
}  # fmt: skip
MAX_NOTED = 256
MAX_BIASES = 65536  # the setting is lower
NO_LIMIT = -1  # as max_tokens: as many as the server allows
WHOLE = {"repeat_last_n": -1, "repetition_penalty_range": 0, "rep_pen_range": 0}  # which tokens it acts on: all of them
PENALTIES = ("alpha_presence", "alpha_frequency", "presence_penalty", "frequency_penalty")
noted: set[str] = set()  # unknown fields that were logged


def at_most(number: int) -> BeforeValidator:
    """Refuse a mapping of more entries, before they are looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > number:
            raise ValueError(f"at most {number} entries")
        return value

    return BeforeValidator(check)


def split_ends(text: str) -> tuple[list[int], str]:
    """The end tokens that a raw prompt begins with, and the rest of its text, in which END_TEXT is plain text."""
    count = 0
    while text.startswith(END_TEXT, count * len(END_TEXT)):
        count += 1
    return [END_ID] * count, text[count * len(END_TEXT) :]


def read(kind: type[SomeBody], data: dict[str, Any]) -> SomeBody:
    """Check a parsed body. Raises InvalidRequest naming the field that is wrong or not supported."""
    for name, neutral in REFUSED.items():
        value: Any = data
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and value not in neutral and name not in kind.model_fields:
            raise InvalidRequest(f"{name}: not supported by this server", param=name, code="unsupported_parameter")
    for name in data.keys() - kind.model_fields.keys() - REFUSED.keys() - IGNORED - noted:
        if len(noted) < MAX_NOTED:
            noted.add(name)
            log.info("the field %s of a request is not known and ignored", json.dumps(name[:MAX_NAME]))
    return validate(kind, data)


class StreamOptions(Body):
    """What a stream tells beside its texts."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(PromptsBody, FormatFields):
    """What all generating routes share; the defaults are those of the reference's OpenAI route."""

    loop: ClassVar[Loop] = "continuous"
    stop_field: ClassVar[str] = "stop"
    default_stops: ClassVar[list[int | str]] = DEFAULT_STOPS

    max_tokens: int = Field(4096, ge=NO_LIMIT, le=MAX_ID)
    max_completion_tokens: int | None = Field(None, ge=NO_LIMIT, le=MAX_ID)
    min_tokens: int = Field(0, ge=0, le=MAX_ID)
    top_k: int = Field(20, ge=-1, le=MAX_ID)
    top_p: float = Field(0.6, ge=-1, le=1)
    alpha_presence: float = Field(1.0, ge=-100, le=100)
    alpha_frequency: float = Field(0.1, ge=-100, le=100)
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    repeat_penalty: float | None = Field(None, ge=MIN_REPETITION, le=MAX_REPETITION)  # other servers' names of it
    rep_pen: float | None = Field(None, ge=MIN_REPETITION, le=MAX_REPETITION)
    repeat_last_n: int | None = None
    repetition_penalty_range: int | None = None
    rep_pen_range: int | None = None
    stop: list[int | str] = Field(default_factory=list)
    stop_token_ids: Ids = Field(default_factory=list, max_length=MAX_STOPS)
    logit_bias: Annotated[dict[int, float], at_most(MAX_BIASES)] = Field(default_factory=dict)
    n: int = Field(1, ge=1, le=MAX_ID)
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    chunk_size: int = Field(1, ge=1, le=1_048_576)

    @field_validator("stop", mode="before")
    @classmethod
    def read_stop(cls, value: Any) -> Any:
        """As `stop_tokens`."""
        return cls.read_stops(value)

    @field_validator("logit_bias")
    @classmethod
    def bound_bias(cls, value: dict[int, float]) -> dict[int, float]:
        """Keys are ids, values within what OpenAI allows."""
        if any(not 0 <= token <= MAX_ID or abs(bias) > 100 for token, bias in value.items()):
            raise ValueError("token ids as keys, numbers from -100 to 100 as values")
        return value

    @model_validator(mode="after")
    def take_newer_limit(self) -> "GenerationBody":
        """`max_completion_tokens` is the newer name of `max_tokens`."""
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens to report beside each; None = no log-probabilities."""
        return None

    @property
    def repetition(self) -> float:
        """The repetition penalty by one of its names."""
        sent = (self.repeat_penalty, self.rep_pen) if "repetition_penalty" not in self.model_fields_set else ()
        return next((penalty for penalty in sent if penalty is not None), self.repetition_penalty)

    def sampling(self) -> SamplingParams:
        """The controls; OpenAI's two penalties stand in for the native ones where these were not sent.

        Temperature 0 means the likeliest token, so then only penalties that were sent act.
        """
        params = super().sampling()
        presence, frequency = params.alpha_presence, params.alpha_frequency
        if params.temperature == 0 and self.model_fields_set.isdisjoint(PENALTIES):
            presence = frequency = 0.0
        if self.presence_penalty is not None or self.frequency_penalty is not None:
            presence = presence if "alpha_presence" in self.model_fields_set else self.presence_penalty or 0.0
            frequency = frequency if "alpha_frequency" in self.model_fields_set else self.frequency_penalty or 0.0
        return msgspec.structs.replace(
            params, alpha_presence=presence, alpha_frequency=frequency, logit_bias=tuple(self.logit_bias.items()),
            min_tokens=self.min_tokens, logprobs=self.num_logprobs, repetition_penalty=self.repetition,
        )  # fmt: skip

    def stops(self, config: Config) -> tuple[list[int], list[bytes]]:
        """All that end a row. Without `stop_tokens` those of the route count, but not beside `ignore_eos`."""
        given = "stop_tokens" in self.model_fields_set
        own = self.stop_tokens if given else [] if self.ignore_eos else self.default_stops
        if own is self.default_stops and own and self._end and not self.stop:
            own = [*own, self._end]
        merged = self.model_copy(update={"stop_tokens": [*own, *self.stop, *self.stop_token_ids]})
        return super(GenerationBody, merged).stops(config)

    def most_tokens(self, config: Config) -> int:
        """See SamplingBody."""
        return config.max_tokens_limit if self.max_tokens == NO_LIMIT else self.max_tokens

    def check_limits(self, config: Config) -> None:
        """Raise InvalidRequest when more is asked for than the server allows."""
        super().check_limits(config)
        if self.min_tokens > self.most_tokens(config):
            raise InvalidRequest("min_tokens: not more than max_tokens", param="min_tokens")
        for name, whole in WHOLE.items():
            if self.repetition != 1 and getattr(self, name) not in (None, whole):
                raise InvalidRequest(f"{name}: the penalty acts on all of prompt and answer, which is {whole}", param=name)
        if len(self.logit_bias) > config.max_logit_bias:
            raise InvalidRequest(f"logit_bias: at most {config.max_logit_bias} entries", param="logit_bias")
        if (self.num_logprobs or 0) > config.max_logprobs:
            raise InvalidRequest(f"logprobs: at most {config.max_logprobs}", param="logprobs")

    def check_count(self, texts: list[Any], config: Config) -> None:
        """Raise InvalidRequest for no prompts, or too many choices."""
        super().check_count(texts, config)
        if len(texts) * self.n > config.max_prompts:
            raise BatchTooLarge(len(texts) * self.n, config.max_prompts, param="n")

    def to_request(self, texts: list[Any], request_id: str, config: Config, encode: Callable[[Any], list[int]]) -> Request:
        """The engine's form: `n` rows of each prompt."""
        request = super().to_request(texts, request_id, config, encode)
        return msgspec.structs.replace(request, copies=self.n, grammar=self.checked_grammar(config))


class ChatBody(GenerationBody, Conversation, ThoughtFields):
    """POST chat/completions with `messages`."""

    field: ClassVar[str] = "messages"
    enable_think: bool | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_ID)
    session_id: str | None = None

    @property
    def tells_tools(self) -> bool:
        """See Prompted. A session's state has seen the tools that the results of calls come from."""
        only_results = all(message.role in ("tool", "function") for message in self.messages) and not self.contents
        return super().tells_tools and not (self.session_id and only_results)

    @property
    def splits(self) -> bool:
        """Whether thoughts are told from the answer, and not left in it with their tags."""
        return self.how_to_think != "fast" and self.thought_shown != "within"

    @property
    def num_logprobs(self) -> int | None:
        """See GenerationBody."""
        return self.top_logprobs if self.logprobs else None

    def texts(self) -> list[str]:
        """The one prompt."""
        return [self.templated()]

    def check_limits(self, config: Config) -> None:
        """Raise InvalidRequest when more is asked for than the server allows."""
        super().check_limits(config)
        self.check_tools(config)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs true", param="top_logprobs")
        if self.session_id and self.n > 1:
            raise InvalidRequest("n: a session takes one choice at a time", param="n")

    def session(self, config: Config) -> Session | None:
        """The state that the new messages continue."""
        return Session(name=session_name(self.session_id, config)) if self.session_id else None

    def wanted_grammar(self) -> Grammar | None:
        """See FormatFields and Prompted."""
        return self.with_calls(super().wanted_grammar())

    def to_request(self, texts: list[Any], request_id: str, config: Config, encode: Callable[[Any], list[int]]) -> Request:
        """The engine's form; tokens come one by one where a thought is told from the answer, so that they can be counted."""
        request = super().to_request(texts, request_id, config, encode)
        return msgspec.structs.replace(request, chunk_size=1) if self.splits else request


class CompletionBody(GenerationBody):
    """POST completions: texts or ids, each completed as it is."""

    field: ClassVar[str] = "prompt"
    default_stops: ClassVar[list[int | str]] = []

    prompt: Annotated[list[str | Ids], Field(fail_fast=True)] = Field(default_factory=lambda: [END_TEXT])
    suffix: str | None = None
    max_tokens: int = Field(16, ge=NO_LIMIT, le=MAX_ID)
    alpha_presence: float = Field(0.0, ge=-100, le=100)
    alpha_frequency: float = Field(0.0, ge=-100, le=100)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_ID)
    best_of: int | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def one_is_a_list(cls, value: Any) -> Any:
        """A bare text, or one list of ids, is a list of one."""
        alone = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int | float))
        return [value] if alone else value

    @field_validator("logprobs", mode="before")
    @classmethod
    def false_is_none(cls, value: Any) -> Any:
        """Some clients say false."""
        return None if value is False else value

    @property
    def num_logprobs(self) -> int | None:
        """See GenerationBody."""
        return self.logprobs

    @cached_property
    def gaps(self) -> list[Gap | None]:
        """The gap that each prompt asks to fill by marks of other families; none where the prompt itself comes back."""
        marked = self.suffix is None and not self.echo
        return [find_gap(prompt) if marked and isinstance(prompt, str) else None for prompt in self.prompt]

    def texts(self) -> list[Any]:
        """The prompts, texts or ids. Raises InvalidRequest for a suffix behind ids."""
        if self.suffix is None:
            return [prompts.fill_in(*gap) if gap else prompt for prompt, gap in zip(self.prompt, self.gaps, strict=True)]
        if not all(isinstance(prompt, str) for prompt in self.prompt):
            raise InvalidRequest("suffix: the prompt must be text", param="suffix")
        return [prompts.fill_in(prompt, self.suffix) for prompt in self.prompt]

    def stops(self, config: Config) -> tuple[list[int], list[bytes]]:
        """All that end a row; without `ignore_eos` a filled gap also ends at the mark that would begin the next one."""
        ids, texts = super().stops(config)
        at_mark = (self.suffix is not None or any(self.gaps)) and not self.ignore_eos
        return ids, [*texts, prompts.FIM_MARK.encode()] if at_mark else texts

    def check_limits(self, config: Config) -> None:
        """Raise InvalidRequest when more is asked for than the server allows."""
        super().check_limits(config)
        if self.best_of not in (None, 1, self.n):
            raise InvalidRequest("best_of: not supported by this server", param="best_of", code="unsupported_parameter")
        if self.suffix is not None and self.echo and self.logprobs is not None:
            raise InvalidRequest("logprobs: not of a prompt with a suffix", param="logprobs")
        if self.suffix is not None:
            self.check_count(self.prompt, config)  # before each prompt gets a copy of the suffix

    def to_request(self, texts: list[Any], request_id: str, config: Config, encode: Callable[[Any], list[int]]) -> Request:
        """The engine's form; a prompt that comes back with its log-probabilities is fed whole."""

        def encode_raw(prompt: str | list[int]) -> list[int]:
            ends, rest = split_ends(prompt) if isinstance(prompt, str) else ([], prompt)
            return ends + encode(rest)

        request = super().to_request(texts, request_id, config, encode_raw)
        if not self.echo or self.logprobs is None:
            return request
        return msgspec.structs.replace(request, prompt_logprobs=self.logprobs, cache=False)
