"""llama.cpp's bodies, and the completions in OpenAI's form that they become.

Samplers that are not there are refused. In which order they act (`samplers`), how long a prompt may take and the like is left
to this server, since editors send all of that with every request.
"""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from routes.openai.schemas import NO_LIMIT, CompletionBody
from routes.schemas import MAX_ID, Body, Ids, Names
from routes.timed import TimedBody
from rwkv_batch.errors import InvalidRequest

MAX_TOKENS = 4096  # without n_predict
ANY_SEED = (-1, 2**32 - 1)  # llama.cpp draws a fresh one for these
MAX_FIELDS = 256  # that an answer is cut down to
# By the same names in OpenAI's form, which refuses those that are not there.
SAME = (
    "model", "stream", "temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "stop",
    "ignore_eos", "mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "top_n_sigma", "grammar", "json_schema",
    "alpha_presence", "alpha_frequency", "alpha_decay",
)  # fmt: skip


class Extra(BaseModel):
    """A piece of another file."""

    model_config = ConfigDict(extra="ignore")

    text: str = ""
    filename: str = ""


def tidy(value: Any) -> Any:
    """Null and a text alone are lists, too."""
    return [] if value is None else [value] if isinstance(value, str) else value


class LlamaBody(Body):
    """What /completion and /infill share."""

    model_config = ConfigDict(extra="allow")

    n_predict: int = Field(MAX_TOKENS, ge=NO_LIMIT, le=MAX_ID)
    n_cmpl: int = Field(1, ge=1, le=MAX_ID)
    n_probs: int = Field(0, ge=0, le=MAX_ID)
    n_indent: int = Field(0, ge=0, le=MAX_ID)
    t_max_predict_ms: float = Field(0.0, le=1e9)
    seed: int | None = None
    repeat_penalty: float | None = None
    cache_prompt: bool = True
    logit_bias: Any = None
    response_fields: Annotated[Names, BeforeValidator(tidy)] = Field(default_factory=list, max_length=MAX_FIELDS)

    @field_validator("n_probs")
    @classmethod
    def refuse_probs(cls, value: int) -> int:
        """OpenAI's routes have them."""
        if value:
            raise ValueError("not on this route; /v1/completions has logprobs")
        return value

    @property
    def warms_up(self) -> bool:
        """Whether only the prompt is to be read, so that what follows it comes sooner."""
        return self.n_predict == 0

    def in_openai_form(self) -> dict[str, Any]:
        """The body of a completion, but for its prompt. A request that only warms up draws a token that nobody sees."""
        sent = self.model_extra or {}
        fields = {name: sent[name] for name in SAME if name in sent}
        return {
            **fields,
            "model": self.model,
            "state": sent.get("state"),
            "max_tokens": self.n_predict or 1,
            "n": self.n_cmpl,
            "seed": None if self.seed in ANY_SEED else self.seed,
            "repetition_penalty": self.repeat_penalty,
            "use_prefix_cache": self.cache_prompt,
            "logit_bias": biases(self.logit_bias),
        }


def biases(value: Any) -> Any:
    """Pairs of an id and a number as a mapping; false in place of the number means never."""
    if not isinstance(value, list):
        return value
    if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int) for pair in value):
        raise InvalidRequest("logit_bias: pairs of a token id and a number", param="logit_bias")
    return {str(token): -100 if bias is False else bias for token, bias in value} or None


class CompletionRequest(LlamaBody):
    """POST /completion: one prompt, as a text or ids."""

    prompt: str | Ids | dict[str, Any] = ""

    @field_validator("prompt", mode="before")
    @classmethod
    def one_prompt(cls, value: Any) -> Any:
        """A list of one is that one; a text may be in an object."""
        if isinstance(value, dict):
            value = value.get("prompt_string", value)
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
            value = value[0]
        if isinstance(value, list) and any(isinstance(part, str | list | dict) for part in value):
            raise ValueError("one prompt, a text or ids; /v1/completions takes several")
        if isinstance(value, dict):
            raise ValueError("a text or ids")
        return value

    def in_openai_form(self) -> dict[str, Any]:
        """See LlamaBody."""
        prompt = [self.prompt] if isinstance(self.prompt, str) else [self.prompt or [0]]
        return {**super().in_openai_form(), "prompt": prompt}


class InfillRequest(LlamaBody):
    """POST /infill: what is before the cursor, in two parts, what is behind it, and pieces of other files."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[Extra], Field(fail_fast=True)] = Field(default_factory=list)
    prompt: str = ""

    def in_openai_form(self) -> dict[str, Any]:
        """See LlamaBody."""
        other_files = "".join(f"{extra.filename}\n{extra.text}\n\n" for extra in self.input_extra if extra.text)
        prefix = other_files + self.input_prefix + self.prompt
        return {**super().in_openai_form(), "prompt": [prefix], "suffix": self.input_suffix}


class LlamaCompletion(TimedBody, CompletionBody):
    """The completion that a body of llama.cpp's is."""

    stop_field: ClassVar[str] = "stop"
