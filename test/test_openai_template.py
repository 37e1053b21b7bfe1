"""The Jinja chat template renders what the server itself makes of a conversation, in the environments that tools use."""

import jinja2
import jinja2.sandbox
import pytest
import quiet_robyn  # noqa: F401
from hypothesis import example, given
from hypothesis import strategies as st

from routes.openai.schemas import Conversation
from routes.openai.template import CHAT_TEMPLATE
from rwkv_batch.errors import InvalidRequest

SETTINGS = {
    "plain": jinja2.Environment(),
    "lm-evaluation-harness": jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True),
    "transformers": jinja2.sandbox.ImmutableSandboxedEnvironment(
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
MESSAGES = st.fixed_dictionaries({"role": ROLES, "content": CONTENTS}, optional={"refusal": TEXTS | st.none()})


def served(messages: list[dict], *, think: bool) -> str:
    """What the server makes of the conversation."""
    return Conversation.model_validate({"messages": messages, "enable_thinking": think}).templated()


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
