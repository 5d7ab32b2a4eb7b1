"""Routes of Triton's system shared memory: status, registration and unregistration of regions.

Each caller has its own regions. Requests from a browser page are rejected: the page may belong to
any site, and browsers let it reach the ports of this host.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, Field

from embedserve.access.authenticator import CERTIFICATE, headers_by_name
from embedserve.access.grants import EMBEDDERS
from embedserve.api.dependencies import PipelineDep, json_body_of, read_json
from embedserve.errors import PermissionDeniedError
from embedserve.pipeline import ORIGIN_HEADER
from embedserve.shared_memory.region_registry import EVERYBODY, RegionRegistry

PREFIX = "/v2/systemsharedmemory"

router = APIRouter(prefix=PREFIX, tags=["open inference"])


class Range(BaseModel):
    """The range of a file that a region covers."""

    key: str = Field(description="Name of a file in /dev/shm, such as /ranker-0.")
    offset: int = Field(0, strict=True, description="Start of the range in the file, in bytes.")
    byte_size: int = Field(strict=True, description="Length of the range, in bytes.")


class RegionStatus(BaseModel):
    """A region registered by the caller."""

    name: str
    key: str
    offset: int
    byte_size: int


async def _owner(request: Request, pipeline: PipelineDep) -> str:
    headers = headers_by_name(request.scope["headers"])
    if ORIGIN_HEADER in headers:
        raise PermissionDeniedError("a browser's page has no shared memory: Origin is set")
    pipeline.models.check_loaded()
    authenticator = pipeline.authenticator
    if authenticator is None:
        return EVERYBODY
    authorization = headers.get(b"authorization")
    # AuthMiddleware has already charged the request to the caller's rate limit.
    certificate = request.scope.get(CERTIFICATE)
    return authenticator.check(authorization, certificate, EMBEDDERS, charge=False).grant.name


async def _regions(pipeline: PipelineDep) -> RegionRegistry:
    assert pipeline.shared_memory is not None
    return pipeline.shared_memory


OwnerDep = Annotated[str, Depends(_owner)]
RegionsDep = Annotated[RegionRegistry, Depends(_regions)]


def _status(shared: RegionRegistry, owner: str, name: str = "") -> list[RegionStatus]:
    return [
        RegionStatus(name=one.name, key=one.key, offset=one.offset, byte_size=one.byte_size)
        for one in shared.status(owner, name)
    ]


@router.get("/status", summary="List shared-memory regions")
async def regions(owner: OwnerDep, shared: RegionsDep) -> list[RegionStatus]:
    """Lists all regions registered by the caller."""
    return _status(shared, owner)


@router.get("/region/{region}/status", summary="Get a shared-memory region")
async def region(region: str, owner: OwnerDep, shared: RegionsDep) -> list[RegionStatus]:
    """Returns a region registered by the caller; 404 if the caller has none of that name."""
    return _status(shared, owner, region)


@router.post(
    "/region/{region}/register",
    summary="Register a shared-memory region",
    response_class=Response,
    openapi_extra=json_body_of(Range),
)
async def register_region(
    region: str, owner: OwnerDep, shared: RegionsDep, request: Request
) -> Response:
    """Registers a range of a file in /dev/shm for the caller's tensors."""
    given = await read_json(request, Range)
    shared.register(owner, region, given.key, given.offset, given.byte_size)
    return Response()


@router.post("/unregister", summary="Unregister all shared-memory regions", response_class=Response)
async def unregister_regions(owner: OwnerDep, shared: RegionsDep) -> Response:
    """Unregisters all regions of the caller."""
    shared.unregister(owner)
    return Response()


@router.post(
    "/region/{region}/unregister",
    summary="Unregister a shared-memory region",
    response_class=Response,
)
async def unregister_region(region: str, owner: OwnerDep, shared: RegionsDep) -> Response:
    """Unregisters a region of the caller, if it exists."""
    shared.unregister(owner, region)
    return Response()
