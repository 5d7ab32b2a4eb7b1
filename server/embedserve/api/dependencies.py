"""Dependencies of the route handlers: the parts of the server that they read, and JSON bodies.

``management_app`` and ``health_app`` put the parts into the state of their application. So each
route is declared once, on the router of its module, for all applications of a process.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError

from embedserve.errors import InvalidRequestError
from embedserve.models.model_registry import ModelRegistry
from embedserve.pipeline import RequestPipeline

M = TypeVar("M", bound=BaseModel)


# FastAPI would run functions that are not async in a thread.
async def _pipeline(request: Request) -> RequestPipeline:
    pipeline: RequestPipeline = request.app.state.pipeline
    return pipeline


async def _models(request: Request) -> ModelRegistry:
    return (await _pipeline(request)).models


PipelineDep = Annotated[RequestPipeline, Depends(_pipeline)]
"""Parameter of a handler that gets the pipeline of the server."""
ModelsDep = Annotated[ModelRegistry, Depends(_models)]
"""Parameter of a handler that gets the served models."""


async def read_json(request: Request, kind: type[M]) -> M:
    """Returns the ``kind`` in a request's body; an empty body stands for {}. Any content type is
    accepted, because Triton's clients send none and curl names a form.

    Raises:
        InvalidRequestError: the body is not a valid ``kind``.
    """
    try:
        return kind.model_validate_json(await request.body() or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(["body", *map(str, first["loc"])])
        raise InvalidRequestError(f"{field}: {first['msg']}", field) from error


def json_body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Returns what OpenAPI shows of a body that `read_json` reads."""
    schema = kind.model_json_schema()
    for described in schema["properties"].values():
        # Client generators treat a field with a default as always present.
        described.pop("default", None)
    content = {"application/json": {"schema": schema}}
    is_required = any(one.is_required() for one in kind.model_fields.values())
    return {"requestBody": {"required": is_required, "content": content}}
