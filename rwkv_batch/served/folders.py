"""Which files a request may name: those that lie in the folder that a setting gives for their kind, and no others.

A file's name comes from outside, so it is judged by where it leads and not by how it is written: a path with `..`, a link out
of the folder and an absolute path elsewhere are refused alike. What is said of one never tells whether it exists.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from rwkv_batch.errors import Forbidden, InvalidRequest, NotFound

MAX_NAME = 256  # characters of a name that things are served under
MAX_PATH = 4096  # bytes of a file's name


def file_below(folder: str | None, name: str, *, field: str, flag: str, suffixes: Sequence[str] = ()) -> Path:
    """Return the file `name` in `folder`, links resolved.

    name      relative to the folder, with or without the folder's own name in front ("models/x.pth" in "/srv/models"), or
              absolute; with or without one of `suffixes`
    field     of the request, for messages
    flag      that gives the folder, for messages

    Raises InvalidRequest for what names no file, Forbidden without a folder and for a file outside of it, NotFound.
    """
    if folder is None:
        raise Forbidden(f"{field}: needs a server with {flag}, the folder that the file is in", param=field, code="no_folder")
    if not name.strip():
        raise InvalidRequest(f"{field}: names no file", param=field)
    if not name.isprintable() or len(name.encode()) > MAX_PATH:
        raise InvalidRequest(f"{field}: not the name of a file", param=field)
    root = real_path(Path(folder).expanduser())
    given = Path(name)
    places = [root / given]
    if not given.is_absolute() and len(given.parts) > 1 and given.parts[0] in (Path(folder).name, root.name):
        places.append(root.joinpath(*given.parts[1:]))
    places = [place for place in places if real_path(place).is_relative_to(root)]
    if not places:
        raise Forbidden(f"{field}: the file is not in the folder of {flag}", param=field, code="outside_folder")
    for place in places:
        for suffix in ("", *suffixes):
            real = real_path(Path(f"{place}{suffix}"))
            with contextlib.suppress(OSError):  # too long a name, or no right to look
                if real.is_relative_to(root) and real.is_file():
                    return real
    raise NotFound(f"{field}: no such file in the folder of {flag}", param=field, code="no_such_file")


def real_path(path: Path) -> Path:
    """Return where a path leads, whether or not something is there."""
    return Path(os.path.realpath(path))


def view_name(name: str, field: str) -> str:
    """Return a name that something is to be served under, without blanks around it. Raises InvalidRequest."""
    text = name.strip()
    if not text or len(text) > MAX_NAME or not text.isprintable():
        raise InvalidRequest(f"{field}: 1 to {MAX_NAME} printable characters", param=field)
    return text
