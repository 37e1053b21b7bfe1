"""The HIP sources on a card of NVIDIA: nvcc compiles them against the small headers of `hip_nvidia/`, wavefronts have 32 lanes.

What a CPU cannot show of them: lanes that run at the same time, atomics between blocks, and captured steps.
"""

import ctypes
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rwkv_batch.kernels import compiler, self_check
from rwkv_batch.kernels.hip.ops import AdaptedHipOps, HipOps
from rwkv_batch.kernels.launch import Launcher
from rwkv_batch.model.adapters.bank import AdapterBank
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
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


@torch.inference_mode()
def test_rows_may_have_adapters(launcher):
    """What one row has changes nothing of the other."""
    weights = self_check.random_weights(launcher.device)
    plain = HipOps(weights, launcher, max_tokens=2, max_rows=2)
    bank = AdapterBank(weights, 8, 2, only_adding=True)
    for banks in bank.layers:
        for name in ("rkv", "output", "ffn_key", "ffn_value"):
            banks[name].down.fill_(0.02), banks[name].up.fill_(0.02)
    bank.owner[:4], bank.of_slot[1] = 1, 1
    found = []
    for ops in (plain, AdaptedHipOps(plain, bank)):
        state = State(weights.shape, 2, shift_dtype=torch.float16, wkv_dtype=torch.float16, device=launcher.device)
        tokens, rows = torch.tensor([3, 3], device=launcher.device), PackedRows([0, 1], [1, 1], launcher.device)
        found.append(Model(weights, ops).forward(tokens, rows, state).clone())
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.allclose(found[0][1], found[1][1], atol=0.01)
