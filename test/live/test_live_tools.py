"""Tools on a real socket: the SDKs, agents' libraries, and the first requests that coding agents send."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("openai", reason="needs the SDK openai: requirements-test.txt")

import tool_checks
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response
from openai_checks import Target, strictly
from scripted_server import ANSWER
from server_process import ROOT, ServerProcess

REQUESTS = sorted((Path(__file__).parent / "requests").glob("*.json"))  # as recorded; long texts are cut


@pytest.fixture(scope="module")
def scripted_target(scripted) -> Target:
    """A model that says one thing."""
    return Target(f"http://{scripted.host}:{scripted.port}")


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Target:
    with ServerProcess(
        "--http-workers", "1", folder=tmp_path_factory.mktemp("demo"), model=ROOT / "demo" / "model.rwkv"
    ) as running:
        yield Target(f"http://{running.host}:{running.port}")


@pytest.mark.parametrize("check", tool_checks.CHECKS, ids=lambda check: check.__name__)
def test_check_on_a_model_that_emits_anything(random_model, check):
    check(Target(f"http://{random_model.host}:{random_model.port}"))


@pytest.mark.long
@pytest.mark.parametrize("check", [*tool_checks.CHECKS, *tool_checks.LONG], ids=lambda check: check.__name__)
def test_check_on_the_demo_model(demo, check):
    check(demo)


@pytest.mark.long
def test_the_node_sdk(demo):
    """`parse`, `stream`, `runTools` and responses; needs `npm install openai` and NODE_PATH where it is."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    found = subprocess.run(["node", "-e", "require('openai')"], capture_output=True, check=False, env=os.environ)
    if found.returncode:
        pytest.skip("the npm package openai is not in NODE_PATH")
    script = Path(__file__).with_name("tools.cjs")
    result = subprocess.run(["node", script, demo.url], capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stdout) == (0, "right\n"), result.stderr


@pytest.mark.parametrize("path", REQUESTS, ids=lambda path: path.stem)
def test_the_first_request_of_an_agent(scripted_target, path):
    """Codex, opencode and Continue get an answer in the form that they read."""
    body = json.loads(path.read_text())
    assert body["stream"]
    route = "/v1/responses" if "input" in body else "/v1/chat/completions"
    if route == "/v1/chat/completions":
        *chunks, usage = scripted_target.events(route, body)
        for chunk in [*chunks, usage]:
            strictly(ChatCompletionChunk, chunk)
        assert (usage["choices"], usage["usage"]["completion_tokens"] > 0) == ([], True)
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == ANSWER
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        return
    status, text, _ = scripted_target.request("POST", route, body)
    assert status == 200, text
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
    last = events[-1]
    assert last["type"] == "response.completed"
    strictly(Response, last["response"])
    assert last["response"]["output"][0]["content"][0]["text"] == ANSWER
    offered = [tool["name"] for tool in body["tools"] if tool["type"] in ("function", "namespace")]
    assert [tool["name"] for tool in last["response"]["tools"]] == offered, "tools of other kinds are dropped"
