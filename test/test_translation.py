"""Paragraphs, placeholders and the memory of translated sentences."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rwkv_batch.text import translation
from rwkv_batch.text.languages import has_letters
from rwkv_batch.text.translation import Memory, Placeholders, split_paragraphs, token_limit


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a", ["a"]),
        ("", [""]),
        ("  a\n", ["", "  ", "a", "\n", ""]),
        ("a b\nc\n\nd", ["a b\nc", "\n\n", "d"]),
        ("a \r\n \t\r\n b", ["a", " \r\n \t\r\n ", "b"]),
        (" \n\n ", ["", " \n\n ", ""]),
    ],
)
def test_paragraphs_are_cut_at_blank_lines(text, parts):
    assert split_paragraphs(text) == parts


@given(st.text(alphabet="ab\n\r \t\u3000{0}", max_size=60))
def test_parts_joined_are_the_text(text):
    parts = split_paragraphs(text)
    assert "".join(parts) == text
    assert len(parts) % 2 == 1
    assert all(part == part.strip() and "\n\n" not in part for part in parts[::2])
    assert all(not gap.strip() for gap in parts[1::2])


@given(st.text(alphabet="ab\n\r \t\x1f\u2028\u3000", max_size=40))
def test_gaps_are_the_white_space_at_the_ends_and_that_of_two_newlines(text):
    gaps = [gap for gap in re.finditer(r"\s+", text) if gap.start() == 0 or gap.end() == len(text) or gap[0].count("\n") > 1]
    assert split_paragraphs(text)[1::2] == [gap[0] for gap in gaps]


def test_placeholders():
    """Contract 1.8: {0}, <b0>…</b0>, and those listed."""
    placeholders = Placeholders(["%s", "__NAME__", "{", "b"])
    text = "Dear __NAME__, <b0>%s</b0> of {0} and {12}{0}; a < b > {name} <b>"
    assert placeholders.found(text) == {"__NAME__": 1, "<b0>": 1, "%s": 1, "</b0>": 1, "{0}": 2, "{12}": 1}
    parts = placeholders.cut(text)
    assert "".join(parts) == text
    assert parts[1::2] == ["__NAME__", "<b0>", "%s", "</b0>", "{0}", "{12}", "{0}"]
    assert placeholders.without("{0}<b1>5</b1>").strip() == "5"
    assert Placeholders().found("{0} __NAME__") == {"{0}": 1}


def test_placeholders_are_found_over_the_borders_of_what_is_searched_at_once(monkeypatch):
    monkeypatch.setattr(translation, "SLICE", 7)
    placeholders = Placeholders(["%a-name%", "aa"])
    for text in ("{0}" * 20, "a" * 33, "x%a-name%" * 9, "{12}{{3}}<b4 ><c5/></d6>" * 5, "{1234567}{" * 8):
        for start in range(9):
            found = re.findall(r"%a-name%|aa|\{\{?\d{1,6}\}?\}|</?[A-Za-z]{1,16}\d{1,6}\s?/?>", text[start:])
            assert placeholders.cut(text[start:])[1::2] == found
            assert placeholders.found(text[start:]).total() == len(found)


def test_no_search_of_a_long_text_holds_up_other_threads():
    """What stands still here stands still in every stream of the process."""
    longest, last, stop = 0.0, time.monotonic(), threading.Event()

    def watch():
        nonlocal longest, last
        while not stop.wait(0.001):
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    text = "{1" * 2**21
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        began = time.monotonic()
        for look in (Placeholders().found, Placeholders().without, split_paragraphs, has_letters):
            look(text)
        took = time.monotonic() - began
        stop.set()
        watching.result()
    assert longest < took / 8


def test_marks_of_the_extensions_settings_are_no_placeholders():
    assert not Placeholders(["{", "}", "b"]).found("a big {book}")


def test_the_longest_placeholder_counts():
    assert Placeholders(["<x>", "<x><y>"]).found("<x><y>") == {"<x><y>": 1}


@pytest.mark.parametrize(
    ("num", "ratio", "many", "limit"), [(1, 3, False, 64), (10, 3, False, 64), (20, 3, False, 128), (100, 3, True, 640)]
)
def test_limits_grow_with_the_text(num, ratio, many, limit):
    assert token_limit(num, ratio, many=many) == limit


def test_the_memory_is_bounded_and_forgets_what_was_not_used():
    memory = Memory(max_bytes=5000)
    memory.put(("a", "en", "de"), "A")
    for number in range(100):
        memory.get(("a", "en", "de"))
        memory.put((f"text {number}", "en", "de"), "x" * 100)
        assert memory.num_bytes <= 5000
    assert 3 < len(memory) < 12
    assert memory.get(("a", "en", "de")) == "A"
    assert memory.get(("text 0", "en", "de")) is None
    assert memory.get(("text 99", "en", "de")) == "x" * 100
    memory.put(("text 99", "en", "de"), "y")
    assert memory.get(("text 99", "en", "de")) == "y"


def test_a_memory_of_nothing_remembers_nothing():
    memory = Memory(0)
    memory.put(("a",), "b")
    assert (len(memory), memory.num_bytes) == (0, 0)


@pytest.mark.parametrize(
    "piece",
    [" ", "\n", "\n ", " \n", "a ", "  a", "a\n", "a\n\n", "{", "<", "</a", "{1", "{{1}", "<aaaaaaaaaaaaaaaa1", "{123456"],
)
def test_time_grows_with_the_text_only(piece):
    """Thirty times the text takes nowhere near nine hundred times as long."""

    def seconds(num_characters: int) -> float:
        text = piece * (num_characters // len(piece)) + "x"
        began = time.process_time()
        split_paragraphs(text)
        Placeholders(["%s", "{{{"]).found(text)
        return time.process_time() - began

    assert seconds(600_000) < 120 * max(seconds(20_000), 0.002)
