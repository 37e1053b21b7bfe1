"""The two vocabularies: known ids, slices equal to the whole, own matching equal to the Rust encoder, bytes for every id."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import tokenizer_for

from rwkv_batch import tokenizer as tokenizer_module
from rwkv_batch.errors import CheckpointError, InvalidRequest
from rwkv_batch.tokenizer import WORLD_ROWS, for_vocab

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


def test_every_id_has_the_bytes_of_the_encoder():
    """The table read here and the one inside the Rust encoder are the same: each whole-text token encodes to itself."""
    for token in range(1, 65530):
        data = WORLD.token_bytes[token]
        assert WORLD.encode_bytes(data) == [token]
        if data.isascii():
            assert WORLD.encode(data.decode()) == [token]


@pytest.mark.parametrize("tokenizer", [WORLD, BYTE])
def test_every_single_byte_has_a_token(tokenizer):
    for value in range(1 if tokenizer is BYTE else 0, 256):
        (token,) = tokenizer.encode_bytes(bytes([value]))
        assert tokenizer.token_bytes[token] == bytes([value])


@given(text=texts, size=st.integers(140, 400))
def test_slices_equal_the_whole(text, size):
    text = text * 3
    whole = WORLD._encoder.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "SLICE_BYTES", size)
        assert WORLD.encode(text) == whole


@pytest.mark.parametrize("size", [3, 17, 130, 200])
@pytest.mark.parametrize("text", ["a" * 3000, "龘" * 700, "🎉" * 700, "\n" * 3000, " " * 3000 + "x", "人工智能。\n" * 200])
def test_slices_of_texts_without_a_good_place_to_cut(text, size, monkeypatch):
    """Slices shorter than the longest token can settle nothing and must grow instead of looping."""
    whole = WORLD._encoder.encode(text)
    monkeypatch.setattr(tokenizer_module, "SLICE_BYTES", size)
    assert WORLD.encode(text) == whole


@given(text=texts)
def test_own_matching_equals_the_encoder_and_round_trips(text):
    tokens = WORLD.encode(text)
    assert WORLD.encode_bytes(text.encode()) == tokens
    assert WORLD.decode(tokens) == text
    assert 0 not in tokens


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
