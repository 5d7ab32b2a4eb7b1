"""OpenAPI description of all routes: those of FastAPI, and those that the wire serves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from embedserve.api.auth_middleware import NO_ROLES, roles_of
from embedserve.api.shared_memory import PREFIX as SHARED_MEMORY
from embedserve.api.wire_openapi import (
    EMBED_PATHS,
    ERRORS,
    INFER_PATHS,
    LOOKUP_ERRORS,
    SCHEMAS,
    JsonSchema,
)
from embedserve.codec.open_inference.body_responses import is_infer_path
from embedserve.model_info import ModelInfo
from embedserve.pipeline import RequestPipeline

_FASTAPIS_OWN = ("HTTPValidationError", "ValidationError")
_TOKEN = {"token": {"type": "http", "scheme": "bearer"}}

router = APIRouter()


@router.get("/openapi.json", include_in_schema=False)
async def description(request: Request) -> JSONResponse:
    """Returns the OpenAPI description, in place of FastAPI's own route. The first request describes
    the routes in a thread, which takes 0.1 s."""
    app, state = request.app, request.app.state
    if app.openapi_schema is None:
        if state.describing is None:
            state.describing = asyncio.create_task(asyncio.to_thread(_fastapi_schema, app))
        app.openapi_schema = await state.describing
    return JSONResponse(app.openapi())


def _operation_id(route: APIRoute) -> str:
    """Returns the operation id of a route: its function's name, prefixed with v2_ for the Open
    Inference Protocol. Generated clients name their methods after it."""
    return ("v2_" if is_infer_path(route.path) else "") + route.name


def describe_routes(app: FastAPI, pipeline: RequestPipeline) -> None:
    """Makes ``app`` describe its own routes and the wire's, with examples of the currently served
    models."""
    served, needs_token = pipeline.models, pipeline.authenticator is not None
    app.state.describing = None

    def openapi() -> JsonSchema:
        if app.openapi_schema is None:
            app.openapi_schema = _fastapi_schema(app)
        schema = app.openapi_schema
        models = served.models()
        default = [one for one in models if served.default_model in (one.served_as, one.name)][:1]
        embed = {
            path: wire_path(path, item, models if "{model}" in path else default)
            for path, item in EMBED_PATHS.items()
        }
        infer = {path: wire_path(path, item, models) for path, item in INFER_PATHS.items()}
        paths = embed | schema["paths"] | infer
        if needs_token:
            paths = {path: _with_token(path, operations) for path, operations in paths.items()}
        return schema | {"paths": paths}

    app.openapi = openapi  # type: ignore[method-assign]


def wire_path(path: str, item: JsonSchema, models: Sequence[ModelInfo]) -> JsonSchema:
    """Returns the description ``item`` of a route that the wire serves, with its errors and with
    examples for ``models``."""
    operation = deepcopy(item["post"])
    if examples := {
        model.served_as: {"summary": f"to {model.name}", "value": _example(path, model)}
        for model in models
        if model.example
    }:
        operation["requestBody"]["content"]["application/json"]["examples"] = examples
    if models:
        name = models[0].name if is_infer_path(path) else models[0].served_as
        values = {"model": name, "version": str(models[0].version)}
        for parameter in operation["parameters"]:
            if parameter["in"] == "path":
                parameter["example"] = values[parameter["name"]]
    operation["responses"] |= error_responses(path, LOOKUP_ERRORS)
    return {"post": operation}


def _example(path: str, model: ModelInfo) -> JsonSchema:
    if not is_infer_path(path):
        return {"features": model.example}
    inputs: list[JsonSchema] = []
    for feature, bags in model.example.items():
        ids = [one for bag in bags for one in bag]
        lengths = [len(bag) for bag in bags]
        is_string = any(isinstance(one, str) for one in ids)
        data = [str(one) for one in ids] if is_string else ids
        inputs.append(_tensor(f"{feature}.ids", "BYTES" if is_string else "INT64", data))
        inputs.append(_tensor(f"{feature}.lengths", "INT32", lengths))
    return {"inputs": inputs}


def _tensor(name: str, datatype: str, data: Sequence[Any]) -> JsonSchema:
    return {"name": name, "datatype": datatype, "shape": [len(data)], "data": data}


def error_responses(path: str, statuses: Iterable[str]) -> JsonSchema:
    """Returns the error responses of an operation of ``path``, by status; "default" is any other
    error."""
    name = "InferError" if is_infer_path(path) else "Error"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {status: ERRORS[status] | {"content": content} for status in (*statuses, "default")}


def _fastapi_schema(app: FastAPI) -> JsonSchema:
    schema = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        tags=app.openapi_tags,
        # Relative to this document, because proxies may put a prefix before the paths.
        servers=[{"url": ".", "description": "this server"}],
        separate_input_output_schemas=False,  # fields with defaults are optional in responses too
    )
    ids = {
        (route.path_format, method.lower()): _operation_id(route)
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            operation["operationId"] = ids[path, method]
            # FastAPI documents its own validation errors, which no route here responds with.
            operation["responses"].pop("422", None)
            operation["responses"] |= error_responses(path, _statuses(path))
    components = schema["components"]
    for one in components["schemas"].values():
        for described in one.get("properties", {}).values():
            # Client generators treat a field with a default as always present.
            described.pop("default", None)
    for name in _FASTAPIS_OWN:
        components["schemas"].pop(name, None)
    components["schemas"] |= SCHEMAS
    components["securitySchemes"] = _TOKEN
    return schema


def _statuses(path: str) -> tuple[str, ...]:
    """Returns the error statuses specific to a route, besides those that any route may respond
    with."""
    statuses = ["503"] if path.endswith("/ready") else []
    if "{model}" in path:
        statuses.append("404")
    if path.startswith("/admin/"):
        statuses.append("415")
        if path != "/admin/reload":
            statuses += ["400", "404" if "/deltas/" in path else "409"]
    if path == "/v2/repository/index":
        statuses.append("400")
    if path.startswith(SHARED_MEMORY):
        statuses += ["403", *(["400", "409", "413"] if path.endswith("/register") else [])]
        statuses += ["404"] if path.endswith("}/status") else []
    return tuple(statuses)


def _with_token(path: str, operations: JsonSchema) -> JsonSchema:
    """Returns the operations of a route with authentication: the token, and the errors 401 and
    403."""
    if roles_of(path) == NO_ROLES:
        return operations
    rejections = error_responses(path, ("401", "403"))
    return {
        method: operation
        | {"security": [{"token": []}], "responses": rejections | operation["responses"]}
        for method, operation in operations.items()
    }
