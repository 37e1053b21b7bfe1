"""The requests that an engine has, and whose they are."""

from collections import Counter

from rwkv_batch.ipc.messages import Live


class LiveRequests:
    """What is known of each, by its id. Touched by the thread of the channel only.

    num_rows  rows of all that have not ended
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._found: dict[str, tuple[bytes, Live]] = {}
        self._rows: Counter[bytes] = Counter()

    def __iter__(self):
        return iter([live for _, live in self._found.values()])

    def add(self, owner: bytes, live: Live) -> None:
        """One has come."""
        self._found[live.id] = (owner, live)
        self._count(owner, live.prompts - live.ended)

    def pop(self, request_id: str) -> tuple[bytes, Live] | None:
        """One is gone: whose it was, None when there is none."""
        found = self._found.pop(request_id, None)
        if found is not None:
            owner, live = found
            self._count(owner, live.ended - live.prompts)
        return found

    def pop_all(self, owner: bytes) -> int:
        """An owner is gone; returns how many requests it had."""
        theirs = [request_id for request_id, (other, _) in self._found.items() if other == owner]
        for request_id in theirs:
            self.pop(request_id)
        del self._rows[owner]
        return len(theirs)

    def ended(self, request_id: str, num_rows: int) -> None:
        """Rows of a request have ended."""
        owner, live = self._found.get(request_id, (b"", None))
        if live is None:
            return
        live.ended += num_rows
        self._count(owner, -num_rows)
        if live.ended >= live.prompts:
            self.pop(request_id)

    def others(self, owner: bytes) -> int:
        """Rows that have not ended of all owners but this one."""
        return self.num_rows - self._rows[owner]

    def _count(self, owner: bytes, num_rows: int) -> None:
        self.num_rows += num_rows
        self._rows[owner] += num_rows
