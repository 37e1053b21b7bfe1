"""Fixtures: one server for the tests that only talk to it; tests that break one start their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server without a password."""
    with ServerProcess("--log-level", "info", folder=tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a test's own server keeps its output."""
    return tmp_path
