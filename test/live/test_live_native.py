"""The native routes on a real socket, line by line of the contract's checklist.

The model follows a script, so the right answer is known: Chinese, emoji and Hangul cut into single bytes, then the end of text.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from scripted_model import byte_ids, write_scripted
from server_process import ROOT, ServerProcess, wait_until

from rwkv_batch import tokenizer

PASSWORD = "rwkv7_7.2b"
V1, V2, V3 = "/v1/chat/completions", "/v2/chat/completions", "/v3/chat/completions"
FIM, BIG, BATCH = "/FIM/v1/batch-FIM", "/big_batch/completions", "/v1/batch/completions"
TRANSLATE = "/translate/v1/batch-translate"

ANSWER = "你😀世界，早上好。한é done"
CUT = "α"  # a prompt that ends in it is answered with CUT_ANSWER, and so on
CUT_ANSWER = " User okUserhidden"
LONG = "β"
LONG_ANSWER = "qwertyuiop"
SCRIPTS = [("你😀", "世界，早上好。", "한é", " done"), (CUT, CUT_ANSWER), (LONG, *LONG_ANSWER)]


def script(index: int) -> list[int]:
    """Ids of one script: in the first every second part, in the last all letters are single bytes."""
    encode = tokenizer.for_vocab(65536).encode
    if index == 0:
        return [i for n, part in enumerate(SCRIPTS[0]) for i in (encode(part) if n % 2 else byte_ids(part))]
    if index == 1:
        return encode(CUT) + encode(" User") + encode(" ok") + encode("User") + encode("hidden")
    return encode(LONG) + [i for letter in LONG_ANSWER for i in byte_ids(letter)]


@pytest.fixture(scope="session")
def scripted_checkpoint(tmp_path_factory) -> Path:
    return write_scripted(tmp_path_factory.mktemp("scripted") / "scripted.pth", [script(index) for index in range(3)])


def start(checkpoint: Path, folder: Path, *args: str) -> ServerProcess:
    return ServerProcess("--threads", "1", "--http-workers", "1", "--heartbeat", "0.05", *args, model=checkpoint, folder=folder)


@pytest.fixture(scope="module")
def scripted(scripted_checkpoint, tmp_path_factory):
    """A server without a password."""
    with start(scripted_checkpoint, tmp_path_factory.mktemp("open")) as server:
        yield server


@pytest.fixture(scope="module")
def locked(scripted_checkpoint, tmp_path_factory):
    """One with the seeds' password."""
    server = start(scripted_checkpoint, tmp_path_factory.mktemp("locked"), "--host", "127.0.0.1", "--password-file", "/dev/null")
    server.close()
    secret = tmp_path_factory.mktemp("secret") / "password"
    secret.write_text(PASSWORD)
    secret.chmod(0o600)
    yield secret


@pytest.fixture(scope="module")
def random_model(tiny_checkpoint, tmp_path_factory):
    """A server whose model emits anything, odd bytes too."""
    with start(tiny_checkpoint, tmp_path_factory.mktemp("random")) as server:
        yield server
