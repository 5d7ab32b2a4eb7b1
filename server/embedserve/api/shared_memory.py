"""Routes of Triton's system shared memory: status, registration and unregistration of regions.

Each caller has its own regions. Requests from a browser page are rejected: the page may belong to
any site, and browsers let it reach the ports of this host.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, Field, ValidationError

from embedserve.access.authenticator import CERTIFICATE, one_header
from embedserve.access.grants import EMBEDDERS
from embedserve.api.dependencies import PipelineDep
from embedserve.errors import InvalidRequestError, PermissionDeniedError, RequestTooLargeError
from embedserve.pipeline import ORIGIN
from embedserve.shared_memory.region_registry import EVERYBODY, RegionRegistry

PREFIX = "/v2/systemsharedmemory"
BODY_BYTES_MAX = 4096

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


_RANGE: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": Range.model_json_schema()}},
    }
}


async def _owner(request: Request, pipeline: PipelineDep) -> str:
    headers = request.scope["headers"]
    if one_header(headers, ORIGIN) is not None:
        raise PermissionDeniedError("a browser's page has no shared memory: Origin is set")
    pipeline.models.check_loaded()
    access = pipeline.authenticator
    if access is None:
        return EVERYBODY
    authorization = one_header(headers, b"authorization")
    # AuthMiddleware has already charged the request to the caller's rate limit.
    certificate = request.scope.get(CERTIFICATE)
    return access.check(authorization, certificate, EMBEDDERS, charge=False).grant.name


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
    openapi_extra=_RANGE,
)
async def register_region(
    region: str, owner: OwnerDep, shared: RegionsDep, request: Request
) -> Response:
    """Registers a range of a file in /dev/shm for the caller's tensors."""
    given = await _range(request)
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


async def _range(request: Request) -> Range:
    """Returns the range in a request's body. Any content type is accepted, because Triton's clients
    send none.

    Raises:
        InvalidRequestError: the body is not a valid Range.
        RequestTooLargeError: the body has more than BODY_BYTES_MAX bytes.
    """
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise RequestTooLargeError(
                f"body has at least {len(body)} bytes, the limit is {BODY_BYTES_MAX}", "body"
            )
    try:
        return Range.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(["body", *map(str, first["loc"])])
        raise InvalidRequestError(f"{field}: {first['msg']}", field) from error
