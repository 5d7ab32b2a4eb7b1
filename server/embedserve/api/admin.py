"""Administrators' routes, which change what a running server serves.

They accept only application/json, which a page of another site cannot make a browser send here.
"""

from __future__ import annotations

from typing import Annotated, Protocol

from fastapi import APIRouter, Depends, Header, Request
from pydantic import BaseModel, Field

from embedserve.errors import EmbedServeError

JSON_TYPE = "application/json"
_IGNORED = {"schema": {"description": "Ignored."}, "example": {}}


class AdminOperations(Protocol):
    """The operations of administrators; processes/rollout/admin_service.py implements them."""

    async def load(self, name: str) -> int: ...

    async def unload(self, name: str) -> None: ...

    def reload(self) -> None: ...


class NotJsonError(EmbedServeError):
    code = "INVALID_ARGUMENT"
    http_status = 415


class Name(BaseModel):
    """The model that an operation applies to."""

    model: str = Field(
        description="NAME for the newest version, NAME@VERSION or NAME@ALIAS.", max_length=1000
    )


class Loaded(BaseModel):
    """The version that is now served."""

    model: str
    version: int


class Done(BaseModel):
    status: str


async def check_json(content_type: str = Header("", include_in_schema=False)) -> None:
    """Raises NotJsonError if the body's content type is not application/json."""
    if content_type.partition(";")[0].strip().lower() != JSON_TYPE:
        raise NotJsonError(f"Content-Type is {content_type!r}: send {JSON_TYPE}", "Content-Type")


async def _operations(request: Request) -> AdminOperations:
    operations: AdminOperations = request.app.state.admin
    return operations


AdminDep = Annotated[AdminOperations, Depends(_operations)]
"""Parameter of a handler that gets the administrators' operations."""

router = APIRouter(prefix="/admin", tags=["admin"], dependencies=[Depends(check_json)])
"""The routes. They do not check roles; AuthMiddleware does."""


@router.post("/load", summary="Load a version")
async def load(name: Name, admin: AdminDep) -> Loaded:
    """Loads a version, next to the served versions or in place of the one that its name meant
    before. Responds once the version is served; 409 with the reason if it cannot be served."""
    return Loaded(model=name.model, version=await admin.load(name.model))


@router.post("/unload", summary="Stop serving a name")
async def unload(name: Name, admin: AdminDep) -> Done:
    """Stops serving a name; requests already queued are answered."""
    await admin.unload(name.model)
    return Done(status="unloaded")


@router.post(
    "/reload",
    summary="Check the store now",
    status_code=202,
    # Without a body generated clients, and the OpenAPI pages, would send no content type.
    openapi_extra={"requestBody": {"required": True, "content": {JSON_TYPE: _IGNORED}}},
)
async def reload(admin: AdminDep) -> Done:
    """Checks the store immediately, whatever is followed, and retries versions that failed.
    /models shows the outcome."""
    admin.reload()
    return Done(status="looking")
