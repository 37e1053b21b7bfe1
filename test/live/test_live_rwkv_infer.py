"""RWKV-Infer's examples as they stand but for the port: models, one with an adapter, states, several mixed, their names."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import adapter_files
import pytest
import torch
from models import ROOT
from rwkv6_models import SHAPES6, random_tensors6
from server_process import ServerProcess, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
LOAD_MODEL, LOAD_WITH_DEFAULTS, LOAD_WITH_ADAPTER = json.loads((ROOT / "test" / "model_curls.json").read_text())[:3]
LOAD_STATE, LOAD_MIXED, LIST, REMOVE_STATES = json.loads((ROOT / "test" / "state_curls.json").read_text())
NAME = "RWKV x060 1B6 Base"
ASKED = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """One that serves the built-in model, with the files that the examples name."""
    folder = tmp_path
    for name in ("models", "states", "adapters"):
        (folder / name).mkdir()
    tensors = random_tensors6(SHAPES6["small heads"], 65536)
    torch.save(tensors, folder / "models" / "RWKV-x060-World-1B6-v2.1-20240328-ctx4096.pth")
    bone, _ = adapter_files.bone(tensors, folder, key="bone")
    bone.rename(folder / "adapters" / "rwkv-9-bone.pth")
    layers, width, size = SHAPES6["small heads"][:3]
    for seed, name in enumerate(("state", "jp7b-bancho", "ojousama2", "secret")):
        generator = torch.Generator().manual_seed(seed)
        dims = (width // size, size, size)
        state = {f"blocks.{i}.att.time_state": torch.randn(*dims, generator=generator) * 3 for i in range(layers)}
        torch.save(state, folder / "states" / f"{name}.pth")
    flags = [part for name in ("models", "states", "adapters") for part in (f"--{name}-dir", str(folder / name))]
    with ServerProcess(*flags, folder=folder, model=ROOT / "demo" / "model.rwkv") as running:
        yield running


def run(command: str, server: ServerProcess) -> str:
    """What the example says here."""
    asked = command.replace("127.0.0.1:9000", f"127.0.0.1:{server.port}").replace("curl ", "curl -sS --fail-with-body ", 1)
    result = subprocess.run(["bash", "-c", asked], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def ids(server: ServerProcess) -> list[str]:
    """The names, once every process lists the same."""
    found: list[list[str]] = []

    def settled() -> bool:
        found[:] = [[entry["id"] for entry in json.loads(run(LIST, server))] for _ in range(4)]
        return all(one == found[0] for one in found)

    wait_until(settled, 30, "all list the same")
    return found[0]


def says(server: ServerProcess, model: str, **fields) -> str:
    status, answer = server.post(ASKED | {"model": model} | fields)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


def test_the_examples_one_after_another(server):
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    assert ids(server) == ["demo"]
    answers = []
    for command in (LOAD_MODEL, LOAD_WITH_DEFAULTS, LOAD_WITH_ADAPTER):
        assert json.loads(run(command, server))["status"] == "success"
        assert ids(server) == [NAME]
        answers.append(says(server, NAME))
    assert answers[0] != answers[2], "the adapter changes the model"
    for command in (LOAD_STATE, LOAD_MIXED):
        assert json.loads(run(command, server))["status"] == "success"
    assert ids(server) == [NAME, f"{NAME} State Test", f"{NAME} MRSS Test"]
    plain, with_state, mixed = (says(server, name) for name in ids(server))
    assert plain == answers[2]
    assert len({plain, with_state, mixed}) == 3
    assert says(server, f"{NAME} MRSS Test", mrss_gatingweight=["0", "0", "0", "1"]) == plain, "the last one is the original"
    assert json.loads(run(REMOVE_STATES, server))["removed"] == 2
    assert ids(server) == [NAME]
    assert says(server, NAME) == plain
