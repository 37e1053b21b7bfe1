"""Servers whose model follows a script, so that the right answer to any prompt is known; see `scripted_model`."""

import json
from pathlib import Path
from typing import Any

from scripted_model import byte_ids, write_scripted
from server_process import ROOT, ServerProcess, without_comments

from rwkv_batch.text import tokenizer

PASSWORD = "rwkv7_7.2b"  # that of the seeds
ANSWER = "你😀世界，早上好。한é done"  # to any prompt but those that end in one of the next two
CUT, CUT_ANSWER = "α", " User okUserhidden"
LONG, LONG_ANSWER = "β", "qwertyuiop"
SEED_CURLS = json.loads((ROOT / "test" / "seed_curls.json").read_text())


def write_checkpoint(path: Path) -> Path:
    """Write the scripted checkpoint: whole tokens and single bytes, Chinese, Hangul and emoji among them."""
    encode = tokenizer.for_vocab(65536).encode
    answer = byte_ids("你😀") + encode("世界，早上好。") + byte_ids("한é") + encode(" done")
    cut = [token for part in (CUT, " User", " ok", "User", "hidden") for token in encode(part)]
    return write_scripted(path, [answer, cut, encode(LONG) + byte_ids(LONG_ANSWER)])


def start(checkpoint: Path, folder: Path, *args: str, password: str | None = None) -> ServerProcess:
    """Start a server with one HTTP process on a checkpoint."""
    env = {"RWKV_BATCH_PASSWORD": password} if password else {}
    flags = ["--threads", "1", "--http-workers", "1", "--heartbeat", "0.05", "--host", "127.0.0.1", *args]
    server = ServerProcess(*flags, model=checkpoint, folder=folder, env=env, wait=False)
    if password:
        server.headers = {"Authorization": f"Bearer {password}"}
    try:
        server.wait_ready()
    except AssertionError:
        server.close()
        raise
    return server


def events(server: ServerProcess, path: str, body: Any, headers: dict[str, str] | None = None) -> list[str]:
    """Post and return the payloads of the stream that comes back."""
    status, text, found = server.request("POST", path, body, headers)
    assert status == 200, text
    assert found["content-type"] == "text/event-stream"
    assert text.endswith("\n\n")
    blocks = without_comments(text).split("\n\n")[:-1]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block[6:] for block in blocks]


def streamed(server: ServerProcess, path: str, body: Any, headers: dict[str, str] | None = None) -> list[str]:
    """The texts of a native stream, checked for its form: contract 9, line 8."""
    *chunks, done = events(server, path, body, headers)
    assert done == "[DONE]"
    texts: dict[int, str] = {}
    for chunk in map(json.loads, chunks):
        assert chunk["object"] == "chat.completion.chunk"
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"]["content"]
    return [texts[index] for index in range(len(texts))]


def answered(answer: dict[str, Any]) -> list[str]:
    """The texts of a whole native answer."""
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    assert {choice["message"]["role"] for choice in answer["choices"]} <= {"assistant"}
    return [choice["message"]["content"] for choice in answer["choices"]]
