"""Tests of the narrow stream window: clients rejected for a full queue may send less of a body."""

from time import perf_counter

import pytest
from hyperframe.frame import Frame, SettingsFrame
from server.wire.http2.peer import OK, Peer, data, has_ended, of, resets
from server.wire.http2.uploads import FRAME_BYTES, is_budget_free, send_body, window_increments

from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http2.inbound_flow_control import (
    NARROW_S,
    NARROW_STREAM_WINDOW,
    STREAM_WINDOW,
    UNACKNOWLEDGED_MAX,
)
from embedserve.wire.http2.upload_budget import UploadBudget

INITIAL_WINDOW_SIZE = SettingsFrame.INITIAL_WINDOW_SIZE


def announced_windows(frames: list[Frame]) -> list[int]:
    """Returns the initial stream windows that ``frames`` announce."""
    announced = (one.settings.get(INITIAL_WINDOW_SIZE) for one in of(frames, SettingsFrame))
    return [window for window in announced if window is not None]


def settings_ack() -> Frame:
    return SettingsFrame(0, flags=["ACK"])


def narrowed_client(uploads: UploadBudget | None = None) -> Peer:
    """Returns a client that was rejected for a full queue, and has received the smaller window."""
    peer = Peer(uploads=uploads)
    peer.holds_bodies = True
    peer.send(settings_ack())
    peer.open(1).stream.slow_next_uploads()
    assert announced_windows(peer.take()) == [NARROW_STREAM_WINDOW]
    return peer


def test_narrow_window_applies_once_the_client_acknowledges_it() -> None:
    peer = narrowed_client()
    peer.open(3, is_end=False)
    assert resets(send_body(peer, 3, STREAM_WINDOW)) == []  # which was sent before it knew
    peer.send(settings_ack())
    peer.open(5, is_end=False)
    assert resets(send_body(peer, 5, NARROW_STREAM_WINDOW)) == []
    assert resets(send_body(peer, 5, 1)) == [(5, ErrorCode.FLOW_CONTROL_ERROR)]


@pytest.mark.parametrize("nbytes", [NARROW_STREAM_WINDOW, NARROW_STREAM_WINDOW + 1])
def test_request_in_one_chunk_is_bounded_by_the_narrow_window(nbytes: int) -> None:
    peer = narrowed_client()
    peer.send(settings_ack())
    is_rejected = nbytes > NARROW_STREAM_WINDOW
    for number in (3, 5):
        frames = peer.send(
            peer.headers(number, is_end=False), data(number, bytes(nbytes), is_end=True)
        )
        assert resets(frames) == [(number, ErrorCode.FLOW_CONTROL_ERROR)] * is_rejected
        assert peer.handlers[number].is_complete is not is_rejected


def test_acknowledged_narrow_window_shrinks_open_streams() -> None:
    peer = narrowed_client()
    peer.open(3, is_end=False)
    send_body(peer, 3, FRAME_BYTES)
    peer.send(settings_ack())
    stream = peer.handlers[3].stream
    assert stream.receive_window == NARROW_STREAM_WINDOW - FRAME_BYTES
    stream.expect(3 * FRAME_BYTES)
    assert window_increments(peer.take(), 3) == 4 * FRAME_BYTES - NARROW_STREAM_WINDOW
    assert resets(send_body(peer, 3, 3 * FRAME_BYTES)) == []
    assert len(peer.handlers[3].body) == 4 * FRAME_BYTES


def test_body_held_back_by_the_narrow_window_is_granted_when_admitted() -> None:
    is_open = True
    uploads = UploadBudget(1 << 20, lambda: is_open)
    peer = narrowed_client(uploads)
    peer.send(settings_ack())
    is_open = False
    peer.open(3, is_end=False)
    send_body(peer, 3, NARROW_STREAM_WINDOW)
    peer.handlers[3].stream.expect(100_000)
    assert window_increments(peer.take(), 3) == 0
    is_open = True
    uploads.retry()
    assert window_increments(peer.take(), 3) == 100_000


@pytest.mark.parametrize("end", [b"rest", b"", None], ids=["data", "no data", "trailers"])
def test_grant_to_a_body_that_begins_with_an_empty_frame_is_returned(end: bytes | None) -> None:
    """Checks a request that ends without held bytes, as most requests without a grant do."""
    bytes_max = 1 << 20
    uploads = UploadBudget(bytes_max, lambda: True)
    peer = narrowed_client(uploads)
    peer.send(settings_ack())
    for number in (3, 5):  # the first response of a connection is written another way
        stream = peer.open(number, is_end=False).stream
        peer.send(data(number, b""))
        stream.expect(100_000)
        assert stream.granted_bytes > 0
        if end is None:
            peer.send(peer.headers(number, [(b"trailer", b"1")]))
        else:
            peer.send(data(number, end, is_end=True))
        stream.send_response(OK, (b"x",), 1, b"")
        assert has_ended(peer.take(), number)
        assert is_budget_free(uploads, bytes_max)


def test_narrow_window_is_announced_once_and_widened_after_a_while() -> None:
    peer = narrowed_client()
    stream = peer.handlers[1].stream
    stream.slow_next_uploads()
    assert announced_windows(peer.take()) == []
    peer.send(settings_ack())
    peer.connection.check_time(0.0)
    assert announced_windows(peer.take()) == []
    for _ in range(2):
        peer.connection.check_time(perf_counter() + NARROW_S)
    assert announced_windows(peer.take()) == [STREAM_WINDOW]
    peer.send(settings_ack())
    peer.open(5, is_end=False)
    assert resets(send_body(peer, 5, STREAM_WINDOW)) == []


def test_widened_window_is_sent_to_a_client_that_waits_for_it() -> None:
    """Checks a body whose handler expects no grant, as of a management request: nothing else is
    sent on its connection."""
    peer = narrowed_client()
    peer.send(settings_ack())
    peer.open(3, is_end=False)
    send_body(peer, 3, NARROW_STREAM_WINDOW)
    outputs = peer.outputs
    peer.connection.check_time(perf_counter() + NARROW_S)
    assert peer.outputs == outputs + 1
    assert announced_windows(peer.take()) == [STREAM_WINDOW]
    peer.send(settings_ack())
    assert resets(send_body(peer, 3, STREAM_WINDOW - NARROW_STREAM_WINDOW)) == []


def test_surplus_settings_acks_are_ignored() -> None:
    peer = narrowed_client()
    peer.send(*[settings_ack()] * 5)
    assert peer.connection.flow_control.stream_window == NARROW_STREAM_WINDOW
    assert not peer.connection.is_over


def test_unacknowledged_settings_are_bounded() -> None:
    peer = Peer()
    stream = peer.open(1).stream
    sent = []
    for _ in range(100):
        stream.slow_next_uploads()
        peer.connection.check_time(perf_counter() + 2 * NARROW_S)
        sent += announced_windows(peer.take())
    assert len(sent) < UNACKNOWLEDGED_MAX
    for _ in range(UNACKNOWLEDGED_MAX):
        peer.send(settings_ack())
    assert peer.connection.flow_control.stream_window == sent[-1]
    peer.connection.check_time(perf_counter() + 2 * NARROW_S)
    stream.slow_next_uploads()
    assert announced_windows(peer.take()) == [STREAM_WINDOW, NARROW_STREAM_WINDOW]


def test_empty_frame_ends_a_body_with_a_negative_window() -> None:
    """Checks RFC 9113, section 6.9.1: an empty frame with END_STREAM needs no window."""
    peer = narrowed_client()
    handler = peer.open(3, is_end=False)
    send_body(peer, 3, 60_000)
    peer.send(settings_ack())
    assert handler.stream.receive_window == NARROW_STREAM_WINDOW - 60_000
    assert resets(peer.send(data(3, b"", is_end=True))) == []
    assert (handler.is_complete, len(handler.body)) == (True, 60_000)
