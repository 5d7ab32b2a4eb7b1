"""A small HTTP/2 client with prior knowledge, of the h2 package over asyncio's streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset

READ_S_MAX = 10.0


Fields = dict[str, str] | list[tuple[str, str]]


@dataclass
class Answer:
    """What came on one stream; ``reset`` is the code it was reset with, if it was."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False
    reset: int | None = None


class Http2Client:
    """One connection; requests may be sent before others are answered."""

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
        self._answers: dict[int, Answer] = {}
        self._flush()

    def _flush(self) -> None:
        self._writer.write(self._connection.data_to_send())

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Fields | None = None,
    ) -> Answer:
        """The answer to one request, whose body may be larger than any window."""
        number = self.send(method, path, headers, is_end=not body)
        while body:
            size = min(
                self._connection.local_flow_control_window(number),
                self._connection.max_outbound_frame_size,
                len(body),
            )
            if not size:
                await self._read()
                if self._answers[number].is_whole:
                    break
                continue
            self._connection.send_data(number, body[:size], end_stream=size == len(body))
            body = body[size:]
            self._flush()
        return await self.answer(number)

    def send(
        self,
        method: str,
        path: str,
        headers: Fields | None = None,
        *,
        is_end: bool = True,
    ) -> int:
        """Opens a stream; gives its number."""
        number = self._connection.get_next_available_stream_id()
        head = {":method": method, ":scheme": "http", ":path": path, ":authority": self._authority}
        fields = headers.items() if isinstance(headers, dict) else headers or ()
        self._connection.send_headers(number, [*head.items(), *fields], is_end)
        self._answers[number] = Answer()
        self._flush()
        return number

    def post(self, path: str, body: bytes) -> int:
        """Sends a small request; gives its stream's number."""
        number = self.send("POST", path, is_end=False)
        self._connection.send_data(number, body, end_stream=True)
        self._flush()
        return number

    async def answer(self, number: int) -> Answer:
        """The answer on a stream, once it is whole or was reset."""
        answer = self._answers[number]
        while not answer.is_whole:
            await self._read()
        return answer

    async def _read(self) -> None:
        data = await asyncio.wait_for(self._reader.read(1 << 16), READ_S_MAX)
        assert data, "the server closed the connection"
        for event in self._connection.receive_data(data):
            if isinstance(event, ResponseReceived):
                headers = {str(name): str(value) for name, value in event.headers}
                answer = self._answers[event.stream_id]
                answer.status = int(headers.pop(":status"))
                answer.headers = headers
            elif isinstance(event, DataReceived):
                self._answers[event.stream_id].body += event.data
                self._connection.acknowledge_received_data(
                    event.flow_controlled_length, event.stream_id
                )
            elif isinstance(event, StreamEnded):
                self._answers[event.stream_id].is_whole = True
            elif isinstance(event, StreamReset) and not self._answers[event.stream_id].is_whole:
                self._answers[event.stream_id].reset = event.error_code
                self._answers[event.stream_id].is_whole = True
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
