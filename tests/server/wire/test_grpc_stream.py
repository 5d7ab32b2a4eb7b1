"""Tests of EmbedStream on both gRPC servers: responses and failures in order, and bounded reads."""

import asyncio

import grpc
import numpy as np
import pytest
from server.fake_engine import FakeEngine
from server.live import GRPC_SERVERS, IN_THREAD, Live
from server.waiting import until

from embedserve.wire.grpc.embed_stream import REQUESTS_MAX
from embedserve_proto import embedding_pb2 as pb

LIMITS = IN_THREAD


@pytest.fixture(params=GRPC_SERVERS)
def grpc_server(request: pytest.FixtureRequest) -> str:
    server: str = request.param
    return server


def request_for(user: int) -> pb.EmbedRequest:
    return pb.EmbedRequest(keys=["user"], ids=[user], lengths=[1])


def user_vector(response: pb.EmbedResponse) -> list[float]:
    values: list[float] = np.frombuffer(response.values, "<f4")[:4].tolist()
    return values


async def test_stream_alternates_requests_and_responses(live: Live, engine: FakeEngine) -> None:
    call = live.stub.EmbedStream()
    for user in (3, 1, 2):
        await call.write(request_for(user))
        assert user_vector(await call.read()) == engine.tables["t_user"][user].tolist()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_pipelining_beyond_the_window_loses_no_request(
    live: Live, engine: FakeEngine
) -> None:
    count = 3 * REQUESTS_MAX
    engine.hold()
    running = asyncio.ensure_future(live.stub.Embed(request_for(1)))
    await until(lambda: engine.lookups)
    call = live.stub.EmbedStream(request_for(i % 7) for i in range(count))
    # The server leaves requests beyond the window unread.
    await until(lambda: live.queued() == REQUESTS_MAX)
    await asyncio.sleep(0.1)
    assert live.queued() == REQUESTS_MAX
    engine.release()
    await running
    responses = [user_vector(response) async for response in call]
    assert responses == [engine.tables["t_user"][i % 7].tolist() for i in range(count)]
    assert engine.lookups[1].batch_size == REQUESTS_MAX


async def test_cancelled_stream_with_a_full_window_leaves_the_queue(
    live: Live, engine: FakeEngine
) -> None:
    engine.hold()
    running = asyncio.ensure_future(live.stub.Embed(request_for(1)))
    await until(lambda: engine.lookups)
    call = live.stub.EmbedStream(request_for(2) for _ in range(2 * REQUESTS_MAX))
    await until(lambda: live.queued() == REQUESTS_MAX)
    await asyncio.sleep(0.05)
    call.cancel()
    await until(lambda: live.queued() == 0)
    engine.release()
    await running
    await live.stub.Embed(request_for(3))
    assert [lookup.ids.tolist() for lookup in engine.lookups] == [[1], [3]]


async def test_empty_stream_ends_immediately(live: Live) -> None:
    assert [response async for response in live.stub.EmbedStream(iter([]))] == []
