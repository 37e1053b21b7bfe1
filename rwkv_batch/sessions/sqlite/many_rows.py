"""Many rows with few statements.

The interpreter's lock is let go of for each statement that SQLite runs, and where the engine's loop runs in the same process it
takes up to a step to have it again: so not each row has a statement of its own.
"""

import sqlite3
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

MAX_ROWS = 512  # of a statement. Above
ANY_NUMBER = 32  # it is a power of two: so there are few statements, which are prepared once
NUM_STATEMENTS = 256  # that stay prepared: some 40 for each of what is executed so


def execute_for(connection: sqlite3.Connection, statement: str, rows: Sequence[tuple]) -> int:
    """Execute `statement`, with its rows of values where it says `{rows}`, until all rows have been; return how many rows of
    the table it has changed."""
    changed = start = 0
    while start < len(rows):
        left = len(rows) - start
        size = left if left <= ANY_NUMBER else min(MAX_ROWS, 1 << left.bit_length() - 1)
        part = rows[start : start + size]
        changed += connection.execute(_statement(statement, size, len(part[0])), [*chain.from_iterable(part)]).rowcount
        start += size
    return changed


@lru_cache(maxsize=NUM_STATEMENTS)
def _statement(statement: str, num_rows: int, num_columns: int) -> str:
    row = f"({', '.join('?' * num_columns)})"
    return statement.format(rows=", ".join([row] * num_rows))
