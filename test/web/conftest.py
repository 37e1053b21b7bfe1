"""A browser and the pages it looks at; run by `make test-web`, skipped by name where no browser is installed."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "live"))

from browser import find_chromium
from scripted_server import start
from server_process import ROOT, ServerProcess

PASSWORD = "the password"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these need a browser; `make test` leaves them out."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.web)


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """Chromium without a window."""
    sync = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-web")
    path = find_chromium()
    if path is None:
        pytest.skip("needs chromium (apt-get install chromium)")
    with sync.sync_playwright() as driver:
        flags = ["--no-sandbox", "--enable-precise-memory-info", "--js-flags=--expose-gc"]
        running = driver.chromium.launch(executable_path=path, args=flags)
        yield running
        running.close()


def is_fault(message) -> bool:
    """Whether a line of the browser's console tells of a fault; answers such as 401, and none at all, are told there too."""
    meant = ("the server responded with a status of 4", "net::ERR_FAILED")
    return message.type == "error" and not any(text in message.text for text in meant)


@pytest.fixture
def open_page(browser) -> Iterator[Callable]:
    """Open a page in a context of its own; what goes wrong in its scripts fails the test."""
    contexts, faults = [], []

    def open_(url: str, **options):
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 800}, "locale": "en-GB"} | options))
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if is_fault(message) else None)
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not faults


def demo(folder: Path, password: str | None = None) -> ServerProcess:
    """A server with the demo model."""
    return start(ROOT / "demo" / "model.rwkv", folder, password=password)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Open to all on this machine."""
    with demo(tmp_path_factory.mktemp("open")) as running:
        yield running


@pytest.fixture(scope="session")
def url(server: ServerProcess) -> str:
    """Its page."""
    return f"http://127.0.0.1:{server.port}/"
