"""Connections of the async REST client, in place of httpx's pool, which loses some to cancelled
tasks."""

import asyncio
from collections import deque
from functools import partial
from time import monotonic
from typing import Any

import httpx

IDLE_S_MAX = 5.0
"""Seconds that a connection stays open without a call, as in httpx's pool."""


class CancelSafeTransport(httpx.AsyncBaseTransport):
    """A pool of transports with one connection each.

    A pool of httpx loses a connection for good if a task is cancelled at some moments: before it
    has connected or sent its request, or while it releases the response. Once all connections of a
    client were lost, all its calls failed. Here the transport of a cancelled or failed call is
    closed.
    """

    def __init__(self, limits: httpx.Limits, **options: Any) -> None:
        """
        Args:
            limits: limits with a number of connections.
            options: further arguments of httpx.AsyncHTTPTransport.
        """
        assert limits.max_connections is not None
        self._make = partial(httpx.AsyncHTTPTransport, limits=limits, **options)
        self._free = asyncio.Semaphore(limits.max_connections)
        self._busy: set[httpx.AsyncHTTPTransport] = set()
        self._idle: deque[tuple[float, httpx.AsyncHTTPTransport]] = deque()  # oldest first
        self._is_closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Returns the whole response."""
        try:
            async with asyncio.timeout(request.extensions["timeout"]["pool"]):
                await self._free.acquire()
        except TimeoutError as error:
            raise httpx.PoolTimeout("no connection is free") from error
        try:
            if self._is_closed:
                raise RuntimeError("the client has been closed")
            return await self._send(request)
        finally:
            self._free.release()

    async def _send(self, request: httpx.Request) -> httpx.Response:
        transport = self._idle.pop()[1] if self._idle else self._make()
        self._busy.add(transport)
        try:
            response = await transport.handle_async_request(request)
            await response.aread()
            if self._is_closed:  # transports that are closed while they connect keep the connection
                await response.extensions["network_stream"].aclose()
        except BaseException:
            await transport.aclose()
            raise
        finally:
            self._busy.discard(transport)
        now_s = monotonic()
        self._idle.append((now_s, transport))
        while now_s - self._idle[0][0] > IDLE_S_MAX:
            await self._idle.popleft()[1].aclose()
        return response

    async def aclose(self) -> None:
        self._is_closed = True
        for transport in (*self._busy, *(one for _, one in self._idle)):
            await transport.aclose()
