"""Responses with calls of tools and thoughts, whole and as events, as the SDK's types have them; needs no model."""

import json
from typing import Any

import pytest
import quiet_robyn  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from test_openai_adapter import answer_to, payloads, step, text_of, to_request

from routes.openai.response_answers import ResponseFormatter
from routes.openai.response_body import ResponseBody
from rwkv_batch.errors import InvalidRequest
from rwkv_batch.request import Delta, Finish
from rwkv_batch.text import grammar

sdk = pytest.importorskip("openai.types.responses", reason="needs the SDK openai: requirements-test.txt")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "description": "Tells the weather", "parameters": CITY, "strict": True}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files"}
TOOLS = [WEATHER, {"type": "web_search"}, PATCH]
CALL = '```json\n{"name":"get_weather","arguments":{"city":"Kyoto"}}\n```'
EVENT: TypeAdapter = TypeAdapter(sdk.ResponseStreamEvent)


@pytest.fixture(autouse=True)
def grammars_are_read(monkeypatch):
    """Whether llguidance is here does not matter to bodies."""
    monkeypatch.setattr(grammar, "installed", lambda: True)


def prompt(**fields: Any) -> str:
    return text_of(to_request(ResponseBody, {"store": False, **fields}))


def test_tools_and_calls_in_the_input():
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "get_weather", "arguments": '{"city":"Kyoto"}'},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "+x"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
        {"type": "function_call_output", "call_id": "call_1", "output": "12 C"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "done"}]},
    ]
    found = prompt(input=items, tools=TOOLS, instructions="Be kind.")
    assert found == (
        "System: Be kind.\nTools:\n["
        '\n{"name":"get_weather","description":"Tells the weather","arguments":{"city":{"type":"string"}}},'
        '\n{"name":"apply_patch","description":"Edits files","arguments":{"input":{"type":"string"}}}\n]\n'
        "To use a tool, return only a JSON function call. Otherwise answer in words.\n\n"
        f"User: hi\n\nAssistant: I look.\n{CALL}\n"
        '```json\n{"name":"apply_patch","arguments":{"input":"+x"}}\n```\n\n'
        "User: Function output:\n12 C\n\nUser: Function output:\ndone\n\nAssistant:"
    )  # fmt: skip
    assert prompt(input="hi", tools=TOOLS, tool_choice={"type": "function", "name": "get_weather"}).endswith(
        "Assistant: ```json"
    )
    following = prompt(input=items[-1:], tools=TOOLS, previous_response_id="resp_1")
    assert following == "User: Function output:\ndone\n\nAssistant:", "the state has seen the tools"


def test_an_answer_with_tools_may_be_as_long_as_a_chats():
    for fields, right in (({}, 4096), ({"max_output_tokens": 5}, 5), ({"max_tokens": 6}, 6)):
        assert to_request(ResponseBody, {"input": "hi", "tools": TOOLS, **fields}).max_tokens == right


def test_a_thought_is_asked_for_by_effort():
    assert prompt(input="hi", reasoning={"effort": "medium", "summary": "auto"}).endswith("User: hi\n\nAssistant: <think")
    assert prompt(input="hi", reasoning={"effort": "low"}).endswith("User: hi (think a bit)\n\nAssistant: <think")
    assert prompt(input="hi", reasoning={"effort": None}) == "User: hi\n\nAssistant:"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].tool_calls[0].name"),
        ({"input": [{"type": "function_call_output", "output": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "shell_call"}]}, "input[0]"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"type": ["message"]}]}, "input[0]"),
    ],
)
def test_what_is_wrong_is_named(fields, param):
    with pytest.raises(InvalidRequest) as error:
        prompt(**{"input": "hi", **fields})
    assert error.value.param == param


def answers(texts: list[str], *, reason: str = "stop", **fields: Any) -> tuple[dict, list[dict]]:
    """The response and the events that a reply in these pieces becomes, each checked against the SDK's types."""
    events = [step([Delta(0, text, 1)]) for text in texts] + [step([], [Finish(0, reason, 4, len(texts))])]
    whole, stream = (answer_to(ResponseFormatter, ResponseBody, **{"tools": TOOLS, "store": False, **fields}) for _ in range(2))
    response = json.loads([whole.document(event) for event in events][-1])
    told = [event for each in events for event in payloads(stream.chunks(each))]
    sdk.Response.model_validate(response)
    for number, event in enumerate(told):
        EVENT.validate_python(event)
        assert event["sequence_number"] == number
    return response, told


def without_ids(items: list[dict]) -> list[dict]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def same(response: dict, told: list[dict]) -> None:
    """The events tell what the response has: each item begins, grows and ends, and the last event has them all."""
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    last = told[-1]["response"]
    assert told[-1]["type"] == f"response.{response['status']}"
    assert without_ids(last["output"]) == without_ids(response["output"])
    for place, item in enumerate(last["output"]):
        own = [event for event in told if event.get("output_index") == place]
        assert own[0]["type"] == "response.output_item.added"
        assert own[0]["item"]["status" if "status" in item else "type"] in ("in_progress", item["type"])
        assert (own[-1]["type"], own[-1]["item"]) == ("response.output_item.done", item)
        assert {event["item_id"] for event in own[1:-1]} <= {item["id"]}
        grown = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert grown == item.get("arguments", item.get("input", item["content"][0]["text"] if item.get("content") else ""))
    places = [event["output_index"] for event in told if "output_index" in event]
    assert places == sorted(places), "one item after the other"


def test_a_call_in_a_response():
    response, told = answers(list(f" I look.\n\n{CALL}"))
    message, call = response["output"]
    assert message["content"][0]["text"] == "I look."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "get_weather", '{"city":"Kyoto"}')
    assert (call["status"], response["status"]) == ("completed", "completed")
    assert call["id"].startswith("fc_")
    assert call["call_id"].startswith("call_")
    same(response, told)
    names = [event["type"].removeprefix("response.") for event in told if event.get("output_index") == 1]
    deltas = ["function_call_arguments.delta"] * len('{"city":"Kyoto"}')
    assert names == ["output_item.added", *deltas, "function_call_arguments.done", "output_item.done"]
    assert [tool["name"] for tool in response["tools"]] == ["get_weather", "apply_patch"], "those that count"
    assert response["tool_choice"] == "auto"


def test_calls_alone_have_no_message():
    response, told = answers(
        list(CALL.removeprefix("```json")), tool_choice={"type": "function", "function": {"name": "get_weather"}}
    )
    assert [item["type"] for item in response["output"]] == ["function_call"]
    assert response["tool_choice"] == {"type": "function", "name": "get_weather"}
    same(response, told)
    response, told = answers([CALL, "\n", CALL], parallel_tool_calls=False)
    assert len(response["output"]) == 1
    assert response["parallel_tool_calls"] is False
    same(response, told)


def test_no_call_is_a_message():
    for fields in ({}, {"tools": None}):
        for texts in ([" Hello"], [" ", "\n"], []):
            response, told = answers(texts, **fields)
            assert [item["type"] for item in response["output"]] == ["message"]
            assert response["output"][0]["content"][0]["text"] == "".join(texts).strip()
            same(response, told)


def test_a_custom_tool_gets_text():
    text = '```json\n{"name":"apply_patch","arguments":{"input":"*** Begin Patch\\n+\\"x\\""}}\n```'
    response, told = answers(list(text))
    (call,) = response["output"]
    assert (call["type"], call["input"]) == ("custom_tool_call", '*** Begin Patch\n+"x"')
    same(response, told)
    names = [event["type"] for event in told if event["type"].startswith("response.custom")]
    assert names == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]


def test_tools_of_a_group_are_called_by_its_name_and_their_own():
    """Codex has the tools of MCP servers in such groups."""
    group = {"type": "namespace", "name": "maps", "description": "d", "tools": [WEATHER, {"type": "function", "name": "f"}]}
    text = list('```json\n{"name":"maps.get_weather","arguments":{}}\n```\n```json\n{"name":"f","arguments":{}}\n```')
    response, told = answers(text, tools=[WEATHER, group, {"type": "namespace", "name": "none", "tools": [{"type": "mcp"}]}])
    assert [(call["namespace"], call["name"]) for call in response["output"]] == [("maps", "get_weather"), ("maps", "f")]
    assert [len(tool.get("tools", "x")) for tool in response["tools"]] == [1, 2, 0]
    same(response, told)
    response, told = answers(list(CALL), tools=[WEATHER, group])
    assert "namespace" not in response["output"][0]
    with pytest.raises(InvalidRequest) as error:
        prompt(input="hi", tools=[group, group])
    assert error.value.param == "tools"
    with pytest.raises(InvalidRequest) as error:
        prompt(input="hi", tools=[{**group, "tools": [{"type": "function"}]}])
    assert error.value.param == "tools[0].tools[0]"


def test_a_thought_is_an_item_of_its_own():
    response, told = answers(list(f"> I could {CALL}.</think>\n\nSo I do.\n{CALL}"), reasoning={"effort": "high"})
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    thought = response["output"][0]
    assert thought["content"] == [{"type": "reasoning_text", "text": f"I could {CALL}."}]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 10
    assert response["reasoning"]["effort"] == "high"
    same(response, told)
    response, told = answers(["> Hm"], reason="length", reasoning={"effort": "high"})
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    same(response, told)


def test_a_call_that_is_cut_off():
    response, told = answers([CALL[: CALL.index("yoto")]], reason="length")
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")
    assert response["output"][0]["arguments"] == '{"city":"K'
    same(response, told)


@given(st.lists(st.integers(1, 40), max_size=9), st.sampled_from(["stop", "length"]), st.integers(0, 260), st.booleans())
def test_events_tell_what_the_response_has(cuts, reason, length, think):
    text = (
        f'> A</think>B <b> `c`\n{CALL}\n```\nx\n```json\n{{"arguments":{{"input":"y"}},"name":"apply_patch"}}\n```\n<tool_call>'
    )
    pieces, begin = [], 0
    for cut in [*cuts, 500]:
        pieces.append(text[:length][begin : begin + cut])
        begin += cut
    same(*answers(pieces, reason=reason, reasoning={"effort": "high" if think else "none"}))


def test_ids_of_a_conversation_begin_with_the_first():
    """A proxy sends a conversation to one server by the part that its ids have in common."""
    first = ResponseBody(input="one").own_id
    second = ResponseBody(input="two", previous_response_id=first).own_id
    third = ResponseBody(input="three", previous_response_id=second).own_id
    assert len({first, second, third}) == 3
    assert second[:29] == third[:29] == first
    assert ResponseBody(input="four", previous_response_id="resp_of another server").own_id[:29] != first
