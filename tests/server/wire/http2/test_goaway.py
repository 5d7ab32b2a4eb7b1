"""Tests of the two-step shutdown: a GOAWAY for streams in flight, then one with the last stream."""

import pytest
from hyperframe.frame import Frame, GoAwayFrame, PingFrame
from server.wire.http2.peer import Peer, of, resets

from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http2.graceful_shutdown import DRAIN_PING, MAX_STREAM_ID


def acknowledge_ping(peer: Peer) -> list[Frame]:
    return peer.send(PingFrame(0, DRAIN_PING, flags=["ACK"]))


def last_stream_ids(frames: list[Frame]) -> list[int]:
    """Returns the last stream id of each GOAWAY."""
    return [one.last_stream_id for one in of(frames, GoAwayFrame)]


@pytest.fixture
def peer() -> Peer:
    """Returns a peer with one stream, whose connection has sent its first GOAWAY."""
    peer = Peer()
    peer.open(1, is_end=False)
    peer.connection.shutdown.send_goaway()
    sent_frames = peer.take()
    assert last_stream_ids(sent_frames) == [MAX_STREAM_ID]
    assert [ping.opaque_data for ping in of(sent_frames, PingFrame)] == [DRAIN_PING]
    return peer


def test_goaway_lets_open_and_in_flight_streams_finish(peer: Peer) -> None:
    peer.open(3)
    assert last_stream_ids(acknowledge_ping(peer)) == [3]
    assert [handler.drains for handler in peer.handlers.values()] == [0, 0]
    assert not peer.connection.is_over
    peer.respond(3)
    assert not peer.connection.is_over
    peer.send(peer.headers(1))  # trailers: the request's end
    peer.respond(1)
    assert peer.connection.is_over


def test_stream_after_the_final_goaway_is_rejected(peer: Peer) -> None:
    acknowledge_ping(peer)
    assert resets(peer.send(peer.headers(3))) == [(3, ErrorCode.REFUSED_STREAM)]
    assert 3 not in peer.handlers
    assert not peer.connection.is_over


def test_drain_after_the_final_goaway_sends_no_other_goaway(peer: Peer) -> None:
    assert last_stream_ids(acknowledge_ping(peer)) == [1]
    peer.connection.shutdown.start_drain()
    peer.connection.shutdown.finish()
    assert last_stream_ids(peer.take()) == []
    assert peer.handlers[1].drains == 1


def test_drain_before_the_ping_ack_still_accepts_streams_in_flight(peer: Peer) -> None:
    peer.connection.shutdown.start_drain()
    assert last_stream_ids(peer.take()) == [MAX_STREAM_ID]
    peer.open(3)
    assert last_stream_ids(acknowledge_ping(peer)) == [3]
    assert [handler.drains for handler in peer.handlers.values()] == [2, 1]


def test_closed_connection_sends_no_goaway(peer: Peer) -> None:
    peer.connection.end(ErrorCode.NO_ERROR)
    peer.take()
    peer.connection.shutdown.send_goaway()
    peer.connection.shutdown.finish()
    assert last_stream_ids(peer.take()) == []
