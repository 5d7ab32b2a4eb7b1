"""The server inside Envoy, as the ASGI application that pyvoy loads: REST and gRPC on one loop.

Started by pyvoy_host.py, which hands over settings and ports. The lifespan's startup loads the
models and starts REST; then Envoy listens. Draining is done here, before Envoy is told to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter

import typer

from embedserve import server
from embedserve.cli import one_line_errors
from embedserve.commands import serve
from embedserve.frontends.grpc_asgi import GrpcApp, Scope
from embedserve.frontends.grpc_call import Receive, Send
from embedserve.ports import Ports
from embedserve.pyvoy_envoy import EnvoyAdmin
from embedserve.pyvoy_host import STOPPED_EARLY, HandedOver, read_handed_over
from embedserve.service import Service

logger = logging.getLogger(__name__)

POLL_S = 0.01
FLUSH_S_MIN = 1.0
"""At least this long answers may take to leave, whatever the grace."""
START_S_MAX = 30.0

Served = tuple[Service, Callable[[], None]]
"""A service, and what tells the user that it is ready."""


class EnvoyFrontend:
    """The gRPC server that server.serve_until() starts and stops: Envoy around this process."""

    def __init__(
        self, grpc_app: GrpcApp, given: HandedOver, ports: Ports, let_listen: Callable[[], object]
    ) -> None:
        self._grpc_app = grpc_app
        self._admin = EnvoyAdmin(Path(given.folder))
        self._ports = ports
        self._let_listen = let_listen

    async def start(self) -> None:
        """Raises OSError: Envoy does not listen."""
        address = self._ports.grpc_socket.getsockname()[:2]
        self._ports.release_grpc()
        self._let_listen()
        async with asyncio.timeout(START_S_MAX):
            while not await _is_listening(*address):  # noqa: ASYNC110  Envoy tells nobody
                await asyncio.sleep(POLL_S)
        self._grpc_app.set_serving(True)

    async def stop_being_ready(self) -> None:
        self._grpc_app.set_serving(False)

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls, and waits up to ``grace_s`` for those that are running."""
        self._grpc_app.drain()
        with _warned():
            await self._admin.drain_listeners()
        await self._grpc_app.finish(grace_s)
        with _warned(), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(grace_s, FLUSH_S_MIN)):
                while not await self._admin.is_quiet():  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)


@contextlib.contextmanager
def _warned() -> Iterator[None]:
    """A drain goes on without Envoy's admin interface, whose file a cleaner may have removed."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise
        logger.warning("draining without Envoy's help: %s", error)


async def _is_listening(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
        return True
    return False


class PyvoyApp:
    """The ASGI application: lifespan, and every call of gRPC."""

    def __init__(
        self, opened: Callable[[HandedOver, Ports], AbstractContextManager[Served]]
    ) -> None:
        """``opened`` gives the service and its end; its errors of a user's making are one line."""
        self._opened = opened
        self._grpc_app: GrpcApp | None = None
        self._folder: str | None = None
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._grpc_app is not None:
            await self._grpc_app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """The lifespan: everything from the loading of the models to the end of the drain."""
        await receive()
        stop = asyncio.Event()
        started = asyncio.Event()
        serving = asyncio.create_task(self._serve(stop, started.set))
        serving.add_done_callback(_log_failure)
        await _either(serving, started)
        if not started.is_set():
            sys.stdout.flush()
            os._exit(1)  # told to end by us, Envoy would show all its configuration
        self._is_started = True
        await send({"type": "lifespan.startup.complete"})
        shutdown = asyncio.ensure_future(receive())
        await asyncio.wait((serving, shutdown), return_when=asyncio.FIRST_COMPLETED)
        stop.set()  # Envoy may have been told to end by others
        await asyncio.wait((serving,))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if serving.exception() is not None:
            os._exit(1)  # Envoy's own status would be 0
        if not shutdown.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await shutdown
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve(self, stop: asyncio.Event, let_listen: Callable[[], None]) -> None:
        """Raises typer.Exit: it could not, which has been told."""
        with one_line_errors():
            given = read_handed_over()
            self._folder = given.folder
            self._watch(given, stop)
            ports = given.ports()
            with self._opened(given, ports) as (service, say_ready):
                self._grpc_app = GrpcApp(service, waits_for_answers=False)
                await server.serve_until(
                    stop,
                    service,
                    given.settings,
                    ports.http_socket,
                    EnvoyFrontend(self._grpc_app, given, ports, let_listen),
                    say_ready,
                )

    def _watch(self, given: HandedOver, stop: asyncio.Event) -> None:
        """Has ``stop`` set when the other end of the pipe closes."""
        loop = asyncio.get_running_loop()

        def wait() -> None:
            os.read(given.stop_fd, 1)
            if not self._is_started:
                shutil.rmtree(given.folder, ignore_errors=True)
                os._exit(STOPPED_EARLY)  # the loop is busy with loading
            loop.call_soon_threadsafe(stop.set)

        threading.Thread(target=wait, daemon=True).start()


async def _either(task: asyncio.Task[None], event: asyncio.Event) -> None:
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def _log_failure(serving: asyncio.Task[None]) -> None:
    """What one_line_errors() has not told already."""
    error = None if serving.cancelled() else serving.exception()
    if error is not None and not isinstance(error, typer.Exit):
        logger.error("the server failed", exc_info=error)


@contextlib.contextmanager
def restored(given: HandedOver, ports: Ports) -> Iterator[Served]:
    """The service over the models of the store, warm.

    Raises:
        StoreError: a version cannot be served.
        ValueError: a setting makes no sense.
    """
    settings = given.settings
    serve.set_up_logging(settings.log_level)
    versions = serve.prepared(settings, serve.open_versions(settings))
    engines = serve.restore_all(settings, versions)
    threads = server.lookup_threads(settings)
    with ThreadPoolExecutor(threads, thread_name_prefix="lookup") as executor:
        service = server.build_service(engines, settings, executor)

        def say_ready() -> None:
            seconds = perf_counter() - given.start_s
            serve.say_ready_to_serve(service.models(), versions, ports, seconds, 1)

        yield service, say_ready


app = PyvoyApp(restored)
