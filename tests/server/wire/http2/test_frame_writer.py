"""Tests of responses as frames: within every window, fair, complete, and freed for stalled
readers.
"""

import gc
import weakref
from time import perf_counter

import numpy as np
import pytest
from hyperframe.frame import DataFrame, HeadersFrame, RstStreamFrame, SettingsFrame
from hypothesis import given
from hypothesis import strategies as st
from server.wire.http2.peer import (
    OK,
    TAIL,
    Peer,
    RecordingHandler,
    assert_connection_error,
    body_of,
    has_ended,
    of,
    resets,
    update,
)

from embedserve.wire.http2.frame_writer import KEPT_BYTES_MIN, TURN_BYTES
from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http_stream import PROGRESS_BYTES_MIN, UNSENT_S_MAX

WINDOW = 65535
LARGE = np.random.default_rng(0).integers(0, 256, 7_000_000, np.uint8).tobytes()


def respond(peer: Peer, stream_id: int, body: bytes, tail: bytes = b"") -> RecordingHandler:
    """Opens a stream, and writes the response to its request."""
    handler = peer.open(stream_id)
    handler.stream.send_response(OK, (body,), len(body), tail)
    return handler


@pytest.mark.parametrize("tail", [b"", TAIL])
@pytest.mark.parametrize("body", [b"", b"x", b"x" * 16384])
def test_small_response_is_written_as_one_chunk(body: bytes, tail: bytes) -> None:
    peer = Peer()
    respond(peer, 1, b"first")  # the first response signals that the peer's table is unused
    peer.take()
    respond(peer, 3, body, tail)
    (chunk,) = peer.connection.frame_writer.out
    frames = peer.take()
    assert body_of(frames, 3) == body
    assert [type(one) for one in frames[1:]] == [DataFrame] + [HeadersFrame] * bool(tail)
    assert [("END_STREAM" in one.flags) for one in frames] == [False] * (len(frames) - 1) + [True]
    assert len(chunk) == sum(9 + len(one.serialize()) - 9 for one in frames)


def test_first_header_block_sets_the_table_size_to_zero() -> None:
    """Checks the table size update of RFC 7541, section 4.2: prebuilt blocks depend on no table."""
    peer = Peer()
    respond(peer, 1, b"x", TAIL)
    first, _, tail = peer.take()
    assert isinstance(first, HeadersFrame)
    assert first.data == b"\x20" + OK
    assert peer.response_headers(first) == [(b":status", b"200")]
    assert peer.decoder.header_table_size == 0
    assert peer.response_headers(tail) == [(b"grpc-status", b"0")]


def test_long_header_block_is_split_into_continuations() -> None:
    peer = Peer()
    peer.open(1)
    block = encode([(b":status", b"200"), (b"x-long", b"a" * 40_000)])
    peer.handlers[1].stream.send_head(block, is_end=True)
    head, *rest = peer.take()
    assert isinstance(head, HeadersFrame)
    assert [len(one.data) <= 16384 for one in (head, *rest)] == [True] * 3  # type: ignore[attr-defined]
    assert [("END_HEADERS" in one.flags) for one in (head, *rest)] == [False, False, True]
    whole = head.data + b"".join(one.data for one in rest)  # type: ignore[attr-defined]
    assert whole == b"\x20" + block
    assert "END_STREAM" in head.flags


@pytest.mark.parametrize("tail", [b"", TAIL])
def test_large_response_reaches_a_client_with_small_windows_complete(tail: bytes) -> None:
    peer = Peer()
    respond(peer, 1, LARGE, tail)
    frames = peer.take()
    received = bytearray(body_of(frames, 1))
    assert len(received) == WINDOW
    while len(received) < len(LARGE):
        frames = peer.send(update(1, 30_000), update(0, 30_000))
        more = body_of(frames, 1)
        assert 0 < len(more) <= 30_000
        received += more
        assert all(len(one.data) <= 16384 for one in of(frames, DataFrame))
    assert received == LARGE
    assert has_ended(frames, 1)
    assert peer.connection.streams == {}
    assert peer.connection.frame_writer.unsent_bytes == 0


@given(
    sizes=st.lists(st.integers(0, 200_000), min_size=1, max_size=5),
    updates=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 70_000)), max_size=30),
)
def test_responses_are_complete_and_never_exceed_a_window(
    sizes: list[int], updates: list[tuple[int, int]]
) -> None:
    peer = Peer()
    windows = {0: WINDOW}
    bodies = {}
    for i, size in enumerate(sizes):
        number = 2 * i + 1
        windows[number] = WINDOW
        bodies[number] = LARGE[i : i + size]
        respond(peer, number, bodies[number], TAIL if i % 2 else b"")
    frames = peer.take()
    last = [(0, 2_000_000), *[(i + 1, 400_000) for i in range(len(sizes))]]
    for place, increment in [*updates, *last]:
        number = 0 if place == 0 else 2 * ((place - 1) % len(sizes)) + 1
        for frame in of(frames, DataFrame):
            windows[0] -= len(frame.data)
            windows[frame.stream_id] -= len(frame.data)
        assert all(window >= 0 for window in windows.values())
        windows[number] += increment
        frames = peer.send(update(number, increment))
    for number, body in bodies.items():
        assert body_of(peer.seen, number) == body
        assert has_ended(peer.seen, number)


def test_streams_share_the_connection_window_fairly() -> None:
    peer = Peer(settings={4: 10_000_000})
    for number in range(1, 20, 2):
        respond(peer, number, LARGE[:300_000])
    peer.take()
    frames = peer.send(update(0, 10 * TURN_BYTES))
    share = [len(body_of(frames, number)) for number in range(1, 20, 2)]
    assert sum(share) == 10 * TURN_BYTES
    assert max(share) - min(share) <= 2 * TURN_BYTES
    assert min(share) > 0


def test_small_response_does_not_wait_for_a_large_response() -> None:
    peer = Peer(settings={4: 10_000_000})
    respond(peer, 1, LARGE)
    peer.take()
    respond(peer, 3, b"small")
    frames = peer.send(update(0, 2 * TURN_BYTES))
    assert body_of(frames, 3) == b"small"
    assert len(body_of(frames, 1)) == 2 * TURN_BYTES - 5


def test_stream_without_a_window_does_not_block_other_streams() -> None:
    peer = Peer(settings={4: 0})
    for handler in [peer.open(1), peer.open(3)]:
        handler.stream.send_response(OK, (b"abc",), 3, TAIL)
    frames = peer.take()
    assert len(of(frames, HeadersFrame)) == 2
    assert of(frames, DataFrame) == []
    frames = peer.send(update(3, 2))
    assert (body_of(frames, 3), has_ended(frames, 3)) == (b"ab", False)
    frames = peer.send(update(3, 1))
    assert (body_of(frames, 3), has_ended(frames, 3)) == (b"c", True)
    assert body_of(peer.seen, 1) == b""
    assert body_of(peer.send(update(1, 100)), 1) == b"abc"


def test_response_without_a_body_needs_no_window() -> None:
    peer = Peer(settings={4: 0})
    respond(peer, 1, b"", TAIL)
    assert has_ended(peer.take(), 1)


def test_settings_change_the_windows_of_open_streams() -> None:
    """Checks RFC 9113, section 6.9.2: windows may also become negative."""
    peer = Peer()
    respond(peer, 1, LARGE[:100_000])
    assert len(body_of(peer.take(), 1)) == WINDOW
    peer.send(update(0, 1_000_000))
    assert body_of(peer.send(SettingsFrame(0, {4: 1000})), 1) == b""
    assert peer.handlers[1].stream.send_window == 1000 - WINDOW
    assert body_of(peer.send(update(1, WINDOW - 1000)), 1) == b""
    assert len(body_of(peer.send(update(1, 10)), 1)) == 10
    assert len(body_of(peer.send(SettingsFrame(0, {4: 1500})), 1)) == 500
    assert peer.open(3).stream.send_window == 1500
    peer.send(SettingsFrame(0, {4: 200_000}))
    assert body_of(peer.seen, 1) == LARGE[:100_000]


def test_max_frame_size_of_the_client_is_used() -> None:
    peer = Peer(settings={4: 1_000_000, 5: 50_000})
    peer.send(update(0, 1_000_000))
    respond(peer, 1, LARGE[:100_000])
    sizes = [len(one.data) for one in of(peer.take(), DataFrame)]
    assert max(sizes) == 50_000
    assert sum(sizes) == 100_000


@pytest.mark.parametrize("how", ["reset", "close"])
def test_unsent_body_is_freed_when_its_stream_ends(how: str) -> None:
    peer = Peer()
    peer.open(1)
    values = np.zeros(2_000_000, np.uint8)
    kept = weakref.ref(values)
    peer.handlers[1].stream.send_response(OK, (values.data,), values.nbytes, b"")
    del values
    peer.take()
    assert peer.connection.frame_writer.unsent_bytes == 2_000_000 - WINDOW
    if how == "reset":
        assert peer.send(RstStreamFrame(1, error_code=8)) == []
    else:
        peer.connection.close()
    assert peer.connection.frame_writer.unsent_bytes == 0
    peer.handlers.clear()
    gc.collect()
    assert kept() is None


def test_small_blocked_response_does_not_keep_its_batch_in_memory() -> None:
    """Checks for a copy: a slice would keep its whole batch in memory."""
    peer = Peer(settings={4: 0})
    peer.open(1)
    batch = np.arange(KEPT_BYTES_MIN, dtype=np.uint8)
    kept = weakref.ref(batch)
    part = batch[100:1100]
    peer.handlers[1].stream.send_response(OK, (b"prefix", part.data), 1006, TAIL)
    peer.take()
    expected = b"prefix" + part.tobytes()
    del batch, part
    gc.collect()
    assert kept() is None
    assert body_of(peer.send(update(1, 2000)), 1) == expected


def test_streamed_body_is_sent_chunk_by_chunk_and_resumes_its_handler() -> None:
    peer = Peer()
    handler = peer.open(1)
    stream = handler.stream
    stream.send_head(OK)
    (head,) = peer.take()
    assert peer.response_headers(head) == [(b":status", b"200")]
    for i, chunk in enumerate((b"ab", b"", b"c" * 70_000)):
        stream.send_body((chunk,), len(chunk))
        peer.take()
        assert handler.resumes == min(i + 1, 1)
    assert stream.unsent_bytes == 70_002 - WINDOW
    peer.send(update(0, 10_000), update(1, 10_000))
    assert handler.resumes == 2
    stream.end(TAIL)
    frames = peer.take()
    assert has_ended(frames, 1)
    assert body_of(peer.seen, 1) == b"ab" + b"c" * 70_000


def test_stream_end_waits_for_the_unsent_body() -> None:
    peer = Peer()
    stream = peer.open(1).stream
    stream.send_head(OK)
    stream.send_body((b"c" * 70_000,), 70_000)
    stream.end(TAIL)
    assert not has_ended(peer.take(), 1)
    assert has_ended(peer.send(update(0, 10_000), update(1, 10_000)), 1)


def test_cancelled_stream_sends_no_more_frames() -> None:
    peer = Peer()
    handler = peer.open(1)
    handler.stream.send_head(OK)
    handler.stream.send_body((b"x" * 100_000,), 100_000)
    peer.take()
    handler.stream.cancel(ErrorCode.INTERNAL_ERROR)
    assert resets(peer.take()) == [(1, ErrorCode.INTERNAL_ERROR)]
    handler.stream.send_body((b"y",), 1)
    handler.stream.end(TAIL)
    handler.stream.cancel(ErrorCode.CANCEL)
    assert peer.send(update(0, 100_000), update(1, 100_000)) == []
    assert handler.resets == 0


def test_stream_without_window_updates_is_reset_after_the_timeout() -> None:
    peer = Peer()
    peer.send(update(0, 1_000_000))
    handlers = [respond(peer, 1, LARGE[:100_000]), respond(peer, 3, b"x" * 100)]
    peer.take()
    blocked_since_s = handlers[0].stream.blocked_since_s
    peer.connection.check_time(blocked_since_s + UNSENT_S_MAX - 1)
    assert peer.take() == []
    peer.connection.check_time(perf_counter() + UNSENT_S_MAX)
    assert resets(peer.take()) == [(1, ErrorCode.CANCEL)]
    assert [one.resets for one in handlers] == [1, 0]
    assert peer.connection.frame_writer.unsent_bytes == 0


def test_stream_of_a_slow_reader_is_not_reset() -> None:
    peer = Peer()
    peer.send(update(0, 1_000_000))
    handler = respond(peer, 1, LARGE[:300_000])
    peer.take()
    before_s = perf_counter()
    peer.send(update(1, 65_536))
    peer.connection.check_time(before_s + UNSENT_S_MAX)
    assert (resets(peer.take()), handler.resets) == ([], 0)


def test_time_of_an_earlier_block_does_not_count() -> None:
    peer = Peer()
    peer.send(update(0, 1_000_000))
    stream = peer.open(1).stream
    stream.send_head(OK)
    stream.send_body((bytes(WINDOW + 1),), WINDOW + 1)
    peer.take()
    blocked_since_s = stream.blocked_since_s
    peer.send(update(1, 1))
    stream.send_body((b"y",), 1)
    peer.take()
    assert stream.blocked_since_s > blocked_since_s > 0


def test_stream_with_one_byte_window_updates_is_reset_after_the_timeout() -> None:
    peer = Peer(settings={4: 0})
    peer.send(update(0, 1_000_000))
    stream = respond(peer, 1, LARGE[:300_000]).stream
    peer.send(update(1, PROGRESS_BYTES_MIN))  # progress before the block does not count
    blocked_since_s = stream.blocked_since_s
    assert blocked_since_s
    for _ in range(100):
        peer.send(update(1, 1))
    assert stream.blocked_since_s == blocked_since_s
    peer.connection.check_time(blocked_since_s + UNSENT_S_MAX + 1)
    assert resets(peer.take()) == [(1, ErrorCode.CANCEL)]


def test_connection_without_window_progress_is_closed_after_the_timeout() -> None:
    """Checks a client whose streams have windows of their own, so that no stream is at fault."""
    peer = Peer(settings={4: 1_000_000})
    start_s = perf_counter()
    peer.connection.check_time(start_s)
    handler = respond(peer, 1, LARGE[:300_000])
    peer.take()
    for _ in range(10):  # a byte at a time is no progress
        peer.send(update(0, 1))
    peer.connection.frame_writer.restart_timeouts(start_s := start_s + 5)  # nothing was read
    peer.connection.check_time(start_s + UNSENT_S_MAX)
    assert peer.take() == []
    peer.connection.check_time(start_s + UNSENT_S_MAX + 1)
    assert_connection_error(peer, peer.take(), ErrorCode.ENHANCE_YOUR_CALM)
    assert (handler.resets, peer.connection.frame_writer.unsent_bytes) == (1, 0)


def test_connection_with_periodic_window_updates_stays_open() -> None:
    peer = Peer(settings={4: 10_000_000})
    respond(peer, 1, LARGE)
    peer.take()
    now_s = perf_counter()
    for _ in range(20):
        peer.connection.check_time(now_s)
        now_s += UNSENT_S_MAX - 1
        peer.send(update(0, TURN_BYTES))
    assert not peer.connection.is_over


def test_connection_with_a_window_for_all_data_needs_no_window_updates() -> None:
    """Checks data that waits to be written, then a connection without unsent data."""
    peer = Peer()
    respond(peer, 1, b"x" * WINDOW)
    now_s = perf_counter()
    for i in range(10):
        if i == 5:
            peer.take()
        peer.connection.check_time(now_s + i * UNSENT_S_MAX)
    assert not peer.connection.is_over


def test_connection_whose_waiting_stream_was_reset_stays_open() -> None:
    """Checks that a response which the client has cancelled needs no window updates either."""
    peer = Peer(settings={4: 1_000_000})
    respond(peer, 1, LARGE[: 2 * WINDOW])
    handler = peer.open(3)
    peer.take()
    now_s = perf_counter()
    peer.connection.check_time(now_s)
    peer.send(RstStreamFrame(1))
    for i in range(5):
        peer.connection.check_time(now_s + i * UNSENT_S_MAX)
    assert (peer.connection.is_over, handler.resets) == (False, 0)


def test_second_response_to_a_blocked_stream_is_ignored() -> None:
    peer = Peer(settings={4: 0})
    stream = respond(peer, 1, b"waits for a window").stream
    # A window arrives while the connection reads, before the blocked response is written.
    stream.send_window = 100
    stream.send_response(OK, (b"second",), 6, b"")
    stream.send_window = 0
    peer.take()
    peer.send(update(1, 1000))
    assert len(of(peer.seen, HeadersFrame)) == 1
    assert body_of(peer.seen, 1) == b"waits for a window"
