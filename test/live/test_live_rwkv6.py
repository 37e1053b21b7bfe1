"""A server with an RWKV-6 model: every route does what it does with RWKV-7, and sessions leave it and come back."""

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bodies import examples
from models import TINY, random_tensors
from rwkv6_models import SHAPES6, random_tensors6
from scripted_server import start
from server_process import ServerProcess

from routes import ROUTES

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """RWKV-6, and RWKV-7."""
    folder: Path = tmp_path_factory.mktemp("rwkv6")
    torch.save(random_tensors6(SHAPES6["small heads"], 65536), folder / "six.pth")
    torch.save(random_tensors(TINY, 65536), folder / "seven.pth")
    for name in ("a", "b"):
        (folder / name).mkdir()
    with start(folder / "six.pth", folder / "a") as six, start(folder / "seven.pth", folder / "b") as seven:
        yield [six, seven]


def test_each_route_answers_as_with_rwkv7(servers):
    asked = 0
    for route in ROUTES:
        changes_server = route.method == "POST" and route.access == "admin"
        if changes_server or route.takes_file or "*" in route.path or ":" in route.path:
            continue
        for body in examples(route.path) if route.method == "POST" else [None]:
            six, seven = (server.request(route.method, route.path, body, {"Accept": "*/*"}) for server in servers)
            assert six[0] == seven[0], (route.path, body, six[1])
            assert six[2].get("content-type") == seven[2].get("content-type"), route.path
            asked += 1
    assert asked > 80


def test_a_session_is_exported_and_imported(servers):
    six, seven = servers
    turn = {"contents": ["User: a\n\nAssistant:"], "session_id": "s", "max_tokens": 5, "temperature": 0, "ignore_eos": True}

    def say(server: ServerProcess, session: str) -> str:
        status, answer = server.post({**turn, "session_id": session}, "/state/chat/completions")
        assert status == 200, answer
        return answer["choices"][0]["message"]["content"]

    say(six, "s")
    assert six.post({"session_id": "s", "copies": ["t", "u"]}, "/state/fork")[0] == 200
    expected = say(six, "t")
    data = exported(six, "u")
    assert six.post(data, "/state/import?session_id=v")[0] == 200
    assert say(six, "v") == expected
    assert seven.post(data, "/state/import?session_id=v")[0] == 422, "a state of another model"


def exported(server: ServerProcess, session: str) -> bytes:
    """The file of a session."""
    with contextlib.closing(http.client.HTTPConnection(server.host, server.port, timeout=60)) as connection:
        connection.request("POST", "/state/export", json.dumps({"session_id": session}).encode())
        reply = connection.getresponse()
        assert reply.status == 200
        return reply.read()
