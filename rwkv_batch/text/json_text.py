"""JSON as models are shown it."""

import json
from typing import Any


def compact(value: Any) -> str:
    """JSON without blanks, as models are shown it; characters as they are, but halves of surrogate pairs."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if encodable(text) else json.dumps(value, separators=(",", ":"))


def encodable(text: str) -> bool:
    """Whether a text has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
