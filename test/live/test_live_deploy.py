"""The recipes of deploy/: proxies in front of a real server, the service's unit, what the image holds.

The shipped files are run as they are but for ports, paths, users and time-outs, which are shortened.
"""

import ast
import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import PATIENCE, ROOT, ServerProcess, wait_until

from routes import ROUTES
from rwkv_batch.config import Config
from rwkv_batch.config_sources import load, names

DEPLOY = ROOT / "deploy"
CHAT = "/v1/chat/completions"
PASSWORD = "never in a log"
HEAD = f"Host: x\r\nAuthorization: Bearer {PASSWORD}\r\n".encode()
BODY = b'{"contents":["hi"],"max_tokens":2}'
LONG = {"contents": ["a"], "max_tokens": 100_000}
SHORT = 1  # s, what the recipes' time-outs become
PROXIES = ("nginx", "haproxy")


def program(name: str) -> str:
    """A program's path, where packages put it; skips the test without it."""
    path = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Proxy:
    """A recipe that runs as an ordinary process; `with` stops it."""

    def __init__(self, name: str, folder: Path, backend: int, tls: Path | None = None):
        self.name = name
        self.port = free_port()
        self.log = folder / f"{name}.log"
        command = (self.nginx if name == "nginx" else self.haproxy)(program(name), folder, backend, tls)
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        wait_until(self.listens, 10, f"{name} listens: {self.log.read_text()}")

    def nginx(self, path: str, folder: Path, backend: int, tls: Path | None) -> list[str]:
        text = (DEPLOY / "nginx.conf").read_text()
        if tls:
            text = text.replace("    listen 8080;\n", "").replace("# listen 443", f"listen 127.0.0.1:{self.port}")
            text = re.sub(r"# (ssl_certificate(?:_key)?) \S+;", rf"\1 {tls};", text)
        text = text.replace("listen 8080", f"listen 127.0.0.1:{self.port}").replace("127.0.0.1:8000", f"127.0.0.1:{backend}")
        text = text.replace("/run/", f"{folder}/").replace("/var/log/nginx/rwkv_batch_error.log", "stderr")
        text = text.replace("/var/log/nginx/rwkv_batch_access.log", str(self.log)).replace("auto;", "1;")
        text = re.sub(r"(client_header_timeout|client_body_timeout|send_timeout) \d+s", rf"\1 {SHORT}s", text)
        folders = [f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
        target = folder / "nginx.conf"
        target.write_text(text.replace("http {", "http {\n  " + " ".join(folders)))
        as_root = "user root; " if os.getuid() == 0 else ""  # who runs the test may enter its folders
        return [path, "-c", str(target), "-g", as_root + "daemon off;"]

    def haproxy(self, path: str, folder: Path, backend: int, tls: Path | None) -> list[str]:
        text = (DEPLOY / "haproxy.cfg").read_text()
        if tls:
            text = text.replace("  bind :8080\n", "").replace("# bind :443", f"bind 127.0.0.1:{self.port}")
            text = text.replace("/etc/ssl/private/rwkv_batch.pem", str(tls))
        text = text.replace("bind :8080", f"bind 127.0.0.1:{self.port}").replace("127.0.0.1:8000", f"127.0.0.1:{backend}")
        text = re.sub(r"^  (user|group) .*\n", "", text, flags=re.MULTILINE)
        text = text.replace("log /dev/log local0", "log stdout format raw local0")
        text = re.sub(r"timeout (http-request|client) \d+s", rf"timeout \1 {SHORT}s", text).replace(
            "body time 10s", f"body time {SHORT}s"
        )
        target = folder / "haproxy.cfg"
        target.write_text(text)
        return [path, "-db", "-f", str(target)]

    def listens(self) -> bool:
        socket.create_connection(("127.0.0.1", self.port), 5).close()
        return True

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)

    def open(self, data: bytes) -> socket.socket:
        """Send something; the connection stays open."""
        connection = socket.create_connection(("127.0.0.1", self.port), 10)
        connection.sendall(data)
        return connection

    def exchange(self, data: bytes) -> bytes:
        """Send something and return all that comes back until the other side closes."""
        with self.open(data) as connection:
            return read_all(connection)

    def call(self, method: str, path: str, body: object = None, source: str = "127.0.0.1", password: bool = True):
        """(status, parsed JSON or text, headers in lower case)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30, source_address=(source, 0))
        with contextlib.closing(connection):
            headers = {"Authorization": f"Bearer {PASSWORD}"} if password else {}
            connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
            reply = connection.getresponse()
            text, found = reply.read().decode(), {name.lower(): value for name, value in reply.getheaders()}
            return reply.status, json.loads(text) if "json" in found.get("content-type", "") else text, found


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(60)
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            data += part
    return data


def post(body: object, path: str = CHAT, more: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\n{more}Content-Length: {len(data)}\r\n".encode() + HEAD + b"\r\n" + data


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.fixture(scope="module")
def backend(tmp_path_factory) -> Iterator[ServerProcess]:
    flags = ("--host", "127.0.0.1", "--http-workers", "1", "--heartbeat", "0.05", "--ping-seconds", "60")
    folder, env = tmp_path_factory.mktemp("backend"), {"RWKV_BATCH_PASSWORD": PASSWORD}
    server = ServerProcess(*flags, folder=folder, env=env, step_ms=20, wait=False)
    server.headers = {"Authorization": f"Bearer {PASSWORD}"}
    with server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module", params=PROXIES)
def proxy(request, backend, tmp_path_factory) -> Iterator[Proxy]:
    with Proxy(request.param, tmp_path_factory.mktemp(request.param), backend.port) as running:
        yield running


def test_a_stream_comes_token_by_token(proxy):
    body = {"contents": ["a"], "max_tokens": 50, "chunk_size": 1, "stream": True}
    with proxy.open(post(body)) as connection:
        connection.settimeout(60)
        data, arrivals = b"", 0
        while b"[DONE]" not in data:
            part = connection.recv(65536)
            assert part, data
            data += part
            arrivals += 1
    assert status_of(data) == 200
    assert data.count(b'"content": " w') == 50
    assert arrivals >= 20  # of a second of tokens; five where a proxy holds them back


def test_a_silent_answer_is_waited_for(proxy):
    body = {"contents": ["a"], "max_tokens": 100, "chunk_size": 1000, "stream": True}
    with proxy.open(post(body, more="Connection: close\r\n")) as connection:
        answer = read_all(connection)
    assert b" w99" in answer
    assert b"[DONE]" in answer


def test_an_answer_that_the_server_cuts_off_is_cut_off(proxy, backend):
    """A whole answer that fails after its first second has said 200 already."""
    name = f"cut-{proxy.name}"
    with proxy.open(post(LONG, more=f"X-Request-Id: {name}\r\n")) as connection:
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 200
        stopped = backend.request("POST", "/v1/server/stop", {"request_id": name}, backend.headers)[1]
        assert stopped["stopped"]
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()


def test_who_leaves_frees_the_rows(proxy, backend):
    calls = [{**LONG, "stream": stream} for stream in (True, True, False, False)]
    connections = [proxy.open(post(body)) for body in calls]
    wait_until(lambda: backend.engine_stats()["sequences_running"] == 4, 10, "four rows run")
    for number, connection in enumerate(connections):
        if number % 2:  # with RST
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    wait_until(lambda: backend.engine_stats()["sequences_running"] == 0, 5, "no row runs")


def test_large_bodies_are_refused_before_the_server_hears_of_them(proxy, backend):
    head = b"POST /large HTTP/1.1\r\n" + HEAD
    with proxy.open(head + b"Content-Length: %d\r\n\r\n" % (33 * 2**20)) as connection:
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, json.loads(answer.read())) == (413, {"error": "the body is too large"})
    with proxy.open(head + b"Transfer-Encoding: chunked\r\n\r\n") as connection:
        with contextlib.suppress(ConnectionError):
            for _ in range(33):
                connection.sendall(b"100000\r\n" + b"a" * 2**20 + b"\r\n")
        with contextlib.suppress(ConnectionError):
            assert status_of(connection.recv(100)) in (411, 413)
    assert "/large" not in backend.output


def test_a_large_body_arrives_whole_and_is_asked_for(proxy):
    """curl waits for 100 before it sends so much."""
    text = "a" * 1_000_000
    body = json.dumps({"text": text}).encode()
    head, _, body = post(body, "/v1/tokens/count", "Expect: 100-continue\r\nConnection: close\r\n").partition(b"\r\n\r\n")
    with proxy.open(head + b"\r\n\r\n") as connection:
        connection.settimeout(60)
        assert connection.recv(1000).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        answer = read_all(connection)
    assert status_of(answer) == 200
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"tokens": len(text)}


def test_large_heads_are_refused_before_the_server_hears_of_them(proxy, backend):
    answer = proxy.exchange(b"GET /wide HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 60_000 + b"\r\n\r\n")
    assert 400 <= status_of(answer) < 500
    assert "/wide" not in backend.output


def test_slow_heads_and_bodies_are_given_up(proxy, backend):
    connections = [
        proxy.open(b"GET /slow-head HTTP/1.1\r\nX: "),
        proxy.open(b"POST /slow-body HTTP/1.1\r\n" + HEAD + b"Content-Length: 1000\r\n\r\n{"),
    ]
    began = time.monotonic()
    for connection in connections:
        with connection:
            answer = read_all(connection)
        assert answer == b"" or status_of(answer) == 408
    assert time.monotonic() - began < 10 * SHORT * PATIENCE
    assert "/slow-" not in backend.output


CHUNKED = b"POST %s HTTP/1.1\r\n" + HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"%x\r\n" % len(BODY) + BODY
HARMFUL = {  # each of them aborts an HTTP process of the server, if it gets through
    "trailers": CHUNK + b"\r\n0\r\nX-Foo: bar\r\n\r\n",
    "bad size": b"zz\r\n" + BODY,
    "no line end": CHUNK + b"XX0\r\n\r\n",
    "only line feeds": CHUNK.replace(b"\r", b"") + b"\n0\n\n",
}


@pytest.mark.parametrize("kind", HARMFUL)
def test_chunks_that_the_server_cannot_bear_do_not_reach_it(proxy, backend, kind):
    processes = backend.children("http")
    path = f"/harm-{proxy.name}-{kind.replace(' ', '-')}"
    answer = proxy.exchange(CHUNKED % path.encode() + HARMFUL[kind])
    # nginx takes the chunks apart, and what it can read arrives as one body; HAProxy wants a length.
    readable = proxy.name == "nginx" and kind in ("trailers", "only line feeds")
    assert status_of(answer) in ((404, 400) if readable else (400, 411))
    assert backend.post(BODY, headers=backend.headers)[0] == 200
    assert backend.children("http") == processes


def test_a_chunked_body_works_or_is_asked_for_its_length(proxy):
    answer = proxy.exchange(CHUNKED % CHAT.encode() + CHUNK + b"\r\n0\r\n\r\n")
    assert status_of(answer) == (200 if proxy.name == "nginx" else 411)


def test_http_2_and_connect_stay_outside(proxy, backend):
    """HTTP/2's bodies need no length, and their trailers would become those of chunks."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
    assert proxy.exchange(preface).startswith((b"HTTP/1.1 400", b"<html>"))
    assert status_of(proxy.exchange(b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n")) in (400, 405)
    ask = "Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
    assert status_of(proxy.exchange(post(BODY, more=ask))) == 200


def test_forms_and_websockets_are_answered_before_the_server_would_not(proxy):
    kind = "Connection: close\r\nContent-Type: multipart/form-data\r\n"
    assert status_of(proxy.exchange(post(BODY, more=kind))) == 415
    upgrade = (
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + b"A" * 22 + b"==\r\n"
    )
    with proxy.open(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n") as connection:
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["status"]) == (200, "ok")


def test_translation_asks_callers_behind_a_proxy_for_the_password(proxy, backend):
    body = {"source_lang": "en", "target_lang": "zh-CN", "text_list": ["Hello"]}
    path = "/translate/v1/batch-translate"
    assert backend.request("POST", path, body)[0] == 200
    assert proxy.call("POST", path, body, password=False)[0] == 401
    assert proxy.call("POST", path, body)[0] == 200


def test_the_owners_routes_are_for_this_machine_only(proxy):
    for method, path in (("GET", "/metrics"), ("GET", "/stats"), ("GET", "/v1/server/status"), ("POST", "/big_batch/clean")):
        assert proxy.call(method, path)[0] == 200
        assert proxy.call(method, path, source="127.0.0.2")[0] == 403
        assert proxy.call(method, path, password=False)[0] == 401
    assert proxy.call("GET", "/%6detrics", source="127.0.0.2")[0] in (403, 404)
    assert proxy.call("GET", "/healthz", source="127.0.0.2")[0] == 200


def test_secrets_in_urls_stay_out_of_the_proxys_log(proxy):
    body = {"source_lang": "en", "target_lang": "zh-CN", "text_list": ["Hello"]}
    path = f"/translate/v1/batch-translate?token={PASSWORD.replace(' ', '%20')}"
    assert proxy.call("POST", path, body, password=False)[0] == 200
    wait_until(lambda: "/translate/v1/batch-translate" in proxy.log.read_text(), 5, "a line in the log")
    assert "token=" not in proxy.log.read_text()


@pytest.mark.parametrize("name", PROXIES)
def test_a_server_that_is_not_there_is_503_in_json(name, tmp_path):
    with Proxy(name, tmp_path, free_port()) as proxy:
        status, answer, headers = proxy.call("GET", "/healthz")
    assert (status, answer) == (503, {"error": "the server cannot be reached"})
    assert int(headers["retry-after"]) > 0


@pytest.mark.parametrize("name", PROXIES)
def test_the_lines_for_tls_work(name, backend, tmp_path):
    pem = tmp_path / "both.pem"
    make = [program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    make += ["-subj", "/CN=localhost", "-days", "2", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(make, cwd=tmp_path, check=True, capture_output=True)
    pem.write_text((tmp_path / "cert.pem").read_text() + (tmp_path / "key.pem").read_text())
    context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        Proxy(name, tmp_path, backend.port, tls=pem) as proxy,
        proxy.open(b"") as connection,
        context.wrap_socket(connection, server_hostname="localhost") as secure,
    ):
        assert secure.selected_alpn_protocol() in ("http/1.1", None)
        secure.sendall(post(BODY, more="Connection: close\r\n"))
        assert status_of(read_all(secure)) == 200


def test_the_recipes_agree_with_the_settings():
    defaults = Config()
    nginx, haproxy = (DEPLOY / "nginx.conf").read_text(), (DEPLOY / "haproxy.cfg").read_text()
    assert f"client_max_body_size {defaults.max_body_mib}m;" in nginx
    assert f"gt {defaults.max_body_bytes} }}" in haproxy
    for silence in (re.search(r"proxy_read_timeout (\d+)s", nginx), re.search(r"timeout server (\d+)s", haproxy)):
        assert int(silence[1]) >= 4 * defaults.ping_seconds
    stop = int(re.search(r"TimeoutStopSec=(\d+)", (DEPLOY / "rwkv-batch.service").read_text())[1])
    assert stop >= defaults.drain_seconds + 3 + defaults.engine_stop_seconds
    admin = [route.path for route in ROUTES if route.access == "admin"]
    kept = re.search(r"location ~ (\S+) {", nginx)[1]
    assert [path for path in admin if not re.match(kept, path)] == []
    kept = tuple(re.search(r"path,url_dec -m beg (.*?) }", haproxy)[1].split())
    assert [path for path in admin if not path.startswith(kept)] == []


@pytest.fixture
def unit(tmp_path) -> Path:
    """The unit, with a Python that is there."""
    path = tmp_path / "rwkv-batch.service"
    text = (DEPLOY / "rwkv-batch.service").read_text()
    assert text.count("/opt/rwkv_batch/.venv/bin/python ") == 1
    path.write_text(text.replace("/opt/rwkv_batch/.venv/bin/python ", f"{sys.executable} "))
    return path


def exposure(unit: Path) -> float:
    command = [program("systemd-analyze"), "security", "--offline=yes", "--no-pager", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "nknown" in done.stderr or "nrecognized" in done.stderr:
        pytest.skip("this systemd-analyze has no --offline")
    return float(re.search(r"exposure level .*: ([\d.]+)", done.stdout)[1])


def verify(unit: Path) -> str:
    done = subprocess.run([program("systemd-analyze"), "verify", str(unit)], capture_output=True, text=True, timeout=60)
    lines = [line for line in done.stderr.splitlines() if unit.name in line]
    assert done.returncode == 0, done.stderr
    return "\n".join(lines)


def test_the_unit_is_right_and_has_few_rights(unit):
    assert verify(unit) == ""
    assert exposure(unit) <= 1.5


def test_the_unit_beside_a_gpu(unit):
    folder = unit.with_name(unit.name + ".d")
    folder.mkdir()
    shutil.copy(DEPLOY / "rwkv-batch-gpu.conf", folder / "gpu.conf")
    assert verify(unit) == ""


def test_the_units_command_line_and_environment_are_settings():
    text = (DEPLOY / "rwkv-batch.service").read_text()
    flags = shlex.split(re.search(r"^ExecStart=\S+ \S+ (.*)$", text, re.MULTILINE)[1])
    assert load(flags, {}).host == "127.0.0.1"


# --- the image; there may be no engine to build it with ---


def instructions() -> list[tuple[str, str]]:
    """(name, rest) of each instruction, continued lines joined."""
    lines = [line for line in (DEPLOY / "Containerfile").read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def last_stage() -> list[tuple[str, str]]:
    found = instructions()
    return found[max(index for index, (name, _) in enumerate(found) if name == "FROM") :]


def test_the_image_has_a_stage_for_each_device():
    stages = [rest.split() for name, rest in instructions() if name == "FROM"]
    names = [words[2] for words in stages]
    assert {"cpu", "cuda"} <= set(names)
    for index, words in enumerate(stages):
        assert words[0].startswith("docker.io/") or words[0] in (*names[:index], "${DEVICE}")
    assert ("ARG", "DEVICE=cpu") in instructions()


def test_the_images_server_is_not_root():
    stage = last_stage()
    assert [name for name, _ in stage].index("USER") < [name for name, _ in stage].index("ENTRYPOINT")
    user = [rest for name, rest in stage if name == "USER"]
    assert len(user) == 1
    assert int(user[0]) > 0
    assert f"--uid {user[0]} " in next(rest for name, rest in stage if name == "RUN")


@pytest.fixture
def image(tmp_path) -> Path:
    """A folder that holds what the image's server stage holds."""
    folder = tmp_path / "image"
    folder.mkdir()
    for *sources, target in (rest.split() for name, rest in instructions() if name == "COPY"):
        for source in sources:
            assert (ROOT / source).exists(), source
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, folder / target)
    return folder


def test_the_image_holds_whatever_its_modules_import(image):
    imported = set()
    for path in image.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    ours = {path.stem for path in ROOT.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert {"app", "rwkv_batch", "routes"} <= ours
    assert imported & ours <= {path.stem for path in image.iterdir()}


@pytest.mark.parametrize("engine", ["stand-in", pytest.param("demo", marks=pytest.mark.long)])
def test_what_the_image_holds_serves(image, engine, tmp_path):
    """Only what is copied, with the image's environment and the image's health check."""
    pairs = dict(pair.split("=", 1) for name, rest in last_stage() if name == "ENV" for pair in rest.split())
    run = Path(f"/tmp/rb{os.getpid()}")
    run.mkdir(mode=0o700)
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("RWKV_BATCH_", "ROBYN_"))}
    environ |= {key: value.replace("/var/lib/rwkv_batch", str(tmp_path)) for key, value in pairs.items()}
    environ |= {"XDG_RUNTIME_DIR": str(run), "TMPDIR": str(run), "XDG_CACHE_HOME": str(tmp_path)}
    environ |= {"RWKV_BATCH_HOST": "127.0.0.1", "RWKV_BATCH_PORT": str(free_port()), "RWKV_BATCH_THREADS": "1"}
    environ |= {"RWKV_BATCH_FAKE_ENGINE": "5"} if engine == "stand-in" else {}
    assert {key.removeprefix("RWKV_BATCH_").lower() for key in pairs if key.startswith("RWKV_BATCH_")} <= set(names())
    check = json.loads(next(rest for name, rest in last_stage() if name == "HEALTHCHECK").partition("CMD ")[2])
    check[0] = sys.executable
    command = json.loads(next(rest for name, rest in last_stage() if name == "ENTRYPOINT"))
    command = [sys.executable, command[1].replace("/opt/rwkv_batch", str(image)), *command[2:]]
    assert subprocess.run(check, env=environ, capture_output=True).returncode != 0
    with open(tmp_path / "log", "wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ, cwd=tmp_path)
    try:
        port = environ["RWKV_BATCH_PORT"]
        wait_until(lambda: f":{port}  " in (tmp_path / "log").read_text(), 60, "the server's address")
        wait_until(lambda: subprocess.run(check, env=environ, capture_output=True).returncode == 0, 10, "a healthy server")
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/web/index.html")
            assert connection.getresponse().status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(run, ignore_errors=True)
