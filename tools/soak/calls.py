"""gRPC clients with their own HTTP/2 frames, so that the connection of each call is known: single
calls and streams.

They respect the server's flow-control windows and GOAWAY.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from hostile import frames as f
from hostile.frames import Frame
from hpack import Decoder
from soak.clients import ANSWER_S_MAX, ClientConnection, connected
from soak.embeds import EmbedCase, is_refusal
from soak.tally import ClientContext

READ_BYTES = 1 << 18
GIVEN_BYTES = 1 << 30
GREETING = (
    f.PREFACE
    + f.settings((f.HEADER_TABLE_SIZE, 0), (f.INITIAL_WINDOW_SIZE, f.WINDOW_MAX))
    + f.window_update(0, GIVEN_BYTES)
)
"""Settings without a header table: a header block then has the same meaning on every connection."""
WINDOW = 65_535
REFUSED, UNAVAILABLE = 8, 14
PENDING_MAX = 8
"""Calls, or requests of a stream, that wait for their responses on a connection, at most."""


@dataclass
class Call:
    """A single call or a stream, with its requests that have no response yet."""

    kind: str
    is_stream: bool
    window: int
    waiting: deque[tuple[EmbedCase, float]] = field(default_factory=deque)
    received: bytearray = field(default_factory=bytearray)
    headers: dict[str, str] = field(default_factory=dict)
    sent: int = 0


class GrpcConnection(ClientConnection):
    """An HTTP/2 connection.

    Attributes:
        calls: open calls, by stream.
    """

    def __init__(
        self, site: ClientContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        super().__init__(site, reader, writer)
        self.calls: dict[int, Call] = {}
        self._next = 1
        self._last_taken = f.WINDOW_MAX
        self._window = WINDOW
        self._stream_window = WINDOW
        self._got = 0
        self._buffer = bytearray()
        self._block = b""
        self._known: dict[bytes, dict[str, str]] = {}
        self.write(GREETING)
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, site: ClientContext) -> GrpcConnection | None:
        found = await connected(site, is_grpc=True)
        return None if found is None else cls(site, *found)

    def begin(self, kind: str, is_stream: bool) -> int:
        """Opens a stream; its headers are sent with its first request."""
        stream, self._next = self._next, self._next + 2
        self.calls[stream] = Call(kind, is_stream, self._stream_window)
        return stream

    def ask(self, stream: int, one: EmbedCase) -> bool:
        """Sends a request if the windows have room. Returns whether it was sent."""
        call, message = self.calls[stream], f.message(one.message)
        if min(call.window, self._window) < len(message):
            if not call.sent:
                del self.calls[stream]
            return False
        call.window -= len(message)
        self._window -= len(message)
        data = f.data(stream, message, end=not call.is_stream)
        if not call.sent:
            method = b"EmbedStream" if call.is_stream else b"Embed"
            data = f.headers(stream, f.grpc_head(method), end=False) + data
        self.write(data)
        call.sent += 1
        call.waiting.append((one, monotonic()))
        self._site.tally.sent[call.kind] += 1
        return True

    def end(self, stream: int) -> None:
        """Ends the requests of a stream."""
        if stream in self.calls:
            self.write(f.data(stream))

    def end_late(self) -> None:
        """Aborts the connection if one of its responses is late."""
        waiting = [call.waiting[0][1] for call in self.calls.values() if call.waiting]
        if waiting and monotonic() - min(waiting) > ANSWER_S_MAX:
            self._writer.transport.abort()

    async def finish(self) -> None:
        """Waits for pending responses, and closes."""
        while self.calls and not self._reading.done():
            self.end_late()
            await asyncio.wait([self._reading], timeout=0.05)
        self.close()
        await self._reading

    async def _read(self) -> None:
        why = "closed"
        try:
            while data := await self._reader.read(READ_BYTES):
                self._buffer += data
                for frame in f.take_frames(self._buffer):
                    self._take(frame)
                self._got += len(data)
                if self._got > GIVEN_BYTES // 2:
                    self.write(f.window_update(0, self._got))
                    self._got = 0
        except OSError as error:
            why = repr(error)
        for stream in list(self.calls):
            self._leave(stream, why)
        self.close()

    def _take(self, frame: Frame) -> None:
        call = self.calls.get(frame.stream)
        if frame.type == f.DATA and call is not None:
            call.received += frame.payload
            self._take_messages(call)
        elif frame.type in (f.HEADERS, f.CONTINUATION):
            self._block += frame.payload
            if frame.flags & f.END_HEADERS:
                headers = self._decoded(self._block)
                self._block = b""
                if call is not None:
                    call.headers |= headers
        elif frame.type == f.RST_STREAM and call is not None:
            (code,) = struct.unpack(">L", frame.payload)
            if code == f.REFUSED_STREAM:
                self._return(frame.stream)
            else:
                self._leave(frame.stream, f"reset with {code}")
        elif frame.type == f.GOAWAY:
            self._take_goaway(*struct.unpack(">LL", frame.payload[:8]))
        elif frame.type == f.PING and not frame.flags & f.ACK:
            self.write(f.frame(f.PING, f.ACK, 0, frame.payload))
        elif frame.type == f.SETTINGS and not frame.flags & f.ACK:
            self._take_settings(frame.payload)
        elif frame.type == f.WINDOW_UPDATE:
            (given,) = struct.unpack(">L", frame.payload)
            if not frame.stream:
                self._window += given
            elif call is not None:
                call.window += given
        if frame.ends_stream and frame.stream in self.calls:
            self._end(frame.stream)

    def _take_settings(self, payload: bytes) -> None:
        for number, value in struct.iter_unpack(">HL", payload):
            if number == f.INITIAL_WINDOW_SIZE:
                for call in self.calls.values():
                    call.window += value - self._stream_window
                self._stream_window = value
        self.write(f.settings_ack())

    def _take_goaway(self, last_stream: int, code: int) -> None:
        self.is_open = False
        self._last_taken = min(self._last_taken, last_stream)
        if code != f.NO_ERROR:
            self._site.tally.say_wrong(f"GOAWAY with {code}")
        for stream in [one for one in self.calls if one > last_stream]:
            self._return(stream)

    def _decoded(self, block: bytes) -> dict[str, str]:
        found = self._known.get(block)
        if found is None:
            decoded = Decoder().decode(block)
            found = {str(name): str(value) for name, value in decoded}
            self._known[block] = found
        return found

    def _take_messages(self, call: Call) -> None:
        received = call.received
        while len(received) >= 5:
            end = 5 + int.from_bytes(received[1:5], "big")
            if len(received) < end:
                return
            body = bytes(received[5:end])
            del received[:end]
            one, asked_s = call.waiting.popleft()
            self._answered += 1
            if call.is_stream and is_refusal(body):
                self._site.tally.refused[call.kind] += 1
            else:
                self._site.answer(call.kind, asked_s, one, body)

    def _end(self, stream: int) -> None:
        """Handles a stream that the server has ended."""
        call = self.calls[stream]
        status, message = call.headers.get("grpc-status"), call.headers.get("grpc-message", "")
        tally = self._site.tally
        if status == str(UNAVAILABLE) and "draining" in message:
            self._return(stream)
        elif status == "0":
            self._leave(stream, "ended without an answer")
        else:
            for _ in call.waiting:
                if status == str(REFUSED):
                    self._site.refuse(call.kind, call.headers.get("retry-after"))
                    self._answered += 1
                else:
                    tally.answered[call.kind] += 1
                    tally.say_wrong(f"{call.kind}: status {status} {message}")
            del self.calls[stream]

    def _return(self, stream: int) -> None:
        """Counts the pending requests of a stream as not taken by the server."""
        call = self.calls.pop(stream)
        self._site.tally.not_taken[call.kind] += len(call.waiting)

    def _leave(self, stream: int, why: str) -> None:
        """Counts the pending requests of a stream as lost."""
        call = self.calls.pop(stream)
        if call.waiting:
            self.lose(call.kind, len(call.waiting), why)


async def call_in_turn(
    site: ClientContext, kind: str, asks: Sequence[EmbedCase], rate: float
) -> None:
    """Makes single calls until the stop, several of them concurrently."""
    line: GrpcConnection | None = None
    leaving: set[asyncio.Task[None]] = set()
    while not site.stop.is_set():
        if line is None or line.is_used_up or not line.is_usable:
            if line is not None:
                leaving.add(task := asyncio.create_task(line.finish()))
                task.add_done_callback(leaving.discard)
            line = await GrpcConnection.open(site)
            continue
        line.end_late()
        if len(line.calls) < PENDING_MAX:
            line.ask(line.begin(kind, is_stream=False), site.random.choice(asks))
        await asyncio.sleep(site.random.uniform(0.5, 1.5) / rate)
    await asyncio.gather(*leaving, *([line.finish()] if line else []))


async def stream_in_turn(
    site: ClientContext, kind: str, asks: Sequence[EmbedCase], rate: float
) -> None:
    """Opens one stream after the other until the stop, with several pending requests each."""
    while not site.stop.is_set():
        line = await GrpcConnection.open(site)
        if line is None:
            return
        stream = 0
        while line.is_usable and not line.is_used_up and not site.stop.is_set():
            line.end_late()
            if stream not in line.calls:
                stream = line.begin(kind, is_stream=True)
            if len(line.calls[stream].waiting) < PENDING_MAX:
                line.ask(stream, site.random.choice(asks))
            await asyncio.sleep(site.random.uniform(0.5, 1.5) / rate)
        line.end(stream)
        await line.finish()
