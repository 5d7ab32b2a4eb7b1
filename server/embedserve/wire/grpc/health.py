"""Health service grpc.health.v1: the Check and Watch methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from embedserve.access.caller_quota import CallerQuota
from embedserve.errors import UnknownModelError
from embedserve.wire.grpc.calls import BidiCall
from embedserve.wire.grpc.grpc_framing import GrpcCallError, GrpcHeaders
from embedserve.wire.http2.stream import Stream

SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_RESPONSE = health_pb2.HealthCheckResponse


class HealthStatuses:
    """Health status of each service; "" is the whole server."""

    def __init__(self, services: Iterable[str], is_ready: Callable[[], bool]) -> None:
        self._services = ("", *services)
        self._is_ready = is_ready

    def check(self, quota: CallerQuota | None, message: bytes) -> bytes:
        """Answers a Check call.

        Raises:
            UnknownModelError: the service does not exist.
            GrpcCallError: INTERNAL, the message is no HealthCheckRequest.
        """
        service = _service(message)
        status = self.status(service)
        if status == _RESPONSE.SERVICE_UNKNOWN:
            raise UnknownModelError(f"service is {service!r}: this server has no such service")
        return self.response(status)

    def status(self, service: str | None) -> Any:
        """Returns the status of ``service``, which is None or another name if unknown."""
        if service not in self._services:
            return _RESPONSE.SERVICE_UNKNOWN
        return _RESPONSE.SERVING if self._is_ready() else _RESPONSE.NOT_SERVING

    def known(self, service: str) -> str | None:
        """Returns ``service``, or None if the server has no such service."""
        return service if service in self._services else None

    def response(self, status: Any) -> bytes:
        response: bytes = _RESPONSE(status=status).SerializeToString()
        return response


def _service(message: bytes) -> str:
    try:
        service: str = health_pb2.HealthCheckRequest.FromString(message).service
    except DecodeError as error:
        raise GrpcCallError("INTERNAL", f"not a HealthCheckRequest: {error}") from error
    return service


class Watch(BidiCall):
    """Handler of a Watch call: sends the status immediately and at each change.

    The call ends when the server drains.
    """

    def __init__(
        self,
        health: HealthStatuses,
        headers: GrpcHeaders,
        stream: Stream,
    ) -> None:
        super().__init__(headers, stream)
        self._health = health
        self._service: str | None = None
        self._is_watching = False
        self._last_status: Any = None

    def take(self, message: bytes) -> None:
        if not self._is_watching:
            # An unknown name is not kept: it may have 64 KiB, and the call may never end.
            self._service = self._health.known(_service(message))
            self._is_watching = True
            self._send_changed_status()

    def _send_changed_status(self) -> None:
        if not self._is_watching:
            return
        status = self._health.status(self._service)
        if status != self._last_status:
            self._last_status = status
            response = self._health.response(status)
            self.write((response,), len(response))

    def is_idle(self) -> bool:
        return self._is_draining or not self._is_watching

    def check_time(self, now_s: float) -> None:
        super().check_time(now_s)
        if not self._is_over:
            self._send_changed_status()

    def drain(self) -> None:
        self._send_changed_status()
        super().drain()
