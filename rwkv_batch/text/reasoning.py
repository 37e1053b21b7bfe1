"""Tells the thought of an answer from the answer itself. Plain text in, plain text out.

A prompt with thinking ends in `<think`, so what the model writes begins inside the thought, with the tag's `>`.
"""

END = "</think>"


class ReasoningParser:
    """Splits the pieces of one text as they come; the pieces' borders do not matter.

    White space around the two parts belongs to neither. A thought that never ends is all thought.
    """

    def __init__(self, begun: str = ""):
        """`begun`: the thought's first words when the prompt holds them, and then its `<think>` is whole."""
        self._begun = begun
        self._held = ""  # may be the end tag's beginning, or white space in front of it
        self._place = "thought" if begun else "start"

    @property
    def thinking(self) -> bool:
        """Whether the thought has not ended."""
        return self._place in ("start", "thought")

    def feed(self, text: str) -> tuple[str, str]:
        """Return what `text` adds to the thought and to the answer."""
        thought, self._begun = self._begun, ""
        self._held += text
        if self._place == "start":
            self._skip_start()
        if self._place == "thought":
            thought += self._take_thought()
        if self._place == "gap" and (rest := self._held.lstrip()):
            self._held, self._place = rest, "answer"
        answer = ""
        if self._place == "answer":
            answer, self._held = self._held, ""
        return thought, answer

    def finish(self) -> str:
        """Return what was held back of the thought, when the text has ended."""
        thought, held, self._begun, self._held = self._begun, self._held, "", ""
        return thought + held if self._place == "thought" else ""

    def _skip_start(self) -> None:
        """Drop the tag's `>` and white space behind it."""
        rest = self._held.lstrip()
        rest = rest.removeprefix(">").lstrip()
        if rest:
            self._held, self._place = rest, "thought"

    def _take_thought(self) -> str:
        before, tag, after = self._held.partition(END)
        if tag:
            self._held, self._place = after, "gap"
            return before.rstrip()
        kept = self._held[: len(self._held) - overlap(self._held)].rstrip()
        self._held = self._held[len(kept) :]
        return kept


def overlap(text: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of the end tag."""
    return next((length for length in range(min(len(END) - 1, len(text)), 0, -1) if text.endswith(END[:length])), 0)
