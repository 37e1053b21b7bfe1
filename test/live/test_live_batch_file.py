"""The command `batch` with an engine that has no model: killed in every way, it goes on where it was."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import ROOT, ServerProcess, wait_until

pytestmark = pytest.mark.faults

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class BatchProcess(ServerProcess):
    """The command in progress."""

    def __init__(self, folder: Path, *args: str, step_ms: float = 2, env: dict[str, str] | None = None):
        self.out = folder / "out.jsonl"
        self.log_path = folder / "log"
        environ = {key: value for key, value in os.environ.items() if not key.startswith("RWKV_BATCH_")} | (env or {})
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "app.py"), "batch", "in.jsonl", "out.jsonl", "--fake-engine", str(step_ms), *args],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, env=environ,
            )  # fmt: skip

    def num_answers(self) -> int:
        return self.out.read_bytes().count(b"\n") if self.out.exists() else 0

    def wait_answers(self, number: int) -> None:
        wait_until(lambda: self.num_answers() >= number or self.process.poll() is not None, 60, f"{number} answers")

    def finish(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)


def request_of(index: int) -> dict:
    url = URLS[index % 3]
    text = f"Number {index}. " * random.Random(index).choice((1, 3, 40))
    tokens = 1 + index % 7
    field = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": tokens},
        "/v1/completions": {"prompt": [text, text], "max_tokens": tokens},
        "/v1/responses": {"input": text, "max_output_tokens": tokens},
    }[url]
    return {"custom_id": f"request-{index}", "method": "POST", "url": url, "body": {"model": "any", **field}}


def text_of(index: int, body: dict) -> list[str]:
    """The answers of a document, whichever it is."""
    if "output" in body:
        return [body["output"][0]["content"][0]["text"]]
    return [choice.get("text") or choice["message"]["content"] for choice in body["choices"]]


def write_requests(folder: Path, number: int, bad: dict[int, bytes]) -> None:
    lines = [bad.get(index) or json.dumps(request_of(index)).encode() for index in range(number)]
    (folder / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def check_answers(folder: Path, number: int, bad: dict[int, bytes]) -> None:
    """Each request has one answer, at its place, with all its words."""
    answers = [json.loads(line) for line in (folder / "out.jsonl").read_bytes().splitlines()]
    assert len(answers) == number
    assert len({answer["id"] for answer in answers}) == number
    for index, answer in enumerate(answers):
        if index in bad:
            assert answer["response"] is None or answer["response"]["status_code"] >= 400
            continue
        assert answer["custom_id"] == f"request-{index}"
        assert (answer["response"]["status_code"], answer["error"]) == (200, None)
        words = " ".join(f"w{place}" for place in range(1 + index % 7))
        assert {text.strip() for text in text_of(index, answer["response"]["body"])} == {words}


@pytest.mark.parametrize("number", [600, pytest.param(10_000, marks=pytest.mark.long)])
def test_killed_again_and_again_it_loses_and_doubles_nothing(tmp_path, number):
    bad = {7: b"{", 8: b'{"custom_id": "request-8", "url": "/v1/embeddings", "body": {}}', number - 1: b'{"custom_id": 5}'}
    held, deadly = number - 70, number - 68
    for index, body in {held: {"prompt": "a", "guided_regex": "(?=a)b"}, deadly: {"prompt": "@"}}.items():
        bad[index] = json.dumps({**request_of(index), "url": "/v1/completions", "body": body}).encode()
    write_requests(tmp_path, number, bad)
    failing = {"RWKV_BATCH_FAULT": "fail:19"}  # a step of each engine fails, whose request is tried again
    for kills, code in enumerate([-signal.SIGKILL, 75, 75]):
        batch = BatchProcess(tmp_path, "--slots", "8", env=failing)
        before = batch.num_answers()
        batch.wait_answers((1 + kills) * number // 5)
        (worker,) = batch.children("batch")
        if kills == 0:
            batch.process.kill()
        elif kills == 1:
            batch.process.terminate()
        else:
            os.kill(worker, signal.SIGKILL)
        assert batch.finish() == code, batch.output
        assert before < batch.num_answers() < number
    poison = {"RWKV_BATCH_FAULT": f"poison:{ord('@')}"}  # that line ends the engine, alone or among others
    batch = BatchProcess(tmp_path, "--slots", "8", env=poison)  # at once, while what was killed may still be ending
    assert batch.finish() == 65, batch.output
    check_answers(tmp_path, number, bad)
    assert f"in the file {number:,} answers, 5 errors" in batch.output
    assert batch.output.count("the engine ended by signal") == 3
    answers = [json.loads(line) for line in batch.out.read_bytes().splitlines()]
    codes = [answers[index]["response"]["body"]["error"]["code"] for index in (held, deadly)]
    assert codes == ["invalid_grammar", "ends_engine"]
