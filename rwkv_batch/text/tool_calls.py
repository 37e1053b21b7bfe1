"""Calls of tools, told from the text around them as it comes. Plain text in, typed pieces out; nothing of any wire is known.

The form that RWKV-7 G1 was trained on is a fenced block, "```json" and {"name": ..., "arguments": {...}} and "```"
(https://github.com/BlinkDL/RWKV-LM/blob/main/RWKV-v7/RWKV7-G1x-templates.txt). Other forms that its data holds, or that other
servers ask for, are read too: `<tool_call>` tags, the label `**Tool Call:**`, a reply that is nothing but JSON, lists of calls,
arguments as a text, `parameters` for `arguments`, and {"function": {...}} around it all.
"""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from rwkv_batch.text.call_reader import CallReader

MARKS = ("```json", "```tool_call", "```\n", "<tool_call>", "**Tool Call:**")  # what a call may begin with
CLOSERS = {"```": "```", "<tool_call>": "</tool_call>"}  # what ends a block, by what a mark begins with
_MARK = re.compile("|".join(map(re.escape, MARKS)))
_VISIBLE = re.compile(r"\S")


class Text(NamedTuple):
    """Text that is no call."""

    text: str


class CallBegan(NamedTuple):
    """A call of the tool `name`; `index` counts the calls of a reply."""

    index: int
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments, which are JSON text."""

    index: int
    text: str


class CallEnded(NamedTuple):
    """A call is whole. One that the reply's end cut off never is."""

    index: int


Piece = Text | CallBegan | CallArguments | CallEnded


class ToolCallParser:
    """Splits the pieces of one reply as they come; the pieces' borders do not matter, and time is linear.

    A call is JSON that names one of the known tools; everything else is text, markup included. White space between text and a
    call belongs to neither.

    names   the tools that may be called
    opened  the prompt holds the mark of a call, so that the reply begins behind it
    limit   how many calls are told; further ones are dropped. None = all
    after   what must have come before calls are looked for, such as the end of a thought
    """

    def __init__(self, names: Iterable[str], *, opened: bool = False, limit: int | None = None, after: str = ""):
        self.num_calls = 0
        self._names = frozenset(names)
        self._limit = limit
        self._after = after
        self._pieces: list[Piece] = []
        self._held = ""  # was fed and not looked at, since it may be the beginning of a mark
        self._before: list[str] = []  # is dropped where a call begins, and text where none does
        self._closers = {"```"} if opened else set()
        self._in_list = False
        self._reader: CallReader | None = None
        # Each takes the text and a place in it and returns the next place; it moves on or changes the state.
        self._state: Callable[[str, int], int] = self._skip if after else self._open

    def feed(self, text: str) -> list[Piece]:
        """Return what `text` adds."""
        text, self._held, place = self._held + text, "", 0
        while place < len(text):
            place = self._state(text, place)
        return self._take()

    def finish(self) -> list[Piece]:
        """Return what was held back, when the text has ended."""
        if self._reader is not None:
            self._before.append(self._reader.take())
        if self._state != self._close:
            self._before.append(self._held)
        rest = "".join(self._before)
        if rest and (rest.strip() or not self.num_calls):
            self._pieces.append(Text(rest))
        self._held, self._before, self._reader = "", [], None
        return self._take()

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _show(self, text: str) -> None:
        """Text that begins or ends with something visible, behind all that was held back before it."""
        self._pieces.append(Text("".join([*self._before, text])))
        self._before = []

    def _hold(self, text: str, place: int) -> int:
        self._held = text[place:]
        return len(text)

    # --- states ---

    def _skip(self, text: str, place: int) -> int:
        """Before `after`."""
        found = text.find(self._after, place)
        if found >= 0:
            end, self._state = found + len(self._after), self._open
            self._show(text[place:end])
            return end
        end = len(text) - overlap(text, (self._after,))
        if end > place:
            self._show(text[place:end])
        return self._hold(text, max(place, end))

    def _read_text(self, text: str, place: int) -> int:
        """Text, up to a mark."""
        mark = _MARK.search(text, place)
        end = mark.start() if mark else max(place, len(text) - overlap(text, MARKS))
        if visible := text[place:end].rstrip():
            self._show(visible)
            self._closers = set()
        self._before.append(text[place + len(visible) : end])
        if mark is None:
            return self._hold(text, end)
        self._before.append(mark.group())
        self._closers |= {closer for start, closer in CLOSERS.items() if mark.group().startswith(start)}
        self._state = self._open
        return mark.end()

    def _open(self, text: str, place: int) -> int:
        """Behind a mark, or at the beginning: JSON follows, or it was no mark."""
        end = self._pass_blanks(text, place)
        if text.startswith("[", end) and not self._in_list:
            self._in_list = True
            self._before.append("[")
            return end + 1
        if text.startswith("{", end):
            self._reader, self._state = CallReader(self._names), self._read_call
        elif end < len(text):
            self._in_list, self._state = False, self._read_text
        return end

    def _pass_blanks(self, text: str, place: int) -> int:
        found = _VISIBLE.search(text, place)
        end = found.start() if found else len(text)
        self._before.append(text[place:end])
        return end

    def _read_call(self, text: str, place: int) -> int:
        """Inside a JSON object that is a call, or may be one."""
        reader = self._reader
        known = reader.committed
        end = reader.feed(text, place)
        if reader.committed:
            if not known:
                self._before = []
                self.num_calls += 1
                self._tell(CallBegan(self.num_calls - 1, reader.name))
            if arguments := reader.take_arguments():
                self._tell(CallArguments(self.num_calls - 1, arguments))
        if reader.ended:
            self._tell(CallEnded(self.num_calls - 1))
            self._reader, self._state = None, self._close
        elif reader.refused:
            self._show(reader.take())
            self._reader, self._closers, self._in_list, self._state = None, set(), False, self._read_text
        return end

    def _tell(self, piece: CallBegan | CallArguments | CallEnded) -> None:
        if self._limit is None or piece.index < self._limit:
            self._pieces.append(piece)

    def _close(self, text: str, place: int) -> int:
        """Behind a call: the end of its block, a further call in it, or neither."""
        end = self._pass_blanks(text, place)
        if self._in_list and text.startswith((",", "]"), end):
            self._in_list = text[end] == ","
            self._before = []
            return end + 1
        if end == len(text) or text[end] == "{":
            return self._open(text, end)
        for closer in self._closers:
            rest = text[end : end + len(closer)]
            if rest == closer:
                self._closers.remove(closer)
                self._before = []
                return end + len(closer)
            if end + len(rest) == len(text) and closer.startswith(rest):
                return self._hold(text, end)
        self._closers, self._in_list, self._state = set(), False, self._read_text
        return end


def overlap(text: str, marks: tuple[str, ...]) -> int:
    """Return how many characters at the end of `text` may be the beginning of one of `marks`."""
    end = text[1 - max(map(len, marks)) :]
    for place, first in enumerate(end):
        for mark in marks:
            if mark[0] == first and mark.startswith(end[place:]) and len(mark) > len(end) - place:
                return len(end) - place
    return 0
