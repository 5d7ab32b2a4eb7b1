"""Seeds of the fuzzer: valid requests of every kind, with their responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import orjson
import pyarrow as pa
from hostile import frames as f
from hostile.canary_client import embed_request
from server.arrow_streams import ARROW, columns_of, stream_of
from server.open_inference import LENGTH_HEADER, InferRequest, jagged
from server.predictions import prediction_request

from embedserve_proto import embedding_pb2 as pb

IDS = (3, 141, 499)
SERVICE = "/embedserve.v1.EmbeddingService"


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
        name: name in the report.
        is_grpc_port: whether it is sent to the gRPC port.
        seeds: valid inputs, each complete.
        wrap: turns a seed, or a mutated seed, into the bytes to send.
        expected: bytes that the response to each seed contains.
    """

    name: str
    is_grpc_port: bool
    seeds: Sequence[bytes]
    wrap: Callable[[bytes], bytes]
    expected: bytes


def post(body: bytes, kind: str) -> bytes:
    head = f"POST /embed HTTP/1.1\r\nHost: h\r\nContent-Type: {kind}\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def post_json(body: bytes) -> bytes:
    return post(body, "application/json")


def post_protobuf(body: bytes) -> bytes:
    return post(body, "application/x-protobuf")


def post_arrow(body: bytes) -> bytes:
    return post(body, ARROW)


def grpc_call(message: bytes, method: bytes = b"Embed") -> bytes:
    """Returns the bytes of a whole connection with one call, whatever the message."""
    return f.PREFACE + f.settings() + f.call(1, message, method)


def json_bodies() -> list[bytes]:
    ids = list(IDS)
    bags = [[one] for one in ids]
    return [
        orjson.dumps({"features": {"user": bags}}),
        orjson.dumps({"features": {"user": bags}, "weights": {"user": [[1.0]] * len(ids)}}),
        orjson.dumps({"features": {"user": bags}, "output_dtype": "float32"}, option=2),
    ]


def messages() -> list[bytes]:
    ids, lengths = list(IDS), [1] * len(IDS)
    packed = pb.EmbedRequest(keys=["user"], ids=ids, lengths=lengths)
    weighted = pb.EmbedRequest(
        model="m", keys=["user"], ids=ids, lengths=lengths, weights=[1.0] * len(ids)
    )
    one_by_one = b"\x12\x04user" + b"".join(
        b"\x18" + (bytes([one]) if one < 128 else bytes([one & 127 | 128, one >> 7])) for one in ids
    )
    return [
        embed_request(IDS),
        packed.SerializeToString(),
        weighted.SerializeToString(),
        one_by_one + b"\x20\1" * len(ids),
    ]


def streams() -> list[bytes]:
    ids = {"user": [[one] for one in IDS]}
    weights = {"user": [[1.0]] * len(IDS)}
    return [
        stream_of(columns_of(ids)),
        stream_of(columns_of(ids, weights), rows=1),
        stream_of(pa.table({"user": pa.array(IDS, pa.uint16())})),
        stream_of(columns_of(ids, layout=pa.large_list), options={"columns": "values"}),
    ]


def infer() -> InferRequest:
    """Returns the ids as tensors of the Open Inference Protocol."""
    return InferRequest(jagged({"user": [[one] for one in IDS]}))


def post_infer(body: bytes) -> bytes:
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


def post_binary(body: bytes) -> bytes:
    """Returns a request with the JSON length of a valid request, whatever the body."""
    length = infer().binary_body()[1][LENGTH_HEADER]
    head = "POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\n"
    head += f"{LENGTH_HEADER}: {length}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def call_infer(message: bytes) -> bytes:
    return grpc_call(message, b"/inference.GRPCInferenceService/ModelInfer")


def call_predict(message: bytes) -> bytes:
    return grpc_call(message, b"/predictor.Predictor/Predict")


def infer_messages() -> list[bytes]:
    raw, typed = (infer().message("m", is_raw=is_raw) for is_raw in (True, False))
    message = InferRequest(infer().inputs, ("user",), "an id").message("m", is_raw=True)
    return [one.SerializeToString() for one in (raw, typed, message)]


def predictions() -> list[bytes]:
    bags = {"user": [[one] for one in IDS]}
    weights = {"user": [[1.0]] * len(IDS)}
    requests = (
        prediction_request(("user",), bags),
        prediction_request(("user",), bags, weights),
        prediction_request(("user",), bags, dtype="<i4"),
    )
    return [one.SerializeToString() for one in requests]


def heads() -> list[bytes]:
    """Returns the kinds that are whole requests of HTTP/1, with their headers."""
    body = json_bodies()[0]
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return [
        post_json(body),
        b"POST /models/m/embed HTTP/1.1\r\nHost: h\r\nX-Timeout-Ms: 5000\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body),
        b"POST /embed HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks,
        b"GET /health/live HTTP/1.1\r\nHost: h\r\n\r\n" + post_json(body),
        b"GET /models HTTP/1.1\r\nHost: h\r\nConnection: keep-alive\r\n\r\n" + post_json(body),
        b"OPTIONS * HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        + post_json(body),
    ]


def connections() -> list[bytes]:
    """Returns the kinds that are whole connections of HTTP/2."""
    message = embed_request(IDS)
    call = f.call(1, message)
    return [
        f.PREFACE + f.settings() + call,
        f.PREFACE + f.settings((f.INITIAL_WINDOW_SIZE, f.WINDOW_MAX)) + f.settings_ack() + call,
        f.PREFACE + f.settings() + f.window_update(0, 1 << 20) + call,
        f.PREFACE + f.settings() + call + f.call(3, message) + f.frame(f.PING, 0, 0, bytes(8)),
    ]


def kinds(rows: np.ndarray) -> list[Kind]:
    """Returns all kinds; ``rows`` are the rows of the server's table."""
    values = rows[list(IDS)]
    as_json = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    flat_json = orjson.dumps(values.reshape(-1), option=orjson.OPT_SERIALIZE_NUMPY)
    as_bytes = values.astype("<f4").tobytes()
    return [
        Kind("HTTP/1.1 requests", False, heads(), bytes, as_json),
        Kind("JSON bodies", False, json_bodies(), post_json, as_json),
        Kind("protobuf bodies", False, messages(), post_protobuf, as_bytes),
        Kind("Arrow bodies", False, streams(), post_arrow, as_bytes),
        Kind("HTTP/2 connections", True, connections(), bytes, as_bytes),
        Kind("gRPC messages", True, messages(), grpc_call, as_bytes),
        Kind("infer JSON", False, [infer().json_body()], post_infer, flat_json),
        Kind("infer binary", False, [infer().binary_body()[0]], post_binary, as_bytes),
        Kind("infer messages", True, infer_messages(), call_infer, as_bytes),
        Kind("predictor messages", True, predictions(), call_predict, as_bytes),
    ]
