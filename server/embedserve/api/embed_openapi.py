"""OpenAPI description of the embed routes, which the wire serves without FastAPI. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from embedserve.api.errors_openapi import OF_LOOKUPS, error_responses, path_parameter
from embedserve.model_info import ModelInfo

_INTEGER = {
    "anyOf": [
        {"type": "integer", "format": "int64"},
        {"type": "string", "pattern": "^-?(0|[1-9][0-9]{0,18})$"},
    ]
}


def _jagged(items: list[dict[str, Any]], what: str) -> dict[str, Any]:
    bags = [{"type": "array", "items": item} for item in items]
    return {
        "type": "object",
        "description": f"Feature to {what}: a list for each example, or one flat list for a "
        "batch of one. A feature that is named twice counts as it stands last.",
        "additionalProperties": {"anyOf": [{"type": "array", "items": bag} for bag in bags] + bags},
    }


def _by_key(description: str, items: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": description,
        "additionalProperties": {"type": "array", "items": items},
    }


_HEADERS = [
    {
        "name": "X-Timeout-Ms",
        "in": "header",
        "required": False,
        "description": "How long the caller waits.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    },
    {
        "name": "X-Routing-Key",
        "in": "header",
        "required": False,
        "description": "Who asks: where several versions share a model, the same one answers each "
        "time.",
        "schema": {"type": "string"},
    },
]
_LENGTH = {"type": "integer", "minimum": 0}
_OUTPUT_DTYPE = {"type": "string", "enum": ["float32", "float16"]}
_VECTOR = {"type": "array", "items": {"type": ["number", "null"], "format": "float"}}


EMBED_SCHEMAS: dict[str, Any] = {
    "EmbedRequest": {
        "type": "object",
        "required": ["features"],
        "additionalProperties": False,
        "properties": {
            "features": _jagged(
                [_INTEGER, {"type": "string"}],
                "ids, which GET /models describes: integers, which may be written as strings, or "
                "strings. A feature left out is an empty bag",
            )
            | {"minProperties": 1},
            "weights": _jagged(
                [{"type": "number"}],
                "weights in the shape of its ids; not of a model that is unpooled. Left out: 1",
            ),
            "version": {
                "oneOf": [{"type": "integer"}, {"type": "string"}],
                "description": "A version that is served, by its number or alias. Default: the one "
                "that answers for the model, or one of those that share such requests.",
            },
            "output_dtype": _OUTPUT_DTYPE
            | {
                "description": "Of the answer's values; float32 where it is left out. float16 has "
                "half the bytes in protobuf, and fewer digits in JSON. Values are computed in "
                "float32 and rounded at the end; past 65504 a float16 is infinite.",
            },
            "output_keys": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Keys that the answer is to have, each once. Left out, or empty: "
                "all of the model.",
            },
        },
    },
    "EmbedResponse": {
        "type": "object",
        "required": ["model", "version", "keys", "length_per_key", "values"],
        "properties": {
            "model": {"type": "string"},
            "version": {"type": "integer"},
            "keys": {"type": "array", "items": {"type": "string"}},
            "length_per_key": {"type": "array", "items": {"type": "integer"}},
            "output_dtype": _OUTPUT_DTYPE
            | {"description": "Only where float16 was asked for; else values are float32."},
            "lengths": _by_key("Of an unpooled model only: the ids of each example.", _LENGTH),
            "unknown_ids": {
                "type": "object",
                "description": "How many ids had no row, by feature; only where some had none.",
                "additionalProperties": {"type": "integer"},
            },
            "values": {
                "anyOf": [
                    {
                        "type": "array",
                        "description": "For each example, the vectors of all keys one after the "
                        "other. null stands for a sum past the largest float32, or 65504 for "
                        "float16: JSON has no infinity.",
                        "items": _VECTOR,
                    },
                    _by_key("Of an unpooled model: a vector for each id, as sent.", _VECTOR),
                ],
            },
        },
    },
}

_BINARY = {"schema": {"type": "string", "format": "binary"}}


def embed_paths(models: Sequence[ModelInfo], default_model: str) -> dict[str, Any]:
    """Returns the path items of the embed routes, with an example for each of ``models``."""
    of_default = [one for one in models if default_model in (one.served_as, one.name)][:1]
    model = path_parameter("model", models[0].served_as if models else None)
    one, other = "/embed", "/models/{model}/embed"
    return {
        one: _post(one, "embed", "Look up vectors in the default model", [], of_default),
        other: _post(other, "embed_model", "Look up vectors in one model", [model], models),
    }


def _post(
    path: str,
    operation: str,
    summary: str,
    parameters: list[dict[str, Any]],
    models: Sequence[ModelInfo],
) -> dict[str, Any]:
    json = {"schema": {"$ref": "#/components/schemas/EmbedRequest"}}
    examples = {
        model.served_as: {"summary": f"to {model.name}", "value": {"features": model.example}}
        for model in models
        if model.example
    }
    return {
        "post": {
            "tags": ["embed"],
            "operationId": operation,
            "summary": summary,
            "description": "Protobuf bodies and answers are the EmbedRequest and EmbedResponse "
            "of the gRPC service; Arrow's are streams of record batches whose columns are "
            "features, and vectors.",
            "parameters": [*parameters, *_HEADERS],
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": json | ({"examples": examples} if examples else {}),
                    "application/x-protobuf": _BINARY,
                    "application/vnd.apache.arrow.stream": _BINARY,
                },
            },
            "responses": {
                "200": {
                    "description": "The vectors: pooled, as in a KeyedTensor; of an unpooled model "
                    "as in a JaggedTensor for each key.",
                    "content": {
                        "application/json": {
                            "schema": {"$ref": "#/components/schemas/EmbedResponse"}
                        },
                        "application/x-protobuf": _BINARY,
                        "application/vnd.apache.arrow.stream": _BINARY,
                    },
                }
            }
            | error_responses(path, OF_LOOKUPS),
        }
    }
