"""Fixtures of the client's tests: the fake servers, and a blocking wrapper of each of the four
clients."""

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from client.fake import RESPONSE_S_MAX, FakeModel, RestFake, grpc_server, rest_server

from embedserve_client import AsyncEmbedClient, AsyncGrpcEmbedClient, EmbedClient, GrpcEmbedClient

MAKERS: dict[str, Any] = {
    "rest": EmbedClient,
    "rest-async": AsyncEmbedClient,
    "grpc": GrpcEmbedClient,
    "grpc-async": AsyncGrpcEmbedClient,
}
"""Classes of the four clients."""


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


@pytest.fixture(params=MAKERS)
def client(request: pytest.FixtureRequest) -> Iterator[BlockingClient]:
    """Yields each of the four clients in turn, connected to its fake server."""
    yield from _connected(request)


@pytest.fixture(params=MAKERS)
def retrying_client(request: pytest.FixtureRequest) -> Iterator[BlockingClient]:
    """Yields each of the four clients in turn, with two retries."""
    yield from _connected(request, retries=2)


@pytest.fixture(params=("grpc", "grpc-async"))
def stream_client(request: pytest.FixtureRequest) -> Iterator[BlockingClient]:
    """Yields both gRPC clients in turn."""
    yield from _connected(request)


@pytest.fixture(params=("rest", "grpc"))
def plain_client(request: pytest.FixtureRequest) -> Iterator[EmbedClient | GrpcEmbedClient]:
    """Yields both sync clients in turn, for threads."""
    with MAKERS[request.param](_address_of(request)) as one:
        yield one


def _connected(request: pytest.FixtureRequest, **options: Any) -> Iterator[BlockingClient]:
    make, address = MAKERS[request.param], _address_of(request)
    blocking = BlockingClient(make, address, timeout_s=RESPONSE_S_MAX, **options)
    yield blocking
    blocking.shut()


def _address_of(request: pytest.FixtureRequest) -> str:
    is_rest = request.param.startswith("rest")
    address: str = request.getfixturevalue("rest_url" if is_rest else "grpc_target")
    return address
