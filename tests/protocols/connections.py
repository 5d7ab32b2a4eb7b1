"""Connections that carry encoded requests: HTTP/1.1, HTTP/2, gRPC calls and gRPC streams."""

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from grpc_messages import unframed
from protocols.requests import EncodedRequest, RawResponse
from server.http2_client import Http2Client

RESPONSE_S_MAX = 60.0


class Exchange:
    """A request in flight and its response."""

    @abstractmethod
    def write(self, data: bytes, *, is_end: bool = False) -> None:
        """Sends more of the body."""

    @abstractmethod
    async def response(self) -> RawResponse:
        """Waits for the whole response."""

    @abstractmethod
    def cancel(self) -> None:
        """Disconnects or resets, as a client of this protocol does."""


class Connection:
    """A connection to the server.

    Attributes:
        is_closed: whether the server has announced that it closes it.
    """

    is_closed = False

    @abstractmethod
    def begin(self, sent: EncodedRequest) -> Exchange:
        """Sends everything but the body."""

    def start(self, *sent: EncodedRequest) -> list[Exchange]:
        """Sends requests, one after the other, without waiting for responses."""
        exchanges = []
        for one in sent:
            exchanges.append(self.begin(one))
            exchanges[-1].write(one.body, is_end=True)
        return exchanges

    async def request(self, sent: EncodedRequest) -> RawResponse:
        """Sends a request and waits for its response."""
        (exchange,) = self.start(sent)
        return await exchange.response()

    def frame(self, body: bytes) -> bytes:
        """Returns the bytes of a whole body, framed as this connection requires."""
        return body


class Http1Connection(Connection):
    """HTTP/1.1 with pipelined requests. To cancel a request, the client closes the connection.

    Args:
        is_chunked: whether bodies are sent in chunks, which do not take the fast path.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_chunked: bool
    ) -> None:
        self._reader, self.writer = reader, writer
        self.is_chunked = is_chunked
        self._waiting: deque[asyncio.Future[RawResponse]] = deque()
        self._task: asyncio.Task[None] | None = None

    def begin(self, sent: EncodedRequest) -> Exchange:
        length = f"content-length: {len(sent.body)}"
        lines = [
            f"POST {sent.path} HTTP/1.1",
            "host: test",
            *(f"{name}: {value}" for name, value in sent.headers.items()),
            "transfer-encoding: chunked" if self.is_chunked else length,
        ]
        self.writer.write("\r\n".join([*lines, "", ""]).encode())
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read())
        return _Http1Exchange(self, future)

    async def _read(self) -> None:
        while self._waiting:
            try:
                raw = await self._read_one()
            except (EOFError, OSError) as error:
                for future in self._waiting:
                    future.set_exception(error)
                    future.exception()
                return
            self._waiting.popleft().set_result(raw)

    async def _read_one(self) -> RawResponse:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *lines = head[:-4].split("\r\n")
        headers = dict(one.lower().split(": ", 1) for one in lines)
        names = {one.split(": ", 1)[0].lower(): one.split(": ", 1)[1] for one in lines}
        body = await self._reader.readexactly(int(headers["content-length"]))
        self.is_closed = self.is_closed or headers.get("connection") == "close"
        return RawResponse(int(line.split()[1]), names, body)


class _Http1Exchange(Exchange):
    def __init__(self, connection: Http1Connection, future: asyncio.Future[RawResponse]) -> None:
        self._connection, self._future = connection, future

    def write(self, data: bytes, *, is_end: bool = False) -> None:
        if self._connection.is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            data += b"0\r\n\r\n" if is_end else b""
        self._connection.writer.write(data)

    async def response(self) -> RawResponse:
        return await asyncio.wait_for(self._future, RESPONSE_S_MAX)

    def cancel(self) -> None:
        self._connection.writer.close()


class Http2Connection(Connection):
    """HTTP/2 with a stream for each request. To cancel a request, the client resets its stream."""

    def __init__(self, client: Http2Client) -> None:
        self.client = client

    def begin(self, sent: EncodedRequest) -> Exchange:
        return _Http2Exchange(self.client, self.open(sent))

    def open(self, sent: EncodedRequest) -> int:
        """Opens a stream; returns its id."""
        return self.client.send("POST", sent.path, dict(sent.headers), is_end=False)


class _Http2Exchange(Exchange):
    def __init__(self, client: Http2Client, number: int, at: int | None = None) -> None:
        self._client, self._number, self._at = client, number, at

    def write(self, data: bytes, *, is_end: bool = False) -> None:
        self._client.write(self._number, data, is_end=is_end)

    async def response(self) -> RawResponse:
        response = await asyncio.wait_for(self._client.response(self._number), RESPONSE_S_MAX)
        body = response.body
        if self._at is not None:
            messages = unframed(body)
            body = framed(messages[self._at]) if self._at < len(messages) else b""
        return RawResponse(response.status, response.headers, body, response.reset)

    def cancel(self) -> None:
        self._client.cancel(self._number)


class GrpcConnection(Http2Connection):
    """Unary gRPC calls."""

    def open(self, sent: EncodedRequest) -> int:
        headers = {"content-type": "application/grpc", "te": "trailers", **sent.headers}
        return self.client.send("POST", sent.path, headers, is_end=False)

    def start(self, *sent: EncodedRequest) -> list[Exchange]:
        return super().start(
            *(EncodedRequest(one.path, one.headers, framed(one.body)) for one in sent)
        )

    def frame(self, body: bytes) -> bytes:
        return framed(body)


class StreamConnection(GrpcConnection):
    """gRPC streams: requests that are started together are messages of one stream."""

    def begin(self, sent: EncodedRequest) -> Exchange:
        return _Http2Exchange(self.client, self.open(sent), 0)

    def start(self, *sent: EncodedRequest) -> list[Exchange]:
        number = self.open(sent[0])
        self.client.write(number, b"".join(framed(one.body) for one in sent), is_end=True)
        return [_Http2Exchange(self.client, number, at) for at in range(len(sent))]


def framed(message: bytes) -> bytes:
    """Returns a message with gRPC's prefix of five bytes."""
    return b"\0" + len(message).to_bytes(4) + message


@asynccontextmanager
async def open_connection(
    kind: type[Connection], port: int, is_chunked: bool
) -> AsyncIterator[Connection]:
    """Yields a connection of ``kind`` to a loopback port; closes it when the block ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if kind is Http1Connection:
            yield Http1Connection(reader, writer, is_chunked)
        else:
            assert issubclass(kind, Http2Connection)
            yield kind(Http2Client(reader, writer))
    finally:
        writer.transport.abort()
