"""Connections as asyncio protocols: their interface, protocol detection and lingering close.

The first bytes of a connection tell HTTP/2 from HTTP/1.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from time import perf_counter
from typing import TYPE_CHECKING, cast

from embedserve.access.client_address import peer_address
from embedserve.wire.http2.frames import PREFACE
from embedserve.wire.http_stream import PROGRESS_BYTES_MIN, UNSENT_S_MAX

if TYPE_CHECKING:
    from embedserve.wire.wire_server import WireServer

FIRST_BYTES_S_MAX = 10.0
"""Seconds until a connection's protocol must be known, and until HTTP/2 SETTINGS must arrive."""
LINGER_S_MAX = 1.0
"""Seconds a client may take to close its side after the kernel has taken the last response."""
LINGER_BYTES_MAX = 64 << 20
"""Bytes discarded from a client during a lingering close; more aborts the connection."""
READ_BYTES = 128 << 10
"""Bytes of a read after which a connection yields to others. libuv alone would read 32 times
256 KiB from one connection."""
DRAIN_IDLE_S = 1.0
"""Seconds a draining connection waits for a request that may be in flight."""


class Connection(asyncio.Protocol, ABC):
    """Base class of every connection of the server."""

    __slots__ = ()

    _transport: asyncio.Transport

    @property
    def peer(self) -> str:
        """Address of the client."""
        return peer_address(self._transport)

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes of incomplete requests, cached header blocks and small unsent responses."""

    def unsent_memory(self) -> dict[int, int]:
        """Returns the bytes of memory kept alive by large unsent responses, by id() of the owner.

        The owner is a batch's output array, which several connections may share.
        """
        return {}

    @abstractmethod
    def check_time(self, now_s: float) -> None:
        """Ends work past its time limits; called every CHECK_S with perf_counter seconds."""

    def retire(self) -> None:
        """Requests the client to reconnect.

        Requests received or in flight are answered, and streams continue until the client ends
        them. Connections that are about to end, or have no protocol yet, do nothing.
        """

    def drain(self) -> None:
        """Answers the requests received, rejects new ones, and closes. Connections that are ending
        already do nothing."""

    def abort(self) -> None:
        """Closes the connection immediately and releases received data."""
        self._transport.abort()


class ProtocolDetector(Connection):
    """A new connection, until its first bytes show which protocol it speaks."""

    def __init__(self, server: WireServer, *, is_local: bool = False) -> None:
        """
        Args:
            server: server of the connection, which makes its successor.
            is_local: whether it was accepted on a Unix socket, which no browser reaches.
        """
        self._server = server
        self._is_local = is_local
        self._data = b""
        self._start_s = perf_counter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not of that class
        if not self._server.has_room():
            self._transport.abort()
            return
        self._server.add(self)

    def data_received(self, data: bytes) -> None:
        data = self._data + data
        if len(data) < len(PREFACE) and PREFACE.startswith(data):
            self._data = data
            return
        is_http2 = data.startswith(PREFACE)
        if not is_http2 and not _may_be_http1(data):
            self._transport.close()
            return
        make = self._server.http2 if is_http2 else self._server.http1
        protocol = make(self._is_local)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        self._server.discard(self)
        protocol.data_received(data.removeprefix(PREFACE))

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.discard(self)

    @property
    def held_bytes(self) -> int:
        return len(self._data)

    def check_time(self, now_s: float) -> None:
        if now_s - self._start_s > FIRST_BYTES_S_MAX:
            self._transport.abort()  # close waits until the client has read what TLS sent

    def drain(self) -> None:
        asyncio.get_running_loop().call_later(DRAIN_IDLE_S, self._close_if_new)

    def _close_if_new(self) -> None:
        if self._transport.get_protocol() is self:
            self._transport.close()


def yield_to_others(transport: asyncio.Transport) -> None:
    """Pauses reading until the next event-loop iteration, so that other connections are served."""
    transport.pause_reading()
    asyncio.get_running_loop().call_soon(_read_on, transport)


def _read_on(transport: asyncio.Transport) -> None:
    if not transport.is_closing():
        transport.resume_reading()


class ReadProgress:
    """Progress of a client that reads what a transport's write buffer has for it."""

    __slots__ = ("_since_s", "_unsent_bytes")

    def __init__(self) -> None:
        self._unsent_bytes = 0  # when the client last counted as reading
        self._since_s = 0.0

    def has_stalled(self, unsent_bytes: int, now_s: float) -> bool:
        """Returns whether the client has read less than PROGRESS_BYTES_MIN for UNSENT_S_MAX.

        Args:
            unsent_bytes: bytes in the write buffer.
            now_s: perf_counter seconds.
        """
        if 0 < self._unsent_bytes < unsent_bytes + PROGRESS_BYTES_MIN:
            return now_s - self._since_s > UNSENT_S_MAX
        self._unsent_bytes, self._since_s = unsent_bytes, now_s
        return False

    def restart(self) -> None:
        """Forgets what was unread: the client is reading, or everything was sent."""
        self._unsent_bytes = 0


class LingeringClose(Connection):
    """A connection whose last response is written; the server's side closes after it is sent.

    Data that the client still sends is discarded for a while. If it were left unread, the kernel
    would reset the connection and drop the last responses.
    """

    def __init__(
        self, transport: asyncio.Transport, connection: Connection, server: WireServer
    ) -> None:
        """Takes over the transport of ``connection``, which must write no more."""
        self._transport = transport
        self._connection = connection
        self._server = server
        self._unsent_s = perf_counter()  # when output was last unread
        self._progress = ReadProgress()
        self._bytes_left = LINGER_BYTES_MAX
        server.add(self)
        server.discard(connection)
        transport.set_protocol(self)
        transport.resume_reading()
        transport.write_eof()

    def data_received(self, data: bytes) -> None:
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            self._transport.abort()
        elif len(data) >= READ_BYTES:
            yield_to_others(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.discard(self)
        self._connection.connection_lost(exc)

    @property
    def held_bytes(self) -> int:
        return self._connection.held_bytes

    def unsent_memory(self) -> dict[int, int]:
        return self._connection.unsent_memory()

    def check_time(self, now_s: float) -> None:
        unsent_bytes = self._transport.get_write_buffer_size()
        if unsent_bytes:
            self._unsent_s = now_s
            is_over = self._progress.has_stalled(unsent_bytes, now_s)
        else:
            is_over = now_s - self._unsent_s > LINGER_S_MAX
        if is_over:
            self._transport.abort()


def _may_be_http1(data: bytes) -> bool:
    """Returns False if the first line is complete but is no HTTP/1 request line.

    The client would then understand an error response of neither protocol.
    """
    line, end, _ = data.partition(b"\r\n")
    return not end or b" HTTP/" in line or not line
