"""The OpenAPI description of the embed routes, which are not FastAPI's: data only."""

from __future__ import annotations

from typing import Any

_REQUEST_EXAMPLE = {
    "features": {"product": [[101, 202], [], [303]], "user": [[404], [505], [606]]},
}


_ID = {"type": "integer", "format": "int64"}


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
                [_ID, {"type": "string"}],
                "ids, which GET /models describes. A feature left out is an empty bag",
            ),
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
                "default": "float32",
                "description": "Of the answer's values: float16 has half the bytes in protobuf, "
                "and fewer digits in JSON. Values are computed in float32 and rounded at the end; "
                "past 65504 a float16 is infinite.",
            },
            "output_keys": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Keys that the answer is to have, each once. Left out, or empty: "
                "all of the model.",
            },
        },
        "example": _REQUEST_EXAMPLE,
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
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["code", "message", "field"],
                "properties": {
                    "code": {
                        "type": "string",
                        "enum": [
                            "INVALID_ARGUMENT",
                            "NOT_FOUND",
                            "RESOURCE_EXHAUSTED",
                            "DEADLINE_EXCEEDED",
                            "UNAVAILABLE",
                            "INTERNAL",
                        ],
                    },
                    "message": {"type": "string"},
                    "field": {"type": "string", "description": "What is wrong, or empty."},
                },
            }
        },
    },
}

ERROR_RESPONSE = {
    "description": "Any error.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_ERRORS = {
    "400": "The request can never be answered: field and value are named.",
    "401": "The server does not know who asks: no token, or a wrong one.",
    "403": "Who asks may not ask that model.",
    "404": "No model of that name.",
    "413": "Over a limit on one request.",
    "415": "The body is compressed: send it as it is.",
    "429": "The queue is full, or the caller over its limits; try again.",
    "431": "The headers are over a limit.",
    "500": "The lookup failed.",
    "504": "X-Timeout-Ms passed.",
    "505": "The request line says neither HTTP/1.1 nor HTTP/1.0.",
}


def _post(summary: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "post": {
            "tags": ["embed"],
            "summary": summary,
            "description": "Protobuf bodies and answers are the EmbedRequest and EmbedResponse "
            "of the gRPC service.",
            "parameters": [
                *parameters,
                {
                    "name": "X-Timeout-Ms",
                    "in": "header",
                    "required": False,
                    "description": "How long the caller waits.",
                    "schema": {"type": "number", "exclusiveMinimum": 0},
                },
            ],
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {"schema": {"$ref": "#/components/schemas/EmbedRequest"}},
                    "application/x-protobuf": _BINARY,
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
                    },
                }
            }
            | {
                status: ERROR_RESPONSE | {"description": description}
                for status, description in _ERRORS.items()
            },
        }
    }


_TENSOR = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "datatype": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "data": {"type": "array", "items": {}},
        "parameters": {"type": "object"},
    },
}
_TENSORS = {"type": "array", "items": _TENSOR}
INFER_SCHEMAS: dict[str, Any] = {
    "InferRequest": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "inputs": _TENSORS,
            "outputs": _TENSORS,
            "parameters": {"type": "object"},
        },
        "example": {
            "inputs": [
                {"name": "user.ids", "datatype": "INT64", "shape": [1], "data": [404]},
                {"name": "user.lengths", "datatype": "INT32", "shape": [1], "data": [1]},
            ]
        },
    },
    "InferResponse": {
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "outputs": _TENSORS,
            "parameters": {"type": "object"},
        },
    },
    "InferError": {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string"}},
    },
}


INFER_ERROR_RESPONSE = {
    "description": "Any error.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/InferError"}}},
}


def _infer(*parameters: str) -> dict[str, Any]:
    def content(name: str) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}

    return {
        "post": {
            "tags": ["open inference"],
            "summary": "Look up vectors by the Open Inference Protocol",
            "description": "Binary tensors may follow the JSON (Inference-Header-Content-Length).",
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in parameters
            ],
            "requestBody": {"required": True, "content": content("InferRequest")},
            "responses": {
                "200": {"description": "The outputs.", "content": content("InferResponse")},
                "default": INFER_ERROR_RESPONSE,
            },
        }
    }


INFER_PATHS: dict[str, Any] = {
    "/v2/models/{model}/infer": _infer("model"),
    "/v2/models/{model}/versions/{version}/infer": _infer("model", "version"),
}


EMBED_PATHS: dict[str, Any] = {
    "/embed": _post("Look up vectors in the default model", []),
    "/models/{model}/embed": _post(
        "Look up vectors in one model",
        [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
    ),
}
