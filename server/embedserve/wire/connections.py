"""Connections as asyncio's protocols: the first bytes tell HTTP/2 from HTTP/1.

``Http2Transport`` moves bytes between a socket and an Http2Connection, and reads no more while its
client does not read.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Protocol, cast

from embedserve.access.authenticator import CERTIFICATE
from embedserve.access.client_address import peer_address
from embedserve.pipeline import RequestPipeline
from embedserve.wire.http2.connection import UNREAD_S_MAX, Http2Connection
from embedserve.wire.http2.frames import PREFACE, ErrorCode
from embedserve.wire.http2.route_resolver import OpenRequest
from embedserve.wire.http2.upload_budget import UploadBudget
from embedserve.wire.unsent_memory import owners_of

FIRST_BYTES_S_MAX = 10.0
"""How long a connection may take to show its protocol, and one of HTTP/2 to send its settings."""
IDLE_S_MAX = 600.0
"""How long an HTTP/2 connection may have no stream: its clients expect to keep it."""
LINGER_S_MAX = 1.0
"""How long a client may take to close its side of a connection whose last answer is written."""
LINGER_BYTES_MAX = 64 << 20
"""Of what it still sends meanwhile."""
READ_BYTES = 128 << 10
"""After a read of so much it is others' turn: libuv reads 32 times 256 KiB of a connection."""
DRAIN_IDLE_S = 1.0
"""How long a draining connection waits for a request that may be on its way."""
DRAIN_PING_S_MAX = 1.0
"""How long a client may take to answer the ping of a drain."""
RETIRE_PING_S_MAX = 10.0
"""The same where the server goes on, and can wait for what is on its way from afar."""
STREAM_BYTES = 4 << 10
"""What an open stream takes, about, beside what was received and is to be sent."""
JOINED_BYTES_MAX = 64 << 10
"""Pieces of no more bytes are written as one."""


class Connection(Protocol):
    """What the server asks of any of its connections."""

    @property
    def peer(self) -> str:
        """The address of its other end."""

    @property
    def held_bytes(self) -> int:
        """Of requests that have not come whole, and of small answers that are not read."""

    def unread(self) -> dict[int, int]:
        """Bytes of what large answers that are not read keep in memory, by its identity:
        connections may keep the same batch."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Lets go of what it holds: there is no connection any more."""

    def check_time(self, now_s: float) -> None:
        """Ends what takes too long (perf_counter seconds); called now and then."""

    def retire(self) -> None:
        """Asks its client to connect anew: what was asked and what is on its way is answered, and
        streams go on until their client ends them."""

    def drain(self) -> None:
        """Answers what was asked, takes no more, and closes."""

    def abort(self) -> None:
        """Closes at once, and lets go of what was received."""


class ConnectionManager(Protocol):
    """Where connections are kept, and what makes them."""

    def has_room(self) -> bool:
        """Whether there may be one more."""

    def has_grown(self, nbytes: int) -> None:
        """Told of what connections hold from now on, where it is not little."""

    def http1(self, is_local: bool) -> asyncio.Protocol: ...

    def http2(self, is_local: bool) -> asyncio.Protocol: ...

    def add(self, connection: Connection) -> None: ...

    def discard(self, connection: Connection) -> None: ...


class ProtocolDetector(asyncio.Protocol):
    """A connection that has not said yet which protocol it speaks."""

    def __init__(self, registry: ConnectionManager, *, is_local: bool = False) -> None:
        """
        Args:
            is_local: it came to a Unix socket, which no browser reaches.
        """
        self._registry = registry
        self._is_local = is_local
        self._data = b""
        self._start_s = perf_counter()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not of that class
        if not self._registry.has_room():
            self._transport.abort()
            return
        self._registry.add(self)

    def data_received(self, data: bytes) -> None:
        if self._data:
            data = self._data + data
        if len(data) < len(PREFACE) and PREFACE.startswith(data):
            self._data = data
            return
        is_http2 = data.startswith(PREFACE)
        if not is_http2 and not _may_be_http1(data):
            self._transport.close()
            return
        make = self._registry.http2 if is_http2 else self._registry.http1
        protocol = make(self._is_local)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        self._registry.discard(self)
        protocol.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.discard(self)

    @property
    def peer(self) -> str:
        return peer_address(self._transport)

    @property
    def held_bytes(self) -> int:
        return len(self._data)

    def unread(self) -> dict[int, int]:
        return {}

    def check_time(self, now_s: float) -> None:
        if now_s - self._start_s > FIRST_BYTES_S_MAX:
            self._transport.close()

    def retire(self) -> None:
        """It soon is another connection, or closed."""

    def drain(self) -> None:
        asyncio.get_running_loop().call_later(DRAIN_IDLE_S, self._close_if_new)

    def _close_if_new(self) -> None:
        if self._transport.get_protocol() is self:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


def yield_to_others(transport: asyncio.Transport) -> None:
    """Reads on once other connections had their turn of the event loop."""
    transport.pause_reading()
    asyncio.get_running_loop().call_soon(_read_on, transport)


def _read_on(transport: asyncio.Transport) -> None:
    if not transport.is_closing():
        transport.resume_reading()


class LingeringClose(asyncio.Protocol):
    """A connection whose last answer is written: our side is closed once that was sent.

    What its client still sends is thrown away for a while. Left unread, it would have the kernel
    throw away our last answers.
    """

    def __init__(
        self, transport: asyncio.Transport, connection: Connection, registry: ConnectionManager
    ) -> None:
        """Takes the transport over from its ``connection``, which must write no more."""
        self._transport = transport
        self._connection = connection
        self._registry = registry
        self._start_s = perf_counter()
        self._bytes_left = LINGER_BYTES_MAX
        registry.add(self)
        registry.discard(connection)
        transport.set_protocol(self)
        transport.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()
        else:  # as over TLS
            transport.close()

    def data_received(self, data: bytes) -> None:
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            self._transport.abort()
        elif len(data) >= READ_BYTES:
            yield_to_others(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.discard(self)
        self._connection.connection_lost(exc)

    @property
    def peer(self) -> str:
        return peer_address(self._transport)

    @property
    def held_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def unread(self) -> dict[int, int]:
        return self._connection.unread()

    def check_time(self, now_s: float) -> None:
        if now_s - self._start_s > (UNREAD_S_MAX if self.held_bytes else LINGER_S_MAX):
            self._transport.abort()

    def retire(self) -> None:
        """It ends already."""

    def drain(self) -> None:
        """It ends already."""

    def abort(self) -> None:
        self._transport.abort()


def _may_be_http1(data: bytes) -> bool:
    """False where the first line is whole and no request line of HTTP/1: neither protocol's error
    would be understood."""
    line, end, _ = data.partition(b"\r\n")
    return not end or b" HTTP/" in line or not line


class Http2Transport(asyncio.Protocol):
    """An HTTP/2 connection and its socket."""

    __slots__ = (
        "_connection",
        "_has_ended",
        "_idle_since_s",
        "_is_flush_due",
        "_loop",
        "_paused_s",
        "_pipeline",
        "_registry",
        "_start_s",
        "_transport",
    )

    def __init__(
        self,
        pipeline: RequestPipeline,
        open_request: OpenRequest,
        uploads: UploadBudget,
        registry: ConnectionManager,
    ) -> None:
        self._pipeline = pipeline
        self._registry = registry
        self._connection = Http2Connection(open_request, uploads, self._on_output)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._has_ended = self._is_flush_due = False
        self._paused_s = 0.0
        self._start_s = self._idle_since_s = perf_counter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not of that class
        self._connection.frame_writer.write = self._transport.write
        self._connection.certificate = self._transport.get_extra_info(CERTIFICATE)
        self._connection.peer = peer_address(self._transport)
        self._registry.add(self)

    def data_received(self, data: bytes) -> None:
        connection = self._connection
        self._is_flush_due = True  # what is answered while reading is written at its end
        connection.receive(data)
        if connection.has_more:
            # Other connections are read before the rest is.
            self._registry.has_grown(len(data))
            self._transport.pause_reading()
            self._loop.call_soon(self._go_on)
        elif connection.flow_control.held_bytes:
            self._registry.has_grown(len(data))
        sender = connection.frame_writer
        if not (sender.out or sender.ready or connection.is_over):
            self._is_flush_due = False
        elif self._pipeline.models.is_closed:
            # Many are refused: each refusal by itself would wake its client.
            self._pipeline.flush_later(self)
        else:
            self.flush()

    def _go_on(self) -> None:
        if self._has_ended or self._transport.is_closing():
            return
        if self._paused_s:
            return  # resume_writing goes on
        self._transport.resume_reading()
        try:
            self.data_received(b"")
        except Exception:
            self._transport.abort()  # as the transport does where data_received raises
            raise

    def _on_output(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self._pipeline.flush_later(self)

    def flush(self) -> None:
        """Writes what there is to be written, as far as the client reads."""
        self._is_flush_due = False
        if self._paused_s or self._has_ended or self._transport.is_closing():
            return
        sender = self._connection.frame_writer
        out = sender.out
        if len(out) == 1 and not (sender.ready or sender.fresh or self._connection.is_over):
            self._transport.write(out.pop())
            return
        while True:
            pumped = sender.pump() if sender.ready else 0
            if not out:
                break
            if len(out) == 1:
                self._transport.write(out[0])
            elif pumped <= JOINED_BYTES_MAX and sum(map(len, out)) <= JOINED_BYTES_MAX:
                self._transport.write(b"".join(out))
            else:
                self._transport.writelines(list(out))
            out.clear()
            if self._paused_s or not sender.ready:
                break
        if sender.fresh:
            sender.detach_small_bodies()
        if self._connection.is_over:
            self._end()

    def _end(self) -> None:
        self._has_ended = True
        LingeringClose(self._transport, self, self._registry)

    def pause_writing(self) -> None:
        self._paused_s = perf_counter()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused_s = 0.0
        if self._transport.is_closing():
            return
        self.flush()
        if self._paused_s:
            return
        if self._connection.has_more:
            self._loop.call_soon(self._go_on)
        else:
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        """The client sends no more, and so cannot end a stream properly: all of it ends."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.discard(self)
        self._connection.close()

    @property
    def peer(self) -> str:
        return peer_address(self._transport)

    @property
    def held_bytes(self) -> int:
        connection = self._connection
        return (
            self._transport.get_write_buffer_size()
            + connection.flow_control.held_bytes
            + connection.left_bytes
            + len(connection.streams) * STREAM_BYTES
        )

    def unread(self) -> dict[int, int]:
        connection = self._connection
        if not connection.frame_writer.unsent_bytes:
            return {}
        return owners_of(
            part for stream in connection.streams.values() for part in stream.unsent or ()
        )

    def check_time(self, now_s: float) -> None:
        connection = self._connection
        if self._transport.is_closing() and not self._paused_s:
            self._paused_s = now_s  # its client has ended it, and may not read
        if self._paused_s and now_s - self._paused_s > UNREAD_S_MAX:
            self._transport.abort()
            return
        if not connection.is_begun and now_s - self._start_s > FIRST_BYTES_S_MAX:
            connection.end(ErrorCode.SETTINGS_TIMEOUT, "no settings have come")
        connection.check_time(now_s)
        if connection.streams:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s > IDLE_S_MAX:
            connection.finish_drain()

    def retire(self) -> None:
        self._connection.send_goaway()
        self._loop.call_later(RETIRE_PING_S_MAX, self._connection.finish_drain)

    def drain(self) -> None:
        self._connection.start_drain()
        self._loop.call_later(DRAIN_PING_S_MAX, self._connection.finish_drain)

    def abort(self) -> None:
        self._transport.abort()
