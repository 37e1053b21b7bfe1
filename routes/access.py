"""Who calls: the server's password, and named API keys.

Only SHA-256 digests are kept and compared, every one of them for every call, so that the time taken says nothing.
"""

import hashlib
import hmac
from collections.abc import Iterable
from typing import Any

from robyn import Headers

from rwkv_batch.config import parse_api_keys
from rwkv_batch.errors import Unauthorized

OWNER = ""  # who has the password, and everybody where there is nothing to know


class Secrets:
    """The password and the keys of one server; false when there are none, so that everybody may call."""

    def __init__(self, password: str | None, api_keys: str | None):
        named = [(name, bytes.fromhex(key.removeprefix("sha256:"))) for name, key in parse_api_keys(api_keys).items()]
        self._digests = [*([(OWNER, digest(password))] if password else []), *named]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def caller(self, offered: list[Any]) -> str:
        """The name of the key, OWNER for the password. Raises Unauthorized unless all that was offered is one caller's."""
        callers = {self._caller(secret if isinstance(secret, str) else "") for secret in offered}
        if len(callers) != 1 or None in callers:
            raise Unauthorized("Unauthorized: invalid or missing password")
        return callers.pop()

    def _caller(self, secret: str) -> str | None:
        given, found = digest(secret), None
        for name, known in self._digests:
            if hmac.compare_digest(given, known):
                found = name
        return found


def digest(secret: str) -> bytes:
    """What is kept and compared instead of a secret: always 32 bytes."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def in_headers(headers: Headers) -> list[str]:
    """The secrets that a call's headers offer: a Bearer, and the two headers that some clients send beside or instead of it."""
    given = headers.get("authorization")
    bearer = given[7:].strip() if given is not None and given.startswith("Bearer ") else None
    return present([bearer, headers.get("x-api-key"), headers.get("api-key")])


def present(secrets: Iterable[Any]) -> list[Any]:
    """Those that are there."""
    return [secret for secret in secrets if secret is not None]
