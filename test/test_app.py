"""What happens around processes, as far as it can be seen without starting a server."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from models import ROOT

import app
from rwkv_batch.config import Config

DYING = """
import threading, time, app
threading.excepthook = app.end_with_thread
threading.Thread(target=lambda: [][0]).start()
time.sleep(60)
"""


def test_a_dead_thread_ends_its_process():
    """Nobody else would notice that the channel or the storage has stopped."""
    ended = subprocess.run([sys.executable, "-c", DYING], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == app.EXIT_ENGINE
    assert "IndexError" in ended.stderr


def test_a_child_that_dies_at_birth_is_found_dead_later(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda command, *, stdin, **more: stdin.close())
    child = app.Child("http", 0, Config(), Path("/nowhere"))
    assert child.reports() == []
    child.socket.close()


def test_listening_sockets_get_their_options_and_nothing_stays_open(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener, open(tmp_path / "file", "w"):
        before = set(os.listdir("/proc/self/fd"))
        app.tune_listener(Config())
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert set(os.listdir("/proc/self/fd")) <= before


def test_sockets_are_made_where_their_paths_fit(tmp_path, monkeypatch):
    base = tmp_path / ("long" * 20)
    base.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    folder = app.make_folder()
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "engine"))
    finally:
        shutil.rmtree(folder)
