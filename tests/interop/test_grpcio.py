"""Tests of grpcio's blocking client: unary calls, streams, deadlines, errors, large messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc
import pytest
from interop.lookups import (
    SERVICE,
    WRONG,
    WRONG_FIELD,
    Lookup,
    large_answer,
    large_request,
    lookup,
    lookups,
)
from server.channels import OWN_CONNECTION

from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

ANSWER_S_MAX = 60
"""Timeout in seconds of a call that must succeed."""
ANY_SIZE = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 100),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
AT_ONCE = 500


@pytest.fixture
def channel(target: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(target, options=(*OWN_CONNECTION, *ANY_SIZE)) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> EmbeddingServiceStub:
    return EmbeddingServiceStub(channel)


def assert_answers(stub: EmbeddingServiceStub, asked: Lookup) -> None:
    assert stub.Embed(asked.request, timeout=ANSWER_S_MAX) == asked.answer


def test_unary_calls_are_answered(stub: EmbeddingServiceStub) -> None:
    for asked in lookups(50):
        assert_answers(stub, asked)


def test_models_are_listed(stub: EmbeddingServiceStub) -> None:
    listed = stub.ListModels(pb.ListModelsRequest(), timeout=ANSWER_S_MAX)
    assert [(model.model, model.version) for model in listed.models] == [("shop", 1)]
    assert stub.GetModel(pb.GetModelRequest(model="shop")) == listed.models[0]


def test_a_stream_in_turns(stub: EmbeddingServiceStub) -> None:
    """Sends each request after the response to the previous one."""
    asked = lookups(30)
    turns = threading.Semaphore(1)

    def requests() -> Iterator[pb.EmbedRequest]:
        for one in asked:
            assert turns.acquire(timeout=ANSWER_S_MAX)
            yield one.request

    stream = stub.EmbedStream(requests(), timeout=ANSWER_S_MAX)
    for one in asked:
        assert next(stream) == one.answer
        turns.release()
    assert list(stream) == []
    assert stream.code() is grpc.StatusCode.OK


def test_hundreds_of_pipelined_requests_are_answered_in_order(stub: EmbeddingServiceStub) -> None:
    asked = lookups(600)
    stream = stub.EmbedStream((one.request for one in asked), timeout=ANSWER_S_MAX)
    assert list(stream) == [one.answer for one in asked]
    assert stream.code() is grpc.StatusCode.OK


def test_a_stream_of_nothing_ends_well(stub: EmbeddingServiceStub) -> None:
    stream = stub.EmbedStream(iter(()), timeout=ANSWER_S_MAX)
    assert list(stream) == []
    assert stream.code() is grpc.StatusCode.OK


def test_a_stream_answers_a_wrong_request_in_its_place(stub: EmbeddingServiceStub) -> None:
    asked = [lookup(1), WRONG, lookup(2)]
    first, wrong, last = stub.EmbedStream((one.request for one in asked), timeout=ANSWER_S_MAX)
    assert (first, last) == (asked[0].answer, asked[2].answer)
    assert (wrong.error.code, wrong.error.field) == ("INVALID_ARGUMENT", WRONG_FIELD)
    assert wrong == pb.EmbedResponse(error=wrong.error)


def test_an_error_has_its_status_message_and_field(stub: EmbeddingServiceStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Embed(WRONG.request, timeout=ANSWER_S_MAX)
    error = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{WRONG_FIELD} is 500" in error.details()
    assert dict(error.trailing_metadata())["embedserve-field"] == WRONG_FIELD


def test_an_unknown_model_and_method_are_said_so(
    stub: EmbeddingServiceStub, channel: grpc.Channel
) -> None:
    unknown = pb.EmbedRequest(model="caf\u00e9 100%", keys=["user"], lengths=[0])
    with pytest.raises(grpc.RpcError) as caught:
        stub.Embed(unknown, timeout=ANSWER_S_MAX)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "caf\u00e9 100%" in caught.value.details()
    for path in (f"/{SERVICE}/Nothing", "/no.such.Service/Embed"):
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(path)(b"", timeout=ANSWER_S_MAX)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_short_deadline_passes_or_is_met(stub: EmbeddingServiceStub) -> None:
    asked = large_answer()
    codes = set()
    for timeout_s in (1e-6, 1e-4, 1e-3, 2e-3, 5e-3, ANSWER_S_MAX):
        try:
            assert stub.Embed(asked.request, timeout=timeout_s) == asked.answer
            codes.add(grpc.StatusCode.OK)
        except grpc.RpcError as error:
            codes.add(error.code())
    assert codes == {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED}
    assert_answers(stub, lookup(3))


def test_cancelled_calls_leave_the_server_to_the_others(stub: EmbeddingServiceStub) -> None:
    asked = lookups(100)
    calls = [stub.Embed.future(one.request) for one in asked]
    for call in calls[::2]:
        call.cancel()
    for one, call in list(zip(asked, calls, strict=True))[1::2]:
        assert call.result(timeout=ANSWER_S_MAX) == one.answer
    assert_answers(stub, lookup(4))


def test_a_cancelled_stream_leaves_the_server_to_the_others(stub: EmbeddingServiceStub) -> None:
    asked = lookup(5)
    ended = threading.Event()

    def requests() -> Iterator[pb.EmbedRequest]:
        while not ended.is_set():
            yield asked.request

    stream = stub.EmbedStream(requests())
    for _ in range(20):
        assert next(stream) == asked.answer
    stream.cancel()
    ended.set()
    with pytest.raises(grpc.RpcError):
        list(stream)
    assert stream.code() is grpc.StatusCode.CANCELLED
    assert_answers(stub, asked)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests_are_read(
    stub: EmbeddingServiceStub, compression: grpc.Compression
) -> None:
    asked = [lookup(6), large_request()]
    for one in asked:
        answer = stub.Embed(one.request, compression=compression, timeout=ANSWER_S_MAX)
        assert answer == one.answer
    stream = stub.EmbedStream(
        (one.request for one in asked), compression=compression, timeout=ANSWER_S_MAX
    )
    assert list(stream) == [one.answer for one in asked]


@pytest.mark.parametrize("make", [large_answer, large_request])
def test_messages_of_megabytes(stub: EmbeddingServiceStub, make: Callable[[], Lookup]) -> None:
    asked = make()
    assert max(len(asked.body), len(asked.values.tobytes())) > 2_500_000
    for _ in range(3):
        assert_answers(stub, asked)
    # At most what fits a caller's share of the queue: a slow server takes all at once.
    stream = stub.EmbedStream(iter([asked.request] * 2), timeout=ANSWER_S_MAX)
    assert list(stream) == [asked.answer] * 2


def test_every_call_may_bring_metadata_of_its_own(stub: EmbeddingServiceStub) -> None:
    """Sends more metadata than any header table holds."""
    for number, asked in enumerate(lookups(100)):
        metadata = [
            (f"x-key-{number}", "v" * 300),
            ("x-trace", f"{number:032x}"),
            ("x-bytes-bin", bytes(range(number))),
        ]
        answer = stub.Embed(asked.request, metadata=metadata, timeout=ANSWER_S_MAX)
        assert answer == asked.answer


def test_500_calls_at_once_over_one_connection(stub: EmbeddingServiceStub) -> None:
    """Starts many more calls than a connection may have streams."""
    asked = lookups(AT_ONCE)
    calls = [stub.Embed.future(one.request, timeout=ANSWER_S_MAX) for one in asked]
    for one, call in zip(asked, calls, strict=True):
        assert call.result() == one.answer


def test_keepalive_pings_are_answered(target: str) -> None:
    """Sends ten pings next to a waiting stream, which the server must not count as too many."""
    asked = lookup(7)
    turn = threading.Semaphore(1)

    def requests() -> Iterator[pb.EmbedRequest]:
        for _ in range(2):
            assert turn.acquire(timeout=ANSWER_S_MAX)
            yield asked.request

    with grpc.insecure_channel(target, options=(*OWN_CONNECTION, *KEEPALIVE)) as channel:
        stream = EmbeddingServiceStub(channel).EmbedStream(requests(), timeout=ANSWER_S_MAX)
        assert next(stream) == asked.answer
        assert not threading.Event().wait(timeout=1.0)  # time for the pings
        turn.release()
        assert list(stream) == [asked.answer]
        assert stream.code() is grpc.StatusCode.OK
