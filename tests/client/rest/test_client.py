"""What only REST has: the deadline header, Retry-After, kept-alive connections."""

import asyncio
from typing import Any

import httpx
import pytest
from client.fake import FakeModel

from embedserve_client import AsyncEmbedClient, EmbedClient, Overloaded


def test_the_deadline_travels_in_a_header(rest_url: str, model: FakeModel) -> None:
    with EmbedClient(rest_url, timeout_s=5.0) as client:
        client.embed({"user": [1]}, timeout_s=0.25)
        client.embed({"user": [1]})
    with EmbedClient(rest_url, timeout_s=None) as client:
        client.embed({"user": [1]})

    assert model.timeouts_ms == ["250", "5000", None]


def test_the_servers_wait_is_passed_on(rest_url: str) -> None:
    with EmbedClient(rest_url) as client, pytest.raises(Overloaded) as caught:
        client.embed({"user": [1]}, model="fail:RESOURCE_EXHAUSTED")

    assert caught.value.retry_after_s == 3.0


class CountingTransport(httpx.HTTPTransport):
    """Counts the connections that httpx opens."""

    opened = 0

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


def test_a_closed_client_sends_nothing(rest_url: str, model: FakeModel) -> None:
    client = EmbedClient(rest_url)
    client.close()

    with pytest.raises(RuntimeError, match="closed"):
        client.embed({"user": [1]})
    assert model.requests == []


async def test_an_async_client_answers_calls_side_by_side(rest_url: str) -> None:
    async with AsyncEmbedClient(rest_url) as client:
        results = await asyncio.gather(*(client.embed({"user": [n]}) for n in range(20)))

    assert [result["user"][0, 0] for result in results] == [2 * n for n in range(20)]
