"""Tests of the client side of HTTP/2 against frames written by hand."""

import logging
from unittest.mock import Mock

import pytest
from hyperframe.frame import DataFrame, HeadersFrame, RstStreamFrame, WindowUpdateFrame
from shard_client.shard_peer import (
    BLOCK,
    LIMIT,
    RESPONSE_HEADERS,
    ShardPeer,
    data,
    headers,
    headers_of,
    only,
    response_frames,
    trailers,
)

from embedserve.shard_client.call_headers import CallHeaders
from embedserve.shard_client.reply import INTERNAL, RESOURCE_EXHAUSTED, UNAVAILABLE, UNKNOWN, Reply
from embedserve.wire.grpc.grpc_framing import framed, parse_timeout
from embedserve.wire.http2 import frames
from embedserve.wire.http2.frames import (
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    HAS_PRIORITY,
    PADDED,
    WINDOW_AT_START,
    ErrorCode,
)
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http_stream import Headers


def test_call_is_two_frames_and_its_reply_the_message() -> None:
    peer = ShardPeer()
    block = CallHeaders("h:1", "/s/m", metadata=[(b"authorization", b"Bearer x")]).block(0.5)
    peer.call(b"ab", b"c", block=block)
    head, body = peer.take_frames()
    fields = headers_of(peer, head)
    assert (b":path", b"/s/m") in fields
    assert (b"authorization", b"Bearer x") in fields
    assert (b"te", b"trailers") in fields
    assert isinstance(body, DataFrame)
    assert body.data == framed(b"abc")
    assert "END_STREAM" in body.flags
    peer.send(response_frames(1, b"reply"))
    assert peer.replies == {0: Reply(0, "", b"reply")}
    assert peer.client.in_flight == 0


def test_header_blocks_need_no_dynamic_table() -> None:
    """Checks the first block, too: it must confirm a table size of 0 (RFC 7541, section 4.2)."""
    peer = ShardPeer()
    peer.decoder.max_allowed_table_size = 0
    for _ in range(2):
        peer.call(b"x")
        assert (b":path", b"/") in headers_of(peer, peer.take_frames()[0])


@pytest.mark.parametrize("timeout_s", [1e-7, 0.0012, 0.0499, 0.5, 3.0, 1e6])
def test_timeouts_are_rounded_up_slightly_to_few_values(timeout_s: float) -> None:
    peer = ShardPeer()
    calls = CallHeaders("h:1", "/s/m")
    peer.call(block=calls.block(timeout_s))
    fields = dict(headers_of(peer, only(peer.take_frames(), HeadersFrame)[0]))
    sent_s = parse_timeout(fields[b"grpc-timeout"])
    assert min(timeout_s, 99.9) - 1e-6 <= sent_s <= max(timeout_s * 1.126, 1e-6)
    assert calls.block(timeout_s) is calls.block(timeout_s)
    assert len({calls.block(ms / 1000) for ms in range(1, 501)}) <= 80


@pytest.mark.parametrize("size", [0, 5, 16384, 16379, LIMIT])
@pytest.mark.parametrize("step", [1, 7, 1000, 70_000, 1 << 20])
def test_responses_may_arrive_in_chunks_of_any_size(size: int, step: int) -> None:
    peer = ShardPeer()
    message = bytes(range(256)) * (size // 256 + 1)
    for _ in range(2):
        peer.call(b"x")
    if step == 1 and size > 16384:
        step = 3
    sent = response_frames(1, message[:size]) + response_frames(3, message[:size], 1000)
    for start in range(0, len(sent), step):
        peer.send(sent[start : start + step])
    assert [peer.replies[n].payload == message[:size] for n in range(2)] == [True, True]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            [(b"grpc-status", b"8"), (b"grpc-message", b"a%20b%C3%A9"), (b"retry-after", b"3")],
            Reply(RESOURCE_EXHAUSTED, "a bé", retry_after_s=3),
        ),
        ([(b"grpc-status", b"99")], Reply(UNKNOWN, "grpc-status is '99'")),
        ([], Reply(UNKNOWN, "the response has no grpc-status")),
        (
            [(b"grpc-status", b"0")],
            Reply(INTERNAL, "the response of 0 bytes is not one whole message"),
        ),
    ],
)
def test_status_is_read_from_trailers_with_and_without_headers(
    fields: Headers, expected: Reply
) -> None:
    peer = ShardPeer()
    peer.call(b"x")
    peer.call(b"x")
    peer.send(headers(1, [*RESPONSE_HEADERS, *fields], END_HEADERS | END_STREAM))
    peer.send(headers(3, RESPONSE_HEADERS), trailers(3, fields))
    assert peer.replies == {0: expected, 1: expected}


def test_http_status_becomes_a_grpc_status() -> None:
    """Proxies send an error with or without a body."""
    peer = ShardPeer()
    for _ in range(2):
        peer.call(b"x")
    peer.send(headers(1, [(b":status", b"503")], END_HEADERS | END_STREAM))
    peer.send(headers(3, [(b":status", b"502")]), data(3, b"<html>", END_STREAM))
    assert [reply.status for reply in peer.replies.values()] == [UNAVAILABLE] * 2


def test_interim_headers_are_ignored() -> None:
    peer = ShardPeer()
    peer.call(b"x")
    peer.send(headers(1, [(b":status", b"103")]), response_frames(1, b"m"))
    assert peer.replies[0].payload == b"m"


def test_header_block_may_be_continued_and_padded_with_a_priority() -> None:
    peer = ShardPeer()
    peer.call(b"x")
    block = encode(RESPONSE_HEADERS)
    payload = b"\3" + b"\0\0\0\0\x10" + block[:9] + b"\0" * 3
    flags = PADDED | HAS_PRIORITY
    first = frames.frame_header(len(payload), frames.HEADERS, flags, 1) + payload
    rest = frames.frame_header(len(block) - 9, CONTINUATION, END_HEADERS, 1) + block[9:]
    body = framed(b"m")
    sent = peer.send(first, rest, data(1, b"\2" + body + b"\0\0", PADDED), trailers(1))
    assert peer.replies[0].payload == b"m"
    assert [one.window_increment for one in only(sent, WindowUpdateFrame)] == [3]


def test_header_block_in_one_byte_frames_is_read_in_linear_time() -> None:
    """Lasts minutes if the time is quadratic in the number of frames."""
    peer = ShardPeer()
    peer.call(b"x")
    block = encode([*RESPONSE_HEADERS, (b"x", b"y" * 60_000)])
    parts = [
        frames.frame_header(1, CONTINUATION, 0, 1) + block[n : n + 1] for n in range(len(block))
    ]
    last = frames.frame_header(0, CONTINUATION, END_HEADERS, 1)
    peer.send(frames.frame_header(0, frames.HEADERS, 0, 1), *parts, last, data(1, framed(b"m")))
    peer.send(trailers(1))
    assert peer.replies[0].payload == b"m"


def test_data_frame_may_be_larger_than_a_header_block() -> None:
    peer = ShardPeer()
    peer.call(b"x")
    peer.send(response_frames(1, b"m" * LIMIT, frame_bytes=2 * LIMIT))
    assert peer.replies[0].payload == b"m" * LIMIT


def test_response_over_the_limit_fails_only_its_call() -> None:
    peer = ShardPeer()
    peer.call(b"x")
    peer.call(b"y")
    sent = peer.send(response_frames(1, b"x" * (LIMIT + 1)), response_frames(3, b"ok"))
    assert peer.replies == {
        0: Reply(INTERNAL, f"the response has over {LIMIT} bytes"),
        1: Reply(0, "", b"ok"),
    }
    assert [one.stream_id for one in only(sent, RstStreamFrame)] == [1]


def test_compressed_truncated_or_repeated_response_fails_the_call() -> None:
    peer = ShardPeer()
    for _ in range(3):
        peer.call(b"x")
    peer.send(headers(1, RESPONSE_HEADERS), data(1, b"\1\0\0\0\1x"), trailers(1))
    peer.send(headers(3, RESPONSE_HEADERS), data(3, b"\0\0\0\0\2x"), trailers(3))
    peer.send(headers(5, RESPONSE_HEADERS), data(5, framed(b"a") + framed(b"b")), trailers(5))
    assert [reply.status for reply in peer.replies.values()] == [INTERNAL] * 3


def test_data_without_headers_or_trailers_fails_the_call() -> None:
    peer = ShardPeer()
    for _ in range(2):
        peer.call(b"x")
    peer.send(data(1, framed(b"a")), trailers(1))
    peer.send(headers(3, RESPONSE_HEADERS), data(3, framed(b"a"), END_STREAM))
    assert [reply.status for reply in peer.replies.values()] == [INTERNAL] * 2
    assert not peer.client.is_closed


def test_requests_wait_for_flow_control_windows() -> None:
    peer = ShardPeer((frames.SETTINGS_INITIAL_WINDOW_SIZE, 10))
    message = bytes(range(100))
    peer.call(message)
    head, first = peer.take_frames()
    assert isinstance(head, HeadersFrame)
    assert isinstance(first, DataFrame)
    assert len(first.data) == 10
    more = peer.send(frames.settings((frames.SETTINGS_INITIAL_WINDOW_SIZE, 15)))
    assert [len(one.data) for one in only(more, DataFrame)] == [5]
    rest = peer.send(frames.window_update(1, 1000))
    body = b"".join(one.data for one in only([first, *more, *rest], DataFrame))
    assert body == framed(message)
    assert "END_STREAM" in rest[-1].flags
    assert peer.send(response_frames(1, b"m")) == []
    assert peer.replies[0].payload == b"m"


def test_lowered_window_may_become_negative() -> None:
    peer = ShardPeer((frames.SETTINGS_INITIAL_WINDOW_SIZE, 10))
    peer.call(b"x" * 100)
    peer.take_frames()
    peer.send(frames.settings((frames.SETTINGS_INITIAL_WINDOW_SIZE, 4)))
    assert peer.send(frames.window_update(1, 6)) == []
    (sent,) = only(peer.send(frames.window_update(1, 3)), DataFrame)
    assert len(sent.data) == 3


def test_requests_share_the_connection_window_in_order() -> None:
    peer = ShardPeer((frames.SETTINGS_INITIAL_WINDOW_SIZE, 1 << 20))
    peer.call(b"a" * WINDOW_AT_START)
    peer.call(b"b" * 10)
    assert sum(len(one.data) for one in only(peer.take_frames(), DataFrame)) == WINDOW_AT_START
    sent = peer.send(frames.window_update(0, 100))
    assert b"".join(one.data for one in only(sent, DataFrame)) == b"a" * 5 + framed(b"b" * 10)
    assert [one.stream_id for one in only(sent, DataFrame)] == [1, 3]


def test_small_requests_share_the_connection_window() -> None:
    peer = ShardPeer()
    for _ in range(5):
        peer.call(b"x" * 16_000)
    assert sum(len(one.data) for one in only(peer.take_frames(), DataFrame)) == WINDOW_AT_START


@pytest.mark.parametrize("frame_bytes", [16384, 20_000])
def test_large_request_is_split_into_frames(frame_bytes: int) -> None:
    peer = ShardPeer(
        (frames.SETTINGS_INITIAL_WINDOW_SIZE, 1 << 20),
        (frames.SETTINGS_MAX_FRAME_SIZE, frame_bytes),
    )
    peer.call(b"a" * 40_000)
    sent = only(peer.take_frames(), DataFrame)
    assert [(len(one.data), "END_STREAM" in one.flags) for one in sent] == [
        (frame_bytes, False),
        (frame_bytes, False),
        (40_005 - 2 * frame_bytes, True),
    ]


def test_calls_beyond_the_stream_limit_wait() -> None:
    peer = ShardPeer((frames.SETTINGS_MAX_CONCURRENT_STREAMS, 2))
    calls = [peer.call(b"x") for _ in range(5)]
    assert len(only(peer.take_frames(), HeadersFrame)) == 2
    assert peer.client.in_flight == 5
    calls[2].cancel()
    sent = peer.send(response_frames(3, b"m"))
    assert [one.stream_id for one in only(sent, HeadersFrame)] == [5]
    calls[0].cancel()
    assert [type(one) for one in peer.take_frames()] == [RstStreamFrame, HeadersFrame, DataFrame]
    peer.send(response_frames(5, b"3"), response_frames(7, b"4"))
    assert {number: one.payload for number, one in peer.replies.items()} == {
        1: b"m",
        3: b"3",
        4: b"4",
    }


def test_raised_stream_limit_opens_waiting_calls() -> None:
    peer = ShardPeer((frames.SETTINGS_MAX_CONCURRENT_STREAMS, 1))
    for _ in range(3):
        peer.call(b"x")
    peer.take_frames()
    sent = peer.send(frames.settings((frames.SETTINGS_MAX_CONCURRENT_STREAMS, 2)))
    assert [one.stream_id for one in only(sent, HeadersFrame)] == [3]


def test_calls_wait_while_the_transport_is_paused() -> None:
    peer = ShardPeer((frames.SETTINGS_INITIAL_WINDOW_SIZE, 10))
    peer.call(b"x" * 10)
    peer.take_frames()
    peer.client.pause()
    peer.call(b"y")
    assert peer.send(frames.window_update(1, 1000)) == []
    assert only(peer.send(frames.settings()), HeadersFrame) == []
    peer.client.resume()
    sent = peer.take_frames()
    assert [(type(one).__name__, one.stream_id) for one in sent] == [
        ("DataFrame", 1),
        ("HeadersFrame", 3),
        ("DataFrame", 3),
    ]


def test_cancelled_call_has_no_reply() -> None:
    peer = ShardPeer()
    call = peer.call(b"x")
    peer.take_frames()
    call.cancel()
    call.cancel()
    (reset,) = peer.take_frames()
    assert isinstance(reset, RstStreamFrame)
    assert reset.error_code == ErrorCode.CANCEL
    peer.send(response_frames(1, b"late"))
    assert peer.replies == {}
    assert not peer.client.is_closed


def test_resets_of_many_cancelled_calls_are_limited() -> None:
    peer = ShardPeer((frames.SETTINGS_MAX_CONCURRENT_STREAMS, 10))
    resets = 0
    for _ in range(700):
        call = peer.call(b"x")
        call.cancel()
        number = peer.client.next_id - 2
        resets += len(only(peer.take_frames(), RstStreamFrame))
        peer.send(response_frames(number, b"late"))
    assert 500 <= resets < 600
    assert peer.replies == {}
    assert peer.client.in_flight == 0


def test_response_before_the_end_of_the_request_resets_its_stream() -> None:
    peer = ShardPeer((frames.SETTINGS_INITIAL_WINDOW_SIZE, 10))
    peer.call(b"x" * 100)
    peer.take_frames()
    sent = peer.send(
        headers(1, [*RESPONSE_HEADERS, (b"grpc-status", b"8")], END_HEADERS | END_STREAM)
    )
    assert [type(one) for one in sent] == [RstStreamFrame]
    assert peer.replies[0].status == RESOURCE_EXHAUSTED
    assert peer.send(frames.window_update(1, 1000)) == []


@pytest.mark.parametrize(
    ("end", "resets"),
    [
        (b"", 1),
        (frames.rst_stream(3, ErrorCode.CANCEL), 0),
        (frames.window_update(3, 0), 1),
        (frames.goaway(1, ErrorCode.NO_ERROR), 0),
        (trailers(3, [*RESPONSE_HEADERS, (b"grpc-status", b"8")]), 1),
    ],
    ids=["cancelled", "reset", "stream error", "GOAWAY", "answered"],
)
def test_ended_call_sends_no_more_of_its_request(end: bytes, resets: int) -> None:
    peer = ShardPeer((frames.SETTINGS_INITIAL_WINDOW_SIZE, 1 << 20))
    peer.call(b"a" * 100_000)
    call = peer.call(b"b" * 100_000)
    peer.take_frames()
    if not end:
        call.cancel()
    assert len(only(peer.send(end), RstStreamFrame)) == resets
    sent = only(peer.send(frames.window_update(0, 1 << 20)), DataFrame)
    assert {one.stream_id for one in sent} == {1}
    assert "END_STREAM" in sent[-1].flags


def test_connection_window_is_replenished() -> None:
    peer = ShardPeer()
    returned = 0
    for number in range(1, 1400, 2):
        peer.call(b"x")
        sent = peer.send(response_frames(number, b"x" * LIMIT))
        returned += sum(one.window_increment for one in only(sent, WindowUpdateFrame))
    assert len(peer.replies) == 700
    assert returned >= 700 * LIMIT - (32 << 20)


def test_exception_in_a_callback_keeps_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    peer = ShardPeer()
    peer.client.call(BLOCK, (b"x",), Mock(side_effect=RuntimeError("callback")))
    peer.call(b"y")
    with caplog.at_level(logging.ERROR):
        peer.send(response_frames(1, b"m"), response_frames(3, b"n"))
    assert peer.replies[0].payload == b"n"
    assert "a reply could not be processed" in caplog.text
