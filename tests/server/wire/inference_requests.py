"""Requests of the Open Inference Protocol in every format, to a server with three models."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import grpc
import numpy as np
import pytest
from server.fake_engine import Bags, FakeEngine
from server.fake_models import ruled_info, unpooled_info
from server.live import Live, live_server
from server.open_inference import (
    LENGTH_HEADER,
    InferRequest,
    InferResponse,
    read_body,
    read_message,
)

from embedserve_proto.open_inference_pb2_grpc import GRPCInferenceServiceStub

BAGS: Bags = {"tag": [[1], [2, 3], []], "user": [[4], [], [6]]}
COLUMNS = {"user": slice(0, 4), "movie": slice(4, 7), "tag": slice(7, 9)}
Infer = Callable[[Live, InferRequest, str], Awaitable[InferResponse]]


@pytest.fixture
async def live(engine: FakeEngine) -> AsyncIterator[Live]:
    others = FakeEngine(ruled_info()), FakeEngine(unpooled_info())
    async with live_server(engine, *others) as live:
        yield live


def stub(live: Live) -> GRPCInferenceServiceStub:
    return GRPCInferenceServiceStub(live.channel)


class RejectedRequestError(Exception):
    """A request was rejected, with this message and status."""

    def __init__(self, message: str, status: int | str) -> None:
        super().__init__(message)
        self.status = status


async def post(
    live: Live, infer_request: InferRequest, model: str, *, is_binary: bool
) -> InferResponse:
    if is_binary:
        body, headers = infer_request.binary_body()
    else:
        body, headers = infer_request.json_body(), {}
    answer = await live.http.post(f"/v2/models/{model}/infer", content=body, headers=headers)
    if answer.status_code != 200:
        assert list(answer.json()) == ["error"]
        raise RejectedRequestError(answer.json()["error"], answer.status_code)
    has_values = len(infer_request.outs) < max(1, len(infer_request.outputs))
    head_bytes = answer.headers.get(LENGTH_HEADER)
    assert (head_bytes is not None) == (is_binary and has_values)
    kind = "application/json" if head_bytes is None else "application/octet-stream"
    assert answer.headers["content-type"] == kind
    return read_body(answer.content, head_bytes)


async def as_json(live: Live, infer_request: InferRequest, model: str = "shop") -> InferResponse:
    return await post(live, infer_request, model, is_binary=False)


async def as_binary(live: Live, infer_request: InferRequest, model: str = "shop") -> InferResponse:
    return await post(live, infer_request, model, is_binary=True)


async def call(
    live: Live, infer_request: InferRequest, model: str, *, is_raw: bool
) -> InferResponse:
    try:
        return read_message(
            await stub(live).ModelInfer(infer_request.message(model, is_raw=is_raw))
        )
    except grpc.aio.AioRpcError as error:
        raise RejectedRequestError(str(error.details()), error.code().name) from None


async def as_raw(live: Live, infer_request: InferRequest, model: str = "shop") -> InferResponse:
    return await call(live, infer_request, model, is_raw=True)


async def as_typed(live: Live, infer_request: InferRequest, model: str = "shop") -> InferResponse:
    return await call(live, infer_request, model, is_raw=False)


async def as_stream(live: Live, infer_request: InferRequest, model: str = "shop") -> InferResponse:
    requests = iter([infer_request.message(model, is_raw=True)])
    (answer,) = [one async for one in stub(live).ModelStreamInfer(requests)]
    assert answer.error_message == ""
    return read_message(answer.infer_response)


FORMS: Mapping[str, Infer] = {
    one.__name__: one for one in (as_json, as_binary, as_raw, as_typed, as_stream)
}


@pytest.fixture(params=FORMS)
def infer(request: pytest.FixtureRequest) -> Infer:
    return FORMS[request.param]


def check(
    response: InferResponse, expected: np.ndarray, keys: tuple[str, ...] = tuple(COLUMNS)
) -> None:
    assert (response.model, response.version) == ("shop", "7")
    assert list(response.outputs) == list(keys)
    for key in keys:
        assert np.array_equal(response.outputs[key], expected[:, COLUMNS[key]])
        assert response.outputs[key].dtype == expected.dtype
