"""Models that come and go in a running server."""

import json
import math
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from models import ROOT, SHARED, TINY, random_tensors
from server_process import ServerProcess, process_figures, wait_until

from rwkv_batch.model.weights import ModelShape

DEMO = ROOT / "demo" / "model.rwkv"
REAL = SHARED / "checkpoints" / "tiny-rwkv-7v0-834K" / "rwkv7-tiny-L12-D64-V256.pth"


class Load:
    """Calls that go on until `close`, each thread one after another; `wrong` has what was no answer."""

    def __init__(self, server: ServerProcess, *, threads: int = 2, max_tokens: int = 8):
        self.server = server
        self.max_tokens = max_tokens
        self.wrong: list = []
        self.models: list[str] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        stream = number % 2 == 0
        body = {
            "model": "any",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": self.max_tokens,
            "stream": stream,
        }
        while not self._ended.is_set():
            try:
                status, answer = self.server.post(body, "/openai/v1/chat/completions")
                complete = answer.endswith("data: [DONE]\n\n") and '"error"' not in answer if stream else "choices" in answer
                if status != 200 or not complete:
                    self.wrong.append((status, answer))
                elif not stream:
                    self.models.append(answer["model"])
            except Exception as error:
                self.wrong.append(repr(error))
            time.sleep(0.01)

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


def names(server: ServerProcess) -> list[str]:
    return [model["id"] for model in server.get("/v1/models")[1]["data"]]


def engine_files(server: ServerProcess) -> set[str]:
    """The engines of which there are files in the server's folder."""
    return {file.name.partition(".")[0] for file in server.run_folder.rglob("engine-*")}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / f"{name}.rwkv").symlink_to("demo.rwkv")
    (folder / "demo.rwkv").write_bytes(DEMO.read_bytes())
    return folder


def swap(server: ServerProcess, name: str, **more) -> None:
    status, answer = server.post({"model_filename": f"models/{name}", "model_viewname": name, **more}, "/loadmodel")
    assert (status, answer.get("status")) == (200, "success"), answer


def test_models_swap_under_load_and_stand_side_by_side(folder, models):
    """With the stub in place of models: what happens is that of processes, links and tables."""
    fault = {"RWKV_BATCH_FAULT": "start:never"}
    with ServerProcess("--models-dir", str(models), folder=folder, env=fault) as server:
        load = Load(server)
        engines = server.children("engine")
        swap(server, "a")
        kill_while_loading(server, "never")
        assert names(server) == ["a"]
        swap(server, "b")
        load.close()
        assert load.wrong == []
        assert set(load.models) >= {"a", "b"}
        assert len(server.children("engine")) == 1
        assert server.children("engine") != engines
        swap(server, "c", keep=True)
        assert names(server) == ["b", "c"]
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        for wanted, served in (("b", "b"), ("c", "c"), (None, "b")):
            status, answer = server.post(body | ({"model": wanted} if wanted else {}))
            assert (status, answer["model"]) == (200, served)
        assert server.post(body | {"model": "d"})[0] == 404
        # an engine that dies comes back with its own model, and the other one never noticed
        os.kill(max(server.children("engine")), signal.SIGKILL)
        assert server.post(body | {"model": "b"})[1]["model"] == "b"
        wait_until(lambda: server.post(body | {"model": "c"})[0] == 200, 10, "the engine of c is back")
        assert server.post({"model_viewname": "b"}, "/removemodel")[0] == 200
        assert names(server) == ["c"]
        status, answer = server.post({"model_viewname": "c"}, "/removemodel")
        assert (status, "only model" in answer["error"]) == (409, True)


def kill_while_loading(server: ServerProcess, name: str) -> None:
    """Order a model whose engine does not come to its end, and kill that."""
    engines = server.children("engine")
    answers: list = []
    body = {"model_filename": "demo", "model_viewname": name}
    loading = threading.Thread(target=lambda: answers.append(server.post(body, "/loadmodel")))
    loading.start()
    wait_until(lambda: len(server.children("engine")) == 2, 10, "a second engine")
    status, answer = server.post({"model_filename": "demo", "model_viewname": "other"}, "/loadmodel")
    assert (status, f"loading {name}" in answer["error"]) == (409, True)
    (second,) = set(server.children("engine")) - set(engines)
    os.kill(second, signal.SIGKILL)
    loading.join()
    ((status, answer),) = answers
    assert (status, "SIGKILL" in answer["error"]) == (500, True)
    assert server.children("engine") == engines


def write_larger_than_memory(path: Path) -> None:
    """A checkpoint of zeros four times as large as this machine's memory, which takes no room on the disk."""
    layer = 24 * 4096**2  # bytes, about
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    entries, end = {}, 0
    for name, dims in ModelShape(4 * memory // layer + 1, 4096, 16384, 65536, 128, 128, 96, 480).tensors().items():
        begin, end = end, end + 2 * math.prod(dims)
        entries[name] = {"dtype": "F16", "shape": dims, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + end)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_files_that_only_the_engine_can_refuse(folder, models):
    """Nobody else is touched, and the answer says what is wrong."""
    import torch

    for name, key, tensor in (
        ("nan", "ln_out.weight", torch.full((128,), float("nan"))),
        ("shape", "head.weight", torch.ones(3, 3)),
    ):
        torch.save(dict(random_tensors(TINY, 256)) | {key: tensor}, models / f"{name}.pth")
    write_larger_than_memory(models / "large.safetensors")
    with ServerProcess("--models-dir", str(models), folder=folder, model=DEMO) as server:
        load = Load(server)
        engines = server.children("engine")
        for name in ("nan", "shape"):
            status, answer = server.post({"model_filename": name}, "/loadmodel")
            assert (status, f"{name}.pth" in answer["error"]) == (422, True), answer
        status, answer = server.post({"model_filename": "large"}, "/loadmodel")
        assert (status, "memory" in answer["error"]) == (507, True), answer
        kill_while_loading(server, "a")
        load.close()
        assert load.wrong == []
        assert set(load.models) == {"demo"}
        assert server.children("engine") == engines


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["stub", "demo"])
def test_twenty_swaps_under_load(folder, models, engine):
    """Nothing fails, and no process grows: neither the supervisor nor HTTP processes, nor what the engines leave behind.

    Models of different sizes and vocabularies take turns: the built-in one, a random one, and a real one of others where it is
    at hand.
    """
    import torch

    torch.save(random_tensors(TINY, 256), models / "random.pth")
    if REAL.is_file():
        (models / "real.pth").write_bytes(REAL.read_bytes())
    turns = ["a", "random", "real"] if REAL.is_file() else ["a", "random"]
    model = {"model": DEMO} if engine == "demo" else {}
    with ServerProcess("--models-dir", str(models), folder=folder, **model) as server:
        load = Load(server)
        sizes: list[dict[int, tuple[int, int, int]]] = []
        for number in range(20):
            swap(server, turns[number % len(turns)])
            sizes.append({pid: process_figures(pid) for pid in [server.process.pid, *server.children("http")]})
        load.close()
        assert load.wrong == []
        assert set(load.models) >= set(turns)
        wait_until(lambda: len(server.children("engine")) == 1, 30, "the last engine but one has ended")
        for pid, (threads, descriptors, resident) in sizes[-1].items():
            before = sizes[4][pid]
            assert threads <= before[0] + 8
            assert descriptors <= before[1] + 8
            assert resident <= before[2] + 20_000, "KiB"
        wait_until(lambda: len(engine_files(server)) == 1, 10, "nothing is left of the engines that went")
