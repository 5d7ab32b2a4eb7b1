"""Tests of bidirectional streams: flow control, drain, errors, and bounded responses."""

import gzip
from dataclasses import replace
from time import perf_counter
from unittest.mock import Mock

import pytest
from server.codecs import PROTOBUF
from server.fake_engine import FakeEngine
from server.pipelines import outcomes_of
from server.waiting import until
from server.wire.grpc.grpc_peer import (
    BODY_MAX,
    EMBED,
    MESSAGE,
    NO_HEADERS,
    STREAM,
    WATCH,
    GrpcPeer,
    framed_compressed,
    outcomes,
    request_headers,
)
from server.wire.http2.peer import Peer, body_of, data, has_ended, resets, update

from embedserve.lookup_types import ResponseChunks
from embedserve.pipeline import RequestOptions, RequestPipeline
from embedserve.wire.grpc import grpc_framing
from embedserve.wire.grpc.calls import BidiCall
from embedserve.wire.grpc.embed_stream import DRAIN_STREAM_S, EmbedStream, StreamedResponse
from embedserve.wire.grpc.grpc_framing import framed
from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http2.request_headers import ResolvedRoute
from embedserve.wire.http_stream import Headers
from embedserve_proto import embedding_pb2 as pb


@pytest.mark.parametrize("rest", [b"\0", b"\0\0\0\0\5ab", b"\2\0\0\0\1a"])
async def test_stream_that_ends_in_an_incomplete_or_invalid_message_fails(
    peer: GrpcPeer, rest: bytes
) -> None:
    peer.call(1, STREAM, framed(MESSAGE) + rest)
    await peer.wait_for_end(1)
    assert peer.status(1)[0] == 13


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_invalid_message_ends_the_stream_after_the_responses_to_earlier_ones(
    peer: GrpcPeer, held_engine: FakeEngine, encoding: str
) -> None:
    """An invalid compressed message is decompressed in the codec thread."""
    invalid, code, name = (1 << 30).to_bytes(5, "big"), 8, "RESOURCE_EXHAUSTED"
    if encoding == "gzip":
        invalid = framed_compressed(gzip.compress(bytes(BODY_MAX))[:-1])
        code, name = 13, "INVALID_ARGUMENT"
    peer.call(
        1,
        STREAM,
        framed(MESSAGE) + invalid + framed(MESSAGE),
        more=[(b"grpc-encoding", encoding.encode())],
    )
    await until(lambda: held_engine.lookups)
    peer.take()
    assert 1 not in peer.trailers
    held_engine.release()
    await peer.wait_for_end(1)
    assert len(peer.messages(1)) == 1
    assert peer.status(1)[0] == code
    assert (outcomes(peer)["OK"], outcomes(peer)[name]) == (1, 1)


@pytest.mark.parametrize(
    ("invalid", "code"), [((1 << 30).to_bytes(5, "big"), 8), (b"\0\0\0\0\5ab", 13)]
)
async def test_invalid_message_ends_a_watch(peer: GrpcPeer, invalid: bytes, code: int) -> None:
    peer.call(1, WATCH, framed(b"") + invalid)
    await peer.wait_for_end(1)
    assert peer.status(1)[0] == code


async def test_unexpected_error_ends_a_stream_that_waits_for_responses(
    peer: GrpcPeer, held_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.call(1, STREAM, framed(MESSAGE), is_end=False)
    await until(lambda: held_engine.lookups)
    monkeypatch.setattr(
        peer.pipeline, "submit", Mock(side_effect=ZeroDivisionError("secret of the server"))
    )
    peer.send(data(1, framed(MESSAGE)))
    await peer.wait_for_end(1)
    assert peer.status(1)[0] == 13
    held_engine.release()
    peer.call(3, EMBED)
    await peer.wait_for_end(3)
    assert peer.messages(1) == []


async def test_stream_with_an_error_that_cannot_be_written_is_reset(
    peer: GrpcPeer, held_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        StreamedResponse, "write_error", Mock(side_effect=ZeroDivisionError("secret of the server"))
    )
    peer.call(1, STREAM, framed(MESSAGE), is_end=False)
    await until(lambda: held_engine.lookups)
    frames = peer.send(data(1, framed(b"no message")))
    assert resets(frames) == [(1, ErrorCode.INTERNAL_ERROR)]
    assert outcomes(peer) == {"INVALID_ARGUMENT": 1, "CANCELLED": 1}


async def test_stream_with_a_response_that_cannot_be_written_is_reset(
    peer: GrpcPeer, held_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that later responses do not take the place of the missing one."""
    write = BidiCall.write
    failing = Mock(side_effect=[None, ZeroDivisionError("secret of the server"), None])

    def sometimes_write(call: BidiCall, chunks: ResponseChunks, nbytes: int) -> None:
        failing()
        write(call, chunks, nbytes)

    monkeypatch.setattr(BidiCall, "write", sometimes_write)
    peer.call(1, STREAM, framed(MESSAGE) * 3, is_end=False)
    await until(lambda: held_engine.lookups)
    held_engine.release()
    await until(lambda: sum(outcomes(peer).values()) == 3)
    assert resets(peer.take()) == [(1, ErrorCode.INTERNAL_ERROR)]
    assert outcomes(peer) == {"OK": 1, "INTERNAL": 1, "CANCELLED": 1}


async def test_stream_blocked_by_its_window_does_not_block_other_calls(
    peer: GrpcPeer, engine: FakeEngine
) -> None:
    large = pb.EmbedRequest(keys=["user"], ids=[1] * 3000, lengths=[1] * 3000).SerializeToString()
    peer.call(1, STREAM, framed(large)[:16000], framed(large)[16000:])
    peer.send(update(0, 1 << 20))
    await until(lambda: engine.lookups)
    await until(lambda: len(body_of([*peer.seen, *peer.take()], 1)) >= 65535)
    peer.call(3, EMBED, framed(MESSAGE))
    await peer.wait_for_end(3)
    assert peer.status(3) == (0, "")
    assert 1 not in peer.trailers
    peer.send(update(1, 1 << 20))
    await peer.wait_for_end(1)
    assert pb.EmbedResponse.FromString(peer.messages(1)[0]).batch_size == 3000


async def test_drain_answers_received_messages_and_ends_the_stream(
    peer: GrpcPeer, held_engine: FakeEngine
) -> None:
    peer.call(1, STREAM, framed(MESSAGE), is_end=False)
    await until(lambda: held_engine.lookups)
    peer.connection.shutdown.start_drain()
    peer.send(data(1, framed(MESSAGE)))  # it was in flight
    peer.connection.check_time(perf_counter() + DRAIN_STREAM_S + 1)
    peer.send(data(1, framed(MESSAGE)))
    assert 1 not in peer.trailers
    held_engine.release()
    await peer.wait_for_end(1)
    assert len(peer.messages(1)) == 2
    assert peer.status(1) == (14, "draining before the stop")
    assert peer.trailers[1][b"retry-after"] == b"1"


class BrokenStream(BidiCall):
    """Fails at each message."""

    def take(self, message: bytes) -> None:
        raise ZeroDivisionError("secret of the server")


def test_unexpected_error_ends_only_its_own_stream(caplog: pytest.LogCaptureFixture) -> None:
    messages: list[bytes] = []

    class Stream(BidiCall):
        def take(self, message: bytes) -> None:
            messages.append(message)

    def open_request(headers: Headers) -> ResolvedRoute:
        return ResolvedRoute(
            lambda stream: (BrokenStream if stream.id == 1 else Stream)(NO_HEADERS, stream),
            None,
        )

    peer = Peer(open_request)
    first, second = (
        peer.send(
            peer.headers(number, request_headers(STREAM), is_end=False), data(number, framed(b"x"))
        )
        for number in (1, 3)
    )
    assert (resets(first), resets(second)) == ([], [])
    for _ in range(2):
        peer.connection.check_time(perf_counter())
    assert resets(peer.take()) == [(1, ErrorCode.NO_ERROR)]
    peer.send(data(3, framed(b"x")))
    assert messages == [b"x", b"x"]
    end = dict(peer.response_headers(first[0]))
    assert (end[b"grpc-status"], b"secret" in end[b"grpc-message"]) == (b"13", False)
    assert caplog.text.count("ZeroDivisionError: secret of the server") == 1


@pytest.mark.parametrize("is_compressed", [False, True])
async def test_messages_in_flight_are_bounded_by_response_bytes(
    pipeline: RequestPipeline,
    held_engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    is_compressed: bool,
) -> None:
    """The sizes of responses to compressed messages are unknown until a thread has decoded them."""
    metrics = pipeline.metrics.protocols["grpc"]
    options = RequestOptions("", PROTOBUF, PROTOBUF, None, metrics)
    nbytes = 3 * 36  # a response is 9 float32 values
    known, message = NO_HEADERS, framed(MESSAGE)
    if is_compressed:
        monkeypatch.setattr(grpc_framing, "INLINE_MESSAGE_BYTES_MAX", 0)
        known = replace(NO_HEADERS, encoding=b"gzip")
        message = framed_compressed(gzip.compress(MESSAGE))

    def open_request(headers: Headers) -> ResolvedRoute:
        return ResolvedRoute(
            lambda stream: EmbedStream(options, pipeline, known, stream, nbytes), None
        )

    peer = Peer(open_request)
    count = 20
    peer.send(peer.headers(1, request_headers(STREAM), is_end=False))
    peer.send(data(1, message))
    await until(lambda: held_engine.lookups)
    peer.send(data(1, message * (count - 1), is_end=True))
    queue = pipeline.metrics.models["shop"].count_queue
    if is_compressed:
        await until(lambda: queue()[0] == 2)
    assert queue()[0] == 2
    held_engine.release()
    # Responses that are not yet written count, too.
    await until(lambda: has_ended([*peer.take(), *peer.seen], 1))
    assert outcomes_of(metrics) == {"OK": count}
    assert sum(lookup.batch_size for lookup in held_engine.lookups) == count
    assert max(lookup.batch_size for lookup in held_engine.lookups) <= 3
