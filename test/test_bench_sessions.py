"""What bench/served/sessions.py makes of what it sees; the server's side of it is in test/live/test_live_session_kills.py."""

from bench.served.sessions import Client, Load, Seen, cells_of, failures_in, read_arguments


def client(session: str | None) -> Client:
    return Client(Load("h", 1, {}, 0.0, 1.0, range(1), 64, session, 8), Seen(), 0)


def test_turns_have_consecutive_versions():
    one = client("s")
    ends = [{"done": True, "session": {"version": version, "durable": True}} for version in (4, 5, 5, 7)]
    assert [bool(one.check(end)) for end in ends] == [False, False, True, True]
    assert one.seen.durable == {True}


def test_ends_that_are_none():
    assert client(None).check({"done": True}) == ""
    assert client(None).check({}) != ""
    assert client("s").check({"done": True, "error": "full"}) == "full"


def test_only_who_is_told_to_come_back_does_so_without_a_failure():
    one = client("s")
    assert 0 < one.refused(429, {"retry-after": "60"}, b"busy") <= 2
    assert (sum(one.seen.refused.values()), sum(one.seen.failures.values())) == (1, 0)
    one.refused(503, {}, b"gone")
    one.refused(507, {"retry-after": "1"}, b"full")
    assert sum(one.seen.failures.values()) == 2


def test_cells_and_failures():
    assert cells_of(read_arguments(["--sessions", "1,2", "--tokens", "3"])) == [(1, 3), (2, 3)]
    assert cells_of(read_arguments(["--cells", "16x64,320x256"])) == [(16, 64), (320, 256)]
    assert failures_in({"cells": [{"failures": {"a": 2}, "plain": {"failures": {"b": 1}}}], "refused": {"c": 9}}) == 3
