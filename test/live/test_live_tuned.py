"""Tuned states over HTTP: RWKV-Infer's curls as they stand, every HTTP process, and an engine that is killed."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models import ROOT
from server_process import ServerProcess, wait_until

from demo import tune_state

pytestmark = pytest.mark.long
NAMES = ("state.pth", "jp7b-bancho.pth", "ojousama2.pth", "secret.pth")
*LOADING, REMOVING = json.loads((ROOT / "test" / "state_curls.json").read_text())
ALL = ["demo", "demo State Test", "demo MRSS Test"]
ASKED = {"contents": ["User: What is 4 + 5?\n\nAssistant:"], "max_tokens": 8, "temperature": 0, "stop_tokens": [261]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The built-in model with a folder of states; the first is the one that was trained."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "states").mkdir()
    for number, name in enumerate(NAMES):
        tensors = torch.load(tune_state.FILE, weights_only=True)
        torch.save({key: tensor * (1 - number / 4) for key, tensor in tensors.items()}, folder / "states" / name)
    flags = ("--states-dir", str(folder / "states"), "--state", f"meow={tune_state.FILE}", "--http-workers", "2")
    with ServerProcess(*flags, folder=folder, model=ROOT / "demo" / "model.rwkv") as running:
        yield running


def run(command: str, server: ServerProcess) -> str:
    """What a curl of another server says here."""
    asked = command.replace("127.0.0.1:9000", f"127.0.0.1:{server.port}").replace("curl ", "curl -sS --fail ", 1)
    return subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True).stdout


def ids(server: ServerProcess) -> list[str]:
    return [entry["id"] for entry in server.get("/models")[1]]


def settled(server: ServerProcess, wanted: list[str]) -> None:
    """Wait until all HTTP processes have heard which ids there are."""
    wait_until(lambda: all(ids(server) == wanted for _ in range(10)), 30, f"all list {wanted}")


def text(server: ServerProcess, path: str = "/v1/chat/completions", **fields) -> str:
    status, answer = server.post(ASKED | fields, path)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


def test_curls_of_rwkv_infer_run_as_they_stand(server):
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    assert ids(server) == ["demo", "demo meow"]
    said = [run(command, server) for command in LOADING]
    assert all('"status": "success"' in answer for answer in said[:2])
    assert '"demo State Test"' in said[2]
    settled(server, ["demo", "demo meow", *ALL[1:]])
    assert [entry["id"] for entry in server.get("/v1/models")[1]["data"]] == ["demo", "demo meow", *ALL[1:]]
    mark = tune_state.MARK
    assert not text(server).startswith(mark)
    assert not text(server, model="demo").startswith(mark)
    for path in ("/v1/chat/completions", "/v2/chat/completions", "/state/chat/completions"):
        answer = text(server, path, model="demo State Test")
        assert answer.startswith(mark)
        assert text(server, path, state="meow") == answer
    assert text(server, model="demo MRSS Test", mrss_gatingweight=[1, 1, 1]).startswith(mark)
    chat = {"messages": [{"role": "user", "content": "What is 4 + 5?"}], "max_tokens": 12, "temperature": 0}
    answers = [server.post(chat | {"model": model})[1]["choices"][0]["message"]["content"] for model in ("demo", "demo meow")]
    assert answers[0] != answers[1]
    status, answer = server.post(ASKED | {"model": "gpt-4"})
    assert (status, "demo MRSS Test" in answer["error"]) == (404, True)
    status, answer = server.post(ASKED | {"model": "demo MRSS Test", "session_id": "s"}, "/state/chat/completions")
    assert (status, "session" in answer["error"]) == (400, True)
    pid = server.children("engine")[0]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.children("engine") not in ([pid], []) and server.get("/readyz")[0] == 200, 60, "a new engine")
    wait_until(lambda: server.all_ready(2), 60, "all processes are ready again")
    settled(server, ["demo", "demo meow", *ALL[1:]])
    assert text(server, model="demo State Test").startswith(mark)
    assert '"removed": 3' in run(REMOVING, server)
    settled(server, ["demo"])
    assert server.post(ASKED | {"model": "demo State Test"})[0] == 404
    assert not text(server, model="gpt-4").startswith(mark)


def test_files_elsewhere_are_never_read(server):
    body = {"state_viewname": "x"}
    for name, status in (("../secret.pth", 403), ("/etc/passwd", 403), ("none.pth", 404), ("", 400)):
        assert server.post(body | {"state_filename": name}, "/loadstatemodel")[0] == status
    assert (Path(server.log_path).parent / "states" / NAMES[0]).exists()
