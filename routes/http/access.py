"""Who calls: the server's password, named API keys, and which pages of a browser may.

Only SHA-256 digests are kept and compared, every one of them for every call, so that the time taken says nothing.
"""

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from rwkv_batch.config import Config
from rwkv_batch.errors import Forbidden, Unauthorized
from rwkv_batch.secrets import parse_api_keys

READING = ("GET", "HEAD", "OPTIONS")
WEB_PORTS = {"http": 80, "https": 443}
LOCAL_NAMES = ("localhost", "host.docker.internal", "host.containers.internal")  # names that no one else's DNS can give
PROXY_HEADERS = ("x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "forwarded", "via")
OWNER = ""  # who has the password, and everybody where there is nothing to know


class Headers(Protocol):
    """A call's headers; names are lower case."""

    def get(self, name: str, /) -> str | None:
        """The value of one."""
        ...


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

    def knows(self, secret: str) -> bool:
        """Whether it is somebody's."""
        return self._caller(secret) is not None

    def _caller(self, secret: str) -> str | None:
        """Whose it is. It may be percent-encoded, for a header cannot bring other characters than ASCII here."""
        as_sent, decoded, found = digest(secret), digest(unquote(secret)), None
        for name, known in self._digests:
            if hmac.compare_digest(as_sent, known) | hmac.compare_digest(decoded, known):
                found = name
        return found


def digest(secret: str) -> bytes:
    """What is kept and compared instead of a secret: always 32 bytes."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def in_headers(headers: Headers) -> list[str]:
    """The secrets that a call's headers offer: a Bearer, and the two headers that some clients send beside or instead of it."""
    given = headers.get("authorization")
    bearer = given[7:].strip() if given is not None and given[:7].lower() == "bearer " else None
    return present([bearer, headers.get("x-api-key"), headers.get("api-key")])


def present(secrets: Iterable[Any]) -> list[Any]:
    """Those that are there."""
    return [secret for secret in secrets if secret is not None]


class Pages:
    """Which pages of a browser may make this server do something, and by which names it may be called.

    Without a secret it is the browser that calls, for whatever page it shows. Then only the server's own pages, those of this
    machine and what is no web page (extensions, programs) may act; `--cors-origins` names others. And the name in `Host` must
    be this machine's, or a page of a name that its owner points here would be the server's own.
    """

    def __init__(self, config: Config, has_secrets: bool):
        given = config.cors_origins if config.cors_origins is not None else "*" if has_secrets else ""
        self.origins = {origin.strip().lower() for origin in given.split(",")} - {""}
        self.readers = self.origins if config.cors_origins is not None else {"*"}
        self.hosts = {name.strip().lower() for name in (config.allowed_hosts or "").split(",")} - {""}
        self._checks_hosts = bool(self.hosts) if has_secrets or not config.loopback else True
        self._own_names = {*LOCAL_NAMES, socket.gethostname().lower()}

    def check(self, headers: Headers, *, acts: bool) -> None:
        """Raise Forbidden for a call by a name that is not this server's, or, where it acts, from a page that may not."""
        host = headers.get("host") or ""
        if self._checks_hosts and host and "*" not in self.hosts and not self._is_own(host):
            raise Forbidden("not a name of this server in Host; --allowed-hosts names further ones", code="host_not_allowed")
        origin = headers.get("origin")
        if acts and origin is not None and "*" not in self.origins and not self._may_act(origin.lower(), host.lower()):
            raise Forbidden("pages of this origin may not call; --cors-origins names those that may", code="origin_not_allowed")

    def _is_own(self, host: str) -> bool:
        name = hostname(host)
        return name in self._own_names or name.endswith(".localhost") or name in self.hosts or is_address(name)

    def _may_act(self, origin: str, host: str) -> bool:
        if origin in self.origins:
            return True
        scheme, _, place = origin.partition("://")
        if scheme not in WEB_PORTS:
            return origin != "null"  # any page can have that one
        return is_loopback(hostname(place)) or (with_port(place, scheme) == with_port(host, scheme) != ("", 0))


def hostname(host: str) -> str:
    """The name or address in `name:port` or `[address]:port`, lower case; "" for what is neither."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def with_port(host: str, scheme: str) -> tuple[str, int]:
    """Name and port, that of the scheme where none is given; ("", 0) for what is neither."""
    try:
        return hostname(host), urlsplit(f"//{host}").port or WEB_PORTS[scheme]
    except ValueError:
        return "", 0


def is_address(name: str) -> bool:
    """Whether it is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    """Whether it means this machine wherever it is read."""
    return name == "localhost" or name.endswith(".localhost") or (is_address(name) and ipaddress.ip_address(name).is_loopback)


def from_this_host(headers: Headers, peer: str) -> bool:
    """Whether a call from `peer` came over the loopback interface and not through a proxy, as far as can be seen.

    A proxy that adds no header of its own gives itself away by the client's Host, or as nginx does by closing the connection.
    """
    if any(headers.get(name) is not None for name in PROXY_HEADERS):
        return False
    if not is_loopback(hostname(headers.get("host") or "")) or (headers.get("connection") or "").lower() == "close":
        return False
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
