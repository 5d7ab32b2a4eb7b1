"""Tests that every leaf of the error tree reaches clients of both protocols with its status."""

import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from server.fake_engine import FakeEngine
from server.live import GRPC_SERVERS, JSON, PROTOBUF, Live, make_pipeline, serving
from server.pipelines import outcomes_of
from server.raw_http import http_client

from embedserve.api.openapi import wire_path
from embedserve.api.wire_openapi import EMBED_PATHS, INFER_PATHS
from embedserve.batching.batcher import Batcher
from embedserve.batching.pending_request import PendingRequest
from embedserve.config import Limits
from embedserve.errors import NAME_CHARACTERS_MAX, EmbedServeError, InvalidRequestError
from embedserve.lookup_types import LookupRequest
from embedserve.metrics.metrics import Metrics
from embedserve.model_info import ModelInfo
from embedserve.models.model_registry import ModelRegistry
from embedserve.pipeline import RequestPipeline
from embedserve.wire.grpc.statuses import error_block
from embedserve.wire.rest.headers import encode_error_response
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

STATUSES = {
    "EngineError": (500, "INTERNAL"),
    "InvalidRequestError": (400, "INVALID_ARGUMENT"),
    "UnknownModelError": (404, "NOT_FOUND"),
    "UnknownRegionError": (404, "NOT_FOUND"),
    "RequestTooLargeError": (413, "RESOURCE_EXHAUSTED"),
    "UnauthenticatedError": (401, "UNAUTHENTICATED"),
    "PermissionDeniedError": (403, "PERMISSION_DENIED"),
    "RateLimitedError": (429, "RESOURCE_EXHAUSTED"),
    "OverloadedError": (429, "RESOURCE_EXHAUSTED"),
    "DeadlineExceededError": (504, "DEADLINE_EXCEEDED"),
    "NotReadyError": (503, "UNAVAILABLE"),
    "MissingPartError": (503, "UNAVAILABLE"),
    # Only the REST frontend raises these; gRPC would map them if it did.
    "MethodNotAllowedError": (405, "INVALID_ARGUMENT"),
    "UnsupportedEncodingError": (415, "INVALID_ARGUMENT"),
    "HeadersTooLargeError": (431, "RESOURCE_EXHAUSTED"),
    "TransferCodingError": (501, "INVALID_ARGUMENT"),
    "HttpVersionError": (505, "INVALID_ARGUMENT"),
}
OF_ADMINISTRATORS = {"NotJsonError": 415, "ConflictError": 409}
"""Errors of administrative requests, which no request for vectors gets."""
OF_GRPC = "GrpcCallError"
"""An error with a code of its own, which no REST request ends with."""
REQUEST = pb.EmbedRequest(keys=["user"], ids=[1], lengths=[1])
INTERNAL = "an error of the server; its log says which"


def leaves(error: type[EmbedServeError] = EmbedServeError) -> Iterator[type[EmbedServeError]]:
    subclasses = error.__subclasses__()
    if not subclasses:
        yield error
    for subclass in subclasses:
        yield from leaves(subclass)


LEAVES = sorted(
    (leaf for leaf in leaves() if leaf.__name__ not in (*OF_ADMINISTRATORS, OF_GRPC)),
    key=lambda leaf: leaf.__name__,
)


class FailingModels(ModelRegistry):
    """Rejects every request with ``error``; `models` raises it, too."""

    error: Exception

    def enqueue(self, request: LookupRequest, pending: PendingRequest) -> None:
        raise self.error

    def models(self) -> list[ModelInfo]:
        raise self.error


@pytest.fixture
def models(engine: FakeEngine, executor: ThreadPoolExecutor, metrics: Metrics) -> FailingModels:
    limits = Limits()
    batcher = Batcher(engine, engine.model, limits, metrics.models["shop"], executor)
    models = FailingModels("shop", limits)
    models.activate("shop", batcher)
    return models


@pytest.fixture
def metrics(engine: FakeEngine) -> Metrics:
    return Metrics([engine.model])


@pytest.fixture(params=GRPC_SERVERS)
def grpc_server(request: pytest.FixtureRequest) -> str:
    server: str = request.param
    return server


@pytest.fixture
async def live(models: FailingModels, metrics: Metrics, grpc_server: str) -> AsyncIterator[Live]:
    async with serving(RequestPipeline(models, metrics), grpc_server=grpc_server) as live:
        yield live


@pytest.fixture
async def rest(models: FailingModels, metrics: Metrics) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(RequestPipeline(models, metrics)) as live:
        yield live.http


async def post(rest: httpx.AsyncClient) -> httpx.Response:
    return await rest.post("/embed", content=b'{"features": {"user": [1]}}')


def test_error_table_lists_every_leaf_class() -> None:
    assert [leaf.__name__ for leaf in LEAVES] == sorted(STATUSES)


@pytest.mark.parametrize("leaf", LEAVES)
async def test_rest_status_is_that_of_the_error_class(
    rest: httpx.AsyncClient, models: FailingModels, metrics: Metrics, leaf: type[EmbedServeError]
) -> None:
    models.error = leaf("said to the client", "features.user[0]")
    response = await post(rest)
    status, code = STATUSES[leaf.__name__]
    assert response.status_code == status
    assert response.json()["error"] == {
        "code": code,
        "message": "said to the client",
        "field": "features.user[0]",
    }
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert outcomes_of(metrics.protocols["rest"]) == {code: 1}


async def failure(stub: EmbeddingServiceStub) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Embed(REQUEST)
    return caught.value


async def test_grpc_code_is_that_of_the_error_class(live: Live, models: FailingModels) -> None:
    for leaf in LEAVES:
        models.error = leaf("said to the client", "features.user[0]")
        status, code = STATUSES[leaf.__name__]
        error = await failure(live.stub)
        assert error.code() is grpc.StatusCode[code]
        assert error.details() == "said to the client"
        metadata = dict(error.trailing_metadata() or ())
        assert metadata["embedserve-field"] == "features.user[0]"
        assert ("retry-after" in metadata) == (status in (429, 503))


async def test_stream_code_is_that_of_the_error_class(live: Live, models: FailingModels) -> None:
    for leaf in LEAVES:
        models.error = leaf("said to the client", "features.user[0]")
        answers = [response async for response in live.stub.EmbedStream(iter([REQUEST]))]
        code = STATUSES[leaf.__name__][1]
        error = pb.Error(code=code, message="said to the client", field="features.user[0]")
        assert answers == [pb.EmbedResponse(error=error)]


@pytest.mark.parametrize(
    "message", ["it has " + ", ".join(f"feature_{i}" for i in range(2000)), "映" * 5000, "a\nb\x00"]
)
@pytest.mark.parametrize("field", ["", "features." + "f" * 9000, "features.映画", "features.a\nb"])
async def test_grpc_reports_errors_with_any_message_and_field(
    live: Live, models: FailingModels, message: str, field: str
) -> None:
    """Checks texts that clients reject: trailers past 8 KiB, and metadata beyond printable
    ASCII.
    """
    models.error = InvalidRequestError(message, field)
    error = await failure(live.stub)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith(str(error.details()))
    assert str(error.details())[:500] == message[:500]
    metadata = dict(error.trailing_metadata() or ())
    assert str(metadata.get("embedserve-field", ""))[:9] == field[:9]


@pytest.mark.parametrize("character", ["n", "\0", "映"])
def test_error_messages_are_shortened(character: str) -> None:
    """Checks sizes, because whole responses are cached by the message and the field."""
    error = InvalidRequestError(character * 1_000_000, character * 1_000_000)
    assert len(str(error)) == len(error.message) < 5000
    assert len(error.field) < 1000
    assert len(encode_error_response(error, [])[1]) < 64 << 10
    assert len(error_block(error)) < 8 << 10


LONG = "n" * 500_000


def as_json(**fields: object) -> tuple[str, str, bytes]:
    return "/embed", JSON, json.dumps(fields).encode()


def as_protobuf(
    *keys: str, model: str = "", string_keys: Sequence[str] = ()
) -> tuple[str, str, bytes]:
    lengths = [0] * len(keys)
    message = pb.EmbedRequest(keys=keys, lengths=lengths, model=model, string_keys=string_keys)
    return "/embed", PROTOBUF, message.SerializeToString()


def as_input(name: str) -> tuple[str, str, bytes]:
    one = {"name": name, "datatype": "INT64", "shape": [1], "data": [1]}
    return "/v2/models/shop/infer", JSON, json.dumps({"inputs": [one]}).encode()


USER = {"user": [[1]]}
LONG_NAMES = {
    "JSON feature": (as_json(features={LONG: [[1]]}), "has no such feature; it has"),
    "JSON ids": (as_json(features={LONG: [["a", 1, 2]]}), 'is "a": ids are'),
    "JSON examples": (as_json(features=USER | {LONG: [[1], [2]]}), "has 1 example"),
    "JSON weights": (as_json(features=USER, weights={LONG: [[1]]}), "beside it"),
    "JSON weights of a bag": (
        as_json(features={LONG: [[1]]}, weights={LONG: [[1, 2]]}),
        "has 2 weights for 1 id",
    ),
    "JSON field": (as_json(features=USER, **{LONG: 1}), "is not a field of a request"),
    "JSON output key": (as_json(features=USER, output_keys=[LONG]), "has no such key; it has"),
    "protobuf model": (as_protobuf("user", model=LONG), "this server has shop"),
    "protobuf feature": (as_protobuf(LONG), "has no such feature; it has"),
    "protobuf feature twice": (as_protobuf(LONG, LONG), "twice"),
    "protobuf string_keys": (as_protobuf("user", string_keys=[LONG]), "keys does not"),
    "Open Inference feature": (as_input(f"{LONG}.ids"), "beside it"),
}


@pytest.mark.parametrize("name", LONG_NAMES)
async def test_long_name_does_not_hide_the_reason(
    engine: FakeEngine, executor: ThreadPoolExecutor, name: str
) -> None:
    (path, content_type, body), reason = LONG_NAMES[name]
    async with http_client(make_pipeline(engine, executor=executor)) as client:
        response = await client.post(path, content=body, headers={"content-type": content_type})
    assert response.status_code in (400, 404)
    assert len(response.content) < 2000
    assert "n" * NAME_CHARACTERS_MAX + "…" in response.text
    assert reason in (
        response.json()["error"] if "/v2" in path else response.json()["error"]["message"]
    )


async def test_unexpected_error_is_logged_but_not_disclosed(
    live: Live, models: FailingModels, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    models.error = ZeroDivisionError("secret of the server")
    with caplog.at_level(logging.ERROR):
        response = await post(live.http)
        error = await failure(live.stub)
    assert (response.status_code, response.json()["error"]["message"]) == (500, INTERNAL)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == INTERNAL
    assert caplog.text.count("ZeroDivisionError: secret of the server") == 2
    assert outcomes_of(metrics.protocols["rest"]) == {"INTERNAL": 1}
    assert outcomes_of(metrics.protocols["grpc"]) == {"INTERNAL": 1}


async def test_unexpected_management_error_has_the_common_format(
    rest: httpx.AsyncClient, models: FailingModels, caplog: pytest.LogCaptureFixture
) -> None:
    models.error = ZeroDivisionError("secret of the server")
    response = await rest.get("/models")
    assert (response.status_code, response.headers["content-type"]) == (500, "application/json")
    expected = {"code": "INTERNAL", "message": INTERNAL, "field": ""}
    assert response.json() == {"error": expected}
    assert "ZeroDivisionError: secret of the server" in caplog.text


async def test_unexpected_management_call_error_is_not_disclosed(
    live: Live, models: FailingModels
) -> None:
    models.error = ZeroDivisionError("secret of the server")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await live.stub.ListModels(pb.ListModelsRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == INTERNAL


async def test_unexpected_error_does_not_end_a_stream(live: Live, models: FailingModels) -> None:
    models.error = ZeroDivisionError("secret of the server")
    answers = [response async for response in live.stub.EmbedStream(iter([REQUEST, REQUEST]))]
    assert [response.error.code for response in answers] == ["INTERNAL"] * 2
    assert answers[0].error.message == INTERNAL


@pytest.mark.parametrize("path", ["/embed", "/models/{model}/embed"])
def test_openapi_lists_every_status_of_the_embed_routes(path: str) -> None:
    responses = wire_path(path, EMBED_PATHS[path], [])["post"]["responses"]
    statuses = {str(status) for status, _ in STATUSES.values()}
    # The server never rejects a POST for its method.
    assert responses.keys() == (statuses | {"200", "default"}) - {"405"}
    again = [status for status, one in responses.items() if "Retry-After" in one.get("headers", {})]
    assert again == ["429", "503"]


def test_admin_errors_have_their_status() -> None:
    statuses = {leaf.__name__: leaf.http_status for leaf in leaves()}
    assert OF_ADMINISTRATORS.items() <= statuses.items()


@pytest.mark.parametrize("path", [*EMBED_PATHS, *INFER_PATHS])
def test_each_lookup_route_describes_its_headers(path: str) -> None:
    operation = (EMBED_PATHS | INFER_PATHS)[path]["post"]
    headers = {one["name"] for one in operation["parameters"] if one["in"] == "header"}
    assert headers >= {"X-Timeout-Ms", "X-Routing-Key"}
