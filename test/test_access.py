"""Who may call: secrets in headers, pages of browsers, names of the server."""

import pytest
import quiet_robyn  # noqa: F401

from routes.http.access import OWNER, Pages, Secrets, hostname, in_headers, is_loopback
from rwkv_batch.config import Config
from rwkv_batch.errors import Forbidden, Unauthorized

EVIL = "https://evil.example"
GOOD = "https://good.example"
EXTENSIONS = ["chrome-extension://abc", "moz-extension://abc", "safari-web-extension://abc", "app://obsidian.md"]


def allowed(config: Config, *, acts: bool = True, secret: bool = False, **headers: str) -> bool:
    try:
        Pages(config, secret).check(headers, acts=acts)
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize(
    "origin", [EVIL, "http://evil.example:8000", "null", "", "http://localhost.evil.example", "http://[", "x"]
)
def test_without_a_secret_foreign_pages_may_not_act(origin):
    own = {"origin": origin, "host": "127.0.0.1:8000"}
    expected = origin in ("", "x")  # no page has such an origin
    assert allowed(Config(), **own) is expected
    assert allowed(Config(), acts=False, **own)
    assert allowed(Config(cors_origins="*"), **own)
    assert allowed(Config(), secret=True, **own)


@pytest.mark.parametrize("origin", [None, *EXTENSIONS, "http://localhost:3000", "http://127.0.0.1", "http://[::1]:7860"])
def test_without_a_secret_tools_extensions_and_pages_of_this_machine_may_act(origin):
    headers = {"host": "127.0.0.1:8000"} | ({"origin": origin} if origin else {})
    for config in (Config(), Config(cors_origins=GOOD), Config(host="0.0.0.0")):
        assert allowed(config, **headers)


def test_the_servers_own_pages_may_act():
    config = Config(host="0.0.0.0")
    for origin, host in (
        ("http://box:8000", "box:8000"),
        ("http://BOX", "box:80"),
        ("https://box", "Box"),
        ("http://[fe80::1]:8000", "[fe80::1]:8000"),
    ):
        assert allowed(config, origin=origin, host=host)
    for origin, host in (("http://box:8001", "box:8000"), ("http://box", "box:8000"), ("http://a", "b"), ("http://a:x", "a:x")):
        assert not allowed(config, origin=origin, host=host)


def test_listed_origins_are_those_that_may_act():
    for secret in (False, True):
        config = Config(cors_origins=f"{GOOD}, http://other.example")
        assert allowed(config, secret=secret, origin=GOOD, host="127.0.0.1")
        assert allowed(config, secret=secret, origin=GOOD.upper(), host="127.0.0.1")
        assert not allowed(config, secret=secret, origin=EVIL, host="127.0.0.1")
        assert not allowed(config, secret=secret, origin="null", host="127.0.0.1")
    assert allowed(Config(cors_origins="null"), origin="null", host="127.0.0.1")


@pytest.mark.parametrize(
    "host", ["rebind.evil.example", "rebind.evil.example:8000", "127.0.0.1.evil.example", "[::1", "a@b", "x:y"]
)
def test_names_of_others_are_refused_where_only_this_machine_calls(host):
    for acts in (False, True):
        assert not allowed(Config(), acts=acts, host=host)
        assert not allowed(Config(allowed_hosts="box"), acts=acts, secret=True, host=host)
        assert allowed(Config(allowed_hosts="*"), acts=acts, host=host)
        assert allowed(Config(host="0.0.0.0"), acts=acts, host=host)
        assert allowed(Config(), acts=acts, secret=True, host=host)


@pytest.mark.parametrize("host", ["localhost:8000", "LOCALHOST", "a.localhost", "127.0.0.1", "[::1]:8000", "10.0.0.7:80", ""])
def test_names_of_this_machine_are_its_own(host):
    for config in (Config(), Config(allowed_hosts="box")):
        assert allowed(config, host=host)
    assert allowed(Config(allowed_hosts="Box.example, other"), host="box.EXAMPLE:8000")


def test_hostnames():
    assert [hostname(host) for host in ("a:1", "A", "[::1]:2", "", ":5", "[")] == ["a", "a", "::1", "", "", ""]
    assert [name for name in ("localhost", "127.9.9.9", "::1", "a.localhost", "10.0.0.1", "local") if is_loopback(name)] == [
        "localhost", "127.9.9.9", "::1", "a.localhost",
    ]  # fmt: skip


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_secrets_in_headers(scheme):
    secrets = Secrets("pässwörd 100%", None)
    for text in ("pässwörd 100%", "p%C3%A4ssw%C3%B6rd%20100%25", "p%c3%a4ssw%c3%b6rd 100%"):
        assert secrets.caller(in_headers({"authorization": f"{scheme} {text}"})) == OWNER
        assert secrets.caller(in_headers({"x-api-key": text})) == OWNER
    for text in ("p%E4ssw%F6rd 100%", "passwort", "", "pässwörd+100%"):
        with pytest.raises(Unauthorized):
            secrets.caller(in_headers({"authorization": f"{scheme} {text}"}))
    assert Secrets("a%41+", None).knows("a%41+")
