"""The texts that models are asked with: chat, thinking, fill in the middle, translation. Pure functions and nothing else.

A blank line separates the blocks of a conversation, so no text inside a block may hold one.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from rwkv_batch.text.json_text import compact

# How a prompt ends that waits for the assistant. Each route keeps its own form without thinking (contract of the reference).
THINK = "Assistant: <think"
NO_THINK_V3 = "Assistant: <think>\n</think>"
NO_THINK = "Assistant: <think>\n</think>\n"

# How long a thought is asked for, by words behind the last user text; and a thought that begins in Chinese.
THOUGHT_LENGTHS = {"en": " (think)", "enShort": " (think a bit)", "enLong": " (think a lot)"}
CHINESE_THOUGHT = "嗯"
FUNCTION_OUTPUT = "Function output:\n"  # begins a user turn that brings a tool's result
CALL_MARK = "```json"  # begins a call of a tool
CALL_TAIL = f"Assistant: {CALL_MARK}"  # how a prompt ends that must be answered by a call

GAP = "\n\n"  # between the blocks of a conversation

FIM_MARK = "✿"  # one token of the World vocabulary; the model writes another one when it does not end

_THOUGHT = re.compile(r"\A\s*<?think>.*?</think>|\A\s*>.*?</think>", re.DOTALL)
_NEWLINES = re.compile(r"\n[\n\t ]*\n")


class Turn(NamedTuple):
    """One message of a conversation: role "system", "user" or "assistant"."""

    role: str
    text: str


class Call(NamedTuple):
    """A call of a tool in an earlier answer; `arguments` is JSON text."""

    name: str
    arguments: str


def chat_tail(*, think: bool, closed: str = NO_THINK) -> str:
    """The open Assistant block: with a thought begun, or with an empty one in the form `closed`."""
    return THINK if think else closed


def one_turn(text: str, tail: str, gap: str = GAP) -> str:
    """`text`, byte for byte, as the only turn."""
    return f"User: {text}{gap}{tail}"


def conversation(turns: list[Turn], tail: str, gap: str = GAP) -> str:
    """All turns and the open Assistant block, with `gap` between them.

    System texts come first, joined by a newline. Thoughts of earlier answers are left out, and so are turns without text.
    """
    system = "\n".join(text for turn in turns if turn.role == "system" and (text := clean(turn.text)))
    blocks = [f"System: {system}"] if system else []
    for role, text in turns:
        if role == "assistant":
            text = without_thought(text)
        if role in ("user", "assistant") and (text := clean(text)):
            blocks.append(f"{role.capitalize()}: {text}")
    return gap.join([*blocks, tail])


def with_calls(text: str, calls: Iterable[Call]) -> str:
    """What an assistant's turn with calls of tools holds: its text, and each call in a block as the models write it."""
    blocks = [
        f'{CALL_MARK}\n{{"name":{compact(call.name)},"arguments":{call.arguments.strip() or "{}"}}}\n```' for call in calls
    ]
    return "\n".join([text, *blocks] if text else blocks)


def clean(text: str) -> str:
    """Make a text fit for a block: newlines as \\n, blank lines closed up, ends trimmed; indentation stays."""
    return _NEWLINES.sub("\n", text.replace("\r\n", "\n").replace("\r", "\n")).strip()


def without_thought(text: str) -> str:
    """An answer without the thought it begins with, which may lack its opening `<think` as sampled answers do."""
    return _THOUGHT.sub("", text, count=1)


def fill_in(prefix: str, suffix: str) -> str:
    """Fill in the middle: the prefix comes last, so that the model goes on behind it."""
    return f"{FIM_MARK}prefix{FIM_MARK}{FIM_MARK}suffix{FIM_MARK}{suffix}{FIM_MARK}middle{FIM_MARK}{prefix}"


def translation(source: str, target: str, text: str) -> str:
    """Translate `text`, which holds no blank line, between two languages given by their names."""
    return f"{source}: {text}\n\n{target}:"


def translation_stops(names: list[str]) -> list[str]:
    """What ends a translation: a blank line, or the next field in one of the languages."""
    return ["\n\n", *(f"\n{name}:" for name in names)]
