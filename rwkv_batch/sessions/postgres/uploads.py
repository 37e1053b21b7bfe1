"""Whole states on their way to a folder or a bucket, in a thread of their own: no turn waits for one."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from rwkv_batch.errors import RwkvBatchError, StorageFailed
from rwkv_batch.sessions.postgres.catalog import SEAL_BYTES
from rwkv_batch.sessions.postgres.objects import Objects
from rwkv_batch.sessions.store import Source


@dataclass
class Upload:
    """A whole state under its name, for a version whose state follows from it by `ids`. `error`: why it was not written."""

    name: str
    namespace: str = ""
    source: Source | None = None
    ids: list[int] = field(default_factory=list)
    pieces: list[bytes | memoryview] = field(default_factory=list)
    error: RwkvBatchError | None = None

    @property
    def seal(self) -> bytes:
        """How it ends."""
        end = b"".join(bytes(piece[-SEAL_BYTES:]) for piece in self.pieces[-SEAL_BYTES:])
        return end[-SEAL_BYTES:]

    def __iter__(self) -> Iterator[bytes | memoryview]:
        return iter(self.pieces)


class Uploads:
    """At most one is on its way. Used by one thread."""

    def __init__(self, objects: Objects):
        self._objects = objects
        self._thread: ThreadPoolExecutor | None = None
        self._draft: Upload | None = None
        self._running: tuple[Upload, Future] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether one is on its way."""
        return self._running is not None and not self._running[1].done()

    def begin(self, name: str) -> None:
        """Begin to gather another one; the last must have been taken."""
        self._draft = Upload(name)

    def add(self, piece: bytes | memoryview) -> None:
        """Gather its next piece."""
        self._draft.pieces.append(piece)

    def finish(self, namespace: str, source: Source, ids: list[int]) -> None:
        """Send it."""
        upload, self._draft = self._draft, None
        upload.namespace, upload.source, upload.ids = namespace, source, ids
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._running = upload, self._thread.submit(self._objects.put, upload.name, upload)

    def take(self, *, wait: bool = False) -> Upload | None:
        """Return the last one when it is there, or could not be written."""
        if self._running is None or (self.is_busy and not wait):
            return None
        upload, result = self._running
        self._running = None
        error = result.exception()
        if error is not None:
            upload.error = error if isinstance(error, RwkvBatchError) else StorageFailed(f"cannot write a state: {error}")
        return upload
