"""Tests of stream errors and connection errors, by the sections of RFC 9113."""

from collections.abc import Callable, Mapping, Sequence

import pytest
from hyperframe.frame import Frame, PingFrame, PriorityFrame, RstStreamFrame, SettingsFrame
from server.wire.http2.peer import (
    OK,
    POST,
    Peer,
    assert_connection_error,
    continuation,
    data,
    raw,
    resets,
    update,
)

from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http2.request_frames import BLOCK_BYTES_MAX

UNDECODABLE_BLOCK = b"\x80"
"""A header block with an index that is in no table (RFC 7541, section 6.1)."""


TRAILERS = [(b"x-sum", b"1")]

Sent = Sequence[Frame | bytes]
ErrorCases = Mapping[str, tuple[Sent | Callable[[Peer], Sent], ErrorCode]]
"""The frames to send, or a function of the peer that returns them, and the expected error code."""
PROTOCOL_ERROR, STREAM_CLOSED = ErrorCode.PROTOCOL_ERROR, ErrorCode.STREAM_CLOSED
FRAME_SIZE_ERROR, FLOW_CONTROL_ERROR = ErrorCode.FRAME_SIZE_ERROR, ErrorCode.FLOW_CONTROL_ERROR
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = ErrorCode.COMPRESSION_ERROR, ErrorCode.ENHANCE_YOUR_CALM


def frames_of(peer: Peer, sent: Sent | Callable[[Peer], Sent]) -> Sent:
    return sent(peer) if callable(sent) else sent


STREAM_ERRORS: ErrorCases = {
    "5.1 data after the end": ([data(1, b"x")], STREAM_CLOSED),
    "5.1 empty data after the end": ([data(1, b"")], STREAM_CLOSED),
    "5.1 headers after the end": (lambda peer: [peer.headers(1, TRAILERS)], STREAM_CLOSED),
    "6.9 an update of 0": ([raw(8, 0, 1, bytes(4))], PROTOCOL_ERROR),
    "6.9.1 a window too large": ([update(1, 2**31 - 1)], FLOW_CONTROL_ERROR),
    "6.3 a priority of another length": ([raw(2, 0, 1, bytes(4))], FRAME_SIZE_ERROR),
    "5.3.1 a priority on itself": ([raw(2, 0, 1, b"\0\0\0\1\0")], PROTOCOL_ERROR),
}


@pytest.mark.parametrize("name", STREAM_ERRORS)
def test_stream_error_resets_only_its_own_stream(name: str) -> None:
    """Checks stream errors by section of RFC 9113, after the end of the request on stream 1.

    The request has no response yet.
    """
    sent, code = STREAM_ERRORS[name]
    peer = Peer()
    handler, other_handler = peer.open(1), peer.open(3)
    received = peer.send(*frames_of(peer, sent))
    assert resets(received) == [(1, code)]
    assert (handler.resets, other_handler.resets) == (1, 0)
    assert list(peer.connection.streams) == [3]
    peer.open(5)


def test_self_dependent_headers_reset_the_stream_but_update_the_table() -> None:
    peer = Peer()
    frame = peer.headers(1, [*POST, (b"x-new", b"1")], flags=["PRIORITY"])
    frame.depends_on, frame.stream_weight = 1, 15
    assert resets(peer.send(frame)) == [(1, ErrorCode.PROTOCOL_ERROR)]
    peer.send(peer.headers(3, [*POST, (b"x-new", b"1")]))
    assert list(peer.handlers) == [3]


CONNECTION_ERRORS: ErrorCases = {
    "4.2 a frame too large": ([raw(0, 0, 1, bytes(16385))], FRAME_SIZE_ERROR),
    "4.2 headers too large": ([raw(1, 0x4, 3, bytes(16385))], FRAME_SIZE_ERROR),
    "4.2 data of 2^24-1 bytes": ([b"\xff\xff\xff\0\0\0\0\0\1"], FRAME_SIZE_ERROR),
    "4.2 an unknown frame of 2^24-1 bytes": ([b"\xff\xff\xff\x42\0\0\0\0\1"], FRAME_SIZE_ERROR),
    "4.2 HTTP/1 after the start": ([b"GET / HTTP/1.1\r\nHost: test\r\n\r\n"], FRAME_SIZE_ERROR),
    "4.3 a block that cannot be decoded": ([raw(1, 0x5, 3, UNDECODABLE_BLOCK)], COMPRESSION_ERROR),
    "4.3 trailers that cannot be decoded": ([raw(1, 0x5, 1, UNDECODABLE_BLOCK)], COMPRESSION_ERROR),
    "5.1 data on an idle stream": ([data(3, b"x")], PROTOCOL_ERROR),
    "5.1 a reset of an idle stream": ([RstStreamFrame(3)], PROTOCOL_ERROR),
    "5.1 a window of an idle stream": ([update(3, 1)], PROTOCOL_ERROR),
    "5.1.1 an even stream": (lambda peer: [peer.headers(2)], PROTOCOL_ERROR),
    "5.1.1 a stream passed over": (lambda peer: [peer.headers(9), peer.headers(5)], PROTOCOL_ERROR),
    "5.1.1 a stream after the last": (
        lambda peer: [peer.headers(2**31 - 1), peer.headers(3)],
        PROTOCOL_ERROR,
    ),
    "5.1.1 headers on no stream": ([raw(1, 0x5, 0, b"")], PROTOCOL_ERROR),
    "5.1 headers on a stream that the client reset": (
        lambda peer: [RstStreamFrame(1), peer.headers(1)],
        STREAM_CLOSED,
    ),
    "6.1 data on no stream": ([raw(0, 0, 0, b"x")], PROTOCOL_ERROR),
    "6.1 padding as long as its frame": ([raw(0, 0x8, 1, b"\4abc")], PROTOCOL_ERROR),
    "6.1 padding without its length": ([raw(0, 0x8, 1, b"")], FRAME_SIZE_ERROR),
    "6.2 headers with too much padding": ([raw(1, 0xD, 3, b"\5abc")], PROTOCOL_ERROR),
    "6.2 headers too short for a priority": ([raw(1, 0x25, 3, b"abc")], FRAME_SIZE_ERROR),
    "6.2 another frame within a block": ([raw(1, 0x1, 3, b""), PingFrame(0)], PROTOCOL_ERROR),
    "5.5 an unknown frame within a block": (
        [raw(1, 0x1, 3, b""), raw(0x42, 0, 3, b"")],
        PROTOCOL_ERROR,
    ),
    "6.3 a priority of no stream": ([raw(2, 0, 0, bytes(5))], PROTOCOL_ERROR),
    "6.4 a reset of no stream": ([raw(3, 0, 0, bytes(4))], PROTOCOL_ERROR),
    "6.4 a reset too short": ([raw(3, 0, 1, bytes(3))], FRAME_SIZE_ERROR),
    "6.4 a reset too long": ([raw(3, 0, 1, bytes(5))], FRAME_SIZE_ERROR),
    "6.5 settings of a stream": ([raw(4, 0, 1, b"")], PROTOCOL_ERROR),
    "6.5 an ack with settings": ([raw(4, 0x1, 0, bytes(6))], FRAME_SIZE_ERROR),
    "6.5 settings of another length": ([raw(4, 0, 0, bytes(5))], FRAME_SIZE_ERROR),
    "6.5.2 a push of 2": ([raw(4, 0, 0, b"\0\2\0\0\0\2")], PROTOCOL_ERROR),
    "6.5.2 a window too large": ([raw(4, 0, 0, b"\0\4\x80\0\0\0")], FLOW_CONTROL_ERROR),
    "6.5.2 frames too small": ([raw(4, 0, 0, b"\0\5\0\0\x3f\xff")], PROTOCOL_ERROR),
    "6.5.2 frames too large": ([raw(4, 0, 0, b"\0\5\1\0\0\0")], PROTOCOL_ERROR),
    "6.9.2 settings that make a window too large": (
        [update(1, 2**31 - 1 - 65535), SettingsFrame(0, {4: 65536})],
        FLOW_CONTROL_ERROR,
    ),
    "6.6 a push": ([raw(5, 0x4, 1, bytes(4))], PROTOCOL_ERROR),
    "6.7 a ping of a stream": ([raw(6, 0, 1, bytes(8))], PROTOCOL_ERROR),
    "6.7 a ping too short": ([raw(6, 0, 0, bytes(7))], FRAME_SIZE_ERROR),
    "6.7 a ping too long": ([raw(6, 0, 0, bytes(9))], FRAME_SIZE_ERROR),
    "6.8 a goaway of a stream": ([raw(7, 0, 1, bytes(8))], PROTOCOL_ERROR),
    "6.8 a goaway too short": ([raw(7, 0, 0, bytes(7))], FRAME_SIZE_ERROR),
    "6.9 an update of 0": ([raw(8, 0, 0, bytes(4))], PROTOCOL_ERROR),
    "6.9 an update of another length": ([raw(8, 0, 0, bytes(3))], FRAME_SIZE_ERROR),
    "6.9.1 a window too large, of all": ([update(0, 2**31 - 1)], FLOW_CONTROL_ERROR),
    "6.10 a continuation of nothing": ([continuation(1, b"")], PROTOCOL_ERROR),
    "6.10 a continuation of another stream": (
        [raw(1, 0x1, 3, b""), continuation(5, b"")],
        PROTOCOL_ERROR,
    ),
    "10.5.1 a block too large": (
        [raw(1, 0x1, 3, bytes(16384)), continuation(3, bytes(BLOCK_BYTES_MAX - 16384 + 1))],
        ENHANCE_YOUR_CALM,
    ),
    "10.5.1 trailers too large": (
        lambda peer: [peer.headers(1, [(b"x", b"0" * 4000)] * 17)],
        ENHANCE_YOUR_CALM,
    ),
    "10.5.1 very many fields": (
        lambda peer: [peer.headers(3, [*POST, *[(b"a", b"b")] * 2000])],
        ENHANCE_YOUR_CALM,
    ),
    "10.5.1 a header list too large": (
        lambda peer: [peer.headers(3, [*POST, *[(b"x", b"0" * 4000)] * 17])],
        ENHANCE_YOUR_CALM,
    ),
}


@pytest.mark.parametrize("name", CONNECTION_ERRORS)
def test_connection_error_sends_goaway_with_its_code(name: str) -> None:
    """Checks connection errors by section of RFC 9113, while stream 1 is open."""
    sent, code = CONNECTION_ERRORS[name]
    peer = Peer()
    handler = peer.open(1, is_end=False)
    received = peer.send(*frames_of(peer, sent))
    last = assert_connection_error(peer, received, code)
    assert last.last_stream_id >= 1
    assert handler.resets == 1


def test_data_on_a_closed_stream_is_a_stream_error() -> None:
    peer = Peer()
    peer.open(1)
    peer.respond(1)
    assert resets(peer.send(data(1, b"x"))) == [(1, ErrorCode.STREAM_CLOSED)]
    peer.open(3)


@pytest.mark.parametrize("kind", [0xA, 0xB, 0xFF])
def test_frames_of_unknown_types_are_ignored(kind: int) -> None:
    peer = Peer()
    assert peer.send(raw(kind, 0xFF, 7, b"whatever")) == []
    peer.open(1)


def test_reserved_bits_are_ignored() -> None:
    peer = Peer()
    ping = PingFrame(0, b"12345678").serialize()
    (ack,) = peer.send(ping[:5] + b"\x80" + ping[6:])
    assert isinstance(ack, PingFrame)
    request = peer.headers(1).serialize()
    assert peer.send(request[:5] + b"\x80" + request[6:]) == []
    assert peer.handlers[1].is_complete


def test_late_control_frames_on_closed_streams_are_ignored() -> None:
    """Checks RFC 9113, section 5.1: closed."""
    peer = Peer()
    peer.open(1)
    peer.respond(1)
    assert peer.send(update(1, 5), RstStreamFrame(1), PriorityFrame(1)) == []
    peer.open(3)


def test_client_reset_notifies_the_handler_once() -> None:
    peer = Peer()
    handler = peer.open(1)
    assert peer.send(RstStreamFrame(1, error_code=8)) == []
    assert handler.resets == 1
    handler.stream.send_response(OK, (b"late",), 4, b"")
    assert peer.take() == []
