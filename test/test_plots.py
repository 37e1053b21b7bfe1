"""The plots of the committed figures: drawn again, and those that lie in docs/img."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

COMMITTED = [*(Path(__file__).parents[1] / "docs" / "img").glob("plot-*.svg")]


@pytest.fixture(scope="module")
def plots() -> ModuleType:
    """The script; not imported before, as matplotlib takes each process of the tests a second."""
    pytest.importorskip("matplotlib", reason="needs matplotlib: make plots")
    return importlib.import_module("bench.plots")


def names_device_and_date(plot: Path) -> bool:
    text = plot.read_text()
    return "NVIDIA H200, 20" in text and len(text) < 100_000


def test_every_plot_of_the_pages_names_device_and_date():
    assert len(COMMITTED) >= 8
    assert all(map(names_device_and_date, COMMITTED))


@pytest.mark.long
def test_every_plot_is_drawn_for_both_kinds_of_page(plots, tmp_path):
    files = plots.draw_all(tmp_path)
    assert sorted(path.name for path in files) == sorted(path.name for path in COMMITTED)
    assert all(map(names_device_and_date, files))


@pytest.mark.long
def test_the_best_of_a_peers_trees_counts_for_each_batch(plots):
    trees = {"a": {"1": 10.0, "8": 40.0, "1x512": 900.0}, "b": {"1": 12.0}}
    assert plots.best_of(trees) == {1: 12.0, 8: 40.0}
