"""The items that a response consists of: thoughts, messages, calls of tools, in the order in which the model writes them."""

from dataclasses import dataclass, field
from typing import Any, Literal

from routes.openai.answers import new_id
from routes.openai.calls import GatheredCall

Kind = Literal["reasoning", "message", "function_call", "custom_tool_call"]
Fields = dict[str, Any]
Events = list[tuple[str, Fields]]  # the name of each and what it tells beside its place

PREFIXES: dict[Kind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}
TEXTS = {"reasoning": "reasoning_text", "message": "output_text"}  # what parts of an item are called, and events about them


@dataclass
class OutputItem:
    """One item. `parts` is its text so far, or its call has what is called; `status` what it came to."""

    kind: Kind
    id: str
    parts: list[str] = field(default_factory=list)
    call: GatheredCall | None = None
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"

    @classmethod
    def of_text(cls, kind: Literal["reasoning", "message"]) -> "OutputItem":
        """One that will have text."""
        return cls(kind, new_id(PREFIXES[kind]))

    @classmethod
    def of_call(cls, call: GatheredCall) -> "OutputItem":
        """One that is a call."""
        kind: Kind = "custom_tool_call" if call.custom else "function_call"
        return cls(kind, new_id(PREFIXES[kind]), call=call)

    @property
    def text(self) -> str:
        """What it says."""
        return "".join(self.parts)

    def document(self) -> Fields:
        """The item as it stands; what is in progress has nothing to show yet."""
        begun = self.status != "in_progress"
        head = {"id": self.id, "type": self.kind}
        if self.call is not None:
            called = {**head, "call_id": self.call.id, "name": self.call.name}
            if self.call.namespace:
                called["namespace"] = self.call.namespace
            if self.kind == "custom_tool_call":
                return {**called, "input": self.call.input if begun else ""}
            return {**called, "arguments": self.call.arguments if begun else "", "status": self.status}
        content = [self.part()] if begun else []
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content, "encrypted_content": None, "status": self.status}
        return {**head, "status": self.status, "role": "assistant", "content": content}

    def part(self) -> Fields:
        """Its one part, as far as it is written."""
        if self.kind == "reasoning":
            return {"type": TEXTS[self.kind], "text": self.text}
        return {"type": TEXTS[self.kind], "text": self.text, "annotations": [], "logprobs": []}

    def begin(self) -> Events:
        """The events that it begins with."""
        events: Events = [("output_item.added", {"item": self.document()})]
        return events if self.call is not None else [*events, ("content_part.added", self._at(part=self.part()))]

    def add(self, text: str) -> Events:
        """More of its text."""
        self.parts.append(text)
        return [(f"{TEXTS[self.kind]}.delta", self._at(delta=text, **self._logprobs()))]

    def add_arguments(self, text: str) -> Events:
        """More of its call's arguments; the text that a custom tool gets comes as a whole."""
        return [("function_call_arguments.delta", {"item_id": self.id, "delta": text})] if self.kind == "function_call" else []

    def end(self, status: Literal["completed", "incomplete"]) -> Events:
        """The events that it ends with."""
        self.status = status
        document = self.document()
        done: Events = [("output_item.done", {"item": document})]
        if self.kind == "function_call":
            whole = {"item_id": self.id, "arguments": document["arguments"]}
            return [("function_call_arguments.done", whole), *done]
        if self.kind == "custom_tool_call":
            given = document["input"]
            events: Events = [("custom_tool_call_input.delta", {"item_id": self.id, "delta": given})] if given else []
            return [*events, ("custom_tool_call_input.done", {"item_id": self.id, "input": given}), *done]
        text_done = (f"{TEXTS[self.kind]}.done", self._at(text=self.text, **self._logprobs()))
        return [text_done, ("content_part.done", self._at(part=self.part())), *done]

    def _at(self, **more: Any) -> Fields:
        return {"item_id": self.id, "content_index": 0, **more}

    def _logprobs(self) -> Fields:
        return {"logprobs": []} if self.kind == "message" else {}
