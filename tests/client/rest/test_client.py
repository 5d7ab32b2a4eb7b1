"""Tests of the REST client alone: the deadline header, Retry-After, kept-alive connections."""

import asyncio
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import httpx
import pytest
from client.fake import RESPONSE_S_MAX, FakeModel

from embedserve_client import (
    AsyncEmbedClient,
    DeadlineExceeded,
    EmbedClient,
    Overloaded,
    ServerError,
    Unavailable,
)


def test_timeout_is_sent_in_a_header(rest_url: str, model: FakeModel) -> None:
    with EmbedClient(rest_url, timeout_s=60.0) as client:
        client.embed({"user": [1]}, timeout_s=59.25)
        client.embed({"user": [1]})
    with EmbedClient(rest_url, timeout_s=None) as client:
        client.embed({"user": [1]})

    assert model.timeouts_ms == ["59250", "60000", None]


def test_retry_after_of_the_server_is_passed_on(rest_url: str) -> None:
    with EmbedClient(rest_url) as client, pytest.raises(Overloaded) as caught:
        client.embed({"user": [1]}, model="fail:RESOURCE_EXHAUSTED")

    assert caught.value.retry_after_s == 3.0


class CountingTransport(httpx.HTTPTransport):
    """Transport that counts the connections that httpx opens."""

    opened = 0

    def __init__(self) -> None:
        super().__init__(limits=httpx.Limits(keepalive_expiry=None))  # never, on a slow host either

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions["trace"] = self._trace
        return super().handle_request(request)

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        self.opened += event == "connection.connect_tcp.complete"


def test_calls_share_one_connection(rest_url: str) -> None:
    transport = CountingTransport()
    with EmbedClient(rest_url, transport=transport) as client:
        for _ in range(5):
            client.embed({"user": [1]})

    assert transport.opened == 1


@pytest.mark.parametrize("make", [EmbedClient, AsyncEmbedClient])
@pytest.mark.parametrize("connections_max", [0, -1, None, 1.5])
def test_client_without_connections_is_rejected(make: Any, connections_max: Any) -> None:
    with pytest.raises(ValueError, match=r"connections_max: .* is no integer from 1"):
        make("localhost", connections_max=connections_max)


def test_closed_client_sends_nothing(rest_url: str, model: FakeModel) -> None:
    client = EmbedClient(rest_url)
    client.close()

    with pytest.raises(RuntimeError, match="closed"):
        client.embed({"user": [1]})
    assert model.requests == []


async def test_async_client_runs_calls_concurrently(rest_url: str) -> None:
    async with AsyncEmbedClient(rest_url) as client:
        results = await asyncio.gather(*(client.embed({"user": [n]}) for n in range(20)))

    assert [result["user"][0, 0] for result in results] == [2 * n for n in range(20)]


@pytest.mark.parametrize("count", [1, 2])
async def test_calls_cancelled_at_any_moment_free_their_connection(
    rest_url: str, count: int
) -> None:
    """The second call waits for the connection of the first, and is cancelled right after it."""
    async with AsyncEmbedClient(rest_url, connections_max=1, timeout_s=RESPONSE_S_MAX) as client:
        for moment in range(20):
            calls = [asyncio.create_task(client.embed({"user": [1]})) for _ in range(count)]
            for _ in range(moment):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
                await asyncio.sleep(0)
            await asyncio.wait(calls)
            assert (await client.embed({"user": [1]}))["user"].tolist() == [[2, 3]]


class Interrupt(BaseException):
    """Exception of a signal handler, as KeyboardInterrupt is."""


def call_interrupted(call: Callable[[], object], number: int) -> None:
    """Raises Interrupt as httpcore calls a function, where signal handlers run, too. An interrupted
    ``__exit__`` would leave httpcore's own lock locked."""
    numbers = count(1)

    def profile(frame: Any, event: str, _argument: Any) -> None:
        is_counted = event == "call" and frame.f_globals["__name__"].startswith("httpcore.")
        if is_counted and frame.f_code.co_name != "__exit__" and next(numbers) == number:
            raise Interrupt

    sys.setprofile(profile)
    try:
        call()
    except Interrupt:
        pass
    finally:
        sys.setprofile(None)


def test_calls_interrupted_at_any_moment_free_their_connection(rest_url: str) -> None:
    with (
        warnings.catch_warnings(action="ignore", category=ResourceWarning),
        EmbedClient(rest_url, connections_max=1, timeout_s=RESPONSE_S_MAX) as client,
    ):
        for number in range(1, 300, 2):
            call_interrupted(partial(client.embed, {"user": [1]}), number)
            assert client.embed({"user": [1]})["user"].tolist() == [[2, 3]]
        gc.collect()  # closes lost connections


async def test_call_in_flight_leaves_no_connection_when_its_client_is_closed() -> None:
    """The client is closed at several moments: before, while and after the call connects."""
    connections: list[asyncio.Task[Any]] = []

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.append(task)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            await reader.read()
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for moment in range(1, 30):
        client = AsyncEmbedClient(f"127.0.0.1:{port}", timeout_s=RESPONSE_S_MAX)
        call = asyncio.create_task(client.models())
        for _ in range(moment):
            await asyncio.sleep(0)
        await client.close()
        await asyncio.wait([call])
        assert isinstance(call.exception(), Unavailable | ServerError)
        async with asyncio.timeout(RESPONSE_S_MAX):
            await asyncio.gather(*connections)
    server.close()


async def test_call_that_gets_no_connection_in_time_exceeds_its_deadline(
    rest_url: str, model: FakeModel
) -> None:
    model.may_respond.clear()
    async with AsyncEmbedClient(rest_url, connections_max=1, timeout_s=RESPONSE_S_MAX) as client:
        pending = asyncio.create_task(client.embed({"user": [1]}))
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded, match="no connection is free"):
            await client.embed({"user": [1]}, timeout_s=0.05)
        model.may_respond.set()
        assert (await pending)["user"].tolist() == [[2, 3]]


CALLS = 50
SLOW_S = 0.005
"""Seconds that each response takes, so that the calls of two processes overlap."""
ignore_fork_warning = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def forked(act: Callable[[], object]) -> int:
    """Forks a process that calls ``act`` and fails if that raises; returns its pid."""
    child = os.fork()
    if not child:
        try:
            act()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def has_failed(child: int) -> bool:
    return os.waitpid(child, 0)[1] != 0


def embed_many(client: EmbedClient, first: int) -> None:
    for n in range(first, first + CALLS):
        assert client.embed({"user": [n]})["user"][0, 0] == 2 * n


async def embed_many_async(client: AsyncEmbedClient, first: int) -> None:
    for n in range(first, first + CALLS):
        assert (await client.embed({"user": [n]}))["user"][0, 0] == 2 * n


@ignore_fork_warning
def test_forked_processes_get_their_own_responses(rest_url: str, model: FakeModel) -> None:
    model.slow_s = SLOW_S
    with EmbedClient(rest_url) as client:
        client.embed({"user": [1]})
        children = [forked(partial(embed_many, client, first)) for first in (0, CALLS)]

        assert [has_failed(child) for child in children] == [False, False]
        embed_many(client, 0)


@ignore_fork_warning
async def test_forked_processes_get_their_own_responses_async(
    rest_url: str, model: FakeModel
) -> None:
    model.slow_s = SLOW_S
    async with AsyncEmbedClient(rest_url) as client:
        await client.embed({"user": [1]})

        def embed_in_a_loop(first: int) -> None:
            asyncio.run(embed_many_async(client, first))

        children = [forked(partial(embed_in_a_loop, first)) for first in (0, CALLS)]

        assert [has_failed(child) for child in children] == [False, False]
        await embed_many_async(client, 0)


@ignore_fork_warning
def test_custom_transport_is_rejected_in_a_forked_process(rest_url: str) -> None:
    transport = CountingTransport()
    with EmbedClient(rest_url, transport=transport) as client:
        client.embed({"user": [1]})

        def use() -> None:
            with client, pytest.raises(RuntimeError, match="custom transport"):
                client.embed({"user": [1]})

        assert not has_failed(forked(use))
        client.embed({"user": [1]})
    assert transport.opened == 1


@ignore_fork_warning
def test_closed_client_stays_closed_in_a_forked_process(rest_url: str) -> None:
    client = EmbedClient(rest_url)
    client.close()

    def use() -> None:
        with pytest.raises(RuntimeError, match="closed"):
            client.embed({"user": [1]})

    assert not has_failed(forked(use))
