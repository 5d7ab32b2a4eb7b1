"""Tests of streams: order, failed items in their places, and every way a stream ends."""

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from client.fake import RESPONSE_S_MAX, FakeModel, SilentModel, grpc_server, pooled

from embedserve_client import (
    AsyncGrpcEmbedClient,
    DeadlineExceeded,
    EmbedResult,
    GrpcEmbedClient,
    InvalidRequest,
    Overloaded,
    ServerError,
    StreamRequest,
    Unavailable,
    UnknownModel,
)


def test_results_arrive_in_the_order_of_the_requests(stream_client: Any) -> None:
    answers = stream_client.stream({"user": [n]} for n in range(100))

    vectors = np.concatenate([answer.result()["user"] for answer in answers])
    np.testing.assert_array_equal(vectors, pooled("user", [[n] for n in range(100)]))


def test_failed_item_keeps_its_place_and_the_stream_continues(stream_client: Any) -> None:
    answers = stream_client.stream(
        [
            {"user": [1]},
            {"user": [[1], [500]]},
            StreamRequest({"user": [1]}, model="books"),
            {"user": [1.5]},
            StreamRequest({"user": [[1, 2]]}, weights={"user": [[1.0, 0.5]]}),
        ]
    )

    first, bad_id, no_model, not_sent, last = answers
    assert first.result()["user"].tolist() == [[2, 3]]
    assert isinstance(bad_id, InvalidRequest)
    assert bad_id.field == "features.user[1]"
    assert isinstance(no_model, UnknownModel)
    assert isinstance(not_sent, InvalidRequest)
    assert str(not_sent) == "features.user[0]: 1.5 is float, not an integer id"
    assert last.result()["user"].tolist() == [[2 + 0.5 * 4, 3 + 0.5 * 5]]


def test_stream_mixes_unpooled_rows_and_pooled_vectors(stream_client: Any) -> None:
    titles = StreamRequest({"title": [["Alien"], []]}, model="sequence")
    rows, pooled_result = stream_client.stream([titles, {"user": [1]}])

    assert rows.result()["title"].values.tolist() == [[3, 4]]
    assert rows.result()["title"].lengths.tolist() == [1, 0]
    assert pooled_result.result()["user"].tolist() == [[2, 3]]


def test_each_stream_item_has_its_own_output_keys(stream_client: Any, model: FakeModel) -> None:
    items = [StreamRequest({"user": [1]}, output_keys=["user"]), {"user": [2]}]
    assert len(stream_client.stream(items)) == 2
    assert [list(request.output_keys) for request in model.requests] == [["user"], []]


def test_each_stream_item_has_its_own_output_dtype(stream_client: Any) -> None:
    halves = StreamRequest({"user": [1]}, output_dtype="float16")
    wrong: Any = StreamRequest({"user": [1]}, output_dtype="int8")  # type: ignore[arg-type]
    first, rejected, whole = stream_client.stream([halves, wrong, {"user": [1]}])

    assert (first.values.dtype, first["user"].tolist()) == (np.float16, [[2, 3]])
    assert isinstance(rejected, InvalidRequest)
    assert str(rejected) == "output_dtype: 'int8' is not float32 or float16"
    assert (whole.values.dtype, whole["user"].tolist()) == (np.float32, [[2, 3]])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_items_that_are_never_sent_have_error_results(stream_client: Any, count: int) -> None:
    answers = stream_client.stream([{"user": "x"}] * count)

    assert [type(answer) for answer in answers] == [InvalidRequest] * count


def test_stream_continues_after_a_tensor_that_numpy_cannot_hold(stream_client: Any) -> None:
    sparse = torch.tensor([1]).to_sparse()
    first, rejected, last = stream_client.stream([{"user": [1]}, {"user": sparse}, {"user": [1]}])

    assert isinstance(rejected, InvalidRequest)
    assert rejected.field == "features.user"
    assert first["user"].tolist() == last["user"].tolist() == [[2, 3]]


def test_stream_ends_at_its_deadline(stream_client: Any, model: FakeModel) -> None:
    model.slow_s = 0.2

    with pytest.raises(DeadlineExceeded):
        stream_client.stream([{"user": [1]}] * 20, timeout_s=0.3)


@pytest.mark.parametrize("after", [0, 1, 5, 10, 20])
def test_abort_by_the_server_ends_the_stream_with_its_error(stream_client: Any, after: int) -> None:
    """Checks that requests in flight do not hide the server's error."""
    abort = StreamRequest({"user": [1]}, model="abort")

    with pytest.raises(Unavailable, match="draining"):
        stream_client.stream([{"user": [1]}, abort, *[{"user": [1]}] * after])


@pytest.mark.parametrize("after", [0, 10])
def test_rejected_stream_reports_retry_after_and_field(stream_client: Any, after: int) -> None:
    full = StreamRequest({"user": [1]}, model="full")

    with pytest.raises(Overloaded, match=r"^the queue is full$") as caught:
        stream_client.stream([full, *[{"user": [1]}] * after])
    assert (caught.value.retry_after_s, caught.value.field) == (7.0, "ids")


@pytest.mark.parametrize("after", [0, 1, 5, 10])
def test_stream_that_the_server_ends_early_raises_server_error(
    stream_client: Any, after: int
) -> None:
    items = [StreamRequest({"user": [1]}, model="cut")] + [{"user": [1]}] * after

    with pytest.raises(ServerError, match="ended the stream before"):
        stream_client.stream(items)


def test_surplus_response_in_a_stream_raises_server_error(stream_client: Any) -> None:
    item = StreamRequest({"user": [1]}, model="twice")

    with pytest.raises(ServerError, match="more answers than it got requests"):
        stream_client.stream([item])


def test_exception_of_the_request_iterable_is_raised(stream_client: Any) -> None:
    def items() -> Iterator[Any]:
        yield {"user": [1]}
        raise OSError("no more lines")

    with pytest.raises(OSError, match="no more lines"):
        stream_client.stream(items())


def test_exit_in_the_request_iterable_reaches_the_reader(stream_client: Any) -> None:
    def items() -> Iterator[Any]:
        yield {"user": [1]}
        sys.exit("line 2 is invalid")

    with pytest.raises(SystemExit, match="line 2 is invalid"):
        stream_client.stream(items(), timeout_s=RESPONSE_S_MAX)
    gc.collect()  # grpc hangs if a process that a later test forks collects the call


def test_result_arrives_before_the_next_request_is_sent(grpc_target: str) -> None:
    """Checks that a caller can wait for one response before it sends its next request."""
    responded = threading.Event()

    def items() -> Iterator[Any]:
        yield {"user": [1]}
        yield {"user": "not sent"}
        assert responded.wait(RESPONSE_S_MAX)
        yield {"user": [2]}

    with GrpcEmbedClient(grpc_target) as client:
        answers = client.embed_stream(items())
        assert next(answers).result()["user"].tolist() == [[2, 3]]
        assert isinstance(next(answers), InvalidRequest)
        responded.set()
        assert next(answers).result()["user"].tolist() == [[4, 5]]
        assert list(answers) == []


def test_stream_to_a_missing_server_raises_unavailable() -> None:
    """The iterable still waits, so no request can report the failure."""
    release = threading.Event()
    released: list[bool] = []

    def items() -> Iterator[Any]:
        released.append(release.wait(RESPONSE_S_MAX))
        yield {"user": [1]}

    with GrpcEmbedClient("127.0.0.1:1") as client, pytest.raises(Unavailable):
        next(client.embed_stream(items()))
    assert released == []
    release.set()


def test_closing_the_iterator_ends_the_call(grpc_target: str, model: FakeModel) -> None:
    model.slow_s = 0.02

    with GrpcEmbedClient(grpc_target) as client:
        answers = client.embed_stream({"user": [1]} for _ in range(10_000))
        assert isinstance(next(answers), EmbedResult)
        answers.close()
        assert model.stream_ended.wait(RESPONSE_S_MAX)
    assert len(model.requests) < 10_000


def test_invalid_stream_timeout_is_rejected_immediately(stream_client: Any) -> None:
    with pytest.raises(ValueError, match="timeout_s: -1 "):
        stream_client.embed_stream([], timeout_s=-1)


async def test_async_iterable_of_requests_is_accepted(grpc_target: str) -> None:
    async def items() -> AsyncIterator[Any]:
        for n in range(10):
            await asyncio.sleep(0)
            yield {"user": [n]}

    async with AsyncGrpcEmbedClient(grpc_target) as client:
        firsts = [answer.result()["user"][0, 0] async for answer in client.embed_stream(items())]

    assert firsts == [2 * n for n in range(10)]


async def test_async_stream_to_a_missing_server_raises_unavailable() -> None:
    async def items() -> AsyncIterator[Any]:
        await asyncio.sleep(2 * RESPONSE_S_MAX)
        yield {"user": [1]}

    async with AsyncGrpcEmbedClient("127.0.0.1:1") as client, asyncio.timeout(RESPONSE_S_MAX):
        with pytest.raises(Unavailable):
            await anext(client.embed_stream(items()))


async def test_deadline_of_a_stream_does_not_cancel_the_task_that_reads_it(
    grpc_target: str,
) -> None:
    """grpc.aio reports a call as cancelled that ends while it sends the end of the requests."""
    async with AsyncGrpcEmbedClient(grpc_target) as client:

        async def read(timeout_s: float) -> None:
            assert [answer async for answer in client.embed_stream([], timeout_s=timeout_s)] == []

        reads = [read((1 + n) * 1e-5) for n in range(50)]
        ended = await asyncio.gather(*reads, return_exceptions=True)
    assert {type(error) for error in ended} <= {DeadlineExceeded, type(None)}


async def test_no_item_is_taken_after_the_server_has_ended_a_stream(grpc_target: str) -> None:
    """The items come from a queue, where the next one stays for another stream."""
    queue: asyncio.Queue[StreamRequest] = asyncio.Queue()
    closed = asyncio.Event()

    async def items() -> AsyncIterator[Any]:
        try:
            while True:
                yield await queue.get()
        finally:
            closed.set()

    queue.put_nowait(StreamRequest({"user": [1]}, model="abort"))
    async with AsyncGrpcEmbedClient(grpc_target) as client, asyncio.timeout(RESPONSE_S_MAX):
        with pytest.raises(Unavailable, match="draining"):
            await anext(client.embed_stream(items()))
        queue.put_nowait(StreamRequest({"user": [2]}))
        await closed.wait()
    assert queue.qsize() == 1


def test_stream_fails_when_another_thread_closes_the_client() -> None:
    model = SilentModel()
    with grpc_server(model) as target, ThreadPoolExecutor(max_workers=1) as pool:
        client = GrpcEmbedClient(target)
        read = pool.submit(lambda: list(client.embed_stream([{"user": [1]}])))
        assert model.requested.wait(RESPONSE_S_MAX)
        client.close()
        error = read.exception(RESPONSE_S_MAX)
        model.may_respond.set()
    assert isinstance(error, Unavailable)


async def test_stream_fails_when_another_task_closes_the_client() -> None:
    """The stream fails with a client error; the task that reads it is not cancelled. Also tested
    with a stream that waits for the caller's next item."""

    async def waiting() -> AsyncIterator[Any]:
        await asyncio.sleep(RESPONSE_S_MAX)
        yield {"user": [1]}

    async def read(client: AsyncGrpcEmbedClient, items: Any) -> None:
        async for answer in client.embed_stream(items):
            answer.result()

    model = SilentModel()
    with grpc_server(model) as target:
        client = AsyncGrpcEmbedClient(target)
        sources = waiting(), [{"user": [1]}], [{"user": [1]}]
        *uncancelled, cancelled = (asyncio.create_task(read(client, items)) for items in sources)
        assert await asyncio.to_thread(model.requested.wait, RESPONSE_S_MAX)
        cancelled.cancel()
        await client.close()
        ended = await asyncio.gather(*uncancelled, cancelled, return_exceptions=True)
        model.may_respond.set()
    assert list(map(type, ended)) == [Unavailable, Unavailable, asyncio.CancelledError]
