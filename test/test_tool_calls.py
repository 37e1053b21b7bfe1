"""Calls of tools told from text: every form, any borders of pieces, nothing lost, in linear time."""

import json
import time
from itertools import groupby, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rwkv_batch.text.call_reader import decoded
from rwkv_batch.text.tool_calls import CallArguments, CallBegan, CallEnded, Piece, Text, ToolCallParser

NAMES = ("f", "get_weather")


def merged(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring texts and arguments are joined, since borders do not matter."""
    found = []
    for kind, group in groupby(enumerate(pieces), lambda pair: (type(pair[1]), pair[0] * (not hasattr(pair[1], "text")))):
        items = [piece for _, piece in group]
        joins = kind[0] in (Text, CallArguments)
        found.append(items[0]._replace(text="".join(piece.text for piece in items)) if joins else items[0])
    return found


def parse(*texts: str, **settings) -> list[Piece]:
    parser = ToolCallParser(NAMES, **settings)
    return merged([*(piece for text in texts for piece in parser.feed(text)), *parser.finish()])


def call(index: int, name: str, arguments: str) -> list[Piece]:
    return [CallBegan(index, name), CallArguments(index, arguments), CallEnded(index)]


ONE = call(0, "f", '{"a":1}')


@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"name":"f","arguments":{"a":1}}\n```',
        '```json\n{"name":"f","arguments":{"a":1}}',
        '\n\n```json{"name" : "f" ,\n "arguments" :{"a":1} }```\n',
        '```\n{"name":"f","arguments":{"a":1}}\n```',
        '```tool_call\n{"name":"f","arguments":{"a":1}}\n```',
        '<tool_call>\n{"name":"f","arguments":{"a":1}}\n</tool_call>',
        '<tool_call>```json\n{"name":"f","arguments":{"a":1}}\n```\n</tool_call>',
        '**Tool Call:**\n```json\n{"name":"f","arguments":{"a":1}}\n```',
        '{"name":"f","arguments":{"a":1}}',
        '[{"name":"f","arguments":{"a":1}}]',
        '```json\n{"name":"f","parameters":{"a":1}}\n```',
        '```json\n{"arguments":{"a":1},"name":"f"}\n```',
        '```json\n{"name":"f","arguments":"{\\"a\\": 1}"}\n```',
        '```json\n{"type":"function","function":{"name":"f","arguments":{"a":1}}}\n```',
        '```json\n{"id":"x","type":"function","name":"f","arguments":{"a":1},"more":[{"name":"f"}]}\n```',
        '```json\n{"na\\u006de":"\\u0066","arguments":{"a":1}}\n```',
        '```json\n{"name":"f","arguments":{"a":1}}\n``',  # cut off
        '<tool_call>{"name":"f","arguments":{"a":1}}</tool_',
    ],
)
def test_forms_of_a_call(text):
    assert parse(text) == parse(*text) == ONE


def test_text_around_a_call_stays():
    block = '```json\n{"name":"f","arguments":{"a":1}}\n```'
    assert parse(f"Let me look.\n\n{block}\n") == [Text("Let me look."), *ONE]
    assert parse(f"{block}\nDone.\n") == [*ONE, Text("\nDone.")], "white space at the very end is nothing beside a call"
    assert parse(f"a `b` {block}\n ```c") == [Text("a `b`"), *ONE, Text("\n ```c")]


def test_several_calls():
    both = [*ONE, *call(1, "get_weather", '{"city":"Kyoto"}')]
    first, second = '{"name":"f","arguments":{"a":1}}', '{"name":"get_weather","arguments":{"city":"Kyoto"}}'
    for text in (
        f"```json\n{first}\n```\n```json\n{second}\n```", f"```json\n[{first},\n{second}]\n```",
        f"<tool_call>{first}</tool_call><tool_call>{second}</tool_call>", f"<tool_call>\n{first}\n{second}\n</tool_call>",
        f"[{first}, {second}]",
    ):  # fmt: skip
        assert parse(text) == parse(*text) == both, text
        assert parse(text, limit=1) == both[:3]


def test_arguments_come_as_they_are_written():
    """In pieces, brackets and marks inside strings among them; a line break that JSON forbids is mended."""
    parser = ToolCallParser(NAMES)
    assert parser.feed('```json\n{"name":"f","arguments":') == []
    assert parser.feed('{"code":"if x {\n\t```json') == [CallBegan(0, "f"), CallArguments(0, '{"code":"if x {\\n\\t```json')]
    assert parser.feed('\\"}') == [CallArguments(0, '\\"}')]
    assert parser.feed('", "b": [{}]}') == [CallArguments(0, '", "b": [{}]}')]
    assert parser.feed("}\n") == [CallEnded(0)]
    assert parser.feed("```") == parser.finish() == []


def test_arguments_that_are_not_there_are_an_empty_object():
    for arguments in ("", ',"arguments":null', ',"arguments":""', ',"arguments":{}', ',"arguments":"{}"'):
        assert parse(f'```json\n{{"name":"f"{arguments}}}\n```') == call(0, "f", "{}"), arguments


@pytest.mark.parametrize(
    "text",
    [
        "", " \n", "plain", "  both ends \n", "```", "``` ", "```json", "```json\n", "<tool_call>", "**Tool Call:** none",
        '```json\n{"a": 1}\n```\nThat was JSON.', '```json\n{"name":"unknown","arguments":{}}\n```', "```json\n[1, 2]\n```",
        '{"name":"f","age":3}', '{"name":"f","arguments":[1]}', '{"name":"f","arguments":3}', '{"name":{"f":1}}', "{}", "[",
        '{"type":"object","properties":{}}', '```json\n{"name":"f","argu', '{"name":"f" "arguments":',
        '{"arguments":{},"name":"g"}',
        "```json\n```json\nx", "x <tool_call", '{"name":"\\x","arguments":{}}', "}{", '{"name":"f","arguments":"no"}', '{"a":',
        '["name"]', "[{}]",
    ],
)  # fmt: skip
def test_what_is_no_call_is_text(text):
    assert parse(text) == parse(*text) == ([Text(text)] if text else [])


def test_a_call_that_is_cut_off_never_ends():
    assert parse('```json\n{"name":"f","arguments":{"a":"b') == [CallBegan(0, "f"), CallArguments(0, '{"a":"b')]
    assert parse('```json\n{"name":"f","arguments":{"a":1}') == ONE[:2]


def test_a_reply_can_begin_inside_its_block():
    assert parse('\n{"name":"f","arguments":{"a":1}}\n```', opened=True) == ONE
    assert parse('{"name":"f","arguments":{"a":1}}\n```\nEnd', opened=True) == [*ONE, Text("\nEnd")]


def test_nothing_is_looked_for_in_a_thought():
    text = '>```json\n{"name":"f","arguments":{}}\n```</think>\n\n```json\n{"name":"f","arguments":{"a":1}}\n```'
    right = [Text('>```json\n{"name":"f","arguments":{}}\n```</think>'), *ONE]
    assert parse(text, after="</think>") == parse(*text, after="</think>") == right
    assert parse("> never </thin", after="</think>") == [Text("> never </thin")]


PARTS = st.sampled_from(
    ["```json\n", "```", "```\n", "<tool_call>", "</tool_call>", "**Tool Call:**", '{"name":"f",', '"arguments":', '{"a":"',
     '"}}', "}", "{", "[", "]", ",", '"', "\\", "\n", " ", "text", '{"name":"f","arguments":{"a":1}}',
     '{"name":"no","arguments":{}}',
     '{"arguments":{},"name":"f"}', "`", "<", "*", "</think>", '{"x":1}', "null", "\x00", "\u2028", "世"]
)  # fmt: skip
REPLIES = st.lists(PARTS, max_size=14).map("".join) | st.text(alphabet='`{}[]":,\\fname <>/\n', max_size=30)
SETTINGS = st.fixed_dictionaries({}, optional={"opened": st.booleans(), "limit": st.just(1), "after": st.just("</think>")})


@given(REPLIES, st.lists(st.integers(0, 60), max_size=12), SETTINGS)
@example('{"name":"f","arguments":{"a":"\\"}}', [28, 29, 30], {})
@example('<tool_call>{"name":"f","arguments":{}}</tool_call>', [46, 47], {"opened": True})
def test_borders_do_not_matter_and_nothing_is_lost(reply, cuts, settings):
    places = sorted({0, len(reply), *(cut for cut in cuts if cut < len(reply))})
    pieces = parse(*(reply[begin:end] for begin, end in pairwise(places)), **settings)
    assert pieces == parse(reply, **settings) == parse(*reply, **settings)
    if not any(isinstance(piece, CallBegan) for piece in pieces):
        assert "".join(piece.text for piece in pieces) == reply
    for ended in (piece.index for piece in pieces if isinstance(piece, CallEnded)):
        assert any(isinstance(piece, CallBegan) and piece.index == ended for piece in pieces)


@given(
    st.dictionaries(
        st.text(max_size=8), st.recursive(st.none() | st.integers() | st.text(max_size=12), st.lists, max_leaves=8), max_size=4
    ),
    st.sampled_from(["```json\n{}\n```", "<tool_call>{}</tool_call>", "{}"]),
    st.booleans(),
    st.integers(1, 9),
)
def test_what_was_written_is_what_comes_out(arguments, block, indented, size):
    text = json.dumps({"name": "get_weather", "arguments": arguments}, indent=2 if indented else None, ensure_ascii=False)
    reply = block.replace("{}", text)
    pieces = parse(*(reply[begin : begin + size] for begin in range(0, len(reply), size)))
    assert [type(piece) for piece in pieces] == [CallBegan, CallArguments, CallEnded]
    assert json.loads(pieces[1].text) == arguments


HOSTILE = {
    "text": "a b\n", "blanks": " ", "fences": "```\n", "marks": "**Tool Call:**", "lists": "[", "braces": "{",
    "empty": '```json\n{"a":1}\n', "calls": '```json\n{"name":"f","arguments":{}}\n```\n',
    "text in arguments": ('{"name":"f","arguments":{"a":"', "x\\n"), "deep": ('{"name":"f","arguments":', '{"a":'),
    "deep, judged late": ('{"arguments":', '{"a":'),
    "late": ('{"arguments":{"a":"', "\\n"), "key": ('{"', "a"), "name": ('{"name":"', "f"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_time_is_linear(name):
    """Ten times the reply in little more than ten times the time, in small pieces and as a whole."""
    start, unit = HOSTILE[name] if isinstance(HOSTILE[name], tuple) else ("", HOSTILE[name])

    def seconds(size: int, step: int) -> float:
        reply = start + unit * (size // len(unit))
        pieces = [reply[begin : begin + step] for begin in range(0, len(reply), step)]
        parser, began = ToolCallParser(NAMES), time.process_time()
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
        return time.process_time() - began

    for step, size in ((4, 2_000), (10**7, 20_000)):
        small = min(seconds(size, step) for _ in range(2))
        assert seconds(size * 10, step) < 40 * small + 0.02


@pytest.mark.long
@pytest.mark.parametrize("name", HOSTILE)
def test_a_reply_of_a_megabyte_takes_seconds(name):
    start, unit = HOSTILE[name] if isinstance(HOSTILE[name], tuple) else ("", HOSTILE[name])
    reply = start + unit * (2**20 // len(unit))
    for step in (4, 10**7):
        parser, began = ToolCallParser(NAMES), time.process_time()
        for begin in range(0, len(reply), step):
            parser.feed(reply[begin : begin + step])
        parser.finish()
        assert time.process_time() - began < 15


def test_decoding_never_fails():
    for text in ("", "[1]", '"f"', "{", '{"name":1}', '{"name":"f","arguments":"["}', "[" * 100_000, '{"function":1}'):
        assert decoded(text) is None or decoded(text)[1] == "{}"
    assert decoded('{"name":"f","arguments":{"a":"\\ud800"}}') == ("f", '{"a":"\\ud800"}'), "it can be sent"
