"""Many rows with few statements.

The interpreter's lock is let go of for each statement that SQLite runs, and where the engine's loop runs in the same process it
takes up to a step to have it again: so not each row has a statement of its own.
"""

import sqlite3
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

MAX_ROWS = 512  # of a statement, a power of two as its number of rows is: so there are few statements, which are prepared once


def execute_for(connection: sqlite3.Connection, statement: str, rows: Sequence[tuple]) -> int:
    """Execute `statement`, with its rows of values where it says `{rows}`, until all rows have been; return how many rows of
    the table it has changed."""
    changed = start = 0
    while start < len(rows):
        size = min(MAX_ROWS, 1 << (len(rows) - start).bit_length() - 1)
        part = rows[start : start + size]
        changed += connection.execute(_statement(statement, size, len(part[0])), [*chain.from_iterable(part)]).rowcount
        start += size
    return changed


@lru_cache(maxsize=64)
def _statement(statement: str, num_rows: int, num_columns: int) -> str:
    row = f"({', '.join('?' * num_columns)})"
    return statement.format(rows=", ".join([row] * num_rows))
