"""Every leaf of the error tree reaches the client of either protocol with its status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import httpx
import pytest
from server.channels import OWN_CONNECTION
from server.fake_engine import FakeEngine
from server.live import make_service

from embedserve.api.management import management_app
from embedserve.api.openapi import EMBED_PATHS
from embedserve.batching.caller import Caller
from embedserve.errors import EmbedServeError, InvalidRequestError
from embedserve.models.models import Service
from embedserve.types import LookupRequest, LookupResult, ModelInfo
from embedserve.wire.grpc_server import GrpcServer
from embedserve.wire.rest import EmbedEndpoint
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

STATUSES = {
    "EngineError": (500, "INTERNAL"),
    "InvalidRequestError": (400, "INVALID_ARGUMENT"),
    "UnknownModelError": (404, "NOT_FOUND"),
    "RequestTooLargeError": (413, "RESOURCE_EXHAUSTED"),
    "OverloadedError": (429, "RESOURCE_EXHAUSTED"),
    "DeadlineExceededError": (504, "DEADLINE_EXCEEDED"),
    "NotReadyError": (503, "UNAVAILABLE"),
    # Of the REST frontend alone; they would map if gRPC raised them.
    "MethodNotAllowedError": (405, "INVALID_ARGUMENT"),
    "UnsupportedEncodingError": (415, "INVALID_ARGUMENT"),
}
REQUEST = pb.EmbedRequest(keys=["user"], ids=[1], lengths=[1])
INTERNAL = "an error of the server; its log says which"


def leaves(error: type[EmbedServeError] = EmbedServeError) -> Iterator[type[EmbedServeError]]:
    subclasses = error.__subclasses__()
    if not subclasses:
        yield error
    for subclass in subclasses:
        yield from leaves(subclass)


LEAVES = sorted(leaves(), key=lambda leaf: leaf.__name__)


class FailingService(Service):
    """Refuses every request with ``error``."""

    error: Exception

    def submit(
        self, request: LookupRequest, timeout_s: float | None = None
    ) -> asyncio.Future[LookupResult]:
        raise self.error

    def enqueue(
        self, request: LookupRequest, caller: Caller, timeout_s: float | None = None
    ) -> None:
        raise self.error


@pytest.fixture
def service(engine: FakeEngine, executor: ThreadPoolExecutor) -> FailingService:
    service = make_service(engine, executor=executor)
    service.__class__ = FailingService
    assert isinstance(service, FailingService)
    return service


@pytest.fixture
async def rest(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    app = EmbedEndpoint(service, management_app(service))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        yield client


@pytest.fixture
async def stub(service: Service) -> AsyncIterator[EmbeddingServiceStub]:
    server = GrpcServer(service, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{server.port}", options=OWN_CONNECTION
    ) as channel:
        yield EmbeddingServiceStub(channel)
    await server.stop(0)


@dataclass
class Failing:
    """A gRPC server whose service refuses every request, and a client of it."""

    stub: EmbeddingServiceStub
    fail: Callable[..., None]
    """(class of the error, its arguments)"""


@pytest.fixture
def failing(stub: EmbeddingServiceStub, service: FailingService) -> Failing:
    def fail(error: type[Exception], *arguments: str) -> None:
        service.error = error(*arguments)

    return Failing(stub, fail)


async def post(rest: httpx.AsyncClient) -> httpx.Response:
    return await rest.post("http://test/embed", content=b'{"features": {"user": [1]}}')


def test_the_table_has_every_leaf() -> None:
    assert [leaf.__name__ for leaf in LEAVES] == sorted(STATUSES)


@pytest.mark.parametrize("leaf", LEAVES)
async def test_rest_answers_with_the_status_of_the_leaf(
    rest: httpx.AsyncClient, service: FailingService, leaf: type[EmbedServeError]
) -> None:
    service.error = leaf("said to the client", "features.user[0]")
    answer = await post(rest)
    status, code = STATUSES[leaf.__name__]
    assert answer.status_code == status
    assert answer.json()["error"] == {
        "code": code,
        "message": "said to the client",
        "field": "features.user[0]",
    }
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    assert service.metrics.protocols["rest"].outcomes == {code: 1}


async def failure(stub: EmbeddingServiceStub) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Embed(REQUEST)
    return caught.value


async def test_grpc_answers_with_the_code_of_the_leaf(
    failing: Failing,
) -> None:
    for leaf in LEAVES:
        failing.fail(leaf, "said to the client", "features.user[0]")
        status, code = STATUSES[leaf.__name__]
        error = await failure(failing.stub)
        assert error.code() is grpc.StatusCode[code]
        assert error.details() == "said to the client"
        metadata = dict(error.trailing_metadata() or ())
        assert metadata["embedserve-field"] == "features.user[0]"
        assert ("retry-after" in metadata) == (status in (429, 503))


async def test_a_stream_answers_with_the_code_of_the_leaf(
    failing: Failing,
) -> None:
    for leaf in LEAVES:
        failing.fail(leaf, "said to the client", "features.user[0]")
        answers = [answer async for answer in failing.stub.EmbedStream(iter([REQUEST]))]
        code = STATUSES[leaf.__name__][1]
        error = pb.Error(code=code, message="said to the client", field="features.user[0]")
        assert answers == [pb.EmbedResponse(error=error)]


@pytest.mark.parametrize(
    "message", ["it has " + ", ".join(f"feature_{i}" for i in range(2000)), "映" * 5000, "a\nb\x00"]
)
@pytest.mark.parametrize("field", ["", "features." + "f" * 9000, "features.映画", "features.a\nb"])
async def test_no_message_or_field_keeps_grpc_from_answering(
    failing: Failing, message: str, field: str
) -> None:
    """Clients refuse trailers past 8 KiB, and metadata that is not printable ASCII."""
    failing.fail(InvalidRequestError, message, field)
    error = await failure(failing.stub)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith(str(error.details()))
    assert str(error.details())[:500] == message[:500]
    metadata = dict(error.trailing_metadata() or ())
    assert str(metadata.get("embedserve-field", ""))[:9] == field[:9]


async def test_an_unforeseen_error_is_logged_in_full_and_answered_in_general(
    rest: httpx.AsyncClient,
    stub: EmbeddingServiceStub,
    service: FailingService,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service.error = ZeroDivisionError("secret of the server")
    with caplog.at_level(logging.ERROR):
        answer = await post(rest)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Embed(REQUEST)
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, INTERNAL)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == INTERNAL
    assert caplog.text.count("ZeroDivisionError: secret of the server") == 2
    assert service.metrics.protocols["rest"].outcomes == {"INTERNAL": 1}
    assert service.metrics.protocols["grpc"].outcomes == {"INTERNAL": 1}


async def test_an_unforeseen_error_of_a_management_route_has_the_same_shape(
    service: FailingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> list[ModelInfo]:
        raise ZeroDivisionError("secret of the server")

    monkeypatch.setattr(service, "models", fail)
    transport = httpx.ASGITransport(management_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport) as client:
        answer = await client.get("http://test/models")
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/json")
    expected = {"code": "INTERNAL", "message": INTERNAL, "field": ""}
    assert answer.json() == {"error": expected}


async def test_an_unforeseen_error_does_not_end_a_stream(
    failing: Failing,
) -> None:
    failing.fail(ZeroDivisionError, "secret of the server")
    answers = [answer async for answer in failing.stub.EmbedStream(iter([REQUEST, REQUEST]))]
    assert [answer.error.code for answer in answers] == ["INTERNAL"] * 2
    assert answers[0].error.message == INTERNAL


@pytest.mark.parametrize("path", ["/embed", "/models/{model}/embed"])
def test_openapi_lists_every_status_of_the_embed_routes(path: str) -> None:
    documented = EMBED_PATHS[path]["post"]["responses"].keys()
    statuses = {str(status) for status, _ in STATUSES.values()}
    # A POST is never refused for its method; readiness is not asked of requests.
    assert documented == (statuses | {"200"}) - {"405", "503"}
