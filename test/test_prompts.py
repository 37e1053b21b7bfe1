"""The templates, to the token."""

import time

import pytest
from models import tokenizer_for

from rwkv_batch.text.prompts import (
    NO_THINK,
    NO_THINK_V3,
    THINK,
    Turn,
    chat_tail,
    clean,
    conversation,
    fill_in,
    one_turn,
    translation,
    translation_stops,
    without_thought,
)

encode = tokenizer_for(65536).encode


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (one_turn("hi", NO_THINK), [24281, 59, 4571, 261, 5585, 41693, 59, 295, 35762, 63, 11, 754, 35762, 63, 11]),
        (one_turn("hi", THINK), [24281, 59, 4571, 261, 5585, 41693, 59, 295, 35762]),
        (translation("English", "Chinese", "Hello"), [48487, 59, 36786, 261, 48407, 59]),
        (fill_in("a", "b"), [10060, 42093, 10060, 10060, 42337, 10060, 99, 10060, 41851, 10060, 98]),
    ],
    ids=["no thinking", "thinking", "translation", "fill in the middle"],
)
def test_token_sequences(text, ids):
    """Contract 9, line 27: the token check values of 2.2 and 2.4."""
    assert encode(text) == ids


def test_v3_has_the_tails_of_version_a():
    """Contract 1.5 and decision (d): no newline behind the closing tag."""
    assert one_turn("x", chat_tail(think=False, closed=NO_THINK_V3)) == "User: x\n\nAssistant: <think>\n</think>"
    assert one_turn("x", chat_tail(think=True, closed=NO_THINK_V3)) == "User: x\n\nAssistant: <think"
    assert chat_tail(think=False) == "Assistant: <think>\n</think>\n"


def test_conversation_joins_blocks_by_one_blank_line():
    turns = [Turn("user", "a"), Turn("assistant", "b"), Turn("system", "s1"), Turn("user", "c"), Turn("system", "s2")]
    assert conversation(turns, THINK) == "System: s1\ns2\n\nUser: a\n\nAssistant: b\n\nUser: c\n\nAssistant: <think"


def test_turns_without_text_and_of_other_roles_are_left_out():
    assert conversation([Turn("user", " \n"), Turn("tool", "t"), Turn("user", "a")], THINK) == f"User: a\n\n{THINK}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n a \n", "a"),
        ("a\r\n\r\nb\rc", "a\nb\nc"),
        ("a\n\n\n\nb", "a\nb"),
        ("def f():\n\n    return 1\n \t\n    # end", "def f():\n    return 1\n    # end"),
        ("", ""),
    ],
)
def test_clean_closes_blank_lines_up_and_keeps_indentation(text, expected):
    assert clean(text) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<think>\nhm\n</think>\nYes", "\nYes"),
        (">hm</think>Yes", "Yes"),
        ("think>hm</think>Yes", "Yes"),
        ("Yes", "Yes"),
        ("a <think>b</think>", "a <think>b</think>"),
        ("> quoted", "> quoted"),
    ],
)
def test_thoughts_of_earlier_answers_are_dropped(answer, expected):
    assert without_thought(answer) == expected
    assert "hm" not in conversation([Turn("user", "a"), Turn("assistant", answer)], NO_THINK)


def test_translations_end_at_a_blank_line_and_at_the_next_field():
    assert translation_stops(["English", "Chinese"]) == ["\n\n", "\nEnglish:", "\nChinese:"]


@pytest.mark.parametrize(
    "piece", [" ", "\n", "\n ", " \n", "\r", " \t", ">", "<think", "<think>", "</think", "think>", " <think>\n"]
)
def test_time_grows_with_the_text_only(piece):
    """Thirty times the text takes nowhere near nine hundred times as long."""

    def seconds(num_characters: int) -> float:
        text = piece * (num_characters // len(piece))
        began = time.process_time()
        for turn in (Turn("user", f"a{text}b"), Turn("assistant", text), Turn("assistant", f"<think{text}")):
            conversation([turn], NO_THINK)
        return time.process_time() - began

    assert seconds(600_000) < 120 * max(seconds(20_000), 0.002)
