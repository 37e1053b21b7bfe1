"""The Jinja chat template renders what the server itself makes of a conversation, in the environments that tools use."""

import pytest
import quiet_robyn  # noqa: F401
from hypothesis import example, given
from hypothesis import strategies as st

from routes.openai.conversation import Conversation
from rwkv_batch.errors import InvalidRequest
from rwkv_batch.text.chat_template import CHAT_TEMPLATE

jinja2 = pytest.importorskip("jinja2", reason="needs jinja2: requirements-test.txt")
sandbox = pytest.importorskip("jinja2.sandbox")

SETTINGS = {
    "plain": jinja2.Environment(),
    "lm-evaluation-harness": jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True),
    "transformers": sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    ),
}
TEMPLATES = {name: environment.from_string(CHAT_TEMPLATE) for name, environment in SETTINGS.items()}

PIECES = st.sampled_from(
    ["a", "Hello", " ", "  ", "\n", "\n\n", "\r\n", "\r", "\t", "\x0b", "\x1c", "\u3000", "\u2028", "<think>", "</think>", ">",
     "think>", "<", "你好", "User: b", "System:", "{{ x }}", "{%", "%}", "\\n", "'", '"', "<|endoftext|>"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=9).map("".join) | st.text(max_size=9)
PARTS = st.one_of(
    TEXTS,
    st.builds(lambda kind, text: {"type": kind, "text": text}, st.sampled_from(["text", "input_text", "output_text"]), TEXTS),
    st.builds(lambda text: {"type": "refusal", "refusal": text}, TEXTS),
)
ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool", "function", "User", "ASSISTANT"])
CONTENTS = TEXTS | st.none() | st.lists(PARTS, max_size=3)
NAMED = st.sampled_from(["f", "get.weather", "世界"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)
ARGUMENTS = TEXTS | OBJECTS | st.none()
CALLED = st.fixed_dictionaries({"name": NAMED, "arguments": ARGUMENTS})
CALLS = st.lists(st.builds(lambda call: {"id": "call_1", "type": "function", "function": call}, CALLED), max_size=2)
MESSAGES = st.fixed_dictionaries(
    {"role": ROLES, "content": CONTENTS},
    optional={"refusal": TEXTS | st.none(), "tool_calls": CALLS | st.none(), "function_call": CALLED | st.none()},
)
SCHEMAS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.just("object"),
        "properties": st.dictionaries(st.sampled_from("abc\n"), VALUES, max_size=3) | st.none(),
        "required": st.lists(st.sampled_from("abcd"), max_size=3) | st.none(),
        "$defs": OBJECTS,
        "definitions": OBJECTS | st.none(),
    },
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": NAMED}, optional={"description": TEXTS | st.none(), "parameters": SCHEMAS | st.none(), "strict": st.booleans()}
)
TOOLS = st.lists(
    st.one_of(
        st.builds(lambda function: {"type": "function", "function": function}, FUNCTIONS),
        FUNCTIONS,
        st.just({"type": "web_search"}),
    ),
    max_size=3,
    unique_by=lambda tool: tool.get("function", tool).get("name"),
)


def served(messages: list[dict], *, think: bool, **more) -> str:
    """What the server makes of the conversation."""
    return Conversation.model_validate({"messages": messages, "enable_thinking": think, **more}).templated()


@given(st.lists(MESSAGES, max_size=6), st.booleans())
@example([{"role": "user", "content": "  a\n \n\n  b \n\t"}], False)
@example([{"role": "assistant", "content": " <think>a</think></think>b"}, {"role": "user", "content": "c"}], False)
@example([{"role": "assistant", "content": ">a"}, {"role": "assistant", "content": ">a</think>\n\nb"}], True)
@example([{"role": "tool", "content": "\n\n5\n\n6 "}, {"role": "tool", "content": ""}], False)
@example(
    [{"role": "user", "content": "a"}, {"role": "system", "content": "S"}, {"role": "developer", "content": "D\n\nE"}], False
)
@example([{"role": "tool", "content": "", "refusal": "a"}, {"role": "assistant", "content": [], "refusal": "b"}], False)
@example([{"role": "tool", "content": "<think>a</think>b"}, {"role": "user", "content": "<think>a</think>b"}], False)
def test_the_template_renders_as_the_server_does(messages, think):
    try:
        right = served(messages, think=think)
    except InvalidRequest:  # nobody says anything
        return
    for name, template in TEMPLATES.items():
        assert template.render(messages=messages, add_generation_prompt=True, enable_thinking=think) == right, name
        if not think:
            assert template.render(messages=messages, add_generation_prompt=True) == right, name


@given(TOOLS, st.sampled_from(["auto", "required", None]), st.booleans(), st.sampled_from(["", "Be kind."]))
def test_tools_are_told_as_the_server_tells_them(tools, choice, think, system):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "a"}]
    more = {"tools": tools, "tool_choice": choice}
    try:
        right = served(messages, think=think, **more)
    except InvalidRequest:  # a call is required, and there is nothing to call
        return
    for name, template in TEMPLATES.items():
        assert template.render(messages=messages, add_generation_prompt=True, enable_thinking=think, **more) == right, name


def test_the_trained_form():
    """Byte for byte what the models were trained on, see RWKV7-G1x-templates.txt."""
    properties = {"date": {"type": "string"}, "duration_minutes": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": "find_free_slots", "description": "Find free calendar slots", "parameters": parameters}
    call = {"name": "find_free_slots", "arguments": '{"date":"2026-05-08","duration_minutes":30}'}
    messages = [
        {"role": "user", "content": "Schedule a sync."},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"free_slots":[]}'},
    ]
    tools = [{"type": "function", "function": function}]
    assert served(messages, think=False, tools=tools, tool_choice="required") == (
        'System: Tools:\n[\n{"name":"find_free_slots","description":"Find free calendar slots",'
        '"arguments":{"date":{"type":"string"},"duration_minutes":{"type":"integer"}}}\n]\nReturn only a JSON function call.'
        "\n\nUser: Schedule a sync."
        '\n\nAssistant: ```json\n{"name":"find_free_slots","arguments":{"date":"2026-05-08","duration_minutes":30}}\n```'
        '\n\nUser: Function output:\n{"free_slots":[]}\n\nAssistant: ```json'
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_an_open_answer_the_last_message_ends_the_text(name):
    """So that a tool can let the model go on with it; with more messages the text goes on."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer is"}]
    closed = TEMPLATES[name].render(messages=messages, add_generation_prompt=False)
    assert closed == "User: a\n\nAssistant: The answer is"
    assert served([*messages, {"role": "user", "content": "b"}], think=False).startswith(closed + "\n\n")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "message",
    [{"role": "robot", "content": "a"}, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
)
def test_what_the_server_refuses_is_not_rendered(name, message):
    with pytest.raises(jinja2.UndefinedError):  # transformers defines raise_exception, which raises an error of its own
        TEMPLATES[name].render(messages=[message], add_generation_prompt=True)
