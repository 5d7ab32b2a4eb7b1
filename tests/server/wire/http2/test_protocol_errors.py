"""What ends a stream, and what ends its connection, by the sections of RFC 9113."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hyperframe.frame import (
    Frame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
)
from server.wire.http2.peer import (
    POST,
    Peer,
    continuation,
    data,
    expect_end,
    raw,
    resets,
    update,
)

from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http2.request_frames import BLOCK_BYTES_MAX

OK = encode([(b":status", b"200")])
BOGUS = b"\x80"
"""A block that refers to an entry of no table (RFC 7541, section 6.1)."""


def answer(peer: Peer, stream_id: int, body: bytes = b"") -> list[Frame]:
    peer.handlers[stream_id].stream.answer(OK, (body,), len(body), b"")
    return peer.take()


TRAILERS = [(b"x-sum", b"1")]

Sent = Callable[[Peer], list[Frame | bytes]]

STREAM_ERRORS: dict[str, tuple[Sent, ErrorCode]] = {
    "5.1 data after the end": (lambda peer: [data(1, b"x")], ErrorCode.STREAM_CLOSED),
    "5.1 empty data after the end": (lambda peer: [data(1, b"")], ErrorCode.STREAM_CLOSED),
    "5.1 headers after the end": (
        lambda peer: [peer.headers(1, TRAILERS)],
        ErrorCode.STREAM_CLOSED,
    ),
    "6.9 an update of 0": (lambda peer: [raw(8, 0, 1, bytes(4))], ErrorCode.PROTOCOL_ERROR),
    "6.9.1 a window too large": (
        lambda peer: [update(1, 2**31 - 1)],
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "6.3 a priority of another length": (
        lambda peer: [raw(2, 0, 1, bytes(4))],
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "5.3.1 a priority on itself": (
        lambda peer: [raw(2, 0, 1, b"\0\0\0\1\0")],
        ErrorCode.PROTOCOL_ERROR,
    ),
}


@pytest.mark.parametrize("name", STREAM_ERRORS)
def test_what_ends_a_stream_ends_no_other(name: str) -> None:
    """Sections of RFC 9113; on stream 1, whose request has ended and is not answered."""
    frames_for, code = STREAM_ERRORS[name]
    peer = Peer()
    handler, neighbour = peer.open(1), peer.open(3)
    answered = peer.send(*frames_for(peer))
    assert resets(answered) == [(1, code)]
    assert (handler.resets, neighbour.resets) == (1, 0)
    assert list(peer.connection.streams) == [3]
    peer.open(5)


def test_a_head_that_depends_on_itself_ends_its_stream_and_is_read() -> None:
    peer = Peer()
    frame = peer.headers(1, [*POST, (b"x-new", b"1")], flags=["PRIORITY"])
    frame.depends_on, frame.stream_weight = 1, 15
    assert resets(peer.send(frame)) == [(1, ErrorCode.PROTOCOL_ERROR)]
    peer.send(peer.headers(3, [*POST, (b"x-new", b"1")]))
    assert list(peer.handlers) == [3]


CONNECTION_ERRORS: dict[str, tuple[Sent, ErrorCode]] = {
    "4.2 a frame too large": (
        lambda peer: [raw(0, 0, 1, bytes(16385))],
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "4.2 headers too large": (
        lambda peer: [raw(1, 0x4, 3, bytes(16385))],
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "4.2 data of 2^24-1 bytes": (
        lambda peer: [b"\xff\xff\xff\0\0\0\0\0\1"],
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "4.2 an unknown frame of 2^24-1 bytes": (
        lambda peer: [b"\xff\xff\xff\x42\0\0\0\0\1"],
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "4.2 HTTP/1 after the start": (
        lambda peer: [b"GET / HTTP/1.1\r\nHost: test\r\n\r\n"],
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "4.3 a block that cannot be decoded": (
        lambda peer: [raw(1, 0x5, 3, BOGUS)],
        ErrorCode.COMPRESSION_ERROR,
    ),
    "4.3 trailers that cannot be decoded": (
        lambda peer: [raw(1, 0x5, 1, BOGUS)],
        ErrorCode.COMPRESSION_ERROR,
    ),
    "5.1 data on an idle stream": (lambda peer: [data(3, b"x")], ErrorCode.PROTOCOL_ERROR),
    "5.1 a reset of an idle stream": (
        lambda peer: [RstStreamFrame(3)],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "5.1 a window of an idle stream": (lambda peer: [update(3, 1)], ErrorCode.PROTOCOL_ERROR),
    "5.1.1 an even stream": (lambda peer: [peer.headers(2)], ErrorCode.PROTOCOL_ERROR),
    "5.1.1 a stream passed over": (
        lambda peer: [peer.headers(9), peer.headers(5)],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "5.1.1 a stream after the last": (
        lambda peer: [peer.headers(2**31 - 1), peer.headers(3)],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "5.1.1 headers on no stream": (
        lambda peer: [raw(1, 0x5, 0, b"")],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "5.1 headers on a stream that the client reset": (
        lambda peer: [RstStreamFrame(1), peer.headers(1)],
        ErrorCode.STREAM_CLOSED,
    ),
    "6.1 data on no stream": (lambda peer: [raw(0, 0, 0, b"x")], ErrorCode.PROTOCOL_ERROR),
    "6.1 padding as long as its frame": (
        lambda peer: [raw(0, 0x8, 1, b"\4abc")],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "6.1 padding without its length": (
        lambda peer: [raw(0, 0x8, 1, b"")],
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "6.2 headers with too much padding": (
        lambda peer: [raw(1, 0xD, 3, b"\5abc")],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "6.2 headers too short for a priority": (
        lambda peer: [raw(1, 0x25, 3, b"abc")],
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "6.2 another frame within a block": (
        lambda peer: [raw(1, 0x1, 3, b""), PingFrame(0)],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "5.5 an unknown frame within a block": (
        lambda peer: [raw(1, 0x1, 3, b""), raw(0x42, 0, 3, b"")],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "6.3 a priority of no stream": (
        lambda peer: [raw(2, 0, 0, bytes(5))],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "6.4 a reset of no stream": (lambda peer: [raw(3, 0, 0, bytes(4))], ErrorCode.PROTOCOL_ERROR),
    "6.4 a reset too short": (lambda peer: [raw(3, 0, 1, bytes(3))], ErrorCode.FRAME_SIZE_ERROR),
    "6.4 a reset too long": (lambda peer: [raw(3, 0, 1, bytes(5))], ErrorCode.FRAME_SIZE_ERROR),
    "6.5 settings of a stream": (lambda peer: [raw(4, 0, 1, b"")], ErrorCode.PROTOCOL_ERROR),
    "6.5 an ack with settings": (
        lambda peer: [raw(4, 0x1, 0, bytes(6))],
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "6.5 settings of another length": (
        lambda peer: [raw(4, 0, 0, bytes(5))],
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "6.5.2 a push of 2": (
        lambda peer: [raw(4, 0, 0, b"\0\2\0\0\0\2")],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "6.5.2 a window too large": (
        lambda peer: [raw(4, 0, 0, b"\0\4\x80\0\0\0")],
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "6.5.2 frames too small": (
        lambda peer: [raw(4, 0, 0, b"\0\5\0\0\x3f\xff")],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "6.5.2 frames too large": (
        lambda peer: [raw(4, 0, 0, b"\0\5\1\0\0\0")],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "6.9.2 settings that make a window too large": (
        lambda peer: [update(1, 2**31 - 1 - 65535), SettingsFrame(0, {4: 65536})],
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "6.6 a push": (lambda peer: [raw(5, 0x4, 1, bytes(4))], ErrorCode.PROTOCOL_ERROR),
    "6.7 a ping of a stream": (lambda peer: [raw(6, 0, 1, bytes(8))], ErrorCode.PROTOCOL_ERROR),
    "6.7 a ping too short": (
        lambda peer: [raw(6, 0, 0, bytes(7))],
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "6.7 a ping too long": (
        lambda peer: [raw(6, 0, 0, bytes(9))],
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "6.8 a goaway of a stream": (lambda peer: [raw(7, 0, 1, bytes(8))], ErrorCode.PROTOCOL_ERROR),
    "6.8 a goaway too short": (
        lambda peer: [raw(7, 0, 0, bytes(7))],
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "6.9 an update of 0": (lambda peer: [raw(8, 0, 0, bytes(4))], ErrorCode.PROTOCOL_ERROR),
    "6.9 an update of another length": (
        lambda peer: [raw(8, 0, 0, bytes(3))],
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "6.9.1 a window too large, of all": (
        lambda peer: [update(0, 2**31 - 1)],
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "6.10 a continuation of nothing": (
        lambda peer: [continuation(1, b"")],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "6.10 a continuation of another stream": (
        lambda peer: [raw(1, 0x1, 3, b""), continuation(5, b"")],
        ErrorCode.PROTOCOL_ERROR,
    ),
    "10.5.1 a block too large": (
        lambda peer: [
            raw(1, 0x1, 3, bytes(16384)),
            continuation(3, bytes(BLOCK_BYTES_MAX - 16384 + 1)),
        ],
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "10.5.1 trailers too large": (
        lambda peer: [peer.headers(1, [(b"x", b"0" * 4000)] * 17)],
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "10.5.1 very many fields": (
        lambda peer: [peer.headers(3, [*POST, *[(b"a", b"b")] * 2000])],
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "10.5.1 a header list too large": (
        lambda peer: [peer.headers(3, [*POST, *[(b"x", b"0" * 4000)] * 17])],
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
}


@pytest.mark.parametrize("name", CONNECTION_ERRORS)
def test_what_ends_the_connection(name: str) -> None:
    """Sections of RFC 9113; stream 1 is open."""
    frames_for, code = CONNECTION_ERRORS[name]
    peer = Peer()
    handler = peer.open(1, is_end=False)
    answered = peer.send(*frames_for(peer))
    last = expect_end(peer, answered, code)
    assert last.last_stream_id >= 1
    assert handler.resets == 1


def test_data_on_a_stream_that_was_answered_and_ended_is_an_error_of_it() -> None:
    peer = Peer()
    peer.open(1)
    answer(peer, 1)
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
    assert peer.handlers[1].is_whole


def test_late_windows_and_resets_of_streams_that_ended_are_ignored() -> None:
    """RFC 9113, section 5.1: closed."""
    peer = Peer()
    peer.open(1)
    answer(peer, 1)
    assert peer.send(update(1, 5), RstStreamFrame(1), PriorityFrame(1)) == []
    peer.open(3)


def test_a_reset_by_the_client_is_told_to_the_handler_once() -> None:
    peer = Peer()
    handler = peer.open(1)
    assert peer.send(RstStreamFrame(1, error_code=8)) == []
    assert handler.resets == 1
    handler.stream.answer(OK, (b"late",), 4, b"")
    assert peer.take() == []
