"""Tests of the status of an ended gRPC call: its error, and while a failed write hides it."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from embedserve_client.grpc.calls import Ending, Status, status_error

SERVER_STATUS = (grpc.StatusCode.UNAVAILABLE, "draining", (("retry-after", "7"),))
GRPC_STATUS = (grpc.StatusCode.INTERNAL, "Internal error from Core", ())


class FakeCall:
    """An aio call whose status changes whenever it is read, until the last."""

    def __init__(self, *statuses: Status) -> None:
        self._statuses = list(statuses)
        self._callback: Callable[[Any], None] | None = None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callback = callback

    def end(self) -> None:
        assert self._callback is not None
        self._callback(self)

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
