"""llguidance behind a door: its form of a grammar, its view of a vocabulary, matchers with limits.

A matcher follows one row: it is told each id, and says which may come next. llguidance works on bytes, so tokens that hold part
of a character are as good as any. Everything it does is within limits of its own (`LIMITS`), except to compile some grammars:
those never get here, because `check_process` has compiled every grammar before, within a limit on time.

Needs llguidance, so it is imported when the first grammar comes.
"""

import json
import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from rwkv_batch.errors import InvalidRequest
from rwkv_batch.request import Grammar
from rwkv_batch.text.grammar import STYLE
from rwkv_batch.text.tokenizer import Tokenizer

END_ID = 0
MAX_REASON = 240  # characters of what llguidance says that an error repeats

# What one mask may take: some 20 ms, a tenth of a MiB; a row that needs more fails, alone. States are those of a row's lexer, a
# few hundred bytes each, and how many bytes can be forced at once.
LIMITS = LLParserLimits(max_lexer_states=50_000, step_lexer_fuel=200_000, step_max_items=50_000, verbose_errors=False)


class Pieces:
    """A vocabulary as llguidance asks for it: of the ids that can be drawn, `output_ids`; the others stand for nothing."""

    eos_token_id = END_ID
    bos_token_id = None
    unk_token_id = None
    is_tokenizer_canonical = True  # forced text is cut into tokens as prompts are

    def __init__(self, tokenizer: Tokenizer, output_ids: Sequence[int]):
        drawn = set(output_ids) - {END_ID}
        known = [data if token in drawn else None for token, data in enumerate(tokenizer.token_bytes)]
        self.tokens = [data or b"\xff<|%d|>" % token for token, data in enumerate(known)]
        self.special_token_ids = [token for token, data in enumerate(known) if not data]
        all_are = all(token in drawn for token, data in enumerate(tokenizer.token_bytes) if data)
        self._encode = tokenizer.encode_bytes if all_are else Tokenizer("drawn", known, "").encode_bytes

    def __call__(self, data: bytes) -> list[int]:
        """Return the ids of `data`, none where a byte of it cannot be drawn: the mask that follows is then empty."""
        try:
            return self._encode(data)
        except InvalidRequest:
            return []


def vocabulary(tokenizer: Tokenizer, output_ids: Sequence[int]) -> LLTokenizer:
    """Return llguidance's view of a vocabulary: for World 0.2 s and 23 MiB, shared by all matchers."""
    pieces = TokenizerWrapper(Pieces(tokenizer, output_ids))
    return LLTokenizer(pieces, n_vocab=tokenizer.vocab_size, eos_token=END_ID)


def serialised(grammar: Grammar) -> str:
    """Return llguidance's form of a grammar, which need not be right. Raises InvalidRequest for what has none."""
    try:
        if grammar.kind == "json_schema":
            source = "{}" if grammar.source.strip() == "true" else grammar.source
            return LLMatcher.grammar_from_json_schema(source, defaults=STYLE)
        if grammar.kind == "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        return LLMatcher.grammar_from_lark(any_to_lark(grammar.source))
    except Exception as error:  # of many kinds, from a parser of llguidance's in Python too
        raise wrong(grammar, str(error)) from None


def matcher(grammar: Grammar, tokens: LLTokenizer) -> LLMatcher:
    """Return a matcher at the grammar's start. Raises InvalidRequest for one that cannot be compiled or allows no text.

    May take for ever, where the grammar was not checked before.
    """
    found = LLMatcher(tokens, serialised(grammar), log_level=0, limits=LIMITS)
    mask = found.compute_bitmask() if not found.is_error() else b""
    if found.is_error():
        raise wrong(grammar, found.get_error())
    if found.is_stopped() or (not any(mask[1:]) and mask[0] <= 1 << END_ID):
        raise wrong(grammar, "only the empty text fits")
    return found


def wrong(grammar: Grammar, told: str) -> InvalidRequest:
    """The error for a grammar that llguidance refuses, with the part of its words that says why."""
    return InvalidRequest(f"{grammar.param}: {reason(told)}", param=grammar.param, code="invalid_grammar")


def reason(told: str) -> str:
    """Return what llguidance says is wrong in one line."""
    if unknown := re.search(r"^Unimplemented keys: (\[.*?\])", told):
        names = ", ".join(name[:64] for name in json.loads(unknown[1]))
        return f'{names}: not supported; "x-guidance": {{"lenient": true}} in the schema has such keywords ignored'
    if told.startswith("NoExtension"):
        return "no text fits that this model can say"
    last = re.findall(r"^error: (.+)$", told, re.MULTILINE)  # of a regex, below a picture of the place
    return " ".join((last[-1] if last else told).split())[:MAX_REASON]
