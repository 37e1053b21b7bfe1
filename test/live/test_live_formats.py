"""Answers held to schemas, regexes and grammars on a real socket, by a model that would say anything."""

import json
import re
import threading
import time
from enum import Enum
from typing import Any

import pydantic
import pytest

pytest.importorskip("openai", reason="needs the SDK openai: requirements-test.txt")

from openai_checks import HELLO, Target


class Mood(Enum):
    GOOD = "good"
    BAD = "bad"


class Person(pydantic.BaseModel):
    """What the model must tell."""

    name: str = pydantic.Field(max_length=9)
    age: int = pydantic.Field(ge=0, le=150)
    mood: Mood
    friends: list[bool] = pydantic.Field(max_length=2)


REGEX = "[a-f]{2,5}-[0-9]{3}"
HOSTILE = {"type": "string", "allOf": [{"pattern": f".*a.{{{number}}}"} for number in range(10, 25)]}


@pytest.fixture(scope="module")
def target(random_model) -> Target:
    return Target(f"http://{random_model.host}:{random_model.port}")


def test_sdk_parses_what_comes(target):
    client = target.client()
    chat = client.chat.completions.parse(model="m", messages=HELLO, response_format=Person, max_tokens=200)
    assert isinstance(chat.choices[0].message.parsed, Person)
    assert chat.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(model="m", messages=HELLO, response_format=Person, max_tokens=200) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)
    response = client.responses.parse(model="m", input="a", text_format=Person, max_output_tokens=200)
    assert isinstance(response.output_parsed, Person)
    assert response.text.format.type == "json_schema"
    following = client.responses.parse(
        model="m", input="b", text_format=Person, previous_response_id=response.id, max_output_tokens=200
    )
    assert isinstance(following.output_parsed, Person)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": REGEX}, REGEX),
        ({"structured_outputs": {"choice": ["red", "dark blue"]}}, "red|dark blue"),
        ({"guided_grammar": 'start: "<" start ">" | "x"'}, "<*x>*"),
        ({"grammar": 'root ::= "a" [0-9] [0-9]'}, "a[0-9]{2}"),
        ({"guided_json": {"const": {"k": [1, 2]}}}, re.escape('{"k": [1, 2]}')),
    ],
)
def test_each_route_follows(target, fields, pattern):
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO, "n": 2, "logprobs": True}),
        ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 1, "ignore_eos": True}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/chat/completions", {"contents": ["a", "b"]}),
        ("/v2/chat/completions", {"contents": ["a", "b"]}),
        ("/v3/chat/completions", {"messages": HELLO}),
    ):
        answer = target.post(path, {**body, **fields, "max_tokens": 60, "temperature": 1})
        texts = [choice.get("text") or choice["message"]["content"] for choice in answer.get("choices", ())]
        for text in texts or [answer["output"][0]["content"][0]["text"]]:
            assert re.fullmatch(pattern, text), (path, text)


def test_a_session_and_a_thought(target):
    body = {"messages": HELLO, "session_id": f"formats-{time.time_ns()}", "guided_regex": REGEX, "max_tokens": 60}
    for _ in range(2):
        answer = target.post("/v1/chat/completions", body)
        assert re.fullmatch(REGEX, answer["choices"][0]["message"]["content"])
    thinking = {"messages": HELLO, "think_type": "preferChinese", "guided_regex": REGEX, "max_tokens": 20}
    choice = target.post("/v1/chat/completions", thinking)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) in (("length", ""), ("length", None)), "all of it is thought"


def test_bad_grammars_are_refused_while_others_are_answered(target):
    with_hostile: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            began = time.perf_counter()
            assert target.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2})["choices"]
            with_hostile.append(time.perf_counter() - began)
            time.sleep(0.05)

    thread = threading.Thread(target=ask)
    thread.start()
    bad: list[tuple[dict[str, Any], str]] = [
        ({"guided_json": HOSTILE}, "guided_json"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"response_format": {"type": "json_object", "schema": {"uniqueItems": True}}}, "response_format"),
        ({"guided_grammar": "start: (" * 5000}, "guided_grammar"),
        ({"guided_json": json.dumps({"items": {}, "description": "x" * 2**20})}, "guided_json"),
    ]
    try:
        for fields, param in bad:
            status, answer, _ = target.request("POST", "/v1/chat/completions", {"messages": HELLO, "stream": True, **fields})
            assert (status, answer["error"]["param"].startswith(param)) == (400, True), answer
    finally:
        stop.set()
        thread.join()
    assert with_hostile, "others are answered meanwhile"
