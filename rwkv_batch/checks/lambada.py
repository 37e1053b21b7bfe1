"""LAMBADA: does the model write the last word of a passage as it is? (Paperno et al., 2016)"""

import json
from pathlib import Path
from typing import NamedTuple

from rwkv_batch.errors import UsageError
from rwkv_batch.text.tokenizer import Tokenizer

END_ID = 0


class Passage(NamedTuple):
    """Ids: token 0 and a passage without its last word, and that word with the space before it."""

    before: list[int]
    word: list[int]


def read_passages(path: str, tokenizer: Tokenizer, limit: int | None = None) -> list[Passage]:
    """Return the first `limit` passages, None = all, of a file of lines `{"text": ...}`. UsageError, naming the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UsageError(f"{path}: there are no lines in it")
    return [_passage(line, f"{path}, line {number}", tokenizer) for number, line in numbered[:limit]]


def _passage(line: str, place: str, tokenizer: Tokenizer) -> Passage:
    try:
        text = json.loads(line)["text"].strip()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UsageError(f'{place}: not of the form {{"text": "..."}}') from None
    before, space, word = text.rpartition(" ")
    if not space:
        raise UsageError(f"{place}: a passage of one word")
    return Passage([END_ID, *tokenizer.encode(before)], tokenizer.encode(" " + word))
