"""Tests of the two-step shutdown: a GOAWAY for streams in flight, then one with the last stream."""

from __future__ import annotations

import pytest
from hyperframe.frame import Frame, GoAwayFrame, PingFrame
from server.wire.http2.peer import Peer, of, resets

from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http2.graceful_shutdown import DRAIN_PING, MAX_STREAM_ID
from embedserve.wire.http2.header_blocks import encode

OK = encode([(b":status", b"200")])


def acknowledged(peer: Peer) -> list[Frame]:
    return peer.send(PingFrame(0, DRAIN_PING, flags=["ACK"]))


def lasts(frames: list[Frame]) -> list[int]:
    """Returns the last stream id of each GOAWAY."""
    return [one.last_stream_id for one in of(frames, GoAwayFrame)]


def answer(peer: Peer, stream_id: int) -> list[Frame]:
    peer.handlers[stream_id].stream.answer(OK, (b"",), 0, b"")
    return peer.take()


@pytest.fixture
def peer() -> Peer:
    """Returns a peer with one stream, whose connection has sent its first GOAWAY."""
    peer = Peer()
    peer.open(1, is_end=False)
    peer.connection.shutdown.send_goaway()
    said = peer.take()
    assert lasts(said) == [MAX_STREAM_ID]
    assert [ping.opaque_data for ping in of(said, PingFrame)] == [DRAIN_PING]
    return peer


def test_streams_go_on_and_those_on_their_way_are_taken(peer: Peer) -> None:
    peer.open(3)
    assert lasts(acknowledged(peer)) == [3]
    assert [handler.drains for handler in peer.handlers.values()] == [0, 0]
    assert not peer.connection.is_over
    answer(peer, 3)
    assert not peer.connection.is_over
    peer.send(peer.headers(1))  # trailers: the request's end
    answer(peer, 1)
    assert peer.connection.is_over


def test_a_later_stream_is_refused_and_harms_no_other(peer: Peer) -> None:
    acknowledged(peer)
    assert resets(peer.send(peer.headers(3))) == [(3, ErrorCode.REFUSED_STREAM)]
    assert 3 not in peer.handlers
    assert not peer.connection.is_over


def test_a_drain_meanwhile_ends_streams_and_names_no_later_one(peer: Peer) -> None:
    assert lasts(acknowledged(peer)) == [1]
    peer.connection.shutdown.start_drain()
    peer.connection.shutdown.finish()
    assert lasts(peer.take()) == []
    assert peer.handlers[1].drains == 1


def test_a_drain_before_the_ping_is_answered(peer: Peer) -> None:
    peer.connection.shutdown.start_drain()
    assert lasts(peer.take()) == [MAX_STREAM_ID]
    peer.open(3)
    assert lasts(acknowledged(peer)) == [3]
    assert [handler.drains for handler in peer.handlers.values()] == [2, 1]


def test_nothing_is_said_once_it_is_over(peer: Peer) -> None:
    peer.connection.end(ErrorCode.NO_ERROR)
    peer.take()
    peer.connection.shutdown.send_goaway()
    peer.connection.shutdown.finish()
    assert lasts(peer.take()) == []
