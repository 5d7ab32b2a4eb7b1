"""Prefaces and frames that are wrong: how each ends its connection or its stream."""

from __future__ import annotations

import struct

import pytest
from hostile import frames as f
from hostile.conftest import MakePeer
from hostile.frames import (
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    INITIAL_WINDOW_SIZE,
    PROTOCOL_ERROR,
    SETTINGS_TIMEOUT,
    STREAM_CLOSED,
)

PLAIN = f.PREFACE + f.settings()
OPEN = f.headers(1, f.head(b"POST", b"/embed"), end=False)
EMPTY_HEADERS = f.frame(f.HEADERS, f.END_STREAM, 1, f.head(b"GET", b"/health/live"))

ENDS_CONNECTION = {
    "SETTINGS of 5 bytes": (f.frame(f.SETTINGS, 0, 0, bytes(5)), FRAME_SIZE_ERROR),
    "SETTINGS ACK of 6 bytes": (f.frame(f.SETTINGS, f.ACK, 0, bytes(6)), FRAME_SIZE_ERROR),
    "SETTINGS on a stream": (f.frame(f.SETTINGS, 0, 1, bytes(6)), PROTOCOL_ERROR),
    "a window of 2^31": (f.settings((INITIAL_WINDOW_SIZE, 2**31)), FLOW_CONTROL_ERROR),
    "a frame size of 16383": (f.settings((f.MAX_FRAME_SIZE, 16_383)), PROTOCOL_ERROR),
    "a frame size of 2^24": (f.settings((f.MAX_FRAME_SIZE, 2**24)), PROTOCOL_ERROR),
    "ENABLE_PUSH 2": (f.settings((f.ENABLE_PUSH, 2)), PROTOCOL_ERROR),
    "PING of 7 bytes": (f.frame(f.PING, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
    "PING of 9 bytes": (f.frame(f.PING, 0, 0, bytes(9)), FRAME_SIZE_ERROR),
    "PING on a stream": (f.frame(f.PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
    "GOAWAY of 7 bytes": (f.frame(f.GOAWAY, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
    "GOAWAY on a stream": (f.frame(f.GOAWAY, 0, 1, bytes(8)), PROTOCOL_ERROR),
    "WINDOW_UPDATE of 3 bytes": (f.frame(f.WINDOW_UPDATE, 0, 0, bytes(3)), FRAME_SIZE_ERROR),
    "WINDOW_UPDATE of 0": (f.window_update(0, 0), PROTOCOL_ERROR),
    "WINDOW_UPDATE over 2^31-1": (f.window_update(0, f.WINDOW_MAX), FLOW_CONTROL_ERROR),
    "WINDOW_UPDATE of an idle stream": (f.window_update(1, 1), PROTOCOL_ERROR),
    "RST_STREAM of 3 bytes": (OPEN + f.frame(f.RST_STREAM, 0, 1, bytes(3)), FRAME_SIZE_ERROR),
    "RST_STREAM of no stream": (f.rst_stream(0), PROTOCOL_ERROR),
    "RST_STREAM of an idle stream": (f.rst_stream(1), PROTOCOL_ERROR),
    "DATA of no stream": (f.data(0, b"x"), PROTOCOL_ERROR),
    "DATA of an idle stream": (f.data(1, b"x"), PROTOCOL_ERROR),
    "DATA of 16385 bytes": (OPEN + f.frame(f.DATA, 0, 1, bytes(16_385)), FRAME_SIZE_ERROR),
    "DATA padded past its end": (
        OPEN + f.frame(f.DATA, f.PADDED, 1, b"\x05abcd"),
        PROTOCOL_ERROR,
    ),
    "DATA padded without a length": (OPEN + f.frame(f.DATA, f.PADDED, 1), FRAME_SIZE_ERROR),
    "HEADERS of no stream": (f.get(0), PROTOCOL_ERROR),
    "HEADERS of an even stream": (f.get(2), PROTOCOL_ERROR),
    "HEADERS of 16385 bytes": (
        f.frame(f.HEADERS, f.END_HEADERS, 1, bytes(16_385)),
        FRAME_SIZE_ERROR,
    ),
    "HEADERS padded past their end": (
        f.frame(f.HEADERS, f.END_HEADERS | f.PADDED, 1, b"\xffabcd"),
        PROTOCOL_ERROR,
    ),
    "HEADERS with half a priority": (
        f.frame(f.HEADERS, f.END_HEADERS | f.WITH_PRIORITY, 1, bytes(3)),
        FRAME_SIZE_ERROR,
    ),
    "PUSH_PROMISE": (f.frame(f.PUSH_PROMISE, f.END_HEADERS, 1, bytes(4)), PROTOCOL_ERROR),
    "CONTINUATION alone": (f.frame(f.CONTINUATION, f.END_HEADERS, 1), PROTOCOL_ERROR),
    "CONTINUATION of another stream": (
        EMPTY_HEADERS + f.frame(f.CONTINUATION, f.END_HEADERS, 3),
        PROTOCOL_ERROR,
    ),
    "a PING amid headers": (EMPTY_HEADERS + f.ping(), PROTOCOL_ERROR),
    "an unknown frame amid headers": (
        EMPTY_HEADERS + f.frame(f.UNKNOWN_TYPE, 0, 1),
        PROTOCOL_ERROR,
    ),
    "a frame of 2^24-1 bytes": (b"\xff\xff\xff\x00\x00\x00\x00\x00\x01", FRAME_SIZE_ERROR),
    "an unknown frame of 2^24-1 bytes": (b"\xff\xff\xff\x42\x00\x00\x00\x00\x01", FRAME_SIZE_ERROR),
    "PRIORITY of no stream": (f.frame(f.PRIORITY, 0, 0, bytes(5)), PROTOCOL_ERROR),
}
EITHER = {"DATA padded without a length", "HEADERS with half a priority"}
"""Of the wrong size and malformed: either code is right."""


@pytest.mark.parametrize("name", ENDS_CONNECTION)
def test_what_ends_a_connection(name: str, rest_peer: MakePeer) -> None:
    sent, code = ENDS_CONNECTION[name]
    allowed = {FRAME_SIZE_ERROR, PROTOCOL_ERROR} if name in EITHER else {code}
    peer = rest_peer(greeting=PLAIN)
    peer.send(sent)
    assert peer.ending() in allowed


ENDS_STREAM = {
    "WINDOW_UPDATE of 0": (f.window_update(1, 0), PROTOCOL_ERROR),
    "WINDOW_UPDATE over 2^31-1": (f.window_update(1, f.WINDOW_MAX), FLOW_CONTROL_ERROR),
    "PRIORITY of 4 bytes": (f.frame(f.PRIORITY, 0, 1, bytes(4)), FRAME_SIZE_ERROR),
}


@pytest.mark.parametrize("name", ENDS_STREAM)
def test_what_ends_a_stream(name: str, rest_peer: MakePeer) -> None:
    """Or its connection, which RFC 9113 lets a server choose."""
    sent, code = ENDS_STREAM[name]
    peer = rest_peer(greeting=PLAIN)
    peer.send(OPEN + sent + f.get(3))
    peer.read_for(0.2)
    if peer.goaway_code is not None or peer.is_closed:
        assert peer.ending() == code
        return
    assert peer.answer(1).reset_code == code
    assert peer.answer(3).status == 200


def test_windows_grown_past_the_end_by_settings(rest_peer: MakePeer) -> None:
    peer = rest_peer(greeting=PLAIN)
    peer.send(OPEN + f.window_update(1, f.WINDOW_MAX - 65_535))
    peer.send(f.settings((INITIAL_WINDOW_SIZE, 65_536)))
    assert peer.ending() == FLOW_CONTROL_ERROR


@pytest.mark.parametrize(
    "frame", [f.data(1, b"x"), f.get(1), f.data(1)], ids=["DATA", "HEADERS", "empty DATA"]
)
def test_more_on_a_stream_that_the_client_ended(frame: bytes, rest_peer: MakePeer) -> None:
    peer = rest_peer(greeting=PLAIN)
    peer.send(f.get(1) + frame)
    peer.read_for(0.2)
    if peer.goaway_code is not None or peer.is_closed:
        assert peer.ending() in (STREAM_CLOSED, PROTOCOL_ERROR)
        return
    assert peer.answer(1).reset_code == STREAM_CLOSED


def test_streams_that_go_backwards(rest_peer: MakePeer) -> None:
    peer = rest_peer()
    peer.send(f.get(9))
    assert peer.answer(9).status == 200
    peer.send(f.get(7))
    assert peer.ending() in (PROTOCOL_ERROR, STREAM_CLOSED)


def test_the_last_stream_there_is(rest_peer: MakePeer) -> None:
    peer = rest_peer()
    peer.send(f.get(f.WINDOW_MAX))
    assert peer.answer(f.WINDOW_MAX).status == 200
    peer.send(f.get(1))
    assert peer.ending() in (PROTOCOL_ERROR, STREAM_CLOSED)


def test_a_reserved_bit_is_ignored(rest_peer: MakePeer) -> None:
    peer = rest_peer()
    request = f.get(1)
    peer.send(request[:5] + struct.pack(">L", 1 | 1 << 31) + request[9:])
    assert peer.answer(1).status == 200


def test_goaway_and_then_more(rest_peer: MakePeer) -> None:
    """A client's GOAWAY speaks of streams that the server opens: its own may be answered."""
    peer = rest_peer()
    peer.send(f.get(1) + f.goaway() + f.get(3))
    assert peer.answer(1).status == 200
    peer.read_for(0.2)
    peer.send(f.goaway() * 50 + f.get(5))
    if peer.goaway_code is None and not peer.is_closed:
        peer.read_for(0.5)
    answered = peer.answers.get(5)
    assert peer.is_closed or (answered is not None and answered.status == 200)


def test_garbage_after_a_good_start(rest_peer: MakePeer) -> None:
    peer = rest_peer()
    peer.send(f.get(1))
    assert peer.answer(1).status == 200
    peer.send(bytes(i * 37 & 0xFF for i in range(100_000)))
    assert peer.ending() in (FRAME_SIZE_ERROR, PROTOCOL_ERROR)


def test_http1_after_a_good_start(rest_peer: MakePeer) -> None:
    peer = rest_peer()
    peer.send(b"GET /health/live HTTP/1.1\r\nHost: test\r\n\r\n" * 10)
    assert peer.ending() in (FRAME_SIZE_ERROR, PROTOCOL_ERROR)


def test_no_settings_after_the_preface(rest_peer: MakePeer) -> None:
    peer = rest_peer(greeting=f.PREFACE + f.ping(), acknowledges=False)
    assert peer.ending() == PROTOCOL_ERROR


def test_an_acknowledgement_first(rest_peer: MakePeer) -> None:
    """SETTINGS with ACK are not the SETTINGS that a preface ends with."""
    peer = rest_peer(greeting=f.PREFACE + f.settings_ack() + f.get(1), acknowledges=False)
    assert peer.ending() == PROTOCOL_ERROR


@pytest.mark.parametrize(
    "greeting",
    [
        b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\rX",
        b"PRI /",
        b"\0" * 1000,
    ],
    ids=["not SM", "one byte wrong", "another path", "zeros"],
)
def test_a_preface_gone_wrong(greeting: bytes, rest_peer: MakePeer) -> None:
    """It is taken for HTTP/1.1, and that is wrong, too: answered 400 at most, then closed."""
    peer = rest_peer(greeting=greeting + b"\r\n\r\n", acknowledges=False)
    peer.ending()


def test_a_preface_that_never_ends(rest_peer: MakePeer) -> None:
    """A head of HTTP/1.1 without end: what is kept of it has a bound."""
    peer = rest_peer(greeting=b"PRI * HTTP/1.1\r\n", acknowledges=False)
    line = b"a: " + b"b" * 1000 + b"\r\n"
    sent = peer.send(line * 20_000)
    assert sent < len(line) * 20_000


@pytest.mark.parametrize("sent", [1, 14, 23], ids=lambda sent: f"{sent} bytes")
def test_a_preface_in_pieces(sent: int, rest_peer: MakePeer) -> None:
    peer = rest_peer(greeting=f.PREFACE[:sent], acknowledges=False)
    peer.read_for(0.05)
    peer.send(f.PREFACE[sent:] + f.settings() + f.get(1))
    assert peer.answer(1).status == 200


def test_a_request_byte_for_byte(rest_peer: MakePeer) -> None:
    """Each byte a segment of its own, as far as the client can see to that."""
    peer = rest_peer(greeting=b"", acknowledges=False)
    for byte in f.PREFACE + f.settings() + f.get(1):
        peer.send(bytes([byte]))
        peer.read_for(0.001)
    assert peer.answer(1).status == 200


def test_partial_prefaces_and_silence_hold_little(rest_peer: MakePeer) -> None:
    """300 connections that say half a preface and nothing more."""
    for i in range(300):
        rest_peer(greeting=f.PREFACE[: i % 24], acknowledges=False)


@pytest.mark.soak
@pytest.mark.parametrize(
    "greeting", [b"", f.PREFACE[:20], b"GET / HTTP/1.1\r\nHost: a"], ids=["nothing", "PRI", "GET"]
)
def test_half_a_start_is_not_waited_for(greeting: bytes, rest_peer: MakePeer) -> None:
    """After 10 s the connection is closed."""
    peer = rest_peer(greeting=greeting, acknowledges=False)
    assert peer.ending() is None


@pytest.mark.soak
def test_settings_are_not_waited_for(rest_peer: MakePeer) -> None:
    peer = rest_peer(greeting=f.PREFACE, acknowledges=False)
    assert peer.ending() == SETTINGS_TIMEOUT
