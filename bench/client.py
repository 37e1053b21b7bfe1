"""A small HTTP/1.1 client over asyncio streams, quick enough to load a server: whole answers and event streams.

For measurements and tests; one connection for each call, no TLS, no redirects.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Reply:
    """A whole answer; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The parsed body."""
        return json.loads(self.body)


class Stream:
    """An answer that is being read. `async with await open_stream(...)` closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: int, headers: dict[str, str]):
        self.reader = reader
        self.writer = writer
        self.status = status
        self.headers = headers

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def reset(self) -> None:
        """Break the connection with RST instead of closing it."""
        self.writer.transport.abort()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's bytes as they come. Raises asyncio.IncompleteReadError when the connection breaks before the end."""
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                yield (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readuntil(b"\r\n")
        elif left := int(self.headers.get("content-length", 0)):
            yield await self.reader.readexactly(left)

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def events(self) -> AsyncIterator[bytes]:
        """The payloads of `data:` lines, comments left out."""
        rest = b""
        async for chunk in self.chunks():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data: "):
                    yield line[6:]


async def open_stream(
    host: str, port: int, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
) -> Stream:
    """Send a request and read the head of its answer. `body` is sent as it is when bytes, else as JSON."""
    reader, writer = await asyncio.open_connection(host, port, limit=2**24)
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}:{port}", f"Content-Length: {len(data)}"]
    if body is not None:
        lines.append("Content-Type: application/json")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    return Stream(reader, writer, int(head[0].split()[1]), found)


async def call(
    host: str, port: int, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
) -> Reply:
    """One whole exchange."""
    async with await open_stream(host, port, path, body, headers, method) as stream:
        return Reply(stream.status, stream.headers, b"" if method == "HEAD" else await stream.read())
