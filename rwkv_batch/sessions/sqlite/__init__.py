"""Sessions in an SQLite file."""

from rwkv_batch.config import Config
from rwkv_batch.sessions.sqlite.database import SessionDatabase
from rwkv_batch.sessions.sqlite.sealing import read_key


def open_store(config: Config, path: str | None = None) -> SessionDatabase:
    """The file at `path`, by default that of `--state-db`, not opened yet. UsageError when its key cannot be read."""
    return SessionDatabase(
        path or config.state_db,
        versions=config.session_versions,
        replay_seconds=config.replay_seconds,
        response_seconds=config.response_ttl_hours * 3600,
        max_responses=config.max_responses,
        max_bytes=int(config.state_db_gib * 2**30) if config.state_db_gib is not None else None,
        key=read_key(config.state_key_file) if config.state_key_file is not None else None,
    )
