"""A small HTTP/2 client with prior knowledge: the h2 package over asyncio's streams."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived

READ_S_MAX = 60.0
GOAWAY = 7


Fields = dict[str, str] | list[tuple[str, str]]


@dataclass
class Http2Response:
    """Response on one stream. ``headers`` include the trailers; ``reset`` is the code of
    RST_STREAM, if the server sent one."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False
    reset: int | None = None


class Http2Client:
    """One connection, whose requests may be in flight concurrently."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        authority: str = "test",
    ) -> None:
        self._authority = authority
        self._reader = reader
        self._writer = writer
        self._connection = H2Connection(H2Configuration(header_encoding="utf-8"))
        self._connection.initiate_connection()
        self._responses: dict[int, Http2Response] = {}
        self._unsent: dict[int, tuple[bytes, bool]] = {}
        self._unread = b""
        self._reading = asyncio.Lock()
        self._flush()

    def _flush(self) -> None:
        self._writer.write(self._connection.data_to_send())

    async def request(
        self,
        method: str,
        path: str | bytes,
        body: bytes = b"",
        headers: Fields | None = None,
    ) -> Http2Response:
        """Returns the response to one request, whose body may be larger than any window."""
        number = self.send(method, path, headers, is_end=not body)
        if body:
            self.write(number, body, is_end=True)
        return await self.response(number)

    def send(
        self,
        method: str,
        path: str | bytes,
        headers: Fields | None = None,
        *,
        is_end: bool = True,
    ) -> int:
        """Opens a stream; returns its number."""
        number = self._connection.get_next_available_stream_id()
        head = {":method": method, ":scheme": "http", ":path": path, ":authority": self._authority}
        fields = headers.items() if isinstance(headers, dict) else headers or ()
        self._connection.send_headers(number, [*head.items(), *fields], is_end)
        self._responses[number] = Http2Response()
        self._flush()
        return number

    def write(self, number: int, data: bytes, *, is_end: bool = False) -> None:
        """Sends more of a body. Data beyond the window is sent while the client waits for a
        response."""
        self._unsent[number] = (self._unsent.pop(number, (b"", False))[0] + data, is_end)
        self._push(number)

    def _push(self, number: int) -> None:
        data, is_end = self._unsent.pop(number)
        sent = 0
        while sent < len(data) or (is_end and not data):
            size = min(
                # Negative once the server has reduced the initial window of open streams.
                max(0, self._connection.local_flow_control_window(number)),
                self._connection.max_outbound_frame_size,
                len(data) - sent,
            )
            if data and not size:
                self._unsent[number] = (data[sent:], is_end)
                break
            sent += size
            is_last = is_end and sent == len(data)
            self._connection.send_data(number, data[sent - size : sent], end_stream=is_last)
            if is_last:
                break
        self._flush()

    def post(self, path: str, body: bytes) -> int:
        """Sends a small request; returns the number of its stream."""
        number = self.send("POST", path, is_end=False)
        self.write(number, body, is_end=True)
        return number

    def cancel(self, number: int) -> None:
        """Resets a stream with CANCEL."""
        self._unsent.pop(number, None)
        self._connection.reset_stream(number, ErrorCodes.CANCEL)
        self._flush()

    async def response(self, number: int) -> Http2Response:
        """Returns the response on a stream, once the response is complete or the stream is
        reset."""
        return await self._read_until(self._responses[number], lambda response: response.is_whole)

    async def begun_response(self, number: int) -> Http2Response:
        """Returns the response on a stream, once its body has begun. Later reads complete it."""
        return await self._read_until(
            self._responses[number], lambda response: response.is_whole or bool(response.body)
        )

    async def _read_until(
        self, response: Http2Response, has_arrived: Callable[[Http2Response], bool]
    ) -> Http2Response:
        while not has_arrived(response):
            async with self._reading:
                if not has_arrived(response):
                    await self._read()
        return response

    def _whole_frames(self) -> bytes:
        """Returns the complete frames received so far, without GOAWAY, because h2 accepts no frame
        after it."""
        frames = b""
        while len(self._unread) >= 9:
            end = 9 + int.from_bytes(self._unread[:3])
            if len(self._unread) < end:
                break
            if self._unread[3] != GOAWAY:
                frames += self._unread[:end]
            self._unread = self._unread[end:]
        return frames

    async def _read(self) -> None:
        data = await asyncio.wait_for(self._reader.read(1 << 16), READ_S_MAX)
        assert data, "the server closed the connection"
        self._unread += data
        for event in self._connection.receive_data(self._whole_frames()):
            if isinstance(event, ResponseReceived | TrailersReceived):
                response = self._responses[event.stream_id]
                response.headers |= {str(name): str(value) for name, value in event.headers}
                if ":status" in response.headers:
                    response.status = int(response.headers.pop(":status"))
            elif isinstance(event, DataReceived):
                self._responses[event.stream_id].body += event.data
                self._connection.acknowledge_received_data(
                    event.flow_controlled_length, event.stream_id
                )
            elif isinstance(event, StreamEnded):
                self._responses[event.stream_id].is_whole = True
                self._unsent.pop(event.stream_id, None)
            elif isinstance(event, StreamReset):
                response = self._responses[event.stream_id]
                self._unsent.pop(event.stream_id, None)
                if not response.is_whole:
                    response.reset = event.error_code
                    response.is_whole = True
        for number in list(self._unsent):
            self._push(number)
        self._flush()


@asynccontextmanager
async def http2_client(port: int, authority: str = "test") -> AsyncIterator[Http2Client]:
    """Connects to a loopback port until the block ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Http2Client(reader, writer, authority)
    finally:
        writer.close()
        await writer.wait_closed()
