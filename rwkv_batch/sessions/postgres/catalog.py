"""What there is in the database, looked up."""

import time
from collections.abc import Iterator
from typing import Any

from rwkv_batch.errors import Unprocessable
from rwkv_batch.sessions.postgres.connection import Database
from rwkv_batch.sessions.postgres.objects import Objects
from rwkv_batch.sessions.sqlite.states import unpack_ids
from rwkv_batch.sessions.store import Record, Replay, SessionSummary, StoredState

SEAL_BYTES = 4  # the end of a whole state: its own checksum

FIND = """
SELECT v.version, v.state, v.tokens, v.newlines, v.num_bytes, v.updated, v.origin, s.id, s.response
FROM kept_sessions s JOIN kept_versions v ON v.session = s.id AND v.version = coalesce(%s, s.version)
WHERE s.namespace = %s AND s.name = %s
"""
CHAIN = """
WITH RECURSIVE chain (base, object, seal, ids, model, depth) AS (
    SELECT base, object, seal, ids, model, 0 FROM kept_states WHERE id = %s
    UNION ALL SELECT s.base, s.object, s.seal, s.ids, s.model, depth + 1 FROM chain JOIN kept_states s ON s.id = chain.base)
SELECT object, seal, ids, model FROM chain ORDER BY depth DESC
"""
LIST = """
SELECT updated, id, name, version, tokens, num_bytes FROM kept_sessions
WHERE namespace = %(namespace)s AND version > 0 AND (%(responses)s OR NOT response)
"""


class PostgresCatalog:
    """Reads the database. See `PostgresStore`."""

    shared, claims_at_once = True, 1

    def __init__(self, database: Database, objects: Objects, *, replay_seconds: float, response_seconds: float):
        self.database = database
        self.objects = objects
        self.replay_seconds = replay_seconds
        self.response_seconds = response_seconds
        self._began = time.time() - time.monotonic()

    def now(self) -> float:
        """Epoch seconds that no change of the clock makes jump while the server runs."""
        return self._began + time.monotonic()

    def find(self, namespace: str, name: str, version: int | None = None) -> Record | None:
        """Return the newest version of a session, or the one asked for; None when there is none or it is too old a response."""
        rows = self.database.rows(FIND, (version, namespace, name))
        if not rows:
            return None
        *values, session, response = rows[0]
        record = Record(*values, None, None, session, int(response))
        return None if response and record.updated <= self.now() - self.response_seconds else record

    def load(self, record: Record) -> StoredState:
        """Return how a version's state comes about; Unprocessable, also from its pieces, when that is not there or damaged."""
        chain = self.database.rows(CHAIN, (record.state,))
        if not chain:
            raise damaged("what leads to it is gone")
        name, seal = chain[0][:2]
        try:
            ids = [id for _, _, packed, _ in chain for id in unpack_ids(packed)]
        except ValueError:
            raise damaged("what leads to it is damaged") from None
        models = {model for _, _, packed, model in chain if len(packed) > 1}
        return StoredState(self._pieces(name, seal) if name is not None else None, ids, models)

    def _pieces(self, name: str, seal: bytes) -> Iterator[bytes]:
        try:
            pieces = self.objects.get(name)
        except KeyError:
            raise damaged("its snapshot is missing") from None
        end = b""
        for piece in pieces:
            yield piece
            end = (end + piece[-SEAL_BYTES:])[-SEAL_BYTES:]
        if end != seal:
            raise damaged("its snapshot is another one")

    def page(
        self, namespace: str, *, without: list[int], offset: int, limit: int, responses: bool = False
    ) -> list[SessionSummary]:
        """Return sessions, newest first, leaving out those with the ids `without`, and responses unless they are wanted."""
        query = f"{LIST} AND id <> ALL (%(without)s::bigint[]) ORDER BY updated DESC, id DESC LIMIT %(limit)s OFFSET %(offset)s"
        values = {"namespace": namespace, "responses": responses, "without": without, "limit": limit, "offset": offset}
        return [SessionSummary(*row) for row in self.database.rows(query, values)]

    def named_after(self, namespace: str, name: str, limit: int, *, responses: bool = False) -> list[SessionSummary]:
        """Return the sessions whose names follow `name`, in the order of their names."""
        query = f"{LIST} AND name > %(name)s ORDER BY name LIMIT %(limit)s"
        values = {"namespace": namespace, "responses": responses, "name": name, "limit": limit}
        return [SessionSummary(*row) for row in self.database.rows(query, values)]

    def count(self, namespace: str, *, responses: bool = False) -> int:
        """Return the number of sessions, with responses when they are wanted."""
        query = "SELECT count(*) FROM kept_sessions WHERE namespace = %s AND version > 0 AND (%s OR NOT response)"
        return self.database.rows(query, (namespace, responses))[0][0]

    def ids(self, namespace: str, names: list[str]) -> list[int]:
        """Return the ids of those of these sessions that exist."""
        query = "SELECT id FROM kept_sessions WHERE namespace = %s AND name = ANY (%s) AND version > 0"
        return [row[0] for row in self.database.rows(query, (namespace, names))]

    def oldest(self, limit: int) -> list[tuple[str, str]]:
        """Return namespace and name of the sessions and responses that were used longest ago."""
        query = "SELECT namespace, name FROM kept_sessions WHERE version > 0 ORDER BY updated LIMIT %s"
        return [(namespace, name) for namespace, name in self.database.rows(query, (limit,))]

    def kept_versions(self, namespace: str, name: str) -> list[int]:
        """Return the versions of a session that can be rewound to, newest first."""
        query = (
            "SELECT v.version FROM kept_sessions s JOIN kept_versions v ON v.session = s.id"
            " WHERE s.namespace = %s AND s.name = %s ORDER BY v.version DESC"
        )
        return [row[0] for row in self.database.rows(query, (namespace, name))]

    def last_node(self, namespace: str, name: str) -> int:
        """Return the largest number a node of this dialogue ever had, 0 if none."""
        query = (
            "SELECT max(number) FROM (SELECT last_node AS number FROM kept_dialogues WHERE namespace = %(namespace)s"
            " AND name = %(name)s UNION ALL SELECT substr(name, %(length)s)::bigint FROM kept_sessions WHERE"
            " namespace = %(namespace)s AND name > %(first)s AND name < %(end)s"
            " AND substr(name, %(length)s) ~ '^[0-9]{1,18}$') n"
        )
        first, end = range_of(name)
        values = {"namespace": namespace, "name": name, "first": first, "end": end, "length": len(name) + 2}
        return self.database.rows(query, values)[0][0] or 0

    def replay(self, namespace: str, name: str, key: str) -> Replay | None:
        """Return the answer that was kept for an idempotency key."""
        query = (
            "SELECT key, digest, answer, extract(epoch FROM created)::double precision FROM kept_replays"
            " WHERE namespace = %s AND name = %s AND key = %s AND created > now() - make_interval(secs => %s)"
        )
        rows = self.database.rows(query, (namespace, name, key, self.replay_seconds))
        return Replay(*rows[0]) if rows else None

    def reference(self, namespace: str) -> list[SessionSummary]:
        """None: rwkv_lightning keeps no sessions here."""
        return []

    def reference_state(self, namespace: str, name: str) -> tuple[Any, float] | None:
        """None, see `reference`."""
        return None


def damaged(why: str) -> Unprocessable:
    """The error for a session whose state cannot be had."""
    return Unprocessable(f"the stored state cannot be used: {why}", code="state_unusable")


def range_of(name: str) -> tuple[str, str]:
    """Bounds of the names that begin with "name:"."""
    return f"{name}:", f"{name};"  # ; follows :
