"""A broken checkpoint on the command line: exit code 2, one line, nothing in it run."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from models import ROOT, TINY, random_tensors
from test_weights import BROKEN

from rwkv_batch.engine import memory
from rwkv_batch.engine.build import CPU_SLOTS
from rwkv_batch.engine.memory import MemoryPlan
from rwkv_batch.errors import CheckpointError
from rwkv_batch.model import weights

FEW = ["malicious zip"]


def refuse(folder: Path, name: str) -> None:
    """Start the server on one broken file and look at what it says."""
    folder.mkdir()
    make, words = BROKEN[name]
    path = make(folder, dict(random_tensors(TINY, 256)))
    command = [
        sys.executable,
        ROOT / "app.py",
        "--model-path",
        path,
        "--port",
        "0",
        "--log-level",
        "error",
        "--http-workers",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 2, (name, done)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, (name, done.stderr)
    assert lines[0].startswith("error: ")
    assert words in lines[0]
    assert not (folder / "canary").exists()


def refuse_all(folder: Path, names: list[str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: refuse(folder / name.replace(" ", "-"), name), names))


@pytest.mark.faults
def test_some_broken_checkpoints_end_the_server_with_2(tmp_path):
    refuse_all(tmp_path, FEW)


@pytest.mark.long
def test_every_broken_checkpoint_ends_the_server_with_2(tmp_path):
    refuse_all(tmp_path, list(BROKEN))


def test_what_does_not_fit_into_memory_is_refused(monkeypatch):
    shape = weights.ModelShape(32, 4096, 16384, 65536, 128, 128, 96, 480)
    monkeypatch.setattr(memory, "free_memory", lambda device: 20 * 2**30)
    with pytest.raises(CheckpointError, match=r"7\.2b: needs 2\d,\d+ MiB of memory \(1 slots, .*only 20,480 MiB are free"):
        MemoryPlan(torch.device("cpu"), shape, torch.float32).slots(0, CPU_SLOTS, "7.2b")
    assert MemoryPlan(torch.device("cpu"), shape, torch.bfloat16).slots(0, CPU_SLOTS, "7.2b") == 51  # a quarter of what is left
