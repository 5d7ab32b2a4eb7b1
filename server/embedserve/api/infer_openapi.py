"""OpenAPI description of the Open Inference Protocol's infer routes, which the wire serves without
FastAPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from embedserve.api.errors_openapi import OF_LOOKUPS, error_responses, path_parameter
from embedserve.model_info import ModelInfo

_PARAMETERS = {"type": ["object", "null"]}
_TENSOR = {
    "type": "object",
    "required": ["name", "datatype", "shape"],
    "properties": {
        "name": {"type": "string"},
        "datatype": {"type": "string", "enum": ["INT64", "INT32", "BYTES", "FP32", "FP16"]},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "data": {"type": "array", "items": {}, "description": "Flat, or nested as its shape."},
        "parameters": _PARAMETERS,
    },
}
_WANTED = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string"}, "parameters": _PARAMETERS},
}
INFER_SCHEMAS: dict[str, Any] = {
    "InferRequest": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "inputs": {
                "type": "array",
                "items": _TENSOR,
                "description": "F.ids and F.lengths of each feature F, as the metadata of the "
                "model has them.",
            },
            "outputs": {
                "type": "array",
                "items": _WANTED,
                "description": "Keys that the answer is to have. Left out: all of the model.",
            },
            "parameters": _PARAMETERS,
        },
    },
    "InferResponse": {
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "outputs": {"type": "array", "items": _TENSOR},
            "parameters": _PARAMETERS,
        },
    },
}


def infer_paths(models: Sequence[ModelInfo]) -> dict[str, Any]:
    """Returns the path items of the infer routes, with an example for each of ``models``."""
    examples = {
        model.served_as: {"summary": f"to {model.name}", "value": {"inputs": _inputs(model)}}
        for model in models
        if model.example
    }
    first = models[0] if models else None
    model = path_parameter("model", first.name if first else None)
    version = path_parameter("version", str(first.version) if first else None)
    one, other = "/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"
    return {
        one: _infer(one, "v2_infer", [model], examples),
        other: _infer(other, "v2_infer_version", [model, version], examples),
    }


def _infer(
    path: str, operation: str, parameters: list[dict[str, Any]], examples: dict[str, Any]
) -> dict[str, Any]:
    def content(name: str) -> dict[str, Any]:
        return {"schema": {"$ref": f"#/components/schemas/{name}"}}

    return {
        "post": {
            "tags": ["open inference"],
            "operationId": operation,
            "summary": "Look up vectors by the Open Inference Protocol",
            "description": "Binary tensors may follow the JSON (Inference-Header-Content-Length).",
            "parameters": parameters,
            "requestBody": {
                "required": True,
                "content": {"application/json": content("InferRequest") | {"examples": examples}},
            },
            "responses": {
                "200": {
                    "description": "The outputs.",
                    "content": {"application/json": content("InferResponse")},
                }
            }
            | error_responses(path, OF_LOOKUPS),
        }
    }


def _inputs(model: ModelInfo) -> list[dict[str, Any]]:
    """Returns the tensors F.ids and F.lengths of each feature F in the model's example."""
    inputs: list[dict[str, Any]] = []
    for feature, bags in model.example.items():
        ids = [one for bag in bags for one in bag]
        has_strings = any(isinstance(one, str) for one in ids)
        inputs += [
            {
                "name": f"{feature}.ids",
                "datatype": "BYTES" if has_strings else "INT64",
                "shape": [len(ids)],
                "data": [str(one) for one in ids] if has_strings else ids,
            },
            {
                "name": f"{feature}.lengths",
                "datatype": "INT32",
                "shape": [len(bags)],
                "data": [len(bag) for bag in bags],
            },
        ]
    return inputs
