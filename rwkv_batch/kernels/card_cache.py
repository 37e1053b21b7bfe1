"""What was found out about a card and takes time to find out again: small JSON files beside the built kernels.

Such a file may be missing, broken or in a folder that cannot be written. Then it is found out again; no start fails for it.
"""

import contextlib
import logging
import os
import uuid
from pathlib import Path
from typing import Any, TypeVar

import msgspec

log = logging.getLogger("rwkv_batch.engine")

T = TypeVar("T", bound=dict)


def recall(file: Path, kind: type[T]) -> T:
    """Return what `file` holds, of type `kind`; an empty one where it holds nothing of that type."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s cannot be used and is made anew: %s", file, error)
    return {}


def remember(file: Path, known: dict[str, Any]) -> None:
    """Write the file as a whole or not at all."""
    draft = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(msgspec.json.encode(known))
        os.replace(draft, file)
    except OSError as error:
        log.warning("%s cannot be written, the next start does without it: %s", file, error)
        with contextlib.suppress(OSError):
            draft.unlink()
