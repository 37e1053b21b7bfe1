"""Sessions in PostgreSQL, for servers that share them; whole states are objects in a folder or a bucket beside it."""

from typing import Any

from rwkv_batch.errors import UsageError
from rwkv_batch.sessions.store import SharedStore


def open_store(url: str, snapshots: str | None, durability: str, **options: Any) -> SharedStore:
    """The store of `--state-url` and `--snapshots`, not connected yet; UsageError when it cannot be used so."""
    if not url.startswith(("postgresql://", "postgres://")):
        raise UsageError("--state-url: wants postgresql://USER@HOST:PORT/DATABASE", param="state_url")
    if snapshots is None:
        raise UsageError(
            "--state-url: needs --snapshots FOLDER, which all servers see, or s3://BUCKET/PREFIX", param="snapshots"
        )
    if durability not in ("log", "turn"):
        raise UsageError(
            f"--durability {durability}: other servers would not see its turns; take log or turn", param="durability"
        )
    try:
        from rwkv_batch.sessions.postgres.database import PostgresStore
    except ImportError:
        raise UsageError("--state-url: needs packages: pip install -r requirements-cluster.txt", param="state_url") from None
    from rwkv_batch.sessions.postgres.objects import open_objects

    return PostgresStore(url, open_objects(snapshots), **options)
