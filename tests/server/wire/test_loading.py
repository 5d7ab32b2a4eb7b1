"""Tests of a server that is loading its models: clients shall retry, and no model is ready."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf.message import Message
from server.live import Live, make_pipeline, serving

from embedserve.config import Limits
from embedserve.errors import LOADING
from embedserve.shared_memory.region_registry import RegionRegistry
from embedserve_proto import embedding_pb2
from embedserve_proto import open_inference_pb2 as pb
from embedserve_proto.open_inference_pb2_grpc import GRPCInferenceServiceStub


@pytest.fixture
async def live(executor: ThreadPoolExecutor) -> AsyncIterator[Live]:
    shared = RegionRegistry("/", Limits())
    pipeline = make_pipeline(executor=executor, default_model="", shared_memory=shared)
    pipeline.models.not_ready = LOADING
    async with serving(pipeline) as live:
        yield live


@pytest.mark.parametrize(
    "path",
    [
        *("/health/ready", "/models", "/models/m", "/models/m/plan", "/info", "/slow"),
        *("/console/labels/m", "/v2", "/v2/health/ready", "/v2/models/m", "/v2/models/m/ready"),
        *("/v2/models/stats", "/v2/systemsharedmemory/status"),
    ],
)
async def test_server_description_is_unavailable_while_loading(live: Live, path: str) -> None:
    response = await live.http.get(path)
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    assert LOADING in response.text


async def test_repository_index_is_unavailable_while_loading(live: Live) -> None:
    response = await live.http.post("/v2/repository/index", json={})
    assert (response.status_code, LOADING in response.text) == (503, True)


async def test_region_registration_is_unavailable_while_loading(live: Live) -> None:
    region = {"key": "/m", "byte_size": 8}
    response = await live.http.post("/v2/systemsharedmemory/region/m/register", json=region)
    assert (response.status_code, LOADING in response.text) == (503, True)


@pytest.mark.parametrize(
    "path", ["/health/live", "/v2/health/live", "/", "/console", "/docs", "/openapi.json"]
)
async def test_loading_progress_can_be_watched(live: Live, path: str) -> None:
    assert (await live.http.get(path)).status_code == 200


async def test_no_worker_is_counted_while_loading(live: Live) -> None:
    metrics = (await live.http.get("/metrics")).text
    assert "\nembedserve_workers 0.0\n" in metrics
    assert "\nprocess_start_time_seconds 0.0\n" not in metrics


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("ServerMetadata", pb.ServerMetadataRequest()),
        ("ModelMetadata", pb.ModelMetadataRequest(name="m")),
        ("ModelReady", pb.ModelReadyRequest(name="m")),
        ("ModelStatistics", pb.ModelStatisticsRequest()),
        ("RepositoryIndex", pb.RepositoryIndexRequest()),
        ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
    ],
)
async def test_open_inference_grpc_is_unavailable_while_loading(
    live: Live, method: str, message: Message
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=LOADING) as caught:
        await getattr(GRPCInferenceServiceStub(live.channel), method)(message)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_models_over_grpc_are_unavailable_while_loading(live: Live) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=LOADING) as caught:
        await live.stub.ListModels(embedding_pb2.ListModelsRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
