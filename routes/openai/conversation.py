"""From the messages of a chat to its prompt."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from routes.openai.thinking import ThinkingFields
from routes.openai.tools import CallSpec, ToolFields
from routes.schemas import Message, Texts
from rwkv_batch.errors import InvalidRequest
from rwkv_batch.request import Grammar
from rwkv_batch.text import prompts
from rwkv_batch.text.grammar import after_thought, as_rule
from rwkv_batch.text.prompts import Turn


class ChatMessage(Message):
    """One message as the SDK sends it: an answer in the history may be a refusal."""

    refusal: str | None = None
    tool_calls: Annotated[list[CallSpec], Field(fail_fast=True)] | None = None
    function_call: CallSpec | None = None
    prefix: bool | None = None
    partial: bool | None = None

    @field_validator("content", mode="before")
    @classmethod
    def read_refusals(cls, value: Any) -> Any:
        """A part that is a refusal is text."""
        if not isinstance(value, list):
            return value
        refused = [isinstance(part, dict) and part.get("type") == "refusal" for part in value]
        return [part.get("refusal") if is_refusal else part for part, is_refusal in zip(value, refused, strict=True)]

    @field_validator("prefix", "partial")
    @classmethod
    def refuse_beginnings(cls, value: bool | None) -> bool | None:
        """Some servers go on with an answer that the client has begun."""
        if value:
            raise ValueError("not supported by this server, which begins each answer itself")
        return value

    def turn(self) -> Turn:
        """See Message."""
        if self.role != "assistant":
            return super().turn()
        calls = self.tool_calls or ([self.function_call] if self.function_call else [])
        return Turn("assistant", prompts.with_calls(self.content or self.refusal or "", [call.call() for call in calls]))


class Prompted(ThinkingFields, ToolFields):
    """The fields that say how a prompt ends, what it says of tools, and what must follow."""

    no_thought: ClassVar[str] = prompts.NO_THINK  # how it ends where an answer follows at once

    @property
    def thinks(self) -> bool:
        """Whether a thought comes first."""
        return self.how_to_think != "fast"

    @property
    def thought_begun(self) -> str:
        """What the prompt holds of the thought."""
        return prompts.CHINESE_THOUGHT if self.how_to_think == "preferChinese" else ""

    @property
    def opens_call(self) -> bool:
        """Whether the prompt ends in the mark of a call, which is then all that can follow."""
        return self.toolbox.forced and not self.thinks

    @property
    def tells_tools(self) -> bool:
        """Whether the prompt says which tools there are."""
        return bool(self.toolbox)

    def prompt_of(self, turns: list[Turn]) -> str:
        """A conversation with an open answer."""
        told = [Turn("system", self.toolbox.text())] if self.tells_tools else []
        return prompts.conversation([*self._with_length(turns), *told], self.tail(), self.gap)

    @property
    def gap(self) -> str:
        """What stands between the turns."""
        return prompts.GAP

    def tail(self) -> str:
        """How the prompt ends."""
        if self.opens_call:
            return prompts.CALL_TAIL
        if self.thought_begun:
            return f"{prompts.THINK}>{self.thought_begun}"
        return prompts.chat_tail(think=self.thinks, closed=self.no_thought)

    def with_calls(self, wanted: Grammar | None) -> Grammar | None:
        """What must follow: a call where one is forced, else a text that `wanted` allows, or calls; first a thought, if any.

        Raises InvalidRequest where these cannot go together.
        """
        if self.toolbox.forced:
            return Grammar("lark", self.toolbox.grammar(thinks=self.thinks), "tools")
        if wanted is None:
            return None
        if self.toolbox:
            return Grammar("lark", self.toolbox.grammar(thinks=self.thinks, answer=as_rule(wanted, "tools")), wanted.param)
        return after_thought(wanted) if self.thinks else wanted

    def _with_length(self, turns: list[Turn]) -> list[Turn]:
        """Ask for a length of the thought behind the last user text."""
        words = prompts.THOUGHT_LENGTHS.get(self.how_to_think, "")
        last = max((place for place, turn in enumerate(turns) if turn.role == "user" and turn.text.strip()), default=None)
        if words and last is not None:
            turns[last] = Turn("user", turns[last].text.rstrip() + words)
        return turns


class Conversation(Prompted):
    """The fields that make a chat's prompt."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(default_factory=list)
    contents: Texts = Field(default_factory=list)  # further user texts
    system: str = ""

    def templated(self) -> str:
        """The conversation with an open answer. Raises InvalidRequest when nobody says anything."""
        turns = [Turn("system", self.system), *(message.turn() for message in self.messages)]
        turns += [Turn("user", text) for text in self.contents]
        if not any(turn.text.strip() for turn in turns):
            raise InvalidRequest("Empty prompt", param="messages")
        return self.prompt_of(turns)
