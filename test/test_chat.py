"""From events to what the native chat route sends: chunks, ends, usage, errors."""

import json

import quiet_robyn  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st

from routes.native.chat import ChunkFormatter, DocumentFormatter
from rwkv_batch.errors import Unavailable
from rwkv_batch.request import Delta, Failure, Finish, Progress


def payloads(data: bytes | None) -> list:
    """The events in some bytes; "[DONE]" as text."""
    if data is None:
        return []
    assert data.endswith(b"\n\n")
    lines = data.decode().split("\n\n")[:-1]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def step(deltas=(), finishes=()) -> Progress:
    return Progress("r", list(deltas), list(finishes))


def texts(event: dict) -> list[tuple[int, str]]:
    return [(choice["index"], choice["delta"]["content"]) for choice in event["choices"]]


def test_an_event_waits_for_chunk_size_tokens_and_takes_all_rows_that_have_them():
    chunks = ChunkFormatter(3, chunk_size=2)
    assert chunks.feed(step([Delta(0, "a", 1), Delta(1, "b", 2), Delta(2, "", 1)])) == (
        b'data: {"object": "chat.completion.chunk", "choices": [{"index": 1, "delta": {"content": "b"}}]}\n\n'
    )
    (event,) = payloads(chunks.feed(step([Delta(0, "c", 1), Delta(1, "d", 1), Delta(2, "", 1)])))
    assert texts(event) == [(0, "ac")], "row 1 has one token since its last event, row 2 has no text"
    (event,) = payloads(chunks.feed(step([Delta(1, "e", 1), Delta(2, "f", 1)])))
    assert texts(event) == [(1, "de")]


def test_non_ascii_stays_as_it_is():
    assert "文✿😀".encode() in ChunkFormatter(1, 1).feed(step([Delta(0, "文✿😀", 1)]))


def test_a_row_that_ends_is_flushed_and_gets_its_reason():
    chunks = ChunkFormatter(2, chunk_size=100)
    events = payloads(chunks.feed(step([Delta(0, "a", 1), Delta(1, "x", 1)], [Finish(0, "stop", 3, 2)])))
    assert texts(events[0]) == [(0, "a")]
    assert events[1] == {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}],
    }
    events = payloads(chunks.feed(step([], [Finish(1, "length", 4, 5)])))
    assert texts(events[0]) == [(1, "x")]
    assert events[1]["choices"][0]["finish_reason"] == "length"
    assert events[1]["usage"] == {"prompt_tokens": 7, "completion_tokens": 7, "total_tokens": 14}
    assert events[2:] == ["[DONE]"]


def test_done_comes_only_after_success():
    assert payloads(ChunkFormatter(1, 1).feed(Failure("r", "EngineFailed", "it broke"))) == [{"error": "it broke"}]
    chunks = ChunkFormatter(2, 1)
    chunks.feed(step([], [Finish(0, "error", 1, 1, "not finite")]))
    events = payloads(chunks.feed(step([Delta(1, "a", 1)], [Finish(1, "stop", 1, 1)])))
    assert events[-1] == {"error": "not finite"}
    assert "[DONE]" not in events
    assert payloads(ChunkFormatter(1, 1).feed(step([], [Finish(0, "cancelled", 1, 1)])))[-1] == {"error": "a row was cancelled"}


def test_a_document_keeps_the_order_of_the_prompts():
    document = DocumentFormatter("rwkv7-batch", "m", 2)
    assert document.feed(step([Delta(1, "b", 1)], [Finish(1, "length", 2, 3)])) is None
    body = document.feed(step([Delta(0, "文", 1)], [Finish(0, "stop", 1, 2)]))
    assert "文".encode() in body
    answer = json.loads(body)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["文", "b"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


def test_a_failed_document_is_its_error():
    failed = DocumentFormatter("i", "m", 1).feed(Failure("r", "Unavailable", "gone"))
    assert (type(failed), failed.message) == (Unavailable, "gone")


def test_a_document_of_rows_that_all_failed_is_an_error():
    document = DocumentFormatter("i", "m", 2)
    assert document.feed(step([], [Finish(0, "error", 1, 0, "not finite")])) is None
    assert document.feed(step([], [Finish(1, "error", 1, 0, "not finite")])).status == 500
    document = DocumentFormatter("i", "m", 2)
    document.feed(step([Delta(1, "a", 1)], [Finish(0, "error", 1, 0, "not finite")]))
    choices = json.loads(document.feed(step([], [Finish(1, "stop", 1, 1)])))["choices"]
    assert [choice.get("error") for choice in choices] == ["not finite", None]


@given(
    st.lists(st.lists(st.tuples(st.text(max_size=3), st.integers(1, 3)), max_size=12), min_size=1, max_size=4),
    st.integers(1, 9),
)
def test_streamed_text_is_the_whole_text_for_any_chunk_size(rows, chunk_size):
    chunks, document = ChunkFormatter(len(rows), chunk_size), DocumentFormatter("i", "m", len(rows))
    sent, whole = b"", None
    for turn in range(max(map(len, rows)) + 1):
        deltas = [Delta(i, *row[turn]) for i, row in enumerate(rows) if turn < len(row)]
        finishes = [Finish(i, "stop", 1, len(row)) for i, row in enumerate(rows) if turn == len(row)]
        event = step(deltas, finishes)
        if deltas or finishes:
            sent += chunks.feed(event) or b""
            whole = document.feed(event)
    joined = [""] * len(rows)
    *events, done = payloads(sent)
    assert done == "[DONE]"
    for event in events:
        for index, text in texts(event):
            joined[index] += text
    assert joined == [choice["message"]["content"] for choice in json.loads(whole)["choices"]]
    assert joined == ["".join(text for text, _ in row) for row in rows]
