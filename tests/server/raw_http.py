"""Embed connections on a loopback port, and plain uvicorn over the same endpoint to compare with.

Without uvicorn.Server, whose stop waits: a connection is told of a drain by its `shutdown`.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from embedserve.api.management import management_app
from embedserve.models.models import Service
from embedserve.wire.heads import RequestHeads
from embedserve.wire.http1 import EmbedConnection
from embedserve.wire.rest import EmbedEndpoint, Receive, Scope, Send

BUFFER_BYTES = 4096
"""Of each socket, so that a reader is slow soon."""

READ_S_MAX = 10.0


class RawServer:
    """A port, the connections behind it, and the paths that came to the ASGI endpoint."""

    def __init__(self, service: Service, is_plain: bool) -> None:
        self.service = service
        self.state = ServerState()
        self.asgi_paths: list[str] = []
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._endpoint = EmbedEndpoint(service, management_app(service))
        self._config = uvicorn.Config(
            self._app,
            interface="asgi3",
            ws="none",
            lifespan="off",
            access_log=False,
            proxy_headers=False,
            log_config=None,
        )
        self._of_protocol: dict[str, Any] = {
            "config": self._config,
            "server_state": self.state,
            "app_state": {},
        }
        self._make = (
            partial(HttpToolsProtocol, **self._of_protocol)
            if is_plain
            else partial(EmbedConnection, service, RequestHeads(), **self._of_protocol)
        )

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asgi_paths.append(scope["path"])
        await self._endpoint(scope, receive, send)

    async def start(self) -> asyncio.Server:
        self._config.load()
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.port = listening.getsockname()[1]
        return await asyncio.get_running_loop().create_server(self._make, sock=listening)

    async def cut_all(self) -> None:
        """Cuts the connections, at both ends, and waits until nothing of them is left."""
        for connection in list(self.state.connections):
            connection.transport.abort()
        for writer in self._writers:
            writer.transport.abort()
        async with asyncio.timeout(5):
            while self.state.connections or self.state.tasks:  # noqa: ASYNC110  no event
                await asyncio.sleep(0)
        await asyncio.sleep(0.001)

    @property
    def connection(self) -> EmbedConnection:
        """The one that is open."""
        (one,) = self.state.connections
        assert isinstance(one, EmbedConnection)
        return one

    def outcomes(self) -> dict[str, int]:
        return dict(self.service.metrics.protocols["rest"].outcomes)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that holds few bytes which nobody reads."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader, writer = await asyncio.open_connection(sock=sock, limit=BUFFER_BYTES)
        self._writers.append(writer)
        # uvloop does not pass on what the alarm of the tests' time limit raises.
        late = TimeoutError(f"still reading after {READ_S_MAX:g} s")
        asyncio.get_running_loop().call_later(READ_S_MAX, reader.set_exception, late)
        return reader, writer

    async def exchange(self, *packets: bytes) -> bytes:
        """All that is answered to ``packets``, the last of which has the connection closed."""
        reader, writer = await self.open()
        for packet in packets:
            writer.write(packet)
            await asyncio.sleep(0)  # the loop's next turn: each is a read of its own, or nearly
        answer = await reader.read()
        writer.close()
        return answer


@asynccontextmanager
async def raw_server(service: Service, is_plain: bool = False) -> AsyncIterator[RawServer]:
    """Until the block ends; its connections are cut then."""
    server = RawServer(service, is_plain)
    listening = await server.start()
    try:
        yield server
    finally:
        listening.close()
        await server.cut_all()


Answer = tuple[int, dict[bytes, bytes], bytes]
"""Status, headers by name, body."""


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """The next answer of a connection."""
    line, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    headers = dict(line.split(b": ", 1) for line in lines)
    return int(line.split()[1]), headers, await reader.readexactly(int(headers[b"content-length"]))


def post(
    body: bytes, *lines: str, url: str = "/embed", version: str = "1.1", length: int | None = None
) -> bytes:
    """A request of ``body``, plain unless ``lines`` make it something else."""
    length = len(body) if length is None else length
    first = f"POST {url} HTTP/{version}"
    head = [first, "Host: test", *lines, f"Content-Length: {length}", "", ""]
    return "\r\n".join(head).encode() + body


def chunked(body: bytes, *lines: str, url: str = "/embed") -> bytes:
    """The same request by uvicorn's way."""
    head = [f"POST {url} HTTP/1.1", "Host: test", *lines, "Transfer-Encoding: chunked", "", ""]
    chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    return "\r\n".join(head).encode() + chunk + b"0\r\n\r\n"


def get(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: test", *lines, "", ""]).encode()


def cut(data: bytes, ends: Iterable[int]) -> list[bytes]:
    """``data`` in packets that end at ``ends``."""
    bounds = [0, *sorted(ends), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds) if a < b]
