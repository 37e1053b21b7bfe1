"""From Anthropic's bodies to requests, and from the engine's events to its messages and events."""

import json
from types import SimpleNamespace

import pytest
import quiet_robyn  # noqa: F401
from test_openai_adapter import BYTES, CONFIG, HI, request_of, step, text_of

from routes import ROUTES
from routes.anthropic.answers import MessageFormatter
from routes.anthropic.schemas import CountBody, MessagesBody, MessagesChat
from routes.http.replies import error_reply
from routes.openai.schemas import read
from routes.schemas import validate
from rwkv_batch.config import Config
from rwkv_batch.errors import Conflict, EngineFailed, Forbidden, InvalidRequest, NotFound, Overloaded, TooLarge, Unauthorized
from rwkv_batch.ipc.messages import EngineInfo
from rwkv_batch.request import Delta, Failure, Finish, Request

OPEN = "Assistant: <think>\n</think>\n"


def chat_of(kind=MessagesBody, **fields) -> MessagesChat:
    limit = {"max_tokens": 9} if kind is MessagesBody else {}
    return read(MessagesChat, validate(kind, {"messages": HI, **limit, **fields}).in_openai_form())


def asked(**fields) -> Request:
    return request_of(chat_of(**fields))


def formatter_of(**fields) -> MessageFormatter:
    body = chat_of(**fields)
    model = SimpleNamespace(info=EngineInfo(model="m", fingerprint="f" * 32), tokenizer=BYTES)
    call = SimpleNamespace(id="id", model=model, config=CONFIG, model_name="m", form="anthropic")
    return MessageFormatter(call, body, request_of(body))


def events_of(formatter: MessageFormatter, *steps) -> list[dict]:
    data = b"".join(formatter.chunks(event) or b"" for event in steps).decode()
    events = []
    for block in data.split("\n\n")[:-1]:
        name, payload = block.split("\n")
        events.append(json.loads(payload.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


# --- bodies ---


def test_a_body_becomes_the_request_of_a_chat():
    request = asked(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000;"},
            {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be short."},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "c"},
            ]},
            {"role": "user", "content": "d"},
        ],
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        metadata={"user_id": "u"},
        context_management={"edits": []},
        service_tier="auto",
        stream=True,
    )  # fmt: skip
    assert text_of(request) == f"System: Be kind.\nBe short.\n\nUser: a\nb\n\nAssistant: c\n\nUser: d\n\n{OPEN}"
    assert (request.max_tokens, request.stop_texts, request.chunk_size) == (9, [b"\nUser:", b"END"], 1)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.25, 7)
    assert asked(seed=5).sampling.seed == 5
    assert asked(use_prefix_cache=False).cache is False


def test_results_of_tools_are_turns():
    messages = [
        *HI,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "42"}]},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no", "is_error": True},
            {"type": "text", "text": "and?"},
        ]},
    ]  # fmt: skip
    text = text_of(asked(messages=messages))
    assert text.endswith(f"Function output:\n42\n\nUser: Function output:\nError: no\n\nUser: and?\n\n{OPEN}")


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, OPEN),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, OPEN),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "hi (think a bit)\n\nAssistant: <think"),
        ({"thinking": {"type": "enabled", "budget_tokens": 8000}}, "hi\n\nAssistant: <think"),
        ({"thinking": {"type": "enabled", "budget_tokens": 31999}}, "hi (think a lot)\n\nAssistant: <think"),
        ({"thinking": {"type": "adaptive"}}, "hi\n\nAssistant: <think"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "hi (think a bit)\n\nAssistant: <think"),
    ],
)
def test_how_much_to_think(fields, end):
    assert text_of(asked(**fields)).endswith(end)
    assert text_of(request_of(chat_of(CountBody, **fields))).endswith(end)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "assistant", "content": "I"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"system": 5}, "system"),
        ({"stop_sequences": ["x"] * 99}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 3}, "top_p"),
        ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format"),
    ],
)
def test_what_is_refused_is_named(fields, name):
    with pytest.raises(InvalidRequest) as error:
        asked(**fields)
    assert error.value.param == name


def test_tools_of_anthropics_own_servers_are_left_out():
    body = validate(MessagesBody, {"messages": HI, "max_tokens": 1, "tools": [{"type": "web_search_20250305", "name": "w"}]})
    assert "tools" not in body.in_openai_form()
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
    for choice, right in (
        ({"type": "auto"}, "auto"),
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ):
        body = validate(
            MessagesBody, {"messages": HI, "max_tokens": 1, "tools": [tool], "tool_choice": choice}
        ).in_openai_form()
        function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
        assert body["tools"] == [{"type": "function", "function": function}]
        assert body["tool_choice"] == right
        assert body["parallel_tool_calls"] is (False if choice.get("disable_parallel_tool_use") else None)


# --- answers ---


def test_a_message_from_events():
    formatter = formatter_of(thinking={"type": "enabled", "budget_tokens": 2000}, stop_sequences=["END"])
    assert formatter.document(step([Delta(0, ">\nWhy", 2), Delta(0, " not?</think>\n\nYes.", 3)])) is None
    message = json.loads(formatter.document(step([], [Finish(0, "stop", 30, 6, cached_tokens=20, stop_text="END")])))
    assert message["content"] == [
        {"type": "thinking", "thinking": "Why not?", "signature": "id"},
        {"type": "text", "text": "Yes."},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    assert (message["id"], message["type"], message["role"], message["model"]) == ("msg_id", "message", "assistant", "m")
    usage = message["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (10, 20, 6)
    assert usage["output_tokens_details"] == {"thinking_tokens": 5}


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        (Finish(0, "length", 3, 1), "max_tokens"),
        (Finish(0, "stop", 3, 1), "end_turn"),
        (Finish(0, "stop", 3, 1, stop_text="\nUser:"), "end_turn"),
    ],
)
def test_why_a_message_ended(finish, reason):
    message = json.loads(formatter_of().document(step([], [finish])))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, None)
    assert message["content"] == [{"type": "text", "text": ""}], "clients read the first block unasked"


def test_a_stream_has_its_events_in_order():
    formatter = formatter_of(thinking={"type": "adaptive"}, stream=True)
    events = events_of(
        formatter,
        step([Delta(0, ">\nWhy", 2)]),
        step([Delta(0, " not?", 1)]),
        step([Delta(0, "</think>\nY", 2)]),
        step([Delta(0, "es.", 1)], [Finish(0, "length", 30, 6)]),
    )
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", "ping", "content_block_delta", "content_block_delta", "content_block_delta",
        "content_block_stop", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    kinds = ["thinking_delta", "thinking_delta", "signature_delta", "text_delta", "text_delta"]
    assert [delta["type"] for delta in deltas] == kinds
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Why not?"
    assert "".join(delta.get("text", "") for delta in deltas) == "Yes."
    assert [event["index"] for event in events if "index" in event] == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    start, end = events[0]["message"], events[-2]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert (end["usage"]["input_tokens"], end["usage"]["output_tokens"]) == (30, 6)


def test_a_stream_without_text_has_an_empty_block():
    events = events_of(formatter_of(stream=True), step([], [Finish(0, "stop", 3, 1)]))
    kinds = ["message_start", "content_block_start", "ping", "content_block_stop", "message_delta", "message_stop"]
    assert [event["type"] for event in events] == kinds


def test_a_thought_that_is_not_wanted_is_left_out():
    formatter = formatter_of(thinking={"type": "adaptive", "display": "omitted"})
    formatter.document(step([Delta(0, ">x</think>y", 3)]))
    message = json.loads(formatter.document(step([], [Finish(0, "stop", 3, 4)])))
    assert message["content"] == [{"type": "text", "text": "y"}]
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


def test_a_stream_that_fails_says_so_and_never_ends_well():
    for last in (Failure.of("r", EngineFailed("broken")), step([], [Finish(0, "error", 3, 1, "broken")])):
        events = events_of(formatter_of(stream=True), step([Delta(0, "a", 1)]), last)
        assert events[-1]["type"] == "error"
        assert events[-1]["error"]["type"] == "api_error"
        assert "broken" in events[-1]["error"]["message"]
        assert "message_stop" not in [event["type"] for event in events]


# --- tools ---

WEATHER = {
    "name": "get_weather", "description": "How it is outside.", "cache_control": {"type": "ephemeral"},
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
CALL = 'Let me see.\n```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```'


def pieces_of(text: str, size: int) -> list:
    return [step([Delta(0, text[place : place + size], 1)]) for place in range(0, len(text), size)]


def test_the_model_is_told_of_tools():
    text = text_of(asked(tools=[WEATHER, {"type": "web_search_20250305", "name": "web_search"}], system="Be kind."))
    assert text.startswith("System: Be kind.\nTools:\n[\n")
    assert '"name":"get_weather"' in text
    assert "web_search" not in text
    assert "get_weather" not in text_of(asked(tools=[WEATHER], tool_choice={"type": "none"}))
    counted = text_of(request_of(chat_of(CountBody, tools=[WEATHER])))
    assert counted == text_of(asked(tools=[WEATHER]))


def test_an_answer_may_have_a_schema():
    wanted = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
    by_field = [asked(output_config={"format": wanted}).grammar, asked(output_format=wanted).grammar]
    assert by_field[0] == by_field[1] != asked().grammar
    assert by_field[0].kind == "json_schema"


def test_a_count_is_bound_by_no_limit_on_answers():
    assert request_of(chat_of(CountBody), Config(max_tokens_limit=5)).max_tokens == 0


def test_a_call_is_a_block():
    formatter = formatter_of(tools=[WEATHER])
    for event in pieces_of(CALL, 5):
        assert formatter.document(event) is None
    message = json.loads(formatter.document(step([], [Finish(0, "stop", 30, 6)])))
    text, call = message["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert call["id"].startswith("toolu_")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", {"city": "Paris"})
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("size", [1, 7, 500])
def test_a_call_in_a_stream(size):
    steps = [*pieces_of(CALL, size), step([], [Finish(0, "stop", 30, 6)])]
    events = events_of(formatter_of(tools=[WEATHER], stream=True), *steps)
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [start["content_block"]["type"] for start in starts] == ["text", "tool_use"]
    assert [start["index"] for start in starts] == [0, 1]
    assert starts[1]["content_block"]["input"] == {}
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "Let me see."
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"city": "Paris"}
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_call_that_was_cut_off_is_no_use_of_a_tool():
    formatter = formatter_of(tools=[WEATHER])
    formatter.document(step([Delta(0, CALL[:60], 9)]))
    message = json.loads(formatter.document(step([], [Finish(0, "length", 30, 9)])))
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][-1]["input"] == {}


# --- errors and routes ---


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("x", param="p"), 400, "invalid_request_error"),
        (Unauthorized("x"), 401, "authentication_error"),
        (Forbidden("x"), 403, "permission_error"),
        (NotFound("x"), 404, "not_found_error"),
        (Conflict("x"), 409, "invalid_request_error"),
        (TooLarge("x"), 413, "request_too_large"),
        (Overloaded("x"), 529, "overloaded_error"),
        (EngineFailed("x"), 500, "api_error"),
    ],
)
def test_errors_have_anthropics_form(error, status, kind):
    reply = error_reply(error, "anthropic")
    assert (reply.status, json.loads(reply.body)) == (status, {"type": "error", "error": {"type": kind, "message": "x"}})
    assert ("Retry-After" in reply.headers) == (status == 529)


def test_the_routes_are_in_the_table():
    table = {(route.method, route.path): route for route in ROUTES}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert table["POST", path].form == "anthropic"
        assert table["POST", path].access == "password"
