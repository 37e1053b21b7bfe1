"""Sessions of several engines in one file, which a process of its own has open."""

from pathlib import Path

from rwkv_batch.config import Config
from rwkv_batch.errors import UsageError
from rwkv_batch.sessions.remote.client import RemoteStore


def open_store(path: Path, config: Config) -> RemoteStore:
    """The store process that listens at `path`, not connected to yet; UsageError when it cannot be used so."""
    if config.durability not in ("log", "turn"):
        raise UsageError(
            f"--durability {config.durability}: other engines would not see its turns; take log or turn", param="durability"
        )
    return RemoteStore(
        path,
        config.state_db,
        replay_seconds=config.replay_seconds,
        response_seconds=config.response_ttl_hours * 3600,
        lease_seconds=config.lease_seconds,
    )
