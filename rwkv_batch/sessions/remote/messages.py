"""What engines and the store process say to each other, and its bytes, over a Unix socket.

A message is two lengths, a body of msgpack, and bytes of states behind it, which are not packed. An engine sends a call and
waits for the reply; a call of `UNANSWERED` has none. Each connection has its calls carried out in order.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rwkv_batch.request import Failure
from rwkv_batch.sessions.store import Claim, NewVersion, Record, Replay, SessionSummary, Source

LENGTHS = struct.Struct("<II")  # of the body, of the bytes behind it
UNANSWERED = ("alive", "let_go")  # and so never waited for


class Call(msgspec.Struct, array_like=True, frozen=True):
    """Engine: do this. `arguments`: a tuple, as `METHODS` has it."""

    method: str
    arguments: msgspec.Raw


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """Store: what came of it.

    failure  the error that a method raised
    lost     the session whose source is not there: the method raised SourceLost
    """

    result: msgspec.Raw = msgspec.Raw(msgspec.msgpack.encode(None))
    failure: Failure | None = None
    lost: str | None = None


class SentVersion(NamedTuple):
    """A `NewVersion`. `sizes`: of the pieces of a whole state, which stand behind the message one after another."""

    namespace: str
    name: str
    version: int
    tokens: int
    newlines: int
    sizes: list[int] | None
    updated: float
    replays: list[tuple[str, Replay]]
    node: tuple[str, int] | None
    response: bool
    source: Source | None
    ids: Sequence[int]
    num_bytes: int
    model: str
    claim: Claim | None


class Found(NamedTuple):
    """A `StoredState`. `base`: None when it comes about from the empty one."""

    ids: list[int]
    models: list[str]
    base: int | None


class Method(NamedTuple):
    """How what a method takes and returns is read."""

    arguments: msgspec.msgpack.Decoder
    result: msgspec.msgpack.Decoder


def _method(arguments: Any, result: Any) -> Method:
    return Method(msgspec.msgpack.Decoder(arguments), msgspec.msgpack.Decoder(result))


METHODS = {
    # Who it is, the session file it wants, whether others write too, seconds of silence after which it is given up.
    "hello": _method(tuple[str, str, bool, float], None),
    "alive": _method(tuple[()], None),
    "find": _method(tuple[str, str, int | None], Record | None),
    "load": _method(tuple[Record], Found),
    "pieces": _method(tuple[Record, int], list[int] | None),  # of this base: their sizes; None when it is another one now
    "page": _method(tuple[str, list[int], int, int, bool], list[SessionSummary]),
    "named_after": _method(tuple[str, str, int, bool], list[SessionSummary]),
    "count": _method(tuple[str, bool], int),
    "ids": _method(tuple[str, list[str]], list[int]),
    "oldest": _method(tuple[int], list[tuple[str, str]]),
    "kept_versions": _method(tuple[str, str], list[int]),
    "last_node": _method(tuple[str, str], int),
    "replay": _method(tuple[str, str, str], Replay | None),
    "reference": _method(tuple[str], list[SessionSummary]),
    "reference_state": _method(tuple[str, str], tuple[Any, float] | None),
    "write": _method(tuple[list[SentVersion]], None),
    "begin_draft": _method(tuple[()], None),
    "add_to_draft": _method(tuple[()], None),
    "finish_draft": _method(tuple[str, Source, list[int]], bool),
    "delete": _method(tuple[str, str, bool], set[str]),
    "fork": _method(tuple[str, Record, list[str]], None),
    "rewind": _method(tuple[str, str, Record, int], None),
    "open_if_there": _method(tuple[()], bool),
    "claim_many": _method(tuple[list[tuple[str, str]]], list[Claim | None]),
    "let_go": _method(tuple[Claim], None),
    "next_node": _method(tuple[str, str], int),
}


def path_in(folder: Path) -> Path:
    """Where the store process listens."""
    return folder / "store"


def head_of(message: Call | Reply, num_bytes: int = 0) -> bytes:
    """The beginning of a message with so many bytes of states: its lengths and its body."""
    body = msgspec.msgpack.encode(message)
    return LENGTHS.pack(len(body), num_bytes) + body


def raw(value: Any) -> msgspec.Raw:
    """Arguments or a result, packed."""
    return msgspec.Raw(msgspec.msgpack.encode(value))


def sent(new: NewVersion) -> tuple[SentVersion, list[bytes | memoryview]]:
    """A version as it is sent, and the pieces of its whole state."""
    pieces = list(new.pieces) if new.pieces is not None else []
    sizes = [len(piece) for piece in pieces] if new.pieces is not None else None
    ids = new.ids if isinstance(new.ids, list) else list(new.ids)
    return SentVersion(
        new.namespace, new.name, new.version, new.tokens, new.newlines, sizes, new.updated, new.replays, new.node,
        new.response, new.source, ids, new.num_bytes, new.model, new.claim,
    ), pieces  # fmt: skip


def received(version: SentVersion, pieces: list[memoryview] | None) -> NewVersion:
    """The version that was sent."""
    namespace, name, number, tokens, newlines, _, *rest = version
    return NewVersion(namespace, name, number, tokens, newlines, pieces, *rest)


def cut(data: memoryview, sizes: list[int]) -> list[memoryview]:
    """Bytes behind a message as the pieces that they are."""
    pieces, begin = [], 0
    for size in sizes:
        pieces.append(data[begin : begin + size])
        begin += size
    return pieces
