"""Tests of the retry loop: a call whose client is closed meanwhile fails with its own error,
without a retry."""

from typing import Any

import pytest

from embedserve_client.core.retry_loop import Operation, one_call, run, run_async
from embedserve_client.errors import Overloaded, Unavailable


class Transport:
    """Transport that rejects every call, and fails as httpx does once the client is closed.

    Args:
        closed_at: number of the call before which the client is closed.
        is_during: whether it is closed while that call is in flight.
    """

    def __init__(self, closed_at: int, *, is_during: bool) -> None:
        self.sent = 0
        self.is_closed = closed_at == 0 and not is_during
        self._closed_at = closed_at
        self._is_during = is_during

    def send(self, call: Any) -> Any:
        self.is_closed |= self.sent == self._closed_at and not self._is_during
        if self.is_closed:
            raise RuntimeError("the connection is closed")
        self.is_closed = self.sent == self._closed_at
        self.sent += 1
        raise Overloaded("full")

    async def send_async(self, call: Any) -> Any:
        return self.send(call)


async def call(transport: Transport, is_async: bool) -> None:
    operation: Operation[None] = one_call(lambda timeout_s: timeout_s, None)
    if is_async:
        await run_async(operation, 9, transport.send_async, lambda: transport.is_closed)
    else:
        run(operation, 9, transport.send, lambda: transport.is_closed)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("closed_at", [0, 2])
async def test_call_is_not_retried_if_the_client_was_closed_in_flight(
    closed_at: int, is_async: bool
) -> None:
    transport = Transport(closed_at, is_during=True)

    with pytest.raises(Overloaded):
        await call(transport, is_async)
    assert transport.sent == closed_at + 1


@pytest.mark.parametrize("is_async", [False, True])
async def test_client_closed_during_a_retry_pause_raises_unavailable(is_async: bool) -> None:
    transport = Transport(1, is_during=False)

    with pytest.raises(Unavailable, match="the client was closed during the call") as caught:
        await call(transport, is_async)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert transport.sent == 1


@pytest.mark.parametrize("is_async", [False, True])
async def test_client_closed_before_the_call_raises_the_transport_error(
    is_async: bool,
) -> None:
    with pytest.raises(RuntimeError, match="the connection is closed"):
        await call(Transport(0, is_during=False), is_async)
