"""OpenAPI description of all routes: those of FastAPI, and those that the wire serves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from embedserve.api.auth_middleware import ANYBODY, roles_of
from embedserve.api.embed_openapi import EMBED_SCHEMAS, embed_paths
from embedserve.api.errors_openapi import ERROR_SCHEMAS, error_responses, is_infer
from embedserve.api.infer_openapi import INFER_SCHEMAS, infer_paths
from embedserve.api.shared_memory import PREFIX as SHARED_MEMORY
from embedserve.pipeline import RequestPipeline

Schema = dict[str, Any]
_FASTAPIS_OWN = ("HTTPValidationError", "ValidationError")
_TOKEN = {"token": {"type": "http", "scheme": "bearer"}}


def operation_id(route: APIRoute) -> str:
    """Returns the operation id of a route: its function's name, prefixed with v2_ for the Open
    Inference Protocol. Generated clients name their methods after it."""
    return ("v2_" if is_infer(route.path) else "") + route.name


def describe_routes(app: FastAPI, pipeline: RequestPipeline) -> None:
    """Makes ``app`` describe its own routes and the wire's, with examples of the currently served
    models."""
    served, asks = pipeline.models, pipeline.authenticator is not None

    def openapi() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = _of_fastapi(app)
        schema = app.openapi_schema
        models = served.models()
        paths = embed_paths(models, served.default_model) | schema["paths"] | infer_paths(models)
        if asks:
            paths = {path: _asking(path, operations) for path, operations in paths.items()}
        return schema | {"paths": paths}

    app.openapi = openapi  # type: ignore[method-assign]


def _of_fastapi(app: FastAPI) -> Schema:
    schema = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        tags=app.openapi_tags,
        separate_input_output_schemas=False,  # fields with defaults are optional in responses too
    )
    for path, operations in schema["paths"].items():
        for operation in operations.values():
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
    components["schemas"] |= EMBED_SCHEMAS | INFER_SCHEMAS | ERROR_SCHEMAS
    components["securitySchemes"] = _TOKEN
    return schema


def _statuses(path: str) -> tuple[str, ...]:
    """Returns the error statuses specific to a route, besides those that any route may respond
    with."""
    statuses = ["503"] if path.endswith("/ready") else []
    if "{model}" in path:
        statuses.append("404")
    if path.startswith("/admin/"):
        statuses += ["400", "404", "409", "415"]
    if path == "/v2/repository/index":
        statuses.append("400")
    if path.startswith(SHARED_MEMORY):
        statuses += ["403", *(["400", "409", "413"] if path.endswith("/register") else [])]
        statuses += ["404"] if path.endswith("}/status") else []
    return tuple(statuses)


def _asking(path: str, operations: Schema) -> Schema:
    """Returns the operations of a route with authentication: the token, and the errors 401 and
    403."""
    if roles_of(path) == ANYBODY:
        return operations
    refusals = error_responses(path, ("401", "403"))
    return {
        method: operation
        | {"security": [{"token": []}], "responses": refusals | operation["responses"]}
        for method, operation in operations.items()
    }
