"""Tests of slow clients by the server's own clock, without any real waiting.

The tests use the connection without its socket: they pass it bytes, and then the time.
"""

from __future__ import annotations

from time import perf_counter

from hostile import frames as f
from hostile.frames import CANCEL, INITIAL_WINDOW_SIZE
from hostile.trace import Trace

from embedserve.wire.http2.connection import Http2Connection
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http2.request_headers import ResolvedRoute
from embedserve.wire.http2.stream import Stream
from embedserve.wire.http2.upload_budget import UploadBudget
from embedserve.wire.http_stream import NULL_HANDLER, UNREAD_S_MAX, Handler

RESPONSE_BODY = bytes(200_000)
RESPONSE_HEADERS = encode([(b":status", b"200")])


class SlowClient:
    """A connection whose client requests large responses."""

    def __init__(self, *frames: bytes) -> None:
        self.trace = Trace()
        self._start_s = perf_counter()
        uploads = UploadBudget(1 << 20, lambda: True)
        self.connection = Http2Connection(
            lambda _: ResolvedRoute(_respond, None), uploads, lambda: None
        )
        self.receive(f.PREFACE + b"".join(frames))

    def receive(self, data: bytes) -> int:
        """Receives ``data``; returns how many bytes of responses the connection sends."""
        self.connection.receive(data)
        return self._sent()

    def at_most(self, seconds: float) -> None:
        """Checks time limits when at most ``seconds`` have passed since any wait began."""
        self.connection.check_time(self._start_s + seconds)
        self._sent()

    def at_least(self, seconds: float) -> None:
        """Checks time limits when at least ``seconds`` have passed."""
        self.connection.check_time(perf_counter() + seconds)
        self._sent()

    def _sent(self) -> int:
        sender, chunks = self.connection.frame_writer, []
        sender.pump()
        while sender.out:
            chunks += sender.out
            sender.out.clear()
            sender.pump()
        data = b"".join(chunks)
        self.trace.sent(data)
        return len(data)


def _respond(stream: Stream) -> Handler:
    stream.send_response(RESPONSE_HEADERS, (RESPONSE_BODY,), len(RESPONSE_BODY), b"")
    return NULL_HANDLER


def settings(window: int) -> bytes:
    return f.settings((INITIAL_WINDOW_SIZE, window))


def test_stream_without_window_is_reset_after_the_timeout() -> None:
    client = SlowClient(settings(0), f.get(1))
    client.at_most(UNREAD_S_MAX - 1)
    assert client.trace.reset_codes == {}
    client.at_least(UNREAD_S_MAX + 1)
    assert client.trace.reset_codes == {1: CANCEL}
    assert client.connection.frame_writer.unsent_bytes == 0


def test_one_byte_window_updates_do_not_prevent_the_reset() -> None:
    client = SlowClient(settings(0), f.get(1))
    for _ in range(100):
        client.receive(f.window_update(1, 1))
    client.at_least(UNREAD_S_MAX + 1)
    assert client.trace.reset_codes == {1: CANCEL}


def test_slow_reader_with_progress_is_not_reset() -> None:
    client = SlowClient(settings(0), f.window_update(0, 1 << 20), f.get(1))
    client.receive(f.window_update(1, 100_000))
    client.at_most(UNREAD_S_MAX - 1)
    assert client.trace.reset_codes == {}
    assert client.receive(f.window_update(1, 100_000)) >= 100_000


def test_connection_without_window_drops_its_unsent_bytes() -> None:
    client = SlowClient(settings(f.WINDOW_MAX), *(f.get(stream) for stream in range(1, 101, 2)))
    assert client.connection.frame_writer.unsent_bytes > 9_000_000
    client.at_least(UNREAD_S_MAX + 1)
    assert client.connection.frame_writer.unsent_bytes == 0
