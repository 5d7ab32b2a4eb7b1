"""GET /slow: the slowest requests of the last minutes, for people and the console."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field

from embedserve.api.dependencies import PipelineDep
from embedserve.tracing.slow_requests import KEPT_S

router = APIRouter()


class SlowRequest(BaseModel):
    """A request that ended, with any outcome; unknown values are left out, as in the log."""

    when: str = Field(description="End of the request: ISO 8601, UTC.")
    request_id: str
    trace_id: str | None = None
    caller: str | None = Field(None, description="Name of the caller's token or certificate.")
    protocol: str
    model: str | None = None
    version: int | None = None
    examples: int | None = None
    ids: int | None = None
    outcome: str
    read_ms: float
    queue_ms: float | None = None
    lookup_ms: float | None = None
    encode_ms: float | None = None
    write_ms: float | None = None
    total_ms: float


class Slow(BaseModel):
    """The slowest requests that took longer than `serve --slow-ms`, slowest first."""

    seconds: float = Field(description="Greatest age of a listed request.")
    requests: list[SlowRequest] = Field(description="Requests of the worker that responds.")


@router.get(
    "/slow", summary="List slow requests", tags=["metrics"], response_model_exclude_none=True
)
async def slow(pipeline: PipelineDep) -> Slow:
    """Lists the slowest requests of the last minutes, with the time spent in each stage."""
    pipeline.models.check_loaded()
    requests = pipeline.telemetry.slow.fields()
    return Slow.model_validate({"seconds": KEPT_S, "requests": requests})
