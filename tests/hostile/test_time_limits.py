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
from embedserve.wire.http_stream import UNREAD_S_MAX, NullHandler

ANSWER = bytes(200_000)
HEAD = encode([(b":status", b"200")])


class Slow:
    """A connection whose client requests large responses."""

    def __init__(self, *frames: bytes) -> None:
        self.trace = Trace()
        self._start_s = perf_counter()
        uploads = UploadBudget(1 << 20, lambda: True)
        self.connection = Http2Connection(
            lambda _: ResolvedRoute(_answer, None), uploads, lambda: None
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
        sender, pieces = self.connection.frame_writer, []
        sender.pump()
        while sender.out:
            pieces += sender.out
            sender.out.clear()
            sender.pump()
        data = b"".join(pieces)
        self.trace.sent(data)
        return len(data)


def _answer(stream: Stream) -> NullHandler:
    stream.answer(HEAD, (ANSWER,), len(ANSWER), b"")
    return NullHandler()


def settings(window: int) -> bytes:
    return f.settings((INITIAL_WINDOW_SIZE, window))


def test_a_stream_without_window_is_reset() -> None:
    slow = Slow(settings(0), f.get(1))
    slow.at_most(UNREAD_S_MAX - 1)
    assert slow.trace.reset_codes == {}
    slow.at_least(UNREAD_S_MAX + 1)
    assert slow.trace.reset_codes == {1: CANCEL}
    assert slow.connection.frame_writer.unsent_bytes == 0


def test_a_byte_now_and_then_is_no_progress() -> None:
    slow = Slow(settings(0), f.get(1))
    for _ in range(100):
        slow.receive(f.window_update(1, 1))
    slow.at_least(UNREAD_S_MAX + 1)
    assert slow.trace.reset_codes == {1: CANCEL}


def test_a_slow_reader_that_reads_is_left_alone() -> None:
    slow = Slow(settings(0), f.window_update(0, 1 << 20), f.get(1))
    slow.receive(f.window_update(1, 100_000))
    slow.at_most(UNREAD_S_MAX - 1)
    assert slow.trace.reset_codes == {}
    assert slow.receive(f.window_update(1, 100_000)) >= 100_000


def test_a_connection_without_window_keeps_nothing() -> None:
    slow = Slow(settings(f.WINDOW_MAX), *(f.get(stream) for stream in range(1, 101, 2)))
    assert slow.connection.frame_writer.unsent_bytes > 9_000_000
    slow.at_least(UNREAD_S_MAX + 1)
    assert slow.connection.frame_writer.unsent_bytes == 0
