"""The bodies, orders and answers of the session routes, without a server."""

import asyncio
import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import quiet_robyn  # noqa: F401

from routes.http.context import RequestContext
from routes.http.replies import Response
from routes.native import state
from routes.openai.response_body import ResponseBody
from routes.schemas import validate
from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest, StorageFailed
from rwkv_batch.request import Delta, Failure, Finish, Progress, Request
from rwkv_batch.session_messages import (
    CommitResult,
    Delete,
    Deleted,
    Entry,
    Export,
    Fork,
    Import,
    Page,
    Rewind,
    Session,
    Status,
)

KEPT = CommitResult("s:3", 1, 3, 17, True)


def request_of(kind=state.StateBody, **body) -> Request:
    """The request of a body, tokens being bytes."""
    checked = validate(kind, body)
    return checked.to_request(checked.checked_texts(Config()), "id", Config(), lambda text: list(text.encode()))


def test_the_session_of_a_turn():
    assert request_of(contents=["a"]).session is None
    assert request_of(contents="a", session_id=None).session is None
    assert request_of(contents="a", session_id="会话 1").session == Session(name="会话 1")
    full = request_of(contents="a", session_id="s", expect_version="2", idempotency_key="k")
    assert full.session == Session(name="s", expect_version=2, key="k")
    assert request_of(contents="\n\na", session_id="s").prompts == [[10, 10, 97]], "the engine makes the border"
    assert not request_of(contents="a", session_id="s", use_prefix_cache=False).cache


def test_rows_that_only_start_from_a_session():
    request = request_of(contents=["a", "b"], session_id="s", keep=False)
    assert request.session == Session(name="s", keep=False, must_exist=True)
    assert len(request.prompts) == 2
    new = request_of(contents=["a"], session_id="s", keep=False, expect_version=0)
    assert not new.session.must_exist, "whoever says that there is none does not mistake its name"


def test_nodes_have_longer_names_than_sessions(tmp_path):
    """A dialogue may have a name of 256 bytes; its nodes can be continued and managed all the same."""
    node = "é" * 128 + ":12345"
    assert request_of(contents="a", session_id=node).session.name == node
    for route in (state.delete, state.fork, state.rewind, state.export, state.import_file):
        answer = Deleted(True, 1) if route is state.delete else PAGE
        assert order(route, answer, {"session_id": node, "copies": [node]}, tmp_path, b"x")[1].orders[0].name == node
    for name in ("é" * 128 + "x:1", "é" * 128 + ":x", "é" * 128 + ":" + "1" * 19):
        with pytest.raises(InvalidRequest, match="at most 256 bytes"):
            request_of(contents="a", session_id=name)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"contents": ["a", "b"], "session_id": "s"}, "Server Error: Requst must be single prompt !"),
        ({"contents": ["a", "b"]}, "Server Error: Requst must be single prompt !"),
        ({"contents": ["a", "b"], "keep": False}, "Server Error: Requst must be single prompt !"),
        ({"contents": [], "session_id": "s"}, "Empty prompts list"),
        ({"contents": "a", "session_id": "é" * 129}, "session_id: at most 256 bytes"),
        ({"contents": "a", "session_id": ""}, "session_id: empty"),
        ({"contents": "a", "session_id": 5}, "session_id"),
        ({"contents": "a", "expect_version": 1}, "expect_version: needs a session_id"),
        ({"contents": "a", "idempotency_key": "k"}, "idempotency_key: needs a session_id"),
        ({"contents": "a", "session_id": "s", "expect_version": -1}, "expect_version"),
        ({"contents": "a", "session_id": "s", "idempotency_key": "k" * 256}, "idempotency_key"),
    ],
)
def test_turns_that_are_refused(body, words):
    """Contract 1.9, decision (i)."""
    with pytest.raises(InvalidRequest, match=r"\A(invalid request: )?" + words):
        request_of(**body)
    assert request_of(contents="a", session_id="é" * 128).session.name == "é" * 128


def test_the_node_of_a_dialogue():
    request = request_of(state.DialogueBody, contents="a", session_id="s", dialogue_idx=None)
    assert request.session == Session(name="s", node=0)
    assert request_of(state.DialogueBody, contents="a", session_id="s", dialogue_idx="7").session.node == 7
    for contents in ([], ["a", "b"]):
        with pytest.raises(InvalidRequest, match=r"\AServer Error: Request must be single prompt!\Z"):
            request_of(state.DialogueBody, contents=contents, session_id="s", dialogue_idx=0)
    with pytest.raises(InvalidRequest, match="dialogue_idx"):
        request_of(state.DialogueBody, contents="a", session_id="s", dialogue_idx=-1)


# --- answers ---


def steps(kept: CommitResult | None, reason: str = "stop") -> list[Progress]:
    finish = Finish(0, reason, 3, 2, None if reason == "stop" else "broken", cached_tokens=0, session=kept)
    return [Progress("r", [Delta(0, "a", 1)], []), Progress("r", [Delta(0, "b", 1)], [finish])]


def events_of(chunks, kept: CommitResult | None, reason: str = "stop") -> list:
    data = b"".join(filter(None, map(chunks.feed, steps(kept, reason)))).decode()
    assert data.endswith("\n\n")
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in data.split("\n\n")[:-1]]


def test_the_new_node_comes_directly_before_the_end():
    """Contract 9, line 9."""
    *_, last, node, done = events_of(state.DialogueChunkFormatter(1, 8), KEPT)
    assert last["usage"]["completion_tokens"] == 2
    assert last["session"] == {"id": "s:3", "version": 1, "tokens": 17, "durable": True}
    assert node == {"object": "multi_state.dialogue_idx", "session_id": "s:3", "dialogue_idx": 3}
    assert done == "[DONE]"


def test_a_turn_of_one_session_has_no_such_event():
    *_, last, done = events_of(state.TurnChunkFormatter(1, 8), CommitResult("s", 4, None, 17, False, replayed=True))
    assert last["session"] == {"id": "s", "version": 4, "tokens": 17, "durable": False, "replayed": True}
    assert done == "[DONE]"
    assert "session" not in events_of(state.TurnChunkFormatter(1, 8), None)[-2]


def test_a_row_that_failed_made_no_node():
    events = events_of(state.DialogueChunkFormatter(1, 8), None, "error")
    assert "[DONE]" not in events
    assert list(events[-1]) == ["error"]
    assert not any(event.get("object") == "multi_state.dialogue_idx" for event in events)


def test_a_turn_that_cannot_be_stored_ends_with_its_error():
    chunks = state.DialogueChunkFormatter(1, 1)
    chunks.feed(steps(KEPT)[0])
    assert chunks.feed(Failure("r", "StorageFailed", "the disk is full")) == b'data: {"error": "the disk is full"}\n\n'


def test_whole_answers():
    document = state.DialogueDocumentFormatter(state.DIALOGUE_ID, "m", 1)
    found = [document.feed(step) for step in steps(KEPT)]
    assert found[0] is None
    answer = json.loads(found[1])
    assert (answer["id"], answer["object"], answer["dialogue_idx"]) == ("rwkv7-multi-state", "chat.completion", 3)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "ab"}
    document = state.TurnDocumentFormatter(state.NATIVE_ID, "m", 1)
    answer = json.loads([document.feed(step) for step in steps(None)][1])
    assert "session" not in answer, "without a session_id nothing was kept"


# --- orders ---


class FakeApp:
    """Stands in for the process's HttpApp: notes the order and gives the answer it was made with."""

    def __init__(self, answer, folder: Path = Path()):
        self.config = Config()
        self.folder = folder
        self.answer = answer
        self.orders = []
        self.models = SimpleNamespace(find=lambda wanted, call: None, all=[None])

    async def execute(self, command, model=None):
        self.orders.append(command)
        if isinstance(command, Export):
            Path(command.path).write_bytes(b"a state")
        if isinstance(command, Import):
            self.imported = Path(command.path).read_bytes()
        return self.answer


def order(route, answer, body: dict, folder: Path = Path(), file: bytes = b"") -> tuple[Response, FakeApp]:
    """Call a route; (its answer, the site with the order that was given)."""
    app = FakeApp(answer, folder)
    call = RequestContext(app, "POST", "/", {}, body=body, file=file)
    return asyncio.run(route(call)), app


DISK = Entry("d", "db", 1700000000.5, 3, 99, 4096)
PAGE = Page(sessions=[Entry("a", "l1", 5.0, 1, 7, 64), Entry("b", "l2", 6.0, 2, 8, 64), DISK], total=7, l1=1, l2=1, db=5)


def test_status_has_the_form_of_the_reference():
    """Contract 1.9, decision (k)."""
    reply, app = order(state.status, PAGE, {})
    assert app.orders == [Status()]
    answer = json.loads(reply.body)
    sessions = answer.pop("sessions")
    assert answer == {
        "status": "success", "total_sessions": 7, "l1_cache_count": 1, "l2_cache_count": 1, "database_count": 5,
    }  # fmt: skip
    assert [session["session_id"] for session in sessions] == ["a", "b", "d"]
    assert [session["cache_level"] for session in sessions] == ["L1 (VRAM)", "L2 (RAM)", "Database (Disk)"]
    assert sessions[0]["last_updated"] == "In Memory"
    assert len(sessions[2]["last_updated"]) == len("2026-01-31 12:00:00")
    assert sessions[2]["timestamp"] == 1700000000.5


def test_status_in_pages():
    reply, app = order(state.status, PAGE, {"limit": 3, "offset": "1"})
    assert app.orders == [Status(offset=1, limit=3)]
    assert json.loads(reply.body)["next_offset"] == 4
    assert json.loads(order(state.status, PAGE, {"limit": 3, "offset": 4})[0].body)["next_offset"] is None
    one = Page(sessions=[Entry("a", "l1", 5.0, 3, 7, 64, [3, 2])], total=7)
    reply, app = order(state.status, one, {"session_id": "a"})
    assert app.orders == [Status(name="a")]
    assert json.loads(reply.body)["sessions"][0]["versions"] == [3, 2]


@pytest.mark.parametrize(
    ("found", "prefix", "status", "answer"),
    [
        (True, False, 200, {"status": "success", "message": "Session x deleted successfully"}),
        (False, False, 404, {"status": "not_found", "message": "Session x not found in database"}),
        (False, True, 200, {"status": "success", "message": "Session x deleted successfully"}),
    ],
)
def test_delete(found, prefix, status, answer):
    """Contract 9, line 23."""
    reply, app = order(state.delete, Deleted(found, int(found)), {"session_id": "x", "delete_prefix": prefix})
    assert app.orders == [Delete(name="x", prefix=prefix)]
    assert (reply.status, json.loads(reply.body)) == (status, answer)


@pytest.mark.parametrize("route", [state.delete, state.fork, state.rewind, state.export, state.import_file])
def test_an_order_names_its_session(route):
    for body in ({}, {"session_id": None}, {"session_id": ""}):
        with pytest.raises(InvalidRequest, match=r"\AMissing session_id parameter\Z"):
            order(route, PAGE, body)
    with pytest.raises(InvalidRequest, match="session_id: at most 256 bytes"):
        order(route, PAGE, {"session_id": "s" * 257, "copies": "a"})


def test_what_a_dialogue_needs():
    for body, missing in (
        ({"session_id": "s", "contents": ["a"]}, "dialogue_idx"),
        ({"dialogue_idx": 0, "contents": ["a"]}, "session_id"),
        ({"dialogue_idx": None, "session_id": "", "contents": ["a"]}, "session_id"),
    ):
        with pytest.raises(InvalidRequest, match=rf"\AMissing {missing} parameter\Z"):
            order(state.dialogue, PAGE, body)


def test_fork_and_rewind():
    reply, app = order(state.fork, PAGE, {"session_id": "s", "copies": ["a", "b"], "version": 2})
    assert app.orders == [Fork(name="s", copies=["a", "b"], version=2)]
    assert json.loads(reply.body)["status"] == "success"
    for copies in ([], ["a", "a"], [""], ["é" * 129], [1], ["x"] * 4097):
        with pytest.raises(InvalidRequest, match="copies"):
            order(state.fork, PAGE, {"session_id": "s", "copies": copies})
    assert order(state.rewind, PAGE, {"session_id": "s"})[1].orders == [Rewind(name="s")]
    with pytest.raises(InvalidRequest, match="version"):
        order(state.rewind, PAGE, {"session_id": "s", "version": 0})


@pytest.mark.parametrize("route", [state.status, state.delete, state.fork, state.rewind])
def test_orders_of_an_api_key_stay_in_its_namespace(route):
    app = FakeApp(Deleted(True, 1) if route is state.delete else PAGE)
    app.config = Config(isolate=True)
    for caller in ("alice", "bob"):
        asyncio.run(route(RequestContext(app, "POST", "/", {}, body={"session_id": "s", "copies": "t"}, caller=caller)))
    assert [action.namespace for action in app.orders] == ["alice", "bob"]


def test_files_are_handed_over_and_removed(tmp_path):
    reply, app = order(state.export, PAGE, {"session_id": "s"}, tmp_path)
    assert reply.body == b"a state"
    assert reply.headers["X-Session-Version"] == "1"
    assert app.orders[0].name == "s"
    reply, app = order(state.import_file, PAGE, {"session_id": "s", "overwrite": "true"}, tmp_path, b"a state")
    assert app.imported == b"a state"
    assert app.orders[0].overwrite
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidRequest, match="empty"):
        order(state.import_file, PAGE, {"session_id": "s"}, tmp_path)


def test_a_full_folder_for_files_in_transit_is_told(tmp_path, monkeypatch):
    def full(*_) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageFailed, match="No space left"):
        order(state.import_file, PAGE, {"session_id": "s"}, tmp_path, b"a state")
    assert list(tmp_path.iterdir()) == []


def test_the_states_of_responses_are_kept_as_such_and_listed_when_wanted():
    assert request_of(ResponseBody, input="hi").session.response
    following = request_of(ResponseBody, input="hi", previous_response_id="resp_1").session
    assert (following.name, following.response) == ("resp_1", True)
    assert request_of(ResponseBody, input="hi", store=False).session is None
    assert order(state.status, PAGE, {"responses": True})[1].orders == [Status(responses=True)]
