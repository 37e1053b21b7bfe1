"""Answers that tell how long their parts took, as some servers do."""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from routes.openai.schemas import GenerationBody
from rwkv_batch.config import Config
from rwkv_batch.request import Event, Failure, Request


class TimedBody(GenerationBody):
    """A body whose tokens come one by one, also when the answer is no stream."""

    def to_request(self, texts: list[Any], request_id: str, config: Config, encode: Callable[[Any], list[int]]) -> Request:
        """See PromptsBody."""
        return msgspec.structs.replace(super().to_request(texts, request_id, config, encode), chunk_size=1)


class Timings:
    """When a call began, had its first token, and ended (s of the monotonic clock).

    Waiting and reading the prompt are one part, generating the other.
    """

    def __init__(self, began: float):
        self._began = self._first = self._last = began
        self._has_text = False

    def note(self, event: Event) -> None:
        """Look at an event as it comes."""
        if isinstance(event, Failure):
            return
        self._last = time.monotonic()
        if not self._has_text:
            self._first = self._last
            self._has_text = bool(event.deltas)

    @property
    def total(self) -> float:
        """Seconds from the call to the last event."""
        return self._last - self._began

    @property
    def prompt(self) -> float:
        """Seconds until the first token."""
        return self._first - self._began

    @property
    def generation(self) -> float:
        """Seconds from the first token to the last event."""
        return self._last - self._first
