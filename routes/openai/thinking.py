"""How a request says whether the model thinks first, and how the thought is shown: each server has words of its own for it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, field_validator

THINK_TYPES = {
    "fast": "fast", "free": "free", "preferChinese": "preferChinese", "prefer_chinese": "preferChinese",
    "en": "en", "enShort": "enShort", "en_short": "enShort", "enLong": "enLong", "en_long": "enLong",
}  # fmt: skip
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: dict[str, str] = {
    "none": "fast", "minimal": "fast", "low": "enShort", "medium": "free", "high": "enLong", "xhigh": "enLong", "max": "enLong",
}  # fmt: skip
# Fields that would bound the length of a thought, which nothing here does, and the values that do not.
BUDGETS: dict[str, tuple[Any, ...]] = {
    "thinking_budget": (-1,),
    "thinking_budget_tokens": (-1,),
    "thinking_token_budget": (-1,),
    "reasoning_budget": (-1,),
    "max_thinking_tokens": (-1,),
    "max_reasoning_tokens": (-1,),
    "thinking.budget_tokens": (),
    "reasoning.max_tokens": (),
    "chat_template_kwargs.thinking_budget": (-1,),
}

Shown = Literal["apart", "within", "hidden"]
FORMATS: dict[str, Shown] = {
    "auto": "apart", "parsed": "apart", "deepseek": "apart", "none": "within", "raw": "within", "hidden": "hidden",
}  # fmt: skip


def bool_is_type(value: Any) -> Any:
    """Some clients say true for {"type": "enabled"}."""
    return {"type": "enabled" if value else "disabled"} if isinstance(value, bool) else value


class Thinking(BaseModel):
    """`thinking`, as Anthropic, DeepSeek and GLM have it; who leaves it to the model gets a thought."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]


class Reasoning(BaseModel):
    """`reasoning`, as OpenAI's responses and OpenRouter have it."""

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class TemplateArguments(BaseModel):
    """`chat_template_kwargs`: what the templates of some models take; others are ignored, as templates do."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Effort | None = None


class ThinkingFields(BaseModel):
    """The fields by which a request asks for a thought."""

    think_type: str | None = None
    enable_think: bool | None = None
    think: bool | None = None
    enable_thinking: bool | None = None
    thinking: Annotated[Thinking | None, BeforeValidator(bool_is_type)] = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning = Field(default_factory=Reasoning)
    chat_template_kwargs: TemplateArguments = Field(default_factory=TemplateArguments)

    @field_validator("think_type")
    @classmethod
    def know_type(cls, value: str | None) -> str | None:
        """One word for each type."""
        if value is not None and value not in THINK_TYPES:
            raise ValueError(f"one of {', '.join(sorted(set(THINK_TYPES.values())))}")
        return value and THINK_TYPES[value]

    @property
    def how_to_think(self) -> str:
        """A value of THINK_TYPES. The type says all; else a switch that is off counts, then the effort, then a switch alone."""
        if self.think_type is not None:
            return self.think_type
        arguments = self.chat_template_kwargs
        switch = first(
            self.enable_think, self.think, self.enable_thinking, self.thinking and self.thinking.type != "disabled",
            self.reasoning.enabled, arguments.enable_thinking, arguments.thinking,
        )  # fmt: skip
        effort = EFFORTS[first(self.reasoning_effort, self.reasoning.effort, arguments.reasoning_effort) or "none"]
        if switch is None:
            return effort
        return "fast" if not switch else effort if effort != "fast" else "free"


class ThoughtFields(ThinkingFields):
    """The fields that say how the thought is shown, too."""

    separate_reasoning: bool = True
    reasoning_format: str = "auto"
    include_reasoning: bool = True

    @field_validator("reasoning_format")
    @classmethod
    def know_format(cls, value: str) -> str:
        """Those of Groq and llama.cpp."""
        if value not in FORMATS:
            raise ValueError(f"one of {', '.join(FORMATS)}")
        return value

    @property
    def thought_shown(self) -> Shown:
        """Apart from the answer, within it with its tags, or not at all; the least that was asked for counts."""
        shown = FORMATS[self.reasoning_format]
        if shown == "hidden" or not self.include_reasoning or self.reasoning.exclude:
            return "hidden"
        return shown if self.separate_reasoning else "within"


def first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)
