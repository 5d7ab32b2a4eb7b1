"""Tests of the client's HTTP/2 connection: settings, resets, GOAWAY, closing, and violations."""

import pytest
from hyperframe.frame import (
    Frame,
    GoAwayFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from shard_client.shard_peer import (
    LIMIT,
    RESPONSE_HEADERS,
    ShardPeer,
    data,
    headers,
    only,
    response_frames,
)

from embedserve.shard_client.reply import INTERNAL, Reply, lost
from embedserve.wire.grpc.grpc_framing import framed
from embedserve.wire.http2 import frames
from embedserve.wire.http2.frames import PADDED, ErrorCode


def test_client_begins_with_settings_and_a_large_window() -> None:
    peer = ShardPeer(is_begun=False)
    settings, update = peer.first
    assert isinstance(settings, SettingsFrame)
    assert settings.settings[SettingsFrame.ENABLE_PUSH] == 0
    assert settings.settings[SettingsFrame.INITIAL_WINDOW_SIZE] > LIMIT
    assert isinstance(update, WindowUpdateFrame)
    assert update.stream_id == 0
    assert update.window_increment > 1 << 20
    assert not peer.client.is_begun
    for _ in range(2):
        assert [type(one) for one in peer.send(frames.settings())] == [SettingsFrame]
        assert peer.changes == [(True, False, False)]  # once


@pytest.mark.parametrize(
    ("code", "status", "is_lost"),
    [
        (ErrorCode.REFUSED_STREAM, 14, True),
        (ErrorCode.CANCEL, 1, False),
        (ErrorCode.ENHANCE_YOUR_CALM, 8, False),
        (77, 13, False),
    ],
)
def test_reset_by_the_shard_becomes_a_status(code: int, status: int, is_lost: bool) -> None:
    peer = ShardPeer()
    peer.call(b"x")
    peer.send(frames.rst_stream(1, code), frames.rst_stream(1, code))
    assert (peer.replies[0].status, peer.replies[0].is_lost) == (status, is_lost)
    assert not peer.replies[0].is_too_large


def test_goaway_fails_later_streams_and_waits_for_earlier_streams() -> None:
    peer = ShardPeer((frames.SETTINGS_MAX_CONCURRENT_STREAMS, 2))
    for _ in range(3):
        peer.call(b"x")
    peer.take_frames()
    peer.send(frames.goaway(1, ErrorCode.NO_ERROR))
    reason = "the shard closes the connection"
    assert peer.replies == {1: lost(reason), 2: lost(reason)}
    assert peer.changes[-1] == (True, True, False)
    with pytest.raises(ConnectionError, match=reason):
        peer.call(b"x")
    (last,) = peer.send(response_frames(1, b"m"))
    assert isinstance(last, GoAwayFrame)
    assert peer.replies[0].payload == b"m"
    assert peer.client.is_closed


def test_goaway_text_is_in_the_close_reason() -> None:
    peer = ShardPeer()
    peer.send(frames.goaway(0, ErrorCode.ENHANCE_YOUR_CALM, "too many resets"))
    assert peer.client.is_closed
    assert peer.client.reason == "the shard closes the connection with code 11: too many resets"


def test_lost_connection_fails_all_calls() -> None:
    peer = ShardPeer((frames.SETTINGS_MAX_CONCURRENT_STREAMS, 1))
    peer.call(b"x")
    peer.call(b"x")
    peer.client.close("gone")
    assert peer.replies == {0: lost("gone"), 1: lost("gone")}
    assert peer.client.in_flight == 0
    assert peer.changes[-1] == (True, True, True)
    peer.send(response_frames(1, b"m"))


def test_pings_are_acknowledged() -> None:
    peer = ShardPeer()
    (sent,) = peer.send(frames.ping(b"12345678"), frames.ping(b"87654321", frames.ACK))
    assert isinstance(sent, PingFrame)
    assert (sent.opaque_data, "ACK" in sent.flags) == (b"12345678", True)


def test_acknowledged_settings_and_unknown_frames_are_ignored() -> None:
    peer = ShardPeer()
    peer.call(b"x")
    peer.take_frames()
    altsvc = frames.frame_header(3, 10, 0, 0) + b"\0\0x"  # RFC 7838
    assert peer.send(frames.SETTINGS_ACK, altsvc, response_frames(1, b"m")) == []
    assert peer.replies[0].payload == b"m"


def test_client_drains_when_stream_ids_run_out() -> None:
    peer = ShardPeer()
    peer.client.next_id = 2**31 - 1
    peer.call(b"x")
    assert peer.client.is_draining
    assert not peer.client.is_closed
    peer.send(response_frames(2**31 - 1, b"m"))
    assert peer.replies[0].payload == b"m"
    assert peer.client.is_closed


VIOLATIONS = {
    "SETTINGS are missing": (frames.ping(b"12345678"), False),
    "SETTINGS as acknowledgement": (frames.SETTINGS_ACK, False),
    "a long frame": (frames.frame_header(1 << 21, 0, 0, 1), True),
    "long headers": (frames.frame_header(1 << 17, 1, 0, 1), True),
    "PUSH_PROMISE": (frames.frame_header(4, 5, 4, 1) + b"\0\0\0\2", True),
    "HEADERS of no call": (headers(3, RESPONSE_HEADERS), True),
    "HEADERS of an even stream": (headers(2, RESPONSE_HEADERS), True),
    "DATA of no call": (data(5, b"x"), True),
    "DATA of stream 0": (data(0, b"x"), True),
    "RST_STREAM of no call": (frames.rst_stream(9, 1), True),
    "WINDOW_UPDATE of no call": (frames.window_update(9, 1), True),
    "WINDOW_UPDATE of 0": (frames.window_update(0, 0), True),
    "a window over the limit": (frames.window_update(0, 2**31 - 1), True),
    "SETTINGS of a stream": (frames.frame_header(0, 4, 0, 1), True),
    "SETTINGS of 5 bytes": (frames.frame_header(5, 4, 0, 0) + b"\0" * 5, True),
    "a bad setting": (frames.settings((frames.SETTINGS_MAX_FRAME_SIZE, 1)), True),
    "PING of 7 bytes": (frames.frame_header(7, 6, 0, 0) + b"\0" * 7, True),
    "GOAWAY of 7 bytes": (frames.frame_header(7, 7, 0, 0) + b"\0" * 7, True),
    "CONTINUATION alone": (frames.frame_header(1, 9, 4, 1) + b"\0", True),
    "a frame within a block": (headers(1, RESPONSE_HEADERS, 0) + frames.ping(b"12345678"), True),
    "a long header block": (
        headers(1, RESPONSE_HEADERS, 0)
        + 2 * (frames.frame_header(50_000, 9, 0, 1) + bytes(50_000)),
        True,
    ),
    "a bad header block": (frames.frame_header(2, 1, 4, 1) + b"\xff\xff", True),
    "empty padded DATA": (data(1, b"", PADDED), True),
    "empty CONTINUATION": (headers(1, RESPONSE_HEADERS, 0) + frames.frame_header(0, 9, 0, 1), True),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_protocol_violations_close_the_connection(name: str) -> None:
    sent, is_begun = VIOLATIONS[name]
    peer = ShardPeer(is_begun=is_begun)
    if is_begun:
        peer.call(b"x")
        peer.take_frames()
    sent_frames: list[Frame] = peer.send(sent)
    assert isinstance(sent_frames[-1], GoAwayFrame)
    assert peer.client.is_closed
    assert peer.client.reason.startswith("the shard violates HTTP/2: ")
    assert all(reply.is_lost for reply in peer.replies.values())
    assert len(peer.replies) == peer.calls


def test_settings_that_raise_a_window_over_the_limit_close_the_connection() -> None:
    peer = ShardPeer((frames.SETTINGS_INITIAL_WINDOW_SIZE, 1 << 20))
    peer.call(b"x" * 100_000)
    peer.send(frames.window_update(1, 100_000))
    peer.send(frames.settings((frames.SETTINGS_INITIAL_WINDOW_SIZE, 2**31 - 1)))
    assert peer.client.is_closed
    assert "SETTINGS raise a window" in peer.client.reason


def test_data_beyond_the_connection_window_closes_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("embedserve.shard_client.response_frames.CONNECTION_WINDOW", 1000)
    peer = ShardPeer()
    peer.call(b"x")
    peer.send(data(1, bytes(1000)), data(1, b"x"))
    assert peer.client.is_closed
    assert "DATA beyond the connection's window" in peer.client.reason


def test_cancelled_last_call_closes_a_draining_connection() -> None:
    peer = ShardPeer()
    call = peer.call(b"x")
    peer.client.finish("done")
    assert not peer.client.is_closed
    call.cancel()
    assert peer.client.is_closed


def test_stream_error_fails_only_its_call() -> None:
    peer = ShardPeer((frames.SETTINGS_INITIAL_WINDOW_SIZE, 10))
    peer.call(b"x" * 100)
    peer.call(b"y")
    sent = peer.send(frames.window_update(1, 0), response_frames(3, b"m"))
    assert [one.stream_id for one in only(sent, RstStreamFrame)] == [1]
    assert [peer.replies[0].status, peer.replies[1].status] == [INTERNAL, 0]


def test_headers_within_data_fail_only_their_call() -> None:
    peer = ShardPeer()
    peer.call(b"x")
    peer.call(b"y")
    again = headers(1, RESPONSE_HEADERS)
    sent = peer.send(again, data(1, framed(b"m")), again, response_frames(3, b"n"))
    assert [one.stream_id for one in only(sent, RstStreamFrame)] == [1]
    assert peer.replies == {
        0: Reply(INTERNAL, "the response has headers within its data"),
        1: Reply(0, "", b"n"),
    }


def test_window_update_over_the_limit_fails_only_its_call() -> None:
    peer = ShardPeer((frames.SETTINGS_INITIAL_WINDOW_SIZE, 1 << 20))
    peer.call(b"x" * 100_000)
    peer.call(b"y")
    sent = peer.send(
        frames.window_update(1, 2**31 - 1), frames.window_update(0, 1000), response_frames(3, b"m")
    )
    assert [one.stream_id for one in only(sent, RstStreamFrame)] == [1]
    assert [peer.replies[0].status, peer.replies[1].status] == [INTERNAL, 0]
