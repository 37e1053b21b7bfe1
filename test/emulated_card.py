"""An AMD card that is not there: the HIP sources as a host compiler builds them, run by `hip_cpu/wavefronts.cpp` on the CPU.

Tensors of the card are tensors of the CPU, so whatever launches kernels runs unchanged on the device "cpu".
"""

import ctypes
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rwkv_batch.kernels.launch import Launcher
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

    def message(self) -> str:
        """Return what a kernel did last that no card can do."""
        return self.library.card_message().decode()


def build(at: Path) -> Card:
    """Compile the HIP sources, and the mistakes beside, into the folder `at`; skips the test where there is no compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler, to run HIP kernels on a CPU")
    sources = [*sorted(folder("hip").glob("*.hip")), *sorted(HERE.glob("*.cpp"))]

    def compiled(source: Path) -> Path:
        target = at / f"{source.stem}.o"
        level = "-O1" if source.stem == "wavefronts" else "-O0"  # the kernels' own are compiled rather than run quickly
        subprocess.run([compiler, level, *FLAGS, "-x", "c++", "-c", source, "-o", target], check=True, timeout=100)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    library = at / "card.so"
    subprocess.run([compiler, "-shared", *objects, "-o", library], check=True)
    return Card(ctypes.CDLL(str(library)))


def launcher_for(card: Card, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Return a launcher to the card, and make torch say that it is there and of AMD."""
    stream = SimpleNamespace(cuda_stream=0, wait_stream=lambda other: None, synchronize=lambda: None)
    properties = SimpleNamespace(multi_processor_count=104, major=9, gcnArchName="gfx90a:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: NAME)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: stream)
    return Launcher(card.library, "cpu")
