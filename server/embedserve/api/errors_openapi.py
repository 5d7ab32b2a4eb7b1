"""Parts shared by operations of the OpenAPI description: error responses by status, and
parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

CODES = [
    "INVALID_ARGUMENT",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "UNAVAILABLE",
    "INTERNAL",
]
STATUSES = {
    "400": "The request can never be answered: field and value are named.",
    "401": "The server does not know who asks: no token, or a wrong one.",
    "403": "Who asks may not ask that.",
    "404": "No model, or region of shared memory, of that name.",
    "409": "It cannot be as things are: the reason is said.",
    "413": "Over a limit on one request, which is named.",
    "415": "The body is compressed, or of a type that is not taken.",
    "429": "The queue is full, or the caller over its limits: try again.",
    "431": "The headers are over a limit.",
    "500": "The lookup failed, or an error of the server: its log says which.",
    "503": "Draining before the stop, or damaged.",
    "504": "X-Timeout-Ms passed, or the body had not come whole in time.",
    "505": "The request line says neither HTTP/1.1 nor HTTP/1.0.",
}
OF_LOOKUPS = tuple(status for status in STATUSES if status != "409")
_HEADERS = {
    "401": {"WWW-Authenticate": "Bearer: send a token."},
    "429": {"Retry-After": "Seconds until the same request may be tried again."},
    "503": {"Retry-After": "Seconds until the same request may be tried again."},
}

ERROR_SCHEMAS: dict[str, Any] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["code", "message", "field"],
                "properties": {
                    "code": {"type": "string", "enum": CODES},
                    "message": {"type": "string", "description": "A sentence for a person."},
                    "field": {"type": "string", "description": "What is wrong, or empty."},
                },
            }
        },
    },
    "InferError": {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string"}},
    },
}


def is_infer(path: str) -> bool:
    """Returns whether ``path`` belongs to the Open Inference Protocol, whose errors have another
    format."""
    return path == "/v2" or path.startswith("/v2/")


def error_responses(path: str, statuses: Iterable[str]) -> dict[str, Any]:
    """Returns the error responses of an operation of ``path``, by status; "default" is any other
    error."""
    name = "InferError" if is_infer(path) else "Error"
    schema = {"schema": {"$ref": f"#/components/schemas/{name}"}}
    described = {status: STATUSES[status] for status in statuses} | {"default": "Any other error."}
    return {
        status: {"description": description, "content": {"application/json": schema}}
        | _headers(status)
        for status, description in described.items()
    }


def _headers(status: str) -> dict[str, Any]:
    if status not in _HEADERS:
        return {}
    kind = "integer" if status in ("429", "503") else "string"
    return {
        "headers": {
            name: {"description": description, "schema": {"type": kind}}
            for name, description in _HEADERS[status].items()
        }
    }


def path_parameter(name: str, example: str | None) -> dict[str, Any]:
    described = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    return described if example is None else described | {"example": example}
