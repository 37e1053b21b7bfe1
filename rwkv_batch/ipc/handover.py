"""A request on its way to the engines: what each of them has of it, what none has yet."""

from collections import deque

from rwkv_batch.ipc.link import EngineLink, Part
from rwkv_batch.ipc.messages import Cancel, Submit, encode
from rwkv_batch.ipc.tickets import Ticket


class Handover:
    """The parts of one request; of one engine there is one, the request itself. Methods are for the client's thread only.

    payload  the message as it is sent when nothing is cut off
    waiting  rows that no engine has, in order
    """

    def __init__(self, ticket: Ticket, message: Submit, payload: bytes):
        self.ticket = ticket
        self.message = message
        self.payload = payload
        self.waiting: deque[range] = deque()
        self._parts: list[tuple[EngineLink, Part]] = []
        self._num_parts = 0

    @property
    def in_hand(self) -> bool:
        """Whether an engine has rows that have not ended."""
        return any(part.open_rows for _, part in self._parts)

    @property
    def is_accepted(self) -> bool:
        """Whether all engines have taken what they were sent."""
        return all(part.accepted for _, part in self._parts)

    def part(self, rows: range) -> Part:
        """These rows as an engine is sent them."""
        request = self.message.request
        if rows == request.indices:
            return Part(self.ticket, request.id, rows, self.payload)
        part_id = f"{request.id}-part{self._num_parts}"
        self._num_parts += 1
        message = Submit(request.part(part_id, rows), self.message.endpoint, self.message.given_id, request.id)
        return Part(self.ticket, part_id, rows, encode(message))

    def may_wait(self, part: Part) -> None:
        """No engine has a free slot for it: from now on one may let it wait."""
        part.refused.clear()
        message = Submit(self.message.request, self.message.endpoint, self.message.given_id)
        part.payload = encode(message)

    def give(self, link: EngineLink, part: Part) -> bool:
        """Hand a part to an engine; whether that reads what it is sent."""
        link.add(part)
        self._parts.append((link, part))
        return link.send_bytes(part.payload)

    def take_back(self, link: EngineLink, part: Part) -> None:
        """An engine does not want it."""
        link.drop(part)
        part.open_rows = len(part.rows)
        self._parts.remove((link, part))

    def cancel(self) -> bool:
        """Have all engines end what they have of it; whether all of them could be told."""
        self.waiting.clear()
        open_parts = [(link, part) for link, part in self._parts if part.id in link.parts]
        told = True
        for link, part in open_parts:
            link.drop(part)
            told = (link.phase == "lost" or link.send(Cancel(part.id))) and told
        return told
