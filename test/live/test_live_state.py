"""Sessions over HTTP, line by line of the contract's checklist: what a client is told is true, also after a kill -9."""

import contextlib
import fcntl
import http.client
import io
import json
import os
import random
import signal
import sqlite3
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest
import quiet_robyn  # noqa: F401
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_model import write_memory
from scripted_server import ANSWER, PASSWORD, answered, events, start, streamed
from server_process import PATIENCE, ServerProcess, wait_until
from session_checker import back, disturb

from routes import ROUTES
from rwkv_batch.model import weights
from rwkv_batch.model.checkpoint import read_file
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.text import tokenizer
from rwkv_batch.text.tokenizer import Tokenizer

STATE, MULTI = "/state/chat/completions", "/multi_state/chat/completions"
STATUS, DELETE = "/state/status", "/state/delete"
GREEDY = {"top_k": 1, "alpha_presence": 2.0, "alpha_frequency": 0.5, "stop_tokens": []}
FILE = ("--state-db", "rwkv_sessions.db")
FIRST, SECOND = "User: 猫 and 鱼\n\nAssistant:", "User: again\n\nAssistant:"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A model whose answers depend on everything before them; its tokens are bytes, so that it is quick."""
    return write_memory(tmp_path_factory.mktemp("memory") / "bytes.pth", 256)


@pytest.fixture(scope="module")
def world_checkpoint(tmp_path_factory) -> Path:
    """The same with the World vocabulary."""
    return write_memory(tmp_path_factory.mktemp("memory") / "world.pth")


@pytest.fixture(scope="module")
def keeper(checkpoint, tmp_path_factory):
    """A server that keeps sessions, on a file that rwkv_lightning has written."""
    folder = tmp_path_factory.mktemp("keeper")
    write_reference_file(folder / "rwkv_sessions.db", checkpoint)
    levels = ("--l1-sessions", "16", "--l2-sessions", "32")
    with start(checkpoint, folder, "--session-wait-seconds", "2", "--max-crashes", "1000", *levels, *FILE) as running:
        yield running


@pytest.fixture(scope="module")
def world_keeper(world_checkpoint, tmp_path_factory):
    """One with the World vocabulary."""
    with start(world_checkpoint, tmp_path_factory.mktemp("world")) as running:
        yield running


def write_reference_file(path: Path, checkpoint: Path) -> None:
    """What rwkv_lightning leaves: a table of states in torch's format, fp16, one of them after FIRST."""
    model = Model(weights.from_tensors(read_file(checkpoint)))
    ids = tokenizer.for_vocab(256).encode(FIRST)
    state = State(model.weights.shape, 1)
    with torch.inference_mode():
        model.forward(torch.tensor(ids), PackedRows([0], [len(ids)]), state)
    kept = io.BytesIO()
    torch.save([state.shift.half(), state.wkv.half(), torch.tensor([len(ids)], dtype=torch.int32)], kept)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE sessions (session_id TEXT PRIMARY KEY, state_blob BLOB, last_updated TIMESTAMP)")
        connection.execute("INSERT INTO sessions VALUES ('theirs', ?, 1750000000.5)", (kept.getvalue(),))
        connection.execute("INSERT INTO sessions VALUES ('damaged', ?, 1750000000.5)", (kept.getvalue()[:-100],))


def turn(server: ServerProcess, session: str | None, text: str, **more) -> dict:
    """The answer to one turn."""
    path = MULTI if "dialogue_idx" in more else STATE
    status, answer = server.post({"contents": [text], "session_id": session, "max_tokens": 8, **GREEDY, **more}, path)
    assert status == 200, answer
    return answer


def said(answer: dict) -> str:
    """Its text."""
    (text,) = answered(answer)
    return text


def say(server: ServerProcess, session: str | None, text: str, **more) -> str:
    """The text of one turn."""
    return said(turn(server, session, text, **more))


def entry(server: ServerProcess, session: str) -> dict | None:
    """What the status says of one session."""
    status, page = server.post({"session_id": session}, STATUS, server.headers)
    assert status == 200, page
    return page["sessions"][0] if page["sessions"] else None


def exported(server: ServerProcess, session: str, **more) -> bytes:
    """The file of a session."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", "/state/export", json.dumps({"session_id": session, **more}).encode())
        reply = connection.getresponse()
        data = reply.read()
        assert reply.status == 200, data
        assert reply.getheader("content-type") == "application/octet-stream"
        return data


def imported(server: ServerProcess, session: str, data: bytes, more: str = "") -> tuple[int, dict]:
    """(status, answer) of posting such a file."""
    return server.post(data, f"/state/import?session_id={quote(session)}{more}")


def of_another_model(data: bytes) -> bytes:
    """What a larger model would have written."""
    (length,) = struct.unpack_from("<I", data, 12)
    header = json.loads(data[16 : 16 + length]) | {"model": "f" * 32, "layers": 32, "width": 4096}
    written = json.dumps(header).encode()
    return data[:12] + struct.pack("<I", len(written)) + written + bytes(2**20)


# --- the border of a turn: contract 9, line 19 ---


def assert_close(one: bytes, other: bytes, tolerance: float = 1e-3) -> None:
    """Two exported states are equal up to the order of sums, which differs between prefill and decode."""
    states = []
    for data in (one, other):
        (length,) = struct.unpack_from("<I", data, 12)
        states.append(
            (json.loads(data[16 : 16 + length]), torch.frombuffer(bytearray(data[16 + length : -4]), dtype=torch.float32))
        )
    assert states[0][0] == states[1][0]
    torch.testing.assert_close(states[0][1], states[1][1], rtol=tolerance, atol=tolerance)


def answer_without_end(server: ServerProcess, encode: Tokenizer, count: int) -> tuple[str, list[str]]:
    """(a prompt, the `count` tokens of its greedy answer), which do not end it."""
    for number in range(100):
        prompt = f"User: {number} 猫\n\nAssistant:"
        answer = turn(server, None, prompt, max_tokens=count)
        if answer["choices"][0]["finish_reason"] == "length":
            ids = encode.encode(said(answer))
            assert len(ids) == count
            return prompt, [encode.decode([id]) for id in ids]
    raise AssertionError("every answer is short")


def answer_with_end(server: ServerProcess) -> tuple[str, str]:
    """(a prompt, its answer), which the end token ends."""
    for number in range(100):
        prompt = f"User: {number} 鱼\n\nAssistant:"
        answer = turn(server, None, prompt, max_tokens=40)
        if answer["choices"][0]["finish_reason"] == "stop" and said(answer):
            return prompt, said(answer)
    raise AssertionError("no answer ends")


def check_border(server: ServerProcess, encode: Tokenizer, how: str) -> None:
    """State and text of two turns are those of one turn with the joined text."""
    more: dict = {"max_tokens": 40}
    if how == "end":
        prompt, answer = answer_with_end(server)
    else:
        prompt, words = answer_without_end(server, encode, 12)
        answer, stop = "".join(words), ""
        if how == "length":
            more = {"max_tokens": 12}
        elif how == "id":
            stop = next(word for word in words[3:] if word not in words[:3])
            more["stop_tokens"] = encode.encode(stop)
        elif how == "text":
            stop = "".join(words[4:7])
            more["stop_tokens"] = [stop]
        elif how == "text inside tokens":
            place = next(i for i, word in enumerate(words[:-1]) if i > 2 and len(word) > 3)
            stop = words[place][2:] + words[place + 1]
            more["stop_tokens"] = [stop]
        answer = answer[: answer.index(stop)] if stop else answer
    assert say(server, f"two {how}", prompt, **more) == answer
    joined = prompt + answer
    say(server, f"fed {how}", joined, max_tokens=0)
    assert entry(server, f"two {how}")["tokens"] == entry(server, f"fed {how}")["tokens"] == len(encode.encode(joined))
    assert_close(exported(server, f"two {how}"), exported(server, f"fed {how}"))
    last = say(server, f"one {how}", f"{joined}\n\n{SECOND}")
    assert say(server, f"two {how}", SECOND) == say(server, f"fed {how}", SECOND) == last
    assert_close(exported(server, f"two {how}"), exported(server, f"one {how}"))


@pytest.mark.parametrize("how", ["length", "id", "text", "end"])
def test_two_turns_equal_one(keeper, how):
    """Contract 9, line 19, however the first turn ended."""
    check_border(keeper, tokenizer.for_vocab(256), how)


@pytest.mark.long
@pytest.mark.parametrize("how", ["length", "id", "text", "text inside tokens", "end"])
def test_two_turns_equal_one_in_the_world_vocabulary(world_keeper, how):
    """Contract 9, line 19, where a stop may begin inside a token."""
    check_border(world_keeper, tokenizer.for_vocab(65536), how)


def test_the_separator_is_exactly_one_blank_line(keeper):
    """Contract 4.2: whatever newlines either side has; a first turn gets none."""
    for left, right in [("a", "b"), ("a\n", "b"), ("a\n\n", "b"), ("a", "\nb"), ("a", "\n\nb"), ("a\n", "\nb")]:
        name = f"border {left!r} {right!r}"
        say(keeper, name, left, max_tokens=0)
        say(keeper, name, right, max_tokens=0)
        assert entry(keeper, name)["tokens"] == 4
    say(keeper, "no border", "a", max_tokens=0)
    assert entry(keeper, "no border")["tokens"] == 1, "nothing is put before a first turn"


def test_without_a_session_nothing_is_remembered(keeper):
    total = keeper.post({"limit": 0}, STATUS)[1]["total_sessions"]
    assert say(keeper, None, FIRST) == say(keeper, None, FIRST)
    assert "session" not in turn(keeper, None, FIRST)
    assert keeper.post({"limit": 0}, STATUS)[1]["total_sessions"] == total


def test_versions_and_streams(keeper):
    """A turn tells its session's version; streamed and whole turns are the same."""
    for number, text in enumerate([FIRST, SECOND, SECOND], 1):
        whole = turn(keeper, "whole", text)
        assert whole["id"] == "rwkv7-batch"
        session = whole["session"]
        assert (session["id"], session["version"], session["durable"]) == ("whole", number, True)
        body = {"contents": [text], "session_id": "streamed", "max_tokens": 8, "stream": True, "chunk_size": 3, **GREEDY}
        assert streamed(keeper, STATE, body) == [said(whole)]
        assert entry(keeper, "streamed")["version"] == number
        assert entry(keeper, "streamed")["tokens"] == session["tokens"]


def test_prompts_and_names_that_are_refused(keeper):
    """Contract 1.9."""
    refused = keeper.post({"contents": ["a", "b"], "session_id": "s"}, STATE)
    assert refused == (400, {"error": "Server Error: Requst must be single prompt !"})
    refused = keeper.post({"contents": ["a", "b"], "session_id": "s", "dialogue_idx": 0}, MULTI)
    assert refused == (400, {"error": "Server Error: Request must be single prompt!"})
    assert keeper.post({"contents": [], "session_id": "s"}, STATE) == (400, {"error": "Empty prompts list"})
    assert keeper.post({"contents": ["a"], "session_id": "é" * 129}, STATE)[0] == 400
    assert keeper.post({"contents": ["a"], "session_id": "s"}, MULTI) == (400, {"error": "Missing dialogue_idx parameter"})
    assert keeper.post({"contents": ["a"], "dialogue_idx": 0}, MULTI) == (400, {"error": "Missing session_id parameter"})
    for name in ("é" * 128, "a\nb", "'; DROP TABLE sessions; --", "../x", "S:0", "%s", "\u0000", "🙂 " * 20):
        assert turn(keeper, name, FIRST)["session"]["id"] == name
        assert entry(keeper, name)["session_id"] == name
        assert keeper.post({"session_id": name}, DELETE)[0] == 200
        assert entry(keeper, name) is None


def test_an_empty_turn_is_fed_token_0(keeper):
    """Decision (i)."""
    say(keeper, "empty", "a", max_tokens=0)
    say(keeper, "empty", "", max_tokens=0)
    assert entry(keeper, "empty")["version"] == 2


# --- tiers, races, cancelling: contract 9, lines 20 and 22 ---


def test_the_17th_and_the_49th_session(keeper):
    """Contract 9, line 20: the oldest leaves VRAM, then RAM; a session that is used returns; nothing is lost."""
    keeper.post({"session_id": "tier", "delete_prefix": True}, DELETE)
    names = [f"tier:{number}" for number in range(49)]
    texts = {name: say(keeper, name, name, max_tokens=2) for name in names}
    page = keeper.post({}, STATUS)[1]
    counts = [page[key] for key in ("l1_cache_count", "l2_cache_count", "database_count")]
    assert counts[:2] == [16, 32]
    assert sum(counts) == page["total_sessions"] == len(page["sessions"])
    assert len({session["session_id"] for session in page["sessions"]}) == page["total_sessions"]
    level = {session["session_id"]: session["cache_level"] for session in page["sessions"]}
    assert level[names[0]] == "Database (Disk)"
    assert {level[name] for name in names[1:33]} == {"L2 (RAM)"}
    assert {level[name] for name in names[33:]} == {"L1 (VRAM)"}
    for name in (names[0], names[1], names[40]):
        control = f"control {name}"
        assert say(keeper, control, name, max_tokens=2) == texts[name]
        assert say(keeper, name, SECOND) == say(keeper, control, SECOND)
        assert entry(keeper, name)["cache_level"] == "L1 (VRAM)"
    keeper.post({"session_id": "tier", "delete_prefix": True}, DELETE)


def test_turns_of_one_session_run_one_after_another(keeper):
    """Contract 9, line 20: as many versions as turns, and the state of one order of them."""
    texts = [f"User: {number}\n\nAssistant:" for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda text: turn(keeper, "race", text, max_tokens=4), texts))
    order = sorted(range(4), key=lambda number: answers[number]["session"]["version"])
    assert [answers[number]["session"]["version"] for number in order] == [1, 2, 3, 4]
    for number in order:
        assert say(keeper, "serial", texts[number], max_tokens=4) == said(answers[number])


def test_a_session_that_stays_busy(keeper):
    """A bounded wait, then 409, also for a stream; other sessions do not wait."""
    with held_turn(keeper, "busy"):
        began = time.monotonic()
        body = {"contents": ["a"], "session_id": "busy", "max_tokens": 1}
        with ThreadPoolExecutor(2) as pool:
            replies = list(pool.map(lambda stream: keeper.request("POST", STATE, body | {"stream": stream}), [False, True]))
        for status, answer, headers in replies:
            assert status == 409
            assert "busy" in answer["error"]
            assert headers["retry-after"] == "1"
        assert 1.9 < time.monotonic() - began < 5 * PATIENCE
        assert say(keeper, "idle", FIRST)
    assert entry(keeper, "busy") is None, "the turn was cancelled, and so there never was a session"


@contextlib.contextmanager
def held_turn(server: ServerProcess, session: str, path: str = STATE, **more):
    """A long turn that runs until the end of the block and whose client leaves then."""
    body = {"contents": [FIRST], "session_id": session, "max_tokens": 100_000, "stream": True, "ignore_eos": True, **GREEDY}
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    connection.request("POST", path, json.dumps({**body, **more}).encode())
    reply = connection.getresponse()
    assert reply.status == 200
    assert reply.readline().startswith(b"data: ")
    yield reply
    reply.close()
    connection.close()
    wait_until(lambda: server.engine_stats()["requests_running"] == 0, 10, "the turn ends when its client has left")


def test_a_cancelled_turn_leaves_the_session_as_it_was(keeper):
    """Contract 9, line 22; of a first turn nothing stays."""
    for name in ("kept", "same"):
        say(keeper, name, FIRST)
    before = entry(keeper, "kept")
    with held_turn(keeper, "kept"):
        pass
    assert entry(keeper, "kept")["version"] == before["version"]
    assert say(keeper, "kept", SECOND) == say(keeper, "same", SECOND)
    with held_turn(keeper, "tree", MULTI, dialogue_idx=0):
        pass
    assert keeper.post({"session_id": "tree:1"}, DELETE)[0] == 404


def test_deleting_a_session_ends_its_turn(keeper):
    """Delete wins: the turn is told, and what it made does not come back."""
    say(keeper, "gone", FIRST)
    with held_turn(keeper, "gone") as stream:
        assert keeper.post({"session_id": "gone"}, DELETE)[0] == 200
        rest = stream.read().decode()
    assert "deleted during the turn" in rest
    assert "[DONE]" not in rest
    assert entry(keeper, "gone") is None


def test_a_prompt_that_came_before_is_not_computed_again(keeper):
    """The prefix cache: usage tells it, the text is the same, and a request can do without."""
    body = {"contents": [f"User: {'one two three four. ' * 30}\n\nAssistant:"], "max_tokens": 8, **GREEDY}
    without, first, second = (keeper.post(body | {"use_prefix_cache": cache})[1] for cache in (False, True, True))
    assert answered(without) == answered(first) == answered(second)
    assert "prompt_tokens_details" not in without["usage"]
    usage = second["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


# --- status, delete, dialogues: contract 9, lines 2, 9, 23, 24 ---


def test_status_and_delete(keeper):
    """Contract 9, line 23, and 1.9; an empty body is one without fields."""
    for name in ("a", "a:1", "a:2", "ab"):
        say(keeper, name, FIRST, max_tokens=1)
    status, page, _ = keeper.request("POST", STATUS)
    assert status == 200
    assert list(page) == ["status", "total_sessions", "l1_cache_count", "l2_cache_count", "database_count", "sessions"]
    assert page["status"] == "success"
    names = [session["session_id"] for session in page["sessions"]]
    assert names.count("a") == 1, "in memory and on disk, and counted once"
    session = page["sessions"][names.index("ab")]
    assert (session["cache_level"], session["last_updated"]) == ("L1 (VRAM)", "In Memory")
    assert abs(session["timestamp"] - time.time()) < 60
    paged, offset = [], 0
    while offset is not None:
        part = keeper.post({"limit": 7, "offset": offset}, STATUS)[1]
        assert part["total_sessions"] == page["total_sessions"]
        paged += [session["session_id"] for session in part["sessions"]]
        offset = part["next_offset"]
    assert paged == names

    deleted = {"status": "success", "message": "Session a deleted successfully"}
    missing = {"status": "not_found", "message": "Session a not found in database"}
    assert keeper.post({"session_id": "a"}, DELETE) == (200, deleted)
    assert keeper.post({"session_id": "a"}, DELETE) == (404, missing)
    assert entry(keeper, "a:1")
    assert keeper.post({"session_id": "a", "delete_prefix": True}, DELETE) == (200, deleted)
    assert keeper.post({"session_id": "a", "delete_prefix": True}, DELETE) == (200, deleted)
    assert [entry(keeper, name) for name in ("a:1", "a:2")] == [None, None]
    assert entry(keeper, "ab")
    assert keeper.post({}, DELETE) == (400, {"error": "Missing session_id parameter"})
    assert say(keeper, "a", FIRST, max_tokens=1) == say(keeper, None, FIRST, max_tokens=1), "nothing of the old one is left"


def test_sessions_with_a_password(locked_scripted):
    """Contract 9, line 2: string stops, Bearer and body password on every route of sessions, delete_prefix."""
    body = {"contents": ["Hello:"], "session_id": "p", "max_tokens": 40, "stop_tokens": ["\nUser:"]}
    calls = [
        (STATE, body),
        (STATE, body | {"stream": True}),
        (MULTI, body | {"dialogue_idx": 0}),
        (STATUS, {}),
        ("/state/fork", {"session_id": "p", "copies": ["p:fork"]}),
        ("/state/rewind", {"session_id": "p"}),
        ("/state/export", {"session_id": "p"}),
        (DELETE, {"session_id": "p", "delete_prefix": True}),
    ]
    for path, asked in calls:
        assert locked_scripted.post(asked, path) == (401, {"error": "Unauthorized: invalid or missing password"})
        assert locked_scripted.post(asked | {"password": "x"}, path)[0] == 401
        if path == "/state/export":
            continue  # no JSON comes back
        status, answer = locked_scripted.post(asked | {"password": PASSWORD}, path)
        assert status == 200, answer
        if path == MULTI or ("contents" in asked and not asked.get("stream")):
            assert said(answer) == ANSWER
    assert locked_scripted.post(b"x", "/state/import?session_id=p")[0] == 401
    for path, asked in calls[:4] + calls[-1:]:
        assert locked_scripted.post(asked, path, locked_scripted.headers)[0] == 200


def test_a_dialogue_branches(keeper):
    """Contract 9, lines 7 and 24: 0 -> 1; from 1 -> 2 and 3, which both continue 1; the numbers go on."""
    first = turn(keeper, "tree", FIRST, dialogue_idx=0)
    assert (first["id"], first["dialogue_idx"]) == ("rwkv7-multi-state", 1)
    second, third = (turn(keeper, "tree", SECOND, dialogue_idx=1) for _ in range(2))
    assert (second["dialogue_idx"], third["dialogue_idx"]) == (2, 3)
    assert said(second) == said(third)
    say(keeper, "line", FIRST)
    assert say(keeper, "line", SECOND) == said(second)
    assert said(turn(keeper, "tree", SECOND, dialogue_idx=None)) == say(keeper, None, SECOND), "null is 0, the empty state"
    assert said(turn(keeper, "tree", SECOND, dialogue_idx=3)) == say(keeper, "line", SECOND)
    missing = keeper.post({"contents": ["a"], "session_id": "tree", "dialogue_idx": 99, "max_tokens": 1}, MULTI)
    assert missing == (404, {"error": "State not found for dialogue_idx=99"})
    body = {"contents": ["a"], "session_id": "tree", "dialogue_idx": 99, "stream": True}
    assert keeper.post(body, MULTI)[0] == 404, "a stream that cannot begin has its true status"
    assert entry(keeper, "tree:5")
    assert keeper.post({"session_id": "tree:5"}, DELETE)[0] == 200
    assert turn(keeper, "tree", FIRST, dialogue_idx=0)["dialogue_idx"] == 6, "a number is not used again"


def test_the_number_comes_directly_before_the_end_of_the_stream(keeper):
    """Contract 9, line 9."""
    body = {"contents": [FIRST], "session_id": "树", "dialogue_idx": 0, "stream": True, "max_tokens": 4, **GREEDY}
    *chunks, node, done = events(keeper, MULTI, body)
    assert node == '{"object": "multi_state.dialogue_idx", "session_id": "树:1", "dialogue_idx": 1}'
    assert done == "[DONE]"
    assert all(json.loads(chunk)["object"] == "chat.completion.chunk" for chunk in chunks)


# --- versions, keys, copies, files ---


def test_a_turn_that_expects_another_version(keeper):
    say(keeper, "v", FIRST, expect_version=0)
    for stream in (False, True):
        body = {"contents": ["a"], "session_id": "v", "max_tokens": 1, "expect_version": 0, "stream": stream}
        status, answer = keeper.post(body, STATE)
        assert status == 412
        assert "1" in answer["error"]
    assert turn(keeper, "v", SECOND, expect_version=1)["session"]["version"] == 2


def test_a_key_makes_a_turn_happen_once(keeper):
    first = turn(keeper, "once", FIRST, idempotency_key="k1")
    again = turn(keeper, "once", FIRST, idempotency_key="k1")
    assert said(again) == said(first)
    assert again["session"] == first["session"] | {"replayed": True}
    body = {"contents": [FIRST], "session_id": "once", "max_tokens": 8, "stream": True, **GREEDY}
    assert streamed(keeper, STATE, body, {"Idempotency-Key": "k1"}) == [said(first)]
    assert entry(keeper, "once")["version"] == 1
    other = {"contents": [SECOND], "session_id": "once", "max_tokens": 8, **GREEDY}
    assert keeper.post(other, STATE, {"Idempotency-Key": "k1"})[0] == 422
    assert turn(keeper, "once", SECOND, idempotency_key="k2")["session"]["version"] == 2


def test_rows_that_only_start_from_a_session(keeper):
    say(keeper, "root", FIRST)
    status, answer = keeper.post(
        {"contents": [SECOND] * 20, "session_id": "root", "keep": False, "max_tokens": 8, **GREEDY}, STATE
    )
    assert status == 200
    assert entry(keeper, "root")["version"] == 1
    assert answered(answer) == [say(keeper, "root", SECOND)] * 20


def test_fork_and_rewind(keeper):
    say(keeper, "trunk", FIRST)
    status, answer = keeper.post({"session_id": "trunk", "copies": ["copy 1", "copy 2"]}, "/state/fork")
    assert (status, answer["status"]) == (200, "success")
    assert [session["session_id"] for session in answer["sessions"]] == ["copy 1", "copy 2"]
    right = say(keeper, "trunk", SECOND)
    assert say(keeper, "copy 1", SECOND) == right
    status, answer = keeper.post({"session_id": "trunk"}, "/state/rewind")
    assert (status, answer["sessions"][0]["version"]) == (200, 3)
    assert say(keeper, "trunk", SECOND) == say(keeper, "copy 2", SECOND) == right
    assert keeper.post({"session_id": "trunk", "copies": ["new", "copy 1"]}, "/state/fork")[0] == 409
    assert entry(keeper, "new") is None, "all copies or none"
    assert keeper.post({"session_id": "nobody", "copies": ["new"]}, "/state/fork")[0] == 404
    assert keeper.post({"session_id": "trunk", "version": 1}, "/state/rewind")[0] == 404, "no longer kept"
    assert keeper.post({"session_id": "nobody"}, "/state/rewind")[0] == 404


def test_a_session_as_a_file(keeper):
    """What comes back is the same state; whatever is not a whole file of this model is refused, and the server goes on."""
    say(keeper, "original", FIRST)
    data = exported(keeper, "original")
    status, answer = imported(keeper, "导入 1", data)
    assert (status, answer["sessions"][0]["session_id"]) == (200, "导入 1")
    assert say(keeper, "导入 1", SECOND) == say(keeper, "original", SECOND)
    assert imported(keeper, "导入 1", data)[0] == 409
    assert imported(keeper, "导入 1", data, "&overwrite=true")[0] == 200
    assert_close(exported(keeper, "original", version=1), data, 1e-4)
    numbers = random.Random(1)
    for _ in range(20):
        damaged = bytearray(data)
        damaged[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
        assert imported(keeper, "bad", bytes(damaged))[0] == 422
    for damaged in (data[:-1], data[: len(data) // 2], data + b"x", b"x", bytes(len(data))):
        assert imported(keeper, "bad", damaged)[0] == 422
    assert imported(keeper, "bad", b"")[0] == 400
    status, answer = imported(keeper, "bad", of_another_model(data))
    assert (status, "another model" in answer["error"]) == (422, True)
    assert imported(keeper, "bad", data + bytes(33 * 2**20))[0] == 413
    assert keeper.post(data, "/state/import")[0] == 400, "without a name"
    assert keeper.post(data, "/state/import?session_id=tom+9")[0] == 200, "as forms write a blank"
    assert entry(keeper, "tom 9")["tokens"] == entry(keeper, "导入 1")["tokens"]
    assert entry(keeper, "tom+9") is None
    assert entry(keeper, "bad") is None
    assert keeper.post({"session_id": "nobody"}, "/state/export")[0] == 404


words = (
    st.none() | st.booleans() | st.integers(-2, 3) | st.text(max_size=4) | st.sampled_from([["a"], ["a", "b"], {}, 2**70, 1.5])
)
FIELDS = """contents session_id dialogue_idx stream keep expect_version idempotency_key version copies limit offset
    delete_prefix overwrite use_prefix_cache""".split()  # noqa: SIM905
PATHS = [route.path for route in ROUTES if "state" in route.path and "export" not in route.path]


@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), body=st.dictionaries(st.sampled_from(FIELDS), words, max_size=6))
def test_any_json_gets_a_designed_answer(keeper, path, body):
    check_any_body(keeper, path, body)


@pytest.mark.long
@settings(max_examples=4000, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), body=st.dictionaries(st.sampled_from(FIELDS), words, max_size=6))
def test_any_json_gets_a_designed_answer_4000_times(keeper, path, body):
    check_any_body(keeper, path, body)


def check_any_body(server: ServerProcess, path: str, body: dict) -> None:
    """Something that a route is designed to say."""
    status, answer = server.post(json.dumps(body | {"max_tokens": 1}).encode(), path)
    assert status in (200, 400, 404, 409, 412, 422), (status, answer, body)
    if status != 200 and path != DELETE:
        assert list(answer) == ["error"], body


# --- restarts: contract 9, lines 20, 21 and 25 ---


def kill_all(server: ServerProcess, database: Path) -> None:
    """kill -9 of the whole server; waits until nobody has the file any more."""
    (engine,) = server.children("engine")
    os.kill(engine, signal.SIGKILL)
    server.process.kill()
    server.process.wait()

    def let_go() -> bool:
        with open(f"{database}.lock", "a+") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    wait_until(let_go, 10, "the processes are gone")


def test_a_file_of_the_reference(keeper):
    """Contract 9, line 25: its sessions go on, a damaged one is refused."""
    assert keeper.post({"contents": ["a"], "session_id": "damaged", "max_tokens": 1}, STATE)[0] == 422
    say(keeper, "ours", FIRST, max_tokens=0)
    for name in ("theirs", "ours"):
        say(keeper, name, SECOND, max_tokens=0)
    assert_close(exported(keeper, "theirs"), exported(keeper, "ours"), 2e-2)


@pytest.mark.faults
def test_kill_9(keeper):
    """Contract 9, lines 20 and 21: no acknowledged turn is lost, none happens twice, and the state from disk is that from VRAM.

    At a random moment under load; afterwards the states are the same up to rounding, and the text that follows is the same.
    """
    names = ("from VRAM", "from disk")
    for name in names:
        say(keeper, name, FIRST)
    before = exported(keeper, "from disk")
    second = say(keeper, "from VRAM", SECOND)
    _, restarts = disturb(keeper, "client", sessions=32, kills=1, seed=9)
    print(f"the engine was back after {max(restarts):.1f} s")
    assert entry(keeper, "from disk")["cache_level"] == "Database (Disk)"
    assert_close(exported(keeper, "from disk"), before, 1e-4)
    assert say(keeper, "from disk", SECOND) == second
    assert_close(exported(keeper, "from disk"), exported(keeper, "from VRAM"), 1e-4)


def database(folder: Path) -> Path:
    """Where a server that runs in this folder keeps its sessions."""
    return folder / "rwkv_batch_sessions.db"


def checked(folder: Path) -> str:
    """What SQLite says of the database's integrity."""
    with contextlib.closing(sqlite3.connect(database(folder))) as connection:
        return connection.execute("PRAGMA integrity_check").fetchone()[0]


# --- faults of the disk; each ends with a request that must succeed ---


@contextlib.contextmanager
def tmpfs(path: Path, size: str):
    """A small file system of its own at `path`; skips where none can be mounted."""
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def failed(server: ServerProcess, session: str, status: int, *words: str, **more) -> None:
    """One turn fails with this status and these words, whole and streamed; other routes do not mind."""
    body = {"contents": [SECOND], "session_id": session, "max_tokens": 2, **GREEDY, **more}
    found, answer = server.post(body, STATE)
    assert found == status, answer
    assert all(word in answer["error"] for word in words), answer
    found, text, _ = server.request("POST", STATE, body | {"stream": True})
    if found == 200:
        assert "[DONE]" not in text
        assert words[0] in text
    else:
        assert found == status
    assert say(server, None, FIRST)
    assert server.get("/readyz")[0] == 200


@pytest.mark.long
def test_a_full_disk(checkpoint, folder):
    """507 and the session as it was; what is stored can be read; when there is room again all goes on."""
    with tmpfs(folder / "disk", "8m") as disk, start(checkpoint, folder, "--state-db", str(disk / "s.db")) as server:
        first = say(server, "s", FIRST)
        filler = disk / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        failed(server, "s", 507, "disk is full", "s.db")
        failed(server, "new", 507, "disk is full")
        assert entry(server, "s")["version"] == 1
        assert entry(server, "new") is None
        assert answered(
            server.post({"contents": [SECOND], "session_id": "s", "keep": False, "max_tokens": 8, **GREEDY}, STATE)[1]
        )
        filler.unlink()
        assert say(server, "control", FIRST) == first
        assert say(server, "s", SECOND) == say(server, "control", SECOND)


@pytest.mark.long
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_read_only_disk(checkpoint, folder, how):
    """The sessions can be read, a turn fails loudly, all else goes on."""
    with tmpfs(folder / "disk", "64m") as disk:
        with start(checkpoint, folder, "--state-db", str(disk / "s.db")) as server:
            say(server, "s", FIRST)
            right = exported(server, "s")
            if how == "killed":
                kill_all(server, disk / "s.db")
            else:
                server.process.send_signal(signal.SIGTERM)
                assert server.process.wait(20) == 0
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with start(checkpoint, folder, "--state-db", str(disk / "s.db")) as server:
            assert entry(server, "s")["version"] == 1
            assert exported(server, "s") == right
            failed(server, "s", 507, "readonly", "s.db")
            failed(server, "new", 507, "readonly")
            assert server.post({"session_id": "s"}, DELETE)[0] == 507
            assert entry(server, "s")["version"] == 1


@pytest.mark.long
def test_flipped_bits_in_states(checkpoint, folder):
    """A damaged state is refused by name, every time; the others are what they were; the name can be used again."""
    names = [f"s{number}" for number in range(60)]
    with start(checkpoint, folder) as server:
        texts = {name: say(server, name, f"User: {name}\n\nAssistant:", max_tokens=4) for name in names}
    numbers = random.Random(3)
    with contextlib.closing(sqlite3.connect(database(folder))) as connection, connection:
        query = (
            "SELECT p.id, p.data FROM kept_sessions s JOIN kept_versions v ON v.session = s.id"
            " JOIN kept_pieces p ON p.id >> 20 = v.state WHERE s.name = ?"
        )
        for name in names[:50]:
            piece, data = numbers.choice(connection.execute(query, (name,)).fetchall())
            damaged = bytearray(data)
            damaged[numbers.randrange(len(damaged))] ^= 1 << numbers.randrange(8)
            connection.execute("UPDATE kept_pieces SET data = ? WHERE id = ?", (bytes(damaged), piece))
    with start(checkpoint, folder) as server:
        assert server.post({"limit": 0}, STATUS)[1]["total_sessions"] == len(names)
        for name in names[:50]:
            failed(server, name, 422, "cannot be used")
        for name in names[50:]:
            assert say(server, "control " + name, f"User: {name}\n\nAssistant:", max_tokens=4) == texts[name]
            assert say(server, name, SECOND) == say(server, "control " + name, SECOND)
        assert server.post({"session_id": names[0]}, DELETE)[0] == 200
        assert turn(server, names[0], FIRST)["session"]["version"] == 1


@pytest.mark.long
def test_damaged_database_files(checkpoint, folder):
    """Bits flipped anywhere in the file, a file cut off, one that is none: right answers or designed errors, never others."""
    names = [f"s{number}" for number in range(8)]
    with start(checkpoint, folder) as server:
        texts = {}
        for name in names:
            say(server, name, f"User: {name}\n\nAssistant:", max_tokens=4)
            texts[name] = answered(server.post(asked_again(name), STATE)[1])
    whole = whole_database(folder)
    numbers = random.Random(4)
    damages = [whole[: len(whole) // 2], whole[:-1], whole[:1000], b"", b"no database" * 1000]
    for _ in range(12):
        data = bytearray(whole)
        for _ in range(3):
            data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
        damages.append(bytes(data))
    for data in damages:
        for file in folder.glob(database(folder).name + "*"):
            file.unlink()
        database(folder).write_bytes(data)
        with start(checkpoint, folder) as server:
            for name in names:
                status, answer = server.post(asked_again(name), STATE)
                assert status in (422, 507, *([404] if data == b"" else [])) or answered(answer) == texts[name]
            assert say(server, None, FIRST)
            assert server.get("/readyz")[0] == 200


def whole_database(folder: Path) -> bytes:
    """The sessions in one file: a server that is told twice to end leaves a write-ahead log."""
    with contextlib.closing(sqlite3.connect(database(folder))) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return database(folder).read_bytes()


def asked_again(name: str) -> dict:
    """A turn that changes nothing."""
    return {"contents": [SECOND], "session_id": name, "keep": False, "max_tokens": 4, **GREEDY}


@pytest.mark.faults
def test_a_server_starts_on_a_file_whose_definitions_are_damaged(checkpoint, folder):
    """Whoever wants a session is told; everybody else is served."""
    with start(checkpoint, folder) as server:
        say(server, "s", FIRST)
    data = bytearray(whole_database(folder))
    data[data.index(b"CREATE TABLE kept_pieces") + 7] ^= 0x80
    database(folder).write_bytes(data)
    with start(checkpoint, folder) as server:
        failed(server, "s", 507, "move it away")
        assert server.post({}, STATUS)[0] == 507
        assert say(server, None, FIRST)
        assert server.get("/readyz")[0] == 200


@pytest.mark.long
def test_a_second_server_on_the_same_file(checkpoint, folder, tmp_path_factory):
    """It serves everything but sessions, and says who has them; when the first has ended it takes over."""
    file = str(database(folder))
    with start(checkpoint, folder) as first, start(checkpoint, tmp_path_factory.mktemp("second"), "--state-db", file) as second:
        say(first, "s", FIRST)
        failed(second, "s", 503, "another server", str(first.children("engine")[0]))
        assert second.post({}, STATUS)[0] == 503
        assert say(first, "s", SECOND)
        first.close()
        assert turn(second, "s", SECOND)["session"]["version"] == 3


@pytest.mark.long
def test_another_model_on_the_same_file(checkpoint, world_checkpoint, folder):
    """A state of another model is refused and stays."""
    with start(checkpoint, folder) as server:
        say(server, "s", FIRST)
        right = exported(server, "s")
    with start(world_checkpoint, folder) as server:
        failed(server, "s", 422, "another model")
        assert imported(server, "t", right)[0] == 422
        assert say(server, "t", FIRST)
    with start(checkpoint, folder) as server:
        assert exported(server, "s") == right


@pytest.mark.long
@pytest.mark.parametrize("durability", ["relaxed", "shutdown"])
def test_other_durabilities(checkpoint, folder, durability):
    """They say that a turn is not on disk yet; an orderly end writes everything, and relaxed ones are soon there."""
    with start(checkpoint, folder, "--durability", durability, "--relaxed-seconds", "0.2") as server:
        assert turn(server, "s", FIRST)["session"]["durable"] is False
        time.sleep(1.0)
        (engine,) = server.children("engine")
        os.kill(engine, signal.SIGKILL)
        back(server, engine)
        assert bool(entry(server, "s")) == (durability == "relaxed"), "a turn that only leaves memory at the end is lost"
        version = turn(server, "s", FIRST)["session"]["version"]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
    with start(checkpoint, folder) as server:
        assert entry(server, "s")["version"] == version
        assert say(server, "s", SECOND)
