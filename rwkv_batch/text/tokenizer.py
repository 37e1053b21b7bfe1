"""Text to ids and ids to bytes, for the two vocabularies RWKV-7 models have: World, and the 256 byte values.

Both are greedy: at every place the longest token that fits is taken. For World an Aho-Corasick automaton finds them; its
vocabulary is the file inside pyrwkv-tokenizer, whose own encoder is several times as fast and takes 240 MiB in each process.
Knows nothing of templates, special texts or HTTP. Id 0 is the end of text: it has no bytes, and no text encodes to it.
"""

import ast
import hashlib
import importlib.util
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path

import ahocorasick_rs

from rwkv_batch.errors import CheckpointError, InvalidRequest

END_TEXT = "<|endoftext|>"  # the name of token 0
WORLD_FILE = "rwkv_vocab_v20230424.txt"
WORLD_IDS = 65_530  # ids the World vocabulary has, the end of text included
WORLD_ROWS = 65_536  # rows of the output layer it is padded to
SLICE_BYTES = 8192  # matching gives the interpreter's lock away, and holds it for less than 1 ms to tell so much


class Tokenizer:
    """A vocabulary of `vocab_size` ids.

    token_bytes  what each id stands for: b"" for id 0, None for ids that the vocabulary lacks, never to be sampled or fed
    fingerprint  SHA-256 of the vocabulary, hexadecimal
    """

    def __init__(self, name: str, token_bytes: list[bytes | None], fingerprint: str):
        self.name = name
        self.token_bytes = token_bytes
        self.vocab_size = len(token_bytes)
        self.fingerprint = fingerprint

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {data: token for token, data in enumerate(self.token_bytes) if data}

    @cached_property
    def _lengths(self) -> dict[bytes, list[int]]:
        return _lengths_by_start(self._ids)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; InvalidRequest if it holds lone surrogates or a character that has no token."""
        return self.encode_bytes(_utf8(text))

    def ids(self, prompt: str | list[int]) -> list[int]:
        """Return the ids of a text, or ids as they are; InvalidRequest as `encode` and `decode_bytes` do."""
        if isinstance(prompt, str):
            return self.encode(prompt)
        self.decode_bytes(prompt)
        return prompt

    def encode_bytes(self, data: bytes) -> list[int]:
        """Return the ids of `data`, which need not be valid UTF-8; InvalidRequest for a byte that has no token.

        Plain Python, well below 1 MB/s: meant for the rest of a token, not for prompts.
        """
        tokens = []
        start = 0
        while start < len(data):
            token, length = self._longest_token(data, start)
            tokens.append(token)
            start += length
        return tokens

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of `tokens`, none for id 0; InvalidRequest if the vocabulary lacks one of them."""
        table = self.token_bytes
        try:
            if tokens and min(tokens) < 0:
                raise IndexError
            return b"".join([table[token] for token in tokens])
        except (IndexError, TypeError):
            raise InvalidRequest(f"token ids must be ids of the {self.name} vocabulary") from None

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`; bytes that are no UTF-8 become U+FFFD. Raises as `decode_bytes` does."""
        return self.decode_bytes(tokens).decode(errors="replace")

    def _longest_token(self, data: bytes, start: int) -> tuple[int, int]:
        """Return (id, length in bytes) of the longest token that `data` has at `start`."""
        for length in self._lengths.get(data[start : start + 2], ()):
            token = self._ids.get(data[start : start + length])
            if token is not None:
                return token, min(length, len(data) - start)
        token = self._ids.get(data[start : start + 1])
        if token is None:
            raise InvalidRequest(f"the {self.name} vocabulary has no token for the byte {data[start]}")
        return token, 1


class WorldTokenizer(Tokenizer):
    """The World vocabulary of 65,530 ids, padded to `vocab_size`."""

    def __init__(self, vocab_size: int = WORLD_ROWS):
        package = importlib.util.find_spec("pyrwkv_tokenizer")  # importing it would load its encoder
        data = Path(package.origin).with_name(WORLD_FILE).read_bytes()
        token_bytes = _parse_vocabulary(data.decode(), vocab_size)
        super().__init__("World", token_bytes, hashlib.sha256(data).hexdigest())
        self._patterns = [token for token, data in enumerate(token_bytes) if data]
        self._longest = max(len(token_bytes[token]) for token in self._patterns)
        self._automaton = ahocorasick_rs.BytesAhoCorasick(
            [token_bytes[token] for token in self._patterns],
            matchkind=ahocorasick_rs.MatchKind.LeftmostLongest,
            implementation=ahocorasick_rs.Implementation.ContiguousNFA,
        )

    def encode_bytes(self, data: bytes) -> list[int]:
        """Return the ids of `data`, which need not be valid UTF-8.

        Every byte has a token, so matches that do not overlap leave nothing out. A token depends on the `_longest` bytes from
        its start on and on nothing before it: a slice is encoded, the tokens too near to its end are given up, and the next
        slice begins where they did.
        """
        tokens: list[int] = []
        patterns = self._patterns
        size = max(SLICE_BYTES, 2 * self._longest)
        start = 0
        while True:
            piece = data[start : start + size]
            matches = self._automaton.find_matches_as_indexes(piece)
            if start + size < len(data):
                while matches[-1][1] + self._longest > len(piece):
                    matches.pop()
            tokens += [patterns[index] for index, _, _ in matches]
            if start + size >= len(data):
                return tokens
            start += matches[-1][2]


class ByteTokenizer(Tokenizer):
    """One id for each byte value but 0, whose id is the end of text."""

    def __init__(self):
        token_bytes = [b"", *(bytes([value]) for value in range(1, 256))]
        super().__init__("byte", token_bytes, hashlib.sha256(bytes(range(256))).hexdigest())

    def encode_bytes(self, data: bytes) -> list[int]:
        """Return the byte values of `data`; InvalidRequest if it holds the byte 0."""
        if 0 in data:
            raise InvalidRequest("the byte vocabulary has no token for the byte 0")
        return list(data)


def token_name(data: bytes) -> str:
    """What a token is called in answers: its text; bytes that are no text are spelled out, so no two tokens have one name."""
    if not data:
        return END_TEXT
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@cache
def for_vocab(vocab_size: int) -> Tokenizer:
    """Return the one tokenizer of models with `vocab_size` output rows; CheckpointError if no vocabulary has that size."""
    if vocab_size == 256:
        return ByteTokenizer()
    if WORLD_IDS <= vocab_size <= WORLD_ROWS:
        return WorldTokenizer(vocab_size)
    raise CheckpointError(
        f"no tokenizer for a vocabulary of {vocab_size} ids; known: 256 (bytes), {WORLD_IDS} to {WORLD_ROWS} (World)"
    )


def _parse_vocabulary(text: str, vocab_size: int) -> list[bytes | None]:
    """Return the bytes of every id in `text`, whose lines are "id literal length"; CheckpointError for a line that is not."""
    table: list[bytes | None] = [None] * vocab_size
    table[0] = b""
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        try:
            token, rest = line.split(" ", 1)
            literal, length = rest.rsplit(" ", 1)
            data = _literal_bytes(literal)
            if not data or len(data) != int(length) or table[int(token)] is not None or int(token) < 0:
                raise ValueError
            table[int(token)] = data
        except (ValueError, IndexError, SyntaxError, AttributeError):
            raise CheckpointError(f"{WORLD_FILE}, line {number}: not an id, its literal and its length in bytes") from None
    return table


def _literal_bytes(literal: str) -> bytes:
    """Return what a Python literal of str or bytes stands for, str as UTF-8."""
    if "\\" not in literal and literal[0] == literal[-1] != "b":
        return literal[1:-1].encode()  # most of them; ast alone would triple the loading time
    value = ast.literal_eval(literal)
    return value if isinstance(value, bytes) else value.encode()


def _lengths_by_start(ids: dict[bytes, int]) -> dict[bytes, list[int]]:
    """Return for each pair of bytes the lengths of the tokens that begin with it, longest first."""
    lengths: dict[bytes, set[int]] = {}
    for data in ids:
        lengths.setdefault(data[:2], set()).add(len(data))
    return {start: sorted(found, reverse=True) for start, found in lengths.items()}


def _utf8(text: str) -> bytes:
    """Return `text` as UTF-8; InvalidRequest if it holds lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text has a lone surrogate at character {error.start}") from None
