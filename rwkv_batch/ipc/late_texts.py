"""What a thread does that is behind: texts of the same row that have come meanwhile are told as one."""

from collections.abc import Callable, Iterable

from rwkv_batch.ipc.messages import Batch, ToHttp
from rwkv_batch.request import Event, Text

LATE_MESSAGES = 32  # steps that may wait until texts are joined,
MOST_JOINED = 32  # and how many of them at most


class LateTexts:
    """Passes events on to `feed` in their order for each request, its texts joined until something else comes or `flush`.

    A text is looked at once more here and told less often: so who is behind catches up, however fast the engine is.
    """

    def __init__(self, feed: Callable[[Event], None]):
        self._feed = feed
        self._texts: dict[str, Text] = {}

    def add(self, event: Event) -> None:
        """The next event."""
        before = self._texts.get(event.request_id)
        if before is not None and isinstance(event, Text) and event.index == before.index:
            event = Text(event.request_id, event.index, before.text + event.text, before.tokens + event.tokens)
        elif before is not None:
            self._feed(self._texts.pop(event.request_id))
        if isinstance(event, Text):
            self._texts[event.request_id] = event
        else:
            self._feed(event)

    def flush(self) -> None:
        """Pass on what was kept."""
        texts, self._texts = self._texts, {}
        for text in texts.values():
            self._feed(text)


def read_all(messages: Iterable[ToHttp], feed: Callable[[Event], None], take: Callable[[ToHttp], None]) -> None:
    """Take all messages and feed the events in them; of very many texts are joined."""
    late = LateTexts(feed)
    try:
        for number, message in enumerate(messages):
            if isinstance(message, Batch):
                pass_on = feed if number < LATE_MESSAGES else late.add
                for event in (*message.progress, *message.failures):
                    pass_on(event)
            if number % MOST_JOINED == 0 or not isinstance(message, Batch):
                late.flush()
            take(message)
    finally:
        late.flush()
