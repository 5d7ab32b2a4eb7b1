"""HTTP servers on a loopback port with small buffers: ours, and plain uvicorn to compare HTTP/1."""

import asyncio
import itertools
import socket
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Self, cast

import httpx
import uvicorn
from server.fake_engine import FakeEngine
from server.pipelines import outcomes_of
from server.waiting import until
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from embedserve.api.management import management_app
from embedserve.pipeline import RequestPipeline
from embedserve.wire.asgi import ASGIApp, Receive, Scope, Send
from embedserve.wire.connections import Connection
from embedserve.wire.http1.fast_path import FastPathConnection
from embedserve.wire.tls.certificates import Certificates
from embedserve.wire.wire_server import WireServer

BUFFER_BYTES = 4096
"""Bytes of each socket buffer, so small that a client that does not read soon blocks the server."""

READ_S_MAX = 60.0
OF_CONNECTION = (b"connection", b"content-length", b"expect", b"transfer-encoding")
"""Headers of a request's framing, which a relay does not pass on."""


class RecordingServer(WireServer):
    """A WireServer that exposes its connections.

    Attributes:
        connections: open connections.
    """

    def __init__(
        self,
        pipeline: RequestPipeline,
        certificates: Certificates | None,
        management: ASGIApp | None,
    ) -> None:
        super().__init__(pipeline, management or management_app(pipeline), certificates)
        self.connections: set[Connection] = set()

    def add(self, connection: Connection) -> None:
        self.connections.add(connection)
        super().add(connection)

    def discard(self, connection: Connection) -> None:
        self.connections.discard(connection)
        super().discard(connection)


class RawServer:
    """A listening port and its connections. It runs until its ``async with`` block ends."""

    def __init__(self, pipeline: RequestPipeline) -> None:
        self.pipeline = pipeline
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []

    def _bind(self) -> socket.socket:
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.port = listening.getsockname()[1]
        return listening

    async def _start(self) -> None:
        raise NotImplementedError

    async def _stop(self) -> None:
        """Aborts the connections at both ends, and waits until all have closed."""
        for writer in self._writers:
            writer.transport.abort()

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    def outcomes(self) -> dict[str, int]:
        return dict(outcomes_of(self.pipeline.metrics.protocols["rest"]))

    async def open(
        self, sent: bytes = b"", context: ssl.SSLContext | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a connection with small buffers for data that the client does not read, and sends
        ``sent``; over TLS with a ``context``. The connection is closed with the server."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader, writer = await asyncio.open_connection(
            sock=sock,
            limit=BUFFER_BYTES,
            ssl=context,
            server_hostname=None if context is None else "localhost",
        )
        self._writers.append(writer)
        # uvloop does not propagate the exception that the alarm of the tests' time limit raises.
        late = TimeoutError(f"still reading after {READ_S_MAX:g} s")
        asyncio.get_running_loop().call_later(READ_S_MAX, reader.set_exception, late)
        writer.write(sent)
        return reader, writer

    async def talk(self, *packets: bytes) -> bytes:
        """Sends ``packets`` and returns all responses. The last packet asks the server to close."""
        reader, writer = await self.open()
        for packet in packets:
            writer.write(packet)
            await asyncio.sleep(0)  # yields: usually each packet is a read of its own
        response = await reader.read()
        writer.close()
        return response


class OurServer(RawServer):
    """A RawServer over embedserve's own connections."""

    def __init__(
        self,
        pipeline: RequestPipeline,
        certificates: Certificates | None = None,
        management: ASGIApp | None = None,
    ) -> None:
        super().__init__(pipeline)
        self.wire = RecordingServer(pipeline, certificates, management)

    async def _start(self) -> None:
        await self.wire.listen([self._bind()])

    async def _stop(self) -> None:
        await self.wire.drain(0)
        await super()._stop()
        await until(lambda: not self.wire.connections)

    async def open_held(
        self, engine: FakeEngine, request: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a connection whose ``request`` stays in its lookup until the engine is released."""
        engine.hold()
        reader, writer = await self.open(request)
        await until(lambda: engine.lookups)
        return reader, writer

    def http1(self) -> list[FastPathConnection]:
        """Open connections that speak HTTP/1."""
        return [one for one in self.wire.connections if isinstance(one, FastPathConnection)]

    @property
    def connection(self) -> FastPathConnection:
        """The only open connection."""
        (one,) = self.http1()
        return one


class PlainServer(RawServer):
    """A RawServer over uvicorn's connections. It relays each request, as uvicorn parsed it, to an
    OurServer over the same pipeline.

    It does without uvicorn.Server, whose stop waits.
    """

    def __init__(self, pipeline: RequestPipeline) -> None:
        super().__init__(pipeline)
        self._ours = OurServer(pipeline)
        self._state = ServerState()
        self._config = uvicorn.Config(
            cast(Any, self._relay),
            interface="asgi3",
            ws="none",
            lifespan="off",
            access_log=False,
            proxy_headers=False,
            log_config=None,
            server_header=False,
            date_header=False,
        )
        self._listening: asyncio.Server

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        body = message["body"]
        while message["more_body"]:
            message = await receive()
            body += message["body"]
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        url = (scope["raw_path"] + query).decode("latin-1")
        lines = [f"{scope['method']} {url} HTTP/1.1", f"content-length: {len(body)}"]
        for name, value in scope["headers"]:
            if name not in OF_CONNECTION:
                lines.append(f"{name.decode()}: {value.decode('latin-1')}")
        reader, writer = self._relaying
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        status, headers, content = await read_response(reader, scope["method"] != "HEAD")
        start = {"type": "http.response.start", "status": status, "headers": [*headers.items()]}
        await send(start)
        await send({"type": "http.response.body", "body": content})

    async def _start(self) -> None:
        await self._ours._start()
        self._relaying = await self._ours.open()
        self._config.load()
        self._listening = await asyncio.get_running_loop().create_server(
            lambda: HttpToolsProtocol(self._config, self._state, {}), sock=self._bind()
        )

    async def _stop(self) -> None:
        self._listening.close()
        for connection in list(self._state.connections):
            connection.transport.abort()
        await super()._stop()
        await until(lambda: not self._state.connections and not self._state.tasks)
        await self._ours._stop()


@asynccontextmanager
async def http_client(pipeline: RequestPipeline) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of a server over ``pipeline``."""
    async with OurServer(pipeline) as server:
        base_url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(
            base_url=base_url, timeout=READ_S_MAX, trust_env=False, verify=False
        ) as client:  # reading the certificates of authorities takes 23 ms
            yield client


Http1Response = tuple[int, dict[bytes, bytes], bytes]
"""Status, headers by name, body."""


async def read_response(reader: asyncio.StreamReader, has_body: bool = True) -> Http1Response:
    """Reads the next response of a connection; drops its Date, which changes with time."""
    line, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    headers = dict(line.split(b": ", 1) for line in lines)
    headers.pop(b"date", None)
    body = await reader.readexactly(int(headers[b"content-length"])) if has_body else b""
    return int(line.split()[1]), headers, body


def post(
    body: bytes, *lines: str, url: str = "/embed", version: str = "1.1", length: int | None = None
) -> bytes:
    """Returns a request with ``body``; ``lines`` add to or replace its header lines."""
    length = len(body) if length is None else length
    first = f"POST {url} HTTP/{version}"
    head = [first, "Host: test", *lines, f"Content-Length: {length}", "", ""]
    return "\r\n".join(head).encode() + body


def chunked(body: bytes, *lines: str, url: str = "/embed") -> bytes:
    """Returns a request with a chunked ``body``, which does not take the fast path."""
    head = [f"POST {url} HTTP/1.1", "Host: test", *lines, "Transfer-Encoding: chunked", "", ""]
    chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    return "\r\n".join(head).encode() + chunk + b"0\r\n\r\n"


def get(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: test", *lines, "", ""]).encode()


def cut(data: bytes, ends: Iterable[int]) -> list[bytes]:
    """Returns ``data`` in packets that end at ``ends``."""
    bounds = [0, *sorted(ends), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds) if a < b]
