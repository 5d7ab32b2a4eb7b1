"""Moves bytes between a socket and an Http2Connection, as asyncio protocol.

It stops reading while its client does not read (backpressure).

A response that is alone goes from FrameWriter straight to the transport. Otherwise its frames wait
in ``FrameWriter.out``, and the transport is flushed once for many: after data_received if that
wrote responses, or else when the batch is done (``pipeline.flush_later``), so that the responses of
a batch are one write.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import TYPE_CHECKING, cast

from embedserve.access.authenticator import CERTIFICATE
from embedserve.access.client_address import peer_address
from embedserve.wire.connections import FIRST_BYTES_S_MAX, Connection, LingeringClose, ReadProgress
from embedserve.wire.http2.connection import Http2Connection
from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http2.upload_budget import UploadBudget
from embedserve.wire.route_table import RouteTable
from embedserve.wire.unsent_memory import owners_of

if TYPE_CHECKING:
    from embedserve.wire.wire_server import WireServer

IDLE_S_MAX = 600.0
"""Seconds an HTTP/2 connection may be without streams; long, as clients expect to keep it."""
DRAIN_PING_S_MAX = 1.0
"""Seconds a draining connection waits for the acknowledgement of its ping."""
RETIRE_PING_S_MAX = 10.0
"""Seconds a retiring connection waits for the acknowledgement of its ping. The server continues to
run, so it can wait for slow networks."""
STREAM_BYTES = 4 << 10
"""Approximate bytes of memory per open stream, without received and unsent data."""
JOINED_BYTES_MAX = 64 << 10
"""Bytes of output up to which chunks are joined into one write."""


class Http2Protocol(Connection):
    """An HTTP/2 connection over an asyncio transport."""

    __slots__ = (
        "_connection",
        "_has_ended",
        "_idle_since_s",
        "_is_continue_due",
        "_is_write_paused",
        "_loop",
        "_pipeline",
        "_progress",
        "_server",
        "_start_s",
        "_transport",
        "_will_flush",
    )

    def __init__(self, routes: RouteTable, uploads: UploadBudget, server: WireServer) -> None:
        self._pipeline = routes.pipeline
        self._server = server
        self._connection = Http2Connection(
            routes.resolve_http2, uploads, self._on_output, server.date
        )
        self._loop = asyncio.get_running_loop()
        self._has_ended = self._is_write_paused = False
        self._will_flush = self._is_continue_due = False
        self._progress = ReadProgress()
        self._start_s = self._idle_since_s = perf_counter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not of that class
        self._connection.frame_writer.write = self._transport.write
        self._connection.certificate = self._transport.get_extra_info(CERTIFICATE)
        self._connection.peer = peer_address(self._transport)
        self._server.add(self)

    def data_received(self, data: bytes) -> None:
        connection = self._connection
        self._will_flush = True  # responses written while reading are flushed once at the end
        connection.receive(data)
        if connection.has_more:
            # Yields to other connections before the rest is read.
            self._server.record_growth(len(data))
            self._transport.pause_reading()
            self._continue_soon()
        elif connection.flow_control.held_bytes:
            self._server.record_growth(len(data))
        writer = connection.frame_writer
        if not (writer.out or writer.ready or connection.is_over):
            self._will_flush = False
        elif self._pipeline.models.has_full_unsized_queue:
            # Under overload many rejections follow: they are batched, as each write wakes a client.
            self._pipeline.flush_later(self.flush)
        else:
            self.flush()

    def _continue_soon(self) -> None:
        if not self._is_continue_due:
            self._is_continue_due = True
            self._loop.call_soon(self._continue_reading)

    def _continue_reading(self) -> None:
        self._is_continue_due = False
        if self._has_ended or self._transport.is_closing():
            return
        if self._is_write_paused:
            return  # resume_writing continues
        self._transport.resume_reading()
        try:
            self.data_received(b"")
        except Exception:
            self._transport.abort()  # as the transport does if data_received raises
            raise

    def _on_output(self) -> None:
        if not self._will_flush:
            self._will_flush = True
            self._pipeline.flush_later(self.flush)

    def flush(self) -> None:
        """Writes pending output until the transport is full."""
        self._will_flush = False
        if self._is_write_paused or self._has_ended or self._transport.is_closing():
            return
        writer = self._connection.frame_writer
        out = writer.out
        if len(out) == 1 and not (writer.ready or writer.fresh or self._connection.is_over):
            self._transport.write(out.pop())
            return
        while True:
            pumped = writer.pump() if writer.ready else 0
            if not out:
                break
            if len(out) == 1:
                self._transport.write(out[0])
            elif pumped <= JOINED_BYTES_MAX and sum(map(len, out)) <= JOINED_BYTES_MAX:
                self._transport.write(b"".join(out))
            else:
                self._transport.writelines(list(out))
            out.clear()
            if self._is_write_paused or not writer.ready:
                break
        if writer.fresh:
            writer.detach_small_bodies()
        if self._connection.is_over:
            self._end()

    def _end(self) -> None:
        self._has_ended = True
        LingeringClose(self._transport, self, self._server)

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        if self._transport.is_closing():
            return
        self.flush()
        if self._is_write_paused:
            return
        if self._connection.has_more:
            self._continue_soon()
        else:
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        """Closes the connection: a client that has closed its side cannot end streams properly."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.discard(self)
        self._connection.close()

    @property
    def held_bytes(self) -> int:
        connection = self._connection
        return (
            self._transport.get_write_buffer_size()
            + connection.flow_control.held_bytes
            + connection.left_bytes
            + len(connection.streams) * STREAM_BYTES
            + connection.blocks.cached_bytes
        )

    def drop_cached_headers(self) -> int:
        """Clears the cache of header blocks, and returns the bytes that it had."""
        blocks = self._connection.blocks
        nbytes = blocks.cached_bytes
        blocks.clear()
        return nbytes

    def unsent_memory(self) -> dict[int, int]:
        connection = self._connection
        if not connection.frame_writer.unsent_bytes:
            return {}
        return owners_of(
            chunk for stream in connection.streams.values() for chunk in stream.unsent or ()
        )

    def check_time(self, now_s: float) -> None:
        connection = self._connection
        if self._is_write_paused or self._transport.is_closing():
            if self._progress.has_stalled(self._transport.get_write_buffer_size(), now_s):
                self._transport.abort()
                return
            connection.frame_writer.restart_timeouts(now_s)
        else:
            self._progress.restart()
        if not connection.is_begun and now_s - self._start_s > FIRST_BYTES_S_MAX:
            connection.end(ErrorCode.SETTINGS_TIMEOUT, "no settings have come")
        connection.check_time(now_s)
        if connection.streams:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s > IDLE_S_MAX:
            connection.shutdown.finish()

    def retire(self) -> None:
        self._connection.shutdown.send_goaway()
        self._loop.call_later(RETIRE_PING_S_MAX, self._connection.shutdown.finish)

    def drain(self) -> None:
        self._connection.shutdown.start_drain()
        self._loop.call_later(DRAIN_PING_S_MAX, self._connection.shutdown.finish)
