"""Tests of the status of an ended gRPC call: its error, and while a failed write hides it."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from embedserve_client import Unavailable
from embedserve_client.core.messages import AnswerReader
from embedserve_client.grpc.calls import Ending, Status, status_error
from embedserve_client.grpc.stream import stream_answers_async
from embedserve_proto import embedding_pb2 as pb

SERVER_STATUS = (grpc.StatusCode.UNAVAILABLE, "draining", (("retry-after", "7"),))
GRPC_STATUS = (grpc.StatusCode.INTERNAL, "Internal error from Core", ())


class FakeCall:
    """An aio call whose status changes whenever it is read, until the last."""

    def __init__(self, *statuses: Status) -> None:
        self._statuses = list(statuses)
        self._callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        for callback in self._callbacks:
            callback(self)

    async def code(self) -> grpc.StatusCode:
        return self._statuses[0][0]

    async def details(self) -> str | None:
        return self._statuses[0][1]

    async def trailing_metadata(self) -> Any:
        trailing = self._statuses[0][2]
        if len(self._statuses) > 1:
            del self._statuses[0]
        return trailing


@pytest.mark.parametrize(
    ("statuses", "ended"),
    [
        ([SERVER_STATUS], SERVER_STATUS),
        ([SERVER_STATUS, GRPC_STATUS], SERVER_STATUS),
        ([GRPC_STATUS, SERVER_STATUS], SERVER_STATUS),
        ([GRPC_STATUS, GRPC_STATUS, GRPC_STATUS, SERVER_STATUS], SERVER_STATUS),
        ([GRPC_STATUS], GRPC_STATUS),
    ],
)
async def test_server_status_takes_precedence_whenever_received(
    statuses: list[Status], ended: Status
) -> None:
    call = FakeCall(*statuses)
    ending = Ending(call)
    call.end()

    assert await ending.status() == ended


async def test_status_not_recorded_at_the_end_is_read_from_the_call() -> None:
    assert await Ending(FakeCall(SERVER_STATUS)).status() == SERVER_STATUS


def test_field_of_an_error_is_percent_decoded() -> None:
    trailing = (("embedserve-field", "features.%E6%98%A0 50%25[0]"),)
    error = status_error(grpc.StatusCode.INVALID_ARGUMENT, "invalid", trailing)
    assert error.field == "features.映 50%[0]"


class FailedWriteCall(FakeCall):
    """An aio call that fails to write while it has an unread response, which grpc.aio's ``read``
    then skips."""

    async def write(self, message: pb.EmbedRequest) -> None:
        self.end()
        raise rpc_error(GRPC_STATUS)

    async def read(self) -> None:
        raise rpc_error(GRPC_STATUS)

    async def __aiter__(self) -> AsyncIterator[pb.EmbedResponse]:
        yield pb.EmbedResponse(
            model="shop", keys=["user"], length_per_key=[1], batch_size=1, values=bytes(4)
        )
        raise rpc_error(GRPC_STATUS)

    def cancel(self) -> None:
        pass


def rpc_error(status: Status) -> grpc.aio.AioRpcError:
    code, details, trailing = status
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


async def test_response_before_a_failed_write_is_read_and_the_status_follows() -> None:
    call = FailedWriteCall(GRPC_STATUS, SERVER_STATUS)
    answers = stream_answers_async(
        lambda: call, [{"user": [1]}], AnswerReader(), is_closed=lambda: False
    )
    assert (await anext(answers)).result()["user"].tolist() == [[0]]
    with pytest.raises(Unavailable, match="draining"):
        await anext(answers)
