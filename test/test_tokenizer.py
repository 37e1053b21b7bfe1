"""The two vocabularies: known ids, slices equal to the whole, both equal to other encoders, bytes for every id."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pyrwkv_tokenizer
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import ROOT, tokenizer_for

from rwkv_batch.errors import CheckpointError, InvalidRequest
from rwkv_batch.text import tokenizer as tokenizer_module
from rwkv_batch.text.tokenizer import WORLD_FILE, WORLD_ROWS, Tokenizer, for_vocab

WORLD, BYTE = tokenizer_for(WORLD_ROWS), tokenizer_for(256)
SHA256 = "e6dee3d4e31b4d5c40ac99508ac6c701ceef4bed681bf2167ce9a908552bca89"  # the file RWKV World models were trained with

FRAGMENTS = [
    *("\n", "\n\n", "\r\n", "\t", " ", "    ", " " * 32, "=" * 16, "。\n", "，", "你好", "世界", "人工智能", "龘"),
    *("🎉", "👨‍👩‍👧", "é", "ß", "ÿ", "\x00", "\x7f", "\ufeff", "\u2028", "User: hi", "Assistant:", "<think>", "</think>"),
    *("def f(x):\n    return x\n", '{"a": [1, 2]}', "the quick brown", "aaaaaaaa", "0123456789"),
]
texts = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=8)), max_size=60).map("".join)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (
            "User: hi\n\nAssistant: <think>\n</think>\n",
            [24281, 59, 4571, 261, 5585, 41693, 59, 295, 35762, 63, 11, 754, 35762, 63, 11],
        ),
        ("User: hi\n\nAssistant: <think", [24281, 59, 4571, 261, 5585, 41693, 59, 295, 35762]),
        ("User: hi\n\nAssistant: <think></think", [24281, 59, 4571, 261, 5585, 41693, 59, 295, 35762, 5439, 35762]),
        ("English: Hello\n\nChinese:", [48487, 59, 36786, 261, 48407, 59]),
        ("✿prefix✿✿suffix✿b✿middle✿a", [10060, 42093, 10060, 10060, 42337, 10060, 99, 10060, 41851, 10060, 98]),
        ("\n\n", [261]),
        ("。\n\n", [28329, 11]),
        ("", []),
        ("\x00", [1]),
    ],
)
def test_known_ids(text, ids):
    assert WORLD.encode(text) == ids
    assert WORLD.decode(ids) == text


def test_end_of_text_cannot_be_written():
    """A user who types the name some decoders print for id 0 must not end the document."""
    assert 0 not in WORLD.encode("<|endoftext|>\x00<|endoftext|>")
    assert WORLD.decode_bytes([0]) == b""


def test_world_table():
    assert WORLD.fingerprint == SHA256
    assert len(WORLD.token_bytes) == WORLD.vocab_size == WORLD_ROWS
    assert WORLD.token_bytes[0] == b""
    assert WORLD.token_bytes[65530:] == [None] * 6
    assert len(set(WORLD.token_bytes[:65530])) == 65530
    assert None not in WORLD.token_bytes[:65530]


def test_every_id_is_what_its_bytes_encode_to():
    for token in range(1, 65530):
        assert WORLD.encode_bytes(WORLD.token_bytes[token]) == [token]


@pytest.mark.parametrize("tokenizer", [WORLD, BYTE])
def test_every_single_byte_has_a_token(tokenizer):
    for value in range(1 if tokenizer is BYTE else 0, 256):
        (token,) = tokenizer.encode_bytes(bytes([value]))
        assert tokenizer.token_bytes[token] == bytes([value])


@pytest.fixture(scope="module")
def other():
    """The encoder that came with the vocabulary."""
    return pyrwkv_tokenizer.WorldTokenizer(str(Path(pyrwkv_tokenizer.__file__).with_name(WORLD_FILE)))


@given(text=texts, size=st.integers(256, 600))
def test_slices_equal_the_whole(other, text, size):
    text = text * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "SLICE_BYTES", size)
        assert WORLD.encode(text) == other.encode(text)


@pytest.mark.parametrize("size", [3, 17, 130, 300])
@pytest.mark.parametrize("text", ["a" * 3000, "龘" * 700, "🎉" * 700, "\n" * 3000, " " * 3000 + "x", "人工智能。\n" * 200])
def test_slices_of_texts_without_a_good_place_to_cut(other, text, size, monkeypatch):
    """Slices shorter than the longest token can settle nothing and must grow instead of looping."""
    monkeypatch.setattr(tokenizer_module, "SLICE_BYTES", size)
    assert WORLD.encode(text) == other.encode(text)


@given(text=texts)
def test_plain_matching_equals_the_automaton_and_round_trips(text):
    tokens = WORLD.encode(text)
    assert Tokenizer.encode_bytes(WORLD, text.encode()) == tokens
    assert WORLD.decode(tokens) == text
    assert 0 not in tokens


@given(data=st.binary(max_size=200))
def test_plain_matching_equals_the_automaton_for_any_bytes(data):
    assert Tokenizer.encode_bytes(WORLD, data) == WORLD.encode_bytes(data)


def test_a_long_text_lets_other_threads_run():
    """Threads that wait for the interpreter's lock get it with each slice, not after a whole text."""
    num_turns, done = 0, threading.Event()

    def turn() -> None:
        nonlocal num_turns
        while not done.is_set():
            num_turns += 1
            time.sleep(0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(100)
    other = threading.Thread(target=turn)
    try:
        other.start()
        WORLD.encode("many words " * 30_000)
        seen = num_turns
    finally:
        sys.setswitchinterval(before)
        done.set()
        other.join()
    assert seen > 5


def test_the_tables_take_little_memory():
    """Measured 33 MiB; each process has them."""
    code = (
        "import resource; from rwkv_batch.text import tokenizer; "
        "size = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "before = size(); tokenizer.for_vocab(65536); print((size() - before) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 80


@given(data=st.binary(max_size=200))
def test_any_bytes_round_trip(data):
    assert WORLD.decode_bytes(WORLD.encode_bytes(data)) == data
    data = data.replace(b"\0", b"")
    assert BYTE.decode_bytes(BYTE.encode_bytes(data)) == data


def test_decode_replaces_what_is_no_text():
    assert WORLD.decode([129]) == "\ufffd"
    assert BYTE.decode([0x68, 0xFF, 0x69, 0]) == "h\ufffdi"


@pytest.mark.parametrize("tokens", [[65530], [65535], [65536], [-1], [-100], [5, 10**9]])
def test_ids_the_vocabulary_lacks_are_refused(tokens):
    with pytest.raises(InvalidRequest):
        WORLD.decode_bytes(tokens)


@pytest.mark.parametrize("tokenizer", [WORLD, BYTE])
def test_lone_surrogates_are_refused(tokenizer):
    with pytest.raises(InvalidRequest, match="surrogate at character 2"):
        tokenizer.encode("ab\ud800c")


def test_byte_vocabulary():
    assert BYTE.encode("hé") == [0x68, 0xC3, 0xA9]
    assert (BYTE.vocab_size, BYTE.token_bytes[0]) == (256, b"")
    assert None not in BYTE.token_bytes
    with pytest.raises(InvalidRequest, match="byte 0"):
        BYTE.encode("a\0b")


@pytest.mark.parametrize("vocab_size", [0, 255, 257, 60_000, 65_529, 65_537, 151_936])
def test_unknown_vocabulary_is_refused(vocab_size):
    """151,936 is another family's vocabulary on RWKV-7 layers: text through the World table would be noise."""
    with pytest.raises(CheckpointError, match=rf"{vocab_size} ids; known: 256 \(bytes\)"):
        for_vocab(vocab_size)


def test_world_may_lack_its_padding():
    tokenizer = for_vocab(65_530)
    assert None not in tokenizer.token_bytes
    assert tokenizer.vocab_size == 65_530


@pytest.mark.parametrize(
    "line", ["7 'ab' 3", "7 'ab'", "x 'ab' 2", "0 'ab' 2", "300 'ab' 2", "-7 'ab' 2", "7 ab 2", "7 print() 1", "7 '' 0", ""]
)
def test_strange_vocabulary_file_is_refused(line):
    with pytest.raises(CheckpointError, match="line 2"):
        tokenizer_module._parse_vocabulary(f"1 'a' 1\n{line}\n", 256)


def test_a_vocabulary_is_loaded_once():
    """An engine that is restarted has the same one, and every HTTP process hears of each engine."""
    assert for_vocab(256) is for_vocab(256)


def test_loads_in_a_second():
    """Measured 0.28 s of CPU time; parsing the literals one by one took 0.7 s."""
    start = time.process_time()
    for_vocab.__wrapped__(WORLD_ROWS)
    assert time.process_time() - start < 3
