"""The routes of administrators: what is served while the server runs.

They take application/json only, which no page of another site can have a browser send here.
"""

from __future__ import annotations

from typing import Protocol

from fastapi import Depends, FastAPI, Header
from pydantic import BaseModel, Field

from embedserve.errors import EmbedServeError

JSON = "application/json"


class AdminOperations(Protocol):
    """Does what is asked; processes/admin_service.py."""

    async def load(self, name: str) -> int: ...

    async def unload(self, name: str) -> None: ...

    def reload(self) -> None: ...


class NotJsonError(EmbedServeError):
    code = "INVALID_ARGUMENT"
    http_status = 415


class Name(BaseModel):
    """What is meant."""

    model: str = Field(
        description="NAME for the newest version, NAME@VERSION or NAME@ALIAS.", max_length=1000
    )


class Loaded(BaseModel):
    """What answers now."""

    model: str
    version: int


class Done(BaseModel):
    status: str


def check_json(content_type: str = Header("", include_in_schema=False)) -> None:
    """Raises NotJsonError for another body."""
    if content_type.partition(";")[0].strip().lower() != JSON:
        raise NotJsonError(f"Content-Type is {content_type!r}: send {JSON}", "Content-Type")


def add_admin(app: FastAPI, operator: AdminOperations) -> None:
    """Adds the routes to ``app``; whoever reaches them may do all of it."""
    json_only = [Depends(check_json)]

    @app.post("/admin/load", tags=["admin"], dependencies=json_only)
    async def load(name: Name) -> Loaded:
        """Loads a version beside what is served, or in the place of what its name meant; answers
        once it does. 409 with the reason where it cannot be served."""
        return Loaded(model=name.model, version=await operator.load(name.model))

    @app.post("/admin/unload", tags=["admin"], dependencies=json_only)
    async def unload(name: Name) -> Done:
        """Has nothing answer for a name any more; what it holds is answered."""
        await operator.unload(name.model)
        return Done(status="unloaded")

    @app.post("/admin/reload", tags=["admin"], dependencies=json_only, status_code=202)
    async def reload() -> Done:
        """Has the store looked at now, whatever is followed, and tries again what was refused;
        /models tells what comes of it."""
        operator.reload()
        return Done(status="looking")
