"""The sessions that rwkv_lightning kept in the same file."""

import sqlite3
from typing import Any

import msgspec

from rwkv_batch.sessions.sqlite.connection import DatabaseFile
from rwkv_batch.sessions.store import SessionSummary

REFERENCE_ID = -(2**62)  # of the first of the sessions that are only in rwkv_lightning's table
_REFERENCE_TIME = (  # a number, or as SQLite and Python write a time
    "CASE WHEN typeof(last_updated) IN ('integer', 'real') THEN last_updated"
    " ELSE ifnull((julianday(last_updated) - 2440587.5) * 86400, 0) END"
)


class ReferenceTable:
    """Sessions that rwkv_lightning kept in the same file, as far as they are not among ours yet. They have no namespace."""

    def __init__(self, file: DatabaseFile):
        self._file = file
        self._sessions: dict[str, SessionSummary] = {}

    def look(self) -> None:
        """See what is there, now that the file is open."""
        time_of = _REFERENCE_TIME if "last_updated" in self._columns() else "0"
        query = (
            f"SELECT {time_of}, rowid + {REFERENCE_ID}, session_id, 1, 0, ifnull(length(state_blob), 0) FROM sessions r"
            " WHERE typeof(session_id) = 'text' AND NOT EXISTS"
            " (SELECT 1 FROM kept_sessions WHERE namespace = '' AND name = r.session_id)"
        )
        self._sessions = {session.name: session for session in summaries(self._file, query, ())} if self._exists() else {}

    def sessions(self, namespace: str) -> list[SessionSummary]:
        """Return all of them."""
        self._file.open(create=False)
        return [] if namespace else list(self._sessions.values())

    def ids(self, namespace: str, names: list[str]) -> list[int]:
        """Return the ids of those of these sessions that exist."""
        return [self._sessions[name].id for name in names if not namespace and name in self._sessions]

    def state(self, namespace: str, name: str) -> tuple[Any, float] | None:
        """Return what was stored for one, whatever it is, and when; None if nothing."""
        self._file.open(create=False)
        if namespace or name not in self._sessions:
            return None
        rows = self._file.rows("SELECT state_blob FROM sessions WHERE session_id = ?", (name,))
        return (rows[0][0], self._sessions[name].updated) if rows else None

    def delete(self, connection: sqlite3.Connection, where: str, values: tuple) -> set[str]:
        """Delete rows; return the names that were there."""
        if not self._exists():
            return set()
        names = {row[0] for row in connection.execute(f"SELECT session_id FROM sessions WHERE {where}", values).fetchall()}
        connection.execute(f"DELETE FROM sessions WHERE {where}", values)
        return names

    def shadow(self, names: set[str]) -> None:
        """Those with these names are not to be seen any more: they are among ours, or deleted."""
        for name in names & self._sessions.keys():
            del self._sessions[name]

    def _exists(self) -> bool:
        """Whether rwkv_lightning has kept sessions in this file."""
        return {"session_id", "state_blob"} <= self._columns()

    def _columns(self) -> set[str]:
        return {row[1] for row in self._file.rows("PRAGMA table_info(sessions)", ())}


def summaries(file: DatabaseFile, query: str, values: tuple) -> list[SessionSummary]:
    """Return the sessions that a query finds."""
    rows = file.rows(query, values)
    try:
        return msgspec.convert(rows, list[SessionSummary])
    except msgspec.MsgspecError as error:
        raise file.failed("read", error) from None
