"""Tests of frame floods, and of how a connection drains and closes."""

import pytest
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
)
from server.wire.http2.peer import OK, POST, Peer, continuation, data, of, raw, resets, update

from embedserve.wire.http2.frames import HEADERS, ErrorCode
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http2.request_headers import ResolvedRoute
from embedserve.wire.http2.stream import Stream
from embedserve.wire.http2.token_bucket import ABUSE_TOKENS_MAX
from embedserve.wire.http2.turns import (
    ABUSE_BYTES,
    ABUSE_WORK,
    FRAMES_PER_TURN,
    HEADERS_ONLY_WORK,
    WORK_PER_TURN,
)
from embedserve.wire.http_stream import NULL_HANDLER, Handler

# Floods


FLOODS: dict[str, Frame | bytes] = {
    "pings": PingFrame(0),
    "settings": SettingsFrame(0),
    "priorities": PriorityFrame(1),
    "unknown frames": raw(0xFE, 0, 0, b""),
    "goaways": GoAwayFrame(0),
    "empty data": data(1, b""),
    "windows": update(0, 1),
    "resets": RstStreamFrame(1),
    "errors of streams": raw(8, 0, 1, bytes(4)),
}


@pytest.mark.parametrize("name", FLOODS)
def test_flood_of_frames_without_requests_ends_the_connection(name: str) -> None:
    """Checks RFC 9113, section 10.5. The token bucket refills with time, but far more slowly."""
    peer = Peer()
    peer.open(1, is_end=False)
    sent = 0
    while not peer.connection.is_over:
        peer.send(*[FLOODS[name]] * 100)
        sent += 100
        assert sent < 20 * ABUSE_TOKENS_MAX, "no end to it"
    assert sent >= ABUSE_TOKENS_MAX
    last = peer.seen[-1]
    assert isinstance(last, GoAwayFrame)
    assert ErrorCode(last.error_code) is ErrorCode.ENHANCE_YOUR_CALM


def test_bytes_of_an_incomplete_header_block_are_counted() -> None:
    peer = Peer()
    peer.send(raw(HEADERS, 0, 1, bytes(3)), continuation(1, bytes(4), is_end=False))
    assert peer.connection.left_bytes == 7
    peer.send(continuation(1, b""))
    assert peer.connection.left_bytes == 0


def test_flood_of_empty_continuations_ends_the_connection() -> None:
    peer = Peer()
    peer.send(raw(1, 0x1, 1, b"\x82"))
    for _ in range(20):
        peer.send(*[continuation(1, b"", is_end=False)] * 100)
    assert peer.connection.is_over
    last = peer.seen[-1]
    assert isinstance(last, GoAwayFrame)
    assert ErrorCode(last.error_code) is ErrorCode.ENHANCE_YOUR_CALM


def test_window_updates_for_each_response_are_allowed() -> None:
    peer = Peer()
    for i in range(2 * ABUSE_TOKENS_MAX):
        peer.open(2 * i + 1)
        peer.respond(2 * i + 1, b"x")
        peer.send(update(0, 1), update(0, 1))
    assert not peer.connection.is_over


def test_window_updates_for_each_frame_of_a_large_response_are_allowed() -> None:
    nbytes = 8 << 20
    peer = Peer(settings={SettingsFrame.INITIAL_WINDOW_SIZE: nbytes})
    peer.send(update(0, nbytes))
    peer.open(1)
    peer.respond(1, bytes(nbytes))
    for _ in range(19):
        peer.send(*[update(0, 1)] * (ABUSE_TOKENS_MAX // 10))
    assert not peer.connection.is_over


def test_window_updates_for_past_responses_are_bounded() -> None:
    peer = Peer()
    for i in range(ABUSE_TOKENS_MAX):
        peer.open(2 * i + 1)
        peer.respond(2 * i + 1, b"x")
    sent = 0
    while not peer.connection.is_over:
        peer.send(*[update(0, 1)] * 100)
        sent += 100
        assert sent < 3 * ABUSE_TOKENS_MAX
    assert sent >= ABUSE_TOKENS_MAX


def test_window_updates_for_each_rejected_call_are_allowed() -> None:
    """Sends a WINDOW_UPDATE with each call, as gRPC clients do. Rejections, such as those of an
    overloaded server, have no DATA. Their connection may have other calls in flight.
    """
    peer = Peer()
    for i in range(2 * ABUSE_TOKENS_MAX):
        peer.open(2 * i + 1)
        peer.handlers[2 * i + 1].stream.send_head(OK, is_end=True)
        peer.take()
        peer.send(update(2 * i + 1, 5), update(0, 5))
    assert not peer.connection.is_over


@pytest.mark.parametrize("is_rejected", [False, True])
def test_a_reset_for_each_response_is_allowed(is_rejected: bool) -> None:
    """Resets as many calls as are answered, far above the rate of the bucket, as a client with many
    calls in flight does that hedges them."""
    peer = Peer()
    for i in range(2 * ABUSE_TOKENS_MAX):
        peer.open(4 * i + 1)
        lost = peer.open(4 * i + 3)
        if is_rejected:
            peer.handlers[4 * i + 1].stream.send_head(OK, is_end=True)
        else:
            peer.respond(4 * i + 1, b"x")
        peer.send(RstStreamFrame(4 * i + 3))
        assert lost.resets == 1
    assert not peer.connection.is_over


def test_resets_of_more_calls_than_are_answered_are_bounded() -> None:
    peer = Peer()
    sent = 0
    while not peer.connection.is_over:
        first = 6 * sent + 1
        for stream_id in (first, first + 2, first + 4):
            peer.open(stream_id)
        peer.respond(first, b"x")
        peer.send(RstStreamFrame(first + 2), RstStreamFrame(first + 4))
        sent += 1
        assert sent < 4 * ABUSE_TOKENS_MAX
    assert sent >= ABUSE_TOKENS_MAX - 1


def test_new_header_blocks_are_parsed_over_several_iterations() -> None:
    peer = Peer()
    frames = [
        peer.headers(2 * i + 1, [*POST, (b"x-number", b"%d" % i + b"\x01" * 2000)])
        for i in range(20)
    ]
    peer.connection.receive(b"".join(frame.serialize() for frame in frames))
    first = len(peer.handlers)
    assert 0 < first < 20
    assert peer.connection.has_more
    assert first <= WORK_PER_TURN // 1000
    peer.send()
    assert len(peer.handlers) == 20


def test_header_block_of_indexes_counts_work_per_header() -> None:
    """Sends blocks in which each byte is a header of the static table; no block is cached."""
    peer = Peer()
    blocks = [b"\x82" * (800 + i) for i in range(20)]
    sent = [raw(1, 0x5, 2 * i + 1, block) for i, block in enumerate(blocks)]
    peer.connection.receive(b"".join(sent))
    assert peer.connection.has_more
    read = len(resets(peer.take()))
    assert 0 < read <= 1 + WORK_PER_TURN // (33 * 800)
    assert len(resets(peer.send())) == 20 - read


def test_trailers_are_parsed_over_several_iterations() -> None:
    peer = Peer()
    for i in range(20):
        peer.open(2 * i + 1, is_end=False)
    block = encode([(b"x", b"y")] * 400)
    peer.connection.receive(b"".join(raw(1, 0x5, 2 * i + 1, block) for i in range(20)))
    assert peer.connection.has_more
    assert 0 < sum(handler.is_complete for handler in peer.handlers.values()) < 10
    peer.send()
    assert all(handler.is_complete for handler in peer.handlers.values())


def test_resets_are_processed_over_several_iterations() -> None:
    peer = Peer()
    frames = [
        frame
        for i in range(100)
        for frame in (peer.headers(2 * i + 1, is_end=False), RstStreamFrame(2 * i + 1))
    ]
    peer.connection.receive(b"".join(frame.serialize() for frame in frames))
    assert peer.connection.has_more
    assert 0 < len(peer.handlers) <= 1 + WORK_PER_TURN // ABUSE_WORK
    peer.send()
    assert len(peer.handlers) == 100
    assert not peer.connection.is_over


def test_unparsed_bytes_of_a_flood_are_dropped_with_the_connection() -> None:
    peer = Peer()
    peer.send(*[PingFrame(0)] * ABUSE_TOKENS_MAX)
    peer.connection.receive(b"".join(PingFrame(0).serialize() for _ in range(100)))
    assert peer.connection.is_over
    assert (peer.connection.left_bytes, peer.connection.has_more) == (0, False)


def test_small_data_frames_are_processed_over_several_iterations() -> None:
    peer = Peer()
    handler = peer.open(1, is_end=False)
    peer.connection.receive(b"".join(data(1, b"x").serialize() for _ in range(5000)))
    assert peer.connection.has_more
    assert len(handler.body) == FRAMES_PER_TURN
    peer.send()
    assert len(handler.body) == 5000


def test_one_iteration_opens_at_least_the_stream_limit_and_stays_bounded() -> None:
    peer = Peer()
    block = encode(POST)
    peer.send(raw(1, 0x4, 1, block), raw(0, 0x1, 1, b"x"))  # the block is cached from here on
    peer.respond(1)
    peer.connection.receive(
        b"".join(raw(1, 0x4, i, block) + raw(0, 0x1, i, b"x") for i in range(3, 3 + 2 * 127, 2))
    )
    assert len(peer.handlers) == 128
    assert not peer.connection.has_more
    peer.connection.receive(b"".join(raw(1, 0x5, i, block) for i in range(257, 2257, 2)))
    assert peer.connection.has_more


@pytest.mark.parametrize("body", [b"", b"x"])
def test_requests_answered_from_their_headers_take_several_iterations(body: bytes) -> None:
    """Sends requests that each end before the next begins; their header block is cached."""

    def respond_immediately(stream: Stream) -> Handler:
        stream.send_head(OK, is_end=True)
        return NULL_HANDLER

    peer = Peer(lambda headers: ResolvedRoute(respond_immediately, None))
    block = encode(POST)

    def request(stream_id: int) -> bytes:
        if not body:
            return raw(1, 0x5, stream_id, block)
        return raw(1, 0x4, stream_id, block) + raw(0, 0x1, stream_id, body)

    peer.send(request(1))
    assert block in peer.connection.blocks.cached
    number = FRAMES_PER_TURN // 2
    peer.connection.receive(b"".join(request(3 + 2 * i) for i in range(number)))
    assert peer.connection.has_more
    received = len(of(peer.take(), HeadersFrame))
    assert received == WORK_PER_TURN // HEADERS_ONLY_WORK
    assert len(of(peer.send(), HeadersFrame)) == number - received


def test_settings_count_work_per_value() -> None:
    peer = Peer()
    values = 1000
    many = raw(4, 0, 0, (bytes((0, 4)) + (1000).to_bytes(4, "big")) * values)
    sent = 0
    while not peer.connection.is_over:
        peer.send(many)
        sent += 1
        assert sent <= 2 * ABUSE_TOKENS_MAX * ABUSE_BYTES // (6 * values)


# Drain


def goaways(frames: list[Frame]) -> list[tuple[int, int]]:
    return [(one.last_stream_id, one.error_code) for one in of(frames, GoAwayFrame)]


def test_drain_accepts_streams_in_flight_and_rejects_later_streams() -> None:
    peer = Peer()
    first = peer.open(1)
    peer.connection.shutdown.start_drain()
    begun = peer.take()
    assert goaways(begun) == [(2**31 - 1, 0)]
    (ping,) = of(begun, PingFrame)
    assert first.drains == 1
    second = peer.open(3)
    ended = peer.send(PingFrame(0, ping.opaque_data, flags=["ACK"]))
    assert goaways(ended) == [(3, 0)]
    assert (first.drains, second.drains) == (2, 1)
    assert resets(peer.send(peer.headers(5))) == [(5, ErrorCode.REFUSED_STREAM)]
    peer.respond(1)
    was_over = peer.connection.is_over
    peer.respond(3)
    assert (was_over, peer.connection.is_over) == (False, True)
    assert (first.resets, second.resets) == (0, 0)


def test_drain_completes_without_a_ping_ack_and_sends_goaway_once() -> None:
    peer = Peer()
    peer.connection.shutdown.start_drain()
    peer.connection.shutdown.finish()
    assert goaways(peer.take()) == [(2**31 - 1, 0), (0, 0)]
    assert peer.connection.is_over
    peer.connection.shutdown.finish()
    assert peer.take() == []


def test_streams_are_answered_after_a_goaway_from_the_client() -> None:
    peer = Peer()
    peer.open(1)
    assert peer.send(GoAwayFrame(0, error_code=0, additional_data=b"bye")) == []
    assert of(peer.respond(1, b"x"), DataFrame)


def test_handlers_are_notified_once_when_the_connection_closes() -> None:
    peer = Peer()
    handlers = [peer.open(1), peer.open(3, is_end=False)]
    peer.connection.close()
    assert [one.resets for one in handlers] == [1, 1]
    peer.connection.close()
    assert [one.resets for one in handlers] == [1, 1]
