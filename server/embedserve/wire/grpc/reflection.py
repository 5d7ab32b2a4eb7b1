"""Server reflection, v1 and v1alpha: list of services and their descriptors.

Both versions have the same messages on the wire. grpcio-reflection produces the responses.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection, reflection_pb2

from embedserve.wire.grpc.calls import PLAIN_WORK, BidiCall
from embedserve.wire.grpc.grpc_framing import GrpcCallError, GrpcHeaders
from embedserve.wire.http2.stream import Stream

SERVICE_NAMES = ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME)


class ServerReflection(BidiCall):
    """Handler of a ServerReflectionInfo call."""

    def __init__(
        self,
        services: Iterable[str],
        headers: GrpcHeaders,
        stream: Stream,
    ) -> None:
        super().__init__(headers, stream)
        self._servicer = reflection.ReflectionServicer(services)

    def take(self, message: bytes) -> None:
        try:
            request = reflection_pb2.ServerReflectionRequest.FromString(message)
        except DecodeError as error:
            raise GrpcCallError("INTERNAL", f"not a ServerReflectionRequest: {error}") from error
        for response in self._servicer.ServerReflectionInfo(iter((request,)), None):
            message = response.SerializeToString()
            self.charge(PLAIN_WORK + len(message))
            self.write((message,), len(message))
