"""The command `batch`, as far as it can be seen without starting it: lines in, lines out, and how it goes on."""

import asyncio
import io
import json
import os
import time
from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routes.http.replies import Response
from routes.offline import answer_file, pipeline, process, request_file
from routes.offline.answer_file import AnswerFile, answered, unanswered
from routes.offline.pipeline import MORE_ROWS, ROWS_PER_SLOT, Pipeline
from routes.offline.request_file import ENVELOPE_BYTES, RequestFile, UnusableLine, check_body, id_of, read_call
from rwkv_batch.config import Config
from rwkv_batch.errors import EngineFailed, InvalidRequest, Unavailable, UsageError
from rwkv_batch.server import batch_command

CONFIG = Config()
OK = Response(b'{"text": "one\\ntwo \xe2\x80\xa8 three"}')


def request_line(custom_id, url="/v1/completions", **more) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "a"}, **more}).encode() + b"\n"


def requests_of(*lines: bytes, max_bytes: int = CONFIG.max_body_bytes) -> RequestFile:
    return RequestFile(io.BytesIO(b"".join(lines)), max_bytes)


def answer_lines(*ids: str) -> bytes:
    return b"".join(answered(name, "r", OK) for name in ids)


@pytest.fixture
def resume(tmp_path):
    """Opens an OUT with this content for an IN with these lines; closes it at the end."""
    opened = []

    def run(content: bytes, *lines: bytes) -> AnswerFile:
        path = tmp_path / "out.jsonl"
        path.write_bytes(content)
        opened.append(AnswerFile(path))
        opened[-1].resume(requests_of(*lines))
        return opened[-1]

    yield run
    for file in opened:
        file.close()


def test_lines_are_counted_as_an_editor_does():
    requests = requests_of(b"\xef\xbb\xbf" + request_line("a"), b"\n", b"  \r\n", request_line("b"), request_line("c")[:-1])
    assert [(line.number, read_call(line, CONFIG).custom_id) for line in requests] == [(1, "a"), (4, "b"), (5, "c")]


def test_a_line_that_is_too_long_is_passed_over_without_reading_it_whole():
    long = b'"' + b"x" * (5 * 2**20) + b'"\n'
    lines = list(requests_of(request_line("a"), long, request_line("b"), max_bytes=2**20))
    assert [line.number for line in lines] == [1, 2, 3]
    assert lines[1].data is None
    with pytest.raises(UnusableLine, match="line 2: it is over"):
        read_call(lines[1], CONFIG)
    assert len(next(requests_of(long, max_bytes=len(long) - ENVELOPE_BYTES)).data) == len(long)


def test_ids_that_come_again_are_counted():
    requests = requests_of(*map(request_line, ["a", "b", "a", "c", "b", "a"]), request_line(7), request_line(7), b"{\n", b"{\n")
    assert len(list(requests)) == 10
    assert (requests.num_repeated, requests.first_repeated.number) == (3, 3)


@pytest.mark.parametrize(
    ("data", "code", "custom_id"),
    [
        (b"no json", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b'{"custom_id": "a"', "invalid_json_line", None),
        (b"[" * 100, "invalid_json_line", None),
        (request_line(5), "invalid_custom_id", None),
        (b'{"url": "/v1/completions", "body": {}}', "invalid_custom_id", None),
        (request_line("a", method="GET"), "invalid_method", "a"),
        (request_line("a", url="/v1/images"), "invalid_url", "a"),
        (request_line("a", url=["/v1/completions"]), "invalid_url", "a"),
        (request_line("a", body=[1]), "invalid_body", "a"),
    ],
)
def test_what_is_no_request_gets_a_line_that_says_why(data, code, custom_id):
    (line,) = requests_of(data)
    with pytest.raises(UnusableLine) as error:
        read_call(line, CONFIG)
    answer = json.loads(unanswered(error.value))
    assert (answer["custom_id"], answer["response"], answer["error"]["code"]) == (custom_id, None, code)
    assert answer["error"]["message"].startswith("line 1: ")


@pytest.mark.parametrize("name", ["stream", "session_id", "previous_response_id"])
def test_streams_and_sessions_are_refused_by_name(name):
    (line,) = requests_of(request_line("a", body={"prompt": "a", name: "x"}))
    with pytest.raises(InvalidRequest) as error:
        check_body(read_call(line, CONFIG))
    assert error.value.param == name


def test_responses_are_not_stored():
    (line,) = requests_of(request_line("a", url="/v1/responses", body={"input": "a", "store": True}))
    call = read_call(line, CONFIG)
    check_body(call)
    assert call.body["store"] is False


def test_an_answer_is_one_line_with_the_document_as_it_is():
    line = answered('"é\n', "id", OK)
    assert line.count(b"\n") == 1
    answer = json.loads(line)
    assert answer.pop("id").startswith("batch_req_")
    assert answer == {
        "custom_id": '"é\n',
        "response": {"status_code": 200, "request_id": "id", "body": json.loads(OK.body)},
        "error": None,
    }


def test_answers_keep_the_order_of_the_requests(tmp_path):
    path = tmp_path / "out"
    answers = AnswerFile(path)
    answers.put(2, b"two\n", failed=True)
    answers.put(1, b"one\n", failed=False)
    assert (answers.num_lines, answers.num_held, path.read_bytes()) == (0, 8, b"")
    answers.put(0, b"nil\n", failed=False)
    answers.sync()
    assert (answers.num_lines, answers.num_errors, answers.num_held, path.read_bytes()) == (3, 1, 0, b"nil\none\ntwo\n")
    answers.close()


@given(cut=st.integers(0, 3 * len(answer_lines("a"))), nulls=st.integers(0, 3))
def test_whatever_a_crash_leaves_is_cut_back_to_whole_lines(tmp_path_factory, cut, nulls):
    """A kill leaves part of a line, a power cut perhaps zeros behind it."""
    whole = answer_lines("a", "b", "c")
    path = tmp_path_factory.mktemp("cut") / "out"
    path.write_bytes(whole[:cut] + b"\0" * nulls)
    answers, requests = AnswerFile(path), requests_of(*map(request_line, "abcd"))
    answers.resume(requests)
    kept = whole[:cut].count(b"\n")
    assert answers.num_lines == kept
    assert read_call(next(requests), CONFIG).custom_id == "abcd"[kept]
    answers.put(kept, b"next\n", failed=False)
    answers.close()
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:kept]) + b"next\n"


def test_errors_of_earlier_runs_count(resume):
    failed = answered("a", "r", Response(b"{}", 400))
    (line,) = requests_of(b"{\n")
    with pytest.raises(UnusableLine) as error:
        read_call(line, CONFIG)
    answers = resume(failed + unanswered(error.value) + answer_lines("c"), request_line("a"), b"{\n", request_line("c"))
    assert (answers.num_lines, answers.num_errors) == (3, 2)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"my thesis\n", "something else"),
        (b"my thesis", "something else"),
        (b'{"id": 1}\n', "something else"),
        (answer_lines("a") + b"edited\n" + answer_lines("c"), "line 2 is something else"),
        (answer_lines("a", "x"), "answer 2 is not to line 3"),
        (answer_lines("a", "b", "c"), "more answers"),
    ],
)
def test_a_file_of_something_else_stays_as_it_is(resume, tmp_path, content, why):
    with pytest.raises(UsageError, match=why):
        resume(content, request_line("a"), b"\n", request_line("b"))
    assert (tmp_path / "out.jsonl").read_bytes() == content


def test_files_of_another_batch_end_the_process_before_it_asks_the_engine(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(process, "beat", lambda control: None)
    (tmp_path / "in").write_bytes(request_line("a"))
    (tmp_path / "out").write_text("my thesis\n")
    birth = SimpleNamespace(arguments=[str(tmp_path / "in"), str(tmp_path / "out")])
    assert process.run(SimpleNamespace(birth=birth, config=CONFIG, report=lambda event: None)) == 2
    assert "something else" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "my thesis\n"


def test_two_commands_cannot_write_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(answer_file, "LOCK_SECONDS", 0.0)
    first = AnswerFile(tmp_path / "out")
    with pytest.raises(UsageError, match="another command"):
        AnswerFile(tmp_path / "out")
    first.close()
    AnswerFile(tmp_path / "out").close()


def test_the_id_of_a_line_is_read_without_the_rest():
    assert id_of(b'{"body": {"custom_id": "x"}, "custom_id": "y"}') == "y"
    assert [id_of(data) for data in (b"{", b"[]", b'{"custom_id": 7}', b'{"custom_id": "\xff"}', None)] == [None] * 5


def test_files_that_cannot_be_those_of_a_batch_are_refused_before_anything_starts(tmp_path, capsys):
    there = tmp_path / "in.jsonl"
    there.write_text("")
    os.link(there, tmp_path / "link")
    for argv, word in [
        ([], "IN, OUT"),
        ([str(there)], "OUT"),
        ([str(tmp_path / "none"), str(tmp_path / "out")], "cannot open"),
        ([str(there), str(tmp_path / "none" / "out")], "cannot open"),
        ([str(there), str(tmp_path)], "cannot open"),
        ([str(there), str(tmp_path / "link")], "the same file"),
        ([str(there), str(tmp_path / "out"), "more"], "argument 3"),
        ([str(there), str(tmp_path / "out"), "--prot", "1"], "--port"),
    ]:
        assert batch_command.answer_file(argv, {}, ["false"]) == 2
        assert word in capsys.readouterr().err


def test_crashes_that_found_a_line_do_not_count():
    supervisor = object.__new__(batch_command.BatchSupervisor)
    engine = SimpleNamespace(crashes=deque([1.0, 2.0, 3.0]))
    supervisor.engines = {0: engine}
    supervisor.hear(None, {"event": "found"})
    assert not engine.crashes


class SlowApp:
    """Answers each request with `size` bytes after a turn of the loop, the first one when it is let."""

    def __init__(self, size: int, window_mib: int):
        self.client = SimpleNamespace(ready=True, info=SimpleNamespace(slots=4), links=[None])
        self.config = Config(batch_window_mib=window_mib, batch_sync_seconds=0.0)
        self.models = SimpleNamespace(default=SimpleNamespace(tokenizer=object()))
        self.num_rows = self.begun = self.most = 0
        self.size = size
        self.first = asyncio.Event()

    async def answer(self, context) -> Response:
        self.begun += 1
        self.num_rows += 1
        self.most = max(self.most, self.num_rows)
        await (self.first.wait() if context.body["prompt"] == "0" else asyncio.sleep(0.001))
        self.num_rows -= 1
        return Response(b'"' + b"x" * self.size + b'"')


@pytest.mark.parametrize(("size", "window_mib", "most_begun"), [(100_000, 1, 60), (10, 1, 500)])
def test_one_slow_line_holds_up_the_others_only_when_the_window_is_full(tmp_path, monkeypatch, size, window_mib, most_begun):
    async def run() -> tuple[int, int]:
        app = SlowApp(size, window_mib)
        monkeypatch.setitem(request_file.HANDLERS, "/v1/completions", app.answer)
        requests = requests_of(*(request_line(str(index), body={"prompt": str(index)}) for index in range(500)))
        progress = SimpleNamespace(begin=lambda app: None, show=lambda *args: None)
        running = asyncio.create_task(Pipeline(app, requests, answers, progress).run())
        begun = -1
        while begun != app.begun or not begun:
            begun = app.begun
            await asyncio.sleep(0.1)
        assert answers.num_lines == 0
        app.first.set()
        assert await running
        return begun, app.most

    answers = AnswerFile(tmp_path / "out")
    begun, most = asyncio.run(run())
    answers.close()
    assert begun <= most_begun
    assert begun >= 10
    assert most <= ROWS_PER_SLOT * 4 + MORE_ROWS
    ids = [json.loads(line)["custom_id"] for line in (tmp_path / "out").read_bytes().splitlines()]
    assert ids == [str(index) for index in range(500)]


class FragileApp(SlowApp):
    """Answers at once, but all that it works on is lost when something holds `poison`; where it `says` so, it takes nothing for
    a while."""

    def __init__(self, poison: set[str], *, says: bool):
        super().__init__(1, 1)
        self.poison, self.says, self.losses = poison, says, []
        self._open: list[tuple[str, asyncio.Event, object]] = []
        self._dead_until = 0.0

    async def answer(self, context) -> Response:
        name, lost = context.body["prompt"], asyncio.Event()
        context.ticket = SimpleNamespace(failure=None)
        if time.monotonic() < self._dead_until:
            context.ticket.failure = SimpleNamespace(code="engine_dead")
            raise Unavailable("the engine has failed", code="engine_dead")
        self._open.append((name, lost, context.ticket))
        await asyncio.sleep(0.002)
        if name in self.poison and not lost.is_set():
            self.losses.append({other for other, *_ in self._open})
            for _, other, ticket in self._open:
                ticket.failure = SimpleNamespace(code="engine_failed" if self.says else "engine_lost")
                other.set()
            self._open = []
            self._dead_until = time.monotonic() + 0.02 * self.says
        if lost.is_set():
            raise EngineFailed("a step failed") if self.says else Unavailable("the engine was lost", code="engine_lost")
        self._open.remove((name, lost, context.ticket))
        return OK


@pytest.mark.parametrize(
    ("poison", "says", "num_found", "most_losses"),
    [
        ({"17"}, False, 1, 3),
        ({"17", "70"}, True, 2, 6),
        ({"3", "17", "18", "70"}, False, 4, 12),
        (set(map(str, range(80))), False, 0, 120),
    ],
)
def test_the_lines_are_found_that_end_the_engine(tmp_path, monkeypatch, poison, says, num_found, most_losses):
    async def run() -> None:
        app = FragileApp(poison, says=says)
        monkeypatch.setitem(request_file.HANDLERS, "/v1/completions", app.answer)
        monkeypatch.setattr(pipeline, "TICK_SECONDS", 0.002)
        requests = requests_of(*(request_line(str(index), body={"prompt": str(index)}) for index in range(80)))
        progress = SimpleNamespace(begin=lambda app: None, show=lambda *args: None)
        assert await Pipeline(app, requests, answers, progress, lambda: found.append(None)).run()
        assert len(app.losses) <= most_losses
        assert {name for losses in app.losses if len(losses) == 1 for name in losses} == poison

    found = []
    answers = AnswerFile(tmp_path / "out")
    asyncio.run(run())
    answers.close()
    assert len(found) == num_found, "each of them, if others are answered"
    for index, line in enumerate((tmp_path / "out").read_bytes().splitlines()):
        answer = json.loads(line)
        assert answer["custom_id"] == str(index)
        assert answer["response"]["status_code"] == (500 if str(index) in poison else 200)
