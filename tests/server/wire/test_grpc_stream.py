"""EmbedStream: answers in order, failures in their place, no more read than can wait; by both."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest
from server.fake_engine import FakeEngine
from server.live import GRPC_SERVERS, IN_THREAD, Live
from server.waiting import until

from embedserve.codec import protobuf_codec
from embedserve.config import Limits
from embedserve.wire.grpc.embed_stream import REQUESTS_MAX
from embedserve_proto import embedding_pb2 as pb


@pytest.fixture
def limits() -> Limits:
    return IN_THREAD


@pytest.fixture(params=GRPC_SERVERS)
def grpc_server(request: pytest.FixtureRequest) -> str:
    server: str = request.param
    return server


def request_for(user: int) -> pb.EmbedRequest:
    return pb.EmbedRequest(keys=["user"], ids=[user], lengths=[1])


def user_vector(answer: pb.EmbedResponse) -> list[float]:
    values: list[float] = np.frombuffer(answer.values, "<f4")[:4].tolist()
    return values


async def test_answers_come_in_order_with_a_failure_in_its_place(
    live: Live, engine: FakeEngine
) -> None:
    users = [0, 1, 99, 3]
    requests = [request_for(user) for user in users]
    requests.insert(2, pb.EmbedRequest(model="shoes", keys=["user"], lengths=[0]))
    answers = [answer async for answer in live.stub.EmbedStream(iter(requests))]
    assert [answer.error.code for answer in answers] == [
        "",
        "",
        "NOT_FOUND",
        "INVALID_ARGUMENT",
        "",
    ]
    assert answers[3].error.field == "features.user[0][0]"
    for place, user in ((0, 0), (1, 1), (4, 3)):
        assert user_vector(answers[place]) == engine.tables["t_user"][user].tolist()
    assert live.outcomes("grpc") == {"OK": 3, "NOT_FOUND": 1, "INVALID_ARGUMENT": 1}


async def test_requests_that_take_long_to_decode_keep_their_place(
    live: Live, engine: FakeEngine
) -> None:
    large = [1, 2] * protobuf_codec.NOW_BYTES_MAX
    wrong = [*large[:-1], 99]
    requests = [
        request_for(3),
        pb.EmbedRequest(keys=["user"], ids=large, lengths=[len(large)]),
        request_for(4),
        pb.EmbedRequest(keys=["user"], ids=wrong, lengths=[len(wrong)]),
        request_for(5),
    ]
    answers = [answer async for answer in live.stub.EmbedStream(iter(requests))]
    assert [answer.error.code for answer in answers] == ["", "", "", "INVALID_ARGUMENT", ""]
    for place, user in ((0, 3), (2, 4), (4, 5)):
        assert user_vector(answers[place]) == engine.tables["t_user"][user].tolist()
    expected = engine.expected({"user": [large]})[0, :4]
    assert user_vector(answers[1]) == expected.tolist()
    assert live.outcomes("grpc") == {"OK": 4, "INVALID_ARGUMENT": 1}


async def test_a_stream_takes_turns_with_its_caller(live: Live, engine: FakeEngine) -> None:
    call = live.stub.EmbedStream()
    for user in (3, 1, 2):
        await call.write(request_for(user))
        assert user_vector(await call.read()) == engine.tables["t_user"][user].tolist()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_more_requests_than_the_window_are_pipelined_and_none_is_lost(
    live: Live, engine: FakeEngine
) -> None:
    count = 3 * REQUESTS_MAX
    engine.hold()
    running = asyncio.ensure_future(live.stub.Embed(request_for(1)))
    await until(lambda: engine.lookups)
    call = live.stub.EmbedStream(request_for(i % 7) for i in range(count))
    # What is past the window is left unread.
    await until(lambda: live.queued() == REQUESTS_MAX)
    await asyncio.sleep(0.1)
    assert live.queued() == REQUESTS_MAX
    engine.release()
    await running
    answers = [user_vector(answer) async for answer in call]
    assert answers == [engine.tables["t_user"][i % 7].tolist() for i in range(count)]
    assert engine.lookups[1].batch_size == REQUESTS_MAX


async def test_a_cancelled_stream_leaves_the_queue(live: Live, engine: FakeEngine) -> None:
    engine.hold()
    running = asyncio.ensure_future(live.stub.Embed(request_for(1)))
    await until(lambda: engine.lookups)
    call = live.stub.EmbedStream()
    for _ in range(10):
        await call.write(request_for(2))
    await until(lambda: live.queued() == 10)
    call.cancel()
    await asyncio.sleep(0.05)
    engine.release()
    await running
    await until(lambda: live.queued() == 0)
    assert live.outcomes("grpc") == {"CANCELLED": 10, "OK": 1}
    await live.stub.Embed(request_for(3))
    assert [lookup.ids.tolist() for lookup in engine.lookups] == [[1], [3]]


async def test_a_cancelled_stream_with_a_full_window_leaves_the_queue(
    live: Live, engine: FakeEngine
) -> None:
    engine.hold()
    running = asyncio.ensure_future(live.stub.Embed(request_for(1)))
    await until(lambda: engine.lookups)
    call = live.stub.EmbedStream(request_for(2) for _ in range(2 * REQUESTS_MAX))
    await until(lambda: live.queued() == REQUESTS_MAX)
    await asyncio.sleep(0.05)
    call.cancel()
    await asyncio.sleep(0.05)
    engine.release()
    await running
    await live.stub.Embed(request_for(3))
    assert [lookup.ids.tolist() for lookup in engine.lookups] == [[1], [3]]


async def test_a_streams_deadline_holds_for_its_requests(live: Live, engine: FakeEngine) -> None:
    engine.hold()
    running = asyncio.ensure_future(live.stub.Embed(request_for(1)))
    await until(lambda: engine.lookups)
    call = live.stub.EmbedStream(iter([request_for(2)]), timeout=0.05)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [answer async for answer in call]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    engine.release()
    await running
    await live.stub.Embed(request_for(3))
    assert [lookup.ids.tolist() for lookup in engine.lookups] == [[1], [3]]


async def test_an_empty_stream_ends_at_once(live: Live) -> None:
    assert [answer async for answer in live.stub.EmbedStream(iter([]))] == []
