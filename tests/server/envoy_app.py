"""gRPC over fake engines as the ASGI application of an Envoy, which a test controls from outside.

The test connects to a socket and sends (name of a method of Controls, its arguments); it is
answered with what the method returned or raised. Every reset makes a new service.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection
from typing import Any

from server.fake_engine import FakeEngine, Lookup
from server.fake_models import model_info
from server.live import make_service

from embedserve import errors
from embedserve.callers import Caller
from embedserve.config import Limits
from embedserve.frontends import grpc_stream, rest
from embedserve.frontends.grpc_asgi import GrpcApp, Scope
from embedserve.frontends.grpc_call import Receive, Send
from embedserve.service import Service
from embedserve.types import LookupRequest, LookupResult

VARIABLE = "TEST_CONTROL_SOCKET"
WINDOW_BYTES_MAX = grpc_stream.WINDOW_BYTES_MAX


class FailingService(Service):
    """Refuses every request with ``error``, if there is one."""

    error: Exception | None = None

    def submit(
        self, request: LookupRequest, timeout_s: float | None = None
    ) -> asyncio.Future[LookupResult]:
        if self.error is not None:
            raise self.error
        return super().submit(request, timeout_s)

    def enqueue(
        self, request: LookupRequest, caller: Caller, timeout_s: float | None = None
    ) -> None:
        if self.error is not None:
            raise self.error
        super().enqueue(request, caller, timeout_s)


class Controls:
    """What a test may ask for; called on the event loop's thread."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor
        self.reset(Limits())

    def reset(self, limits: Limits) -> None:
        self._engine = FakeEngine()
        films = FakeEngine(model_info("films", {"user": (7, 2)}), seed=1)
        service = make_service(self._engine, films, executor=self._executor, limits=limits)
        service.__class__ = FailingService
        assert isinstance(service, FailingService)
        self._service = service
        self.app = GrpcApp(service, waits_for_answers=False)
        self.app.set_serving(True)
        grpc_stream.WINDOW_BYTES_MAX = WINDOW_BYTES_MAX

    def hold(self) -> None:
        self._engine.hold()

    def release(self) -> None:
        self._engine.release()

    def lookups(self) -> list[Lookup]:
        return self._engine.lookups

    def queued(self) -> int:
        return self._service.metrics.models["shop"].queued_requests

    def outcomes(self) -> dict[str, int]:
        return dict(self._service.metrics.protocols["grpc"].outcomes)

    def open_calls(self) -> int:
        return len(self.app.open_calls)

    def set_window_bytes(self, nbytes: int) -> None:
        grpc_stream.WINDOW_BYTES_MAX = nbytes

    def set_serving(self, is_serving: bool) -> None:
        self.app.set_serving(is_serving)

    def drain(self) -> None:
        self.app.drain()

    def fail(self, error: str, *arguments: str) -> None:
        """With ``error`` of embedserve.errors, the REST frontend or Python itself."""
        kind = getattr(errors, error, None) or getattr(rest, error, None)
        self._service.error = kind(*arguments) if kind else ZeroDivisionError(*arguments)


class App:
    """The application, and the thread that takes the test's orders."""

    def __init__(self) -> None:
        self._controls: Controls | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            assert self._controls is not None
            await self._controls.app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        with ThreadPoolExecutor(1) as executor:
            self._controls = Controls(executor)
            loop = asyncio.get_running_loop()
            arguments = (self._controls, loop, Client(os.environ[VARIABLE]))
            threading.Thread(target=_obey, args=arguments, daemon=True).start()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})


def _obey(controls: Controls, loop: asyncio.AbstractEventLoop, test: Connection[Any, Any]) -> None:
    async def call(name: str, arguments: tuple[Any, ...]) -> object:
        return getattr(controls, name)(*arguments)

    while True:
        try:
            name, arguments = test.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = asyncio.run_coroutine_threadsafe(call(name, arguments), loop).result()
        except Exception as error:
            answer = error
        test.send(answer)


app = App()
