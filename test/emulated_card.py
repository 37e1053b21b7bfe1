"""An AMD card that is not there: the HIP sources as a host compiler builds them, run by `hip_cpu/wavefronts.cpp` on the CPU.

Tensors of the card are tensors of the CPU, so whatever launches kernels runs unchanged on the device "cpu".
"""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rwkv_batch.kernels.launch import KernelLaunchFailed, Launcher
from rwkv_batch.shipped import folder

HERE = Path(__file__).parent / "hip_cpu"
FLAGS = ("-std=c++17", "-w", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-U_FORTIFY_SOURCE", f"-I{HERE}")
NAME = "emulated card"


class Card:
    """The library, and how its wavefronts are."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library
        library.card_message.restype = ctypes.c_char_p
        self.be(64)

    def be(self, wavefront: int, *, backwards: bool = False) -> None:
        """Have wavefronts of 32 or 64 lanes, and let lanes that can go on do so in this order or the opposite one."""
        self.library.card_set(wavefront, int(backwards))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say what a kernel did that no card can do."""
        try:
            yield
        except (KernelLaunchFailed, RuntimeError) as error:
            raise AssertionError(f"{error}: {self.library.card_message().decode()}") from error


def build(at: Path, sources: list[Path] | None = None) -> Card:
    """Compile the HIP sources, or others, into the folder `at`; skips the test where there is no compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler, to run HIP kernels on a CPU")
    sources = [*(sources or sorted(folder("hip").glob("*.hip"))), HERE / "wavefronts.cpp"]

    def compiled(source: Path) -> Path:
        target = at / f"{source.stem}.o"
        level = "-O1" if source.parent == HERE else "-O0"  # the kernels' own are compiled rather than run quickly
        subprocess.run([compiler, level, *FLAGS, "-x", "c++", "-c", source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    library = at / "card.so"
    subprocess.run([compiler, "-shared", *objects, "-o", library], check=True)
    return Card(ctypes.CDLL(str(library)))


def launcher_for(card: Card, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Return a launcher to the card, and make torch say that it is there and of AMD."""
    stream = SimpleNamespace(cuda_stream=0, wait_stream=lambda other: None)
    properties = SimpleNamespace(multi_processor_count=104, major=9, gcnArchName="gfx90a:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: NAME)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: stream)
    return Launcher(card.library, "cpu")
