"""When kernels are built anew; that the sources compile is checked by `make kernels`."""

import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_recorder import make_launcher

from rwkv_batch.config import Config
from rwkv_batch.errors import UsageError
from rwkv_batch.kernels import compiler
from rwkv_batch.kernels.linear import Linear
from rwkv_batch.kernels.mix import Mix


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


@pytest.mark.parametrize(
    ("card", "wanted", "arch", "flags"),
    [
        ((9, 0), None, "sm_90a", "arch=compute_90a,code=sm_90a"),
        ((9, 0), "sm_90", "sm_90a", "arch=compute_90a,code=sm_90a"),
        ((9, 0), "sm_80", "sm_80-on-sm_90", "arch=compute_80,code=sm_90"),
        ((12, 0), "sm_89", "sm_89-on-sm_120", "arch=compute_89,code=sm_120"),
        ((12, 0), None, "sm_120", "arch=compute_120,code=sm_120"),
        ((7, 5), None, "sm_75", "arch=compute_75,code=sm_75"),
    ],
)
def test_a_card_can_be_built_for_as_an_older_one(toolchain, monkeypatch, card, wanted, arch, flags):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: card)
    monkeypatch.delenv(compiler.ARCH_VARIABLE, raising=False)
    if wanted:
        monkeypatch.setenv(compiler.ARCH_VARIABLE, wanted)
    assert compiler.arch_of_device(0) == arch
    assert toolchain.arch_flags(arch) == (f"-gencode={flags}",)


@pytest.mark.parametrize("wanted", ["sm_75", "sm_120", "80", "compute_80", "gfx90a"])
def test_an_architecture_that_the_card_does_not_run_is_refused(monkeypatch, wanted):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setenv(compiler.ARCH_VARIABLE, wanted)
    with pytest.raises(UsageError, match=compiler.ARCH_VARIABLE):
        compiler.arch_of_device(0)


def test_what_only_hopper_has_follows_what_was_built(monkeypatch):
    launcher, _ = make_launcher(monkeypatch)
    assert launcher.hopper
    launcher, _ = make_launcher(monkeypatch, hopper=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))  # such a library on a Hopper card
    assert not launcher.hopper
    assert not Mix(launcher)._hopper
    assert not Linear(launcher).masked_ffn_fits(1, 1024, 1024)


def test_every_part_of_a_source_is_a_unit_and_the_longest_come_first(toolchain):
    units = toolchain.units()
    assert len({unit.name for unit in units}) == len(units)
    assert {unit.source for unit in units} == set(toolchain.sources())
    for source in toolchain.sources():
        text = source.read_text()
        asked = {int(number) for number in re.findall(r"^#if IN_PART\((\d+)\)$", text, re.MULTILINE)}
        parts = [unit.part for unit in units if unit.source == source]
        assert sorted(parts) == sorted(asked) if asked else parts == [None]
    first = [unit.part for unit in units]
    assert all(first[: sum(map(bool, first))])


def test_a_plain_model_waits_for_no_kernels_of_quantised_ones(toolchain):
    plain, every = ({unit.name for unit in toolchain.units(quant=quant)} for quant in (False, True))
    assert every - plain >= {"quant_gemv-1", "dequantise", "quant_rows", "quant_gemm_fp8"}
    assert plain >= {"gemv", "grouped", "sparse_ffn", "sampling-2", "state"}
    assert toolchain.digest("sm_90a", quant=False) != toolchain.digest("sm_90a")
    assert {unit for unit in every - plain if "quant" not in unit} == {"sampling-1", "sampling-4"}
    assert toolchain.kind_flags(quant=False) == ("-DFP16_ALONE",)  # which is why nothing asks for what is left out
    assert toolchain.kind_flags(quant=True) == ()


class Driver:
    """As much of NVIDIA's driver as tells what a GPU can do."""

    def __init__(self, card: tuple[int, int], asked: list[int]):
        self.card, self.asked = card, asked

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device, index: int) -> int:
        self.asked.append(index)
        return 0

    def cuDeviceGetAttribute(self, value, attribute: int, device) -> int:
        value._obj.value = self.card[attribute - 75]
        return 0


def test_building_begins_before_torch_is_there(toolchain, monkeypatch, tmp_path):
    built, asked = [], []
    monkeypatch.setattr(compiler.ctypes, "CDLL", lambda name: Driver((9, 0), asked))
    monkeypatch.setattr(compiler.Toolchain, "cuda", lambda: toolchain)
    monkeypatch.setattr(compiler, "build", lambda chain, arch, quant: built.append((arch, quant)))
    model = Config(model_path=str(tmp_path / "m.pth"))

    def begin(**settings) -> bool:
        thread = compiler.build_early(replace(model, **settings))
        if thread is not None:
            thread.join(10)
        return thread is not None

    assert begin()
    assert begin(device="cuda:1", quant="int8")
    assert (built, asked) == ([("sm_90a", False), ("sm_90a", True)], [0, 1])
    for settings in ({"device": "cpu"}, {"ops": "reference"}, {"dtype": "bf16"}, {"compile": "default"}, {"model_path": None}):
        assert not begin(**settings)
    monkeypatch.setattr(compiler.ctypes, "CDLL", no_driver)
    assert begin()  # and nothing comes of it
    assert len(built) == 2


def no_driver(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


def test_kernels_are_built_beside_whatever_goes_on(toolchain, monkeypatch, caplog):
    begun, go_on = threading.Event(), threading.Event()

    def build(chain, arch, quant):
        begun.set()
        assert go_on.wait(10)
        raise compiler.KernelError(f"not for {arch}")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(compiler.Toolchain, "cuda", lambda: toolchain)
    monkeypatch.setattr(compiler, "build", build)
    for required in (False, True):
        begun.clear(), go_on.clear()
        building = compiler.Building.begin(0, quant=False, required=required)
        assert begun.wait(10)
        go_on.set()
        if required:
            with pytest.raises(UsageError, match="--ops kernels: not for sm_90a"):
                building.result()
        else:
            assert building.result() is None
    assert "WITHOUT KERNELS" in caplog.text


def test_each_gpu_of_a_process_has_a_file_of_its_own_whoever_asks_for_it(toolchain, tmp_path, monkeypatch):
    """What a library prepares once is of one GPU, and the same file is loaded but once."""

    class Library(SimpleNamespace):
        def __init__(self, file: str):
            assert Path(file).read_text() == "built"
            super().__init__(_name=file, **({"rwkv_quant_gemv": None} if "all" in file else {}))

    def build(chain, arch, quant):
        file = tmp_path / f"{arch}-{'all' if quant else 'plain'}.so"
        file.write_text("built")
        return file

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0) if device == 3 else (9, 0))
    monkeypatch.setattr(compiler, "_toolchain", lambda: toolchain)
    monkeypatch.setattr(compiler, "build", build)
    monkeypatch.setattr(compiler, "_gpu_of", {})
    monkeypatch.setattr(compiler, "library", compiler.library.__wrapped__)
    monkeypatch.setattr(compiler.ctypes, "CDLL", Library)
    first = compiler.Building.begin(1, quant=True, required=True).result()  # an engine that begins on card 1
    assert first._name == str(tmp_path / "sm_90a-all.so")
    for index, again in ((0, first), (1, first), (2, compiler.library(0))):
        file = Path(compiler.library_like(again, index)._name)
        assert file == tmp_path / ("" if index == 1 else f"copy-{index}") / "sm_90a-all.so"
        assert Path(compiler.library(index)._name) == file
    assert compiler.library_like(first, 3)._name == str(tmp_path / "sm_80-all.so")
    plain = compiler.library(0, quant=False)
    assert plain._name == str(tmp_path / "sm_90a-plain.so")
    assert compiler.library_like(plain, 1)._name == str(tmp_path / "copy-1" / "sm_90a-plain.so")
