"""Reads one JSON object that may be the call of a tool, piece by piece, each character once."""

import json
import re
from typing import Any

from rwkv_batch.text.json_text import compact

CALL_KEYS = frozenset(("name", "arguments", "parameters", "function", "function_call", "type", "id"))
ARGUMENT_KEYS = ("arguments", "parameters")
WRAPPERS = ("function", "function_call")
TYPES = ("function", "function_call", "tool_call", "tool_use")
_STRING_END = re.compile(r'["\\]')
_MARK = re.compile(r'["{}\[\]]')
_OUTER_MARK = re.compile(r'["{}\[\],:]')
_CONTROLS = {code: json.dumps(chr(code))[1:-1] for code in range(32)}


class CallReader:
    """One object. Its header, {"name": ..., "arguments": {, commits it: from there the arguments come out as they come in.

    An object that has these in another order, or inside another object, is judged at its end. Line breaks and tabs as they are
    inside a string, which models write and JSON forbids, become escapes.

    committed  it is a call, and `name` the tool's
    refused    it is none
    ended      the call is whole
    """

    def __init__(self, names: frozenset[str]):
        self.name = ""
        self.committed = self.refused = self.ended = False
        self._names = names
        self._raw: list[str] = []  # all that was read while it is not committed
        self._arguments: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = self._in_arguments = False
        self._is_key = False  # the next string of the outermost object is a key
        self._key = ""
        self._string: list[str] | None = None  # what was read of a string that matters

    def take(self) -> str:
        """Return what was read of an object that is not a call."""
        raw, self._raw = self._raw, []
        return "".join(raw)

    def take_arguments(self) -> str:
        """Return what came of the arguments since last time."""
        arguments, self._arguments = self._arguments, []
        return "".join(arguments)

    def feed(self, text: str, place: int) -> int:
        """Read on from `place`, at first the object's brace; return the place behind its end, or behind what refused it."""
        while place < len(text) and not (self.ended or self.refused):
            end = self._read_string(text, place) if self._in_string else self._read_mark(text, place)
            if not self.committed:
                self._raw.append(text[place:end])
            if self._depth == 0:
                self._end()
            place = end
        return place

    def _read_string(self, text: str, place: int) -> int:
        """A string up to its end, or what there is of it."""
        begin = place
        if self._escaped:
            place, self._escaped = place + 1, False
        while found := _STRING_END.search(text, place):
            place = found.end()
            if found.group() == '"':
                self._in_string = False
                break
            if place == len(text):
                self._escaped = True
                break
            place += 1
        else:
            place = len(text)
        if self._in_arguments:
            self._arguments.append(text[begin:place].translate(_CONTROLS))
        elif self._string is not None:
            self._string.append(text[begin:place])
            if not self._in_string:
                self._take_string()
        return place

    def _take_string(self) -> None:
        """A string of the outermost object has ended: a key, or a value that says what the object is."""
        try:
            value = json.loads('"' + "".join(self._string), strict=False)
        except ValueError:
            value = None
        self._string = None
        if self._is_key:
            self._key, self._is_key = value or "", False
            self.refused = value not in CALL_KEYS
        elif self._key == "name":
            self.name = value or ""
            self.refused = value not in self._names
        else:
            self.refused = value not in TYPES

    def _read_mark(self, text: str, place: int) -> int:
        """Up to the next character that has a meaning, outside of strings."""
        outermost = self._depth == 1
        found = (_OUTER_MARK if outermost else _MARK).search(text, place)
        end = found.end() if found else len(text)
        if self._in_arguments:
            self._arguments.append(text[place:end])
        if found is None:
            return end
        mark = found.group()
        if mark == '"':
            self._in_string = True
            matters = outermost and not self.committed and (self._is_key or self._key in ("name", "type"))
            self._string = [] if matters else None
        elif mark in "{[":
            self._open(mark)
        elif mark in "}]":
            self._depth -= 1
            self._in_arguments &= self._depth > 1
        else:
            self._is_key = mark == ","
        return end

    def _open(self, mark: str) -> None:
        if self._depth == 1 and not self.committed:
            if self._is_key or self._key == "name":
                self.refused = True
            elif mark == "{" and self._key in ARGUMENT_KEYS and self.name:
                self.committed = self._in_arguments = True
                self._raw, self._arguments = [], [mark]
        self._depth += 1
        self._is_key = self._depth == 1

    def _end(self) -> None:
        """The object is whole: judge it, unless its header already said that it is a call."""
        if not self.committed:
            call = decoded("".join(self._raw))
            if call is None or call[0] not in self._names:
                self.refused = True
                return
            self.name, arguments = call
            self.committed, self._raw, self._arguments = True, [], [arguments]
        self.ended = True


def decoded(text: str) -> tuple[str, str] | None:
    """The name and the arguments, as JSON text, of a call in one of its forms; None for what is none."""
    try:
        call: Any = json.loads(text, strict=False)
        if isinstance(call, dict):
            call = next((call[key] for key in WRAPPERS if isinstance(call.get(key), dict)), call)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str) and arguments.strip():
            arguments = json.loads(arguments, strict=False)
        return (call["name"], compact(arguments or {})) if isinstance(arguments or {}, dict) else None
    except (ValueError, RecursionError):
        return None
