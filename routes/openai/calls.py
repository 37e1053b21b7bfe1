"""What one reply holds: its text and its calls of tools, gathered as they come."""

import json
from dataclasses import dataclass, field
from typing import Any

from routes.openai.answers import new_id
from routes.openai.tools import CUSTOM_INPUT, ToolFields
from rwkv_batch.text.tool_calls import CallArguments, CallBegan, CallEnded, Piece, Text


@dataclass
class GatheredCall:
    """A call that the reply makes. `custom`: it takes a text, which is its one argument. `ended`: it is whole.

    namespace  the group that the tool is in, "" for none
    """

    name: str
    custom: bool
    namespace: str = ""
    id: str = field(default_factory=lambda: new_id("call"))
    parts: list[str] = field(default_factory=list)
    ended: bool = False

    @property
    def arguments(self) -> str:
        """Its arguments as JSON text, as far as they came."""
        return "".join(self.parts)

    @property
    def as_object(self) -> dict[str, Any]:
        """Its arguments; none where they are no JSON object, as when the call was cut off."""
        try:
            found = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def input(self) -> str:
        """The text that a custom tool gets; what is no such call is passed on as it is."""
        given = self.as_object.get(CUSTOM_INPUT)
        return given if isinstance(given, str) else self.arguments


class GatheredReply:
    """One reply. Pieces are told as they come, and kept."""

    def __init__(self, fields: ToolFields, *, opened: bool, after: str = ""):
        """`opened` and `after`: see ToolCallParser."""
        self.texts: list[str] = []
        self.calls: list[GatheredCall] = []
        self._specs = fields.specs
        self._parser = fields.toolbox.parser(opened=opened, after=after) if fields.toolbox else None

    @property
    def text(self) -> str:
        """What it says beside its calls."""
        return "".join(self.texts)

    def feed(self, text: str) -> list[Piece]:
        """Take the next text and return what it brings."""
        if self._parser is None:
            return self._keep([Text(text)] if text else [])
        return self._keep(self._parser.feed(text))

    def finish(self) -> list[Piece]:
        """Return what was held back, when the reply has ended."""
        return self._keep(self._parser.finish()) if self._parser is not None else []

    def _keep(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            match piece:
                case Text(text):
                    self.texts.append(text)
                case CallBegan(_, name):
                    spec = self._specs[name]
                    self.calls.append(GatheredCall(spec.name, spec.type == "custom", spec.namespace))
                case CallArguments(index, text):
                    self.calls[index].parts.append(text)
                case CallEnded(index):
                    self.calls[index].ended = True
        return pieces


def in_message(call: GatheredCall) -> dict[str, Any]:
    """A call as an entry of a message's `tool_calls`."""
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.input}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
