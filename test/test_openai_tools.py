"""Tools in OpenAI's bodies, and calls of them in chats; needs no model."""

import contextlib
import copy
import json

import pytest
import quiet_robyn  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from test_openai_adapter import CONFIG, answer_to, chat, payloads, step, text_of, to_request

from routes.openai.chat_answers import ChatFormatter
from routes.openai.conversation import Conversation
from routes.openai.schemas import ChatBody, CompletionBody, read
from routes.openai.tools import read_choice
from rwkv_batch.config import Config
from rwkv_batch.errors import InvalidRequest
from rwkv_batch.request import Delta, Finish
from rwkv_batch.text import grammar

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Tells the weather", "parameters": CITY}}
NOW = {"type": "function", "name": "now", "strict": None, "parameters": None}  # as responses have it
PATCH = {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": {"definition": "start: /x/"}}}}
TOLD = 'System: Tools:\n[\n{"name":"get_weather","description":"Tells the weather","arguments":{"city":{"type":"string"}}}\n]\n'
CALL = '```json\n{"name":"get_weather","arguments":{"city":"Kyoto"}}\n```'


@pytest.fixture(autouse=True)
def grammars_are_read(monkeypatch):
    """Whether llguidance is here does not matter to bodies."""
    monkeypatch.setattr(grammar, "installed", lambda: True)


# --- bodies ---


def test_tools_stand_in_the_system_block():
    prompt = text_of(chat(tools=[WEATHER, NOW]))
    assert prompt.startswith(TOLD.removesuffix("\n]\n") + ',\n{"name":"now","arguments":{}}\n]\nTo use a tool, ')
    assert prompt.endswith("\n\nUser: hi\n\nAssistant: <think>\n</think>\n")
    prompt = text_of(
        chat(tools=[WEATHER], messages=[{"role": "user", "content": "a"}, {"role": "system", "content": "Be kind."}])
    )
    assert prompt.startswith("System: Be kind.\nTools:\n[\n")
    assert "Tools:" not in text_of(chat(tools=[]))


def test_a_choice_says_which_tools_are_told_and_whether_one_must_be_called():
    tools = {"tools": [WEATHER, NOW]}
    for choice in ("none", {"type": "allowed_tools", "mode": "none", "tools": [{"name": "now"}]}):
        assert "Tools:" not in text_of(chat(**tools, tool_choice=choice))
    for choice in (None, "auto"):
        request = chat(**tools, tool_choice=choice)
        assert ("now" in text_of(request), request.grammar) == (True, None)
    for choice in ("required", "any"):
        request = chat(**tools, tool_choice=choice)
        assert text_of(request).endswith("Return only a JSON function call.\n\nUser: hi\n\nAssistant: ```json")
        assert (request.grammar.kind, request.grammar.param) == ("lark", "tools")
    for choice in (
        {"type": "function", "function": {"name": "get_weather"}}, {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER]}},
    ):  # fmt: skip
        request = chat(**tools, tool_choice=choice)
        assert text_of(request).startswith(TOLD + "Return only"), choice
        assert "now" not in request.grammar.source
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]},
    }
    request = chat(**tools, tool_choice=allowed)
    assert ("get_weather" in text_of(request), request.grammar) == (False, None)


def test_a_thought_comes_before_a_forced_call():
    request = chat(tools=[WEATHER], tool_choice="required", enable_think=True)
    assert text_of(request).endswith("Assistant: <think")
    assert "start: thought gap calls" in request.grammar.source


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": "f"}, "tools"),
        ({"tools": [WEATHER, 5]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": [1]}}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": {"a": 1}}}}]}, "tools[0]"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [NOW] * 300}, "tools"),
        ({"tools": [{**NOW, "description": "d" * 600_000}]}, "tools"),
        ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": ["function"], "name": "now"}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": ["auto"], "tools": [NOW]}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": ["auto"]}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0].name"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields, param):
    with pytest.raises(InvalidRequest) as error:
        chat(**fields)
    assert error.value.param == param


def test_limits_are_settings():
    for config in (Config(max_tools=1), Config(max_tools_bytes=150)):
        with pytest.raises(InvalidRequest, match="tools: at most"):
            to_request(ChatBody, {"messages": [{"content": "hi"}], "tools": [WEATHER, NOW]}, config)
    to_request(ChatBody, {"messages": [{"content": "hi"}], "tools": [WEATHER]}, Config(max_tools=1, max_tools_bytes=300))


def test_a_grammar_that_nobody_can_read_is_refused(monkeypatch):
    monkeypatch.setattr(grammar, "installed", lambda: False)
    with pytest.raises(InvalidRequest, match="tools: this server lacks llguidance"):
        chat(tools=[WEATHER], tool_choice="required")
    assert chat(tools=[WEATHER]).grammar is None


KEYS = st.sampled_from(
    ["type", "function", "custom", "name", "parameters", "properties", "required", "tools", "mode", "allowed_tools", "format",
     "grammar", "definition", "description", "$defs", "input", "arguments"]
)  # fmt: skip
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.sampled_from(["function", "custom", "allowed_tools"])
)


@given(st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4)))
def test_hostile_values_are_refused_by_name_or_taken(value):
    for fields in ({"tools": [value]}, {"tools": value}, {"tools": [NOW], "tool_choice": value}, {"functions": value},
                   {"messages": [{"role": "assistant", "tool_calls": value, "content": "a"}]},
                   {"messages": [{"role": "assistant", "function_call": value, "content": "a"}]}):  # fmt: skip
        with contextlib.suppress(InvalidRequest):
            chat(**fields)


def test_tools_of_other_kinds_are_dropped():
    prompt = text_of(chat(tools=[{"type": "web_search"}, NOW, {"type": "mcp", "server_label": "x", "parameters": 5}]))
    assert prompt.startswith('System: Tools:\n[\n{"name":"now","arguments":{}}\n]\n')
    assert "Tools:" not in text_of(chat(tools=[{"type": "web_search"}]))
    assert "Tools:" not in text_of(chat(tools=[NOW], rwkv_tool_compat_mode=False))


def test_other_routes_take_no_tools():
    with pytest.raises(InvalidRequest, match="tools: not supported"):
        read(CompletionBody, {"prompt": "a", "tools": [NOW]})
    assert (
        Conversation.model_validate({"messages": [{"content": "a"}], "tools": [NOW]}).templated().startswith("System: Tools:")
    )


def test_calls_and_results_in_a_history():
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Kyoto"}'}}
    patch = {"id": "call_2", "type": "custom", "custom": {"name": "patch", "input": 'a\n\n"b"'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, patch]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12 C"}]},
        {"role": "tool", "tool_call_id": "call_2", "content": "done"},
        {"role": "assistant", "content": "It is cold.", "function_call": {"name": "now", "arguments": {"a": None}}},
        {"role": "function", "name": "now", "content": "noon"},
    ]
    assert text_of(chat(messages=messages)) == (
        f"User: hi\n\nAssistant: {CALL}\n"
        '```json\n{"name":"patch","arguments":{"input":"a\\n\\n\\"b\\""}}\n```\n\n'
        "User: Function output:\n12 C\n\nUser: Function output:\ndone\n\n"
        'Assistant: It is cold.\n```json\n{"name":"now","arguments":{"a":null}}\n```\n\n'
        "User: Function output:\nnoon\n\nAssistant: <think>\n</think>\n"
    )


def test_a_session_is_not_told_its_tools_again_with_the_results_of_calls():
    result = {"role": "tool", "tool_call_id": "call_1", "content": "12 C"}
    for messages, told in (([result], False), ([result, {"content": "And?"}], True), ([{"content": "hi"}], True)):
        for session, right in (("s", told), (None, True)):
            assert ("Tools:" in text_of(chat(tools=[NOW], messages=messages, session_id=session))) == right


@pytest.mark.parametrize("choice", [["auto"], 5, {}, {"type": "function"}, {"type": "allowed_tools"}, "sometimes"])
def test_choices_that_are_none(choice):
    with pytest.raises(InvalidRequest) as error:
        read_choice(choice, "tool_choice")
    assert error.value.param == "tool_choice"


# --- answers ---


def answers(texts: list[str], *, reason: str = "stop", **fields) -> tuple[dict, list[dict]]:
    """The choice and the chunks that a reply in these pieces becomes."""
    events = [step([Delta(0, text, 1)]) for text in texts] + [step([], [Finish(0, reason, 4, len(texts))])]
    whole, stream = (answer_to(ChatFormatter, ChatBody, **{"tools": [WEATHER, NOW, PATCH], **fields}) for _ in range(2))
    document = json.loads([whole.document(event) for event in events][-1])
    chunks = [chunk for event in events for chunk in payloads(stream.chunks(event))]
    assert chunks.pop() == "[DONE]"
    return document["choices"][0], [chunk["choices"][0] for chunk in chunks]


def gathered(chunks: list[dict]) -> tuple[dict, str]:
    """The message and the reason that a client puts together."""
    message: dict = {"content": ""}
    for chunk in copy.deepcopy(chunks):
        delta = chunk["delta"]
        message["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({key: value for key, value in call.items() if key != "index"})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if "function_call" in delta:
            told = delta["function_call"]
            known = message.setdefault("function_call", {"name": told.get("name"), "arguments": ""})
            known["arguments"] += told["arguments"]
    return message, chunks[-1]["finish_reason"]


def same(choice: dict, chunks: list[dict]) -> None:
    """The stream tells what the document has, but for the ids of calls."""
    message, reason = gathered(chunks)
    assert reason == choice["finish_reason"]
    assert message["content"] == (choice["message"]["content"] or "")
    assert message.get("reasoning_content") == choice["message"].get("reasoning_content")
    for kind in ("tool_calls", "function_call"):
        found, right = (json.loads(json.dumps(each.get(kind))) for each in (message, choice["message"]))
        for call in [*(found or []), *(right or [])] if kind == "tool_calls" else []:
            assert call.pop("id").startswith("call_")
        assert found == right


def test_a_call_in_a_chat():
    choice, chunks = answers(list(f"Let me look.\n\n{CALL}"))
    call = choice["message"]["tool_calls"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    assert (call["type"], call["function"]) == ("function", {"name": "get_weather", "arguments": '{"city":"Kyoto"}'})
    same(choice, chunks)
    deltas = [chunk["delta"]["tool_calls"][0] for chunk in chunks if "tool_calls" in chunk["delta"]]
    assert deltas[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert (deltas[0]["index"], deltas[0]["type"]) == (0, "function")
    assert deltas[1] == {"index": 0, "function": {"arguments": "{"}}
    assert len(deltas) == 1 + len('{"city":"Kyoto"}'), "arguments come as they are written"
    assert all(len(chunk["delta"]) == 1 for chunk in chunks[1:-1])


def test_only_a_call_has_no_content():
    choice, chunks = answers([CALL])
    assert choice["message"]["content"] is None
    same(choice, chunks)
    choice, chunks = answers(["Hello"])
    assert (choice["message"].get("tool_calls"), choice["message"]["content"], choice["finish_reason"]) == (
        None,
        "Hello",
        "stop",
    )
    same(choice, chunks)


def test_a_forced_call_begins_in_the_prompt():
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer, chunks = answers(list(CALL.removeprefix("```json")), tool_choice=choice)
        assert answer["message"]["tool_calls"][0]["function"]["arguments"] == '{"city":"Kyoto"}'
        assert answer["finish_reason"] == "tool_calls"
        same(answer, chunks)


def test_a_call_behind_a_thought():
    thought = f">I could do {CALL}.</think>\n\n"
    choice, chunks = answers(list(thought + CALL), enable_think=True)
    assert choice["message"]["reasoning_content"] == f"I could do {CALL}."
    assert len(choice["message"]["tool_calls"]) == 1
    same(choice, chunks)
    choice, chunks = answers(list(thought + CALL), enable_think=True, separate_reasoning=False)
    assert choice["message"]["content"] == "<think" + thought.rstrip()
    assert len(choice["message"]["tool_calls"]) == 1
    same(choice, chunks)


def test_parallel_calls_unless_they_are_not_wanted():
    text = f'{CALL}\n```json\n{{"name":"now","arguments":{{}}}}\n```'
    choice, chunks = answers(list(text))
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather", "now"]
    same(choice, chunks)
    choice, chunks = answers(list(text), parallel_tool_calls=False)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    same(choice, chunks)


def test_the_older_fields_get_the_older_form():
    fields = {"tools": None, "functions": [WEATHER["function"]]}
    choice, chunks = answers(list(CALL), **fields)
    assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": '{"city":"Kyoto"}'}
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("function_call", False)
    same(choice, chunks)
    choice, chunks = answers(list(CALL.removeprefix("```json")), **fields, function_call={"name": "get_weather"})
    assert choice["message"]["function_call"]["name"] == "get_weather"


def test_a_custom_tool_gets_text():
    choice, chunks = answers(list('```json\n{"name":"patch","arguments":{"input":"*** Begin\\n+\\"x\\""}}\n```'))
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": '*** Begin\n+"x"'})
    assert "start: /x/" in text_of(chat(tools=[PATCH]))
    same(choice, chunks)


def test_a_call_that_is_cut_off():
    choice, chunks = answers(list(CALL[: CALL.index("city")]), reason="length")
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"'
    same(choice, chunks)
    choice, chunks = answers(list(CALL[:20]), reason="length")
    assert choice["message"]["content"] == CALL[:20], "what is not known to be a call is text"
    same(choice, chunks)


def test_several_choices_have_calls_of_their_own():
    events = [step([Delta(1, CALL, 1), Delta(0, "No.", 1)], [Finish(0, "stop", 1, 1), Finish(1, "stop", 1, 1)])]
    answer = answer_to(ChatFormatter, ChatBody, n=2, tools=[WEATHER])
    choices = json.loads(answer.document(events[0]))["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "tool_calls"]


@given(st.lists(st.integers(1, 40), max_size=9), st.sampled_from(["stop", "length"]), st.integers(0, 200))
def test_streams_tell_what_documents_have(cuts, reason, length):
    text = (
        f'A <b> `c`\n{CALL}\n```\nx\n```json\n{{"arguments":{{}},"name":"now"}}\n```\n<tool_call>{{"name":"no"}}</tool_call>'[
            :length
        ]
    )
    pieces, begin = [], 0
    for cut in [*cuts, 500]:
        pieces.append(text[begin : begin + cut])
        begin += cut
    same(*answers(pieces, reason=reason))


def test_markup_that_is_asked_for_no_tools_is_text():
    choice, _ = answers(list(CALL), tools=None)
    assert choice["message"]["content"] == CALL
    choice, _ = answers(list(CALL), tool_choice="none")
    assert choice["message"]["content"] == CALL


def test_the_default_limits_are_generous():
    assert CONFIG.max_tools >= 128
