"""Drivers, one for each protocol: how it connects, how it encodes, and which options it has."""

import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from protocols import formats, inference_formats
from protocols.connections import (
    Connection,
    Exchange,
    GrpcConnection,
    Http1Connection,
    Http2Connection,
    StreamConnection,
    open_connection,
)
from protocols.formats import Format
from protocols.requests import EncodedRequest, Request, Response
from protocols.shared_memory_formats import SharedMemory, SharedMemoryFolder, SharedMemoryMessage
from server.fake_engine import FakeEngine
from server.live import Live
from server.waiting import until


@dataclass(frozen=True)
class Protocol:
    """A row of the matrix of protocols.

    Attributes:
        is_chunked: whether HTTP/1.1 bodies are sent in chunks, off the fast path.
        grpc_server: which server serves the gRPC port.
    """

    connection: type[Connection]
    format: type[Format]
    is_chunked: bool = False
    grpc_server: str = "native"

    @property
    def is_grpc(self) -> bool:
        return issubclass(self.connection, GrpcConnection)

    @property
    def is_stream(self) -> bool:
        return self.connection is StreamConnection


PROTOCOLS: Mapping[str, Protocol] = {
    "json": Protocol(Http1Connection, formats.Json),
    "json-chunked": Protocol(Http1Connection, formats.Json, is_chunked=True),
    "json-http2": Protocol(Http2Connection, formats.Json),
    "protobuf": Protocol(Http1Connection, formats.Protobuf),
    "protobuf-http2": Protocol(Http2Connection, formats.Protobuf),
    "arrow": Protocol(Http1Connection, formats.Arrow),
    "arrow-http2": Protocol(Http2Connection, formats.Arrow),
    "grpc": Protocol(GrpcConnection, formats.Message),
    "grpc-grpcio": Protocol(GrpcConnection, formats.Message, grpc_server="grpcio"),
    "stream": Protocol(StreamConnection, formats.StreamMessage),
    "stream-grpcio": Protocol(StreamConnection, formats.StreamMessage, grpc_server="grpcio"),
    "infer": Protocol(Http1Connection, inference_formats.Infer),
    "infer-binary": Protocol(Http1Connection, inference_formats.InferBinary),
    "infer-binary-chunked": Protocol(
        Http1Connection, inference_formats.InferBinary, is_chunked=True
    ),
    "infer-binary-http2": Protocol(Http2Connection, inference_formats.InferBinary),
    "infer-grpc": Protocol(GrpcConnection, inference_formats.InferMessage),
    "infer-grpcio": Protocol(GrpcConnection, inference_formats.InferMessage, grpc_server="grpcio"),
    "infer-typed": Protocol(GrpcConnection, inference_formats.InferTyped),
    "infer-stream": Protocol(StreamConnection, inference_formats.InferStream),
    "predictor": Protocol(GrpcConnection, formats.Predict),
    "predictor-grpcio": Protocol(GrpcConnection, formats.Predict, grpc_server="grpcio"),
    "shared-memory": Protocol(Http1Connection, SharedMemory),
    "shared-memory-grpc": Protocol(GrpcConnection, SharedMemoryMessage),
}


class Driver:
    """Sends requests to a live server over one protocol.

    Attributes:
        protocol: row of the matrix.
        engines: engines of the server; the first is the default model's.
    """

    def __init__(
        self, name: str, live: Live, engines: list[FakeEngine], shared_folder: SharedMemoryFolder
    ) -> None:
        self.name = name
        self.protocol = PROTOCOLS[name]
        self.live = live
        self.engines = engines
        self._shared_folder = shared_folder
        self.format = self.protocol.format(shared_folder)

    def can(self, *options: str) -> bool:
        """Returns whether requests of this protocol have all of ``options``."""
        return self.format.can >= set(options)

    @property
    def frontend(self) -> str:
        """The protocol's name in the metrics."""
        return "grpc" if self.protocol.is_grpc else "rest"

    def outcomes(self) -> dict[str, int]:
        """Returns the number of requests so far, by outcome."""
        return self.live.outcomes(self.frontend)

    def has_more(self, before: Mapping[str, int], **counts: int) -> bool:
        """Returns whether exactly ``counts`` requests were counted since ``before``."""
        return Counter(self.outcomes()) - Counter(before) == Counter(counts)

    def expect_more(self, before: Mapping[str, int], **counts: int) -> None:
        """Asserts that exactly ``counts`` requests were counted since ``before``."""
        assert Counter(self.outcomes()) - Counter(before) == Counter(counts)

    def over(self, name: str) -> "Driver":
        """Returns a driver of another protocol for the same server."""
        return Driver(name, self.live, self.engines, self._shared_folder)

    def http_status(self, status: int) -> int | None:
        """Returns the ``status`` of an expected Response: None over gRPC, which has no HTTP
        status."""
        return None if self.protocol.is_grpc else status

    @property
    def is_http1(self) -> bool:
        return self.protocol.connection is Http1Connection

    @property
    def engine(self) -> FakeEngine:
        """The engine of the default model."""
        return self.engines[0]

    def engine_of(self, request: Request) -> FakeEngine:
        name = request.model.partition("@")[0]
        named = [one for one in self.engines if one.model.name == name]
        return named[0] if named else self.engines[0]

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """Yields a new connection; closes it when the block ends."""
        port = self.live.http_port
        if self.protocol.is_grpc:
            port = int(self.live.grpc_target.rpartition(":")[2])
        async with open_connection(self.protocol.connection, port, self.protocol.is_chunked) as one:
            yield one

    async def encode(self, request: Request) -> EncodedRequest:
        """Encodes a request. Tensors in shared memory are written and their region is registered
        first."""
        sent = self.format.encode(request, self.engine_of(request))
        if isinstance(self.format, SharedMemory | SharedMemoryMessage):
            await self._register(self.format.shared_folder, request)
        return sent

    async def _register(self, shared_folder: SharedMemoryFolder, request: Request) -> None:
        region, size = shared_folder.last.name, shared_folder.last.stat().st_size
        headers = {k: v for k, v in request.headers.items() if k == "authorization"}
        body = json.dumps({"key": region, "byte_size": size}).encode()
        path = f"/v2/systemsharedmemory/region/{region}/register"
        async with open_connection(Http1Connection, self.live.http_port, False) as connection:
            await connection.request(EncodedRequest(path, headers, body))

    async def start(self, connection: Connection, *requests: Request) -> list[Exchange]:
        """Sends requests without waiting for responses."""
        return connection.start(*[await self.encode(one) for one in requests])

    @asynccontextmanager
    async def looking_up(self, connection: Connection, request: Request) -> AsyncIterator[Exchange]:
        """Sends a request to the default model; holds its lookup until the block ends."""
        self.engine.lookups.clear()
        self.engine.hold()
        try:
            (exchange,) = await self.start(connection, request)
            await until(lambda: self.engine.lookups)
            yield exchange
        finally:
            self.engine.release()

    async def read(self, exchange: Exchange) -> Response:
        return self.format.read(await exchange.response())

    async def request(self, request: Request, connection: Connection | None = None) -> Response:
        """Sends a request, over a new connection unless one is given."""
        return await self.request_raw(await self.encode(request), connection)

    async def request_raw(
        self, sent: EncodedRequest, connection: Connection | None = None
    ) -> Response:
        """Sends an encoded request, over a new connection unless one is given."""
        async with AsyncExitStack() as stack:
            if connection is None:
                connection = await stack.enter_async_context(self.connect())
            return self.format.read(await connection.request(sent))
