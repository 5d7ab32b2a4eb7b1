"""Tests of grpcio's asyncio client: unary calls, streams, cancellation, gzip, concurrent calls."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from interop.lookups import large_request, large_response, lookup, lookups
from interop.tools import ANSWER_S_MAX, ANY_SIZE
from server.channels import OWN_CONNECTION

from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub


@pytest.fixture
async def stub(target: str) -> AsyncIterator[EmbeddingServiceStub]:
    options = (*OWN_CONNECTION, *ANY_SIZE)
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        yield EmbeddingServiceStub(channel)


async def test_500_concurrent_calls_over_one_connection_are_answered(
    stub: EmbeddingServiceStub,
) -> None:
    requested = lookups(500)
    calls = [stub.Embed(one.request, timeout=ANSWER_S_MAX) for one in requested]
    assert await asyncio.gather(*calls) == [one.response for one in requested]


async def test_concurrent_large_and_small_messages_are_answered(stub: EmbeddingServiceStub) -> None:
    requested = [large_response(), *lookups(20), large_request(), *lookups(20, 20)]
    calls = [stub.Embed(one.request, timeout=ANSWER_S_MAX) for one in requested]
    assert await asyncio.gather(*calls) == [one.response for one in requested]


async def test_turn_by_turn_stream_is_answered(stub: EmbeddingServiceStub) -> None:
    stream = stub.EmbedStream(timeout=ANSWER_S_MAX)
    for one in lookups(30):
        await stream.write(one.request)
        assert await stream.read() == one.response
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
async def test_concurrent_pipelined_streams_are_answered_in_order(
    stub: EmbeddingServiceStub, compression: grpc.Compression
) -> None:
    async def check_stream(first_seed: int) -> None:
        requested = lookups(200, first_seed)
        requests = (one.request for one in requested)
        stream = stub.EmbedStream(requests, compression=compression, timeout=ANSWER_S_MAX)
        assert [response async for response in stream] == [one.response for one in requested]

    await asyncio.gather(*(check_stream(1000 * number) for number in range(8)))


async def test_cancelled_calls_and_streams_do_not_affect_other_calls(
    stub: EmbeddingServiceStub,
) -> None:
    requested = lookups(100)
    calls = [stub.Embed(one.request, timeout=ANSWER_S_MAX) for one in requested]
    stream = stub.EmbedStream()
    await stream.write(requested[0].request)
    assert await stream.read() == requested[0].response
    stream.cancel()
    for call in calls[1::2]:
        call.cancel()
    assert await asyncio.gather(*calls[::2]) == [one.response for one in requested[::2]]
    with pytest.raises(asyncio.CancelledError):
        await stream.read()
    assert await stream.code() is grpc.StatusCode.CANCELLED
    assert await stub.Embed(lookup(1).request, timeout=ANSWER_S_MAX) == lookup(1).response
