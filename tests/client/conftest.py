"""Fixtures of the client's tests: the fake servers, and a blocking wrapper of each of the four
clients."""

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from client.fake import RESPONSE_S_MAX, FakeModel, RestFake, grpc_server, rest_server

from embedserve_client import (
    AsyncEmbedClient,
    AsyncGrpcEmbedClient,
    EmbedClient,
    GrpcEmbedClient,
)

KINDS = ("rest", "rest-async", "grpc", "grpc-async")


class BlockingClient:
    """A sync or async client with a blocking interface. Coroutines run to their end in an event
    loop of its own."""

    def __init__(self, make: Any, address: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(self._make(make, address, options))
        self.over_grpc = make in (GrpcEmbedClient, AsyncGrpcEmbedClient)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *args, **options: self._wait(method(*args, **options))

    def stream(self, items: Any, **options: Any) -> list[Any]:
        answers = self._client.embed_stream(items, **options)
        if hasattr(answers, "__aiter__"):
            collected: list[Any] = self._wait(_collect(answers))
            return collected
        return list(answers)

    def shut(self) -> None:
        self.close()
        self._runner.close()

    @staticmethod
    async def _make(make: Any, address: str, options: dict[str, Any]) -> Any:
        return make(address, **options)

    def _wait(self, result: Any) -> Any:
        return self._runner.run(result) if inspect.iscoroutine(result) else result


async def _collect(answers: Any) -> list[Any]:
    return [answer async for answer in answers]


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture(scope="module")
def rest_fake() -> Iterator[RestFake]:
    """Starts one server for all tests of a module, because uvicorn is slow to stop."""
    with rest_server() as fake:
        yield fake


@pytest.fixture
def rest_url(rest_fake: RestFake, model: FakeModel) -> str:
    rest_fake.model = model
    return rest_fake.url


@pytest.fixture
def grpc_target(model: FakeModel) -> Iterator[str]:
    with grpc_server(model) as target:
        yield target


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest) -> Iterator[BlockingClient]:
    """Yields each of the four clients in turn, connected to its fake server."""
    blocking = _connected(request.param, request)
    yield blocking
    blocking.shut()


@pytest.fixture(params=KINDS)
def retrying_client(request: pytest.FixtureRequest) -> Iterator[BlockingClient]:
    """Yields each of the four clients in turn, with two retries."""
    blocking = _connected(request.param, request, retries=2)
    yield blocking
    blocking.shut()


@pytest.fixture(params=("grpc", "grpc-async"))
def stream_client(request: pytest.FixtureRequest) -> Iterator[BlockingClient]:
    """Yields both gRPC clients in turn."""
    blocking = _connected(request.param, request)
    yield blocking
    blocking.shut()


def _connected(kind: str, request: pytest.FixtureRequest, **options: Any) -> BlockingClient:
    make: dict[str, Any] = {
        "rest": EmbedClient,
        "rest-async": AsyncEmbedClient,
        "grpc": GrpcEmbedClient,
        "grpc-async": AsyncGrpcEmbedClient,
    }
    address = request.getfixturevalue("rest_url" if kind.startswith("rest") else "grpc_target")
    return BlockingClient(make[kind], address, timeout_s=RESPONSE_S_MAX, **options)
