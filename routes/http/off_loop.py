"""Long work on texts leaves the event loop to others."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

LARGE = 65536  # characters of texts or bytes of a body: work on fewer takes some milliseconds

Result = TypeVar("Result")


async def off_loop(size: int, work: Callable[..., Result], *args: Any) -> Result:
    """What `work` comes to, done in a thread when the characters or bytes that it is done on are many."""
    return await asyncio.to_thread(work, *args) if size > LARGE else work(*args)
