"""Formats of bodies: how each format encodes a request, and decodes vectors and errors."""

import json
from abc import abstractmethod
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
from grpc_messages import unframed
from protocols.requests import EncodedRequest, RawResponse, Request, Response, Vectors, split_by_key
from server.arrow_streams import ARROW
from server.fake_engine import FakeEngine
from server.live import PROTOBUF
from server.predictions import prediction_request

from embedserve_proto import embedding_pb2 as pb
from embedserve_proto import predictor_pb2 as predictor
from server import arrow_streams

if TYPE_CHECKING:
    from protocols.shared_memory_formats import SharedMemoryFolder

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
EMBED = "/embedserve.v1.EmbeddingService/Embed"
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
        shared_folder: folder that stands for shared memory.
    """

    wrong_type = (b"", "")
    is_text = False
    is_grpc = False
    has_field = True
    can = frozenset({"model", "version", "dtype", "keys", "strings", "NaN", "default model"})
    not_a_message = b"{"

    def __init__(self, shared_folder: "SharedMemoryFolder") -> None:
        self.shared_folder = shared_folder

    @abstractmethod
    def encode(self, request: Request, engine: FakeEngine) -> EncodedRequest:
        """Encodes a request to the model of ``engine``."""

    @abstractmethod
    def decode(self, raw: RawResponse) -> Vectors:
        """Decodes the vectors of a response."""

    def read(self, raw: RawResponse) -> Response:
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

    def encode(self, request: Request, engine: FakeEngine) -> EncodedRequest:
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
        return EncodedRequest(embed_path(request), rest_headers(request), json.dumps(body).encode())

    def decode(self, raw: RawResponse) -> Vectors:
        assert raw.headers["content-type"] == "application/json"
        result = json.loads(raw.body)
        dtype = result.get("output_dtype", "float32")
        keys, dims, lengths = result["keys"], result["length_per_key"], result.get("lengths")

        def array(values: Any) -> np.ndarray:
            flat = [[np.inf if one is None else one for one in row] for row in values]
            return np.array(flat, np.float64).astype(dtype)

        if lengths is None:
            by_key = split_by_key(array(result["values"]), keys, dims)
        else:
            by_key = {
                key: array(result["values"][key]).reshape(-1, dim)
                for key, dim in zip(keys, dims, strict=True)
            }
            lengths = [lengths[key] for key in keys]
        unknown, seq = result.get("unknown_ids", {}), result.get("seq")
        missing = result.get("missing_ids", {})
        return Vectors(
            result["model"], str(result["version"]), by_key, unknown, lengths, seq, missing
        )


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
    def encode(self, request: Request, engine: FakeEngine) -> EncodedRequest:
        headers = rest_headers(request, **{"content-type": PROTOBUF})
        return EncodedRequest("/embed", headers, message_of(request).SerializeToString())

    def decode(self, raw: RawResponse) -> Vectors:
        assert raw.headers["content-type"] == PROTOBUF
        return vectors_of(pb.EmbedResponse.FromString(raw.body))


class Arrow(Format):
    """Arrow stream with a column for each feature."""

    wrong_type = (
        arrow_streams.stream_of(pa.table({"user": pa.array([[1.5]])})),
        "user",
    )

    def encode(self, request: Request, engine: FakeEngine) -> EncodedRequest:
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
        return EncodedRequest(
            embed_path(request), rest_headers(request, **{"content-type": ARROW}), body
        )

    def decode(self, raw: RawResponse) -> Vectors:
        assert raw.headers["content-type"] == ARROW
        table = arrow_streams.read_table(raw.body)
        result = arrow_streams.metadata_in(table)
        keys, lengths = result["keys"], None
        if table.column_names == ["values"]:
            values = arrow_streams.vectors(table["values"])
            by_key = split_by_key(values, keys, result["length_per_key"])
        else:
            assert table.column_names == keys
            by_key = {key: arrow_streams.vectors(table[key]) for key in keys}
            lengths = [[len(bag) for bag in table[key].to_pylist()] for key in keys]
        unknown, seq = result.get("unknown_ids", {}), result.get("seq")
        missing = result.get("missing_ids", {})
        return Vectors(
            result["model"], str(result["version"]), by_key, unknown, lengths, seq, missing
        )


class Grpc(Format):
    """Base of gRPC formats, whose errors are gRPC statuses."""

    is_grpc = True

    def read(self, raw: RawResponse) -> Response:
        assert raw.status == 200
        code = GRPC_CODES[int(raw.headers["grpc-status"])]
        if code == "OK":
            return Response("OK", None, raw.headers, vectors=self.decode(raw))
        assert raw.body == b""
        message = unquote(raw.headers.get("grpc-message", ""))
        field = unquote(raw.headers.get("embedserve-field", ""))
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

    def encode(self, request: Request, engine: FakeEngine) -> EncodedRequest:
        return EncodedRequest(self.path, metadata(request), message_of(request).SerializeToString())

    def decode(self, raw: RawResponse) -> Vectors:
        (message,) = unframed(raw.body)
        return vectors_of(pb.EmbedResponse.FromString(message))


class StreamMessage(Message):
    """EmbedRequest, for the method EmbedStream, which sends an error as a message of the stream."""

    path = "/embedserve.v1.EmbeddingService/EmbedStream"

    def read(self, raw: RawResponse) -> Response:
        if raw.body:
            (data,) = unframed(raw.body)
            message = pb.EmbedResponse.FromString(data)
            if message.HasField("error"):
                error = message.error
                assert message == pb.EmbedResponse(error=error)
                return Response(error.code, None, raw.headers, error.message, error.field)
            return Response("OK", None, raw.headers, vectors=vectors_of(message))
        return super().read(raw)


class Predict(Grpc):
    """TorchRec's predictor protocol: the features of the default model, by position."""

    can = frozenset({"NaN", "default model"})
    not_a_message = b"\xff"

    def encode(self, request: Request, engine: FakeEngine) -> EncodedRequest:
        order = engine.model.features
        message = prediction_request(order, request.bags, request.weights or None)
        min_seq = {} if request.min_seq is None else {"x-min-seq": str(request.min_seq)}
        self.dims = dict(zip(engine.model.keys, engine.model.length_per_key, strict=True))
        return EncodedRequest(PREDICT, metadata(request) | min_seq, message.SerializeToString())

    def decode(self, raw: RawResponse) -> Vectors:
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
