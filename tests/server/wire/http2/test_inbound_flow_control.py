"""Tests of inbound flow control: receive windows, their updates, and grants for large bodies."""

import pytest
from hyperframe.frame import Frame, RstStreamFrame
from server.wire.http2.peer import Peer, assert_connection_error, data, resets
from server.wire.http2.uploads import FRAME_BYTES, fill_streams, send_body, window_increments

from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http2.inbound_flow_control import CONNECTION_WINDOW, STREAM_WINDOW
from embedserve.wire.http2.upload_budget import UploadBudget


def test_data_beyond_the_stream_window_resets_the_stream() -> None:
    peer = Peer()
    peer.holds_bodies = True
    handler = peer.open(1, is_end=False)
    other_handler = peer.open(3, is_end=False)
    assert resets(send_body(peer, 1, STREAM_WINDOW)) == []
    assert resets(send_body(peer, 1, 1)) == [(1, ErrorCode.FLOW_CONTROL_ERROR)]
    assert (len(handler.body), handler.resets, other_handler.resets) == (STREAM_WINDOW, 1, 0)


def test_data_beyond_the_connection_window_ends_the_connection() -> None:
    peer = Peer(uploads=UploadBudget(1 << 30, lambda: False))
    peer.holds_bodies = True
    *numbers, last = range(1, 2 * CONNECTION_WINDOW // STREAM_WINDOW + 2, 2)
    for number in (*numbers, last):
        peer.open(number, is_end=False)
    received = []
    for number in numbers:
        received += send_body(peer, number, STREAM_WINDOW)
    assert window_increments(received, 0) == 0
    assert not peer.connection.is_over
    assert_connection_error(peer, send_body(peer, last, 1), ErrorCode.FLOW_CONTROL_ERROR)


@pytest.mark.parametrize("padding", [0, 255])
def test_padding_counts_in_both_windows_and_is_returned_to_the_connection(padding: int) -> None:
    """Checks RFC 9113, section 6.1: the whole payload counts, with its padding."""
    peer = Peer()
    handler = peer.open(1, is_end=False)
    received = peer.send(*[data(1, b"", padding=padding)] * 10)
    assert handler.stream.receive_window == STREAM_WINDOW - 10 * (padding + 1)
    assert handler.stream.held_bytes == 0
    before = window_increments(peer.initial_frames, 0) + 65535
    for i in range(1, 200):
        number = 2 * i + 1
        peer.send(peer.headers(number, is_end=False))
        received += peer.send(*[data(number, b"x" * 10_000, padding=255)] * 5)
        received += peer.send(data(number, b"", is_end=True))
        peer.handlers[number].stream.send_head(b"", is_end=True)
        peer.take()
    sent = 10 * (padding + 1) + 199 * 5 * 10_256
    assert sent - CONNECTION_WINDOW // 2 < window_increments(received, 0) <= sent
    assert before == CONNECTION_WINDOW


def test_consumed_bytes_are_returned_before_the_windows_run_out() -> None:
    peer = Peer()
    handler = peer.open(1, is_end=False)
    received = []
    for _ in range(100):
        received += send_body(peer, 1, 5 * FRAME_BYTES)
    assert len(handler.body) == 500 * FRAME_BYTES
    sent = 500 * FRAME_BYTES
    assert sent - STREAM_WINDOW < window_increments(received, 1) <= sent
    assert sent - CONNECTION_WINDOW < window_increments(received, 0) <= sent
    assert not peer.connection.is_over


def test_bytes_held_by_a_reset_stream_are_returned_to_the_connection() -> None:
    peer = Peer(uploads=UploadBudget(1 << 30, lambda: False))
    peer.holds_bodies = True
    received = []
    for i in range(20):
        number = 2 * i + 1
        peer.open(number, is_end=False)
        received += send_body(peer, number, STREAM_WINDOW)
        received += peer.send(RstStreamFrame(number, error_code=8))
    assert window_increments(received, 0) >= 20 * STREAM_WINDOW - CONNECTION_WINDOW
    assert not peer.connection.is_over


def test_data_on_an_ended_stream_is_returned_to_the_connection_window() -> None:
    peer = Peer()
    handler = peer.open(1, is_end=False)
    handler.stream.send_head(b"", is_end=True)  # which resets the rest of the request
    peer.take()
    received = []
    for _ in range(10):
        received += send_body(peer, 1, 8 * FRAME_BYTES)
    assert window_increments(received, 0) > 80 * FRAME_BYTES - CONNECTION_WINDOW
    assert not peer.connection.is_over


def test_concurrent_incomplete_bodies_do_not_deadlock() -> None:
    """Opens streams that each hold a part of a body; none can end in the connection's window."""
    peer = Peer()
    peer.holds_bodies = True
    for number in range(1, 21, 2):
        peer.open(number, is_end=False)
    received: list[Frame] = []
    window = CONNECTION_WINDOW
    for number in range(1, 21, 2):
        for _ in range(STREAM_WINDOW // FRAME_BYTES):
            assert window >= FRAME_BYTES, "the connection is stuck"
            window -= FRAME_BYTES
            received = send_body(peer, number, FRAME_BYTES)
            window += window_increments(received, 0)
    for number in range(1, 21, 2):
        assert len(peer.handlers[number].body) == STREAM_WINDOW
    assert not peer.connection.is_over


def test_late_returned_bytes_do_not_enlarge_the_connection_window() -> None:
    """Checks the window: the client would keep the excess, and could exceed the budget by it."""
    peer = Peer()
    handlers = fill_streams(peer, 80)
    for handler in handlers[5:]:  # the others still hold more than half of the usual window
        handler.stream.consumed(handler.stream.held_bytes)
    fill_streams(peer, 8)
    assert CONNECTION_WINDOW // 2 < peer.connection.flow_control.window <= CONNECTION_WINDOW


def test_window_left_by_a_reset_body_is_usable_by_other_streams() -> None:
    peer = Peer()
    peer.holds_bodies = True
    handler = peer.open(1, is_end=False)
    while len(handler.body) < 4 << 20:
        handler.stream.expect(16 << 20)
        send_body(peer, 1, FRAME_BYTES)
    peer.send(RstStreamFrame(1, error_code=8))
    left_bytes = peer.connection.flow_control.window
    assert left_bytes > 2 * CONNECTION_WINDOW
    fill_streams(peer, left_bytes // STREAM_WINDOW + 8)
