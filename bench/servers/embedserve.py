"""embedserve itself."""

from __future__ import annotations

import sys

import numpy as np
import orjson
from workloads import Request, Workload

from embedserve_proto.embedding_pb2 import EmbedRequest, EmbedResponse
from servers.base import Server, Way

PROTOBUF = "application/x-protobuf"
SERVICE = "/embedserve.v1.EmbeddingService"


class EmbedServe(Server):
    name = "embedserve"
    ways = (
        Way("JSON", "http", "/embed", {"Content-Type": "application/json"}),
        Way("protobuf", "http", "/embed", {"Content-Type": PROTOBUF}),
        Way("gRPC", "grpc", f"{SERVICE}/Embed"),
        Way("gRPC stream", "grpc-stream", f"{SERVICE}/EmbedStream"),
    )

    def __init__(self, *options: str) -> None:
        self.options = options

    def command(self, workload: Workload, port: int) -> list[str]:
        ports = ("--http-port", str(port), "--grpc-port", str(port + 1))
        start = (sys.executable, "-W", "ignore", "-m", "embedserve", "serve")
        return [*start, str(workload.tables.store), *ports, *self.options]

    def body(self, way: Way, workload: Workload, request: Request) -> bytes:
        features = workload.tables.features
        if way.name == "JSON":
            return orjson.dumps({"features": dict(zip(features, request.bags(), strict=True))})
        return EmbedRequest(
            keys=features,
            ids_bytes=request.ids.astype("<i8").tobytes(),
            lengths_bytes=request.lengths.astype("<i4").tobytes(),
        ).SerializeToString()

    def values(self, way: Way, workload: Workload, answer: bytes) -> np.ndarray:
        if way.name == "JSON":
            return np.array(orjson.loads(answer)["values"], np.float32)
        response = EmbedResponse.FromString(answer)
        return np.frombuffer(response.values, "<f4").reshape(response.batch_size, -1)


class EmbedServeBatch(EmbedServe):
    """Its threads scheduled as batch jobs, which a host does well that has cores for it alone."""

    name = "embedserve, chrt --batch"
    ways = EmbedServe.ways[2:]
    workloads = ("small",)

    def command(self, workload: Workload, port: int) -> list[str]:
        return ["chrt", "--batch", "0", *super().command(workload, port)]
