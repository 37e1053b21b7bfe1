"""The plots of the committed figures: drawn again, and those that lie in docs/img."""

import importlib
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def plots() -> ModuleType:
    """The script; not imported before, as matplotlib takes each process of the tests a second."""
    pytest.importorskip("matplotlib", reason="needs matplotlib: make plots")
    return importlib.import_module("bench.plots")


def test_every_plot_is_drawn_for_both_kinds_of_page_and_names_device_and_date(plots, tmp_path):
    files = plots.draw_all(tmp_path)
    committed = plots.ROOT / "docs" / "img"
    assert sorted(path.name for path in files) == sorted(path.name for path in committed.glob("plot-*.svg"))
    for path in files:
        for text in (path.read_text(), (committed / path.name).read_text()):
            assert "NVIDIA H200, 20" in text
            assert len(text) < 100_000


def test_the_best_of_a_peers_trees_counts_for_each_batch(plots):
    trees = {"a": {"1": 10.0, "8": 40.0, "1x512": 900.0}, "b": {"1": 12.0}}
    assert plots.best_of(trees) == {1: 12.0, 8: 40.0}
