"""Graceful shutdown of an HTTP/2 connection: GOAWAY, a ping, and the end of the last stream
(RFC 9113, section 6.8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embedserve.wire.http2 import frames
from embedserve.wire.http2.frames import ErrorCode

if TYPE_CHECKING:
    from embedserve.wire.http2.connection import Http2Connection

DRAIN_PING = b"draining"
MAX_STREAM_ID = 2**31 - 1


class GracefulShutdown:
    """Ends a connection once its streams are answered: ``send_goaway`` or ``start_drain``, and
    ``finish`` when the client has acknowledged the ping, or some time later."""

    __slots__ = ("_connection", "_is_draining")

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        self._is_draining = False

    def send_goaway(self) -> None:
        """Sends GOAWAY, so that the client opens no more streams.

        Streams in flight are still accepted, and all streams continue. A ping follows; its
        acknowledgement shows that no more streams are in flight.
        """
        connection = self._connection
        if connection.streams_max and not connection.is_over:  # else the final GOAWAY was sent
            out = connection.frame_writer.out
            out.append(frames.goaway(MAX_STREAM_ID, ErrorCode.NO_ERROR))
            out.append(frames.ping(DRAIN_PING))
            connection.on_output()

    def start_drain(self) -> None:
        """Sends GOAWAY and drains the streams: each ends after it has answered its requests."""
        self._is_draining = True
        self.send_goaway()
        self._drain_streams()

    def _drain_streams(self) -> None:
        for stream in list(self._connection.streams.values()):
            stream.handler.drain()

    def finish(self) -> None:
        """Rejects new streams from now on, and ends the connection when the last stream ends."""
        connection = self._connection
        if connection.is_over or not connection.streams_max:
            return
        connection.streams_max = 0
        last_id = max(0, connection.next_id - 2)
        connection.frame_writer.out.append(frames.goaway(last_id, ErrorCode.NO_ERROR))
        if self._is_draining:
            self._drain_streams()
        if not connection.streams:
            connection.finish()
        connection.on_output()
