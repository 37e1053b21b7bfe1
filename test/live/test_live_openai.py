"""The OpenAI surface on a real socket: the checks that the scripts run, and what needs a server of its own."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("openai", reason="needs the SDK openai: requirements-test.txt")

import httpx
import openai
import openai_checks
from openai_checks import HELLO, Target
from scripted_server import ANSWER, PASSWORD
from server_process import PATIENCE, ROOT, ServerProcess, wait_until

CHECKS = [*openai_checks.ADAPTER, *openai_checks.ROUTES]


def target_of(server: ServerProcess, password: str | None = None) -> Target:
    return Target(f"http://{server.host}:{server.port}", password)


@pytest.fixture(scope="module")
def checked(scripted) -> Target:
    """The server whose answers are known."""
    return target_of(scripted)


def slow(check):
    """Importing langchain takes longer than all other checks."""
    return pytest.param(check, marks=pytest.mark.long) if check is openai_checks.check_langchain else check


@pytest.mark.parametrize("check", [slow(check) for check in CHECKS], ids=lambda check: check.__name__)
def test_check(checked, check):
    check(checked)


@pytest.mark.long
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check_on_the_demo_model(demo, check):
    check(demo)


@pytest.mark.long
@pytest.mark.parametrize("check", openai_checks.ROUTES, ids=lambda check: check.__name__)
def test_check_on_a_model_that_emits_anything(random_model, check):
    check(target_of(random_model))


@pytest.mark.long
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check_with_a_password(locked_scripted, check):
    check(target_of(locked_scripted, PASSWORD))


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Target:
    with ServerProcess(
        "--http-workers", "1", folder=tmp_path_factory.mktemp("demo"), model=ROOT / "demo" / "model.rwkv"
    ) as running:
        yield target_of(running)


def test_the_answers_are_the_models(checked):
    """A chat's answer, its reason and its counts, for a model whose answer to everything is known."""
    answer = checked.client().chat.completions.create(model="m", messages=HELLO, temperature=0)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")
    response = checked.client().responses.create(model="m", input="Hello!", temperature=0, store=False)
    assert (response.output_text, response.status) == (ANSWER, "completed")


def test_a_wrong_key_on_a_locked_server(locked_scripted):
    """A1: the message is ours, in words that the SDK shows."""
    openai_checks.check_wrong_key(target_of(locked_scripted, PASSWORD))
    status, answer = locked_scripted.post({"contents": ["a"]}, "/v1/chat/completions", {"Authorization": "Bearer x"})
    assert (status, answer) == (401, {"error": "Unauthorized: invalid or missing password"}), "native bodies, native errors"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory) -> Iterator[ServerProcess]:
    """A server for callers with keys, that gives one answer at a time and whose first request fails in its third step."""
    folder = tmp_path_factory.mktemp("keyed")
    file = folder / "keys"
    file.write_text(
        "# who may call\nalice alice-key\n\nbob sha256:81b637d8fcd2c6da6359e6963113a1170de795e4b725b84d1e0b4cfd9ec58ce9\n"
    )
    file.chmod(0o600)
    flags = ["--api-key-file", str(file), "--max-streams", "1", "--http-workers", "1", "--host", "127.0.0.1"]
    env = {"RWKV_BATCH_PASSWORD": PASSWORD, "RWKV_BATCH_FAULT": "row:1"}
    running = ServerProcess(*flags, folder=folder, env=env, wait=False)
    running.headers = {"Authorization": f"Bearer {PASSWORD}"}
    with running:
        running.wait_ready()
        target = target_of(running, PASSWORD)
        with pytest.raises(openai.APIError, match="not finite"):  # and no [DONE] follows
            list(target.client().chat.completions.create(model="m", messages=HELLO, max_tokens=9, stream=True))
        yield running


def retrying(target: Target, statuses: list[int], *more: Callable) -> openai.OpenAI:
    """A client that retries as it does by default, and notes the statuses that it meets; `more` is called with each reply."""

    def note(response: httpx.Response) -> None:
        statuses.append(response.status_code)

    return target.client(max_retries=2, http_client=openai.DefaultHttpxClient(event_hooks={"response": [note, *more]}))


def test_429_is_retried_after_the_given_time(keyed):
    """A1: the SDK waits as long as Retry-After says and then succeeds."""
    target, statuses = target_of(keyed, PASSWORD), []
    busy = http.client.HTTPConnection(keyed.host, keyed.port, timeout=60)
    client = retrying(target, statuses, lambda response: busy.close())
    body = {"contents": ["a"], "max_tokens": 100_000, "stream": True}
    busy.request("POST", "/v1/chat/completions", json.dumps(body), keyed.headers)
    wait_until(lambda: keyed.get("/stats", keyed.headers)[1]["http"]["answers_in_progress"] == 1, 5, "the stream has begun")
    began = time.monotonic()
    answer = client.chat.completions.create(model="m", messages=HELLO, max_tokens=1)
    assert answer.choices[0].message.content == " w0"
    assert statuses in ([429, 200], [429, 429, 200])  # by how soon the stream's end is noticed
    assert len(statuses) - 1 <= time.monotonic() - began < 5.0 * PATIENCE


@pytest.mark.long
def test_503_is_retried_after_the_given_time(folder):
    """A1: the engine is lost while it works, comes back, and the SDK's second try succeeds."""
    statuses: list[int] = []
    with ServerProcess("--http-workers", "1", folder=folder, env={"RWKV_BATCH_FAULT": "crash:2"}) as running:
        client = retrying(target_of(running), statuses)
        for _ in range(2):
            assert client.completions.create(model="m", prompt="a", max_tokens=8).choices[0].text.startswith(" w0")
        assert statuses == [200, 503, 200]


def test_keys(keyed):
    """Several keys in every header that clients use; what administers needs the password; nothing shows a key."""
    body = {"messages": HELLO, "max_tokens": 2}
    for headers in (
        {"Authorization": "Bearer alice-key"}, {"X-API-Key": "alice-key"}, {"api-key": "bob"}, keyed.headers,
        {"Authorization": "Bearer bob", "X-API-Key": "bob", "api-key": "bob"},
    ):  # fmt: skip
        assert keyed.post(body, headers=headers)[0] == 200, headers
    for headers in (
        {}, {"Authorization": "Bearer carol"}, {"Authorization": "Bearer alice-key", "X-API-Key": "bob"},
        {"Authorization": "Bearer 81b637d8fcd2c6da6359e6963113a1170de795e4b725b84d1e0b4cfd9ec58ce9"},
    ):  # fmt: skip
        assert keyed.post(body, headers=headers)[0] == 401, headers
    for path in ("/stats", "/metrics", "/v1/server/status"):
        assert keyed.get(path, {"Authorization": "Bearer alice-key"})[0] == 403
        assert keyed.get(path, keyed.headers)[0] == 200
    assert keyed.post({}, "/v1/server/stop", {"Authorization": "Bearer bob"})[0] == 403
    assert "key=alice" in keyed.output
    assert "alice-key" not in keyed.output
    for pid in (*keyed.children("http"), *keyed.children("engine")):
        for name in ("cmdline", "environ"):
            with open(f"/proc/{pid}/{name}", "rb") as opened:
                assert b"alice-key" not in opened.read()


@pytest.mark.long
def test_each_key_has_its_own_sessions_and_prefixes(scripted_checkpoint, folder):
    """With --isolate; and a header binds a chat to a session (A9)."""
    flags = ["--isolate", "--session-header", "X-OpenWebUI-Chat-Id", "--http-workers", "1", "--threads", "1"]
    env = {"RWKV_BATCH_PASSWORD": PASSWORD, "RWKV_BATCH_API_KEYS": "alice=one,bob=two"}
    running = ServerProcess(*flags, "--host", "127.0.0.1", model=scripted_checkpoint, folder=folder, env=env, wait=False)
    running.headers = {"Authorization": f"Bearer {PASSWORD}"}
    with running:
        running.wait_ready()
        alice, bob = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
        body = {"messages": HELLO, "max_tokens": 2}
        assert running.post({**body, "session_id": "s"}, headers=alice)[0] == 200
        seen = [running.post({}, "/state/status", headers)[1]["total_sessions"] for headers in (alice, bob, running.headers)]
        assert seen == [1, 0, 0]
        assert running.post({"session_id": "s"}, "/state/delete", bob)[0] == 404
        first = running.post({"input": "Hello!"}, "/v1/responses", alice)[1]["id"]
        assert running.post({"input": "x", "previous_response_id": first}, "/v1/responses", bob)[0] == 404
        assert running.post({"input": "x", "previous_response_id": first}, "/v1/responses", alice)[0] == 200
        assert running.post(body, headers={**alice, "x-openwebui-chat-id": "a chat"})[0] == 200
        assert "a chat" in str(running.post({}, "/state/status", alice)[1])
        long = {"messages": [{"role": "system", "content": "Be kind. " * 300}, *HELLO], "max_tokens": 2}
        cached = []
        for headers in (alice, alice, bob):
            answer = running.post(long, headers=headers)[1]
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
        assert cached == [False, True, False]


def test_a_given_id_can_be_stopped(server):
    """/v1/server/stop takes the caller's own X-Request-Id."""
    target, answers = target_of(server), []
    body = {"messages": HELLO, "max_tokens": 5000}
    call = threading.Thread(
        target=lambda: answers.append(target.request("POST", "/v1/chat/completions", body, {"X-Request-Id": "mine"}))
    )
    call.start()
    wait_until(lambda: server.engine_stats()["requests_running"] > 0, 5, "it runs")
    assert len(target.post("/v1/server/stop", {"request_id": "mine"})["requests"]) == 1
    call.join()
    status, answer, headers = answers[0]
    assert (status, answer["error"]["code"], headers["x-should-retry"]) == (409, "cancelled", "false")
    assert headers["x-request-id"] == "mine"


def test_the_scripts_run(checked):
    """They exit with 0 where all is right, and say so."""
    for checks in (openai_checks.ADAPTER[4:5], openai_checks.ROUTES[7:8]):
        assert openai_checks.run(checks, checked) == 0
    assert openai_checks.run([openai_checks.check_wrong_key], Target("http://127.0.0.1:1")) == 1


@pytest.mark.long
def test_sdk_over_several_connections(checked):
    """Sixteen calls at once, each with its own seed, give what each gives alone."""
    client = checked.client()

    def ask(seed: int) -> str:
        return (
            client.chat.completions.create(model="m", messages=HELLO, seed=seed, temperature=2, max_tokens=6)
            .choices[0]
            .message.content
        )

    alone = [ask(seed) for seed in range(4)]
    together: dict[int, str] = {}
    threads = [threading.Thread(target=lambda seed=seed: together.update({seed: ask(seed % 4)})) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[seed] for seed in range(16)] == alone * 4


def test_http_keeps_alive(checked):
    """One connection for many calls, as the SDK uses it."""
    with httpx.Client(base_url=checked.url) as client:
        for _ in range(3):
            assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
