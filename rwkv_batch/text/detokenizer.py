"""Sampled ids to text that is safe to show: whole UTF-8, no stop, nothing held back longer than needed.

Stop texts are matched on the bytes, wherever token borders lie. Knows nothing of requests, rows or events.
"""

import re
from codecs import utf_8_decode
from collections.abc import Iterable, Sequence

MAX_PLAIN_TEXTS = 8192  # remembered with the stops of a request


class StopMatcher:
    """What ends a row, built once for all rows of a request; immutable but for what it remembers.

    stop_ids    ids that end a row; 0, the end of text, always does
    stop_texts  byte strings that end a row; empty ones are ignored

    The texts form an automaton (Aho and Corasick). A node stands for a prefix of some stop text, and the node reached after
    some bytes is the longest such prefix that the bytes end in; node 0 is the empty one.
    """

    def __init__(self, stop_ids: Iterable[int] = (), stop_texts: Iterable[bytes] = ()):
        stop_texts = [text for text in stop_texts if text]
        self.stop_ids = frozenset(stop_ids) | {0}
        self.may_begin_in = _any_of({text[0] for text in stop_texts}).search
        self._next: list[dict[int, int]] = [{}]  # node -> byte -> longer prefix
        self._depth = [0]  # length of the prefix in bytes
        self._matched = [0]  # length of the longest stop text the prefix ends in, 0 if none
        for text in stop_texts:
            self._add(text)
        self._fallback = self._link()  # node -> longest prefix that is a true suffix of this one
        self._plain_texts: tuple[Sequence[bytes | None], dict[int, str]] = ((), {})

    def plain_texts(self, token_bytes: Sequence[bytes | None]) -> dict[int, str]:
        """Return where texts of tokens are remembered that are whole characters and begin no stop: most are looked up."""
        if self._plain_texts[0] is not token_bytes:
            self._plain_texts = (token_bytes, {})
        return self._plain_texts[1]

    def advance(self, node: int, data: bytes) -> tuple[int, int, int, int]:
        """Read `data` from `node` up to the first byte that completes a stop text.

        Returns (node, depth, end, length): the node reached and the length of its prefix, which is how much may yet become a
        stop text; then the offset in `data` behind the stop text and its length, (0, 0) if there is none. Of stop texts that
        end together the longest counts.
        """
        following, fallback, matched = self._next, self._fallback, self._matched
        for offset, byte in enumerate(data):
            while node and byte not in following[node]:
                node = fallback[node]
            node = following[node].get(byte, 0)
            if matched[node]:
                return node, self._depth[node], offset + 1, matched[node]
        return node, self._depth[node], 0, 0

    def _add(self, text: bytes) -> None:
        """Add one stop text to the tree of prefixes."""
        node = 0
        for byte in text:
            child = self._next[node].setdefault(byte, len(self._next))
            if child == len(self._next):
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._matched.append(0)
            node = child
        self._matched[node] = len(text)

    def _link(self) -> list[int]:
        """Return the fallback of every node and complete `_matched` along it, short prefixes first."""
        fallback = [0] * len(self._next)
        queue = [0]
        for node in queue:
            for byte, child in self._next[node].items():
                queue.append(child)
                if node:
                    shorter = fallback[node]
                    while shorter and byte not in self._next[shorter]:
                        shorter = fallback[shorter]
                    fallback[child] = self._next[shorter].get(byte, 0)
                    self._matched[child] = self._matched[child] or self._matched[fallback[child]]
        return fallback


class IncrementalDetokenizer:
    """The text of one row.

    Bytes that were fed and not shown are held back: they may become a stop text, or a character whose end is to come.
    Invalid bytes are shown as U+FFFD. What is held back when the row ends is shown if it was no stop after all and is whole.

    stop_text  the one that ended the row, if one did
    """

    __slots__ = (
        "_held", "_node", "_num_shown", "_partly_shown", "_plain_texts", "_stops", "_token_bytes", "_unshown", "stop_text",
    )  # fmt: skip

    def __init__(self, token_bytes: Sequence[bytes | None], stops: StopMatcher):
        self._token_bytes = token_bytes
        self._stops = stops
        self._plain_texts = stops.plain_texts(token_bytes)
        self._node = 0
        self._held = b""  # bytes fed and not shown
        self._num_shown = 0  # leading ids whose bytes are all shown
        self._unshown: list[bytes] = []  # bytes of the ids after them
        self._partly_shown = 0  # how many bytes of the first of these are shown
        self.stop_text: bytes | None = None

    def arm(self, stops: StopMatcher) -> None:
        """Let `stops` end the row from the next token on."""
        self._stops = stops
        self._plain_texts = stops.plain_texts(self._token_bytes)
        self._node = 0

    @property
    def num_shown(self) -> int:
        """Leading ids whose bytes are all shown; the others may yet turn out to be hidden."""
        return self._num_shown

    def feed(self, token: int) -> tuple[str, bool]:
        """Return (text that became safe to show, whether the row has stopped).

        `token` is an id the vocabulary has. A stop id, a stop text and what follows it inside its token are neither shown nor
        part of `visible`. Not to be called again after the row has stopped.
        """
        text = self._plain_texts.get(token)
        if text is not None and not self._held:
            self._num_shown += 1
            return text, False
        if token in self._stops.stop_ids:
            return self.finish(), True
        data = self._token_bytes[token]
        if not self._held and not self._stops.may_begin_in(data):
            text, num_bytes = utf_8_decode(data, "replace", False)
            if num_bytes == len(data):
                self._num_shown += 1
                if len(self._plain_texts) < MAX_PLAIN_TEXTS:
                    self._plain_texts[token] = text
                return text, False
        num_before = len(self._held)
        self._held += data
        self._unshown.append(data)
        self._node, depth, end, length = self._stops.advance(self._node, data)
        if length:
            end += num_before
            self.stop_text = self._held[end - length : end]
            return self._show(end - length), True
        return self._show(len(self._held) - depth), False

    def feed_plain(self, token: int | None) -> str | None:
        """Return the text of a token, if nothing is held back and it is known to be whole characters and to begin no stop; else
        nothing is fed. What `feed` would return first, at a third of the cost."""
        if self._held:
            return None
        text = self._plain_texts.get(token)
        if text is not None:
            self._num_shown += 1
        return text

    def finish(self) -> str:
        """Return what was held back and is no stop: for a row that ends without one, by its length or a cancel.

        An incomplete character at the end is dropped.
        """
        return self._show(len(self._held))

    def visible(self) -> tuple[int, bytes]:
        """Return (m, rest): all text shown so far is the first m ids and then `rest`, a leading part of the next id's bytes.

        Bytes shown as U+FFFD are in it as they were sampled, so `rest` and the m ids need not be valid UTF-8.
        """
        return self._num_shown, self._unshown[0][: self._partly_shown] if self._partly_shown else b""

    def _show(self, length: int) -> str:
        """Return the text of the first `length` held bytes, without an incomplete character at their end."""
        text, num_bytes = utf_8_decode(self._held[:length], "replace", False)
        self._held = self._held[num_bytes:]
        self._partly_shown += num_bytes
        while self._unshown and self._partly_shown >= len(self._unshown[0]):
            self._partly_shown -= len(self._unshown.pop(0))
            self._num_shown += 1
        return text


def _any_of(values: set[int]) -> re.Pattern[bytes]:
    """Return a pattern for any one of the byte `values`; without values it matches nowhere."""
    if not values:
        return re.compile(rb"(?!)")
    return re.compile(b"[" + b"".join(re.escape(bytes([value])) for value in sorted(values)) + b"]")
