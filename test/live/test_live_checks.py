"""The checks against a running server find what they find in this process."""

import json

import pytest
from server_process import ServerProcess

from rwkv_batch.checks.checks import CHECKS
from rwkv_batch.checks.local import LocalTarget
from rwkv_batch.checks.remote import RemoteTarget
from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest
from rwkv_batch.server import check_command


@pytest.fixture(scope="module")
def local(tiny_checkpoint, tmp_path_factory):
    """The server's model in this process."""
    database = str(tmp_path_factory.mktemp("local") / "db")
    target = LocalTarget(Config(model_path=str(tiny_checkpoint), device="cpu", slots=4, state_db=database))
    yield target
    target.close()


def test_a_server_says_what_its_model_says(random_model: ServerProcess, local: LocalTarget, tmp_path):
    remote = RemoteTarget(f"http://127.0.0.1:{random_model.port}")
    assert remote.model == local.model
    file = tmp_path / "lambada.jsonl"
    file.write_text('{"text": "a passage of few words"}\n{"text": "and another one"}\n')
    for name, options in {
        "generate": {"seed": None, "noise": None, "prompt": ["one", "two"], "max_tokens": 4},
        "consistency": {"seed": 1, "prompt": ["one", "two"], "max_tokens": 4},
    }.items():
        assert CHECKS[name](remote, **options) == CHECKS[name](local, **options)
    found, expected = (
        CHECKS["next-token"](target, prompt=["one"], top=3)["prompts"][0]["tokens"] for target in (remote, local)
    )
    assert [token["token"] for token in found] == [token["token"] for token in expected]
    assert [token["probability"] for token in found] == pytest.approx([token["probability"] for token in expected], rel=1e-3)
    found, expected = (CHECKS["lambada"](target, file=str(file)) for target in (remote, local))
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found["right"] == expected["right"]
    drawn = [target.draw(["one", "two"], max_tokens=5, seed=3) for target in (remote, local)]
    assert drawn[0] == drawn[1]
    written = [target.write(["one"], max_tokens=5, noise=2.0, seed=3, stops=[]) for target in (remote, local)]
    assert written[0].texts == written[1].texts
    assert written[0].num_tokens == written[1].num_tokens == 5


def test_what_a_server_refuses_is_told(random_model: ServerProcess, locked_scripted: ServerProcess, capsys):
    with pytest.raises(InvalidRequest, match="logprobs: at most 20"):
        RemoteTarget(f"127.0.0.1:{random_model.port}").likely(["a"], 21)
    url = f"127.0.0.1:{locked_scripted.port}/v1"
    assert check_command.check_model(["generate", "--url", url, "--max-tokens", "1"], {}, []) == 2
    assert "401" in capsys.readouterr().err
    password = locked_scripted.headers["Authorization"].removeprefix("Bearer ")
    argv = ["generate", "--url", url, "--max-tokens", "1", "--password", password, "--json"]
    assert check_command.check_model(argv, {}, []) == 0
    assert len(json.loads(capsys.readouterr().out)["texts"]) == 7
