"""Tests of grpcio's asyncio client: unary calls, streams, cancellation, gzip, concurrent calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from interop.lookups import large_answer, large_request, lookup, lookups
from server.channels import OWN_CONNECTION

from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

ANSWER_S_MAX = 60
ANY_SIZE = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


@pytest.fixture
async def stub(target: str) -> AsyncIterator[EmbeddingServiceStub]:
    options = (*OWN_CONNECTION, *ANY_SIZE)
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        yield EmbeddingServiceStub(channel)


async def test_500_calls_at_once_over_one_connection(stub: EmbeddingServiceStub) -> None:
    asked = lookups(500)
    calls = [stub.Embed(one.request, timeout=ANSWER_S_MAX) for one in asked]
    assert await asyncio.gather(*calls) == [one.answer for one in asked]


async def test_large_messages_and_small_ones_at_once(stub: EmbeddingServiceStub) -> None:
    asked = [large_answer(), *lookups(20), large_request(), *lookups(20, 20)]
    calls = [stub.Embed(one.request, timeout=ANSWER_S_MAX) for one in asked]
    assert await asyncio.gather(*calls) == [one.answer for one in asked]


async def test_a_stream_in_turns(stub: EmbeddingServiceStub) -> None:
    stream = stub.EmbedStream(timeout=ANSWER_S_MAX)
    for one in lookups(30):
        await stream.write(one.request)
        assert await stream.read() == one.answer
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
async def test_pipelined_streams_beside_each_other(
    stub: EmbeddingServiceStub, compression: grpc.Compression
) -> None:
    async def ask(first_seed: int) -> None:
        asked = lookups(200, first_seed)
        requests = (one.request for one in asked)
        stream = stub.EmbedStream(requests, compression=compression, timeout=ANSWER_S_MAX)
        assert [answer async for answer in stream] == [one.answer for one in asked]

    await asyncio.gather(*(ask(1000 * number) for number in range(8)))


async def test_cancelled_calls_and_streams_leave_the_server_to_the_others(
    stub: EmbeddingServiceStub,
) -> None:
    asked = lookups(100)
    calls = [stub.Embed(one.request, timeout=ANSWER_S_MAX) for one in asked]
    stream = stub.EmbedStream()
    await stream.write(asked[0].request)
    assert await stream.read() == asked[0].answer
    stream.cancel()
    for call in calls[1::2]:
        call.cancel()
    assert await asyncio.gather(*calls[::2]) == [one.answer for one in asked[::2]]
    with pytest.raises(asyncio.CancelledError):
        await stream.read()
    assert await stream.code() is grpc.StatusCode.CANCELLED
    assert await stub.Embed(lookup(1).request, timeout=ANSWER_S_MAX) == lookup(1).answer
