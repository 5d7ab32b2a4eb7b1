"""Tests of endless frames that cost a client nothing: the server closes the connection soon."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hostile import frames as f
from hostile.canary_client import embed_request
from hostile.conftest import MakePeer
from hostile.frames import ENHANCE_YOUR_CALM

FLOOD = 20_000
"""Number of frames, far above every token bucket."""
PLAIN = f.PREFACE + f.settings()
"""A greeting with default windows, so that a flood of WINDOW_UPDATE can raise them."""
ROUNDS = 2
"""Number of consecutive connections; a second one shows what the first leaves behind."""


def rapid_resets() -> bytes:
    streams = range(1, 20_000, 2)
    return b"".join(f.get(stream) + f.rst_stream(stream) for stream in streams)


def resets_of_incomplete_requests() -> bytes:
    opened = f.head(b"POST", b"/embed")
    return b"".join(
        f.headers(stream, opened, end=False)
        + f.data(stream, b"{", end=False)
        + f.rst_stream(stream)
        for stream in range(1, 20_000, 2)
    )


def stream_errors() -> bytes:
    """Returns streams that the client makes the server reset: MadeYouReset."""
    return b"".join(f.get(stream) + f.window_update(stream, 0) for stream in range(1, 20_000, 2))


def malformed_headers() -> bytes:
    """Returns streams that the server resets because their headers are malformed."""
    malformed = f.block([(b":method", b"GET")])
    return b"".join(f.headers(stream, malformed) for stream in range(1, 20_000, 2))


def small_continuations() -> bytes:
    opened = f.frame(f.HEADERS, f.END_STREAM, 1, f.head(b"GET", b"/health/live"))
    return opened + f.frame(f.CONTINUATION, 0, 1, f.literal(b"a", b"b")) * FLOOD


def one_byte_continuations() -> bytes:
    """Returns one-byte CONTINUATIONs, more than the limit on the bytes of a header block admits."""
    opened = f.frame(f.HEADERS, f.END_STREAM, 1, f.head(b"GET", b"/health/live"))
    return opened + f.frame(f.CONTINUATION, 0, 1, b"\x82") * FLOOD


def empty_continuations() -> bytes:
    opened = f.frame(f.HEADERS, f.END_STREAM, 1, f.head(b"GET", b"/health/live"))
    return opened + f.frame(f.CONTINUATION, 0, 1) * FLOOD


def large_continuations() -> bytes:
    filler = f.literal(b"a", b"b" * 16_000)
    opened = f.frame(f.HEADERS, f.END_STREAM, 1, f.head(b"GET", b"/health/live"))
    return opened + f.frame(f.CONTINUATION, 0, 1, filler) * 1000


def settings() -> bytes:
    return f.settings((f.INITIAL_WINDOW_SIZE, 65_535)) * FLOOD


def empty_settings() -> bytes:
    return f.settings() * FLOOD


def settings_of_many_values() -> bytes:
    return f.settings(*[(f.INITIAL_WINDOW_SIZE, 1), (f.INITIAL_WINDOW_SIZE, 2)] * 100) * (
        FLOOD // 8
    )


def pings() -> bytes:
    return b"".join(map(f.ping, range(FLOOD)))


def ping_acks() -> bytes:
    return f.frame(f.PING, f.ACK, 0, bytes(8)) * FLOOD


def settings_acks() -> bytes:
    return f.settings_ack() * FLOOD


def connection_window_updates() -> bytes:
    return f.window_update(0, 1) * FLOOD


def stream_window_updates() -> bytes:
    opened = f.headers(1, f.head(b"POST", b"/embed"), end=False)
    return opened + f.window_update(1, 1) * FLOOD


def empty_data() -> bytes:
    opened = f.headers(1, f.head(b"POST", b"/embed"), end=False)
    return opened + f.data(1, b"", end=False) * FLOOD


def padded_empty_data() -> bytes:
    opened = f.headers(1, f.head(b"POST", b"/embed"), end=False)
    return opened + f.frame(f.DATA, f.PADDED, 1, b"\x01\x00") * FLOOD


def priorities() -> bytes:
    return f.frame(f.PRIORITY, 0, 1, bytes([0, 0, 0, 3, 16])) * FLOOD


def priorities_of_many_streams() -> bytes:
    return b"".join(
        f.frame(f.PRIORITY, 0, stream, bytes([0, 0, 0, 0, 16])) for stream in range(1, 2 * FLOOD, 2)
    )


def unknown_frames() -> bytes:
    return f.frame(f.UNKNOWN_TYPE, 0, 0, b"x") * FLOOD


def large_unknown_frames() -> bytes:
    return f.frame(f.UNKNOWN_TYPE, 0xFF, 1, bytes(16_000)) * 1500


Flood = Callable[[], bytes]
FLOODS: list[Flood] = [
    rapid_resets,
    resets_of_incomplete_requests,
    stream_errors,
    malformed_headers,
    small_continuations,
    one_byte_continuations,
    empty_continuations,
    large_continuations,
    settings,
    empty_settings,
    settings_of_many_values,
    pings,
    ping_acks,
    settings_acks,
    connection_window_updates,
    stream_window_updates,
    empty_data,
    padded_empty_data,
    priorities,
    priorities_of_many_streams,
    unknown_frames,
    large_unknown_frames,
]


@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.__name__)
def test_flood_ends_its_connection(flood: Flood, rest_peer: MakePeer) -> None:
    frames = flood()
    for _ in range(ROUNDS):
        peer = rest_peer(greeting=PLAIN)
        peer.send(frames)
        assert peer.ending() == ENHANCE_YOUR_CALM
        peer.close()


MALFORMED_REQUEST = f.headers(1, f.block([(b":method", b"GET")]), end=False)
"""A malformed request, which the server resets while more of its frames may be in flight."""


@pytest.mark.parametrize(
    "frame",
    [f.headers(1, f.integer(19, 7, 0x80) * 1000), f.data(1, b"", end=False)],
    ids=["HEADERS", "empty DATA"],
)
def test_flood_on_a_reset_stream_ends_the_connection(frame: bytes, rest_peer: MakePeer) -> None:
    peer = rest_peer(greeting=PLAIN)
    peer.send(MALFORMED_REQUEST + frame * 1500)
    with contextlib.suppress(AssertionError):
        peer.pong()
    assert peer.goaway_code == ENHANCE_YOUR_CALM


def test_settings_that_change_many_windows_end_the_connection(rest_peer: MakePeer) -> None:
    """Sends SETTINGS of 2,600 values; each value changes the window of 128 streams. 1 MB in all."""
    opened = f.head(b"POST", b"/embed")
    streams = b"".join(f.headers(stream, opened, end=False) for stream in range(1, 257, 2))
    pairs = [(f.INITIAL_WINDOW_SIZE, 1), (f.INITIAL_WINDOW_SIZE, 2)] * 1300
    peers = [rest_peer(greeting=PLAIN) for _ in range(4)]
    for peer in peers:
        peer.send(streams)
        peer.pong()
    for peer in peers:
        peer.send(f.settings(*pairs) * 16)
    assert [peer.ending() for peer in peers] == [ENHANCE_YOUR_CALM] * 4


def test_flood_ends_the_connection_with_a_call_in_flight(grpc_peer: MakePeer) -> None:
    """Floods the gRPC port too, with a call in flight."""
    peer = grpc_peer()
    peer.send(f.headers(1, f.grpc_head(b"EmbedStream"), end=False) + pings())
    assert peer.ending() == ENHANCE_YOUR_CALM


@pytest.mark.parametrize("flood", [pings, settings], ids=lambda flood: flood.__name__)
def test_flood_with_unread_acks_is_stopped(flood: Flood, rest_peer: MakePeer) -> None:
    """Checks that acknowledgements do not pile up. The server stops reading frames, or sends GOAWAY
    and discards them.
    """
    peer = rest_peer(receive_buffer=4096)
    frames = flood()
    for _ in range(20):
        if peer.send(frames, reads=False, wait_s=0.2) < len(frames):
            break
    else:
        assert peer.ending() == ENHANCE_YOUR_CALM


def test_frames_within_the_token_bucket_are_allowed(rest_peer: MakePeer) -> None:
    """Checks that a connection may ping, reset and update its windows as real clients do."""
    peer = rest_peer(greeting=PLAIN)
    resets = b"".join(f.get(stream) + f.rst_stream(stream) for stream in range(1, 201, 2))
    peer.send(resets + f.window_update(0, 1) * 100 + f.frame(f.UNKNOWN_TYPE, 0, 0, b"x") * 100)
    for number in range(100):
        peer.pong(number)
    peer.send(f.get(301))
    assert peer.response(301).status == 200
    assert peer.goaway_code is None


@pytest.mark.growth(8 << 10)
def test_answered_streams_leave_no_memory_behind(grpc_peer: MakePeer) -> None:
    """Checks that 10,000 calls on one connection leave nothing behind."""
    peer = grpc_peer()
    request = embed_request([1])
    for first in range(1, 20_000, 200):
        batch = range(first, first + 200, 2)
        peer.send(b"".join(f.call(stream, request) for stream in batch))
        assert [peer.response(stream).grpc_status for stream in batch] == [0] * 100
        peer.responses.clear()
    assert peer.goaway_code is None
