"""Health as grpc.health.v1 has it, on asyncio: the status of each service, asked for or watched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from grpc_health.v1 import health_pb2


class Health:
    """Statuses of services, "" among them for the whole server; not serving until told."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = ("", *services)
        self._status: Any = health_pb2.HealthCheckResponse.NOT_SERVING
        self._changed = asyncio.Event()

    def set_serving(self, is_serving: bool) -> None:
        response = health_pb2.HealthCheckResponse
        self._status = response.SERVING if is_serving else response.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    def check(self, body: bytes) -> bytes | None:
        """The answer to a Check; None if there is no such service."""
        service = health_pb2.HealthCheckRequest.FromString(body).service
        return self._answer(self._status) if service in self._services else None

    async def watch(self, body: bytes) -> AsyncIterator[bytes]:
        """Answers to a Watch: the status now, and whenever it has changed. Never ends."""
        service = health_pb2.HealthCheckRequest.FromString(body).service
        last = None
        while True:
            changed = self._changed
            is_known = service in self._services
            status = self._status if is_known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                yield self._answer(status)
                last = status
            await changed.wait()

    def _answer(self, status: Any) -> bytes:
        answer: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
        return answer
