"""What an engine was told to load, in a file for the engine that follows it."""

import logging
import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

log = logging.getLogger(__name__)

Order = TypeVar("Order", bound=msgspec.Struct)


class Remembered(Generic[Order]):
    """The orders of one kind. `what` they load, for the log; without a file nothing is written."""

    def __init__(self, kind: type[Order], what: str):
        self._kind = kind
        self._what = what
        self._file: Path | None = None

    def left_in(self, file: Path) -> list[Order] | None:
        """Return the orders that an engine that ended has left in a file; None = no such engine."""
        try:
            return msgspec.json.decode(file.read_bytes(), type=list[self._kind])
        except OSError:
            return None
        except msgspec.MsgspecError as error:
            log.error("the %s loaded before cannot be read: %s", self._what, error)
            return None

    def write_to(self, file: Path) -> None:
        """Use this file from now on."""
        self._file = file

    def write(self, orders: list[Order]) -> None:
        """Let whoever starts after this engine know; a file that cannot be written costs a later restart what was loaded."""
        if self._file is None:
            return
        draft = self._file.with_name(self._file.name + ".part")
        try:
            draft.write_bytes(msgspec.json.encode(orders))
            os.replace(draft, self._file)
        except OSError as error:
            log.error("the %s that are loaded cannot be written down: %s", self._what, error.strerror)
