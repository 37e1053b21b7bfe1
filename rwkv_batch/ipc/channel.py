"""The names of both ends under the name they had."""

from rwkv_batch.errors import RwkvBatchError
from rwkv_batch.ipc.client import EngineClient, SessionAnswer, Ticket
from rwkv_batch.ipc.messages import Ask, EngineInfo, Live
from rwkv_batch.request import Event, Failure

__all__ = ["Ask", "EngineClient", "EngineInfo", "Event", "Live", "SessionAnswer", "Ticket", "error_of"]


def error_of(message: Failure) -> RwkvBatchError:
    """See `Failure.exception`."""
    return message.exception()
