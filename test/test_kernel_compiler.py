"""When kernels are built anew; that the sources compile is checked by `make kernels`."""

import shutil
from pathlib import Path

import pytest

from rwkv_batch.kernels import compiler


@pytest.fixture
def toolchain(tmp_path, monkeypatch) -> compiler.Toolchain:
    """A compiler that only says its version, and copies of the sources."""
    for name in ("cuda", "hip"):
        shutil.copytree(compiler.folder(name), tmp_path / name)
    monkeypatch.setattr(compiler, "folder", lambda name: tmp_path / name)
    program = tmp_path / "nvcc"
    program.write_text("#!/bin/sh\necho 1.0\n")
    program.chmod(0o755)
    return compiler.Toolchain("cuda", str(program), tmp_path / "cuda", ".cu", ())


def files_below(top: Path) -> list[Path]:
    return sorted(file for file in top.rglob("*") if file.is_file())


def test_a_change_of_any_source_is_noticed(toolchain):
    files = [*files_below(toolchain.folder), *files_below(toolchain.folder.parent / "hip")]
    assert any(file.parent != toolchain.folder for file in files)
    seen = {toolchain.digest("sm_90a")}
    for file in files:
        file.write_text(file.read_text() + "// changed\n")
        seen.add(toolchain.digest("sm_90a"))
    assert len(seen) == len(files) + 1


def test_a_source_that_moves_is_noticed(toolchain):
    before = toolchain.digest("sm_90a")
    moved = next(file for file in files_below(toolchain.folder) if file.suffix == ".cuh")
    moved.rename(toolchain.folder / "sampling" / "moved.cuh")
    assert toolchain.digest("sm_90a") != before


def test_every_source_is_compiled(toolchain):
    assert toolchain.sources() == sorted(toolchain.folder.rglob("*.cu"))
    assert len({source.stem for source in toolchain.sources()}) == len(toolchain.sources())  # objects have no folders
