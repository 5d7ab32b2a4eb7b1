"""Baselines: servers that return the same bytes for every request, as many as embedserve.

They show the least that any Python server on the same libraries costs. The bytes are embedserve's
own response to the first request, so that only the work differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import orjson
from workloads import CACHE, Request, Workload

from embedserve_proto.embedding_pb2 import EmbedResponse
from servers.base import HERE, Server, Way
from servers.embedserve import PROTOBUF, SERVICE, EmbedServe


class Constant(Server):
    """Base class: requests in embedserve's format, and responses that are not checked."""

    def body(self, way: Way, workload: Workload, request: Request) -> bytes:
        return EmbedServe().body(way, workload, request)

    def values(self, way: Way, workload: Workload, answer: bytes) -> np.ndarray:
        """Returns the values of the first request. The reply has the size of any response."""
        return workload.expected(workload.requests[0]).astype(np.float32)


class ConstantHttp(Constant):
    """Constant reply on uvicorn."""

    def __init__(self, kind: str) -> None:
        self.name = f"constant reply, {kind}"
        content_type = "application/json" if kind == "JSON" else PROTOBUF
        self.ways = (Way(kind, "http", "/embed", {"Content-Type": content_type}),)

    def command(self, workload: Workload, port: int) -> list[str]:
        way = self.ways[0]
        reply = reply_file(workload, way.name)
        server = str(HERE / "constant_http.py")
        return [sys.executable, server, str(reply), way.headers["Content-Type"], str(port)]


class ConstantProtocol(Constant):
    """Constant reply without any HTTP library."""

    name = "constant reply, bare protocol"
    ways = (Way("protobuf", "http", "/embed", {"Content-Type": PROTOBUF}),)

    def command(self, workload: Workload, port: int) -> list[str]:
        reply = reply_file(workload, "protobuf")
        server = str(HERE / "constant_protocol.py")
        return [sys.executable, server, str(reply), PROTOBUF, str(port)]


class ConstantGrpc(Constant):
    def __init__(self, kind: str) -> None:
        self.name = f"constant reply, grpcio {kind}"
        self.kind = kind
        self.ways = (Way("gRPC", "grpc", f"{SERVICE}/Embed"),)

    def command(self, workload: Workload, port: int) -> list[str]:
        reply = reply_file(workload, "protobuf")
        server = str(HERE / "constant_grpc.py")
        return [sys.executable, server, str(reply), self.kind, str(port + 1)]


def reply_file(workload: Workload, kind: str) -> Path:
    """Creates a file with the response to the first request, in embedserve's encoding."""
    path = CACHE / "replies" / f"{workload.name}-{workload.ids}.{kind}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        values = workload.expected(workload.requests[0]).astype(np.float32)
        path.write_bytes(_json(workload, values) if kind == "JSON" else _message(workload, values))
    return path


def _message(workload: Workload, values: np.ndarray) -> bytes:
    tables = workload.tables
    return EmbedResponse(
        model=tables.name,
        version=1,
        keys=tables.features,
        length_per_key=[tables.dim] * tables.count,
        batch_size=len(values),
        values=values.tobytes(),
    ).SerializeToString()


def _json(workload: Workload, values: np.ndarray) -> bytes:
    tables = workload.tables
    answer = {
        "model": tables.name,
        "version": 1,
        "keys": tables.features,
        "length_per_key": [tables.dim] * tables.count,
        "values": values,
    }
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
