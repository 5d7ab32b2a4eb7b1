"""Tests of grpcio's blocking client: streams, deadlines, cancellation, gzip, large messages."""

import threading
from collections.abc import Callable, Iterator

import grpc
import pytest
from interop.lookups import (
    INVALID,
    INVALID_FIELD,
    Lookup,
    large_request,
    large_response,
    lookup,
    lookups,
)
from interop.tools import ANSWER_S_MAX, ANY_SIZE
from server.channels import OWN_CONNECTION

from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

KEEPALIVE = (
    ("grpc.keepalive_time_ms", 100),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CONCURRENT_CALLS = 500


@pytest.fixture
def stub(target: str) -> Iterator[EmbeddingServiceStub]:
    with grpc.insecure_channel(target, options=(*OWN_CONNECTION, *ANY_SIZE)) as channel:
        yield EmbeddingServiceStub(channel)


def assert_responses(stub: EmbeddingServiceStub, requested: Lookup) -> None:
    assert stub.Embed(requested.request, timeout=ANSWER_S_MAX) == requested.response


def test_turn_by_turn_stream_is_answered(stub: EmbeddingServiceStub) -> None:
    """Sends each request after the response to the previous one."""
    requested = lookups(30)
    turns = threading.Semaphore(1)

    def requests() -> Iterator[pb.EmbedRequest]:
        for one in requested:
            assert turns.acquire(timeout=ANSWER_S_MAX)
            yield one.request

    stream = stub.EmbedStream(requests(), timeout=ANSWER_S_MAX)
    for one in requested:
        assert next(stream) == one.response
        turns.release()
    assert list(stream) == []
    assert stream.code() is grpc.StatusCode.OK


def test_hundreds_of_pipelined_requests_are_answered_in_order(stub: EmbeddingServiceStub) -> None:
    requested = lookups(600)
    stream = stub.EmbedStream((one.request for one in requested), timeout=ANSWER_S_MAX)
    assert list(stream) == [one.response for one in requested]
    assert stream.code() is grpc.StatusCode.OK


def test_stream_answers_an_invalid_request_in_order(stub: EmbeddingServiceStub) -> None:
    requested = [lookup(1), INVALID, lookup(2)]
    first, wrong, last = stub.EmbedStream((one.request for one in requested), timeout=ANSWER_S_MAX)
    assert (first, last) == (requested[0].response, requested[2].response)
    assert (wrong.error.code, wrong.error.field) == ("INVALID_ARGUMENT", INVALID_FIELD)
    assert wrong == pb.EmbedResponse(error=wrong.error)


def test_short_deadline_is_met_or_reported_as_exceeded(stub: EmbeddingServiceStub) -> None:
    requested = large_response()
    codes = set()
    for timeout_s in (1e-6, 1e-4, 1e-3, 2e-3, 5e-3, ANSWER_S_MAX):
        try:
            assert stub.Embed(requested.request, timeout=timeout_s) == requested.response
            codes.add(grpc.StatusCode.OK)
        except grpc.RpcError as error:
            codes.add(error.code())
    assert codes == {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED}
    assert_responses(stub, lookup(3))


def test_cancelled_calls_do_not_affect_other_calls(stub: EmbeddingServiceStub) -> None:
    requested = lookups(100)
    calls = [stub.Embed.future(one.request) for one in requested]
    for call in calls[::2]:
        call.cancel()
    for one, call in list(zip(requested, calls, strict=True))[1::2]:
        assert call.result(timeout=ANSWER_S_MAX) == one.response
    assert_responses(stub, lookup(4))


def test_cancelled_stream_does_not_affect_other_calls(stub: EmbeddingServiceStub) -> None:
    requested = lookup(5)
    ended = threading.Event()

    def requests() -> Iterator[pb.EmbedRequest]:
        while not ended.is_set():
            yield requested.request

    stream = stub.EmbedStream(requests())
    for _ in range(20):
        assert next(stream) == requested.response
    stream.cancel()
    ended.set()
    with pytest.raises(grpc.RpcError):
        list(stream)
    assert stream.code() is grpc.StatusCode.CANCELLED
    assert_responses(stub, requested)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests_are_answered(
    stub: EmbeddingServiceStub, compression: grpc.Compression
) -> None:
    requested = [lookup(6), large_request()]
    for one in requested:
        response = stub.Embed(one.request, compression=compression, timeout=ANSWER_S_MAX)
        assert response == one.response
    stream = stub.EmbedStream(
        (one.request for one in requested), compression=compression, timeout=ANSWER_S_MAX
    )
    assert list(stream) == [one.response for one in requested]


@pytest.mark.parametrize("make", [large_response, large_request])
def test_multi_megabyte_messages_are_answered(
    stub: EmbeddingServiceStub, make: Callable[[], Lookup]
) -> None:
    requested = make()
    assert max(len(requested.body), len(requested.values.tobytes())) > 2_500_000
    for _ in range(3):
        assert_responses(stub, requested)
    # At most what fits a caller's share of the queue: a slow server takes all at once.
    stream = stub.EmbedStream(iter([requested.request] * 2), timeout=ANSWER_S_MAX)
    assert list(stream) == [requested.response] * 2


def test_calls_with_distinct_metadata_are_answered(stub: EmbeddingServiceStub) -> None:
    """Sends more metadata than any header table holds."""
    for number, requested in enumerate(lookups(100)):
        metadata = [
            (f"x-key-{number}", "v" * 300),
            ("x-trace", f"{number:032x}"),
            ("x-bytes-bin", bytes(range(number))),
        ]
        response = stub.Embed(requested.request, metadata=metadata, timeout=ANSWER_S_MAX)
        assert response == requested.response


def test_500_concurrent_calls_over_one_connection_are_answered(stub: EmbeddingServiceStub) -> None:
    """Starts many more calls than a connection may have streams."""
    requested = lookups(CONCURRENT_CALLS)
    calls = [stub.Embed.future(one.request, timeout=ANSWER_S_MAX) for one in requested]
    for one, call in zip(requested, calls, strict=True):
        assert call.result() == one.response


def test_frequent_keepalive_pings_do_not_end_the_connection(target: str) -> None:
    """Sends ten pings next to a waiting stream, which the server must not count as too many."""
    requested = lookup(7)
    turn = threading.Semaphore(1)

    def requests() -> Iterator[pb.EmbedRequest]:
        for _ in range(2):
            assert turn.acquire(timeout=ANSWER_S_MAX)
            yield requested.request

    with grpc.insecure_channel(target, options=(*OWN_CONNECTION, *KEEPALIVE)) as channel:
        stream = EmbeddingServiceStub(channel).EmbedStream(requests(), timeout=ANSWER_S_MAX)
        assert next(stream) == requested.response
        assert not threading.Event().wait(timeout=1.0)  # time for the pings
        turn.release()
        assert list(stream) == [requested.response]
        assert stream.code() is grpc.StatusCode.OK
