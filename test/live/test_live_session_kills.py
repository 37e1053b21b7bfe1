"""kill -9 of the engine at many random moments under turns of many sessions; `test_kill_9` is the quick one of them."""

from typing import get_args, get_type_hints

import pytest
from memory_model import write_memory
from scripted_server import start
from server_process import ROOT
from session_checker import Client, check_all, disturb
from test_live_state import checked, database, kill_all

from rwkv_batch.config import Config

DURABLE = [mode for mode in get_args(get_type_hints(Config)["durability"]) if mode not in ("relaxed", "shutdown")]

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("durability", "sessions", "kills"), [*((mode, 32, 100) for mode in DURABLE), (Config().durability, 320, 20)]
)
def test_many_kills(tmp_path_factory, folder, durability, sessions, kills):
    """Every tenth time the whole server is killed, and SQLite checks the file."""
    checkpoint = write_memory(tmp_path_factory.mktemp("memory") / "bytes.pth", 256)
    restarts, clients = [], list[Client]()
    for number in range(kills // 10):
        flags = ("--snapshot-tokens", "64") if number % 2 else ()  # whole states follow after few turns, or never
        with start(checkpoint, folder, "--max-crashes", "1000", "--durability", durability, *flags) as server:
            check_all(server, clients)
            clients, seconds = disturb(server, f"round {number}", sessions=sessions, kills=10, seed=number)
            restarts += seconds
            kill_all(server, database(folder))
        assert checked(folder) == "ok"
    print(f"restarts: median {sorted(restarts)[len(restarts) // 2]:.1f} s, longest {max(restarts):.1f} s")
    assert sorted(restarts)[len(restarts) // 2] < 5


@pytest.mark.parametrize("durability", DURABLE)
def test_kills_under_sessions_of_the_demo_model(folder, durability):
    with start(ROOT / "demo" / "model.rwkv", folder, "--max-crashes", "1000", "--durability", durability) as server:
        disturb(server, "demo", sessions=32, kills=10, seed=3)
