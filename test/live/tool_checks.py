"""Checks of tools over HTTP, as `openai_checks` has them: for any server and any model, since a forced call is a call with any.

The schemas are bounded, so that a model that knows nothing gets to their ends.
"""

import importlib.util
import json
import time
from enum import StrEnum
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from openai_checks import HELLO, Target, strictly
from pydantic import BaseModel
from server_process import PATIENCE

CITY = {"enum": ["Kyoto", "Oslo", "Lima"]}
SCHEMA = {
    "type": "object",
    "properties": {"city": CITY, "days": {"type": "integer", "minimum": 0, "maximum": 9}, "detailed": {"type": "boolean"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "description": "Tells it", "parameters": SCHEMA}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
FLAT: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
LIMIT = {"model": "m", "max_tokens": 200, "temperature": 1, "seed": 7}


class City(StrEnum):
    """Where."""

    KYOTO = "Kyoto"
    OSLO = "Oslo"


class GetWeather(BaseModel):
    """Tells the weather."""

    city: City
    days: Literal[1, 2, 3]  # some clients drop the bounds of numbers, and then a model may go on with digits


def right(arguments: str) -> dict[str, Any]:
    """The arguments, which follow the schema."""
    found = json.loads(arguments)
    assert found["city"] in CITY["enum"]
    assert 0 <= found["days"] <= 9
    assert found.keys() <= SCHEMA["properties"].keys()
    return found


def check_sdk_tools(target: Target) -> None:
    """A1: a call that is required, or named, is one that follows the schema; a free answer is as the SDK expects it."""
    chat = target.client().chat.completions
    for choice in ("required", NAMED, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}):
        answer = chat.create(messages=HELLO, tools=[WEATHER], tool_choice=choice, **LIMIT)
        (call,) = answer.choices[0].message.tool_calls
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("tool_calls", None)
        assert (call.type, call.function.name) == ("function", "get_weather")
        right(call.function.arguments)
        strictly(ChatCompletion, answer.model_dump(exclude_none=True))
    for choice in ("auto", "none"):
        message = (
            chat.create(messages=HELLO, tools=[WEATHER, NOW], tool_choice=choice, **LIMIT | {"max_tokens": 8})
            .choices[0]
            .message
        )
        assert message.content or message.tool_calls
    several = chat.create(messages=HELLO, tools=[WEATHER, NOW], tool_choice="required", n=3, **LIMIT)
    for choice in several.choices:
        assert choice.message.tool_calls[0].function.name in ("get_weather", "now")


def check_sdk_tools_streamed(target: Target) -> None:
    """A1: chunks tell what the whole answer has, as the strict helper puts them together."""
    client = target.client()
    fields = {"messages": HELLO, "tools": [WEATHER], "tool_choice": "required", **LIMIT}
    whole = client.chat.completions.create(**fields).choices[0]
    chunks = list(client.chat.completions.create(stream=True, **fields))
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk.model_dump(exclude_unset=True))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert {delta.index for delta in deltas} == {0}
    assert deltas[0].id.startswith("call_")
    assert (deltas[0].type, deltas[0].function.name, deltas[0].function.arguments) == ("function", "get_weather", "")
    assert all(delta.id is None and delta.function.name is None for delta in deltas[1:])
    assert len(deltas) > 3, "arguments come in pieces"
    assert "".join(delta.function.arguments for delta in deltas) == whole.message.tool_calls[0].function.arguments
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    tool = openai.pydantic_function_tool(GetWeather)
    with client.chat.completions.stream(messages=HELLO, tools=[tool], tool_choice="required", **LIMIT) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_completion()
    assert names.count("tool_calls.function.arguments.done") == 1
    assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, GetWeather)


def check_sdk_parse(target: Target) -> None:
    """A1: `parse` gives typed arguments, and typed answers."""
    chat = target.client().chat.completions
    tool = openai.pydantic_function_tool(GetWeather)
    answer = chat.parse(messages=HELLO, tools=[tool], tool_choice="required", **LIMIT)
    parsed = answer.choices[0].message.tool_calls[0].function.parsed_arguments
    assert isinstance(parsed, GetWeather)
    message = chat.parse(messages=HELLO, tools=[tool], response_format=GetWeather, **LIMIT).choices[0].message
    assert isinstance(message.parsed, GetWeather) or message.tool_calls, "words of a schema, or a call"
    thinking: Any = {"tool_choice": NAMED, "reasoning_effort": "low", **LIMIT, "max_tokens": 60}
    thought = chat.create(messages=HELLO, tools=[WEATHER], **thinking).choices[0]
    if thought.finish_reason == "tool_calls":  # else all tokens went into the thought
        right(thought.message.tool_calls[0].function.arguments)


def check_tool_loop(target: Target) -> None:
    """A1: results are fed back, with the whole history, and in a session with the new messages alone."""
    chat = target.client().chat.completions
    name = f"tools-{time.time_ns()}"
    for session in ({}, {"session_id": name}):
        messages: list[Any] = [{"role": "user", "content": "Kyoto?"}]
        first = chat.create(messages=messages, tools=[WEATHER], tool_choice="required", extra_body=session, **LIMIT)
        call = first.choices[0].message.tool_calls[0]
        result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature":12}'}
        history = [result] if session else [*messages, first.choices[0].message, result]
        second = chat.create(messages=history, tools=[WEATHER], extra_body=session, **LIMIT | {"max_tokens": 9})
        assert second.choices[0].message.content or second.choices[0].message.tool_calls
        assert (second.usage.prompt_tokens < first.usage.prompt_tokens) == bool(session), "the state has seen the tools"
    assert target.request("POST", "/state/delete", {"session_id": name, "password": target.password})[0] == 200
    said = first.choices[0].message.model_dump(exclude_none=True)
    prompt = target.post("/apply_template", {"messages": [*messages, said, result], "tools": [WEATHER]})["prompt"]
    block = f'```json\n{{"name":"get_weather","arguments":{call.function.arguments}}}\n```'
    assert f"Assistant: {block}\n\nUser: Function output:" in prompt


def check_older_functions(target: Target) -> None:
    """A1: what came before tools."""
    fields: Any = {"functions": [WEATHER["function"]], "function_call": {"name": "get_weather"}}
    choice = target.client().chat.completions.create(messages=HELLO, **fields, **LIMIT).choices[0]
    assert (choice.finish_reason, choice.message.function_call.name) == ("function_call", "get_weather")
    right(choice.message.function_call.arguments)


def check_sdk_responses_tools(target: Target) -> None:
    """A1: calls of tools in responses, whole, streamed, typed, and continued by id."""
    client = target.client()
    fields: Any = {
        "model": "m",
        "input": "Kyoto?",
        "tools": [FLAT, {"type": "web_search"}],
        "temperature": 1,
        "extra_body": {"seed": 7},
    }
    whole = client.responses.create(tool_choice="required", **fields)
    (call,) = whole.output
    right(call.arguments)
    assert (call.type, call.name, call.status, whole.status) == ("function_call", "get_weather", "completed", "completed")
    status, document, _ = target.request("POST", "/v1/responses", {"input": "a", "tools": [FLAT], "tool_choice": "required"})
    assert status == 200
    strictly(Response, document)
    events = list(client.responses.create(tool_choice="required", stream=True, **fields))
    assert [event.type for event in events[:3]] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert events[-2].type == "response.output_item.done"
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == events[-1].response.output[0].arguments
    assert len(pieces) > 3
    with client.responses.stream(tool_choice="required", **fields) as stream:
        assert stream.get_final_response().output[0].name == "get_weather"
    parsed = client.responses.parse(
        model="m", input="a", tools=[openai.pydantic_function_tool(GetWeather)], tool_choice="required"
    )  # fmt: skip
    assert isinstance(parsed.output[0].parsed_arguments, GetWeather)
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "12 C"}]
    second = client.responses.create(**fields | {"input": output}, previous_response_id=whole.id, max_output_tokens=9)
    assert second.usage.input_tokens < whole.usage.input_tokens, "the state has seen the tools"
    history: Any = [{"role": "user", "content": "Kyoto?"}, *whole.output, *output]
    assert client.responses.create(**fields | {"input": history}, max_output_tokens=9, store=False).output


def check_hostile_tools(target: Target) -> None:
    """Deep, long and wrong tools are refused in words within a second, and what can be served is."""
    deep: Any = {"type": "object"}
    for _ in range(70):
        deep = {"type": "object", "properties": {"a": deep}}
    many = {"type": "object", "properties": {f"property_{number}": {"type": "string"} for number in range(30_000)}}
    cases = [
        ([{"type": "function", "function": {"name": "f", "parameters": deep}}], None),
        ([{"type": "function", "function": {"name": "f", "parameters": many}}], "tools"),
        ([{"type": "function", "function": {"name": "f", "description": "d" * 1_000_000}}], "tools"),
        ([{"type": "function", "function": {"name": f"f{number}"}} for number in range(9000)], "tools"),
        ([{"type": "function", "function": {"name": "f" * 1_000_000}}], "tools[0]"),
    ]
    for tools, param in cases:
        for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/responses", {"input": "a"})):
            began = time.monotonic()
            status, answer, _ = target.request("POST", path, {**body, "tools": tools})
            assert status == 400, answer
            assert time.monotonic() - began < 2.0 * PATIENCE
            assert param is None or answer["error"]["param"] == param
    broken = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"$ref": "#/$defs/nothing"}}}}}  # fmt: skip
    body = {"messages": HELLO, "tools": [broken], "max_tokens": 2}
    status, answer, _ = target.request("POST", "/v1/chat/completions", {**body, "tool_choice": "required"})
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert target.post("/v1/chat/completions", body)["choices"], "where no call is forced no grammar is made"


def needs(package: str) -> None:
    """Skip, by name, where a package is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")


def check_langchain_tools(target: Target) -> None:
    """A2: bind_tools, and structured output by calls and by schemas."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    settings: Any = {
        "base_url": target.url + "/v1",
        "api_key": target.password or "any",
        "model": "m",
        "max_retries": 0,
        "seed": 7,
    }
    model = ChatOpenAI(**settings, max_tokens=200)
    bound = model.bind_tools([GetWeather], tool_choice="any")
    answer = bound.invoke("Kyoto?")
    assert [call["name"] for call in answer.tool_calls] == ["GetWeather"]
    GetWeather.model_validate(answer.tool_calls[0]["args"])
    whole = None
    for chunk in bound.stream("Kyoto?"):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == answer.tool_calls[0]["args"]
    result = ToolMessage('{"temperature":12}', tool_call_id=answer.tool_calls[0]["id"])
    assert model.bind_tools([GetWeather]).invoke([HumanMessage("Kyoto?"), answer, result]).response_metadata["finish_reason"]
    for method in ("function_calling", "json_schema"):
        assert isinstance(model.with_structured_output(GetWeather, method=method).invoke("Kyoto?"), GetWeather)
    del settings["seed"]
    responses = ChatOpenAI(**settings, use_responses_api=True).bind_tools([GetWeather], tool_choice="any")
    assert [call["name"] for call in responses.invoke("Kyoto?").tool_calls] == ["GetWeather"]


def check_pydantic_ai(target: Target) -> None:
    """An agent whose result comes by a call, or by a schema, over chats and over responses."""
    needs("pydantic_ai")
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=target.url + "/v1", api_key=target.password or "any")
    for model in (OpenAIChatModel("m", provider=provider), OpenAIResponsesModel("m", provider=provider)):
        for wanted in (GetWeather, NativeOutput(GetWeather)):
            found = Agent(model, output_type=wanted, retries=0, model_settings={"max_tokens": 200}).run_sync("Kyoto?")
            assert isinstance(found.output, GetWeather)


CHECKS = [
    check_sdk_tools, check_sdk_tools_streamed, check_sdk_parse, check_tool_loop, check_older_functions,
    check_sdk_responses_tools, check_hostile_tools,
]  # fmt: skip
LONG = [check_langchain_tools, check_pydantic_ai]
