"""OpenAPI description of the routes that the wire serves without FastAPI.

Data only: openapi.py adds error responses, and examples for the served models.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_INTEGER_ID = {
    "anyOf": [
        {"type": "integer", "format": "int64"},
        {"type": "string", "pattern": "^-?(0|[1-9][0-9]{0,18})$"},
    ]
}
_INTEGER_BAG = {"type": "array", "items": _INTEGER_ID}
_STRING_BAG = {"type": "array", "items": {"type": "string"}}
_WEIGHT_BAG = {"type": "array", "items": {"type": "number"}}
_OUTPUT_DTYPE = {"type": "string", "enum": ["float32", "float16"]}
_VECTOR = {"type": "array", "items": {"type": ["number", "null"], "format": "float"}}
_PARAMETERS = {"type": ["object", "null"]}
_TENSOR = {
    "type": "object",
    "required": ["name", "datatype", "shape"],
    "properties": {
        "name": {"type": "string"},
        "datatype": {"type": "string", "enum": ["INT64", "INT32", "BYTES", "FP32", "FP16"]},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "data": {"type": "array", "items": {}, "description": "Flat, or nested like the shape."},
        "parameters": _PARAMETERS,
    },
}

SCHEMAS: Schema = {
    "EmbedRequest": {
        "type": "object",
        "required": ["features"],
        "additionalProperties": False,
        "properties": {
            "features": {
                "type": "object",
                "minProperties": 1,
                "description": "Feature to ids: a list for each example, or one flat list for a "
                "batch of one. GET /models shows whether the ids are integers, which may be "
                "written as strings, or strings. A missing feature is an empty bag. If a feature "
                "is repeated, its last value counts.",
                "additionalProperties": {
                    "anyOf": [
                        {"type": "array", "items": _INTEGER_BAG},
                        {"type": "array", "items": _STRING_BAG},
                        _INTEGER_BAG,
                        _STRING_BAG,
                    ]
                },
            },
            "weights": {
                "type": "object",
                "description": "Feature to weights, in the shape of its ids. Default: 1. An "
                "unpooled model takes no weights.",
                "additionalProperties": {
                    "anyOf": [{"type": "array", "items": _WEIGHT_BAG}, _WEIGHT_BAG]
                },
            },
            "version": {
                "oneOf": [{"type": "integer"}, {"type": "string"}],
                "description": "Served version, by number or alias. Default: the version that "
                "serves the model, or one of several that share its traffic.",
            },
            "output_dtype": _OUTPUT_DTYPE
            | {
                "description": "Type of the response's values. Default: float32. float16 halves "
                "the bytes in protobuf and has fewer digits in JSON. Values are computed in "
                "float32 and rounded at the end; above 65504 a float16 is infinite.",
            },
            "output_keys": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Keys of the response, each once. Default, and if empty: all keys "
                "of the model.",
            },
            "min_seq": {
                "type": "integer",
                "minimum": 0,
                "maximum": 2**63 - 1,
                "description": "Smallest seq that the rows may have, if the version follows "
                "deltas. Default: any.",
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
            | {"description": "Present if float16 was requested; otherwise values are float32."},
            "lengths": {
                "type": "object",
                "description": "Key to the number of ids of each example. Unpooled models only.",
                "additionalProperties": {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 0},
                },
            },
            "unknown_ids": {
                "type": "object",
                "description": "Number of ids without a row, by feature; absent if there are none.",
                "additionalProperties": {"type": "integer"},
            },
            "missing_ids": {
                "type": "object",
                "description": "Number of ids whose rows no server could look up, by feature; the "
                "values lack them. Absent if there are none.",
                "additionalProperties": {"type": "integer"},
            },
            "values": {
                "anyOf": [
                    {
                        "type": "array",
                        "description": "For each example, the concatenated vectors of all keys. "
                        "null is a sum above the largest float32 or float16 (65504): JSON has no "
                        "infinity.",
                        "items": _VECTOR,
                    },
                    {
                        "type": "object",
                        "description": "Unpooled models: key to a vector for each id, in the "
                        "order of the request.",
                        "additionalProperties": {"type": "array", "items": _VECTOR},
                    },
                ],
            },
            "seq": {
                "type": "integer",
                "minimum": 0,
                "description": "Sequence number of the last delta in the rows; 0 before the first. "
                "Absent if the version follows no deltas.",
            },
        },
    },
    "InferRequest": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "inputs": {
                "type": "array",
                "items": _TENSOR,
                "description": "F.ids and F.lengths of each feature F, as in the model's metadata.",
            },
            "outputs": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}, "parameters": _PARAMETERS},
                },
                "description": "Keys of the response. Default: all keys of the model.",
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
            "parameters": _PARAMETERS
            | {
                "description": "unknown_ids.F: number of ids of feature F without a row. "
                "missing_ids.F: the same of ids whose rows no server could look up. seq: sequence "
                "number of the last delta in the rows, if the version follows deltas."
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
                            "UNAUTHENTICATED",
                            "PERMISSION_DENIED",
                            "NOT_FOUND",
                            "FAILED_PRECONDITION",
                            "RESOURCE_EXHAUSTED",
                            "DEADLINE_EXCEEDED",
                            "UNAVAILABLE",
                            "INTERNAL",
                        ],
                    },
                    "message": {"type": "string", "description": "A sentence for people."},
                    "field": {"type": "string", "description": "The invalid field, or empty."},
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

_RETRY = {
    "Retry-After": {
        "description": "Seconds until the same request may be tried again.",
        "schema": {"type": "integer"},
    }
}
_AUTHENTICATE = {
    "WWW-Authenticate": {"description": "Bearer: send a token.", "schema": {"type": "string"}}
}
ERRORS: dict[str, Schema] = {
    "400": {"description": "The request is invalid. The message names field and value."},
    "401": {"description": "The caller has no token, or a wrong one.", "headers": _AUTHENTICATE},
    "403": {"description": "The caller may not make this request."},
    "404": {"description": "There is no model, or region of shared memory, of that name."},
    "409": {"description": "The present state does not allow it. The message has the reason."},
    "413": {"description": "The request is over a limit, which the message names."},
    "415": {"description": "The body is compressed, or of an unsupported type."},
    "429": {
        "description": "The queue is full, or the caller is over its limits. Try again later.",
        "headers": _RETRY,
    },
    "431": {"description": "The headers are over a limit."},
    "500": {"description": "The lookup failed, or the server has an error; its log says which."},
    "503": {
        "description": "The server is loading its models or draining, a model is damaged, the rows "
        "are older than min_seq, or a part of the model has no replica.",
        "headers": _RETRY,
    },
    "504": {"description": "X-Timeout-Ms passed, or the body did not arrive in time."},
    "505": {"description": "The request line has neither HTTP/1.1 nor HTTP/1.0."},
    "default": {"description": "Any other error."},
}
"""Error responses by status, without the schema of their body."""
LOOKUP_ERRORS = tuple(status for status in ERRORS if status not in ("409", "default"))

_MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
_VERSION = _MODEL | {"name": "version"}
_HEADERS = [
    {
        "name": "X-Timeout-Ms",
        "in": "header",
        "required": False,
        "description": "Milliseconds that the caller waits.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    },
    {
        "name": "X-Routing-Key",
        "in": "header",
        "required": False,
        "description": "Key of the caller. If several versions share a model's traffic, requests "
        "with the same key are served by the same version.",
        "schema": {"type": "string"},
    },
]
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_BINARY_FORMATS = {
    "application/x-protobuf": _BINARY,
    "application/vnd.apache.arrow.stream": _BINARY,
}
_EMBED: Schema = {
    "tags": ["embed"],
    "description": "Protobuf bodies are the EmbedRequest and EmbedResponse of the gRPC service. "
    "Arrow bodies are streams of record batches with features and vectors as columns.",
    "parameters": _HEADERS,
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/EmbedRequest"}},
            **_BINARY_FORMATS,
        },
    },
    "responses": {
        "200": {
            "description": "The vectors: pooled, as in a KeyedTensor, or for an unpooled model "
            "as in a JaggedTensor for each key.",
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/EmbedResponse"}},
                **_BINARY_FORMATS,
            },
        }
    },
}
_INFER: Schema = {
    "tags": ["open inference"],
    "summary": "Look up vectors by the Open Inference Protocol",
    "description": "Binary tensors may follow the JSON (Inference-Header-Content-Length).",
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/InferRequest"},
                "examples": {},
            }
        },
    },
    "responses": {
        "200": {
            "description": "The outputs.",
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/InferResponse"}}
            },
        }
    },
}
EMBED_PATHS: dict[str, Schema] = {
    "/embed": {
        "post": _EMBED
        | {"operationId": "embed", "summary": "Look up vectors in the default model"},
    },
    "/models/{model}/embed": {
        "post": _EMBED
        | {
            "operationId": "embed_model",
            "summary": "Look up vectors in one model",
            "parameters": [_MODEL, *_HEADERS],
        },
    },
}
INFER_PATHS: dict[str, Schema] = {
    "/v2/models/{model}/infer": {
        "post": _INFER | {"operationId": "v2_infer", "parameters": [_MODEL, *_HEADERS]},
    },
    "/v2/models/{model}/versions/{version}/infer": {
        "post": _INFER
        | {"operationId": "v2_infer_version", "parameters": [_MODEL, _VERSION, *_HEADERS]},
    },
}
