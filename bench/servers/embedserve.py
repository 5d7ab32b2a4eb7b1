"""embedserve itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson
from workloads import Request, Workload

from embedserve_proto.embedding_pb2 import EmbedRequest, EmbedResponse
from servers.base import HERE, Server, Way

PROTOBUF = "application/x-protobuf"
SERVICE = "/embedserve.v1.EmbeddingService"


JSON = Way("JSON", "http", "/embed", {"Content-Type": "application/json"})
MESSAGE = Way("protobuf", "http", "/embed", {"Content-Type": PROTOBUF})
GRPC = Way("gRPC", "grpc", f"{SERVICE}/Embed")
GRPC_STREAM = Way("gRPC stream", "grpc-stream", f"{SERVICE}/EmbedStream")
ONE_MESSAGE = Way("protobuf, one body", "http-one", "/embed", {"Content-Type": PROTOBUF})
"""The way that h2load uses: it repeats one request, as it does over gRPC."""

SERVE = (sys.executable, "-W", "ignore", "-m", "embedserve", "serve")
OURS = HERE.parents[1]
SOURCE_ROOTS = ("server", "model_store", "clients", "proto")


class EmbedServe(Server):
    """The server of a checkout; by default this one."""

    name = "embedserve"
    ways: Sequence[Way] = (JSON, MESSAGE, GRPC, GRPC_STREAM, ONE_MESSAGE)

    def __init__(self, *options: str, checkout: Path = OURS) -> None:
        self.options = options
        self.checkout = checkout.resolve()

    def command(self, workload: Workload, port: int) -> list[str]:
        ports = ("--http-port", str(port), "--grpc-port", str(port + 1))
        return [*SERVE, str(workload.tables.store), *ports, *self.options]

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": ":".join(str(self.checkout / root) for root in SOURCE_ROOTS)}

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


class EmbedServeGrpcio(EmbedServe):
    """The server with grpcio's gRPC server instead of its own."""

    name = "embedserve, grpcio"
    ways = (GRPC, GRPC_STREAM)

    def __init__(self) -> None:
        super().__init__("--grpc-server", "grpcio")


class EmbedServeBefore(EmbedServe):
    """The server of another checkout, such as the commit before a change."""

    name = "embedserve before"
    ways = (JSON, MESSAGE, GRPC, GRPC_STREAM)

    def __init__(self, checkout: Path) -> None:
        super().__init__(checkout=checkout)

    def missing(self) -> str:
        package = self.checkout / "server" / "embedserve" / "__main__.py"
        return "" if package.exists() else f"{package}, in a checkout of embedserve"
