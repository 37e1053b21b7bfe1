"""Where an editor wants no more of a completion: llama.cpp's `n_indent` and `t_max_predict_ms`."""

import re

_LINE = re.compile(r"[^\n]*\n|[^\n]+")


class Bounds:
    """Watches the lines of one text as they come.

    min_indent   a further line ends the text if fewer blanks begin it, empty lines too; 0 = any may
    max_seconds  at its first newline after this time from its first token the text ends; 0 = never
    """

    def __init__(self, min_indent: int, max_seconds: float):
        self._min_indent = min_indent
        self._max_seconds = max_seconds
        self._indent: int | None = None  # blanks that begin the line so far, None behind them

    def feed(self, text: str, seconds: float) -> tuple[str, bool]:
        """Return what of the next text is wanted, and whether that is the end; `seconds` have passed since the first token."""
        wanted = []
        for line in _LINE.findall(text):
            rest = line
            if self._indent is not None:
                rest = line.lstrip(" \t")
                wanted.append(line[: len(line) - len(rest)])
                self._indent += len(line) - len(rest)
                if rest and self._indent < self._min_indent:
                    return "".join(wanted), True
                self._indent = None if rest else self._indent
            wanted.append(rest)
            if rest.endswith("\n"):
                self._indent = 0
                if 0 < self._max_seconds < seconds:
                    return "".join(wanted), True
        return "".join(wanted), False
