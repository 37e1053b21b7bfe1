"""The password and the API keys: read from settings and from files that nobody else may read, keys hashed."""

import hashlib
import os
import re
import stat
from pathlib import Path

from rwkv_batch.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # of an API key's holder


def read_password(password: str | None, path: str | None) -> str | None:
    """The password given directly or in a file that only its owner may read; None when there is none. Raises UsageError."""
    if path is None:
        return password or None
    if password:
        raise UsageError("--password and --password-file: give one of them", param="password_file")
    return read_secret(path, "password_file")


def exposed(mode: int) -> bool:
    """Whether others than its owner may open a file of this mode."""
    return os.name == "posix" and stat.S_IMODE(mode) & 0o077 != 0


def read_secret(path: str, name: str) -> str:
    """The text of a file that only its owner may read, without line ends around it. Raises UsageError naming the setting."""
    flag = "--" + name.replace("_", "-")
    try:
        if exposed(os.stat(path).st_mode):
            raise UsageError(f"{flag}: others may read {path}; run chmod 600 {path}", param=name)
        text = Path(path).read_text(encoding="utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"{flag}: cannot read {path}: {reason}", param=name) from None
    if not text:
        raise UsageError(f"{flag}: {path} is empty", param=name)
    return text


def read_api_keys(api_keys: str | None, path: str | None) -> str | None:
    """All keys, given directly and in a file, in the form of the setting, hashed; None without any. Raises UsageError."""
    keys = parse_api_keys(api_keys)
    lines = read_secret(path, "api_key_file").splitlines() if path is not None else []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            add_api_key(keys, *line.split(), source=f"--api-key-file: {path}, line {number}")
    return ",".join(f"{name}={key}" for name, key in keys.items()) or None


def parse_api_keys(text: str | None) -> dict[str, str]:
    """`name=key,name=sha256:HEX` -> {name: sha256:HEX}. Raises UsageError."""
    keys: dict[str, str] = {}
    for number, part in enumerate((text or "").split(","), 1):
        if part.strip():
            add_api_key(keys, *part.strip().split("=", 1), source=f"--api-keys: entry {number}")
    return keys


def add_api_key(keys: dict[str, str], *entry: str, source: str) -> None:
    """Add a name and its key, hashed unless it came so. Raises UsageError, which never shows the key."""
    if len(entry) != 2 or not NAME.fullmatch(entry[0]) or not entry[1]:
        raise UsageError(f"{source}: wants a name of letters, digits, dot, - and _, and a key", param="api_keys")
    name, key = entry
    if name in keys:
        raise UsageError(f"{source}: there is a key called {name} already", param="api_keys")
    if key.startswith("sha256:"):
        if not re.fullmatch("sha256:[0-9a-f]{64}", key):
            raise UsageError(f"{source}: wants 64 hexadecimal digits, lower case, behind sha256:", param="api_keys")
        keys[name] = key
    else:
        keys[name] = "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def without_secret(url: str) -> str:
    """A URL that can be shown: without user, password and options."""
    scheme, mark, rest = url.partition("://")
    return f"{scheme}{mark}{rest.partition('?')[0].rpartition('@')[2]}" if mark else "…"
