"""Tests that a request in one chunk has the same effect as a request that arrives byte by byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame
from server.wire.http2.peer import (
    POST,
    Peer,
    RecordingHandler,
    data,
    of,
    resets,
)

from embedserve.wire.http2.control import STREAMS_MAX
from embedserve.wire.http2.frames import FRAME_BYTES_MAX, ErrorCode
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http2.inbound_flow_control import STREAM_WINDOW
from embedserve.wire.http2.request_headers import ResolvedRoute
from embedserve.wire.http2.stream import Stream
from embedserve.wire.http2.upload_budget import UploadBudget
from embedserve.wire.http_stream import Headers
from embedserve.wire.wire_server import UPLOAD_BYTES_MAX

OK = encode([(b":status", b"200")])
TAIL = encode([(b"grpc-status", b"0")])
DECLARED: Headers = [*POST, (b"content-length", b"5")]
MALFORMED: Headers = [*POST, (b"Upper", b"case")]
FULL = b"f" * FRAME_BYTES_MAX


def head(peer: Peer, stream_id: int, headers: Headers = POST) -> HeadersFrame:
    return peer.headers(stream_id, headers, is_end=False)


def whole(peer: Peer, stream_id: int, body: bytes, headers: Headers = POST) -> list[Frame]:
    return [head(peer, stream_id, headers), data(stream_id, body, is_end=True)]


def knowing_peer(uploads: UploadBudget | None = None) -> Peer:
    """Returns a peer that has sent all the headers before, so that its table no longer changes."""
    peer = Peer(uploads=uploads)
    for number, headers in enumerate((POST, DECLARED, MALFORMED) * 2):
        peer.send(head(peer, 2 * number + 1, headers), data(2 * number + 1, b"12345", is_end=True))
    for handler in list(peer.handlers.values()):
        handler.stream.answer(OK, (b"x",), 1, TAIL)
    peer.take()
    peer.handlers.clear()
    return peer


Sent = Callable[[Peer], list[Frame]]
CASES: dict[str, Sent] = {
    "a body": lambda peer: whole(peer, 21, b"12345"),
    "no byte of a body": lambda peer: whole(peer, 21, b""),
    "the largest frame": lambda peer: whole(peer, 21, b"x" * 16384),
    "a frame that is too large": lambda peer: whole(peer, 21, b"x" * 16385),
    "as declared": lambda peer: whole(peer, 21, b"12345", DECLARED),
    "less than declared": lambda peer: whole(peer, 21, b"1234", DECLARED),
    "more than declared": lambda peer: whole(peer, 21, b"123456", DECLARED),
    "malformed": lambda peer: whole(peer, 21, b"12345", MALFORMED),
    "padded": lambda peer: [head(peer, 21), data(21, b"12345", is_end=True, padding=3)],
    "a body that goes on": lambda peer: [
        head(peer, 21),
        data(21, b"123"),
        data(21, b"45", is_end=True),
    ],
    "two": lambda peer: [*whole(peer, 21, b"first"), *whole(peer, 23, b"second")],
    "the body of another stream": lambda peer: [head(peer, 21), data(23, b"12345", is_end=True)],
    "a number that was passed over": lambda peer: [
        *whole(peer, 23, b"12345"),
        *whole(peer, 21, b"12345"),
    ],
    "an even number": lambda peer: whole(peer, 22, b"12345"),
    "more after its end": lambda peer: [
        *whole(peer, 21, b"12345"),
        data(21, b"67890", is_end=True),
    ],
    "full frames": lambda peer: full(peer, data(21, b"rest", is_end=True)),
    "full frames and an empty one": lambda peer: full(peer, data(21, b"", is_end=True)),
    "full frames that go on": lambda peer: full(peer, data(21, b"more")),
    "full frames, the last of another stream": lambda peer: full(peer, data(23, FULL)),
    "full frames, the last padded": lambda peer: full(
        peer, data(21, b"rest", is_end=True, padding=9)
    ),
    "full frames, the last too large": lambda peer: full(peer, data(21, FULL + b"f")),
    "full frames and one after their end": lambda peer: full(
        peer, data(21, FULL, is_end=True), data(21, b"more")
    ),
    "full frames and trailers": lambda peer: full(
        peer, peer.headers(21, [(b"a", b"trailer")], is_end=True)
    ),
    "full frames, more than declared": lambda peer: [
        head(peer, 21, DECLARED),
        data(21, FULL),
        data(21, FULL, is_end=True),
    ],
}


def full(peer: Peer, *last: Frame) -> list[Frame]:
    return [head(peer, 21), data(21, FULL), data(21, FULL), *last]


@pytest.mark.parametrize("case", CASES)
def test_whole_is_as_byte_by_byte(case: str) -> None:
    answers = []
    for is_whole in (True, False):
        peer = knowing_peer()
        sent = b"".join(frame.serialize() for frame in CASES[case](peer))
        pieces = [sent] if is_whole else [sent[i : i + 1] for i in range(len(sent))]
        frames = [frame for piece in pieces for frame in peer.send(piece)]
        told = {
            number: (handler.body, handler.is_whole, handler.resets)
            for number, handler in peer.handlers.items()
        }
        connection = peer.connection
        left = sorted(connection.streams), connection.flow_control.window, connection.is_over
        answers.append(([frame.serialize() for frame in frames], told, left))
    assert answers[0] == answers[1]


def test_streams_over_the_limit_are_refused() -> None:
    peer = knowing_peer()
    numbers = range(21, 21 + 2 * (STREAMS_MAX + 1), 2)
    peer.send(*(one for n in numbers for one in whole(peer, n, b"body")))
    assert resets(peer.seen)[-1] == (numbers[-1], ErrorCode.REFUSED_STREAM)
    assert [handler.body for handler in peer.handlers.values()] == [b"body"] * STREAMS_MAX


def test_none_is_taken_while_draining() -> None:
    peer = knowing_peer()
    peer.connection.shutdown.finish()
    peer.send(*whole(peer, 21, b"body"))
    assert peer.handlers == {}
    assert peer.connection.is_over


def test_one_beyond_the_connections_window_ends_it() -> None:
    peer = knowing_peer(UploadBudget(UPLOAD_BYTES_MAX, lambda: False))
    peer.holds = True
    number = 21
    while peer.connection.flow_control.window >= 16384:
        # Incomplete bodies are held, and their window is not returned.
        peer.send(head(peer, number), data(number, b"x" * 16384))
        number += 2
    (ended,) = of(peer.send(*whole(peer, number, b"x" * 16384)), GoAwayFrame)
    assert ended.error_code == ErrorCode.FLOW_CONTROL_ERROR
    assert not peer.handlers[number].is_whole


def test_full_frames_are_given_as_one_as_far_as_they_have_come() -> None:
    peer = knowing_peer()
    first, *others = [frame.serialize() for frame in full(peer, *[data(21, FULL)] * 2)]
    sent = b"".join(others)
    peer.send(first, sent[:-1])
    assert peer.handlers[21].pieces == [3 * len(FULL)]
    peer.send(sent[-1:], data(21, FULL), data(21, b"", is_end=True))
    assert peer.handlers[21].pieces == [3 * len(FULL), 2 * len(FULL)]
    assert peer.handlers[21].is_whole


def test_full_frames_beyond_the_streams_window_end_it() -> None:
    peer = knowing_peer()
    peer.holds = True
    frames = STREAM_WINDOW // len(FULL) + 1
    answered = peer.send(head(peer, 21), *[data(21, FULL)] * frames)
    assert resets(answered) == [(21, ErrorCode.FLOW_CONTROL_ERROR)]
    assert peer.handlers[21].resets == 1


def test_what_is_answered_by_its_head_is_told_no_body() -> None:
    handlers = []

    def refuse(stream: Stream) -> RecordingHandler:
        stream.answer(OK, (b"no",), 2, b"")
        handlers.append(RecordingHandler(stream))
        return handlers[-1]

    peer = Peer(lambda _: ResolvedRoute(refuse, None))
    for number in (1, 3, 5):
        frames = peer.send(*whole(peer, number, b"body"))
        assert isinstance(frames[0], HeadersFrame)
        assert isinstance(frames[1], DataFrame)
    # The first response announces the use of the client's table, and is not framed immediately.
    assert [handler.body for handler in handlers] == [b"body", b"", b""]
    assert peer.connection.streams == {}


def test_a_lone_answer_is_written_at_once_and_others_together() -> None:
    peer = knowing_peer()
    written: list[bytes] = []
    peer.connection.frame_writer.write = written.append
    peer.send(*whole(peer, 21, b"body"))
    outputs = peer.outputs
    peer.handlers[21].stream.answer(OK, (b"lone",), 4, TAIL)
    assert len(written) == 1
    assert b"lone" in written[0]
    assert (peer.take(), peer.outputs) == ([], outputs)
    for number in (23, 25):
        peer.send(*whole(peer, number, b"body"))
    for number in (23, 25):
        peer.handlers[number].stream.answer(OK, (b"both",), 4, TAIL)
    assert len(written) == 1
    assert peer.outputs > outputs
    assert [frame.stream_id for frame in of(peer.take(), HeadersFrame)] == [23, 23, 25, 25]


def test_a_lone_answer_does_not_pass_what_is_to_be_written() -> None:
    peer = knowing_peer()
    written: list[bytes] = []
    peer.connection.frame_writer.write = written.append
    peer.send(*whole(peer, 21, b"body"))
    peer.connection.frame_writer.out.append(b"a frame")
    peer.handlers[21].stream.answer(OK, (b"lone",), 4, TAIL)
    assert written == []
    assert peer.connection.frame_writer.out[0] == b"a frame"
    assert len(peer.connection.frame_writer.out) == 2
    peer.connection.frame_writer.out.clear()
