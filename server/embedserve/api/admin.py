"""Administrators' routes, which change what a running server serves.

They accept only application/json, which a page of another site cannot make a browser send here.
"""

from __future__ import annotations

from typing import Protocol

from fastapi import Depends, FastAPI, Header
from pydantic import BaseModel, Field

from embedserve.errors import EmbedServeError

JSON = "application/json"


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


def check_json(content_type: str = Header("", include_in_schema=False)) -> None:
    """Raises NotJsonError if the body's content type is not application/json."""
    if content_type.partition(";")[0].strip().lower() != JSON:
        raise NotJsonError(f"Content-Type is {content_type!r}: send {JSON}", "Content-Type")


def add_admin(app: FastAPI, admin: AdminOperations) -> None:
    """Adds the routes to ``app``. The routes do not check roles; AuthMiddleware does."""
    json_only = [Depends(check_json)]

    @app.post("/admin/load", summary="Load a version", tags=["admin"], dependencies=json_only)
    async def load(name: Name) -> Loaded:
        """Loads a version, next to the served versions or in place of the one that its name meant
        before. Responds once the version is served; 409 with the reason if it cannot be served."""
        return Loaded(model=name.model, version=await admin.load(name.model))

    @app.post(
        "/admin/unload", summary="Stop serving a name", tags=["admin"], dependencies=json_only
    )
    async def unload(name: Name) -> Done:
        """Stops serving a name; requests already queued are answered."""
        await admin.unload(name.model)
        return Done(status="unloaded")

    @app.post(
        "/admin/reload",
        summary="Check the store now",
        tags=["admin"],
        dependencies=json_only,
        status_code=202,
    )
    async def reload() -> Done:
        """Checks the store immediately, whatever is followed, and retries versions that failed.
        /models shows the outcome."""
        admin.reload()
        return Done(status="looking")
