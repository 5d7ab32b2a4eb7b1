"""OpenAPI description of the routes that the wire serves without FastAPI.

Data only: openapi.py adds error responses, and examples for the served models.
"""

from __future__ import annotations

from typing import Any

JsonSchema = dict[str, Any]


def _described(schema: JsonSchema, description: str) -> JsonSchema:
    return schema | {"description": description}


def _array(items: JsonSchema) -> JsonSchema:
    return {"type": "array", "items": items}


def _map_to(values: JsonSchema) -> JsonSchema:
    """Returns the schema of an object with any names, all of whose ``values`` have one schema."""
    return {"type": "object", "additionalProperties": values}


def _object(required: list[str], properties: JsonSchema) -> JsonSchema:
    return {"type": "object", "required": required, "properties": properties}


def _content(schema: str, *binary_formats: str, **more: Any) -> JsonSchema:
    """Returns the content of a body: JSON with the fields of a schema, or a binary format."""
    json = {"schema": {"$ref": f"#/components/schemas/{schema}"}, **more}
    return {"application/json": json, **dict.fromkeys(binary_formats, _BINARY)}


_BINARY = {"schema": {"type": "string", "format": "binary"}}
_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_COUNT = {"type": "integer", "minimum": 0}
_INTEGER_ID = {
    "anyOf": [
        {"type": "integer", "format": "int64"},
        {"type": "string", "pattern": "^-?(0|[1-9][0-9]{0,18})$"},
    ]
}
_INTEGER_BAG = _array(_INTEGER_ID)
_STRING_BAG = _array(_STRING)
_WEIGHT_BAG = _array({"type": "number"})
_OUTPUT_DTYPE = {"type": "string", "enum": ["float32", "float16"]}
_VECTORS = _array(_array({"type": ["number", "null"], "format": "float"}))
_PARAMETERS = {"type": ["object", "null"]}
_TENSOR = _object(
    ["name", "datatype", "shape"],
    {
        "name": _STRING,
        "datatype": {"type": "string", "enum": ["INT64", "INT32", "BYTES", "FP32", "FP16"]},
        "shape": _array(_COUNT),
        "data": _described(_array({}), "Flat, or nested like the shape."),
        "parameters": _PARAMETERS,
    },
)

SCHEMAS: JsonSchema = {
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
                        _array(_INTEGER_BAG),
                        _array(_STRING_BAG),
                        _INTEGER_BAG,
                        _STRING_BAG,
                    ]
                },
            },
            "weights": _described(
                _map_to({"anyOf": [_array(_WEIGHT_BAG), _WEIGHT_BAG]}),
                "Feature to weights, in the shape of its ids. Default: 1. An unpooled model takes "
                "no weights.",
            ),
            "version": {
                "oneOf": [_INTEGER, _STRING],
                "description": "Served version, by number or alias. Default: the version that "
                "serves the model, or one of several that share its traffic.",
            },
            "output_dtype": _described(
                _OUTPUT_DTYPE,
                "Type of the response's values. Default: float32. float16 halves the bytes in "
                "protobuf and has fewer digits in JSON. Values are computed in float32 and rounded "
                "at the end; above 65504 a float16 is infinite.",
            ),
            "output_keys": _described(
                _array(_STRING),
                "Keys of the response, each once. Default, and if empty: all keys of the model.",
            ),
            "min_seq": _described(
                _COUNT | {"maximum": 2**63 - 1},
                "Smallest seq that the rows may have, if the version follows deltas. Default: any.",
            ),
        },
    },
    "EmbedResponse": _object(
        ["model", "version", "keys", "length_per_key", "values"],
        {
            "model": _STRING,
            "version": _INTEGER,
            "keys": _array(_STRING),
            "length_per_key": _array(_INTEGER),
            "output_dtype": _described(
                _OUTPUT_DTYPE,
                "Present if float16 was requested; otherwise values are float32.",
            ),
            "lengths": _described(
                _map_to(_array(_COUNT)),
                "Key to the number of ids of each example. Unpooled models only.",
            ),
            "unknown_ids": _described(
                _map_to(_INTEGER),
                "Number of ids without a row, by feature; absent if there are none.",
            ),
            "missing_ids": _described(
                _map_to(_INTEGER),
                "Number of ids whose rows no server could look up, by feature; the values lack "
                "them. Absent if there are none.",
            ),
            "values": {
                "anyOf": [
                    _described(
                        _VECTORS,
                        "For each example, the concatenated vectors of all keys. null is a sum "
                        "above the largest float32 or float16 (65504): JSON has no infinity.",
                    ),
                    _described(
                        _map_to(_VECTORS),
                        "Unpooled models: key to a vector for each id, in the order of the "
                        "request.",
                    ),
                ],
            },
            "seq": _described(
                _COUNT,
                "Sequence number of the last delta in the rows; 0 before the first. Absent if the "
                "version follows no deltas.",
            ),
        },
    ),
    "InferRequest": _object(
        ["inputs"],
        {
            "id": _STRING,
            "inputs": _described(
                _array(_TENSOR),
                "F.ids and F.lengths of each feature F, as in the model's metadata.",
            ),
            "outputs": _described(
                _array(_object(["name"], {"name": _STRING, "parameters": _PARAMETERS})),
                "Keys of the response. Default: all keys of the model.",
            ),
            "parameters": _PARAMETERS,
        },
    ),
    "InferResponse": _object(
        ["model_name", "model_version", "outputs"],
        {
            "model_name": _STRING,
            "model_version": _STRING,
            "id": _STRING,
            "outputs": _array(_TENSOR),
            "parameters": _described(
                _PARAMETERS,
                "unknown_ids.F: number of ids of feature F without a row. missing_ids.F: the same "
                "of ids whose rows no server could look up. seq: sequence number of the last delta "
                "in the rows, if the version follows deltas.",
            ),
        },
    ),
    "Error": _object(
        ["error"],
        {
            "error": _object(
                ["code", "message", "field"],
                {
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
                    "message": _described(_STRING, "A sentence for people."),
                    "field": _described(_STRING, "The invalid field, or empty."),
                },
            )
        },
    ),
    "InferError": _object(["error"], {"error": _STRING}),
}

_RETRY = {
    "Retry-After": {
        "description": "Seconds until the same request may be tried again.",
        "schema": _INTEGER,
    }
}
_AUTHENTICATE = {"WWW-Authenticate": {"description": "Bearer: send a token.", "schema": _STRING}}
ERRORS: dict[str, JsonSchema] = {
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
    "501": {"description": "The body has a transfer coding other than chunked."},
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

_MODEL = {"name": "model", "in": "path", "required": True, "schema": _STRING}
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
        "schema": _STRING,
    },
]
_BINARY_FORMATS = ("application/x-protobuf", "application/vnd.apache.arrow.stream")
_EMBED: JsonSchema = {
    "tags": ["embed"],
    "description": "Protobuf bodies are the EmbedRequest and EmbedResponse of the gRPC service. "
    "Arrow bodies are streams of record batches with features and vectors as columns.",
    "parameters": _HEADERS,
    "requestBody": {
        "required": True,
        "content": _content("EmbedRequest", *_BINARY_FORMATS),
    },
    "responses": {
        "200": {
            "description": "The vectors: pooled, as in a KeyedTensor, or for an unpooled model "
            "as in a JaggedTensor for each key.",
            "content": _content("EmbedResponse", *_BINARY_FORMATS),
        }
    },
}
_INFER: JsonSchema = {
    "tags": ["open inference"],
    "summary": "Look up vectors by the Open Inference Protocol",
    "description": "Binary tensors may follow the JSON (Inference-Header-Content-Length).",
    "requestBody": {"required": True, "content": _content("InferRequest", examples={})},
    "responses": {"200": {"description": "The outputs.", "content": _content("InferResponse")}},
}
EMBED_PATHS: dict[str, JsonSchema] = {
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
INFER_PATHS: dict[str, JsonSchema] = {
    "/v2/models/{model}/infer": {
        "post": _INFER | {"operationId": "v2_infer", "parameters": [_MODEL, *_HEADERS]},
    },
    "/v2/models/{model}/versions/{version}/infer": {
        "post": _INFER
        | {"operationId": "v2_infer_version", "parameters": [_MODEL, _VERSION, *_HEADERS]},
    },
}
