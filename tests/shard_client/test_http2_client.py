"""Tests of the client side of HTTP/2 against frames written by hand."""

from __future__ import annotations

import logging

import pytest
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from shard_client.shard_peer import (
    BLOCK,
    HEAD,
    LIMIT,
    ShardPeer,
    answer,
    data,
    headers,
    headers_of,
    only,
    trailers,
)

from embedserve.shard_client.call_headers import CallHeaders
from embedserve.shard_client.reply import (
    INTERNAL,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNKNOWN,
    Reply,
    lost,
)
from embedserve.wire.grpc.grpc_framing import framed, parse_timeout
from embedserve.wire.http2 import frames
from embedserve.wire.http2.frames import (
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    PADDED,
    WINDOW_AT_START,
    ErrorCode,
)
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http_stream import Headers


def test_begins_with_settings_and_a_large_window() -> None:
    peer = ShardPeer(is_begun=False)
    settings, update = peer.first
    assert isinstance(settings, SettingsFrame)
    assert settings.settings[SettingsFrame.ENABLE_PUSH] == 0
    assert settings.settings[SettingsFrame.INITIAL_WINDOW_SIZE] > LIMIT
    assert isinstance(update, WindowUpdateFrame)
    assert update.window_increment > 1 << 20
    assert not peer.client.is_begun
    assert [type(one) for one in peer.send(frames.settings())] == [SettingsFrame]
    assert peer.changes == [(True, False, False)]


def test_a_call_is_two_frames_and_its_reply_the_message() -> None:
    peer = ShardPeer()
    block = CallHeaders("h:1", "/s/m", metadata=[(b"authorization", b"Bearer x")]).block(0.5)
    peer.call(b"ab", b"c", block=block)
    head, body = peer.taken()
    fields = headers_of(peer, head)
    assert (b":path", b"/s/m") in fields
    assert (b"authorization", b"Bearer x") in fields
    assert (b"te", b"trailers") in fields
    assert isinstance(body, DataFrame)
    assert body.data == framed(b"abc")
    assert "END_STREAM" in body.flags
    peer.send(answer(1, b"reply"))
    assert peer.replies == {0: Reply(0, "", b"reply")}
    assert peer.client.in_flight == 0


@pytest.mark.parametrize("timeout_s", [1e-7, 0.0012, 0.0499, 0.5, 3.0, 1e6])
def test_timeouts_are_rounded_up_a_little_and_few(timeout_s: float) -> None:
    peer = ShardPeer()
    calls = CallHeaders("h:1", "/s/m")
    peer.call(block=calls.block(timeout_s))
    fields = dict(headers_of(peer, only(peer.taken(), HeadersFrame)[0]))
    sent_s = parse_timeout(fields[b"grpc-timeout"])
    assert min(timeout_s, 99.9) - 1e-6 <= sent_s <= max(timeout_s * 1.126, 1e-6)
    assert calls.block(timeout_s) is calls.block(timeout_s)
    assert len({calls.block(ms / 1000) for ms in range(1, 501)}) <= 80


@pytest.mark.parametrize("size", [0, 5, 16384, 16379, LIMIT])
@pytest.mark.parametrize("step", [1, 7, 1000, 70_000, 1 << 20])
def test_responses_arrive_in_any_pieces(size: int, step: int) -> None:
    peer = ShardPeer()
    message = bytes(range(256)) * (size // 256 + 1)
    for _ in range(2):
        peer.call(b"x")
    if step == 1 and size > 16384:
        step = 3
    sent = answer(1, message[:size]) + answer(3, message[:size], 1000)
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
def test_trailers_alone_and_behind_headers(fields: Headers, expected: Reply) -> None:
    peer = ShardPeer()
    peer.call(b"x")
    peer.call(b"x")
    peer.send(headers(1, [*HEAD, *fields], END_HEADERS | END_STREAM))
    peer.send(headers(3, HEAD), trailers(3, fields))
    assert peer.replies == {0: expected, 1: expected}


def test_an_http_status_becomes_a_grpc_status() -> None:
    peer = ShardPeer()
    peer.call(b"x")
    peer.send(headers(1, [(b":status", b"503")], END_HEADERS | END_STREAM))
    assert peer.replies[0].status == UNAVAILABLE


def test_interim_headers_are_ignored() -> None:
    peer = ShardPeer()
    peer.call(b"x")
    peer.send(headers(1, [(b":status", b"103")]), answer(1, b"m"))
    assert peer.replies[0].payload == b"m"


def test_a_header_block_may_be_continued_and_padded() -> None:
    peer = ShardPeer()
    peer.call(b"x")
    block = encode(HEAD)
    first = (
        frames.head(len(block[:9]) + 4, frames.HEADERS, PADDED, 1) + b"\3" + block[:9] + b"\0" * 3
    )
    rest = frames.head(len(block) - 9, CONTINUATION, END_HEADERS, 1) + block[9:]
    body = framed(b"m")
    sent = peer.send(first, rest, data(1, b"\2" + body + b"\0\0", PADDED), trailers(1))
    assert peer.replies[0].payload == b"m"
    assert [one.window_increment for one in only(sent, WindowUpdateFrame)] == [3]


def test_a_response_over_the_limit_fails_its_call_alone() -> None:
    peer = ShardPeer()
    peer.call(b"x")
    peer.call(b"y")
    sent = peer.send(answer(1, b"x" * (LIMIT + 1)), answer(3, b"ok"))
    assert peer.replies == {
        0: Reply(INTERNAL, f"the response has over {LIMIT} bytes"),
        1: Reply(0, "", b"ok"),
    }
    assert [one.stream_id for one in only(sent, RstStreamFrame)] == [1]


def test_a_response_may_not_be_compressed_cut_or_twice() -> None:
    peer = ShardPeer()
    for _ in range(3):
        peer.call(b"x")
    peer.send(headers(1, HEAD), data(1, b"\1\0\0\0\1x"), trailers(1))
    peer.send(headers(3, HEAD), data(3, b"\0\0\0\0\2x"), trailers(3))
    peer.send(headers(5, HEAD), data(5, framed(b"a") + framed(b"b")), trailers(5))
    assert [reply.status for reply in peer.replies.values()] == [INTERNAL] * 3


def test_data_without_headers_or_trailers_fails_the_call() -> None:
    peer = ShardPeer()
    for _ in range(2):
        peer.call(b"x")
    peer.send(data(1, framed(b"a")), trailers(1))
    peer.send(headers(3, HEAD), data(3, framed(b"a"), END_STREAM))
    assert [reply.status for reply in peer.replies.values()] == [INTERNAL] * 2
    assert not peer.client.is_closed


def test_requests_wait_for_windows() -> None:
    peer = ShardPeer((frames.SETTINGS_INITIAL_WINDOW_SIZE, 10))
    message = bytes(range(100))
    peer.call(message)
    head, first = peer.taken()
    assert isinstance(head, HeadersFrame)
    assert isinstance(first, DataFrame)
    assert len(first.data) == 10
    more = peer.send(frames.settings((frames.SETTINGS_INITIAL_WINDOW_SIZE, 15)))
    rest = peer.send(frames.window_update(1, 1000))
    body = b"".join(one.data for one in only([first, *more, *rest], DataFrame))
    assert body == framed(message)
    assert "END_STREAM" in rest[-1].flags
    peer.send(answer(1, b"m"))
    assert peer.replies[0].payload == b"m"


def test_requests_share_the_connection_window_in_order() -> None:
    peer = ShardPeer((frames.SETTINGS_INITIAL_WINDOW_SIZE, 1 << 20))
    peer.call(b"a" * WINDOW_AT_START)
    peer.call(b"b" * 10)
    assert sum(len(one.data) for one in only(peer.taken(), DataFrame)) == WINDOW_AT_START
    sent = peer.send(frames.window_update(0, 100))
    assert b"".join(one.data for one in only(sent, DataFrame)) == b"a" * 5 + framed(b"b" * 10)
    assert [one.stream_id for one in only(sent, DataFrame)] == [1, 3]


def test_a_large_request_is_cut_into_frames() -> None:
    peer = ShardPeer((frames.SETTINGS_INITIAL_WINDOW_SIZE, 1 << 20))
    peer.call(b"a" * 40_000)
    sizes = [len(one.data) for one in only(peer.taken(), DataFrame)]
    assert sizes == [16384, 16384, 40_005 - 2 * 16384]


def test_calls_beyond_the_stream_limit_wait() -> None:
    peer = ShardPeer((frames.SETTINGS_MAX_CONCURRENT_STREAMS, 2))
    calls = [peer.call(b"x") for _ in range(5)]
    assert len(only(peer.taken(), HeadersFrame)) == 2
    assert peer.client.in_flight == 5
    calls[2].cancel()
    sent = peer.send(answer(3, b"m"))
    assert [one.stream_id for one in only(sent, HeadersFrame)] == [5]
    calls[0].cancel()
    assert [type(one) for one in peer.taken()] == [RstStreamFrame, HeadersFrame, DataFrame]
    peer.send(answer(5, b"3"), answer(7, b"4"))
    assert {number: one.payload for number, one in peer.replies.items()} == {
        1: b"m",
        3: b"3",
        4: b"4",
    }


def test_calls_wait_while_the_transport_is_full() -> None:
    peer = ShardPeer()
    peer.client.pause()
    peer.call(b"x")
    assert peer.taken() == []
    peer.client.resume()
    assert len(peer.taken()) == 2


def test_a_cancelled_call_has_no_reply() -> None:
    peer = ShardPeer()
    call = peer.call(b"x")
    peer.taken()
    call.cancel()
    call.cancel()
    (reset,) = peer.taken()
    assert isinstance(reset, RstStreamFrame)
    assert reset.error_code == ErrorCode.CANCEL
    peer.send(answer(1, b"late"))
    assert peer.replies == {}
    assert not peer.client.is_closed


def test_many_cancelled_calls_are_no_flood() -> None:
    peer = ShardPeer((frames.SETTINGS_MAX_CONCURRENT_STREAMS, 10))
    resets = 0
    for _ in range(700):
        call = peer.call(b"x")
        call.cancel()
        number = peer.client.next_id - 2
        resets += len(only(peer.taken(), RstStreamFrame))
        peer.send(answer(number, b"late"))
    assert 500 <= resets < 600
    assert peer.replies == {}
    assert peer.client.in_flight == 0


def test_a_response_before_the_end_of_the_request_resets_it() -> None:
    peer = ShardPeer((frames.SETTINGS_INITIAL_WINDOW_SIZE, 10))
    peer.call(b"x" * 100)
    peer.taken()
    sent = peer.send(headers(1, [*HEAD, (b"grpc-status", b"8")], END_HEADERS | END_STREAM))
    assert [type(one) for one in sent] == [RstStreamFrame]
    assert peer.replies[0].status == RESOURCE_EXHAUSTED
    assert peer.send(frames.window_update(1, 1000)) == []


@pytest.mark.parametrize(
    ("code", "status", "is_lost"),
    [
        (ErrorCode.REFUSED_STREAM, 14, True),
        (ErrorCode.CANCEL, 1, False),
        (ErrorCode.ENHANCE_YOUR_CALM, 8, False),
        (77, 13, False),
    ],
)
def test_resets_of_the_shard(code: int, status: int, is_lost: bool) -> None:
    peer = ShardPeer()
    peer.call(b"x")
    peer.send(frames.rst_stream(1, code), frames.rst_stream(1, code))
    assert (peer.replies[0].status, peer.replies[0].is_lost) == (status, is_lost)
    assert not peer.replies[0].is_too_large


def test_goaway_fails_later_streams_and_waits_for_the_others() -> None:
    peer = ShardPeer((frames.SETTINGS_MAX_CONCURRENT_STREAMS, 2))
    for _ in range(3):
        peer.call(b"x")
    peer.taken()
    peer.send(frames.goaway(1, ErrorCode.NO_ERROR))
    reason = "the shard closes the connection"
    assert peer.replies == {1: lost(reason), 2: lost(reason)}
    assert peer.changes[-1] == (True, True, False)
    with pytest.raises(ConnectionError, match=reason):
        peer.call(b"x")
    (last,) = peer.send(answer(1, b"m"))
    assert isinstance(last, GoAwayFrame)
    assert peer.replies[0].payload == b"m"
    assert peer.client.is_closed


def test_goaway_with_a_code_reports_its_text() -> None:
    peer = ShardPeer()
    peer.send(frames.goaway(0, ErrorCode.ENHANCE_YOUR_CALM, "too many resets"))
    assert peer.client.is_closed
    assert peer.client.reason == "the shard closes the connection with code 11: too many resets"


def test_a_lost_connection_fails_all_calls() -> None:
    peer = ShardPeer((frames.SETTINGS_MAX_CONCURRENT_STREAMS, 1))
    peer.call(b"x")
    peer.call(b"x")
    peer.client.close("gone")
    assert peer.replies == {0: lost("gone"), 1: lost("gone")}
    assert peer.changes[-1] == (True, True, True)
    peer.send(answer(1, b"m"))


def test_window_is_returned_in_time() -> None:
    peer = ShardPeer()
    returned = 0
    for number in range(1, 1400, 2):
        peer.call(b"x")
        sent = peer.send(answer(number, b"x" * LIMIT))
        returned += sum(one.window_increment for one in only(sent, WindowUpdateFrame))
    assert len(peer.replies) == 700
    assert returned >= 700 * LIMIT - (32 << 20)


def test_pings_and_settings_are_answered() -> None:
    peer = ShardPeer()
    sent = peer.send(frames.ping(b"12345678"), frames.ping(b"12345678", frames.ACK))
    assert [(type(one), one.flags.__contains__("ACK")) for one in sent] == [(PingFrame, True)]


def test_stream_identifiers_run_out() -> None:
    peer = ShardPeer()
    peer.client.next_id = 2**31 - 1
    peer.call(b"x")
    assert peer.client.is_draining
    assert not peer.client.is_closed
    peer.send(answer(2**31 - 1, b"m"))
    assert peer.replies[0].payload == b"m"
    assert peer.client.is_closed


def test_a_callback_that_raises_leaves_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    peer = ShardPeer()

    def fail(reply: Reply) -> None:
        raise RuntimeError("callback")

    peer.client.call(BLOCK, (b"x",), fail)
    peer.call(b"y")
    with caplog.at_level(logging.ERROR):
        peer.send(answer(1, b"m"), answer(3, b"n"))
    assert peer.replies[0].payload == b"n"
    assert "a reply could not be processed" in caplog.text


def test_headers_that_do_not_fit_are_rejected() -> None:
    with pytest.raises(ValueError, match="headers of a call"):
        ShardPeer().call(block=b"x" * 16384)


VIOLATIONS = {
    "SETTINGS are missing": (frames.ping(b"12345678"), False),
    "SETTINGS as acknowledgement": (frames.SETTINGS_ACK, False),
    "a long frame": (frames.head(1 << 21, 0, 0, 1), True),
    "long headers": (frames.head(1 << 17, 1, 0, 1), True),
    "PUSH_PROMISE": (frames.head(4, 5, 4, 1) + b"\0\0\0\2", True),
    "HEADERS of no call": (headers(3, HEAD), True),
    "HEADERS of an even stream": (headers(2, HEAD), True),
    "DATA of no call": (data(5, b"x"), True),
    "DATA of stream 0": (data(0, b"x"), True),
    "RST_STREAM of no call": (frames.rst_stream(9, 1), True),
    "WINDOW_UPDATE of no call": (frames.window_update(9, 1), True),
    "WINDOW_UPDATE of 0": (frames.window_update(0, 0), True),
    "a window over the limit": (frames.window_update(0, 2**31 - 1), True),
    "SETTINGS of a stream": (frames.head(0, 4, 0, 1), True),
    "SETTINGS of 5 bytes": (frames.head(5, 4, 0, 0) + b"\0" * 5, True),
    "a bad setting": (frames.settings((frames.SETTINGS_MAX_FRAME_SIZE, 1)), True),
    "PING of 7 bytes": (frames.head(7, 6, 0, 0) + b"\0" * 7, True),
    "GOAWAY of 7 bytes": (frames.head(7, 7, 0, 0) + b"\0" * 7, True),
    "CONTINUATION alone": (frames.head(1, 9, 4, 1) + b"\0", True),
    "a frame within a block": (headers(1, HEAD, 0) + frames.ping(b"12345678"), True),
    "a bad header block": (frames.head(2, 1, 4, 1) + b"\xff\xff", True),
    "empty padded DATA": (data(1, b"", PADDED), True),
    "empty CONTINUATION": (headers(1, HEAD, 0) + frames.head(0, 9, 0, 1), True),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_malformed_frames_end_the_connection(name: str) -> None:
    sent, is_begun = VIOLATIONS[name]
    peer = ShardPeer(is_begun=is_begun)
    if is_begun:
        peer.call(b"x")
        peer.taken()
    answered: list[Frame] = peer.send(sent)
    assert isinstance(answered[-1], GoAwayFrame)
    assert peer.client.is_closed
    assert peer.client.reason.startswith("the shard violates HTTP/2: ")
    assert all(reply.is_lost for reply in peer.replies.values())
    assert len(peer.replies) == peer.calls


def test_a_stream_error_ends_one_call() -> None:
    peer = ShardPeer((frames.SETTINGS_INITIAL_WINDOW_SIZE, 10))
    peer.call(b"x" * 100)
    peer.call(b"y")
    sent = peer.send(frames.window_update(1, 0), answer(3, b"m"))
    assert [one.stream_id for one in only(sent, RstStreamFrame)] == [1]
    assert [peer.replies[0].status, peer.replies[1].status] == [INTERNAL, 0]
