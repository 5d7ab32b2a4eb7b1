"""Formats of bodies: how each format encodes a request, and decodes vectors and errors."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
from protocols.connections import unframed
from protocols.requests import Raw, Request, Response, Sent, Vectors, split_by_key
from server.arrow_streams import ARROW
from server.fake_engine import FakeEngine
from server.live import PROTOBUF
from server.open_inference import LENGTH_HEADER, Answered, Asked, Input, jagged
from server.predictions import prediction_request

from embedserve_proto import embedding_pb2 as pb
from embedserve_proto import open_inference_pb2 as inference
from embedserve_proto import predictor_pb2 as predictor
from server import arrow_streams, open_inference

CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    413: "RESOURCE_EXHAUSTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
GRPC_CODES = {
    0: "OK",
    1: "CANCELLED",
    3: "INVALID_ARGUMENT",
    4: "DEADLINE_EXCEEDED",
    5: "NOT_FOUND",
    7: "PERMISSION_DENIED",
    8: "RESOURCE_EXHAUSTED",
    12: "UNIMPLEMENTED",
    13: "INTERNAL",
    14: "UNAVAILABLE",
    16: "UNAUTHENTICATED",
}
FRACTIONS = Asked([Input("user", "FP32", [[1.5]])])
EMBED = "/embedserve.v1.EmbeddingService/Embed"
INFER = "/inference.GRPCInferenceService/ModelInfer"
PREDICT = "/predictor.Predictor/Predict"


class Format:
    """The bodies of a protocol.

    Attributes:
        is_grpc: whether errors are gRPC statuses; otherwise they are HTTP statuses.
        can: optional fields of its requests.
        has_field: whether errors name a field.
        not_a_message: bytes that are no request.
        wrong_type: (body with fractions for ids, words of its error); b"" if there is none.
        is_text: whether the body is JSON alone.
    """

    wrong_type = (b"", "")
    is_text = False
    is_grpc = False
    has_field = True
    can = frozenset({"model", "version", "dtype", "keys", "strings", "NaN", "default model"})
    not_a_message = b"{"

    @abstractmethod
    def encode(self, request: Request, engine: FakeEngine) -> Sent:
        """Encodes a request to the model of ``engine``."""

    @abstractmethod
    def decode(self, raw: Raw) -> Vectors:
        """Decodes the vectors of a response."""

    def read(self, raw: Raw) -> Response:
        """Decodes a response with vectors or an error."""
        if raw.status == 200:
            return Response("OK", 200, raw.headers, vectors=self.decode(raw))
        assert raw.headers["content-type"] == "application/json"
        error = json.loads(raw.body)
        assert error.keys() == {"error"}
        if not self.has_field:
            return Response(CODES[raw.status], raw.status, raw.headers, error["error"])
        error = error["error"]
        assert error.keys() == {"code", "message", "field"}
        assert error["code"] == CODES[raw.status]
        return Response(error["code"], raw.status, raw.headers, error["message"], error["field"])


def rest_headers(request: Request, **more: str) -> dict[str, str]:
    """Returns the HTTP headers of a request, including its timeout."""
    timeout = {}
    if request.timeout_s is not None:
        timeout = {"x-timeout-ms": f"{request.timeout_s * 1000:g}"}
    return {**more, **timeout, **request.headers}


def embed_path(request: Request) -> str:
    return f"/models/{quote(request.model, safe='@')}/embed" if request.model else "/embed"


class Json(Format):
    """JSON, as POST /embed accepts it."""

    wrong_type = b'{"features": {"user": [[1.5]]}}', "features.user[0][0] is 1.5"
    is_text = True

    def encode(self, request: Request, engine: FakeEngine) -> Sent:
        body: dict[str, Any] = {"features": request.bags}
        options = {
            "weights": request.weights,
            "version": request.version,
            "output_dtype": request.output_dtype,
            "output_keys": list(request.output_keys),
        }
        body |= {name: value for name, value in options.items() if value}
        if request.min_seq is not None:
            body["min_seq"] = request.min_seq
        return Sent(embed_path(request), rest_headers(request), json.dumps(body).encode())

    def decode(self, raw: Raw) -> Vectors:
        assert raw.headers["content-type"] == "application/json"
        told = json.loads(raw.body)
        dtype = told.get("output_dtype", "float32")
        keys, dims, lengths = told["keys"], told["length_per_key"], told.get("lengths")

        def array(values: Any) -> np.ndarray:
            flat = [[np.inf if one is None else one for one in row] for row in values]
            return np.array(flat, np.float64).astype(dtype)

        if lengths is None:
            by_key = split_by_key(array(told["values"]), keys, dims)
        else:
            by_key = {
                key: array(told["values"][key]).reshape(-1, dim)
                for key, dim in zip(keys, dims, strict=True)
            }
            lengths = [lengths[key] for key in keys]
        unknown, seq = told.get("unknown_ids", {}), told.get("seq")
        missing = told.get("missing_ids", {})
        return Vectors(told["model"], str(told["version"]), by_key, unknown, lengths, seq, missing)


def message_of(request: Request) -> pb.EmbedRequest:
    """Returns a request as an EmbedRequest."""
    message = arrow_streams.message_of(request.bags, request.weights or None)
    message.model, message.version = request.model, request.version
    message.output_keys.extend(request.output_keys)
    if request.min_seq is not None:
        message.min_seq = request.min_seq
    if request.output_dtype:
        message.output_dtype = {"float32": pb.FLOAT32, "float16": pb.FLOAT16}[request.output_dtype]
    return message


def vectors_of(message: pb.EmbedResponse) -> Vectors:
    """Returns the vectors of an EmbedResponse."""
    dtype = np.dtype("<f2" if message.output_dtype == pb.FLOAT16 else "<f4")
    values = np.frombuffer(message.values, dtype)
    keys, dims = list(message.keys), list(message.length_per_key)
    lengths = None
    if message.lengths:
        lengths = np.array(message.lengths).reshape(len(keys), message.batch_size).tolist()
        ends = np.cumsum([sum(row) for row in lengths])[:-1]
        by_key = dict(zip(keys, np.split(values.reshape(-1, dims[0]), ends), strict=True))
    else:
        by_key = split_by_key(values.reshape(message.batch_size, -1), keys, dims)
    unknown, seq = dict(message.unknown_ids), message.seq if message.HasField("seq") else None
    missing = dict(message.missing_ids)
    return Vectors(message.model, str(message.version), by_key, unknown, lengths, seq, missing)


class Protobuf(Format):
    def encode(self, request: Request, engine: FakeEngine) -> Sent:
        headers = rest_headers(request, **{"content-type": PROTOBUF})
        return Sent("/embed", headers, message_of(request).SerializeToString())

    def decode(self, raw: Raw) -> Vectors:
        assert raw.headers["content-type"] == PROTOBUF
        return vectors_of(pb.EmbedResponse.FromString(raw.body))


class Arrow(Format):
    """Arrow stream with a column for each feature."""

    wrong_type = (
        arrow_streams.stream_of(pa.table({"user": pa.array([[1.5]])})),
        "user",
    )

    def encode(self, request: Request, engine: FakeEngine) -> Sent:
        columns: dict[str, Any] = {}
        for feature, bags in request.bags.items():
            is_text = any(isinstance(one, str) for bag in bags for one in bag)
            kind = pa.string() if is_text else pa.int64()
            columns[feature] = pa.array(bags, pa.list_(kind))
            if feature in request.weights:
                weights = pa.array(request.weights[feature], pa.list_(pa.float32()))
                columns[f"{feature}.weights"] = weights
        options = {"version": request.version, "output_dtype": request.output_dtype}
        if request.output_keys:
            options["output_keys"] = json.dumps(list(request.output_keys))
        if request.min_seq is not None:
            options["min_seq"] = str(request.min_seq)
        options = {name: value for name, value in options.items() if value}
        body = arrow_streams.stream_of(pa.table(columns), options=options)
        return Sent(embed_path(request), rest_headers(request, **{"content-type": ARROW}), body)

    def decode(self, raw: Raw) -> Vectors:
        assert raw.headers["content-type"] == ARROW
        table = arrow_streams.read_answer(raw.body)
        told = arrow_streams.said_in(table)
        keys, lengths = told["keys"], None
        if table.column_names == ["values"]:
            values = arrow_streams.vectors(table["values"])
            by_key = split_by_key(values, keys, told["length_per_key"])
        else:
            assert table.column_names == keys
            by_key = {key: arrow_streams.vectors(table[key]) for key in keys}
            lengths = [[len(bag) for bag in table[key].to_pylist()] for key in keys]
        unknown, seq = told.get("unknown_ids", {}), told.get("seq")
        missing = told.get("missing_ids", {})
        return Vectors(told["model"], str(told["version"]), by_key, unknown, lengths, seq, missing)


class Grpc(Format):
    """Base of gRPC formats, whose errors are gRPC statuses."""

    is_grpc = True

    def read(self, raw: Raw) -> Response:
        assert raw.status == 200
        code = GRPC_CODES[int(raw.headers["grpc-status"])]
        if code == "OK":
            return Response("OK", None, raw.headers, vectors=self.decode(raw))
        assert raw.body == b""
        message = unquote(raw.headers.get("grpc-message", ""))
        field = raw.headers.get("embedserve-field", "")
        return Response(code, None, raw.headers, message, field)


def metadata(request: Request) -> dict[str, str]:
    """Returns the gRPC metadata of a request, including its timeout."""
    timeout = {}
    if request.timeout_s is not None:
        timeout = {"grpc-timeout": f"{round(request.timeout_s * 1e6)}u"}
    return {**timeout, **request.headers}


class Message(Grpc):
    """EmbedRequest, for the method Embed."""

    not_a_message = b"\xff"
    path = EMBED

    def encode(self, request: Request, engine: FakeEngine) -> Sent:
        return Sent(self.path, metadata(request), message_of(request).SerializeToString())

    def decode(self, raw: Raw) -> Vectors:
        (message,) = unframed(raw.body)
        return vectors_of(pb.EmbedResponse.FromString(message))


class StreamMessage(Message):
    """EmbedRequest, for the method EmbedStream, which sends an error as a message of the stream."""

    path = "/embedserve.v1.EmbeddingService/EmbedStream"

    def read(self, raw: Raw) -> Response:
        if raw.body:
            (data,) = unframed(raw.body)
            message = pb.EmbedResponse.FromString(data)
            if message.HasField("error"):
                error = message.error
                assert message == pb.EmbedResponse(error=error)
                return Response(error.code, None, raw.headers, error.message, error.field)
            return Response("OK", None, raw.headers, vectors=vectors_of(message))
        return super().read(raw)


def asked(request: Request) -> Asked:
    """Returns the tensors and parameters of a request in the Open Inference Protocol."""
    inputs = jagged(request.bags)
    for feature, weights in request.weights.items():
        flat = [one for bag in weights for one in bag]
        inputs.append(Input(f"{feature}.weights", "FP32", flat))
    parameters: dict[str, str | int] = {}
    if request.min_seq is not None:
        parameters["min_seq"] = request.min_seq
    if request.output_dtype:
        names = {"float16": "FP16", "float32": "FP32"}
        parameters["output_dtype"] = names.get(request.output_dtype, request.output_dtype)
    return Asked(inputs, list(request.output_keys), parameters=parameters)


def inferred(answered: Answered) -> Vectors:
    parameters = dict(answered.parameters)
    seq = parameters.pop("seq", None)
    counts: dict[str, dict[str, int]] = {"unknown_ids": {}, "missing_ids": {}}
    for name, count in parameters.items():
        kind, _, feature = name.partition(".")
        counts[kind][feature] = int(count)
    return Vectors(
        answered.model,
        answered.version,
        answered.outputs,
        counts["unknown_ids"],
        seq=seq,
        missing_ids=counts["missing_ids"],
    )


class Infer(Format):
    """The Open Inference Protocol over REST, in JSON."""

    wrong_type = FRACTIONS.json_body(), "'user' (FP32 [1, 1]) is not INT64"
    is_text = True
    has_field = False
    can = frozenset({"model", "version", "dtype", "keys", "strings"})
    is_binary = False

    def encode(self, request: Request, engine: FakeEngine) -> Sent:
        model = quote(request.model or engine.model.name, safe="@")
        version = f"/versions/{request.version}" if request.version else ""
        headers: dict[str, str] = {}
        body = asked(request).json_body()
        if self.is_binary:
            body, headers = asked(request).binary_body()
        headers = {name.lower(): value for name, value in headers.items()}
        path = f"/v2/models/{model}{version}/infer"
        return Sent(path, rest_headers(request, **headers), body)

    def decode(self, raw: Raw) -> Vectors:
        kind = "application/octet-stream" if self.is_binary else "application/json"
        assert raw.headers["content-type"] == kind
        head = raw.headers.get(LENGTH_HEADER.lower())
        assert (head is not None) == self.is_binary
        return inferred(open_inference.read_body(raw.body, head))


class InferBinary(Infer):
    """The Open Inference Protocol over REST, with binary tensors."""

    is_text = False
    can = Infer.can | {"NaN"}
    is_binary = True


class InferMessage(Grpc):
    """The Open Inference Protocol over gRPC, with tensors as raw bytes or typed values."""

    wrong_type = (
        FRACTIONS.message("shop", is_raw=True).SerializeToString(),
        "'user' (FP32 [1, 1]) is not INT64",
    )
    can = Infer.can | {"NaN"}
    not_a_message = b"\xff"
    path = INFER
    is_raw = True

    def encode(self, request: Request, engine: FakeEngine) -> Sent:
        model = request.model or engine.model.name
        version = request.version
        message = asked(request).message(model, is_raw=self.is_raw, version=version)
        return Sent(self.path, metadata(request), message.SerializeToString())

    def decode(self, raw: Raw) -> Vectors:
        (message,) = unframed(raw.body)
        return inferred(
            open_inference.read_message(inference.ModelInferResponse.FromString(message))
        )


class InferTyped(InferMessage):
    is_raw = False


class InferStream(InferMessage):
    """The Open Inference Protocol over ModelStreamInfer, which sends an error as a message of the
    stream."""

    path = "/inference.GRPCInferenceService/ModelStreamInfer"

    def read(self, raw: Raw) -> Response:
        if raw.body:
            (data,) = unframed(raw.body)
            message = inference.ModelStreamInferResponse.FromString(data)
            if message.error_message:
                assert not message.HasField("infer_response")
                code, _, text = message.error_message.removeprefix("[").partition("] ")
                return Response(code, None, raw.headers, text)
            vectors = inferred(open_inference.read_message(message.infer_response))
            return Response("OK", None, raw.headers, vectors=vectors)
        return super().read(raw)


class Predict(Grpc):
    """TorchRec's predictor protocol: the features of the default model, by position."""

    can = frozenset({"NaN", "default model"})
    not_a_message = b"\xff"

    def encode(self, request: Request, engine: FakeEngine) -> Sent:
        order = engine.model.features
        message = prediction_request(order, request.bags, request.weights or None)
        min_seq = {} if request.min_seq is None else {"x-min-seq": str(request.min_seq)}
        self.dims = dict(zip(engine.model.keys, engine.model.length_per_key, strict=True))
        return Sent(PREDICT, metadata(request) | min_seq, message.SerializeToString())

    def decode(self, raw: Raw) -> Vectors:
        (data,) = unframed(raw.body)
        predictions = predictor.PredictionResponse.FromString(data).predictions
        assert set(predictions) == set(self.dims)
        by_key = {
            key: np.array(predictions[key].data, np.float32).reshape(-1, dim)
            for key, dim in self.dims.items()
        }
        seq = raw.headers.get("x-embedding-seq")
        entries = raw.headers.get("x-embedding-missing-ids")
        counts = [one.split("=") for one in entries.split(",")] if entries else []
        missing = {unquote(feature): int(count) for feature, count in counts}
        return Vectors(
            None, None, by_key, seq=None if seq is None else int(seq), missing_ids=missing
        )


ROOM = 1 << 16
"""Bytes reserved for an output in shared memory."""


class Placed:
    """A folder that stands for /dev/shm. Each request has a file with its ids and room for outputs.

    Attributes:
        last: file of the last request, whose name is to be registered as a region.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last = folder / "none"
        self._count = 0

    def place(self, request: Request, engine: FakeEngine) -> dict[str, Any]:
        """Writes the ids; returns the JSON of the request."""
        self._count += 1
        self.last = self.folder / f"region-{self._count}"
        question = asked(request)
        data = bytearray()
        inputs, outputs = [], []
        for one in question.inputs:
            inputs.append(one.head | {"parameters": self._part(len(data), len(one.raw))})
            data += one.raw
        for key in request.output_keys or engine.model.keys:
            outputs.append({"name": key, "parameters": self._part(len(data), ROOM)})
            data += bytes(ROOM)
        self.last.write_bytes(data)
        return {"inputs": inputs, "outputs": outputs, "parameters": dict(question.parameters)}

    def _part(self, offset: int, nbytes: int) -> dict[str, Any]:
        at = {"shared_memory_offset": offset} if offset else {}
        return {
            "shared_memory_region": self.last.name,
            "shared_memory_byte_size": nbytes,
            **at,
        }

    def read(self, outputs: Mapping[str, tuple[str, Any, Mapping[str, Any]]]) -> Any:
        """Returns the vectors by key, given (datatype, shape, location) of each output."""
        by_key = {}
        for key, (datatype, shape, place) in outputs.items():
            data = (self.folder / place["shared_memory_region"]).read_bytes()
            start = place["shared_memory_offset"]
            end = start + place["shared_memory_byte_size"]
            dtype = open_inference.DTYPES[datatype]
            by_key[key] = np.frombuffer(data[start:end], dtype).reshape(shape)
        return by_key


class SharedMemory(Infer):
    """The Open Inference Protocol over REST, with ids and vectors in shared memory."""

    def __init__(self, placed: Placed) -> None:
        self.placed = placed

    def encode(self, request: Request, engine: FakeEngine) -> Sent:
        body = self.placed.place(request, engine)
        sent = super().encode(request, engine)
        return Sent(sent.path, sent.headers, json.dumps(body).encode())

    def decode(self, raw: Raw) -> Vectors:
        told = json.loads(raw.body)
        outputs = {
            one["name"]: (one["datatype"], one["shape"], one["parameters"])
            for one in told["outputs"]
        }
        named = told["model_name"], told["model_version"], "", told.get("parameters", {})
        return inferred(Answered(*named, self.placed.read(outputs)))


class SharedMemoryMessage(InferMessage):
    """The Open Inference Protocol over gRPC, with ids and vectors in shared memory."""

    def __init__(self, placed: Placed) -> None:
        self.placed = placed

    def encode(self, request: Request, engine: FakeEngine) -> Sent:
        body = self.placed.place(request, engine)
        model = request.model or engine.model.name
        message = inference.ModelInferRequest(model_name=model, model_version=request.version)
        _put(message.parameters, body["parameters"])
        for one in body["inputs"]:
            tensor = message.inputs.add(
                name=one["name"], datatype=one["datatype"], shape=one["shape"]
            )
            _put(tensor.parameters, one["parameters"])
        for one in body["outputs"]:
            _put(message.outputs.add(name=one["name"]).parameters, one["parameters"])
        return Sent(INFER, metadata(request), message.SerializeToString())

    def decode(self, raw: Raw) -> Vectors:
        (data,) = unframed(raw.body)
        message = inference.ModelInferResponse.FromString(data)
        assert not any(message.raw_output_contents)
        outputs: dict[str, tuple[str, Any, dict[str, Any]]] = {}
        for one in message.outputs:
            place: dict[str, Any] = {
                "shared_memory_region": one.parameters["shared_memory_region"].string_param,
                "shared_memory_offset": one.parameters["shared_memory_offset"].int64_param,
                "shared_memory_byte_size": one.parameters["shared_memory_byte_size"].int64_param,
            }
            outputs[one.name] = (one.datatype, list(one.shape), place)
        parameters = {name: one.int64_param for name, one in message.parameters.items()}
        named = message.model_name, message.model_version, "", parameters
        return inferred(Answered(*named, self.placed.read(outputs)))


def _put(parameters: Any, place: Mapping[str, Any]) -> None:
    for name, value in place.items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(parameters[name], kind, value)
