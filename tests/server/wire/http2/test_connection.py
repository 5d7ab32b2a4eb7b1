"""Tests of a connection's states and errors by RFC 9113, from bytes to bytes."""

from itertools import pairwise
from time import perf_counter

import pytest
from hyperframe.frame import (
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import given
from hypothesis import strategies as st
from server.wire.http2.peer import (
    OK,
    POST,
    Peer,
    assert_connection_error,
    continuation,
    data,
    of,
    raw,
    resets,
    update,
)

from embedserve.wire.http2.closed_streams import DISCARDED_BYTES_MAX, REMEMBERED_MAX
from embedserve.wire.http2.control import STREAMS_MAX
from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http2.request_frames import UNSENT_BYTES_MAX

# Start


def test_connection_starts_with_settings_and_a_larger_window() -> None:
    settings, window = Peer(is_begun=False).initial_frames
    assert isinstance(settings, SettingsFrame)
    assert settings.settings == {3: 128, 4: 131072, 6: 16384}
    assert isinstance(window, WindowUpdateFrame)
    assert (window.stream_id, 65535 + window.window_increment) == (0, 1 << 20)


def test_settings_are_acknowledged() -> None:
    peer = Peer(is_begun=False)
    assert not peer.connection.is_begun
    (ack,) = peer.send(SettingsFrame(0))
    assert isinstance(ack, SettingsFrame)
    assert set(ack.flags) == {"ACK"}
    assert peer.connection.is_begun


@pytest.mark.parametrize("first", [PingFrame(0), SettingsFrame(0, flags=["ACK"]), update(0, 1)])
def test_first_frame_other_than_settings_ends_the_connection(first: Frame) -> None:
    peer = Peer(is_begun=False)
    assert_connection_error(peer, peer.send(first), ErrorCode.PROTOCOL_ERROR)


def test_frames_after_a_connection_error_are_ignored() -> None:
    peer = Peer()
    peer.send(raw(0x6, 0, 0, b"short"))
    assert peer.send(PingFrame(0), peer.headers(1)) == []
    assert peer.handlers == {}


# Requests


def test_handler_receives_the_request_and_its_response_is_sent() -> None:
    peer = Peer()
    handler = peer.open(1, is_end=False)
    peer.send(data(1, b"ab"))
    assert (handler.body, handler.is_complete) == (b"ab", False)
    peer.send(data(1, b"c", is_end=True))
    assert (handler.body, handler.is_complete) == (b"abc", True)
    head, body = peer.respond(1, b"xyz")
    assert peer.response_headers(head) == [(b":status", b"200")]
    assert isinstance(body, DataFrame)
    assert (body.data, set(body.flags)) == (b"xyz", {"END_STREAM"})
    assert peer.connection.streams == {}
    assert handler.resets == 0


@given(st.lists(st.integers(0, 400), max_size=20))
def test_frames_split_at_random_bytes_are_parsed(ends: list[int]) -> None:
    peer = Peer(is_begun=False)
    header_frames = [peer.headers(1, is_end=False), peer.headers(3, is_end=False)]
    trailers = peer.headers(3, [(b"x-sum", b"1")])
    block = peer.encoder.encode([*POST, (b"x-other", b"12345")])
    frames = [
        SettingsFrame(0, {4: 70000}),
        *header_frames,
        data(1, b"ab", padding=9),
        data(3, b"cd"),
        PingFrame(0, b"12345678"),
        data(1, b"ef", is_end=True),
        trailers,
        HeadersFrame(5, block[:3]),
        continuation(5, block[3:5], is_end=False),
        continuation(5, block[5:]),
        data(5, b"gh", is_end=True),
    ]
    sent = b"".join(frame.serialize() for frame in frames)
    bounds = [0, *sorted(min(end, len(sent)) for end in ends), len(sent)]
    for start, end in pairwise(bounds):
        peer.send(sent[start:end])
    assert {number: (one.body, one.is_complete) for number, one in peer.handlers.items()} == {
        1: (b"abef", True),
        3: (b"cd", True),
        5: (b"gh", True),
    }
    assert [one.opaque_data for one in of(peer.seen, PingFrame)] == [b"12345678"]
    assert not peer.connection.is_over


@pytest.mark.parametrize("padding", [0, 1, 255])
def test_padding_is_removed(padding: int) -> None:
    peer = Peer()
    head = peer.headers(1, is_end=False, flags=["PADDED"])
    head.pad_length = padding
    peer.send(head, data(1, b"abc", is_end=True, padding=padding))
    assert peer.handlers[1].body == b"abc"


def test_priority_is_ignored() -> None:
    peer = Peer()
    frame = peer.headers(3, flags=["PRIORITY"])
    frame.depends_on, frame.stream_weight, frame.exclusive = 1, 15, True
    peer.send(frame, PriorityFrame(5, depends_on=3))
    assert peer.handlers[3].is_complete


def test_stream_is_reset_when_its_body_continues_after_an_early_response() -> None:
    """Checks RFC 9113, section 8.1: a reset with NO_ERROR, after much more of the body or some
    time.
    """
    peer = Peer()
    handler = peer.open(1, is_end=False)
    assert resets(peer.respond(1)) == []
    assert resets(peer.send(data(1, bytes(DISCARDED_BYTES_MAX)))) == []
    assert resets(peer.send(data(1, b"x"))) == [(1, ErrorCode.NO_ERROR)]
    assert peer.send(data(1, b"on its way"), peer.headers(1, [(b"x", b"late")])) == []
    assert (handler.body, handler.resets) == (b"", 0)
    peer.open(3)  # the header table is still in sync


def test_incomplete_requests_with_early_responses_are_bounded() -> None:
    peer, frames = Peer(), []
    for i in range(REMEMBERED_MAX + 1):
        peer.open(1 + 2 * i, is_end=False)
        frames += peer.respond(1 + 2 * i)
    assert resets(frames) == [(1, ErrorCode.NO_ERROR)]


def test_early_response_resets_only_requests_that_stay_incomplete() -> None:
    peer = Peer()
    for number in (1, 3):
        peer.open(number, is_end=False)
        assert resets(peer.respond(number)) == []
    assert peer.send(data(1, b"all of it", is_end=True)) == []
    peer.connection.check_time(perf_counter())
    assert peer.take() == []  # it may be in flight
    peer.connection.check_time(perf_counter())
    assert resets(peer.take()) == [(3, ErrorCode.NO_ERROR)]
    peer.connection.check_time(perf_counter())
    assert peer.take() == []


def test_incomplete_requests_are_reset_with_the_next_early_response() -> None:
    """Checks that a client with repeated rejections causes one write for each rejection."""
    peer = Peer()
    peer.open(1, is_end=False)
    assert resets(peer.respond(1)) == []
    peer.open(3, is_end=False)
    assert resets(peer.respond(3)) == []  # both together, since the first may still be in flight
    peer.connection.check_time(perf_counter())
    peer.open(5, is_end=False)
    assert resets(peer.respond(5)) == [(1, ErrorCode.NO_ERROR), (3, ErrorCode.NO_ERROR)]
    peer.connection.check_time(perf_counter())
    assert peer.take() == []


def test_incomplete_answered_requests_are_reset_when_the_connection_ends() -> None:
    """Checks for resets: grpcio fails half-open streams when a connection closes.

    That happens even to a stream that has its response.
    """
    peer = Peer()
    for number in (1, 3):
        peer.open(number, is_end=False)
    assert resets(peer.respond(1)) == []
    peer.connection.shutdown.finish()
    assert resets(peer.respond(3)) == [(1, ErrorCode.NO_ERROR), (3, ErrorCode.NO_ERROR)]
    assert peer.connection.is_over


def test_incomplete_answered_request_is_reset_when_idle_connection_ends() -> None:
    peer = Peer()
    peer.open(1, is_end=False)
    peer.respond(1)
    peer.connection.shutdown.finish()
    assert resets(peer.take()) == [(1, ErrorCode.NO_ERROR)]
    assert peer.connection.is_over


def test_stream_over_the_limit_is_rejected_and_later_streams_open() -> None:
    peer = Peer()
    for i in range(STREAMS_MAX):
        peer.open(2 * i + 1)
    over = 2 * STREAMS_MAX + 1
    assert resets(peer.send(peer.headers(over))) == [(over, ErrorCode.REFUSED_STREAM)]
    assert over not in peer.handlers
    peer.respond(1)
    peer.open(over + 2)


def test_new_streams_are_rejected_while_too_many_bytes_are_unsent() -> None:
    peer = Peer()
    peer.open(1)
    half = UNSENT_BYTES_MAX // 2
    stream = peer.handlers[1].stream
    stream.send_head(OK)
    stream.send_body((bytes(half),), half)
    peer.open(3)
    stream.send_body((bytes(half + 65536),), half + 65536)
    assert resets(peer.send(peer.headers(5))) == [(5, ErrorCode.REFUSED_STREAM)]
    peer.send(RstStreamFrame(1, error_code=8))
    peer.open(7)


@pytest.mark.parametrize(
    ("headers", "frames"),
    [
        ([(b":method", b"POST")], []),
        ([*POST, (b"Upper", b"x")], []),
        ([*POST, (b"content-length", b"5")], [data(1, b"123456")]),
        ([*POST, (b"content-length", b"5")], [data(1, b"1234", is_end=True)]),
        ([*POST, (b"content-length", b"5")], [data(1, b"12345"), data(1, b"6", is_end=True)]),
    ],
)
def test_malformed_request_resets_its_stream(
    headers: list[tuple[bytes, bytes]], frames: list[Frame]
) -> None:
    """Checks RFC 9113, section 8.1.1."""
    peer = Peer()
    received = peer.send(peer.headers(1, headers, is_end=False), *frames)
    assert resets(received) == [(1, ErrorCode.PROTOCOL_ERROR)]
    if frames:
        assert peer.handlers[1].resets == 1
    assert not any(one.is_complete for one in peer.handlers.values())
    peer.open(3)


def test_missing_declared_body_resets_the_stream() -> None:
    peer = Peer()
    received = peer.send(peer.headers(1, [*POST, (b"content-length", b"5")]))
    assert resets(received) == [(1, ErrorCode.PROTOCOL_ERROR)]
    assert peer.handlers == {}
    assert resets(peer.send(peer.headers(3, [*POST, (b"content-length", b"0")]))) == []


TRAILERS = [(b"x-sum", b"1")]


@pytest.mark.parametrize(
    ("trailers", "is_end"),
    [(TRAILERS, False), ([(b":path", b"/")], True), ([(b"X-Sum", b"1")], True)],
)
def test_malformed_trailers_reset_the_stream(
    trailers: list[tuple[bytes, bytes]], is_end: bool
) -> None:
    peer = Peer()
    handler = peer.open(1, is_end=False)
    assert resets(peer.send(peer.headers(1, trailers, is_end=is_end))) == [
        (1, ErrorCode.PROTOCOL_ERROR)
    ]
    assert (handler.is_complete, handler.resets) == (False, 1)


def test_trailers_complete_a_request() -> None:
    peer = Peer()
    handler = peer.open(1, is_end=False)
    peer.send(data(1, b"abc"), peer.headers(1, TRAILERS))
    assert (handler.body, handler.is_complete) == (b"abc", True)
