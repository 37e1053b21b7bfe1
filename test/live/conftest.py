"""Fixtures: one server for the tests that only talk to it; tests that break one start their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_server import PASSWORD, start, write_checkpoint
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


@pytest.fixture(scope="session")
def scripted_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers are known."""
    return write_checkpoint(tmp_path_factory.mktemp("scripted") / "scripted.pth")


@pytest.fixture(scope="session")
def scripted(scripted_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with it, without a password."""
    with start(scripted_checkpoint, tmp_path_factory.mktemp("open")) as running:
        yield running


@pytest.fixture(scope="session")
def locked_scripted(scripted_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with it and the password of the seeds."""
    with start(scripted_checkpoint, tmp_path_factory.mktemp("locked"), password=PASSWORD) as running:
        yield running


@pytest.fixture(scope="session")
def random_model(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose model emits anything, incomplete characters too."""
    with start(tiny_checkpoint, tmp_path_factory.mktemp("random"), "--translate-ratio", "0.5") as running:
        yield running
