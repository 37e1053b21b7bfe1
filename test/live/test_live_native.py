"""The native routes on a real socket, line by line of the contract's checklist."""

import http.client
import http.server
import itertools
import json
import os
import shutil
import subprocess
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_server import (
    ANSWER,
    CUT,
    CUT_ANSWER,
    LONG,
    PASSWORD,
    SEED_CURLS,
    answered,
    events,
    streamed,
)
from server_process import PATIENCE, ROOT, ServerProcess, wait_until

from routes import ROUTES, Route
from routes.dialects import NATIVE_FIELDS

V1, V2, V3 = "/v1/chat/completions", "/v2/chat/completions", "/v3/chat/completions"
FIM, BIG, BATCH = "/FIM/v1/batch-FIM", "/big_batch/completions", "/v1/batch/completions"
TRANSLATE = "/translate/v1/batch-translate"
JSON_ONLY = {"Accept": "application/json"}
PROMPTS = ["Hello:", "你好:", ""]
PATHS = [V1, V2, V3, FIM, BIG, BATCH]
GREEDY = {"temperature": 0, "alpha_presence": 0, "alpha_frequency": 0}
ROUTE_OF: dict[str, Route] = {route.path: route for route in ROUTES}
DISTINCT = list({(route.method, route.handler): route for route in ROUTES}.values())  # one path of each handler


def at_length(path: str, *more):
    """A path whose case runs in test-long only, where others take the same way."""
    return pytest.param(*more, path, marks=pytest.mark.long)


def body_for(path: str, texts: list[str], **more) -> dict:
    """A body that asks one path about some texts."""
    fields = {"prefix": texts, "suffix": texts} if path == FIM else {"contents": texts}
    return {**fields, "max_tokens": 40, **more}


def whole(server: ServerProcess, path: str, texts: list[str], **more) -> dict:
    """The answer in one document."""
    status, answer = server.post(body_for(path, texts, **more), path, {**server.headers, **JSON_ONLY})
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("access", [pytest.param("scripted", marks=pytest.mark.long), "locked_scripted"])
@pytest.mark.parametrize("number", range(len(SEED_CURLS)))
def test_every_curl_of_the_seeds(number, access, request):
    """Contract 9, line 1: the bodies unchanged, with and without a password set; the answer is right."""
    curl = SEED_CURLS[number]
    server = request.getfixturevalue(access)
    headers = dict(header.replace("your-password-if-set", PASSWORD).split(": ", 1) for header in curl["headers"])
    body, raw = json.loads(curl["body"]), curl["body"].encode()
    num_rows = len(body.get("contents") or body.get("prefix") or body.get("text_list") or [0])
    if "text_list" in body:
        status, answer = server.post(raw, curl["path"], headers)
        assert status == 200
        assert answer == {"translations": [{"detected_source_lang": body["source_lang"], "text": ANSWER}] * num_rows}
    elif curl["path"] == "/state/status":
        status, answer = server.post(raw, curl["path"], headers)
        assert (status, answer["status"], answer["total_sessions"]) == (200, "success", len(answer["sessions"]))
    elif curl["path"] == "/state/delete":
        message = f"Session {body['session_id']} not found in database"
        assert server.post(raw, curl["path"], headers) == (404, {"status": "not_found", "message": message})
    elif curl["path"].startswith("/openai/") and body["stream"]:
        *chunks, done = events(server, curl["path"], raw, headers)
        assert done == "[DONE]"
        assert "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks) == ANSWER
    elif body["stream"]:
        assert streamed(server, curl["path"], raw, headers) == [ANSWER] * num_rows
    else:
        status, answer = server.post(raw, curl["path"], headers)
        assert status == 200
        assert answered(answer) == [ANSWER] * num_rows


@pytest.mark.parametrize("path", PATHS)
def test_string_stops_bearer_and_body_password(locked_scripted, path):
    """Contract 9, line 2, its part without sessions."""
    body = body_for(path, ["Hello:"], stop_tokens=["\nUser:"], stream=True, password=PASSWORD)
    assert streamed(locked_scripted, path, body) == [ANSWER]
    assert streamed(locked_scripted, path, body, locked_scripted.headers) == [ANSWER]
    del body["password"]
    assert streamed(locked_scripted, path, body, locked_scripted.headers) == [ANSWER]
    assert locked_scripted.post(body, path)[0] == 401


@pytest.mark.parametrize("path", PATHS)
def test_stops_of_both_kinds(scripted, path):
    """Contract 9, line 3: a mix, null for the default, an empty list for token 0 only."""
    for stops in ([0, 261, "\nUser:"], None, []):
        assert answered(whole(scripted, path, ["Hello:"], stop_tokens=stops)) == [ANSWER]
    assert answered(whole(scripted, path, ["Hello:"], stop_tokens=[261, "好。"])) == ["你😀世界，早上"]


def message_of(answer: dict) -> str:
    """What an error says, in either form."""
    return answer["error"]["message"] if isinstance(answer["error"], dict) else answer["error"]


@pytest.mark.parametrize("path", PATHS)
def test_prompts_of_all_kinds(scripted, path):
    """Contract 9, line 4: one text for a list of one, none refused, an empty one answered."""
    assert answered(whole(scripted, path, "Hello:")) == [ANSWER]
    assert scripted.post(body_for(path, []), path) == (400, {"error": "Empty prompts list"})
    status, answer = scripted.post({}, path)
    assert (status, message_of(answer)) == (400, "Empty prompts list")
    assert answered(whole(scripted, path, [""])) == [ANSWER]


@pytest.mark.parametrize("path", PATHS)
def test_fields_that_are_unknown_wrong_or_null(scripted, path):
    """Contract 9, line 5."""
    nulls = dict.fromkeys(("temperature", "top_k", "top_p", "stop_tokens", "chunk_size", "model", "seed", "password"))
    assert answered(whole(scripted, path, ["Hello:"], something={"else": [1]}, **nulls)) == [ANSWER]
    assert answered(whole(scripted, path, ["Hello:"], max_tokens="40", top_k=5.0)) == [ANSWER]
    for wrong in ({"max_tokens": "x"}, {"temperature": []}, {"stop_tokens": [None]}, {"top_k": 1.5}, {"contents": {"a": 1}}):
        name = next(iter(wrong))
        if name != "contents" or path != FIM:
            status, answer = scripted.post({**body_for(path, ["a"]), **wrong}, path)
            assert (status, list(answer)) == (400, ["error"])
            assert name in answer["error"]


def test_pairs_of_fim_must_match(scripted):
    """Contract 1.7."""
    status, answer = scripted.post({"prefix": ["a", "b"], "suffix": ["c"]}, FIM)
    assert (status, answer["error"]) == (400, "prefix and suffix: as many of each, not 2 and 1")


def test_a_body_of_8_mb(scripted):
    """Contract 9, line 6."""
    assert answered(whole(scripted, V1, ["Hello:"], padding="x" * 8_000_000)) == [ANSWER]


@pytest.mark.parametrize(
    ("path", "answer_id", "object_name"),
    [
        (V1, "rwkv7-batch", "chat.completion"),
        (V2, "rwkv7-batch", "chat.completion"),
        (V3, "rwkv7-batch-v3", "chat.completion"),
        (FIM, "rwkv7-batch", "FIM.completion"),
        (BIG, "rwkv7-batch", "chat.completion"),
        (BATCH, "rwkv7-fast-batch", "chat.completion"),
    ],
)
def test_ids_objects_and_order(scripted, path, answer_id, object_name):
    """Contract 9, line 7; FIM has its object with one pair too."""
    for texts in (["Hello"], ["Hello", f"Hello{CUT}", "world"]):
        answer = whole(scripted, path, texts, model="my 模型")
        assert (answer["id"], answer["object"], answer["model"]) == (answer_id, object_name, "my 模型")
        right = [ANSWER if path == V3 or not text.endswith(CUT) else CUT_ANSWER for text in texts]
        assert answered(answer) == right, "v3 ends every prompt with its own words"


@pytest.mark.parametrize(
    ("server_name", "path"),
    [
        *(("scripted", path) for path in PATHS),
        *(("random_model", path) for path in (V1, FIM, BIG)),
        *(at_length(path, "random_model") for path in (V2, V3, BATCH)),
    ],
)
def test_stream_equals_the_whole_answer(server_name, path, request):
    """Contract 9, lines 8 and 11: for any chunk size, Chinese and emoji cut over tokens, odd bytes from a random model."""
    server = request.getfixturevalue(server_name)
    more = {**GREEDY, "stop_tokens": []}
    if server_name == "random_model":
        more |= {"max_tokens": 12}
    right = answered(whole(server, path, PROMPTS, **more))
    assert all(right)
    if server_name == "scripted":
        assert right == [ANSWER] * len(PROMPTS)
    for chunk_size in (1, 2, 3, 7, 128):
        assert streamed(server, path, body_for(path, PROMPTS, stream=True, chunk_size=chunk_size, **more)) == right


@pytest.mark.long
def test_stream_equals_the_whole_answer_for_many_prompts(random_model):
    """The same over 16 prompts and 60 tokens each."""
    texts = [f"{number} 你好 {'😀' * (number % 5)}" for number in range(16)]
    for path in PATHS:
        right = answered(whole(random_model, path, texts, **GREEDY, stop_tokens=[], max_tokens=60))
        for chunk_size in (1, 2, 3, 7, 128):
            body = body_for(path, texts, stream=True, chunk_size=chunk_size, **GREEDY, stop_tokens=[])
            assert streamed(random_model, path, {**body, "max_tokens": 60}) == right


def test_sse_byte_for_byte(scripted):
    """Contract 1.1: a blank after : and , in the payload, characters as they are, one [DONE]; our end marks beside them."""
    _, text, headers = scripted.request("POST", V1, body_for(V1, ["Hello:"], stream=True, chunk_size=15))
    assert headers["content-type"] == "text/event-stream"
    assert text == (
        'data: {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "你😀世界，早上好。"}}]}\n\n'
        'data: {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "한é done"}}]}\n\n'
        'data: {"object": "chat.completion.chunk", '
        '"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}], '
        '"usage": {"prompt_tokens": 2, "completion_tokens": 21, "total_tokens": 23}}\n\n'
        "data: [DONE]\n\n"
    )


def test_big_batch_always_streams(scripted):
    """Contract 9, line 10; JSON only for a client that asks for nothing else (1.11)."""
    body = body_for(BIG, ["a", "b"], stream=False)
    for accept in ({}, {"Accept": "*/*"}, {"Accept": "application/json, text/plain, */*"}, {"Accept": "text/event-stream"}):
        assert streamed(scripted, BIG, body, accept) == [ANSWER] * 2
    assert answered(whole(scripted, BIG, ["a"], stream=True)) == [ANSWER]


@pytest.mark.parametrize("path", [V1, BIG, *map(at_length, (V2, FIM, BATCH))])
def test_a_stop_text_never_appears(scripted, path):
    """Contract 9, line 12: inside a token, over tokens and bytes, longer than seven tokens; what comes before is complete."""
    for stop, left in [("世", "你😀"), ("界，早", "你😀世"), ("😀", "你"), (" don", ANSWER[:-5]), ("한é d", ANSWER[:-7])]:
        for chunk_size in (1, 128):
            body = body_for(path, ["Hello:"], stop_tokens=[stop], chunk_size=chunk_size, stream=True)
            assert streamed(scripted, path, body) == [left], stop
        answer = whole(scripted, path, ["Hello:"], stop_tokens=[stop])
        assert answered(answer) == [left]
        assert answer["choices"][0]["finish_reason"] == "stop"
    texts = [f"a{LONG}"]
    assert answered(whole(scripted, path, texts, stop_tokens=["wertyuio"])) == ["q"]
    assert answered(whole(scripted, path, texts, stop_tokens=["wertyuix", "iop"])) == ["qwertyu"]


def test_stop_ids(scripted):
    """Contract 9, line 13: the id's text is not shown, and " User" is another token than "User"."""
    assert answered(whole(scripted, V1, [CUT], stop_tokens=[0, 261, 24281])) == [" User ok"]
    assert answered(whole(scripted, V1, [CUT], stop_tokens=[])) == [CUT_ANSWER]
    assert answered(whole(scripted, V1, [CUT], stop_tokens=["24281"])) == [CUT_ANSWER], "a number written as text is text"


@pytest.mark.parametrize("path", [V1, V2, *map(at_length, (V3, FIM, BATCH))])
def test_greedy_is_the_same_in_any_company(random_model, path):
    """Contract 9, lines 15 and 16: top_k 1, top_p 0 and temperature 0 are greedy, over runs and batches."""
    off = {"alpha_presence": 0, "alpha_frequency": 0, "stop_tokens": [], "max_tokens": 8}
    right = answered(whole(random_model, path, ["a prompt"], temperature=0, **off))
    for more in ({"top_k": 1}, {"top_p": 0}, {"temperature": 0.0}):
        assert answered(whole(random_model, path, ["a prompt"], **off, **more)) == right
        assert answered(whole(random_model, path, ["x", "a prompt", "another"], **off, **more))[1] == right[0]


def test_big_batch_is_greedy_at_temperature_0_and_at_noise_0(random_model):
    """Contract 9, line 16, and decision (h)."""
    off = {"stop_tokens": [], "max_tokens": 8}
    right = answered(whole(random_model, V1, ["a prompt"], **GREEDY, **off))
    assert answered(whole(random_model, BIG, ["a prompt"], temperature=0, **off)) == right
    assert answered(whole(random_model, BIG, ["a prompt"], noise=0, **off)) == right


def test_v2_puts_token_0_in_front(random_model):
    """Contract 2.6: by default on v2, elsewhere when it is sent."""

    def tokens(path: str, **more) -> int:
        return whole(random_model, path, ["a"], **{**GREEDY, "max_tokens": 1, **more})["usage"]["prompt_tokens"]

    assert [tokens(V2), tokens(V2, pad_zero=True), tokens(V2, pad_zero=False)] == [2, 2, 1]
    assert [tokens(V1), tokens(V1, pad_zero=True), tokens(V1, pad_zero=False)] == [1, 2, 1]


@pytest.mark.parametrize("path", [V1, V2, BIG, *map(at_length, (V3, FIM, BATCH))])
def test_max_tokens_finish_reason_and_usage(scripted, path):
    """Contract 9, line 18."""
    num_prompt = whole(scripted, path, ["Hello:"], max_tokens=0)["usage"]["prompt_tokens"]
    for num, text, reason in [(0, "", "length"), (1, "", "length"), (8, "你😀世", "length"), (20, ANSWER, "length"),
                              (21, ANSWER, "stop"), (40, ANSWER, "stop")]:  # fmt: skip
        answer = whole(scripted, path, ["Hello:"], max_tokens=num)
        assert (answered(answer), answer["choices"][0]["finish_reason"]) == ([text], reason)
        used = min(num, 21)
        expected = {"prompt_tokens": num_prompt, "completion_tokens": used, "total_tokens": num_prompt + used}
        assert answer["usage"] == expected
        *_, last, done = events(scripted, path, body_for(path, ["Hello:"], max_tokens=num, stream=True))
        assert (json.loads(last)["usage"], done) == (expected, "[DONE]")
        assert json.loads(last)["choices"][0]["finish_reason"] == reason


def test_v3_takes_a_conversation(scripted):
    """Contract 1.5: every text of contents is answered; messages are one conversation, counted in tokens."""

    def tokens(**body) -> int:
        return scripted.post({"max_tokens": 0, **body}, V3)[1]["usage"]["prompt_tokens"]

    def count(text: str) -> int:
        return scripted.post({"text": text}, "/v1/tokens/count")[1]["tokens"]

    assert answered(whole(scripted, V3, ["a", "b", "c"])) == [ANSWER] * 3
    hi = [{"role": "user", "content": "hi"}]
    closed, open_ = "User: hi\n\nAssistant: <think>\n</think>", "User: hi\n\nAssistant: <think"
    assert [tokens(messages=hi), tokens(messages=hi, enable_think=True)] == [count(closed), count(open_)]
    assert tokens(contents="hi") == count(closed)
    assert tokens(messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]) == count(closed)
    history = [*hi, {"role": "assistant", "content": "<think>\nx\n</think>\nyes"}, {"role": "user", "content": "go"}]
    right = "System: s\n\nUser: hi\n\nAssistant: yes\n\nUser: go\n\nAssistant: <think>\n</think>"
    assert tokens(messages=[*history, {"role": "system", "content": "s"}]) == count(right)
    assert scripted.post({"messages": []}, V3) == (400, {"error": "Empty prompts list"})
    assert scripted.post({"messages": [{"role": "system", "content": " "}]}, V3)[0] == 400
    assert scripted.post({"messages": [{"content": [{"type": "image_url"}]}]}, V3)[0] == 400


def test_big_batch_of_chats(scripted):
    """Contract 1.11: `chats` are given the template; noise 0 is greedy, other noise is taken."""
    chats = [{"messages": [{"role": "user", "content": "hi"}], "system": "be kind"}, {"messages": [{"content": "you"}]}]
    assert streamed(scripted, BIG, {"chats": chats, "max_tokens": 40}) == [ANSWER] * 2
    status, answer = scripted.post({"chats": chats, "max_tokens": 0}, BIG, JSON_ONLY)
    tail = "Assistant: <think>\n</think>\n"
    right = [f"System: be kind\n\nUser: hi\n\n{tail}", f"User: you\n\n{tail}"]
    counts = [scripted.post({"text": text}, "/v1/tokens/count")[1]["tokens"] for text in right]
    assert (status, answer["usage"]["prompt_tokens"]) == (200, sum(counts))
    status, answer = scripted.post({"chats": [*chats, {"messages": []}]}, BIG)
    assert (status, "chats[2].messages" in answer["error"]) == (400, True)
    for more in ({"noise": 0}, {"noise": 1.5}, {"temperature": 0}, {"temperature": 1.3, "seed": 5}):
        assert streamed(scripted, BIG, body_for(BIG, ["a"], **more)) == [ANSWER]


def test_batch_of_prompts(scripted):
    """Contract 1.15: the other form of /v1/batch/completions."""
    status, answer = scripted.post({"prompts": ["a", CUT], "max_tokens": 40, "temperature": 1.0}, BATCH)
    assert status == 200
    assert answer["id"].startswith("batch-")
    assert (answer["object"], answer["batch_size"]) == ("batch_completion", 2)
    assert [result["text"] for result in answer["results"]] == [ANSWER, CUT_ANSWER]
    assert {"created", "inference_time", "speed_stats", "usage"} <= set(answer)
    assert scripted.post({"prompts": []}, BATCH) == (400, {"error": "Empty prompts list"})


def test_tokens_count(scripted):
    """Contract 1.14."""
    path = "/v1/tokens/count"
    assert scripted.post({"text": "English: Hello\n\nChinese:"}, path) == (200, {"tokens": 6})
    assert scripted.post({"messages": [{"role": "user", "content": "hi"}]}, path) == (200, {"tokens": 15})
    assert scripted.post({"contents": ["English: Hello\n\n", "Chinese:"]}, path) == (200, {"tokens": 6})
    assert scripted.post({"text": ""}, path) == (200, {"tokens": 0})
    for nothing in ({}, {"messages": []}):
        assert scripted.post(nothing, path) == (400, {"error": "Missing text or messages"})


def test_status_and_stop_reach_all_http_processes(server):
    """Contract 1.14 and 1.11: one HTTP process is asked about the requests of both; a stopped one is told."""
    answers = []

    def begin(path: str, **more) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
        connection.request("POST", path, json.dumps({"contents": ["a"], "max_tokens": 100_000, **more}))
        return connection.getresponse()

    def active() -> list[dict]:
        return server.get("/v1/server/status")[1]["active_requests"]

    try:
        answers = [begin(V1, stream=True) for _ in range(6)] + [begin(BIG), begin(BIG)]
        wait_until(lambda: sum(live["generated_tokens"] > 0 for live in active()) == 8, 3, "all eight run")
        status = server.get("/v1/server/status")[1]
        assert (status["status"], status["active_request"]) == ("ready", status["active_requests"][0])
        assert sorted(live["endpoint"] for live in status["active_requests"]) == [BIG] * 2 + [V1] * 6
        assert server.get("/big_batch/completions-status") == (200, {"generating": True})

        wanted = answers[0].headers["X-Request-Id"]
        stopped = server.post({"request_id": wanted}, "/v1/server/stop")[1]
        assert (stopped["ok"], stopped["stopped"], stopped["requests"]) == (True, True, [wanted])
        tail = answers[0].read().decode().split("\n\n")
        assert (tail[-2], tail[-1]) == ('data: {"error": "Request cancelled"}', "")
        assert server.post({"request_id": "nobody"}, "/v1/server/stop")[1]["stopped"] is False

        assert server.post(b"", "/big_batch/clean") == (200, {"generating": False, "cleaned": True})
        assert server.get("/big_batch/completions-status") == (200, {"generating": False})
        assert len(active()) == 5
        assert len(server.post(b"", "/v1/server/stop")[1]["requests"]) == 5
        assert active() == []
        for answer in answers[1:]:
            assert b"[DONE]" not in answer.read()
    finally:
        for answer in answers:
            answer.close()
    assert server.get("/v1/server/status")[1]["active_request"] is None


def test_a_stopped_whole_answer_is_409(server):
    """Contract 1.14."""
    found = []
    asking = threading.Thread(target=lambda: found.append(server.post({"contents": ["a"], "max_tokens": 100_000})))
    asking.start()
    wait_until(lambda: server.get("/v1/server/status")[1]["active_requests"], 3, "it runs")
    server.post({}, "/v1/server/stop")
    asking.join(60)
    assert found == [(409, {"error": "Request cancelled"})]


def test_a_long_prompt_does_not_hold_up_others(random_model):
    """Contract 9, line 29: the tokens of a running stream go on between the pieces of a long prompt."""
    connection = http.client.HTTPConnection(random_model.host, random_model.port, timeout=30)
    body = {"contents": ["a"], "max_tokens": 150, "stream": True, "chunk_size": 1, "ignore_eos": True, "stop_tokens": []}
    connection.request("POST", V1, json.dumps({**body, "temperature": 0}))
    stream = connection.getresponse()
    times = []

    def read() -> None:
        while line := stream.readline():
            if line.startswith(b"data: "):
                times.append(time.monotonic())

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: len(times) > 20, 10, "the stream runs")
    began = time.monotonic()
    assert random_model.post({"contents": ["word " * 4000], "max_tokens": 1})[0] == 200
    took = time.monotonic() - began
    reader.join(60)
    pauses = [b - a for a, b in itertools.pairwise(times)]
    print(f"4,000 prompt tokens took {took:.2f} s; longest pause of the stream beside them {max(pauses):.3f} s")
    assert max(pauses) < max(0.25 * PATIENCE, took / 3)


@pytest.mark.parametrize("path", [V1, BIG, TRANSLATE, *map(at_length, (V2, V3, FIM, BATCH))])
def test_a_client_that_leaves_frees_its_rows(one_slot, path):
    """Contract 9, line 30: within one second, running and queued."""
    server = one_slot
    bodies = {
        FIM: {"prefix": ["a"], "suffix": ["b"]},
        TRANSLATE: {"source_lang": "en", "target_lang": "de", "text_list": ["a " * 2000]},
    }
    body = {**bodies.get(path, {"contents": ["a"]}), "max_tokens": 100_000, "stream": True}

    def begin() -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
        connection.request("POST", path, json.dumps(body))
        return connection

    def counts() -> tuple[int, int]:
        stats = server.engine_stats()
        return stats["sequences_running"], stats["sequences_waiting"]

    running = begin()
    wait_until(lambda: counts() == (1, 0), 3, "one runs")
    waiting = begin()
    wait_until(lambda: counts() == (1, 1), 3, "one waits")
    if "translate" in path:
        time.sleep(1.1)  # a whole answer notices after the first second
    waiting.close()
    queued = wait_until(lambda: counts() == (1, 0), 2.0, "the waiting one is gone")
    running.close()
    freed = wait_until(lambda: counts() == (0, 0), 2.0, "the slot is free")
    print(f"{path}: queued row gone after {queued:.2f} s, running row after {freed:.2f} s")
    assert max(queued, freed) < 1.0 * PATIENCE


@pytest.fixture(scope="module")
def one_slot(tmp_path_factory):
    """A server that can run one row at a time."""
    flags = ["--slots", "1", "--http-workers", "1", "--heartbeat", "0.05"]
    with ServerProcess(*flags, folder=tmp_path_factory.mktemp("slot"), step_ms=10) as server:
        yield server


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3),
    max_leaves=5,
)
FIELDS = """contents messages prefix suffix chats prompts text texts from to text_list source_lang target_lang placeholders
    stop_tokens noise pad_zero enable_think stream request_id seed temperature""".split()  # noqa: SIM905
bodies = st.dictionaries(st.sampled_from(FIELDS), values | st.just(["a", "b"]) | st.just("de") | st.just(1), max_size=7)


def check_any_body(server: ServerProcess, path: str, body: dict) -> None:
    status, answer = server.post(json.dumps({**body, "max_tokens": 2, "n_predict": 2}).encode(), path)
    is_refused = status in (403, 409) and path in ("/loadmodel", "/removemodel", "/switch-model")  # this server has one model
    assert status in (200, 400) or is_refused or path.endswith("/embeddings"), (status, answer, body)
    if status != 200:
        nested = isinstance(answer["error"], dict)
        form = ROUTE_OF[path].form
        if form == "chat":  # which of the two the body is
            chat = body.get("contents") is None and body.get("messages") is not None
            form = "native" if body.keys() & set(NATIVE_FIELDS) and not chat else "openai"
        assert nested == (form in ("openai", "anthropic")), body
        text = answer["error"]["message"] if nested else answer["error"]
        assert isinstance(text, str), body
        assert "Traceback" not in text


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.parametrize("path", [route.path for route in DISTINCT if route.method == "POST"])
@settings(max_examples=12, derandomize=True, **QUIET)
@given(body=bodies)
def test_any_json_gets_200_or_400(server, path, body):
    check_any_body(server, path, body)


@pytest.mark.long
@pytest.mark.parametrize("path", [route.path for route in DISTINCT if route.method == "POST"])
@settings(max_examples=400, **QUIET)
@given(body=bodies)
def test_any_json_gets_200_or_400_400_times(server, path, body):
    check_any_body(server, path, body)


@pytest.mark.parametrize("access", [pytest.param("scripted", marks=pytest.mark.long), "locked_scripted"])
def test_the_script_of_curls(access, request):
    """test_curl.sh passes with and without a password set, and fails with the wrong one or without a server."""
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    server = request.getfixturevalue(access)

    def run(**env) -> subprocess.CompletedProcess:
        environ = {**os.environ, "BASE_URL": f"http://127.0.0.1:{server.port}", "MAX_TOKENS": "40", **env}
        return subprocess.run(["bash", ROOT / "test" / "test_curl.sh"], env=environ, capture_output=True, text=True)

    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ok   {TRANSLATE}" in done.stdout
    assert " 0 wrong" in done.stdout
    if access == "locked_scripted":
        assert run(PASSWORD="wrong").returncode == 1
        assert run(BASE_URL="http://127.0.0.1:1").returncode == 2


class ShowsMarks(http.server.BaseHTTPRequestHandler):
    """Answers every body with one document of texts that are no more than a mark, and one that is empty."""

    def do_GET(self):
        """The question for health."""
        self.answer({})

    def do_POST(self):
        """The right form with the wrong texts."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rows = range(len(asked.get("contents") or asked.get("prefix") or [0]))
        texts = ["✿" if "prefix" in asked else "" for _ in rows]
        choices = [{"index": i, "message": {"content": texts[i]}, "finish_reason": "stop"} for i in rows]
        self.answer({"object": "FIM.completion" if "prefix" in asked else "chat.completion", "choices": choices})

    def answer(self, document: dict) -> None:
        """Send it."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, *args):
        """Nothing."""


def test_the_script_of_curls_calls_nothing_right_that_shows_a_mark_or_is_empty():
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ShowsMarks) as wrong:
        threading.Thread(target=wrong.serve_forever).start()
        try:
            environ = {**os.environ, "BASE_URL": f"http://127.0.0.1:{wrong.server_port}"}
            done = subprocess.run(["bash", ROOT / "test" / "test_curl.sh"], env=environ, capture_output=True, text=True)
        finally:
            wrong.shutdown()
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    fim = [line for line in lines if FIM in line]
    assert fim
    assert all(line.startswith("FAIL") for line in fim)
    assert any("✿" in line for line in fim)
    whole_answers = [line for line in lines if line.startswith("ok")]
    assert whole_answers
    assert all("empty" in line for line in whole_answers)
