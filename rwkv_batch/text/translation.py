"""What surrounds the model when texts are translated: paragraphs, placeholders, remembered sentences. Plain Python."""

import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence

from rwkv_batch.errors import InvalidRequest

MANY_FACTOR = 2  # tokens that a language in a script of many tokens takes beside one in another
MIN_TOKENS = 32  # every translation may have so many
STEP_TOKENS = 64  # limits are rounded up to a multiple, so that few different ones are in use
ENTRY_BYTES = 400  # a remembered sentence beside its texts

SLICE = 65536  # characters searched at once: a search lets no other thread run

_BLANK_LINES = re.compile(r"\n[^\S\n]*+\n\s*+")
_NUMBERED = r"\{\{?\d{1,6}+\}\}?|</?[A-Za-z]{1,16}+\d{1,6}+\s?/?>"
NUMBERED_LENGTH = 32  # characters, at most


def split_paragraphs(text: str, max_parts: int | None = None, field: str = "text_list") -> list[str]:
    """Cut a text at its blank lines; paragraphs and gaps alternate, a paragraph, maybe empty, at both ends.

    Joined they are the text again. Gaps also take the whitespace at the text's ends. InvalidRequest above `max_parts`.
    """
    first, last = len(text) - len(text.lstrip()), len(text.rstrip())
    if first >= last:
        return ["", text, ""] if text else [""]
    parts, begin = ["", text[:first]] if first else [], first
    for gap in _BLANK_LINES.finditer(text, first, last):
        part = text[begin : gap.start()].rstrip()
        parts += [part, text[begin + len(part) : gap.end()]]
        begin = gap.end()
        if max_parts is not None and len(parts) > max_parts:
            raise InvalidRequest(f"{field}: too many paragraphs", param=field)
    parts.append(text[begin:last])
    return [*parts, text[last:], ""] if last < len(text) else parts


def split_all(texts: Sequence[str], max_parts: int, field: str = "text_list") -> list[list[str]]:
    """Cut several texts, the client's `field`, that may have `max_parts` parts together. Raises InvalidRequest."""
    found: list[list[str]] = []
    for text in texts:
        found.append(split_paragraphs(text, max_parts, field))
        max_parts -= len(found[-1]) - 1
    return found


class Placeholders:
    """Finds what has to come back unchanged: `{0}`, `<b0>`, `</b0>` and the texts given.

    A single character is no placeholder but a mark of the caller's settings; it is ignored.
    """

    def __init__(self, texts: Sequence[str] = ()):
        self.key = tuple(sorted({text for text in texts if len(text.strip()) > 1}, key=len, reverse=True))
        self._pattern = re.compile("|".join([*map(re.escape, self.key), _NUMBERED]))
        self._reach = max(NUMBERED_LENGTH, *map(len, self.key), 0)

    def found(self, text: str) -> Counter[str]:
        """How often each occurs."""
        return Counter(match[0] for match in self._matches(text))

    def cut(self, text: str) -> list[str]:
        """Text and placeholders in turn, text, maybe empty, at both ends."""
        parts, begin = [], 0
        for match in self._matches(text):
            parts += [text[begin : match.start()], match[0]]
            begin = match.end()
        return [*parts, text[begin:]]

    def without(self, text: str) -> str:
        """The text between them."""
        return " ".join(self.cut(text)[::2])

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        begin = 0
        while begin < len(text):
            end = begin + SLICE
            for match in self._pattern.finditer(text, begin, end + self._reach):
                if match.start() >= end:
                    break
                yield match
                begin = match.end()
            begin = max(begin, end)


def token_limit(num_tokens: int, ratio: float, *, many: bool) -> int:
    """How many tokens the translation of `num_tokens` may have; `many` for a language that takes many of them."""
    limit = num_tokens * ratio * (MANY_FACTOR if many else 1) + MIN_TOKENS
    return -int(-limit // STEP_TOKENS) * STEP_TOKENS


class Memory:
    """The translations used last, as many as fit into `max_bytes`. Not for several threads."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._texts: OrderedDict[Hashable, tuple[str, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._texts)

    def get(self, key: Hashable) -> str | None:
        """Return what was kept, None if nothing was."""
        if key not in self._texts:
            return None
        self._texts.move_to_end(key)
        return self._texts[key][0]

    def put(self, key: tuple, text: str) -> None:
        """Keep a translation; the longest unused ones go."""
        size = ENTRY_BYTES + sys.getsizeof(text) + sum(sys.getsizeof(part) for part in key)
        if key in self._texts:
            self.num_bytes -= self._texts.pop(key)[1]
        self._texts[key] = (text, size)
        self.num_bytes += size
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._texts.popitem(last=False)[1][1]
