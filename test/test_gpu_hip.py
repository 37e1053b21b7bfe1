"""The HIP sources on a card of NVIDIA: nvcc compiles them against the small headers of `hip_nvidia/`, wavefronts have 32 lanes.

What a CPU cannot show of them: lanes that run at the same time, atomics between blocks, and captured steps.
"""

import ctypes
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from test_hip import logits_of_two_rows

from rwkv_batch.kernels import compiler, self_check
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.shipped import folder

pytestmark = pytest.mark.gpu
HEADERS = Path(__file__).parent / "hip_nvidia"
FLAGS = ("-O3", "-std=c++17", "-x", "cu", "-Xcompiler=-fPIC,-fvisibility=hidden", "-w", f"-I{HEADERS}")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    """The HIP sources, without what only newer cards than sm_80 have."""
    at = tmp_path_factory.mktemp("hip")
    try:
        toolchain = compiler.Toolchain.cuda()
    except compiler.KernelError as error:
        pytest.skip(str(error))
    card = "sm_{}{}".format(*torch.cuda.get_device_capability(0))
    flags = (*FLAGS, *toolchain.arch_flags(f"sm_80-on-{card}"))

    def compiled(source: Path) -> Path:
        target = at / f"{source.stem}.o"
        subprocess.run([toolchain.compiler, *flags, "-c", source, "-o", target], check=True, timeout=100)
        return target

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compiled, sorted(folder("hip").glob("*.hip"))))
    built = at / "hip.so"
    subprocess.run([toolchain.compiler, *toolchain.link_flags(), "-shared", *objects, "-o", built], check=True, timeout=100)
    return ctypes.CDLL(str(built))


@pytest.fixture
def launcher(library, monkeypatch) -> Launcher:
    """To the card, which passes for one of AMD."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    return Launcher(library, torch.device("cuda", 0))


@pytest.mark.parametrize("state", [torch.float16, torch.float32])
def test_the_check_of_the_first_start(launcher, state):
    """Every op, the sampler, the fill, and a captured step."""
    assert not launcher.hopper
    assert self_check.failing(launcher, state) == []


def test_the_check_of_rwkv_6(launcher):
    assert self_check.failing(launcher, torch.float16, architecture="RWKV-6") == []


@pytest.mark.parametrize("quant", ["int8", "fp8", "int4"])
def test_the_check_with_quantised_matrices(launcher, quant):
    assert self_check.failing(launcher, torch.float16, quant=quant) == []


def test_rows_may_have_adapters(launcher):
    """What one row has changes nothing of the other."""
    plain, adapted = logits_of_two_rows(launcher)
    assert torch.equal(plain[0], adapted[0])
    assert not torch.allclose(plain[1], adapted[1], atol=0.01)
