"""What is said about sessions across the process border: which one a request continues, what was kept, and the commands of the
state routes with their answers. Plain msgspec structs; `state_pool.py` does the work.
"""

from typing import Literal

import msgspec

Tier = Literal["l1", "l2", "db"]


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """The named state that a request continues.

    name            any text; a missing session is an empty state, unless `must_exist`
    node            None: the row's state replaces that of `name`. A number n: the request continues node n of the dialogue
                    `name` and its state becomes a new node with the next free number; nodes are the sessions "name:n", node
                    0 may be missing and is then the empty state, another missing node is NotFound
    keep            whether the row's state is kept, for requests of one prompt; without it any number of rows start from the
                    state and nothing is stored
    save_as         the row's state becomes the new session of this name, Conflict when there is one, and `name` stays as it
                    was; not with a node
    must_exist      NotFound when there is no such session
    expect_version  PreconditionFailed unless the session is at this version; 0: it must not exist
    key             idempotency key: a turn that was kept under it is answered again, not run again
    response        what is kept is the state of an answer of the Responses API: forgotten after a while, and not in lists
    separate        a continued state and the prompt get exactly one blank line between them, whatever newlines they have
    """

    name: str
    node: int | None = None
    keep: bool = True
    save_as: str | None = msgspec.field(default=None, name="kept_as")  # digests of turns on disk were made with that name
    must_exist: bool = False
    expect_version: int | None = None
    key: str | None = None
    response: bool = False
    separate: bool = True


class CommitResult(msgspec.Struct, array_like=True, frozen=True):
    """Where the state of a row that ended was kept.

    name      the session, "dialogue:n" for a new node
    version   counts the states this session has had, from 1
    node      number of the new node, None without nodes
    tokens    tokens the state has seen
    durable   whether it is on disk
    replayed  whether this is the answer of an earlier turn with the same idempotency key
    """

    name: str
    version: int
    node: int | None
    tokens: int
    durable: bool
    replayed: bool = False


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """What a turn said, to say it again: its text, how it ended, its usage, what was kept."""

    text: str
    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    kept: CommitResult | None = None


class Status(msgspec.Struct, tag="status", frozen=True, kw_only=True):
    """List sessions, each once: those in VRAM oldest first, those in RAM oldest first, those on disk only newest first.

    name           only this session, with `versions` filled in; an empty list when there is none
    offset, limit  the part of the list that is wanted; None = all
    responses      the states of responses too
    """

    namespace: str = ""
    name: str | None = None
    offset: int = 0
    limit: int | None = None
    responses: bool = False


class Delete(msgspec.Struct, tag="delete", frozen=True, kw_only=True):
    """Forget a session on every tier, and with `prefix` all whose names begin with "name:"; a turn in progress fails."""

    namespace: str = ""
    name: str
    prefix: bool = False


class Fork(msgspec.Struct, tag="fork", frozen=True, kw_only=True):
    """Make sessions `copies` from a kept version of `name` (None = the last one). All or none: Conflict when one exists."""

    namespace: str = ""
    name: str
    copies: list[str]
    version: int | None = None


class Rewind(msgspec.Struct, tag="rewind", frozen=True, kw_only=True):
    """Make a kept version the newest one again, under the next version number.

    version  None = one turn back: the version before the one whose state the session is in, so that the same order again goes
             one further back, and is NotFound when no earlier one is kept
    """

    namespace: str = ""
    name: str
    version: int | None = None
    expect_version: int | None = None


class Export(msgspec.Struct, tag="export", frozen=True, kw_only=True):
    """Write a kept version of a session (None = the last one) to the file `path`, which is made by whoever asks."""

    namespace: str = ""
    name: str
    path: str
    version: int | None = None


class Import(msgspec.Struct, tag="import", frozen=True, kw_only=True):
    """Make a session from the file `path` that an export wrote. Conflict when it exists, unless `overwrite`."""

    namespace: str = ""
    name: str
    path: str
    overwrite: bool = False


SessionCommand = Status | Delete | Fork | Rewind | Export | Import


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One session. `updated` is epoch seconds, `tokens` what the state has seen, `num_bytes` its size on disk.

    For a session of rwkv_lightning that was not used yet `tokens` is 0, for its file does not say it.

    versions  those that can be rewound to, newest first; only filled in for a session asked for by name
    """

    name: str
    tier: Tier
    updated: float
    version: int
    tokens: int
    num_bytes: int
    versions: list[int] = []


class Page(msgspec.Struct, tag="page", frozen=True, kw_only=True):
    """The answer to `Status`, and with only `sessions` filled in to `Fork`, `Rewind`, `Export` and `Import`.

    total, l1, l2, db  sessions of the namespace, each counted once on its fastest tier
    """

    sessions: list[Entry]
    total: int = 0
    l1: int = 0
    l2: int = 0
    db: int = 0


class Deleted(msgspec.Struct, tag="deleted", frozen=True):
    """The answer to `Delete`: whether the session itself was there, and how many were forgotten in all."""

    found: bool
    count: int
