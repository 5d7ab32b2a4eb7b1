"""The routes of Triton's system shared memory: regions are told, registered and unregistered.

Each caller has its own. A page that a browser shows has none: it could be any site's, and browsers
let it ask the ports of this host.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, ValidationError

from embedserve.access.authenticator import CERTIFICATE, one_header
from embedserve.errors import InvalidRequestError, PermissionDeniedError, RequestTooLargeError
from embedserve.pipeline import ORIGIN, RequestPipeline
from embedserve.shared_memory.region_registry import EVERYBODY, RegionRegistry

PREFIX = "/v2/systemsharedmemory"
BODY_BYTES_MAX = 4096
EMBEDDERS = frozenset({"embed"})


class Range(BaseModel):
    """Which part of a file a region is."""

    key: str = Field(description="Of a file in /dev/shm, such as /ranker-0.")
    offset: int = Field(0, strict=True, description="Where it begins, in bytes.")
    byte_size: int = Field(strict=True, description="How many it has.")


class RegionStatus(BaseModel):
    """A region of the caller's."""

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


def shared_memory_routes(pipeline: RequestPipeline, shared: RegionRegistry) -> APIRouter:
    """Of what callers of ``pipeline`` have registered."""
    router = APIRouter(prefix=PREFIX, tags=["open inference"])

    def owner_of(request: Request) -> str:
        headers = request.scope["headers"]
        if one_header(headers, ORIGIN) is not None:
            raise PermissionDeniedError("a browser's page has no shared memory: Origin is set")
        access = pipeline.authenticator
        if access is None:
            return EVERYBODY
        authorization = one_header(headers, b"authorization")
        # The guard has had it pay.
        certificate = request.scope.get(CERTIFICATE)
        return access.check(authorization, certificate, EMBEDDERS, pays=False).grant.name

    def told(owner: str, name: str = "") -> list[RegionStatus]:
        return [
            RegionStatus(name=one.name, key=one.key, offset=one.offset, byte_size=one.byte_size)
            for one in shared.status(owner, name)
        ]

    @router.get("/status")
    async def regions(request: Request) -> list[RegionStatus]:
        """All regions that the caller has registered."""
        return told(owner_of(request))

    @router.get("/region/{region}/status")
    async def region(region: str, request: Request) -> list[RegionStatus]:
        """A region that the caller has registered; 404 where it has none of that name."""
        return told(owner_of(request), region)

    @router.post("/region/{region}/register", response_class=Response, openapi_extra=_RANGE)
    async def register_region(region: str, request: Request) -> Response:
        """Registers a part of a file in /dev/shm, where tensors of the caller's may lie."""
        owner = owner_of(request)
        given = await _range(request)
        shared.register(owner, region, given.key, given.offset, given.byte_size)
        return Response()

    @router.post("/unregister", response_class=Response)
    async def unregister_regions(request: Request) -> Response:
        """Forgets all regions that the caller has registered."""
        shared.unregister(owner_of(request))
        return Response()

    @router.post("/region/{region}/unregister", response_class=Response)
    async def unregister_region(region: str, request: Request) -> Response:
        """Forgets a region that the caller has registered, if there is one."""
        shared.unregister(owner_of(request), region)
        return Response()

    return router


async def _range(request: Request) -> Range:
    """Of a body of any content type: Triton's clients name none.

    Raises:
        InvalidRequestError: it is none.
        RequestTooLargeError: it has over BODY_BYTES_MAX.
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
