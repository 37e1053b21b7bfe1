"""Whole states beside the database: immutable objects in a folder that all servers see, or in a bucket that speaks S3.

Each is written once, under a name that no other ever has, and nothing in it is changed. So it does not matter when a store
shows a change to others, and what is there under a name is whole.
"""

import contextlib
import errno
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from rwkv_batch.errors import StorageFailed, StorageFull, Unavailable, UsageError

READ_BYTES = 2**20
PART_BYTES = 8 * 2**20  # of an upload to a bucket
FULL = (errno.ENOSPC, errno.EDQUOT)
HOW_TO_INSTALL = "pip install -r requirements-cluster.txt"


class Objects(Protocol):
    """Where whole states are. Used by several threads. Every method raises StorageFailed or Unavailable when it cannot."""

    def put(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write an object; what has returned survives a power loss."""

    def get(self, name: str) -> Iterator[bytes]:
        """Yield its bytes, in pieces; KeyError, at once, when it is not there."""

    def delete(self, names: list[str]) -> None:
        """Delete objects, those that are not there too."""


class Folder:
    """Objects as files in a folder, which may be on a network: each is written beside its place and renamed."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path).absolute()

    def put(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See `Objects`."""
        path = self._path(name)
        draft = path.with_name(f"{path.name}.draft")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            draft.rename(path)
            for folder in (path.parent, path.parent.parent):
                _sync(folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise self._failed("write", error) from None

    def get(self, name: str) -> Iterator[bytes]:
        """See `Objects`."""
        try:
            file = open(self._path(name), "rb")  # noqa: SIM115 - closed by the generator
        except FileNotFoundError:
            raise KeyError(name) from None
        except OSError as error:
            raise self._failed("read", error) from None
        return self._read(file)

    def _read(self, file: Any) -> Iterator[bytes]:
        with file:
            try:
                while piece := file.read(READ_BYTES):
                    yield piece
            except OSError as error:
                raise self._failed("read", error) from None

    def delete(self, names: list[str]) -> None:
        """See `Objects`."""
        for name in names:
            path = self._path(name)
            for file in (path, path.with_name(f"{path.name}.draft")):
                try:
                    file.unlink(missing_ok=True)
                except OSError as error:
                    raise self._failed("delete", error) from None

    def _path(self, name: str) -> Path:
        return self.path / name[:2] / name  # a folder of millions is slow on some file systems

    def _failed(self, what: str, error: OSError) -> StorageFailed:
        kind = StorageFull if error.errno in FULL else StorageFailed
        return kind(f"cannot {what} a state in the folder of snapshots: {error.strerror or error}")


class Bucket:
    """Objects in a bucket. Credentials, region and endpoint come from the environment, as AWS's own tools read them."""

    def __init__(self, url: str):
        try:
            import obstore
            from obstore.exceptions import BaseError, NotFoundError
            from obstore.store import from_url
        except ImportError:
            raise UsageError(f"--snapshots {url}: needs a package for buckets: {HOW_TO_INSTALL}", param="snapshots") from None
        self._obstore, self._error, self._not_found = obstore, BaseError, NotFoundError
        plain_http = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        options = {"client_options": {"allow_http": True, "timeout": "60s"}} if plain_http else {}
        try:
            self._store = from_url(url, **options)
        except (BaseError, ValueError) as error:
            raise UsageError(f"--snapshots {url}: {_first_line(error)}", param="snapshots") from None

    def put(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See `Objects`."""
        rest = iter(pieces)
        first, num_bytes = [], 0
        for piece in rest:
            first.append(bytes(piece))
            num_bytes += len(piece)
            if num_bytes >= PART_BYTES:
                break
        try:
            if num_bytes < PART_BYTES:
                self._obstore.put(self._store, self._key(name), b"".join(first), use_multipart=False)
            else:
                parts = itertools.chain(first, map(bytes, rest))
                self._obstore.put(self._store, self._key(name), parts, chunk_size=PART_BYTES)
        except (self._error, OSError) as error:
            raise self._failed("write", error) from None

    def get(self, name: str) -> Iterator[bytes]:
        """See `Objects`."""
        try:
            found = self._obstore.get(self._store, self._key(name))
        except (self._not_found, FileNotFoundError):
            raise KeyError(name) from None
        except (self._error, OSError) as error:
            raise self._failed("read", error) from None
        return self._read(found)

    def _read(self, found: Any) -> Iterator[bytes]:
        try:
            for piece in found.stream(min_chunk_size=READ_BYTES):
                yield bytes(piece)
        except (self._error, OSError) as error:
            raise self._failed("read", error) from None

    def delete(self, names: list[str]) -> None:
        """See `Objects`."""
        try:
            self._obstore.delete(self._store, [self._key(name) for name in names])
        except (self._not_found, FileNotFoundError):
            pass
        except (self._error, OSError) as error:
            raise self._failed("delete", error) from None

    def _key(self, name: str) -> str:
        return f"{name[:2]}/{name}"

    def _failed(self, what: str, error: Exception) -> Unavailable:
        return Unavailable(
            f"cannot {what} a state in the bucket of snapshots: {_first_line(error)}", code="storage_unavailable"
        )


def open_objects(place: str) -> Folder | Bucket:
    """The objects at `place`, a folder or the URL of a bucket; UsageError when it cannot be one."""
    return Bucket(place) if "://" in place else Folder(place)


def _first_line(error: Exception) -> str:
    """What a library says of a failure, without the dump of its inside."""
    return str(error).strip().partition("\n")[0]


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
