"""Tests of endless frames that cost a client nothing: the server closes the connection soon."""

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


STREAMS = range(1, FLOOD, 2)
OPENED_GET = f.frame(f.HEADERS, f.END_STREAM, 1, f.head(b"GET", b"/health/live"))
"""HEADERS whose block continues in CONTINUATIONs."""
OPENED_POST = f.headers(1, f.head(b"POST", b"/embed"), end=False)
NO_PATH = f.block([(b":method", b"GET")])
"""A malformed header block, for which the server resets the stream."""
PINGS = b"".join(map(f.ping, range(FLOOD)))
SETTINGS = f.settings((f.INITIAL_WINDOW_SIZE, 65_535)) * FLOOD

FLOODS: dict[str, Callable[[], bytes]] = {
    "rapid resets": lambda: b"".join(f.get(one) + f.rst_stream(one) for one in STREAMS),
    "resets of incomplete requests": lambda: b"".join(
        f.headers(one, f.head(b"POST", b"/embed"), end=False)
        + f.data(one, b"{", end=False)
        + f.rst_stream(one)
        for one in STREAMS
    ),
    # streams that the client makes the server reset: MadeYouReset
    "stream errors": lambda: b"".join(f.get(one) + f.window_update(one, 0) for one in STREAMS),
    "malformed headers": lambda: b"".join(f.headers(one, NO_PATH) for one in STREAMS),
    "small continuations": lambda: (
        OPENED_GET + f.frame(f.CONTINUATION, 0, 1, f.literal(b"a", b"b")) * FLOOD
    ),
    # more than the limit on the bytes of a header block admits
    "one-byte continuations": lambda: OPENED_GET + f.frame(f.CONTINUATION, 0, 1, b"\x82") * FLOOD,
    "empty continuations": lambda: OPENED_GET + f.frame(f.CONTINUATION, 0, 1) * FLOOD,
    "large continuations": lambda: (
        OPENED_GET + f.frame(f.CONTINUATION, 0, 1, f.literal(b"a", b"b" * 16_000)) * 1000
    ),
    "settings": lambda: SETTINGS,
    "empty settings": lambda: f.settings() * FLOOD,
    "settings of many values": lambda: (
        f.settings(*[(f.INITIAL_WINDOW_SIZE, 1), (f.INITIAL_WINDOW_SIZE, 2)] * 100) * (FLOOD // 8)
    ),
    "pings": lambda: PINGS,
    "ping acks": lambda: f.frame(f.PING, f.ACK, 0, bytes(8)) * FLOOD,
    "settings acks": lambda: f.settings_ack() * FLOOD,
    "connection window updates": lambda: f.window_update(0, 1) * FLOOD,
    "stream window updates": lambda: OPENED_POST + f.window_update(1, 1) * FLOOD,
    "empty data": lambda: OPENED_POST + f.data(1, b"", end=False) * FLOOD,
    "padded empty data": lambda: OPENED_POST + f.frame(f.DATA, f.PADDED, 1, b"\x01\x00") * FLOOD,
    "priorities": lambda: f.frame(f.PRIORITY, 0, 1, bytes([0, 0, 0, 3, 16])) * FLOOD,
    "priorities of many streams": lambda: b"".join(
        f.frame(f.PRIORITY, 0, one, bytes([0, 0, 0, 0, 16])) for one in range(1, 2 * FLOOD, 2)
    ),
    "unknown frames": lambda: f.frame(f.UNKNOWN_TYPE, 0, 0, b"x") * FLOOD,
    "large unknown frames": lambda: f.frame(f.UNKNOWN_TYPE, 0xFF, 1, bytes(16_000)) * 1500,
}


@pytest.mark.parametrize("name", FLOODS)
def test_flood_ends_its_connection(name: str, rest_peer: MakePeer) -> None:
    frames = FLOODS[name]()
    for _ in range(ROUNDS):
        peer = rest_peer(greeting=PLAIN)
        peer.send(frames)
        assert peer.ending() == ENHANCE_YOUR_CALM
        peer.close()


@pytest.mark.parametrize(
    "frame",
    [f.headers(1, f.integer(19, 7, 0x80) * 1000), f.data(1, b"", end=False)],
    ids=["HEADERS", "empty DATA"],
)
def test_flood_on_a_reset_stream_ends_the_connection(frame: bytes, rest_peer: MakePeer) -> None:
    """Sends frames that may be in flight when the server resets a malformed request."""
    peer = rest_peer(greeting=PLAIN)
    peer.send(f.headers(1, NO_PATH, end=False) + frame * 1500)
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
    peer.send(f.headers(1, f.grpc_head(b"EmbedStream"), end=False) + PINGS)
    assert peer.ending() == ENHANCE_YOUR_CALM


@pytest.mark.parametrize("frames", [PINGS, SETTINGS], ids=["pings", "settings"])
def test_flood_with_unread_acks_is_stopped(frames: bytes, rest_peer: MakePeer) -> None:
    """Checks that acknowledgements do not pile up. The server stops reading frames, or sends GOAWAY
    and discards them.
    """
    peer = rest_peer(receive_buffer=4096)
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
