"""Tests that a request in one chunk has the same effect as a request that arrives byte by byte."""

from collections.abc import Callable

import pytest
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame
from server.wire.http2.peer import OK, POST, TAIL, Peer, RecordingHandler, data, of, resets

from embedserve.wire.http2.control import STREAMS_MAX
from embedserve.wire.http2.frames import FRAME_BYTES_MAX, ErrorCode
from embedserve.wire.http2.inbound_flow_control import STREAM_WINDOW
from embedserve.wire.http2.request_headers import ResolvedRoute
from embedserve.wire.http2.stream import Stream
from embedserve.wire.http2.upload_budget import UploadBudget
from embedserve.wire.http_stream import Headers
from embedserve.wire.wire_server import UPLOAD_BYTES_MAX

DECLARED: Headers = [*POST, (b"content-length", b"5")]
MALFORMED: Headers = [*POST, (b"Upper", b"case")]
FULL = b"f" * FRAME_BYTES_MAX


def headers_frame(peer: Peer, stream_id: int, headers: Headers = POST) -> HeadersFrame:
    return peer.headers(stream_id, headers, is_end=False)


def whole_request(peer: Peer, stream_id: int, body: bytes, headers: Headers = POST) -> list[Frame]:
    return [headers_frame(peer, stream_id, headers), data(stream_id, body, is_end=True)]


def warmed_up_peer(uploads: UploadBudget | None = None) -> Peer:
    """Returns a peer that has sent all the headers before, so that its table no longer changes."""
    peer = Peer(uploads=uploads)
    for number, headers in enumerate((POST, DECLARED, MALFORMED) * 2):
        peer.send(
            headers_frame(peer, 2 * number + 1, headers),
            data(2 * number + 1, b"12345", is_end=True),
        )
    for handler in list(peer.handlers.values()):
        handler.stream.send_response(OK, (b"x",), 1, TAIL)
    peer.take()
    peer.handlers.clear()
    return peer


Sent = Callable[[Peer], list[Frame]]
CASES: dict[str, Sent] = {
    "a body": lambda peer: whole_request(peer, 21, b"12345"),
    "no byte of a body": lambda peer: whole_request(peer, 21, b""),
    "the largest frame": lambda peer: whole_request(peer, 21, b"x" * 16384),
    "a frame that is too large": lambda peer: whole_request(peer, 21, b"x" * 16385),
    "as declared": lambda peer: whole_request(peer, 21, b"12345", DECLARED),
    "less than declared": lambda peer: whole_request(peer, 21, b"1234", DECLARED),
    "more than declared": lambda peer: whole_request(peer, 21, b"123456", DECLARED),
    "malformed": lambda peer: whole_request(peer, 21, b"12345", MALFORMED),
    "padded": lambda peer: [headers_frame(peer, 21), data(21, b"12345", is_end=True, padding=3)],
    "a body that goes on": lambda peer: [
        headers_frame(peer, 21),
        data(21, b"123"),
        data(21, b"45", is_end=True),
    ],
    "two": lambda peer: [*whole_request(peer, 21, b"first"), *whole_request(peer, 23, b"second")],
    "the body of another stream": lambda peer: [
        headers_frame(peer, 21),
        data(23, b"12345", is_end=True),
    ],
    "a number that was passed over": lambda peer: [
        *whole_request(peer, 23, b"12345"),
        *whole_request(peer, 21, b"12345"),
    ],
    "an even number": lambda peer: whole_request(peer, 22, b"12345"),
    "more after its end": lambda peer: [
        *whole_request(peer, 21, b"12345"),
        data(21, b"67890", is_end=True),
    ],
    "full frames": lambda peer: full_frames(peer, data(21, b"rest", is_end=True)),
    "full frames and an empty one": lambda peer: full_frames(peer, data(21, b"", is_end=True)),
    "full frames that go on": lambda peer: full_frames(peer, data(21, b"more")),
    "full frames, the last of another stream": lambda peer: full_frames(peer, data(23, FULL)),
    "full frames, the last padded": lambda peer: full_frames(
        peer, data(21, b"rest", is_end=True, padding=9)
    ),
    "full frames, the last too large": lambda peer: full_frames(peer, data(21, FULL + b"f")),
    "full frames and one after their end": lambda peer: full_frames(
        peer, data(21, FULL, is_end=True), data(21, b"more")
    ),
    "full frames and trailers": lambda peer: full_frames(
        peer, peer.headers(21, [(b"a", b"trailer")], is_end=True)
    ),
    "full frames, more than declared": lambda peer: [
        headers_frame(peer, 21, DECLARED),
        data(21, FULL),
        data(21, FULL, is_end=True),
    ],
}


def full_frames(peer: Peer, *last: Frame) -> list[Frame]:
    return [headers_frame(peer, 21), data(21, FULL), data(21, FULL), *last]


@pytest.mark.parametrize("case", CASES)
def test_request_in_one_chunk_equals_byte_by_byte_request(case: str) -> None:
    results = []
    for is_whole in (True, False):
        peer = warmed_up_peer()
        sent = b"".join(frame.serialize() for frame in CASES[case](peer))
        chunks = [sent] if is_whole else [sent[i : i + 1] for i in range(len(sent))]
        frames = [frame for chunk in chunks for frame in peer.send(chunk)]
        handler_states = {
            number: (handler.body, handler.is_complete, handler.resets)
            for number, handler in peer.handlers.items()
        }
        connection = peer.connection
        left = sorted(connection.streams), connection.flow_control.window, connection.is_over
        results.append(([frame.serialize() for frame in frames], handler_states, left))
    assert results[0] == results[1]


def test_stream_over_the_limit_is_rejected() -> None:
    peer = warmed_up_peer()
    numbers = range(21, 21 + 2 * (STREAMS_MAX + 1), 2)
    peer.send(*(one for n in numbers for one in whole_request(peer, n, b"body")))
    assert resets(peer.seen)[-1] == (numbers[-1], ErrorCode.REFUSED_STREAM)
    assert [handler.body for handler in peer.handlers.values()] == [b"body"] * STREAMS_MAX


def test_no_request_is_accepted_after_shutdown() -> None:
    peer = warmed_up_peer()
    peer.connection.shutdown.finish()
    peer.send(*whole_request(peer, 21, b"body"))
    assert peer.handlers == {}
    assert peer.connection.is_over


def test_body_beyond_the_connection_window_ends_the_connection() -> None:
    peer = warmed_up_peer(UploadBudget(UPLOAD_BYTES_MAX, lambda: False))
    peer.holds_bodies = True
    number = 21
    while peer.connection.flow_control.window >= 16384:
        # Incomplete bodies are held, and their window is not returned.
        peer.send(headers_frame(peer, number), data(number, b"x" * 16384))
        number += 2
    (ended,) = of(peer.send(*whole_request(peer, number, b"x" * 16384)), GoAwayFrame)
    assert ended.error_code == ErrorCode.FLOW_CONTROL_ERROR
    assert not peer.handlers[number].is_complete


def test_complete_full_frames_are_passed_on_as_one_chunk() -> None:
    peer = warmed_up_peer()
    first, *others = [frame.serialize() for frame in full_frames(peer, *[data(21, FULL)] * 2)]
    sent = b"".join(others)
    peer.send(first, sent[:-1])
    assert peer.handlers[21].chunk_sizes == [3 * len(FULL)]
    peer.send(sent[-1:], data(21, FULL), data(21, b"", is_end=True))
    assert peer.handlers[21].chunk_sizes == [3 * len(FULL), 2 * len(FULL)]
    assert peer.handlers[21].is_complete


def test_full_frames_beyond_the_stream_window_reset_the_stream() -> None:
    peer = warmed_up_peer()
    peer.holds_bodies = True
    frames = STREAM_WINDOW // len(FULL) + 1
    replies = peer.send(headers_frame(peer, 21), *[data(21, FULL)] * frames)
    assert resets(replies) == [(21, ErrorCode.FLOW_CONTROL_ERROR)]
    assert peer.handlers[21].resets == 1


def test_body_is_not_passed_on_after_a_response_to_the_headers() -> None:
    handlers = []

    def reject(stream: Stream) -> RecordingHandler:
        stream.send_response(OK, (b"no",), 2, b"")
        handlers.append(RecordingHandler(stream))
        return handlers[-1]

    peer = Peer(lambda _: ResolvedRoute(reject, None))
    for number in (1, 3, 5):
        frames = peer.send(*whole_request(peer, number, b"body"))
        assert isinstance(frames[0], HeadersFrame)
        assert isinstance(frames[1], DataFrame)
    # The first response announces the use of the client's table, and is not framed immediately.
    assert [handler.body for handler in handlers] == [b"body", b"", b""]
    assert peer.connection.streams == {}


def test_single_response_is_written_immediately_and_several_together() -> None:
    peer = warmed_up_peer()
    written: list[bytes] = []
    peer.connection.frame_writer.write = written.append
    peer.send(*whole_request(peer, 21, b"body"))
    outputs = peer.outputs
    peer.handlers[21].stream.send_response(OK, (b"lone",), 4, TAIL)
    assert len(written) == 1
    assert b"lone" in written[0]
    assert (peer.take(), peer.outputs) == ([], outputs)
    for number in (23, 25):
        peer.send(*whole_request(peer, number, b"body"))
    for number in (23, 25):
        peer.handlers[number].stream.send_response(OK, (b"both",), 4, TAIL)
    assert len(written) == 1
    assert peer.outputs > outputs
    assert [frame.stream_id for frame in of(peer.take(), HeadersFrame)] == [23, 23, 25, 25]


def test_single_response_does_not_overtake_pending_frames() -> None:
    peer = warmed_up_peer()
    written: list[bytes] = []
    peer.connection.frame_writer.write = written.append
    peer.send(*whole_request(peer, 21, b"body"))
    peer.connection.frame_writer.out.append(b"a frame")
    peer.handlers[21].stream.send_response(OK, (b"lone",), 4, TAIL)
    assert written == []
    assert peer.connection.frame_writer.out[0] == b"a frame"
    assert len(peer.connection.frame_writer.out) == 2
    peer.connection.frame_writer.out.clear()
