"""Routes of the Open Inference Protocol other than inference: health, metadata, configuration,
statistics and the repository index. POST …/infer is served by the wire."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from embedserve.access.authenticator import CALLER
from embedserve.api.dependencies import ModelsDep, PipelineDep, json_body_of, read_json
from embedserve.open_inference_service import (
    configuration,
    metadata,
    repository,
    served,
    server_metadata,
    statistics,
)

TAG = "open inference"
health_router = APIRouter(prefix="/v2/health", tags=[TAG])
"""Health routes, which need no authentication."""
router = APIRouter(prefix="/v2", tags=[TAG])
"""Routes of metadata, configuration, readiness, statistics and the repository index."""


class Live(BaseModel):
    live: bool


class Ready(BaseModel):
    ready: bool


class Server(BaseModel):
    """Name, version and protocol extensions of the server."""

    name: str
    version: str = Field(description="Version of embedserve.")
    extensions: list[str]


class TensorMetadata(BaseModel):
    name: str
    datatype: str
    shape: list[int] = Field(description="-1 stands for any size.")


class ModelMetadata(BaseModel):
    """Input and output tensors of a model. A request may leave out any of the features."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ConfiguredTensor(BaseModel):
    name: str
    data_type: str = Field(description="TYPE_INT64, TYPE_INT32, TYPE_STRING or TYPE_FP32.")
    dims: list[int] = Field(description="-1 stands for any size.")


class ConfiguredInput(ConfiguredTensor):
    optional: bool


class ModelConfig(BaseModel):
    """Tensors of a model, in the fields of Triton's model configuration that apply."""

    name: str
    platform: str
    max_batch_size: int = Field(description="0: shapes include the batch dimension.")
    input: list[ConfiguredInput]
    output: list[ConfiguredTensor]


class ModelReady(BaseModel):
    name: str
    ready: bool


class Duration(BaseModel):
    count: int
    ns: int = Field(description="Total time in nanoseconds.")


class InferStatistics(BaseModel):
    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class ModelStatistics(BaseModel):
    """Counts and times of the requests of a version since it began to serve."""

    name: str
    version: str
    last_inference: int
    inference_count: int = Field(description="Number of examples.")
    execution_count: int = Field(description="Number of batches.")
    inference_stats: InferStatistics


class Statistics(BaseModel):
    model_stats: list[ModelStatistics]


class Indexed(BaseModel):
    """A version of a model that is served or pending."""

    name: str
    version: str
    state: str = Field(description="READY, LOADING or UNAVAILABLE.")
    reason: str


class RepositoryIndexRequest(BaseModel):
    ready: bool = Field(
        False, strict=True, description="Whether to list ready versions only. Default: all."
    )


@health_router.get("/live", summary="Check liveness")
async def live() -> Live:
    """Reports that the process runs."""
    return Live(live=True)


@health_router.get("/ready", summary="Check readiness")
async def ready(models: ModelsDep) -> Ready:
    """Reports that all models are ready; 503 if a model is not."""
    models.check_ready()
    return Ready(ready=True)


@router.get("", summary="Get server metadata")
async def server(pipeline: PipelineDep) -> Server:
    """Returns the name, version and extensions of the server."""
    return Server.model_validate(server_metadata(pipeline))


@router.get("/models/stats", summary="Get statistics of all models")
async def statistics_of_all(pipeline: PipelineDep, request: Request) -> Statistics:
    """Returns request counts and times of every model that the caller may use."""
    stats = {"model_stats": statistics(pipeline, quota=request.scope.get(CALLER))}
    return Statistics.model_validate(stats)


@router.get("/models/{model}/versions/{version}", summary="Get metadata of a version")
async def model_version(model: str, version: str, pipeline: PipelineDep) -> ModelMetadata:
    """Returns the tensors of a version."""
    return ModelMetadata.model_validate(metadata(pipeline, model, version))


@router.get("/models/{model}", summary="Get metadata of a model")
async def model(model: str, pipeline: PipelineDep) -> ModelMetadata:
    """Returns the tensors of a model."""
    return await model_version(model, "", pipeline)


@router.get("/models/{model}/versions/{version}/config", summary="Get configuration of a version")
async def configuration_of_version(model: str, version: str, pipeline: PipelineDep) -> ModelConfig:
    """Returns the tensors of a version, in the format of Triton's model configuration."""
    return ModelConfig.model_validate(configuration(served(pipeline, model, version)))


@router.get("/models/{model}/config", summary="Get configuration of a model")
async def configuration_of_model(model: str, pipeline: PipelineDep) -> ModelConfig:
    """Returns the tensors of a model, in the format of Triton's model configuration."""
    return await configuration_of_version(model, "", pipeline)


@router.get("/models/{model}/versions/{version}/ready", summary="Check readiness of a version")
async def model_version_ready(model: str, version: str, pipeline: PipelineDep) -> ModelReady:
    """Reports whether a version is ready; 404 if it does not exist, 503 if it is not ready."""
    name = served(pipeline, model, version).name
    pipeline.models.check_ready()
    return ModelReady(name=name, ready=True)


@router.get("/models/{model}/ready", summary="Check readiness of a model")
async def model_ready(model: str, pipeline: PipelineDep) -> ModelReady:
    """Reports whether a model is ready; 404 if it does not exist, 503 if it is not ready."""
    return await model_version_ready(model, "", pipeline)


@router.get("/models/{model}/versions/{version}/stats", summary="Get statistics of a version")
async def statistics_of_version(
    model: str, version: str, pipeline: PipelineDep, request: Request
) -> Statistics:
    """Returns request counts and times of a version."""
    stats = {"model_stats": statistics(pipeline, model, version, request.scope.get(CALLER))}
    return Statistics.model_validate(stats)


@router.get("/models/{model}/stats", summary="Get statistics of a model")
async def statistics_of_model(model: str, pipeline: PipelineDep, request: Request) -> Statistics:
    """Returns request counts and times of a model."""
    return await statistics_of_version(model, "", pipeline, request)


# The schema of the list is named after the operation id.
@router.post(
    "/repository/index",
    operation_id="v2_index",
    summary="List versions served or pending",
    openapi_extra=json_body_of(RepositoryIndexRequest),
)
async def index(pipeline: PipelineDep, request: Request) -> list[Indexed]:
    """Lists every version that is served or pending."""
    only_ready = (await read_json(request, RepositoryIndexRequest)).ready
    return [Indexed.model_validate(one) for one in repository(pipeline, only_ready=only_ready)]
