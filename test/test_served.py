"""What requests may load, and under which names."""

import os
from pathlib import Path

import pytest

from rwkv_batch.errors import Forbidden, InvalidRequest, NotFound, RwkvBatchError
from rwkv_batch.served.folders import MAX_PATH, file_below, view_name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    (folder / "deep").mkdir(parents=True)
    for name in ("a.pth", "deep/b.pth", "with blank.pth"):
        (folder / name).write_bytes(b"x")
    (tmp_path / "secret.pth").write_bytes(b"x")
    (folder / "out.pth").symlink_to(tmp_path / "secret.pth")
    (folder / "in.pth").symlink_to("deep/b.pth")
    (folder / "circle.pth").symlink_to("circle.pth")
    (folder / "up").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe.pth")
    return folder


def found(folder: Path | None, name: str) -> Path:
    return file_below(folder and str(folder), name, field="model_filename", flag="--models-dir", suffixes=(".pth",))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("a.pth", "a.pth"),
        ("a", "a.pth"),
        ("models/a.pth", "a.pth"),
        ("models/deep/b.pth", "deep/b.pth"),
        ("deep/../a.pth", "a.pth"),
        ("./a.pth", "a.pth"),
        ("in.pth", "deep/b.pth"),
        ("with blank.pth", "with blank.pth"),
    ],
)
def test_files_of_the_folder_are_found_however_they_are_written(folder, name, file):
    assert found(folder, name) == folder / file
    assert found(folder, str(folder / file)) == folder / file


@pytest.mark.parametrize(
    "name",
    ["../secret.pth", "deep/../../secret.pth", "out.pth", "up/secret.pth", "/etc/passwd", "..", "models/../../secret.pth"],
)
def test_no_way_leads_out_of_the_folder(folder, name):
    with pytest.raises(Forbidden) as raised:
        found(folder, name)
    assert raised.value.param == "model_filename"
    assert "secret" not in raised.value.message


def test_what_is_outside_is_refused_alike_whether_it_is_there_or_not(folder):
    said = set()
    for name in ("../secret.pth", "../nothing.pth"):
        with pytest.raises(Forbidden) as raised:
            found(folder, name)
        said.add(raised.value.message)
    assert len(said) == 1


@pytest.mark.parametrize("name", ["b.pth", "deep", ".", "circle.pth", "pipe.pth", "a.pth/x", "x" * 300, "models", "~/a.pth"])
def test_what_is_no_file_of_the_folder_is_not_found(folder, name):
    with pytest.raises(NotFound):
        found(folder, name)


@pytest.mark.parametrize("name", ["", "  ", "a\0.pth", "a\n.pth", "a/" * MAX_PATH, "\ud800"])
def test_what_can_be_no_file_is_refused(folder, name):
    with pytest.raises(InvalidRequest):
        found(folder, name)


def test_without_a_folder_nothing_is_loaded(tmp_path):
    with pytest.raises(Forbidden, match="--models-dir"):
        found(None, "a.pth")


def test_names_that_things_are_served_under():
    assert view_name(" RWKV x060 1B6 Base ", "model_viewname") == "RWKV x060 1B6 Base"
    assert view_name("日本語" * 80, "model_viewname")
    for name in ("", "  ", "a\nb", "a\0", "x" * 257, "\ud800"):
        with pytest.raises(RwkvBatchError) as raised:
            view_name(name, "model_viewname")
        assert (raised.value.status, raised.value.param) == (400, "model_viewname")
