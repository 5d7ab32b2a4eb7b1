"""Tests of upload grants: windows for large bodies from the budget that connections share."""

import pytest
from hyperframe.frame import PingFrame, RstStreamFrame
from server.wire.http2.peer import Peer, RecordingHandler, data, resets
from server.wire.http2.uploads import (
    FRAME_BYTES,
    client_awaiting_grant,
    fill_streams,
    is_budget_free,
    send_body,
    window_increments,
)

from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http2.inbound_flow_control import CONNECTION_WINDOW, STREAM_WINDOW
from embedserve.wire.http2.upload_budget import WAITING_MIN, UploadBudget


def test_large_body_is_granted_exactly_its_missing_bytes() -> None:
    peer = Peer(uploads=UploadBudget(8 << 20, lambda: True))
    peer.holds_bodies = True
    handler = peer.open(1, is_end=False)
    size = 5 << 20
    received = []
    while missing := size - len(handler.body):
        handler.stream.expect(missing)
        received += peer.take()
        window, has = handler.stream.receive_window, len(handler.body)
        # A step is as large as the body so far, and is requested when half of a step is left.
        assert 0 < window <= 1.5 * max(has, STREAM_WINDOW)
        received += send_body(peer, 1, min(FRAME_BYTES, window))
    assert window_increments(received, 1) == size - STREAM_WINDOW
    assert window_increments(received, 0) >= size - CONNECTION_WINDOW
    assert not peer.connection.is_over
    assert resets(send_body(peer, 1, 1)) == [(1, ErrorCode.FLOW_CONTROL_ERROR)]


def test_body_within_the_window_requests_no_grant() -> None:
    peer = Peer(uploads=UploadBudget(1, lambda: True))
    handler = peer.open(1, is_end=False)
    handler.stream.expect(STREAM_WINDOW)
    assert peer.take() == []


def test_large_body_gets_no_grant_while_the_queue_is_full() -> None:
    is_open = True
    uploads = UploadBudget(8 << 20, lambda: is_open)
    peer = Peer(uploads=uploads)
    peer.holds_bodies = True
    handler = peer.open(1, is_end=False)
    is_open = False
    received = send_body(peer, 1, STREAM_WINDOW)
    handler.stream.expect(1 << 20)
    assert window_increments([*received, *peer.take()], 1) == 0
    is_open = True
    uploads.retry()
    assert window_increments(peer.take(), 1) == STREAM_WINDOW


def test_grants_go_to_connections_in_order_as_streams_end() -> None:
    uploads = UploadBudget(STREAM_WINDOW, lambda: True)
    peers = [client_awaiting_grant(uploads) for _ in range(3)]
    assert [window_increments(peer.take(), 1) for peer in peers] == [STREAM_WINDOW, 0, 0]
    peers[1].send(RstStreamFrame(1, error_code=8))
    assert [window_increments(peer.take(), 1) for peer in peers] == [0, 0, 0]
    peers[0].send(RstStreamFrame(1, error_code=8))
    # The second client has reset its stream.
    assert [window_increments(peer.take(), 1) for peer in peers] == [0, 0, STREAM_WINDOW]
    peers[2].connection.close()
    assert window_increments(client_awaiting_grant(uploads).take(), 1) == STREAM_WINDOW


def test_grant_is_returned_when_the_body_is_complete() -> None:
    uploads = UploadBudget(STREAM_WINDOW, lambda: True)
    first, second = client_awaiting_grant(uploads), client_awaiting_grant(uploads)
    first.take()
    assert window_increments(second.take(), 1) == 0
    first.send(data(1, bytes(STREAM_WINDOW // 32), is_end=True))
    stream = first.handlers[1].stream
    stream.consumed(stream.held_bytes)
    assert window_increments(second.take(), 1) == STREAM_WINDOW


def test_grant_is_returned_when_each_message_is_consumed() -> None:
    """Checks that the second large message of a stream does not wait forever."""
    uploads = UploadBudget(STREAM_WINDOW, lambda: True)
    peer = client_awaiting_grant(uploads)
    stream = peer.handlers[1].stream
    for _ in range(3):
        assert stream.granted_bytes == STREAM_WINDOW
        send_body(peer, 1, STREAM_WINDOW)
        stream.consumed(stream.held_bytes)
        assert stream.granted_bytes == 0
        assert stream.receive_window >= STREAM_WINDOW // 2
        send_body(peer, 1, stream.receive_window)
        stream.expect(1 << 20)


def test_reopened_budget_sends_window_updates_immediately() -> None:
    """Checks for an immediate update: a waiting client sends nothing that would trigger a write."""
    is_open = True
    uploads = UploadBudget(8 << 20, lambda: is_open)
    peer = Peer(uploads=uploads)
    peer.holds_bodies = True
    is_open = False
    for number in range(1, 2 * CONNECTION_WINDOW // STREAM_WINDOW, 2):
        peer.open(number, is_end=False)
        send_body(peer, number, STREAM_WINDOW)
    before = peer.outputs
    is_open = True
    uploads.retry()
    assert peer.outputs > before
    assert window_increments(peer.take(), 0) >= STREAM_WINDOW


def finish_requests(peer: Peer, handlers: list[RecordingHandler]) -> None:
    """Ends the requests of ``handlers``, which consume their held bytes and respond."""
    for handler in handlers:
        peer.send(data(handler.stream.id, b"", is_end=True))
        handler.stream.consumed(handler.stream.held_bytes)
        handler.stream.send_head(b"", is_end=True)
    peer.take()


def test_idle_connections_hold_no_upload_budget() -> None:
    """Checks that idle connections hold no budget; else large bodies on all connections wait."""
    bytes_max = 16 << 20
    uploads = UploadBudget(bytes_max, lambda: True)
    peers = [Peer(uploads=uploads) for _ in range(2)]
    for peer in peers * 3:
        finish_requests(peer, fill_streams(peer, 40))
        assert peer.connection.streams == {}
        assert is_budget_free(uploads, bytes_max)
    assert not any(peer.connection.is_over for peer in peers)


def test_budget_returned_by_a_connection_goes_to_a_waiting_body() -> None:
    uploads = UploadBudget(CONNECTION_WINDOW, lambda: True)
    busy = Peer(uploads=uploads)
    handlers = fill_streams(busy, 12)
    waiting = client_awaiting_grant(uploads)
    assert window_increments(waiting.take(), 1) == 0
    finish_requests(busy, handlers)
    assert window_increments(waiting.take(), 1) == STREAM_WINDOW


@pytest.mark.parametrize("is_widened", [False, True])
def test_connection_keeps_no_budget_granted_after_its_bodies_are_consumed(is_widened: bool) -> None:
    is_open = True
    uploads = UploadBudget(8 << 20, lambda: is_open)
    peer = Peer(uploads=uploads)
    is_open = False
    handlers = fill_streams(peer, CONNECTION_WINDOW // STREAM_WINDOW)
    for handler in handlers:
        handler.stream.consumed(handler.stream.held_bytes)
    assert peer.connection.flow_control.window < FRAME_BYTES
    peer.take()
    frames = peer.send(PingFrame(0, bytes(8))) if is_widened else []
    is_open = True
    uploads.retry()
    assert window_increments(frames + peer.take(), 0) == CONNECTION_WINDOW
    assert is_budget_free(uploads, 8 << 20)


def test_ended_streams_and_connections_leave_few_requests_in_the_budget() -> None:
    """Checks streams that end while nothing is granted, and so wait for it."""
    uploads = UploadBudget(1 << 20, lambda: False)
    for _ in range(3):
        peer = Peer(uploads=uploads)
        peer.holds_bodies = True
        for number in range(1, 2 * WAITING_MIN, 2):
            stream = peer.open(number, is_end=False).stream
            send_body(peer, number, STREAM_WINDOW // 2 + 1)
            stream.expect(1 << 20)
            assert stream.has_pending_grant
            stream.cancel(ErrorCode.CANCEL)
            peer.take()
        peer.connection.close()
    assert len(uploads._waiting) <= WAITING_MIN
