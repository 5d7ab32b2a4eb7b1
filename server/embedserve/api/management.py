"""The management application, on FastAPI, and its routes of health, metrics and models.

Other modules of this package have the other routes, each on a ``router`` of its own. The OpenAPI
description also covers the embed routes, which the wire serves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from embedserve import __version__
from embedserve.api import delta_hold, open_inference_routes, plan, shared_memory, slow
from embedserve.api.admin import AdminOperations
from embedserve.api.admin import router as admin_router
from embedserve.api.auth_middleware import AuthMiddleware, error_response
from embedserve.api.console.labels import Labels
from embedserve.api.console.routes import HEADERS
from embedserve.api.console.routes import router as console_router
from embedserve.api.dependencies import ModelsDep, PipelineDep
from embedserve.api.openapi import describe_routes
from embedserve.api.openapi import router as openapi_router
from embedserve.api.openapi_pages import OpenApiPagesMiddleware
from embedserve.codec.model_description import describe
from embedserve.errors import INTERNAL, EmbedServeError, EngineError, InvalidRequestError
from embedserve.metrics.scrape_text import RECEIVED_S, ScrapeText
from embedserve.model_info import ModelInfo
from embedserve.models.model_registry import ModelRegistry
from embedserve.pipeline import RequestPipeline

START_PAGE = """<!doctype html>
<html lang="en"><title>embedserve</title>
<h1>embedserve</h1>
<p>Embedding lookups of TorchRec models: POST /models/MODEL/embed.</p>
<ul>%s</ul>
</html>
"""
HEALTH_LINKS = ("/health/ready",)
MANAGEMENT_LINKS = ("/console", "/docs", "/models", "/metrics", *HEALTH_LINKS)

health_router = APIRouter()
"""Health routes, which need no authentication."""
router = APIRouter()
"""Routes of metrics, information and models."""


class IdRule(BaseModel):
    """How ids of a table map to row numbers; fields that the rule does not use are left out."""

    rule: str = Field(description="rows, modulo or map.")
    id_type: str | None = Field(None, description="Only for the rule map: int64 or string.")
    entries: int | None = Field(
        None, description="Only for the rule map: number of ids in the vocabulary."
    )
    examples: list[str] | None = Field(None, description="Some of the ids of a map of strings.")
    modulus: int | None = Field(
        None, description="Only for the rule modulo: row = id mod modulus + offset."
    )
    offset: int | None = None
    unknown: str | None = Field(
        None,
        description="Treatment of an id without a row: error rejects its request, skip leaves it "
        "out, row looks up default_row.",
    )
    default_row: int | None = None


class TableResponse(BaseModel):
    """A table of a served model."""

    name: str
    num_embeddings: int
    embedding_dim: int
    pooling: str = Field(description="sum or mean; none for an unpooled model.")
    dtype: str
    features: list[str]
    sharding: str
    ids: IdRule


class NextVersion(BaseModel):
    """A version that is to take over but is not served yet."""

    version: int
    state: str = Field(description="loading, warming, or failed if it will not be served.")
    reason: str = Field(description="Reason of the failure.")
    since: str = Field(description="ISO 8601, UTC.")


class Deltas(BaseModel):
    """Deltas that a model follows."""

    line: int = Field(description="Version at which the line of deltas begins.")
    seq: int = Field(description="Last delta whose rows are served; 0 for none.")
    wanted_seq: int = Field(
        description="Last delta that is known to be in the store, up to at_seq."
    )
    as_of: str | None = Field(
        None, description="Time at which training read the last delta's rows: ISO 8601, UTC."
    )
    looked_at: str | None = Field(
        None, description="Time of the last poll of the store for deltas: ISO 8601, UTC."
    )
    lag_s: float = Field(description="Age in seconds of the oldest delta that is not applied.")
    state: str = Field(description="catching up, following, stalled, full or held.")
    reason: str = Field(description="Reason why no delta is applied.")
    rows_changed: int = Field(
        description="Rows that differ from those of the version. A row of tables that share "
        "features counts once."
    )
    ids_changed: int = Field(
        description="Ids of vocabularies that are new, have another row or are removed since the "
        "version."
    )
    memory_bytes: int = Field(description="Bytes of memory that changed rows take.")
    undo_from: int = Field(
        description="First delta that the server can go back to without reading the store."
    )
    at_seq: int | None = Field(
        None,
        description="Last delta that may be applied: that of an alias with --at-seq, or during a "
        "move that of the next version. Absent if every delta may.",
    )
    signatures: str | None = Field(
        None, description="required: deltas need a signature (--delta-key). Absent otherwise."
    )
    notify: str | None = Field(
        None,
        description="connected or disconnected: the broker of --delta-notify. Absent without it.",
    )


class ShardPart(BaseModel):
    """A part of a router's model, which shards serve."""

    part: int = Field(description="Number of the part, from 0.")
    replicas: int = Field(
        description="Shards that serve it, as the worker that responds sees them."
    )
    why: str = Field(description="Why the part has no replica; empty if it has one.")


class Model(BaseModel):
    """A served model."""

    model: str
    version: int
    features: list[str]
    keys: list[str]
    length_per_key: list[int]
    unpooled: bool = Field(description="Responses have one row for each id, and lengths.")
    tables: list[TableResponse]
    device: str
    bytes_per_rank: list[int] = Field(
        description="Bytes of table rows on each rank, for each replica."
    )
    replicas: int = Field(description="Copies of the tables, each on its own GPUs; 1 on CPUs.")
    replanned: bool
    lookup: str = Field(
        description="How lookups run: traced, scripted or eager; in parts, if by shards."
    )
    fingerprint: str = Field(
        description="Identifies the published version, wherever it or a part of it is served."
    )
    part: int = Field(description="Number of the part of the tables that this server holds.")
    parts: int = Field(description="Number of parts; 0 where whole tables are served.")
    alias: str = Field(
        description="Alias or number that it is served by; empty for the newest version."
    )
    share: float = Field(description="Percentage of the model's requests without a version.")
    shadow: float = Field(
        description="Percentage of the served version's batches that this shadow version looks up, "
        "too, for comparison."
    )
    since: str = Field(description="Time since this version serves: ISO 8601, UTC.")
    next: NextVersion | None = Field(
        None, description="Version that is being loaded or has failed to load; null if none."
    )
    leaving: list[int] = Field(description="Previous versions that are draining.")
    deltas: Deltas | None = Field(
        None, description="Deltas that it follows; left out if it follows none."
    )
    shards: list[ShardPart] | None = Field(
        None, description="Parts of the tables; left out unless the server is a router."
    )
    local_tables: list[str] | None = Field(
        None, description="Tables that a router looks up itself; left out unless it is one."
    )


class Models(BaseModel):
    """All served models, and the default model of POST /embed."""

    models: list[Model]
    default_model: str


class HealthResponse(BaseModel):
    status: str


class Info(BaseModel):
    """How the server runs."""

    version: str = Field(description="Version of embedserve.")
    workers: int = Field(description="Number of worker processes.")
    tables: str = Field(description="mapped from the store's files, or resident in memory.")


@health_router.get("/health/live", summary="Check liveness", tags=["health"])
async def live() -> HealthResponse:
    """Reports that the process runs."""
    return HealthResponse(status="live")


@health_router.get("/health/ready", summary="Check readiness", tags=["health"])
async def ready(models: ModelsDep) -> HealthResponse:
    """Reports that all models are loaded, checked and warm. 503 while draining before the stop, and
    if a model's files were changed while it was served."""
    models.check_ready()
    return HealthResponse(status="ready")


@router.get(
    "/metrics",
    name="metrics",
    summary="Get Prometheus metrics",
    tags=["metrics"],
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def scrape(request: Request) -> Response:
    """Prometheus metrics."""
    scrape_text: ScrapeText = request.app.state.scrape_text
    rendered = await scrape_text.render(request.scope.get(RECEIVED_S, math.inf))
    return Response(rendered, media_type=CONTENT_TYPE_LATEST)


@router.get("/info", summary="Get server information", tags=["info"])
async def info(pipeline: PipelineDep) -> Info:
    """Describes how the server runs; /models lists what it serves."""
    pipeline.models.check_loaded()
    metrics = pipeline.metrics
    return Info(version=__version__, workers=metrics.workers, tables=metrics.tables)


@router.get("/models", summary="List models", tags=["models"], response_model_exclude_none=True)
async def models(served: ModelsDep) -> Models:
    """Lists every served version of every model."""
    served.check_loaded()
    return Models(
        models=[_described(served, one) for one in served.models()],
        default_model=served.default_model,
    )


@router.get(
    "/models/{model}", summary="Get a model", tags=["models"], response_model_exclude_none=True
)
async def model(model: str, served: ModelsDep) -> Model:
    """Returns one served model, NAME, or one of its versions, NAME@VERSION or NAME@ALIAS."""
    return _described(served, served.model(model))


def _described(served: ModelRegistry, info: ModelInfo) -> Model:
    return Model.model_validate(describe(info) | served.status(info))


def health_app(pipeline: RequestPipeline) -> FastAPI:
    """Returns the FastAPI application for the main ports of a server with a separate management
    port. It serves health and the caller's shared memory only."""
    routes = [*open_inference_routes.health_router.routes, *health_router.routes]
    if pipeline.shared_memory is not None:
        routes += shared_memory.router.routes
    app = FastAPI(
        routes=routes, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.pipeline = pipeline
    _add_start_page(app, HEALTH_LINKS)
    if pipeline.shared_memory is not None:
        _authenticate(app, pipeline)
    _add_error_handlers(app)
    return app


def management_app(
    pipeline: RequestPipeline,
    admin: AdminOperations | None = None,
    labels: Labels | None = None,
    *,
    authenticates: bool = True,
) -> FastAPI:
    """Returns the FastAPI application with every route but the embed routes.

    Its pages load nothing from other hosts, because clusters often cannot reach a CDN.

    Args:
        admin: performs the administrators' operations; without it their routes are left out.
        labels: labels of ids, for the console.
        authenticates: whether callers are authenticated, if the server has an authenticator.
    """
    routers = [open_inference_routes.health_router, health_router, router, plan.router]
    routers.append(open_inference_routes.router)
    if pipeline.shared_memory is not None:
        routers.append(shared_memory.router)
    routers += [slow.router, console_router, openapi_router]
    if admin is not None:
        routers += [admin_router, delta_hold.router]
    app = FastAPIOffline(
        title="embedserve",
        version=__version__,
        description="Embedding lookups of TorchRec models.",
        # include_router would make each route anew, which takes 23 ms in all.
        routes=[route for one in routers for route in one.routes],
        redirect_slashes=False,  # a redirect would echo the client's Host header
    )
    state = app.state
    state.pipeline, state.admin, state.labels = pipeline, admin, labels or {}
    state.scrape_text = ScrapeText(pipeline.metrics.registry())
    _add_start_page(app, MANAGEMENT_LINKS)
    app.add_middleware(OpenApiPagesMiddleware)
    if authenticates:
        _authenticate(app, pipeline)
    _add_error_handlers(app)
    describe_routes(app, pipeline)
    return app


def _authenticate(app: FastAPI, pipeline: RequestPipeline) -> None:
    """Adds AuthMiddleware to ``app``, if the server has an authenticator."""
    if (authenticator := pipeline.authenticator) is not None:
        addresses = pipeline.addresses
        app.add_middleware(AuthMiddleware, authenticator=authenticator, addresses=addresses)


def _add_start_page(app: FastAPI, links: Sequence[str]) -> None:
    """Adds a page of links for browsers that open the port. It discloses nothing else."""
    page = START_PAGE % "".join(f'<li><a href=".{link}">{link}</a></li>' for link in links)

    @app.get("/", include_in_schema=False)
    async def start() -> Response:
        return Response(page, 200, HEADERS, "text/html; charset=utf-8")


def _add_error_handlers(app: FastAPI) -> None:
    """Gives every error the JSON format of the embed routes or of the Open Inference Protocol."""

    @app.exception_handler(EmbedServeError)
    async def on_known_error(request: Request, error: EmbedServeError) -> Response:
        return error_response(error, error.http_status, request.scope)

    @app.exception_handler(HTTPException)
    async def on_routing_error(request: Request, error: HTTPException) -> Response:
        shaped = InvalidRequestError(f"{request.method} {request.scope['path']}: {error.detail}")
        if error.status_code == 404:
            shaped.code = "NOT_FOUND"
        response = error_response(shaped, error.status_code, request.scope)
        response.headers.update(error.headers or {})
        if response.headers.get("allow") == "GET":
            response.headers["allow"] = "GET, HEAD"  # AsgiHandler responds to HEAD like to GET
        return response

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        invalid = InvalidRequestError(f"{field}: {first['msg']}", field)
        return error_response(invalid, 400, request.scope)

    @app.exception_handler(Exception)
    async def on_unexpected_error(request: Request, error: Exception) -> Response:
        """Responds with 500. Starlette then raises ``error`` again, for AsgiHandler to log."""
        return error_response(EngineError(INTERNAL), EngineError.http_status, request.scope)
