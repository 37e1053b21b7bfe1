"""What goes over the wire, on a real socket: shapes, errors, access, limits. The engine is the stand-in."""

import contextlib
import json
import re
import socket
import threading
import time
from urllib.parse import quote

import pytest
import quiet_robyn  # noqa: F401
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_process import PATIENCE, ServerProcess, process_figures, wait_until, without_comments

from routes import ROUTES, admin
from routes.page import FILES

CHAT = "/v1/chat/completions"
CHUNK = "chat.completion.chunk"


def raw(server: ServerProcess, text: str | bytes, path: str = CHAT):
    return server.post(text.encode() if isinstance(text, str) else text, path)


def events(server: ServerProcess, body: dict) -> tuple[str, list]:
    status, text, headers = server.request("POST", CHAT, {**body, "stream": True})
    assert status == 200
    assert headers["content-type"] == "text/event-stream"
    text = without_comments(text)
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return text, [block[6:] for block in blocks]


def test_whole_answer(server):
    status, answer, headers = server.request("POST", CHAT, {"contents": ["ab", "c"], "max_tokens": 3, "model": "模型"})
    assert status == 200
    assert headers["content-type"] == "application/json"
    assert headers["access-control-allow-origin"] == "*"
    assert answer["id"] == "rwkv7-batch"
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "模型"
    assert isinstance(answer["created"], int)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["message"] == {"role": "assistant", "content": " w0 w1 w2"} for choice in answer["choices"])
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}


def test_stream_is_the_references_form(server):
    text, payloads = events(server, {"contents": ["ab", "c"], "max_tokens": 5, "chunk_size": 2})
    choice = '{{"index": {}, "delta": {{"content": "{}"}}}}'
    first = f'{{"object": "{CHUNK}", "choices": [{choice.format(0, " w0 w1")}, {choice.format(1, " w0 w1")}]}}'
    assert payloads[0] == first
    assert payloads[-1] == "[DONE]"
    assert text.count("[DONE]") == 1
    chunks = [json.loads(payload) for payload in payloads[:-1]]
    assert {chunk["object"] for chunk in chunks} == {CHUNK}
    joined = ["", ""]
    for chunk in chunks:
        for part in chunk["choices"]:
            joined[part["index"]] += part["delta"]["content"]
    assert joined == [" w0 w1 w2 w3 w4"] * 2
    ends = chunks[-1]["choices"]
    assert [(end["delta"], end["finish_reason"]) for end in ends] == [({"content": ""}, "length")] * 2
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13}


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_asked_for_gives_empty_text(server, stream):
    body = {"contents": ["a", "b"], "max_tokens": 0}
    if stream:
        payloads = events(server, body)[1]
        assert all(part["delta"]["content"] == "" for p in payloads[:-1] for part in json.loads(p)["choices"])
        assert payloads[-1] == "[DONE]"
    else:
        assert [choice["message"]["content"] for choice in server.post(body)[1]["choices"]] == ["", ""]


def test_a_long_answer_is_blanks_then_json(server):
    status, answer, headers = server.request("POST", CHAT, {"contents": ["a"], "max_tokens": 500})
    assert status == 200
    assert headers["content-type"] == "application/json"
    assert headers["transfer-encoding"] == "chunked"
    assert answer["usage"]["completion_tokens"] == 500


def test_seed_bodies_are_taken(server):
    body = {
        "contents": ["English: After a blissful two weeks\n\nChinese:", ""],
        "max_tokens": 8,
        "stop_tokens": [0, 261, 24281],
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.6,
        "alpha_presence": 1.0,
        "alpha_frequency": 0.1,
        "alpha_decay": 0.99,
        "noise": 1.5,
        "pad_zero": True,
        "chunk_size": 128,
        "password": "rwkv7_7.2b",
        "something_unknown": {"a": [1]},
    }
    status, answer = server.post(body)
    assert status == 200, answer
    assert len(answer["choices"]) == 2


@pytest.mark.parametrize(
    "stops",
    [[0, 261, "\nUser:"], 261, "✿", None, [], ["5"], [1.0]],
    ids=["mixed", "id", "text", "null", "none", "digits", "1.0"],
)
def test_stop_forms(server, stops):
    assert server.post({"contents": ["a"], "max_tokens": 1, "stop_tokens": stops})[0] == 200


BIG = 2**63
GOOD = {"contents": ["a"], "max_tokens": 1}
NUMBERS = [
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "alpha_presence",
    "alpha_frequency",
    "alpha_decay",
    "noise",
    "chunk_size",
]
BAD_VALUES = ["[]", "{}", '"x"', "NaN", "Infinity", "-Infinity", "1e999", "-1e300", str(-BIG), str(BIG), str(2 * BIG), '"nan"']


@pytest.mark.parametrize("field", NUMBERS)
def test_bad_numbers_name_their_field(server, field):
    for value in BAD_VALUES:
        status, answer = raw(server, f'{{"contents": ["a"], "max_tokens": 1, "{field}": {value}}}')
        assert status == 400, (field, value, answer)
        assert list(answer) == ["error"], answer
        assert field in answer["error"], (value, answer)
    for value in ('"1"', "1", "1.0", *(["null"] if field != "max_tokens" else [])):  # its default would take a minute
        assert raw(server, f'{{"contents": ["a"], "max_tokens": 1, "{field}": {value}}}')[0] == 200, (field, value)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ('{"contents": []}', "Empty prompts list"),
        ('{"contents": null}', "Empty prompts list"),
        ('{"contents": {"a": 1}}', "contents"),
        ('{"contents": [1]}', "contents[0]"),
        ('{"contents": ["a", null]}', "contents[1]"),
        ('{"contents": ["\\ud800"]}', "contents"),
        ('{"contents": ["a"], "model": ["m"]}', "model"),
        ('{"contents": ["a"], "stream": "maybe"}', "stream"),
        ('{"contents": ["a"], "stop_tokens": [true]}', "stop_tokens"),
        ('{"contents": ["a"], "stop_tokens": [-1]}', "stop_tokens"),
        ('{"contents": ["a"], "stop_tokens": {"a": 1}}', "stop_tokens"),
        ('{"contents": ["a"], "stop_tokens": [[1]]}', "stop_tokens"),
        ('{"contents": ["a"]', "JSON"),
        (b'{"contents": ["\xff"]}', "JSON"),
        ('{"contents": "a", "max_tokens": ' + "9" * 5000 + "}", "JSON"),
        ('{"contents": ' + "[" * 100000 + "]" * 100000 + "}", "64 levels"),
        ('{"contents": ' + "[" * 70 + "]" * 70 + "}", "64 levels"),
        ('{"contents": ["a"], "stop_tokens": ["%s"]}' % ("x" * 257), "256 bytes"),
        (f'{{"contents": ["a"], "stop_tokens": {json.dumps(list(range(65)))}}}', "64 entries"),
        ('{"contents": ["a"], "max_tokens": 1048577}', "max_tokens: at most 1048576"),
    ],
)
def test_bad_bodies(server, body, word):
    status, answer = raw(server, body)
    assert status == 400, answer
    assert list(answer) == ["error"]
    assert word in answer["error"]
    assert server.post(GOOD)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num", [4097, 100_000])
def test_more_prompts_than_one_request_may_have(server, num, stream):
    """Contract 9, line 31: refused as a whole, before any stream starts."""
    assert server.post({"contents": ["a"] * num, "stream": stream}) == (
        400, {"error": "bsz overflow, Max bsz=4096", "request_bsz": num, "max_bsz": 4096},
    )  # fmt: skip


def test_repeated_key_counts_as_its_last_value(server):
    assert raw(server, '{"contents": ["a"], "max_tokens": "x", "max_tokens": 2}')[1]["usage"]["completion_tokens"] == 2


def test_body_over_the_limit_is_refused_and_8_mib_are_not(server):
    assert server.post({"contents": ["a" * 8 * 2**20], "max_tokens": 1})[1].get("error", "").startswith("contents[0]: at most")
    status, answer = raw(server, b'{"contents": ["' + b"a" * (33 * 2**20) + b'"]}')
    assert status == 413
    assert "32 MiB" in answer["error"]
    assert server.post(GOOD)[0] == 200


def test_compressed_and_cut_off_bodies(server):
    assert server.request("POST", CHAT, b"\x1f\x8b", {"Content-Encoding": "gzip"})[0] == 400
    with socket.create_connection((server.host, server.port)) as connection:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head + json.dumps(GOOD).encode())
        connection.shutdown(socket.SHUT_WR)
        assert b"200 OK" not in connection.recv(4096)
    assert server.post(GOOD)[0] == 200


def test_forms_of_several_parts_are_refused(server):
    body = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n{}\r\n--b--\r\n'
    status, answer, _ = server.request("POST", CHAT, body, {"Content-Type": "multipart/form-data; boundary=b"})
    assert status == 415
    assert "several parts" in str(answer)


def test_paths_and_methods(server):
    assert server.request("GET", "/nowhere")[:2] == (404, {"error": "Not found"})
    nowhere = {"message": "Not found", "type": "not_found_error", "param": None, "code": None}
    for base in ("/v1", "/openai/v1"):
        assert server.request("POST", f"{base}/chat/completion", GOOD)[:2] == (404, {"error": nowhere})
    for method in ("GET", "PUT", "DELETE", "PATCH", "TRACE"):
        status, answer, headers = server.request(method, CHAT)
        assert (status, answer["error"]["message"], headers["allow"]) == (405, "Method not allowed", "POST")
        status, answer, headers = server.request(method, "/v3/chat/completions")
        assert (status, answer, headers["allow"]) == (405, {"error": "Method not allowed"}, "POST")
    for route in ROUTES:
        if route.method == "GET":
            right = 404 if "/*" in route.path or "/:" in route.path else 200  # what stands for any name is nobody's
            assert server.request("HEAD", route.path)[0] == right, route
    for path in ("//", "/../etc/passwd", "/v1/models/", "/V1/models", "/%2e%2e/x"):
        assert server.request("GET", path)[0] in (200, 404), path


def test_routes_under_other_names(server):
    assert server.post(GOOD, "/chat/completions")[1]["id"] == "rwkv7-batch"
    messages = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    assert server.post(messages, "/chat/completions")[1]["object"] == "chat.completion"
    assert server.post({"prompt": "a", "max_tokens": 1}, "/completions")[1]["object"] == "text_completion"
    assert server.get("/healthcheck")[0] == 200


@pytest.mark.parametrize(
    "body",
    ["{", "", "[1]", "{}", '{"messages": null}', '{"prompt": "a"}', '{"messages": 5}', '{"messages": ["\\ud800"]}', "[" * 99],
)
def test_errors_of_a_chat_are_openais_unless_the_body_is_native(server, body):
    for path in (CHAT, "/chat/completions", "/openai/v1/chat/completions"):
        status, answer = raw(server, body, path)
        assert status == 400
        assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert isinstance(raw(server, '{"contents": ["a"], "messages": ' + (body or "["), CHAT)[1]["error"], str)


def test_a_compressed_body_is_refused_in_the_form_of_its_route(server):
    for path, form in ((CHAT, dict), ("/v1/completions", dict), ("/v3/chat/completions", str)):
        answer = server.request("POST", path, b"\x1f\x8b", {"Content-Encoding": "gzip"})[1]
        assert isinstance(answer["error"], form), path


ACTIONS = [route for route in ROUTES if route.method != "GET" and route.access != "translate"]


def test_pages_of_other_origins_may_not_act(server):
    """Without a password it is the browser that calls, for whatever page it shows."""
    foreign = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    for route in ACTIONS:
        status, answer, headers = server.request(route.method, route.path, b'{"contents": ["a"]}', foreign)
        assert status == 403, route
        assert "--cors-origins" in str(answer)
        assert headers["access-control-allow-origin"] == "*"
    for path in ("/v1/models", "/stats", "/readyz"):
        assert server.get(path, foreign)[0] == 200
    translate = GOOD_FOR["/v1/immersive_translate"] | {"text_list": ["5"]}
    assert server.post(translate, "/v1/immersive_translate", foreign)[0] == 200
    for origin in (f"http://{server.host}:{server.port}", "chrome-extension://x", "http://localhost:3000"):
        assert server.post(GOOD, headers={"Origin": origin})[0] == 200


def test_names_that_others_point_here_are_refused(server):
    for method, path in (("GET", "/stats"), ("POST", CHAT), ("GET", "/"), ("POST", "/v1/immersive_translate")):
        status, answer, _ = server.request(method, path, None, {"Host": f"rebind.evil.example:{server.port}"})
        assert status == 403
        assert "--allowed-hosts" in str(answer)
    assert server.post(GOOD, headers={"Host": f"localhost:{server.port}"})[0] == 200


@pytest.mark.parametrize("path", [CHAT, "/", "/nowhere", "/translate/v1/batch-translate"])
def test_preflight_from_an_extension(server, path):
    asked = {
        "Origin": "chrome-extension://x",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,x-stainless-os",
        "Access-Control-Request-Private-Network": "true",
    }
    status, _, headers = server.request("OPTIONS", path, headers=asked)
    assert status == 204
    assert headers["access-control-allow-origin"] == "*"
    assert headers["access-control-allow-headers"] == "content-type,x-stainless-os"
    assert headers["access-control-allow-private-network"] == "true"
    assert "POST" in headers["access-control-allow-methods"]


def test_every_answer_carries_cors(server):
    calls = [("POST", CHAT, {**GOOD, "stream": True}), ("POST", CHAT, b"["), ("GET", "/nowhere", None), ("GET", "/stats", None)]
    for method, path, body in calls:
        assert server.request(method, path, body)[2]["access-control-allow-origin"] == "*"


def test_models_health_stats(server):
    status, models = server.get("/v1/models")
    assert status == 200
    assert models["data"][0]["id"] == "fake"
    assert models["data"][0]["object"] == "model"
    assert server.get("/healthz") == (200, {"status": "ok", "model": "fake", "engine": "ready"})
    assert server.get("/readyz")[0] == 200
    assert server.get("/")[1]["name"] == "rwkv_batch"
    assert server.get("/stats")[1]["engine"]["slots"] == 320


@pytest.mark.parametrize("stream", [False, True])
def test_status_shows_how_far_a_request_is(server, stream):
    """Also of one whose text comes at its end, and under the id that its caller gave it."""
    given_id = f"mine-{stream}"

    def mine() -> list[dict]:
        requests = server.get("/v1/server/status")[1]["active_requests"]
        return [request for request in requests if request["given_id"] == given_id]

    body = {"contents": ["a", "b"], "max_tokens": 100_000, "stream": stream, "chunk_size": 100_000}
    thread = threading.Thread(target=server.post, args=(body,), kwargs={"headers": {"X-Request-Id": given_id}})
    thread.start()
    try:
        wait_until(lambda: mine() and mine()[0]["generated_tokens"] > 10, 5, "some tokens")
    finally:
        server.post({"request_id": given_id}, "/v1/server/stop")
        thread.join()


def test_the_log_counts_the_tokens_of_a_stream_that_failed(server):
    body = {"contents": ["a"], "max_tokens": 100_000, "stream": True, "chunk_size": 1}
    thread = threading.Thread(target=server.post, args=(body,), kwargs={"headers": {"X-Request-Id": "to-be-stopped"}})
    thread.start()
    try:
        active = lambda: server.get("/v1/server/status")[1]["active_requests"]  # noqa: E731
        wait_until(lambda: any(r["given_id"] == "to-be-stopped" and r["generated_tokens"] > 12 for r in active()), 5, "tokens")
    finally:
        server.post({"request_id": "to-be-stopped"}, "/v1/server/stop")
        thread.join()
    wait_until(lambda: "given_id=to-be-stopped" in server.output, 5, "its line")
    (line,) = [line for line in server.output.splitlines() if "given_id=to-be-stopped" in line]
    assert int(re.search(r" tokens=(\d+)", line)[1]) > 5  # bytes of a character that is not whole yet were not sent
    assert line.endswith("end=error")


def test_metrics_add_up_over_processes(server):
    def total(name: str) -> float:
        page = server.get("/metrics")[1]
        assert "# TYPE rwkv_batch:time_to_first_token_seconds histogram" in page
        return sum(float(value) for value in re.findall(rf"^rwkv_batch:{name}(?:{{.*}})? (\S+)$", page, re.M))

    before = total("request_success_total"), total("time_to_first_token_seconds_count")
    for _ in range(12):  # spread over both processes by chance
        assert server.post({"contents": ["a", "b"], "max_tokens": 2, "stream": True})[0] == 200
    assert total("request_success_total") - before[0] == 24
    assert total("time_to_first_token_seconds_count") - before[1] == 12
    for name in ("num_requests_running", "num_requests_waiting", "generation_tokens_total", "state_slots_usage_ratio"):
        assert re.search(rf"^rwkv_batch:{name}", server.get("/metrics")[1], re.M), name


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = [
    *NUMBERS,
    "contents",
    "messages",
    "stop_tokens",
    "stream",
    "model",
    "seed",
    "ignore_eos",
    "pad_zero",
    "password",
    "xyz",
]
bodies = st.dictionaries(st.sampled_from(FIELDS), json_values | st.just(["a"]) | st.just("5") | st.just(3), max_size=8)


def check_body(server: ServerProcess, body: dict) -> None:
    if isinstance(body.get("max_tokens"), int | float | str) or "max_tokens" not in body or body["max_tokens"] is None:
        body["max_tokens"] = 2  # long generations are not the point
    status, answer, _headers = server.request("POST", CHAT, json.dumps(body).encode())
    assert status in (200, 400), (status, answer, body)
    if status == 400:
        assert list(answer) == ["error"]
        chat = body.get("contents") is None and body.get("messages") is not None
        openai = chat or "contents" not in body  # the body says whose errors these are
        text = answer["error"]["message"] if openai else answer["error"]
        assert isinstance(text, str)
        assert "Traceback" not in text


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(body=bodies)
def test_any_json_gets_200_or_400(server, body):
    check_body(server, body)


@pytest.mark.long
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=bodies)
def test_any_json_gets_200_or_400_500_times(server, body):
    check_body(server, body)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.binary(max_size=200))
def test_any_bytes_get_400(server, data):
    assert raw(server, data)[0] == 400


def test_client_text_cannot_forge_log_lines(server):
    for path in ("/x%0d%0aforged", "/x%e2%80%a8forged", "/" + "y" * 1000):
        server.request("GET", path)
    server.post(
        {**GOOD, "model": "m\nforged", "contents": ["a\nforged"]}, headers={"X-Request-Id": "forged", "User-Agent": "forged"}
    )
    assert not [line for line in server.output.splitlines() if line.startswith("forged") or len(line) > 600]


def test_nothing_of_this_was_an_internal_error(server):
    assert server.post(GOOD)[0] == 200
    assert "Traceback" not in server.output
    assert "prompts [" not in server.output


SECRET = "pässwörd-canary-7391"
ASCII_SECRET = "canary-secret-7391"


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    with ServerProcess(
        "--host", "127.0.0.1", "--http-workers", "1", folder=tmp_path_factory.mktemp("locked"),
        env={"RWKV_BATCH_PASSWORD": ASCII_SECRET}, wait=False,
    ) as running:  # fmt: skip
        running.headers = {"Authorization": f"Bearer {ASCII_SECRET}"}
        running.wait_ready()
        yield running


GOOD_FOR = {  # bodies of routes that do not take contents
    "/FIM/v1/batch-FIM": {"prefix": ["a"], "suffix": ["b"]},
    "/translate/v1/batch-translate": {"target_lang": "de", "source_lang": "en", "text_list": ["a"]},
    "/v1/immersive_translate": {"target_lang": "de", "source_lang": "en", "text_list": ["a"]},
    "/infill": {"n_predict": 1},
    "/completion": {"n_predict": 1},
    "/api/chat": {"options": {"num_predict": 1}},
    "/api/generate": {"options": {"num_predict": 1}},
}
WRONG = ["", "x", ASCII_SECRET + "x", ASCII_SECRET[:-1], ASCII_SECRET.upper(), "ä", "x" * 2**20]
UNAUTHORIZED = {"error": "Unauthorized: invalid or missing password"}
NESTED = {"message": UNAUTHORIZED["error"], "type": "authentication_error", "param": None, "code": "invalid_api_key"}
UNAUTHORIZED_IN = {
    "openai": {"error": NESTED},
    "anthropic": {"type": "error", "error": {"type": "authentication_error", "message": UNAUTHORIZED["error"]}},
}
ORDERS = {"/loadmodel": [403], "/removemodel": [409], "/switch-model": [403]}  # of a server without a folder of models
DISTINCT = list({(route.method, route.handler): route for route in ROUTES}.values())  # one path of each handler


@pytest.mark.parametrize("route", DISTINCT, ids=lambda route: f"{route.method} {route.path}")
def test_access_to_every_route(locked, route):
    elsewhere = {"X-Forwarded-For": "203.0.113.5"} if route.access == "translate" else {}

    def status(headers=None, body=None):
        data = json.dumps({**GOOD, **GOOD_FOR.get(route.path, {}), **(body or {})}).encode() if route.method == "POST" else None
        return locked.request(route.method, route.path, data, {**elsewhere, **(headers or {})})[:2]

    refused = (401, UNAUTHORIZED_IN.get(route.form, UNAUTHORIZED))
    right = {"Authorization": f"Bearer {ASCII_SECRET}"}
    good = status(right)[0]  # this engine keeps no sessions, and some routes say no to everybody
    assert good in (200, 400, 404, *ORDERS.get(route.path, ()))
    if route.access == "open" and route.handler is not admin.index:  # its JSON form asks for the password itself
        assert status()[0] == good
        return
    assert status() == refused
    for wrong in WRONG[:-2]:
        assert status({"Authorization": f"Bearer {wrong}"}) == refused, wrong
    assert status({"Authorization": f"bearer {ASCII_SECRET}"})[0] == good
    for other in (f"Basic {ASCII_SECRET}", ASCII_SECRET):
        assert status({"Authorization": other}) == refused, other
    if route.method != "POST" or route.takes_file:
        return
    assert status(body={"password": ASCII_SECRET})[0] == good
    assert status(right, {"password": ASCII_SECRET})[0] == good
    for wrong in [*WRONG, 5, [ASCII_SECRET], {}, True]:
        assert status(body={"password": wrong}) == refused, str(wrong)[:20]
        assert status(right, {"password": wrong}) == refused, str(wrong)[:20]
    assert status({"Authorization": "Bearer x"}, {"password": ASCII_SECRET}) == refused
    assert status(body={"contents": 5}) == refused, "access comes before everything that depends on the body"
    assert status(right, {"password": None})[0] == good


@pytest.mark.parametrize("path", [CHAT, "/state/status", "/openai/v1/chat/completions"])
def test_hostile_bodies_of_nobody_known_hold_up_nobody(locked, path):
    unterminated = b"[" * 65 + b'"' + b'\\"' * 2**19
    strings = b'{"contents": [' + b'"a",' * 2**22 + b'"a"]}'
    for body, statuses in ((unterminated, {400}), (strings, {400, 401})):
        with socket.create_connection((locked.host, locked.port)) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            longest, answer = 0.0, b""
            connection.settimeout(0.01)
            while b"\r\n" not in answer:
                with contextlib.suppress(TimeoutError):
                    answer += connection.recv(4096)
                began = time.monotonic()
                assert locked.get("/healthz")[0] == 200
                longest = max(longest, time.monotonic() - began)
            assert int(answer.split()[1]) in statuses
            assert longest < 0.5 * PATIENCE


def test_refused_bodies_are_not_kept(locked):
    body = b'{"contents": ["' + b"a" * 2**24 + b'"]}'
    (pid,) = locked.children("http")
    sizes = []
    for _ in range(8):
        assert locked.post(body)[0] == 401
        sizes.append(process_figures(pid)[2])
    # KiB. Each is 32 MiB, as text and as bytes: four that are kept are more, the last one that is not yet gone is less.
    assert min(sizes[4:]) < min(sizes[:4]) + 96 * 1024


def test_a_large_body_needs_its_password(locked):
    """Found without reading the rest, and right or wrong as in any other body."""
    text = "a " * 2**16
    for body, expected in (({}, 401), ({"password": "x"}, 401), ({"password": 5}, 401), ({"password": ASCII_SECRET}, 200)):
        assert locked.post({"contents": [text], "max_tokens": 1, **body})[0] == expected
    assert locked.post({"contents": [text], "max_tokens": 1, "password": "x"}, headers=locked.headers)[0] == 401


def test_public_routes_are_few_and_the_secret_is_nowhere(locked):
    lists = {f"{base}/models{one}" for base in ("/v1", "/openai/v1") for one in ("", "/*model")} | {
        "/api/tags",
        "/api/version",
        "/models",
    }
    health = {"/healthcheck"} | {f"{base}/health" for base in ("", "/v1", "/openai", "/openai/v1")}
    page = {f"/web/{name}" for name in FILES}
    public = {route.path for route in ROUTES if route.access == "open"}
    assert public == {*lists, *health, *page, "/", "/healthz", "/readyz"}
    assert {route.method for route in ROUTES if route.access == "open"} == {"GET"}
    for path in ("/stats", "/metrics", "/"):
        assert ASCII_SECRET not in str(locked.get(path, locked.headers))
    assert ASCII_SECRET not in locked.output
    for pid in (*locked.children("http"), *locked.children("engine")):
        for name in ("cmdline", "environ"):
            with open(f"/proc/{pid}/{name}", "rb") as file:
                assert ASCII_SECRET.encode() not in file.read()


def test_streams_and_errors_need_no_password_for_cors(locked):
    status, _, headers = locked.request("POST", CHAT, GOOD)
    assert status == 401
    assert headers["www-authenticate"].startswith("Bearer")
    assert {"Retry-After", "X-Request-Id"} <= set(headers["access-control-expose-headers"].split(", "))
    assert headers["access-control-allow-origin"] == "*"
    assert locked.request("OPTIONS", CHAT)[0] == 204


def test_a_password_that_is_not_ascii_works_in_the_body_and_encoded_in_headers(folder):
    secret = folder / "secret"
    secret.write_text(SECRET + "\n")
    secret.chmod(0o600)
    with ServerProcess("--password-file", str(secret), "--http-workers", "1", folder=folder, wait=False) as running:
        wait_until(lambda: "address" in running.output, 10, "the address")
        running.port = int(re.search(r"address  http://0.0.0.0:(\d+)  \(a password is set", running.output)[1])
        wait_until(lambda: running.get("/readyz")[0] == 200, 10, "ready")
        assert running.post({**GOOD, "password": SECRET})[0] == 200
        assert running.post({**GOOD, "password": "passwort"})[0] == 401
        encoded = quote(SECRET)
        for headers in ({"Authorization": f"Bearer {encoded}"}, {"X-Api-Key": encoded}):
            assert running.get("/stats", headers)[0] == 200
        text = GOOD_FOR["/v1/immersive_translate"] | {"text_list": ["5"]}
        elsewhere = {"X-Forwarded-For": "203.0.113.5"}
        assert running.post(text, f"/v1/immersive_translate?token={encoded}", elsewhere)[0] == 200
        assert SECRET not in running.output
