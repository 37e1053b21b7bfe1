"""What a server takes for itself alone before it starts: a port, and a folder for its sockets and figures."""

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import tempfile
from dataclasses import replace
from pathlib import Path

from rwkv_batch.config import Config
from rwkv_batch.errors import UsageError

log = logging.getLogger(__name__)

FOLDER_PREFIX = "rwkv-batch-"
MAX_BASE = 68  # bytes of the path before that: those of a socket may be 103 in all


def claim_port(config: Config) -> tuple[Config, socket.socket]:
    """Make sure that the port is free and keep it for us; returns the settings with the port's number. Raises UsageError.

    A port that another server shares (SO_REUSEPORT) would be shared with us silently, so the test goes without that option.
    """
    host = config.host or "127.0.0.1"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as test:
            test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            test.bind((host, config.port))
            test.listen()
            port = test.getsockname()[1]
        claim = socket.socket(family, socket.SOCK_STREAM)
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        claim.bind((host, port))
    except OSError as error:
        raise UsageError(f"--port: cannot listen on {host} port {config.port}: {error.strerror}", param="port") from None
    return replace(config, port=port), claim


def make_folder() -> tuple[Path, int]:
    """A folder only we may enter, for sockets and figures, and the lock on it; folders of servers that were killed are removed.

    A lock and no process id says who is alive, because containers that share a folder do not share ids. It also keeps
    systemd-tmpfiles away, which ages files in /tmp. Raises UsageError.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if len(os.fsencode(base)) > MAX_BASE:
        base = Path("/tmp")
    for old in base.glob(FOLDER_PREFIX + "*"):
        if "-" not in old.name.removeprefix(FOLDER_PREFIX):  # with a hyphen: an older version's, which did not lock them
            remove_unlocked(old)
    try:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=base))
            with contextlib.suppress(BlockingIOError, FileNotFoundError):  # found by another server before it was locked
                return folder, lock_folder(folder)
    except OSError as error:
        raise UsageError(f"no folder for sockets in {base}: {error.strerror}; set TMPDIR to one with room") from None


def lock_folder(folder: Path) -> int:
    """Make `folder` ours; returns what holds it. Raises BlockingIOError or FileNotFoundError when it is being removed."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:  # then nobody else can lock it either, to remove it
            log.warning("%s cannot be locked: %s", folder, error.strerror)
        (folder / "metrics").mkdir()
    except OSError:
        os.close(lock)
        raise
    return lock


def remove_unlocked(folder: Path) -> None:
    """Remove a folder of ours that no server holds."""
    with contextlib.suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
        finally:
            os.close(lock)
