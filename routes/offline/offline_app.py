"""What routes ask of their process, where there is no HTTP: whole documents, and no client that leaves."""

import asyncio
from collections.abc import Callable

from routes.http.context import RequestContext
from routes.http.http_app import HttpApp
from routes.http.replies import Response
from routes.http.served import ServedModel
from routes.http.streams import FormatEvent, StreamingAnswer
from rwkv_batch.errors import InvalidRequest, RwkvBatchError
from rwkv_batch.request import Event, Request


class OfflineApp(HttpApp):
    """The routes' view of a batch.

    num_rows       rows that the engine has of all requests in progress
    prompt_tokens  of all that were answered; `tokens` counts what was sampled for them
    """

    num_rows = 0
    prompt_tokens = 0
    tokens = 0

    def _check_room(self, model: ServedModel) -> None:
        model.engines.check()

    async def stream(self, context: RequestContext, request: Request, format_event: FormatEvent) -> StreamingAnswer:
        """Nobody reads while it is written. Raises InvalidRequest."""
        raise InvalidRequest("stream: not in a batch", param="stream", code="unsupported_parameter")

    async def document(
        self,
        context: RequestContext,
        request: Request,
        format_event: Callable[[Event], bytes | Callable[[], bytes] | RwkvBatchError | None],
    ) -> Response:
        """See HttpApp; however long it takes, with its true status."""
        ended = asyncio.Event()
        self.num_rows += request.num_rows
        try:
            ticket = await self.submit(context, request, format_event, ended)
            try:
                await ended.wait()
            except asyncio.CancelledError:
                ticket.cancel()
                raise
        finally:
            self.num_rows -= request.num_rows
        reply = await self.gathered(ticket)
        self.tokens += ticket.completion_tokens
        self.prompt_tokens += context.prompt_tokens
        return reply
